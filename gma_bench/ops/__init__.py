"""GMA as functions. Imports torch (and triton, where its kernels are asked for) alone."""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gma_bench.ops import chunked, fused, native, reference  # noqa: F401 (chunked registers operators)

BACKENDS = ("auto", "reference", "chunked", "native", "triton")

LOGITS = "ieee"
"""Precision of the products behind the kernels' logits: full float32, no tf32."""


def responsibilities(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> Tensor:
    """Posterior of each mixture component given ``x``: ``γ_k(x)``, paper, section "Method".

    Args:
        x: ``(B, H, N, d_r)``.
        means: ``(H, K, d_r)``.
        variances: ``(H, K, d_r)``, positive.
        log_priors: ``(H, K)``; a constant added to a row changes nothing.

    Returns:
        ``(B, H, N, K)``, rows summing to one, in float32 (float64 if any input is). Differentiable
        once.
    """
    _check_mixture(x, means, variances, log_priors)
    _refuse_forward_mode(x, means, variances, log_priors)
    return torch.ops.gma_bench.responsibilities(x, means, variances, log_priors)


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
    backend: str = "auto",
) -> Tensor:
    """Gaussian mixture attention, ``O = Γ_Q Ṽ / (Γ_Q Z + ε)``; paper, section "Method".

    Time and memory are linear in N and M. Logits are computed in float32 at least, whatever the
    dtype of the inputs. Differentiable once (twice with ``backend="reference"``).

    Args:
        q: ``(B, H, N, d_r)``.
        k: ``(B, H, M, d_r)``.
        v: ``(B, H, M, d_v)``.
        means: ``(H, K, d_r)``.
        variances: ``(H, K, d_r)``, positive.
        log_priors: ``(H, K)``.
        causal: whether query i reads keys j ≤ i only.
        key_mask: ``(B, M)`` bool, True = a real token. Others contribute nothing; where none is
            real the output is zero.
        eps: added to the denominator, positive.
        backend: ``auto`` takes the fastest that runs here (see :func:`choose_backend`): the Triton
            kernels, the ``native`` CPU code, or ``chunked``, which is plain torch; ``reference`` is
            the specification, slow and large.

    Returns:
        ``(B, H, N, d_v)`` in the dtype of ``v``.

    Raises:
        ValueError: shapes that do not fit together, H, K, d_r or d_v of 0, ``causal`` with N ≠ M, ε
            not positive, an unknown backend, or ``triton`` for inputs that its kernels do not take.
        RuntimeError: a second or a forward-mode derivative outside ``reference``.
    """
    _check_mixture(q, means, variances, log_priors)
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q {_shape(q)}, k {_shape(k)} and v {_shape(v)} do not fit together")
    if v.shape[3] == 0:
        raise ValueError(f"v {_shape(v)} must have d_v of at least 1")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal=True needs N = M, got N={q.shape[2]} and M={k.shape[2]}")
    if key_mask is not None and (key_mask.shape != k.shape[::2] or key_mask.dtype != torch.bool):
        raise ValueError(f"key_mask must be bool (B, M), got {key_mask.dtype} {_shape(key_mask)}")
    if eps <= 0:
        raise ValueError(f"eps={eps} must be positive: a query may find nothing that was written")
    if backend == "auto":
        backend = choose_backend(q, k, v, means, variances, log_priors)
    arguments = q, k, v, means, variances, log_priors
    if backend == "reference":
        return reference.gma(*arguments, causal=causal, key_mask=key_mask, eps=eps)
    _refuse_forward_mode(*arguments)
    if backend == "chunked":
        return torch.ops.gma_bench.gma(*arguments, key_mask, causal, eps)[0]
    if backend == "native":
        if reason := native.why_not(*arguments):
            raise ValueError(f"backend='native': {reason}; backend='chunked' takes any input")
        return torch.ops.gma_bench.gma_native(*arguments, key_mask, causal, eps)[0]
    if backend == "triton":
        if reason := fused.why_not(q, v, means):
            raise ValueError(f"backend='triton': {reason}; backend='chunked' takes any input")
        if not has_triton():
            raise ValueError("backend='triton': triton is not installed (pip install triton)")
        return torch.ops.gma_bench.gma_fused(*arguments, key_mask, causal, eps, LOGITS)[0]
    raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")


def choose_backend(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor
) -> str:
    """What ``backend="auto"`` takes for these inputs.

    ``triton`` on a GPU, ``native`` on a CPU that has a C++ compiler, where they take the inputs; else
    ``chunked``.
    """
    if q.device.type == "cuda" and has_triton() and fused.why_not(q, v, means) is None:
        return "triton"
    reason = native.why_not(q, k, v, means, variances, log_priors)
    if reason is None:
        return "native"
    if reason == native.problem():
        _say_plain(reason)
    return "chunked"


@functools.cache
def _say_plain(reason: str) -> None:
    """Once a process: what is slower than it could be says so."""
    warnings.warn(f"GMA runs in plain torch on this CPU, half as fast: {reason}", stacklevel=3)


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported; does not import it."""
    return importlib.util.find_spec("triton") is not None


def _check_mixture(x: Tensor, means: Tensor, variances: Tensor, log_priors: Tensor) -> None:
    heads, width = x.shape[1], x.shape[3]
    if means.shape != (heads, means.shape[1], width) or variances.shape != means.shape:
        raise ValueError(
            f"means {_shape(means)} and variances {_shape(variances)} must be (H, K, d_r) for "
            f"routing vectors {_shape(x)}"
        )
    if 0 in means.shape:
        raise ValueError(f"means {_shape(means)} must have H, K and d_r of at least 1")
    if log_priors.shape != means.shape[:2]:
        raise ValueError(f"log_priors {_shape(log_priors)} must be (H, K) = {_shape(means)[:2]}")


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Forward-mode derivatives of an operator without a rule for them would be zero, in silence."""
    if torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise RuntimeError(
            "gma has no forward-mode derivative outside backend='reference'; use that, or backward"
        )


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
