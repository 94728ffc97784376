"""Put what runs produced into the README, so that none of its figures is typed by hand.

    .venv/bin/python docs/update_readme.py results/mini results/experiments

Text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced: by the file NAME of the
first folder (``tables/lra.md``, ``claims.md``), and the block ``experiments`` by a row for each record
of the second. The records of both go into ``docs/reference``, where a reader finds them.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from gma_bench.report.table import escape_markdown
from gma_bench.results import read_all

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
REFERENCE = DOCS / "reference"
BLOCK = re.compile(r"(<!-- begin (?P<name>\S+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)


def main(results: Path, experiments: Path) -> None:
    """Rewrite every block of the README, and the records behind them."""

    def fill(block: re.Match[str]) -> str:
        if block["name"] == "experiments":
            return f"{block[1]}\n{experiment_table(experiments)}\n{block[3]}"
        source = results / block["name"]
        if not source.exists():
            sys.exit(f"{source} is missing; run: make reproduce")
        # Headings of a table file would break the README's own outline.
        text = re.sub(
            r"^#+ (.*)$", r"**\1**", source.read_text(encoding="utf-8").strip(), flags=re.MULTILINE
        )
        return f"{block[1]}\n{text}\n\n{block[3]}"

    README.write_text(BLOCK.sub(fill, README.read_text(encoding="utf-8")), encoding="utf-8")
    publish(results / "runs", REFERENCE / results.name / "runs")
    publish(experiments / "mini" / "runs", REFERENCE / "experiments" / "mini" / "runs")


def experiment_table(results_dir: Path) -> str:
    """A row a record: what it measured, and in how long."""
    records, broken = read_all(results_dir, "mini")
    if broken or not records:
        sys.exit(f"{results_dir} holds no records, or broken ones")
    lines = ["| task | mixer | figure | value | time (s) |", "|:--|:--|:--|--:|--:|"]
    for record in sorted(records, key=lambda r: (r["task"], r["mixer"])):
        figure = f"{record['split']} {record['metric']}"
        lines.append(
            f"| {record['task']} | {escape_markdown(record['mixer'])} | {figure} "
            f"| {record['value']:.4g} | {record['duration_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def publish(source: Path, target: Path) -> None:
    """Copy a folder of records, in place of those that were there."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
