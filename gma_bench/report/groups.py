"""Which records may be averaged: groups of one config, one data set, and several seeds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from gma_bench.report.stats import mean

Record = dict[str, Any]
MISSING = "—"


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as dotted names to leaves, the way overrides spell them."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings whose values differ, as ``name: (old, new)``; the seed is not one of them."""
    flat_old, flat_new = flatten(old), flatten(new)
    names = [n for n in {**flat_old, **flat_new} if n != "seed"]
    pairs = {n: (flat_old.get(n, MISSING), flat_new.get(n, MISSING)) for n in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass
class Group:
    """Records that share task, mixer, config (without the seed) and data.

    Attributes:
        records: of any status, by seed.
        variant: how this group differs from the main one of its task and mixer, as overrides;
            empty for the main one.
    """

    task: str
    mixer: str
    records: list[Record]
    variant: tuple[str, ...] = field(default=())

    @property
    def finished(self) -> list[Record]:
        """The records with results."""
        return [r for r in self.records if r["status"] == "finished"]

    @property
    def config(self) -> dict[str, Any]:
        """The config that the records share; only their seeds differ."""
        return self.records[0]["config"]

    @property
    def fingerprint(self) -> str | None:
        """The digest of the data."""
        return next((r["data"].get("fingerprint") for r in self.finished), None)

    def by_seed(self, split: str | None = None, metric: str | None = None) -> dict[int, float]:
        """Seed to value of a metric (the record's primary one when none is named)."""
        values = {r["seed"]: metric_of(r, split, metric) for r in self.finished}
        return {seed: value for seed, value in values.items() if value is not None}

    def column(self, key: str) -> dict[int, float]:
        """Seed to a top-level number of the record (``tokens_per_s``, ``parameters``)."""
        return {r["seed"]: float(r[key]) for r in self.finished if is_number(r.get(key))}


def is_number(value: Any) -> TypeGuard[float]:
    """A real number, not a truth value and not a null."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def metric_of(record: Record, split: str | None = None, metric: str | None = None) -> float | None:
    """A metric of a record, or None."""
    if metric is None or split is None:
        value = record.get("value")
    else:
        value = (record["metrics"].get(split) or {}).get(metric)
    return float(value) if is_number(value) else None


def group(records: Iterable[Record]) -> dict[tuple[str, str], list[Group]]:
    """Groups by (task, mixer), the main one first.

    The main group is the one that compares with the other mixers': its settings outside the mixer
    are shared by most of them. Between equals: the fewest overrides in the command, then the mixer
    settings that most tasks ran, then the most finished seeds, then the latest. Failed records
    carry no data fingerprint; they go with the records of their config.
    """
    buckets: dict[tuple[str, str], dict[tuple[str, str | None], list[Record]]] = {}
    for record in records:
        cell = buckets.setdefault((record["task"], record["mixer"]), defaultdict(list))
        data = record["data"].get("fingerprint") if record["status"] == "finished" else None
        cell[(record.get("group_hash") or record["config_hash"], data)].append(record)
    for cell in buckets.values():
        _adopt_failed(cell)
    shared, mixers = _shared_settings(buckets)
    groups = {}
    for (task, mixer), cell in buckets.items():
        found = [
            Group(task, mixer, sorted(rs, key=lambda r: (r["seed"], r["run_id"])))
            for rs in cell.values()
        ]
        found.sort(key=lambda g: _precedence(g, shared, mixers), reverse=True)
        taken: set[tuple[str, ...]] = {()}
        for other in found[1:]:
            variant = _variant(found[0], other)
            if variant in taken:
                variant = (*variant, f"config {other.records[0]['config_hash'][:8]}")
            other.variant = variant
            taken.add(variant)
        groups[task, mixer] = found
    return groups


def _adopt_failed(cell: dict[tuple[str, str | None], list[Record]]) -> None:
    """Put failed records beside the finished ones of the same config, where there are any."""
    for config, data in [key for key in cell if key[1] is None]:
        homes = [key for key in cell if key[0] == config and key[1] is not None]
        if homes:
            largest = max(homes, key=lambda key: len(cell[key]))
            cell[largest].extend(cell.pop((config, data)))


def _shared_key(record: Record) -> tuple[str, str]:
    config = flatten(record["config"])
    outside = {k: v for k, v in config.items() if k != "seed" and not k.startswith("mixer")}
    return record["task"], repr(sorted(outside.items(), key=lambda item: item[0]))


def _mixer_key(record: Record) -> tuple[str, str]:
    return record["mixer"], repr(sorted(flatten(record["config"].get("mixer", {})).items()))


def _shared_settings(
    buckets: dict[tuple[str, str], dict[tuple[str, str | None], list[Record]]],
) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """How many mixers share the settings outside them, and how many tasks those of a mixer."""
    shared: Counter[tuple[str, str]] = Counter()
    mixers: Counter[tuple[str, str]] = Counter()
    for cell in buckets.values():
        shared.update({_shared_key(rs[0]) for rs in cell.values()})
        mixers.update({_mixer_key(rs[0]) for rs in cell.values()})
    return shared, mixers


def _precedence(
    group: Group, shared: Counter[tuple[str, str]], mixers: Counter[tuple[str, str]]
) -> tuple[Any, ...]:
    first = group.records[0]
    return (
        shared[_shared_key(first)],
        -str(first.get("command", "")).count("="),
        mixers[_mixer_key(first)],
        len(group.finished),
        max(str(r.get("started_at") or "") for r in group.records),
    )


def _variant(main: Group, other: Group) -> tuple[str, ...]:
    changed = differences(main.config, other.config)
    names = [f"{name}={new}" for name, (_, new) in sorted(changed.items())]
    if not names or (main.fingerprint and other.fingerprint != main.fingerprint):
        names.append(f"data {str(other.fingerprint)[:8]}")
    return tuple(names)


def lines(
    groups: dict[tuple[str, str], list[Group]], tasks: Sequence[str], mixer: str
) -> list[dict[str, Group]]:
    """The table lines of a mixer over several tasks: one per variant, the main one first.

    Groups of different tasks stand on one line when they differ from their main ones in the same
    settings.
    """
    by_variant: dict[tuple[str, ...], dict[str, Group]] = {}
    for task in tasks:
        for found in groups.get((task, mixer), []):
            by_variant.setdefault(found.variant, {})[task] = found
    return [by_variant[v] for v in sorted(by_variant, key=lambda v: (len(v), v))]


def paired(*columns: dict[int, float]) -> dict[int, tuple[float, ...]]:
    """Seeds that every column has, each with its values."""
    seeds = set(columns[0]).intersection(*columns[1:]) if columns else set()
    return {seed: tuple(column[seed] for column in columns) for seed in sorted(seeds)}


def average(*columns: dict[int, float]) -> dict[int, float]:
    """The mean over columns, seed by seed; seeds that one column lacks are left out."""
    return {seed: mean(values) for seed, values in paired(*columns).items()}
