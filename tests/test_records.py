"""Records and figures of others are looked at before they are believed, and never end a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gma_bench.errors import UserError
from gma_bench.report import report
from gma_bench.report.build import all_tables, verdict_table
from gma_bench.report.charts import drawn, learning, scaling
from gma_bench.report.claims import judge_all
from gma_bench.report.page import _run
from gma_bench.report.paper import read_paper
from gma_bench.report.table import latex, markdown, to_csv
from gma_bench.report.tables import Results
from gma_bench.results import BrokenRecord, load, read_all, read_record, write_record

REFERENCE = Path(__file__).resolve().parent.parent / "docs/reference/mini"
SAMPLE = sorted(REFERENCE.glob("runs/*-s0-*.json"))
TEXT = SAMPLE[0].read_text(encoding="utf-8")

BAD = {
    "nested rows": lambda text: text.replace('"rows": [', '"rows": [' + "[" * 100_000, 1),
    "nested far below the parser's limit": lambda text: with_field("extra", nested(200)),
    "an integer of 5,000 digits": lambda text: text.replace('"seed": 0', f'"seed": {"9" * 5000}'),
    "an integer no float holds": lambda text: with_field("parameters", 10**400),
    "a split without metrics": lambda text: with_field("metrics", {"test": None}),
    "an error that is text": lambda text: with_field("error", "boom"),
    "a surrogate": lambda text: with_field("command", "\ud800"),
    "a surrogate for a key": lambda text: with_field("extra", {"\udfff": 1}),
    "not a number": lambda text: with_field("value", float("nan")),
    "infinity, written out": lambda text: with_field("value", 0.5).replace('"value": 0.5', '"value": 1e999'),
    "a truth value": lambda text: with_field("value", True),
    "no text at all": lambda text: "\x00",
    "an empty file": lambda text: "",
}  # fmt: skip


def with_field(key: str, value: Any) -> str:
    return json.dumps(json.loads(TEXT) | {key: value})


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"deeper": value}
    return value


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one good record."""
    folder = tmp_path / "mini/runs"
    folder.mkdir(parents=True)
    good = next(p for p in SAMPLE if p.name.startswith("listops-gma-"))
    (folder / good.name).write_bytes(good.read_bytes())
    return folder


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_cannot_be_is_left_out_and_named(case: str, runs: Path) -> None:
    bad = runs / SAMPLE[0].name
    bad.write_text(BAD[case](TEXT), encoding="utf-8")
    records, broken = read_all(runs.parent.parent)
    assert len(records) == 1
    (message,) = broken
    assert bad.name in message
    assert "\n" not in message
    assert len(message) < 600
    message.encode("utf-8")
    with pytest.warns(UserWarning, match="left out"):
        assert len(load(runs.parent.parent)) == 1


def test_the_report_goes_on_without_them(runs: Path) -> None:
    for index, change in enumerate(BAD.values()):
        path = runs / SAMPLE[0].name.replace("-s0-", f"-s{index}-")
        path.write_text(change(TEXT), encoding="utf-8")
    (runs / "latin.json").write_bytes('{"schema": "é"}'.encode("latin-1"))
    (runs / "folder.json").mkdir()
    with (runs / "large.json").open("wb") as file:
        file.truncate(1 << 32)  # sparse
    console = Console(record=True, width=300)
    report(runs.parent.parent, "mini", console=console)
    assert console.export_text().count("record left out") == len(BAD) + 3
    assert (runs.parent / "index.html").is_file()


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    """A run that went beyond all figures keeps its record, and no other run of it is started."""
    record = json.loads(TEXT)
    beyond = {"inf": float("inf"), "nan": float("nan"), "huge": 1e200, "tiny": 1e-200, "fine": 1e9}
    path = tmp_path / SAMPLE[0].name
    write_record(path, record | {"metrics": {"val": beyond}})
    read = read_record(path)["metrics"]["val"]
    assert read == {"inf": None, "nan": None, "huge": None, "tiny": 0.0, "fine": 1e9}


def test_the_reference_is_read_whole() -> None:
    records, broken = read_all(REFERENCE.parent)
    assert broken == []
    assert len(records) == len(list(REFERENCE.parent.glob("*/runs/*.json")))


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    "content", [BOMB, "source: &a {b: *a}", "[" * 50_000, "claims: 3", "figures: [1]", "scale: 1",
                "source: {a: .nan}", "[]", "é: 1", "unknown: 1"],
)  # fmt: skip
def test_figures_of_a_paper_that_cannot_be_are_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "paper.yaml").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=r"paper\.yaml") as error:
        read_paper(tmp_path)
    assert "\n" not in str(error.value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested values, one of a list standing for its others."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is ...:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


TASKS = {p.name.split("-")[0]: json.loads(p.read_text(encoding="utf-8")) for p in SAMPLE}
PLACES = [(task, path) for task, made in TASKS.items() for path in places(made)]
OTHERS = {
    task: [read_record(p) for p in sorted(REFERENCE.glob(f"runs/{task}-*.json"))
           if p.stem != made["run_id"]][:2]
    for task, made in TASKS.items()
}  # fmt: skip
PAPER = read_paper(REFERENCE.parent)
ANYTHING = st.recursive(
    st.sampled_from([None, True, 0, -1, 1, 0.5, -0.5, 1e308, 5e-324, 2**62, "", "ok", "x\ny"])
    | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["step", "train_loss", "name", "a"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("results") / "mini/runs"
    made.mkdir(parents=True)
    return made


@settings(
    max_examples=2000, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(place=st.sampled_from(PLACES), value=st.just(...) | ANYTHING)
def test_no_record_ends_a_report(
    place: tuple[str, tuple[Any, ...]], value: Any, folder: Path
) -> None:
    """One place of a real record holds anything, or nothing: left out, or shown beside its like."""
    task, path = place
    file = folder / f"{TASKS[task]['run_id']}.json"
    file.write_text(json.dumps(replaced(TASKS[task], path, value)), encoding="utf-8")
    try:
        record = read_record(file)
    except BrokenRecord:
        return
    results = Results("mini", [record, *OTHERS[task]], [], PAPER)
    for table in all_tables(results):
        for form in (markdown, to_csv, latex):
            form(table).encode("utf-8")
    verdict_table(judge_all(results), results)
    for chart in [*scaling(results), *(c for _, charts in learning(results) for c in charts)]:
        drawn(chart)
    _run(results, record)
