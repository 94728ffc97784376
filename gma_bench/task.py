"""What a task is: its data, its batches, its loss and its metric, in one Lightning data module."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import lightning as L
from torch import Tensor
from torchmetrics import Metric

Batch = dict[str, Tensor]
"""``tokens (B, N)`` int64, ``mask (B, N)`` bool with True = a real token, ``target`` (as the task says)."""


class Task(L.LightningDataModule):
    """A data set with a loss and metrics. The training loop knows tasks only through this.

    After :meth:`setup` the attributes below are set and the three dataloaders work.
    """

    causal: ClassVar[bool] = False
    """Whether the mixer must be causal."""
    pooling: ClassVar[Literal["sequence", "token"]] = "sequence"
    """``sequence``: one output vector a sequence (classification); ``token``: one a position."""
    metric: ClassVar[str] = "accuracy"
    """The metric that tables show and that selects the checkpoint on validation."""
    higher_is_better: ClassVar[bool] = True

    vocab_size: int
    """Number of token ids, padding and special ones included."""
    num_outputs: int
    """Width of the head: number of classes, or the vocabulary."""
    max_length: int
    """The longest sequence that a batch holds, special tokens included."""
    fingerprint: str
    """A digest of the data as it is fed (hex); stands in the record."""

    def description(self) -> dict[str, Any]:
        """What the data is, for the record: ``source``, ``name``, sizes, label shares, …  JSON-ready."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean training loss of a batch, over examples or over predicted tokens. Scalar."""

    @abstractmethod
    def new_metrics(self) -> dict[str, Metric]:
        """Fresh metrics for one split, keyed by name; :attr:`metric` among them."""

    @abstractmethod
    def update(self, metrics: dict[str, Metric], logits: Tensor, batch: Batch) -> None:
        """Add a batch to metrics that :meth:`new_metrics` made. Sums, never means of batch means."""
