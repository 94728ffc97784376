"""Scaling figures: what they draw, how it looks, and that nothing overlaps or leaves the page."""

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gma_bench.report import curves
from gma_bench.report.curves import Line, Plot, draw, draw_all
from gma_bench.report.paper import Paper, read_paper
from gma_bench.report.style import COLUMN_INCHES, KNOWN, looks

LENGTHS = [256, 1024, 4096, 16384, 65536, 262144, 1048576]
PEAKS = {"gma": (5000, 1), "sdpa": (2300, 1), "mha": (24, 2), "linear_transformer": (3000, 1),
         "performer": (3600, 1), "linformer": (1500, 1), "mamba": (9000, 1)}  # fmt: skip
TIMES = {"gma": (0.01, 1), "sdpa": (0.00002, 2), "linear_transformer": (0.008, 1), "mamba": (0.02, 1),
         "performer": (0.011, 1), "linformer": (0.006, 1)}  # fmt: skip


@pytest.fixture(scope="module")
def paper() -> Paper:
    return read_paper(Path(__file__).parents[2] / "results")


def record(
    task: str, mixer: str, rows: list[dict[str, Any]], seed: int = 0, **more: Any
) -> dict[str, Any]:
    config = {"task": {"name": task, "budget_gib": 8}, "mixer": {"name": mixer}, "seed": seed}
    digest = f"{abs(hash((task, mixer, seed))):064x}"[-64:]
    return {
        "schema": 1, "run_id": f"{task}-{mixer}-s{seed}-{digest[:12]}", "status": "finished",
        "task": task, "mixer": mixer, "scale": "mini", "seed": seed, "config": config,
        "config_hash": digest, "group_hash": f"{task}-{mixer}", "metric": "accuracy",
        "split": "test", "value": None, "higher_is_better": True, "metrics": {}, "rows": rows,
        "curves": {}, "data": {"fingerprint": "f"}, "command": "", "git": {}, "versions": {},
        "machine": {}, "extra": {}, "duration_s": 1.0, "started_at": "",
    } | more  # fmt: skip


def memory_rows(mixer: str) -> list[dict[str, Any]]:
    factor, power = PEAKS[mixer]
    rows = []
    for scope, method, n in itertools.product(
        ("layer", "model"), ("simulated", "measured"), LENGTHS
    ):
        peak = factor * n**power
        fits = method == "simulated" or peak < 8 * 2**30
        if method == "measured" and fits and n > 65536:
            continue
        rows.append({
            "sweep": "length", "scope": scope, "pass": "forward_backward", "method": method,
            "seq_len": n, "num_components": 32, "status": "ok" if fits else "OOM",
            "peak_bytes": peak if fits else None,
        })  # fmt: skip
    for k in (16, 64, 256) if mixer == "gma" else ():
        rows += [{"sweep": "components", "scope": "layer", "pass": step, "method": "simulated",
                  "seq_len": 4096, "num_components": k, "status": "ok", "peak_bytes": 1e5 * k}
                 for step in ("forward", "forward_backward")]  # fmt: skip
    return rows


def time_rows(mixer: str) -> list[dict[str, Any]]:
    factor, power = TIMES[mixer]
    rows = []
    for backend, step, n in itertools.product(
        ("auto", "reference") if mixer == "gma" else (None,),
        ("forward_backward", "forward"),
        LENGTHS[:4],
    ):
        slow = 30 if backend == "reference" else 1
        rows.append({"sweep": "length", "pass": step, "backend": backend, "seq_len": n, "status": "ok",
                     "num_components": 32, "median_ms": slow * factor * n**power})  # fmt: skip
    for n in (1024, 16384, 131072):
        if mixer != "linformer":
            grows = n / 1024 if mixer == "sdpa" else 1
            rows.append({"sweep": "context", "pass": "decode", "seq_len": n, "status": "ok",
                         "median_ms": 0.3 * grows + factor, "state_bytes": int(8448 * grows)})  # fmt: skip
    for k in (16, 64, 256) if mixer == "gma" else ():
        rows.append({"sweep": "components", "pass": "forward", "seq_len": 1024, "num_components": k,
                     "status": "ok", "median_ms": 0.1 * k})  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    found = [record("memory", m, memory_rows(m)) for m in PEAKS]
    found += [record("throughput", m, time_rows(m)) for m in TIMES]
    for (place, mixer), seed in itertools.product(enumerate(TIMES), range(3)):
        base = 0.3 + 0.05 * place + 0.01 * seed
        by_length = {
            f"accuracy_len_{a}_{b}": base - a / 400 for a, b in ((8, 16), (16, 32), (32, 64))
        }
        found.append(
            record("listops", mixer, [], seed, metrics={"test": {"accuracy": base, **by_length}})
        )
        by_pairs = {f"accuracy_pairs_{n}": base - n / 100 for n in (4, 8, 16)}
        found.append(record("mqar", mixer, [], seed, extra={"state_bytes": 1024 * 2**place},
                            metrics={"test": {"accuracy": base, **by_pairs}}))  # fmt: skip
    return found


FIGURES = ["decode_by_context", "listops_by_length", "memory_by_components", "memory_by_length_layer",
           "memory_by_length_model", "mqar_by_pairs", "mqar_by_state", "time_by_components",
           "time_by_length_forward", "time_by_length_forward_backward"]  # fmt: skip


@pytest.fixture(scope="module")
def drawn(records: list[dict[str, Any]], paper: Paper) -> dict[str, tuple[Plot, Figure]]:
    """Every figure as it is handed to matplotlib."""
    seen: dict[str, tuple[Plot, Figure]] = {}

    def keep(plot: Plot, folder: Path) -> list[Path]:
        import matplotlib as mpl

        with mpl.rc_context(curves.RC):
            canvas = Figure()
            FigureCanvasAgg(canvas).draw()
            draw(plot, canvas)
            canvas.canvas.draw()
        seen[plot.name] = plot, canvas
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "save", keep)
        draw_all(records, Path(), paper)
    return seen


def test_every_figure_is_drawn(drawn: dict[str, tuple[Plot, Figure]]) -> None:
    assert sorted(drawn) == FIGURES


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_leaves_the_page_and_texts_do_not_overlap(
    name: str, drawn: dict[str, tuple[Plot, Figure]]
) -> None:
    _, canvas = drawn[name]
    assert canvas.get_figwidth() == COLUMN_INCHES
    (axes,) = canvas.axes
    page = canvas.bbox
    texts = [*canvas.texts, *axes.texts, axes.xaxis.label, axes.yaxis.label, *canvas.legends[0].texts,
             *(t for t in (*axes.get_xticklabels(), *axes.get_yticklabels()) if t.get_text())]  # fmt: skip
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    low, high = axes.get_ylim()
    ticks = {t.get_text() for t, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
             if not low <= y <= high}  # fmt: skip
    boxes = [(text, box) for text, box in boxes if text not in ticks]
    for text, box in boxes:
        assert box.x0 >= page.x0 - 1, text
        assert box.x1 <= page.x1 + 1, text
        assert box.y0 >= page.y0 - 1, text
        assert box.y1 <= page.y1 + 1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-0.5).overlaps(b.padded(-0.5)), f"{one!r} overlaps {other!r}"


def test_slopes_crossing_and_oom_are_in_the_figure(drawn: dict[str, tuple[Plot, Figure]]) -> None:
    plot, canvas = drawn["memory_by_length_layer"]
    labels = [t.get_text() for t in canvas.legends[0].texts]
    assert labels[0] == "GMA, slope 1.00"
    assert "MHA (explicit), slope 2.00" in labels
    crosses = [
        line for line in canvas.axes[0].lines if line.get_marker() == "x" and len(line.get_xdata())
    ]
    assert [list(line.get_xdata()) for line in crosses] == [[65536, 262144, 1048576], [1048576]]
    assert plot.limit == (8 * 2**30, "8 GiB budget")
    assert "GMA is not cheaper than SDPA" in canvas.texts[-1].get_text().replace("\n", " ")
    # 5000 N = 24 N² at N = 208: below the first length, so at every one of them.
    assert "GMA is cheaper than MHA" in canvas.texts[-1].get_text().replace("\n", " ")


def test_crossing_with_sdpa_is_written_into_the_figure(
    drawn: dict[str, tuple[Plot, Figure]],
) -> None:
    _, canvas = drawn["time_by_length_forward"]
    (note,) = [t.get_text() for t in canvas.axes[0].texts]
    assert note == "cheaper than SDPA\nfrom N ≈ 500"  # 0.01 N = 0.00002 N²


def test_captions_hold_the_papers_statement_and_the_scale(
    drawn: dict[str, tuple[Plot, Figure]], paper: Paper
) -> None:
    said = {c["id"]: " ".join(c["statement"].split()) for c in paper.claims}
    for name, claim in (("memory_by_length_layer", "memory-linear"), ("listops_by_length", "lra-average"),
                        ("time_by_length_forward", "throughput-behind")):  # fmt: skip
        caption = drawn[name][1].texts[-1].get_text().replace("\n", " ")
        assert said[claim] in caption
        assert "Scale mini: not the paper’s size" in caption


def test_one_order_colour_and_marker_everywhere(drawn: dict[str, tuple[Plot, Figure]]) -> None:
    order = list(KNOWN)
    for name, (plot, canvas) in drawn.items():
        mixers = [line.mixer for line in plot.lines]
        assert mixers == sorted(mixers, key=order.index), name
        for line in plot.lines:
            shown = [one for one in canvas.axes[0].lines if one.get_label() == line.label]
            assert [(one.get_color(), one.get_marker()) for one in shown] == [KNOWN[line.mixer]], (
                name
            )


def test_unknown_mixers_get_looks_of_their_own_after_the_papers() -> None:
    names = [f"mine{i}" for i in range(30)]
    found = looks([*names, "sdpa", "gma"])
    assert list(found)[:2] == ["gma", "sdpa"]
    assert len({(look.colour, look.marker) for look in found.values()}) == 32
    assert all((found[n].colour, found[n].marker) not in KNOWN.values() for n in names)
    assert found["mine0"] == looks(["mine0"])["mine0"], "whatever else is drawn"


def test_files_are_written_in_three_formats_and_stay_the_same(
    records: list[dict[str, Any]], paper: Paper, tmp_path: Path
) -> None:
    some = [r for r in records if r["task"] == "memory" and r["mixer"] in ("gma", "mha")]
    paths = draw_all(some, tmp_path / "one", paper)
    again = draw_all(some, tmp_path / "two", paper)
    assert {p.suffix for p in paths} == {".svg", ".pdf", ".png"}
    for one, other in zip(paths, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    svg = ElementTree.fromstring(next(p for p in paths if p.suffix == ".svg").read_text())
    text = " ".join("".join(t.itertext()) for t in svg.iter("{http://www.w3.org/2000/svg}text"))
    assert "GMA, slope 1.00" in text, "text is text, not outlines"


def test_no_records_no_figures(paper: Paper, tmp_path: Path) -> None:
    assert draw_all([], tmp_path, paper) == []
    failed = record("memory", "gma", []) | {"status": "failed"}
    assert draw_all([failed], tmp_path, paper) == []


def test_a_single_point_has_no_slope() -> None:
    plot = Plot("p", "P", "N", "y", [Line("gma", "GMA", {256: 1.0})])
    canvas = Figure()
    FigureCanvasAgg(canvas)
    draw(plot, canvas)
    assert [t.get_text() for t in canvas.legends[0].texts] == ["GMA"]
