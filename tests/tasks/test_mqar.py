"""MQAR: Zoology's law, the batches, accuracy over queries and by number of pairs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from gma_bench.errors import SettingError, UserError
from gma_bench.run.compose import compose
from gma_bench.run.execute import run_cell
from gma_bench.train.training import build_task
from tasks.mqar import IGNORED, MQAR, _choose, draw

LAW = {"vocab_size": 40, "max_length": 24, "num_pairs": 5}
SIZES = {"num_train": 40, "num_val": 9, "num_test": 31}


def task(**settings: object) -> MQAR:
    arguments = {
        "vocab_size": 64, "max_length": 32, "num_pairs": [2, 4, 8], "batch_size": 8,
        **SIZES, **settings,
    }  # fmt: skip
    made = MQAR(**arguments)  # type: ignore[arg-type]
    made.prepare_data()
    made.setup()
    return made


# ---------------------------------------------------------------------------------------- the law


def test_every_key_is_asked_once_for_the_value_that_followed_it() -> None:
    tokens, targets = draw(np.random.default_rng(0), 300, **LAW, random_non_queries=False)
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == 5
        assert all(1 <= key < 20 for key in pairs)
        assert all(20 <= value < 40 for value in pairs.values())
        asked = [i for i, wanted in enumerate(target) if wanted != IGNORED]
        assert {row[i] for i in asked} == set(pairs)
        assert all(target[i] == pairs[row[i]] and i >= 10 and i % 2 == 0 for i in asked)
        assert all(row[i] == 0 for i in range(10, 24) if i not in asked)


def test_what_is_neither_pair_nor_query_is_filled_at_random() -> None:
    plain = draw(np.random.default_rng(0), 500, **LAW, random_non_queries=False)
    filled = draw(np.random.default_rng(0), 500, **LAW)
    empty = plain[0] == 0
    np.testing.assert_array_equal(plain[1], filled[1])
    np.testing.assert_array_equal(plain[0][~empty], filled[0][~empty])
    counts = np.bincount(filled[0][empty], minlength=40)
    assert len(counts) == 40
    assert chisquare(counts).pvalue > 1e-3


def gap_probabilities(power_a: float, space: int, pairs: int) -> np.ndarray:
    """``(pairs, space)``: the chance that the i-th key has a gap, by going through all draws.

    Weighted drawing without replacement, as ``numpy.random.choice(…, replace=False, p=p)`` in the
    published generator: each draw among those left, in proportion to their weights.
    """
    weights = np.arange(1, space + 1) ** (power_a - 1.0)
    weights /= weights.sum()
    found = np.zeros((pairs, space))
    for drawn in itertools.permutations(range(space), pairs):
        chance, left = 1.0, 1.0
        for gap in drawn:
            chance *= weights[gap] / left
            left -= weights[gap]
        for i, gap in enumerate(drawn):
            found[i, gap] += chance
    return found


@pytest.mark.parametrize("power_a", [0.01, 0.5, 1.0])
def test_gaps_follow_the_power_law(power_a: float) -> None:
    tokens, _ = draw(
        np.random.default_rng(7), 20_000, vocab_size=30, max_length=18, num_pairs=3,
        power_a=power_a, random_non_queries=False,
    )  # fmt: skip
    expected = gap_probabilities(power_a, space=6, pairs=3)
    for i in range(3):
        gaps = (tokens[:, 6:] == tokens[:, 2 * i, None]).argmax(axis=1) // 2
        assert chisquare(np.bincount(gaps, minlength=6), 20_000 * expected[i]).pvalue > 1e-3


def test_keys_are_drawn_evenly_and_in_any_order() -> None:
    tokens, _ = draw(np.random.default_rng(1), 20_000, vocab_size=8, max_length=4, num_pairs=1)
    assert chisquare(np.bincount(tokens[:, 0])[1:]).pvalue > 1e-3
    clocks = np.random.default_rng(2).random((12_000, 3))
    orders = _choose(clocks, 2)
    assert chisquare(np.bincount(3 * orders[:, 0] + orders[:, 1])[[1, 2, 3, 5, 6, 7]]).pvalue > 1e-3
    np.testing.assert_array_equal(orders, np.argsort(clocks, axis=1)[:, :2])


# --------------------------------------------------------------------------------------- the task


def test_splits_have_equal_shares_of_pairs_and_no_sequence_in_common() -> None:
    made = task(vocab_size=40, num_pairs=[1, 2], max_length=8, random_non_queries=False)
    rows = {split: rows.tokens.tolist() for split, rows in made.rows.items()}
    assert {split: len(r) for split, r in rows.items()} == {"train": 40, "val": 9, "test": 31}
    together = [tuple(row) for split in rows.values() for row in split]
    assert len(set(together)) == len(together)
    counts = np.bincount(made.rows["test"].pairs).tolist()
    assert counts in ([0, 15, 16], [0, 16, 15])


def test_data_depend_on_their_own_seed_alone() -> None:
    one = task(order_seed=1)
    np.random.seed(5)
    torch.manual_seed(5)
    assert task(order_seed=2).fingerprint == one.fingerprint
    assert task(data_seed=1).fingerprint != one.fingerprint


def test_a_space_that_is_too_small_is_an_error_not_a_loop() -> None:
    with pytest.raises(UserError, match=r"only \d+ distinct MQAR sequences of 1 pairs"):
        task(vocab_size=5, num_pairs=1, max_length=4, random_non_queries=False, num_train=100)


def test_a_mixer_cannot_see_the_answer_behind_the_query() -> None:
    """The task is causal, one output a token, and values are asked where the key stands."""
    made = task(random_non_queries=False)
    batch = made.collate([made.splits["train"][i] for i in range(40)])
    assert made.causal
    assert made.pooling == "token"
    assert batch["tokens"].shape == batch["target"].shape == batch["mask"].shape == (40, 32)
    assert batch["mask"].all()
    assert batch["tokens"].dtype == batch["target"].dtype == torch.int64
    asked = batch["target"] != IGNORED
    assert asked.sum(1).tolist() == batch["pairs"].tolist()
    assert int(batch["tokens"].max()) < made.vocab_size
    for row in range(40):
        assert not (batch["tokens"][row, 2 * batch["pairs"][row] :] >= 32).any()  # no value again


@pytest.mark.parametrize("eval_batch_size", [1, 7, 64])
def test_accuracy_is_over_queries_at_any_batch_size(eval_batch_size: int) -> None:
    made = task(eval_batch_size=eval_batch_size)
    metrics = made.new_metrics("test")
    for batch in made.test_dataloader():
        # Right for keys that are even, wrong for the others, and where nothing is asked.
        guess = torch.where(batch["tokens"] % 2 == 0, batch["target"].clamp(min=0), 1)
        made.update(metrics, torch.nn.functional.one_hot(guess, 64).float(), batch)
    rows = made.rows["test"]
    asked = rows.targets != IGNORED
    even = rows.tokens % 2 == 0
    figures = made.compute(metrics)
    assert set(figures) == {"accuracy", *(f"accuracy_pairs_{n}" for n in (2, 4, 8))}
    assert figures["accuracy"] == even[asked].mean()
    for number in (2, 4, 8):
        chosen = asked & (rows.pairs == number)[:, None]
        assert figures[f"accuracy_pairs_{number}"] == even[chosen].mean()
    assert list(made.new_metrics("val")) == ["accuracy"]


def test_loss_is_the_mean_over_queries() -> None:
    made = task()
    batch = made.collate([made.splits["val"][i] for i in (0, 4, 8)])
    logits = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))
    logs = logits.log_softmax(-1)
    asked = (batch["target"] != IGNORED).nonzero().tolist()
    expected = -torch.stack([logs[i, j, batch["target"][i, j]] for i, j in asked]).mean()
    torch.testing.assert_close(made.loss(logits, batch), expected)


def test_description_is_plain_json() -> None:
    made = task()
    described = json.loads(json.dumps(made.description()))
    assert described["splits"]["train"]["examples"] == 40
    assert described["splits"]["test"]["queries"] == (made.rows["test"].targets != IGNORED).sum()
    assert described["chance"] == 1 / 32


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_pairs": []}, r"task.num_pairs=\[\]"),
        ({"num_pairs": [4, 4]}, r"task.num_pairs=\[4, 4\]"),
        ({"num_pairs": 0}, r"task.num_pairs=\[0\]"),
        ({"max_length": 31}, "task.max_length=31: .*Try: task.max_length=32"),
        ({"num_pairs": 9}, "task.max_length=32: .*= 36. Try: task.max_length=36"),
        ({"vocab_size": 32}, "task.vocab_size=32"),
        ({"power_a": 0.0}, "task.power_a=0.0"),
        ({"num_val": 2}, "task.num_val=2"),
        ({"data_seed": -1}, "task.data_seed=-1"),
    ],
)
def test_settings_that_leave_no_room_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        task(**settings)


@pytest.mark.parametrize(
    "overrides",
    [
        ["+experiment=mqar"],
        *(["task=mqar", f"scale={name}"] for name in ("smoke", "mini", "paper")),
    ],
    ids=" ".join,
)
def test_settings_of_every_scale_leave_room(overrides: list[str]) -> None:
    few = [f"task.num_{split}=10" for split in ("train", "val", "test")]
    config = compose([*overrides, *few])
    made = build_task(config)
    assert isinstance(made, MQAR)
    assert made.num_pairs == list(config.task.num_pairs)
    assert made.max_length >= 4 * max(made.num_pairs)


@pytest.mark.slow
def test_softmax_attention_recalls_what_a_small_linear_state_forgets(tmp_path: Path) -> None:
    """The committed experiment."""
    figures = {}
    for mixer in ("sdpa", "linear_transformer"):
        record = run_cell(
            [
                "+experiment=mqar",
                f"mixer={mixer}",
                "logger=none",
                "trainer=cpu",
                f"results_dir={tmp_path}",
            ],
            keep_failure=False,
        )
        figures[mixer] = record["metrics"]["test"]
    assert figures["sdpa"]["accuracy"] > 0.95
    assert figures["linear_transformer"]["accuracy"] < 0.5
    assert figures["sdpa"]["accuracy_pairs_8"] > 0.95
    assert figures["linear_transformer"]["accuracy_pairs_8"] < 0.5
