"""The selective scan of Mamba in plain torch, parallel in the sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
SEGMENT_ELEMENTS = 2**22
"""Hidden states (positions × channels × state size) that are held at once; bounds the memory."""


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t`` and ``y_t = C_t·h_t``, from ``h_0 = 0``.

    Source: Gu and Dao, *Mamba* (2023), algorithm 2. The sequence is cut into chunks that are
    scanned side by side, once to find what each hands on and, when those are combined, once more
    for the outputs: about 2√N steps, each over all chunks at once, in place of N. Only the states
    between chunks are kept for the backward pass, which computes the others again.

    Args:
        x: ``(B, N, D)``.
        dt: Δ, ``(B, N, D)``, not negative. Where it is zero the state passes unchanged.
        a: A, ``(D, S)``, negative.
        b: ``(B, N, S)``.
        c: ``(B, N, S)``.

    Returns:
        ``(B, N, D)``, in float32 at least.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        x, dt, a, b, c = (t.to(dtype) for t in (x, dt, a, b, c))
        return torch.ops.gma_bench.selective_scan(dt * x, dt, a.t().contiguous(), b, c)[0]


class _Segment(NamedTuple):
    """A stretch of T chunks of C positions; the position in the chunk is the first index."""

    u: Tensor  # (C, B, T, 1, D)
    dt: Tensor  # (C, B, T, 1, D)
    b: Tensor  # (C, B, T, S, 1)
    c: Tensor  # (C, B, T, S, 1)


def scan_body(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs ``(B, N, D)`` and the state before each chunk ``(B, T, S, D)``, for ``a (S, D)``."""
    carry = u.new_zeros(u.shape[0], *a.shape)
    outputs, starts = [], []
    decays = None
    for s in _segments(u, dt, b, c, state_size=a.shape[0]):
        decays = _decays(s, a, decays)
        start, carry = _chunk_starts(s, a, decays, carry)
        h, ys = start.clone(), []
        for t in range(len(s.u)):
            h.mul_(decays[t]).addcmul_(s.b[t], s.u[t])
            ys.append((s.c[t].transpose(-1, -2) @ h).squeeze(-2))
        outputs.append(_in_order(ys))
        starts.append(start)
    return _without_padding(outputs, u.shape[1]), torch.cat(starts, 1)


def scan_backward_body(
    grad: Tensor, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor
) -> Five:
    """Gradients of u, dt, a, b and c; the states between those kept are computed again."""
    segments = list(_segments(u, dt, b, c, state_size=a.shape[0]))
    grads_y = [s.u for s in _segments(grad, dt, b, c, state_size=a.shape[0])]
    kept = starts.split([s.u.shape[2] for s in segments], 1)
    carry = u.new_zeros(u.shape[0], *a.shape)
    grad_a, pieces = torch.zeros_like(a), []
    decays = states = None
    for s, start, grad_y in zip(segments[::-1], kept[::-1], grads_y[::-1], strict=True):
        decays = _decays(s, a, decays)
        states = _states(s, start, decays, states)
        carries, carry = _chunk_carries(s, a, grad_y, decays, carry)
        piece, grad_a_s = _segment_gradients(s, a, grad_y, decays, states, carries)
        grad_a += grad_a_s
        pieces.append(piece)
    du, ddt, db, dc = (
        _without_padding(list(parts[::-1]), u.shape[1]) for parts in zip(*pieces, strict=True)
    )
    return du, ddt, grad_a, db, dc


def _without_padding(parts: list[Tensor], n: int) -> Tensor:
    whole = torch.cat(parts, 1)
    return whole if whole.shape[1] == n else whole[:, :n].clone()  # an output owns its storage


# Operators of torch's library, so that compilers and fake tensors see one node and not its steps.
_define: Any = torch.library.custom_op
_scan_op = _define("gma_bench::selective_scan", scan_body, mutates_args=())
_scan_backward_op = _define(
    "gma_bench::selective_scan_backward", scan_backward_body, mutates_args=()
)


@_scan_op.register_fake
def _(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    chunks = sum(n for _, _, n in _cuts(u.shape, a.shape[0]))
    return u.new_empty(u.shape), u.new_empty(u.shape[0], chunks, *a.shape)


@_scan_backward_op.register_fake
def _(grad: Tensor, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor) -> Five:
    return tuple(t.new_empty(t.shape) for t in (u, dt, a, b, c))  # type: ignore[return-value]


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return torch.ops.gma_bench.selective_scan_backward(grad.contiguous(), *ctx.saved_tensors)


_scan_op.register_autograd(_grad, setup_context=_setup)


@register_flop_formula(torch.ops.gma_bench.selective_scan)
def _flops(u: Any, dt: Any, a: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """The read ``C·h``, the scan's one product; two operations a multiply-add."""
    return 2 * u[0] * u[1] * u[2] * a[0]


@register_flop_formula(torch.ops.gma_bench.selective_scan_backward)
def _backward_flops(
    grad: Any, u: Any, dt: Any, a: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Three products: the gradients of u, b and c."""
    return 3 * 2 * u[0] * u[1] * u[2] * a[0]


def _cuts(shape: torch.Size, state_size: int) -> Iterator[tuple[int, int, int]]:
    """First position, chunk length and number of chunks of each segment."""
    batch, n, width = shape
    positions = max(1, min(n, SEGMENT_ELEMENTS // max(1, batch * width * state_size)))
    chunk = max(1, round(positions**0.5))
    chunks = -(-positions // chunk)
    for first in range(0, n, chunk * chunks):
        yield first, chunk, -(-min(chunk * chunks, n - first) // chunk)


def _segments(u: Tensor, dt: Tensor, b: Tensor, c: Tensor, state_size: int) -> Iterator[_Segment]:
    for first, chunk, chunks in _cuts(u.shape, state_size):
        length = min(chunk * chunks, u.shape[1] - first)
        # Padding has Δ = 0, so it hands the state on as it is.
        parts = (
            F.pad(t[:, first : first + length], (0, 0, 0, -length % chunk))
            .unflatten(1, (-1, chunk))
            .permute(2, 0, 1, 3)
            for t in (u, dt, b, c)
        )
        u_s, dt_s, b_s, c_s = parts
        yield _Segment(u_s.unsqueeze(-2), dt_s.unsqueeze(-2), b_s.unsqueeze(-1), c_s.unsqueeze(-1))


def _buffer(old: Tensor | None, *shape: int, like: Tensor) -> Tensor:
    # Fresh memory costs more than what is computed into it, so segments of a size share theirs.
    return like.new_empty(shape) if old is None or old.shape != shape else old


def _decays(s: _Segment, a: Tensor, old: Tensor | None) -> Tensor:
    """``exp(Δ A)`` at each position, ``(C, B, T, S, D)``."""
    decays = _buffer(old, *s.u.shape[:3], *a.shape, like=a)
    for t in range(len(s.u)):
        torch.mul(s.dt[t], a, out=decays[t]).exp_()
    return decays


def _states(s: _Segment, start: Tensor, decays: Tensor, old: Tensor | None) -> Tensor:
    """States of each chunk: before its first position, and after each, ``(C + 1, B, T, S, D)``."""
    states = _buffer(old, len(s.u) + 1, *start.shape, like=start)
    states[0] = start
    for t in range(len(s.u)):
        torch.mul(states[t], decays[t], out=states[t + 1]).addcmul_(s.b[t], s.u[t])
    return states


def _chunk_starts(s: _Segment, a: Tensor, decays: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """State before each chunk ``(B, T, S, D)`` and after the last, from that before the first."""
    h = torch.zeros_like(decays[0])
    for t in range(len(s.u)):
        h.mul_(decays[t]).addcmul_(s.b[t], s.u[t])
    through = (s.dt.sum(0) * a).exp_()
    starts = []
    for chunk in range(h.shape[1]):
        starts.append(carry)
        carry = torch.addcmul(h[:, chunk], through[:, chunk], carry)
    return torch.stack(starts, 1), carry


def _chunk_carries(
    s: _Segment, a: Tensor, grad_y: Tensor, decays: Tensor, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """What later chunks pass back: gradients of the state after each chunk and before the first."""
    g = torch.zeros_like(decays[0])
    for t in reversed(range(len(s.u))):
        g.addcmul_(s.c[t], grad_y[t]).mul_(decays[t])
    through = (s.dt.sum(0) * a).exp_()
    carries = []
    for chunk in reversed(range(g.shape[1])):
        carries.append(carry)
        carry = torch.addcmul(g[:, chunk], through[:, chunk], carry)
    return torch.stack(carries[::-1], 1), carry


def _segment_gradients(
    s: _Segment, a: Tensor, grad_y: Tensor, decays: Tensor, states: Tensor, g: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Gradients of u, dt, b, c ``(B, T·C, ·)`` and of a, from the chunks' carries ``g``."""
    sum_a, log_decay, grads = torch.zeros_like(g), torch.empty_like(g), []
    for t in reversed(range(len(s.u))):
        g.addcmul_(s.c[t], grad_y[t])  # gradient of the state after position t
        du = (s.b[t].transpose(-1, -2) @ g).squeeze(-2)
        db = (g @ s.u[t].transpose(-1, -2)).squeeze(-1)
        dc = (states[t + 1] @ grad_y[t].transpose(-1, -2)).squeeze(-1)
        g.mul_(decays[t])  # gradient of the state before it
        torch.mul(g, states[t], out=log_decay)
        sum_a.addcmul_(log_decay, s.dt[t])
        grads.append((du, log_decay.mul_(a).sum(-2), db, dc))
    ordered = tuple(_in_order(parts[::-1]) for parts in zip(*grads, strict=True))
    return ordered, sum_a.sum((0, 1))


def _in_order(steps: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """One tensor ``(B, T, ·)`` for each position in the chunk, to ``(B, T·C, ·)``."""
    return torch.stack(tuple(steps), 2).flatten(1, 2)
