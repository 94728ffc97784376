"""Following storages: how many bytes of tensors are alive, and how many were at the worst moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of storages that operators allocate while the mode is on.

    Every storage that an operator returns is counted once, from the moment it is returned until the
    last reference to it is gone, whoever held it (Python, autograd, a module). A storage that an
    operator reads without the tracker having seen it come into being was there before: it belongs
    to the baseline and is not counted (parameters, inputs, buffers).

    Works on real tensors and under ``FakeTensorMode`` alike: both run the same operators in the same
    order, so the figures agree to the byte. What a kernel allocates and frees inside itself is seen
    by neither. ``tests/profiling`` compares with the allocator's own count.

    Attributes:
        live_bytes: bytes alive now, above the baseline.
        peak_bytes: the most that were alive after any operator.
        operators: number of operators run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = self.operators = 0
        self._storages: dict[
            int, tuple[weakref.ref[Any], int, int]
        ] = {}  # address: ref, bytes, serial
        self._serial = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operators += 1
        for tensor in _tensors((args, kwargs)):
            self._meet(tensor, counted=False)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._meet(tensor, counted=True)
        return out

    def serial(self, tensor: Tensor) -> int | None:
        """A number for the storage of ``tensor``, unique for good; None if it is in the baseline."""
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return None if entry is None or entry[1] == 0 else entry[2]

    def bytes_of(self, serials: set[int]) -> int:
        """Bytes of those storages that are still alive."""
        return sum(size for _, size, serial in self._storages.values() if serial in serials)

    def _meet(self, tensor: Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        entry = self._storages.get(address)
        if entry is None:
            size = storage.nbytes() if counted else 0
            self._serial += 1

            def gone(_: Any, address: int = address) -> None:
                self.live_bytes -= self._storages.pop(address)[1]

            self._storages[address] = (weakref.ref(storage, gone), size, self._serial)
            self._grow(size)
        elif counted and entry[1] and entry[1] != storage.nbytes():  # resized in place
            self._storages[address] = (entry[0], storage.nbytes(), entry[2])
            self._grow(storage.nbytes() - entry[1])

    def _grow(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (
        leaf for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided
    )  # fmt: skip


class Saved:
    """Storages that autograd keeps for the backward pass; filled by :func:`saved_for_backward`."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker, self._serials = tracker, set[int]()

    def add(self, tensor: Tensor) -> Tensor:
        serial = self._tracker.serial(tensor) if tensor.layout is torch.strided else None
        if serial is not None:
            self._serials.add(serial)
        return tensor

    def num_bytes(self) -> int:
        """Bytes saved and still alive, each storage once; parameters and inputs left out."""
        return self._tracker.bytes_of(self._serials)


@contextmanager
def saved_for_backward(tracker: StorageTracker) -> Iterator[Saved]:
    """Note what autograd saves while the body runs a forward pass under ``tracker``."""
    saved = Saved(tracker)
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        yield saved
