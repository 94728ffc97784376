"""What a queue sends before it takes a job away: the resume point is written, then the job is queued again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gma_bench.results import read_all
from gma_bench.run.execute import run_cell

TAKEN = """
import os
from pathlib import Path
from gma_bench.mixer.gma import GaussianMixtureAttention

class Taken(GaussianMixtureAttention):
    '''Its sixth training step is when the queue wants the machine back; once.'''
    steps = 0

    def forward(self, x, mask=None):
        flag = Path(os.environ["TAKEN_FLAG"])
        Taken.steps += self.training
        if Taken.steps == 6 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), int(os.environ["TAKEN_SIGNAL"]))
        return super().forward(x, mask)
"""
SAME = ("value", "metrics", "curves", "parameters")


@pytest.fixture
def taken(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cell that a signal reaches at its sixth step, unless ``flag`` exists."""
    (tmp_path / "taken.py").write_text(TAKEN)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TAKEN_FLAG", str(tmp_path / "flag"))
    mixer = ["mixer=external", "mixer._target_=taken.Taken"]
    return [o for o in tiny if not o.startswith("mixer=")] + mixer


def uninterrupted(overrides: list[str], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "flag").touch()
    record = run_cell([*overrides, f"results_dir={tmp_path / 'whole'}"])
    (tmp_path / "flag").unlink()
    assert record["status"] == "finished", record["error"]
    return record


def test_lightning_requeues_a_slurm_job_which_goes_on(
    taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uninterrupted(taken, tmp_path)
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        f"ls {tmp_path}/results/smoke/resume >> {tmp_path}/asked\n"
    )
    scontrol.chmod(0o755)
    slurm = {
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}", "TAKEN_SIGNAL": str(int(signal.SIGUSR1)),
        "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "cell", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "1",
    }  # fmt: skip
    words = [sys.executable, "-m", "gma_bench.cli", "run", *taken]

    def job() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=120, env=os.environ | slurm
        )

    first = job()
    assert first.returncode == 128 + signal.SIGUSR1, first.stderr[-2000:]
    assert "goes on from here" in first.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "requeue 4711"
    assert asked[1].endswith(".ckpt")  # it was there when the job was queued again
    assert not list(tmp_path.rglob("hpc_ckpt*"))
    second = job()
    assert second.returncode == 0, second.stderr[-2000:]
    (record,), _ = read_all(tmp_path / "results")
    assert all(record[key] == whole[key] for key in SAME)


@pytest.mark.slow
def test_submitit_checkpoints_a_job_which_goes_on(
    taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """submitit's local executor sends what its Slurm executor has Slurm send."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    whole = uninterrupted(taken, tmp_path)
    monkeypatch.setenv("TAKEN_SIGNAL", str(int(signal.SIGUSR2)))
    words = ["run", "-m", *taken, "hydra/launcher=submitit_local"]
    done = subprocess.run(
        [sys.executable, "-m", "gma_bench.cli", *words],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "flag").exists()
    logs = "".join(p.read_text() for p in (tmp_path / "results").rglob("*_log.*"))
    assert "preempted" in logs
    (record,), _ = read_all(tmp_path / "results")
    assert record["status"] == "finished", record["error"]
    assert all(record[key] == whole[key] for key in SAME)
