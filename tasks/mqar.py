"""MQAR, multi-query associative recall: which value stood behind this key, earlier in the sequence?

The probe for what a mixer with a small state forgets (Arora et al., 2023, "Zoology", section 3 and
its data generator). A sequence begins with ``num_pairs`` keys, each followed by its value; later
every key comes once more, and there its value is to be predicted:

    keys 2 4, values 8 7:   tokens   2  8  4  7  0  0  4  0  0  0  0  0  2  0
                            target   .  .  .  .  .  .  7  .  .  .  .  .  8  .

How far behind the pairs a key comes again follows a power law: gap g (in steps of two tokens) has
the weight ``(g + 1) ** (power_a - 1)``, and no two keys have the same gap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics import Metric

from gma_bench.errors import SettingError, UserError
from gma_bench.task import Batch, Task
from tasks.accuracy import Accuracy

IGNORED = -100
"""The target where nothing is asked."""
SPLITS = ("train", "val", "test")
BLOCK = 256
"""Rows drawn at once. Part of what a seed means: a change gives other data."""


class Rows(NamedTuple):
    """Sequences of one split."""

    tokens: NDArray[np.int32]
    """``(n, max_length)``."""
    targets: NDArray[np.int32]
    """``(n, max_length)``; :data:`IGNORED` where nothing is asked."""
    pairs: NDArray[np.int32]
    """``(n,)`` key-value pairs in each sequence."""


class MQAR(Task):
    """Recall of values by key, asked at several places of a sequence.

    Args:
        vocab_size: keys are drawn from its lower half (0 left out), values from its upper half.
        max_length: tokens in every sequence; even, at least four times the most pairs.
        num_pairs: key-value pairs a sequence, or several such numbers, each with an equal share of
            every split.
        power_a: exponent of the power law of gaps; 1 makes gaps uniform.
        random_non_queries: fill what is neither pair nor query with random tokens; else with 0.
        num_train, num_val, num_test: sequences per split; no sequence stands in two of them.
        data_seed: decides the data.
        **loading: ``batch_size`` and the other arguments of :class:`~gma_bench.task.Task`.

    Raises:
        SettingError: settings that leave no room for the pairs or for the queries.
    """

    causal = True
    pooling = "token"

    def __init__(
        self,
        *,
        vocab_size: int = 8192,
        max_length: int = 64,
        num_pairs: int | Sequence[int] = 4,
        power_a: float = 0.01,
        random_non_queries: bool = True,
        num_train: int = 100_000,
        num_val: int = 3_000,
        num_test: int = 3_000,
        data_seed: int = 0,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        if data_seed < 0:
            raise SettingError("task.data_seed", data_seed, "must be ≥ 0", "task.data_seed=0")
        self.num_pairs = [num_pairs] if isinstance(num_pairs, int) else list(num_pairs)
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        check_settings(vocab_size, max_length, self.num_pairs, power_a, self.sizes)
        self.vocab_size = self.num_outputs = vocab_size
        self.max_length = max_length
        self.power_a, self.random_non_queries = power_a, random_non_queries
        self.data_seed = data_seed
        self.rows: dict[str, Rows] = {}

    def setup(self, stage: str | None = None) -> None:
        """Draw the three splits."""
        if self.rows:
            return
        seen: set[bytes] = set()
        for number, split in enumerate(SPLITS):
            rng = np.random.default_rng([self.data_seed, number])
            self.rows[split] = self._split(rng, self.sizes[split], seen)
        self.splits = {split: RecallDataset(rows) for split, rows in self.rows.items()}
        digest = hashlib.sha256()
        for rows in self.rows.values():
            for array in rows:
                digest.update(array.tobytes())
        self.fingerprint = digest.hexdigest()

    def _split(self, rng: np.random.Generator, size: int, seen: set[bytes]) -> Rows:
        parts = []
        for i, pairs in enumerate(self.num_pairs):
            share = (size + i) // len(self.num_pairs)
            tokens, targets = self._distinct(rng, share, pairs, seen)
            parts.append(Rows(tokens, targets, np.full(share, pairs, np.int32)))
        return Rows(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    def _distinct(
        self, rng: np.random.Generator, size: int, pairs: int, seen: set[bytes]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        tokens = np.empty((size, self.max_length), np.int32)
        targets = np.empty_like(tokens)
        filled = idle = 0
        while filled < size:
            before = filled
            for row, target in zip(*self._block(rng, pairs), strict=True):
                key = row.tobytes()
                if filled < size and key not in seen:
                    seen.add(key)
                    tokens[filled], targets[filled] = row, target
                    filled += 1
            idle = idle + 1 if filled == before else 0
            if idle == 8:
                raise UserError(
                    f"only {filled} distinct MQAR sequences of {pairs} pairs found, {size} wanted. "
                    "Try: fewer examples, or a larger task.vocab_size"
                )
        return tokens, targets

    def _block(
        self, rng: np.random.Generator, pairs: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return draw(
            rng, BLOCK, vocab_size=self.vocab_size, max_length=self.max_length, num_pairs=pairs,
            power_a=self.power_a, random_non_queries=self.random_non_queries,
        )  # fmt: skip

    def collate(self, examples: list[tuple[NDArray[np.int32], NDArray[np.int32], int]]) -> Batch:
        """Stack examples.

        Returns:
            ``tokens (B, N)`` int64, ``mask (B, N)`` all True, ``target (B, N)`` int64 with -100
            where nothing is asked, ``pairs (B,)``.
        """
        tokens, targets, pairs = zip(*examples, strict=True)
        return {
            "tokens": torch.from_numpy(np.stack(tokens).astype(np.int64)),
            "mask": torch.ones(len(examples), self.max_length, dtype=torch.bool),
            "target": torch.from_numpy(np.stack(targets).astype(np.int64)),
            "pairs": torch.tensor(pairs),
        }

    def description(self) -> dict[str, Any]:
        """The law, the sizes, and the accuracy of guessing any value."""
        return {
            "name": "mqar",
            "source": "embedded",
            "vocab_size": self.vocab_size,
            "max_length": self.max_length,
            "num_pairs": self.num_pairs,
            "power_a": self.power_a,
            "random_non_queries": self.random_non_queries,
            "data_seed": self.data_seed,
            "fingerprint": self.fingerprint,
            "chance": 1 / (self.vocab_size - self.vocab_size // 2),
            "splits": {
                split: {"examples": len(rows.tokens), "queries": int(rows.pairs.sum())}
                for split, rows in self.rows.items()
            },
        }

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy, mean over queries."""
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["target"].flatten(), ignore_index=IGNORED
        )

    def target_counts(self, split: str) -> NDArray[np.int32]:
        """Queries of each sequence, ``(size,)``: as many as it has pairs."""
        return self.rows[split].pairs

    def new_metrics(self, split: str) -> dict[str, Metric]:
        """``accuracy`` over queries; on test also by the number of pairs in the sequence."""
        numbers = self.num_pairs if split == "test" else []
        return {
            name: Accuracy() for name in ("accuracy", *(f"accuracy_pairs_{n}" for n in numbers))
        }

    def update(self, metrics: dict[str, Metric], logits: Tensor, batch: Batch) -> None:
        """Add a batch of ``logits (B, N, vocab_size)``."""
        asked = batch["target"] != IGNORED
        right = logits.argmax(-1) == batch["target"]
        metrics["accuracy"].update(right, asked)
        for number in self.num_pairs if len(metrics) > 1 else []:
            chosen = asked & (batch["pairs"] == number)[:, None]
            metrics[f"accuracy_pairs_{number}"].update(right, chosen)


class RecallDataset(Dataset[tuple[NDArray[np.int32], NDArray[np.int32], int]]):
    """Sequences as examples: tokens, targets, number of pairs."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows.tokens)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        tokens, targets, pairs = self.rows
        return tokens[index], targets[index], int(pairs[index])


def check_settings(
    vocab_size: int, max_length: int, num_pairs: list[int], power_a: float, sizes: dict[str, int]
) -> None:
    """Refuse settings that no sequence satisfies.

    Raises:
        SettingError: names the setting, what is allowed, and an override that mends it.
    """
    if not num_pairs or min(num_pairs) < 1 or len(set(num_pairs)) < len(num_pairs):
        raise SettingError(
            "task.num_pairs", num_pairs, "must be distinct numbers ≥ 1", "task.num_pairs=[4,8]"
        )
    needed = 4 * max(num_pairs)
    if max_length % 2 or max_length < needed:
        allowed = f"must be even and ≥ 4 × task.num_pairs = {needed}"
        fix = f"task.max_length={max(needed, max_length + max_length % 2)}"
        raise SettingError("task.max_length", max_length, allowed, fix)
    if vocab_size <= max_length:
        allowed = f"must be above task.max_length={max_length}"
        raise SettingError(
            "task.vocab_size", vocab_size, allowed, f"task.vocab_size={8 * max_length}"
        )
    if power_a <= 0:
        raise SettingError("task.power_a", power_a, "must be above 0", "task.power_a=0.01")
    for split, size in sizes.items():
        if size < len(num_pairs):
            name = f"task.num_{split}"
            allowed = f"must be ≥ {len(num_pairs)}, the number of values in task.num_pairs"
            raise SettingError(name, size, allowed, f"{name}=1000")


def draw(
    rng: np.random.Generator,
    size: int,
    *,
    vocab_size: int,
    max_length: int,
    num_pairs: int,
    power_a: float = 0.01,
    random_non_queries: bool = True,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw sequences with Zoology's law.

    Returns:
        tokens and targets, ``(size, max_length)`` each.
    """
    half, context = vocab_size // 2, 2 * num_pairs
    keys = 1 + _choose(rng.random((size, half - 1)), num_pairs)
    values = half + _choose(rng.random((size, vocab_size - half)), num_pairs)
    # Weighted drawing without replacement: the first to arrive of exponential clocks.
    space = (max_length - context) // 2
    weights = np.arange(1, space + 1) ** (power_a - 1.0)
    gaps = _choose(rng.exponential(size=(size, space)) / weights, num_pairs)

    tokens = np.zeros((size, max_length), np.int32)
    tokens[:, 0:context:2], tokens[:, 1:context:2] = keys, values
    targets = np.full((size, max_length), IGNORED, np.int32)
    np.put_along_axis(tokens, context + 2 * gaps, keys, axis=1)
    np.put_along_axis(targets, context + 2 * gaps, values, axis=1)
    if random_non_queries:
        noise = rng.integers(0, vocab_size, tokens.shape, dtype=np.int32)
        tokens = np.where(tokens == 0, noise, tokens)
    return tokens, targets


def _choose(clocks: NDArray[np.float64], number: int) -> NDArray[np.int32]:
    """Column numbers of the smallest entries of each row, ``(rows, number)``, smallest first."""
    if number < clocks.shape[1]:
        first = np.argpartition(clocks, number - 1, axis=1)[:, :number]
    else:
        first = np.broadcast_to(np.arange(number), clocks.shape)
    order = np.argsort(np.take_along_axis(clocks, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1).astype(np.int32)
