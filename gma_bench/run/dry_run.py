"""``gma-bench reproduce --dry-run``: every cell composed, checked, built and costed; none is run."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gma_bench.errors import UserError
from gma_bench.profiling.cost import StepCost, step_cost
from gma_bench.profiling.flops import peak_flops_per_s
from gma_bench.run.compose import CONF, is_trained
from gma_bench.run.plan import Cell, grid

GPU_COUNTS = (1, 8, 64)


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


def dry_run(overrides: Sequence[str], only: Sequence[str] = ()) -> int:
    """Compose, check, build and cost every cell of the grid, and run none."""
    return show(grid([o for o in overrides if not o.startswith("hydra")], only))


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
    console.print(_time(plans, assumed), soft_wrap=True)
    return 1 if any(p.problem for p in plans) else 0


def _time(plans: Sequence[Plan], assumed: DictConfig) -> str:
    """How long the grid takes on so many GPUs, a cell on one of them."""
    hours = {f"{p.task} {p.mixer}": p.gpu_hours for p in plans if p.gpu_hours}
    if not hours:
        return "No cell of these is trained, or the GPU's peak is not known: no hours."
    cells = [p.gpu_hours for p in plans for _ in range(p.seeds) if p.gpu_hours]
    longest = max(hours, key=lambda name: hours[name])
    on = ", ".join(f"{makespan(cells, gpus):,.1f} hours on {gpus}" for gpus in GPU_COUNTS)
    return (
        f"Training alone, all seeds, on {assumed.gpu}s at {assumed.utilisation:.0%} of their peak (assumed), "
        f"each cell on one GPU, longest first: {on}. "
        f"No less than {hours[longest]:,.1f}, the longest cell ({longest}). "
        "Peak: float32 activations, without data."
    )


def makespan(hours: Sequence[float], gpus: int) -> float:
    """Hours until the last cell ends, when a free GPU takes the longest cell that is left."""
    busy_until = [0.0] * gpus
    for cell in sorted(hours, reverse=True):
        heapq.heapreplace(busy_until, busy_until[0] + cell)
    return max(busy_until)
