"""Figures against sklearn, autograd and what can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    adjusted_mutual_info_score,
    mutual_info_score,
    normalized_mutual_info_score,
)

from gma_bench import ops
from gma_bench.interpret import measures as m


def table_of(components: np.ndarray, categories: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    table = np.zeros(shape)
    np.add.at(table, (components, categories), 1)
    return table


# -- agreement with sklearn --------------------------------------------------------------------


@pytest.mark.parametrize("dependence", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(
    ("tokens", "k", "c"), [(2000, 64, 8), (300, 128, 8), (50, 5, 2), (400, 3, 12)]
)
def test_scores_are_sklearns(tokens: int, k: int, c: int, dependence: float) -> None:
    rng = np.random.default_rng(tokens + k)
    categories = rng.choice(c, tokens, p=rng.dirichlet(np.ones(c)))
    components = np.where(
        rng.random(tokens) < dependence, categories % k, rng.integers(0, k, tokens)
    )
    table = table_of(components, categories, (k, c))
    assert m.mutual_information(table) == pytest.approx(
        mutual_info_score(categories, components), abs=1e-12
    )
    assert m.nmi(table) == pytest.approx(
        normalized_mutual_info_score(categories, components), abs=1e-12
    )
    expected = np.asarray(m.expected_information(table))
    assert m.ami(table, expected) == pytest.approx(
        adjusted_mutual_info_score(categories, components), abs=1e-9
    )


def test_scores_of_many_tables_are_those_of_each() -> None:
    tables = np.random.default_rng(0).integers(0, 9, (5, 7, 4)).astype(float)
    expected = np.array([m.expected_information(t) for t in tables])
    assert m.nmi(tables) == pytest.approx([float(m.nmi(t)) for t in tables])
    assert m.ami(tables, expected) == pytest.approx(
        [float(m.ami(t, e)) for t, e in zip(tables, expected, strict=True)]
    )


def test_entropy_is_scipys() -> None:
    from scipy.stats import entropy

    weights = np.random.default_rng(0).random((4, 9))
    assert m.entropy(weights) == pytest.approx(entropy(weights, axis=-1))
    assert m.normalised_entropy(weights) == pytest.approx(entropy(weights, axis=-1) / np.log(9))


# -- planted cases -----------------------------------------------------------------------------


def test_assignments_equal_to_the_categories_score_one() -> None:
    table = np.diag([30.0, 20.0, 10.0])
    assert m.nmi(table) == pytest.approx(1)
    assert m.ami(table, np.asarray(m.expected_information(table))) == pytest.approx(1)


def test_one_component_for_all_tokens() -> None:
    weights = np.array([0.0, 100.0, 0.0, 0.0])
    assert m.normalised_entropy(weights) == 0
    assert m.components_in_use(weights) == 1
    assert m.components_above(weights) == 1
    assert m.effective_components(weights) == 1
    table = np.array([[0.0, 0.0], [60.0, 40.0]])
    assert m.nmi(table) == 0
    assert m.ami(table, np.asarray(m.expected_information(table))) == pytest.approx(0, abs=1e-9)


def test_even_use() -> None:
    weights = np.full(128, 0.25)
    assert m.normalised_entropy(weights) == pytest.approx(1)
    assert m.effective_components(weights) == pytest.approx(128)
    assert m.components_above(weights) == 128


def test_components_above_a_tenth_of_even_use() -> None:
    weights = np.array([0.90, 0.05, 0.026, 0.024])  # 1/(10·4) = 0.025
    assert m.components_above(weights) == 3


def test_one_component_in_all_has_no_entropy() -> None:
    assert m.normalised_entropy(np.array([5.0])) == 0


# -- intervals ---------------------------------------------------------------------------------


def bootstrap(
    seed: int, documents: int = 40, tokens: int = 50, effect: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Intervals of NMI and AMI for random text whose components follow categories with a chance."""
    rng = np.random.default_rng(seed)
    shape = (documents, tokens)
    categories = rng.integers(0, 6, shape)
    components = np.where(rng.random(shape) < effect, categories, rng.integers(0, 24, shape))
    by_document = np.zeros((documents, 24, 6))
    np.add.at(by_document, (np.arange(documents)[:, None], components, categories), 1)
    table = by_document.sum(0)
    weights = m.document_weights(documents, 200, rng)
    resampled = np.einsum("rd,dkc->rkc", weights, by_document)
    expected = m.expected_information(table)
    estimate = float(m.ami(table, np.asarray(expected)))
    return {
        "ami": m.interval(estimate, m.resampled_ami(resampled, table, expected)),
        "nmi": m.interval(float(m.nmi(table)), m.nmi(resampled)),
        "estimate": (estimate, float(m.nmi(table))),
    }


def test_random_assignments_have_ami_zero_within_the_interval() -> None:
    covered = [b["ami"][0] <= 0 <= b["ami"][1] for b in map(bootstrap, range(60))]
    assert np.mean(covered) >= 0.85  # 95 % aimed at; 60 trials, 40 documents each
    assert any(b["estimate"][1] > 0.005 for b in map(bootstrap, range(3)))  # NMI is not zero there


def test_an_interval_holds_its_estimate_and_the_truth() -> None:
    truth = np.mean([bootstrap(s, documents=400, effect=0.4)["estimate"][0] for s in range(4)])
    found = [bootstrap(s, effect=0.4) for s in range(40)]
    assert all(f["ami"][0] < f["estimate"][0] < f["ami"][1] for f in found)
    assert np.mean([f["ami"][0] <= truth <= f["ami"][1] for f in found]) >= 0.8


def test_scaled_expectation_gives_the_exact_bootstraps_interval() -> None:
    rng = np.random.default_rng(3)
    by_document = rng.poisson(0.4, (30, 40, 6)).astype(float)
    table, weights = by_document.sum(0), m.document_weights(30, 60, rng)
    resampled = np.einsum("rd,dkc->rkc", weights, by_document)
    exact = m.ami(resampled, np.array([m.expected_information(t) for t in resampled]))
    quick = m.resampled_ami(resampled, table, m.expected_information(table))
    assert np.std(quick) == pytest.approx(np.std(exact), rel=0.05)
    assert quick == pytest.approx(exact, abs=0.1 * np.std(exact))


def test_one_document_has_no_interval() -> None:
    assert np.isnan(m.interval(0.3, np.array([]))).all()


def test_shuffled_categories_score_what_chance_expects() -> None:
    rng = np.random.default_rng(0)
    components, categories = rng.integers(0, 32, (2, 3000)), rng.integers(0, 6, 3000)
    components[1] = categories  # however strong the dependence was, shuffling takes it
    scores = m.permuted_nmi(components, categories, 32, 6, rng, 30).mean(0)
    for head in range(2):
        table = table_of(components[head], categories, (32, 6))
        assert scores[head] == pytest.approx(
            m.expected_information(table) / m.mean_entropy(table), rel=0.1
        )


# -- affinity ----------------------------------------------------------------------------------


def mixture(
    seed: int = 0, k: int = 5, d: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, k, d, generator=generator, dtype=torch.float64)
    return (
        draw,
        0.2 + torch.rand(2, k, d, generator=generator, dtype=torch.float64),
        torch.full((2, k), 1 / k, dtype=torch.float64).log(),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_affinity_is_what_the_operator_multiplies_values_by(causal: bool) -> None:
    q, k = torch.randn(
        2, 1, 2, 9, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    parts = mixture()
    one_hot = torch.eye(9, dtype=torch.float64).expand(1, 2, 9, 9)
    applied = ops.gma(q, k, one_hot, *parts, causal=causal, eps=1e-30)[0].numpy()
    formed = m.affinity(
        ops.responsibilities(q, *parts)[0].numpy(),
        ops.responsibilities(k, *parts)[0].numpy(),
        causal=causal,
    )
    assert formed == pytest.approx(applied, abs=1e-12)


def test_rank_of_a_product() -> None:
    rng = np.random.default_rng(0)
    rank, tail = m.numerical_rank(rng.random((40, 7)) @ rng.random((7, 40)))
    assert (rank, tail < 1e-14) == (7, True)
    assert m.numerical_rank(np.eye(6)) == (6, 0.0)
    assert m.numerical_rank(np.zeros((4, 4)))[0] == 0


def test_overlap() -> None:
    assert m.overlap(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0
    assert m.overlap(np.array([0.7, 0.3]), np.array([0.2, 0.8])) == pytest.approx(0.5)


# -- smoothness --------------------------------------------------------------------------------


def test_the_jacobian_is_autograds() -> None:
    means, variances, log_priors = (part[:1] for part in mixture(2, k=6, d=4))
    x = torch.randn(7, 4, dtype=torch.float64)

    def gamma(vector: torch.Tensor) -> torch.Tensor:
        return ops.responsibilities(vector.view(1, 1, 1, -1), means, variances, log_priors).view(-1)

    wanted = torch.stack([torch.autograd.functional.jacobian(gamma, row) for row in x])
    parts = (means[0].numpy(), variances[0].numpy(), log_priors[0].numpy())
    assert m.routing_jacobian(x.numpy(), *parts) == pytest.approx(wanted.numpy(), abs=1e-12)
    assert m.local_lipschitz(x.numpy(), *parts) == pytest.approx(
        torch.linalg.matrix_norm(wanted, 2).numpy(), rel=1e-9
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_local_constant_exceeds_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k, d, floor = 8, 5, 0.01
    means = rng.normal(size=(k, d)) * rng.choice([0.1, 1, 5])
    variances = floor + rng.exponential(rng.choice([1e-3, 0.1, 3]), size=(k, d))
    log_priors = np.log(rng.dirichlet(np.ones(k)))
    x = np.concatenate([rng.normal(size=(200, d)), (means[:, None] + means).reshape(-1, d) / 2])
    bound = m.lipschitz_bound(float(np.linalg.norm(x, axis=-1).max()), means, floor)
    assert m.local_lipschitz(x, means, variances, log_priors).max() <= bound


def test_the_bound_is_met_by_two_opposite_components() -> None:
    # Halfway between ±μ the slope is ‖μ‖/(√2 v), and R = 0 there: no smaller constant would do.
    means, floor = np.array([[2.0, 0.0], [-2.0, 0.0]]), 0.25
    slope = m.local_lipschitz(np.zeros((1, 2)), means, np.full((2, 2), floor), np.log([0.5, 0.5]))
    assert slope[0] == pytest.approx(m.lipschitz_bound(0.0, means, floor))
