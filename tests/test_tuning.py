"""Learning rates are chosen on validation, never on test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gma_bench.run.tuning import choose, write


def record(mixer: str, rate: float, val: float, test: float, **more: Any) -> dict[str, Any]:
    return {
        "task": "listops", "mixer": mixer, "status": "finished", "metric": "accuracy",
        "higher_is_better": True, "config": {"training": {"lr": rate}},
        "metrics": {"val": {"accuracy": val}, "test": {"accuracy": test}},
    } | more  # fmt: skip


def test_validation_decides() -> None:
    records = [record("gma", 0.1, val=0.9, test=0.1), record("gma", 0.2, val=0.8, test=0.9)]
    assert choose(records) == {"listops": {"gma": 0.1}}


def test_seeds_are_averaged_and_a_diverged_rate_is_out() -> None:
    records = [
        record("gma", 0.1, 0.9, 0), record("gma", 0.1, 0.1, 0), record("gma", 0.2, 0.6, 0),
        record("gma", 0.3, 0.99, 0), record("gma", 0.3, 0, 0, status="diverged"),
    ]  # fmt: skip
    assert choose(records) == {"listops": {"gma": 0.2}}


def test_lower_is_better_for_perplexity() -> None:
    records = [record("gma", r, v, 0, higher_is_better=False) for r, v in ((0.1, 9.0), (0.2, 8.0))]
    assert choose(records) == {"listops": {"gma": 0.2}}


def test_writing_keeps_comments_and_other_scales(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text("# @package tuned\n# why\ngrid: [0.1]\nlr: {paper: {text: {gma: 0.5}}}\n")
    write("mini", {"listops": {"gma": 0.1}}, path)
    assert path.read_text().startswith("# @package tuned\n# why\n")
    content = yaml.safe_load(path.read_text())
    assert content["lr"] == {"paper": {"text": {"gma": 0.5}}, "mini": {"listops": {"gma": 0.1}}}
