"""Files that are whole or absent: atomic writes, checksums, locks that outlive no process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gma_bench.errors import UserError

CHUNK_BYTES = 1 << 20


SETTLED_S = 2.0
"""A file changed less long ago may change again within one tick of its file system's clock."""
_known: dict[tuple[str, int, int, int, int, int], str] = {}


def sha256_file(path: Path | str) -> str:
    """Hex digest of a file's bytes, read in blocks; read again only when its metadata changed.

    The time of the last change of metadata (ctime) is part of them: tools that set a file's
    modification time back do not set that one.
    """
    found = os.stat(path)
    key = (
        str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip
    if key in _known:
        return _known[key]
    asked = time.time()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
    if asked - max(found.st_mtime, found.st_ctime) > SETTLED_S:
        _known[key] = digest.hexdigest()
    return digest.hexdigest()


STRAY_NAMES = ("Thumbs.db", "desktop.ini")
STRAY_SUFFIXES = (".lock", ".tmp", ".part", "~")


def is_stray(relative: Path) -> bool:
    """Whether a file in a data folder is no data: hidden, a desktop's, a lock or half a download."""
    hidden = any(part.startswith(".") for part in relative.parts)
    return hidden or relative.name in STRAY_NAMES or relative.name.endswith(STRAY_SUFFIXES)


def sha256_tree(path: Path | str) -> str:
    """Hex digest of a file, or of every file below a folder with its relative name, in order.

    Stray files (:func:`is_stray`) do not count; links are followed.
    """
    path = Path(path)
    if path.is_file():
        return sha256_file(path)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        if not is_stray(relative := file.relative_to(path)):
            digest.update(f"{relative}\0{sha256_file(file)}\n".encode())
    return digest.hexdigest()


def write_atomic(path: Path | str, content: bytes | str | Callable[[BinaryIO], object]) -> Path:
    """Write a file whole or not at all: temporary file beside it, fsync, rename.

    Args:
        path: where; parent folders are made.
        content: bytes, text (UTF-8), or a function that writes to the open binary file.

    Raises:
        UserError: the disk is full or the folder is not writable; nothing is left behind.
    """
    path = Path(path)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
        )
        with os.fdopen(handle, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
        _fsync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
    return path


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: Path | str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock file ``<path>.lock`` while the body runs.

    The lock is the kernel's (``flock``): it ends with the process that holds it, however that ends,
    so no lock file is ever stale, and its age means nothing. A body that refuses with a UserError
    leaves none behind. Linux carries it over NFS as well; a
    machine that vanishes there loses its locks when its lease at the server ends (NFSv4: about 90 s).

    Args:
        path: what is guarded.
        wait: wait for the lock; otherwise yield ``False`` at once when somebody else holds it.

    Yields:
        Whether the lock is held.

    Raises:
        UserError: the lock file cannot be made, or the file system has no locks (Lustre without
            ``-o flock``): two runs could damage each other there, so none starts.
    """
    lock = Path(f"{path}.lock")
    file = _acquire(lock, wait)
    if file is None:
        yield False
        return
    with file:
        try:
            yield True
        except UserError:
            lock.unlink(missing_ok=True)  # while it is held: who waits for it finds it gone
            raise
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _acquire(lock: Path, wait: bool) -> BinaryIO | None:
    """The open, locked file; None when somebody else holds it."""
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = open(lock, "ab+")  # noqa: SIM115 - the caller closes it
        except OSError as error:
            raise UserError(f"cannot lock {lock}: {error.strerror or error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            return None
        except OSError as error:
            file.close()
            raise UserError(
                f"cannot lock {lock}: {error.strerror or error}. Its file system must support flock; "
                "mount it so, or point results_dir and cache_dir elsewhere"
            ) from error
        try:
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file
        except FileNotFoundError:
            pass
        file.close()  # who held it took it away, and the next one to come makes a new one


def require_disk(path: Path | str, needed_bytes: int, purpose: str) -> None:
    """Raise a UserError when the file system that holds ``path`` has less than ``needed_bytes`` free."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"{purpose} needs about {needed_bytes / 2**20:,.0f} MiB and {folder} has "
            f"{free / 2**20:,.0f} MiB free. Free some space, or point results_dir or cache_dir elsewhere"
        )
