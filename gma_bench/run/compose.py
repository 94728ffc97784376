"""Composing and checking a cell's configuration. Imports no torch: an error answers at once."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigLoadError
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gma_bench.errors import SettingError, UserError
from gma_bench.results import config_hash, join_run_id
from gma_bench.run import rules
from gma_bench.run.layer import with_layer
from gma_bench.run.rules import select
from gma_bench.run.sources import sources_digest

# Our launcher files bear the names of the plugins' own, as they should; said once a worker otherwise.
warnings.filterwarnings(
    "ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore"
)

ROOT = Path(__file__).resolve().parents[2]
CONF = next(f for f in (ROOT / "gma_bench" / "conf", ROOT / "conf") if f.is_dir())
"""In an installed package, or in a checkout."""
GROUPS = ("task", "mixer", "scale", "trainer", "logger")
CLOSED_NODES = ("", "task", "model", "training", "trainer")
"""Where no key may be added: a mixer of one's own has settings that no file names, these have none."""


def choices(group: str) -> list[str]:
    """The names that a group of ``conf/`` offers."""
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


def default_choices() -> dict[str, str]:
    """Task, mixer and scale of a run that names none."""
    config = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"))
    assert isinstance(config, dict)
    chosen = {k: v for d in config["defaults"] if isinstance(d, dict) for k, v in d.items()}
    return {str(group): str(chosen[group]) for group in ("task", "mixer", "scale")}


@functools.cache
def claim_packages() -> None:
    """Let ``tasks`` and ``baselines`` be this project's, whatever a user's folder calls its own files."""
    for name in ("tasks", "baselines"):
        file = ROOT / name / "__init__.py"
        loaded = sys.modules.get(name)
        if loaded is not None and getattr(loaded, "__file__", None) == str(file):
            continue
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(file.parent)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def new_loader() -> ConfigLoaderImpl:
    """A loader of ``conf/`` that touches no global state of Hydra's."""
    from hydra import version
    from hydra.core.plugins import Plugins

    version.setbase("1.3")
    Plugins.instance()  # registers launchers and sweepers
    return ConfigLoaderImpl(create_config_search_path(str(CONF)))


def compose(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The checked configuration of one cell.

    Args:
        overrides: as on the command line (``["task=listops", "model.d_model=128"]``).
        with_hydra: keep Hydra's own node (launchers need it).

    Raises:
        SettingError, UserError: an unknown name or key, or a value that is not allowed.
    """
    claim_packages()
    overrides = with_external_mixer(with_literal_paths(overrides))
    if os.environ.get("GMA_BENCH_CACHE") == "":
        del os.environ["GMA_BENCH_CACHE"]  # empty is unset
    try:
        config = new_loader().load_configuration("config", list(overrides), RunMode.RUN)
    except (HydraException, ConfigLoadError, OmegaConfBaseException, ValueError) as error:
        raise _explain(error, overrides) from None
    _refuse_added(overrides)
    rules.check(config)
    if not with_hydra:
        with open_dict(config):
            del config["hydra"]
    return config


PATHS = ("results_dir", "cache_dir", "task.data_dir", "task.tokenizer_dir", "task.checkpoint")


def with_literal_paths(overrides: Sequence[str]) -> list[str]:
    """Take paths as they are written, whatever their signs mean to Hydra; ``~`` is one's home."""
    return [_literal_path(o) if o.partition("=")[0] in PATHS else o for o in overrides]


def _literal_path(override: str) -> str:
    key, _, value = override.partition("=")
    quote = value[:1]
    if quote in ("'", '"') and value.endswith(quote) and len(value) > 1:
        value = value[1:-1].replace(f"\\{quote}", quote)
    elif value in ("", "null", "???") or "${" in value:
        return override
    value = os.path.expanduser(value)
    plain = re.fullmatch(r"[\w./:@%+-]+", value, re.ASCII) is not None
    return f"{key}={value}" if plain else f"{key}=" + "'" + value.replace("'", "\\'") + "'"


def with_external_mixer(overrides: Sequence[str]) -> list[str]:
    """Let ``mixer._target_=my_package.MyMixer`` stand for a mixer of its own, not for a changed GMA."""
    overrides = with_layer(overrides)
    names = {o.split("=")[0].lstrip("+~") for o in overrides}
    if "mixer._target_" in names and "mixer" not in names:
        return ["mixer=external", *overrides]
    return list(overrides)


def _refuse_added(overrides: Sequence[str]) -> None:
    """A misspelt key after a plus sign would change nothing but the run's name."""
    added = [o.lstrip("+").partition("=")[0] for o in overrides if o.startswith("+")]
    added = [k for k in added if k.rpartition(".")[0] in CLOSED_NODES]
    added = [k for k in added if "/" not in k and "@" not in k and not (CONF / k).is_dir()]
    if not added:
        return
    known = _known_keys(overrides)
    for key in added:
        if key not in known:
            raise _unknown_key(key, [o.lstrip("+") for o in overrides])


def _explain(error: Exception, overrides: Sequence[str]) -> UserError:
    """Hydra's complaint in one line: what, what is allowed, what to write instead."""
    text = str(error)
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        named = f"{key}/" in text or value == "null"
        if key in (*GROUPS, "hydra/launcher") and named and value not in choices(key):
            names = choices(key)
            return SettingError(
                key, value, f"must be one of {', '.join(names)}", f"{key}={nearest(value, names)}"
            )
    if "Ambiguous value for argument" in text:
        several = next((o for o in overrides if f"'{o}'" in text), "key=a,b")
        key, _, value = several.partition("=")
        return SettingError(
            key, value, "one value a run; several are a sweep, which takes -m",
            f"gma-bench run -m {shlex.join(overrides)}",
        )  # fmt: skip
    unknown = re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text)
    if unknown:
        return _unknown_key(unknown[1] or unknown[2], overrides)
    return UserError(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def _unknown_key(key: str, overrides: Sequence[str]) -> UserError:
    spelled = next((o for o in overrides if o.partition("=")[0] == key), f"{key}=…")
    known = _known_keys(overrides)
    parent, _, leaf = key.rpartition(".")
    siblings = [k for k in known if k.rpartition(".")[0] == parent] or known
    if not parent:
        siblings = [*GROUPS, *siblings]
    leaves = {k.rpartition(".")[2]: k for k in siblings}
    close = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
    if not close and parent:  # right leaf, wrong node
        close = [k for k in known if k.rpartition(".")[2] == leaf][:1]
    fix = f"{close[0]}={spelled.partition('=')[2]}" if close else f"{siblings[0]}=…"
    return SettingError(
        key, spelled.partition("=")[2], f"no such setting; there are {', '.join(siblings)}", fix
    )


def _group_choices(overrides: Sequence[str]) -> list[str]:
    chosen = [o.partition("=") for o in overrides]
    return [f"{k}={v}" for k, _, v in chosen if k in GROUPS and v in choices(k)]


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Every setting of the groups that are chosen."""
    config = new_loader().load_configuration("config", _group_choices(overrides), RunMode.RUN)
    return list(_keys(config))


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        if prefix == "" and key in ("hydra", "scale", "tuned"):
            continue
        if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            yield f"{prefix}{key}"
        elif isinstance(config[key], DictConfig):
            yield from _keys(config[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def nearest(value: str, names: Sequence[str]) -> str:
    return (difflib.get_close_matches(value, names, n=1, cutoff=0.0) or [names[0]])[0]


# --- what a run is called --------------------------------------------------------------------

IDENTITY = ("task", "mixer", "model", "training", "trainer")
SOURCES = "_sources_sha256"
NOT_IDENTITY = {
    "training": ("checkpoint_minutes", "num_workers", "worker_timeout_s", "log_every"),
    "task": ("data_dir", "checkpoint"),
}


def resolved(config: DictConfig) -> dict[str, Any]:
    """The part of a configuration that decides a run's figures, resolved to plain values.

    Paths, logging and launcher are left out; a local data folder is named by the digest of what it
    holds, and mixer, task and procedure by the digest of their sources, so that neither changed data
    nor changed code reuse an old record.
    """
    from gma_bench.results.store import sha256_tree

    plain: dict[str, Any] = {"scale": config.scale.name, "seed": config.seed}
    for node in IDENTITY:
        if node == "training" and not is_trained(config):
            continue
        values = OmegaConf.to_container(config[node], resolve=True)
        assert isinstance(values, dict)
        plain[node] = {str(k): v for k, v in values.items() if k not in NOT_IDENTITY.get(node, ())}
    for key, fix in (("data_dir", "task.source=embedded"), ("checkpoint", "task.checkpoint=null")):
        path = select(config, f"task.{key}")
        if path:
            if not Path(path).exists():
                raise SettingError(f"task.{key}", path, "no such file or folder", fix)
            plain["task"][f"{key}_sha256"] = sha256_tree(path)
    for node, key in (
        ("mixer", "_target_"),
        ("mixer", "layer"),
        ("task", "_target_"),
        ("task", "procedure"),
    ):
        target = plain[node].get(key)
        if not isinstance(target, str) or target.startswith("torch."):
            continue  # torch is six hundred files, and records name its version
        if digest := sources_digest(target):
            plain[node][f"{key.strip('_')}{SOURCES}"] = digest
    return plain


def without_sources(plain: dict[str, Any]) -> dict[str, Any]:
    """A resolved configuration as records had it before they knew their sources."""
    return {
        name: {k: v for k, v in node.items() if not k.endswith(SOURCES)}
        if isinstance(node, dict)
        else node
        for name, node in plain.items()
    }


def is_trained(config: DictConfig) -> bool:
    """Whether the cell trains a model (its scale gives it steps)."""
    return select(config, "training.steps") is not None


def group_hash(plain: dict[str, Any]) -> str:
    """The hash of what a run shares with its other seeds; runs that differ in it are not averaged."""
    return config_hash({k: v for k, v in plain.items() if k != "seed"})


def run_id(plain: dict[str, Any]) -> str:
    """``<task>-<mixer>-s<seed>-<hash>``."""
    names = plain["task"]["name"], plain["mixer"]["name"]
    return join_run_id(*names, plain["seed"], config_hash(plain))


def import_target(path: str) -> Callable[..., Any]:
    """The function that a dotted path names."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(
            "task.procedure", path, f"must be an importable function ({error})",
            "task.procedure=gma_bench.train.training.train",
        ) from error  # fmt: skip
