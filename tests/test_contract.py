"""The contract: every mixer passes it, and every line of it can fail."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baselines.cosformer import CosFormer
from baselines.kernelized import kernelized_attention
from baselines.linear_transformer import LinearTransformer
from baselines.mha import MHA
from baselines.sdpa import SDPA
from gma_bench.cli import main
from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, State, contract, copy_state
from gma_bench.mixer.gma import GaussianMixtureAttention
from gma_bench.mixer.model import build_mixer
from gma_bench.run.compose import choices, compose

CELLS = [(name, 0) for name in choices("mixer") if name != "external"] + [("hybrid", 1)]


def builder(name: str, layer: int = 0) -> Callable[..., Mixer]:
    config = compose([f"mixer={name}", "scale=smoke"])
    return lambda **sizes: build_mixer(config.mixer, layer_index=layer, **sizes)


def failures(results: list[contract.CheckResult]) -> list[contract.CheckResult]:
    return [r for r in results if r.status == "fail"]


@pytest.mark.parametrize(("name", "layer"), CELLS, ids=lambda v: str(v))
def test_every_mixer_passes(name: str, layer: int) -> None:
    results = contract.check(builder(name, layer), device="cpu")
    assert not failures(results)
    assert sum(r.status == "pass" for r in results) >= 12
    assert all(r.detail for r in results if r.status == "not applicable")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), CELLS, ids=lambda v: str(v))
def test_every_mixer_passes_with_generated_code(name: str, layer: int) -> None:
    line = {"works under torch.compile"}
    results = contract.check(builder(name, layer), compile_backend="inductor", only=line)
    assert not failures(results)


# --- mixers that break one line each -----------------------------------------------------------


class WrongDtype(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask).double()


class Overflows(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * x.square().sum(-1, keepdim=True).exp()


class InfiniteIn(LinearTransformer):
    bad: torch.dtype

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        return y / 0 if y.dtype == self.bad else y


class InfiniteInBfloat16(InfiniteIn):
    bad = torch.bfloat16


class InfiniteInFloat16(InfiniteIn):
    bad = torch.float16


class DeadParameter(LinearTransformer):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.unused = nn.Parameter(torch.zeros(3))


class LooksAhead(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        causal, self.causal = self.causal, False
        try:
            return super().forward(x, mask)
        finally:
            self.causal = causal


class NeverLooksAhead(LooksAhead):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(
            self.merge_heads(kernelized_attention(q.exp(), k.exp(), v, causal=True))
        )


class ForgetsMaskAlone(SDPA):
    """Padding taken for tokens where the batch has one sequence."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None or len(x) > 1:
            return super().forward(x, mask)
        return super().forward(x) * mask.unsqueeze(-1)


class MultipliesByMask(LinearTransformer):
    """Zero times NaN is NaN."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask.unsqueeze(-1))


class LeavesPadding(SDPA):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        return y if mask is None else torch.where(mask.unsqueeze(-1), y, torch.ones(()))


class NothingToNormalise(MHA):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -math.inf)
        return scores.softmax(-1) @ v


class NormalisesOverBatch(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) / x.std()


class ScalesByBatchLength(CosFormer):
    """M from the batch at hand, as in cosFormer's published code."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.longest = x.shape[1]
        return super().forward(x, mask)


class Remembers(LinearTransformer):
    """A state that is not reset: a call starts where the one before ended."""

    last: Tensor | float = 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask) + self.last
        self.last = y.detach().mean()
        return y


class LooksAtTheLargest(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert x.abs().max() < math.inf
        return super().forward(x, mask)


class Views(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.view(-1, self.d_model).view_as(x), mask)


class WholeChunksOnly(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x.reshape(len(x), -1, min(32, x.shape[1]), x.shape[2]).flatten(1, 2))


class StepsWithoutHistory(LinearTransformer):
    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        return super().step(x_t, self.init_state(len(x_t)))


class AddsInPlace(LinearTransformer):
    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = super().step(x_t, state)
        return y, {name: state[name].copy_(value) for name, value in after.items()}


class OneStateForAll(LinearTransformer):
    """Its state is the mixer's own, as in layers written to generate one text at a time."""

    kept: State | None = None

    def init_state(self, batch_size: int) -> State:
        self.kept = self.kept or super().init_state(batch_size)
        return {}

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        assert self.kept is not None
        y, self.kept = super().step(x_t, self.kept)
        return y, {}


class SharesItsCache(SDPA):
    overwrites_state = False


class PrefillsAfresh(LinearTransformer):
    def prefill(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        return super().prefill(x)


class DoublesAtTheStart(LinearTransformer):
    def prefill(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        out, after = super().prefill(x, state)
        return (2 * out if state is None else out), after


class DetachesItsState(LinearTransformer):
    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        return super().step(x_t, {name: value.detach() for name, value in state.items()})


class ClaimsConstantState(SDPA):
    constant_state = True


class HiddenWeights(LinearTransformer):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.register_buffer("hidden", torch.randn(self.d_model), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * self.hidden


class Counts(LinearTransformer):
    calls = itertools.count(1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * next(self.calls)


class BranchesOnData(LinearTransformer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * (2 if x.sum().item() > 0 else 1)


BROKEN: list[tuple[str, type[Mixer], str]] = [
    ("shape and dtype are kept", WrongDtype, "B=1 N=1: torch.float32 became torch.float64"),
    ("finite in float32", Overflows, "B=2 N=17 scale=30"),
    ("finite in bfloat16 autocast", InfiniteInBfloat16, "B=1 N=1"),
    ("finite in float16 autocast", InfiniteInFloat16, "B=1 N=1"),
    ("gradients finite, and reach every parameter", DeadParameter, "no gradient for unused"),
    ("no later token reaches an earlier output", LooksAhead, "B=1 N=2: tokens from 1 on"),
    ("every token reaches every output", NeverLooksAhead, "B=1 N=2: output 0 ignores token 1"),
    ("masked positions influence nothing", ForgetsMaskAlone, "B=1 N=2 masked=tail"),
    ("NaN and infinities under a mask reach nothing", MultipliesByMask, "B=1 N=2 masked=tail"),
    ("outputs at masked positions are zero", LeavesPadding, "B=1 N=2 masked=tail: 1 masked"),
    ("a row masked whole gives zeros, no NaN", NothingToNormalise, "B=1 N=1 masked=all"),
    ("a sequence does not depend on its batch neighbours", NormalisesOverBatch, "B=2 N=1"),
    ("right padding does not change real positions", ScalesByBatchLength, "positions of padding"),
    ("a call leaves nothing behind", Remembers, "B=1 N=1: after another call"),
    ("a batch of zero gives a batch of zero", LooksAtTheLargest, "B=0 N=1: "),
    ("the layout of the input does not matter", Views, "B=2 N=3: RuntimeError: view size"),
    ("any length works, or is refused clearly", WholeChunksOnly, "B=1 N=33: RuntimeError"),
    ("step by step equals all at once", StepsWithoutHistory, "B=1 N=2: step 1 differs"),
    ("a step leaves the state it was given as it was", AddsInPlace,
     "B=1 N=1: step 0 overwrites state, mass"),
    ("two streams do not meet", OneStateForAll, "B=1 N=1: step 0 changes with another stream's"),
    ("one state can be continued twice", SharesItsCache, "B=1 N=3: step 2, of two continuations"),
    ("prefill in pieces equals all at once", PrefillsAfresh, "B=1 N=2: pieces cut at 1 differ"),
    ("a state carried in from nothing equals no state", DoublesAtTheStart,
     "B=1 N=1: the output with the state of init_state differs"),
    ("gradients flow through the state", DetachesItsState, "B=1 N=2: "),
    ("the state keeps its size", ClaimsConstantState, "bytes after a token"),
    ("state_dict round-trips", HiddenWeights, "B=2 N=17: the loaded mixer differs"),
    ("the same under the same seed", Counts, "two runs with one seed differ"),
    ("works under torch.compile", BranchesOnData, "B=2 N=9"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "broken", "says"), BROKEN, ids=lambda v: getattr(v, "__name__", "")
)
def test_line_fails_and_names_the_smallest_input(line: str, broken: type[Mixer], says: str) -> None:
    found = failures(contract.check(broken, device="cpu", only={line}))
    assert found
    assert {r.line for r in found} == {line}
    assert says in found[0].detail


def test_every_line_has_a_mixer_that_breaks_it() -> None:
    assert [line for line, *_ in BROKEN] == [line.name for line in contract.LINES]


def test_a_sound_mixer_passes_beside_the_broken_ones() -> None:
    # The mixers that the broken ones are made from pass, so it is the break that is found.
    for sound in (LinearTransformer, SDPA, MHA, CosFormer):
        lines = {line for line, *_ in BROKEN if line != "works under torch.compile"}
        assert not failures(contract.check(sound, device="cpu", only=lines))


def test_refusing_both_forms_fails() -> None:
    def refuses(**sizes: Any) -> Mixer:
        raise SettingError("mixer", "Nothing", "has no form", "mixer=gma")

    assert [r.line for r in failures(contract.check(refuses))] == ["has a form"]


def test_a_constructor_that_breaks_fails() -> None:
    def breaks(**sizes: Any) -> Mixer:
        raise TypeError("unexpected argument")

    found = failures(contract.check(breaks))
    assert {(r.line, r.form) for r in found} == {("builds", f) for f in contract.FORMS}
    assert "TypeError: unexpected argument" in found[0].detail


# --- used from Python ---------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", [GaussianMixtureAttention, SDPA])
def test_wrong_inputs_say_what_to_pass(mixer: type[Mixer]) -> None:
    layer, x = mixer(64, 4), torch.randn(2, 5, 64)
    layer(x, torch.ones(2, 5, dtype=torch.bool))
    for error, says, arguments in (
        (TypeError, r"float32; must be bool .* mask\.bool\(\)", (x, torch.ones(2, 5))),
        (ValueError, r"x \(5, 64\) must be .* x\.unsqueeze\(0\)", (x[0],)),
        (ValueError, r"x \(2, 5, 32\) must be \(B, N, d_model=64\)", (x[..., :32],)),
        (ValueError, r"mask \(2, 4\) must be .* \(2, 5\)", (x, torch.ones(2, 4).bool())),
    ):
        with pytest.raises(error, match=says):
            layer(*arguments)
    with pytest.raises(ValueError, match=r"bidirectional.*causal=True"):
        layer.prefill(x)


def test_a_bidirectional_gma_refuses_to_stream() -> None:
    layer, causal = GaussianMixtureAttention(64, 4), GaussianMixtureAttention(64, 4, causal=True)
    with pytest.raises(ValueError, match="causal=True"):
        layer.init_state(1)
    with pytest.raises(ValueError, match="causal=True"):
        layer.step(torch.randn(1, 64), causal.init_state(1))


def test_a_copied_state_goes_on_by_itself() -> None:
    state: State = {"a": torch.zeros(2), "inner": {"b": torch.zeros(1), "position": 3}}
    copied = copy_state(state)
    copied["a"] += 1
    copied["inner"]["b"] += 1
    copied["inner"]["position"] += 1
    assert state["a"].sum() == state["inner"]["b"] == 0
    assert state["inner"]["position"] == 3


# --- from the command line ---------------------------------------------------------------------

MINE = '''
import torch
from torch import nn
from gma_bench.mixer import Mixer, zero_masked

class MyMixer(Mixer):
    """Running mean of a projection: as small as a sound mixer gets."""

    constant_state = True

    def __init__(self, d_model, num_heads, causal=False, max_length=None, *, gain: float = 1.0):
        super().__init__(d_model, num_heads, causal, max_length)
        self.gain = gain
        self.proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, mask=None):
        weight = torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        total, count = self.proj(zero_masked(x, mask)), weight
        if self.causal:
            total, count = total.cumsum(1), count.cumsum(1)
        else:
            total, count = total.sum(1, keepdim=True), count.sum(1, keepdim=True)
        return zero_masked((self.gain * total / count.clamp(min=1)).expand_as(x), mask)

    def init_state(self, batch_size):
        zero = self.proj.weight.new_zeros(batch_size, self.d_model)
        return {"total": zero, "count": 0}

    def step(self, x_t, state):
        total, count = state["total"] + self.proj(x_t), state["count"] + 1
        return self.gain * total / count, {"total": total, "count": count}

class Leaky(MyMixer):
    def forward(self, x, mask=None):
        return super().forward(x)
'''


@pytest.fixture
def my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "outside" / "my_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(folder.parent))
    return "my_package"


def test_mixer_outside_the_repository_is_checked_and_run(
    my_package: str, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixer = [f"mixer._target_={my_package}.MyMixer", "+mixer.gain=2"]
    assert main(["check", "scale=smoke", *mixer]) == 0
    assert "my_package.MyMixer" in capsys.readouterr().out
    cell = [o for o in tiny if not o.startswith("mixer=")]
    assert main(["run", *cell, *mixer]) == 0
    assert len(list((tmp_path / "results").rglob("runs/*.json"))) == 1


def test_check_exits_with_1_on_a_failure(
    my_package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "scale=smoke", f"mixer._target_={my_package}.Leaky"]) == 1
    assert "B=1 N=2 masked=tail: what is under the mask" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_failure_is_printed_as_python_that_reproduces_it(
    my_package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", "scale=smoke", f"mixer._target_={my_package}.Leaky", "+mixer.gain=2"])
    said = capsys.readouterr().out
    script = said[said.index("from my_package import Leaky") :].partition("\n\n")[0]
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    runpy.run_path(str(tmp_path / "script.py"))
    assert capsys.readouterr().out.startswith("what is under the mask changes the output by")


def test_results_as_json(my_package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "scale=smoke", "--json", f"mixer._target_={my_package}.Leaky"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert {r["mixer"] for r in rows} == {"my_package.Leaky"}
    assert {r["status"] for r in rows} == {"pass", "fail", "not applicable"}
    assert all(r["detail"] for r in rows if r["status"] != "pass")
    assert all(bool(r["code"]) == (r["status"] == "fail") for r in rows)


class OnlyAhead(LinearTransformer):
    supports_bidirectional = False
    no_bidirectional_reason = "reads one way"


class DoesNotStream(LinearTransformer):
    streaming = False


def test_what_a_class_declares_is_not_applicable_and_says_why() -> None:
    results = contract.check(OnlyAhead, device="cpu", only={"finite in float32"})
    assert [(r.form, r.status) for r in results] == [
        ("bidirectional", "not applicable"), ("bidirectional", "not applicable"),
        ("causal", "pass"), ("causal", "pass"),
    ]  # fmt: skip
    assert "reads one way" in results[0].detail
    results = contract.check(DoesNotStream, device="cpu", only={"step by step equals all at once"})
    assert [r.detail for r in results if r.form == "causal"][1] == "declared: streaming=False"


@pytest.mark.parametrize("target", ["my_package.Nope", "nope.Nope", "Nope", "os.path.join"])
def test_a_target_that_is_no_mixer_is_one_line(
    my_package: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"mixer._target_={target}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"mixer._target_={target}: must be a" in said


def test_linformer_in_a_causal_task_says_why() -> None:
    with pytest.raises(SettingError, match="no causal form: its projections mix all positions"):
        builder("linformer")(d_model=32, num_heads=4, causal=True, max_length=8)


# --- the page that explains it -----------------------------------------------------------------


def test_page_on_adding_a_mixer_shows_what_there_is() -> None:
    root = Path(contract.__file__).parents[2]
    page = (root / "docs/adding_a_mixer.md").read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", page):
        assert (root / "docs" / link).exists(), link
    for line in contract.LINES:
        tried = " ".join((line.check.__doc__ or "").split())
        assert tried
        assert f"| {line.name} | {tried} |" in page, "run docs/update_audit.py lines"
    shown = re.findall(r"^fail  causal, (.+?): (B=.+?) by ", page, re.MULTILINE)
    found = failures(contract.check(ScalesByBatchLength, device="cpu"))
    assert shown
    assert set(shown) <= {(r.line, r.detail.partition(" by ")[0]) for r in found}
