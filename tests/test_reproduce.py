"""The grid: the paper's cells, no cell twice, failures named with the way to run just those again."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from gma_bench.errors import UserError
from gma_bench.profiling import cost
from gma_bench.run import compose as configuration
from gma_bench.run import plan as reproduce
from gma_bench.run.compose import compose
from gma_bench.run.dry_run import dry_run

PAPER = ("gma", "sdpa", "linformer", "linear_transformer", "performer", "mamba")


def names(*overrides: str, only: tuple[str, ...] = ()) -> Counter[tuple[str, str]]:
    cells = reproduce.grid(overrides, only)
    assert len({c.run_id for c in cells}) == len(cells)
    return Counter((c.config.task.name, c.config.mixer.name) for c in cells)


def test_the_grid_is_the_papers() -> None:
    found = names("scale=mini")
    for mixer in PAPER:
        assert found["listops", mixer] == found["text", mixer] == 3
        assert found["wikitext103", mixer] == (0 if mixer == "linformer" else 3)
        assert found["memory", mixer] == found["throughput", mixer] == 1
    assert found["memory", "mha"] == 1
    assert found["interpretability", "gma"] >= 1


def test_a_part_of_it() -> None:
    assert names("scale=mini", only=("task=text", "mixer=gma,sdpa", "seed=1")) == {
        ("text", "gma"): 1,
        ("text", "sdpa"): 1,
    }
    with pytest.raises(UserError, match="no cell"):
        names("scale=mini", only=("task=wikitext103", "mixer=linformer"))
    for word, allowed in {
        "mixer=gmaa": r"must be out of .*gma, .*sdpa.* Try: --only mixer=gma$",
        "seed=9": "must be out of 0, 1, 2",
        "tasks=text": r"task=.*listops.*; mixer=.*; seed=0,1,2\. Try",
        "task=": "must be out of .*listops",
    }.items():
        with pytest.raises(UserError, match=allowed) as error:
            names("scale=mini", only=(word,))
        assert str(error.value).startswith("--only ")
    with pytest.raises(UserError, match="--only task=text"):
        names("task=text")


def test_a_mixer_joins_by_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    conf = shutil.copytree(configuration.CONF, tmp_path / "conf")
    text = (conf / "mixer/sdpa.yaml").read_text().replace("name: sdpa", "name: mine")
    (conf / "mixer/mine.yaml").write_text(text + "\nreproduce: true\n")
    monkeypatch.setattr(configuration, "CONF", conf)
    monkeypatch.setattr(reproduce, "CONF", conf)
    found = names("scale=smoke")
    for task in ("listops", "text", "wikitext103", "memory", "throughput"):
        assert found[task, "mine"] == 1, task
    assert found["interpretability", "mine"] == 0


def test_time_before_any_record_is_the_budget_scaled_by_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["scale=smoke", f"results_dir={tmp_path}", "trainer=cpu"]
    cells = reproduce.grid(overrides, ["task=text", "mixer=gma,sdpa"])
    estimate = reproduce.Estimate(cells[0].config)
    estimate.workers = 2
    monkeypatch.setattr(cost, "step_seconds", lambda config: 0.8)
    assert estimate.sentence(cells).startswith("Time: at most about 12 min, from a calibration")
    estimate.workers = 8
    assert "about 3 min" in estimate.sentence(cells)
    estimate.records = [{"task": "text", "mixer": "gma", "duration_s": 600.0}]
    assert estimate.sentence(cells) == "Time: about 2 min, from 2 cells like these."
    cells[0].config.scale.budget_minutes = None
    estimate.records = []
    assert "not known yet" in estimate.sentence(cells)


def test_a_training_step_is_timed_within_seconds() -> None:
    config = compose(["task=mqar", "mixer=sdpa", "scale=smoke", "trainer=cpu"])
    assert 0 < cost.step_seconds(config, most_steps=2) < 5


def test_a_failed_cell_is_marked_and_named_and_the_rest_go_on(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [o for o in tiny if not o.startswith(("task=", "mixer="))]
    # Linformer takes no such setting: its cell fails when it is built, and GMA's goes on
    words = [*shared, "++mixer.num_components=4", "hydra/launcher=basic"]
    only = ["task=listops", "mixer=gma,linformer"]
    code = reproduce.reproduce([*words], only)
    said = capsys.readouterr().out
    assert code == 1
    again = shlex.split(said.strip().splitlines()[-1])
    assert again[:2] == ["gma-bench", "reproduce"]
    assert "task=listops" in again
    assert len(list((tmp_path / "results/smoke/runs").glob("*.json"))) == 2


def test_a_second_run_runs_nothing(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [o for o in tiny if not o.startswith(("task=", "mixer="))]
    words, only = [*shared, "hydra/launcher=basic"], ["task=listops", "mixer=gma,sdpa"]
    assert reproduce.reproduce(words, only) == 0
    first = capsys.readouterr().out
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "results/smoke/runs").iterdir()}
    assert reproduce.reproduce(words, only) == 0
    second = capsys.readouterr().out
    assert "nothing to run" in second
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "results/smoke/runs").iterdir()}
    table = first[first.index("mixer   ") :] if "mixer   " in first else first[-2000:]
    assert table.splitlines()[0] in second


def test_a_dry_run_costs_every_cell_and_runs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["scale=smoke", f"results_dir={tmp_path / 'results'}"]
    only = ["task=listops,wikitext103,interpretability,memory", "mixer=gma,sdpa"]
    assert dry_run(words, only) == 0
    said = capsys.readouterr().out
    for task in ("listops", "wikitext103", "interpretability", "memory"):
        assert task in said
    for gpus in (1, 8, 64):
        assert re.search(rf"[\d.]+ hours on {gpus}\b", said)
    assert not (tmp_path / "results").exists()


def test_a_grid_on_many_gpus_takes_no_less_than_its_longest_cell() -> None:
    from gma_bench.run.dry_run import makespan

    hours = [3.0, 1.0, 1.0, 1.0, 2.0]
    assert makespan(hours, 1) == 8.0
    assert makespan(hours, 2) == 4.0
    assert makespan(hours, 64) == 3.0


def test_published_records_still_stand_for_their_cells(tmp_path: Path) -> None:
    """Code that moves between modules is the same code: no finished cell runs again for it."""
    published = Path(__file__).parents[1] / "docs" / "reference"
    cells = reproduce.grid(["scale=mini", f"results_dir={published}"])
    records = sorted(p.stem for p in (published / "mini" / "runs").glob("*.json"))
    standing = [c.record for c in cells]
    assert sorted(r["run_id"] for r in standing if r) == records
