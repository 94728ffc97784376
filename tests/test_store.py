"""Files are whole or absent, and a lock is held by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from gma_bench.errors import UserError
from gma_bench.results import store
from gma_bench.results.store import locked, require_disk, sha256_file, sha256_tree, write_atomic


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "file", "old")

    def half(file: BinaryIO) -> None:
        file.write(b"new, but")
        raise RuntimeError("died")

    with pytest.raises(RuntimeError):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    def full(file: BinaryIO) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_atomic(tmp_path / "file", full)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="MiB free"):
        require_disk(tmp_path / "deep" / "er", 1 << 60, "a test")


def test_the_digest_of_a_folder_follows_names_and_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = sha256_tree(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    second = sha256_tree(tmp_path)
    (tmp_path / "b").write_text("2")
    assert len({first, second, sha256_tree(tmp_path)}) == 3


def test_a_lock_is_held_by_one_process_and_dies_with_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from gma_bench.results.store import locked\n"
        "with locked(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with locked(tmp_path / "x", wait=False) as free:
        assert not free
    holder.kill()
    holder.wait()
    with locked(tmp_path / "x", wait=False) as free:
        assert free


def test_a_refusal_leaves_no_lock_file_and_no_second_holder(tmp_path: Path) -> None:
    """Who waited for a lock file that was taken away must not share what it guards with a new one."""
    script = (
        "import sys, time; from gma_bench.results.store import locked\n"
        "print('waits', flush=True)\n"
        "with locked(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    with contextlib.suppress(UserError), locked(tmp_path / "x"):
        waiting = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True
        )
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        time.sleep(0.2)
        raise UserError("no")
    try:
        assert waiting.stdout
        assert waiting.stdout.readline() == "held\n"
        with locked(tmp_path / "x", wait=False) as free:
            assert not free
    finally:
        waiting.kill()
        waiting.wait()
    with pytest.raises(UserError), locked(tmp_path / "x"):
        raise UserError("no")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre without ``-o flock``: to go on unlocked could damage a record."""

    def refused(file: object, flags: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(UserError, match="must support flock"), locked(tmp_path / "x"):
        pytest.fail("held a lock that is none")


def test_a_lock_file_that_was_left_behind_is_free_whatever_its_age(tmp_path: Path) -> None:
    lock = tmp_path / "x.lock"
    for age in (0, 4e9):
        lock.touch()
        os.utime(lock, (age, age))
        with locked(tmp_path / "x", wait=False) as free:
            assert free


@pytest.mark.parametrize(
    "stray",
    [".DS_Store", "Thumbs.db", "desktop.ini", ".cache/huggingface/x", "._a.tsv", "a.tsv.lock"],
)
def test_stray_files_are_no_data(tmp_path: Path, stray: str) -> None:
    (tmp_path / "a.tsv").write_text("data")
    before = sha256_tree(tmp_path)
    (tmp_path / stray).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / stray).write_text("not data")
    assert sha256_tree(tmp_path) == before
    (tmp_path / "b.tsv").write_text("data")
    assert sha256_tree(tmp_path) != before


def test_a_digest_is_of_the_content_whatever_size_and_time_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SETTLED_S", -1.0)  # remember at once
    path = tmp_path / "file"
    path.write_text("one")
    stamp = path.stat()
    first = sha256_file(path)
    assert sha256_file(path) == first
    time.sleep(0.02)
    path.write_text("two")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert path.stat().st_mtime_ns == stamp.st_mtime_ns
    assert sha256_file(path) != first
