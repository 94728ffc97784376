"""A cell: one record, the same figures again, nothing lost when it fails or is stopped."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gma_bench.cli import main
from gma_bench.errors import UserError
from gma_bench.results import load, read_all
from gma_bench.run.execute import run_cell

Record = dict[str, Any]


def figures(record: Record) -> Record:
    return {k: record[k] for k in ("value", "metrics", "parameters", "data", "config", "curves")}


def fresh(overrides: list[str], folder: Path) -> list[str]:
    return [*overrides, f"results_dir={folder}"]


def test_the_same_cell_gives_the_same_figures_to_the_last_digit(
    tiny: list[str], tmp_path: Path
) -> None:
    first = run_cell(fresh(tiny, tmp_path / "a"))
    second = run_cell(fresh(tiny, tmp_path / "b"))
    assert first["status"] == "finished", first["error"]
    assert figures(first) == figures(second)
    other = run_cell([*fresh(tiny, tmp_path / "b"), "seed=1"])
    assert other["curves"]["train_loss"] != first["curves"]["train_loss"]
    assert other["data"]["fingerprint"] == first["data"]["fingerprint"]


def test_the_command_in_a_record_gives_the_record_again(tiny: list[str], tmp_path: Path) -> None:
    record = run_cell(tiny)
    words = shlex.split(record["command"])
    assert words[:2] == ["gma-bench", "run"]
    where = [o for o in tiny if o.startswith("cache_dir=")]
    again = run_cell([*words[2:], *where, f"results_dir={tmp_path / 'again'}"])
    assert again["run_id"] == record["run_id"]
    assert figures(again) == figures(record)


def test_the_evaluation_batch_changes_no_figure(tiny: list[str]) -> None:
    values = [
        run_cell([*tiny, f"training.eval_batch_size={size}"])["metrics"] for size in (1, 7, 64)
    ]
    assert values[0] == values[1] == values[2]


def test_buckets_change_no_test_figure_of_the_same_model(tiny: list[str]) -> None:
    one, two = (
        run_cell([*tiny, "training.steps=1", "training.lr=1e-30", f"training.bucket_by_length={b}"])
        for b in (True, False)
    )
    assert one["metrics"]["test"] == two["metrics"]["test"]


def test_a_finished_cell_is_skipped(tiny: list[str]) -> None:
    first = run_cell(tiny)
    second = run_cell(tiny)
    assert second["skipped"]
    assert second["finished_at"] == first["finished_at"]
    assert "skipped" not in run_cell([*tiny, "rerun=true"])


def test_the_best_validation_step_is_reported_and_kept(tiny: list[str]) -> None:
    record = run_cell(tiny)
    curves = record["curves"]
    best = max(curves["val_accuracy"])
    assert record["metrics"]["val"]["accuracy"] == best
    assert record["extra"]["best_step"] == curves["val_step"][curves["val_accuracy"].index(best)]
    assert record["value"] == record["metrics"]["test"]["accuracy"]


def test_load_gives_a_row_a_run(tiny: list[str], tmp_path: Path) -> None:
    run_cell(tiny)
    run_cell([*tiny, "mixer=sdpa"])
    frame = load(tmp_path / "results", scale="smoke")
    assert list(frame.mixer) == ["gma", "sdpa"]
    assert set(frame.metric) == {"accuracy"}
    assert (frame["test/accuracy"] == frame.value).all()
    assert frame.fingerprint.nunique() == 1
    assert load(tmp_path / "results", scale="mini").empty


def test_a_users_mistake_writes_nothing(tiny: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError):
        run_cell([*tiny, "mixer._target_=no_such.Mixer"], keep_failure=False)
    assert not [path for path in (tmp_path / "results").rglob("*") if path.is_file()]


def test_a_bad_data_file_is_one_line_with_the_override_that_mends_it(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "val", "test"):
        (folder / f"basic_{split}.tsv").write_text("Source\tTarget\n[MAX 1 2 ]\t1\n")
    assert main(["run", *tiny, f"task.data_dir={folder}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gma-bench: task.data_dir={folder}: {folder}/basic_train.tsv, line 2")
    assert line.endswith("or task.source=embedded task.data_dir=null")


def test_a_model_too_large_for_memory_is_one_line_with_what_makes_it_smaller(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *tiny, "model.d_model=10000000"]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    (line,) = [line for line in said.out.splitlines() if "out of memory" in line]
    assert "GiB more did not fit" in line
    assert "smaller: model.d_model=10000000, model.num_layers=1" in line
    (record,) = (tmp_path / "results").rglob("*.json")
    assert "Traceback" in json.loads(record.read_text())["error"]["traceback"]


def test_a_failure_in_a_sweep_is_a_record(tiny: list[str], tmp_path: Path) -> None:
    record = run_cell([*tiny, "mixer._target_=no_such.Mixer"])
    assert record["status"] == "failed"
    assert "no_such" in record["error"]["message"]
    again = run_cell([*tiny, "mixer._target_=no_such.Mixer"])
    assert "skipped" not in again


def test_a_loss_that_diverges_stops_the_cell_with_its_step(tiny: list[str]) -> None:
    record = run_cell([*tiny, "training.lr=1e30", "training.clip=0", "training.schedule=constant"])
    assert record["status"] == "diverged"
    assert 1 < record["error"]["step"] <= 12
    assert run_cell([*tiny, "training.lr=1e30", "training.clip=0", "training.schedule=constant"])[
        "skipped"
    ]


@pytest.mark.parametrize("damage", ["cut", "altered", "empty"])
def test_a_broken_record_is_run_again_and_left_out(
    tiny: list[str], tmp_path: Path, damage: str
) -> None:
    record = run_cell(tiny)
    (path,) = (tmp_path / "results/smoke/runs").glob("*.json")
    text = path.read_text()
    path.write_text(
        {
            "cut": text[: len(text) // 2],
            "altered": text.replace('"schema": 1', '"schema": 9'),
            "empty": "",
        }[damage]
    )
    found, broken = read_all(tmp_path / "results")
    assert found == []
    assert len(broken) == 1
    assert figures(run_cell(tiny)) == figures(record)


def test_wandb_keeps_one_closed_run_a_cell(tiny: list[str], tmp_path: Path) -> None:
    words = [o for o in tiny if o != "logger=none"]
    for mixer in ("gma", "sdpa"):
        record = run_cell([*words, f"mixer={mixer}", "logger=wandb"])
        assert record["status"] == "finished", record["error"]
    runs = list((tmp_path / "results/smoke/artifacts").glob("*/wandb/offline-run-*/*.wandb"))
    assert len(runs) == 2
    import wandb

    assert wandb.run is None


def test_the_csv_logger_writes_the_curves(tiny: list[str], tmp_path: Path) -> None:
    words = [o for o in tiny if o != "logger=none"]
    run_cell([*words, "logger=csv"])
    (file,) = (tmp_path / "results/smoke/artifacts").rglob("metrics.csv")
    assert "train/loss" in file.read_text().splitlines()[0]


# --- stopping and going on --------------------------------------------------------------------

STOP_AFTER = """
import sys, os, signal
from gma_bench.cli import main
from gma_bench.train import training

count = 0
original = training.TrainingModule.training_step

def stop(self, batch, batch_idx):
    global count
    count += 1
    if count == int(sys.argv[1]):
        os.kill(os.getpid(), int(sys.argv[2]))
    return original(self, batch, batch_idx)

training.TrainingModule.training_step = stop
sys.exit(main(["run", *sys.argv[3:]]))
"""


def stop_after(step: int, signum: int, overrides: list[str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", STOP_AFTER, str(step), str(signum), *overrides]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("signum", "step", "code", "workers"),
    [
        (signal.SIGTERM, 6, 143, 0), (signal.SIGINT, 4, 130, 0), (signal.SIGKILL, 7, -9, 0),
        (signal.SIGTERM, 6, 143, 2),
    ],
    ids=["SIGTERM", "SIGINT at a validation", "SIGKILL", "SIGTERM with loader workers"],
)  # fmt: skip
def test_a_stopped_run_ends_as_an_uninterrupted_one(
    tiny: list[str], tmp_path: Path, signum: int, step: int, code: int, workers: int
) -> None:
    whole = run_cell(fresh(tiny, tmp_path / "whole"))
    words = [
        *fresh(tiny, tmp_path / "parts"), "training.checkpoint_minutes=0",
        f"training.num_workers={workers}",
    ]  # fmt: skip
    done = stop_after(step, signum, words)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "parts").rglob("runs/*.json"))
    (point,) = (tmp_path / "parts/smoke/resume").glob("*.ckpt")
    record = run_cell(words)
    assert figures(record) == figures(whole)
    assert not point.exists()


def test_a_damaged_resume_point_is_named_and_not_used(tiny: list[str], tmp_path: Path) -> None:
    whole = run_cell(fresh(tiny, tmp_path / "whole"))
    words = [*fresh(tiny, tmp_path / "parts"), "training.checkpoint_minutes=0"]
    stop_after(7, signal.SIGKILL, words)
    (point,) = (tmp_path / "parts/smoke/resume").glob("*.ckpt")
    content = bytearray(point.read_bytes())
    content[len(content) // 2] ^= 1
    point.write_bytes(content)
    with pytest.warns(UserWarning, match=point.name):
        record = run_cell(words)
    assert figures(record) == figures(whole)


def test_two_processes_on_one_cell_end_with_one_record(tiny: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gma_bench.cli", "run", *tiny]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert sum("skipped" in text for text in said) == 1
    (path,) = (tmp_path / "results/smoke/runs").iterdir()
    assert json.loads(path.read_text())["status"] == "finished"


def test_a_results_folder_that_cannot_be_written_is_one_line(
    tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    words = [sys.executable, "-m", "gma_bench.cli", "run", *fresh(tiny, tmp_path / "file")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_clock_that_is_set_back_does_no_harm(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 86_400 * (os.getpid() % 7 + 1))
    record = run_cell(tiny)
    assert record["status"] == "finished"
    assert record["duration_s"] > 0


def test_a_mixer_renamed_on_the_command_line_is_given_again_by_its_command(
    tiny: list[str], tmp_path: Path
) -> None:
    kept = [o for o in tiny if not o.startswith("mixer=")]
    record = run_cell([*kept, "training.steps=2", "mixer.name=gma_ours"])
    assert record["mixer"] == "gma_ours"
    words = shlex.split(record["command"])[2:]
    assert "mixer=gma" in words
    assert "mixer=gma_ours" not in words
    again = run_cell([*words, "logger=none", f"results_dir={tmp_path / 'again'}"])
    assert again["run_id"] == record["run_id"]


@pytest.mark.parametrize(
    "left_over",
    [{"SLURM_PROCID": "1"}, {"RANK": "1"}, {"LOCAL_RANK": "1"}, {"SLURM_NTASKS": "4"}],
)
def test_ranks_left_in_the_environment_are_not_a_single_devices(
    tiny: list[str], left_over: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gma_bench.cli", "run", *tiny, "training.steps=2"],
        env={**os.environ, **left_over}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    folder = next(o for o in tiny if o.startswith("results_dir=")).partition("=")[2]
    assert len(read_all(folder)[0]) == 1
