"""Rows of profiling cells: which of them make up one curve."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from gma_bench.report.groups import is_number
from gma_bench.report.tables import Results
from gma_bench.results.growth import select

Rows = list[dict[str, Any]]

SETTINGS = (
    "sweep", "scope", "pass", "method", "device", "dtype", "causal", "batch_size",
    "num_components", "backend", "num_threads", "compiled",
)  # fmt: skip
"""Columns that say how a row was measured; rows of one curve agree in them."""


def profile(
    results: Results, task: str, mixer: str, where: dict[str, Any]
) -> tuple[Rows, list[str]]:
    """The rows of a mixer's profiling cell that make up one curve, and the records they are of.

    Args:
        where: column to value; a list gives alternatives, and the first that has rows is taken.

    Returns:
        Rows that were reached, measured like the first of them, and run ids. Both are empty where
        there is no such cell.
    """
    found = results.main(task, mixer)
    if found is None:
        return [], []
    rows: Rows = []
    records = []
    for record in found.finished:
        mine = curve(record["rows"], where)
        rows += mine
        records += [record["run_id"]] if mine else []
    return rows, records


def curve(rows: Iterable[dict[str, Any]], where: dict[str, Any]) -> Rows:
    """Rows of status ``ok`` that match ``where`` and share the first one's :data:`SETTINGS`."""
    rows = list(rows)
    options = [v if isinstance(v, list) else [v] for v in where.values()]
    for values in product(*options):
        chosen = select(rows, **dict(zip(where, values, strict=True)))
        if chosen:
            first = chosen[0]
            return [r for r in chosen if all(r.get(k) == first.get(k) for k in SETTINGS)]
    return []


def relative_times(rows: Rows) -> dict[int, float]:
    """Sequence length to time over the reference mixer's, both timed in turn in the same minute.

    Two mixers compare through these better than through their milliseconds, which were taken at
    different times: what slows the machine slows the reference as well.
    """
    return {
        int(row["seq_len"]): float(row["ratio"]) for row in rows
        if is_number(row.get("ratio")) and row["ratio"] > 0
    }  # fmt: skip
