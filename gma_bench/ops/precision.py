"""Products in float32 that are float32, whatever the surroundings say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch off autocast, tf32 and bfloat16 products for the body."""
    backends: Any = torch.backends
    settings = backends.cuda.matmul, backends.mkldnn.matmul
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
