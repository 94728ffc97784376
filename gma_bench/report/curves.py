"""Scaling figures, drawn from records alone: SVG, PDF and PNG at the width of a paper's column."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gma_bench.report.groups import Record, is_number
from gma_bench.report.paper import Paper
from gma_bench.report.profiles import curve
from gma_bench.report.stats import mean, std
from gma_bench.report.style import COLUMN_INCHES, RC, drawing, looks
from gma_bench.report.tables import Results
from gma_bench.results.growth import crossing, fit
from gma_bench.results.store import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

FORMATS = ("svg", "pdf", "png")
OURS, RIVALS = "gma", ("sdpa", "mha")
PASS_NAMES = {
    "forward": "forward",
    "forward_backward": "forward and backward",
    "decode": "decoding",
}


DASHES = ("-", "--", (0, (1, 1.2)))
"""Of a mixer, and of its variants."""


@dataclass
class Line:
    """One mixer's curve.

    Attributes:
        mixer: its name in records; gives colour and marker.
        label: what the legend says, without the slope.
        points: x to y, drawn as a line.
        marked: x to y, drawn as markers (measured points of a simulated curve).
        errors: x to the standard deviation over seeds.
        lost: x to (y or None) of cells that ran out of memory; drawn as crosses.
        variant: 0 for the mixer itself, 1, 2 for another pass or backend of it; gives the dashes.
    """

    mixer: str
    label: str
    points: dict[float, float]
    marked: dict[float, float] | None = None
    errors: dict[float, float] = field(default_factory=dict)
    lost: dict[float, float | None] = field(default_factory=dict)
    variant: int = 0


@dataclass
class Plot:
    """A figure: lines, axes and the words around them.

    Attributes:
        name: stem of its files.
        x, y: titles of the axes; ``x_unit``, ``y_unit`` choose how ticks are written, unless
            ``x_names`` has a name for the place. ``x_symbol`` stands for x in the figure.
        caption: stands under the figure.
        slopes: whether the legend gives the slope on log–log axes.
        log_y: whether y is logarithmic, too.
        limit: a horizontal line with its name (the memory budget).
        crossing_of: the line whose crossings with :data:`RIVALS` are written into the figure.
    """

    name: str
    title: str
    x: str
    y: str
    lines: list[Line]
    caption: str = ""
    x_symbol: str = "N"
    x_unit: str = "count"
    x_names: dict[float, str] = field(default_factory=dict)
    y_unit: str = "number"
    slopes: bool = True
    log_y: bool = True
    limit: tuple[float, str] | None = None
    crossing_of: str | None = OURS


def draw_all(records: list[Record], folder: Path, paper: Paper) -> list[Path]:
    """Draw every figure that the records have rows or metrics for.

    Args:
        records: of one scale.
        folder: where the files go.
        paper: for names and the paper's statements.

    Returns:
        The files written, ``<folder>/<figure>.{svg,pdf,png}``.
    """
    if not records:
        return []
    results = Results(records[0]["scale"], records, [], paper)
    makers: list[Callable[[Results], Plot | None]] = [
        lambda r: memory_by_length(r, "layer"),
        lambda r: memory_by_length(r, "model"),
        memory_by_components,
        lambda r: time_by_length(r, "forward_backward"),
        lambda r: time_by_length(r, "forward"),
        time_by_components,
        decode_by_context,
        listops_by_length,
        recall_by_pairs,
        recall_by_state,
    ]
    plots = [plot for make in makers if (plot := make(results)) is not None]
    return [path for plot in plots for path in save(plot, folder)]


# --- what the figures show -------------------------------------------------------------------


def memory_by_length(results: Results, scope: str) -> Plot | None:
    """Peak bytes against N: simulated as a line, measured as markers, OOM as crosses."""
    lines, budget = [], None
    where = {"sweep": "length", "scope": scope, "pass": "forward_backward"}
    for mixer, rows in _profiles(results, "memory"):
        simulated = curve(rows, where | {"method": "simulated"})
        measured = curve(rows, where | {"method": "measured"})
        points = _points(simulated or measured, "seq_len", "peak_bytes")
        if not points:
            continue
        lost = {
            r["seq_len"]: points.get(r["seq_len"])
            for r in rows
            if r.get("status") == "OOM" and all(r.get(k) == v for k, v in where.items())
        }
        marked = _points(measured, "seq_len", "peak_bytes")
        lines.append(Line(mixer, results.paper.label(mixer), points, marked, lost=lost))
    budgets = {_setting(r, "task", "budget_gib") for r in results.records if r["task"] == "memory"}
    if len(budgets) == 1 and any(line.lost for line in lines):
        budget = budgets.pop()
    return _plot(
        f"memory_by_length_{scope}",
        f"Peak memory of a {'mixer' if scope == 'layer' else 'model'}, forward and backward",
        "sequence length N", "peak above baseline", lines,
        _statement(results, "memory-linear", "memory-quadratic")
        + " Lines: simulated; markers: measured" + ("; ×: out of memory." if budget else "."),
        results, x_unit="tokens", y_unit="bytes",
        limit=(budget * 2**30, f"{budget:g} GiB budget") if budget else None,
    )  # fmt: skip


def memory_by_components(results: Results) -> Plot | None:
    """Peak bytes against K at one length."""
    return _by_components(
        results, "memory", "memory_by_components", "Peak memory", "peak above baseline",
        "peak_bytes", "bytes", {"sweep": "components", "method": ["simulated", "measured"]},
    )  # fmt: skip


def time_by_components(results: Results) -> Plot | None:
    """Time of a call against K at one length."""
    return _by_components(
        results, "throughput", "time_by_components", "Time", "time of a call", "median_ms",
        "ms", {"sweep": "components"},
    )  # fmt: skip


def _by_components(
    results: Results, task: str, name: str, title: str, y: str, quantity: str, y_unit: str,
    where: dict[str, Any],
) -> Plot | None:  # fmt: skip
    lines, length = [], None
    for mixer, rows in _profiles(results, task):
        for step in ("forward_backward", "forward"):
            found = _any_components(rows, where | {"pass": step})
            points = _points(found, "num_components", quantity)
            if len(points) < 2:
                continue
            length = found[0]["seq_len"]
            label = f"{results.paper.label(mixer)}, {PASS_NAMES[step]}"
            lines.append(Line(mixer, label, points, variant=int(step == "forward")))
    shown = f"{title} against K" + (f" at N = {length:,}" if length else "")
    return _plot(
        name, shown, "components K", y, lines,
        "The paper: memory and compute are O(N·K).", results, y_unit=y_unit, crossing_of=None,
    )  # fmt: skip


def time_by_length(results: Results, step: str) -> Plot | None:
    """Time of a call against N; other backends of a mixer in dashes of their own."""
    lines = []
    for mixer, rows in _profiles(results, "throughput"):
        where = {"sweep": "length", "pass": step}
        for index, backend in enumerate(dict.fromkeys(r.get("backend") for r in rows)):
            points = _points(curve(rows, where | {"backend": backend}), "seq_len", "median_ms")
            name = results.paper.label(mixer) + (f" ({backend})" if index else "")
            if points:
                lines.append(Line(mixer, name, points, variant=index))
    return _plot(
        f"time_by_length_{step}", f"Time of a mixer, {PASS_NAMES[step]}", "sequence length N",
        "time of a call", lines, _statement(results, "throughput-behind"), results,
        x_unit="tokens", y_unit="ms",
    )  # fmt: skip


def decode_by_context(results: Results) -> Plot | None:
    """Time of one streamed token against the tokens before it."""
    lines, states = [], []
    for mixer, rows in _profiles(results, "throughput"):
        found = curve(rows, {"pass": "decode"})
        points = _points(found, "seq_len", "median_ms")
        if points:
            label = results.paper.label(mixer)
            lines.append(Line(mixer, label, points))
            longest = max(found, key=lambda r: r["seq_len"])
            states.append(f"{label} {_bytes(longest['state_bytes'])}")
    caption = "State of a layer at the longest context: " + ", ".join(states) + "."
    return _plot(
        "decode_by_context", "Decoding one token", "tokens in the context", "time of a token",
        lines, caption, results, x_symbol="context", x_unit="tokens", y_unit="ms",
    )  # fmt: skip


def listops_by_length(results: Results) -> Plot | None:
    """Test accuracy of ListOps by length of the expression."""
    pattern = re.compile(r"accuracy_len_(\d+)_(\d+)")
    names: dict[float, str] = {}

    def place(match: re.Match[str]) -> float:
        middle = math.sqrt(max(1, int(match[1])) * int(match[2]))
        names[middle] = f"{match[1]}–{match[2]}"
        return middle

    lines = _quality(results, "listops", pattern, place)
    return _plot(
        "listops_by_length", "ListOps accuracy by length", "length of the expression",
        "test accuracy", lines, _statement(results, "lra-average") + _seeds(results, "listops"),
        results, y_unit="percent", slopes=False, log_y=False, crossing_of=None, x_names=names,
    )  # fmt: skip


def recall_by_pairs(results: Results) -> Plot | None:
    """Test accuracy of associative recall by number of pairs to remember."""
    lines = _quality(results, "mqar", re.compile(r"accuracy_pairs_(\d+)"), lambda m: int(m[1]))
    return _plot(
        "mqar_by_pairs", "Associative recall by number of pairs", "key–value pairs",
        "test accuracy", lines,
        "Not in the paper; task of Arora et al. (2023)." + _seeds(results, "mqar"), results,
        y_unit="percent", slopes=False, log_y=False, crossing_of=None,
    )  # fmt: skip


def recall_by_state(results: Results) -> Plot | None:
    """Test accuracy of associative recall against bytes of streaming state, over variants."""
    lines = []
    for mixer in results.mixers("mqar"):
        points: dict[float, float] = {}
        for group in results.groups.get(("mqar", mixer), []):
            sizes = [r["extra"].get("state_bytes") for r in group.finished]
            values = list(group.by_seed("test", "accuracy").values())
            if sizes and is_number(sizes[0]) and values:
                points[float(sizes[0])] = mean(values)
        if points:
            lines.append(Line(mixer, results.paper.label(mixer), dict(sorted(points.items()))))
    return _plot(
        "mqar_by_state", "Associative recall by size of state", "state of a layer",
        "test accuracy", lines,
        "Not in the paper; task of Arora et al. (2023)." + _seeds(results, "mqar"), results,
        x_unit="bytes", y_unit="percent", slopes=False, log_y=False, crossing_of=None,
    )  # fmt: skip


def _plot(
    name: str, title: str, x: str, y: str, lines: list[Line], caption: str, results: Results,
    **options: Any,
) -> Plot | None:  # fmt: skip
    if not lines:
        return None
    order = looks(line.mixer for line in lines)
    lines.sort(key=lambda line: order[line.mixer].order)
    if results.below_paper:
        caption += f" Scale {results.scale}: not the paper’s size."
    return Plot(name, title, x, y, lines, caption.strip(), **options)


def _profiles(results: Results, task: str) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """Each mixer with the rows of its main cell."""
    for mixer in results.mixers(task):
        group = results.main(task, mixer)
        if group is not None and group.finished:
            yield mixer, group.finished[-1]["rows"]


def _any_components(rows: list[dict[str, Any]], where: dict[str, Any]) -> list[dict[str, Any]]:
    # `curve` keeps rows of one K; here K is what varies.
    return [
        row | {"num_components": k}
        for k in sorted({r["num_components"] for r in rows if r.get("num_components")})
        for row in curve((r for r in rows if r.get("num_components") == k), where)
    ]


def _points(rows: list[dict[str, Any]], x: str, y: str) -> dict[float, float]:
    return {
        r[x]: r[y] for r in sorted(rows, key=lambda r: r[x]) if is_number(r.get(y)) and r[y] > 0
    }


def _quality(
    results: Results, task: str, pattern: re.Pattern[str], place: Callable[[re.Match[str]], float]
) -> list[Line]:
    lines = []
    for mixer in results.mixers(task):
        group = results.main(task, mixer)
        names = {n for r in (group.finished if group else []) for n in r["metrics"].get("test", {})}
        points, errors = {}, {}
        for name in names:
            match = pattern.fullmatch(name)
            values = list(group.by_seed("test", name).values()) if group and match else []
            if match and values:
                points[place(match)] = mean(values)
                errors[place(match)] = std(values) or 0.0
        if points:
            ordered = dict(sorted(points.items()))
            lines.append(Line(mixer, results.paper.label(mixer), ordered, errors=errors))
    return lines


def _setting(record: Record, *path: str) -> Any:
    value: Any = record["config"]
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _statement(results: Results, *ids: str) -> str:
    found = {c["id"]: " ".join(str(c["statement"]).split()) for c in results.paper.claims}
    said = "; ".join(found[i] for i in ids if i in found)
    return f"The paper: {said}." if said else ""


def _seeds(results: Results, task: str) -> str:
    count = len(results.seeds(task))
    return f" Mean and standard deviation of {count} seeds." if count > 1 else ""


# --- drawing ---------------------------------------------------------------------------------

LINE_POINTS = 8.6  # height of a line of the legend and of the caption
CAPTION_POINTS = 6.5
AXES_INCHES = 1.95


def save(plot: Plot, folder: Path) -> list[Path]:
    """Draw a figure and write it in every format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    about: dict[str, dict[str, Any]] = {
        "svg": {"Title": plot.title, "Description": plot.caption, "Date": None},
        "pdf": {"Title": plot.title, "Subject": plot.caption, "CreationDate": None},
        "png": {"Title": plot.title, "Description": plot.caption},
    }
    with drawing(RC):
        canvas = Figure()
        FigureCanvasAgg(canvas)
        draw(plot, canvas)
        paths = []
        for kind in FORMATS:
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=kind, metadata=about[kind])
            paths.append(write_atomic(folder / f"{plot.name}.{kind}", buffer.getvalue()))
    return paths


def draw(plot: Plot, canvas: Canvas) -> None:
    """Lay out title, axes, legend and caption from top to bottom; every height is known beforehand."""
    labels = [_label(plot, line) for line in plot.lines]
    columns = _legend_columns(canvas, labels)
    rows = math.ceil(len(labels) / columns)
    caption = _wrapped(canvas, _full_caption(plot), COLUMN_INCHES * 0.96, CAPTION_POINTS)
    unit = LINE_POINTS / 72
    below = 0.40 + unit * rows + unit * len(caption) + 0.05
    height = 0.26 + AXES_INCHES + below
    canvas.set_size_inches(COLUMN_INCHES, height)
    left, right = 0.62, 0.12
    axes = canvas.add_axes(
        (
            left / COLUMN_INCHES,
            below / height,
            1 - (left + right) / COLUMN_INCHES,
            AXES_INCHES / height,
        )
    )
    _lines(plot, axes)
    _axes(plot, axes)
    _crossings(plot, axes)
    canvas.text(0.02, 1 - 0.05 / height, plot.title, va="top", ha="left", fontsize=8, weight="bold")
    handles = axes.get_legend_handles_labels()[0]
    canvas.legend(
        handles, labels, loc="upper left", ncols=columns, borderaxespad=0, borderpad=0,
        bbox_to_anchor=(0.03, (below - 0.38) / height),
    )  # fmt: skip
    canvas.text(
        0.02, 0.04 / height, "\n".join(caption), va="bottom", ha="left", fontsize=CAPTION_POINTS,
        color="#444444", linespacing=LINE_POINTS / CAPTION_POINTS / 1.2,
    )  # fmt: skip


def _wrapped(canvas: Canvas, text: str, inches: float, points: float) -> list[str]:
    """Lines of ``text`` that are at most so wide in the font they are drawn in."""
    lines: list[str] = []
    for word in text.split():
        if lines and _width(canvas, f"{lines[-1]} {word}", points) <= inches:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _width(canvas: Canvas, text: str, points: float) -> float:
    """Inches that a line of text takes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.font_manager import FontProperties

    renderer = cast(FigureCanvasAgg, canvas.canvas).get_renderer()
    font = FontProperties(size=points)
    return float(renderer.get_text_width_height_descent(text, font, ismath=False)[0] / canvas.dpi)


def _legend_columns(canvas: Canvas, labels: list[str]) -> int:
    """Two where they fit side by side, else one."""
    size = RC["legend.fontsize"]
    handle = (RC["legend.handlelength"] + 0.8) * size / 72  # and the space up to its text
    half = math.ceil(len(labels) / 2)
    needed = RC["legend.columnspacing"] * size / 72 + sum(
        handle + max((_width(canvas, label, size) for label in column), default=0.0)
        for column in (labels[:half], labels[half:])
    )
    return 2 if needed <= COLUMN_INCHES * 0.97 else 1


def _label(plot: Plot, line: Line) -> str:
    if not plot.slopes:
        return line.label
    growth = fit(list(line.points), list(line.points.values()))
    return line.label if growth is None else f"{line.label}, slope {_signed(growth.slope)}"


def _signed(value: float) -> str:
    shown = f"{value:.2f}"
    return "0.00" if float(shown) == 0 else shown.replace("-", "−")


def _full_caption(plot: Plot) -> str:
    slope = " Slopes: log–log, upper half of the range." if plot.slopes else ""
    return f"{plot.caption}{slope}{''.join(f' {note}' for note in _notes(plot))}"


def _lines(plot: Plot, axes: Axes) -> None:
    order = looks(line.mixer for line in plot.lines)
    for index, line in enumerate(plot.lines):
        look = order[line.mixer]
        # Error bars at one place would hide each other: each line stands a little beside it.
        aside = 1 + 0.012 * (index - (len(plot.lines) - 1) / 2) if any(line.errors.values()) else 1
        xs, ys = [x * aside for x in line.points], list(line.points.values())
        marked = line.points if line.marked is None else line.marked
        axes.plot(
            xs, ys, color=look.colour, marker=look.marker, label=line.label,
            markevery=[i for i, x in enumerate(line.points) if x in marked],
            linestyle=DASHES[min(line.variant, len(DASHES) - 1)], markeredgecolor="white", markeredgewidth=0.4,
            zorder=4 if line.mixer == OURS else 3,
        )  # fmt: skip
        if any(line.errors.values()):
            errors = [line.errors.get(x, 0.0) for x in line.points]
            axes.errorbar(
                xs, ys, errors, fmt="none", ecolor=look.colour, elinewidth=0.7, capsize=1.2,
                capthick=0.7, alpha=0.8,
            )  # fmt: skip
        crosses = {x: y for x, y in line.lost.items() if y is not None}
        axes.plot(
            list(crosses), list(crosses.values()), linestyle="none", marker="x", markersize=4.5,
            markeredgewidth=1.2, color=look.colour, zorder=5,
        )  # fmt: skip
    if plot.limit is not None:
        axes.axhline(plot.limit[0], color="#666666", linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            plot.limit[1], (0.24, plot.limit[0]), xycoords=("axes fraction", "data"), fontsize=6,
            color="#555555", xytext=(1, 1.5), textcoords="offset points",
        )  # fmt: skip


def _axes(plot: Plot, axes: Axes) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    if plot.log_y:
        axes.set_yscale("log")
    axes.set_xlabel(plot.x, labelpad=2)
    axes.set_ylabel(plot.y, labelpad=2)
    xs = sorted({x for line in plot.lines for x in line.points})
    axes.xaxis.set_major_locator(FixedLocator(_x_ticks(xs)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda v, _: plot.x_names.get(v) or _written(v, plot.x_unit))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    if plot.log_y:
        axes.yaxis.set_major_locator(FixedLocator(_y_ticks(*axes.get_ylim(), plot.y_unit)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _written(v, plot.y_unit)))


def _x_ticks(xs: list[float], most: int = 6) -> list[float]:
    """Ticks at points that exist, at most so many, evenly spaced among them and the last one there."""
    step = math.ceil(len(xs) / most)
    return xs[::-1][::step][::-1]


def _y_ticks(low: float, high: float, unit: str) -> list[float]:
    base = 2.0 if unit == "bytes" else 10.0
    first, last = math.ceil(math.log(low, base)), math.floor(math.log(high, base))
    step = max(1, math.ceil((last - first + 1) / 7))
    if unit == "bytes":
        step = next(s for s in (1, 2, 5, 10, 20, 40) if s >= step)
        first = math.ceil(first / step) * step
    ticks = [base**e for e in range(first, last + 1, step)]
    if len(ticks) >= 3:
        return ticks
    return [
        m * 10.0**e
        for e in range(first - 1, last + 1)
        for m in (1, 2, 5)
        if low <= m * 10.0**e <= high
    ]


def _written(value: float, unit: str) -> str:
    if unit == "bytes":
        return _bytes(value)
    if unit == "percent":
        return f"{100 * value:.0f} %"
    if unit == "ms":
        return f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"
    if unit == "tokens":
        for size, name in ((2**20, "M"), (2**10, "k")):
            if value >= size and value % size == 0:
                return f"{value / size:g}{name}"
    return f"{value:.0f}" if value >= 10 else f"{value:g}"


def _bytes(value: float) -> str:
    for size, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f} B"


# --- where GMA becomes cheaper ---------------------------------------------------------------


def crossings(plot: Plot) -> list[tuple[str, float | None, float | None]]:
    """For each rival: its label, the x from which ours stays cheaper (None: nowhere), and y there."""
    by_mixer = {line.mixer: line for line in plot.lines if not line.variant}
    ours = by_mixer.get(plot.crossing_of or "")
    found = []
    for rival in RIVALS:
        theirs = by_mixer.get(rival)
        if ours is None or theirs is None or rival == ours.mixer:
            continue
        xs = sorted(set(ours.points) & set(theirs.points))
        if len(xs) < 2:
            continue
        at = crossing(xs, [ours.points[x] for x in xs], [theirs.points[x] for x in xs])
        found.append((theirs.label, at, None if at is None else _interpolated(ours.points, at)))
    return found


def _interpolated(points: dict[float, float], x: float) -> float:
    import numpy as np

    logs = np.interp(
        math.log(x), [math.log(p) for p in points], [math.log(y) for y in points.values()]
    )
    return float(np.exp(logs))


def _notes(plot: Plot) -> list[str]:
    ours = next((line for line in plot.lines if line.mixer == plot.crossing_of), None)
    notes = []
    for label, at, _ in crossings(plot):
        assert ours is not None
        if at is None:
            notes.append(f"{ours.label} is not cheaper than {label} at the longest length.")
        elif at == min(ours.points):
            notes.append(f"{ours.label} is cheaper than {label} at every length.")
    return notes


def _crossings(plot: Plot, axes: Axes) -> None:
    ours = next((line for line in plot.lines if line.mixer == plot.crossing_of), None)
    if ours is None:
        return
    shown = [
        (label, at, y) for label, at, y in crossings(plot) if at and y and at > min(ours.points)
    ]
    for level, (label, at, y) in enumerate(shown):
        axes.plot([at], [y], marker="o", markersize=7, fillstyle="none", color="#333333",
                  markeredgewidth=0.7, zorder=6, linestyle="none")  # fmt: skip
        place = axes.transAxes.inverted().transform(axes.transData.transform((at, y)))[0]
        axes.annotate(
            f"cheaper than {label}\nfrom {plot.x_symbol} ≈ {at:,.0f}", (at, y), xycoords="data",
            xytext=(min(max(place - 0.02, 0.02), 0.5), 0.97 - 0.17 * level),
            textcoords="axes fraction", fontsize=6, va="top", ha="left", color="#222222",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "#777777", "shrinkB": 4,
                        "relpos": (0.04, 0)},
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}, zorder=7,
        )  # fmt: skip
