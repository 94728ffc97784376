"""GMA on a GPU: launches the kernels of :mod:`gma_bench.ops.kernels`.

Also runs on CPU tensors under Triton's interpreter (``TRITON_INTERPRET=1``), which is how the tests
hold the kernels to the reference.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gma_bench.ops import blocks
from gma_bench.ops.chunked import (
    gma_backward_flops,
    gma_flops,
    gradients_like,
    refuse_double_backward,
)
from gma_bench.ops.mixture import SAFE_MAGNITUDE
from gma_bench.ops.precision import full_precision

MAX_COMPONENTS = 512
WIDTHS = (16, 128)
"""Smallest and largest width of routing vectors and of values."""

SCAN_BLOCK = 1024


class Tiles(NamedTuple):
    """Sizes of a launch; powers of two."""

    block: int  # tokens
    part_blocks: int  # blocks between two causal states
    width_tile: int  # of the routing width, in the products of the logits
    value_tile: int  # of the value width
    num_stages: int  # of the loads in a loop; each takes shared memory
    num_warps: int


TABLE: dict[int, Tiles] = {
    64: Tiles(32, 2, 16, 32, 3, 8), 128: Tiles(16, 4, 16, 32, 3, 8),
    256: Tiles(16, 4, 16, 16, 1, 8), 512: Tiles(16, 8, 16, 16, 1, 8),
}  # fmt: skip
"""Sizes by the smallest K that holds a problem. Chosen by what ptxas says of registers and spills
(``tests/ops/ahead_of_time.py``), not searched for on a device. Widths are walked in tiles, so that
they change neither."""


def tiles(components: int) -> Tiles:
    """The entry of :data:`TABLE` for a problem."""
    return TABLE[next(size for size in TABLE if components <= size)]


def power_of_two(size: int) -> int:
    """The smallest power of two, 16 at least, that is not below ``size``."""
    return max(16, 1 << (size - 1).bit_length())


def constants(components: int, dtype: torch.dtype, precision: str) -> dict[str, Any]:
    """Compile-time arguments that all kernels share."""
    chosen = tiles(components)
    coarse = 0 if dtype == torch.float32 else 2 if interpreted() else 1
    return {
        "COMPONENTS": power_of_two(components), "BLOCK": chosen.block,
        "WIDTH_TILE": chosen.width_tile, "VALUE_TILE": chosen.value_tile,
        "COARSE": coarse, "PRECISION": precision,
    }  # fmt: skip


def interpreted() -> bool:
    """Whether kernels run in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(q: Tensor, v: Tensor, means: Tensor) -> str | None:
    """What keeps the kernels from taking these inputs, or None."""
    low, high = WIDTHS
    if q.device.type != "cuda" and not interpreted():
        return f"tensors are on {q.device.type}: kernels run on cuda (or with TRITON_INTERPRET=1)"
    if torch.float64 in (q.dtype, v.dtype, means.dtype):
        return "float64 is not supported"
    if means.shape[1] > MAX_COMPONENTS:
        return f"K={means.shape[1]} is above {MAX_COMPONENTS}"
    if not (low <= q.shape[3] <= high and low <= v.shape[3] <= high):
        return f"d_r={q.shape[3]} and d_v={v.shape[3]} must be {low} to {high}"
    return None


# ---------------------------------------------------------------- launches


class Prepared:
    """What every launch of a call is given."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        means: Tensor,
        variances: Tensor,
        log_priors: Tensor,
        key_mask: Tensor | None,
        causal: bool,
        precision: str,
    ) -> None:
        from gma_bench.ops import kernels

        self.kernels = kernels
        self.q, self.k, self.v = (blocks.rows_contiguous(t) for t in (q, k, v))
        self.parameters = means, variances, log_priors
        self.causal = causal
        self.mask = q if key_mask is None else key_mask.contiguous().view(torch.int8)
        self.batch, self.heads = q.shape[:2]
        self.components, self.width = means.shape[1:]
        self.value_width = v.shape[3]
        mean, variance = means.double(), variances.double()
        half = 0.5 / variance
        logs = log_priors.double() - 0.5 * variance.log().sum(-1)
        norm = (mean.square() * half).sum(-1)
        reach = max_length(q, k).square() * half.amax() + norm.amax()
        self.is_far = ~(reach <= SAFE_MAGNITUDE)  # stays on the device: nothing waits for it
        constant = torch.where(self.is_far, logs, logs - norm)
        constant = constant - constant.amax(-1, keepdim=True)  # no posterior sees it
        self.mixture = (
            half.float(),
            (2 * mean * half).float(),
            means.float().contiguous(),
            constant.float(),
            self.is_far.to(torch.int32),
        )
        self.tiles = tiles(self.components)
        self.constants = constants(self.components, v.dtype, precision)
        self.sizes = self.components, self.width, self.value_width
        self.masked = key_mask is not None
        centre = blocks.lone_values(self.v, key_mask)
        if centre is None:
            centre = q.new_zeros(*v.shape[:2], v.shape[3], dtype=torch.float32)
        self.centre = centre

    def split(self, length: int) -> tuple[int, int, int, int]:
        """``(programs, parts, blocks of a part, parts of a program)`` for a length."""
        count = max(1, -(-length // self.tiles.block))
        wanted = max(1, 2 * processors(self.q.device) // max(1, self.batch * self.heads))
        if not self.causal:
            each = -(-count // min(wanted, count))
            return -(-count // each), -(-count // each), each, 1
        parts = -(-count // self.tiles.part_blocks)
        each = -(-parts // min(wanted, parts))
        return -(-parts // each), parts, self.tiles.part_blocks, each

    def launch(self, kernel: Any, grid: tuple[int, int], *args: Any, **options: Any) -> None:
        """Run a kernel with the shared compile-time arguments."""
        kernel[grid](
            *args,
            **self.constants,
            **options,
            num_warps=self.tiles.num_warps,
            num_stages=self.tiles.num_stages,
        )

    def states(self, parts: int) -> tuple[Tensor, Tensor]:
        """Room for a state a part."""
        masses = self.q.new_empty(
            self.batch * self.heads, parts, self.components, dtype=torch.float32
        )
        return masses.new_empty(*masses.shape, self.value_width), masses

    def join(self, states: Tensor, masses: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """What each part reads: all parts, or the earlier (later) ones."""
        if not self.causal:
            return states.sum(1, keepdim=True), masses.sum(1, keepdim=True)
        for tensor in (states, masses):
            size = tensor.shape[2:].numel()
            grid = -(-size // SCAN_BLOCK), tensor.shape[0]
            self.kernels.scan[grid](
                tensor, size, tensor.shape[1], REVERSE=reverse, BLOCK=SCAN_BLOCK
            )
        return states, masses


def max_length(*tokens: Tensor) -> Tensor:
    """Length of the longest vector, float64."""
    lengths = [
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float32).amax()
        for t in tokens if t.numel()
    ]  # fmt: skip
    return torch.stack(lengths).amax().double() if lengths else tokens[0].new_zeros(()).double()


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; a few where there are none, so that every branch is walked."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, head and token."""
    return [size for tensor in tensors for size in tensor.stride()[:3]]


def gma_fused_body(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    eps: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output; what backward needs: exact output, the states that were read, masses, denominators.

    The exact output is ``(B, H, N, d_v)`` in float32, less what was taken from the values; denominators
    are ``(B·H, N)``.
    """
    with full_precision():
        call = Prepared(q, k, v, means, variances, log_priors, key_mask, causal, precision)
        programs, parts, part_blocks, program_parts = call.split(k.shape[2])
        states, masses = call.states(parts)
        sequences = call.batch * call.heads
        call.launch(
            call.kernels.write,
            (programs, sequences),
            call.k,
            call.v,
            call.centre,
            call.mask,
            *call.mixture,
            states,
            masses,
            *strides(call.k, call.v),
            call.heads,
            k.shape[2],
            *call.sizes,
            parts,
            part_blocks,
            program_parts,
            MASKED=call.masked,
        )
        states, masses = call.join(states, masses)
        out = blocks.like_layout(q, v)
        denominators = masses.new_empty(sequences, q.shape[2])
        exact = masses.new_empty(out.shape)
        call.launch(
            call.kernels.read,
            (-(-q.shape[2] // call.tiles.block), sequences),
            call.q,
            call.k,
            call.v,
            call.centre,
            call.mask,
            out,
            exact,
            denominators,
            *call.mixture,
            states,
            masses,
            *strides(call.q, call.k, call.v, out),
            call.heads,
            q.shape[2],
            *call.sizes,
            states.shape[1],
            part_blocks,
            eps,
            CAUSAL=causal,
            MASKED=call.masked,
        )
        return out, exact, states, masses, denominators


def gma_fused_backward_body(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    exact: Tensor,
    states: Tensor,
    masses: Tensor,
    denominators: Tensor,
    causal: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, means, variances and log priors."""
    with full_precision():
        call = Prepared(q, k, v, means, variances, log_priors, key_mask, causal, precision)
        grad_out = blocks.rows_contiguous(grad_out)
        grads = [torch.empty_like(t) for t in (q, k, v)]
        grad_q, grad_k, grad_v = filled = [blocks.rows_contiguous(t) for t in grads]
        sequences = call.batch * call.heads
        programs, grad_parts, part_blocks, program_parts = call.split(q.shape[2])
        sums_q = Sums(call, programs)
        grad_states, grad_masses = call.states(grad_parts)
        ratios = torch.empty_like(denominators)
        call.launch(
            call.kernels.read_backward,
            (programs, sequences),
            call.q,
            call.k,
            call.v,
            call.centre,
            call.mask,
            exact,
            grad_out,
            grad_q,
            denominators,
            ratios,
            *call.mixture,
            states,
            masses,
            grad_states,
            grad_masses,
            *sums_q.tensors,
            *strides(call.q, call.k, call.v, exact, grad_out, grad_q),
            call.heads,
            q.shape[2],
            *call.sizes,
            grad_parts,
            part_blocks,
            program_parts,
            CAUSAL=causal,
            MASKED=call.masked,
        )
        grad_states, grad_masses = call.join(grad_states, grad_masses, reverse=True)
        programs, key_parts, part_blocks, program_parts = call.split(k.shape[2])
        sums_k = Sums(call, programs)
        call.launch(
            call.kernels.write_backward,
            (programs, sequences),
            call.q,
            call.k,
            call.v,
            call.centre,
            call.mask,
            grad_out,
            grad_k,
            grad_v,
            denominators,
            ratios,
            *call.mixture,
            grad_states,
            grad_masses,
            *sums_k.tensors,
            *strides(call.q, call.k, call.v, grad_out, grad_k, grad_v),
            call.heads,
            k.shape[2],
            *call.sizes,
            key_parts,
            part_blocks,
            program_parts,
            CAUSAL=causal,
            MASKED=call.masked,
        )
        blocks.copy_back(grads, filled)
        return *grads, *finish(call, sums_q, sums_k)  # type: ignore[return-value]


class Sums:
    """A program's own sums for the gradients of the mixture."""

    def __init__(self, call: Prepared, programs: int) -> None:
        shape = call.batch, call.heads, programs, call.components
        constant = call.q.new_empty(shape, dtype=torch.float32)
        square = constant.new_empty(*shape, call.width)
        self.tensors = square, torch.empty_like(square), constant

    def total(self) -> list[Tensor]:
        """Over programs and sequences, in float64."""
        return [tensor.sum((0, 2), dtype=torch.float64) for tensor in self.tensors]


def finish(call: Prepared, *sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of means, variances and log priors."""
    means, variances, log_priors = call.parameters
    square, linear, constant = (
        a + b for a, b in zip(*(part.total() for part in sums), strict=True)
    )
    mean, precision, total = means.double(), variances.double().reciprocal(), constant[..., None]
    first = torch.where(call.is_far, linear, linear - total * mean)  # Σ dL (x − μ)
    centred = square - mean * (2 * linear - total * mean)
    second = torch.where(call.is_far, square, centred)  # Σ dL (x − μ)²
    grad_variances = 0.5 * (second * precision - total) * precision
    return (
        (first * precision).to(means.dtype),
        grad_variances.to(variances.dtype),
        constant.to(log_priors.dtype),
    )


# ---------------------------------------------------------------- registration

_define: Any = torch.library.custom_op
gma_fused_op = _define("gma_bench::gma_fused", gma_fused_body, mutates_args=())
gma_fused_backward_op = _define(
    "gma_bench::gma_fused_backward", gma_fused_backward_body, mutates_args=()
)


@gma_fused_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    eps: float,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sequences, components = q.shape[0] * q.shape[1], means.shape[1]
    parts: Any = 1
    if causal:
        chosen = tiles(components)
        tokens = chosen.block * chosen.part_blocks
        parts = (q.shape[2] + tokens - 1) // tokens
    masses = q.new_empty(sequences, parts, components, dtype=torch.float32)
    out = blocks.like_layout(q, v)
    return (
        out,
        masses.new_empty(out.shape),
        masses.new_empty(*masses.shape, v.shape[3]),
        masses,
        masses.new_empty(sequences, q.shape[2]),
    )


gma_fused_backward_op.register_fake(gradients_like)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.causal, _, ctx.precision = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 10
    grads = torch.ops.gma_bench.gma_fused_backward(
        grad_out, *ctx.saved_tensors, ctx.causal, ctx.precision
    )
    return *grads, None, None, None, None


gma_fused_op.register_autograd(_grad, setup_context=_setup)
gma_fused_backward_op.register_autograd(refuse_double_backward)


_forward_formula: Any = gma_flops
_backward_formula: Any = gma_backward_flops


@register_flop_formula(torch.ops.gma_bench.gma_fused)
def _fused_flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    return int(_forward_formula(*shapes[:9]))


@register_flop_formula(torch.ops.gma_bench.gma_fused_backward)
def _fused_backward_flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    causal = shapes[12]
    return int(_backward_formula(*shapes[:8], shapes[9], shapes[10], causal, 0.0))
