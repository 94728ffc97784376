"""The comparison is fair: every mixer's model has as many parameters as softmax attention's."""

from __future__ import annotations

import pytest

from gma_bench.errors import UserError
from gma_bench.mixer.model import build_model, count_parameters
from gma_bench.profiling.cost import planned_shape, unprepared_task
from gma_bench.run import listing
from gma_bench.run.compose import choices, compose
from gma_bench.run.listing import FAIR_SHARE, REFERENCE


def parameters(mixer: str, task: str, scale: str) -> int:
    config = compose([f"task={task}", f"mixer={mixer}", f"scale={scale}"])
    return count_parameters(build_model(config, planned_shape(unprepared_task(config))))


@pytest.mark.parametrize("scale", ["smoke", "mini", pytest.param("paper", marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ["listops", "text", "wikitext103", "mqar"])
def test_parameters_are_within_five_percent_of_attention(task: str, scale: str) -> None:
    reference = parameters(REFERENCE, task, scale)
    compared = 0
    for mixer in choices("mixer"):
        if mixer == "external":
            continue
        try:
            count = parameters(mixer, task, scale)
        except UserError:
            continue  # no causal form
        assert abs(count / reference - 1) <= FAIR_SHARE, (mixer, count, reference)
        compared += 1
    assert compared >= 9


def test_the_list_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No name or figure cut short, and a mixer that has no such form says why below the table."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(listing, "choices", _fewer_choices)
    assert listing.show(["scale=paper"], names_only=False) == 0
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert "linear_transformer " in said
    assert "linformer: has no causal form" in said


def _fewer_choices(group: str) -> list[str]:
    few = {"task": ["mqar"], "mixer": ["linear_transformer", "linformer", "sdpa"]}
    return few.get(group) or choices(group)
