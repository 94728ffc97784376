"""``layer=X`` on the command line: a layer of any package in the place of a mixer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gma_bench.errors import SettingError

ADAPTER = "gma_bench.mixer.adapter.LayerMixer"
EXAMPLE = "layer=torch.nn.MultiheadAttention"


def with_layer(overrides: Sequence[str]) -> list[str]:
    """``layer=X`` as settings of an external mixer: a class's dotted name, or a YAML file of settings.

    Raises:
        SettingError: no such file, or one that holds no settings with a ``layer`` among them.
    """
    written: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key != "layer":
            written.append(override)
            continue
        settings = read(value) if value.endswith((".yaml", ".yml")) else {"layer": value}
        written += [
            "mixer=external", f"mixer._target_={ADAPTER}", "mixer.name=${mixer.layer}",
            "+mixer._recursive_=false", *_overrides("mixer", settings),
        ]  # fmt: skip
    return written


def read(path: str) -> Mapping[str, Any]:
    """The settings of a layer's file.

    Raises:
        SettingError: it cannot be read, or names no layer.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise SettingError("layer", path, f"must be a YAML file ({said})", EXAMPLE) from None
    if not isinstance(settings, Mapping) or not isinstance(settings.get("layer"), str):
        raise SettingError("layer", path, "must say layer: a class's dotted name", EXAMPLE)
    return settings


def _overrides(node: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """A mapping as Hydra's overrides, a line a value."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _overrides(f"{node}.{key}", value)
        else:
            yield f"++{node}.{key}={_spelled(value)}"


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_spelled, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
