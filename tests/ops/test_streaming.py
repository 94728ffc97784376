"""Streaming gives the causal outputs, in a state that stays as it is."""

from __future__ import annotations

import pytest
import torch

from gma_bench.ops import gma
from gma_bench.ops.streaming import init_state, prefill, step
from tests.ops.cases import make


def test_steps_equal_the_causal_form() -> None:
    case = make(n=70, causal=True)
    q, k, v, *mixture = case.tensors
    want = gma(*case.tensors, causal=True)
    state = init_state(2, mixture[0], v.shape[-1])
    for i in range(70):
        out, state = step(q[:, :, i], k[:, :, i], v[:, :, i], *mixture, state)
        torch.testing.assert_close(out, want[:, :, i], rtol=1e-10, atol=1e-12)


def test_nothing_grows_and_a_state_stays_as_it_was() -> None:
    q, k, v, *mixture = (t.float() for t in make(n=20, causal=True).tensors)
    state = init_state(2, mixture[0], v.shape[-1])
    for i in range(20):
        kept = [t.clone() for t in state]
        _, after = step(q[:, :, i], k[:, :, i], v[:, :, i], *mixture, state)
        assert [t.shape for t in after] == [t.shape for t in kept]
        assert all(map(torch.equal, state, kept))
        state = after


@pytest.mark.parametrize("cut", [0, 1, 128, 150, 299, 300])
def test_prefill_equals_the_causal_form_from_any_state(cut: int) -> None:
    case = make(n=300, causal=True)
    q, k, v, *mixture = leaves = [t.requires_grad_() for t in case.tensors]
    state, outs = init_state(2, mixture[0], v.shape[-1]), []
    for piece in (slice(0, cut), slice(cut, 300)):
        out, state = prefill(q[:, :, piece], k[:, :, piece], v[:, :, piece], *mixture, state)
        outs.append(out)
    got, want = torch.cat(outs, 2), gma(*leaves, causal=True)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(got.square().sum(), leaves),
        torch.autograd.grad(want.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_gradients_flow_through_steps() -> None:
    case = make(n=9, causal=True)
    leaves = [t.requires_grad_() for t in case.tensors]
    q, k, v, *mixture = leaves
    state = init_state(2, mixture[0], v.shape[-1])
    outs = []
    for i in range(9):
        out, state = step(q[:, :, i], k[:, :, i], v[:, :, i], *mixture, state)
        outs.append(out)
    got = torch.autograd.grad(torch.stack(outs, 2).square().sum(), leaves)
    want = torch.autograd.grad(gma(*leaves, causal=True).square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_state_has_float32_at_least(dtype: torch.dtype) -> None:
    state = init_state(1, torch.zeros(2, 4, 8, dtype=dtype), 8)
    assert state.mass.dtype == torch.promote_types(dtype, torch.float32)
