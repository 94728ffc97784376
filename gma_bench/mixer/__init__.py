"""What a mixer is: the interface that every sequence mixer in the harness answers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gma_bench.errors import SettingError

State = dict[str, Any]
"""What a causal mixer carries from one token to the next: names to tensors (or nested dicts)."""


class Mixer(nn.Module):
    """Mixes information along a sequence, ``(B, N, d_model) -> (B, N, d_model)``.

    A mixer owns its projections (in and out) and nothing else: no norm, no residual, no dropout,
    no positions; those belong to the backbone and are the same for every mixer.

    Args:
        d_model: width of the sequence.
        num_heads: number of heads; must divide ``d_model``.
        causal: whether position i may only see positions j ≤ i.
        max_length: the longest sequence that will be fed. Mixers whose parameters or tables depend
            on it refuse longer ones; the others ignore it.

    Raises:
        SettingError: ``d_model`` is not divisible by ``num_heads``; ``causal=True`` for a mixer
            that has no causal form.
    """

    supports_causal: ClassVar[bool] = True
    supports_bidirectional: ClassVar[bool] = True
    constant_state: ClassVar[bool] = False
    """Whether the streaming state has the same size at every context length."""

    def __init__(
        self, d_model: int, num_heads: int, causal: bool = False, max_length: int | None = None
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            divisors = [h for h in range(1, d_model + 1) if d_model % h == 0]
            nearest = min(divisors, key=lambda h: abs(h - num_heads))
            raise SettingError(
                "model.num_heads",
                num_heads,
                f"must divide model.d_model={d_model}",
                f"model.num_heads={nearest}",
            )
        if causal and not self.supports_causal:
            raise SettingError("mixer", type(self).__name__, self.no_causal_reason, "mixer=gma")
        self.d_model, self.num_heads, self.causal, self.max_length = (
            d_model,
            num_heads,
            causal,
            max_length,
        )
        self.head_dim = d_model // num_heads

    no_causal_reason: ClassVar[str] = "has no causal form"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix along the sequence.

        Args:
            x: ``(B, N, d_model)``.
            mask: ``(B, N)`` bool, True = a real token. Masked positions influence nothing, and
                their own outputs are zero.

        Returns:
            ``(B, N, d_model)``, in the dtype of the projections (or of autocast).
        """
        raise NotImplementedError

    def init_state(self, batch_size: int) -> State:
        """The state before the first token, on the module's device and in its dtype."""
        raise NotImplementedError

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """One token of a causal sequence, ``(B, d_model)`` in and out, and the next state."""
        raise NotImplementedError

    def tie(self, first: Mixer) -> None:
        """Share parameters with the first layer's mixer, for mixers that do so by their setting.

        The backbone calls it on every later layer's mixer; by default nothing is shared.
        """

    def split_heads(self, x: Tensor) -> Tensor:
        """``(B, N, H·d) -> (B, H, N, d)``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """``(B, H, N, d) -> (B, N, H·d)``."""
        return x.transpose(1, 2).flatten(2)


def state_tensors(state: State) -> Iterator[Tensor]:
    """Every tensor in a state, nested or not."""
    for value in state.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from state_tensors(value)


def state_bytes(state: State) -> int:
    """Bytes that a state holds (for the whole batch); scalar position counters included."""
    return sum(t.numel() * t.element_size() for t in state_tensors(state))


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the rows of ``x (B, N, …)`` that ``mask (B, N)`` calls padding."""
    if mask is None:
        return x
    return torch.where(mask.unflatten(-1, (-1, *[1] * (x.dim() - 2))), x, x.new_zeros(()))
