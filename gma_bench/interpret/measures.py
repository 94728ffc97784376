"""The figures, as functions of arrays: how components are used, what they go with, how smooth they are.

Conventions: K components, C categories, D documents, N tokens; logarithms are natural; an entropy
that is *normalised* is divided by log K and lies in [0, 1] (0 for K = 1). PAPER, "interpretability"
names the figures; where it leaves a definition open, the choice stands in the docstring.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp, xlogy

ArrayF = np.ndarray
"""A float64 array."""

SQRT2 = float(np.sqrt(2.0))


# -- use of components -------------------------------------------------------------------------


def entropy(weights: ArrayF) -> ArrayF:
    """Entropy in nats over the last axis of non-negative weights ``(..., K)``, scaled to sum one.

    Rows that sum to zero have entropy 0.
    """
    total = weights.sum(-1)
    safe = np.where(total > 0, total, 1.0)
    return np.maximum(np.log(safe) - xlogy(weights, weights).sum(-1) / safe, 0.0)


def normalised_entropy(weights: ArrayF) -> ArrayF:
    """:func:`entropy` divided by log K; 0 where K = 1."""
    num_components = weights.shape[-1]
    if num_components == 1:
        return np.zeros(weights.shape[:-1])
    return np.minimum(entropy(weights) / np.log(num_components), 1.0)


def effective_components(weights: ArrayF) -> ArrayF:
    """Exponential of the entropy: the number of equally used components with the same entropy."""
    return np.exp(entropy(weights))


def components_in_use(wins: ArrayF) -> np.ndarray:
    """Number of components that win the hard assignment of at least one token. ``(..., K) -> (...)``."""
    return (wins > 0).sum(-1)


def components_above(mass: ArrayF) -> np.ndarray:
    """Number of components with a mean responsibility above 1/(10·K). ``(..., K) -> (...)``.

    Unlike :func:`components_in_use` it hardly depends on how many tokens were read.
    """
    num_components = mass.shape[-1]
    return (mass > mass.sum(-1, keepdims=True) / (10 * num_components)).sum(-1)


# -- agreement with categories -----------------------------------------------------------------


def mutual_information(tables: ArrayF) -> ArrayF:
    """Mutual information in nats of contingency tables ``(..., K, C)`` of counts."""
    flat = tables.reshape(*tables.shape[:-2], tables.shape[-2] * tables.shape[-1])
    information = entropy(tables.sum(-1)) + entropy(tables.sum(-2)) - entropy(flat)
    return np.maximum(information, 0.0)


def mean_entropy(tables: ArrayF) -> ArrayF:
    """Arithmetic mean of the entropies of both margins, in nats."""
    return (entropy(tables.sum(-1)) + entropy(tables.sum(-2))) / 2


def nmi(tables: ArrayF) -> ArrayF:
    """Normalised mutual information, I(K;C) over the arithmetic mean of H(K) and H(C).

    The same as ``sklearn.metrics.normalized_mutual_info_score`` by its defaults, one at a time. It
    is not corrected for chance: independent labels score above 0, the more the larger K is
    against the number of tokens; :func:`ami` is, and :func:`permuted_nmi` says how much it is.

    Args:
        tables: ``(..., K, C)`` counts of tokens by component and category.

    Returns:
        ``(...)`` in [0, 1]; 1 where both margins have one class only, as sklearn has it.
    """
    mean = mean_entropy(tables)
    score = np.divide(mutual_information(tables), mean, out=np.ones_like(mean), where=mean > 1e-12)
    return np.clip(score, 0.0, 1.0)


def expected_information(table: ArrayF) -> float:
    """Expected mutual information in nats of labels with these margins, paired at random.

    The hypergeometric model of Vinh, Epps and Bailey (JMLR 2010), by sklearn's implementation.
    """
    from sklearn.metrics.cluster import expected_mutual_information

    counts = table[np.ix_(table.sum(-1) > 0, table.sum(-2) > 0)].astype(np.int64)
    return float(expected_mutual_information(counts, int(counts.sum())))


def ami(tables: ArrayF, expected: ArrayF) -> ArrayF:
    """Adjusted mutual information, (I − E[I]) / (mean of H(K), H(C) − E[I]).

    The same as ``sklearn.metrics.adjusted_mutual_info_score`` by its defaults: 0 on average for
    independent labels, 1 for identical ones, negative below chance.

    Args:
        tables: ``(..., K, C)`` counts.
        expected: ``(...)``, :func:`expected_information` of each table.

    Returns:
        ``(...)``.
    """
    mean, information = mean_entropy(tables), mutual_information(tables)
    room = mean - expected
    tiny = np.finfo(float).eps
    room = np.where(room < 0, np.minimum(room, -tiny), np.maximum(room, tiny))
    classes = ((tables.sum(-1) > 0).sum(-1), (tables.sum(-2) > 0).sum(-1))
    trivial = (classes[0] == classes[1]) & (classes[0] <= 1)
    return np.where(trivial, 1.0, (information - expected) / room)


def permuted_nmi(
    assignments: np.ndarray, categories: np.ndarray, num_components: int, num_categories: int,
    rng: np.random.Generator, repeats: int = 20,
) -> ArrayF:  # fmt: skip
    """NMI after shuffling which token has which category: what chance alone scores.

    Args:
        assignments: ``(H, N)`` winning component of each token, in each of H heads.
        categories: ``(N,)`` codes.
        rng: source of the shuffles.
        repeats: number of shuffles.

    Returns:
        ``(repeats, H)``.
    """
    heads = np.arange(len(assignments))[:, None] * num_components
    scores = []
    for _ in range(repeats):
        index = (heads + assignments) * num_categories + rng.permutation(categories)
        size = len(assignments) * num_components * num_categories
        tables = np.bincount(index.ravel(), minlength=size).astype(float)
        scores.append(nmi(tables.reshape(-1, num_components, num_categories)))
    return np.stack(scores)


# -- bootstrap over documents ------------------------------------------------------------------


def document_weights(num_documents: int, repeats: int, rng: np.random.Generator) -> ArrayF:
    """How often each document is drawn in each of ``repeats`` resamples, ``(R, D)``."""
    return rng.multinomial(
        num_documents, np.full(num_documents, 1 / num_documents), repeats
    ).astype(float)


def resampled_ami(tables: ArrayF, table: ArrayF, expected: float) -> ArrayF:
    """AMI of resampled tables ``(R, K, C)``, given the whole table and its expected information.

    The expectation of each resample is the exact one of the whole table times the ratio of their
    leading terms, (K' − 1)(C' − 1) / 2n with the classes and tokens that are present: the exact sum
    for each of a thousand resamples would take minutes, and a test holds both to the same interval.
    """

    def leading(t: ArrayF) -> ArrayF:
        rows, columns = (t.sum(-1) > 0).sum(-1), (t.sum(-2) > 0).sum(-1)
        return (rows - 1) * (columns - 1) / (2 * np.maximum(t.sum((-1, -2)), 1))

    base = float(leading(table))
    scale = leading(tables) / base if base > 0 else np.zeros(len(tables))
    return ami(tables, expected * scale)


def interval(
    estimate: float, resampled: ArrayF, *, level: float = 0.95,
    bounds: tuple[float, float] = (-np.inf, np.inf),
) -> tuple[float, float]:  # fmt: skip
    """A bootstrap interval around an estimate: quantiles of the resamples, centred on it.

    Resampling repeats documents, and repeats look like dependence: mutual information is biased
    upwards in a resample (and entropy downwards) against the sample it was drawn from, by as much
    as the sample is against the truth. Percentiles would carry that shift into the interval, so
    the resamples are used for their spread alone.

    Args:
        estimate: the figure of the whole sample.
        resampled: ``(R,)`` the figure of each resample.
        level: coverage aimed at.
        bounds: the range that the figure can have.

    Returns:
        Low and high; both NaN where the resamples do not vary at all because there is but one
        document (``resampled`` empty).
    """
    if len(resampled) == 0:
        return float("nan"), float("nan")
    tail = (1 - level) / 2
    low, high = np.quantile(resampled - resampled.mean(), [tail, 1 - tail]) + estimate
    return float(np.clip(low, *bounds)), float(np.clip(high, *bounds))


# -- queries, keys and affinity ----------------------------------------------------------------


def overlap(query: ArrayF, key: ArrayF) -> ArrayF:
    """Σ_k min(γ_k(q), γ_k(k)) over the last axis: 1 − total variation distance, in [0, 1]."""
    return np.minimum(query, key).sum(-1)


def affinity(query: ArrayF, key: ArrayF, *, causal: bool = False) -> ArrayF:
    """Γ_Q Γ_Kᵀ with rows scaled to sum one, ``(..., N, K) -> (..., N, N)``; PAPER, "read".

    The harness never forms it in a model; for short texts it is what the read does. With
    ``causal``, a row is scaled over positions up to its own; only without it is the rank ≤ K.
    """
    weights = query @ np.swapaxes(key, -1, -2)
    if causal:
        weights = np.tril(weights)
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


def numerical_rank(matrix: ArrayF) -> tuple[int, float]:
    """Rank of ``(N, N)``, and the largest singular value beyond it relative to the first.

    Singular values under N·ε₆₄ of the first count as zero (the rule of ``numpy.linalg.matrix_rank``).
    """
    values = np.linalg.svd(matrix, compute_uv=False)
    small = values <= values[0] * max(matrix.shape) * np.finfo(np.float64).eps
    rank = int((~small).sum())
    return rank, float(values[rank] / values[0]) if rank < len(values) and values[0] > 0 else 0.0


# -- smoothness of routing ---------------------------------------------------------------------


def routing_jacobian(x: ArrayF, means: ArrayF, variances: ArrayF, log_priors: ArrayF) -> ArrayF:
    """The Jacobian of the responsibilities by the routing vector.

    ∇ₓ γ_k = γ_k (s_k − Σ_l γ_l s_l) with the scores s_k = (μ_k − x) / σ²_k.

    Args:
        x: ``(N, d_r)`` routing vectors.
        means, variances: ``(K, d_r)``.
        log_priors: ``(K,)``.

    Returns:
        ``(N, K, d_r)`` float64.
    """
    x, means, variances = (np.asarray(a, dtype=np.float64) for a in (x, means, variances))
    scores = (means - x[:, None]) / variances  # (N, K, d_r)
    logits = log_priors - 0.5 * (
        np.log(variances).sum(-1) + ((means - x[:, None]) * scores).sum(-1)
    )
    gamma = np.exp(logits - logsumexp(logits, axis=-1, keepdims=True))  # (N, K)
    mean_score = np.einsum("nk,nkd->nd", gamma, scores)
    return gamma[..., None] * (scores - mean_score[:, None])


def local_lipschitz(x: ArrayF, means: ArrayF, variances: ArrayF, log_priors: ArrayF) -> ArrayF:
    """The local Lipschitz constant at each routing vector: ‖∂γ/∂x‖₂, ``(N, d_r) -> (N,)``."""
    jacobian = routing_jacobian(x, means, variances, log_priors)
    gram = np.swapaxes(jacobian, -1, -2) @ jacobian  # (N, d_r, d_r)
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[:, -1], 0.0))


def lipschitz_bound(radius: float, means: ArrayF, variance_floor: float) -> float:
    """A Lipschitz constant of x ↦ γ(x) on the ball ‖x‖ ≤ R, from the variance floor alone.

    For a unit vector u, the k-th entry of (∂γ/∂x) u is γ_k (a_k − ā) with a_k = s_k·u and
    ā = Σ_l γ_l a_l. Its positive and its negative entries each sum to m = ½ Σ_k γ_k |a_k − ā|, and
    a variable on an interval of length Δ has a mean absolute deviation of at most Δ/2, so
    m ≤ Δ/4. The 2-norm of each part is at most its sum, so ‖(∂γ/∂x) u‖₂ ≤ √2 m ≤ Δ / (2√2), where
    Δ ≤ max_{k,l} ‖s_k − s_l‖ ≤ 2 max_k ‖s_k‖ ≤ 2 (R + max_k ‖μ_k‖) / v for variances of at least v.
    Hence ‖∂γ/∂x‖₂ ≤ (R + max_k ‖μ_k‖) / (√2 v) everywhere in the ball, which is convex, so that this
    is a Lipschitz constant there: PAPER, "the responsibility map is locally Lipschitz for bounded
    inputs and variances bounded below".

    Args:
        radius: R, the largest norm of a routing vector.
        means: ``(K, d_r)``.
        variance_floor: v, no variance is under it.
    """
    return float((radius + np.linalg.norm(means, axis=-1).max()) / (SQRT2 * variance_floor))
