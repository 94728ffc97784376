"""Running one cell: from a checked configuration to one record, whatever happens on the way."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from gma_bench.errors import UserError
from gma_bench.results import (
    SCHEMA,
    BrokenRecord,
    Outcome,
    config_hash,
    read_record,
    record_path,
    write_record,
)
from gma_bench.results.store import locked, require_disk
from gma_bench.run import provenance
from gma_bench.run.compose import (
    compose,
    default_choices,
    group_hash,
    import_target,
    is_trained,
    resolved,
    run_id,
    without_sources,
)

Record = dict[str, Any]

OUT_OF_MEMORY = "out of memory"
SIZES = (
    "model.d_model", "model.num_layers", "mixer.num_components", "task.max_length",
    "training.batch_size",
)  # fmt: skip
"""What a training step's memory grows with."""


def finished_record(path: Path) -> Record | None:
    """The record at ``path`` when it stands: valid, and of a run that ended (well, or diverged)."""
    try:
        record = read_record(path)
    except BrokenRecord as error:
        if path.exists():
            print(f"record not believed, running again: {error}", file=sys.stderr)
        return None
    return record if record["status"] in ("finished", "diverged") else None


def standing_record(results_dir: str | Path, scale: str, plain: Record) -> Record | None:
    """The record that a cell need not be run for again.

    Records made before sources were part of a run's identity stand for the cells of this repository's
    mixers: they are never averaged with others, whose group differs.
    """
    record = finished_record(record_path(results_dir, scale, run_id(plain)))
    own = str(plain["mixer"]["_target_"]).startswith(("gma_bench.", "baselines."))
    old = record_path(results_dir, scale, run_id(without_sources(plain)))
    return finished_record(old) if record is None and own and old.exists() else record


def run_cell(overrides: Sequence[str], *, keep_failure: bool = True) -> Record:
    """Run the cell that ``overrides`` describe, unless its record is there already.

    Args:
        overrides: as on the command line.
        keep_failure: turn any error into a record with status ``failed`` (in sweeps). Otherwise a
            user's mistake is raised and writes nothing.

    Returns:
        The record; ``record["skipped"]`` tells that it was there before.
    """
    config = compose(overrides)
    _forget_ranks(config)
    plain = identify(config)
    name = config.run_id
    path = record_path(config.results_dir, config.scale.name, name)
    standing = partial(standing_record, config.results_dir, config.scale.name, plain)
    if not config.rerun and (record := standing()):
        return record | {"skipped": True}
    if not is_main_process():
        return _run(config, plain, name, overrides, keep_failure)
    require_disk(config.results_dir, 32 << 20, "a run")
    with locked(path.parent.parent / "locks" / name):
        # Somebody else may have finished it while this process waited.
        if not config.rerun and (record := standing()):
            return record | {"skipped": True}
        record = _run(config, plain, name, overrides, keep_failure)
        write_record(path, record)
    return record


def record_failure(overrides: Sequence[str], message: str) -> None:
    """Write the record of a cell that failed where it could not write one itself."""
    config = compose(overrides)
    plain = identify(config)
    record = _before(config, plain, config.run_id, overrides) | {
        "status": "failed",
        **vars(Outcome(metric="", split="none")),
        "duration_s": 0.0,
        "machine": provenance.machine(None, config.trainer.num_threads),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": {"type": "WorkerDied", "message": message, "step": None, "traceback": None},
    }
    write_record(record_path(config.results_dir, config.scale.name, config.run_id), record)


def identify(config: DictConfig) -> Record:
    """Write into a configuration what its procedure needs to know of the run; return what it resolves to.

    ``config.run_id`` names it, ``config.output_dir`` is the folder of its logs and artifacts, and
    ``config.resolved`` is the part of the configuration that its figures depend on.
    """
    plain = resolved(config)
    name = run_id(plain)
    with open_dict(config):
        config.run_id, config.resolved = name, plain
        config.output_dir = str(Path(config.results_dir) / config.scale.name / "artifacts" / name)
    return plain


RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def is_main_process() -> bool:
    """Whether this process writes the record: rank 0 of the processes that share a cell."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


def _forget_ranks(config: DictConfig) -> None:
    """A cell on one device has no ranks: those of whatever started this process are not its own."""
    if config.trainer.devices == 1 and config.trainer.get("num_nodes", 1) == 1:
        for name in (*RANKS, "SLURM_NTASKS", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            if os.environ.get(name, "0") not in ("0", "1") or name in RANKS:
                os.environ.pop(name, None)


def _run(
    config: DictConfig, plain: Record, name: str, overrides: Sequence[str], keep_failure: bool
) -> Record:
    record = _before(config, plain, name, overrides)
    started = time.monotonic()
    outcome, error = Outcome(metric="", split="none"), None
    try:
        procedure: Callable[[DictConfig], Outcome] = import_target(config.task.procedure)
        outcome = procedure(config)
        status = "finished"
    except Exception as problem:
        if isinstance(problem, UserError) and not keep_failure:
            raise
        status = "diverged" if type(problem).__name__ == "Diverged" else "failed"
        error = {
            "type": type(problem).__name__,
            "message": _too_large(config, problem) or str(problem),
            "step": getattr(problem, "step", None),
            "traceback": None if isinstance(problem, UserError) else traceback.format_exc(),
        }
    return record | {
        "status": status,
        **vars(outcome),
        "duration_s": time.monotonic() - started,
        "machine": provenance.machine(_device_name(config), config.trainer.num_threads),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "error": error,
    }


def tells_itself(error: Record) -> bool:
    """Whether the message of an error is enough, and its traceback would but bury it."""
    return error["traceback"] is None or error["message"].startswith(OUT_OF_MEMORY)


def _too_large(config: DictConfig, problem: Exception) -> str | None:
    """What did not fit into memory, and the settings that make it smaller; None for other errors."""
    from gma_bench.profiling.memory import is_out_of_memory

    if not is_out_of_memory(problem):
        return None
    asked = re.search(r"allocate ([\d.]+) ?(\w+)", str(problem))
    what = f"{asked[1]} {asked[2]}" if asked else "the next allocation"
    if asked and asked[2] == "bytes":
        what = f"{int(asked[1]) / 2**30:,.2f} GiB"
    sizes = [f"{k}={v}" for k in SIZES if (v := OmegaConf.select(config, k)) is not None]
    mend = f"Make one of these smaller: {', '.join(sizes)}"
    if is_trained(config):
        mend += f"; or training.accumulate={config.training.accumulate} larger"
    return f"{OUT_OF_MEMORY}: {what} more did not fit. {mend}"


def _before(config: DictConfig, plain: Record, name: str, overrides: Sequence[str]) -> Record:
    """What a record says before the run: who it is and where it comes from."""
    return {
        "schema": SCHEMA,
        "run_id": name,
        "status": None,
        "task": config.task.name,
        "mixer": config.mixer.name,
        "scale": config.scale.name,
        "seed": config.seed,
        "config": plain,
        "config_hash": config_hash(plain),
        "group_hash": group_hash(plain),
        "command": provenance.command(_complete(overrides, config)),
        "git": provenance.git(),
        "versions": provenance.versions(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _complete(overrides: Sequence[str], config: DictConfig) -> list[str]:
    """The overrides with the choices that were left to their defaults spelled out."""
    named = {o.partition("=")[0] for o in overrides}
    chosen = default_choices() | {"seed": config.seed}
    if "mixer._target_" in named:
        del chosen["mixer"]
    return [*overrides, *(f"{key}={value}" for key, value in chosen.items() if key not in named)]


def _device_name(config: DictConfig) -> str | None:
    """The accelerator's name, or None for the CPU. A failed import says None."""
    torch = sys.modules.get("torch")
    if torch is None or config.trainer.accelerator == "cpu":
        return None
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return "Apple GPU" if torch.backends.mps.is_available() else None


def run_job(config: DictConfig) -> float | None:
    """What a Hydra launcher calls for each job of a sweep. Returns the figure, for sweepers.

    The job's overrides are composed anew: launchers carry them from process to process, and a
    cell must not depend on which of them it ran under.
    """
    from hydra.core.hydra_config import HydraConfig

    overrides = list(HydraConfig.get().overrides.task)
    record = run_cell(overrides)
    report_cell(record)
    value = record.get("value")
    return value if value is None else float(value)


def report_cell(record: Record) -> None:
    """One line on a cell that ended."""
    print(describe(record), flush=True)


def describe(record: Record) -> str:
    """``listops gma s0: test accuracy 0.41 (38 s)``, or what went wrong."""
    name = f"{record['task']} {record['mixer']} seed {record['seed']} [{record['run_id'][-12:]}]"
    if record["status"] != "finished":
        return f"{name}: {record['status']}: {record['error']['message'].splitlines()[0]}"
    figure = "done" if record["value"] is None else (
        f"{record['split']} {record['metric']} {record['value']:.4g}"
    )  # fmt: skip
    when = "already finished, skipped" if record.get("skipped") else f"{record['duration_s']:.0f} s"
    return f"{name}: {figure} ({when})"
