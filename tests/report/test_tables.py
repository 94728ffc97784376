"""Tables: what is averaged, what is marked, and what each form of them escapes."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gma_bench.cli import main
from gma_bench.errors import UserError
from gma_bench.report import report
from gma_bench.report.groups import group
from gma_bench.report.paper import DEFAULT, read_paper
from gma_bench.report.table import Cell, Column, Row, Table, latex, mark, markdown, to_csv
from gma_bench.report.tables import Results, build


def results(records, scale="mini", broken=()):
    return Results(scale, list(records), list(broken), read_paper(DEFAULT.parent))


def table(records, table_id, scale="mini"):
    return next(t for t in build(results(records, scale)) if t.id == table_id)


def row(found, name):
    return next(r for r in found.rows if r.name == name)


def rows_of_csv(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_mean_std_and_seeds(synthetic):
    values = {0: 0.30, 1: 0.40, 2: 0.50}
    found = table([synthetic("listops", "gma", s, value=v) for s, v in values.items()], "summary")
    cell = row(found, "GMA").cells[0]
    assert (cell.value, cell.std, cell.n) == (pytest.approx(40.0), pytest.approx(10.0), 3)
    assert found.shown(row(found, "GMA"))[0] == "40.0 ± 10.0"
    assert "over 3 seeds" in found.full_caption
    assert len(cell.records) == 3


def test_one_seed_has_no_deviation(synthetic):
    found = table([synthetic(value=0.4)], "summary")
    assert found.shown(row(found, "GMA"))[0] == "40.0"
    assert "One seed" in found.full_caption


def test_records_of_different_configs_are_never_averaged(synthetic):
    """Two configs of one mixer are two lines, and the second says what differs."""
    plain = [synthetic(seed=s, value=0.4) for s in range(2)]
    other = [
        synthetic(seed=s, value=0.2, settings={"mixer": {"num_components": 8}}) for s in range(2)
    ]
    for made in other:
        made["command"] += " mixer.num_components=8"
    found = table(plain + other, "summary")
    assert row(found, "GMA").cells[0].value == pytest.approx(40.0)
    assert row(found, "GMA [mixer.num_components=8]").cells[0].value == pytest.approx(20.0)


def test_records_of_different_data_are_never_averaged(synthetic):
    data = {"source": "local", "name": "other", "fingerprint": "ffff0000"}
    found = table([synthetic(seed=0), synthetic(seed=1, data=data)], "summary")
    assert sorted(r.name for r in found.rows if r.label == "GMA") == ["GMA", "GMA [data ffff0000]"]


def test_variants_of_two_tasks_share_a_line(make_grid, synthetic):
    """ListOps and Text runs that differ in the same setting stand on one line with an average."""
    changed = []
    for task in ("listops", "text"):
        template = next(r for r in make_grid([0], ["gma"]) if r["task"] == task)
        made = synthetic(
            task, settings={"mixer": {"num_components": 8}}, value=0.5, data=template["data"]
        )
        changed.append(made | {"command": made["command"] + " mixer.num_components=8"})
    found = table([*make_grid(), *changed], "lra")
    line = row(found, "GMA [mixer.num_components=8]")
    assert [c.value for c in line.cells[:3]] == [pytest.approx(50.0)] * 3


def test_average_is_taken_seed_by_seed(synthetic):
    """A seed that one task lacks does not enter the average."""
    records = [synthetic("listops", seed=0, value=0.2), synthetic("listops", seed=1, value=0.9)]
    records.append(synthetic("text", seed=0, value=0.6))
    cell = row(table(records, "lra"), "GMA").cells[2]
    assert (cell.value, cell.n) == (pytest.approx(40.0), 1)


def test_failed_missing_and_impossible_cells_are_marked(make_grid, make_failed):
    records = [r for r in make_grid() if (r["task"], r["mixer"], r["seed"]) != ("text", "mamba", 2)]
    records = [r for r in records if (r["task"], r["mixer"]) != ("listops", "performer")]
    records += [make_failed("listops", "performer", s, "out of memory | <b>") for s in range(3)]
    records = [r for r in records if (r["task"], r["mixer"]) != ("text", "linformer")]
    found = table(records, "summary")
    assert row(found, "Performer").cells[0].text == "failed"
    assert any("out of memory" in text for _, text in found.notes)
    assert "seed 2 not run" in row(found, "Mamba").cells[1].notes
    assert row(found, "Linformer").cells[1].text == "not run"
    assert row(found, "Linformer").cells[2].text == "no causal form"
    assert r"out of memory \| \<b\>" in markdown(found)


def test_best_is_bold_and_the_paper_stands_beside(make_grid):
    found = table(make_grid(), "summary")
    assert row(found, "Mamba").cells[0].best
    assert not row(found, "GMA").cells[0].best
    assert row(found, "SDPA").cells[2].best  # lower perplexity is better
    assert row(found, "GMA").cells[3].value == 41.72
    assert row(found, "most frequent label").cells[0].value == pytest.approx(19.0)
    assert not row(found, "most frequent label").cells[0].best


def test_what_seeds_do_not_tell_from_the_best_is_bold_too(synthetic):
    """Means of 40.2 and 40.1 whose seeds are now above, now below each other, and one far off."""
    values = {
        "gma": (0.39, 0.40, 0.413), "sdpa": (0.40, 0.393, 0.412), "mamba": (0.30, 0.31, 0.32),
    }  # fmt: skip
    records = [
        synthetic("listops", mixer, seed, value=value)
        for mixer, of_seeds in values.items() for seed, value in enumerate(of_seeds)
    ]  # fmt: skip
    found = table(records, "summary")
    assert [row(found, name).cells[0].best for name in ("GMA", "SDPA", "Mamba")] == [1, 1, 0]
    assert "Bold: the best, and what its seeds do not tell from the best" in found.full_caption
    for form in (markdown(found), latex(found)):
        assert "Bold: the best" in form
        assert len(re.findall(r"\*\*4|textbf\{4", form)) == 2
    # A difference that every seed shows is one, however little it is beside their scatter.
    for record in records:
        if record["mixer"] == "sdpa":
            record["value"] = values["gma"][record["seed"]] - 0.005
    assert not row(table(records, "summary"), "SDPA").cells[0].best


def test_one_seed_is_bold_at_its_word(synthetic):
    records = [synthetic("listops", m, value=v) for m, v in {"gma": 0.40, "sdpa": 0.39}.items()]
    found = table(records, "summary")
    assert [row(found, name).cells[0].best for name in ("GMA", "SDPA")] == [True, False]
    assert "Bold: the best, by this one seed." in found.full_caption


def test_a_report_refuses_what_it_would_ignore(capsys):
    assert main(["report", "scale=mini", "task=text"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gma-bench: task=text: a report takes scale=… and results_dir=… only")
    assert "Try: gma-bench report scale=mini" in said


def test_a_mixer_and_a_task_unknown_to_the_paper_appear(make_grid, synthetic):
    records = make_grid() + make_grid(mixers=["mine"]) + [synthetic("mqar", "mine", value=0.9)]
    for table_id in ("summary", "lra", "wikitext103", "mqar"):
        assert "mine" in [r.label for r in table(records, table_id).rows]


def test_caption_says_what_it_is_below_the_papers_size(make_grid):
    assert "Not the paper’s size" in table(make_grid(), "summary").full_caption
    assert "generated listops (embedded)" in table(make_grid(), "summary").full_caption
    full = table(make_grid(scale="paper"), "summary", "paper").full_caption
    assert "Not the paper’s size" not in full


def test_settings_that_differ_between_mixers_are_named(synthetic):
    records = [
        synthetic("listops", "sdpa", 0),
        synthetic("listops", "gma", 0, settings={"training": {"lr": 0.002}}),
    ]
    assert "training.lr: 0.001 → 0.002" in " ".join(table(records, "summary").footnotes)


def test_the_config_that_compares_with_the_others_is_the_main_one(synthetic):
    """A longer private run does not displace the cell that the other mixers are compared on."""
    records = [synthetic("listops", m, s) for m in ("sdpa", "mamba") for s in range(2)]
    records += [synthetic("listops", "gma", s, value=0.4) for s in range(2)]
    records += [
        synthetic("listops", "gma", s, value=0.6, settings={"training": {"steps": 9000}})
        for s in range(3)
    ]
    main, other = group(records)["listops", "gma"]
    assert main.config["training"]["steps"] == 300
    assert other.variant == ("training.steps=9000",)


def test_csv_round_trips_in_full_precision(synthetic):
    value = 0.1 + 0.2
    line = rows_of_csv(to_csv(table([synthetic(value=value)], "summary")))
    gma = next(r for r in line if r["mixer"] == "GMA")
    assert float(gma["listops_test_accuracy_percent"]) == 100 * value
    assert gma["listops_test_accuracy_percent_records"].startswith("listops-gma-s0-")


def test_names_from_records_are_text_in_every_form():
    """Nothing that a record says is read as markup."""
    name = r"<script>|*a*_b_&%$#{}~^\x[red]"
    cells = [Cell(1.0, 0.1, 3, notes=(name,))]
    found = Table("t", name, name, [Column("k", name, "%", digits=1)], [Row(name, cells)])
    assert "<script>" not in markdown(found)
    assert markdown(found).count("\n| ") == 2
    escaped = latex(found)
    for raw in ("&%", "$#", "_b_", "~^"):
        assert raw not in escaped
    assert rows_of_csv(to_csv(found))[0]["mixer"] == name


def test_marks_continue_past_z():
    assert [mark(i) for i in (0, 25, 26, 51, 52)] == ["a", "z", "aa", "az", "ba"]


def test_report_prints_and_writes(tmp_path, make_grid, write_records):
    """The entry point, a folder with a space, and a record that cannot be read."""
    folder = write_records(tmp_path / "my results", make_grid())
    (folder / "mini" / "runs" / "listops-gma-s7-000000000000.json").write_text('{"schema": 1')
    console = Console(record=True, width=160, file=io.StringIO())
    written = report(folder, "mini", console=console)
    text = console.export_text()
    assert "Linear Transformer" in text
    assert "record left out" in text
    assert "listops-gma-s7" in text
    assert folder / "mini" / "tables" / "summary.csv" in written
    assert all(path.is_file() for path in written)


def test_no_records_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="gma-bench reproduce scale=mini"):
        report(tmp_path, "mini", console=Console(file=io.StringIO()))


def test_a_broken_paper_file_is_one_clear_error(tmp_path):
    (tmp_path / "paper.yaml").write_text("figures: [")
    with pytest.raises(UserError, match=r"paper\.yaml"):
        read_paper(tmp_path)


def test_reporting_imports_no_torch():
    """The report starts in a fraction of a second because nothing in it needs torch."""
    code = "import sys, gma_bench.report.build; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
