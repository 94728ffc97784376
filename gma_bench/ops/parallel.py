"""GMA over a sequence that is split between processes: what they exchange does not grow with it.

Every process holds consecutive tokens of each sequence, in the order of the ranks (equal shares or
not). Bidirectional, ``Ṽ`` and ``Z`` are added up over processes; causal, each starts from the sum
of those before it. Backward sends as much again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gma_bench.ops import blocks
from gma_bench.ops.mixture import Mixture, MixtureGradients, compute_dtype
from gma_bench.ops.precision import full_precision


@dataclass
class Traffic:
    """Bytes that this process put into collectives."""

    sent_bytes: int = 0


TRAFFIC = Traffic()
"""Counted since the process started; set ``sent_bytes`` to 0 to count anew."""


def context_parallel_gma(
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
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """:func:`gma_bench.ops.gma` of the whole sequence, for this process's tokens.

    Args:
        q, k, v, key_mask: this process's tokens; shapes as for :func:`gma_bench.ops.gma`.
        means, variances, log_priors: the same on every process. Their gradients are this process's
            share: add them up over processes, as for any replicated parameter (the mean that DDP
            takes is that divided by the number of processes).
        causal: whether position i of the whole sequence reads j ≤ i only.
        eps: added to the denominator.
        group: the processes that share the sequence; all by default.

    Returns:
        ``(B, H, N of this process, d_v)``. Differentiable once.
    """
    arguments = q, k, v, means, variances, log_priors, key_mask, causal, eps, group
    return _ContextParallel.apply(*arguments)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        means: Tensor,
        variances: Tensor,
        log_priors: Tensor,
        key_mask: Tensor | None,
        causal: bool,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.causal, ctx.eps, ctx.group = causal, eps, group
        out = blocks.like_layout(q, v)
        with full_precision():
            mixture = Mixture(
                means, variances, log_priors, compute_dtype(q, k, v, means, variances)
            )
            written, mass = blocks.write(k, v, mixture, key_mask)
            if causal:
                written, mass = _others(written, mass, group, later=False)
                written, mass = blocks.causal(q, k, v, mixture, key_mask, eps, out, written, mass)
            else:
                written, mass = _sum(written, mass, group)
                blocks.read(q, written, mass, mixture, eps, out)
        ctx.save_for_backward(q, k, v, means, variances, log_priors, key_mask, written, mass)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, means, variances, log_priors, key_mask, written, mass = ctx.saved_tensors
        with full_precision():
            mixture = Mixture(
                means, variances, log_priors, compute_dtype(q, k, v, means, variances)
            )
            gradients = MixtureGradients(mixture)
            if ctx.causal:
                grad_q, grad_k, grad_v, grad_written, grad_mass = blocks.causal_backward(
                    grads[0], q, k, v, written, mass, key_mask, gradients, ctx.eps
                )
                # what later processes ask of the state is linear in it: a write of its own
                grad_written, grad_mass = _others(grad_written, grad_mass, ctx.group, later=True)
                more_k, more_v = blocks.write_backward(
                    grad_written, grad_mass, k, v, key_mask, gradients
                )
                grad_k, grad_v = grad_k + more_k, grad_v + more_v
            else:
                grad_q, grad_written, grad_mass = blocks.read_backward(
                    grads[0], q, written, mass, gradients, ctx.eps
                )
                grad_written, grad_mass = _sum(grad_written, grad_mass, ctx.group)
                grad_k, grad_v = blocks.write_backward(
                    grad_written, grad_mass, k, v, key_mask, gradients
                )
            return grad_q, grad_k, grad_v, *gradients.finish(), None, None, None, None


def _sum(written: Tensor, mass: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """States of all processes, added up."""
    state = torch.cat((written, mass.unsqueeze(-1)), -1)
    TRAFFIC.sent_bytes += state.nbytes
    dist.all_reduce(state, group=group)
    return state[..., :-1].contiguous(), state[..., -1].contiguous()


def _others(
    written: Tensor, mass: Tensor, group: dist.ProcessGroup | None, *, later: bool
) -> tuple[Tensor, Tensor]:
    """States of the processes before this one (or after it), added up."""
    state = torch.cat((written, mass.unsqueeze(-1)), -1)
    TRAFFIC.sent_bytes += state.nbytes
    every = [torch.empty_like(state) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, state, group=group)
    rank = dist.get_rank(group)
    chosen = every[rank + 1 :] if later else every[:rank]
    total = sum(chosen, torch.zeros_like(state))
    return total[..., :-1].contiguous(), total[..., -1].contiguous()
