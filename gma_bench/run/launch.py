"""Many cells: Hydra's sweepers and launchers around :func:`gma_bench.run.execute.run_job`."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Sequence

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from gma_bench.errors import MissingExtra, SettingError, UserError
from gma_bench.results import BrokenRecord, read_record, record_path
from gma_bench.run.compose import (
    choices,
    compose,
    new_loader,
    resolved,
    run_id,
    with_external_mixer,
    with_literal_paths,
)
from gma_bench.run.execute import record_failure, run_job

MAX_DEATHS = 2
LAUNCHER_EXTRAS = {
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
}


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep, each a list of overrides: ``mixer=gma,sdpa seed=0,1`` makes four."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides=list(overrides))
        (jobs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise UserError(" ".join(str(error).split())) from None
    return [list(job) for job in jobs]


def sweep(overrides: Sequence[str]) -> int:
    """``gma-bench run -m``: check every job, run them through the launcher, report each.

    Returns:
        0, or 1 when a cell failed (the others were run all the same).
    """
    hydra_overrides = [o for o in overrides if o.lstrip("+").startswith("hydra")]
    own = [o for o in overrides if o not in hydra_overrides]
    several = [o for o in own if "," in o]  # of paths too: a sweep over folders
    literal = with_literal_paths([o for o in own if o not in several])
    jobs = expand(with_external_mixer([*literal, *several]))
    return 1 if launch(jobs, hydra_overrides) else 0


def launch(jobs: Sequence[Sequence[str]], hydra_overrides: Sequence[str] = ()) -> list[str]:
    """Run jobs through a Hydra launcher.

    Every job is composed and checked before the first one starts.

    Args:
        jobs: overrides of each cell.
        hydra_overrides: overrides of Hydra's own node (``hydra/launcher=joblib``).

    Returns:
        Run ids of the cells that have no finished record afterwards.

    Raises:
        UserError: a job or the launcher is not valid; nothing was run.
    """
    checked = [compose(job) for job in jobs]
    loader = new_loader()
    config = _launcher_config(loader, [*_shared(jobs), *hydra_overrides])
    HydraConfig.instance().set_config(config)
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=loader, callbacks=Callbacks()),
        task_function=run_job,
        config=config,
    )
    _launch_all(launcher, [list(job) for job in jobs])
    return [name for name in map(_unfinished, checked) if name]


def _launch_all(launcher: Launcher, jobs: list[list[str]]) -> None:
    """Launch, and launch what is left again when a worker dies (killed for memory, say).

    A dead worker takes its pool along, and nobody says whose it was: so those that were running run
    one by one then, which also leaves them all the memory there is. A cell that dies alone, at its
    second death or later, becomes a record that says so.
    """
    deaths: Counter[str] = Counter()
    batches = [jobs]
    while batches:
        batch, *batches = batches
        try:
            launcher.launch(batch, initial_job_idx=0)
        except Exception as error:
            left = [job for job in batch if not _has_record(job)]
            print(
                f"a worker died ({type(error).__name__}); "
                f"{len(left) + sum(map(len, batches))} cells left",
                file=sys.stderr,
            )
            running, waiting = left[: os.cpu_count()], left[os.cpu_count() :]
            deaths.update(" ".join(job) for job in running)
            if len(batch) == 1 and deaths[" ".join(batch[0])] >= MAX_DEATHS:
                record_failure(batch[0], f"its worker died {MAX_DEATHS} times, alone too: {error}")
                running = []
            batches = [*([job] for job in running), *([waiting] if waiting else []), *batches]


def _has_record(job: Sequence[str]) -> bool:
    config = compose(job)
    return record_path(config.results_dir, config.scale.name, run_id(resolved(config))).exists()


def _shared(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Overrides that all jobs share; the launcher's own folders depend on them."""
    first, *others = [set(job) for job in jobs]
    return sorted(first.intersection(*others) & {o for o in first if "=" in o})


def _launcher_config(loader: ConfigLoaderImpl, overrides: Sequence[str]) -> DictConfig:
    name = next(
        (o.partition("=")[2] for o in overrides if o.startswith("hydra/launcher=")), "basic"
    )
    known = ["basic", *choices("hydra/launcher")]
    if name not in known:
        raise SettingError(
            "hydra/launcher", name, f"must be one of {', '.join(known)}", "hydra/launcher=joblib"
        )
    package, extra = LAUNCHER_EXTRAS.get(name, (None, None))
    if package and extra and not _installed(package):
        raise MissingExtra(
            package.rpartition(".")[2].replace("_", "-"), extra, f"hydra/launcher={name}"
        )
    try:
        config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
    except HydraException as error:
        raise UserError(" ".join(str(error).split())) from None
    if name == "ray":
        _check_ray(config)
    return config


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _check_ray(config: DictConfig) -> None:
    """Ray waits for ever for a GPU that is not there; say so at once instead."""
    import torch

    ray = config.hydra.launcher.ray
    if ray.init.address is None and ray.remote.num_gpus and not torch.cuda.is_available():
        raise SettingError(
            "hydra.launcher.ray.remote.num_gpus", ray.remote.num_gpus, "this machine has no GPU",
            "hydra.launcher.ray.remote.num_gpus=0",
        )  # fmt: skip


def _unfinished(config: DictConfig) -> str | None:
    name = run_id(resolved(config))
    try:
        record = read_record(record_path(config.results_dir, config.scale.name, name))
    except BrokenRecord as error:
        print(f"{name}: no record: {error}", file=sys.stderr)
        return name
    return None if record["status"] == "finished" else name
