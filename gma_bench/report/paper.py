"""What the paper reports: figures, labels and claims, read from ``results/paper.yaml``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gma_bench.errors import UserError
from gma_bench.results import read_bounded
from gma_bench.results.validate import implausible

ROOT = Path(__file__).resolve().parents[2]
PLACES = (ROOT / "gma_bench" / "paper" / "paper.yaml", ROOT / "results" / "paper.yaml")
DEFAULT = next((file for file in PLACES if file.exists()), PLACES[-1])
"""In an installed package, or in a checkout."""


@dataclass(frozen=True)
class Paper:
    """The content of ``paper.yaml``.

    Attributes:
        source: title, authors, arXiv number.
        scale: the scale whose records are the paper's size.
        labels: names in records to names in tables.
        settings: task to its mixers, in the order of the tables.
        absent: task to mixers that have no cell there, each with the reason.
        figures: ``task, mixer, split, metric, value``, each with an optional ``setting``.
        rules: parameters shared by all claims.
        claims: declarative tests, see :mod:`gma_bench.report.claims`.
    """

    source: dict[str, Any] = field(default_factory=dict)
    scale: str = "paper"
    labels: dict[str, str] = field(default_factory=dict)
    settings: dict[str, list[str]] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    rules: dict[str, Any] = field(default_factory=dict)
    claims: list[dict[str, Any]] = field(default_factory=list)

    def label(self, name: str) -> str:
        """The name that tables show."""
        return self.labels.get(name, name)

    def figure(self, task: str, mixer: str, split: str, metric: str) -> float | None:
        """The paper's value, or None where it is not known as a number."""
        wanted = (task, mixer, split, metric)
        for figure in self.figures:
            if tuple(figure[key] for key in ("task", "mixer", "split", "metric")) == wanted:
                return float(figure["value"])
        return None

    def ordered(self, task: str, present: set[str]) -> list[str]:
        """The paper's mixers of a task that have records or should, then those it does not know."""
        known = self.settings.get(task, [])
        return [*known, *sorted(present - set(known))]


def _wrong_kind(content: Any) -> str | None:
    """A part of the file that is no list or mapping where one belongs."""
    if not isinstance(content, dict):
        return "not a mapping"
    for name, part in vars(Paper()).items():
        if not isinstance(content.get(name, part), type(part)):
            return f"{name} must be a {type(part).__name__}"
        if isinstance(part, list) and not all(isinstance(i, dict) for i in content.get(name, part)):
            return f"{name} must be a list of mappings"
    return None


def read_paper(results_dir: Path) -> Paper:
    """``<results_dir>/paper.yaml``, or the repository's own where there is none.

    Raises:
        UserError: the file is missing or not what it should be.
    """
    path = results_dir / "paper.yaml"
    if not path.is_file():
        path = DEFAULT
    try:
        content = yaml.safe_load(read_bounded(path))
        if wrong := implausible(content) or _wrong_kind(content):
            raise ValueError(wrong)
        return Paper(**content)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read the paper's figures: {path}: {reason}") from error
