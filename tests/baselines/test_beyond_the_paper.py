"""cosFormer, RetNet and hybrids against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.cosformer import CosFormer
from baselines.hybrid import Hybrid
from baselines.retnet import RetNet, decay_rates, retention
from baselines.sdpa import SDPA
from gma_bench.errors import SettingError
from gma_bench.mixer.gma import GaussianMixtureAttention
from gma_bench.mixer.model import build_mixer
from gma_bench.run.compose import compose


@pytest.mark.parametrize("causal", [False, True])
def test_cosformer_equals_its_quadratic_form(causal: bool, agree) -> None:
    torch.manual_seed(0)
    mixer = CosFormer(32, 4, causal, max_length=50, chunk_size=8)

    def reference(x: Tensor) -> Tensor:
        q, k, v = (mixer.split_heads(p(x)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        position = torch.arange(x.shape[1])
        cosine = (math.pi / 2 * (position[:, None] - position) / 50).cos()
        weights = F.relu(q) @ F.relu(k).transpose(-1, -2) * cosine
        weights = weights.tril() if causal else weights
        out = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
        return mixer.out_proj(mixer.merge_heads(out))

    agree(mixer, reference, torch.randn(2, 37, 32), [(p, p) for p in mixer.parameters()])


def test_cosformer_refuses_what_would_get_negative_weights() -> None:
    mixer = CosFormer(32, 4, causal=True, max_length=10)
    with pytest.raises(SettingError, match="11 positions"):
        mixer(torch.zeros(1, 11, 32))
    state = mixer.init_state(1)
    for _ in range(10):
        _, state = mixer.step(torch.ones(1, 32), state)
    with pytest.raises(SettingError, match="11 positions"):
        mixer.step(torch.ones(1, 32), state)
    with pytest.raises(SettingError, match="need one"):
        CosFormer(32, 4)


def faded(q: Tensor, k: Tensor, v: Tensor, both_ways: bool) -> Tensor:
    """Retention with the N×N matrix of decays (equation 5)."""
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position
    decay = (decay_rates(q.shape[1])[:, None, None] * distance.abs()).exp()
    decay = decay if both_ways else decay * (distance >= 0)
    return (q @ k.transpose(-1, -2) * decay) @ v


@pytest.mark.parametrize(("n", "chunk"), [(1, 4), (7, 4), (8, 4), (33, 16), (5, 64)])
def test_retention_equals_its_quadratic_form(n: int, chunk: int, agree) -> None:
    torch.manual_seed(n)
    k, v = torch.randn(2, 3, n, 8).requires_grad_(), torch.randn(2, 3, n, 5).requires_grad_()
    agree(
        lambda q: retention(q, k, v, decay_rates(3), chunk), lambda q: faded(q, k, v, False),
        torch.randn(2, 3, n, 8), [(k, k), (v, v)],
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_retnet_equals_its_quadratic_form(causal: bool, agree) -> None:
    torch.manual_seed(0)
    mixer = RetNet(32, 4, causal, chunk_size=8)

    def rotated(x: Tensor) -> Tensor:
        """As complex numbers, one a pair of coordinates."""
        angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** -torch.linspace(0, 1, 4)
        turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(()), angle)
        return torch.cat((turned.real, turned.imag), -1)

    def reference(x: Tensor) -> Tensor:
        q, k, v = (mixer.split_heads(p(x)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
        out = faded(rotated(q), rotated(k) / 8**0.5, v, not causal)
        out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return mixer.out_proj(F.silu(mixer.gate_proj(x)) * mixer.merge_heads(out))

    agree(mixer, reference, torch.randn(2, 37, 32), [(p, p) for p in mixer.parameters()])


def test_retnet_decays_are_the_papers() -> None:
    torch.testing.assert_close(decay_rates(3).exp(), torch.tensor([31 / 32, 63 / 64, 127 / 128]))


def test_retnet_refuses_heads_that_cannot_be_rotated() -> None:
    with pytest.raises(SettingError, match="even multiple"):
        RetNet(12, 4)


def test_hybrid_takes_full_attention_every_period_layers() -> None:
    config = compose(["mixer=hybrid", "mixer.period=3", "scale=smoke"])
    sizes = {"d_model": 32, "num_heads": 4, "causal": True, "max_length": 10}
    layers = [build_mixer(config.mixer, **sizes, layer_index=i) for i in range(6)]
    kinds = [type(layer.mixer) for layer in layers if isinstance(layer, Hybrid)]
    gma, full = GaussianMixtureAttention, SDPA
    assert kinds == [gma, gma, full, gma, gma, full]
    assert all(layer.mixer.causal for layer in layers if isinstance(layer, Hybrid))
    assert [layer.constant_state for layer in layers] == [True, True, False] * 2


def test_hybrid_computes_what_its_mixer_does() -> None:
    hybrid = Hybrid(
        32,
        4,
        linear={"_target_": "baselines.mamba.Mamba"},
        full={"_target_": "baselines.sdpa.SDPA"},
    )
    x = torch.randn(2, 9, 32)
    assert torch.equal(hybrid(x), hybrid.mixer(x))


def test_hybrid_passes_on_what_its_mixer_refuses() -> None:
    linformer = {"_target_": "baselines.linformer.Linformer"}
    with pytest.raises(SettingError, match="no causal form"):
        Hybrid(32, 4, True, 10, linear=linformer, full=linformer)
    with pytest.raises(SettingError, match=r"mixer\.period=0"):
        Hybrid(32, 4, linear=linformer, full=linformer, period=0)
