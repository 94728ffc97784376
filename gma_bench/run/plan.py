"""``gma-bench reproduce``: the paper's grid, cell by missing cell, and the report."""

from __future__ import annotations

import itertools
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gma_bench.errors import SettingError, UserError
from gma_bench.results import BrokenRecord, read_all, read_record, record_path
from gma_bench.results.store import locked
from gma_bench.run.compose import CONF, choices, compose, nearest, resolved, run_id
from gma_bench.run.execute import Record, standing_record
from gma_bench.run.launch import launch


@dataclass(frozen=True)
class Cell:
    """One cell of the grid: its overrides, its checked configuration and what that resolves to."""

    overrides: tuple[str, ...]
    config: DictConfig
    plain: Record
    alone: bool

    @property
    def run_id(self) -> str:
        return run_id(self.plain)

    @property
    def record(self) -> Record | None:
        """The record that this cell need not be run for again."""
        return standing_record(self.config.results_dir, self.config.scale.name, self.plain)

    @property
    def path(self) -> Path:
        return record_path(self.config.results_dir, self.config.scale.name, self.run_id)

    @property
    def lock(self) -> Path:
        return self.path.parent.parent / "locks" / self.run_id


def grid(overrides: Sequence[str], only: Sequence[str] = ()) -> list[Cell]:
    """The cells of ``conf/reproduce.yaml`` under ``overrides``, each composed and checked.

    Args:
        overrides: for every cell (``scale=mini``, ``results_dir=…``); not task, mixer or seed.
        only: ``key=a,b`` with key task, mixer or seed: that part of the grid.
    """
    for word in overrides:
        if word.partition("=")[0] in ("task", "mixer", "seed"):
            raise UserError(
                f"{word}: the grid sets task, mixer and seed itself. Try: --only {word}"
            )
    entries = list(_entries(list(compose(overrides).scale.seeds)))
    part = _only(only, [names for names, _ in entries])
    composed = dict[Any, DictConfig]()
    cells = [
        _cell(names, overrides, composed, alone=alone)
        for names, alone in entries
        if all(names[key] in values for key, values in part.items())
    ]
    if not cells:  # each name is in the grid, but not with the others
        raise UserError(f"--only {' --only '.join(only)} leaves no cell of the grid. Try: one less")
    return cells


def _entries(seeds: Sequence[int]) -> Iterator[tuple[dict[str, str], bool]]:
    """Task, mixer and seed of every cell of the grid, and whether it runs alone."""
    joining = [m for m in choices("mixer") if _file("mixer", m).get("reproduce")]
    for entry in _file(".", "reproduce").cells:
        chosen_seeds = seeds if entry.seed == "all" else list(entry.seed)
        for task, seed in itertools.product(entry.task, chosen_seeds):
            more = [m for m in joining if _has_form(m, task)] if entry.get("joins", True) else []
            for mixer in dict.fromkeys([*entry.mixer, *more]):
                yield {"task": task, "mixer": mixer, "seed": str(seed)}, entry.get("alone", False)


def _only(only: Sequence[str], names: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """The values that ``--only`` asks for, each of them one of the grid's."""
    known = {key: sorted({name[key] for name in names}) for key in ("task", "mixer", "seed")}
    part = {}
    for word in only:
        key, _, values = word.partition("=")
        if key not in known:
            allowed = "; ".join(f"{k}={','.join(v)}" for k, v in known.items())
            raise UserError(
                f"--only {word}: must be key=a,b out of {allowed}. Try: --only task=text"
            )
        part[key] = values.split(",")
        for value in part[key]:
            if value not in known[key]:
                raise SettingError(
                    f"--only {key}", value, f"must be out of {', '.join(known[key])}",
                    f"--only {key}={nearest(value, known[key])}",
                )  # fmt: skip
    return part


def _file(group: str, name: str) -> Any:
    return OmegaConf.load(CONF / group / f"{name}.yaml")


def _has_form(mixer: str, task: str) -> bool:
    form, forms = _file("task", task).get("form"), _file("mixer", mixer).get("forms")
    return form is None or forms is None or form in forms


def _cell(
    names: dict[str, str], overrides: Sequence[str], composed: dict[Any, DictConfig], *, alone: bool
) -> Cell:
    words = (*(f"{key}={value}" for key, value in names.items()), *overrides)
    key = names["task"], names["mixer"]
    if key not in composed:  # composing is slow, and seeds differ in one value
        composed[key] = compose(words)
    config = composed[key].copy()
    config.seed = int(names["seed"])
    return Cell(words, config, resolved(config), alone)


def reproduce(overrides: Sequence[str], only: Sequence[str] = ()) -> int:
    """Run the missing cells, two at a time by default, then report.

    Returns:
        0, or 1 when a cell failed; the last line then says how to run just those again.
    """
    console = Console()
    own = [o for o in overrides if not o.startswith("hydra")]
    hydra = [o for o in overrides if o.startswith("hydra")]
    if not any(o.startswith("hydra/launcher=") for o in hydra):
        hydra.append(f"hydra/launcher={_default_launcher(own)}")
    cells = grid(own, only)
    missing = [c for c in cells if c.record is None]
    _announce(console, cells, missing)
    with _progress(console, missing):
        for alone in (False, True):
            batch = [c.overrides for c in missing if c.alone is alone]
            if batch:
                launch(batch, ["hydra/launcher=basic"] if alone else hydra)
    from gma_bench.report import report

    report(Path(cells[0].config.results_dir), cells[0].config.scale.name, console=console)
    failed = [c for c in cells if not _succeeded(c)]
    if failed:
        console.print(f"{len(failed)} of {len(cells)} cells failed; to run just those again:")
        words = ["gma-bench", "reproduce", *overrides]
        for key in ("task", "mixer", "seed"):
            names = dict.fromkeys(_name(c, key) for c in failed)
            words += ["--only", f"{key}={','.join(names)}"]
        console.print(shlex.join(words), soft_wrap=True)
    return 1 if failed else 0


def _default_launcher(overrides: Sequence[str]) -> str:
    """A cell a core; one after another where they share a GPU."""
    import torch

    on_cpu = "trainer=cpu" in overrides or not torch.cuda.is_available()
    return "joblib" if on_cpu else "basic"


def _name(cell: Cell, key: str) -> str:
    return next(o.partition("=")[2] for o in cell.overrides if o.startswith(f"{key}="))


def _succeeded(cell: Cell) -> bool:
    record = cell.record
    return record is not None and record["status"] == "finished"


def _announce(console: Console, cells: Sequence[Cell], missing: Sequence[Cell]) -> None:
    """What will run, on what, from which data, and how long it should take."""
    scale = cells[0].config.scale.name
    if not missing:
        console.print(f"All {len(cells)} cells of scale={scale} are finished; nothing to run.")
        return
    estimate = Estimate(cells[0].config)
    table = Table(title=f"To run at scale={scale}: {len(missing)} of {len(cells)} cells")
    for column in ("task", "mixers", "seeds", "data", "cells"):
        table.add_column(column)
    for task, group in itertools.groupby(missing, key=lambda c: c.config.task.name):
        part = list(group)
        source = _source(part[0].config.task)
        table.add_row(
            task,
            ", ".join(dict.fromkeys(c.config.mixer.name for c in part)),
            ", ".join(dict.fromkeys(str(c.config.seed) for c in part)),
            source,
            str(len(part)),
        )
    console.print(table)
    console.print(f"On {_device(cells[0].config)}. {estimate.sentence(missing)}")


def _source(task: DictConfig) -> str:
    """Where a task's data come from, as its settings say."""
    if "_target_" not in task:
        return "none"
    given = task.get("source") or ("local" if task.get("data_dir") else None)
    return given or task.get("default_source", "embedded")


def _device(config: DictConfig) -> str:
    from gma_bench.run.provenance import machine

    found = machine()
    wanted = config.trainer.accelerator
    where = "an accelerator where there is one, else on " if wanted == "auto" else f"{wanted}; "
    return f"{where}{found['cores']} × {found['cpu']}"


class Estimate:
    """Seconds that cells should take, from the records of cells like them on this machine."""

    def __init__(self, config: DictConfig) -> None:
        from gma_bench.run.provenance import machine

        self.host, self.workers = machine()["host"], machine()["cores"]
        records, _ = read_all(config.results_dir, config.scale.name)
        self.records = [r for r in records if r["status"] == "finished"]

    def seconds(self, cell: Cell) -> float | None:
        """The mean of finished cells of the same task and mixer, else of the same task."""
        task, mixer = cell.config.task.name, cell.config.mixer.name
        same_task = [r for r in self.records if r["task"] == task]
        same = [r["duration_s"] for r in same_task if r["mixer"] == mixer]
        return mean(same or [r["duration_s"] for r in same_task]) if same_task else None

    def sentence(self, cells: Sequence[Cell]) -> str:
        """How long the cells should take, in words."""
        known = [s for s in map(self.seconds, cells) if s is not None]
        if not known:
            return self.budget(cells[0].config)
        total = mean(known) * len(cells) / max(1, self.workers)
        return f"Time: about {max(1, round(total / 60))} min, from {len(known)} cells like these."

    def budget(self, config: DictConfig) -> str:
        """The scale's budget, scaled to this machine by a training step that is timed now."""
        budget = config.scale.get("budget_minutes")
        if not budget:
            return "Time: not known yet; an estimate follows with the first cells."
        if _default_launcher([f"trainer={config.trainer.accelerator}"]) == "basic":
            return f"Time: at most {budget} min on two cores; not known for a GPU."
        from gma_bench.profiling.cost import step_seconds

        known = _file(".", "reproduce").calibration
        here = step_seconds(compose([*known.cell, "trainer=cpu"]))
        minutes = budget * here / known.step_s * 2 / max(1, self.workers)
        return (
            f"Time: at most about {max(1, round(minutes))} min, from a calibration: the scale's "
            f"budget is {budget} min on two cores where a training step took {known.step_s:g} s; "
            f"here it takes {here:.2g} s on each of {self.workers}."
        )


@contextmanager
def _progress(console: Console, cells: Sequence[Cell]) -> Iterator[None]:
    """One line for the whole while the body runs: cells done, running, failed, time left."""
    if not cells:
        yield
        return
    finished = threading.Event()
    columns: tuple[str | ProgressColumn, ...] = (
        BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
    )  # fmt: skip
    live = console.is_terminal
    with Progress(*columns, console=console, disable=not live, redirect_stdout=live) as progress:
        line = progress.add_task(_counts(cells, {}, 0.0), total=len(cells))
        started = time.monotonic()
        known: dict[str, Record] = {}

        def watch() -> None:
            while not finished.wait(1.0):
                _refresh(cells, known)
                words = _counts(cells, known, time.monotonic() - started)
                progress.update(line, completed=len(known), description=words)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()
            _refresh(cells, known)
            progress.update(line, completed=len(known), description=_counts(cells, known, 0.0))


def _refresh(cells: Sequence[Cell], known: dict[str, Record]) -> None:
    for cell in cells:
        if cell.run_id not in known and cell.path.exists():
            try:
                known[cell.run_id] = read_record(cell.path)
            except BrokenRecord:
                continue


def _counts(cells: Sequence[Cell], known: dict[str, Record], elapsed_s: float) -> str:
    failed = sum(r["status"] != "finished" for r in known.values())
    running = sum(_is_running(c) for c in cells if c.run_id not in known)
    words = f"{len(known)}/{len(cells)} cells, {running} running, {failed} failed"
    if known and elapsed_s and len(known) < len(cells):
        left = elapsed_s / len(known) * (len(cells) - len(known))
        words += f", about {max(1, round(left / 60))} min left"
    return words


def _is_running(cell: Cell) -> bool:
    if not Path(f"{cell.lock}.lock").exists():
        return False
    with locked(cell.lock, wait=False) as free:
        return not free
