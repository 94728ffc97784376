"""Compile the kernels for a GPU that need not be present; print what they use, as JSON lines.

Run as a script, in a process where Triton is not interpreting: ``ahead_of_time.py ARCH K D DTYPE
FORM [KERNEL …]``. Spills are those that ptxas reports, shared memory is that of the launch.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from gma_bench.ops import LOGITS, kernels
from gma_bench.ops.fused import SCAN_BLOCK, constants, tiles

KERNELS = ("write", "read", "read_backward", "write_backward", "scan")
TOKENS = {"q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"}
FLOAT32 = {
    "half_precision", "linear", "means", "constant", "states", "masses", "grad_states",
    "grad_masses", "grad_square", "grad_linear", "grad_constant", "denominators", "ratios",
    "exact", "centre",
}  # fmt: skip


def signature(name: str, fixed: dict[str, Any], dtype: str) -> dict[str, str]:
    """The type of each argument, as ASTSource wants them."""
    types = {}
    for argument in inspect.signature(getattr(kernels, name).fn).parameters:
        if argument in fixed:
            types[argument] = "constexpr"
        elif argument == "out" and name == "read_backward":  # the exact output
            types[argument] = "*fp32"
        elif argument in TOKENS:
            types[argument] = f"*{dtype}"
        elif argument in FLOAT32:
            types[argument] = "*fp32"
        else:
            types[argument] = {"key_mask": "*i8", "far_flag": "*i32", "eps": "fp32"}.get(
                argument, "i32"
            )
    return types


def compile_kernel(
    name: str, arch: int, size: int, width: int, dtype: str, causal: bool
) -> dict[str, Any]:
    """Shared memory, registers and spills of one kernel."""
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    if name == "scan":
        fixed: dict[str, Any] = {"REVERSE": False, "BLOCK": SCAN_BLOCK}
        options = {}
    else:
        fixed = constants(size, torch_dtype, LOGITS) | {
            "CAUSAL": causal,
            "MASKED": True,
        }
        chosen = tiles(size)
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    arguments = list(inspect.signature(getattr(kernels, name).fn).parameters)
    fixed = {key: value for key, value in fixed.items() if key in arguments}
    types = signature(name, fixed, dtype)
    # what a launch finds out about its arguments: aligned pointers, sizes that 16 divides
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (index,): divisible for index, argument in enumerate(arguments)
        if types[argument].startswith("*") or argument.endswith(("_row", "_head", "_batch", "width"))
    }  # fmt: skip
    source = ASTSource(getattr(kernels, name), types, fixed, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"kernel": name, "arch": arch, "size": size, "width": width,
            "shared_bytes": built.metadata.shared, **registers(built.asm["ptx"], arch)}  # fmt: skip


def registers(ptx: str, arch: int) -> dict[str, int]:
    """What ptxas says of a kernel."""
    target = re.search(r"\.target (\S+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        chip = target[1].split(",")[0]
        said = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name={chip}", file.name, "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    used = re.search(r"Used (\d+) registers", said)
    assert spilled is not None, said
    assert used is not None, said
    return {"registers": int(used[1]), "spill_bytes": int(spilled[1])}


if __name__ == "__main__":
    arch, size, width, dtype, form = sys.argv[1:6]
    for kernel in sys.argv[6:] or KERNELS:
        print(
            json.dumps(
                compile_kernel(kernel, int(arch), int(size), int(width), dtype, form == "causal")
            ),
            flush=True,
        )
