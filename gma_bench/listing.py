"""``gma-bench list``: what there is to choose from, and whether the comparison is fair."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gma_bench.config import choices, compose, is_trained
from gma_bench.errors import UserError

REFERENCE = "sdpa"
FAIR_SHARE = 0.05


def show(overrides: Sequence[str], *, names_only: bool) -> int:
    """Print the choices, then parameters and FLOPs per token of every mixer on every trained task."""
    console = Console()
    for group in ("task", "mixer", "scale", "trainer", "logger", "experiment", "hydra/launcher"):
        console.print(
            f"[bold]{group}[/]: {', '.join(n for n in choices(group) if n != 'external')}"
        )
    if names_only:
        return 0
    with console.status("building every model without data …"):
        tables = [t for task in choices("task") if (t := _task_table(task, overrides))]
    for table in tables:
        console.print(table)
    console.print(
        f"Parameters of a model are matched to {REFERENCE}'s by the width of its MLPs "
        "(model.match_parameters). FLOPs: forward and backward at full length, "
        "matrix products only, as torch.utils.flop_counter counts them."
    )
    return 0


def _task_table(task: str, overrides: Sequence[str]) -> Table | None:
    first = compose([f"task={task}", *overrides])
    if not is_trained(first) or "_target_" not in first.task:
        return None
    from gma_bench.cost import StepCost, step_cost

    costs: dict[str, StepCost] = {}
    refusals: dict[str, str] = {}
    for mixer in choices("mixer"):
        if mixer == "external":
            continue
        try:
            costs[mixer] = step_cost(compose([f"task={task}", f"mixer={mixer}", *overrides]))
        except UserError as error:
            refusals[mixer] = str(error).partition(". Try")[0]
    table = Table(title=f"{task} at scale={first.scale.name}", title_justify="left")
    table.add_column("mixer")
    for column in (
        "parameters",
        f"of {REFERENCE}'s",
        "MLP width",
        "mixer's own",
        "FLOPs per token",
    ):
        table.add_column(column, justify="right")
    base = costs[REFERENCE].parameters
    for mixer, cost in costs.items():
        share = cost.parameters / base
        mark = "" if abs(share - 1) <= FAIR_SHARE else " ✗"
        table.add_row(
            mixer, f"{cost.parameters:,}", f"{share:.1%}{mark}", str(cost.mlp_hidden),
            f"{cost.mixer_parameters:,}", f"{cost.flops_per_token:,.0f}",
        )  # fmt: skip
    for mixer, reason in refusals.items():
        table.add_row(mixer, "—", "", "", "", reason)
    return table
