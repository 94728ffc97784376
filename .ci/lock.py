"""Write what is installed in this environment into two locks: what running needs, and what testing adds."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "gma-bench"
RUN_EXTRAS = ("data", "kernels")
"""The optional parts that `make reproduce` installs. Torch's CUDA build pins triton; its CPU build does not."""
NOT_LOCKED = {canonicalize_name(name) for name in (PROJECT, "pip", "wheel")}


def closure(roots: list[Requirement]) -> set[str]:
    """Canonical names of the installed packages that some requirements lead to, extras included."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = list(roots)
    while pending:
        wanted = pending.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            needed = requires(wanted.name) or []
        except PackageNotFoundError:  # for another platform or Python
            continue
        found.add(name)
        for need in map(Requirement, needed):
            if need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                pending.append(need)
    return found


def pins(names: set[str]) -> str:
    """``name==version`` a line, without a build's local part (``+cpu``)."""
    lines = [f"{name}=={re.sub(r'[+].*', '', version(name))}" for name in sorted(names)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write ``requirements.lock`` and ``requirements-dev.lock``."""
    installed = {canonicalize_name(d.metadata["Name"]) for d in distributions()} - NOT_LOCKED
    run = closure([Requirement(f"{PROJECT}[{','.join(RUN_EXTRAS)}]")]) & installed
    (ROOT / "requirements.lock").write_text(pins(run), encoding="utf-8")
    (ROOT / "requirements-dev.lock").write_text(pins(installed - run), encoding="utf-8")


if __name__ == "__main__":
    main()
