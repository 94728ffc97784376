"""Floating-point operations of a call, and the peak rates of known GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from gma_bench.profiling.memory import MadeUpScalars
from gma_bench.profiling.subject import Subject

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    # Dense peaks without sparsity, NVIDIA's data sheets of the named boards. float32 is that of the
    # ordinary cores: torch leaves tf32 off by default.
    "H200": {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9},
    "H100 PCIe": {"bfloat16": 756.0, "float16": 756.0, "float32": 51.2},
    "H100 NVL": {"bfloat16": 835.0, "float16": 835.0, "float32": 60.0},
    "H100": {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9},
    "A100": {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5},
    "A10": {"bfloat16": 125.0, "float16": 125.0, "float32": 31.2},
    "L40S": {"bfloat16": 362.0, "float16": 362.0, "float32": 91.6},
    "L4": {"bfloat16": 121.0, "float16": 121.0, "float32": 30.3},
    "V100": {"float16": 125.0, "float32": 15.7},
    "T4": {"float16": 65.0, "float32": 8.1},
}
"""Teraflops a second by a part of the device's name (the first that fits) and dtype."""


def peak_flops_per_s(device_name: str, dtype: str) -> float | None:
    """The data sheet's peak of a GPU, or None where it is not known."""
    for part, peaks in PEAK_TFLOPS.items():
        if all(word in device_name.replace("-", " ").split() for word in part.split()):
            return peaks[dtype] * 1e12 if dtype in peaks else None
    return None


def count_flops(build: Callable[[], Subject]) -> int:
    """Floating-point operations of a subject's pass, counted on tensors without data.

    ``torch.utils.flop_counter`` counts matrix products, convolutions and attention (two operations
    a multiply-add; a causal product in full) and nothing elementwise. Formulas for torch's CPU
    attention and for the harness's own operators are added here.
    """
    with FakeTensorMode():
        with MadeUpScalars():
            subject = build()
        with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
            subject.run_pass()
    return int(counter.get_total_flops())


def _formulas() -> dict[Any, Any]:
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    }


def _cpu_attention(
    q: Any, k: Any, v: Any, *args: Any, out_val: Tensor | None = None, **kwargs: Any
) -> int:
    return sdpa_flop_count(q, k, v)


def _cpu_attention_backward(
    grad: Any, q: Any, k: Any, v: Any, *args: Any, out_val: Tensor | None = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)
