"""Faults from outside: whatever happens, nothing that was finished is lost and nothing wrong is used."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gma_bench.results import load, read_all
from gma_bench.run.execute import run_cell

ROOT = Path(__file__).resolve().parent.parent
SAME = ("value", "metrics", "curves", "parameters", "data")


def command(overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "gma_bench.cli", "run", *overrides]


def elsewhere(overrides: list[str], folder: Path) -> list[str]:
    return [*overrides, f"results_dir={folder / 'results'}", f"cache_dir={folder / 'cache'}"]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in SAME)


@pytest.mark.slow
def test_kill_at_ten_random_moments_costs_no_figure(tiny: list[str], tmp_path: Path) -> None:
    """Building the cache, training, checkpointing, writing the record: wherever it hits."""
    longer = [*tiny, "training.steps=40", "training.checkpoint_minutes=0"]
    start = time.monotonic()
    whole = subprocess.run(command(elsewhere(longer, tmp_path / "whole")), check=True, timeout=200)
    seconds = time.monotonic() - start
    assert whole.returncode == 0
    expected = run_cell(elsewhere(longer, tmp_path / "whole"))
    assert expected["skipped"]
    moments = random.Random(0)
    words = elsewhere(longer, tmp_path / "killed")
    for _ in range(10):
        process = subprocess.Popen(
            command(words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(moments.uniform(0.2, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        _, broken = read_all(tmp_path / "killed/results")
        assert broken == []
    record = run_cell(words)
    assert record["status"] == "finished"
    assert same(record, expected)


def test_a_disk_that_fills_up_leaves_nothing_half_written(tiny: list[str], tmp_path: Path) -> None:
    words = elsewhere([*tiny, "model.d_model=64"], tmp_path)
    limit = 30_000  # bytes a file: the data fit, a checkpoint does not
    done = subprocess.run(
        command(words), capture_output=True, text=True, check=False, timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("runs/*.json"))
    assert run_cell(words)["status"] == "finished"


def test_no_room_is_said_before_the_start(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    from gma_bench.errors import UserError

    with pytest.raises(UserError, match="MiB free"):
        run_cell(tiny, keep_failure=False)
    assert not list(tmp_path.rglob("*.json"))


def test_a_cache_that_was_altered_is_rebuilt(tiny: list[str], tmp_path: Path) -> None:
    words = elsewhere(tiny, tmp_path)
    expected = run_cell(words)
    (tokens,) = (tmp_path / "cache").rglob("tokens.npy")
    content = bytearray(tokens.read_bytes())
    content[-3] ^= 1
    tokens.write_bytes(content)
    with pytest.warns(UserWarning, match="tokens"):
        again = run_cell([*words, "rerun=true"])
    assert same(again, expected)


def test_a_data_file_changed_after_caching_is_new_data(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    operators = {
        "train": ("[MAX", max),
        "val": ("[MIN", min),
        "test": ("[SM", lambda *v: sum(v) % 10),
    }
    for split, (symbol, value) in operators.items():  # no expression in two splits
        rows = [
            f"( ( ( {symbol} {a} ) {b} ) ] )\t{value(a, b)}\n" for a in range(10) for b in range(10)
        ]
        order = np.random.default_rng(len(split)).permutation(len(rows))
        text = "Source\tTarget\n" + "".join(rows[i] for i in order)
        (folder / f"basic_{split}.tsv").write_text(text)
    words = [o for o in tiny if not o.startswith("task.num")]
    words += ["task.source=local", f"task.data_dir={folder}"]
    first = run_cell(words)
    assert first["status"] == "finished", first["error"]
    path = folder / "basic_test.tsv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:51]))
    second = run_cell(words)
    assert "skipped" not in second
    assert second["run_id"] != first["run_id"]
    assert second["data"]["fingerprint"] != first["data"]["fingerprint"]


def test_a_loader_process_that_fails_is_a_failed_cell(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.listops import ListOps

    def broken(self: ListOps, examples: list[Any]) -> Any:
        raise RuntimeError("a worker's trouble")

    monkeypatch.setattr(ListOps, "collate", broken)
    record = run_cell([*tiny, "training.num_workers=1"])
    assert record["status"] == "failed"
    assert "a worker's trouble" in record["error"]["message"]


def test_a_loader_process_that_hangs_is_a_failed_cell_and_the_sweep_goes_on(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gma_bench.run.launch import launch
    from tasks.listops import ListOps

    started, collate = time.monotonic(), ListOps.collate

    def hang(self: ListOps, examples: list[Any]) -> Any:
        if self.num_workers:
            time.sleep(3600)
        return collate(self, examples)

    monkeypatch.setattr(ListOps, "collate", hang)
    hung = [*tiny, "training.num_workers=1", "training.worker_timeout_s=2"]
    failed = launch([[*hung, "seed=1"], [*tiny, "seed=2"]], ["hydra/launcher=basic"])
    assert time.monotonic() - started < 300
    records, _ = read_all(tmp_path / "results")
    assert [(r["seed"], r["status"]) for r in records] == [(1, "failed"), (2, "finished")]
    assert failed == [records[0]["run_id"]]
    assert "timed out after 2 seconds" in records[0]["error"]["message"]


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A file system of its own over ``folder``; only root may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


FILLS = """
import os
from pathlib import Path
from gma_bench.mixer.gma import GaussianMixtureAttention

class Fills(GaussianMixtureAttention):
    # Somebody else fills the disk at the sixth training step, unless it was full before.
    steps = 0

    def forward(self, x, mask=None):
        Fills.steps += self.training
        rubbish = Path(os.environ["RUBBISH"])
        if Fills.steps == 6 and not rubbish.exists():
            with rubbish.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                except OSError:
                    pass
        return super().forward(x, mask)
"""


@pytest.mark.slow
def test_a_disk_that_others_fill_costs_no_finished_record(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fills.py").write_text(FILLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    results = tmp_path / "results"
    rubbish = results / "rubbish"
    monkeypatch.setenv("RUBBISH", str(rubbish))
    words = [o for o in tiny if not o.startswith("mixer=")]
    words += ["mixer=external", "mixer._target_=fills.Fills", "training.checkpoint_minutes=0"]
    with mounted(results, "-o", "size=100m"):
        done_before = run_cell(tiny)
        done = subprocess.run(
            command(words), capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 2, done.stderr
        assert "No space left on device" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert rubbish.exists()
        assert not list(results.rglob("*.tmp"))
        rubbish.write_bytes(b"")
        records, broken = read_all(results)
        assert [r["run_id"] for r in records] == [done_before["run_id"]]
        assert broken == []
        assert list(results.rglob("resume/*.ckpt"))  # the last whole one
        resumed = run_cell(words)
        assert same(resumed, run_cell([*words, f"results_dir={tmp_path / 'whole'}"]))


def test_a_results_folder_for_reading_only_is_said_in_one_line_and_still_read(
    tiny: list[str], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    with mounted(results):
        record = run_cell(tiny)
        subprocess.run(["mount", "-o", "remount,ro", str(results)], check=True)
        done = subprocess.run(
            command([*tiny, "seed=7"]), capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert "Read-only file system" in done.stderr
        assert run_cell(tiny)["skipped"]  # what is finished needs no writing
        assert list(load(results).run_id) == [record["run_id"]]


def test_a_clock_that_is_set_back_all_the_time_changes_nothing(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durations are monotonic, locks know no time, and a record older than its start stands."""
    expected = run_cell(elsewhere(tiny, tmp_path / "whole"))
    now = [time.time()]

    def back() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", back)
    words = elsewhere(tiny, tmp_path / "back")
    lock = tmp_path / f"back/results/smoke/locks/{expected['run_id']}.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()  # left by a process that died, and from the future
    os.utime(lock, (4e9, 4e9))
    started = time.monotonic()
    record = run_cell(words)
    assert 0 < record["duration_s"] <= time.monotonic() - started
    assert record["tokens_per_s"] > 0
    assert same(record, expected)
    assert run_cell(words)["skipped"]


@pytest.mark.slow
def test_two_processes_that_build_one_cache_share_it(tiny: list[str], tmp_path: Path) -> None:
    both = [
        subprocess.Popen(command([*elsewhere(tiny, tmp_path), f"seed={seed}"])) for seed in (1, 2)
    ]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    frame = load(tmp_path / "results")
    assert list(frame.seed) == [1, 2]
    assert frame.fingerprint.nunique() == 1
    assert len(list((tmp_path / "cache").rglob("tokens.npy"))) == 1
    assert not list(tmp_path.rglob("*.tmp"))


STOP_IN_TEST = """
import os, signal, sys
from gma_bench.train import training
from gma_bench.cli import main

original = training.TrainingModule.test_step

def stop(self, batch, batch_idx):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(self, batch, batch_idx)

training.TrainingModule.test_step = stop
sys.exit(main(["run", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_stop_within_the_test_costs_no_training(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gma_bench.train.training import TrainingModule

    expected = run_cell(elsewhere(tiny, tmp_path / "whole"))
    words = elsewhere(tiny, tmp_path / "parts")
    done = subprocess.run(
        [sys.executable, "-c", STOP_IN_TEST, *words],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 128 + signal.SIGTERM, done.stderr

    def again(self: TrainingModule, *batch: Any) -> None:
        pytest.fail("trained a step again")

    monkeypatch.setattr(TrainingModule, "training_step", again)
    assert same(run_cell(words), expected)


DIE = """
import os, signal
from gma_bench.mixer import Mixer

class Deadly(Mixer):
    def __init__(self, d_model, num_heads, causal=False, max_length=None):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_worker_takes_no_other_cell_along(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DIE)
    deadly = ["mixer=external", *tiny, "mixer._target_=deadly.Deadly"]
    deadly.remove("mixer=gma")
    jobs = [deadly, *([*tiny, f"seed={s}"] for s in range(3))]
    script = (
        "import json, sys; from gma_bench.run.launch import launch\n"
        "failed = launch(json.loads(sys.argv[1]), ['hydra/launcher=joblib', 'hydra.launcher.n_jobs=2'])\n"
        "sys.exit(len(failed))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(jobs)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    frame = load(tmp_path / "results")
    assert sorted(frame.status) == ["failed", "finished", "finished", "finished"]
    assert list(frame[frame.status == "failed"].mixer) == ["deadly.Deadly"]


def test_an_interrupted_install_starts_over(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "requirements.lock", "requirements-dev.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)  # begun, not ended: no stamp
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # may run under make
    plan = subprocess.run(
        ["make", "-n", ".venv/.ready"],
        cwd=tmp_path, capture_output=True, text=True, check=True, env=alone,
    ).stdout  # fmt: skip
    assert "venv --clear" in plan
    steps = plan.splitlines()
    assert "touch .venv/.ready" in steps[-1]
