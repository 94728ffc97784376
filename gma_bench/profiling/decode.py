"""Streaming states of any context length, without streaming that many tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gma_bench.mixer import Mixer, State

MOST_STEPS = 4096


class UnknownGrowth(Exception):
    """A state whose size at a longer context cannot be told from two steps."""


@torch.no_grad()
def state_at(mixer: Mixer, context: int, batch_size: int) -> State:
    """The state of a causal mixer after ``context`` tokens, with made-up contents.

    How a state grows is read off its first two steps: a tensor longer by one along one dimension (a
    KV cache) is lengthened; a number that went up by one (a position) is set to the length; whatever
    kept its shape stays. The last token is then stepped for real, which leaves a cache with the
    spare room that steps leave it with. A state that grows otherwise is streamed for real up to
    ``MOST_STEPS`` tokens.

    Raises:
        UnknownGrowth: it grows otherwise, and ``context`` is too long to stream.
    """
    weight = next(mixer.parameters(), torch.empty(0))  # a control may have none
    x = torch.randn(batch_size, mixer.d_model, device=weight.device, dtype=weight.dtype)
    _, first = mixer.step(x, mixer.init_state(batch_size))
    _, second = mixer.step(x, first)
    try:
        made = {name: _lengthen(first[name], second[name], context - 1) for name in second}
        return mixer.step(x, made)[1]
    except UnknownGrowth:
        if context > MOST_STEPS:
            raise
    state = mixer.init_state(batch_size)
    for _ in range(context):
        _, state = mixer.step(x, state)
    return state


def _lengthen(first: Any, second: Any, context: int) -> Any:
    if isinstance(second, dict):
        return {name: _lengthen(first[name], second[name], context) for name in second}
    if isinstance(second, Tensor):
        return _lengthen_tensor(first, second, context)
    if isinstance(second, int) and not isinstance(second, bool) and second - first == 1:
        return context + (second - 2)
    return second


def _lengthen_tensor(first: Tensor, second: Tensor, context: int) -> Tensor:
    if first.shape == second.shape:
        if not second.dtype.is_floating_point and bool((second - first == 1).all()):
            return second + (context - 2)
        return second
    grown = [i for i, (a, b) in enumerate(zip(first.shape, second.shape, strict=True)) if a != b]
    if len(grown) != 1 or second.shape[grown[0]] - first.shape[grown[0]] != 1:
        raise UnknownGrowth(
            f"a state went from shape {tuple(first.shape)} to {tuple(second.shape)}"
        )
    length = second.shape[grown[0]] + context - 2
    index = torch.arange(length, device=second.device) % second.shape[grown[0]]
    return second.index_select(grown[0], index)
