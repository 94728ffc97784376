"""GMA as an operator of plain torch: blocks of tokens, a backward of its own, any device.

Registered with ``torch.library`` so that autograd, autocast, ``torch.compile``, fake tensors and
the FLOP counter know it as one node: ``gma_bench::gma`` and ``gma_bench::gma_backward``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gma_bench.ops import blocks
from gma_bench.ops.mixture import Mixture, MixtureGradients, compute_dtype

NO_DOUBLE_BACKWARD = (
    "gma(backend='chunked') has no second derivative; use backend='reference' for create_graph=True"
)


def forward(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor,
    key_mask: Tensor | None, causal: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, then what backward needs: ``Ṽ`` and ``Z``, or the causal states and their masses."""
    mixture = Mixture(means, variances, log_priors, compute_dtype(q, k, v, means, variances))
    if causal:
        out = blocks.like_layout(q, v)
        return out, *blocks.causal(q, k, v, mixture, key_mask, eps, out)
    written, mass = blocks.write(k, v, mixture, key_mask)
    out = blocks.like_layout(q, v)
    blocks.read(q, written, mass, mixture, eps, out)
    return out, written, mass


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, means: Tensor, variances: Tensor,
    log_priors: Tensor, key_mask: Tensor | None, written: Tensor, mass: Tensor, causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, means, variances and log priors."""
    mixture = Mixture(means, variances, log_priors, compute_dtype(q, k, v, means, variances))
    gradients = MixtureGradients(mixture)
    if causal:
        grad_q, grad_k, grad_v, _, _ = blocks.causal_backward(
            grad_out, q, k, v, written, mass, key_mask, gradients, eps
        )
    else:
        grad_q, grad_written, grad_mass = blocks.read_backward(
            grad_out, q, written, mass, gradients, eps
        )
        grad_k, grad_v = blocks.write_backward(
            grad_written, grad_mass, k, v, key_mask, gradients
        )
    return grad_q, grad_k, grad_v, *gradients.finish()
