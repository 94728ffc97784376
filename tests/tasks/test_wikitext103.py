"""WikiText-103: every token is predicted once, and perplexity is that of the text, not of batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gma_bench.errors import SettingError, UserError
from tasks.perplexity import BitsPerUnit, Perplexity
from tasks.tokenizers import (
    BytePairTokenizer,
    ByteTokenizer,
    Gpt2Tokenizer,
    WordTokenizer,
    from_json,
)
from tasks.wikitext103 import IGNORED, WikiText103, Windows, count_words

WORDS = [
    "the",
    "of",
    "valley",
    "was",
    "built",
    "river",
    "by",
    "@-@",
    ",",
    ".",
    "<unk>",
    "Ünï",
    "東京",
]


def article(number: int, random: np.random.Generator) -> list[str]:
    """Rows of one article as the release has them: a title, empty rows, paragraphs."""
    rows = ["", f" = Title {number} = \n", ""]
    for _ in range(random.integers(1, 4)):
        rows.append(" " + " ".join(random.choice(WORDS, random.integers(5, 40))) + " \n")
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of three splits in the hub's layout, train in two shards."""
    root = tmp_path_factory.mktemp("wikitext")
    random = np.random.default_rng(0)
    sizes = {
        "train-00000-of-00002": 30,
        "train-00001-of-00002": 20,
        "validation-00000-of-00001": 6,
        "test-00000-of-00001": 5,
    }
    for name, articles in sizes.items():
        rows = [row for i in range(articles) for row in article(i, random)]
        pd.DataFrame({"text": rows}).to_parquet(root / f"{name}.parquet")
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def make(folder: Path, cache: Path, **own: Any) -> WikiText103:
    task = WikiText103(
        data_dir=str(folder), cache_dir=cache, **{"tokenizer": "bpe", "bpe_vocab_size": 300, **own}
    )
    task.prepare_data()
    task.setup()
    return task


def split_text(folder: Path, split: str) -> str:
    rows = [r for path in sorted(folder.glob(f"{split}-*")) for r in pd.read_parquet(path).text]
    return "".join(row.removesuffix("\n") + "\n" for row in rows)


class Bigram(nn.Module):
    """A causal model with weights of its own for every previous token; float64."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        before = nn.functional.pad(tokens, (1, 0))[:, :-1]  # the window's edge matters too
        return self.table[tokens] + 0.5 * self.table[before]


def evaluate(task: WikiText103, split: str, batch_size: int) -> dict[str, float]:
    task.eval_batch_size = batch_size
    model, metrics = Bigram(task.vocab_size), task.new_metrics(split)
    for batch in task.evaluation_dataloader(split):
        task.update(metrics, model(batch["tokens"]), batch)
    return task.compute(metrics)


def brute_force_nats(task: WikiText103, split: str) -> tuple[float, int]:
    """Total loss and tokens of a split, each window cut from the stream by hand and fed alone."""
    data, model = task.data[split], Bigram(task.vocab_size)
    stream = torch.tensor(data.stream[: data.tokens + 1].astype(np.int64))
    total, done, start = 0.0, 0, 0
    while done < data.tokens:
        stop = min(start + task.max_length, data.tokens)
        losses = nn.functional.cross_entropy(
            model(stream[None, start:stop])[0].float(),
            stream[start + 1 : stop + 1],
            reduction="none",
        )
        total += float(losses.double()[done - start :].sum())
        done, start = stop, start + task.eval_stride
    return total, done


# ------------------------------------------------------------------------------------------ windows


@given(
    tokens=st.integers(1, 200), context=st.integers(1, 40), data=st.data()
)  # fmt: skip
def test_every_token_is_predicted_exactly_once_from_the_tokens_before_it(
    tokens: int, context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))

    class Stream:
        stream = np.arange(tokens + 1)

    Stream.tokens = tokens  # type: ignore[attr-defined]
    windows = Windows(Stream, context, stride)  # type: ignore[arg-type]
    counted: list[int] = []
    for index in range(len(windows)):
        inputs, targets = windows[index]
        assert 1 <= len(inputs) <= context
        kept = targets != IGNORED
        assert (targets[kept] == inputs[kept] + 1).all()
        if index:  # all that is counted has at least context − stride tokens of context
            assert not kept[: context - stride].any()
        counted += targets[kept].tolist()
    assert counted == list(range(1, tokens + 1))


def test_batches_pad_without_targets(folder: Path, cache: Path) -> None:
    task = make(folder, cache, max_length=50)
    last = len(task.splits["val"]) - 1  # type: ignore[arg-type]
    batch = task.collate([task.splits["val"][0], task.splits["val"][last]])
    assert batch["tokens"].shape == batch["mask"].shape == batch["target"].shape == (2, 50)
    assert (batch["target"][~batch["mask"]] == IGNORED).all()
    assert (batch["tokens"][~batch["mask"]] == 0).all()
    assert batch["tokens"][0, 0] == task.tokenizer.line_end
    assert 0 < batch["mask"][1].sum() < 50


def test_targets_decode_to_the_split(folder: Path, cache: Path) -> None:
    for kind in ("bpe", "byte"):
        task = make(folder, cache, tokenizer=kind, max_length=37)
        for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
            windows = task.splits[split]
            ids = [int(i) for w in range(len(windows)) for i in windows[w][1]]  # type: ignore[arg-type]
            assert task.tokenizer.decode(ids) == split_text(folder, name)


# ------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("stride", [None, 20, 7])
def test_perplexity_is_the_same_at_any_batch_size_and_by_brute_force(
    folder: Path, cache: Path, stride: int | None
) -> None:
    task = make(folder, cache, max_length=33, eval_stride=stride)
    text = split_text(folder, "validation")
    nats, tokens = brute_force_nats(task, "val")
    assert tokens == task.data["val"].tokens
    expected = {
        "perplexity": math.exp(nats / tokens),
        "perplexity_per_word": math.exp(nats / count_words(text)),
        "bits_per_byte": nats / math.log(2) / len(text.encode()),
    }
    figures = [evaluate(task, "val", size) for size in (1, 3, 8)]
    assert figures[0] == pytest.approx(expected, rel=1e-6)
    assert figures[0] == pytest.approx(figures[1], rel=1e-12)
    assert figures[0] == pytest.approx(figures[2], rel=1e-12)


def test_stride_changes_the_figure_and_stands_in_the_record(folder: Path, cache: Path) -> None:
    plain = make(folder, cache, max_length=33)
    overlapping = make(folder, cache, max_length=33, eval_stride=5)
    assert evaluate(plain, "val", 4)["perplexity"] != evaluate(overlapping, "val", 4)["perplexity"]
    assert plain.description()["eval_stride"] == 33
    assert overlapping.description()["eval_stride"] == 5
    assert overlapping.description()["context"] == 33
    assert plain.fingerprint != overlapping.fingerprint


def test_ranks_add_up_to_one(folder: Path, cache: Path) -> None:
    task = make(folder, cache, max_length=33)
    whole, model = evaluate(task, "val", 4), Bigram(task.vocab_size)
    ranks = [task.new_metrics("val") for _ in range(3)]
    for index in range(len(task.splits["val"])):  # type: ignore[arg-type]
        batch = task.collate([task.splits["val"][index]])
        task.update(ranks[index % 3], model(batch["tokens"]), batch)
    total = ranks[0]["perplexity"]
    for other in ranks[1:]:
        for state in ("nats", "tokens"):  # what torchmetrics does with dist_reduce_fx="sum"
            setattr(total, state, getattr(total, state) + getattr(other["perplexity"], state))
    assert float(total.compute()) == whole["perplexity"]
    assert all(reduce is not None for reduce in total._reductions.values())


def test_training_loss_is_the_mean_over_predicted_tokens(folder: Path, cache: Path) -> None:
    task = make(folder, cache, max_length=33, eval_stride=20)
    windows = task.splits["val"]
    batch = task.collate([windows[1], windows[len(windows) - 1]])  # type: ignore[arg-type]
    logits = Bigram(task.vocab_size)(batch["tokens"])
    metrics = task.new_metrics("val")
    task.update(metrics, logits, batch)
    loss = float(task.loss(logits, batch))
    assert float(metrics["perplexity"].compute()) == pytest.approx(math.exp(loss), rel=1e-6)


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary() -> None:
    losses = torch.full((1000,), math.log(50.0))
    perplexity, bits = Perplexity(), BitsPerUnit(units_per_token=4.0)
    for part in losses.split(7):
        perplexity.update(part)
        bits.update(part)
    assert float(perplexity.compute()) == pytest.approx(50.0, rel=1e-6)
    assert float(bits.compute()) == pytest.approx(math.log2(50.0) / 4, rel=1e-6)


def test_a_diverged_model_has_an_infinite_perplexity_and_no_tokens_have_none() -> None:
    metric = Perplexity()
    metric.update(torch.tensor([1.0, math.nan]))
    assert float(metric.compute()) == math.inf
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert math.isnan(float(Perplexity().compute()))


# ----------------------------------------------------------------------------------- words and bytes


def test_words_and_bytes_are_counted_over_the_text_that_is_used(folder: Path, cache: Path) -> None:
    text = split_text(folder, "validation")
    for kind in ("word", "bpe", "byte"):
        whole = make(folder, cache, tokenizer=kind).data["val"]
        assert (whole.words, whole.bytes) == (count_words(text), len(text.encode()))
        assert whole.whole
        cut = make(folder, cache, tokenizer=kind, max_eval_tokens=whole.tokens // 2).data["val"]
        assert 0 < cut.tokens <= whole.tokens // 2
        assert not cut.whole
        head = text.encode()[: cut.bytes].decode()
        assert cut.words == count_words(head)
        assert head.count(" = Title") == cut.documents - 1  # and the rows before the first title


def test_word_tokens_are_the_words_of_the_release(folder: Path, cache: Path) -> None:
    task = make(folder, cache, tokenizer="word")
    for split, data in task.data.items():
        assert data.tokens == data.words, split
    metrics = evaluate(task, "val", 3)
    assert metrics["perplexity"] == pytest.approx(metrics["perplexity_per_word"], rel=1e-12)
    shares = task.description()["splits"]
    text = split_text(folder, "train")
    assert shares["train"]["unknown_share"] == pytest.approx(
        text.split().count("<unk>") / count_words(text), abs=1e-5
    )


def test_official_count_of_words(shared_data: Path, tmp_path: Path) -> None:
    """The slice's training file is the official test split, of 245,569 tokens (Merity et al. 2016)."""
    folder = tmp_path / "official"
    folder.mkdir()
    source = next((shared_data / "wikitext").glob("train-*.parquet"))
    for split in ("train", "validation", "test"):
        (folder / f"{split}.parquet").symlink_to(source)
    assert make(folder, tmp_path / "cache", tokenizer="word").data["test"].tokens == 245_569


# -------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def byte_pairs() -> BytePairTokenizer:
    random = np.random.default_rng(1)
    return BytePairTokenizer.train([" ".join(random.choice(WORDS, 2000))], 320)


AWKWARD = [
    "",
    "\n",
    "  two  spaces ",
    "tab\tand\r\nreturn",
    "<unk> <pad> <|endoftext|> <eos>",
    "naïve 東京 🙂\u00a0x\u2028y",
    "a\x1fb \x1fc",
    " lead",
    "don't 12,345.6",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back(byte_pairs: BytePairTokenizer, text: str) -> None:
    for tokenizer in (byte_pairs, ByteTokenizer()):
        ids = tokenizer.encode([text])[0]
        assert tokenizer.decode(ids.tolist()) == text
        assert (ids > 0).all()
        assert (ids < tokenizer.vocab_size).all()


@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(byte_pairs: BytePairTokenizer, text: str) -> None:
    for tokenizer in (byte_pairs, ByteTokenizer()):
        ids = tokenizer.encode([text])[0].tolist()
        assert tokenizer.decode(ids) == text


def test_a_stored_tokenizer_gives_the_same_ids(byte_pairs: BytePairTokenizer) -> None:
    words = WordTokenizer.train([AWKWARD], None, workers=1)
    for tokenizer in (byte_pairs, ByteTokenizer(), words):
        stored = from_json(tokenizer.to_json())
        for first, second in zip(tokenizer.encode(AWKWARD), stored.encode(AWKWARD), strict=True):
            assert (first == second).all()
        assert stored.vocab_size == tokenizer.vocab_size


def test_remembered_pieces_give_the_library_s_ids(byte_pairs: BytePairTokenizer) -> None:
    text = "\n".join([*AWKWARD, " = Title = \n\n   was built ,  by the  river .\n\t the"])
    direct = byte_pairs.model.encode(text, add_special_tokens=False).ids
    for _ in range(2):  # new pieces, then known ones
        assert (byte_pairs.encode([text])[0] - 1).tolist() == direct


def test_held_out_text_comes_back(folder: Path, cache: Path) -> None:
    text = split_text(folder, "test")
    for kind in ("bpe", "byte"):
        tokenizer = make(folder, cache, tokenizer=kind).tokenizer
        assert tokenizer.decode(tokenizer.encode([text])[0].tolist()) == text


def test_byte_pairs_are_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    first = make(folder, tmp_path / "a", bpe_vocab_size=290)
    second = make(folder, tmp_path / "b", bpe_vocab_size=290)
    assert first.tokenizer.to_json() == second.tokenizer.to_json()
    assert first.fingerprint == second.fingerprint
    assert first.vocab_size == 290


def test_a_smaller_word_vocabulary_keeps_the_most_frequent(folder: Path, cache: Path) -> None:
    task = make(folder, cache, tokenizer="word", word_vocab_size=10)
    assert task.vocab_size == 10
    every = make(folder, cache, tokenizer="word").tokenizer
    assert task.tokenizer.words == every.words[:7]  # type: ignore[attr-defined]
    shares = task.description()["splits"]["val"]
    assert shares["unknown_share"] > 0.3


def test_gpt2_from_a_folder(folder: Path, tmp_path: Path, byte_pairs: BytePairTokenizer) -> None:
    byte_pairs.model.save(str(tmp_path / "tokenizer.json"))
    task = make(folder, tmp_path / "cache", tokenizer="gpt2", tokenizer_dir=str(tmp_path))
    text = split_text(folder, "validation")
    assert task.vocab_size == byte_pairs.vocab_size
    assert task.data["val"].tokens == len(byte_pairs.model.encode(text).ids)


def test_gpt2_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must hold tokenizer\.json"):
        Gpt2Tokenizer.load(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"task\.tokenizer=bpe"):
        Gpt2Tokenizer.load(None)


# ----------------------------------------------------------------------------------- files and cache


def test_missing_splits_are_held_out_of_train(folder: Path, tmp_path: Path) -> None:
    partial = tmp_path / "partial"
    partial.mkdir()
    for path in folder.glob("train-*"):
        (partial / path.name).symlink_to(path)
    task = make(partial, tmp_path / "cache", tokenizer="byte")
    assert task.description()["held_out_of_train"] == ["val", "test"]
    total = sum(data.bytes for data in task.data.values())
    assert total == len(split_text(folder, "train").encode())
    texts = {
        split: task.tokenizer.decode(data.stream[1:].tolist()) for split, data in task.data.items()
    }
    assert all(text.count(" = Title") >= 2 for text in texts.values())
    moved = make(partial, tmp_path / "cache", tokenizer="byte", data_seed=3)
    assert moved.tokenizer.decode(moved.data["val"].stream[1:].tolist()) != texts["val"]


def test_rows_that_end_as_on_windows_are_the_same_articles(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "crlf"
    other.mkdir()
    for path in folder.glob("*.parquet"):
        rows = pq.read_table(path).column("text").to_pylist()
        crlf = [row.removesuffix("\n") + "\r\n" for row in rows]
        pq.write_table(pa.table({"text": crlf}), other / path.name)
    unix = make(folder, tmp_path / "cache", tokenizer="byte")
    windows = make(other, tmp_path / "cache", tokenizer="byte")
    for split in unix.data:
        assert windows.data[split].documents == unix.data[split].documents > 1
        assert np.array_equal(windows.data[split].stream, unix.data[split].stream)


def test_second_start_reads_the_cache(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(folder, cache)

    def forbidden(*args: Any) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(BytePairTokenizer, "encode", forbidden)
    again = make(folder, cache, max_length=77)
    assert (again.data["train"].stream[:] == first.data["train"].stream[:]).all()


def test_failed_preparation_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "data"
    empty.mkdir()
    pd.DataFrame({"text": ["a"]}).to_parquet(empty / "train.parquet")
    pd.DataFrame({"text": ["ok", None]}).to_parquet(empty / "validation.parquet")
    with pytest.raises(UserError, match=r"validation\.parquet, row 1: no text"):
        make(empty, tmp_path / "cache", tokenizer="byte")
    assert not list((tmp_path / "cache" / "wikitext103").glob("*/"))


@pytest.mark.parametrize(
    ("own", "setting"),
    [
        ({"tokenizer": "char"}, "task.tokenizer"),
        ({"bpe_vocab_size": 100}, "task.bpe_vocab_size"),
        ({"tokenizer": "word", "word_vocab_size": 2}, "task.word_vocab_size"),
        ({"max_length": 0}, "task.max_length"),
        ({"max_length": 32, "eval_stride": 33}, "task.eval_stride"),
        ({"max_eval_tokens": 0}, "task.max_eval_tokens"),
        ({"source": "local", "data_dir": None}, "task.data_dir"),
    ],
)
def test_settings_out_of_range(own: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingError) as error:
        WikiText103(**{"data_dir": "x", **own})
    assert error.value.setting == setting


def test_no_train_split(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pd.DataFrame({"text": ["a"]}).to_parquet(tmp_path / "data" / "test.parquet")
    with pytest.raises(UserError, match="no train split; it has test"):
        make(tmp_path / "data", tmp_path / "cache")
