"""Linformer against the ``linformer`` package, its sharing, and its limit on length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from baselines.linformer import Linformer
from gma_bench.errors import SettingError
from gma_bench.mixer.gma import GaussianMixtureAttention


@pytest.mark.parametrize("shared", [False, True], ids=["headwise", "key_value"])
@pytest.mark.parametrize("n", [24, 17], ids=["full length", "shorter"])
def test_equals_the_package(shared: bool, n: int, agree) -> None:
    package = pytest.importorskip("linformer")
    torch.manual_seed(0)
    mine = Linformer(32, 4, max_length=24, k=6, sharing="key_value" if shared else "headwise")
    theirs = package.LinformerSelfAttention(32, 24, k=6, heads=4)
    pairs = [
        (mine.q_proj.weight, theirs.to_q.weight), (mine.k_proj.weight, theirs.to_k.weight),
        (mine.v_proj.weight, theirs.to_v.weight), (mine.out_proj.weight, theirs.to_out.weight),
    ]  # fmt: skip
    with torch.no_grad():
        theirs.to_out.bias.zero_()
        for a, b in pairs:
            b.copy_(a)
        theirs.proj_k.copy_(mine.length_proj_k[0].T)
        theirs.proj_v.copy_((mine.length_proj_k if shared else mine.length_proj_v)[0].T)
    agree(mine, theirs, torch.randn(2, n, 32), pairs)


def test_projection_per_head_equals_its_formula(agree) -> None:
    torch.manual_seed(0)
    mixer = Linformer(32, 4, max_length=24, k=6, sharing="none")
    assert mixer.length_proj_k.shape == (4, 6, 24)

    def reference(x: Tensor) -> Tensor:
        heads = []
        for h in range(4):
            q, k, v = (
                x @ p.weight[8 * h : 8 * h + 8].T
                for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
            )
            k = torch.einsum("kn,bnd->bkd", mixer.length_proj_k[h, :, :20], k)
            v = torch.einsum("kn,bnd->bkd", mixer.length_proj_v[h, :, :20], v)
            heads.append((q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v)
        return torch.cat(heads, -1) @ mixer.out_proj.weight.T

    agree(mixer, reference, torch.randn(2, 20, 32), [(p, p) for p in mixer.parameters()])


@pytest.mark.parametrize(
    ("sharing", "matrices"), [("none", 16), ("headwise", 4), ("key_value", 2), ("layerwise", 1)]
)
def test_sharing_counts_projections_of_two_layers(sharing: str, matrices: int) -> None:
    layers = [Linformer(32, 4, max_length=10, k=3, sharing=sharing) for _ in range(2)]
    for layer in layers[1:]:
        layer.tie(layers[0])
    model = nn.ModuleList(layers)
    assert sum(p.numel() for p in model.parameters()) == 2 * 4 * 32**2 + matrices * 3 * 10


def test_tying_to_another_kind_of_mixer_changes_nothing() -> None:
    layer = Linformer(32, 4, max_length=10, k=3, sharing="layerwise")
    before = layer.length_proj_k
    layer.tie(GaussianMixtureAttention(32, 4, num_components=2))
    assert layer.length_proj_k is before


def test_longer_input_is_refused() -> None:
    mixer = Linformer(32, 4, max_length=10, k=3)
    with pytest.raises(SettingError, match=r"11 positions.*task\.max_length=11"):
        mixer(torch.zeros(1, 11, 32))


@pytest.mark.parametrize(
    "settings", [{"max_length": None}, {"k": 0}, {"sharing": "some"}, {"causal": True}],
    ids=lambda s: next(iter(s)),
)  # fmt: skip
def test_bad_settings_are_named(settings: dict) -> None:
    with pytest.raises(SettingError):
        Linformer(32, 4, **{"max_length": 10, **settings})
