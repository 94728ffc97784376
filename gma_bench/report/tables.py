"""The paper's tables, from records: what stands in which row and column."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gma_bench.report.groups import (
    Group,
    Record,
    average,
    differences,
    group,
    is_number,
    lines,
    metric_of,
)
from gma_bench.report.paper import Paper
from gma_bench.report.stats import mean, std
from gma_bench.report.table import Better, Cell, Column, Kind, Row, Table

MIB = 2**20
PROFILING = ("memory", "throughput", "interpretability")
LRA = ("listops", "text")
NOT_SHOWN = ("loss", "majority_accuracy")
SPLIT_NAMES = {"val": "validation"}


@dataclass
class Results:
    """Records of one scale, grouped, beside what the paper says.

    Attributes:
        scale: the scale that the records are of.
        records: every valid record.
        broken: what was wrong with the files that are not.
    """

    scale: str
    records: list[Record]
    broken: list[str]
    paper: Paper

    def __post_init__(self) -> None:
        self.groups = group(self.records)
        self.tasks = sorted({r["task"] for r in self.records}, key=self._task_order)

    def _task_order(self, task: str) -> tuple[int, str]:
        order = [*LRA, "wikitext103", "mqar"]
        return (order.index(task) if task in order else len(order), task)

    @property
    def below_paper(self) -> bool:
        """Whether the records are of a smaller scale than the paper's."""
        return self.scale != self.paper.scale

    def mixers(self, task: str) -> list[str]:
        """The paper's mixers of a task, then any others with records."""
        return self.paper.ordered(task, {m for t, m in self.groups if t == task})

    def main(self, task: str, mixer: str) -> Group | None:
        """The group that stands for a mixer on a task."""
        found = self.groups.get((task, mixer))
        return found[0] if found else None

    def seeds(self, task: str) -> set[int]:
        """Every seed that a main group of the task ran."""
        mains = [found[0] for (t, _), found in self.groups.items() if t == task]
        return {r["seed"] for found in mains for r in found.records}

    def caption(self, tasks: Iterable[str]) -> str:
        """Scale, data, and the warning on every table below the paper's size."""
        tasks = list(tasks)
        parts = [f"Scale {self.scale}"]
        for task in tasks:
            sources = {_source(r) for r in self.records if r["task"] == task and r["data"]}
            sources.discard("")
            if sources:
                parts.append(f"{self.paper.label(task)}: {' / '.join(sorted(sources))}")
        text = "; ".join(parts) + "."
        if self.below_paper:
            text += (
                " Not the paper’s size: smaller data, models and budgets; "
                "compare orders, not values."
            )
        return text


def _source(record: Record) -> str:
    data = record["data"]
    name, source = data.get("name"), data.get("source")
    if name and source:
        return f"{name} ({source})"
    return str(name or source or "")


def summary(results: Results) -> Table | None:
    """Mixer × task: each trained task's own metric, the paper's figure beside it."""
    tasks = [t for t in results.tasks if t not in PROFILING and _valued(results, t)]
    if not tasks:
        return None
    columns, known = [], {}
    for task in tasks:
        columns.append(_primary_column(results, task))
        known[task] = _paper_values(results, task)
        if known[task]:
            columns.append(_paper_column(columns[-1]))
    rows = []
    for mixer in _all_mixers(results, tasks):
        for line in lines(results.groups, tasks, mixer) or [{}]:
            variant = next((g.variant for g in line.values()), ())
            cells = []
            for task in tasks:
                cells.append(_task_cell(results, task, mixer, line.get(task), bool(variant)))
                if known[task]:
                    cells.append(Cell() if variant else Cell(known[task].get(mixer)))
            kind: Kind = "variant" if variant else "main"
            rows.append(Row(results.paper.label(mixer), cells, variant, kind))
    rows += _majority(results, tasks, known)
    foot = _comparability(results, tasks)
    caption = results.caption(tasks)
    return Table("summary", "Every trained task", caption, columns, rows, footnotes=foot)


def _valued(results: Results, task: str) -> bool:
    of_task = [r for r in results.records if r["task"] == task]
    return not any(r["rows"] for r in of_task) or any(is_number(r.get("value")) for r in of_task)


def _all_mixers(results: Results, tasks: list[str]) -> list[str]:
    return list(dict.fromkeys(m for task in tasks for m in results.mixers(task)))


def _example(results: Results, task: str) -> Record:
    of_task = [r for r in results.records if r["task"] == task]
    return next((r for r in of_task if r["status"] == "finished"), of_task[0])


def _primary_column(results: Results, task: str) -> Column:
    record = _example(results, task)
    better: Better = "max" if record.get("higher_is_better", True) else "min"
    metric, split = str(record["metric"]), str(record["split"])
    head = results.paper.label(task)
    if not metric:  # no run of it finished
        return Column(task, head, "", better, 2)
    if metric == "accuracy":
        key = f"{task}_{split}_accuracy_percent"
        return Column(key, f"{head} {_split(split)} accuracy", "%", better, 1)
    head = f"{head} {_split(split)} {_words(metric)}"
    return Column(f"{task}_{split}_{metric}", head, "", better, 2)


def _split(split: str) -> str:
    return SPLIT_NAMES.get(split, split)


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def _paper_column(beside: Column) -> Column:
    return Column(
        f"{beside.key}_paper", "paper", beside.unit, digits=beside.digits, reference=True
    )  # fmt: skip


def _paper_values(results: Results, task: str) -> dict[str, float]:
    record = _example(results, task)
    scale = 100.0 if record["metric"] == "accuracy" else 1.0
    values = {
        mixer: results.paper.figure(task, mixer, record["split"], record["metric"])
        for mixer in results.mixers(task)
    }
    return {mixer: value * scale for mixer, value in values.items() if value is not None}


def _task_cell(
    results: Results, task: str, mixer: str, found: Group | None, is_variant: bool,
    metric: tuple[str, str] | None = None,
) -> Cell:  # fmt: skip
    """A task's primary metric (or another), averaged over the seeds of one group."""
    if found is None:
        return Cell() if is_variant else _absent(results, task, mixer)
    split, name = metric or (None, None)
    values = found.by_seed(split, name)
    if (name or found.records[0]["metric"]) == "accuracy":
        values = {seed: 100 * value for seed, value in values.items()}
    return over_seeds(found, values, results.seeds(task) if not is_variant else None)


def _absent(results: Results, task: str, mixer: str) -> Cell:
    reason = results.paper.absent.get(task, {}).get(mixer)
    if reason:
        return Cell(text=reason)
    return Cell(text="not run") if mixer in results.paper.settings.get(task, []) else Cell()


def over_seeds(found: Group, values: dict[int, float], expected: set[int] | None = None) -> Cell:
    """The mean over a group's seeds, with a note for each that failed, diverged or is missing."""
    notes = [
        f"seed {r['seed']} {r['status']}{_reason(r)}" for r in found.records
        if r["status"] != "finished"
    ]  # fmt: skip
    missing = sorted((expected or set()) - {r["seed"] for r in found.records})
    notes += [f"seed {seed} not run" for seed in missing]
    ids = tuple(r["run_id"] for r in found.records if r["seed"] in values)
    if not values:
        words = sorted({r["status"] for r in found.records if r["status"] != "finished"})
        return Cell(text=" / ".join(words), notes=tuple(notes))
    sample = list(values.values())
    return Cell(
        mean(sample), std(sample), len(sample), notes=tuple(notes), records=ids, sample=values
    )


def _reason(record: Record) -> str:
    error = record.get("error") or {}
    message = " ".join(str(error.get("message") or "").split())
    if len(message) > 120:
        message = message[:119] + "…"
    return f": {error.get('type', 'error')}: {message}" if error else ""


def _majority(results: Results, tasks: list[str], known: dict[str, dict[str, float]]) -> list[Row]:
    """Always answering the most frequent label, where the records say what that gives."""
    cells, any_known = [], False
    for task in tasks:
        value = majority_accuracy(_example(results, task))
        any_known |= value is not None
        cells.append(Cell(None if value is None else 100 * value))
        if known.get(task):
            cells.append(Cell())
    return [Row("most frequent label", cells, kind="baseline")] if any_known else []


def majority_accuracy(record: Record) -> float | None:
    """Accuracy of the constant answer on the record's split, from its description of the data.

    Tasks say it as ``majority_share`` in the statistics of the split, or give all ``class_shares``.
    """
    pending: list[Any] = [record["data"]]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            of_split = part.get(record["split"])
            if isinstance(of_split, dict) and is_number(of_split.get("majority_share")):
                return float(of_split["majority_share"])
            shares = of_split.get("class_shares") if isinstance(of_split, dict) else None
            if isinstance(shares, dict) and shares and all(map(is_number, shares.values())):
                return float(max(shares.values()))
            pending += part.values()
    return metric_of(record, record["split"], "majority_accuracy")


def _comparability(results: Results, tasks: list[str]) -> list[str]:
    """Settings outside the mixer in which the main groups of a task differ."""
    sentences = []
    for task in tasks:
        mains = [g for m in results.mixers(task) if (g := results.main(task, m))]
        for other in mains[1:]:
            changed = [
                f"{name}: {old} → {new}"
                for name, (old, new) in differences(mains[0].config, other.config).items()
                if not name.startswith("mixer")
            ]
            if changed:
                label = results.paper.label
                sentences.append(
                    f"{label(task)}: {label(other.mixer)} differs from {label(mains[0].mixer)} "
                    f"outside the mixer ({'; '.join(changed)})."
                )
    return sentences


def lra(results: Results) -> Table | None:
    """ListOps, Text and their average per seed, as in Long-Range Arena."""
    tasks = [t for t in LRA if t in results.tasks]
    if len(tasks) < 2:
        return None
    columns = [_primary_column(results, t) for t in tasks]
    columns.append(Column("average_accuracy_percent", "average", "%", "max", 1))
    columns += _cost_columns(tasks)
    rows = []
    for mixer in _all_mixers(results, tasks):
        for line in lines(results.groups, tasks, mixer) or [{}]:
            variant = next((g.variant for g in line.values()), ())
            cells = [_task_cell(results, t, mixer, line.get(t), bool(variant)) for t in tasks]
            cells.append(_average_cell([line.get(t) for t in tasks]))
            cells += [_cost_cell(line.get(t), "tokens_per_s") for t in tasks]
            cells += [_cost_cell(line.get(t), "parameters") for t in tasks]
            kind: Kind = "variant" if variant else "main"
            rows.append(Row(results.paper.label(mixer), cells, variant, kind))
    baseline = _majority(results, tasks, {})
    for row in baseline:
        values = [c.value for c in row.cells if c.value is not None]
        row.cells.append(Cell(mean(values)) if len(values) == len(tasks) else Cell())
        row.cells += [Cell() for _ in range(2 * len(tasks))]
    rows += baseline
    foot = ["The average is taken seed by seed; the paper’s accuracies are not known as numbers."]
    foot += _comparability(results, tasks)
    return Table("lra", "Long-Range Arena", results.caption(tasks), columns, rows, footnotes=foot)


def _cost_columns(tasks: list[str]) -> list[Column]:
    names = {"listops": "ListOps", "text": "Text"}
    speed = [
        Column(f"{t}_tokens_per_s", f"{names.get(t, t)} speed", "tokens/s", "max", 0, True)
        for t in tasks
    ]
    size = [
        Column(f"{t}_parameters", f"{names.get(t, t)} parameters", "", None, 0, True) for t in tasks
    ]
    return speed + size


def _average_cell(groups: list[Group | None]) -> Cell:
    if any(g is None for g in groups):
        return Cell()
    columns = [g.by_seed() for g in groups if g]
    values = average(*({s: 100 * v for s, v in column.items()} for column in columns))
    if not values:
        return Cell()
    ids = tuple(
        r["run_id"] for g in groups if g for r in g.finished if r["seed"] in values
    )  # fmt: skip
    sample = list(values.values())
    return Cell(mean(sample), std(sample), len(sample), records=ids, sample=values)


def _cost_cell(found: Group | None, key: str, divide: float = 1.0) -> Cell:
    """A cost that depends on the machine; figures of several machines are marked."""
    if found is None:
        return Cell()
    values = {seed: value / divide for seed, value in found.column(key).items()}
    if not values:
        return Cell()
    ids = tuple(r["run_id"] for r in found.finished if r["seed"] in values)
    sample = list(values.values())
    if key == "parameters" and len(set(sample)) == 1:
        return Cell(sample[0], records=ids)
    machines = {_machine(r) for r in found.finished if r["seed"] in values}
    notes = (f"mean over {len(machines)} machines",) if len(machines) > 1 else ()
    return Cell(mean(sample), std(sample), len(sample), notes=notes, records=ids, sample=values)


def _machine(record: Record) -> tuple[str, str]:
    return str(record["machine"].get("host")), str(record["machine"].get("device"))


def language_model(results: Results) -> Table | None:
    """WikiText-103: perplexities, bits per byte, speed, memory, parameters."""
    task = "wikitext103"
    if task not in results.tasks:
        return None
    val, test = "validation perplexity", "test perplexity"
    figures = [
        ("val", "perplexity", Column("val_perplexity_per_token", val, "per token", "min")),
        ("test", "perplexity", Column("test_perplexity_per_token", test, "per token", "min")),
        (
            "test",
            "perplexity_per_word",
            Column("test_perplexity_per_word", test, "per word", "min", 1, True),
        ),
        ("test", "bits_per_byte", Column("test_bits_per_byte", "test", "bits/byte", "min", 3)),
    ]
    paper = Column("val_perplexity_paper", "paper", "per token", reference=True)
    columns = [figures[0][2], paper, *(column for _, _, column in figures[1:])]
    columns += [
        Column("tokens_per_s", "speed", "tokens/s", "max", 0, True),
        Column("peak_memory_mib", "peak memory", "MiB", "min", 1, True),
        Column("parameters", "parameters", "", None, 0, True),
    ]
    rows = []
    for mixer in results.mixers(task):
        for line in lines(results.groups, [task], mixer) or [{}]:
            found = line.get(task)
            variant = found.variant if found else ()
            cells = [
                _task_cell(results, task, mixer, found, bool(variant), (split, name))
                for split, name, _ in figures
            ]
            if found is None:
                cells[1:] = [Cell() for _ in cells[1:]]
            for cell in cells[1:]:
                cell.notes = ()
            known = None if variant else results.paper.figure(task, mixer, "val", "perplexity")
            cells.insert(1, Cell(known))
            cells.append(_cost_cell(found, "tokens_per_s"))
            cells.append(_cost_cell(found, "peak_memory_bytes", MIB))
            cells.append(_cost_cell(found, "parameters"))
            kind: Kind = "variant" if variant else "main"
            rows.append(Row(results.paper.label(mixer), cells, variant, kind))
    foot = _comparability(results, [task])
    absent = results.paper.absent.get(task, {})
    foot += [f"{results.paper.label(m)}: {why}." for m, why in absent.items()]
    return Table(
        task, "Language modelling, WikiText-103 setting", results.caption([task]), columns, rows,
        footnotes=foot,
    )  # fmt: skip


def other_tasks(results: Results) -> list[Table]:
    """A table for every trained task that the paper does not have."""
    known = {*LRA, "wikitext103", *PROFILING}
    tables = []
    for task in results.tasks:
        if task in known or not _valued(results, task):
            continue
        primary = _primary_column(results, task)
        others = _other_metrics(results, task)
        columns = [primary, *(column for _, _, column in others)]
        columns += [
            Column("tokens_per_s", "speed", "tokens/s", "max", 0, True),
            Column("peak_memory_mib", "peak memory", "MiB", "min", 1, True),
            Column("parameters", "parameters", "", None, 0, True),
        ]
        rows = []
        for mixer in results.mixers(task):
            for line in lines(results.groups, [task], mixer) or [{}]:
                found = line.get(task)
                variant = found.variant if found else ()
                cells = [_task_cell(results, task, mixer, found, bool(variant))]
                cells += [_plain_cell(found, split, name) for split, name, _ in others]
                cells.append(_cost_cell(found, "tokens_per_s"))
                cells.append(_cost_cell(found, "peak_memory_bytes", MIB))
                cells.append(_cost_cell(found, "parameters"))
                kind: Kind = "variant" if variant else "main"
                rows.append(Row(results.paper.label(mixer), cells, variant, kind))
        foot = ["The paper has no such setting.", *_comparability(results, [task])]
        title = results.paper.label(task)
        tables.append(Table(task, title, results.caption([task]), columns, rows, footnotes=foot))
    return tables


def _other_metrics(results: Results, task: str, most: int = 6) -> list[tuple[str, str, Column]]:
    record = _example(results, task)
    found = []
    for split in ("test", "val"):
        for name in record["metrics"].get(split, {}):
            if (split, name) == (record["split"], record["metric"]) or name in NOT_SHOWN:
                continue
            if split == "val" and name != record["metric"]:
                continue
            percent = name.startswith("accuracy")
            column = Column(
                f"{split}_{name}" + ("_percent" if percent else ""),
                f"{_split(split)} {_words(name)}", "%" if percent else "",
                digits=1 if percent else 2,
            )  # fmt: skip
            found.append((split, name, column))
    return found[:most]


def _plain_cell(found: Group | None, split: str, name: str) -> Cell:
    if found is None:
        return Cell()
    factor = 100.0 if name.startswith("accuracy") else 1.0
    values = {seed: factor * v for seed, v in found.by_seed(split, name).items()}
    return over_seeds(found, values) if values else Cell()


BUILDERS: list[Callable[[Results], Table | None]] = [summary, lra, language_model]


def build(results: Results) -> list[Table]:
    """Every table that the records allow, in the paper's order."""
    tables = [table for builder in BUILDERS if (table := builder(results))]
    return tables + other_tasks(results)
