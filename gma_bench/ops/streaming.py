"""Causal GMA one token at a time: ``O(K·(d_r + d_v))`` a token, in a state that never grows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gma_bench.ops.reference import responsibilities


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
        state: from :func:`init_state` or the step before. It is updated in place, and returned,
            unless gradients are being recorded; then a new one is.

    Returns:
        ``(B, H, d_v)`` in the dtype of ``v``, and the state after the token.
    """
    # For one token the formula itself is both the most accurate form and the fewest operations.
    mixture = (t.to(state.mass.dtype) for t in (means, variances, log_priors))
    both = responsibilities(torch.stack((q, k), 2).to(state.mass.dtype), *mixture)
    gamma_q, gamma_k = both.unbind(2)  # (B, H, K)
    value = v.to(state.written.dtype)
    if torch.is_grad_enabled() and (gamma_k.requires_grad or state.written.requires_grad):
        written = torch.addcmul(state.written, gamma_k.unsqueeze(-1), value.unsqueeze(-2))
        state = StreamingState(written, state.mass + gamma_k)
    else:
        state.written.addcmul_(gamma_k.unsqueeze(-1), value.unsqueeze(-2))
        state.mass.add_(gamma_k)
    numerator = (gamma_q.unsqueeze(-2) @ state.written).squeeze(-2)
    denominator = (gamma_q * state.mass).sum(-1, keepdim=True) + eps
    return (numerator / denominator).to(v.dtype), state
