"""SDPA and MHA against each other and torch's own module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from baselines.mha import MHA
from baselines.sdpa import SDPA, append
from gma_bench.mixer import State, state_bytes


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


def streamed(mixer: SDPA, x: torch.Tensor) -> tuple[torch.Tensor, list[State]]:
    """Outputs of every step, and the state before and after each."""
    states, outputs = [mixer.init_state(len(x))], []
    for x_t in x.unbind(1):
        y_t, state = mixer.step(x_t, states[-1])
        outputs.append(y_t)
        states.append(state)
    return torch.stack(outputs, 1), states


@pytest.mark.parametrize(("batch", "num_heads"), [(3, 4), (1, 1)])
def test_the_cache_is_written_in_place_and_seldom_copied(batch: int, num_heads: int) -> None:
    mixer, x = SDPA(32, num_heads, causal=True), torch.randn(batch, 200, 32)
    with torch.no_grad():
        y, states = streamed(mixer, x)
        torch.testing.assert_close(y, mixer(x))
    assert [state_bytes(s) for s in states] == [2 * batch * t * 32 * 4 for t in range(201)]
    for name in ("keys", "values"):
        assert len({s[name].untyped_storage().data_ptr() for s in states[1:]}) == 5, "16 … 256 rows"
        assert states[-1][name].untyped_storage().nbytes() == batch * 256 * 32 * 4


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_cache_that_was_copied_or_cut_is_not_written_beyond(batch: int, num_heads: int) -> None:
    """Clones, heads and sequences of a cache, and casts, have strides that may promise room."""
    mixer = SDPA(16, num_heads, causal=True)
    with torch.no_grad():
        _, states = streamed(mixer, torch.randn(batch, 9, 16))
        cache = states[-1]["keys"]
        for part in (cache, cache.clone(), cache[:, :1], cache[:, -1:], cache[:1], cache[-1:],
                     cache[:, :, 2:], cache[:, :, ::2], cache.double(), cache[..., :4]):  # fmt: skip
            before, shape = cache.clone(), (*part.shape[:2], 1, part.shape[3])
            row = torch.randn(shape, dtype=part.dtype)
            longer = append(part, row)
            torch.testing.assert_close(longer, torch.cat((part, row), 2))
            torch.testing.assert_close(cache, before)


@pytest.mark.parametrize("mixer", [SDPA, MHA])
def test_gradients_of_steps_are_those_of_the_whole(mixer: type[SDPA], agree) -> None:
    one = mixer(32, 4, causal=True)
    agree(
        lambda x: streamed(one, x)[0], one, torch.randn(2, 21, 32),
        [(p, p) for p in one.parameters()],
    )  # fmt: skip
