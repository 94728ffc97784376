"""What is installed from a wheel works without the checkout that it was built from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of a wheel, built from a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in ("gma_bench", "conf", "tasks", "baselines"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "results").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "results/paper.yaml"):
        shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", str(folder), str(copy),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("gma_bench-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HOME")}
    return subprocess.run(
        [sys.executable, "-m", "gma_bench.cli", *words], cwd=where, capture_output=True, text=True,
        env={**environment, "PYTHONPATH": str(installed), "HOME": "/nowhere", "PATH": "/nowhere"},
    )  # fmt: skip


def test_the_wheel_holds_configurations_and_the_papers_figures(installed: Path) -> None:
    for name in ("conf/config.yaml", "conf/task/listops.yaml", "paper/paper.yaml"):
        assert (installed / "gma_bench" / name).is_file()
    assert not list(installed.rglob("*.json")), "no record of a run"


def test_it_lists_runs_and_reports_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    """Without git, without a compiler, without a home that can be written to."""
    listed = run(installed, tmp_path, "list", "--names")
    assert listed.returncode == 0, listed.stderr
    assert "linear_transformer" in listed.stdout
    tiny = [
        "task=listops", "mixer=gma", "scale=smoke", "trainer=cpu", "logger=none",
        "training.steps=2", "task.num_train=60", "task.num_val=40", "task.num_test=40",
    ]  # fmt: skip
    done = run(installed, tmp_path, "run", *tiny)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    reported = run(installed, tmp_path, "report", "scale=smoke")
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "results" / "smoke" / "index.html").is_file()
