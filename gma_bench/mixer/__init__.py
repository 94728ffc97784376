"""What a mixer is: the interface that every sequence mixer in the harness answers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gma_bench.errors import SettingError

State = dict[str, Any]
"""What a causal mixer carries from one token to the next: names to tensors, numbers or nested dicts."""


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
        SettingError: ``d_model`` is not divisible by ``num_heads``; a form that the class says it
            does not have.
    """

    supports_causal: ClassVar[bool] = True
    supports_bidirectional: ClassVar[bool] = True
    no_causal_reason: ClassVar[str] = "has no causal form"
    no_bidirectional_reason: ClassVar[str] = "has no bidirectional form"
    streaming: ClassVar[bool] = True
    """Whether the causal form has ``init_state`` and ``step``; False declares that it has none."""
    constant_state: ClassVar[bool] = False
    """Whether the streaming state has the same size at every context length."""
    overwrites_state: ClassVar[bool] = False
    """Whether ``step`` may write into the state it is given, or into room behind it: such a state goes
    on once, and a second continuation (beam search) starts from a :func:`copy_state` of it."""

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
        if not causal and not self.supports_bidirectional:
            raise SettingError(
                "mixer", type(self).__name__, self.no_bidirectional_reason, "mixer=gma"
            )
        self.d_model, self.num_heads, self.causal, self.max_length = (
            d_model,
            num_heads,
            causal,
            max_length,
        )
        self.head_dim = d_model // num_heads

    def __call__(self, x: Tensor, mask: Tensor | None = None, *others: Any, **named: Any) -> Any:
        """:meth:`forward`, for an input that has the shapes and dtypes it takes."""
        self.check_input(x, mask)
        return super().__call__(x, mask, *others, **named)

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
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """One token of a causal sequence, ``(B, d_model)`` in and out, and the next state."""
        raise NotImplementedError(f"{type(self).__name__} does not stream")

    def prefill(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """A stretch of a causal sequence at once, and the state that :meth:`step` goes on from.

        Here token by token; a mixer with a faster way has its own.

        Args:
            x: ``(B, N, d_model)``, real tokens only.
            state: of the tokens before; None where there are none.

        Returns:
            ``(B, N, d_model)`` and the state after the last token.

        Raises:
            ValueError: the mixer is bidirectional.
        """
        self.check_streaming()
        self.check_input(x)
        state = self.init_state(len(x)) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            y_t, state = self.step(x_t, state)
            outputs.append(y_t)
        return torch.stack(outputs, 1) if outputs else torch.zeros_like(x), state

    def check_input(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Refuse what :meth:`forward` does not take; reads shapes and dtypes only.

        Raises:
            ValueError: a shape other than ``(B, N, d_model)``, or ``(B, N)`` for the mask.
            TypeError: a mask that is not bool.
        """
        shape = tuple(x.shape)
        if x.dim() != 3 or x.shape[2] != self.d_model:
            hint = "; for one sequence, x.unsqueeze(0)" if shape[1:] == (self.d_model,) else ""
            raise ValueError(f"x {shape} must be (B, N, d_model={self.d_model}){hint}")
        if mask is None:
            return
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask is {mask.dtype}; must be bool (B, N), True = a real token: mask.bool() for "
                "ones and zeros, mask == 0 for a mask that is added to logits"
            )
        if mask.shape != x.shape[:2]:
            raise ValueError(f"mask {tuple(mask.shape)} must be (B, N) = {shape[:2]}")

    def check_streaming(self) -> None:
        """Refuse to stream a bidirectional mixer.

        Raises:
            ValueError: the mixer is bidirectional.
        """
        if not self.causal:
            name = type(self).__name__
            raise ValueError(
                f"this {name} is bidirectional: every output waits for the last token. To stream, "
                f"build it with causal=True"
            )

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


def copy_state(state: State) -> State:
    """A state of its own for another continuation; gradients flow through."""
    return {
        name: value.clone()
        if isinstance(value, Tensor)
        else copy_state(value)
        if isinstance(value, dict)
        else value
        for name, value in state.items()
    }


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero the rows of ``x (B, N, …)`` that ``mask (B, N)`` calls padding."""
    if mask is None:
        return x
    return torch.where(mask.unflatten(-1, (-1, *[1] * (x.dim() - 2))), x, x.new_zeros(()))
