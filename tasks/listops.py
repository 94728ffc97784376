"""ListOps: what does a nested expression of MIN, MAX, MED and SM over digits evaluate to?

One of the two Long-Range Arena tasks of the paper's evaluation. Expressions come from the law of
the Arena's generator (:mod:`tasks.listops_generator`) or from its published files.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics import Metric

from gma_bench.errors import DataError, SettingError, UserError
from gma_bench.results.store import locked, sha256_file, write_atomic
from gma_bench.task import Batch, Task
from tasks.accuracy import Accuracy
from tasks.arrays import code_digest
from tasks.listops_generator import (
    PAD,
    SYMBOLS,
    Expressions,
    check_settings,
    encode,
    evaluate,
    generate,
    join,
    value_and_depth,
)

__all__ = ["ListOps", "evaluate", "generate", "read_tsv"]

SPLITS = ("train", "val", "test")
SOURCES = ("embedded", "local", "hub")
ARRAYS = tuple(field.name for field in fields(Expressions))

Example = tuple[NDArray[np.uint8], int, int]
"""Token ids, target, depth."""


class ListOps(Task):
    """Classification of ListOps expressions into the digits 0 to 9.

    Args:
        source: ``embedded`` generates expressions; ``local`` reads ``basic_{train,val,test}.tsv``
            in ``data_dir``. ``None``: local when ``data_dir`` is set, else embedded.
        data_dir: folder with the published files.
        min_length, max_length, max_depth, max_args: the law of the generator. Lengths lie strictly
            between the two. Rows of files must be below ``max_length`` too: nothing is cut off.
        num_train, num_val, num_test: examples per split; of files the first so many rows are used.
        data_seed: decides what is generated. Test and validation come first in the stream, so that
            they stay the same at any ``num_train``.
        **loading: ``batch_size`` and the other arguments of :class:`~gma_bench.task.Task`.

    Raises:
        SettingError: settings that no expression satisfies, or that contradict each other.
    """

    num_outputs = 10

    def __init__(
        self,
        *,
        source: str | None = None,
        data_dir: str | None = None,
        min_length: int = 500,
        max_length: int = 2000,
        max_depth: int = 10,
        max_args: int = 10,
        num_train: int = 96_000,
        num_val: int = 2_000,
        num_test: int = 2_000,
        data_seed: int = 0,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.source = _source(source, data_dir)
        self.data_dir = data_dir
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        for split, size in self.sizes.items():
            if size < 1:
                name = f"task.num_{split}"
                raise SettingError(name, size, "must be ≥ 1", f"{name}=100")
        total = sum(self.sizes.values())
        check_settings(total, min_length, max_length, max_depth, max_args, data_seed)
        self.law = {
            "min_length": min_length, "max_length": max_length,
            "max_depth": max_depth, "max_args": max_args,
        }  # fmt: skip
        self.data_seed = data_seed
        self.max_length = max_length - 1
        self.vocab_size = len(SYMBOLS)
        self.data: dict[str, Expressions] = {}

    # ------------------------------------------------------------------------------------- data

    def prepare_data(self) -> None:
        """Generate or read what is not in the cache yet."""
        self._load()

    def setup(self, stage: str | None = None) -> None:
        """Map the cached arrays into memory and make the splits."""
        if self.data:
            return
        self.data, self.fingerprint = self._load()
        self.splits = {split: ExpressionDataset(data) for split, data in self.data.items()}
        self.length_edges = _edges(self.data["test"].lengths)
        self.depths = [int(depth) for depth in np.unique(self.data["test"].depths)]

    def _load(self) -> tuple[dict[str, Expressions], str]:
        if self.source == "local":
            paths = {split: Path(str(self.data_dir)) / f"basic_{split}.tsv" for split in SPLITS}
            whole, counts, digest = _cached(
                self.cache_dir, {split: _sha256(path) for split, path in paths.items()},
                lambda: _read_distinct(paths),
            )  # fmt: skip
            data = _consecutive(whole, counts)
            for split, path in paths.items():
                _check_lengths(data[split], path, self.law["max_length"])
                data[split] = data[split].part(0, min(self.sizes[split], len(data[split])))
        else:
            settings = {**self.law, "data_seed": self.data_seed, **self.sizes}
            whole, counts, digest = _cached(self.cache_dir, settings, self._generate)
            data = _consecutive(whole, counts)
        used = {split: len(data[split]) for split in SPLITS}
        return data, _digest({"data": digest, "used": used})

    def _generate(self) -> dict[str, Expressions]:
        whole = generate(sum(self.sizes.values()), **self.law, seed=self.data_seed)
        return _consecutive(whole, {split: self.sizes[split] for split in ("test", "val", "train")})

    def lengths(self, split: str) -> NDArray[np.int64]:
        """``(n,)`` tokens in each example of a split."""
        return self.data[split].lengths

    def collate(self, examples: list[Example]) -> Batch:
        """Pad examples to the longest among them.

        Returns:
            ``tokens (B, N)`` int64, ``mask (B, N)`` bool, ``target (B,)``, ``depth (B,)``.
        """
        lengths = [len(row) for row, _, _ in examples]
        tokens = np.full((len(examples), max(lengths)), PAD, np.int64)
        for line, (row, _, _) in zip(tokens, examples, strict=True):
            line[: len(row)] = row
        return {
            "tokens": torch.from_numpy(tokens),
            "mask": torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None],
            "target": torch.tensor([target for _, target, _ in examples]),
            "depth": torch.tensor([depth for _, _, depth in examples]),
        }

    token_kind = "listops"

    def spell(self, ids: np.ndarray) -> list[str]:
        return [SYMBOLS[i] for i in ids]

    def description(self) -> dict[str, Any]:
        """Source, law, and per split: size, lengths, label shares and the most frequent label's."""
        described: dict[str, Any] = {"name": "listops", "source": self.source}
        if self.source == "local":
            described["data_dir"] = str(self.data_dir)
        else:
            described |= {**self.law, "data_seed": self.data_seed}
        described["fingerprint"] = self.fingerprint
        described["splits"] = {split: _statistics(data) for split, data in self.data.items()}
        return described

    # --------------------------------------------------------------------------- loss and metric

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy, mean over examples."""
        return functional.cross_entropy(logits.float(), batch["target"])

    def new_metrics(self, split: str) -> dict[str, Metric]:
        """``accuracy``; on test also by quarter of the lengths and by depth of nesting."""
        if split != "test":
            return {"accuracy": Accuracy()}
        lengths = [f"accuracy_len_{low}_{high}" for low, high in self.length_edges]
        depths = [f"accuracy_depth_{depth}" for depth in self.depths]
        return {name: Accuracy() for name in ("accuracy", *lengths, *depths)}

    def update(self, metrics: dict[str, Metric], logits: Tensor, batch: Batch) -> None:
        """Add a batch of ``logits (B, 10)``."""
        right = logits.argmax(-1) == batch["target"]
        metrics["accuracy"].update(right)
        if len(metrics) == 1:
            return
        length = batch["mask"].sum(1)
        for low, high in self.length_edges:
            chosen = (length >= low) & (length <= high)
            metrics[f"accuracy_len_{low}_{high}"].update(right, chosen)
        for depth in self.depths:
            metrics[f"accuracy_depth_{depth}"].update(right, batch["depth"] == depth)


class ExpressionDataset(Dataset[Example]):
    """Expressions as examples, read from the mapped file when asked for."""

    def __init__(self, data: Expressions) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Example:
        data = self.data
        return data.row(index), int(data.targets[index]), int(data.depths[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self[index] for index in indices]


def _source(source: str | None, data_dir: str | None) -> str:
    source = source or ("local" if data_dir else "embedded")
    if source not in SOURCES:
        raise SettingError(
            "task.source", source, f"must be one of {', '.join(SOURCES)}", "task.source=embedded"
        )
    if source == "hub":
        raise SettingError(
            "task.source",
            source,
            "the hub has no official ListOps; it is generated, or read from the files of the "
            "Long-Range Arena release",
            "task.source=embedded, or task.source=local task.data_dir=<folder of basic_train.tsv>",
        )
    if source == "local" and not data_dir:
        raise SettingError(
            "task.data_dir",
            data_dir,
            "task.source=local needs a folder",
            "task.data_dir=<folder of basic_train.tsv, basic_val.tsv, basic_test.tsv>",
        )
    if source == "embedded" and data_dir:
        raise SettingError(
            "task.data_dir", data_dir, "task.source=embedded reads no files", "task.source=local"
        )
    return source


# ------------------------------------------------------------------------------- published files


def read_tsv(path: Path | str) -> Expressions:
    """Read a file as the Arena's generator writes it: a header, then expression, tab, value.

    Raises:
        DataError: the file is missing or empty, a row is malformed, or its target is not what its
            expression evaluates to; names the file and the line.
    """
    path = Path(path)
    rows: list[bytes] = []
    targets, depths = [], []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(file, "").rstrip("\r\n")
            if header != "Source\tTarget":
                raise DataError(f"{path}, line 1: {header[:60]!r} is not 'Source\\tTarget'")
            for number, line in enumerate(file, start=2):
                try:
                    tokens, value, depth = _read_row(line)
                except ValueError as error:
                    raise DataError(f"{path}, line {number}: {error}") from None
                rows.append(tokens)
                targets.append(value)
                depths.append(depth)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason})") from error
    if not rows:
        raise DataError(f"{path}: no rows after the header")
    return Expressions(
        np.frombuffer(b"".join(rows), np.uint8),
        np.cumsum([0, *map(len, rows)], dtype=np.int64),
        np.array(targets, np.uint8),
        np.array(depths, np.uint8),
    )


def _read_row(line: str) -> tuple[bytes, int, int]:
    columns = line.rstrip("\r\n").split("\t")
    if len(columns) != 2:
        raise ValueError(f"{len(columns)} columns where 2 are expected")
    tokens = encode(columns[0])
    value, depth = value_and_depth(tokens)
    if columns[1] != str(value):
        raise ValueError(f"the target is {columns[1]!r}, but the expression evaluates to {value}")
    return tokens, value, depth


def _read_distinct(paths: dict[str, Path]) -> dict[str, Expressions]:
    """All files, refused when an expression stands in two of them or twice in one."""
    data = {split: read_tsv(path) for split, path in paths.items()}
    seen: dict[bytes, str] = {}
    for split, path in paths.items():
        for i in range(len(data[split])):
            place = f"{path}, line {i + 2}"
            first = seen.setdefault(data[split].row(i).tobytes(), place)
            if first != place:
                raise DataError(f"{place}: the same expression stands in {first}")
    return data


def _sha256(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}. task.data_dir must hold "
            "basic_train.tsv, basic_val.tsv and basic_test.tsv"
        ) from error


def _check_lengths(data: Expressions, path: Path, max_length: int) -> None:
    longest = int(data.lengths.max())
    if longest >= max_length:
        line = int(data.lengths.argmax()) + 2
        raise SettingError(
            "task.max_length",
            max_length,
            f"{path}, line {line} has {longest} tokens, and nothing is cut off",
            f"task.max_length={longest + 1}",
        )


# ------------------------------------------------------------------------------------- the cache


def _cached(
    cache_dir: Path, settings: dict[str, Any], build: Callable[[], dict[str, Expressions]]
) -> tuple[Expressions, dict[str, int], str]:
    """Expressions from the cache, built when they are missing or damaged.

    Returns:
        All of them, mapped from disk; how many each split has, in the order in which they stand;
        and a digest of the data.
    """
    folder = cache_dir / "listops" / _digest({**settings, "code": code_digest()})[:16]
    with locked(folder):
        manifest = _read_manifest(folder)
        if manifest is None:
            _write_cache(folder, settings, build())
            manifest = _read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} does not hold what was just written. Try: another cache_dir")
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    return Expressions(**arrays), manifest["splits"], _digest(manifest["sha256"])


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """What the cache says of itself; ``None`` when there is none, or when a file does not agree."""
    try:
        manifest: dict[str, Any] = json.loads(
            (folder / "manifest.json").read_text(encoding="utf-8")
        )
        for name in ARRAYS:
            if sha256_file(folder / f"{name}.npy") != manifest["sha256"][name]:
                raise ValueError(f"{name}.npy has another checksum")
    except FileNotFoundError as error:
        if str(error.filename).endswith("manifest.json"):
            return None
        reason = f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error)
    else:
        return manifest
    warnings.warn(f"the cache {folder} is damaged ({reason}) and is built anew", stacklevel=2)
    return None


def _write_cache(folder: Path, settings: dict[str, Any], splits: dict[str, Expressions]) -> None:
    whole = join(list(splits.values()))
    checksums = {}
    for name in ARRAYS:
        path = folder / f"{name}.npy"
        array = getattr(whole, name)
        write_atomic(path, lambda file, array=array: np.save(file, array))  # type: ignore[misc]
        checksums[name] = sha256_file(path)
    manifest = {
        "settings": settings,
        "splits": {split: len(data) for split, data in splits.items()},
        "sha256": checksums,
    }
    # The manifest comes last: without it there is no cache.
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1))


def _consecutive(whole: Expressions, counts: dict[str, int]) -> dict[str, Expressions]:
    stops = np.cumsum([0, *counts.values()]).tolist()
    cut = {
        split: whole.part(start, stop)
        for split, start, stop in zip(counts, stops, stops[1:], strict=False)
    }
    return {split: cut[split] for split in SPLITS}


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------ statistics


def _edges(lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Four ranges of length, both ends included, that hold about a quarter of the examples each."""
    cuts = np.unique(np.quantile(lengths, [0.25, 0.5, 0.75], method="nearest"))
    lows = [int(lengths.min()), *(int(cut) + 1 for cut in cuts if cut < lengths.max())]
    return list(zip(lows, [low - 1 for low in lows[1:]] + [int(lengths.max())], strict=True))


def _statistics(data: Expressions) -> dict[str, Any]:
    lengths = data.lengths
    shares = np.bincount(data.targets, minlength=10) / len(data)
    return {
        "examples": len(data),
        "length_mean": round(float(lengths.mean()), 2),
        "length_min": int(lengths.min()),
        "length_max": int(lengths.max()),
        "depth_mean": round(float(data.depths.mean()), 3),
        "label_shares": [round(float(share), 5) for share in shares],
        "majority_label": int(shares.argmax()),
        "majority_share": float(shares.max()),
    }
