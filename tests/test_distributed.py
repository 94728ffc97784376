"""One cell on two processes gives the figures of one process with the same global batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(overrides: list[str], folder: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "gma_bench.cli", "run", *overrides, f"results_dir={folder}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.glob("smoke/runs/*.json")
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["listops", "wikitext103"])
def test_two_processes_agree_with_one(task: str, tiny: list[str], tmp_path: Path) -> None:
    overrides = [o for o in tiny if not o.startswith(("task", "trainer"))] + [f"task={task}"]
    if task == "listops":
        # 71 test examples and batches of 5: sizes that divide by nothing
        overrides += [o for o in tiny if o.startswith("task.")]
        overrides += ["task.num_test=71", "training.eval_batch_size=5"]
    overrides += ["model.dropout=0"]  # each rank draws its own mask
    one = run([*overrides, "trainer=cpu"], tmp_path / "one")
    two = run([*overrides, "trainer=ddp", "trainer.accelerator=cpu"], tmp_path / "two")
    assert two["curves"]["train_loss"] == pytest.approx(one["curves"]["train_loss"], rel=1e-4)
    for split in ("val", "test"):
        assert two["metrics"][split] == pytest.approx(one["metrics"][split], rel=2e-4), split


def test_a_batch_that_ranks_cannot_share_is_named(tiny: list[str]) -> None:
    from gma_bench.cell import run_cell
    from gma_bench.errors import SettingError

    with pytest.raises(SettingError, match=r"training\.batch_size=7"):
        run_cell([*tiny, "training.batch_size=7", "trainer.devices=2"], keep_failure=False)
