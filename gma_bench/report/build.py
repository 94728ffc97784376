"""The report's order of work: read, tabulate, judge, draw, print."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from gma_bench.errors import UserError
from gma_bench.report import claims, profile_tables
from gma_bench.report import tables as tables_module
from gma_bench.report.against import compare, read_other
from gma_bench.report.page import page
from gma_bench.report.paper import Paper, read_paper
from gma_bench.report.table import Table, latex, markdown, terminal, to_csv
from gma_bench.results import read_all
from gma_bench.results.store import write_atomic

if TYPE_CHECKING:
    from rich.console import Console


def build(results_dir: Path, scale: str, against: Path | None, console: Console) -> list[Path]:
    """See :func:`gma_bench.report.report`."""
    records, broken = read_all(results_dir, scale)
    if not records:
        damaged = f" but {len(broken)} damaged ones ({broken[0]})" if broken else ""
        raise UserError(
            f"no records in {results_dir / scale / 'runs'}{damaged}. "
            f"Try: gma-bench reproduce scale={scale} results_dir={results_dir}"
        )
    folder = results_dir / scale
    results = tables_module.Results(scale, records, broken, read_paper(results_dir))
    tables = all_tables(results)
    verdicts = claims.judge_all(results)
    if against is not None:
        tables += compare(results, read_other(against, results), str(against))
    written = write_tables(folder, tables)
    written += write_verdicts(folder, verdicts, results)
    figures = draw(records, folder, results.paper)
    text = page(results, tables, verdicts, folder, figures)
    written += [*figures, write_atomic(folder / "index.html", text)]
    print_tables(console, [t for t in tables if t.id not in FILES_ONLY], broken)
    console.print(verdict_table(verdicts, results))
    return written


FILES_ONLY = ("against_metrics",)
"""Tables too long for a terminal."""


def draw(records: list[dict[str, Any]], folder: Path, paper: Paper) -> list[Path]:
    """The scaling figures, drawn again only when what they are drawn from has changed."""
    stamp, inputs = folder / "figures" / ".inputs.json", digest(records, paper)
    try:
        known = json.loads(stamp.read_text(encoding="utf-8"))
        files = [folder / "figures" / name for name in known["files"]]
        if known["inputs"] == inputs and all(file.is_file() for file in files):
            return files
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never drawn, or not by this version
    from gma_bench.report.curves import draw_all

    drawn = draw_all(records, folder / "figures", paper)
    names = [path.relative_to(folder / "figures").as_posix() for path in drawn]
    write_atomic(stamp, json.dumps({"inputs": inputs, "files": names}) + "\n")
    return drawn


def digest(records: list[dict[str, Any]], paper: Paper) -> str:
    """Of all that figures can depend on: records, the paper's file, and the code of the report."""
    found = hashlib.sha256(json.dumps([records, asdict(paper)], sort_keys=True).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        found.update(source.read_bytes())
    return found.hexdigest()


def all_tables(results: tables_module.Results) -> list[Table]:
    """The paper's settings in its order, then what the paper does not have."""
    return [
        *tables_module.build(results), *profile_tables.memory(results),
        *profile_tables.throughput(results), *profile_tables.interpretability(results),
        *profile_tables.other_profiles(results),
    ]  # fmt: skip


def write_tables(folder: Path, tables: list[Table]) -> list[Path]:
    """Each table as Markdown, CSV and LaTeX under ``<folder>/tables``."""
    forms = {".md": markdown, ".csv": to_csv, ".tex": latex}
    return [
        write_atomic(folder / "tables" / f"{table.id}{suffix}", form(table))
        for table in tables
        for suffix, form in forms.items()
    ]


def write_verdicts(
    folder: Path, verdicts: list[claims.Verdict], results: tables_module.Results
) -> list[Path]:
    """``claims.json`` and ``claims.md``."""
    content = {"scale": results.scale, "verdicts": [v.as_dict() for v in verdicts]}
    text = json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"
    return [
        write_atomic(folder / "claims.json", text),
        write_atomic(folder / "claims.md", claims.markdown(verdicts, _scale_sentence(results))),
    ]


def _scale_sentence(results: tables_module.Results) -> str:
    return results.caption([])


COLOURS = {"reproduced": "green", "contradicted": "red", "inconclusive": "yellow", "not run": "dim"}


def verdict_table(verdicts: list[claims.Verdict], results: tables_module.Results) -> RichTable:
    """The verdicts for a terminal."""
    out = RichTable(
        title=Text("Claims of the paper", style="bold"), title_justify="left",
        caption=Text(_scale_sentence(results), style="dim"), caption_justify="left",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    out.add_column("claim")
    out.add_column("verdict", no_wrap=True)
    out.add_column("effect, 95 % interval")
    for verdict in verdicts:
        effects = Text("\n".join(effect.shown for effect in verdict.effects))
        shown = Text(verdict.outcome, style=COLOURS[verdict.outcome])
        out.add_row(Text(verdict.id), shown, effects)
    return out


def print_tables(console: Console, tables: list[Table], broken: list[str]) -> None:
    """Print the tables, and below them the records that could not be read."""
    for table in tables:
        console.print(terminal(table))
        console.print()
    for message in broken:
        console.print(Text(f"record left out: {message}", style="red"))
