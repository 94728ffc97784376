"""What the README promises, a test keeps."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<tests>(`tests/[^`]+`(, )?)+) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    """Each guarantee of the README with a test that it names."""
    section = (ROOT / "README.md").read_text().partition("## What it guarantees")[2]
    section = section.partition("\n## ")[0]
    found = [
        (row["promise"], name)
        for row in ROW.finditer(section)
        for name in re.findall(r"`([^`]+)`", row["tests"])
    ]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert len({promise for promise, _ in found}) == len(lines) - 1, "a line names no test"
    return found


@pytest.mark.parametrize(("promise", "name"), rows())
def test_a_guarantee_names_a_test_that_exists(promise: str, name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    tests = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    assert any(t.startswith("test_") for t in tests)
    if function:
        assert function in tests, f"{promise}: {file} has no {function}"
