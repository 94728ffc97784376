"""How figures look: one colour, marker and place in the legend per mixer, everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

# Okabe & Ito, "Color Universal Design" (2008): told apart with every common colour blindness.
# Their yellow is left out: on white paper a thin line in it cannot be seen.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"

KNOWN: dict[str, tuple[str, str]] = {
    "gma": (VERMILION, "o"),
    "sdpa": (BLACK, "s"),
    "mha": ("#7F7F7F", "D"),
    "linear_transformer": (BLUE, "^"),
    "performer": (GREEN, "v"),
    "linformer": (PURPLE, "P"),
    "mamba": (ORANGE, "X"),
}
"""Colour and marker of the paper's mixers, in the order of every legend."""

FURTHER_COLOURS = (SKY, "#882255", "#44AA99", "#999933", "#332288", "#AA4499")
FURTHER_MARKERS = ("*", "<", ">", "p", "h", "d")

COLUMN_INCHES = 3.3
"""Width of a column of a two-column paper."""

RC: dict[str, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "legend.fontsize": 6.4,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.6,
    "legend.frameon": False,
    "legend.handlelength": 1.7,
    "legend.labelspacing": 0.25,
    "legend.columnspacing": 0.9,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "svg.hashsalt": "gma_bench",  # the same figure gives the same file
    "pdf.fonttype": 42,
    "savefig.dpi": 300,
}


@contextmanager
def drawing(settings: dict[str, Any]) -> Iterator[None]:
    """Matplotlib with these settings over its own defaults while the body runs.

    A user's ``matplotlibrc`` and styles have no say: the same records give the same figures.
    """
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        cast(Any, mpl.rcParams).update(settings)
        yield


@dataclass(frozen=True)
class Look:
    """Colour and marker of a mixer's line, and its place in legends."""

    colour: str
    marker: str
    order: int


def looks(mixers: Iterable[str]) -> dict[str, Look]:
    """The look of each mixer, in legend order: the paper's first, then others by name.

    A mixer that is not the paper's gets the next free colour and marker; with more than there are,
    they are combined anew, so that no two among the first 36 look alike.
    """
    names = set(mixers)
    found = {
        name: Look(*KNOWN[name], order) for order, name in enumerate(n for n in KNOWN if n in names)
    }
    size = len(FURTHER_COLOURS)
    others = sorted(names - set(KNOWN))
    for place, name in zip(itertools.count(), others, strict=False):
        colour = FURTHER_COLOURS[place % size]
        marker = FURTHER_MARKERS[(place + place // size) % size]
        found[name] = Look(colour, marker, len(KNOWN) + place)
    return found
