"""``analyze``: what every layer's, head's component of a trained GMA does with a text.

The figures of a head, from γ (N, K) on the chosen side and the winner argmax_k γ of each token:

- ``components_in_use``: win at least one token; ``components_above_tenth``: mean γ above 1/(10·K);
- ``usage_entropy``: entropy of the mean γ over log K, ``usage_entropy_hard`` of the winners' counts,
  ``effective_components`` = exp of the former's entropy in nats;
- ``nmi``, ``ami``: winners against categories, as sklearn defines them; ``…_permuted``: the same with
  categories shuffled over tokens;
- ``posterior_entropy``: mean entropy of a token's γ over log K;
- ``query_key_overlap``: mean Σ_k min(γ_k(q), γ_k(k)) of a token's own query and key;
- ``affinity_itself, _same_token, _neighbours, _same_category``: share of a row of the scaled affinity
  (causal where the layer is) on its own position, on the same id, within two positions, on the same
  category, mean over rows; ``…_uniform``: what attention spread evenly would give;
- ``affinity_rank_max, affinity_min``: rank and smallest entry of the bidirectional affinity as the
  operator applies it in float64, over short inputs of ``affinity_length`` tokens;
- ``lipschitz_empirical``: largest ‖∂γ/∂x‖₂ at sampled routing vectors; ``lipschitz_bound`` from the
  variance floor, ``lipschitz_bound_learned`` from the smallest variance that was learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor, nn

from gma_bench.errors import UserError
from gma_bench.interpret import measures
from gma_bench.interpret.capture import Forward, LayerTrace, Side, call_with_mask, trace
from gma_bench.interpret.categories import CATEGORIES, categorise, display

NEIGHBOUR_DISTANCE = 2
"""Positions up to this far away, on either side, count as neighbours."""
RANK_WINDOWS = 2
"""Sequences whose implied affinity is decomposed; it is cubic in their length."""
LIPSCHITZ_SAMPLES = 128
"""Routing vectors of a head at which the local Lipschitz constant is computed."""


@dataclass(frozen=True)
class Settings:
    """How figures are computed; see :func:`analyze`."""

    side: Side = "key"
    resamples: int = 1000
    permutations: int = 20
    windows: int = 4
    window_length: int = 256
    detail_tokens: int = 4096
    top: int = 8
    seed: int = 0


@dataclass
class Text:
    """The real tokens in order, N of them, and the sequences they stand in.

    Attributes:
        table: a row a token: ``sequence, position, document, token`` (id, −1 when vectors were
            fed), ``text`` (as spelled, None when unknown), ``shown`` (as it stands in running text),
            ``category`` (code, −1 when unknown).
        categories: names that the codes index.
        num_documents: D.
    """

    table: pd.DataFrame
    categories: tuple[str, ...]
    num_documents: int

    @property
    def codes(self) -> np.ndarray:
        return self.table["category"].to_numpy()

    @property
    def documents(self) -> np.ndarray:
        return self.table["document"].to_numpy()


@dataclass
class Analysis:
    """What :func:`analyze` found.

    Attributes:
        metrics: figures of the model: means over layers and heads unless the name says ``_max`` or
            ``_min``, with 95 % intervals ``…_low``, ``…_high`` from a bootstrap over documents.
        heads: a row a layer and head, with every figure.
        components: a row a layer, head and component: ``usage`` (mean responsibility), ``prior``,
            ``tokens_won``, ``top_category`` and its share ``purity`` among the tokens won.
        contingency: a row a layer, head and component: tokens won, a column a category.
        text: the tokens.
        traces: per layer, hard assignments (``winners``), leading components and kept windows.
        settings: what it was computed with.
    """

    metrics: dict[str, float]
    heads: pd.DataFrame
    components: pd.DataFrame
    contingency: pd.DataFrame
    text: Text
    traces: list[LayerTrace]
    settings: Settings

    def assignments(self, layer: int, head: int) -> pd.DataFrame:
        """The text's table with the winning ``component`` of each token in one head."""
        return self.text.table.assign(component=self.traces[layer].winners[head])


def analyze(
    model: nn.Module,
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    categories: Literal["word", "bpe", "byte", "listops"] | np.ndarray | None = None,
    category_names: Sequence[str] | None = None,
    documents: np.ndarray | Tensor | None = None,
    texts: Sequence[Sequence[str]] | None = None,
    side: Side = "key",
    forward: Forward = call_with_mask,
    resamples: int = 1000,
    permutations: int = 20,
    windows: int = 4,
    window_length: int = 256,
    detail_tokens: int = 4096,
    top: int = 8,
    seed: int = 0,
) -> Analysis:
    """Say what each component of each GMA layer and head in a model does with a text.

    Args:
        model: any module that holds :class:`~gma_bench.GaussianMixtureAttention` layers.
        tokens: ``(B, N)`` ids, or ``(B, N, d_model)`` vectors for a bare mixer.
        mask: ``(B, N)`` bool, True = a real token.
        categories: the kind of token, with ``texts``: categories are then found by rule
            (:func:`gma_bench.interpret.categories.categorise`); or ``(B, N)`` codes of your own;
            None leaves out every figure that needs them (NaN).
        category_names: names of your own codes.
        documents: ``(B, N)`` or ``(B,)``: which document each token is of, any integers; tokens of
            one document are resampled together. None takes each sequence for a document.
        texts: ``(B, N)`` tokens as the tokenizer spells them.
        side: which posterior is summed up: ``key``, by which a token is written into the slots, or
            ``query``, by which it reads them.
        forward: how to run the model on a batch; ``model(tokens, mask)`` unless given.
        resamples: bootstrap resamples.
        permutations: shuffles behind the permuted baseline.
        windows, window_length: how many sequences, and how much of each, the figures on affinity
            and smoothness read (their cost is quadratic in it).
        detail_tokens, top: for how many tokens the leading components are kept, and how many.
        seed: of resampling and shuffling.

    Returns:
        An :class:`Analysis`; the model is left as it was.

    Raises:
        UserError: no GMA in the model, no real token, or arrays that do not fit together.
    """
    settings = Settings(
        side, resamples, permutations, windows, window_length, detail_tokens, top, seed
    )
    real = np.ones(tokens.shape[:2], bool) if mask is None else mask.cpu().numpy().astype(bool)
    if not real.any():
        raise UserError("the text holds no real token")
    indices = _document_indices(documents, real)
    text = _text(tokens, real, indices, categories, category_names, texts)
    traces = trace(
        model, tokens, mask, indices, side=side, detail_tokens=detail_tokens, top=top,
        windows=windows, window_length=window_length, forward=forward,
    )  # fmt: skip
    return summarise(traces, text, settings)


def _document_indices(documents: np.ndarray | Tensor | None, real: np.ndarray) -> np.ndarray:
    """``(B, N)`` documents counted from zero over the real tokens; padding has the index 0."""
    if documents is None:
        documents = np.arange(len(real))
    values = np.asarray(documents)
    if values.ndim == 1:
        values = values[:, None].repeat(real.shape[1], axis=1)
    if values.shape != real.shape:
        raise UserError(f"documents have shape {values.shape}, tokens {real.shape}")
    indices = np.zeros(real.shape, dtype=np.int64)
    indices[real] = np.unique(values[real], return_inverse=True)[1]
    return indices


def _text(
    tokens: Tensor, real: np.ndarray, documents: np.ndarray,
    categories: str | np.ndarray | None, category_names: Sequence[str] | None,
    texts: Sequence[Sequence[str]] | None,
) -> Text:  # fmt: skip
    sequence, position = real.nonzero()
    table = pd.DataFrame({"sequence": sequence, "position": position, "document": documents[real]})
    table["token"] = tokens.cpu().numpy()[real] if tokens.dim() == 2 else -1
    kind = categories if isinstance(categories, str) else ""
    spelled = (
        None
        if texts is None
        else [texts[b][n] for b, n in zip(sequence.tolist(), position.tolist(), strict=True)]
    )
    table["text"] = spelled
    table["shown"] = (
        [f" #{token}" for token in table["token"]] if spelled is None
        else [display(token, kind) for token in spelled]
    )  # fmt: skip
    names: tuple[str, ...] = ()
    if categories is None:
        table["category"] = -1
    elif isinstance(categories, str):
        if texts is None:
            raise UserError(f"categories={categories!r} are found by rule and need texts")
        names = CATEGORIES.get(categories, ())
        table["category"] = _by_rule(table, categories)
    else:
        codes = np.asarray(categories)[real].astype(np.int64)
        if codes.min() < 0:
            raise UserError("category codes count from 0")
        names = tuple(category_names or (str(c) for c in range(codes.max() + 1)))
        if codes.max() >= len(names):
            raise UserError(f"category code {codes.max()} has no name")
        table["category"] = codes
    return Text(table, names, int(table["document"].max()) + 1)


def _by_rule(table: pd.DataFrame, kind: str) -> np.ndarray:
    # Only a change of document breaks a word off; a window's edge does not, if the text goes on.
    codes = np.empty(len(table), dtype=np.int64)
    documents = table["document"].to_numpy()
    starts = np.flatnonzero(np.r_[True, documents[1:] != documents[:-1]])
    spelled = table["text"].tolist()
    for start, end in zip(starts, [*starts[1:], len(table)], strict=True):
        codes[start:end] = categorise(spelled[start:end], kind)
    return codes


# -- figures -----------------------------------------------------------------------------------


def summarise(traces: list[LayerTrace], text: Text, settings: Settings) -> Analysis:
    """Every figure from what was traced; the arguments are those of :class:`Analysis`."""
    rng = np.random.default_rng(settings.seed)
    weights = np.zeros((0, text.num_documents))
    if text.num_documents > 1:
        weights = measures.document_weights(text.num_documents, settings.resamples, rng)
    rows: list[dict[str, Any]] = []
    draws: list[dict[str, np.ndarray]] = []
    components, contingency = [], []
    for index, layer in enumerate(traces):
        chance = _chance(layer, text, settings, rng)
        ranks = _ranks(layer)
        for head in range(layer.num_heads):
            key = {"layer": index, "head": head, "module": layer.name}
            table, by_document = _tables(layer, head, text)
            figures, resampled = _use(layer, head, table, weights)
            agreement, more = _agreement(table, by_document, weights)
            figures |= agreement | _permuted(chance[:, head], table)
            resampled |= more
            for name, values in resampled.items():
                figures[f"{name}_low"], figures[f"{name}_high"] = measures.interval(
                    figures[name], values, bounds=BOUNDS[name]
                )
            resampled["nmi_permuted"] = chance[:, head]
            figures |= _affinity(layer, head, text) | ranks[head]
            figures |= _smoothness(layer, head, rng)
            rows.append(key | figures)
            draws.append(resampled)
            components.append(_component_table(key, layer, head, table, text.categories))
            contingency.append(_contingency_table(key, table, text.categories))
    heads = pd.DataFrame(rows)
    return Analysis(
        _model_metrics(heads, draws, text), heads, pd.concat(components, ignore_index=True),
        pd.concat(contingency, ignore_index=True), text, traces, settings,
    )  # fmt: skip


BOUNDS = {"usage_entropy": (0.0, 1.0), "nmi": (0.0, 1.0), "ami": (-1.0, 1.0)}
"""The figures that get an interval, and the range of each."""


def _chance(
    layer: LayerTrace, text: Text, settings: Settings, rng: np.random.Generator
) -> np.ndarray:
    if not text.categories:
        return np.full((1, layer.num_heads), np.nan)
    return measures.permuted_nmi(
        layer.winners, text.codes, layer.num_components, len(text.categories), rng,
        settings.permutations,
    )  # fmt: skip


def _permuted(scores: np.ndarray, table: np.ndarray) -> dict[str, float]:
    """The mean over shuffles and the range of 95 % of them; shuffling leaves the margins alone."""
    if table.shape[-1] == 1:
        names = ("nmi_permuted", "nmi_permuted_low", "nmi_permuted_high", "ami_permuted")
        return dict.fromkeys(names, float("nan"))
    low, high = np.quantile(scores, [0.025, 0.975])
    mean, expected = float(measures.mean_entropy(table)), measures.expected_information(table)
    room = mean - expected
    return {
        "nmi_permuted": float(scores.mean()), "nmi_permuted_low": float(low),
        "nmi_permuted_high": float(high),
        "ami_permuted": float(scores.mean() * mean - expected) / room if room > 1e-12 else 0.0,
    }  # fmt: skip


def _tables(layer: LayerTrace, head: int, text: Text) -> tuple[np.ndarray, np.ndarray]:
    """Counts of tokens by component and category, ``(K, C)``, and by document, ``(D, K, C)``."""
    winners, num_categories = layer.winners[head].astype(np.int64), max(len(text.categories), 1)
    codes = text.codes if text.categories else np.zeros(len(winners), dtype=np.int64)
    shape = (text.num_documents, layer.num_components, num_categories)
    index = np.ravel_multi_index((text.documents, winners, codes), shape)
    by_document = np.bincount(index, minlength=int(np.prod(shape))).reshape(shape)
    return by_document.sum(0).astype(float), by_document


def _use(
    layer: LayerTrace, head: int, table: np.ndarray, weights: np.ndarray
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    by_document = layer.mass[head].numpy()
    mass, wins = by_document.sum(0), table.sum(-1)
    scale = layer.seen * np.log(layer.num_components) if layer.num_components > 1 else np.inf
    in_use = int(measures.components_in_use(wins))
    figures = {
        "num_components": layer.num_components,
        "components_in_use": in_use,
        "components_in_use_fraction": in_use / layer.num_components,
        "components_above_tenth": int(measures.components_above(mass)),
        "usage_entropy": float(measures.normalised_entropy(mass)),
        "usage_entropy_hard": float(measures.normalised_entropy(wins)),
        "effective_components": float(measures.effective_components(mass)),
        "posterior_entropy": float(layer.entropy[head]) / scale,
        "query_key_overlap": float(layer.overlap[head]) / layer.seen,
    }
    return figures, {"usage_entropy": measures.normalised_entropy(weights @ by_document)}


def _agreement(
    table: np.ndarray, by_document: np.ndarray, weights: np.ndarray
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    if table.shape[-1] == 1:
        nothing = np.full(len(weights), np.nan)
        return {"nmi": float("nan"), "ami": float("nan")}, {"nmi": nothing, "ami": nothing}
    expected = measures.expected_information(table)
    used = np.ix_(table.sum(-1) > 0, table.sum(-2) > 0)  # the rest adds nothing to any sum
    documents = by_document[(slice(None), *used)]
    flat = weights @ documents.reshape(len(documents), -1)
    resampled = flat.reshape(len(weights), *documents.shape[1:])
    figures = {
        "nmi": float(measures.nmi(table)),
        "ami": float(measures.ami(table, np.asarray(expected))),
    }
    return figures, {
        "nmi": measures.nmi(resampled),
        "ami": measures.resampled_ami(resampled, table[used], expected),
    }


def _affinity(layer: LayerTrace, head: int, text: Text) -> dict[str, float]:
    """Shares of affinity mass on relations between positions, averaged over rows."""
    shares: list[np.ndarray] = []
    starts = text.table.groupby("sequence", sort=True).indices
    for window, sequence in zip(range(len(layer.windows.query)), starts, strict=False):
        length = layer.windows.query[window].shape[1]
        tokens = text.table.iloc[starts[sequence][:length]]
        weights = measures.affinity(
            layer.windows.query[window][head].astype(float),
            layer.windows.key[window][head].astype(float), causal=layer.module.causal,
        )  # fmt: skip
        shares.append(_shares(weights, tokens, layer.module.causal))
    return dict(zip(SHARES, np.mean(shares, axis=0).tolist(), strict=True))


def _ranks(layer: LayerTrace) -> list[dict[str, float]]:
    """Rank and sign of the implied affinity of each head, over the first kept windows."""
    found: list[dict[str, float]] = []
    affinities = [layer.implied_affinity(w) for w in range(len(layer.windows.query))[:RANK_WINDOWS]]
    for head in range(layer.num_heads):
        ranks = [measures.numerical_rank(a[head]) for a in affinities]
        found.append(
            {
                "affinity_rank_max": max(rank for rank, _ in ranks),
                "affinity_rank_tail": max(tail for _, tail in ranks),
                "affinity_min": min(float(a[head].min()) for a in affinities),
                "affinity_length": max(a.shape[-1] for a in affinities),
            }
        )
    return found


SHARES = [
    f"affinity_{of}{against}"
    for against in ("", "_uniform")
    for of in ("itself", "same_token", "neighbours", "same_category")
]


def _shares(weights: np.ndarray, tokens: pd.DataFrame, causal: bool) -> np.ndarray:
    """Mean over rows of the mass on each relation, then the same for attention spread evenly."""
    ids, codes = tokens["token"].to_numpy(), tokens["category"].to_numpy()
    place = np.arange(len(tokens))
    distance = np.abs(place[:, None] - place)
    unknown = np.full(weights.shape, np.nan)
    relations = [
        distance == 0,
        (ids[:, None] == ids) if ids.min() >= 0 else unknown,
        (distance > 0) & (distance <= NEIGHBOUR_DISTANCE),
        (codes[:, None] == codes) if codes.min() >= 0 else unknown,
    ]
    even = np.ones(weights.shape)
    even = measures.affinity(even, np.eye(len(even)), causal=causal)
    return np.array([(w * r).sum(-1).mean() for w in (weights, even) for r in relations])


def _smoothness(layer: LayerTrace, head: int, rng: np.random.Generator) -> dict[str, float]:
    kept = layer.windows
    vectors = np.concatenate([w[head] for w in (*kept.routed_query, *kept.routed_key)])
    sample = vectors[rng.permutation(len(vectors))[:LIPSCHITZ_SAMPLES]]
    means, variances, log_priors = (t[head] for t in layer.mixture())
    radius = float(layer.radius[head])
    return {
        "lipschitz_empirical": float(
            measures.local_lipschitz(sample, means, variances, log_priors).max()
        ),
        "lipschitz_bound": measures.lipschitz_bound(radius, means, layer.module.variance_floor),
        "lipschitz_bound_learned": measures.lipschitz_bound(radius, means, float(variances.min())),
        "input_radius": radius,
        "smallest_variance": float(variances.min()),
    }


def _component_table(
    key: dict[str, Any],
    layer: LayerTrace,
    head: int,
    table: np.ndarray,
    categories: tuple[str, ...],
) -> pd.DataFrame:
    won = table.sum(-1)
    frame = pd.DataFrame(
        {
            "component": np.arange(len(table)),
            "usage": layer.mass[head].sum(0).numpy() / layer.seen,
            "prior": np.exp(layer.mixture()[2][head]),
            "tokens_won": won.astype(int),
        }
    )
    best = table.argmax(-1)
    frame["top_category"] = [
        categories[c] if w and categories else None for c, w in zip(best, won, strict=True)
    ]
    purity = np.divide(table.max(-1), won, out=np.full(len(won), np.nan), where=won > 0)
    frame["purity"] = purity if categories else np.nan
    return _keyed(key, frame)


def _contingency_table(
    key: dict[str, Any], table: np.ndarray, categories: tuple[str, ...]
) -> pd.DataFrame:
    frame = pd.DataFrame(table.astype(int), columns=list(categories or ("all",)))
    frame.insert(0, "component", np.arange(len(frame)))
    return _keyed(key, frame)


def _keyed(key: dict[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    for place, (name, value) in enumerate(key.items()):
        frame.insert(place, name, value)
    return frame


def _model_metrics(
    heads: pd.DataFrame, draws: list[dict[str, np.ndarray]], text: Text
) -> dict[str, float]:
    """Means over layers and heads; the same documents are drawn for all heads of a resample."""
    numeric = heads.drop(columns=["layer", "head", "module"])
    metrics = {str(name): float(values.mean()) for name, values in numeric.items()}
    for name, bounds in BOUNDS.items():
        together = np.mean([d[name] for d in draws], axis=0)
        metrics[f"{name}_low"], metrics[f"{name}_high"] = measures.interval(
            metrics[name], together, bounds=bounds
        )
    shuffled = np.mean([d["nmi_permuted"] for d in draws], axis=0)
    low, high = np.quantile(shuffled, [0.025, 0.975])
    metrics |= {"nmi_permuted_low": float(low), "nmi_permuted_high": float(high)}
    worst = {
        "affinity_rank_max": "max", "affinity_rank_tail": "max", "affinity_min": "min",
        "affinity_length": "max", "lipschitz_empirical": "max", "lipschitz_bound": "min",
        "lipschitz_bound_learned": "min", "input_radius": "max", "smallest_variance": "min",
    }  # fmt: skip
    metrics |= {name: float(numeric[name].agg(how)) for name, how in worst.items()}
    return metrics | {
        "components_in_use_min": float(numeric["components_in_use"].min()),
        "components_in_use_max": float(numeric["components_in_use"].max()),
        "num_tokens": float(len(text.table)),
        "num_documents": float(text.num_documents),
    }
