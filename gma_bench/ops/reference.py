"""The paper's formulas, line by line: the specification that every other backend is held to.

Everything is written in the direct (broadcast) form, ``(x − μ)²/σ²`` term by term, in whatever
dtype comes in; evaluated in float64 it is what tests compare with. It forms ``(N, K, d_r)`` and,
when causal, ``(N, K, d_v)`` tensors, so it is slow and large.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_joint(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Tensor:
    """``log π_k + log N(x; μ_k, diag σ²_k)``, paper, section "Method".

    Args:
        x: ``(B, H, N, d_r)``.
        means: ``(H, K, d_r)``.
        variances: ``(H, K, d_r)``, positive.
        log_priors: ``(H, K)``.

    Returns:
        ``(B, H, N, K)``.
    """
    difference = x.unsqueeze(-2) - means.unsqueeze(1)  # (B, H, N, K, d_r)
    mahalanobis = (difference.square() / variances.unsqueeze(1)).sum(-1)
    log_determinant = variances.log().sum(-1).unsqueeze(1)  # (H, 1, K)
    constant = x.shape[-1] * math.log(2 * math.pi)
    return log_priors.unsqueeze(1) - 0.5 * (mahalanobis + log_determinant + constant)


def responsibilities(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Tensor:
    """``γ_k(x) = π_k N(x; μ_k, σ²_k) / Σ_l π_l N(x; μ_l, σ²_l)``; shapes as in :func:`log_joint`."""
    return log_joint(x, means, variances, log_priors).softmax(-1)


def gma(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Write ``Ṽ = Γ_Kᵀ V``, ``Z = Γ_Kᵀ 1``; read ``O = Γ_Q Ṽ / (Γ_Q Z + ε)``; prefix sums when causal.

    Shapes as in :func:`gma_bench.ops.gma`.
    """
    gamma_q = responsibilities(q, means, variances, log_priors)  # (B, H, N, K)
    gamma_k = responsibilities(k, means, variances, log_priors)  # (B, H, M, K)
    if key_mask is not None:
        real = key_mask[:, None, :, None]
        gamma_k = torch.where(real, gamma_k, 0.0)
        v = torch.where(real, v, 0.0)  # 0 · anything a padding row holds, infinities included
    if causal:
        written = (gamma_k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)  # (B, H, N, K, d_v)
        mass = gamma_k.cumsum(2)  # (B, H, N, K)
        numerator = (gamma_q.unsqueeze(-1) * written).sum(-2)
        denominator = (gamma_q * mass).sum(-1, keepdim=True)
    else:
        written = gamma_k.transpose(-1, -2) @ v  # (B, H, K, d_v)
        mass = gamma_k.sum(-2).unsqueeze(-1)  # (B, H, K, 1)
        numerator = gamma_q @ written
        denominator = gamma_q @ mass
    return numerator / (denominator + eps)
