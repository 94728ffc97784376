"""Where a record comes from: code, packages, machine, and the command that gives it again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from gma_bench.run.compose import ROOT

PACKAGES = (
    "torch", "lightning", "torchmetrics", "hydra-core", "numpy", "pandas", "datasets",
    "tokenizers", "scikit-learn", "triton", "mamba-ssm", "flash-linear-attention",
)  # fmt: skip
NOT_IN_COMMAND = ("results_dir", "cache_dir", "rerun", "logger", "hydra/launcher")


def git() -> dict[str, Any]:
    """``commit`` and ``dirty`` (whether tracked files differ from it); None outside a checkout."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that can change a figure, and of GMA's compiler (``c++``).

    Without a compiler GMA runs in plain torch on a CPU: slower, and other in the last digits.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    from gma_bench.ops import native  # torch comes with it: not before a cell runs

    if native.problem() is None:
        found["c++"] = native.compiler_version()
    return found


def machine(device: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Host, processor, memory and the device that a cell ran on."""
    cpu = cpu_name()
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "device": device or cpu,
        "threads": threads,
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def command(overrides: Sequence[str]) -> str:
    """The command that gives the run again; where things are stored is left to whoever types it."""
    kept = [o for o in overrides if o.partition("=")[0].lstrip("+~") not in NOT_IN_COMMAND]
    first = ("task=", "mixer=", "scale=", "seed=")
    ordered = [o for key in first for o in kept if o.startswith(key)]
    rest = [o for o in kept if o not in ordered]
    return shlex.join(["gma-bench", "run", *ordered, *rest])
