"""Checkpoints that are whole, sealed with a digest, and read without unpickling code."""

from __future__ import annotations

import hashlib
import io
import struct
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from gma_bench.results.store import write_atomic

# torch.save writes a zip archive; the digest goes into the archive's comment, which every zip
# reader (torch.load too) passes over. One file, so there is no moment at which it lacks its seal.
_END = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_DIGEST_BYTES = 64


class DamagedCheckpoint(Exception):
    """A checkpoint that is cut short or altered since it was written."""


def seal(archive: bytes) -> bytes:
    """A zip archive without comment, with its own SHA-256 (hex) as the comment."""
    head, tail = archive[: -_END.size], archive[-_END.size :]
    fields = _END.unpack(tail)
    if fields[0] != _END_MAGIC or fields[-1] != 0:
        raise ValueError("not a zip archive without a comment")
    digest = hashlib.sha256(archive).hexdigest().encode()
    return head + _END.pack(*fields[:-1], _DIGEST_BYTES) + digest


def unseal(sealed: bytes) -> bytes:
    """What :func:`seal` was given.

    Raises:
        DamagedCheckpoint: a byte differs, or some are missing.
    """
    body, digest = sealed[:-_DIGEST_BYTES], sealed[-_DIGEST_BYTES:]
    if len(body) < _END.size:
        raise DamagedCheckpoint("cut short")
    fields = _END.unpack(body[-_END.size :])
    archive = body[: -_END.size] + _END.pack(*fields[:-1], 0)
    intact = fields[0] == _END_MAGIC and fields[-1] == _DIGEST_BYTES
    if not intact or hashlib.sha256(archive).hexdigest().encode() != digest:
        raise DamagedCheckpoint("its digest does not match its content")
    return archive


def save_checkpoint(checkpoint: dict[str, Any], path: Path | str) -> None:
    """Write a sealed checkpoint whole or not at all."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    write_atomic(path, seal(buffer.getvalue()))


def load_checkpoint(path: Path | str, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a sealed checkpoint; tensors and plain values only, no code is run.

    Raises:
        DamagedCheckpoint: cut short or altered.
        OSError: it cannot be read.
    """
    try:
        archive = unseal(Path(path).read_bytes())
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{path}: {error}") from None
    return torch.load(io.BytesIO(archive), map_location=map_location, weights_only=True)


class SealedCheckpointIO(TorchCheckpointIO):
    """Lightning's way to the functions above."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        save_checkpoint(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_checkpoint(path, map_location)
