"""From records to tables, verdicts, figures and a page. Reads records; never runs anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["report"]


def report(
    results_dir: Path, scale: str, *, against: Path | None = None, console: Console
) -> list[Path]:
    """Print the tables of a scale and write all that is drawn from its records beside them.

    Args:
        results_dir: the results folder; records lie in ``<results_dir>/<scale>/runs``.
        scale: which scale.
        against: another results folder to compare with.
        console: where the tables are printed.

    Returns:
        The files written, under ``<results_dir>/<scale>``.

    Raises:
        UserError: there are no records, or a file cannot be written.
    """
    from gma_bench.report.build import build

    return build(Path(results_dir), scale, against, console)
