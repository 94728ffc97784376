"""Flat arrays on disk: a folder an entry, built once, memory-mapped, checked on reading.

An entry is a folder of raw little-endian arrays and one ``header.json`` that gives each file's
dtype, length and digests. It is built in a temporary folder under a lock and renamed, so it is
whole or absent, also with several processes at once.

What reading checks, so that an entry of any size opens at once: size and modification time against
the header, and the digest of 64 blocks spread over the file. Where size or time differ (an entry
that was edited, restored or copied) the full SHA-256 decides. A damaged entry is named in a warning
and built again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gma_bench.errors import UserError
from gma_bench.results.store import locked, sha256_file, write_atomic

BLOCK_BYTES = 1 << 16
SAMPLED_BLOCKS = 64


@functools.cache
def code_digest() -> str:
    """SHA-256 of the code that prepares data, part of every cache's key.

    What other code has built is never read, whether or not whoever changed it thought of the caches.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


class MappedArray:
    """A one-dimensional array in a file, mapped on first use; pickles as its path."""

    def __init__(self, path: Path, dtype: str, count: int) -> None:
        self.path, self.dtype, self.count = path, dtype, count
        self._values: np.ndarray | None = None

    @property
    def values(self) -> np.ndarray:
        """The mapped array, read-only."""
        if self._values is None:
            self._values = (
                np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,))
                if self.count  # an empty file cannot be mapped
                else np.empty(0, dtype=self.dtype)
            )
        return self._values

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: Any) -> np.ndarray:
        return self.values[item]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": None}


class Writer:
    """Appends to the arrays of an entry that is being built; memory stays flat."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = {}
        self._files: dict[str, tuple[Any, Any, str, int]] = {}

    def append(self, name: str, values: np.ndarray) -> None:
        """Add one-dimensional ``values`` to array ``name``; its dtype is that of the first."""
        if name not in self._files:
            file = open(self.folder / f"{name}.bin", "wb")  # noqa: SIM115 - closed in finish()
            self._files[name] = (file, hashlib.sha256(), values.dtype.str, 0)
        file, digest, dtype, count = self._files[name]
        block = np.ascontiguousarray(values, dtype=dtype).tobytes()
        file.write(block)
        digest.update(block)
        self._files[name] = (file, digest, dtype, count + len(values))

    def finish(self) -> None:
        """Close the arrays and write the header."""
        arrays = {}
        for name, (file, digest, dtype, count) in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            path = self.folder / f"{name}.bin"
            arrays[name] = {
                "dtype": dtype,
                "count": count,
                "sha256": digest.hexdigest(),
                "sampled": _sampled_digest(path),
                **_stamp(path),
            }
        _write_header(self.folder, {"arrays": arrays, "meta": self.meta})

    def abandon(self) -> None:
        """Close the arrays of a build that failed."""
        for file, *_ in self._files.values():
            file.close()


class Entry:
    """An entry on disk: its arrays and what its builder noted (:attr:`meta`)."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.folder, self.header = folder, header
        self.meta: dict[str, Any] = header["meta"]

    def array(self, name: str) -> MappedArray:
        """The array ``name``, not yet mapped."""
        about = self.header["arrays"][name]
        return MappedArray(self.folder / f"{name}.bin", about["dtype"], about["count"])

    @property
    def digest(self) -> str:
        """One SHA-256 over the contents of every array (hex)."""
        arrays = self.header["arrays"]
        lines = (f"{name} {arrays[name]['sha256']}\n" for name in sorted(arrays))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def entry(folder: Path, build: Callable[[Writer], None]) -> Entry:
    """Open the entry at ``folder``; build it first when it is absent or damaged.

    Raises:
        UserError: the folder cannot be written. What ``build`` raises passes through, and leaves
            nothing behind.
    """
    found = _read(folder)
    if found is not None:
        return found
    with locked(folder):
        found = _read(folder)  # somebody else may have built it while this process waited
        if found is not None:
            return found
        try:
            _build(folder, build)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    found = _read(folder)
    if found is None:
        raise UserError(f"{folder} was written and reads back damaged: is the disk sound, or full?")
    return found


def _build(folder: Path, build: Callable[[Writer], None]) -> None:
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    writer = Writer(temporary)
    try:
        build(writer)
        writer.finish()
        if folder.exists():  # damaged; whoever still maps it keeps its pages
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        writer.abandon()
        shutil.rmtree(temporary, ignore_errors=True)


def _read(folder: Path) -> Entry | None:
    if not folder.exists():
        return None
    try:
        header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        restamped = False
        for name, about in header["arrays"].items():
            path = folder / f"{name}.bin"
            stamp = _stamp(path)
            if stamp == {key: about[key] for key in stamp}:
                sound = _sampled_digest(path) == about["sampled"]
            else:
                sound = sha256_file(path) == about["sha256"]
                about.update(stamp)
                restamped = True
            if not sound:
                raise ValueError(f"{path.name} does not match its checksum")
        if restamped:
            _remember(folder, header)
        return Entry(folder, header)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{folder} is damaged ({error}) and is built again", stacklevel=3)
        return None


def _remember(folder: Path, header: dict[str, Any]) -> None:
    try:
        _write_header(folder, header)
    except UserError:
        return  # a read-only cache is checked in full each time


def _write_header(folder: Path, header: dict[str, Any]) -> None:
    write_atomic(folder / "header.json", json.dumps(header, indent=1))


def _stamp(path: Path) -> dict[str, int]:
    about = path.stat()
    return {"size_bytes": about.st_size, "mtime_ns": about.st_mtime_ns}


def _sampled_digest(path: Path) -> str:
    size = path.stat().st_size
    starts = np.linspace(0, max(0, size - BLOCK_BYTES), SAMPLED_BLOCKS, dtype=np.int64)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for start in np.unique(starts):
            file.seek(int(start))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
