"""Text from parquet files: a local folder in the hub's layout, or the hub, through ``datasets``."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from gma_bench.errors import DataError, SettingError, UserError
from gma_bench.results.store import sha256_file

if TYPE_CHECKING:
    from datasets import Dataset

SOURCES = ("embedded", "local", "hub")
_SPLIT_NAMES = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
}
_ROWS_A_READ = 4096


class Shard(NamedTuple):
    """One file of a split, or a whole split of the hub."""

    name: str
    """What error messages call it."""
    load: Callable[[], Dataset]


class Source(NamedTuple):
    """Where rows come from. ``identity`` changes when what the files hold does."""

    name: str
    identity: str
    open: Callable[[], dict[str, list[Shard]]]
    """Split (train, val, test; those that exist) to its shards in order."""


def choose_source(source: str | None, data_dir: str | None, default: str) -> str:
    """Resolve ``task.source``: as given, else local when ``task.data_dir`` is, else ``default``.

    Raises:
        SettingError: it is none of embedded, local and hub, or contradicts ``data_dir``.
    """
    chosen = source or ("local" if data_dir else default)
    if chosen not in SOURCES:
        raise SettingError(
            "task.source", chosen, f"must be one of {', '.join(SOURCES)}", "task.source=embedded"
        )
    if chosen == "local" and not data_dir:
        raise SettingError(
            "task.data_dir", data_dir, "task.source=local needs a folder of train-*.parquet, …",
            "task.data_dir=<folder>",
        )  # fmt: skip
    if chosen != "local" and data_dir:
        raise SettingError(
            "task.data_dir", data_dir, f"task.source={chosen} reads no folder", "task.source=local"
        )
    return chosen


def local_source(data_dir: str | Path, config: str, cache_dir: Path) -> Source:
    """Parquet files ``train-*.parquet``, ``validation-*.parquet``, ``test-*.parquet`` in a folder.

    Args:
        data_dir: the folder, or one that holds a folder ``config`` or ``data`` with the files, as
            repositories on the hub do.
        config: the name of the data set's configuration.
        cache_dir: where ``datasets`` keeps its Arrow copies.

    Raises:
        DataError: the folder is missing, or holds no such file.
    """
    root = Path(data_dir).expanduser().resolve()
    if not root.is_dir():
        raise DataError(f"task.data_dir={data_dir} is not a folder")
    for folder in (root, root / config, root / "data"):
        files = _parquet_files(folder)
        if files:
            break
    else:
        there = ", ".join(sorted(path.name for path in root.iterdir())[:8]) or "nothing"
        raise DataError(
            f"task.data_dir={data_dir} holds no train-*.parquet, neither itself nor in {config}/ "
            f"or data/; it holds {there}. Lay it out as the hub does"
        )
    contents = [
        f"{split} {path.name} {sha256_file(path)}"
        for split, paths in sorted(files.items())
        for path in paths
    ]

    def shard(path: Path) -> Shard:
        return Shard(str(path), partial(_read_parquet, path, cache_dir))

    return Source(
        folder.name,
        "\n".join(contents),
        lambda: {split: [shard(path) for path in paths] for split, paths in files.items()},
    )


def _parquet_files(folder: Path) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.parquet")):
        split = _SPLIT_NAMES.get(re.split(r"[-._]", path.name)[0])
        if split:
            files.setdefault(split, []).append(path)
    return files


def _read_parquet(path: Path, cache_dir: Path) -> Dataset:
    import pyarrow.parquet as pq

    datasets = _quiet_datasets()
    try:
        if not pq.read_metadata(path).num_rows:  # which the reader of ``datasets`` trips over
            raise DataError(f"{path} has no rows")
        return datasets.load_dataset(
            "parquet",
            data_files={"train": [_literal(path)]},
            split="train",
            # Its own cache knows a file by size and time alone.
            cache_dir=str(cache_dir / "datasets" / sha256_file(path)[:16]),
        )
    except DataError:
        raise
    except Exception as error:  # whatever its Arrow reader raises for this file
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise DataError(f"{path} cannot be read as parquet: {reason}") from error


def _quiet_datasets() -> ModuleType:
    """The library, with its bars and its second copy of each error message off."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets


def _literal(path: Path) -> str:
    """``datasets`` takes paths as glob patterns."""
    return re.sub(r"([*?\[])", r"[\1]", str(path))


def hub_source(repository: str, config: str, revision: str, cache_dir: Path) -> Source:
    """A data set of the hub at a fixed revision; nothing is fetched before ``open``."""

    def open_hub() -> dict[str, list[Shard]]:
        loaded = _download(repository, config, revision, cache_dir)
        return {
            _SPLIT_NAMES[name]: [Shard(f"{repository} {name}", partial(loaded.__getitem__, name))]
            for name in loaded
            if name in _SPLIT_NAMES
        }

    return Source(repository, f"{repository} {config} {revision}", open_hub)


def _download(repository: str, config: str, revision: str, cache_dir: Path) -> dict[str, Dataset]:
    datasets = _quiet_datasets()
    stay_offline_without_network()
    try:
        return dict(
            datasets.load_dataset(
                repository, config, revision=revision, cache_dir=str(cache_dir / "datasets")
            )
        )
    except Exception as error:  # the hub's clients raise a family of their own for each failure
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0][:160]
        raise UserError(
            f"task.source=hub cannot load {repository} ({config}) from the hub ({reason}). Without "
            "a network: task.source=embedded for the built-in text, or task.source=local "
            "task.data_dir=<folder of its parquet files>"
        ) from error


def stay_offline_without_network() -> None:
    """Let the hub's client answer from its cache at once, not after half a minute of retries.

    Only where the hub's name does not resolve and no proxy could resolve it.
    """
    import datasets
    from huggingface_hub import constants

    if getproxies():
        return
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def read_rows(shard: Shard, columns: tuple[str, ...]) -> Iterator[tuple[int, list[Any]]]:
    """Rows of a shard with their numbers, from 0; the first column as checked UTF-8 bytes.

    Raises:
        UserError: a column is missing, a text is null, not text or not UTF-8; names shard and row.
    """
    import pyarrow as pa

    data = shard.load()
    for column in columns:
        if column not in data.column_names:
            raise DataError(
                f"{shard.name} has no column {column!r}; it has {', '.join(data.column_names)}"
            )
    number = 0
    for table in data.select_columns(list(columns)).with_format("arrow").iter(_ROWS_A_READ):
        try:
            texts = table[columns[0]].cast(pa.large_binary()).to_pylist()
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{shard.name}: column {columns[0]!r} is not text ({error})") from error
        others = [table[column].to_pylist() for column in columns[1:]]
        for text, *rest in zip(texts, *others, strict=True):
            if text is None:
                raise DataError(f"{shard.name}, row {number}: no {columns[0]}")
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{shard.name}, row {number}: {columns[0]} is not UTF-8 "
                    f"({error.reason} at byte {error.start})"
                ) from error
            yield number, [text, *rest]
            number += 1
