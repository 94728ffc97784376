"""An interpolated trigram language model: the oracle that GMA's and SDPA's have to beat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gma_bench.run.compose import compose
from gma_bench.run.execute import identify
from gma_bench.train.training import build_task, train

ITERATIONS = 30
BUCKETS = 8

Ids = NDArray[np.int64]


class Trigram:
    """Maximum-likelihood trigram, bigram and unigram and a uniform distribution, interpolated.

    Weights depend on how often the two-token history was seen (eight buckets on a logarithmic scale)
    and are fitted to held-out tokens by expectation maximisation (Jelinek and Mercer 1980).

    Args:
        train: the tokens that are counted.
        held_out: the tokens that weights are fitted to.
        vocab_size: ids, padding (id 0, never predicted) included.
    """

    def __init__(self, train: Ids, held_out: Ids, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.total = len(train) - 2
        self.unigrams = np.bincount(train[2:], minlength=vocab_size)
        self.contexts1 = np.bincount(train[1:-1], minlength=vocab_size)
        self.bigrams = _counted(train[1:-1] * vocab_size + train[2:])
        pairs = train[:-2] * vocab_size + train[1:-1]
        self.contexts2 = _counted(pairs)
        self.trigrams = _counted(pairs * vocab_size + train[2:])
        self.weights = np.full((BUCKETS, 4), 0.25)
        self._fit(held_out)

    def _components(self, tokens: Ids) -> tuple[NDArray[np.float64], Ids]:
        """Probabilities ``(n − 2, 4)`` of each token after its two, and each history's bucket."""
        v = self.vocab_size
        pairs = tokens[:-2] * v + tokens[1:-1]
        seen2 = _look_up(self.contexts2, pairs)
        seen1 = self.contexts1[tokens[1:-1]]
        parts = [
            _look_up(self.trigrams, pairs * v + tokens[2:]) / np.maximum(seen2, 1),
            _look_up(self.bigrams, tokens[1:-1] * v + tokens[2:]) / np.maximum(seen1, 1),
            self.unigrams[tokens[2:]] / self.total,
            np.full(len(tokens) - 2, 1 / (v - 1)),
        ]
        bucket = np.minimum(np.log2(seen2 + 1).astype(np.int64), BUCKETS - 1)
        return np.stack(parts, axis=1), bucket

    def _fit(self, tokens: Ids) -> None:
        parts, bucket = self._components(tokens)
        for _ in range(ITERATIONS):
            share = self.weights[bucket] * parts
            share /= share.sum(1, keepdims=True)
            for b in np.unique(bucket):
                self.weights[b] = share[bucket == b].mean(0)

    def perplexity(self, tokens: Ids) -> float:
        """Over all tokens but the first two, which have no history."""
        parts, bucket = self._components(tokens)
        return float(np.exp(-np.log((self.weights[bucket] * parts).sum(1)).mean()))


def _counted(keys: Ids) -> tuple[Ids, Ids]:
    keys, counts = np.unique(keys, return_counts=True)
    return keys, counts


def _look_up(table: tuple[Ids, Ids], keys: Ids) -> Ids:
    known, counts = table
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, counts[places], 0)


def test_probabilities_after_any_history_sum_to_one() -> None:
    random = np.random.default_rng(0)
    train_ids = random.zipf(1.5, 5000) % 19 + 1
    model = Trigram(train_ids, random.zipf(1.5, 500) % 19 + 1, 20)
    for history in ([1, 2], [7, 7], [19, 18]):
        parts, bucket = model._components(np.asarray([[*history, t] for t in range(1, 20)]).ravel())
        each = (model.weights[bucket] * parts).sum(1)[::3]  # windows of three that are histories
        assert each.sum() == pytest.approx(1.0)


def test_it_finds_the_order_that_is_in_the_data() -> None:
    random = np.random.default_rng(0)
    noise = random.integers(1, 11, 20_000)
    cycle = np.tile([1, 2, 1, 3, 2, 3], 3000)  # two tokens of history tell the next, one does not
    assert Trigram(noise, noise[:500], 11).perplexity(noise[10_000:]) > 8.5
    assert Trigram(cycle, cycle[:500], 11).perplexity(cycle) < 1.05


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on an idle machine, more beside other work
@pytest.mark.parametrize("mixer", ["gma", "sdpa"])
def test_language_models_beat_it_on_wikitext(
    shared_data: Path, tmp_path: Path, cache_dir: Path, mixer: str
) -> None:
    """The committed experiment, on the same tokens, with weights fitted to the held-out articles."""
    config = compose(
        ["+experiment=wikitext", f"mixer={mixer}", f"task.data_dir={shared_data / 'wikitext'}",
         "trainer=cpu", "logger=none", f"results_dir={tmp_path}", f"cache_dir={cache_dir}"]
    )  # fmt: skip
    identify(config)
    task = build_task(config)
    ids = {split: data.stream[:].astype(np.int64) for split, data in task.data.items()}  # type: ignore[attr-defined]
    trigram = Trigram(ids["train"], ids["test"], task.vocab_size).perplexity(ids["val"])
    perplexity = train(config).metrics["val"]["perplexity"]
    assert perplexity < trigram, f"{mixer} {perplexity:.1f}, trigram {trigram:.1f}"
