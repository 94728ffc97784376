"""Measured memory, simulated memory, and what happens where memory does not suffice."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from gma_bench.mixer import Mixer
from gma_bench.profiling import memory
from gma_bench.profiling.storages import StorageTracker
from gma_bench.profiling.subject import Subject, build_subject, form_of
from gma_bench.results.growth import growth_of
from gma_bench.run.compose import choices, compose

MIXERS = [name for name in choices("mixer") if name != "external"]
CPU = torch.device("cpu")


def cell(mixer: str, *overrides: str) -> DictConfig:
    mixers = [f"mixer._target_={mixer}"] if "." in mixer else [f"mixer={mixer}"]
    steady = ["task.device=cpu", "task.cell_seconds=600", "task.simulation_operators=1000000"]
    return compose(["task=memory", "scale=smoke", *mixers, *steady, *overrides])


def rows_of(mixer: str, *overrides: str) -> list[dict[str, Any]]:
    return memory.profile(cell(mixer, *overrides)).rows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_measured_equals_simulated_to_the_byte_at_three_sizes(mixer: str, causal: bool) -> None:
    scopes = "[layer]" if causal else "[layer,model]"
    config = cell(
        mixer, "task.lengths=[64,192,640]", f"task.causal={causal}", f"task.scopes={scopes}"
    )
    if causal and not form_of(config.mixer, True):
        pytest.skip("has no causal form")
    outcome = memory.profile(config)
    measured = [r for r in outcome.rows if r["method"] == "measured"]
    assert {r["seq_len"] for r in measured} == {64, 192, 640}
    assert all(r["status"] == "ok" for r in outcome.rows), outcome.rows
    for row in measured:
        assert row["peak_bytes"] == row["simulated_bytes"] > 0, row
    simulated = [r for r in outcome.rows if r["method"] == "simulated"]
    for one, other in zip(simulated, measured, strict=True):
        assert one["saved_bytes"] == other["saved_bytes"]
        assert one["parameter_bytes"] == other["parameter_bytes"] > 0
    assert outcome.extra["equal_to_simulation"] == outcome.extra["compared_with_simulation"] > 0


def test_components_are_measured_as_simulated_and_memory_grows_with_them() -> None:
    rows = rows_of("gma", "task.components=[16,64,256]", "task.lengths=[64]", "task.scopes=[layer]",
                   "task.components_length=512")  # fmt: skip
    swept = [r for r in rows if r["sweep"] == "components"]
    assert all(r["peak_bytes"] == r["simulated_bytes"] for r in swept if r["method"] == "measured")
    for method in ("measured", "simulated"):
        peaks = [r["peak_bytes"] for r in swept
                 if r["method"] == method and r["pass"] == "forward_backward"]  # fmt: skip
        assert len(peaks) == 3
        assert peaks == sorted(peaks)


@pytest.mark.parametrize(("mixer", "slope"), [("gma", 1.0), ("sdpa", 1.0), ("mha", 2.0)])
@pytest.mark.parametrize("causal", [False, True])
def test_growth_to_a_million_tokens(mixer: str, slope: float, causal: bool) -> None:
    lengths = [4096, 16384, 65536, 262144, 1048576]
    rows = rows_of(mixer, f"task.lengths={lengths}", "task.measured=false", f"task.causal={causal}",
                   "task.scopes=[layer]")  # fmt: skip
    for step in ("forward", "forward_backward"):
        found = growth_of(rows, **{"pass": step, "method": "simulated"})
        assert found is not None
        assert found.to_x == 1048576
        assert found.within(slope, 0.05), found


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_allocator_counts_what_the_tracker_counts(mixer: str) -> None:
    """What kernels allocate and free inside themselves is not tracked.

    It must be a small part, or (torch's fused attention) at least not grow faster than the length.
    """
    tracked, hidden = zip(*(_hidden_bytes(cell(mixer), n) for n in (512, 2048)), strict=True)
    assert min(hidden) >= 0
    assert hidden[1] <= 0.2 * tracked[1] or hidden[1] <= 4.4 * hidden[0]


def _hidden_bytes(config: DictConfig, length: int) -> tuple[int, int]:
    """Peak that the tracker saw, and what the allocator's own peak was above it."""
    subject = build_subject(
        config, config.mixer, scope="layer", seq_len=length, backward=True, device=CPU,
        causal=form_of(config.mixer, False),
    )  # fmt: skip
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities, profile_memory=True) as profiler,
        StorageTracker() as tracker,
    ):
        subject.run_pass()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return tracker.peak_bytes, peak - tracker.peak_bytes


def test_parameters_and_their_gradients_are_kept_apart() -> None:
    class Wide(Mixer):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.weight = nn.Parameter(torch.ones(100_000))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x * self.weight[0]

    def build() -> Subject:
        module = Wide()
        module.weight.grad = torch.zeros_like(module.weight)
        x = torch.ones(1, 8, 4, requires_grad=True)
        return Subject(module, (x,), None)

    found = memory.measure(build, CPU)
    assert found.parameter_bytes == 400_000
    assert found.standing_bytes == 800_000 + 128
    assert found.peak_bytes == 128, "the result alone"


def test_a_budget_marks_what_does_not_fit_and_keeps_the_rest() -> None:
    overrides = [
        "task.lengths=[64,256,1024,4096]",
        "task.scopes=[layer]",
        "task.measured_max_length=4096",
    ]
    tight = rows_of("mha", *overrides, "task.budget_gib=0.01")
    roomy = rows_of("mha", "task.lengths=[64,256]", "task.scopes=[layer]", "task.budget_gib=2")
    measured = [r for r in tight if r["method"] == "measured" and r["pass"] == "forward_backward"]
    assert [r["status"] for r in measured] == ["ok", "ok", "OOM", "OOM"]
    for row in measured[2:]:
        assert row["reached"] == 256
        assert row["peak_bytes"] is None
        assert "GiB" in row["reason"]
    small = [r["peak_bytes"] for r in tight if r["status"] == "ok" and r["seq_len"] <= 256]
    assert small == [r["peak_bytes"] for r in roomy], "other rows are untouched"
    simulated = [r for r in tight if r["method"] == "simulated"]
    assert all(r["status"] == "ok" for r in simulated)


UNDER_ULIMIT = """
import json, resource, sys
import torch
from gma_bench.run.compose import compose
from gma_bench.profiling import memory
config = compose(["task=memory", "scale=smoke", "mixer=mha", "task.device=cpu", "task.scopes=[layer]",
                  "task.lengths=[128,512,65536,262144]", "task.measured_max_length=262144",
                  "task.budget_gib=1024", "task.passes=[forward]",
                  "task.cell_seconds=1e9"])  # a slow machine must not stop for time first
memory.profile(compose(["task=memory", "scale=smoke", "task.lengths=[64]"]))  # imports done
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))  # as `ulimit -v`
foreseen = memory.profile(config).rows
memory.available_bytes = lambda budget, device: 2**60  # nothing foreseen: the allocator says no
refused = memory.profile(config).rows
print(json.dumps([foreseen, refused]))
"""


def test_under_ulimit_small_cells_are_measured_and_the_rest_is_marked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_ULIMIT], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    foreseen, refused = json.loads(done.stdout.splitlines()[-1])
    for rows in (foreseen, refused):
        measured = [r for r in rows if r["method"] == "measured"]
        assert [r["status"] for r in measured] == ["ok", "ok", "OOM", "OOM"], measured
        assert [r["reached"] for r in measured[2:]] == [512, 512]
        assert all(r["peak_bytes"] == r["simulated_bytes"] for r in measured[:2])
    assert "needs" in foreseen[-1]["reason"]
    assert "memory" in refused[-1]["reason"]


def test_errors_that_are_not_about_memory_are_not_taken_for_it() -> None:
    def build() -> Subject:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        memory.measure(build, CPU)
    assert memory.is_out_of_memory(MemoryError())
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(memory.OutOfMemory):
        memory.measure(lambda: Subject(nn.Identity(), (torch.empty(2**60),), None), CPU)


class DataDependent(Mixer):
    """Picks rows by value: its memory cannot be told without the data."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * (x[x > 0].shape[0] + 1)


def test_a_mixer_that_cannot_be_simulated_is_measured_all_the_same() -> None:
    rows = rows_of(f"{__name__}.DataDependent", "task.lengths=[64,128]", "task.scopes=[layer]",
                   "task.passes=[forward]")  # fmt: skip
    simulated, measured = ([r for r in rows if r["method"] == m] for m in ("simulated", "measured"))
    assert [r["status"] for r in simulated] == ["unavailable"] * 2
    assert [r["status"] for r in measured] == ["ok"] * 2
    assert all(r["peak_bytes"] > 0 and r["simulated_bytes"] is None for r in measured)


class DrawsASeed(Mixer):
    """Reads a random number in its constructor, as random-feature mixers do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seed = int(torch.randint(1000, ()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * self.scale


def test_a_constructor_may_read_a_number_it_drew() -> None:
    rows = rows_of(f"{__name__}.DrawsASeed", "task.lengths=[64]", "task.scopes=[layer]")
    assert {r["status"] for r in rows} == {"ok"}


def test_cells_that_would_take_too_long_are_marked_not_run() -> None:
    rows = rows_of("mha", "task.lengths=[64,128,256,512]", "task.scopes=[layer]",
                   "task.passes=[forward]", "task.cell_seconds=0")  # fmt: skip
    measured = [r for r in rows if r["method"] == "measured"]
    assert [r["status"] for r in measured] == ["ok", "ok", "time", "time"]
    assert measured[-1]["reached"] == 128


def test_all_measured_calls_share_the_seconds_of_the_cell_and_the_cheapest_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[tuple[int, bool]] = []

    def measure(build: Callable[[], Subject], device: torch.device) -> memory.Footprint:
        subject = build()
        length, backward = subject.inputs[0].shape[1], subject.gradient is not None
        order.append((length, backward))
        return memory.Footprint(1, 1, 1, 1, 1, seconds=length / 64 * (3 if backward else 1))

    monkeypatch.setattr(memory, "measure", measure)
    # Forward 1 + 2 + 4 + 8 s, backward three times as much: 15 + 3 + 6 + 12 fit into 40 s.
    rows = rows_of(
        "sdpa", "task.lengths=[64,128,256,512]", "task.scopes=[layer]", "task.cell_seconds=40"
    )
    measured = [r for r in rows if r["method"] == "measured"]
    assert [r["status"] for r in measured] == [*["ok"] * 7, "time"]
    assert measured[-1]["reason"] == "would take 24 s, of 4 s left to the cell"
    assert order == [(64, False), (128, False), (64, True), (128, True),
                     (256, False), (512, False), (256, True)]  # fmt: skip


def test_cuda_is_refused_by_a_build_without_it() -> None:
    from gma_bench.errors import SettingError

    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch has CUDA")
    with pytest.raises(SettingError, match=r"task\.device=cpu"):
        memory.profile(compose(["task=memory", "scale=smoke", "task.device=cuda"]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_allocator_and_the_simulation_agree() -> None:
    config = compose(["task=memory", "scale=smoke", "mixer=linear_transformer", "task.device=cuda",
                      "task.scopes=[layer]", "task.lengths=[4096,16384]"])  # fmt: skip
    measured = [r for r in memory.profile(config).rows if r["method"] == "measured"]
    assert measured
    for row in measured:
        assert row["peak_bytes"] == pytest.approx(row["simulated_bytes"], rel=0.1)
