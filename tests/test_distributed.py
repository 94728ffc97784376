"""One cell on two processes gives the figures of one process with the same global batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED = {"ddp": "trainer=ddp", "fsdp": "trainer=fsdp"}


def start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run to its end; ranks that wait for each other for ever are all ended, not the first alone."""
    process = subprocess.Popen(
        [sys.executable, *words, f"results_dir={folder}"], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def run(overrides: list[str], folder: Path) -> dict[str, Any]:
    done = start(["-m", "gma_bench.cli", "run", *overrides], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.glob("smoke/runs/*.json")
    return json.loads(path.read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The best checkpoint's, read as any torch file is."""
    (path,) = folder.glob("smoke/checkpoints/*.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def two(strategy: str) -> list[str]:
    return [SHARED[strategy], "trainer.accelerator=cpu"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("strategy", "task", "mixer"),
    [
        ("ddp", "listops", "gma"),
        ("ddp", "wikitext103", "gma"),
        ("fsdp", "listops", "gma"),
        ("fsdp", "listops", "linformer"),  # layers may share parameters
        ("fsdp", "wikitext103", "gma"),  # embedding and head share theirs
    ],
)
def test_two_processes_agree_with_one(
    strategy: str, task: str, mixer: str, tiny: list[str], tmp_path: Path
) -> None:
    overrides = [o for o in tiny if not o.startswith(("task", "trainer", "mixer"))]
    overrides += [f"task={task}", f"mixer={mixer}", "model.num_layers=2"]
    if task == "listops":
        # 71 test examples, 36 and 35 a rank, in batches of 5: sizes that divide by nothing
        overrides += [o for o in tiny if o.startswith("task.")]
        overrides += ["task.num_test=71", "training.eval_batch_size=5"]
    overrides += ["model.dropout=0"]  # each rank draws its own mask
    if mixer == "linformer":
        overrides += ["mixer.sharing=layerwise"]
    one = run([*overrides, "trainer=cpu"], tmp_path / "one")
    both = run([*overrides, *two(strategy)], tmp_path / "two")
    assert both["curves"]["train_loss"] == pytest.approx(one["curves"]["train_loss"], rel=1e-4)
    for split in ("val", "test"):
        assert both["metrics"][split] == pytest.approx(one["metrics"][split], rel=2e-4), split
    assert both["parameters"] == one["parameters"]
    assert both["extra"]["state_bytes"] == one["extra"]["state_bytes"]
    expected, got = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert list(got) == list(expected)
    assert {type(tensor) for tensor in got.values()} == {torch.Tensor}  # whole, whatever trained it
    apart = torch.cat([(got[name] - expected[name]).flatten() for name in got])
    assert apart.norm() <= 1e-3 * torch.cat([t.flatten() for t in expected.values()]).norm()


STOP = """
import os, signal, sys
from gma_bench.train import training
from gma_bench.cli import main

count = 0
original = training.TrainingModule.training_step

def stop(self, batch, batch_idx):
    global count
    count += 1
    if count == 6 and os.environ.get("LOCAL_RANK", "0") == os.environ["STOP_RANK"]:
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, batch, batch_idx)

training.TrainingModule.training_step = stop
sys.exit(main(["run", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("ddp", 1), ("fsdp", 0)])
def test_a_stopped_run_of_two_processes_goes_on_to_the_same_figures(
    strategy: str, rank: int, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is asked to stop, both do; each goes on from the step where both stopped."""
    overrides = [*(o for o in tiny if not o.startswith("trainer")), *two(strategy)]
    whole = run(overrides, tmp_path / "whole")
    script = tmp_path / "stop.py"
    script.write_text(STOP)
    monkeypatch.setenv("STOP_RANK", str(rank))
    done = start([str(script), *overrides], tmp_path / "parts")
    assert done.returncode == 143, done.stderr[-3000:]
    assert not list((tmp_path / "parts").rglob("runs/*.json"))
    record = run(overrides, tmp_path / "parts")
    assert record["value"] == whole["value"]
    if strategy == "ddp":  # to the last digit
        assert record["curves"] == whole["curves"]
    # FSDP gathers into buffers that lie elsewhere each time; sums then differ in their last digit.
    losses = [r["curves"]["train_loss"] for r in (record, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_parameter_with_two_names_is_not_sharded_wrongly() -> None:
    from gma_bench.errors import SettingError
    from gma_bench.train.sharding import shard

    module = torch.nn.Module()
    module.one = module.two = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(SettingError, match="trainer=ddp"):
        shard(module, None)  # type: ignore[arg-type]


def test_a_batch_that_ranks_cannot_share_is_named(tiny: list[str]) -> None:
    from gma_bench.errors import SettingError
    from gma_bench.run.execute import run_cell

    with pytest.raises(SettingError, match=r"training\.batch_size=7"):
        run_cell([*tiny, "training.batch_size=7", "trainer.devices=2"], keep_failure=False)
