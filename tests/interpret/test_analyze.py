"""``analyze``: planted models give what they must, and figures are those of the plain definitions."""

from __future__ import annotations

import time

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score
from torch import nn

from gma_bench import GaussianMixtureAttention
from gma_bench.errors import UserError
from gma_bench.interpret import analyze
from gma_bench.interpret import capture as capture_module
from tests.interpret.conftest import WORDS, Case, Lookup, planted

UNITS = 10 * torch.eye(8)


def read_vectors(
    codes: np.ndarray, categories: np.ndarray, num_components: int = 8
) -> dict[str, float]:
    """Metrics where token i is sure of component ``codes[i]``; ``(B, N)`` arrays."""
    return analyze(
        planted(num_components),
        UNITS[torch.from_numpy(codes)],
        categories=categories,
        resamples=200,
    ).metrics


def test_components_that_are_the_categories() -> None:
    codes = np.random.default_rng(0).integers(0, 4, (6, 40))
    metrics = read_vectors(codes, codes)
    assert metrics["nmi"] == pytest.approx(1)
    assert metrics["ami"] == pytest.approx(1)
    assert metrics["nmi_low"] == pytest.approx(1)
    assert metrics["components_in_use"] == 4
    assert metrics["usage_entropy"] == pytest.approx(np.log(4) / np.log(8), abs=0.01)
    assert metrics["posterior_entropy"] == pytest.approx(0, abs=1e-6)
    assert metrics["query_key_overlap"] == pytest.approx(1)
    assert metrics["affinity_same_category"] == pytest.approx(1, abs=1e-4)
    assert metrics["affinity_rank_max"] == 4


def test_components_that_have_nothing_to_do_with_the_categories() -> None:
    rng = np.random.default_rng(1)
    metrics = read_vectors(rng.integers(0, 8, (30, 60)), rng.integers(0, 5, (30, 60)))
    assert metrics["ami_low"] < 0 < metrics["ami_high"]
    assert metrics["nmi"] == pytest.approx(metrics["nmi_permuted"], abs=0.01)
    assert (
        0 < metrics["nmi_permuted_low"] <= metrics["nmi_permuted"] <= metrics["nmi_permuted_high"]
    )
    assert metrics["ami_permuted"] == pytest.approx(0, abs=0.005)


def test_one_component_for_all_tokens() -> None:
    metrics = read_vectors(np.full((3, 20), 5), np.random.default_rng(2).integers(0, 3, (3, 20)))
    assert metrics["components_in_use"] == 1
    assert metrics["components_in_use_fraction"] == 1 / 8
    assert metrics["usage_entropy"] == pytest.approx(0, abs=1e-6)
    assert metrics["effective_components"] == pytest.approx(1, abs=1e-5)
    assert metrics["nmi"] == 0


def test_uniform_posteriors() -> None:
    layer = planted(8)
    nn.init.zeros_(layer.means)
    metrics = analyze(layer, torch.randn(3, 20, 8), categories=np.zeros((3, 20), int)).metrics
    for name in ("usage_entropy", "posterior_entropy"):
        assert metrics[name] == pytest.approx(1, abs=1e-6)
    assert metrics["effective_components"] == pytest.approx(8, abs=1e-4)
    assert metrics["affinity_rank_max"] == 1
    for name in ("itself", "neighbours", "same_category"):
        assert metrics[f"affinity_{name}"] == pytest.approx(
            metrics[f"affinity_{name}_uniform"], abs=1e-5
        )
    assert metrics["lipschitz_empirical"] == pytest.approx(0, abs=1e-9)


def test_figures_are_those_of_the_definitions(case: Case) -> None:
    found = case.analyze()
    real = case.mask.numpy()
    with torch.no_grad():
        x = case.model.embedding(case.tokens)
        for number, layer in enumerate(case.model.layers):
            key = layer.responsibilities(x, "key").transpose(0, 1)[:, case.mask].numpy()
            query = layer.responsibilities(x, "query").transpose(0, 1)[:, case.mask].numpy()
            for head in range(2):
                row = found.heads.query("layer == @number and head == @head").iloc[0]
                winners = key[head].argmax(-1)
                assert (found.assignments(number, head)["component"] == winners).all()
                labels = found.text.codes
                assert row["nmi"] == pytest.approx(normalized_mutual_info_score(labels, winners))
                assert row["ami"] == pytest.approx(adjusted_mutual_info_score(labels, winners))
                assert row["components_in_use"] == len(set(winners))
                p = key[head].astype(float).mean(0)
                k = len(p)
                assert row["usage_entropy"] == pytest.approx(
                    -(p * np.log(p)).sum() / np.log(k), rel=1e-5
                )
                own = -(key[head] * np.log(key[head])).sum(-1).mean() / np.log(k)
                assert row["posterior_entropy"] == pytest.approx(own, rel=1e-4)
                assert row["query_key_overlap"] == pytest.approx(
                    np.minimum(key[head], query[head]).sum(-1).mean(), rel=1e-5
                )
                usage = found.components.query("layer == @number and head == @head")["usage"]
                assert usage.to_numpy() == pytest.approx(p, rel=1e-5)
            x = x + layer(x, case.mask)
    assert len(found.text.table) == real.sum() == found.metrics["num_tokens"]
    assert found.metrics["num_documents"] == 4
    assert found.metrics["nmi"] == pytest.approx(found.heads["nmi"].mean())
    assert found.metrics["lipschitz_empirical"] == found.heads["lipschitz_empirical"].max()


def test_categories_by_rule_and_tables_agree(case: Case) -> None:
    found = case.analyze()
    names = list(found.text.categories)
    by_name = found.text.table.groupby("text")["category"].first().map(lambda c: names[c])
    assert by_name[","] == "punctuation"
    assert by_name["NASA"] == "upper case"
    counts = found.contingency.groupby(["layer", "head"])[names].sum()
    assert (counts.sum(axis=1) == len(found.text.table)).all()
    by_head = found.contingency.set_index(["layer", "head"])[names]
    for key, own in found.components.groupby(["layer", "head"]):
        table = by_head.loc[key].to_numpy()
        assert (own["tokens_won"] == table.sum(1)).all()
        assert own["usage"].sum() == pytest.approx(1)
        used = own[own["tokens_won"] > 0]
        assert (used["purity"] * used["tokens_won"]).tolist() == pytest.approx(
            table.max(1)[table.sum(1) > 0]
        )


def test_affinity_shares_by_hand() -> None:
    # Two kinds in turn: a token reads its own kind alone, itself once among the three of a kind.
    codes = np.array([[0, 1, 0, 1, 0, 1]])
    model = Lookup(8, 8, [planted(8)])
    with torch.no_grad():
        model.embedding.weight.copy_(UNITS)
    shares = analyze(model, torch.from_numpy(codes), categories=codes, resamples=1).metrics
    assert shares["affinity_itself"] == pytest.approx(1 / 3, abs=1e-5)
    assert shares["affinity_same_token"] == pytest.approx(1, abs=1e-5)
    # Of its own kind, neighbours within two positions: one at the ends (4 rows), two inside (2 rows).
    assert shares["affinity_neighbours"] == pytest.approx((4 * 1 / 3 + 2 * 2 / 3) / 6, abs=1e-5)
    assert shares["affinity_same_category_uniform"] == pytest.approx(0.5)


def test_rank_and_sign_come_from_the_operator(case: Case) -> None:
    metrics = case.analyze().metrics
    assert metrics["affinity_length"] == 24
    assert metrics["affinity_rank_max"] <= 20
    assert metrics["affinity_min"] >= 0
    assert metrics["lipschitz_empirical"] <= metrics["lipschitz_bound"]


def test_padding_changes_nothing(case: Case) -> None:
    garbage = case.tokens.clone()
    garbage[~case.mask] = 0
    assert (
        case.analyze().metrics
        == Case(case.model, garbage, case.mask, case.documents, case.texts).analyze().metrics
    )


def test_reading_in_parts_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = case.analyze()
    monkeypatch.setattr(capture_module, "CHUNK_ELEMENTS", 1)
    parts = case.analyze()
    pd.testing.assert_frame_equal(whole.heads, parts.heads, rtol=1e-5)
    assert (whole.traces[1].leading[0] == parts.traces[1].leading[0]).all()


def test_the_model_is_left_as_it_was(case: Case) -> None:
    case.model.train()
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    case.analyze()
    assert case.model.training
    assert not any(module._forward_pre_hooks for module in case.model.modules())
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_sides_differ_and_seeds_repeat(case: Case) -> None:
    key, query = case.analyze().metrics, case.analyze(side="query").metrics
    assert key == case.analyze().metrics
    assert key["usage_entropy"] != query["usage_entropy"]
    assert key["query_key_overlap"] == pytest.approx(query["query_key_overlap"])


def test_a_text_of_one_document_has_no_interval(case: Case) -> None:
    metrics = case.analyze(documents=np.zeros((5, 30), int)).metrics
    assert np.isnan(metrics["nmi_low"])
    assert not np.isnan(metrics["nmi"])


def test_without_categories_their_figures_are_absent(case: Case) -> None:
    metrics = case.analyze(categories=None, texts=None).metrics
    assert np.isnan([metrics["nmi"], metrics["ami"], metrics["affinity_same_category"]]).all()
    assert 0 < metrics["usage_entropy"] < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.zeros(5, 30, dtype=torch.bool)}, "no real token"),
        ({"documents": np.zeros((5, 7))}, "documents have shape"),
        ({"texts": None}, "need texts"),
        ({"categories": np.full((5, 30), 3), "category_names": ["a"]}, "has no name"),
    ],
)
def test_arrays_that_do_not_fit(case: Case, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        case.analyze(**options)


def test_models_that_cannot_be_read() -> None:
    with pytest.raises(UserError, match="holds no GaussianMixtureAttention"):
        analyze(nn.Linear(4, 4), torch.zeros(1, 3, 4))

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = planted(4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return x

    with pytest.raises(UserError, match="did not run"):
        analyze(Idle(), torch.zeros(1, 3, 8))

    class Crossing(Idle):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return self.layer(x, memory=x)

    with pytest.raises(UserError, match="self-attention only"):
        analyze(Crossing(), torch.zeros(1, 3, 8))

    class Longer(Idle):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return self.layer(torch.cat([x, x], 1))

    with pytest.raises(UserError, match="6 positions and the text has 3"):
        analyze(Longer(), torch.zeros(1, 3, 8))


@pytest.mark.slow
def test_ten_thousand_tokens_in_a_minute() -> None:
    import resource

    torch.manual_seed(0)
    layers = [GaussianMixtureAttention(512, 8, causal=True, num_components=256) for _ in range(4)]
    tokens = torch.randint(0, len(WORDS), (40, 250))
    texts = [[WORDS[i] for i in row] for row in tokens.tolist()]
    started, cpu = time.perf_counter(), time.process_time()
    analyze(Lookup(len(WORDS), 512, layers), tokens, texts=texts, categories="word")
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # On a machine that others use too, the time on its processors says more than the clock.
    assert min(wall, cpu) < 60, (wall, cpu)
    assert peak_gib < 4
