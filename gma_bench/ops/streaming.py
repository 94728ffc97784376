"""Causal GMA one token at a time: ``O(K·(d_r + d_v))`` a token, in a state that never grows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gma_bench.ops.precision import full_precision
from gma_bench.ops.reference import responsibilities

CHUNK_SIZE = 128
"""Tokens of a :func:`prefill` that read one another at once."""


class StreamingState(NamedTuple):
    """What was written so far: ``Ṽ (B, H, K, d_v)`` and ``Z (B, H, K)``; float32 at least."""

    written: Tensor
    mass: Tensor


def init_state(
    batch: int, means: Tensor, value_width: int, dtype: torch.dtype | None = None
) -> StreamingState:
    """The state before the first token, for a mixture with these ``means (H, K, d_r)``."""
    heads, components, _ = means.shape
    dtype = torch.promote_types(dtype or means.dtype, torch.float32)
    mass = means.new_zeros(batch, heads, components, dtype=dtype)
    return StreamingState(mass.new_zeros(*mass.shape, value_width), mass)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    state: StreamingState,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, StreamingState]:
    """Write one key and value, then read with one query; equals a position of causal :func:`gma`.

    Args:
        q, k: ``(B, H, d_r)``.
        v: ``(B, H, d_v)``.
        means, variances, log_priors, eps: as for :func:`gma_bench.ops.gma`.
        state: from :func:`init_state` or the step before; it stays as it is.

    Returns:
        ``(B, H, d_v)`` in the dtype of ``v``, and the state after the token.
    """
    # For one token the formula itself is both the most accurate form and the fewest operations.
    mixture = (t.to(state.mass.dtype) for t in (means, variances, log_priors))
    both = responsibilities(torch.stack((q, k), 2).to(state.mass.dtype), *mixture)
    gamma_q, gamma_k = both.unbind(2)  # (B, H, K)
    value = v.to(state.written.dtype)
    written = torch.addcmul(state.written, gamma_k.unsqueeze(-1), value.unsqueeze(-2))
    state = StreamingState(written, state.mass + gamma_k)
    numerator = (gamma_q.unsqueeze(-2) @ state.written).squeeze(-2)
    denominator = (gamma_q * state.mass).sum(-1, keepdim=True) + eps
    return (numerator / denominator).to(v.dtype), state


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    state: StreamingState,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, StreamingState]:
    """Consecutive tokens at once; equals a :func:`step` for each. Differentiable, in the state too.

    Args:
        q, k: ``(B, H, N, d_r)``.
        v: ``(B, H, N, d_v)``.
        means, variances, log_priors, eps: as for :func:`gma_bench.ops.gma`.
        state: of the tokens before; it stays as it is.

    Returns:
        ``(B, H, N, d_v)`` in the dtype of ``v``, and the state after the last token.
    """
    dtype, mixture = state.mass.dtype, (means, variances, log_priors)
    with full_precision():
        gamma_q, gamma_k = (
            torch.ops.gma_bench.responsibilities(t.to(dtype), *mixture) for t in (q, k)
        )
        # A value of one in every key adds the weights up: the denominator is one more column.
        values = F.pad(v.to(dtype), (0, 1), value=1.0)
        slots = torch.cat((state.written, state.mass.unsqueeze(-1)), -1)  # (B, H, K, d_v + 1)
        sums = []
        chunks = (t.split(CHUNK_SIZE, 2) for t in (gamma_q, gamma_k, values))
        for readers, writers, written in zip(*chunks, strict=True):
            affinity = (readers @ writers.transpose(-1, -2)).tril()
            sums.append(affinity @ written + readers @ slots)
            slots = slots + writers.transpose(-1, -2) @ written
        both = torch.cat(sums, 2)
        out = both[..., :-1] / (both[..., -1:] + eps)
    return out.to(v.dtype), StreamingState(
        slots[..., :-1].contiguous(), slots[..., -1].contiguous()
    )
