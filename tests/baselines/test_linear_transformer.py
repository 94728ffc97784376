"""Linear Transformer against an O(N²) evaluation of the same kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.kernelized import kernelized_attention
from baselines.linear_transformer import LinearTransformer, elu_plus_one, linear_attention


def quadratic(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2)
    if causal:
        weights = weights.tril()
    if mask is not None:
        weights = weights * mask[:, None, None]
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "chunk"), [(2, 4), (7, 4), (8, 4), (33, 16), (5, 64)])
def test_equals_the_quadratic_form(n: int, chunk: int, masked: bool, causal: bool, agree) -> None:
    torch.manual_seed(n)
    k, v = torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 5)
    mask = torch.rand(2, n) > 0.4 if masked else None
    if mask is not None:
        mask[:, 0] = True
    leaves = [t.requires_grad_() for t in (k, v)]
    agree(
        lambda q: linear_attention(q, k, v, causal=causal, mask=mask, chunk_size=chunk),
        lambda q: quadratic(q, k, v, causal, mask),
        torch.randn(2, 3, n, 8),
        [(t, t) for t in leaves],
    )  # fmt: skip


def test_module_equals_the_quadratic_form(agree) -> None:
    torch.manual_seed(0)
    for causal in (False, True):
        mixer = LinearTransformer(32, 4, causal, chunk_size=8)

        def reference(x: Tensor, m: LinearTransformer = mixer) -> Tensor:
            q, k, v = (m.split_heads(p(x)) for p in (m.q_proj, m.k_proj, m.v_proj))
            return m.out_proj(m.merge_heads(quadratic(q, k, v, m.causal, None)))

        agree(mixer, reference, torch.randn(2, 37, 32), [(p, p) for p in mixer.parameters()])


def test_feature_map_is_elu_plus_one() -> None:
    x = torch.linspace(-30, 30, 601, dtype=torch.float64, requires_grad=True)
    y, reference = elu_plus_one(x), F.elu(x) + 1
    torch.testing.assert_close(y, reference)
    torch.testing.assert_close(*(torch.autograd.grad(f.sum(), x)[0] for f in (y, reference)))


def test_sums_do_not_overflow_in_half_precision() -> None:
    """4096 features of about one add up to more than float16 holds."""
    q, k, v = (torch.rand(1, 1, 4096, 32).half() for _ in range(3))
    for causal in (False, True):
        out = kernelized_attention(q + 1, k + 1, v, causal=causal)
        assert out.dtype == torch.float16
        assert out.isfinite().all()
        assert 0.45 < out[0, 0, -1].float().mean() < 0.55
