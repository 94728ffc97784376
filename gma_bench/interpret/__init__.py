"""Interpretability: what the components of a trained GMA learned (PAPER, "interpretability")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gma_bench.interpret.analysis import Analysis, analyze
    from gma_bench.interpret.procedure import run

__all__ = ["Analysis", "analyze", "run"]


def __getattr__(name: str) -> Any:
    # Lazy, so that a config error does not wait for torch and matplotlib.
    if name in ("Analysis", "analyze"):
        from gma_bench.interpret import analysis

        return getattr(analysis, name)
    if name == "run":
        from gma_bench.interpret.procedure import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
