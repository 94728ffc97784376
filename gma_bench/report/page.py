"""The page: one file without dependencies, built from tables, verdicts, curves and records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from gma_bench.report import charts, palette
from gma_bench.report.claims import Effect, Verdict
from gma_bench.report.groups import Record
from gma_bench.report.table import Table
from gma_bench.report.tables import Results

TEMPLATES = Path(__file__).parent / "templates"
SYMBOLS = {"reproduced": "✓", "contradicted": "✕", "inconclusive": "≈", "not run": "○"}
TONES = {"reproduced": "good", "contradicted": "bad", "inconclusive": "open", "not run": "faint"}


def page(
    results: Results, tables: list[Table], verdicts: list[Verdict], folder: Path,
    figures: list[Path],
) -> str:  # fmt: skip
    """The page's HTML.

    Args:
        results: the records.
        tables, verdicts: what was made of them.
        folder: where the page will lie; links are relative to it.
        figures: files drawn beside it.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    # Written here, not by anybody else: these are the only texts that go in unescaped.
    style, script = (
        Markup((TEMPLATES / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js")
    )
    learning = [
        (results.paper.label(task), [charts.drawn(chart) for chart in found])
        for task, found in charts.learning(results)
    ]
    return environment.get_template("index.html.j2").render(
        results=results,
        source=results.paper.source,
        label=results.paper.label,
        counts=Counter(v.outcome for v in verdicts),
        outcomes=list(SYMBOLS),
        symbols=SYMBOLS,
        tones=TONES,
        verdicts=[(v, [(e, _glyph(e)) for e in v.effects]) for v in verdicts],
        tables=tables,
        scaling=[charts.drawn(chart) for chart in charts.scaling(results)],
        learning=learning,
        runs=[_run(results, r) for r in results.records],
        code=_commits(results.records),
        machines=_machines(results.records),
        links=_links(folder, figures),
        interpretations=_interpretations(folder),
        light=palette.css(palette.LIGHT, palette.SERIES_LIGHT),
        dark=palette.css(palette.DARK, palette.SERIES_DARK),
        style=style,
        script=script,
    )


def _glyph(effect: Effect) -> charts.Glyph | None:
    if effect.interval is None or effect.borders is None:
        return None
    i = effect.interval
    return charts.glyph(i.estimate, i.low, i.high, effect.borders)


def _run(results: Results, record: Record) -> dict[str, Any]:
    """What stands behind a figure: enough to make it again and to tell why it may differ."""
    git, machine, data = record["git"], record["machine"], record["data"]
    error = record.get("error") or {}
    commit = str(git.get("commit") or "unknown")
    facts = {
        "commit": commit + (" (with uncommitted changes)" if git.get("dirty") else ""),
        "data": f"{data.get('name', 'unknown')}, {data.get('source', 'source unknown')}",
        "data fingerprint": data.get("fingerprint") or "none",
        "machine": ", ".join(
            f"{key} {value}" for key, value in machine.items() if not isinstance(value, dict | list)
        ),
        "versions": ", ".join(f"{name} {value}" for name, value in record["versions"].items()),
        "config": record["config_hash"],
        "took": f"{record['duration_s']:,.1f} s, finished {record.get('finished_at') or 'unknown'}",
        "record": f"runs/{record['run_id']}.json",
    }
    if error:
        step = f" at step {error['step']}" if error.get("step") is not None else ""
        facts["error"] = f"{error.get('type')}: {error.get('message')}{step}"
    value = record.get("value")
    shown = (
        "no single figure" if value is None else f"{record['split']} {record['metric']} {value:.6g}"
    )
    return {
        "id": record["run_id"], "status": record["status"], "command": record["command"],
        "task": results.paper.label(record["task"]), "mixer": results.paper.label(record["mixer"]),
        "seed": record["seed"], "shown": shown, "facts": facts,
    }  # fmt: skip


def _commits(records: list[Record]) -> list[str]:
    found = Counter(
        str(r["git"].get("commit") or "unknown")[:12] + ("+" if r["git"].get("dirty") else "")
        for r in records
    )
    return [commit for commit, _ in found.most_common()]


def _machines(records: list[Record]) -> list[str]:
    found = Counter(f"{r['machine'].get('host')} ({r['machine'].get('device')})" for r in records)
    return [machine for machine, _ in found.most_common()]


def _interpretations(folder: Path) -> list[tuple[str, str]]:
    """The interpretability pages beside this one: a name and a relative address each."""
    pages = [path.relative_to(folder) for path in sorted(folder.rglob("interpret*.html"))]
    # The page of a run lies in the run's own folder; that is what tells them apart.
    return [(path.parent.name or path.stem, quote(path.as_posix())) for path in pages]


def _links(folder: Path, figures: list[Path]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The figures beside the page: a name with its forms, each a word and a relative address."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in figures:
        if path.is_relative_to(folder):
            address = quote(path.relative_to(folder).as_posix())
            name = path.stem.replace("_", " ")
            found.setdefault(name, []).append((path.suffix.lstrip("."), address))
    return list(found.items())
