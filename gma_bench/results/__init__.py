"""One record a run: what a cell produced, from which config, data, code and machine."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gma_bench.results.store import write_atomic
from gma_bench.results.validate import MAX_BYTES, implausible, is_measured, problem

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
STATUSES = ("finished", "failed", "diverged")
MOVED = {
    "gma_bench.training.train": "gma_bench.train.training.train",
    "gma_bench.gma.GaussianMixtureAttention": "gma_bench.mixer.gma.GaussianMixtureAttention",
}
"""Old and new names of what a configuration may name. A move is no other run: its id stays."""
RUN_ID = re.compile(r"[a-z0-9_.]+-[A-Za-z0-9_.]+-s\d+-[0-9a-f]{12}")


def join_run_id(task: str, mixer: str, seed: int, digest: str) -> str:
    """A run's name from what it consists of."""
    return f"{task}-{mixer}-s{seed}-{digest[:12]}"


def config_hash(plain: dict[str, Any]) -> str:
    """Hex SHA-256 of a resolved configuration, in which what has moved bears its first name."""
    first = _renamed(plain, {new: old for old, new in MOVED.items()})
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {k: _renamed(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(v, names) for v in value]
    return names.get(value, value) if isinstance(value, str) else value


@dataclass
class Outcome:
    """What a procedure hands back; :mod:`gma_bench.run.execute` adds where it came from.

    Attributes:
        metric: name of the metric that the tables show (``accuracy``, ``perplexity``, …).
        split: the split it was computed on.
        value: its value, or None where a cell has no single figure (profiling).
        higher_is_better: the metric's direction.
        metrics: every metric, by split.
        rows: a tidy table (a profiling sweep, components): one flat dict a row.
        curves: columns of equal length drawn over training (``step``, ``train_loss``, …).
        data: what it was computed on: ``source``, ``name``, ``fingerprint``, sizes.
        parameters: number of trainable parameters.
        tokens_per_s: real tokens consumed in training a second, validation left out.
        peak_memory_bytes: peak of the device's memory (CUDA allocator) or of the process (CPU).
        extra: whatever else belongs to the record (JSON-ready).
    """

    metric: str
    split: str
    value: float | None = None
    higher_is_better: bool = True
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class BrokenRecord(Exception):
    """A record that cannot be believed: cut short, altered, or not of this schema.

    Args:
        path: its file.
        wrong: what is wrong with it; may quote the record, so that it is cut and made printable.
    """

    def __init__(self, path: Path, wrong: object) -> None:
        words = " ".join(f"{path}: {str(wrong)[:200]}".split())
        super().__init__(words.encode("utf-8", "backslashreplace").decode("utf-8"))


def record_path(results_dir: Path | str, scale: str, run_id: str) -> Path:
    """Where a run's record lies: ``<results_dir>/<scale>/runs/<run_id>.json``."""
    return Path(results_dir) / scale / "runs" / f"{run_id}.json"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record whole or not at all. NaN, infinity and what is near it become null."""
    write_atomic(
        path, json.dumps(_finite(record), indent=1, sort_keys=False, allow_nan=False) + "\n"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not is_measured(value):
        return 0.0 if abs(value) < 1 else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def read_record(path: Path) -> dict[str, Any]:
    """Read and validate one record. Nothing in it is ever instantiated or executed.

    Raises:
        BrokenRecord: with what is wrong.
    """
    try:
        record = json.loads(read_bounded(path))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenRecord(path, error) from error
    wrong = _problem(record, path)
    if wrong:
        raise BrokenRecord(path, wrong)
    record["config"] = _renamed(record["config"], MOVED)
    return record


def read_bounded(path: Path) -> str:
    """The text of a file that somebody else may have written.

    Raises:
        ValueError: it is larger than :data:`~gma_bench.results.validate.MAX_BYTES`, no regular file,
            or not UTF-8.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise ValueError("no regular file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    return path.read_text(encoding="utf-8")


def _problem(record: Any, path: Path) -> str | None:
    if not isinstance(record, dict):
        return "not a JSON object"
    if record.get("schema") != SCHEMA:
        return f"schema {record.get('schema')!r}, this version reads {SCHEMA}"
    if record.get("status") not in STATUSES:
        return f"status {record.get('status')!r} is none of {', '.join(STATUSES)}"
    if record.get("run_id") != path.stem or not RUN_ID.fullmatch(path.stem):
        return f"run_id {record.get('run_id')!r} does not match the file's name"
    wrong = implausible(record) or problem(record)
    if wrong:
        return wrong
    named = join_run_id(record["task"], record["mixer"], record["seed"], record["config_hash"])
    if record["run_id"] != named:
        return "task, mixer, seed or config_hash does not match run_id"
    return None


def read_all(
    path: Path | str = "results", scale: str | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Every valid record under a results folder, in order of run id, and what was wrong with the others."""
    records, broken = [], []
    for file in sorted(Path(path).glob(f"{scale or '*'}/runs/*.json")):
        try:
            records.append(read_record(file))
        except BrokenRecord as error:
            broken.append(str(error))
    return records, broken


def load(path: Path | str = "results", scale: str | None = None) -> pd.DataFrame:
    """Records as a table, a row a run.

    Args:
        path: a results folder.
        scale: only that scale; all of them otherwise.

    Returns:
        Columns ``run_id, task, mixer, scale, seed, status, metric, value, split, higher_is_better,
        parameters, duration_s, tokens_per_s, peak_memory_bytes, source, fingerprint, config_hash,
        commit, dirty, host, device, command`` and one ``<split>/<metric>`` for each metric.
        Broken records are left out with a warning.
    """
    import pandas as pd

    records, broken = read_all(path, scale)
    for message in broken:
        warnings.warn(f"record left out: {message}", stacklevel=2)
    return pd.DataFrame([_row(r) for r in records], columns=None if records else LEADING_COLUMNS)


LEADING_COLUMNS = [
    "run_id", "task", "mixer", "scale", "seed", "status", "metric", "value", "split",
    "higher_is_better", "parameters", "duration_s", "tokens_per_s", "peak_memory_bytes", "source",
    "fingerprint", "config_hash", "commit", "dirty", "host", "device", "command",
]  # fmt: skip


def _row(record: dict[str, Any]) -> dict[str, Any]:
    row = {column: record.get(column) for column in LEADING_COLUMNS}
    row["source"] = record["data"].get("source")
    row["fingerprint"] = record["data"].get("fingerprint")
    row["commit"] = record["git"].get("commit")
    row["dirty"] = record["git"].get("dirty")
    row["host"] = record["machine"].get("host")
    row["device"] = record["machine"].get("device")
    for split, values in record["metrics"].items():
        row |= {f"{split}/{name}": value for name, value in values.items()}
    return row
