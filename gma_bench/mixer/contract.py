"""The contract that every mixer answers to, whoever wrote it: ``gma-bench check mixer=NAME``.

A line is a property. It is tried on inputs from small to large, so what it reports on a failure is
the smallest of them that fails.
"""

from __future__ import annotations

import inspect
import io
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from gma_bench.errors import UserError
from gma_bench.mixer import Mixer, state_bytes

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import RenderableType

Status = Literal["pass", "fail", "n/a"]
Form = Literal["bidirectional", "causal"]
FORMS: tuple[Form, ...] = ("bidirectional", "causal")

D_MODEL, NUM_HEADS, MAX_LENGTH = 32, 4, 160
TOLERANCE = 2e-5
"""Of the largest output, or of one: what float32 sums in another order may differ by."""


@dataclass(frozen=True)
class CheckResult:
    """What became of one line in one form."""

    line: str
    form: Form
    status: Status
    detail: str = ""


class NotApplicable(Exception):
    """The line asks nothing of this mixer; the message says why."""


class Noted(Exception):
    """The line holds, and there is something to say about it."""


class Case(NamedTuple):
    """One input: sizes, which positions are masked, how large the entries are."""

    batch: int
    length: int
    masked: str = "none"
    scale: float = 1.0

    def __str__(self) -> str:
        text = f"B={self.batch} N={self.length}"
        if self.masked != "none":
            text += f" masked={self.masked}"
        return text if self.scale == 1 else f"{text} scale={self.scale:g}"


@dataclass
class Subject:
    """The mixer under test: how to build it, and on what device."""

    build: Callable[..., Mixer]
    form: Form
    device: torch.device
    compile_backend: str

    @property
    def causal(self) -> bool:
        return self.form == "causal"

    def new(self, seed: int = 0) -> Mixer:
        """A fresh mixer, the same for the same seed, in evaluation mode."""
        torch.manual_seed(seed)
        mixer = self.build(
            d_model=D_MODEL, num_heads=NUM_HEADS, causal=self.causal, max_length=MAX_LENGTH
        )
        return mixer.to(self.device).eval()

    def input(self, case: Case, seed: int = 1) -> Tensor:
        """``(B, N, D_MODEL)``, the same for the same case and seed."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(case.batch, case.length, D_MODEL, generator=generator)
        return (x * case.scale).to(self.device)

    def mask(self, case: Case) -> Tensor | None:
        """``(B, N)``; True = a real token."""
        mask = torch.ones(case.batch, case.length, dtype=torch.bool, device=self.device)
        if case.masked == "none":
            return None
        if case.masked == "tail":
            mask[:, (case.length + 1) // 2 :] = False
        elif case.masked == "head":
            mask[:, : case.length // 2] = False
        elif case.masked == "every other":
            mask[:, 1::2] = False
        elif case.masked == "all":
            mask[:] = False
        elif case.masked == "first row":
            mask[0] = False
        return mask


Check = Callable[[Subject, Case], str | None]
"""Says what is wrong with a case, or None."""


@dataclass(frozen=True)
class Line:
    name: str
    cases: tuple[Case, ...]
    check: Check
    forms: tuple[Form, ...] = FORMS
    why_not: str = ""


LINES: list[Line] = []


def _line(
    name: str, cases: Sequence[Case], forms: tuple[Form, ...] = FORMS, why_not: str = ""
) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        LINES.append(Line(name, tuple(cases), check, forms, why_not))
        return check

    return register


def _cases(*sizes: tuple[int, int], masked: Sequence[str] = ("none",)) -> list[Case]:
    return [Case(batch, n, kind) for batch, n in sizes for kind in masked]


def _differ(what: str, a: Tensor, b: Tensor) -> str | None:
    """Where ``a`` and ``b`` ``(B, N, …)`` differ by more than rounding, or None."""
    if a.shape != b.shape:
        return f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if not a.numel():
        return None
    gap = (a.detach().double() - b.detach().double()).abs()
    if not bool(gap.isfinite().all()):
        return f"{what}: not finite"
    largest = gap.max().item()
    if largest <= TOLERANCE * max(1.0, b.detach().abs().max().item()):
        return None
    where = [int(i) for i in (gap == gap.max()).nonzero()[0]]
    return f"{what} by {largest:.2g} at {where}"


# --- the lines -------------------------------------------------------------------------------


@_line("shape and dtype are kept", _cases((1, 1), (2, 5), (2, 65), masked=("none", "tail")))
def _shape(subject: Subject, case: Case) -> str | None:
    x = subject.input(case)
    y = subject.new()(x, subject.mask(case))
    if y.shape != x.shape:
        return f"shape {tuple(x.shape)} became {tuple(y.shape)}"
    return None if y.dtype == x.dtype else f"{x.dtype} became {y.dtype}"


SCALES = [Case(1, 1), Case(2, 17), Case(2, 17, scale=30), Case(1, 129, scale=30)]


def _finite_in(subject: Subject, case: Case, dtype: torch.dtype | None) -> str | None:
    context = torch.autocast(subject.device.type, dtype) if dtype is not None else nullcontext()
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad(), context:
        y = mixer(x, None)
    bad = (~y.isfinite()).sum().item()
    return f"{bad} of {y.numel()} outputs are not finite" if bad else None


@_line("finite in float32", SCALES)
def _finite_float32(subject: Subject, case: Case) -> str | None:
    return _finite_in(subject, case, None)


@_line("finite in bfloat16 autocast", SCALES)
def _finite_bfloat16(subject: Subject, case: Case) -> str | None:
    return _finite_in(subject, case, torch.bfloat16)


# Float16 ends at 65504, and what the backbone feeds is normed.
@_line("finite in float16 autocast", [c._replace(scale=min(c.scale, 5)) for c in SCALES])
def _finite_float16(subject: Subject, case: Case) -> str | None:
    probe = torch.zeros(2, 2, device=subject.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.autocast(subject.device.type, torch.float16):
                half = (probe @ probe).dtype == torch.float16
    except (RuntimeError, UserWarning):
        half = False
    if not half:
        raise NotApplicable(f"no float16 on {subject.device.type}")
    return _finite_in(subject, case, torch.float16)


@_line(
    "gradients finite, and reach every parameter",
    [Case(1, 1), Case(2, 17), Case(2, 17, "tail"), Case(2, 17, "first row"), Case(1, 129)],
)
def _gradients(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case).requires_grad_()
    y = mixer(x, subject.mask(case))
    (y * subject.input(case, seed=2)).sum().backward()
    assert x.grad is not None
    if not x.grad.isfinite().all():
        return "the input's gradient is not finite"
    for name, parameter in mixer.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None or (case.length > 1 and not parameter.grad.any()):
            return f"no gradient for {name}"
        if not parameter.grad.isfinite().all():
            return f"the gradient of {name} is not finite"
    return None


@_line(
    "no later token reaches an earlier output",
    _cases((1, 2), (1, 3), (2, 17), (1, 65), (1, 129), masked=("none", "every other")),
    forms=("causal",), why_not="the form that looks both ways",
)  # fmt: skip
def _causality(subject: Subject, case: Case) -> str | None:
    mixer, x, mask = subject.new(), subject.input(case), subject.mask(case)
    with torch.no_grad():
        y = mixer(x, mask)
        for seen in sorted({1, case.length // 2, case.length - 1}):
            other = x.clone()
            other[:, seen:] = 5 * subject.input(case, seed=3)[:, seen:]
            gap = _differ(
                f"tokens from {seen} on change earlier outputs",
                mixer(other, mask)[:, :seen], y[:, :seen],
            )  # fmt: skip
            if gap:
                return gap
    return None


@_line(
    "every token reaches every output",
    _cases((1, 2), (2, 5), (1, 65), (1, 129)),
    forms=("bidirectional",), why_not="causal",
)  # fmt: skip
def _reach(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad():
        y = mixer(x)
        for source, target in ((-1, 0), (0, -1)):
            other = x.clone()
            other[:, source] = 10 * subject.input(case, seed=3)[:, source]
            if torch.equal(mixer(other)[:, target], y[:, target]):
                return f"output {target % case.length} ignores token {source % case.length}"
    return None


MASKED = _cases(
    (1, 2), (1, 3), (2, 5), (3, 17), (1, 65), (1, 129), masked=("tail", "head", "every other")
)


@_line("masked positions influence nothing", MASKED)
def _masked_influence(subject: Subject, case: Case) -> str | None:
    mixer, x, mask = subject.new(), subject.input(case), subject.mask(case)
    assert mask is not None
    noise = 100 * subject.input(case, seed=3)
    with torch.no_grad():
        y, other = mixer(x, mask), mixer(torch.where(mask[..., None], x, noise), mask)
    return _differ("what is under the mask changes the output", other, y)


@_line("outputs at masked positions are zero", MASKED)
def _masked_zero(subject: Subject, case: Case) -> str | None:
    mask = subject.mask(case)
    assert mask is not None
    with torch.no_grad():
        y = subject.new()(subject.input(case), mask)
    wrong = int((y[~mask] != 0).any(-1).sum())
    return f"{wrong} masked positions have an output" if wrong else None


@_line(
    "a row masked whole gives zeros, no NaN",
    [Case(1, 1, "all"), Case(1, 5, "all"), Case(2, 5, "first row"), Case(2, 65, "first row")],
)
def _masked_row(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case).requires_grad_()
    y = mixer(x, subject.mask(case))
    if y[0].isnan().any():
        return "NaN in the masked row"
    if y[0].any():
        return f"outputs up to {y[0].abs().max().item():.2g} in the masked row"
    y.sum().backward()
    gradients = [x.grad, *(p.grad for p in mixer.parameters())]
    if not all(bool(g.isfinite().all()) for g in gradients if g is not None):
        return "gradients that are not finite"
    return None


@_line("a sequence does not depend on its batch neighbours", _cases((2, 1), (2, 5), (3, 65)))
def _neighbours(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case)
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[1:, (case.length + 1) // 2 :] = False
    x[1:] *= 5
    with torch.no_grad():
        alone = mixer(x[:1])
        return _differ(
            "the first sequence changes with the others beside it", mixer(x)[:1], alone
        ) or _differ(
            "the first sequence changes with padded ones beside it", mixer(x, mask)[:1], alone
        )


@_line("right padding does not change real positions", _cases((1, 1), (1, 2), (2, 17), (1, 65)))
def _right_padding(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad():
        y = mixer(x)
        for padding in (0, 1, 7, 70):
            padded = torch.nn.functional.pad(x, (0, 0, 0, padding), value=3.0)
            mask = torch.arange(padded.shape[1], device=x.device) < case.length
            got = mixer(padded, mask.expand(case.batch, -1))[:, : case.length]
            gap = _differ(f"{padding} positions of padding change the output", got, y)
            if gap:
                return gap
    return None


LENGTHS = (1, 2, 3, 7, 31, 33, 63, 64, 65, 100, 127, 128, 129, MAX_LENGTH, MAX_LENGTH + 1,
           2 * MAX_LENGTH + 3)  # fmt: skip


@_line("any length works, or is refused clearly", [Case(1, n) for n in LENGTHS])
def _lengths(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case)
    try:
        with torch.no_grad():
            y = mixer(x)
            shorter = mixer(x[:, : max(1, case.length // 2)])
    except UserError as error:
        if case.length > MAX_LENGTH:
            raise Noted(f"longer than max_length is refused: {error}") from None
        return f"refused although max_length={MAX_LENGTH}: {error}"
    if not y.isfinite().all():
        return "outputs that are not finite"
    if subject.causal:
        return _differ("half of the sequence has other outputs", shorter, y[:, : shorter.shape[1]])
    return None


@_line(
    "step by step equals all at once", [Case(1, 1), Case(1, 2), Case(2, 17), Case(2, 70)],
    forms=("causal",), why_not="streaming is for the causal form",
)  # fmt: skip
def _streaming(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad():
        y, state = mixer(x), mixer.init_state(case.batch)
        for t in range(case.length):
            y_t, state = mixer.step(x[:, t], state)
            gap = _differ(f"step {t} differs", y_t, y[:, t])
            if gap:
                return gap
    return None


@_line(
    "the state keeps its size", [Case(1, 48)],
    forms=("causal",), why_not="streaming is for the causal form",
)  # fmt: skip
def _state_size(subject: Subject, case: Case) -> str | None:
    mixer, x = subject.new(), subject.input(case)
    state, sizes = mixer.init_state(1), []
    with torch.no_grad():
        for t in range(case.length):
            _, state = mixer.step(x[:, t], state)
            sizes.append(state_bytes(state))
    if not mixer.constant_state:
        raise NotApplicable(
            f"not claimed; {sizes[0]} bytes after a token, {sizes[-1]} after {len(sizes)}"
        )
    if len(set(sizes)) > 1:
        return f"{sizes[0]} bytes after a token, {sizes[-1]} after {len(sizes)}"
    raise Noted(f"{sizes[0]} bytes a sequence, at d_model={D_MODEL} with {NUM_HEADS} heads")


@_line("state_dict round-trips", [Case(2, 17)])
def _state_dict(subject: Subject, case: Case) -> str | None:
    saved, other, x = subject.new(), subject.new(seed=9), subject.input(case)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True, map_location=subject.device))
    with torch.no_grad():
        return _differ("the loaded mixer differs", other(x), saved(x))


@_line("the same under the same seed", [Case(2, 17)])
def _deterministic(subject: Subject, case: Case) -> str | None:
    x, runs = subject.input(case), []
    for _ in range(2):
        mixer = subject.new().train()
        mixer(x).square().sum().backward()
        with torch.no_grad():
            runs.append([mixer(x), *(p.grad for p in mixer.parameters() if p.grad is not None)])
    for first, second in zip(*runs, strict=True):
        gap = _differ("two runs with one seed differ", first, second)
        if gap:
            return gap
    return None


@_line("works under torch.compile", [Case(2, 9), Case(2, 9, "tail")])
def _compiled(subject: Subject, case: Case) -> str | None:
    mixer, x, mask = subject.new(), subject.input(case), subject.mask(case)
    torch.compiler.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend=subject.compile_backend)
    results: list[list[Tensor]] = []
    for run in (mixer, compiled):
        inputs = x.clone().requires_grad_()
        y = run(inputs, mask)
        gradients = torch.autograd.grad(y.square().sum(), [inputs, *mixer.parameters()])
        results.append([y, *gradients])
    names = ["the output", "the input's gradient", *(n for n, _ in mixer.named_parameters())]
    for name, eager, other in zip(names, *results, strict=True):
        gap = _differ(f"{name} differs from eager", other, eager)
        if gap:
            return gap
    return None


# --- running them ----------------------------------------------------------------------------


def check(
    build: Callable[..., Mixer],
    *,
    device: torch.device | str | None = None,
    compile_backend: str = "aot_eager",
    only: Collection[str] | None = None,
) -> list[CheckResult]:
    """Hold a mixer to the contract.

    Args:
        build: makes the mixer from ``d_model``, ``num_heads``, ``causal`` and ``max_length``.
        device: where to run; ``None`` takes CUDA if there is any.
        compile_backend: backend of the torch.compile line; ``inductor`` generates code and takes
            longest.
        only: names of the lines to try; ``None`` tries all.

    Returns:
        One result a line and form.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    results: list[CheckResult] = []
    with torch.random.fork_rng(devices=[]):
        for form in FORMS:
            subject = Subject(build, form, chosen, compile_backend)
            results += _check_form(subject, [e for e in LINES if only is None or e.name in only])
    if all(r.status == "n/a" for r in results):
        results.append(CheckResult("has a form", "bidirectional", "fail", "refuses both"))
    return results


def _check_form(subject: Subject, lines: Sequence[Line]) -> Iterator[CheckResult]:
    line = "builds"
    try:
        subject.new()
    except UserError as error:  # a form that the mixer says it does not have
        yield CheckResult(line, subject.form, "n/a", str(error))
        yield from (CheckResult(entry.name, subject.form, "n/a") for entry in lines)
        return
    except Exception as error:
        yield CheckResult(line, subject.form, "fail", _said(error))
        return
    yield CheckResult(line, subject.form, "pass")
    for entry in lines:
        status, detail = _check_line(entry, subject)
        yield CheckResult(entry.name, subject.form, status, detail)


def _check_line(line: Line, subject: Subject) -> tuple[Status, str]:
    if subject.form not in line.forms:
        return "n/a", line.why_not
    for case in line.cases:
        try:
            problem = line.check(subject, case)
        except NotApplicable as reason:
            return "n/a", str(reason)
        except Noted as note:
            return "pass", str(note)
        except Exception as error:  # whatever a mixer raises is a finding about it
            problem = _said(error)
        if problem:
            return "fail", f"{case}: {problem}"
    return "pass", ""


def _said(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def check_config(config: DictConfig) -> bool:
    """Check ``config.mixer`` and print a table; whether every line passed.

    A mixer that differs from layer to layer is checked once in every shape it takes.
    """
    from rich.console import Console

    from gma_bench.mixer.model import build_mixer, mixer_class

    layers = [0]
    if "layer_index" in inspect.signature(mixer_class(config.mixer["_target_"])).parameters:
        layers = list(range(config.model.num_layers))
    seen: set[str] = set()
    sound = True
    for layer in layers:

        def build(layer: int = layer, **sizes: Any) -> Mixer:
            return build_mixer(config.mixer, layer_index=layer, **sizes)

        shape = _shape_of(build)
        if shape in seen:
            continue
        seen.add(shape)
        results = check(build)
        title = config.mixer.name + (f", layer {layer}" if len(layers) > 1 else "")
        Console().print(table(results, title))
        sound = sound and all(r.status != "fail" for r in results)
    return sound


def _shape_of(build: Callable[..., Mixer]) -> str:
    for causal in (False, True):
        try:
            return repr(
                build(d_model=D_MODEL, num_heads=NUM_HEADS, causal=causal, max_length=MAX_LENGTH)
            )
        except Exception:  # the check itself reports it
            continue
    return ""


def table(results: Sequence[CheckResult], title: str) -> RenderableType:
    """Results for a terminal: a row a line, a column a form, and below what there is to say."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    styles = {"pass": "green", "fail": "bold red", "n/a": "dim"}
    found = {(r.line, r.form): r for r in results}
    out = Table("line", *FORMS, title=f"Contract: {title}", title_justify="left")
    for line in dict.fromkeys(r.line for r in results):
        row = [found.get((line, form)) for form in FORMS]
        out.add_row(line, *(Text(r.status, style=styles[r.status]) if r else "" for r in row))
    notes = [
        Text(f"{r.status}  {r.form}, {r.line}: {r.detail}", style=styles[r.status])
        for r in sorted(results, key=lambda r: r.status)
        if r.detail
    ]
    return Group(out, *notes)
