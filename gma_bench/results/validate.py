"""What a file of results may hold: plain values of bounded size, and a record's fields by type.

Records travel between machines and people, so that none is trusted before it was looked at; what
comes through :func:`problem` needs no further checks in tables, verdicts and figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_BYTES = 1 << 26
"""Of one file: a thousand times the largest of the reference results."""
MAX_DEPTH = 12
MAX_VALUES = 1_000_000
MAX_INTEGER = 1 << 63
MAX_MAGNITUDE = 1e100
"""Of a number, and of what it is divided by: squares and ratios of figures stay finite."""

Check = Callable[[Any], bool]


def implausible(value: Any) -> str | None:
    """What is wrong with nested plain values, whatever they mean; None where nothing is.

    Refused are: depth above :data:`MAX_DEPTH`, more than :data:`MAX_VALUES` values (aliases counted
    as often as they are used), NaN, infinity and
    numbers beyond :data:`MAX_MAGNITUDE`, integers above 63 bits, text that is not Unicode.
    """
    count = 0
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            count += 1
            if isinstance(item, float) and not is_measured(item):
                return f"a number that is not finite, or beyond {MAX_MAGNITUDE:g}"
            if isinstance(item, int) and abs(item) >= MAX_INTEGER:
                return "an integer above 63 bits"
            if isinstance(item, str) and not _is_text(item):
                return "text that is not Unicode"
            if isinstance(item, dict):
                below += [*item, *item.values()]
            elif isinstance(item, list):
                below += item
            if count + len(below) > MAX_VALUES:
                return f"more than {MAX_VALUES:,} values"
        if not below:
            return None
        level = below
    return f"values nested deeper than {MAX_DEPTH}"


def is_measured(value: float) -> bool:
    """Zero, or of a size that something measured can have; not NaN, not infinite."""
    return value == 0 or 1 / MAX_MAGNITUDE < abs(value) < MAX_MAGNITUDE


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: Any) -> bool:
    """A real number, not a truth value and not a null."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _size(value: Any) -> bool:
    return is_number(value) and value >= 0


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_of(check: Check, **known: Check) -> Check:
    """A dict whose values pass ``check``, or the one of their own where they are known."""
    return lambda value: (
        isinstance(value, dict) and all(known.get(key, check)(item) for key, item in value.items())
    )


def _anything(value: Any) -> bool:
    return True


ROW = _dict_of(
    _scalar,
    **dict.fromkeys(
        ("sweep", "scope", "pass", "dtype", "device", "device_name", "status", "reason", "method",
         "timer", "backend", "reference", "module"),
        _or_null(_text),
    ),
    **dict.fromkeys(("causal", "converged"), _or_null(_truth)),
    **dict.fromkeys(("seq_len", "batch_size"), _positive),
    **dict.fromkeys(
        ("num_components", "median_ms", "tokens_per_s", "reference_median_ms", "ratio"),
        _or_null(_positive),
    ),
    **dict.fromkeys(
        ("iqr_ms", "ratio_iqr", "rounds", "calls", "flops", "flops_per_s", "peak_share",
         "state_bytes", "peak_bytes", "saved_bytes", "parameter_bytes", "standing_bytes",
         "operators", "seconds", "simulated_bytes", "reached", "layer", "head"),
        _or_null(_size),
    ),
)  # fmt: skip
"""The columns of a row of a profile or of the components of a mixer."""


def _row(value: Any) -> bool:
    """Such a row; one that measures a sweep over lengths has a length."""
    return ROW(value) and ("sweep" not in value or "seq_len" in value)


FIELDS: dict[str, Check] = {
    "task": _text,
    "mixer": _text,
    "scale": _text,
    "seed": _whole,
    "config": _dict_of(
        _anything,
        **dict.fromkeys(("task", "mixer", "model", "training", "trainer"), _dict_of(_anything)),
    ),
    "config_hash": _text,
    "metric": _text,
    "split": _text,
    "metrics": _dict_of(_dict_of(_or_null(is_number))),
    "rows": _list_of(_row),
    "curves": _dict_of(_list_of(_or_null(is_number))),
    "data": _dict_of(
        _anything, **dict.fromkeys(("name", "source", "fingerprint"), _or_null(_text))
    ),
    "duration_s": _size,
    "command": _text,
    "git": _dict_of(_scalar, commit=_or_null(_text), dirty=_or_null(_truth)),
    "versions": _dict_of(_scalar),
    "machine": _dict_of(_scalar),
}
"""What every record has."""

OPTIONAL: dict[str, Check] = {
    "group_hash": _or_null(_text),
    "value": _or_null(is_number),
    "higher_is_better": _or_null(_truth),
    "parameters": _or_null(_size),
    "tokens_per_s": _or_null(_size),
    "peak_memory_bytes": _or_null(_size),
    "started_at": _or_null(_text),
    "finished_at": _or_null(_text),
    "error": _or_null(_dict_of(_or_null(_text), step=_or_null(_whole))),
    "extra": _dict_of(_anything, state_bytes=_or_null(_size), growth=_list_of(_dict_of(_scalar))),
}


def problem(record: dict[str, Any]) -> str | None:
    """The first field of a record that is missing or of the wrong type, in words; None when none is."""
    for key, check in FIELDS.items():
        if key not in record or not check(record[key]):
            return f"{key} is missing or of the wrong type"
    for key, check in OPTIONAL.items():
        if key in record and not check(record[key]):
            return f"{key} is of the wrong type"
    return None
