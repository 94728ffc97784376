"""The report's order of work: read, tabulate, judge, draw, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from gma_bench.errors import UserError
from gma_bench.report import tables as tables_module
from gma_bench.report.paper import read_paper
from gma_bench.report.table import Table, latex, markdown, terminal, to_csv
from gma_bench.results import read_all
from gma_bench.store import write_atomic

if TYPE_CHECKING:
    from rich.console import Console


def build(results_dir: Path, scale: str, against: Path | None, console: Console) -> list[Path]:
    """See :func:`gma_bench.report.report`."""
    records, broken = read_all(results_dir, scale)
    if not records and not broken:
        raise UserError(
            f"no records in {results_dir / scale / 'runs'}. "
            f"Try: gma-bench reproduce scale={scale} results_dir={results_dir}"
        )
    folder = results_dir / scale
    results = tables_module.Results(scale, records, broken, read_paper(results_dir))
    tables = tables_module.build(results)
    written = write_tables(folder, tables)
    print_tables(console, tables, broken)
    return written


def write_tables(folder: Path, tables: list[Table]) -> list[Path]:
    """Each table as Markdown, CSV and LaTeX under ``<folder>/tables``."""
    forms = {".md": markdown, ".csv": to_csv, ".tex": latex}
    return [
        write_atomic(folder / "tables" / f"{table.id}{suffix}", form(table))
        for table in tables
        for suffix, form in forms.items()
    ]


def print_tables(console: Console, tables: list[Table], broken: list[str]) -> None:
    """Print the tables, and below them the records that could not be read."""
    for table in tables:
        console.print(terminal(table))
        console.print()
    for message in broken:
        console.print(Text(f"record left out: {message}", style="red"))
