"""Sweeps through Hydra's launchers: each cell once, a failed one takes no other along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gma_bench.errors import MissingExtra, SettingError, UserError
from gma_bench.results import load
from gma_bench.run.launch import expand, launch, sweep

LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra.launcher.n_jobs=2"],
    "submitit_local": [],
    "ray": ["hydra.launcher.ray.remote.num_gpus=0", "+hydra.launcher.ray.init.num_cpus=2"],
}


def test_a_sweep_is_the_product_of_its_values() -> None:
    jobs = expand(["mixer=gma,sdpa", "seed=0,1", "scale=smoke"])
    assert sorted(jobs) == sorted(
        [f"mixer={m}", f"seed={s}", "scale=smoke"] for m in ("gma", "sdpa") for s in (0, 1)
    )


def test_nothing_runs_when_one_job_is_wrong(tiny: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="gmaa"):
        launch([[*tiny, "seed=0"], [*tiny, "mixer=gmaa"]])
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "launcher",
    [
        "basic",
        "joblib",
        pytest.param("submitit_local", marks=pytest.mark.slow),
        pytest.param("ray", marks=pytest.mark.slow),
    ],
)
def test_each_launcher_runs_every_cell_and_survives_a_failed_one(
    tiny: list[str], tmp_path: Path, launcher: str
) -> None:
    if launcher in ("ray", "submitit_local"):
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    overrides = [o for o in tiny if not o.startswith("mixer=")]
    words = [*overrides, "mixer=gma,sdpa", "model.positions=learned", f"hydra/launcher={launcher}"]
    broken = [*overrides, "mixer._target_=no_such.Mixer"]
    script = (
        "import sys\n"
        "from gma_bench.run.launch import expand, launch\n"
        "split = sys.argv.index('--')\n"
        "hydra = [w for w in sys.argv[1:split] if w.lstrip('+').startswith('hydra')]\n"
        "jobs = expand([w for w in sys.argv[1:split] if w not in hydra])\n"
        "failed = launch([*jobs, ['mixer=external', *sys.argv[split + 1:]]], hydra)\n"
        "assert len(failed) == 1, failed\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words, *LAUNCHERS[launcher], "--", *broken],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    frame = load(tmp_path / "results")
    assert sorted(frame.status) == ["failed", "finished", "finished"]
    assert sorted(frame[frame.status == "finished"].mixer) == ["gma", "sdpa"]


def test_the_exit_code_of_a_sweep_tells_a_failure(tiny: list[str]) -> None:
    assert sweep([*tiny, "training.steps=1,2"]) == 0
    assert sweep([*tiny, "training.lr=1e30", "training.clip=0", "training.schedule=constant"]) == 1


def test_an_unknown_launcher_is_named(tiny: list[str]) -> None:
    with pytest.raises(SettingError, match="joblib"):
        launch([tiny], ["hydra/launcher=jobli"])


def test_a_missing_launcher_names_its_extra(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gma_bench.run.launch._installed", lambda module: False)
    with pytest.raises(MissingExtra, match=r"gma-bench\[slurm\]"):
        launch([tiny], ["hydra/launcher=submitit_slurm"])


def test_ray_without_a_gpu_says_how_to_go_on(tiny: list[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="num_gpus=0"):
        launch([tiny], ["hydra/launcher=ray"])
