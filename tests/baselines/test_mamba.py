"""Mamba against transformers and mambapy, its scan against a loop, its two directions."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from baselines import selective_scan as scan_module
from baselines.mamba import Mamba, SelectiveSSM
from baselines.selective_scan import selective_scan
from gma_bench.errors import MissingExtra, SettingError


def loop(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The recurrence as it is written."""
    h = x.new_zeros(x.shape[0], *a.shape)
    ys = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        h = (step * a).exp() * h + step * b[:, t, None] * x[:, t, :, None]
        ys.append((h * c[:, t, None]).sum(-1))
    return torch.stack(ys, 1)


def random_inputs(batch: int, n: int, width: int = 6, d_state: int = 3) -> list[Tensor]:
    torch.manual_seed(n)
    inputs = [
        torch.randn(batch, n, width), 0.3 * torch.rand(batch, n, width),
        -8 * torch.rand(width, d_state), torch.randn(batch, n, d_state),
        torch.randn(batch, n, d_state),
    ]  # fmt: skip
    return [t.double().requires_grad_() for t in inputs]


@pytest.mark.parametrize("positions", [1, 10, 17, 10**6], ids=lambda p: f"segment{p}")
@pytest.mark.parametrize("n", [1, 2, 7, 37, 64])
def test_scan_equals_the_loop(n: int, positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, with one segment and with many, whole ones and not."""
    monkeypatch.setattr(scan_module, "SEGMENT_ELEMENTS", 2 * 6 * 3 * positions)
    inputs = random_inputs(2, n)
    y, expected = selective_scan(*inputs), loop(*inputs)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, weights)
    for got, want in zip(gradients, torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_scan_keeps_no_hidden_states_for_the_backward_pass() -> None:
    """What is saved must grow like N·D, not N·D·S: here S = 32 would be 32 times as much."""
    torch.manual_seed(0)
    inputs = [t.float().detach().requires_grad_() for t in random_inputs(1, 1024, 64, 32)]
    saved = 0

    def count(t: Tensor) -> Tensor:
        nonlocal saved
        saved += t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        selective_scan(*inputs)
    assert saved < 1024 * 64 * 32 / 4


def weights_of(mine: Mamba, theirs: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    ssm = mine.ssm
    return [
        (mine.in_proj.weight, theirs.in_proj.weight), (ssm.conv.weight, theirs.conv1d.weight),
        (ssm.conv.bias, theirs.conv1d.bias), (ssm.x_proj.weight, theirs.x_proj.weight),
        (ssm.dt_proj.weight, theirs.dt_proj.weight), (ssm.dt_proj.bias, theirs.dt_proj.bias),
        (ssm.A_log, theirs.A_log), (ssm.D, theirs.D),
        (mine.out_proj.weight, theirs.out_proj.weight),
    ]  # fmt: skip


def share_weights(mine: Mamba, theirs: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    pairs = weights_of(mine, theirs)
    with torch.no_grad():
        for a, b in pairs:
            b.copy_(a)
    assert set(theirs.parameters()) == {b for _, b in pairs}
    return pairs


def test_equals_transformers(agree) -> None:
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    torch.manual_seed(0)
    mine = Mamba(32, 4, causal=True)
    config = modeling.MambaConfig(
        hidden_size=32, state_size=16, conv_kernel=4, expand=2, num_hidden_layers=1
    )
    theirs = modeling.MambaMixer(config, layer_idx=0)
    agree(mine, lambda x: theirs(x), torch.randn(2, 37, 32), share_weights(mine, theirs))


def test_equals_transformers_with_padding(agree) -> None:
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    torch.manual_seed(0)
    mine = Mamba(32, 4, causal=True)
    config = modeling.MambaConfig(hidden_size=32, num_hidden_layers=1)
    theirs = modeling.MambaMixer(config, layer_idx=0)
    pairs = share_weights(mine, theirs)
    mask = torch.arange(20) < torch.tensor([[20], [11]])
    agree(
        lambda x: mine(x, mask)[mask],
        lambda x: theirs(x, attention_mask=mask.long())[mask], torch.randn(2, 20, 32), pairs,
    )  # fmt: skip


def test_equals_mambapy(agree) -> None:
    mamba = pytest.importorskip("mambapy.mamba")
    torch.manual_seed(0)
    mine = Mamba(32, 4, causal=True)
    theirs = mamba.MambaBlock(mamba.MambaConfig(d_model=32, n_layers=1))
    agree(mine, theirs, torch.randn(2, 37, 32), share_weights(mine, theirs))


def test_backward_direction_is_the_forward_one_on_the_reversed_sequence() -> None:
    torch.manual_seed(0)
    mixer, x = Mamba(32, 4), torch.randn(2, 19, 32)
    assert isinstance(mixer.backward_ssm, SelectiveSSM)
    y = mixer(x)
    mixer.ssm, mixer.backward_ssm = mixer.backward_ssm, mixer.ssm
    torch.testing.assert_close(mixer(x.flip(1)).flip(1), y)


def test_bidirectional_shares_the_projections() -> None:
    one, both = (sum(p.numel() for p in Mamba(32, 4, c).parameters()) for c in (True, False))
    ssm = sum(p.numel() for p in Mamba(32, 4, True).ssm.parameters())
    assert both == one + ssm


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for mamba-ssm: the documented layout and dtypes, computed by the loop."""
    seen = SimpleNamespace(calls=0)

    def selective_scan_fn(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        assert u.shape == delta.shape == (2, 64, 11)
        assert A.shape == (64, 16)
        assert B.shape == C.shape == (2, 16, 11)
        assert A.dtype == torch.float32
        assert u.dtype == delta.dtype == B.dtype == C.dtype
        assert all(t.is_contiguous() for t in (u, delta, B, C))
        seen.calls += 1
        u, delta, B, C = (t.transpose(1, 2) for t in (u, delta, B, C))
        return loop(u, delta, A, B, C).transpose(1, 2)

    interface = ModuleType("mamba_ssm.ops.selective_scan_interface")
    interface.selective_scan_fn = selective_scan_fn  # type: ignore[attr-defined]
    for name in ("mamba_ssm", "mamba_ssm.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "mamba_ssm")
    return seen


def test_authors_kernel_is_called_as_it_wants(kernel: SimpleNamespace) -> None:
    """Layout and masking of the call; the kernel itself needs a CUDA device."""
    torch.manual_seed(0)
    plain, fused = (Mamba(32, 4, backend=b) for b in ("torch", "mamba_ssm"))
    fused.load_state_dict(plain.state_dict())
    x, mask = torch.randn(2, 11, 32), torch.arange(11) < torch.tensor([[11], [6]])
    torch.testing.assert_close(fused(x, mask), plain(x, mask))
    assert kernel.calls == 2
    Mamba(32, 4, backend="auto")(x)  # on the CPU, the kernel is no choice
    assert kernel.calls == 2


def test_missing_kernel_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"mamba-ssm.*gma-bench\[cuda\]"):
        Mamba(32, 4, backend="mamba_ssm")


@pytest.mark.parametrize(
    "settings", [{"d_state": 0}, {"d_conv": 0}, {"expand": 0}, {"backend": "triton"}]
)
def test_bad_settings_are_named(settings: dict) -> None:
    with pytest.raises(SettingError, match=f"mixer.{next(iter(settings))}="):
        Mamba(32, 4, **settings)
