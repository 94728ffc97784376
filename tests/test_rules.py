"""Every setting of every task and mixer is held to a rule before anything is built or written."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from gma_bench.cli import main
from gma_bench.errors import SettingError
from gma_bench.run import rules
from gma_bench.run.compose import choices, compose

PAIRS = [(task, "gma") for task in choices("task")] + [
    ("listops", mixer) for mixer in choices("mixer") if mixer not in ("gma", "external")
]
FREE = {"task.backends"}
"""Mixer to names that only the mixer knows; read where they are used."""


@cache
def composed(task: str, mixer: str) -> DictConfig:
    """Resolved, so that a setting is changed without those that refer to it."""
    config = compose([f"task={task}", f"mixer={mixer}", "scale=smoke"])
    return OmegaConf.create(OmegaConf.to_container(config, resolve=True))


def leaves(config: DictConfig) -> list[str]:
    """The settings that a user may give, those of nodes that the program fills in left out."""
    found = [k for k in config if k not in ("scale", "logger", "tuned", *rules.RULES)]
    found += [f"{node}.{key}" for node in filter(None, rules.RULES) for key in config[node]]
    return [
        str(key) for key in found
        if not isinstance(OmegaConf.select(config, str(key)), DictConfig)
        and str(key).rpartition(".")[2] not in ("name", "_target_", "_recursive_", "forms", "forms_reason")
    ]  # fmt: skip


def refused(config: DictConfig, key: str, value: Any) -> bool:
    node, _, leaf = key.rpartition(".")
    home = config[node] if node else config
    before = home[leaf]
    home[leaf] = value
    try:
        rules.check(config)
    except SettingError as error:
        return error.setting == key and "\n" not in str(error)
    finally:
        home[leaf] = before
    return False


@pytest.mark.parametrize(("task", "mixer"), PAIRS)
def test_every_setting_refuses_what_it_cannot_be(task: str, mixer: str) -> None:
    config = composed(task, mixer)
    known = dict(rules.rules())
    trained = "steps" in config.scale[task]
    for key in leaves(config):
        if key in FREE or (mixer != "gma" and not key.startswith("mixer.")):
            continue
        assert key in known, f"{key} has no rule"
        nullable = key in rules.NULLABLE or (key.startswith("training.") and not trained)
        assert refused(config, key, None) != nullable, key
        allowed = known[key][0]
        for wrong in ({"a": 1}, [[]], -1, -0.5, float("nan"), ""):
            assert refused(config, key, wrong), (key, wrong)
        if allowed(1) or allowed(0.5):
            assert refused(config, key, True), key
            assert refused(config, key, 2**70) or allowed(1.5), key
        if not allowed("…"):
            assert refused(config, key, "maybe"), key


LISTED = [
    "seed=4294967296", "trainer.precision=float16", "trainer.devices=0", "trainer.accelerator=foo",
    "training.betas=0.9", "training.lr=null", "training.steps=null", "mixer=null", "task=null",
    "training.bucket_by_length=maybe", "results_dir=null", "task.data_seed=1.5",
]  # fmt: skip


@pytest.mark.parametrize("override", LISTED)
def test_a_mistake_is_one_line_and_writes_nothing(
    override: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "task=listops", "scale=smoke", "logger=none", override]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert override.partition("=")[0] in said.err
    assert list(tmp_path.iterdir()) == []
