"""What a setting's value may be: a rule a setting, and what settings must be together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gma_bench.errors import SettingError, UserError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
Rule = tuple[Callable[[Any], bool], str, str]
"""Which values are allowed, that in words, and one of them as an override spells it."""

MOST = 2**63 - 1


def _is_whole(value: Any, low: int, high: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _integer(low: int, high: int = MOST) -> Rule:
    ends = f"of at least {low}" if high == MOST else f"from {low} to {high}"
    return (lambda v: _is_whole(v, low, high)), f"must be a whole number {ends}", str(low)


def _number(
    low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> Rule:
    """A finite number between two ends; ``above`` and ``below`` leave the ends themselves out."""
    start = f"above {low:g}" if above else f"at least {low:g}"
    end = "" if high == math.inf else f" and {'below' if below else 'at most'} {high:g}"

    def allowed(value: Any) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (low < value if above else low <= value)
            and (value < high if below else value <= high)
        )

    return allowed, f"must be a number, {start}{end}", "0.1" if above else f"{low:g}"


def _one_of(*names: str) -> Rule:
    words = "must be " + " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return (lambda v: isinstance(v, str) and v in names), words, names[0]


def _list_of(rule: Rule, *, least: int = 1, most: int = 1000) -> Rule:
    allowed, words, example = rule
    count = f"{least}" if least == most else "one or more" if least else "any number of"
    return (
        lambda v: (
            isinstance(v, list | ListConfig) and least <= len(v) <= most and all(map(allowed, v))
        ),
        f"must be a list of {count}, and each {words}",
        f"'[{','.join([example] * max(least, 1))}]'",
    )


def _either(*rules: Rule) -> Rule:
    return (
        (lambda v: any(allowed(v) for allowed, *_ in rules)),
        " or ".join(r[1] for r in rules),
        rules[0][2],
    )


TRUTH: Rule = (lambda v: isinstance(v, bool)), "must be true or false", "true"
TEXT: Rule = (lambda v: isinstance(v, str) and bool(v)), "must be text", "…"
POSITIVE, COUNT = _integer(1), _integer(0)
ABOVE_0, FROM_0, SHARE = _number(0, above=True), _number(0), _number(0, 1)
PASSES = _list_of(_one_of("forward", "forward_backward"))

RULES: dict[str, dict[Rule, str]] = {
    "": {
        _integer(0, 2**32 - 1): "seed",
        TEXT: "results_dir cache_dir",
        TRUTH: "rerun",
    },
    "model": {
        POSITIVE: "d_model num_layers num_heads",
        ABOVE_0: "mlp_ratio",
        _number(0, 1, below=True): "dropout",
        _one_of("learned", "sinusoidal", "none"): "positions",
        _one_of("mean", "cls"): "pooling",
        TRUTH: "tie_embeddings match_parameters",
    },
    "training": {
        POSITIVE: "steps batch_size accumulate eval_batch_size evaluations log_every",
        COUNT: "num_workers",
        ABOVE_0: "lr worker_timeout_s",
        FROM_0: "weight_decay clip checkpoint_minutes",
        SHARE: "warmup final_lr",
        _list_of(_number(0, 1, below=True), least=2, most=2): "betas",
        _one_of("adamw"): "optimizer",
        _one_of("cosine", "linear", "constant"): "schedule",
        TRUTH: "bucket_by_length test",
    },
    "trainer": {
        POSITIVE: "devices num_threads",
        _one_of("auto", "cpu", "gpu", "cuda", "mps"): "accelerator",
        _one_of("auto", "ddp", "fsdp"): "strategy",
        _one_of("32-true", "32", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"):
            "precision",
    },
    "mixer": {
        POSITIVE: "redraw_interval num_components routing_dim num_features chunk_size k d_state d_conv expand period",
        ABOVE_0: "variance_floor init_variance eps",
        TRUTH: "share_components_across_heads",
        _one_of("layernorm", "none"): "routing_norm",
        _one_of("none", "layerwise", "headwise", "key_value"): "sharing",
        TEXT: "backend",
    },
    "task": {
        POSITIVE: "max_length max_depth max_args num_train num_val num_test vocab_size batch_size "
                  "components_length measured_max_length simulation_operators min_rounds "
                  "bpe_vocab_size word_vocab_size eval_stride max_train_tokens max_eval_tokens "
                  "num_tokens resamples",
        COUNT: "min_length data_seed",
        ABOVE_0: "power_a budget_gib tolerance block_ms",
        FROM_0: "cell_seconds cap_seconds call_seconds",
        _number(0, 1, above=True, below=True): "validation_share",
        _one_of("embedded", "local", "hub"): "source default_source",
        _one_of("word", "bpe", "gpt2", "byte"): "tokenizer",
        _one_of("key", "query"): "side",
        _one_of("auto", "cpu", "cuda"): "device",
        _one_of("bidirectional", "causal"): "form",
        _list_of(POSITIVE): "lengths",
        _list_of(POSITIVE, least=0): "components contexts",
        _either(POSITIVE, _list_of(POSITIVE)): "num_pairs",
        _list_of(_one_of("layer", "model")): "scopes",
        PASSES: "passes",
        TRUTH: "random_non_queries measured causal companion",
        TEXT: "procedure data_dir tokenizer_dir dtype hub_dataset hub_config hub_revision record "
              "checkpoint",
    },
}  # fmt: skip
"""By node of the configuration: a rule, and the settings that it holds for."""

NULLABLE = {
    "model.dropout",
    "mixer.routing_dim",
    "mixer.init_variance",
    "mixer.redraw_interval",
    "task.source",
    "task.data_dir",
    "task.num_train",
    "task.num_val",
    "task.num_test",
    "task.tokenizer_dir",
    "task.word_vocab_size",
    "task.eval_stride",
    "task.max_train_tokens",
    "task.max_eval_tokens",
    "task.hub_config",
    "task.record",
    "task.checkpoint",
}
"""Settings that may be null; those of :mod:`training` may where a scale gives a task no steps."""


EXAMPLES = {
    "results_dir": "results",
    "cache_dir": ".cache/gma_bench",
    "model.d_model": "64",
    "model.num_heads": "2",
    "training.steps": "100",
    "training.batch_size": "32",
    "training.eval_batch_size": "64",
    "training.lr": "0.001",
    "training.betas": "'[0.9,0.98]'",
    "training.worker_timeout_s": "600",
    "mixer": "gma",
    "mixer.num_components": "64",
    "mixer.backend": "auto",
    "task": "listops",
    "task.max_length": "512",
}
"""What is proposed where the least that a rule allows would be odd."""


def rules() -> Iterator[tuple[str, Rule]]:
    """Every setting by its dotted name, with its rule."""
    for node, kinds in RULES.items():
        for rule, names in kinds.items():
            for name in names.split():
                yield (f"{node}.{name}" if node else name), rule


def check(config: DictConfig) -> None:
    """Check every value of a composed configuration that can be judged without building anything.

    Raises:
        SettingError: the first that is not allowed.
    """
    for node in filter(None, RULES):
        if not isinstance(select(config, node), DictConfig):
            raise SettingError(
                node, select(config, node), "must be chosen", f"{node}={EXAMPLES.get(node, '…')}"
            )
    for key in ("task.name", "mixer.name", "scale.name"):
        name = select(config, key)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise SettingError(key, name, "may hold letters, digits, _ and . only", f"{key}=mine")
    trained = select(config, f"scale.{config.task.name}.steps") is not None
    for setting, (allowed, words, example) in rules():
        if not _has(config, setting):
            continue
        value = select(config, setting)
        nullable = setting in NULLABLE or (setting.startswith("training.") and not trained)
        if not (nullable if value is None else allowed(value)):
            raise SettingError(setting, value, words, f"{setting}={EXAMPLES.get(setting, example)}")
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
