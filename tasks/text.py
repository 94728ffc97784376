"""Text: classify a document read byte by byte (the Text task of the Long-Range Arena).

At the paper's size the documents are film reviews (IMDb) and the classes their sentiment. Without a
download they are docstrings, and the class is the package that a docstring comes from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset
from torchmetrics import Metric

from gma_bench.errors import DataError, SettingError
from gma_bench.task import Batch, Task
from tasks.accuracy import Accuracy
from tasks.arrays import Entry, Writer, code_digest, entry
from tasks.embedded import PACKAGES, classification_examples, load_corpus
from tasks.sources import Shard, Source, choose_source, hub_source, local_source, read_rows

SPLITS = ("train", "val", "test")
PAD = 0
FIRST_BYTE = 1

Example = tuple[NDArray[np.uint8], int]
"""Bytes (cut to the longest allowed), label."""
Documents = tuple[list[bytes], NDArray[np.int64]]


class Text(Task):
    """Classification of documents given as UTF-8 bytes, one id a byte plus padding.

    Validation is held out of train (stratified, by ``data_seed``) unless the source has a
    validation split of its own. The test split decides nothing.

    Args:
        source: ``embedded`` (docstrings, 8 classes), ``local`` (parquet files in ``data_dir``) or
            ``hub``. ``None``: local when ``data_dir`` is set, else ``default_source``.
        default_source: what the scale uses.
        data_dir: folder in the hub's layout, with columns ``text`` and ``label``.
        max_length: bytes fed; of longer documents the first so many.
        num_train, num_val, num_test: at most so many documents a split, classes in proportion;
            ``None``: all.
        validation_share: of the training documents, where validation is held out.
        data_seed: decides the held-out documents and which ones a smaller split keeps.
        hub_dataset, hub_config, hub_revision: what ``hub`` loads.
        **loading: ``batch_size`` and the other arguments of :class:`~gma_bench.task.Task`.

    Raises:
        SettingError: settings out of range or in contradiction.
    """

    def __init__(
        self,
        *,
        source: str | None = None,
        default_source: str = "embedded",
        data_dir: str | None = None,
        max_length: int = 4096,
        num_train: int | None = None,
        num_val: int | None = None,
        num_test: int | None = None,
        validation_share: float = 0.1,
        data_seed: int = 0,
        hub_dataset: str = "stanfordnlp/imdb",
        hub_config: str = "plain_text",
        hub_revision: str = "e6281661ce1c48d982bc483cf8a173c1bbeb5d31",
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.source = choose_source(source, data_dir, default_source)
        self.data_dir = data_dir
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        counts = {"max_length": max_length, **{f"num_{k}": v for k, v in self.sizes.items()}}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise SettingError(f"task.{name}", count, "must be ≥ 1", f"task.{name}=256")
        if not 0 < validation_share < 1:
            raise SettingError(
                "task.validation_share", validation_share, "must lie between 0 and 1",
                "task.validation_share=0.1",
            )  # fmt: skip
        self.validation_share, self.data_seed = validation_share, data_seed
        self.hub = (hub_dataset, hub_config, hub_revision)
        self.max_length = max_length
        self.vocab_size = FIRST_BYTE + 256
        self.data: dict[str, TextDataset] = {}

    # ------------------------------------------------------------------------------------- data

    def planned_sizes(self) -> tuple[int, int]:
        """As set up; before that, a class a package, or the two of IMDb."""
        planned = len(PACKAGES) if self.source == "embedded" else 2
        return self.vocab_size, len(self.classes) if self.data else planned

    def prepare_data(self) -> None:
        """Read or extract what is not in the cache yet."""
        self._entry()

    def setup(self, stage: str | None = None) -> None:
        """Map the cached bytes into memory and make the splits."""
        if self.data:
            return
        stored = self._entry()
        self.meta = stored.meta
        self.classes: list[str] = stored.meta["classes"]
        self.num_outputs = len(self.classes)
        self.data = {
            split: TextDataset(stored, split, self.sizes[split], self.max_length)
            for split in SPLITS
        }
        self.splits = dict(self.data)
        fed = {"data": stored.digest, "max_length": self.max_length}
        fed |= {split: len(data) for split, data in self.data.items()}
        self.fingerprint = _digest(fed)

    def _entry(self) -> Entry:
        source = None if self.source == "embedded" else self._files()
        if source is None:
            corpus = load_corpus(self.cache_dir)
            identity = corpus.fingerprint
        else:
            identity = source.identity
        key = _digest([code_digest(), identity, self.data_seed, self.validation_share])
        folder = self.cache_dir / "text" / key[:16]

        def build(writer: Writer) -> None:
            if source is None:
                documents = classification_examples(corpus, self.data_seed)
                writer.meta |= {"name": "docstrings", "classes": list(PACKAGES)}
                writer.meta |= {"versions": corpus.versions, "validation": "held out of train"}
            else:
                documents, about = read_classified(source, self.validation_share, self.data_seed)
                writer.meta |= {"name": source.name, **about}
            for split, (texts, labels) in documents.items():
                order = proportional_order(labels, self.data_seed)
                texts = [texts[i] for i in order]
                writer.append(f"{split}_text", np.frombuffer(b"".join(texts), np.uint8))
                writer.append(f"{split}_ends", np.cumsum([len(t) for t in texts], dtype=np.int64))
                writer.append(f"{split}_labels", labels[order].astype(np.uint8))

        return entry(folder, build)

    def _files(self) -> Source:
        if self.source == "local":
            return local_source(str(self.data_dir), self.hub[1], self.cache_dir)
        return hub_source(*self.hub, self.cache_dir)

    def lengths(self, split: str) -> NDArray[np.int64]:
        """``(n,)`` bytes fed of each document of a split."""
        return self.data[split].lengths

    def collate(self, examples: list[Example]) -> Batch:
        """Pad documents to the longest among them.

        Returns:
            ``tokens (B, N)`` int64, ``mask (B, N)`` bool, ``target (B,)`` int64.
        """
        lengths = [len(text) for text, _ in examples]
        tokens = np.full((len(examples), max(lengths)), PAD, np.int64)
        for line, (text, _) in zip(tokens, examples, strict=True):
            line[: len(text)] = text
            line[: len(text)] += FIRST_BYTE
        return {
            "tokens": torch.from_numpy(tokens),
            "mask": torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None],
            "target": torch.tensor([label for _, label in examples]),
        }

    token_kind = "byte"

    def spell(self, ids: np.ndarray) -> list[str]:
        return ["<pad>" if i < FIRST_BYTE else chr(i - FIRST_BYTE) for i in ids]

    def description(self) -> dict[str, Any]:
        """Where the documents come from, and per split: size, class shares, lengths, share cut."""
        described: dict[str, Any] = {
            "name": self.meta["name"], "source": self.source, "classes": self.classes,
            "max_length": self.max_length, "data_seed": self.data_seed,
            "validation": self.meta["validation"], "fingerprint": self.fingerprint,
        }  # fmt: skip
        if "versions" in self.meta:
            described["versions"] = self.meta["versions"]
        described["splits"] = {
            split: data.statistics(self.classes) for split, data in self.data.items()
        }
        return described

    # --------------------------------------------------------------------------- loss and metric

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy, mean over documents."""
        return functional.cross_entropy(logits.float(), batch["target"])

    def new_metrics(self, split: str) -> dict[str, Metric]:
        """``accuracy``."""
        return {"accuracy": Accuracy()}

    def update(self, metrics: dict[str, Metric], logits: Tensor, batch: Batch) -> None:
        """Add a batch of ``logits (B, num_outputs)``."""
        metrics["accuracy"].update(logits.argmax(-1) == batch["target"])


class TextDataset(Dataset[Example]):
    """The first documents of a split, mapped from the cache and cut when they are read."""

    def __init__(self, stored: Entry, split: str, size: int | None, max_length: int) -> None:
        self.text = stored.array(f"{split}_text")
        self.ends = np.asarray(stored.array(f"{split}_ends").values[:size])
        self.labels = np.asarray(stored.array(f"{split}_labels").values[:size]).astype(np.int64)
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def whole_lengths(self) -> NDArray[np.int64]:
        """``(n,)`` bytes of each document before the cut."""
        return np.diff(self.ends, prepend=np.int64(0))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``(n,)`` bytes of each document after the cut."""
        return np.minimum(self.whole_lengths, self.max_length)

    def __getitem__(self, index: int) -> Example:
        start = int(self.ends[index - 1]) if index else 0
        stop = min(int(self.ends[index]), start + self.max_length)
        return self.text[start:stop], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        return [self[index] for index in indices]

    def statistics(self, classes: list[str]) -> dict[str, Any]:
        """Size, class shares, lengths and the share of documents that are cut."""
        lengths = self.whole_lengths
        return {
            "examples": len(self),
            "class_shares": {
                name: round(float((self.labels == label).mean()), 4)
                for label, name in enumerate(classes)
            },
            "median_bytes": int(np.median(lengths)),
            "max_bytes": int(lengths.max()),
            "truncated_share": round(float((lengths > self.max_length).mean()), 4),
        }


# ------------------------------------------------------------------------------------------- files


def read_classified(
    source: Source, validation_share: float, seed: int
) -> tuple[dict[str, Documents], dict[str, Any]]:
    """Documents and labels of a source, with validation held out of train where it has none.

    Returns:
        documents by split, and notes for the record: class names, how validation came about.

    Raises:
        UserError: a split or column is missing; an empty, null or undecodable text; a label that is
            not a class of the training split; fewer than two classes.
    """
    shards = source.open()
    for split in ("train", "test"):
        if split not in shards:
            raise DataError(
                f"{source.name} has no {split} split; it has {', '.join(sorted(shards)) or 'none'}"
            )
    names = _class_names(shards["train"][0])
    documents = {split: _read_split(shards[split], names) for split in SPLITS if split in shards}
    train_labels = documents["train"][1]
    classes = names or [str(label) for label in range(int(train_labels.max()) + 1)]
    present = np.bincount(train_labels, minlength=len(classes)) > 0
    if present.sum() < 2:
        raise DataError(
            f"{source.name}, train: every row has the label {classes[int(train_labels[0])]}; "
            "classification needs two classes"
        )
    for split, (_, labels) in documents.items():
        for row in np.flatnonzero(labels >= len(classes)):
            raise DataError(f"{source.name}, {split}, row {row}: train has no label {labels[row]}")
    notes = {"classes": classes, "validation": "as published"}
    if "val" not in documents:
        documents |= _hold_out(documents["train"], validation_share, seed)
        notes["validation"] = f"{validation_share:g} of train, stratified"
    return {split: documents[split] for split in SPLITS}, notes


def _class_names(shard: Shard) -> list[str] | None:
    feature = shard.load().features.get("label")
    return list(feature.names) if hasattr(feature, "names") else None


def _read_split(shards: list[Shard], names: list[str] | None) -> Documents:
    texts, labels = [], []
    for shard in shards:
        for row, (text, label) in read_rows(shard, ("text", "label")):
            if not text.strip():
                raise DataError(f"{shard.name}, row {row}: the text is empty")
            if not isinstance(label, int) or not 0 <= label < (len(names) if names else 256):
                raise DataError(f"{shard.name}, row {row}: label {label!r} is not a class")
            texts.append(text)
            labels.append(label)
    if not texts:
        raise DataError(f"{shards[0].name} has no rows")
    return texts, np.asarray(labels, np.int64)


def _hold_out(train: Documents, share: float, seed: int) -> dict[str, Documents]:
    texts, labels = train
    order = proportional_order(labels, seed)
    size = max(1, round(share * len(texts)))

    def part(members: NDArray[np.int64]) -> Documents:
        return [texts[i] for i in members], labels[members]

    return {"val": part(order[:size]), "train": part(order[size:])}


def proportional_order(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """A random order of which every beginning has the classes in their overall proportions."""
    random = np.random.default_rng([seed, len(labels)])
    place = np.empty(len(labels))
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        place[members] = (np.arange(len(members)) + random.random(len(members))) / len(members)
    return np.argsort(place, kind="stable")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
