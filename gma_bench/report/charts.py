"""Curves for the page: plain SVG drawn here, with the data that the page's script reads on hover."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gma_bench.report.groups import Record, is_number
from gma_bench.report.profiles import curve
from gma_bench.report.style import KNOWN
from gma_bench.report.tables import MIB, Results

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 42
SLOTS = 8
MOST_POINTS = 240
"""More points than this a curve are thinned: the drawing is no wider than that."""

PROFILE_WHERE: dict[str, Any] = {"pass": ["forward_backward", "forward"]}


@dataclass
class Series:
    """A line: ``points`` are (x, y) in data units; ``slot`` picks its colour and dashes."""

    name: str
    group: str
    slot: int
    points: list[tuple[float, float]]


@dataclass
class Chart:
    """A diagram with its axes; see :func:`drawn` for what the page gets."""

    id: str
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    log_x: bool = False
    log_y: bool = False
    note: str = ""
    markers: bool = True
    x: Axis = field(init=False)
    y: Axis = field(init=False)

    def __post_init__(self) -> None:
        xs = [x for s in self.series for x, _ in s.points]
        ys = [y for s in self.series for _, y in s.points]
        self.x = Axis.over(xs, self.log_x, LEFT, WIDTH - RIGHT)
        self.y = Axis.over(ys, self.log_y, HEIGHT - BOTTOM, TOP)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Legend entries: mixer and slot, each once."""
        return list(dict.fromkeys((s.group, s.slot) for s in self.series))


@dataclass
class Axis:
    """From data to user units of the drawing, with ticks."""

    low: float
    high: float
    log: bool
    start: float
    end: float
    binary: bool = False

    @classmethod
    def over(cls, values: Sequence[float], log: bool, start: float, end: float) -> Axis:
        """An axis that holds all values, with a little room where it is linear."""
        low, high = min(values), max(values)
        if log:
            room = 0.04 * math.log(high / low) if high > low else 0.7
            binary = all(value >= 1 and math.log2(value).is_integer() for value in values)
            return cls(low / math.exp(room), high * math.exp(room), True, start, end, binary)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        return cls(low - room, high + room, False, start, end)

    def place(self, value: float) -> float:
        """Where a value lies."""
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Position and label of each tick."""
        if not self.log:
            return [(self.place(v), short(v)) for v in _ticks(self.low, self.high)]
        ticks = _log_ticks(self.low, self.high, self.binary)
        return [(self.place(v), f"{v:,.0f}" if self.binary else short(v)) for v in ticks]


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    raw = (high - low) / most
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float, binary: bool, most: int = 6) -> list[float]:
    """Powers of 2, 4, 16, … where the data are; else 1–2–5, then powers of 10, 100, …"""
    if not binary:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        fine = [m * 10.0**i for i in range(first, last + 1) for m in (1, 2, 5)]
        fine = [value for value in fine if low <= value <= high]
        if 2 <= len(fine) <= most:
            return fine
    for base in (2.0, 4.0, 16.0, 256.0) if binary else (10.0, 100.0, 1000.0, 1e4):
        first = math.ceil(math.log(low, base) - 1e-9)
        last = math.floor(math.log(high, base) + 1e-9)
        if last - first < most:
            return [base**i for i in range(first, last + 1)]
    return []


def short(value: float) -> str:
    """Four significant digits at most, with k, M, G for thousands."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[letter]:.4g}{letter}"
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:.4g}"


def drawn(chart: Chart) -> dict[str, Any]:
    """A chart as the template wants it: paths, ticks, and the points that the script reads."""
    lines, data = [], []
    for series in chart.series:
        placed = [(chart.x.place(x), chart.y.place(y)) for x, y in series.points]
        path = "M" + "L".join(f"{x:g},{y:g}" for x, y in placed)
        dots = placed if chart.markers and len(placed) <= 24 else []
        lines.append({"path": path, "dots": dots, "slot": series.slot, "group": series.group})
        data.append({
            "name": series.name, "group": series.group, "slot": series.slot,
            "points": [
                [px, py, f"{x:,.6g}", short(y)]
                for (px, py), (x, y) in zip(placed, series.points, strict=True)
            ],
        })  # fmt: skip
    return {
        "chart": chart, "lines": lines, "data": {"x": chart.x_label, "series": data},
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP,
        "bottom": HEIGHT - BOTTOM,
    }  # fmt: skip


def slots(results: Results) -> dict[str, int]:
    """A fixed colour for each mixer: the paper's first, as in the figures, then the others.

    Beyond :data:`SLOTS` mixers the colours come again, dashed; so do those of a mixer's backends, then dotted.
    """
    found = sorted({r["mixer"] for r in results.records})
    return {mixer: i % (2 * SLOTS) for i, mixer in enumerate(dict.fromkeys([*KNOWN, *found]))}


def scaling(results: Results) -> list[Chart]:
    """Peak memory and throughput against sequence length."""
    length = "sequence length N (tokens)"
    made = []
    for scope, name in (("layer", "a mixer"), ("model", "a model")):
        where = {"sweep": "length", "scope": scope, **PROFILE_WHERE}
        where["method"] = ["simulated", "measured"]
        made.append(_profile(
            results, "memory", where, "peak_bytes", 1 / MIB, f"memory-{scope}",
            f"Peak memory of {name}, forward and backward", length, "peak memory (MiB)",
        ))  # fmt: skip
    made.append(_profile(
        results, "throughput", {"sweep": "length", **PROFILE_WHERE}, "tokens_per_s", 1, "throughput",
        "Throughput, forward and backward", length, "tokens/s",
    ))  # fmt: skip
    return [chart for chart in made if chart]


def _profile(
    results: Results, task: str, where: dict[str, Any], quantity: str, factor: float,
    chart_id: str, title: str, x_label: str, y_label: str,
) -> Chart | None:  # fmt: skip
    colours, series = slots(results), []
    for mixer in results.mixers(task):
        group = results.main(task, mixer)
        for record in group.finished[:1] if group else []:
            backends = dict.fromkeys(row.get("backend") for row in record["rows"])
            for index, backend in enumerate(backends):
                rows = curve(record["rows"], where | ({"backend": backend} if backend else {}))
                points = sorted(
                    (float(r["seq_len"]), r[quantity] * factor) for r in rows
                    if is_number(r.get(quantity)) and r[quantity] > 0
                )  # fmt: skip
                label = results.paper.label(mixer) + (f" ({backend})" if index else "")
                if points:
                    series.append(Series(label, label, colours[mixer] + SLOTS * index, points))
    return Chart(chart_id, title, x_label, y_label, series, True, True) if series else None


LOSSES = ("train_loss", "val_loss")


def learning(results: Results) -> list[tuple[str, list[Chart]]]:
    """Every column that was drawn over training, a chart a task and column, a line a run."""
    colours = slots(results)
    found: list[tuple[str, list[Chart]]] = []
    for task in results.tasks:
        columns: dict[str, list[Series]] = defaultdict(list)
        for record in results.records:
            if record["task"] == task:
                for name, points in _curves(record["curves"]):
                    label = results.paper.label(record["mixer"])
                    shown = f"{label}, seed {record['seed']}{_variant(results, record)}"
                    columns[name].append(Series(shown, label, colours[record["mixer"]], points))
        charts = [
            Chart(
                f"learning-{task}-{name}", name.replace("_", " "), "training step",
                name.replace("_", " "), series, markers=False,
            )
            for name, series in sorted(columns.items(), key=lambda item: _first(item[0]))
        ]  # fmt: skip
        if charts:
            found.append((task, charts))
    return found


def _first(name: str) -> tuple[int, str]:
    """Losses first, the learning rate last."""
    return (LOSSES.index(name) if name in LOSSES else len(LOSSES) + (name == "lr"), name)


def _variant(results: Results, record: Record) -> str:
    for group in results.groups[record["task"], record["mixer"]]:
        if any(r["run_id"] == record["run_id"] for r in group.records) and group.variant:
            return f" [{', '.join(group.variant)}]"
    return ""


def _curves(curves: dict[str, Any]) -> Iterable[tuple[str, list[tuple[float, float]]]]:
    for name, ys in curves.items():
        if name in ("step", "val_step") or not isinstance(ys, list):
            continue
        xs = curves.get("val_step" if name.startswith("val_") else "step")
        if not isinstance(xs, list):
            continue
        points = [
            (float(x), float(y)) for x, y in zip(xs, ys, strict=False)
            if is_number(x) and is_number(y) and math.isfinite(y)
        ]  # fmt: skip
        if points:
            step = math.ceil(len(points) / MOST_POINTS)
            yield name, points[::step]


@dataclass
class Glyph:
    """An interval beside the border that the claim sets, as user units of a small drawing."""

    low: float
    high: float
    at: float
    band: tuple[float, float]
    width: int = 180


def glyph(
    estimate: float, low: float | None, high: float | None, borders: tuple[float, float]
) -> Glyph | None:
    """Where to draw a point, its interval and the range that the claim allows."""
    low, high = (estimate if low is None else low), (estimate if high is None else high)
    ends = [low, high, estimate, *(b for b in borders if math.isfinite(b))]
    if not all(map(math.isfinite, ends)):
        return None
    span = (max(ends) - min(ends)) or abs(max(ends)) or 1.0
    left, right = min(ends) - 0.15 * span, max(ends) + 0.15 * span
    width = Glyph.width

    def place(value: float) -> float:
        return round(width * min(1.0, max(0.0, (value - left) / (right - left))), 1)

    return Glyph(place(low), place(high), place(estimate), (place(borders[0]), place(borders[1])))
