"""What changed between two sets of records: another commit, another machine, another config."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gma_bench.errors import UserError
from gma_bench.report.claims import judge_all
from gma_bench.report.groups import Group, Record, differences, paired
from gma_bench.report.stats import mean, std, t_interval
from gma_bench.report.table import Cell, Column, Row, Table
from gma_bench.report.tables import MIB, Results
from gma_bench.results import read_all

COSTS = (("tokens_per_s", "tokens/s", 1.0, 0), ("peak_memory_bytes", "peak memory (MiB)", MIB, 1))
Figure = tuple[str, dict[int, float], dict[int, float], int]
"""Name, values by seed there and here, decimals."""


def read_other(path: Path, here: Results) -> Results:
    """The other set: a results folder, or a scale's folder in one.

    Raises:
        UserError: it holds no records of the scale.
    """
    folder, scale = (path.parent, path.name) if (path / "runs").is_dir() else (path, here.scale)
    records, broken = read_all(folder, scale)
    if not records:
        raise UserError(
            f"against={path}: no records of scale {scale} in {folder / scale / 'runs'}. "
            "Try: a results folder, such as --against ../other/results"
        )
    return Results(scale, records, broken, here.paper)


def compare(here: Results, there: Results, name: str) -> list[Table]:
    """Two tables: each cell's own metric with its costs, and every other metric.

    Values are matched by task, mixer, seed and metric; the interval is of the mean paired
    difference over seeds.
    """
    primary, others, notes = [], [], []
    for task in dict.fromkeys([*there.tasks, *here.tasks]):
        for mixer in dict.fromkeys([*there.mixers(task), *here.mixers(task)]):
            old, new = there.main(task, mixer), here.main(task, mixer)
            label = f"{here.paper.label(task)}, {here.paper.label(mixer)}"
            if old is None or new is None:
                if old or new:
                    notes.append(f"{label}: only {'here' if new else f'in {name}'}.")
                continue
            notes += _changes(label, old, new)
            primary += [_row(label, figure, new) for figure in _own(old, new)]
            others += [_row(label, figure, new) for figure in _others(old, new)]
    notes += _verdicts(here, there)
    caption = (
        f"{name} ({_origin(there.records)}) against this set ({_origin(here.records)}). "
        f"Scale {there.scale} and {here.scale}. Difference: this set less the other, paired over "
        "seeds, with its 95 % t interval."
    )
    columns = [
        Column("before", "before"), Column("after", "after"), Column("difference", "difference"),
        Column("change_percent", "change", "%", digits=1), Column("seeds", "paired seeds", digits=0),
    ]  # fmt: skip
    made = [Table("against", "What changed", caption, columns, primary, "cell, figure", notes)]
    if others:
        title = "What changed in every other metric"
        made.append(Table("against_metrics", title, caption, columns, others, "cell, figure"))
    return made


def _own(old: Group, new: Group) -> list[Figure]:
    found: list[Figure] = []
    record = (new.finished or new.records)[0]
    if old.by_seed() and new.by_seed():
        name = f"{record['split']} {record['metric']}"
        found.append((name, old.by_seed(), new.by_seed(), 4))
    for key, unit, divide, digits in COSTS:
        before, after = [
            {seed: value / divide for seed, value in g.column(key).items()} for g in (old, new)
        ]
        if before and after:
            found.append((unit, before, after, digits))
    return found


def _others(old: Group, new: Group) -> list[Figure]:
    if not old.finished or not new.finished:
        return []
    record = new.finished[0]
    own = (record["split"], record["metric"])
    names = [(s, m) for s, values in record["metrics"].items() for m in values if (s, m) != own]
    found = [(f"{s} {m}", old.by_seed(s, m), new.by_seed(s, m), 4) for s, m in names]
    return [figure for figure in found if figure[1] and figure[2]]


def _row(label: str, figure: Figure, group: Group) -> Row:
    name, before, after, digits = figure
    pairs = paired(before, after)
    cells = [
        Cell(mean(list(v.values())), std(list(v.values())), digits=digits) for v in (before, after)
    ]
    cells[1].records = tuple(r["run_id"] for r in group.finished if r["seed"] in after)
    if not pairs:
        return Row(f"{label}: {name}", [*cells, Cell(text="no seed in both"), Cell(), Cell(0.0)])
    gaps = [new - old for old, new in pairs.values()]
    interval = t_interval(gaps)
    if not any(gaps):
        suffix = " (same to the last digit)"
    elif interval.low is None or interval.high is None:
        suffix = ""
    else:
        suffix = f" [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    old_mean = mean([old for old, _ in pairs.values()])
    change = Cell(100 * interval.estimate / abs(old_mean)) if old_mean else Cell()
    gap = Cell(interval.estimate, suffix=suffix, digits=digits)
    return Row(f"{label}: {name}", [*cells, gap, change, Cell(float(len(pairs)))])


def _changes(label: str, old: Group, new: Group) -> list[str]:
    notes = []
    changed = differences(old.config, new.config)
    if changed:
        listed = "; ".join(f"{k}: {a} → {b}" for k, (a, b) in sorted(changed.items()))
        notes.append(f"{label}: config changed ({listed}).")
    if old.finished and new.finished and old.fingerprint != new.fingerprint:
        notes.append(f"{label}: data changed ({old.fingerprint} → {new.fingerprint}).")
    seeds = [{r["seed"] for r in g.finished} for g in (old, new)]
    for which, words in ((seeds[0] - seeds[1], "there"), (seeds[1] - seeds[0], "here")):
        if which:
            notes.append(
                f"{label}: seed {', '.join(map(str, sorted(which)))} finished only {words}."
            )
    return notes


def _verdicts(here: Results, there: Results) -> list[str]:
    before, after = ({v.id: v.outcome for v in judge_all(results)} for results in (there, here))
    return [
        f"Claim {claim}: {before[claim]} → {after[claim]}."
        for claim in after if before[claim] != after[claim]
    ]  # fmt: skip


def _origin(records: list[Record]) -> str:
    """Commits and machines, the commonest first."""
    commits = Counter(
        str(r["git"].get("commit") or "unknown")[:10] + ("+" if r["git"].get("dirty") else "")
        for r in records
    )
    machines = Counter(f"{r['machine'].get('host')}, {r['machine'].get('device')}" for r in records)
    torch = Counter(f"torch {r['versions'].get('torch', 'unknown')}" for r in records)
    return "; ".join(
        " / ".join(value for value, _ in found.most_common())
        for found in (commits, machines, torch)
    )
