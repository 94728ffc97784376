"""Intervals for means, differences and ratios of a few seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_DRAWS = 4000
FEW = 8


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval; ``low`` and ``high`` are None where ``n`` allows none."""

    estimate: float
    low: float | None
    high: float | None
    n: int
    method: str

    @property
    def known(self) -> bool:
        """Whether there is an interval at all."""
        return self.low is not None and self.high is not None

    def negated(self) -> Interval:
        """The interval of the quantity with its sign turned."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Interval(-self.estimate, low, high, self.n, self.method)

    def mapped(self, function: object) -> Interval:
        """The interval of an increasing function of the quantity (``math.exp`` for log ratios)."""
        assert callable(function)
        ends = [None if end is None else float(function(end)) for end in (self.low, self.high)]
        return Interval(float(function(self.estimate)), ends[0], ends[1], self.n, self.method)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n − 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def t_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's t interval of the mean; paired comparisons feed it differences.

    Args:
        values: independent values (one a seed); at least one.
        confidence: coverage, between 0 and 1.

    Returns:
        An interval without ends where there are fewer than two values.
    """
    spread = std(values)
    if spread is None:
        return Interval(mean(values), None, None, len(values), "one value: no interval")
    from scipy.special import stdtrit

    n = len(values)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * spread / math.sqrt(n)
    return Interval(mean(values), mean(values) - half, mean(values) + half, n, f"t, {n - 1} d.f.")


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The bootstrap interval of the mean from :data:`FEW` values on, Student's t below.

    A percentile bootstrap of a handful never looks beyond their extremes and covers too little.
    """
    if len(values) < FEW:
        return t_interval(values, confidence)
    return bootstrap_interval(values, confidence)


def bootstrap_interval(
    values: Sequence[float], confidence: float = 0.95, draws: int = BOOTSTRAP_DRAWS
) -> Interval:
    """Percentile bootstrap interval of the mean, for samples too many or too skewed for t.

    The draws are seeded: the same records give the same interval.
    """
    sample = np.asarray(values, dtype=float)
    if sample.size < 2:
        return Interval(float(sample.mean()), None, None, sample.size, "one value: no interval")
    index = np.random.default_rng(0).integers(sample.size, size=(draws, sample.size))
    ends = np.quantile(sample[index].mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(
        float(sample.mean()), float(ends[0]), float(ends[1]), sample.size,
        f"bootstrap, {draws} draws",
    )  # fmt: skip
