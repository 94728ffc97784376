"""What a setting's value may be: a rule a setting, and what settings must be together."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gma_bench.errors import SettingError, UserError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
Rule = tuple[str, Callable[[Any], bool], str, Any]


def _integer(low: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low


def _number(
    low: float, high: float = float("inf"), *, open_low: bool = False
) -> Callable[[Any], bool]:
    return lambda v: (
        isinstance(v, int | float)
        and not isinstance(v, bool)
        and (low < v if open_low else low <= v)
        and v <= high
    )


POSITIVE = "must be a whole number of at least 1"
NEVER_NULL = (
    "seed",
    "model.d_model",
    "model.num_layers",
    "model.num_heads",
    "mixer.num_components",
)
RULES: list[Rule] = [
    ("seed", _integer(0), "must be a whole number of at least 0", 0),
    ("model.d_model", _integer(1), POSITIVE, 64),
    ("model.num_layers", _integer(1), POSITIVE, 2),
    ("model.num_heads", _integer(1), POSITIVE, 2),
    ("model.mlp_ratio", _number(0, open_low=True), "must be above 0", 2),
    ("model.dropout", _number(0, 0.999), "must be at least 0 and below 1", 0.0),
    ("model.positions", lambda v: v in ("learned", "sinusoidal", "none"),
     "must be learned, sinusoidal or none", "learned"),
    ("model.pooling", lambda v: v in ("mean", "cls"), "must be mean or cls", "mean"),
    ("training.steps", _integer(1), POSITIVE, 100),
    ("training.batch_size", _integer(1), POSITIVE, 32),
    ("training.accumulate", _integer(1), POSITIVE, 1),
    ("training.eval_batch_size", _integer(1), POSITIVE, 64),
    ("training.evaluations", _integer(1), POSITIVE, 5),
    ("training.optimizer", lambda v: v in ("adamw",), "must be adamw", "adamw"),
    ("training.lr", _number(0, open_low=True), "must be above 0", 0.001),
    ("training.weight_decay", _number(0), "must be at least 0", 0.01),
    ("training.warmup", _number(0, 1), "must lie between 0 and 1", 0.1),
    ("training.schedule", lambda v: v in ("cosine", "linear", "constant"),
     "must be cosine, linear or constant", "cosine"),
    ("training.final_lr", _number(0, 1), "must lie between 0 and 1", 0.1),
    ("training.clip", _number(0), "must be at least 0 (0 does not clip)", 1.0),
    ("training.num_workers", _integer(0), "must be a whole number of at least 0", 0),
    ("training.worker_timeout_s", _number(0, open_low=True), "must be above 0", 600),
    ("training.checkpoint_minutes", _number(0), "must be at least 0", 10),
    ("training.log_every", _integer(1), POSITIVE, 10),
    ("training.test", lambda v: isinstance(v, bool), "must be true or false", "true"),
    ("trainer.num_threads", _integer(1), POSITIVE, 1),
    ("mixer.num_components", _integer(1), POSITIVE, 64),
    ("mixer.routing_dim", _integer(1), POSITIVE, 32),
    ("mixer.num_features", _integer(1), POSITIVE, 64),
    ("mixer.variance_floor", _number(0, open_low=True), "must be above 0", 0.001),
    ("task.max_length", _integer(1), POSITIVE, 512),
    ("task.min_length", _integer(0), "must be a whole number of at least 0", 16),
    ("task.source", lambda v: v in ("embedded", "local", "hub"),
     "must be embedded, local or hub", "embedded"),
    ("task.data_seed", _integer(0), "must be a whole number of at least 0", 0),
]  # fmt: skip


def check(config: DictConfig) -> None:
    """Check every value of a composed configuration that can be judged without building anything.

    Raises:
        SettingError: the first that is not allowed.
    """
    for key in ("task.name", "mixer.name", "scale.name"):
        name = select(config, key)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SettingError(key, name, "may hold letters, digits, _ and . only", f"{key}=mine")
    for setting, allowed, words, example in RULES:
        value = select(config, setting)
        null = value is None and setting in NEVER_NULL and _has(config, setting)
        if null or (value is not None and not allowed(value)):
            raise SettingError(setting, value, words, f"{setting}={example}")
    folder = Path(str(select(config, "results_dir")))
    if folder.exists() and not folder.is_dir():
        raise SettingError(
            "results_dir", folder, "is a file; must be a folder", "results_dir=results"
        )
    _check_together(config)


def _check_together(config: DictConfig) -> None:
    d_model, heads = select(config, "model.d_model"), select(config, "model.num_heads")
    if d_model and heads and d_model % heads:
        divisors = [h for h in range(1, d_model + 1) if d_model % h == 0]
        nearest = min(divisors, key=lambda h: abs(h - heads))
        raise SettingError(
            "model.num_heads", heads, f"must divide model.d_model={d_model}",
            f"model.num_heads={nearest}",
        )  # fmt: skip
    low, high = select(config, "task.min_length"), select(config, "task.max_length")
    if low is not None and high is not None and high < low:
        raise SettingError(
            "task.max_length", high, f"must be at least task.min_length={low}",
            f"task.max_length={max(2 * low, 16)}",
        )  # fmt: skip
    if select(config, "task.source") == "local" and not select(config, "task.data_dir"):
        raise SettingError(
            "task.data_dir", None, "task.source=local reads a folder", "task.data_dir=/path/to/data"
        )
    batch, parts = select(config, "training.batch_size"), select(config, "training.accumulate")
    if batch and parts and batch % parts:
        raise SettingError(
            "training.accumulate", parts, f"must divide training.batch_size={batch}",
            "training.accumulate=1",
        )  # fmt: skip
    form, forms = select(config, "task.form"), select(config, "mixer.forms")
    if form and forms and form not in forms:
        mixer = select(config, "mixer.name")
        raise SettingError(
            "mixer", mixer, f"has no {form} form, which task={config.task.name} needs"
            + (f" ({config.mixer.forms_reason})" if "forms_reason" in config.mixer else ""),
            "mixer=gma",
        )  # fmt: skip


def _has(config: DictConfig, key: str) -> bool:
    node, _, leaf = key.rpartition(".")
    return leaf in (config[node] if node else config)


def select(config: DictConfig, key: str) -> Any:
    """A setting by its dotted name; None where there is none.

    Raises:
        UserError: it refers to something that is not there.
    """
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{key} cannot be resolved: {first}") from None
