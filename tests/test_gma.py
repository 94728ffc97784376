"""GaussianMixtureAttention: the paper's formulas term by term, and what the module adds to them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from gma_bench import GaussianMixtureAttention
from gma_bench.errors import SettingError
from gma_bench.ops import responsibilities


def make(causal: bool = False, **settings: object) -> GaussianMixtureAttention:
    """In float64, with means, variances and priors away from their initial values."""
    torch.manual_seed(0)
    mixer = GaussianMixtureAttention(16, 2, causal, **{"num_components": 5, **settings}).double()  # type: ignore[arg-type]
    with torch.no_grad():
        mixer.raw_variance += 0.5 * torch.randn_like(mixer.raw_variance)
        mixer.log_priors += torch.randn_like(mixer.log_priors)
    return mixer


def posteriors(mixer: GaussianMixtureAttention, x: Tensor) -> Tensor:
    """``γ (B, H, N, K)`` of routing vectors ``(B, H, N, d_r)`` from torch's own densities."""
    means, deviations = (
        t.expand(mixer.num_heads, -1, -1)[:, None] for t in (mixer.means, mixer.variances().sqrt())
    )
    component = Independent(Normal(means, deviations), 1)
    joint = component.log_prob(x[..., None, :]) + mixer.priors().log()[:, None]
    mixture = MixtureSameFamily(Categorical(mixer.priors()[:, None]), component)
    return (joint - mixture.log_prob(x)[..., None]).exp()


def by_the_paper(
    mixer: GaussianMixtureAttention, x: Tensor, source: Tensor, seen: Tensor
) -> Tensor:
    """The module's output with the affinity ``Γ_Q Γ_Kᵀ`` formed; ``seen (B, N, M)`` bool."""

    def routed(weight: Tensor, of: Tensor) -> Tensor:
        out = mixer.split_heads(of @ weight.T)
        if mixer.routing_norm == "none":
            return out
        return (out - out.mean(-1, keepdim=True)) / (out.var(-1, False, True) + 1e-5).sqrt()

    gamma_q = posteriors(mixer, routed(mixer.q_proj.weight, x))
    gamma_k = posteriors(mixer, routed(mixer.k_proj.weight, source))
    affinity = (gamma_q @ gamma_k.transpose(-1, -2)) * seen[:, None]
    values = mixer.split_heads(source @ mixer.v_proj.weight.T)
    out = affinity @ values / (affinity.sum(-1, keepdim=True) + mixer.eps)
    return mixer.merge_heads(out) @ mixer.out_proj.weight.T


def assert_agree(mixer: GaussianMixtureAttention, a: Tensor, b: Tensor) -> None:
    """Outputs, and gradients of every parameter, to 1e-10."""
    weights = torch.randn(a.shape, generator=torch.Generator().manual_seed(3)).to(a)
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    parameters = list(mixer.parameters())
    for mine, theirs in zip(
        *(torch.autograd.grad((y * weights).sum(), parameters) for y in (a, b)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"routing_norm": "none"}, {"routing_dim": 3}, {"share_components_across_heads": True},
     {"num_components": 1}, {"init_variance": 1.0}],
    ids=lambda s: ",".join(s) or "default",
)  # fmt: skip
def test_equals_the_papers_formulas(settings: dict, causal: bool) -> None:
    mixer, x = make(causal, **settings), torch.randn(2, 23, 16, dtype=torch.float64)
    mask = torch.arange(23) < torch.tensor([[23], [9]])
    seen = mask[:, None].expand(-1, 23, -1)
    if causal:
        seen = seen & torch.ones(23, 23, dtype=torch.bool).tril()
    expected = by_the_paper(mixer, x, x, seen) * mask.unsqueeze(-1)
    assert_agree(mixer, mixer(x, mask), expected)


def test_cross_attention_reads_the_memory() -> None:
    mixer = make()
    x, memory = (torch.randn(2, n, 16, dtype=torch.float64) for n in (7, 12))
    memory_mask = torch.arange(12) < torch.tensor([[5], [12]])
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    expected = by_the_paper(mixer, x, memory, memory_mask[:, None].expand(-1, 7, -1))
    expected = expected * mask.unsqueeze(-1)
    assert_agree(mixer, mixer(x, mask, memory, memory_mask), expected)
    noise = torch.where(memory_mask.unsqueeze(-1), memory, 1e3)
    torch.testing.assert_close(mixer(x, mask, noise, memory_mask), expected)
    torch.testing.assert_close(mixer(x, memory=x), mixer(x))


def test_cross_attention_misused_is_refused() -> None:
    x = torch.randn(1, 3, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="no order"):
        make(causal=True)(x, memory=x)
    with pytest.raises(ValueError, match="without memory"):
        make()(x, memory_mask=torch.ones(1, 3, dtype=torch.bool))


def test_streaming_equals_forward_and_keeps_its_size() -> None:
    mixer, x = make(causal=True), torch.randn(3, 31, 16, dtype=torch.float64)
    state, outputs = mixer.init_state(3), []
    for t in range(31):
        y, state = mixer.step(x[:, t], state)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), mixer(x), rtol=1e-10, atol=1e-12)
    assert state["written"].shape == (3, 2, 5, 8)
    assert state["mass"].shape == (3, 2, 5)
    torch.testing.assert_close(state["mass"].sum(-1), torch.full((3, 2), 31.0).double())


@pytest.mark.parametrize("seed", range(4))
def test_responsibilities_equal_sklearns_posteriors(seed: int) -> None:
    """A mixture that sklearn fitted, asked for the posteriors of points it did not see."""
    rng = np.random.default_rng(seed)
    d_r, components = (1, 3, 8, 5)[seed], (2, 6, 4, 9)[seed]
    centres = 3 * rng.normal(size=(components, d_r))
    points = centres[rng.integers(components, size=400)] + rng.normal(size=(400, d_r))
    fitted = GaussianMixture(components, covariance_type="diag", random_state=seed).fit(points)
    fresh = 3 * rng.normal(size=(50, d_r))
    got = responsibilities(
        torch.from_numpy(fresh)[None, None],
        torch.from_numpy(fitted.means_)[None],
        torch.from_numpy(fitted.covariances_)[None],
        torch.from_numpy(fitted.weights_).log()[None],
    )
    np.testing.assert_allclose(got[0, 0].numpy(), fitted.predict_proba(fresh), atol=1e-10)


@pytest.mark.parametrize("which", ["query", "key"])
def test_module_responsibilities_equal_sklearns(which: str) -> None:
    mixer, x = make(), torch.randn(2, 9, 16, dtype=torch.float64)
    got = mixer.responsibilities(x, which)  # type: ignore[arg-type]
    weight = (mixer.q_proj if which == "query" else mixer.k_proj).weight
    routed = mixer.split_heads(x @ weight.T)
    routed = (routed - routed.mean(-1, keepdim=True)) / (routed.var(-1, False, True) + 1e-5).sqrt()
    for h in range(2):
        oracle = GaussianMixture(5, covariance_type="diag")
        oracle.means_ = mixer.means[h].detach().numpy()
        oracle.covariances_ = mixer.variances()[h].detach().numpy()
        oracle.precisions_cholesky_ = oracle.covariances_**-0.5
        oracle.weights_ = mixer.priors()[h].detach().numpy()
        expected = oracle.predict_proba(routed[:, h].detach().reshape(18, 8).numpy())
        np.testing.assert_allclose(got[:, h].detach().reshape(18, 5).numpy(), expected, atol=1e-10)


def test_variances_and_priors_are_what_they_should_be() -> None:
    mixer = GaussianMixtureAttention(32, 4, num_components=6, variance_floor=0.5)
    assert mixer.variances().shape == (4, 6, 8)
    torch.testing.assert_close(mixer.variances(), torch.full((4, 6, 8), 1.0))
    torch.testing.assert_close(mixer.priors(), torch.full((4, 6), 1 / 6))
    with torch.no_grad():
        mixer.raw_variance.fill_(-1e3)
    assert (mixer.variances() == 0.5).all()


def test_shared_components_are_one_mixture() -> None:
    mixer = GaussianMixtureAttention(32, 4, num_components=6, share_components_across_heads=True)
    own = GaussianMixtureAttention(32, 4, num_components=6)
    assert mixer.means.shape == (1, 6, 8)
    assert (mixer.variances().shape, mixer.priors().shape) == ((4, 6, 8), (4, 6))
    saved = sum(p.numel() for p in own.parameters()) - sum(p.numel() for p in mixer.parameters())
    assert saved == 3 * (6 * 8 + 6 * 8 + 6)


def usage_entropy(gamma: Tensor) -> float:
    """Entropy of how often each component is the most responsible, over log K."""
    counts = torch.bincount(gamma.argmax(-1).flatten(), minlength=gamma.shape[-1]).double()
    share = counts / counts.sum()
    return -(share * share.clamp_min(1e-12).log()).sum().item() / math.log(len(share))


def test_initial_variances_keep_posteriors_soft() -> None:
    """With unit variances the posteriors start nearly one-hot, which is how use collapses."""
    x = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(0))
    sharpest = {}
    for name, variance in (("default", None), ("unit", 1.0)):
        torch.manual_seed(0)
        mixer = GaussianMixtureAttention(128, 2, num_components=64, init_variance=variance)
        gamma = mixer.responsibilities(x)
        sharpest[name] = gamma.amax(-1).mean().item()
        if name == "default":
            assert usage_entropy(gamma[:, 0]) > 0.85
    assert sharpest["default"] < 0.15
    assert sharpest["unit"] > 0.7


def test_backends_agree() -> None:
    x = torch.randn(2, 70, 16, dtype=torch.float64)
    for causal in (False, True):
        outputs = [make(causal, backend=b)(x) for b in ("reference", "chunked", "auto")]
        for a, b in pairwise(outputs):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_autocast_keeps_the_posteriors_in_float32() -> None:
    mixer, x = make().float(), torch.randn(2, 19, 16)
    exact = mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert mixer.responsibilities(x).dtype == torch.float32
        y = mixer(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_components", 0), ("routing_dim", 0), ("routing_norm", "batch"), ("variance_floor", 0.0),
     ("init_variance", 0.005), ("eps", 0.0), ("backend", "numpy")],
)  # fmt: skip
def test_bad_settings_are_named_with_a_remedy(setting: str, value: object) -> None:
    with pytest.raises(SettingError, match=rf"mixer\.{setting}=.*Try: mixer\.{setting}="):
        GaussianMixtureAttention(16, 2, **{setting: value})  # type: ignore[arg-type]


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(SettingError, match=r"model\.num_heads=3.*Try: model\.num_heads=(2|4)"):
        GaussianMixtureAttention(16, 3)
