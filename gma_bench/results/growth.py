"""How fast a quantity grows: the slope of a straight line through its logarithms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Growth:
    """``y ∝ xˢ``: the exponent s with a confidence interval.

    Attributes:
        slope: the exponent; 1 is linear, 2 is quadratic.
        low, high: ends of the interval.
        points: number of points that the line was fitted through.
        from_x, to_x: the range they span.
    """

    slope: float
    low: float
    high: float
    points: int
    from_x: float
    to_x: float

    def within(self, expected: float, tolerance: float) -> bool:
        """Whether the whole interval lies within ``expected ± tolerance``."""
        return expected - tolerance <= self.low and self.high <= expected + tolerance

    def as_dict(self) -> dict[str, float]:
        """Plain values, for a record."""
        return asdict(self)


def fit(xs: Sequence[float], ys: Sequence[float], *, confidence: float = 0.95) -> Growth | None:
    """Least squares on log–log axes over the upper half of the range of ``xs``.

    The lower half is left out because constant terms weigh there: a curve ``a + bx`` has slope 1
    only once ``bx`` dominates.

    Args:
        xs, ys: at least two points, all above 0; in any order.
        confidence: of the interval (Student's t on the residuals). With two points there are no
            residuals, and the interval is the slope itself.

    Returns:
        The growth, or None with fewer than two different ``xs``.
    """
    points = sorted((x, y) for x, y in zip(xs, ys, strict=True) if x > 0 and y > 0)
    if len({x for x, _ in points}) < 2:
        return None
    upper = _upper_half(points)
    log_x, log_y = [math.log(x) for x, _ in upper], [math.log(y) for _, y in upper]
    n = len(upper)
    mean_x, mean_y = sum(log_x) / n, sum(log_y) / n
    spread = sum((x - mean_x) ** 2 for x in log_x)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_x, log_y, strict=True)) / spread
    margin = 0.0
    if n > 2:
        from scipy.stats import t

        residuals = (y - mean_y - slope * (x - mean_x) for x, y in zip(log_x, log_y, strict=True))
        variance = sum(r * r for r in residuals) / (n - 2)
        margin = float(t.ppf(0.5 + confidence / 2, n - 2)) * math.sqrt(variance / spread)
    return Growth(slope, slope - margin, slope + margin, n, upper[0][0], upper[-1][0])


def _upper_half(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    middle = math.sqrt(points[0][0] * points[-1][0])
    upper = [p for p in points if p[0] >= middle * (1 - 1e-9)]
    return upper if len({x for x, _ in upper}) >= 2 else points[-2:]


def select(rows: Iterable[dict[str, Any]], **where: Any) -> list[dict[str, Any]]:
    """Rows of a profiling cell that were reached (status ``ok``) and match every ``column=value``."""
    return [
        row for row in rows
        if row.get("status") == "ok" and all(row.get(k) == v for k, v in where.items())
    ]  # fmt: skip


def growth_of(
    rows: Iterable[dict[str, Any]], y: str = "peak_bytes", x: str = "seq_len", **where: Any
) -> Growth | None:
    """:func:`fit` of column ``y`` against column ``x`` over the rows that :func:`select` finds."""
    chosen = select(rows, **where)
    return fit([r[x] for r in chosen], [r[y] for r in chosen])


def crossing(xs: Sequence[float], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """From which ``x`` on ``ours`` stays below ``theirs``, interpolated on log–log axes.

    Args:
        xs: increasing, shared by both curves; values above 0.

    Returns:
        The x of the last crossing; ``xs[0]`` where ours is below everywhere; None where it is not
        below at the end.
    """
    gaps = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    if not gaps or gaps[-1] >= 0:
        return None
    last_above = max((i for i, gap in enumerate(gaps) if gap >= 0), default=None)
    if last_above is None:
        return xs[0]
    x0, x1 = math.log(xs[last_above]), math.log(xs[last_above + 1])
    g0, g1 = gaps[last_above], gaps[last_above + 1]
    return math.exp(x0 + (x1 - x0) * g0 / (g0 - g1))
