"""``gma-bench reproduce --dry-run``: every cell composed, checked, built and costed; none is run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gma_bench.config import CONF, is_trained
from gma_bench.cost import StepCost, step_cost
from gma_bench.errors import UserError
from gma_bench.profiling.flops import peak_flops_per_s
from gma_bench.reproduce import Cell


@dataclass(frozen=True)
class Plan:
    """Cells that differ in their seed only, and what they should take."""

    task: str
    mixer: str
    seeds: int
    steps: int
    cost: StepCost | None
    gpu_hours: float | None
    problem: str | None = None


def plan(cells: Sequence[Cell]) -> list[Plan]:
    """Cost the cells of a grid, seeds of a cell together.

    GPU hours are training operations over the share of the named GPU's peak that
    ``conf/reproduce.yaml`` assumes; evaluation and loading come on top.
    """
    assumed = OmegaConf.load(CONF / "reproduce.yaml").dry_run
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.config.task.name, cell.config.mixer.name), []).append(cell)
    plans = []
    for (task, mixer), group in track(
        groups.items(), "building", transient=True, console=Console(stderr=True)
    ):
        config = group[0].config
        if not is_trained(config) or "_target_" not in config.task:
            plans.append(Plan(task, mixer, len(group), 0, None, None))
            continue
        try:
            cost = step_cost(config)
        except UserError as error:
            plans.append(Plan(task, mixer, len(group), 0, None, None, str(error)))
            continue
        dtype = "bfloat16" if "bf16" in config.trainer.precision else "float32"
        rate = (peak_flops_per_s(assumed.gpu, dtype) or 0) * assumed.utilisation
        hours = cost.flops * config.training.steps / rate / 3600 if rate else None
        plans.append(Plan(task, mixer, len(group), config.training.steps, cost, hours))
    return plans


def show(cells: Sequence[Cell]) -> int:
    """Print the plan. Returns 1 when a cell cannot be built."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    assumed = OmegaConf.load(CONF / "reproduce.yaml").dry_run
    plans = plan(cells)
    table = Table(
        title=f"{len(cells)} cells at scale={cells[0].config.scale.name}", title_justify="left"
    )
    for column in ("task", "mixer"):
        table.add_column(column)
    for column in (
        "seeds",
        "parameters",
        "peak GiB",
        "TFLOPs a step",
        "steps",
        f"{assumed.gpu} hours",
    ):
        table.add_column(column, justify="right")
    for p in plans:
        if p.cost is None:
            table.add_row(p.task, p.mixer, str(p.seeds), p.problem or "not trained", "", "", "", "")
            continue
        hours = "?" if p.gpu_hours is None else f"{p.gpu_hours * p.seeds:,.1f}"
        table.add_row(
            p.task, p.mixer, str(p.seeds), f"{p.cost.parameters:,}", f"{p.cost.peak_bytes / 2**30:.2f}",
            f"{p.cost.flops / 1e12:.2f}", f"{p.steps:,}", hours,
        )  # fmt: skip
    console.print(table)
    total = sum((p.gpu_hours or 0) * p.seeds for p in plans)
    console.print(
        f"Training alone, all seeds: {total:,.0f} hours on one {assumed.gpu} at {assumed.utilisation:.0%} of its "
        f"peak (assumed), {total / 8:,.0f} on 8, {total / 64:,.1f} on 64. Peak: float32 activations, without data."
    )
    return 1 if any(p.problem for p in plans) else 0
