"""The page on components: one file, no network, that shows any component and any token."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from gma_bench.interpret.analysis import NEIGHBOUR_DISTANCE, Analysis
from gma_bench.interpret.pictures import Picture
from gma_bench.report import palette
from gma_bench.report.paper import read_paper
from gma_bench.results.store import write_atomic

NAME = "interpretability.html"
TEMPLATES = Path(__file__).parent / "templates"
PAGE_TOKENS = 2048
"""Tokens of the text that the page holds; the figures are of all that were read."""
PROBABILITY_STEPS = 65535
SHADE_PERCENT = 45
"""Of colour, at most, behind a token; more would cost the contrast of its text."""

FIGURES = (
    ("components_in_use", "components that win a token", 1, ""),
    ("components_above_tenth", "components with a mean responsibility above 1/(10 K)", 1, ""),
    ("num_components", "components, K", 0, ""),
    ("usage_entropy", "usage entropy, divided by log K", 3, ""),
    ("effective_components", "effective number of components", 1, ""),
    ("nmi", "NMI with token categories", 3, ""),
    ("nmi_permuted", "… with categories shuffled (chance)", 3, ""),
    ("ami", "adjusted mutual information", 3, ""),
    ("ami_permuted", "… with categories shuffled", 3, ""),
    ("posterior_entropy", "entropy of a token’s posterior, divided by log K", 3, ""),
    ("query_key_overlap", "overlap of query and key posteriors", 3, ""),
    ("affinity_same_token", "affinity on the same token", 3, "affinity_same_token_uniform"),
    ("affinity_neighbours", "affinity on neighbours", 3, "affinity_neighbours_uniform"),
    (
        "affinity_same_category",
        "affinity on the same category",
        3,
        "affinity_same_category_uniform",
    ),
    ("affinity_rank_max", "largest rank of the implied affinity", 0, ""),
    ("affinity_min", "smallest entry of the implied affinity", 6, ""),
    ("gradient_norm_initial", "gradient norm through routing, first step", 4, ""),
    ("gradient_norm_max", "… largest of all steps", 4, ""),
    ("gradient_norm_other_max", "… largest through everything else", 4, ""),
    ("lipschitz_empirical", "largest local Lipschitz constant found", 4, ""),
    ("lipschitz_bound", "… its bound from variance floor and radius", 0, ""),
)
"""Metric, what it is called, digits, and the metric that says what even attention would give."""

HEAD_COLUMNS = (
    ("components_in_use", "in use", 0), ("usage_entropy", "usage entropy", 3),
    ("effective_components", "effective", 1), ("nmi", "NMI", 3), ("nmi_permuted", "chance", 3),
    ("ami", "AMI", 3), ("posterior_entropy", "posterior entropy", 3),
    ("query_key_overlap", "query–key overlap", 3), ("affinity_rank_max", "rank", 0),
    ("lipschitz_empirical", "Lipschitz", 4),
)  # fmt: skip


@dataclass(frozen=True)
class Values:
    """What the page says about the run besides the analysis."""

    run: str
    scale: str
    mixer: str
    data: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    results_dir: Path = Path("results")


def write(path: Path, analysis: Analysis, values: Values, pictures: list[Picture]) -> Path:
    """Write the page; see :func:`render`."""
    return write_atomic(path, render(analysis, values, pictures))


def render(analysis: Analysis, values: Values, pictures: list[Picture]) -> str:
    """The page's HTML. Everything that comes from data is escaped, or text of DOM nodes.

    Args:
        analysis: what :func:`gma_bench.interpret.analyze` found.
        values: the run.
        pictures: drawn ones; their SVG is put into the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    # Written here, not by anybody else: these are the only texts that go in unescaped.
    style, script = (
        Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js")
    )
    paper = read_paper(values.results_dir)
    return environment.get_template("interpretability.html.j2").render(
        values=values,
        below_paper=values.scale != paper.scale,
        analysis=analysis,
        neighbour_distance=NEIGHBOUR_DISTANCE,
        figures=_figures(values.metrics or analysis.metrics, paper),
        heads=_head_rows(analysis),
        head_columns=[name for _, name, _ in HEAD_COLUMNS],
        pictures=[(p.name, p.caption, _data_uri(p.svg)) for p in pictures],
        payload=payload(analysis),
        style=style, script=script,
        light=palette.css(palette.LIGHT, palette.SERIES_LIGHT),
        dark=palette.css(palette.DARK, palette.SERIES_DARK),
    )  # fmt: skip


def _figures(metrics: dict[str, float], paper: Any) -> list[dict[str, str]]:
    rows = []
    for metric, name, digits, even in FIGURES:
        value = metrics.get(metric)
        if value is None or not np.isfinite(value):
            continue
        low, high = (metrics.get(f"{metric}_{side}") for side in ("low", "high"))
        known = paper.figure("interpretability", "gma", "val", metric)
        rows.append(
            {
                "name": name,
                "value": number(value, digits),
                "interval": (
                    f"{number(low, digits)} – {number(high, digits)}"
                    if low is not None and high is not None and np.isfinite([low, high]).all() else ""
                ),
                "even": number(metrics[even], digits) if even else "",
                "paper": "" if known is None else f"{known:g}",
            }
        )  # fmt: skip
    return rows


def number(value: float, digits: int) -> str:
    """``value`` with so many decimals, in significant figures where they would show nothing."""
    if value and abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}".replace("e-0", "e−").replace("e-", "e−")
    return f"{value:.{digits}f}".replace("-", "−")


def _head_rows(analysis: Analysis) -> list[list[str]]:
    return [
        [f"{row['layer']}", f"{row['head']}"]
        + [number(row[c], d) if np.isfinite(row[c]) else "–" for c, _, d in HEAD_COLUMNS]
        for row in analysis.heads.to_dict("records")
    ]


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def payload(analysis: Analysis) -> dict[str, Any]:
    """What the script reads: the text, and of each head its components and each token's leading ones.

    Component numbers are 16-bit, responsibilities 16-bit fractions of one, both little-endian and in
    base64, ``n · top`` of each.
    """
    table = analysis.text.table
    count = min(PAGE_TOKENS, analysis.settings.detail_tokens, len(table))
    table = table.head(count)
    words, index = np.unique(table["shown"].to_numpy(dtype=str), return_inverse=True)
    documents = table["document"].to_numpy()
    return {
        "shade": SHADE_PERCENT,
        "words": words.tolist(),
        "text": index.tolist(),
        "category": table["category"].tolist(),
        "categories": list(analysis.text.categories),
        "starts": (1 + np.flatnonzero(documents[1:] != documents[:-1])).tolist(),
        "layers": [_layer(analysis, number_, count) for number_ in range(len(analysis.traces))],
    }


def _layer(analysis: Analysis, layer: int, count: int) -> dict[str, Any]:
    trace = analysis.traces[layer]
    components, responsibilities = trace.leading
    steps = np.round(responsibilities[:, :count] * PROBABILITY_STEPS)
    return {
        "name": trace.name, "top": trace.top, "K": trace.num_components,
        "heads": [
            {
                "components": _packed(components[head, :count]),
                "responsibilities": _packed(steps[head]),
                **_head(analysis, layer, head),
            }
            for head in range(trace.num_heads)
        ],
    }  # fmt: skip


def _head(analysis: Analysis, layer: int, head: int) -> dict[str, Any]:
    frame = analysis.components
    own = frame[(frame["layer"] == layer) & (frame["head"] == head)]
    counts = analysis.contingency
    counts = counts[(counts["layer"] == layer) & (counts["head"] == head)]
    names = list(analysis.text.categories)
    return {
        "usage": [round(u, 6) for u in own["usage"].tolist()],
        "prior": [round(p, 6) for p in own["prior"].tolist()],
        "won": own["tokens_won"].tolist(),
        "counts": counts[names].to_numpy().tolist() if names else [],
    }


def _packed(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype="<u2").tobytes()).decode()
