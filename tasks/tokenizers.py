"""Tokenizers for language modelling: word, bpe, gpt2 and byte. Id 0 is padding in all of them."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gma_bench.errors import SettingError, UserError
from tasks.parallel import available_cores, ordered_map
from tasks.sources import stay_offline_without_network

if TYPE_CHECKING:
    import tokenizers

PAD = 0
KINDS = ("word", "bpe", "gpt2", "byte")
GPT2 = "openai-community/gpt2"

Ids = NDArray[np.uint32]
_PIECE_START = re.compile(r"(?= \S)")
"""Where GPT-2's pattern cuts whatever surrounds it: before a space that a visible character follows."""


class Tokenizer(ABC):
    """Text to ids and back. Documents are encoded one by one, so batching changes no id."""

    kind: ClassVar[str]
    lossless: ClassVar[bool] = True
    """Whether ``decode(encode(text))`` is ``text``."""
    vocab_size: int
    """Ids, padding included."""
    line_end: int
    """The id of a line's end; it is the input before the first token of a split."""

    @abstractmethod
    def encode(self, texts: list[str]) -> list[Ids]:
        """Ids of each text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; padding has none."""

    @abstractmethod
    def to_json(self) -> str:
        """All that :func:`from_json` needs."""

    def spell(self, ids: Iterable[int]) -> list[str]:
        """Each token as its vocabulary writes it; padding is ``<pad>``."""
        return ["<pad>" if i == PAD else self._spell_one(int(i)) for i in ids]

    @abstractmethod
    def _spell_one(self, i: int) -> str: ...

    def encode_stream(self, batches: Iterable[list[str]]) -> Iterator[list[Ids]]:
        """Encode batches of documents as they come, in order."""
        return map(self.encode, batches)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes."""

    kind = "byte"
    vocab_size = 257
    line_end = ord("\n") + 1

    def encode(self, texts: list[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) + 1 for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i - 1 for i in ids if i != PAD).decode("utf-8", "replace")

    def _spell_one(self, i: int) -> str:
        return chr(i - 1)

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind})


class WordTokenizer(Tokenizer):
    """Words between white space, ``<eos>`` at each line's end, ``<unk>`` for unknown words.

    This is the tokenisation that the WikiText releases come in; ``<unk>`` in the text is the same id.

    Args:
        words: the vocabulary, without ``<eos>`` and ``<unk>``.
    """

    kind = "word"
    lossless = False
    line_end, unknown, first = 1, 2, 3

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.numbers = {word: self.first + i for i, word in enumerate(words)}
        self.numbers |= {"<eos>": self.line_end, "<unk>": self.unknown}
        self.vocab_size = self.first + len(words)

    @classmethod
    def train(cls, batches: Iterable[list[str]], size: int | None, workers: int) -> WordTokenizer:
        """All words of the documents, or the ``size`` most frequent ids' worth of them."""
        counts: Counter[str] = Counter()
        for counted in ordered_map(_count_words, batches, workers):
            counts.update(counted)
        for special in ("<unk>", "<eos>"):
            counts.pop(special, None)
        words = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(words if size is None else words[: max(0, size - cls.first)])

    def encode(self, texts: list[str]) -> list[Ids]:
        get, unknown = self.numbers.get, self.unknown
        return [
            np.fromiter((get(word, unknown) for word in _words(text)), np.uint32) for text in texts
        ]

    def encode_stream(self, batches: Iterable[list[str]]) -> Iterator[list[Ids]]:
        return ordered_map(self.encode, batches, available_cores(), shared=True)

    def decode(self, ids: Iterable[int]) -> str:
        text = ""
        for i in ids:
            if i == self.line_end:
                text = text.removesuffix(" ") + "\n"
            elif i != PAD:
                text += ("<unk>" if i == self.unknown else self.words[i - self.first]) + " "
        return text

    def _spell_one(self, i: int) -> str:
        return {self.line_end: "<eos>", self.unknown: "<unk>"}.get(i) or self.words[i - self.first]

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "words": self.words})


def _words(text: str) -> list[str]:
    return text.replace("\n", " <eos> ").split()


def _count_words(texts: list[str]) -> Counter[str]:
    return Counter(chain.from_iterable(map(_words, texts)))


class BytePairTokenizer(Tokenizer):
    """Byte-level byte-pair encoding; any text has ids and comes back whole.

    Nothing in the text is read as a special token. Merges never cross the pieces into which the
    pre-tokenizer cuts a text, so the ids of pieces seen before are looked up.
    """

    kind = "bpe"
    most_known = 1 << 19
    """Pieces remembered at most, which bounds the memory."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        model.encode_special_tokens = True
        self.model = model
        self.vocab_size = model.get_vocab_size() + 1
        newline = self.model.encode("\n", add_special_tokens=False).ids
        if len(newline) != 1:
            raise UserError("the tokenizer has no token for a line end; it must be byte-level")
        self.line_end = newline[0] + 1
        self.known: dict[str, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "known": {}}

    @classmethod
    def train(cls, documents: Iterable[str], size: int) -> BytePairTokenizer:
        """Merge the most frequent pairs of the documents until there are ``size`` ids."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size - 1,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )
        model.train_from_iterator(documents, trainer)
        return cls(model)

    def encode(self, texts: list[str]) -> list[Ids]:
        cut = [_PIECE_START.split(text) for text in texts]
        if len(self.known) > self.most_known:
            self.known.clear()
        new = list({piece: None for pieces in cut for piece in pieces if piece not in self.known})
        for piece, encoded in zip(
            new, self.model.encode_batch_fast(new, add_special_tokens=False), strict=True
        ):
            self.known[piece] = encoded.ids
        known = self.known
        return [
            np.fromiter(chain.from_iterable(map(known.__getitem__, pieces)), np.uint32) + 1
            for pieces in cut
        ]

    def encode_stream(self, batches: Iterable[list[str]]) -> Iterator[list[Ids]]:
        with _tokenizer_threads_off():
            yield from ordered_map(self.encode, batches, available_cores(), shared=True)

    def decode(self, ids: Iterable[int]) -> str:
        return self.model.decode([i - 1 for i in ids if i != PAD], skip_special_tokens=False)

    def _spell_one(self, i: int) -> str:
        return self.model.id_to_token(i - 1) or "<unk>"

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "model": self.model.to_str()})


class Gpt2Tokenizer(BytePairTokenizer):
    """GPT-2's byte-pair encoding, from a folder or from the hub."""

    kind = "gpt2"

    @classmethod
    def load(cls, folder: str | None) -> Gpt2Tokenizer:
        """Read ``tokenizer.json`` (or ``vocab.json`` and ``merges.txt``) in ``folder``, or the hub's.

        Raises:
            UserError: the files are missing or damaged, or the hub cannot be reached.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        if folder is None:
            stay_offline_without_network()
            try:
                return cls(Tokenizer.from_pretrained(GPT2))
            except Exception as error:  # the client raises plain Exception
                reason = str(error).strip().split("\n")[0][:160]
                raise UserError(
                    f"task.tokenizer=gpt2 cannot load {GPT2} from the hub ({reason}). Without a "
                    "network: task.tokenizer_dir=<folder with its tokenizer.json>, or "
                    "task.tokenizer=bpe"
                ) from error
        root = Path(folder).expanduser()
        try:
            if (root / "tokenizer.json").exists():
                return cls(Tokenizer.from_file(str(root / "tokenizer.json")))
            model = Tokenizer(
                models.BPE.from_file(str(root / "vocab.json"), str(root / "merges.txt"))
            )
        except Exception as error:
            raise UserError(
                f"task.tokenizer_dir={folder} must hold tokenizer.json, or vocab.json and merges.txt "
                f"({str(error).strip()[:120]})"
            ) from error
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        return cls(model)


@contextmanager
def _tokenizer_threads_off() -> Iterator[None]:
    """Processes forked meanwhile do not wait for the library's threads, which they do not have."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def from_json(text: str) -> Tokenizer:
    """The tokenizer that :meth:`Tokenizer.to_json` wrote."""
    about = json.loads(text)
    if about["kind"] == "byte":
        return ByteTokenizer()
    if about["kind"] == "word":
        return WordTokenizer(about["words"])
    from tokenizers import Tokenizer as Model

    kind = Gpt2Tokenizer if about["kind"] == "gpt2" else BytePairTokenizer
    return kind(Model.from_str(about["model"]))


def check_settings(kind: str, bpe_vocab_size: int, word_vocab_size: int | None) -> None:
    """Raise a SettingError for a tokenizer that cannot be made."""
    if kind not in KINDS:
        raise SettingError(
            "task.tokenizer", kind, f"must be one of {', '.join(KINDS)}", "task.tokenizer=bpe"
        )
    if kind == "bpe" and bpe_vocab_size < 258:
        raise SettingError(
            "task.bpe_vocab_size", bpe_vocab_size, "must be ≥ 258: 256 bytes, padding and a merge",
            "task.bpe_vocab_size=4096",
        )  # fmt: skip
    if kind == "word" and word_vocab_size is not None and word_vocab_size < 4:
        raise SettingError(
            "task.word_vocab_size", word_vocab_size, "must be ≥ 4, or null for every word",
            "task.word_vocab_size=null",
        )  # fmt: skip
