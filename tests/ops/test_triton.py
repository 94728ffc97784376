"""The kernels: under the interpreter they are the reference, and they compile for each GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
INTERPRET = "TRITON_INTERPRET"
SCRIPTS = Path(__file__).parent

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one block may take, CUDA C programming guide, table of compute capabilities."""

SPILL_LIMIT = {64: 768, 128: 768, 256: 3072, 512: 10240}
"""Bytes a thread that may go to local memory, by K, for bfloat16.

A thread of 256 holds ``block · K / 256`` of every tensor over components: 8 to 32 of the 255 registers
there are, with several such tensors alive in the causal backward.
"""

FLOAT32_SPILLS = 2
"""How many times that for float32, where products of values are float32 too: each of their operands
lies in registers whole."""


def _run(script: str, *arguments: str, interpret: bool) -> list[dict[str, object]]:
    """JSON lines of a script, in a process of its own: Triton decides on import what it does."""
    environment = {**os.environ, INTERPRET: "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def _agrees(group: str) -> None:
    cases = _run("interpreted.py", group, interpret=True)
    assert cases
    for case in cases:
        assert max(case["errors"]) < case["tolerance"], case  # type: ignore[arg-type, operator]
        assert case["repeats"], case
        assert case["zero where nothing is read"], case


def test_kernels_agree_with_the_reference() -> None:
    _agrees("default")


@pytest.mark.slow
@pytest.mark.parametrize("group", ["components", "widths", "lengths"])
def test_kernels_agree_with_the_reference_at_every_size(group: str) -> None:
    _agrees(group)


def _compiles(arch: int, size: int, width: int, dtype: str, form: str, *kernels: str) -> None:
    built = _run(
        "ahead_of_time.py", str(arch), str(size), str(width), dtype, form, *kernels, interpret=False
    )
    assert len(built) == (len(kernels) or 5)
    limit = SPILL_LIMIT[size] * (FLOAT32_SPILLS if dtype == "fp32" else 1)
    for kernel in built:
        assert kernel["shared_bytes"] <= SHARED_LIMIT[arch], kernel  # type: ignore[operator]
        assert kernel["spill_bytes"] <= limit, kernel  # type: ignore[operator]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_kernels_compile_ahead_of_time(arch: int) -> None:
    _compiles(arch, 64, 64, "bf16", "bidirectional")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bidirectional", "causal"])
@pytest.mark.parametrize(
    ("arch", "size", "width", "dtype"),
    [(90, size, width, "bf16") for size in SPILL_LIMIT for width in (64, 128)]
    + [
        (80, 64, 64, "fp32"),
        (100, 64, 64, "fp32"),
        (80, 512, 128, "bf16"),
        (100, 512, 128, "bf16"),
    ],
)
def test_the_table_compiles_ahead_of_time(
    arch: int, size: int, width: int, dtype: str, form: str
) -> None:
    _compiles(arch, size, width, dtype, form)


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gma_bench.ops import gma
    from tests.ops.cases import make

    monkeypatch.delenv(INTERPRET, raising=False)
    tensors = [t.float() for t in make(width=16, value_width=16).tensors]
    with pytest.raises(ValueError, match=r"tensors are on cpu.*TRITON_INTERPRET"):
        gma(*tensors, backend="triton")
    monkeypatch.setenv(INTERPRET, "1")
    with pytest.raises(ValueError, match="float64"):
        gma(*(t.double() for t in tensors), backend="triton")
    with pytest.raises(ValueError, match="d_r=8"):
        gma(*(t.float() for t in make().tensors), backend="triton")
    with pytest.raises(ValueError, match="K=513"):
        gma(
            *(t.float() for t in make(components=513, width=16, value_width=16).tensors),
            backend="triton",
        )


def test_auto_takes_the_kernels_where_they_run() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from gma_bench.ops import choose_backend

    def choice(device: str, dtype: torch.dtype, components: int = 64, width: int = 64) -> str:
        # a tensor that says it is there is enough
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
            q = torch.empty(1, 2, 4, width, dtype=dtype)
            means, log_priors = torch.empty(2, components, width), torch.empty(2, components)
            return choose_backend(q, q, q, means, means, log_priors)

    assert choice("cpu", torch.float32) != "triton"
    assert choice("cuda", torch.bfloat16) == "triton"
    assert choice("cuda", torch.float64) == "chunked"
    assert choice("cuda", torch.bfloat16, components=1024) == "chunked"
    assert choice("cuda", torch.bfloat16, width=256) == "chunked"


def test_fused_operator_under_fake_tensors() -> None:
    """Shapes and strides that the compiler plans with are those of the chunked operator."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.ops.cases import make

    with FakeTensorMode() as mode:
        tensors = [
            mode.from_tensor(t.float()) for t in make(n=300, width=16, by_token=True).tensors
        ]
        out, *kept = torch.ops.gma_bench.gma_fused(*tensors, None, True, 1e-6, "ieee")
        grads = torch.ops.gma_bench.gma_fused_backward(out, *tensors, None, *kept, True, "ieee")
    assert out.shape == tensors[2].shape
    assert out.stride() == tensors[2].stride()
    assert [g.shape for g in grads] == [t.shape for t in tensors]
