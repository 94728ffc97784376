"""A step is one thing: its examples, loss, dropout and validations, however it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from omegaconf import OmegaConf
from torch import Tensor

from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer
from gma_bench.run.compose import compose
from gma_bench.run.execute import identify, run_cell
from gma_bench.task.loading import TrainingBatches
from gma_bench.train import training
from gma_bench.train.training import validation_steps

Record = dict[str, Any]


def run(*overrides: str) -> Record:
    record = run_cell(list(overrides))
    assert record["status"] == "finished", record["error"]
    return record


@pytest.fixture
def recall(tiny: list[str]) -> list[str]:
    """Rows of 1, 2 and 4 pairs: as many targets, so that a mean of means is another loss."""
    kept = [o for o in tiny if not o.startswith(("task", "model.dropout"))]
    return [
        "task=mqar", *kept, "task.num_pairs=[1,2,4]", "task.max_length=16", "task.vocab_size=32",
        "task.num_train=90", "task.num_val=30", "task.num_test=30",
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_change_no_step_where_rows_have_several_numbers_of_targets(
    recall: list[str], parts: int
) -> None:
    whole, cut = run(*recall), run(*recall, f"training.accumulate={parts}")
    for name in ("train_loss", "val_accuracy", "lr", "step", "val_step"):
        assert whole["curves"][name] == pytest.approx(cut["curves"][name], rel=1e-5), name
    assert cut["tokens_per_s"] > 0


@pytest.mark.parametrize("bucket", ["true", "false"])
def test_parts_change_neither_examples_nor_loss(tiny: list[str], bucket: str) -> None:
    tiny = [*tiny, "model.dropout=0", f"training.bucket_by_length={bucket}"]
    whole, cut = run(*tiny), run(*tiny, "training.accumulate=2")
    assert whole["curves"]["train_loss"] == pytest.approx(cut["curves"]["train_loss"], rel=1e-4)


@pytest.mark.parametrize("lengths", [None, np.arange(50) % 7])
def test_ranks_and_parts_share_a_steps_examples(lengths: np.ndarray | None) -> None:
    whole = TrainingBatches(50, 12, 70, 3, lengths=lengths)
    ranks = [
        list(TrainingBatches(50, 12, 70, 3, rank=r, world_size=2, parts=3, lengths=lengths))
        for r in range(2)
    ]
    for i, step in enumerate(whole):
        shares = [part for rank in ranks for part in rank[3 * i : 3 * i + 3]]
        assert {len(s) for s in shares} == {2}
        assert sorted(x for s in shares for x in s) == sorted(step)


def test_loader_workers_change_no_figure(tiny: list[str]) -> None:
    assert "model.dropout=0.1" in tiny
    alone = run(*tiny)
    beside = run(*tiny, "training.num_workers=2", "rerun=true")
    assert beside["run_id"] == alone["run_id"]
    assert beside["curves"] == alone["curves"]
    assert beside["metrics"] == alone["metrics"]


@pytest.mark.parametrize(
    ("steps", "asked", "wanted"),
    [
        (10, 3, {3, 7, 10}),
        (100, 51, None),
        (5, 3, {2, 3, 5}),
        (350, 5, {70, 140, 210, 280, 350}),
        (2, 9, {1, 2}),
    ],
)
def test_validations_are_as_many_as_asked_and_the_last_is_at_the_end(
    steps: int, asked: int, wanted: set[int] | None
) -> None:
    found = validation_steps(OmegaConf.create({"steps": steps, "evaluations": asked}))
    assert len(found) == min(steps, asked)
    assert max(found) == steps
    assert wanted is None or found == wanted


def test_no_validation_within_a_step(tiny: list[str]) -> None:
    record = run(*tiny, "training.steps=5", "training.evaluations=3", "training.accumulate=4")
    assert record["curves"]["val_step"] == [2, 3, 5]


def test_logits_that_are_not_finite_make_no_figure(tiny: list[str]) -> None:
    """The loss of the only step is finite; what it leaves behind is not."""
    record = run_cell([
        *tiny, "training.steps=1", "training.warmup=0", "training.lr=1e18", "mixer=sdpa",
        "training.evaluations=1",
    ])  # fmt: skip
    assert record["status"] == "diverged"
    assert record["value"] is None
    assert "val logits" in record["error"]["message"]


class NoParameters(Mixer):
    """A control: position-wise, with nothing to learn."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x * mask[..., None]

    def init_state(self, batch_size: int) -> dict[str, Any]:
        return {"position": torch.zeros((), dtype=torch.long)}

    def step(self, x_t: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return x_t, {"position": state["position"] + 1}


def test_a_mixer_without_parameters_keeps_its_figures(
    recall: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "controls", sys.modules[__name__])
    target = "mixer._target_=controls.NoParameters"
    record = run(*[o for o in recall if not o.startswith("mixer=")], target)
    assert record["value"] is not None
    assert record["extra"]["process_peak_bytes"] > 50 << 20


def test_the_rate_in_a_curve_is_the_one_the_step_used(tiny: list[str]) -> None:
    record = run(*tiny, "training.lr=0.01", "training.warmup=0.25", "training.steps=12")
    rates = dict(zip(record["curves"]["step"], record["curves"]["lr"], strict=True))
    assert rates[1] == pytest.approx(0.01 / 3)
    assert rates[3] == pytest.approx(0.01)


def test_float16_is_refused_on_a_cpu(tiny: list[str]) -> None:
    with pytest.raises(SettingError, match=r"trainer\.precision.*16-mixed.*bf16-mixed"):
        run_cell([*tiny, "trainer.precision=16-mixed"], keep_failure=False)


def test_the_heap_is_given_back_now_and_then(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(training, "trim_heap", lambda: calls.append(1))
    monkeypatch.setattr(training, "TRIM_STEPS", 4)
    run(*tiny)
    assert len(calls) == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_stays_flat_over_batches_of_ever_new_lengths(tmp_path: Path) -> None:
    """Resident memory after 1,200 steps is within 10 % of that after 300."""
    seen: dict[int, int] = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step in (300, 1200):
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                seen[trainer.global_step] = pages

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    config = compose([
        "task=text", "mixer=gma", "scale=mini", "trainer=cpu", "logger=none",
        f"results_dir={tmp_path}", f"cache_dir={tmp_path}/cache", "training.steps=1200",
        "training.evaluations=1", "training.test=false",
    ])  # fmt: skip
    identify(config)
    training.train(config, [Watch()])
    assert seen[1200] < 1.1 * seen[300]
