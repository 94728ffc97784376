"""``gma-bench list``: what there is to choose from, and whether the comparison is fair."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gma_bench.errors import UserError
from gma_bench.run.compose import choices, compose, is_trained

REFERENCE = "sdpa"
FAIR_SHARE = 0.05


def show(overrides: Sequence[str], *, names_only: bool) -> int:
    """Print the choices, then parameters and FLOPs per token of every mixer on every trained task."""
    console = Console()
    names = Table.grid(padding=(0, 1))
    for group in ("task", "mixer", "scale", "trainer", "logger", "experiment", "hydra/launcher"):
        names.add_row(f"[bold]{group}[/]", ", ".join(n for n in choices(group) if n != "external"))
    console.print(names)
    if names_only:
        return 0
    with console.status("building every model without data …"):
        tables = [t for task in choices("task") if (t := _task_table(task, overrides))]
    for table, refusals in tables:
        console.print(table)
        for mixer, reason in refusals.items():
            console.print(f"{mixer}: {reason}", highlight=False)
        console.print()
    console.print(
        f"Parameters of a model are matched to {REFERENCE}'s by the width of its MLPs "
        "(model.match_parameters). FLOPs: forward and backward at full length, "
        "matrix products only, as torch.utils.flop_counter counts them."
    )
    return 0


def _task_table(task: str, overrides: Sequence[str]) -> tuple[Table, dict[str, str]] | None:
    """A line a mixer, and why the others cannot be built; None for a task that trains nothing."""
    first = compose([f"task={task}", *overrides])
    if not is_trained(first) or "_target_" not in first.task:
        return None
    from gma_bench.profiling.cost import StepCost, step_cost

    costs: dict[str, StepCost] = {}
    refusals: dict[str, str] = {}
    for mixer in choices("mixer"):
        if mixer == "external":
            continue
        try:
            costs[mixer] = step_cost(compose([f"task={task}", f"mixer={mixer}", *overrides]))
        except UserError as error:
            refusals[mixer] = str(error).partition(". Try")[0].partition(": ")[2]
    table = Table(
        title=f"{task} at scale={first.scale.name}", title_justify="left",
        box=SIMPLE_HEAD, padding=(0, 0, 0, 1),
    )  # fmt: skip
    table.add_column("mixer", no_wrap=True)
    for column in (
        "parameters",
        f"of {REFERENCE}'s",
        "MLP",
        "mixer's own",
        "MFLOPs/token",
    ):
        table.add_column(column, justify="right")
    base = costs[REFERENCE].parameters
    for mixer, cost in costs.items():
        share = cost.parameters / base
        mark = "" if abs(share - 1) <= FAIR_SHARE else " ✗"
        table.add_row(
            mixer, f"{cost.parameters:,}", f"{share:.1%}{mark}", str(cost.mlp_hidden),
            f"{cost.mixer_parameters:,}", f"{cost.flops_per_token / 1e6:,.3f}",
        )  # fmt: skip
    return table, refusals
