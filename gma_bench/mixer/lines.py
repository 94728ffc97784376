"""The lines of the contract: what each asks of a mixer, and the inputs that it is tried on.

A line is tried on inputs from small to large, so that what it reports is the smallest that fails.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gma_bench.errors import UserError
from gma_bench.mixer import Mixer, State, copy_state, state_bytes

Form = Literal["bidirectional", "causal"]
FORMS: tuple[Form, ...] = ("bidirectional", "causal")
Needs = Literal["", "bidirectional", "causal", "streaming"]

D_MODEL, NUM_HEADS, MAX_LENGTH = 32, 4, 160
TOLERANCE = 2e-5
"""Of the largest output, or of one: what float32 sums in another order may differ by."""


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
    """The mixer under test: how to build it, in which form, and on what device."""

    build: Callable[..., Mixer]
    form: Form
    device: torch.device | str = "cpu"
    compile_backend: str = "aot_eager"

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
    """A property, the inputs that it is tried on, and what a mixer must have for it to apply.

    What is tried is told by the docstring of ``check``.
    """

    name: str
    cases: tuple[Case, ...]
    check: Check
    needs: Needs = ""

    def why_not(self, mixer: Mixer) -> str | None:
        """Why the line cannot apply to a mixer; None where it does."""
        if self.needs == "bidirectional" and mixer.causal:
            return "for the bidirectional form"
        if self.needs in ("causal", "streaming") and not mixer.causal:
            return "for the causal form"
        if self.needs == "streaming" and not mixer.streaming:
            return "declared: streaming=False"
        return None


LINES: list[Line] = []


def line(name: str) -> Line:
    """The line of that name."""
    return next(entry for entry in LINES if entry.name == name)


def _line(name: str, cases: Sequence[Case], needs: Needs = "") -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        LINES.append(Line(name, tuple(cases), check, needs))
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
    """`(B, N, d_model)` in and out; float32 stays float32."""
    x = subject.input(case)
    y = subject.new()(x, subject.mask(case))
    if y.shape != x.shape:
        return f"shape {tuple(x.shape)} became {tuple(y.shape)}"
    return None if y.dtype == x.dtype else f"{x.dtype} became {y.dtype}"


SCALES = [Case(1, 1), Case(2, 17), Case(2, 17, scale=30), Case(1, 129, scale=30)]


def _finite_in(subject: Subject, case: Case, dtype: torch.dtype | None) -> str | None:
    context = (
        torch.autocast(torch.device(subject.device).type, dtype)
        if dtype is not None
        else nullcontext()
    )
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad(), context:
        y = mixer(x, None)
    bad = (~y.isfinite()).sum().item()
    return f"{bad} of {y.numel()} outputs are not finite" if bad else None


@_line("finite in float32", SCALES)
def _finite_float32(subject: Subject, case: Case) -> str | None:
    """At N from 1 to 129, with inputs 30 times larger than a norm gives."""
    return _finite_in(subject, case, None)


@_line("finite in bfloat16 autocast", SCALES)
def _finite_bfloat16(subject: Subject, case: Case) -> str | None:
    """The same under `torch.autocast`."""
    return _finite_in(subject, case, torch.bfloat16)


# Float16 ends at 65504, and what the backbone feeds is normed.
@_line("finite in float16 autocast", [c._replace(scale=min(c.scale, 5)) for c in SCALES])
def _finite_float16(subject: Subject, case: Case) -> str | None:
    """The same with inputs up to 5 times a norm's, where the device has float16."""
    probe = torch.zeros(2, 2, device=subject.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.autocast(torch.device(subject.device).type, torch.float16):
                half = (probe @ probe).dtype == torch.float16
    except (RuntimeError, UserWarning):
        half = False
    if not half:
        raise NotApplicable(f"no float16 on {torch.device(subject.device).type}")
    return _finite_in(subject, case, torch.float16)


@_line(
    "gradients finite, and reach every parameter",
    [Case(1, 1), Case(2, 17), Case(2, 17, "tail"), Case(2, 17, "first row"), Case(1, 129)],
)
def _gradients(subject: Subject, case: Case) -> str | None:
    """With padding and rows masked whole too; a parameter without gradient is dead weight."""
    mixer, x = subject.new(), subject.input(case).requires_grad_()
    y = mixer(x, subject.mask(case))
    (y * subject.input(case, seed=2)).sum().backward()
    assert x.grad is not None
    if not x.grad.isfinite().all():
        return "the input's gradient is not finite"
    for name, parameter in mixer.named_parameters():
        if not parameter.requires_grad:
            continue
        if case.length > 1 and (parameter.grad is None or not parameter.grad.any()):
            return f"no gradient for {name}"
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"the gradient of {name} is not finite"
    return None


@_line(
    "no later token reaches an earlier output",
    _cases((1, 2), (1, 3), (2, 17), (1, 65), (1, 129), masked=("none", "every other")),
    "causal",
)
def _causality(subject: Subject, case: Case) -> str | None:
    """Causal form: tokens from some position on are replaced, and outputs before it stay."""
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
    "bidirectional",
)
def _reach(subject: Subject, case: Case) -> str | None:
    """Bidirectional form: the first output depends on the last token, and the other way round."""
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
    """What lies under the mask is replaced by numbers 100 times larger; masks at the end, at the start
    and in between, a batch of one included."""
    mixer, x, mask = subject.new(), subject.input(case), subject.mask(case)
    assert mask is not None
    noise = 100 * subject.input(case, seed=3)
    with torch.no_grad():
        y, other = mixer(x, mask), mixer(torch.where(mask[..., None], x, noise), mask)
    return _differ("what is under the mask changes the output", other, y)


@_line(
    "NaN and infinities under a mask reach nothing",
    _cases((1, 2), (2, 5), (1, 65), masked=("tail", "head", "every other")),
)
def _masked_not_finite(subject: Subject, case: Case) -> str | None:
    """What lies under the mask is replaced by NaN and infinities: the same outputs, finite gradients."""
    mixer, x, mask = subject.new(), subject.input(case), subject.mask(case)
    assert mask is not None
    with torch.no_grad():
        y = mixer(x, mask)
    for value in (math.nan, math.inf, -math.inf):
        other = x.masked_fill(~mask[..., None], value).requires_grad_()
        mixer.zero_grad()
        out = mixer(other, mask)
        gap = _differ(f"{value} under the mask changes the output", out, y)
        if gap:
            return gap
        out.sum().backward()
        gradients = {"the input": other.grad} | {n: p.grad for n, p in mixer.named_parameters()}
        for name, gradient in gradients.items():
            if gradient is not None and not gradient.isfinite().all():
                return f"{value} under the mask reaches the gradient of {name}"
    return None


@_line("outputs at masked positions are zero", MASKED)
def _masked_zero(subject: Subject, case: Case) -> str | None:
    """So that pooling and residuals see nothing of them."""
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
    """Its gradients are finite as well."""
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
    """A sequence alone, beside others, beside padded ones."""
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
    """By 0, 1, 7 and 70 positions, against no mask at all."""
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


@_line("a call leaves nothing behind", _cases((1, 1), (2, 5), (1, 65)))
def _no_memory(subject: Subject, case: Case) -> str | None:
    """The same input before and after a call with another one."""
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad():
        y = mixer(x)
        mixer(subject.input(case, seed=3))
        return _differ("after another call, the same input's output differs", mixer(x), y)


@_line("a batch of zero gives a batch of zero", _cases((0, 1), (0, 5), masked=("none", "tail")))
def _no_batch(subject: Subject, case: Case) -> str | None:
    """With a mask and without."""
    y = subject.new()(subject.input(case), subject.mask(case))
    wanted = (0, case.length, D_MODEL)
    return None if y.shape == wanted else f"shape {wanted} became {tuple(y.shape)}"


@_line("the layout of the input does not matter", _cases((2, 3), (2, 65), masked=("none", "tail")))
def _layout(subject: Subject, case: Case) -> str | None:
    """Strided inputs and masks give what contiguous ones give."""
    mixer, x, mask = subject.new(), subject.input(case), subject.mask(case)
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "length before batch": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "every other row": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    }
    with torch.no_grad():
        y = mixer(x, mask)
        for name, laid in layouts.items():
            out = mixer(laid(x), None if mask is None else laid(mask))
            gap = _differ(f"the output for strides of {name} differs", out, y)
            if gap:
                return gap
    return None


LENGTHS = (1, 2, 3, 7, 31, 33, 63, 64, 65, 100, 127, 128, 129, MAX_LENGTH, MAX_LENGTH + 1,
           2 * MAX_LENGTH + 3)  # fmt: skip


@_line("any length works, or is refused clearly", [Case(1, n) for n in LENGTHS])
def _lengths(subject: Subject, case: Case) -> str | None:
    """N=1, around multiples of chunk sizes, beyond `max_length`; causal forms give prefixes of a
    sequence the outputs that they have in it."""
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
    "step by step equals all at once",
    [Case(1, 1), Case(1, 2), Case(2, 17), Case(2, 70)],
    "streaming",
)
def _streaming(subject: Subject, case: Case) -> str | None:
    """`step` over 70 tokens against `forward`."""
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
    "a step leaves the state it was given as it was",
    [Case(1, 1), Case(1, 2), Case(2, 17)],
    "streaming",
)
def _state_untouched(subject: Subject, case: Case) -> str | None:
    """Unless `overwrites_state` declares that a step may write into it."""
    mixer, x = subject.new(), subject.input(case)
    if mixer.overwrites_state:
        raise NotApplicable("declared: overwrites_state=True")
    with torch.no_grad():
        state = mixer.init_state(case.batch)
        for t in range(case.length):
            given, kept = state, copy_state(state)
            _, state = mixer.step(x[:, t], given)
            changed = [name for name, a, b in _pairs(given, kept) if not _same(a, b)]
            if changed:
                return f"step {t} overwrites {', '.join(changed)}"
    return None


@_line("two streams do not meet", [Case(1, 1), Case(1, 2), Case(2, 17)], "streaming")
def _two_streams(subject: Subject, case: Case) -> str | None:
    """Steps of two sequences by turns, each from an `init_state` of its own, then a new one."""
    mixer, x, other = subject.new(), subject.input(case), subject.input(case, seed=3)
    with torch.no_grad():
        y, first, second = mixer(x), mixer.init_state(case.batch), mixer.init_state(case.batch)
        for t in range(case.length):
            _, second = mixer.step(other[:, t], second)
            y_t, first = mixer.step(x[:, t], first)
            gap = _differ(f"step {t} changes with another stream's steps", y_t, y[:, t])
            if gap:
                return gap
        y_0, _ = mixer.step(x[:, 0], mixer.init_state(case.batch))
    return _differ("a new stream goes on from an old one: its first step differs", y_0, y[:, 0])


@_line(
    "one state can be continued twice",
    [Case(1, 1), Case(1, 3), Case(1, 4), Case(2, 40)],
    "streaming",
)
def _continued_twice(subject: Subject, case: Case) -> str | None:
    """Two continuations of one state by turns, as in beam search; where `overwrites_state` is declared,
    one goes on from a copy."""
    mixer, x, other = subject.new(), subject.input(case), subject.input(case, seed=3)
    start = case.length // 2
    other[:, :start] = x[:, :start]
    with torch.no_grad():
        state = mixer.init_state(case.batch)
        for t in range(start):
            _, state = mixer.step(x[:, t], state)
        states = [state, copy_state(state) if mixer.overwrites_state else state]
        wanted = [mixer(x), mixer(other)]
        for t in range(start, case.length):
            for which, tokens in enumerate((x, other)):
                y_t, states[which] = mixer.step(tokens[:, t], states[which])
                gap = _differ(
                    f"step {t}, of two continuations from {start} on, differs",
                    y_t, wanted[which][:, t],
                )  # fmt: skip
                if gap:
                    return gap
    return None


@_line(
    "prefill in pieces equals all at once",
    [Case(1, 1), Case(1, 2), Case(2, 5), Case(2, 70), Case(1, 150)],
    "streaming",
)
def _prefill(subject: Subject, case: Case) -> str | None:
    """`prefill` of the whole, of two pieces cut anywhere, and `step` after it, against `forward`."""
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad():
        y = mixer(x)
        for cut in sorted({0, 1, case.length // 2, case.length - 1, case.length}):
            first, state = mixer.prefill(x[:, :cut])
            second, state = mixer.prefill(x[:, cut:-1], state)
            last = x[:, max(cut, case.length - 1) :]
            steps = [first, second]
            for x_t in last.unbind(1):
                y_t, state = mixer.step(x_t, state)
                steps.append(y_t.unsqueeze(1))
            gap = _differ(f"pieces cut at {cut} differ", torch.cat(steps, 1), y)
            if gap:
                return gap
    return None


@_line("a state carried in from nothing equals no state", [Case(1, 1), Case(2, 17)], "streaming")
def _empty_state(subject: Subject, case: Case) -> str | None:
    """`prefill` from no state, from `init_state` and from a prefill of no tokens."""
    mixer, x = subject.new(), subject.input(case)
    with torch.no_grad():
        y, after = mixer.prefill(x)
        for what, state in (
            ("init_state", mixer.init_state(case.batch)),
            ("a prefill of no tokens", mixer.prefill(x[:, :0])[1]),
        ):
            out, carried = mixer.prefill(x, state)
            gap = _differ(f"the output with the state of {what} differs", out, y)
            if gap:
                return gap
            for name, a, b in _pairs(carried, after):
                if not _same(a, b, TOLERANCE):
                    return f"{name} differs after the state of {what}"
    return None


@_line("gradients flow through the state", [Case(1, 2), Case(2, 17)], "streaming")
def _state_gradients(subject: Subject, case: Case) -> str | None:
    """Gradients of the last output through `prefill` in two pieces and through steps, against `forward`."""

    def in_pieces(mixer: Mixer, x: Tensor) -> Tensor:
        cut = case.length // 2
        _, state = mixer.prefill(x[:, :cut])
        return mixer.prefill(x[:, cut:], state)[0][:, -1]

    def in_steps(mixer: Mixer, x: Tensor) -> Tensor:
        state = mixer.init_state(case.batch)
        for x_t in x.unbind(1):
            y_t, state = mixer.step(x_t, state)
        return y_t

    weights = subject.input(case, seed=2)[:, -1]

    def gradients(last: Callable[[Mixer, Tensor], Tensor]) -> list[Tensor | None]:
        mixer, x = subject.new(), subject.input(case).requires_grad_()
        wanted = [x, *(p for p in mixer.parameters() if p.requires_grad)]
        loss = (last(mixer, x) * weights).sum()
        return list(torch.autograd.grad(loss, wanted, allow_unused=True))

    wanted = gradients(lambda mixer, x: mixer(x)[:, -1])
    names = ["the input", *(n for n, p in subject.new().named_parameters() if p.requires_grad)]
    for how, last in (("prefill", in_pieces), ("steps", in_steps)):
        for name, got, want in zip(names, gradients(last), wanted, strict=True):
            if want is None:
                continue
            if got is None:
                return f"no gradient for {name} through {how}"
            gap = _differ(f"the gradient of {name} through {how} differs", got, want)
            if gap:
                return gap
    return None


def _pairs(a: State, b: State, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Entries of two states side by side, nested ones by dotted name."""
    for name in a:
        if isinstance(a[name], dict):
            yield from _pairs(a[name], b[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", a[name], b[name]


def _same(a: Any, b: Any, tolerance: float = 0.0) -> bool:
    """Whether two entries of a state agree; those that are no tensors or numbers always do."""
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)
    return a == b if isinstance(a, int | float) else True


@_line("the state keeps its size", [Case(1, 48)], "streaming")
def _state_size(subject: Subject, case: Case) -> str | None:
    """Where the class claims `constant_state`; the bytes are reported."""
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
    """Saved, loaded into a mixer with another seed: the same outputs."""
    saved, other, x = subject.new(), subject.new(seed=9), subject.input(case)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True, map_location=subject.device))
    with torch.no_grad():
        return _differ("the loaded mixer differs", other(x), saved(x))


@_line("the same under the same seed", [Case(2, 17)])
def _deterministic(subject: Subject, case: Case) -> str | None:
    """Outputs and gradients of two runs in training mode."""
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
    """`fullgraph=True`, outputs and gradients against eager, with a mask and without."""
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
