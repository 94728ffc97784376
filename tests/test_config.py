"""A wrong configuration is one clear line, exit code 2, nothing written; a right one has one name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gma_bench.errors import SettingError, UserError
from gma_bench.results import config_hash
from gma_bench.run.compose import choices, compose, group_hash, resolved, run_id

WRONG = {
    "unknown mixer": (["mixer=gmaa"], "mixer=gmaa", "mixer=gma"),
    "unknown task": (["task=listop"], "task=listop", "task=listops"),
    "unknown scale": (["scale=tiny"], "scale=tiny", "scale="),
    "unknown key": (["mixer.num_component=3"], "mixer.num_component=3", "mixer.num_components=3"),
    "unknown top key": (["sed=1"], "sed=1", "seed=1"),
    "added key": (["+training.batchsize=8"], "training.batchsize=8", "training.batch_size=8"),
    "added top key": (["+sed=1"], "sed=1", "seed=1"),
    "added task key": (["+task.maxlength=8"], "task.maxlength=8", "task.max_length=8"),
    "added trainer key": (["+trainer.device=2"], "trainer.device=2", "trainer.devices=2"),
    "unknown group": (["tsak=listops"], "tsak=listops", "task=listops"),
    "a file for a folder": (["results_dir=pyproject.toml"], "results_dir=pyproject.toml", "results_dir=results"),
    "null": (["mixer.num_components=null"], "mixer.num_components=None", "mixer.num_components="),
    "heads": (["model.d_model=64", "model.num_heads=3"], "model.num_heads=3", "model.num_heads=2"),
    "components": (["mixer.num_components=0"], "mixer.num_components=0", "mixer.num_components="),
    "lengths": (["task.min_length=50", "task.max_length=20"], "task.max_length=20", "task.max_length=100"),
    "negative seed": (["seed=-1"], "seed=-1", "seed=0"),
    "seed in words": (["seed=one"], "seed=one", "seed=0"),
    "no folder": (["task=text", "task.source=local"], "task.data_dir", "task.data_dir="),
    "a sweep without -m": (["mixer=gma,sdpa", "seed=1"], "mixer=gma,sdpa", "gma-bench run -m mixer=gma,sdpa seed=1"),
    "no steps": (["training.steps=0"], "training.steps=0", "training.steps="),
    "accumulate": (["training.batch_size=30", "training.accumulate=4"], "training.accumulate=4", "training.accumulate=1"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_named_with_what_mends_it(case: str) -> None:
    overrides, named, fix = WRONG[case]
    with pytest.raises(UserError) as error:
        compose(overrides)
    message = str(error.value)
    assert "\n" not in message
    assert named in message
    assert f"Try: {fix}" in message


def test_linformer_in_a_causal_task_says_why() -> None:
    with pytest.raises(SettingError, match="causal"):
        compose(["task=wikitext103", "mixer=linformer", "scale=smoke"])


def test_the_command_line_exits_with_2_writes_nothing_and_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from gma_bench.cli import main\n"
        "code = main(['run', 'mixer=gmaa'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "reproduce", "report", "check", "list"])
def test_help_needs_no_torch(command: str, tmp_path: Path) -> None:
    script = (
        "import sys; from gma_bench.cli import parser\n"
        f"try: parser().parse_args([{command!r}, '--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules and 'hydra' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert command in done.stdout


def test_options_and_overrides_come_in_any_order() -> None:
    from gma_bench.cli import parse

    options = parse(["run", "mixer=gma,sdpa", "-m", "~task.data_dir", "seed=0"])
    assert options.multirun
    assert options.overrides == ["mixer=gma,sdpa", "~task.data_dir", "seed=0"]


def name_of(*overrides: str) -> str:
    return run_id(resolved(compose(overrides)))


def test_a_run_is_named_by_what_decides_its_figures() -> None:
    base = name_of("scale=smoke")
    same = ["results_dir=elsewhere", "cache_dir=elsewhere", "logger=none", "training.num_workers=2"]
    for override in same:
        assert name_of("scale=smoke", override) == base, override
    other = [
        "seed=1", "model.d_model=64", "training.lr=0.1", "mixer.num_components=8",
        "task.num_train=999", "trainer.num_threads=2", "training.eval_batch_size=7",
    ]  # fmt: skip
    names = {name_of("scale=smoke", override) for override in other}
    assert base not in names
    assert len(names) == len(other)


def test_settings_of_other_tasks_do_not_change_a_name() -> None:
    assert name_of("scale=smoke", "scale.text.steps=7") == name_of("scale=smoke")


def test_seeds_share_their_group_and_nothing_else_does() -> None:
    first, second = (resolved(compose([f"seed={s}"])) for s in (0, 1))
    assert group_hash(first) == group_hash(second)
    assert config_hash(first) != config_hash(second)
    assert group_hash(resolved(compose(["training.lr=0.5"]))) != group_hash(first)


def test_changed_data_change_the_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.tsv").write_text("a")
    words = ("task=listops", "task.source=local", f"task.data_dir={data}")
    before = name_of(*words)
    (data / "train.tsv").write_text("b")
    assert name_of(*words) != before
    moved = data.rename(tmp_path / "moved")
    (moved / "train.tsv").write_text("a")
    assert name_of("task=listops", "task.source=local", f"task.data_dir={moved}") == before


def test_a_mixer_from_outside_is_not_a_changed_gma() -> None:
    config = compose(["mixer._target_=somewhere.Mine", "+mixer.width=3"])
    assert config.mixer.name == "somewhere.Mine"
    assert "num_components" not in config.mixer


@pytest.mark.parametrize("scale", choices("scale"))
@pytest.mark.parametrize("task", choices("task"))
def test_every_task_composes_at_every_scale(task: str, scale: str) -> None:
    plain = resolved(compose([f"task={task}", f"scale={scale}"]))
    assert plain["task"]["name"] == task
