"""Inputs of GMA, and how far two evaluations of it are apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gma_bench.ops import blocks, gma

FORMS = {
    "one token": {"n": 1},
    "one token, causal": {"n": 1, "causal": True},
    "one key in all": {"n": 40, "m": 1},
    "one real key": {"n": 40, "m": 90, "masked": True, "lone": True},
    "one real key, causal": {"n": 190, "causal": True, "masked": True, "lone": True},
    "odd sizes": {"n": 131, "components": 5, "width": 3, "value_width": 7},
    "cross-attention": {"n": 40, "m": 333},
    "masked": {"n": 150, "masked": True},
    "masked, by token": {"n": 150, "masked": True, "by_token": True},
    "causal": {"n": 300, "causal": True},
    "causal, whole chunks": {"n": 2 * blocks.CHUNK, "causal": True},
    "causal, masked, by token": {"n": 300, "causal": True, "masked": True, "by_token": True},
    "many short sequences": {"batch": 200, "n": 10},
    "many short sequences, causal": {"batch": 200, "n": 10, "causal": True, "masked": True},
    "one component": {"n": 50, "components": 1},
    "many blocks": {"batch": 1, "heads": 1, "n": 3000},
    "many blocks, causal": {"batch": 1, "heads": 1, "n": 3000, "causal": True, "width": 4},
}

KINDS = (
    "far from the origin", "far from each other", "variances at the floor",
    "variances of all sizes", "components that nobody uses", "inputs far from every component",
)  # fmt: skip


class Case(NamedTuple):
    """Arguments of :func:`gma_bench.ops.gma`, in float64."""

    tensors: tuple[Tensor, ...]  # q, k, v, means, variances, log_priors
    key_mask: Tensor | None = None
    causal: bool = False


def make(
    batch: int = 2,
    heads: int = 2,
    n: int = 37,
    m: int | None = None,
    components: int = 8,
    width: int = 8,
    value_width: int = 8,
    *,
    causal: bool = False,
    masked: bool = False,
    lone: bool = False,
    by_token: bool = False,
    seed: int = 0,
) -> Case:
    """Gaussian tokens and means, variances from 0.2 to 8.2; the first row of a mask is all padding.

    ``lone`` leaves every other row one real key, with padding before and behind it.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def tokens(length: int, size: int) -> Tensor:
        if by_token:  # as a projection leaves them: heads within a token
            return randn(batch, length, heads, size).transpose(1, 2)
        return randn(batch, heads, length, size)

    m = n if m is None else m
    mask = None
    if masked:
        mask = torch.rand(batch, m, generator=generator) > 0.4
        if lone:
            mask &= mask.cumsum(1) == m // 3
        if batch > 1:
            mask[0] = False
    shape = heads, components, width
    variances = torch.rand(shape, generator=generator, dtype=torch.float64) * 8 + 0.2
    return Case(
        (tokens(n, width), tokens(m, width), tokens(m, value_width), randn(*shape), variances,
         randn(heads, components).log_softmax(-1)), mask, causal,
    )  # fmt: skip


def evaluate(
    case: Case,
    backend: str,
    dtype: torch.dtype,
    token_dtype: torch.dtype | None = None,
    upstream_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Output and the gradients of the six tensors, in float64.

    Args:
        dtype: of the parameters, and of q, k and v unless ``token_dtype`` is given.
        upstream_dtype: what the gradient of the output is rounded to beforehand.
    """
    token_dtype = token_dtype or dtype
    leaves = [
        t.to(token_dtype if i < 3 else dtype).requires_grad_() for i, t in enumerate(case.tensors)
    ]
    out = gma(*leaves, causal=case.causal, key_mask=case.key_mask, backend=backend)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    upstream = upstream.to(upstream_dtype or out.dtype).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, upstream)
    return [t.detach().double() for t in (out, *grads)]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """Largest difference of each tensor, relative to the largest entry that is expected of it."""
    return [
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))
        for a, b in zip(got, want, strict=True)
    ]


def far(kind: str, width: int, causal: bool, seed: int = 0) -> Case:
    """Tokens near their components where the expanded form cancels, in numbers that float32 holds."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, components, n = 2, 12, 200
    shape = heads, components, width
    variances, means = torch.ones(shape, dtype=torch.float64), randn(*shape)
    if kind == "far from the origin":
        means += 30
    elif kind == "far from each other":
        means *= 30
    elif kind == "variances at the floor":
        variances *= 1e-2
        means *= 3
    elif kind == "variances of all sizes":
        variances = randn(*shape).mul(3).exp().clamp(min=1e-2)
        means *= 3
    used = slice(0, components)
    if kind == "components that nobody uses":
        means[:, :4] = 30
        variances[:, 0] = 1e-2
        used = slice(4, components)

    def tokens() -> Tensor:
        index = torch.randint(used.start, used.stop, (heads, n), generator=generator)
        head = torch.arange(heads)[:, None]
        x = means[head, index] + variances[head, index].sqrt() * randn(heads, n, width)
        if kind == "inputs far from every component":
            x += 30 * randn(heads, n, width)
        between = (x + x.roll(1, 1)) / 2  # two components share these
        return torch.where(torch.arange(n)[:, None] % 3 == 0, between, x)[None]

    tensors = (
        tokens(),
        tokens(),
        randn(1, heads, n, 8),
        means,
        variances,
        torch.zeros(heads, components),
    )
    return Case(tuple(t.float().double() for t in tensors), None, causal)
