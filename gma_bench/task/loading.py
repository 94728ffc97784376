"""The order of batches: a pure function of the seed and the step, so that a run can resume anywhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

WINDOW_BATCHES = 64


class TrainingBatches(Sampler[list[int]]):
    """Index batches of a run that counts steps, not epochs.

    The examples form one endless stream, a fresh permutation after another; step ``i`` takes the
    stream's ``i``-th stretch of ``batch_size`` examples. Every example is seen once before any is
    seen twice, none is dropped at the end of a pass. Ranks share each step's examples between them,
    and each rank yields its share in ``parts`` batches: neither changes which examples a step has.

    Args:
        size: number of examples.
        batch_size: examples a step, over all ranks and parts.
        num_steps: steps in the whole run.
        seed: fixes the order.
        start: the first step to yield (when resuming).
        rank, world_size: this process takes every ``world_size``-th example of each step.
        parts: batches that a rank's share of a step is cut into (gradient accumulation).
        lengths: sequence lengths ``(size,)``; when given, batches are drawn from windows of
            ``WINDOW_BATCHES`` batches sorted by length, in shuffled order, so that a batch holds
            sequences of about one length and little padding.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        num_steps: int,
        seed: int,
        *,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        parts: int = 1,
        lengths: np.ndarray | None = None,
    ) -> None:
        self.size, self.batch_size, self.num_steps = size, batch_size, num_steps
        self.seed, self.start, self.rank, self.world_size = seed, start, rank, world_size
        self.parts, self.lengths = parts, lengths
        self._window = functools.lru_cache(maxsize=2)(self._draw_window)

    def __len__(self) -> int:
        # The whole run's, whatever `start` is: Lightning counts the batches before it as fetched.
        return self.num_steps * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start, self.num_steps):
            for part in range(self.parts):
                yield self.part(step, part).tolist()

    def step(self, step: int) -> np.ndarray:
        """The examples of a step (counted from 0), over all ranks and parts."""
        return self._window(step // WINDOW_BATCHES)[step % WINDOW_BATCHES]

    def part(self, step: int, part: int) -> np.ndarray:
        """The examples of one part of this rank's share of a step."""
        share = self.step(step)[self.rank :: self.world_size]
        size = len(share) // self.parts
        return share[part * size : (part + 1) * size]

    def _draw_window(self, window: int) -> np.ndarray:
        per_window = WINDOW_BATCHES * self.batch_size
        indices = self._stream(window * per_window, (window + 1) * per_window)
        if self.lengths is not None:
            indices = indices[np.argsort(self.lengths[indices], kind="stable")]
        batches = indices.reshape(WINDOW_BATCHES, self.batch_size)
        if self.lengths is not None:
            batches = np.random.default_rng([self.seed, 1, window]).permutation(batches)
        return batches

    def _stream(self, start: int, stop: int) -> np.ndarray:
        passes = range(start // self.size, -(-stop // self.size))
        orders = [np.random.default_rng([self.seed, 0, p]).permutation(self.size) for p in passes]
        offset = passes.start * self.size
        return np.concatenate(orders)[start - offset : stop - offset]


class EvaluationBatches(Sampler[list[int]]):
    """Every example once, over all ranks together; the last batch may be short.

    Args:
        size: number of examples.
        batch_size: examples a batch and rank.
        rank, world_size: this process takes every ``world_size``-th example.
        lengths: when given, examples come in order of length (less padding, the same figures).
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        lengths: np.ndarray | None = None,
    ) -> None:
        order = np.arange(size) if lengths is None else np.argsort(lengths, kind="stable")
        self.indices, self.batch_size = order[rank::world_size], batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield self.indices[start : start + self.batch_size].tolist()
