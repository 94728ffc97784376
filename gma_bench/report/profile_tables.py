"""Tables of cells that measure rather than train: memory, throughput, interpretability."""

from __future__ import annotations

import math
from typing import Any

from gma_bench.report.groups import Group, is_number
from gma_bench.report.profiles import Rows, curve, relative_times
from gma_bench.report.stats import FEW, mean, mean_interval, std
from gma_bench.report.table import Cell, Column, Kind, Row, Table
from gma_bench.report.tables import MIB, Results, over_seeds
from gma_bench.results.growth import fit

MOST_LENGTHS = 6
TRAINING_PASS = ["forward_backward"]
REFERENCE_MIXER = "sdpa"
NOISY = 0.05
"""Interquartile range over median above which a time is marked."""


def memory(results: Results) -> list[Table]:
    """Peak bytes against N, a table for the mixer alone and one for the model around it."""
    titles = {"layer": "Peak memory of a mixer", "model": "Peak memory of a model"}
    tables = []
    for scope, title in titles.items():
        where = {"sweep": "length", "scope": scope, "pass": TRAINING_PASS}
        method = {"method": ["simulated", "measured"]}
        table = _by_length(
            results, "memory", f"memory_{scope}", f"{title}, forward and backward",
            where | method, "peak_bytes", "peak_mib", "MiB", 1 / MIB, "min",
        )  # fmt: skip
        if table:
            table.columns.append(Column("exponent_of_n", "exponent of N", digits=2))
            table.footnotes.append(
                "Parameters, their gradients and the inputs are left out. Exponent: slope on "
                "log–log axes over the upper half of the lengths, with its 95 % t interval."
            )
            for row, rows in zip(
                table.rows, _rows_of(results, "memory", where | method), strict=True
            ):
                row.cells.append(_exponent(rows))
            tables.append(table)
    return tables


def throughput(results: Results) -> list[Table]:
    """Tokens a second against N, and time over fused SDPA's."""
    where = {"sweep": "length", "pass": TRAINING_PASS}
    table = _by_length(
        results, "throughput", "throughput", "Throughput of a mixer, forward and backward", where,
        "tokens_per_s", "tokens_per_s", "tokens/s", 1, "max",
    )  # fmt: skip
    if table is None:
        return []
    label = results.paper.label(REFERENCE_MIXER)
    table.columns.append(Column("time_ratio_to_sdpa", f"time / {label}", digits=2))
    table.footnotes.append(
        f"Time / {label}: each length timed in turn with {label}; geometric mean over lengths, "
        f"with its 95 % interval (t, bootstrap from {FEW} lengths on)."
    )
    for row, rows in zip(table.rows, _rows_of(results, "throughput", where), strict=True):
        row.cells.append(_ratio(rows))
    return [table]


def _lines(
    results: Results, task: str, where: dict[str, Any]
) -> list[tuple[str, tuple[str, ...], Group | None, Rows, Rows]]:
    """Label, variant, group, rows that were reached, and all rows, for every line of a table."""
    lines: list[tuple[str, tuple[str, ...], Group | None, Rows, Rows]] = []
    for mixer in results.mixers(task):
        label = results.paper.label(mixer)
        groups = results.groups.get((task, mixer), [])
        if not groups:
            lines.append((label, (), None, [], []))
        for group in groups:
            every = [row for record in group.finished for row in record["rows"]]
            backends = list(dict.fromkeys(row.get("backend") for row in every)) or [None]
            for index, backend in enumerate(backends):
                more = {} if backend is None else {"backend": backend}
                # The first is the mixer's own choice; the others are measured beside it.
                name = (f"backend={backend}",) if index else ()
                reached = [r for rec in group.finished for r in curve(rec["rows"], where | more)]
                lines.append((label, group.variant + name, group, reached, every))
    return lines


def _rows_of(results: Results, task: str, where: dict[str, Any]) -> list[Rows]:
    return [reached for _, _, _, reached, _ in _lines(results, task, where)]


def _by_length(
    results: Results, task: str, table_id: str, title: str, where: dict[str, Any],
    quantity: str, key: str, unit: str, factor: float, better: str,
) -> Table | None:  # fmt: skip
    lines = _lines(results, task, where)
    lengths = sorted({int(r["seq_len"]) for *_, reached, _ in lines for r in reached})
    if not lengths:
        return None
    lengths = _spread(lengths)
    digits = 0 if key == "tokens_per_s" else 1
    columns = [
        Column(f"{key}_n{n}", f"N = {n:,}", unit, "max" if better == "max" else "min", digits, True)
        for n in lengths
    ]
    rows = []
    for label, variant, group, reached, every in lines:
        cells = [_at(n, group, reached, every, where, quantity, factor) for n in lengths]
        kind: Kind = "variant" if variant else "main"
        rows.append(Row(label, cells, variant, kind))
    first = next((reached[0] for *_, reached, _ in lines if reached), {})
    return Table(table_id, title, _caption(results, task, first), columns, rows)


def _spread(lengths: list[int], most: int = MOST_LENGTHS) -> list[int]:
    """At most so many of the lengths, the ends among them, evenly on a logarithmic axis."""
    if len(lengths) <= most:
        return lengths
    step = (len(lengths) - 1) / (most - 1)
    return [lengths[round(i * step)] for i in range(most)]


def _at(
    length: int, group: Group | None, reached: Rows, every: Rows, where: dict[str, Any],
    quantity: str, factor: float,
) -> Cell:  # fmt: skip
    if group is None:
        return Cell(text="not run")
    if not group.finished:
        return over_seeds(group, {})
    here = [r for r in reached if r["seq_len"] == length]
    values = [float(r[quantity]) * factor for r in here if is_number(r.get(quantity))]
    ids = tuple(r["run_id"] for r in group.finished)
    if values:
        return Cell(mean(values), std(values), len(values), notes=_noise(here), records=ids)
    fixed = {k: v for k, v in where.items() if not isinstance(v, list)}
    lost = [
        r for r in every
        if r.get("seq_len") == length and all(r.get(k) == v for k, v in fixed.items())
        and r.get("status") not in (None, "ok")
    ]  # fmt: skip
    if not lost:
        return Cell()
    reason = str(lost[0].get("reason") or "")
    return Cell(text=str(lost[0]["status"]), notes=(reason,) if reason else (), records=ids)


def _noise(rows: Rows) -> tuple[str, ...]:
    """A note where a time scattered up to the time cap, as on a machine with other work."""
    spreads = [r["iqr_ms"] / r["median_ms"] for r in rows if is_number(r.get("iqr_ms"))]
    if not any(spread > NOISY for spread in spreads):
        return ()
    return (
        f"Noisy: interquartile range above {NOISY:.0%} of the median when the time cap was reached.",
    )


def _exponent(rows: Rows) -> Cell:
    found = fit([r["seq_len"] for r in rows], [r["peak_bytes"] for r in rows])
    if found is None:
        return Cell()
    ends = f" [{found.low:.2f}, {found.high:.2f}]" if found.points > 2 else ""
    return Cell(found.slope, suffix=ends)


def _ratio(rows: Rows) -> Cell:
    logs = [math.log(ratio) for ratio in relative_times(rows).values()]
    if not logs:
        return Cell()
    found = mean_interval(logs).mapped(math.exp)
    ends = "" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return Cell(found.estimate, suffix=ends, notes=_noise(rows))


def _caption(results: Results, task: str, row: dict[str, Any]) -> str:
    shown = {
        "method": "{}", "device": "on {}", "dtype": "{}", "batch_size": "batch {}",
        "causal": "causal: {}", "num_threads": "{} threads",
    }  # fmt: skip
    parts = [
        form.format({True: "yes", False: "no"}.get(row[k], row[k]) if k == "causal" else row[k])
        for k, form in shown.items() if row.get(k) is not None
    ]  # fmt: skip
    scale, *rest = results.caption([task]).split(".", 1)
    return f"{scale}; {', '.join(parts)}.{''.join(rest)}" if parts else results.caption([task])


INTERPRETED = (
    # metric, name, digits
    ("num_components", "components, K", 0),
    ("components_in_use", "components in use", 1),
    ("components_in_use_fraction", "share of components in use", 3),
    ("usage_entropy", "usage entropy / log K", 3),
    ("nmi", "NMI with surface-form categories", 3),
    ("nmi_permuted", "NMI with shuffled categories", 3),
    ("ami", "AMI with surface-form categories", 3),
    ("affinity_length", "tokens of the affinity, N", 0),
    ("affinity_rank_max", "largest rank of the affinity", 0),
    ("affinity_min", "smallest affinity", 6),
    ("gradient_norm_initial", "gradient norm at the start", 3),
    ("gradient_norm_max", "largest gradient norm", 3),
    ("lipschitz_empirical", "largest slope found", 3),
    ("lipschitz_bound", "Lipschitz bound", 3),
)

FIGURE_NAMES = {metric: name for metric, name, _ in INTERPRETED}


def interpretability(results: Results) -> list[Table]:
    """Use of components and what they go with; the paper's figures beside ours."""
    task = "interpretability"
    if task not in results.tasks:
        return []
    groups = [
        (results.paper.label(mixer), group)
        for mixer in results.mixers(task) for group in results.groups.get((task, mixer), [])
    ]  # fmt: skip
    columns = []
    for index, (label, group) in enumerate(groups):
        name = f"{label} [{', '.join(group.variant)}]" if group.variant else label
        # The digits of a row, not of the column: figures of one column are of many kinds.
        columns.append(Column(f"{group.mixer}_{index}" if index else group.mixer, name))
    columns.append(Column("paper", "paper", reference=True))
    rows = []
    for metric, name, digits in INTERPRETED:
        cells = [
            over_seeds(group, group.by_seed("val", metric)) for _, group in groups
        ]  # fmt: skip
        if not any(cell.value is not None for cell in cells):
            continue
        cells.append(Cell(_papers(results, metric)))
        for cell in cells:
            cell.digits = digits
        rows.append(Row(name, cells))
    if not rows:
        return []
    caption = results.caption([task])
    return [Table(task, "Interpretability", caption, columns, rows, label_head="figure")]


def _papers(results: Results, metric: str) -> float | None:
    known = results.paper.figure("interpretability", "gma", "val", metric)
    if known is None and metric == "components_in_use_fraction":
        used = results.paper.figure("interpretability", "gma", "val", "components_in_use")
        of = results.paper.figure("interpretability", "gma", "val", "num_components")
        return used / of if used is not None and of else None
    return known


def other_profiles(results: Results) -> list[Table]:
    """Rows of profiling cells that this module knows nothing of, as they are."""
    known = {"memory", "throughput", "interpretability"}
    tables = []
    for task in results.tasks:
        records = [r for r in results.records if r["task"] == task and r["rows"]]
        if task in known or not records or any(is_number(r.get("value")) for r in records):
            continue
        heads = list(dict.fromkeys(k for r in records for row in r["rows"] for k in row))
        columns = [Column(k, k) for k in heads]
        rows = [
            Row(results.paper.label(r["mixer"]), [_any(row.get(k), r["run_id"]) for k in heads])
            for r in records for row in r["rows"]
        ]  # fmt: skip
        title = results.paper.label(task)
        tables.append(Table(task, title, results.caption([task]), columns, rows))
    return tables


def _any(value: Any, run: str) -> Cell:
    if is_number(value):
        digits = 0 if float(value).is_integer() else 3
        return Cell(float(value), digits=digits, records=(run,))
    return Cell(text="" if value is None else str(value), records=(run,))
