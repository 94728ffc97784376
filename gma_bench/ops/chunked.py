"""GMA as operators of plain torch: blocks of tokens, a backward of their own, any device.

Registered with ``torch.library``, so that autograd, autocast, ``torch.compile``, fake tensors and
the FLOP counter know each of them as one node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gma_bench.ops import blocks
from gma_bench.ops.mixture import Mixture, MixtureGradients, compute_dtype
from gma_bench.ops.precision import full_precision

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


# ---------------------------------------------------------------- what the operators do


def gma_body(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, then what backward needs: ``Ṽ`` and ``Z``, or the states of :func:`blocks.causal`."""
    with full_precision():
        mixture = Mixture(means, variances, log_priors, compute_dtype(q, k, v, means, variances))
        out, centre = blocks.like_layout(q, v), blocks.lone_values(v, key_mask)
        if causal:
            return out, *blocks.causal(q, k, v, mixture, key_mask, eps, out, centre=centre)
        written, mass = blocks.write(k, v, mixture, key_mask, centre)
        blocks.read(q, written, mass, mixture, eps, out, centre)
        return out, written, mass


def gma_backward_body(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    written: Tensor,
    mass: Tensor,
    causal: bool,
    eps: float,
) -> Six:
    """Gradients of q, k, v, means, variances and log priors."""
    with full_precision():
        mixture = Mixture(means, variances, log_priors, compute_dtype(q, k, v, means, variances))
        gradients, centre = MixtureGradients(mixture), blocks.lone_values(v, key_mask)
        if causal:
            grad_q, grad_k, grad_v, _, _ = blocks.causal_backward(
                grad_out, q, k, v, written, mass, key_mask, gradients, eps, centre
            )
        else:
            grad_q, grad_written, grad_mass = blocks.read_backward(
                grad_out, q, written, mass, gradients, eps, centre
            )
            grad_k, grad_v = blocks.write_backward(
                grad_written, grad_mass, k, v, key_mask, gradients, centre
            )
        return grad_q, grad_k, grad_v, *gradients.finish()


def responsibilities_body(
    x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor
) -> Tensor:
    """Posteriors of every token, ``(B, H, N, K)``."""
    with full_precision():
        mixture = Mixture(means, variances, log_priors, compute_dtype(x, means, variances))
        return blocks.responsibilities(x, mixture)


def responsibilities_backward_body(
    grad: Tensor, x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor
) -> Four:
    """Gradients of x, means, variances and log priors."""
    with full_precision():
        mixture = Mixture(means, variances, log_priors, compute_dtype(x, means, variances))
        gradients = MixtureGradients(mixture)
        grad_x = blocks.responsibilities_backward(grad, x, gradients)
        return grad_x, *gradients.finish()


# ---------------------------------------------------------------- registration

_define: Any = torch.library.custom_op
gma_op = _define("gma_bench::gma", gma_body, mutates_args=())
gma_backward_op = _define("gma_bench::gma_backward", gma_backward_body, mutates_args=())
responsibilities_op = _define("gma_bench::responsibilities", responsibilities_body, mutates_args=())
responsibilities_backward_op = _define(
    "gma_bench::responsibilities_backward", responsibilities_backward_body, mutates_args=()
)

BODIES: dict[Any, Callable[..., Any]] = {
    torch.ops.gma_bench.gma.default: gma_body,
    torch.ops.gma_bench.gma_backward.default: gma_backward_body,
    torch.ops.gma_bench.responsibilities.default: responsibilities_body,
    torch.ops.gma_bench.responsibilities_backward.default: responsibilities_backward_body,
}
"""What each operator runs, for dispatch modes that want to see inside it (real or fake tensors)."""


@gma_op.register_fake
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
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q, k, v, means, variances)
    shape = *q.shape[:2], means.shape[1]
    if causal:
        shape = blocks.num_causal_blocks(q, means.shape[1]) + 1, *shape
    mass = q.new_empty(shape, dtype=dtype)
    return blocks.like_layout(q, v), mass.new_empty(*shape, v.shape[-1]), mass


@gma_backward_op.register_fake
def gradients_like(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    *_: Any,
) -> Six:
    """Without values, what every backward of GMA returns."""
    tokens = tuple(torch.empty_like(t) for t in (q, k, v))
    parameters = tuple(t.new_empty(t.shape) for t in (means, variances, log_priors))
    return tokens + parameters  # type: ignore[return-value]


@responsibilities_op.register_fake
def _(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:3], means.shape[1], dtype=compute_dtype(x, means, variances))


@responsibilities_backward_op.register_fake
def _(grad: Tensor, x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Four:
    parameters = tuple(t.new_empty(t.shape) for t in (means, variances, log_priors))
    return torch.empty_like(x), *parameters  # type: ignore[return-value]


def keep_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Setup of autograd: the inputs, and what forward returns besides its output."""
    *tensors, ctx.causal, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _gma_grad(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 9
    grads = torch.ops.gma_bench.gma_backward(grad_out, *ctx.saved_tensors, ctx.causal, ctx.eps)
    return *grads, None, None, None


def _responsibilities_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _responsibilities_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.gma_bench.responsibilities_backward(grad, *ctx.saved_tensors)


def refuse_double_backward(ctx: Any, *grads: Tensor) -> None:
    """Autograd of an operator that is a backward itself."""
    raise RuntimeError(
        "gma has no second derivative outside backend='reference'; use that with create_graph=True"
    )


gma_op.register_autograd(_gma_grad, setup_context=keep_for_backward)
responsibilities_op.register_autograd(_responsibilities_grad, setup_context=_responsibilities_setup)
gma_backward_op.register_autograd(refuse_double_backward)
responsibilities_backward_op.register_autograd(refuse_double_backward)


# ---------------------------------------------------------------- FLOPs of the matrix products

Shape = tuple[int, ...]


def _logit_flops(x: Shape, components: int) -> int:
    batch, heads, length, width = x
    return 2 * batch * heads * length * 2 * width * components


def _state_flops(x: Shape, v: Shape, components: int) -> int:
    batch, heads, length, _ = x
    return 2 * batch * heads * length * components * v[3]


def _chunk_flops(q: Shape, inner: int) -> int:
    batch, heads, length, _ = q
    return 2 * batch * heads * length * min(blocks.CHUNK, max(length, 1)) * inner


@register_flop_formula(torch.ops.gma_bench.gma)
def gma_flops(
    q: Shape,
    k: Shape,
    v: Shape,
    means: Shape,
    variances: Shape,
    log_priors: Shape,
    key_mask: Shape | None,
    causal: bool,
    eps: float,
    out_shape: Any = None,
    **_: Any,
) -> int:
    """Two operations a multiply-add, matrix products alone."""
    components = means[1]
    total = _logit_flops(q, components) + _logit_flops(k, components)
    total += _state_flops(q, v, components) + _state_flops(k, v, components)
    return total + (_chunk_flops(q, components) + _chunk_flops(q, v[3]) if causal else 0)


@register_flop_formula(torch.ops.gma_bench.gma_backward)
def gma_backward_flops(
    grad_out: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    means: Shape,
    variances: Shape,
    log_priors: Shape,
    key_mask: Shape | None,
    written: Shape,
    mass: Shape,
    causal: bool,
    eps: float,
    out_shape: Any = None,
    **_: Any,
) -> int:
    """The responsibilities again, then two products for each one of forward."""
    components = means[1]
    total = 3 * (_logit_flops(q, components) + _logit_flops(k, components))
    total += 2 * (_state_flops(q, v, components) + _state_flops(k, v, components))
    if causal:  # the states and the affinity again, then two products for each one of forward
        total += _state_flops(k, v, components)
        total += 3 * _chunk_flops(q, components) + 2 * _chunk_flops(q, v[3])
    return total


@register_flop_formula(torch.ops.gma_bench.responsibilities)
def responsibilities_flops(
    x: Shape, means: Shape, variances: Shape, log_priors: Shape, out_shape: Any = None, **_: Any
) -> int:
    """One product over ``[x², x]``."""
    return _logit_flops(x, means[1])


@register_flop_formula(torch.ops.gma_bench.responsibilities_backward)
def responsibilities_backward_flops(
    grad: Shape,
    x: Shape,
    means: Shape,
    variances: Shape,
    log_priors: Shape,
    out_shape: Any = None,
    **_: Any,
) -> int:
    """The same again, and one product each for the tokens and the parameters."""
    return 3 * _logit_flops(x, means[1])
