"""Performer against ``performer-pytorch``, against exact attention, and its redrawing."""

from __future__ import annotations

import copy
import itertools
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.performer import Performer, orthogonal_random_matrix, softmax_features
from gma_bench.errors import SettingError


@pytest.fixture(scope="module")
def package() -> ModuleType:
    return pytest.importorskip("performer_pytorch.performer_pytorch")


def heads_of(mixer: Performer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (mixer.split_heads(p(x)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    return q, k, v


def test_bidirectional_equals_the_package(package: ModuleType, agree) -> None:
    torch.manual_seed(0)
    mixer = Performer(32, 4, num_features=20)
    theirs = package.FastAttention(8, nb_features=20)
    theirs.projection_matrix.copy_(mixer.projection)

    def reference(x: Tensor) -> Tensor:
        return mixer.out_proj(mixer.merge_heads(theirs(*heads_of(mixer, x))))

    agree(mixer, reference, torch.randn(2, 37, 32), [(p, p) for p in mixer.parameters()])


def test_causal_equals_the_package(package: ModuleType, agree) -> None:
    """Without ε: theirs is relative to a maximum over later tokens too, which ours must not be."""
    torch.manual_seed(0)
    mixer = Performer(32, 4, causal=True, num_features=20, chunk_size=8, eps=0.0)

    def reference(x: Tensor) -> Tensor:
        q, k, v = heads_of(mixer, x)
        q, k = (
            package.softmax_kernel(t, projection_matrix=mixer.projection, is_query=query, eps=0.0)
            for t, query in ((q, True), (k, False))
        )
        out = package.causal_linear_attention_noncuda(q, k, v, eps=0.0)
        return mixer.out_proj(mixer.merge_heads(out))

    agree(mixer, reference, torch.randn(2, 37, 32), [(p, p) for p in mixer.parameters()])


@pytest.mark.parametrize("causal", [False, True])
def test_converges_to_softmax_attention(causal: bool) -> None:
    """The error of the weights falls like one over the root of the number of features."""
    torch.manual_seed(0)
    q, k, v = (s * torch.randn(1, 2, 24, 8, dtype=torch.float64) for s in (0.6, 0.6, 1))
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    errors = []
    for m in (32, 512, 8192):
        trials = []
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            projection = orthogonal_random_matrix(m, 8, generator).double()
            features_q = softmax_features(q, projection, eps=0.0)
            # Any constant of the keys cancels; zero is one.
            features_k = softmax_features(k, projection, torch.zeros_like, eps=0.0)
            weights = features_q @ features_k.transpose(-1, -2)
            weights = weights.tril() if causal else weights
            trials.append((weights @ v / weights.sum(-1, keepdim=True) - exact).square().mean())
        errors.append(torch.stack(trials).mean().sqrt().item())
    assert errors[2] < 0.02
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_directions_are_orthogonal_with_gaussian_norms() -> None:
    matrix = orthogonal_random_matrix(2000, 16, torch.Generator().manual_seed(0))
    assert matrix.shape == (2000, 16)
    block = F.normalize(matrix[:16], dim=1)
    torch.testing.assert_close(block @ block.T, torch.eye(16), atol=1e-5, rtol=0)
    assert matrix.square().sum(1).mean() == pytest.approx(16, rel=0.05)
    assert matrix.mean(0).abs().max() < 0.1


def train_pass(mixer: Performer) -> Tensor:
    mixer(torch.ones(1, 3, 32))
    return mixer.projection.clone()


def test_redraws_in_training_only_and_at_the_interval() -> None:
    torch.manual_seed(0)
    mixer = Performer(32, 4, num_features=16, redraw_interval=3)
    first = mixer.projection.clone()
    mixer.eval()
    assert all(torch.equal(train_pass(mixer), first) for _ in range(7))
    mixer.train()
    drawn = [train_pass(mixer) for _ in range(9)]
    same = [torch.equal(a, b) for a, b in itertools.pairwise(drawn)]
    assert torch.equal(drawn[0], first)
    assert same == [True, True, False, True, True, False, True, True]


def test_never_redraws_without_an_interval() -> None:
    mixer = Performer(32, 4, num_features=16, redraw_interval=None)
    assert len({train_pass(mixer).sum().item() for _ in range(5)}) == 1


def test_a_resumed_run_draws_what_it_would_have_drawn() -> None:
    torch.manual_seed(0)
    through = Performer(32, 4, num_features=16, redraw_interval=2)
    for _ in range(3):
        train_pass(through)
    torch.manual_seed(99)
    resumed = Performer(32, 4, num_features=16, redraw_interval=2)
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))
    for _ in range(5):
        torch.rand(1)  # what else the run draws has no say
        assert torch.equal(train_pass(through), train_pass(resumed))


def test_wide_heads_do_not_overflow() -> None:
    """A key that points along a feature has an exponent of |w|²/2, near 130 here."""
    torch.manual_seed(0)
    mixer = Performer(256, 1, causal=True, num_features=64)
    with torch.no_grad():
        mixer.k_proj.weight.copy_(torch.eye(256))
        x = (mixer.projection[:5] * 256**0.25).unsqueeze(0)
        assert (mixer.projection.square().sum(1) / 2).max() > 88
        assert mixer(x).isfinite().all()


@pytest.mark.parametrize("settings", [{"num_features": 0}, {"redraw_interval": 0}])
def test_bad_settings_are_named(settings: dict) -> None:
    with pytest.raises(SettingError, match=f"mixer.{next(iter(settings))}=0"):
        Performer(32, 4, **settings)
