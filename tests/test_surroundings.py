"""What surrounds a run, a notebook's variables, a user's styles, odd folders, changes no figure and ends none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gma_bench import task
from gma_bench.cli import main
from gma_bench.errors import UserError
from gma_bench.results import load
from gma_bench.run.compose import compose, with_literal_paths
from gma_bench.run.execute import run_cell


def cli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gma_bench.cli", *words], capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_a_notebooks_backend_and_a_users_style_change_nothing(
    tiny: list[str], tmp_path: Path
) -> None:
    folder = next(o for o in tiny if o.startswith("results_dir="))
    style = tmp_path / "matplotlibrc"
    style.write_text("text.usetex: True\naxes.facecolor: red\n", encoding="utf-8")
    around = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline", "MATPLOTLIBRC": str(style),
    }  # fmt: skip
    done = cli("run", *tiny, "training.steps=2", **around)
    assert done.returncode == 0, done.stderr
    done = cli("report", "scale=smoke", folder, **around)
    assert done.returncode == 0, done.stderr
    figures = sorted(Path(folder.partition("=")[2]).rglob("*.svg"))
    assert figures
    styled = [f.read_bytes() for f in figures]
    for figure in figures:
        figure.unlink()
    stamp = Path(folder.partition("=")[2]) / "smoke"
    for file in stamp.glob("*.html"):
        file.unlink()
    assert cli("report", "scale=smoke", folder).returncode == 0
    assert [f.read_bytes() for f in figures] == styled


@pytest.mark.parametrize(
    "name", ["a#b", "a&b", "é", "a=b", "a{b", "a[b", "a(b", "p,1", "it's", "two words", "a~b"]
)
def test_a_results_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    config = compose([f"results_dir={tmp_path}/{name}", "scale=smoke"])
    assert config.results_dir == f"{tmp_path}/{name}"
    quoted = '"' + f"{tmp_path}/{name}" + '"'
    assert compose([f"results_dir={quoted}", "scale=smoke"]).results_dir == f"{tmp_path}/{name}"


@pytest.mark.parametrize("spelled", ["~/x", "'~/x'", '"~/x"'])
def test_a_tilde_is_ones_home(
    spelled: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose([f"results_dir={spelled}", "scale=smoke"]).results_dir == f"{tmp_path}/x"


def test_what_is_no_plain_path_is_left_to_hydra() -> None:
    kept = ["results_dir=null", "cache_dir=${results_dir}/c", "mixer=gma,sdpa", "task.data_dir="]
    assert with_literal_paths(kept) == kept


def test_an_empty_cache_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GMA_BENCH_CACHE", "")
    assert compose(["scale=smoke"]).cache_dir == ".cache/gma_bench"


def test_an_unknown_wandb_mode_is_one_line(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "foo")
    words = [o for o in tiny if not o.startswith("logger=")]
    assert main(["run", *words, "logger=wandb"]) == 2
    said = capsys.readouterr().err
    assert "WANDB_MODE=foo: must be one of online, offline, disabled" in said
    folder = next(o for o in tiny if o.startswith("results_dir=")).partition("=")[2]
    assert load(folder).empty


@pytest.mark.parametrize("around", [{"WANDB_DISABLED": "true"}, {"WANDB_MODE": "disabled"}])
def test_wandb_is_off_where_its_variables_say_so(
    tiny: list[str], around: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    words = [o for o in tiny if not o.startswith("logger=")]
    record = run_cell([*words, "logger=wandb", "training.steps=2"])
    assert record["status"] == "finished", record["error"]
    folder = next(o for o in tiny if o.startswith("results_dir=")).partition("=")[2]
    assert not list(Path(folder).rglob("*wandb*"))


def test_a_users_own_tasks_module_hides_none_of_ours(tiny: list[str], tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "tasks.py").write_text("MINE = 1\n", encoding="utf-8")
    (own / "mixers.py").write_text(
        "from gma_bench.mixer import Mixer\n"
        "class Mine(Mixer):\n"
        "    def forward(self, x, mask=None):\n"
        "        return x\n",
        encoding="utf-8",
    )
    words = [o for o in tiny if not o.startswith("mixer=")]
    path = os.pathsep.join([str(own), os.environ.get("PYTHONPATH", str(Path.cwd()))])
    done = cli("run", *words, "training.steps=2", "mixer._target_=mixers.Mine", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout


def test_too_little_shared_memory_is_named(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not task.SHARED_MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    usage = SimpleNamespace(total=4096, used=0, free=4096)
    real = shutil.disk_usage
    monkeypatch.setattr(
        task.shutil, "disk_usage", lambda p: usage if p == task.SHARED_MEMORY else real(p)
    )
    with pytest.raises(UserError, match=r"training\.num_workers=2: .*/dev/shm has 4 KiB free"):
        run_cell([*tiny, "training.num_workers=2"], keep_failure=False)
