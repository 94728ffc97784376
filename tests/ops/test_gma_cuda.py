"""The script for a GPU: what it imports, what it says without one, and a small run of its checks."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gma_cuda.py"
COMPARED = {"fla", "mamba_ssm"}
"""Imported only where they are installed."""


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gma_cuda", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


def test_it_needs_torch_triton_and_the_operators_alone() -> None:
    names = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
    others = {name for name in others if name.split(".")[0] not in {"torch", "triton"} | COMPARED}
    assert others == {"gma_bench.ops"}


def test_without_a_device_it_says_so_in_a_line() -> None:
    done = _run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no CUDA device here" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_its_checks_pass_under_the_interpreter(tmp_path: Path) -> None:
    out = tmp_path / "gma_cuda.json"
    done = _run("--dry-run", "--out", str(out), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert record["dry_run"]
    assert {(row["dtype"], row["causal"]) for row in record["checks"]} == {
        (dtype, causal) for dtype in ("float32", "bfloat16") for causal in (False, True)
    }
    assert all(row["within"] and row["repeats"] for row in record["checks"])
    counted = [row for row in record["timings"] if row["subject"] == "gma"]
    assert all(row["both_flops"] > row["forward_flops"] > 0 for row in counted)
    assert all(row["both_bytes"] > row["forward_bytes"] > 0 for row in counted)
