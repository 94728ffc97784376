"""Nothing that was written elsewhere runs code or leaves its folder, and no secret is written."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gma_bench.errors import SettingError, UserError
from gma_bench.results import BrokenRecord, load, read_all, read_record, record_path
from gma_bench.run.compose import compose
from gma_bench.run.execute import run_cell

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    p for folder in ("gma_bench", "tasks", "baselines", "benchmarks", "docs", "tests")
    for p in (ROOT / folder).rglob("*.py")
)  # fmt: skip
TRAP = "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\nclass Trap: ...\n"


def test_a_target_in_a_record_is_never_imported(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gma_bench.report import report

    (tmp_path / "trap.py").write_text(TRAP)
    monkeypatch.syspath_prepend(tmp_path)
    run_cell(tiny)
    (path,) = (tmp_path / "results/smoke/runs").glob("*.json")
    record = json.loads(path.read_text())
    for node in ("task", "mixer"):
        record["config"][node]["_target_"] = "trap.Trap"
    record["config"]["task"]["procedure"] = "trap.Trap"
    record["extra"]["_target_"] = record["data"]["_target_"] = "trap.Trap"
    path.write_text(json.dumps(record))
    assert len(load(tmp_path / "results")) == 1
    report(tmp_path / "results", "smoke", console=Console())
    assert run_cell(tiny)["skipped"]
    interpretability = [o for o in tiny if not o.startswith(("task", "training", "model"))]
    run_cell([*interpretability, "task=interpretability", f"task.record={record['run_id']}"])
    assert not (tmp_path / "sprung").exists()
    assert "trap" not in sys.modules


@pytest.mark.parametrize("name", ["../../elsewhere", "a/b", "/etc/passwd", "a b", "", "..", "a\n"])
@pytest.mark.parametrize("key", ["task.name", "mixer.name", "scale.name"])
def test_a_name_that_is_no_plain_name_is_refused(key: str, name: str, tiny: list[str]) -> None:
    config = compose(tiny)
    node, _, leaf = key.partition(".")
    config[node][leaf] = name
    from gma_bench.run.rules import check

    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        check(config)


def test_a_record_that_names_another_folder_is_refused(tiny: list[str], tmp_path: Path) -> None:
    record = run_cell(tiny)
    path = record_path(tmp_path / "results", "smoke", record["run_id"])
    path.write_text(json.dumps(record | {"run_id": "../../elsewhere"}))
    with pytest.raises(BrokenRecord, match="run_id"):
        read_record(path)
    path.write_text(json.dumps(record | {"task": "<b>listops"}))
    with pytest.raises(BrokenRecord, match="does not match run_id"):
        read_record(path)
    words = [o for o in tiny if not o.startswith(("task", "training", "model"))]
    with pytest.raises(SettingError, match=r"task\.record"):
        run_cell(
            [*words, "task=interpretability", "task.record=../../elsewhere"], keep_failure=False
        )


def _calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), call) for call in calls]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_read_with_pickle(path: Path) -> None:
    """``torch.load`` with ``weights_only=True``, arrays without pickles, YAML that makes plain values."""
    own_process = path.name in ("test_text.py",)  # sends an object to a process of its own
    for name, call in _calls(ast.parse(path.read_text())):
        options = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
        where = f"{path.name}:{call.lineno}: {name}"
        if name == "torch.load":
            assert options.get("weights_only") is True, where
        if name.endswith("load") and name.startswith(("np.", "numpy.")):
            assert not options.get("allow_pickle"), where
        if name in ("pickle.load", "pickle.loads", "joblib.load", "pd.read_pickle", "dill.load"):
            assert own_process, where
        assert name not in ("yaml.load", "yaml.unsafe_load", "eval", "exec"), where
        assert options.get("trust_remote_code") is not True, where


MARKER = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("ends", ["well", pytest.param("badly", marks=pytest.mark.slow)])
def test_a_wandb_key_is_written_nowhere(tiny: list[str], tmp_path: Path, ends: str) -> None:
    """Not in the record, the logs, W&B's own files, what is printed, or an error's traceback."""
    words = [o for o in tiny if not o.startswith("logger=")] + ["logger=wandb"]
    if ends == "badly":
        words += ["training.lr=1e30", "training.clip=0", "training.schedule=constant"]
    environment = os.environ | {"WANDB_API_KEY": MARKER, "WANDB_MODE": "offline"}
    environment |= {
        f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("CACHE", "CONFIG", "DATA")
    }
    done = subprocess.run(
        [sys.executable, "-m", "gma_bench.cli", "run", "-m", *words], env=environment,
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == (0 if ends == "well" else 1), done.stderr[-2000:]
    assert MARKER not in done.stdout + done.stderr
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    (record,), _ = read_all(tmp_path / "results")
    assert record["status"] == ("finished" if ends == "well" else "diverged")
    assert any(p.suffix == ".wandb" for p in written)
    for path in written:
        assert MARKER.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_the_audit_of_dependencies_says_when_it_cannot_be_made() -> None:
    script = ROOT / ".ci/audit"
    if not script.exists() or shutil.which("bash") is None:
        pytest.skip("no audit script here")
    assert "bash .ci/audit" in (ROOT / "Makefile").read_text()
    nowhere = {f"{s}_proxy": "http://127.0.0.1:9" for s in ("http", "https", "HTTP", "HTTPS")}
    nowhere |= {name.upper(): value for name, value in nowhere.items()} | {
        "no_proxy": "",
        "NO_PROXY": "",
    }
    done = subprocess.run(
        ["bash", str(script)], env=os.environ | nowhere,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "audit skipped" in done.stdout


def test_readers_of_records_take_plain_values_only(tmp_path: Path) -> None:
    """JSON that is no record, however it is meant, is left out with a word, not half believed."""
    folder = tmp_path / "smoke/runs"
    folder.mkdir(parents=True)
    hostile: dict[str, Any] = {
        "list.json": [], "null.json": None, "deep.json": {"schema": 1, "status": {"$ref": "x"}},
        "yaml.json": {"!!python/object/apply:os.system": ["true"]},
    }  # fmt: skip
    for name, content in hostile.items():
        (folder / name).write_text(json.dumps(content))
    records, broken = read_all(tmp_path)
    assert records == []
    assert len(broken) == len(hostile)
