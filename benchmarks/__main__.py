"""Run the benchmarks, print their tables, keep their rows as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gma_bench.results.store import write_atomic
from gma_bench.run import provenance

NAMES = ("gma", "mixers", "listops", "loading", "harness")


def table(name: str, rows: list[dict[str, object]]) -> Table:
    """Rows under the union of their columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    drawn = Table(title=name, title_justify="left")
    for column in columns:
        drawn.add_column(column, justify="left" if column in ("benchmark", "mixer") else "right")
    for row in rows:
        drawn.add_row(*(_cell(row.get(column)) for column in columns))
    return drawn


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure one benchmark after another."""
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    options.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; all of them by default"
    )
    options.add_argument("--out", type=Path, default=Path("results/bench.json"))
    chosen = options.parse_args()
    if unknown := set(chosen.names) - set(NAMES):
        options.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    console = Console()
    measured: dict[str, list[dict[str, object]]] = {}
    for name in chosen.names or NAMES:
        with console.status(f"measuring {name} …"):
            measured[name] = list(importlib.import_module(f"benchmarks.{name}").rows())
        console.print(table(name, measured[name]))
    record = {
        "machine": provenance.machine(), "versions": provenance.versions(), "git": provenance.git(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"), "rows": measured,
    }  # fmt: skip
    write_atomic(chosen.out, json.dumps(record, indent=1, default=str))
    console.print(f"rows: {chosen.out}")


if __name__ == "__main__":
    main()
