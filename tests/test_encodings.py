"""Files are UTF-8 whatever the locale; a terminal that cannot show a sign shows another."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = [
    path for folder in ("gma_bench", "tasks", "baselines", "benchmarks", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
]  # fmt: skip


def opens_text(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name == "read_text":
        return not call.args  # a distribution's takes a name
    if name == "write_text":
        return True
    if ast.unparse(call.func) != "open":
        return False
    modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
    return not any("b" in ast.unparse(mode) for mode in modes)


def test_every_text_file_names_its_encoding() -> None:
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text(node)
        if not any(k.arg == "encoding" for k in node.keywords)
    ]
    assert not unnamed


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
    ],
)
def test_a_run_and_its_report_in_a_narrow_locale(
    tiny: list[str], environment: dict[str, str]
) -> None:
    folder = next(o for o in tiny if o.startswith("results_dir="))
    commands = (
        ["run", *tiny, "training.steps=2"],
        ["report", "scale=smoke", folder],
        ["run", "×=1"],
    )
    done = [
        subprocess.run(
            [sys.executable, "-m", "gma_bench.cli", *words],
            capture_output=True,
            env={**os.environ, **environment},
        )
        for words in commands
    ]
    assert [d.returncode for d in done] == [0, 0, 2], [d.stderr for d in done]
    assert b"Traceback" not in b"".join(d.stderr for d in done)
    page = Path(folder.partition("=")[2]) / "smoke" / "index.html"
    assert "±" in page.read_text(encoding="utf-8") or "–" in page.read_text(encoding="utf-8")
