"""GMA as functions. Imports torch (and triton, where a kernel is asked for) alone."""

from __future__ import annotations

import torch
from torch import Tensor

from gma_bench.ops import reference

BACKENDS = ("auto", "reference", "chunked", "triton")


def _logits(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(x.dtype, means.dtype), torch.float32)
    x, means, variances = x.to(dtype), means.to(dtype), variances.to(dtype)
    precision = variances.reciprocal()
    constant = log_priors.to(dtype) - 0.5 * (
        means.square() * precision + variances.log()
    ).sum(-1)
    weight = torch.cat((-0.5 * precision, means * precision), -1).transpose(-1, -2)
    return torch.cat((x.square(), x), -1) @ weight + constant.unsqueeze(1)


def responsibilities(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Tensor:
    """Posterior of each mixture component given ``x``: ``(B, H, N, d_r) -> (B, H, N, K)``."""
    with torch.autocast(x.device.type, enabled=False):
        return _logits(x, means, variances, log_priors).softmax(-1)


def gma(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor,
    *, causal: bool = False, key_mask: Tensor | None = None, eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """Gaussian mixture attention.

    Args:
        q: ``(B, H, N, d_r)``.
        k: ``(B, H, M, d_r)``.
        v: ``(B, H, M, d_v)``.
        means, variances: ``(H, K, d_r)``.
        log_priors: ``(H, K)``.
        causal: whether query i reads keys j ≤ i only (needs N = M).
        key_mask: ``(B, M)`` bool, True = a real token.
        eps: added to the denominator.
        backend: one of ``auto``, ``reference``, ``chunked``, ``triton``.

    Returns:
        ``(B, H, N, d_v)`` in the dtype of ``v``.
    """
    if backend == "reference":
        return reference.gma(
            q, k, v, means, variances, log_priors, causal=causal, key_mask=key_mask, eps=eps
        )
    with torch.autocast(q.device.type, enabled=False):
        gamma_q = _logits(q, means, variances, log_priors).softmax(-1)
        gamma_k = _logits(k, means, variances, log_priors).softmax(-1)
        values = v.to(gamma_k.dtype)
        if key_mask is not None:
            real = key_mask[:, None, :, None]
            gamma_k = torch.where(real, gamma_k, 0.0)
            values = torch.where(real, values, 0.0)
        if causal:
            affinity = (gamma_q @ gamma_k.transpose(-1, -2)).tril()
            out = (affinity @ values) / (affinity.sum(-1, keepdim=True) + eps)
        else:
            written = gamma_k.transpose(-1, -2) @ values
            mass = gamma_k.sum(-2).unsqueeze(-1)
            out = (gamma_q @ written) / (gamma_q @ mass + eps)
        return out.to(v.dtype)
