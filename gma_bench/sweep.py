"""Many cells: Hydra's sweepers and launchers around :func:`gma_bench.cell.run_job`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from gma_bench.cell import run_job
from gma_bench.config import compose, new_loader, resolved, run_id, with_external_mixer
from gma_bench.errors import MissingExtra, UserError
from gma_bench.results import BrokenRecord, read_record, record_path

LAUNCHER_EXTRAS = {
    "joblib": ("hydra-joblib-launcher", "dev"),
    "submitit_local": ("hydra-submitit-launcher", "slurm"),
    "submitit_slurm": ("hydra-submitit-launcher", "slurm"),
    "ray": ("hydra-ray-launcher", "ray"),
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
    jobs = expand(with_external_mixer([o for o in overrides if o not in hydra_overrides]))
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
    launcher.launch([list(job) for job in jobs], initial_job_idx=0)
    return [name for name in map(_unfinished, checked) if name]


def _shared(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Overrides that all jobs share; the launcher's own folders depend on them."""
    first, *others = [set(job) for job in jobs]
    return sorted(first.intersection(*others) & {o for o in first if "=" in o})


def _launcher_config(loader: object, overrides: Sequence[str]) -> DictConfig:
    name = next((o.partition("=")[2] for o in overrides if o.startswith("hydra/launcher=")), None)
    try:
        return loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)  # type: ignore[attr-defined]
    except HydraException as error:
        if name in LAUNCHER_EXTRAS:
            package, extra = LAUNCHER_EXTRAS[name]
            raise MissingExtra(package, extra, f"hydra/launcher={name}") from None
        raise UserError(" ".join(str(error).split())) from None


def _unfinished(config: DictConfig) -> str | None:
    name = run_id(resolved(config))
    try:
        record = read_record(record_path(config.results_dir, config.scale.name, name))
    except BrokenRecord as error:
        print(f"{name}: no record: {error}", file=sys.stderr)
        return name
    return None if record["status"] == "finished" else name
