"""Attention with a kernel ``φ(q)·φ(k)`` in place of the exponential, given the features φ.

What Linear Transformer, Performer and cosFormer have in common once their feature maps are applied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_SIZE = 128


def kernelized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    eps: float = 1e-6,
) -> Tensor:
    """``o_i = Σ_j (q_i·k_j) v_j / (Σ_j q_i·k_j + ε)`` in time and memory linear in the length.

    The causal form keeps one state ``Σ_j k_j v_jᵀ`` a chunk, not one a position. Computed in
    float32 at least: sums over thousands of positions overflow float16 and are coarse in bfloat16.

    Args:
        q: query features ``(B, H, N, D)``, not negative.
        k: key features ``(B, H, M, D)``, not negative.
        v: values ``(B, H, M, d_v)``.
        causal: whether position i sees only j ≤ i (N = M).
        mask: ``(B, M)`` bool, True = a real key.
        chunk_size: positions a chunk, causal only.
        eps: ε of the denominator.

    Returns:
        ``(B, H, N, d_v)`` in the dtype of ``v``.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    with torch.autocast(v.device.type, enabled=False):
        features_q, features_k, values = q.to(dtype), k.to(dtype), v.to(dtype)
        if mask is not None:
            real = mask[:, None, :, None]
            features_k = torch.where(real, features_k, 0.0)
            values = torch.where(real, values, 0.0)
        # A value of one in every key adds the weights up: the denominator is one more column.
        values = F.pad(values, (0, 1), value=1.0)
        if causal:
            sums = _causal_sums(features_q, features_k, values, chunk_size)
        else:
            sums = features_q @ (features_k.transpose(-1, -2) @ values)
        out = sums[..., :-1] / (sums[..., -1:] + eps)
    return out.to(v.dtype)


def _causal_sums(q: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> Tensor:
    """``Σ_{j≤i} (q_i·k_j) v_j``."""
    n = q.shape[-2]
    chunk_size = min(chunk_size, n)
    padding = -n % chunk_size
    if padding:  # keys of zero at the end: no effect on what comes before
        q, k, v = (F.pad(t, (0, 0, 0, padding)) for t in (q, k, v))
    q, k, v = (t.unflatten(2, (-1, chunk_size)) for t in (q, k, v))  # (B, H, T, C, ·)
    affinity = (q @ k.transpose(-1, -2)).tril()  # (B, H, T, C, C)
    state = before(k.transpose(-1, -2) @ v)  # (B, H, T, D, d_v + 1)
    return (affinity @ v + q @ state).flatten(2, 3)[:, :, :n]


def before(x: Tensor) -> Tensor:
    """Sum over the chunks before each one, ``(B, H, T, …)``; zero for the first."""
    return F.pad(x[:, :, :-1].cumsum(2), (0, 0, 0, 0, 1, 0))


def kernelized_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, mass: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """One position of the causal form.

    Args:
        q, k: features ``(B, H, D)``.
        v: ``(B, H, d_v)``.
        state: ``Σ k vᵀ`` so far, ``(B, H, D, d_v)``, float32 or wider.
        mass: ``Σ k`` so far, ``(B, H, D)``.
        eps: ε of the denominator.

    Returns:
        ``(B, H, d_v)`` in the dtype of ``v``, and the next ``state`` and ``mass``.
    """
    features_q, features_k = q.to(state.dtype), k.to(state.dtype)
    state = state + features_k.unsqueeze(-1) * v.to(state.dtype).unsqueeze(-2)
    mass = mass + features_k
    numerator = (features_q.unsqueeze(-2) @ state).squeeze(-2)
    out = numerator / ((features_q * mass).sum(-1, keepdim=True) + eps)
    return out.to(v.dtype), state, mass
