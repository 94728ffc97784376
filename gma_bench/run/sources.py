"""The sources that make a run's figures, as a digest: an edited mixer is another mixer."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

OWN = "gma_bench"
COMPILED = (".cpp", ".cu")
"""Sources that a module of the same name compiles when it runs."""


@functools.cache
def sources_digest(target: str) -> str | None:
    """Hex SHA-256 of the source files behind a dotted name; None where there are none to read.

    The files are the module's own and those that it imports, directly or not, at module level out of
    its own top-level package and ``gma_bench``. Nothing in them is run, but a package's
    ``__init__`` is, as for any import.
    """
    files = module_files(target.rpartition(".")[0])
    if not files:
        return None
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def module_files(module: str) -> dict[str, Path]:
    """Names and files of a module and of what it imports out of its own package and ``gma_bench``."""
    packages = {module.partition(".")[0], OWN}
    found: dict[str, Path] = {}
    seen: set[str] = set()
    pending = [module]
    while pending:
        name = pending.pop()
        if name in seen or name.partition(".")[0] not in packages:
            continue
        seen.add(name)
        path = _file(name)
        if path is None:
            continue
        found[name] = path
        for suffix in COMPILED:
            if (beside := path.with_suffix(suffix)).exists():
                found[f"{name}{suffix}"] = beside
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        pending += _imports(path, package)
    return found


def _file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    except Exception:  # whatever a user's package raises: building the mixer will say it
        return None
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).exists() else None


def _imports(path: Path, package: str) -> Iterator[str]:
    """Modules that a file may import at module level: ``from a import b`` names both a and a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
