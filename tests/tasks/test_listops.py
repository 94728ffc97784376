"""ListOps: the grammar, the generator's law, the published files, the cache, the batches."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, ks_2samp

from gma_bench.errors import SettingError, UserError
from gma_bench.run.compose import compose
from gma_bench.train.training import build_task
from tasks import listops_generator
from tasks.listops import ListOps, evaluate, generate, read_tsv
from tasks.listops_generator import (
    CLOSE,
    FIRST_OPERATOR,
    OPERATORS,
    SYMBOLS,
    Expressions,
    encode,
    value_and_depth,
)

SMALL = {"min_length": 8, "max_length": 40, "max_depth": 5, "max_args": 5}
SIZES = {"num_train": 60, "num_val": 20, "num_test": 30}


def task(folder: Path, **settings: object) -> ListOps:
    arguments = {**SMALL, **SIZES, "batch_size": 8, "cache_dir": folder, **settings}
    made = ListOps(**arguments)  # type: ignore[arg-type]
    made.prepare_data()
    made.setup()
    return made


# ------------------------------------------------------------------------------------ the grammar


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("[MAX 4 3 [MIN 2 3 ] 1 0 ]", 4),
        ("7", 7),
        ("[SM 9 9 9 ]", 7),
        ("[MED 1 2 3 ]", 2),
        ("[MED 9 1 5 ]", 5),
        ("( ( ( [MIN 5 ) 3 ) ] )", 3),
    ],
)
def test_evaluate(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize("digits", [(1, 2), (0, 9), (8, 3, 5, 4), (6, 7, 7, 8), (0, 0, 1, 1)])
def test_median_of_an_even_number_is_rounded_towards_zero(digits: tuple[int, ...]) -> None:
    """As ``int(numpy.median(…))`` in the published generator."""
    expression = f"[MED {' '.join(map(str, digits))} ]"
    assert evaluate(expression) == int(np.median(digits))
    assert evaluate("[MED 2 5 ]") == 3  # 3.5


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_operators_are_numpy_s(digits: list[int]) -> None:
    inside = f"{' '.join(map(str, digits))} ]"
    assert evaluate(f"[MIN {inside}") == min(digits)
    assert evaluate(f"[MAX {inside}") == max(digits)
    assert evaluate(f"[MED {inside}") == int(np.median(digits))
    assert evaluate(f"[SM {inside}") == sum(digits) % 10


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("", "0 expressions"),
        ("1 2", "2 expressions"),
        ("[MAX 1 2", "never closed"),
        ("[MAX ]", "without arguments"),
        ("1 ]", "without an operator"),
        ("[AVG 1 2 ]", "'[AVG'"),
        ("[MAX 12 3 ]", "'12'"),
        ("( [MAX 1 2 ]", "1 opening and 0 closing"),
        ("( [MAX 1 2 ] )", "1 opening and 1 closing parentheses around 4"),
    ],
)
def test_malformed_expressions_say_what_is_wrong(expression: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        evaluate(expression)


def test_every_symbol_has_a_token_of_its_own_closing_bracket_included() -> None:
    text = "[MIN [MAX [MED [SM 0 1 2 3 4 5 6 7 8 9 ] ] ] ]"
    tokens = encode(text)
    assert len(tokens) == len(text.split())
    assert set(tokens) == set(range(1, len(SYMBOLS)))
    assert " ".join(SYMBOLS[token] for token in tokens) == text


# ---------------------------------------------------------------------------------- the generator


def published_tree(rng: random.Random, depth: int, max_depth: int, max_args: int) -> list[str]:
    """The law as the Arena states it, node after node: the oracle for the vectorised generator."""
    if depth >= max_depth or rng.random() > 0.25:
        return [str(rng.randrange(10))]
    arguments = [
        published_tree(rng, depth + 1, max_depth, max_args) for _ in range(rng.randint(2, max_args))
    ]
    return [rng.choice(OPERATORS), *(token for tree in arguments for token in tree), "]"]


def from_published_law(number: int, seed: int, **law: int) -> Expressions:
    rng = random.Random(seed)
    rows: dict[bytes, tuple[int, int]] = {}
    while len(rows) < number:
        tree = published_tree(rng, 1, law["max_depth"], law["max_args"])
        if law["min_length"] < len(tree) < law["max_length"]:
            tokens = encode(" ".join(tree))
            rows[tokens] = value_and_depth(tokens)
    return Expressions(
        np.frombuffer(b"".join(rows), np.uint8),
        np.cumsum([0, *map(len, rows)]),
        np.array([value for value, _ in rows.values()], np.uint8),
        np.array([depth for _, depth in rows.values()], np.uint8),
    )


def arities(data: Expressions) -> np.ndarray:
    counts: list[int] = []
    for i in range(len(data)):
        stack = [0]
        for token in data.row(i).tolist():
            if token == CLOSE:
                counts.append(stack.pop())
                continue
            stack[-1] += 1
            if token >= FIRST_OPERATOR:
                stack.append(0)
    return np.bincount(counts, minlength=11)


def same_frequencies(one: np.ndarray, other: np.ndarray) -> float:
    """p of the chi-square test that two tables of counts come from one distribution."""
    table = np.stack([one, other])
    table = table[:, table.sum(0) > 0]
    return float(chi2_contingency(table)[1]) if table.shape[1] > 1 else 1.0


def p_values(one: Expressions, other: Expressions) -> dict[str, float]:
    digits = slice(1, 11)
    tokens = [np.bincount(data.tokens, minlength=len(SYMBOLS)) for data in (one, other)]
    depths = [np.bincount(data.depths, minlength=12) for data in (one, other)]
    targets = [np.bincount(data.targets, minlength=10) for data in (one, other)]
    return {
        "length": float(ks_2samp(one.lengths, other.lengths).pvalue),
        "nesting": float(ks_2samp(mean_nesting(one), mean_nesting(other)).pvalue),
        "depth": same_frequencies(*depths),
        "target": same_frequencies(*targets),
        "operator": same_frequencies(*(counts[FIRST_OPERATOR:-1] for counts in tokens)),
        "digit": same_frequencies(*(counts[digits] for counts in tokens)),
        "arity": same_frequencies(arities(one), arities(other)),
    }


def mean_nesting(data: Expressions) -> list[float]:
    """How deep the tokens of each expression lie on average."""
    steps = (data.tokens >= FIRST_OPERATOR).astype(int) - 2 * (data.tokens == CLOSE)
    level = np.concatenate([[0], np.cumsum(steps)])
    return [float(level[a:b].mean()) for a, b in zip(data.offsets, data.offsets[1:], strict=False)]


def test_generated_expressions_agree_with_published_ones(shared_data: Path) -> None:
    """Two samples, one law: 600 rows of the published generator, 2000 of ours."""
    parts = [read_tsv(shared_data / "listops" / f"basic_{s}.tsv") for s in ("train", "val", "test")]
    published = listops_generator.join(parts)
    assert len(published) == 600
    ours = generate(2000, seed=5)
    assert min(p_values(ours, published).values()) > 0.005
    assert set(np.unique(ours.depths)) == set(np.unique(published.depths))
    assert ours.lengths.min() > 500
    assert ours.lengths.max() < 2000


@pytest.mark.parametrize(
    "law", [SMALL, {"min_length": 3, "max_length": 90, "max_depth": 4, "max_args": 10}], ids=str
)
def test_generated_expressions_follow_the_stated_law(law: dict[str, int]) -> None:
    """Against the law written out node by node, at bounds where depths and digits vary."""
    oracle = from_published_law(4000, seed=1, **law)
    ours = generate(4000, seed=2, **law)
    assert min(p_values(ours, oracle).values()) > 0.002
    # The bounds themselves, strictly between: no two-sample test would see a length more or less.
    assert {*ours.lengths.tolist()} == {*range(max(4, law["min_length"] + 1), law["max_length"])}


def test_two_sample_tests_tell_another_law() -> None:
    """The tests above can fail: one argument more, or one level less, is seen."""
    ours = generate(4000, seed=2, **SMALL)
    for change in ({"max_args": 6}, {"max_depth": 4}, {"max_length": 36}):
        other = from_published_law(4000, seed=1, **{**SMALL, **change})
        assert min(p_values(ours, other).values()) < 1e-3, change


@pytest.mark.parametrize("law", [{}, SMALL], ids=["published", "small"])
def test_targets_and_depths_are_what_the_tokens_evaluate_to(law: dict[str, int]) -> None:
    data = generate(300, seed=11, **law)
    for i in range(len(data)):
        assert value_and_depth(data.row(i).tobytes()) == (data.targets[i], data.depths[i])
    text, target = data[7]
    assert evaluate(text) == target
    assert len(text.split()) == data.lengths[7]


def test_a_seed_means_the_same_expressions_whatever_the_number_and_the_workers() -> None:
    one = generate(2500, seed=3, workers=1, **SMALL)
    assert generate(2500, seed=3, workers=4, **SMALL) == one
    assert generate(700, seed=3, **SMALL) == one[:700]
    assert generate(2500, seed=4, **SMALL) != one


def test_no_expression_comes_twice() -> None:
    texts = [text for text, _ in generate(3000, min_length=2, max_length=8, max_depth=3)]
    assert len(set(texts)) == 3000


def test_a_space_that_is_too_small_is_an_error_not_a_loop() -> None:
    assert sorted(generate(10, min_length=0, max_length=2)) == [(str(d), d) for d in range(10)]
    with pytest.raises(UserError, match="only 10 distinct"):
        generate(11, min_length=0, max_length=2)


def test_bounds_that_no_tree_meets_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listops_generator, "HOPELESS", listops_generator.CANDIDATES)
    with pytest.raises(UserError, match="none of"):  # with two arguments lengths are 1, 4, 7, …
        generate(1, min_length=4, max_length=6, max_args=2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"min_length": 50, "max_length": 40}, "task.max_length=40"),
        ({"min_length": 50, "max_length": 51}, "task.max_length=51"),
        ({"max_args": 1}, "task.max_args=1"),
        ({"max_depth": 0}, "task.max_depth=0"),
        ({"min_length": -1}, "task.min_length=-1"),
        ({"max_depth": 2, "max_args": 3}, "task.min_length=500"),
        ({"seed": -1}, "task.data_seed=-1"),
    ],
)
def test_settings_that_cannot_be_met_are_named(settings: dict[str, int], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        generate(5, **settings)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- the published files


def write_rows(folder: Path, rows: dict[str, list[str]], header: str = "Source\tTarget") -> Path:
    for split in ("train", "val", "test"):
        lines = [header, *rows.get(split, [f"[MAX {len(split)} {len(split)} ]\t{len(split)}"])]
        (folder / f"basic_{split}.tsv").write_bytes("".join(f"{x}\r\n" for x in lines).encode())
    return folder


def test_published_files_load_and_all_targets_agree(shared_data: Path, tmp_path: Path) -> None:
    made = ListOps(data_dir=str(shared_data / "listops"), cache_dir=tmp_path)
    made.setup()
    description = made.description()
    assert description["source"] == "local"
    assert {s: d["examples"] for s, d in description["splits"].items()} == {
        "train": 400, "val": 100, "test": 100,
    }  # fmt: skip
    raw = (shared_data / "listops" / "basic_val.tsv").read_text().splitlines()
    assert made.data["val"][3] == (
        " ".join(raw[4].split("\t")[0].replace("(", "").replace(")", "").split()),
        int(raw[4].split("\t")[1]),
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("[MAX 1 2 ]\t1", "the target is '1', but the expression evaluates to 2"),
        ("[MAX 1 2\t2", "never closed"),
        ("[MAX 1 2 ]", "1 columns"),
        ("[MAX 1 2 ]\t2\t2", "3 columns"),
        ("[MAX 1 2 X\t2", "unknown symbol 'X'"),
        ("[MAX 1 2 ]\ttwo", "'two'"),
        ("", "1 columns"),
    ],
)
def test_a_wrong_row_is_named_with_file_and_line(tmp_path: Path, row: str, says: str) -> None:
    write_rows(tmp_path, {"val": ["[SM 4 4 ]\t8", row, "[SM 4 5 ]\t9"]})
    with pytest.raises(UserError) as caught:
        task(tmp_path / "cache", data_dir=str(tmp_path))
    assert f"{tmp_path / 'basic_val.tsv'}, line 3: " in str(caught.value)
    assert says in str(caught.value)


def test_an_expression_in_two_splits_is_refused(tmp_path: Path) -> None:
    row = "[SM 4 4 ]\t8"
    write_rows(tmp_path, {"train": ["[SM 1 2 ]\t3", row], "test": [row]})
    with pytest.raises(UserError, match=r"basic_test.tsv, line 2: .*basic_train.tsv, line 3"):
        task(tmp_path / "cache", data_dir=str(tmp_path))


def test_files_that_are_missing_empty_or_of_another_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"basic_train.tsv"):
        task(tmp_path / "cache", data_dir=str(tmp_path))
    write_rows(tmp_path, {"test": []})
    with pytest.raises(UserError, match=r"basic_test.tsv: no rows"):
        task(tmp_path / "cache", data_dir=str(tmp_path))
    write_rows(tmp_path, {}, header="text,label")
    with pytest.raises(UserError, match=r"basic_train.tsv, line 1"):
        task(tmp_path / "cache", data_dir=str(tmp_path))


def test_a_row_longer_than_the_bound_is_refused_not_cut(tmp_path: Path) -> None:
    write_rows(tmp_path, {"val": ["[SM 4 4 ]\t8", f"[MIN {'5 ' * 60}]\t5"]})
    with pytest.raises(SettingError, match=r"task.max_length=40: .*basic_val.tsv, line 3 has 62"):
        task(tmp_path / "cache", data_dir=str(tmp_path))
    assert task(tmp_path / "cache", data_dir=str(tmp_path), max_length=63).max_length == 62


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"source": "hub"}, "task.source=hub: .*task.source=embedded"),
        ({"source": "web"}, "task.source=web: must be one of embedded, local, hub"),
        ({"source": "local"}, "task.data_dir=None"),
        ({"source": "embedded", "data_dir": "x"}, "task.data_dir=x"),
        ({"num_val": 0}, "task.num_val=0"),
        ({"max_length": 5}, "task.max_length=5"),
    ],
)
def test_sources_and_sizes_that_contradict_are_named(
    tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    with pytest.raises(SettingError, match=named):
        task(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------- the cache


def only_folder(folder: Path) -> Path:
    (found,) = (path for path in (folder / "listops").iterdir() if path.is_dir())
    return found


def test_a_second_start_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = task(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("generated again")

    monkeypatch.setattr("tasks.listops.generate", refuse)
    second = task(tmp_path)
    assert second.fingerprint == first.fingerprint
    assert all(second.data[split] == first.data[split] for split in first.data)
    assert isinstance(second.data["train"].tokens.base, np.memmap)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_cache_is_named_and_built_anew(tmp_path: Path, damage: str) -> None:
    first = task(tmp_path)
    file = only_folder(tmp_path) / ("manifest.json" if damage == "manifest" else "tokens.npy")
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    file.unlink()
    if damage != "remove":
        file.write_bytes(content[: len(content) // 2] if damage in ("cut", "manifest") else content)
    with pytest.warns(UserWarning, match=rf"{only_folder(tmp_path)} is damaged"):
        second = task(tmp_path)
    assert second.fingerprint == first.fingerprint
    assert all(second.data[split] == first.data[split] for split in first.data)


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write_rows(tmp_path, {"train": ["[SM 1 2 ]\t3"]})
    before = task(cache, data_dir=str(tmp_path))
    write_rows(tmp_path, {"train": ["[SM 1 3 ]\t4"]})
    after = task(cache, data_dir=str(tmp_path))
    assert after.data["train"][0] == ("[SM 1 3 ]", 4)
    assert after.fingerprint != before.fingerprint


def test_the_cache_of_one_folder_serves_a_copy_of_it(tmp_path: Path) -> None:
    write_rows(tmp_path, {})
    first = task(tmp_path / "cache", data_dir=str(tmp_path))
    (tmp_path / "copy").mkdir()
    for path in tmp_path.glob("*.tsv"):
        shutil.copy(path, tmp_path / "copy")
    assert (
        task(tmp_path / "cache", data_dir=str(tmp_path / "copy")).fingerprint == first.fingerprint
    )


# --------------------------------------------------------------------------------------- the task


def test_splits_share_no_expression_and_test_stays_when_train_grows(tmp_path: Path) -> None:
    small, large = task(tmp_path), task(tmp_path, num_train=90)
    texts = {split: {text for text, _ in data} for split, data in large.data.items()}
    assert not texts["train"] & texts["val"] | texts["train"] & texts["test"]
    assert not texts["val"] & texts["test"]
    assert large.data["test"] == small.data["test"]
    assert large.data["val"] == small.data["val"]
    assert large.data["train"][:60] == small.data["train"]
    assert large.fingerprint != small.fingerprint


def test_data_depend_on_their_own_seed_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = task(tmp_path / "a", order_seed=1)
    torch.manual_seed(2)
    np.random.seed(2)
    assert task(tmp_path / "b", order_seed=2).fingerprint == one.fingerprint
    assert task(tmp_path / "c", data_seed=1).fingerprint != one.fingerprint


def test_batches_pad_to_their_longest_and_mask_what_is_padded(tmp_path: Path) -> None:
    made = task(tmp_path)
    batch = made.collate([made.splits["train"][i] for i in range(8)])
    lengths = made.lengths("train")[:8]
    assert batch["tokens"].shape == batch["mask"].shape == (8, lengths.max())
    assert batch["mask"].sum(1).tolist() == lengths.tolist()
    assert batch["tokens"].dtype == torch.int64
    for i, row in enumerate(batch["tokens"]):
        text, target = made.data["train"][i]
        assert bytes(row[: lengths[i]].tolist()) == encode(text)
        assert not row[lengths[i] :].any()
        assert batch["target"][i] == target == evaluate(text)
    assert lengths.max() <= made.max_length
    assert int(batch["tokens"].max()) < made.vocab_size


@pytest.mark.parametrize("bucket_by_length", [False, True])
@pytest.mark.parametrize("eval_batch_size", [1, 7, 64])
def test_accuracy_is_over_examples_at_any_batch_size(
    tmp_path: Path, eval_batch_size: int, bucket_by_length: bool
) -> None:
    made = task(tmp_path, eval_batch_size=eval_batch_size, bucket_by_length=bucket_by_length)
    metrics = made.new_metrics("test")
    for batch in made.test_dataloader():
        guesses = batch["tokens"].sum(1) % 10  # depends on the example alone
        made.update(metrics, torch.nn.functional.one_hot(guesses, 10).float(), batch)
    data = made.data["test"]
    right = np.array([int(data.row(i).sum()) % 10 == data.targets[i] for i in range(len(data))])
    figures = made.compute(metrics)
    assert figures.pop("accuracy") == right.mean()
    shown = 0
    for name, value in figures.items():
        kind, *bounds = name.removeprefix("accuracy_").split("_")
        of = data.lengths if kind == "len" else data.depths
        chosen = (of >= int(bounds[0])) & (of <= int(bounds[-1]))
        assert value == right[chosen].mean()
        shown += int(chosen.sum())
    assert shown == 2 * len(data)  # each example in one range of length and at one depth
    assert list(made.new_metrics("val")) == ["accuracy"]


def test_description_is_plain_json_and_gives_the_majority_baseline(tmp_path: Path) -> None:
    made = task(tmp_path)
    described = json.loads(json.dumps(made.description()))
    split = described["splits"]["test"]
    targets = made.data["test"].targets
    assert split["majority_share"] == (targets == split["majority_label"]).mean()
    assert split["majority_share"] == max((targets == d).mean() for d in range(10))
    assert described["fingerprint"] == made.fingerprint
    assert (split["length_min"], split["length_max"]) == (
        made.data["test"].lengths.min(), made.data["test"].lengths.max(),
    )  # fmt: skip


def test_loss_is_the_mean_over_examples(tmp_path: Path) -> None:
    made = task(tmp_path)
    batch = made.collate([made.splits["val"][i] for i in range(5)])
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    expected = -torch.stack([logits[i].log_softmax(0)[batch["target"][i]] for i in range(5)]).mean()
    torch.testing.assert_close(made.loss(logits, batch), expected)


@pytest.mark.parametrize("scale", ["smoke", "mini", "paper"])
def test_settings_of_every_scale_can_be_met(scale: str, tmp_path: Path) -> None:
    few = [f"task.num_{split}=10" for split in ("train", "val", "test")]
    config = compose(["task=listops", f"scale={scale}", f"cache_dir={tmp_path}", *few])
    made = build_task(config)
    assert isinstance(made, ListOps)
    assert made.source == "embedded"
    assert len(generate(3, **made.law)) == 3


def test_a_cell_reads_published_files_when_their_folder_is_named(
    shared_data: Path, tmp_path: Path
) -> None:
    local = [f"task.data_dir={shared_data / 'listops'}", f"cache_dir={tmp_path}"]
    made = build_task(compose(["task=listops", "scale=paper", *local]))
    assert isinstance(made, ListOps)
    assert made.source == "local"
