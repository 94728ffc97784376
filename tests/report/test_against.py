"""Two sets of records side by side."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gma_bench.errors import UserError
from gma_bench.report import report
from gma_bench.report.against import compare, read_other
from gma_bench.report.paper import DEFAULT, read_paper
from gma_bench.report.tables import Results

PAPER = read_paper(DEFAULT.parent)


def results(records):
    return Results("mini", records, [], PAPER)


def line(table, name):
    return next(row for row in table.rows if row.name == name)


def test_differences_are_paired_and_have_intervals(synthetic):
    old = [synthetic(seed=s, value=0.3 + 0.1 * s) for s in range(3)]
    new = [synthetic(seed=s, value=0.3 + 0.1 * s + 0.01 + s * 1e-4) for s in range(3)]
    table = compare(results(new), results(old), "old")[0]
    row = line(table, "ListOps, GMA: test accuracy")
    before, after, gap, change, pairs = row.cells
    assert before.value == pytest.approx(0.4)
    assert after.value == pytest.approx(0.4101)
    assert gap.value == pytest.approx(0.0101)
    # t(0.975, 2) · 1e-4 / √3 = 0.000248: the spread of seeds cancels
    assert gap.suffix == " [0.0099, 0.0103]"
    assert change.value == pytest.approx(2.525)
    assert pairs.value == 3


def test_equal_sets_say_so(make_grid):
    tables = compare(results(make_grid()), results(make_grid()), "old")
    assert {row.cells[2].suffix for t in tables for row in t.rows} == {" (same to the last digit)"}
    assert tables[0].footnotes == []


def test_new_missing_and_changed_cells_are_named(synthetic):
    old = [synthetic("listops", "gma", 0), synthetic("listops", "sdpa", 0)]
    new = [
        synthetic("listops", "gma", s, settings={"training": {"lr": 0.1}},
                  git={"commit": "f" * 40, "dirty": True}) for s in range(2)
    ]  # fmt: skip
    new.append(synthetic("text", "gma", 0))
    table = compare(results(new), results(old), "old")[0]
    notes = " ".join(table.footnotes)
    assert "ListOps, SDPA: only in old." in notes
    assert "Text, GMA: only here." in notes
    assert "training.lr: 0.001 → 0.1" in notes
    assert "seed 1 finished only here" in notes
    assert "ffffffffff+" in table.caption
    assert "0123456789" in table.caption


def test_verdicts_that_changed_are_named(make_grid, synthetic):
    worse = [
        r | {"value": 90.0, "metrics": {"val": {"perplexity": 90.0 + r["seed"]}}}
        if (r["task"], r["mixer"]) == ("wikitext103", "gma") else r
        for r in make_grid()
    ]  # fmt: skip
    notes = compare(results(worse), results(make_grid()), "old")[0].footnotes
    assert "Claim lm-beats-linear: reproduced → contradicted." in notes


def test_from_the_entry_point(tmp_path, make_grid, write_records):
    """Either a results folder or a scale's folder in it may be named."""
    here = write_records(tmp_path / "here", make_grid())
    there = write_records(tmp_path / "there", make_grid())
    for against in (there, there / "mini"):
        console = Console(file=io.StringIO(), width=200, record=True)
        written = report(here, "mini", against=against, console=console)
        assert here / "mini" / "tables" / "against.md" in written
        assert "What changed" in console.export_text()


def test_a_folder_without_records_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="no records of scale mini"):
        read_other(tmp_path, results([]))
