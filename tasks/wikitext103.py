"""WikiText-103: predict the next token of encyclopedia articles.

Without a download the text is docstrings (:mod:`tasks.embedded`) in place of articles.

Perplexity is the exponential of the total negative log-likelihood over a count, for the whole split:
per token, and with the same total per word and per byte of the text, so that tokenizers compare.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
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
from tasks import tokenizers
from tasks.arrays import Entry, MappedArray, Writer, code_digest, entry
from tasks.embedded import load_corpus, split_documents
from tasks.parallel import available_cores
from tasks.perplexity import BitsPerUnit, Perplexity
from tasks.sources import Source, choose_source, hub_source, local_source, read_rows
from tasks.tokenizers import PAD, Tokenizer

SPLITS = ("train", "val", "test")
IGNORED = -100
BATCH_CHARACTERS = 1 << 20
"""Text encoded at a time, which bounds the memory that preparing takes."""
HELD_OUT_EVERY = 20
"""Where the source lacks a split, every 20th training document makes one."""

Window = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Inputs, and targets of the same length (``-100``: not counted)."""

_ARTICLE = re.compile(r"^ ?= [^=].* = ?$")

RELEASE_WORDS = 267_735
"""Distinct words of WikiText-103's train split, ``<unk>`` and ``<eos>`` included (Merity et al. 2017)."""
GPT2_PIECES = 50_257


class WikiText103(Task):
    """Causal language modelling over contiguous windows of a text.

    A split is one stream of tokens with a line end put before it. A window's inputs are the tokens
    just before its targets; together the windows predict every token of the split exactly once, the
    last one short.

    Args:
        source: ``embedded`` (docstrings), ``local`` (parquet files in ``data_dir``) or ``hub``.
            ``None``: local when ``data_dir`` is set, else ``default_source``.
        default_source: what the scale uses.
        data_dir: folder in the hub's layout, with a column ``text``, a line a row.
        tokenizer: ``word`` (the release's words), ``bpe`` (trained on train), ``gpt2``, ``byte``.
        bpe_vocab_size: ids of ``bpe``.
        word_vocab_size: ids of ``word``, the most frequent words; ``None``: every word of train.
        tokenizer_dir: folder of GPT-2's ``tokenizer.json``; ``None``: the hub.
        max_length: tokens of context, the longest window.
        eval_stride: targets a window adds in evaluation; ``None``: ``max_length``, no overlap. With
            less, each window after the first counts only its last ``eval_stride`` targets.
        max_train_tokens, max_eval_tokens: use only the first documents of train, of val and test
            each, that fit (at least one); ``None``: all. Words and bytes are counted over what is
            used.
        data_seed: decides how embedded text is split, and which documents are held out.
        hub_dataset, hub_config, hub_revision: what ``hub`` loads. ``hub_config=None``:
            ``wikitext-103-v1`` for ``word`` and ``wikitext-103-raw-v1`` for the others.
        **loading: ``batch_size`` and the other arguments of :class:`~gma_bench.task.Task`.

    Raises:
        SettingError: settings out of range or in contradiction.
    """

    causal = True
    pooling = "token"
    metric = "perplexity"
    split = "val"
    higher_is_better = False

    def __init__(
        self,
        *,
        source: str | None = None,
        default_source: str = "embedded",
        data_dir: str | None = None,
        tokenizer: str = "bpe",
        bpe_vocab_size: int = 4096,
        word_vocab_size: int | None = None,
        tokenizer_dir: str | None = None,
        max_length: int = 512,
        eval_stride: int | None = None,
        max_train_tokens: int | None = None,
        max_eval_tokens: int | None = None,
        data_seed: int = 0,
        hub_dataset: str = "Salesforce/wikitext",
        hub_config: str | None = None,
        hub_revision: str = "b08601e04326c79dfdd32d625aee71d232d685c3",
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.source = choose_source(source, data_dir, default_source)
        tokenizers.check_settings(tokenizer, bpe_vocab_size, word_vocab_size)
        _check_sizes(max_length, eval_stride, max_train_tokens, max_eval_tokens)
        self.data_dir, self.data_seed = data_dir, data_seed
        self.tokenizer_settings: dict[str, Any] = {"tokenizer": tokenizer}
        if tokenizer == "bpe":
            self.tokenizer_settings["bpe_vocab_size"] = bpe_vocab_size
        elif tokenizer == "word":
            self.tokenizer_settings["word_vocab_size"] = word_vocab_size
        elif tokenizer == "gpt2":
            self.tokenizer_settings["tokenizer_dir"] = tokenizer_dir
        raw = "wikitext-103-v1" if tokenizer == "word" else "wikitext-103-raw-v1"
        self.hub = (hub_dataset, hub_config or raw, hub_revision)
        self.max_length = max_length
        self.eval_stride = eval_stride or max_length
        self.limits = {"train": max_train_tokens, "val": max_eval_tokens, "test": max_eval_tokens}
        self.data: dict[str, TokenStream] = {}

    # ------------------------------------------------------------------------------------- data

    def planned_sizes(self) -> tuple[int, int]:
        """As set up; before that, the tokenizer's setting or what is known of the release."""
        if self.data:
            return self.vocab_size, self.num_outputs
        settings = self.tokenizer_settings
        planned: Any = {
            "bpe": settings.get("bpe_vocab_size"),
            "word": settings.get("word_vocab_size") or RELEASE_WORDS,
            "gpt2": GPT2_PIECES,
            "byte": 257,
        }[settings["tokenizer"]]
        return planned, planned

    def prepare_data(self) -> None:
        """Train the tokenizer and encode the text, where the cache does not have them yet."""
        self._entry()

    def setup(self, stage: str | None = None) -> None:
        """Map the cached tokens into memory and make the windows."""
        if self.data:
            return
        stored = self._entry()
        self.meta = stored.meta
        self.tokenizer = tokenizers.from_json(stored.array("tokenizer").values.tobytes().decode())
        self.vocab_size = self.num_outputs = self.tokenizer.vocab_size
        self.data = {split: TokenStream(stored, split, self.limits[split]) for split in SPLITS}
        self.splits = {
            split: Windows(
                stream, self.max_length, self.max_length if split == "train" else self.eval_stride
            )
            for split, stream in self.data.items()
        }
        fed = {"data": stored.digest, "max_length": self.max_length, "stride": self.eval_stride}
        fed |= {split: stream.tokens for split, stream in self.data.items()}
        self.fingerprint = _digest(fed)

    def _entry(self) -> Entry:
        text: EmbeddedText | SourceText
        if self.source == "embedded":
            text = EmbeddedText(self)
        elif self.source == "local":
            text = SourceText(
                local_source(str(self.data_dir), self.hub[1], self.cache_dir), self.data_seed
            )
        else:
            text = SourceText(hub_source(*self.hub, self.cache_dir), self.data_seed)
        key = _digest([code_digest(), text.identity, self.tokenizer_settings, self.data_seed])
        folder = self.cache_dir / "wikitext103" / key[:16]
        return entry(folder, lambda writer: self._build(writer, text))

    def _build(self, writer: Writer, text: EmbeddedText | SourceText) -> None:
        text.open()
        tokenizer = self._make_tokenizer(text)
        encoded = tokenizer.to_json().encode()
        writer.append("tokenizer", np.frombuffer(encoded, np.uint8))
        for split in SPLITS:
            write_split(writer, split, text.documents(split), tokenizer)
        writer.meta |= text.notes

    def _make_tokenizer(self, text: EmbeddedText | SourceText) -> Tokenizer:
        settings = self.tokenizer_settings
        train = text.documents("train")
        if settings["tokenizer"] == "word":
            return tokenizers.WordTokenizer.train(
                batched(train), settings["word_vocab_size"], available_cores()
            )
        if settings["tokenizer"] == "bpe":
            return tokenizers.BytePairTokenizer.train(train, settings["bpe_vocab_size"])
        if settings["tokenizer"] == "gpt2":
            return tokenizers.Gpt2Tokenizer.load(settings["tokenizer_dir"])
        return tokenizers.ByteTokenizer()

    def collate(self, examples: list[Window]) -> Batch:
        """Pad windows to the longest among them.

        Returns:
            ``tokens (B, N)`` int64, ``mask (B, N)`` bool, ``target (B, N)`` int64, −100 where
            nothing is to be predicted.
        """
        lengths = [len(inputs) for inputs, _ in examples]
        tokens = np.full((len(examples), max(lengths)), PAD, np.int64)
        target = np.full_like(tokens, IGNORED)
        for i, (inputs, wanted) in enumerate(examples):
            tokens[i, : len(inputs)] = inputs
            target[i, : len(inputs)] = wanted
        return {
            "tokens": torch.from_numpy(tokens),
            "mask": torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None],
            "target": torch.from_numpy(target),
        }

    @property
    def token_kind(self) -> str:  # type: ignore[override]
        return "bpe" if self.tokenizer.kind == "gpt2" else self.tokenizer.kind

    def spell(self, ids: np.ndarray) -> list[str]:
        return self.tokenizer.spell(ids)

    def documents(self, split: str, index: int, length: int) -> np.ndarray:
        window: Any = self.splits[split]
        place = index * window.stride + np.arange(length) - 1  # the first input precedes the text
        return np.searchsorted(self.data[split].ends, place, side="right")

    def description(self) -> dict[str, Any]:
        """Where the text comes from, tokenizer, context and stride, and what each split counts."""
        described = {
            **self.meta, "source": self.source, **self.tokenizer_settings,
            "vocab_size": self.vocab_size, "context": self.max_length,
            "eval_stride": self.eval_stride, "data_seed": self.data_seed,
            "fingerprint": self.fingerprint,
        }  # fmt: skip
        described["splits"] = {split: data.statistics() for split, data in self.data.items()}
        return described

    # --------------------------------------------------------------------------- loss and metrics

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy, mean over the predicted tokens."""
        return functional.cross_entropy(
            logits.float().flatten(0, 1), batch["target"].flatten(), ignore_index=IGNORED
        )

    def target_counts(self, split: str) -> np.ndarray:
        """Predicted tokens of each window, ``(size,)``; the last window is shorter."""
        windows: Any = self.splits[split]
        return windows.target_counts()

    def new_metrics(self, split: str) -> dict[str, Metric]:
        """``perplexity`` (a token), ``perplexity_per_word`` and ``bits_per_byte``."""
        data = self.data[split]
        return {
            "perplexity": Perplexity(),
            "perplexity_per_word": Perplexity(data.words / data.tokens),
            "bits_per_byte": BitsPerUnit(data.bytes / data.tokens),
        }

    def update(self, metrics: dict[str, Metric], logits: Tensor, batch: Batch) -> None:
        """Add a batch of ``logits (B, N, num_outputs)``."""
        counted = batch["target"] != IGNORED
        losses = functional.cross_entropy(
            logits[counted].float(), batch["target"][counted], reduction="none"
        )
        for metric in metrics.values():
            metric.update(losses)


def _check_sizes(
    max_length: int, stride: int | None, train_tokens: int | None, eval_tokens: int | None
) -> None:
    for name, value in {
        "max_length": max_length, "eval_stride": stride,
        "max_train_tokens": train_tokens, "max_eval_tokens": eval_tokens,
    }.items():  # fmt: skip
        if value is not None and value < 1:
            raise SettingError(f"task.{name}", value, "must be ≥ 1", f"task.{name}=256")
    if stride is not None and stride > max_length:
        raise SettingError(
            "task.eval_stride", stride, f"must be ≤ task.max_length={max_length}",
            f"task.eval_stride={max_length}",
        )  # fmt: skip


class TokenStream:
    """The tokens that are used of a split, and what they count in words and bytes."""

    def __init__(self, stored: Entry, split: str, limit: int | None) -> None:
        self.stream: MappedArray = stored.array(f"{split}_tokens")
        ends = stored.array(f"{split}_ends").values
        fitting = len(ends) if limit is None else int(np.searchsorted(ends, limit, side="right"))
        self.documents = max(1, fitting)
        self.ends = ends[: self.documents]
        self.tokens = int(ends[self.documents - 1])
        self.words = int(stored.array(f"{split}_words")[: self.documents].sum())
        self.bytes = int(stored.array(f"{split}_bytes")[: self.documents].sum())
        self.unknown_share = stored.meta["unknown_share"][split]
        self.whole = len(ends) == self.documents

    def statistics(self) -> dict[str, Any]:
        """Counts for the record; ``words`` include one ``<eos>`` a line."""
        about = {
            "documents": self.documents, "tokens": self.tokens, "words": self.words,
            "bytes": self.bytes, "whole": self.whole,
        }  # fmt: skip
        return (
            about if self.unknown_share is None else about | {"unknown_share": self.unknown_share}
        )


class Windows(Dataset[Window]):
    """Windows over a stream, each with the targets that no earlier window had.

    Args:
        data: the stream; its first entry is the input before the first target.
        context: the longest window.
        stride: how far windows are apart; ``context`` for no overlap.
    """

    def __init__(self, data: TokenStream, context: int, stride: int) -> None:
        self.stream, self.tokens = data.stream, data.tokens
        self.context, self.stride = context, stride

    def __len__(self) -> int:
        return 1 + max(0, -(-(self.tokens - self.context) // self.stride))

    def __getitem__(self, index: int) -> Window:
        start = index * self.stride
        stop = min(start + self.context, self.tokens)
        piece = self.stream[start : stop + 1].astype(np.int64)
        inputs, targets = piece[:-1], piece[1:].copy()
        if index:
            targets[: self.context - self.stride] = IGNORED
        return inputs, targets

    def __getitems__(self, indices: Sequence[int]) -> list[Window]:
        return [self[index] for index in indices]

    def target_counts(self) -> np.ndarray:
        """Targets of each window, ``(len(self),)``: all together they are the stream's tokens."""
        stops = self.context + self.stride * np.arange(len(self))
        return np.diff(np.minimum(stops, self.tokens), prepend=0)


# -------------------------------------------------------------------------------------- documents


class EmbeddedText:
    """Docstrings as documents, each followed by an empty line."""

    def __init__(self, task: WikiText103) -> None:
        self.corpus, self.seed = load_corpus(task.cache_dir), task.data_seed
        self.identity = self.corpus.fingerprint
        self.notes = {"name": "docstrings", "versions": self.corpus.versions}

    def open(self) -> None:
        self.parts = split_documents(self.corpus.texts, self.seed)

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split; every line ends in a newline."""
        for i in self.parts[split]:
            yield self.corpus.texts[i].rstrip() + "\n\n"


class SourceText:
    """Articles of a parquet source: from one title to the next.

    Where the source has no validation or no test split, every 20th training document makes it.
    """

    def __init__(self, source: Source, seed: int) -> None:
        self.source, self.seed = source, seed
        self.identity = source.identity
        self.notes: dict[str, Any] = {"name": source.name}

    def open(self) -> None:
        self.shards = self.source.open()
        if "train" not in self.shards:
            there = ", ".join(sorted(self.shards)) or "none"
            raise DataError(f"{self.source.name} has no train split; it has {there}")
        missing = [split for split in ("val", "test") if split not in self.shards]
        self.places = {
            split: (self.seed - 1 - 10 * i) % HELD_OUT_EVERY for i, split in enumerate(missing)
        }
        if missing:
            self.notes["held_out_of_train"] = missing

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split; every line ends in a newline."""
        published = split in self.shards
        for number, document in enumerate(self._articles(split if published else "train")):
            # One of the places of held-out documents, or none: then it is train's own.
            place = number % HELD_OUT_EVERY
            owner = next((name for name, held in self.places.items() if held == place), "train")
            if split == owner or (published and split != "train"):
                yield document

    def _articles(self, split: str) -> Iterator[str]:
        lines: list[str] = []
        size = 0
        for shard in self.shards[split]:
            for _, (row,) in read_rows(shard, ("text",)):
                line = row.decode().replace("\r\n", "\n").removesuffix("\n") + "\n"
                if lines and (_ARTICLE.match(line) or size > BATCH_CHARACTERS):
                    yield "".join(lines)
                    lines, size = [], 0
                lines.append(line)
                size += len(line)
        if lines:
            yield "".join(lines)


def batched(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents of about a million characters each."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def count_words(text: str) -> int:
    """Words of the release's tokenisation: between white space, and ``<eos>`` for each line."""
    return len(text.split()) + text.count("\n")


def write_split(writer: Writer, split: str, documents: Iterable[str], tokenizer: Tokenizer) -> None:
    """Encode a split into the entry: tokens, and per document its end, words and bytes.

    Raises:
        UserError: the split has no document.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    unknown = getattr(tokenizer, "unknown", None)
    total = unknowns = 0
    counts: list[tuple[int, int]] = []

    def counted() -> Iterator[list[str]]:
        for batch in batched(documents):
            counts.extend((count_words(text), len(text.encode())) for text in batch)
            yield batch

    writer.append(f"{split}_tokens", np.asarray([tokenizer.line_end], dtype))
    for ids in tokenizer.encode_stream(counted()):
        sizes = np.asarray([len(one) for one in ids], np.int64)
        flat = np.concatenate(ids)
        writer.append(f"{split}_tokens", flat.astype(dtype))
        writer.append(f"{split}_ends", total + np.cumsum(sizes))
        total += len(flat)
        if unknown is not None:
            unknowns += int((flat == unknown).sum())
    if not total:
        raise DataError(
            f"the {split} split has no text (a split that the source lacks is every "
            f"{HELD_OUT_EVERY}th document of train)"
        )
    words, sizes_bytes = np.asarray(counts, np.int64).T
    writer.append(f"{split}_words", words)
    writer.append(f"{split}_bytes", sizes_bytes)
    share = None if unknown is None else round(unknowns / total, 5)
    writer.meta.setdefault("unknown_share", {})[split] = share


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
