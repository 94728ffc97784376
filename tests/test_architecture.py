"""The listing of ``gma_bench/`` is its architecture: rooms import downwards, and nothing goes in circles."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gma_bench"
FLOORS = (
    "errors", "ops", "results", "task", "mixer", "report", "profiling", "train", "run", "interpret",
    "cli",
)  # fmt: skip
"""From the ground up. A room may import those before it; what is above it reaches it by name only."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, within functions too, but for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from a import b` of modules a.b needs a.b; of anything else it needs a.
            named |= {name if name in known else str(node.module) for name in inner}
    return named & set(known)


def room(module: str) -> str:
    return module.split(".")[1]


def test_a_stranger_can_draw_the_package() -> None:
    shown = [p for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    assert len(shown) <= 12
    assert {p.stem for p in shown} - {"__init__"} == set(FLOORS)


def test_rooms_import_downwards() -> None:
    known = modules()
    upwards = [
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imports(path, known)
        if "." in module and "." in other
        if FLOORS.index(room(other)) > FLOORS.index(room(module))
    ]
    assert not upwards


def test_no_module_imports_itself_in_a_circle() -> None:
    known = modules()
    graph = {m: imports(p, known) - {m, "gma_bench"} for m, p in known.items() if m != "gma_bench"}
    list(TopologicalSorter(graph).static_order())  # raises a CycleError that names the circle


def test_the_report_reads_records_and_nothing_else() -> None:
    known = modules()
    below = {
        room(o) for m in known if m.startswith("gma_bench.report") for o in imports(known[m], known)
    }
    assert below <= {"report", "results", "errors"}
