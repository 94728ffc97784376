"""Colours of the page, light and dark; a test holds them to WCAG AA."""

from __future__ import annotations

LIGHT = {
    "paper": "#fdfcf9", "sheet": "#f4f2ec", "ink": "#1d1f23", "faint": "#5b6068",
    "rule": "#cfcabd", "link": "#1f4e8c", "good": "#1d6b3a", "bad": "#a3261c", "open": "#7a5200",
}  # fmt: skip
DARK = {
    "paper": "#16181c", "sheet": "#1f2227", "ink": "#e8e6e1", "faint": "#a4a8af",
    "rule": "#3b4048", "link": "#8fbcf5", "good": "#7fd09a", "bad": "#f39a8f", "open": "#e2bb6a",
}  # fmt: skip
# In the order of `style.KNOWN`, in its hues: GMA, SDPA, MHA, Linear Transformer, Performer,
# Linformer, Mamba; the last for others.
SERIES_LIGHT = (
    "#b8400a", "#24272c", "#6b7079", "#1f5fa8", "#0b7358", "#8a3f8f", "#8a5a00", "#a3215c",
)  # fmt: skip
SERIES_DARK = (
    "#ff8f5c", "#eceae5", "#9aa0a8", "#79b0f2", "#52c9a3", "#d9a0dd", "#e3b04f", "#f08bb5",
)  # fmt: skip
TEXT = ("ink", "faint", "link", "good", "bad", "open")


def css(colours: dict[str, str], series: tuple[str, ...]) -> str:
    """Custom properties: ``--ink: #1d1f23; … --s0: #b4310f; …``."""
    lines = [f"--{name}: {value};" for name, value in colours.items()]
    lines += [f"--s{i}: {value};" for i, value in enumerate(series)]
    return " ".join(lines)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two colours ``#rrggbb``, from 1 to 21."""
    brighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
