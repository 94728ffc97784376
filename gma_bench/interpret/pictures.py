"""Pictures of components: use, categories, one text, the means, and affinity beside softmax attention."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gma_bench.interpret import measures
from gma_bench.interpret.analysis import Analysis
from gma_bench.report.style import drawing
from gma_bench.results.store import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RC: dict[str, Any] = {
    "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "axes.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 7,
    "svg.fonttype": "path", "svg.hashsalt": "gma_bench", "savefig.dpi": 160,
    "figure.facecolor": "white",
}  # fmt: skip
INK, ACCENT, FAINT, NOBODY = "#1d1f23", "#0072B2", "#9aa0a8", "#d9dbdf"
# Okabe & Ito (2008), one a category; their yellow, unseen on white, is replaced by a wine red.
CATEGORY_COLOURS = (
    "#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#882255",
)  # fmt: skip
TEXT_TOKENS, TEXT_COMPONENTS, AFFINITY_TOKENS, MOST_PANELS = 40, 40, 32, 12
ELLIPSES = 16
PLAIN = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"}


@dataclass(frozen=True)
class Picture:
    """A drawn picture: its name, what it shows in a sentence or two, its files beside the page."""

    name: str
    caption: str
    files: tuple[str, ...]
    svg: str


def draw(
    analysis: Analysis, folder: Path, *, companion: list[np.ndarray] | None = None,
    companion_about: str = "",
) -> list[Picture]:  # fmt: skip
    """Draw every picture that the analysis has data for, as SVG and PNG, into ``folder``.

    Args:
        analysis: what :func:`gma_bench.interpret.analyze` found, with texts.
        folder: where to.
        companion: softmax attention of another model on the first sequence, a layer ``(H, n, n)``.
        companion_about: what that model is, for the caption.
    """
    layer, head = _telling_head(analysis)
    jobs: list[tuple[str, Callable[[], tuple[Figure, str]]]] = [
        ("usage", lambda: _usage(analysis)),
        ("responsibilities", lambda: _responsibilities(analysis, layer, head)),
        ("means", lambda: _means(analysis, layer, head)),
        ("affinity", lambda: _affinity(analysis, layer, companion, companion_about)),
    ]
    if analysis.text.categories:
        jobs.insert(1, ("categories", lambda: _categories(analysis, layer, head)))
    drawn = []
    with drawing(RC):
        for name, job in jobs:
            figure, caption = job()
            drawn.append(_save(figure, folder, name, caption))
    return drawn


def _save(figure: Figure, folder: Path, name: str, caption: str) -> Picture:
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None}, bbox_inches="tight")
    figure.savefig(png, format="png", bbox_inches="tight")
    write_atomic(folder / f"{name}.svg", svg.getvalue())
    write_atomic(folder / f"{name}.png", png.getvalue())
    return Picture(name, caption, (f"{name}.svg", f"{name}.png"), svg.getvalue().decode())


def _new(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    # Without pyplot: no global figure list, no display, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _telling_head(analysis: Analysis) -> tuple[int, int]:
    """The layer and head whose components go with categories most (else the most evenly used)."""
    by = "ami" if analysis.text.categories else "usage_entropy"
    best = analysis.heads.iloc[int(analysis.heads[by].to_numpy().argmax())]
    return int(best["layer"]), int(best["head"])


def readable(token: str) -> str:
    """A token (as shown in running text) for a label: white space as signs, and what the plain font lacks as a dot."""
    text = "".join(PLAIN.get(c, c) for c in token).lstrip("␣") or "␣"
    text = "".join(
        c if c.isprintable() and (ord(c) < 0x250 or c in "␣↵⇥‘’“”–—…") else "·" for c in text
    )
    return text if len(text) <= 14 else text[:13] + "…"


def _usage(analysis: Analysis) -> tuple[Figure, str]:
    heads = analysis.heads.head(MOST_PANELS)
    columns = min(4, len(heads))
    rows = math.ceil(len(heads) / columns)
    figure, axes = _new(rows, columns, (1.9 * columns + 0.8, 1.6 * rows + 0.4), sharey=True)
    for axis in axes.flat[len(heads) :]:
        axis.axis("off")
    for axis, (_, figures) in zip(axes.flat, heads.iterrows(), strict=False):
        own = _of_head(analysis.components, figures["layer"], figures["head"])
        usage = np.sort(own["usage"].to_numpy())[::-1] * 100
        axis.bar(np.arange(len(usage)), usage, width=1.0, color=ACCENT, linewidth=0)
        axis.axhline(100 / len(usage), color=INK, linewidth=0.7, linestyle=(0, (4, 3)))
        axis.set_title(
            f"layer {figures['layer']}, head {figures['head']}: {figures['components_in_use']} of "
            f"{figures['num_components']}\nentropy {figures['usage_entropy']:.3f}",
            loc="left", fontsize=7,
        )  # fmt: skip
        axis.margins(x=0.01)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean responsibility, %")
    for axis in axes[-1]:
        axis.set_xlabel("component, by rank")
    more = (
        f" The first {MOST_PANELS} of {len(analysis.heads)} heads."
        if len(analysis.heads) > MOST_PANELS
        else ""
    )
    return figure, (
        "Use of components, sorted, in each layer and head; dashed, even use. Above, how many win the "
        "hard assignment of at least one token; entropy is of the mean "
        f"responsibilities, divided by log K.{more}"
    )


def _of_head(frame: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    return frame[(frame["layer"] == layer) & (frame["head"] == head)]


def _categories(analysis: Analysis, layer: int, head: int) -> tuple[Figure, str]:
    names = analysis.text.categories
    counts = _of_head(analysis.contingency, layer, head)[list(names)].to_numpy(float)
    counts = counts[counts.sum(-1) > 0]
    share = counts / counts.sum(-1, keepdims=True)
    order = np.lexsort((-share.max(-1), share.argmax(-1)))
    figure, axes = _new(2, 1, (7.0, 2.9), height_ratios=[1, 4], sharex=True)
    top, axis = axes[:, 0]
    won = counts.sum(-1)[order]
    top.bar(np.arange(len(order)), 100 * won / won.sum(), width=0.9, color=FAINT, linewidth=0)
    top.set_ylabel("tokens\nwon, %")
    image = axis.imshow(
        share[order].T, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest"
    )
    overall = counts.sum(0) / counts.sum()
    labels = [f"{name}  {100 * s:.0f} %" for name, s in zip(names, overall, strict=True)]
    axis.set_yticks(np.arange(len(names)), labels)
    axis.set_xlabel(
        f"the {len(order)} components that win a token, by the category they win most of"
    )
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, ax=axis, fraction=0.02, pad=0.01, label="share of its tokens")
    return figure, (
        f"What the components of layer {layer}, head {head} win (of all heads the one with the highest "
        "adjusted mutual information): each column is a component, colour the share of a category among "
        "the tokens it wins. Beside each name, the category's share of the text."
    )


def _responsibilities(analysis: Analysis, layer: int, head: int) -> tuple[Figure, str]:
    kept = analysis.traces[layer].windows
    gamma = (kept.query if analysis.settings.side == "query" else kept.key)[0][head][:TEXT_TOKENS]
    chosen = np.argsort(-gamma.sum(0), kind="stable")[:TEXT_COMPONENTS]
    # Components in the order in which the text first wants them: the path through the text shows.
    chosen = chosen[np.argsort(gamma[:, chosen].argmax(0), kind="stable")]
    words = _first_words(analysis, len(gamma))
    figure, axes = _new(1, 1, (6.2, 0.135 * len(gamma) + 0.9))
    axis = axes[0, 0]
    image = axis.imshow(
        gamma[:, chosen], aspect="auto", cmap="Blues", vmin=0, interpolation="nearest"
    )
    axis.set_yticks(np.arange(len(words)), words, fontsize=7, parse_math=False)
    axis.set_xticks(np.arange(len(chosen)), chosen, fontsize=5.5, rotation=90)
    axis.tick_params(length=0)
    axis.set_xlabel("component")
    figure.colorbar(image, ax=axis, fraction=0.03, pad=0.015, label="responsibility")
    held = gamma[:, chosen].sum(-1).mean()
    return figure, (
        f"Responsibilities ({analysis.settings.side} side) of layer {layer}, head {head} for the first "
        f"{len(gamma)} tokens of the text: the {len(chosen)} components with most mass in it "
        f"({100 * held:.0f} % of the mass), in the order of their peak."
    )


def _first_words(analysis: Analysis, count: int) -> list[str]:
    table = analysis.text.table
    first = table[table["sequence"] == table["sequence"].iloc[0]].head(count)
    return [readable(shown) for shown in first["shown"]]


def _means(analysis: Analysis, layer: int, head: int) -> tuple[Figure, str]:
    from matplotlib.patches import Ellipse

    trace = analysis.traces[layer]
    means, variances, _ = (part[head] for part in trace.mixture())
    kept = trace.windows
    routed = kept.routed_query if analysis.settings.side == "query" else kept.routed_key
    vectors = np.concatenate([w[head] for w in routed]).astype(float)
    center, axes_2d, explained = _plane(np.concatenate([means, vectors]))
    places, points = (means - center) @ axes_2d, (vectors - center) @ axes_2d
    own = _of_head(analysis.components, layer, head)
    seen = np.ptp(np.concatenate([places, points]), axis=0)
    figure, axes = _new(
        1, 1, (5.6, float(np.clip(4.2 * seen[1] / max(seen[0], 1e-12), 2.4, 5.0)) + 0.5)
    )
    axis: Axes = axes[0, 0]
    axis.scatter(points[:, 0], points[:, 1], s=2, color=FAINT, alpha=0.35, linewidths=0, zorder=1)
    names = analysis.text.categories
    colour_of = dict(zip(names, CATEGORY_COLOURS, strict=False))
    colours = [colour_of.get(name, NOBODY) for name in own["top_category"]]
    usage = own["usage"].to_numpy()
    axis.scatter(
        places[:, 0], places[:, 1], s=6 + 90 * usage / usage.max(), c=colours, linewidths=0.4,
        edgecolors="white", zorder=3,
    )  # fmt: skip
    most = np.argsort(-usage)[:ELLIPSES]
    covariances = [axes_2d.T @ (variances[k][:, None] * axes_2d) for k in most]
    part = _ellipse_part(covariances, places)
    for k, covariance in zip(most, covariances, strict=True):
        values, directions = np.linalg.eigh(covariance)
        width, height = 2 * part * np.sqrt(np.maximum(values[::-1], 0))
        angle = np.degrees(np.arctan2(directions[1, 1], directions[0, 1]))
        axis.add_patch(
            Ellipse(
                places[k],
                width,
                height,
                angle=angle,
                fill=False,
                edgecolor=colours[k],
                linewidth=0.9,
                zorder=2,
            )
        )
    for name in names:
        if (own["top_category"] == name).any():
            axis.scatter([], [], s=22, color=colour_of[name], label=name)
    if own["top_category"].isna().any():
        axis.scatter([], [], s=22, color=NOBODY, label="wins no token")
    axis.scatter([], [], s=6, color=FAINT, label="routing vectors of the text")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handletextpad=0.2)
    axis.set_aspect("equal")
    axis.set_xlabel(f"first principal direction, {100 * explained[0]:.0f} % of the variance")
    axis.set_ylabel(f"second, {100 * explained[1]:.0f} %")
    return figure, (
        f"Means of layer {layer}, head {head}, projected to the two principal directions of means and "
        f"{analysis.settings.side} routing vectors; the size is use, the colour the category won most. "
        f"Ellipses: the projected variance of the {len(most)} most used, at {_fraction(part)} standard "
        f"deviation{'' if part == 1 else ' (whole ones would cover the picture)'}."
    )


def _plane(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centre, two principal directions ``(d, 2)``, and the share of variance along each."""
    center = points.mean(0)
    _, values, directions = np.linalg.svd(points - center, full_matrices=False)
    values, directions = (
        np.append(values, 0.0),
        np.concatenate([directions, np.zeros((1, points.shape[1]))]),
    )
    return center, directions[:2].T, values[:2] ** 2 / max((values**2).sum(), 1e-30)


def _ellipse_part(covariances: list[np.ndarray], places: np.ndarray) -> float:
    """The share of a standard deviation at which ellipses are a tenth of the picture or less."""
    widest = np.median([np.sqrt(max(np.linalg.eigvalsh(c)[-1], 0.0)) for c in covariances])
    room = 0.06 * max(float(np.ptp(places, axis=0).max()), 1e-12)
    return next((p for p in (1.0, 1 / 2, 1 / 4, 1 / 8) if p * widest <= room), 1 / 16)


def _fraction(part: float) -> str:
    return {1.0: "one", 0.5: "half a", 0.25: "a quarter of a", 0.125: "an eighth of a"}.get(
        part, "1/16 of a"
    )


def _affinity(
    analysis: Analysis, layer: int, companion: list[np.ndarray] | None, about: str
) -> tuple[Figure, str]:
    trace = analysis.traces[layer]
    query, key = (
        w[0][:, :AFFINITY_TOKENS].astype(float) for w in (trace.windows.query, trace.windows.key)
    )
    mine = measures.affinity(query, key, causal=trace.module.causal).mean(0)
    panels = [("GMA", mine)]
    if companion is not None:
        other = companion[min(layer, len(companion) - 1)]
        panels.append(("softmax attention (SDPA)", other.mean(0)[: len(mine), : len(mine)]))
    words = _first_words(analysis, len(mine))
    figure, axes = _new(1, len(panels), (3.7 * len(panels) + 0.6, 3.9))
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=1)  # rows sum to one, and the first of a causal row is one
    for axis, (title, weights) in zip(axes[0], panels, strict=True):
        image = axis.imshow(weights, cmap="Blues", norm=norm, interpolation="nearest")
        axis.set_title(title, loc="left")
        axis.set_yticks(np.arange(len(words)), words, fontsize=5.5, parse_math=False)
        axis.set_xticks(np.arange(len(words)), words, fontsize=5.5, rotation=90, parse_math=False)
        axis.tick_params(length=0, pad=1.5)
        axis.set_xlabel("is read")
    axes[0, 0].set_ylabel("reads")
    figure.colorbar(image, ax=axes[0, -1], fraction=0.045, pad=0.02, label="weight (root scale)")
    beside = (
        f" Beside it, softmax attention of the same layer: {about}."
        if companion is not None
        else ""
    )
    return figure, (
        f"Affinity of the first {len(mine)} tokens in layer {layer}, rows scaled to sum one"
        f"{' over what is not later' if trace.module.causal else ''}, mean over heads.{beside}"
    )
