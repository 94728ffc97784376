"""Comparing a baseline with an independent implementation of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

Agree = Callable[..., None]


@pytest.fixture
def agree() -> Agree:
    """Asserts that two functions of ``x`` agree to 1e-5 relative, outputs and gradients.

    ``agree(mine, theirs, x, [(parameter of mine, parameter of theirs), …])``; relative to the
    largest entry of what is compared.
    """
    return _agree


def _agree(
    mine: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
    x: Tensor,
    parameters: Iterable[tuple[Tensor, Tensor]] = (),
    rtol: float = 1e-5,
) -> None:
    pairs = list(parameters)
    results = []
    for function, own in ((mine, [a for a, _ in pairs]), (theirs, [b for _, b in pairs])):
        inputs = x.clone().requires_grad_()
        y = function(inputs)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
        results.append([y, *torch.autograd.grad((y * weights).sum(), [inputs, *own])])
    names = ["output", "gradient of the input", *(f"gradient {i}" for i in range(len(pairs)))]
    for name, a, b in zip(names, *results, strict=True):
        assert b.abs().max() > 0, name
        gap = (a.reshape(b.shape) - b).abs().max() / b.abs().max()
        assert gap <= rtol, f"{name} differs by {gap:.2g}"
