"""SDPA and MHA against each other and torch's own module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.mha import MHA
from baselines.sdpa import SDPA


@pytest.fixture
def pair(causal: bool) -> tuple[SDPA, MHA]:
    torch.manual_seed(0)
    fused, explicit = SDPA(32, 4, causal), MHA(32, 4, causal)
    explicit.load_state_dict(fused.state_dict())
    return fused, explicit


def some_mask(kind: str) -> torch.Tensor | None:
    mask = torch.ones(3, 21, dtype=torch.bool)
    if kind == "none":
        return None
    if kind == "tail":
        mask[1, 9:], mask[2, 1:] = False, False
    if kind == "scattered":
        mask = torch.rand(3, 21, generator=torch.Generator().manual_seed(2)) > 0.5
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["none", "tail", "scattered"])
def test_fused_equals_explicit(pair: tuple[SDPA, MHA], masked: str, agree) -> None:
    fused, explicit = pair
    mask = some_mask(masked)
    agree(
        lambda x: fused(x, mask), lambda x: explicit(x, mask), torch.randn(3, 21, 32),
        zip(fused.parameters(), explicit.parameters(), strict=True),
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["none", "tail"])
def test_equals_torchs_multihead_attention(pair: tuple[SDPA, MHA], masked: str, agree) -> None:
    mine, _ = pair
    theirs = nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([mine.q_proj.weight, mine.k_proj.weight, mine.v_proj.weight])
        )
        theirs.out_proj.weight.copy_(mine.out_proj.weight)
    mask = some_mask(masked)
    later = torch.ones(21, 21, dtype=torch.bool).triu(1) if mine.causal else None
    keep = torch.ones(3, 21, 1) if mask is None else mask.unsqueeze(-1).float()

    def reference(x: torch.Tensor) -> torch.Tensor:
        padded = None if mask is None else ~mask
        return keep * theirs(x, x, x, padded, need_weights=False, attn_mask=later)[0]

    agree(
        lambda x: mine(x, mask), reference, torch.randn(3, 21, 32),
        [(mine.out_proj.weight, theirs.out_proj.weight)],
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", ["none", "tail"])
def test_stays_in_the_fused_kernel(pair: tuple[SDPA, MHA], masked: str) -> None:
    """A mask must not push it to the kernel that forms N×N: a restricted choice would raise."""
    fused, _ = pair
    x = torch.randn(3, 21, 32, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused(x, some_mask(masked)).sum().backward()
    assert x.grad is not None
