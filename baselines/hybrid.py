"""Hybrid: a linear mixer in most layers, full attention in every n-th."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, State
from gma_bench.mixer.model import build_mixer


class Hybrid(Mixer):
    """One of two mixers, by the layer it is in: ``full`` in layers ``period``, ``2·period``, ….

    Args:
        d_model, num_heads, causal, max_length: handed to the mixer chosen.
        layer_index: the layer's number, from 0; the backbone passes it.
        period: every how many layers ``full`` takes the place of ``linear``.
        linear: config of the usual mixer (``_target_`` and its own arguments).
        full: config of the other one.

    Raises:
        SettingError: ``period`` below 1, and whatever the mixer chosen raises.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        linear: Mapping[str, Any],
        full: Mapping[str, Any],
        period: int = 4,
        layer_index: int = 0,
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        if period < 1:
            raise SettingError("mixer.period", period, "at least 1", "mixer.period=4")
        chosen = full if (layer_index + 1) % period == 0 else linear
        self.mixer = build_mixer(
            OmegaConf.create(dict(chosen)),
            d_model=d_model, num_heads=num_heads, causal=causal, max_length=max_length,
        )  # fmt: skip

    @property
    def constant_state(self) -> bool:  # type: ignore[override]
        """Whether this layer's mixer keeps a state of constant size."""
        return self.mixer.constant_state

    @property
    def streaming(self) -> bool:  # type: ignore[override]
        """Whether this layer's mixer streams."""
        return self.mixer.streaming

    @property
    def overwrites_state(self) -> bool:  # type: ignore[override]
        """Whether a step of this layer's mixer may write into the state it is given."""
        return self.mixer.overwrites_state

    def tie(self, first: Mixer) -> None:
        if isinstance(first, Hybrid):
            self.mixer.tie(first.mixer)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.mixer(x, mask)
        return out

    def init_state(self, batch_size: int) -> State:
        return self.mixer.init_state(batch_size)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        return self.mixer.step(x_t, state)

    def prefill(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        return self.mixer.prefill(x, state)
