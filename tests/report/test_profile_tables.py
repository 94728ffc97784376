"""Tables and curves of profiling cells."""

from __future__ import annotations

import math

import pytest

from gma_bench.report import charts
from gma_bench.report.build import all_tables
from gma_bench.report.paper import DEFAULT, read_paper
from gma_bench.report.tables import Results

PAPER = read_paper(DEFAULT.parent)


def results(records):
    return Results("mini", records, [], PAPER)


def table(records, table_id):
    return next(t for t in all_tables(results(records)) if t.id == table_id)


def row(found, name):
    return next(r for r in found.rows if r.name == name)


def test_memory_has_bytes_by_length_and_the_exponent(make_profiling):
    found = table(make_profiling(), "memory_layer")
    heads = [c.key for c in found.columns]
    assert heads[0] == "peak_mib_n256"
    assert heads[-2:] == ["peak_mib_n1048576", "exponent_of_n"]
    assert row(found, "GMA").cells[-1].value == pytest.approx(1.0, abs=0.01)
    assert row(found, "MHA (explicit)").cells[-1].value == pytest.approx(2.0, abs=0.01)
    # 4 bytes · 256 · (384 + 32 · 3) in MiB
    assert row(found, "GMA").cells[0].value == pytest.approx(4 * 256 * 480 / 2**20)


def test_lengths_that_did_not_fit_are_marked(make_profiling):
    records = [r for r in make_profiling(["mha"]) if r["task"] == "memory"]
    for record in records:  # as on a machine where nothing can be simulated
        record["rows"] = [r for r in record["rows"] if r["method"] == "measured"]
    records += [r for r in make_profiling(["gma"]) if r["task"] == "memory"]
    found = table(records, "memory_layer")
    last = row(found, "MHA (explicit)").cells[-2]
    assert last.text == "OOM"
    assert any("needs 16.0 GiB of 8.0 GiB" in text for _, text in found.notes)


def test_backends_are_separate_lines(make_profiling):
    found = table(make_profiling(), "throughput")
    fast, slow = row(found, "GMA"), row(found, "GMA [backend=reference]")
    assert slow.kind == "variant"
    assert fast.cells[0].value == pytest.approx(40 * slow.cells[0].value)
    assert slow.cells[-1].value == pytest.approx(40 * fast.cells[-1].value)


def test_times_of_a_busy_machine_are_marked(make_profiling):
    records = [r for r in make_profiling() if r["task"] == "throughput"]
    quiet = table(records, "throughput")
    assert not quiet.notes
    for record in records:
        for line in record["rows"]:
            if record["mixer"] == "gma" and line["seq_len"] == 256:
                line |= {"median_ms": 10.0, "iqr_ms": 0.6, "converged": False}
    found = table(records, "throughput")
    ((_, words),) = found.notes
    assert "interquartile range above 5% of the median" in words
    assert row(found, "GMA").cells[0].notes == row(found, "GMA").cells[-1].notes == (words,)
    assert not row(found, "GMA").cells[1].notes
    assert not row(found, "SDPA").cells[0].notes


def test_interpretability_stands_beside_the_paper(make_profiling):
    found = table(make_profiling(), "interpretability")
    assert row(found, "usage entropy / log K").cells[-1].value == 0.933
    assert row(found, "share of components in use").cells[-1].value == 104 / 128
    assert found.shown(row(found, "components in use")) == ["53.0 ± 1.0", "104.0"]


def test_an_unknown_profiling_task_is_shown_as_it_is(synthetic):
    rows = [{"temperature": 0.5, "state": "<b>"}, {"temperature": 1.5, "state": "ok"}]
    found = table([synthetic("heat", "mine", rows=rows, value=None)], "heat")
    assert [c.text for c in row(found, "mine").cells] == ["", "<b>"]


def test_a_new_mixer_appears_in_every_table_and_curve(make_grid, make_profiling):
    records = make_grid() + make_profiling() + make_grid(mixers=["mine"])
    records += [r for r in make_profiling(["mine"]) if r["task"] != "interpretability"]
    for found in all_tables(results(records)):
        if found.id != "interpretability":
            assert "mine" in [r.label for r in found.rows], found.id
    drawn = charts.scaling(results(records)) + [
        chart for _, found in charts.learning(results(records)) for chart in found
        if chart.id.startswith("learning-listops")
    ]  # fmt: skip
    for chart in drawn:
        assert "mine" in [name for name, _ in chart.groups], chart.id


def test_every_run_has_a_learning_curve(make_grid):
    found = dict(charts.learning(results(make_grid())))
    loss = next(c for c in found["listops"] if c.id == "learning-listops-train_loss")
    assert len(loss.series) == 18
    assert len({s.name for s in loss.series}) == 18


def test_gaps_in_curves_are_left_out(synthetic):
    curves = {"step": [0, 1, 2], "train_loss": [3.0, None, 1.0], "val_step": [1], "val_loss": [2.0]}
    found = dict(charts.learning(results([synthetic(curves=curves)])))["listops"]
    assert [s.points for c in found for s in c.series] == [[(0, 3.0), (2, 1.0)], [(1, 2.0)]]


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.9), (3.0, 3.0), (-5.0, 120.0), (0.0, 0.0)])
def test_linear_ticks_lie_on_the_axis(low, high):
    axis = charts.Axis.over([low, high], False, 0, 100)
    assert 2 <= len(axis.ticks) <= 8
    assert all(0 <= at <= 100 for at, _ in axis.ticks)


def test_logarithmic_ticks():
    """Powers of two where the data are, round figures elsewhere."""
    binary = charts.Axis.over([256, 2048], True, 0, 100)
    assert [text for _, text in binary.ticks] == ["256", "512", "1,024", "2,048"]
    plain = charts.Axis.over([90, 1100], True, 0, 100)
    assert [text for _, text in plain.ticks] == ["100", "200", "500", "1000"]


def test_long_curves_are_thinned():
    """The page stays small however long a run was."""
    ((_, points),) = charts._curves({"step": list(range(10_000)), "loss": [1.0] * 10_000})
    assert len(points) <= charts.MOST_POINTS


def test_glyphs_stay_in_their_box():
    drawn = charts.glyph(1.2, 1.1, 1.3, (1.0, math.inf))
    assert drawn is not None
    assert 0 < drawn.band[0] < drawn.low < drawn.at < drawn.high < drawn.width == drawn.band[1]
    assert charts.glyph(math.inf, None, None, (0, 1)) is None
