"""What a task is: its data, its batches, its loss and its metric, in one Lightning data module."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from gma_bench.errors import SettingError
from gma_bench.task.loading import EvaluationBatches, TrainingBatches

Batch = dict[str, Tensor]
"""``tokens (B, N)`` int64, ``mask (B, N)`` bool with True = a real token, ``target`` (as the task says)."""


SHARED_MEMORY = Path("/dev/shm")
PREFETCHED = 2
"""Batches that a loader process keeps ready."""

NOT_ARGUMENTS = ("name", "procedure", "form")
"""Keys of a task's file that are not its constructor's: what the harness reads of it."""


class Task(L.LightningDataModule):
    """A data set with a loss and metrics. The training loop knows tasks only through this.

    A task builds or reads its data in :meth:`prepare_data` (one process, into the cache), and in
    :meth:`setup` sets :attr:`splits` and the attributes below. The data depend on the task's own
    settings only, never on the run's seed.

    Args:
        batch_size: examples a training step, over all ranks and parts.
        eval_batch_size: examples an evaluation batch and rank; changes no metric.
        num_steps: training steps in the whole run.
        parts: batches that each rank computes its share of a step in; changes no step.
        num_workers: loader processes; 0 loads in the training process.
        worker_timeout_s: a loader process that gives no batch for so long is taken to hang, and the
            cell fails.
        order_seed: fixes the order of training examples.
        bucket_by_length: draw batches of about one length each (where the task knows lengths).
        cache_dir: where prepared data lie.
    """

    causal: ClassVar[bool] = False
    """Whether the mixer must be causal."""
    pooling: ClassVar[Literal["sequence", "token"]] = "sequence"
    """``sequence``: one output vector a sequence (classification); ``token``: one a position."""
    metric: ClassVar[str] = "accuracy"
    """The metric that tables show and that selects the checkpoint on validation."""
    split: ClassVar[str] = "test"
    """The split whose figure tables show."""
    higher_is_better: ClassVar[bool] = True

    splits: dict[str, Dataset[Any]]
    """``train``, ``val``, ``test``: map-style, with ``__len__`` and ``__getitem__``."""
    vocab_size: int
    """Number of token ids, padding and special ones included."""
    num_outputs: int
    """Width of the head: number of classes, or the vocabulary."""
    max_length: int
    """The longest sequence that a batch holds, special tokens included."""
    fingerprint: str
    """A digest of the data as it is fed (hex); stands in the record."""

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        num_steps: int = 1,
        parts: int = 1,
        num_workers: int = 0,
        worker_timeout_s: float = 600,
        order_seed: int = 0,
        bucket_by_length: bool = False,
        cache_dir: str | Path = ".cache/gma_bench",
    ) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_steps, self.parts = num_steps, parts
        self.num_workers, self.worker_timeout_s = num_workers, worker_timeout_s
        self.order_seed = order_seed
        self.bucket_by_length, self.cache_dir = bucket_by_length, Path(cache_dir)

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """What the data is, for the record: ``source``, ``name``, sizes, label shares, …  JSON-ready."""

    @abstractmethod
    def collate(self, examples: list[Any]) -> Batch:
        """Pad examples of a split to one batch, as long as the longest of them."""

    @abstractmethod
    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean training loss of a batch, over examples or over predicted tokens. Scalar.

        Where examples have different numbers of targets, :meth:`target_counts` says so.
        """

    @abstractmethod
    def new_metrics(self, split: str) -> dict[str, Metric]:
        """Fresh metrics for a split, keyed by name; :attr:`metric` among them."""

    @abstractmethod
    def update(self, metrics: dict[str, Metric], logits: Tensor, batch: Batch) -> None:
        """Add a batch to metrics that :meth:`new_metrics` made. Sums, never means of batch means."""

    def compute(self, metrics: dict[str, Metric]) -> dict[str, float]:
        """The figures of a split after its last batch, over all ranks."""
        return {name: float(metric.compute()) for name, metric in metrics.items()}

    token_kind: str = ""
    """How tokens are sorted by their form: ``word``, ``bpe``, ``byte`` or ``listops``."""

    def spell(self, ids: np.ndarray) -> list[str]:
        """Tokens as the tokenizer writes them, for a reader and for rules on their form."""
        raise NotImplementedError

    def documents(self, split: str, index: int, length: int) -> np.ndarray:
        """The number of the document that each token of one example belongs to, ``(length,)``."""
        return np.full(length, index)

    def planned_sizes(self) -> tuple[int, int]:
        """``(vocab_size, num_outputs)`` as far as they are known before any data are read."""
        return self.vocab_size, self.num_outputs

    def lengths(self, split: str) -> np.ndarray | None:
        """Sequence length of each example of a split, where the task knows it cheaply."""
        return None

    def target_counts(self, split: str) -> np.ndarray | None:
        """Number of targets of each example of a split that the loss is a mean over; None: all alike."""
        return None

    def train_dataloader(self) -> DataLoader[Batch]:
        trainer = self.trainer
        self._order = TrainingBatches(
            len(self.splits["train"]),  # type: ignore[arg-type]
            self.batch_size,
            self.num_steps,
            self.order_seed,
            start=trainer.global_step if trainer else 0,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            parts=self.parts,
            lengths=self.lengths("train") if self.bucket_by_length else None,
        )
        self._targets = self.target_counts("train")
        return self._loader("train", self._order)

    def part_weight(self, step: int, part: int) -> float:
        """What a part's mean loss counts in its step's loss: its targets over an equal share's.

        A step's loss is a sum over its targets, divided once by their number over all parts and
        ranks. The trainer averages parts and ranks; this weight turns that mean into the step's.
        """
        if self._targets is None:
            return 1.0
        order, targets = self._order, self._targets
        shares = order.parts * order.world_size
        own = int(targets[order.part(step, part)].sum())
        return own * shares / int(targets[order.step(step)].sum())

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.evaluation_dataloader("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.evaluation_dataloader("test")

    def evaluation_dataloader(self, split: str) -> DataLoader[Batch]:
        """Every example of a split once, over all ranks together."""
        batches = EvaluationBatches(
            len(self.splits[split]),  # type: ignore[arg-type]
            self.eval_batch_size,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
            lengths=self.lengths(split) if self.bucket_by_length else None,
        )
        return self._loader(split, batches)

    def _require_shared_memory(self) -> None:
        """Loader processes hand batches over in shared memory, and wait for ever where there is none."""
        if not self.num_workers or not SHARED_MEMORY.is_dir():
            return
        batch_bytes = (
            17 * self.max_length * max(self.batch_size // self.parts, self.eval_batch_size)
        )
        needed = self.num_workers * PREFETCHED * batch_bytes
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < needed:
            raise SettingError(
                "training.num_workers", self.num_workers,
                f"loader processes need {needed >> 10:,} KiB of shared memory and {SHARED_MEMORY} has "
                f"{free >> 10:,} KiB free (containers: --shm-size)", "training.num_workers=0",
            )  # fmt: skip

    def _loader(
        self, split: str, batches: TrainingBatches | EvaluationBatches
    ) -> DataLoader[Batch]:
        self._require_shared_memory()
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            self.splits[split],
            batch_sampler=batches,
            collate_fn=self.collate,
            num_workers=self.num_workers,
            pin_memory=on_cuda,
            persistent_workers=self.num_workers > 0,
            timeout=self.worker_timeout_s if self.num_workers else 0,
        )
