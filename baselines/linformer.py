"""Linformer: keys and values projected along the sequence to a fixed length."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, zero_masked

Sharing = Literal["none", "headwise", "key_value", "layerwise"]


class Linformer(Mixer):
    """Softmax attention over k learned combinations of the positions.

    Source: Wang et al., *Linformer: Self-Attention with Linear Complexity* (2020), section 4. A
    shorter input uses the first columns of the projections, so padding at the end has no effect.

    Args:
        d_model, num_heads, causal: as for every :class:`Mixer`.
        max_length: columns of the projections; longer inputs are refused.
        k: rows of the projections, the length that keys and values are brought to.
        sharing: which projections are one and the same (paper, section 4, 'Additional efficiency
            techniques'): ``none``, E and F in each head; ``headwise``, E and F for all heads of a
            layer; ``key_value``, headwise with E = F; ``layerwise``, one E for all layers, heads,
            keys and values (layers are joined by :meth:`tie`).

    Raises:
        SettingError: ``causal=True``, no ``max_length``, ``k`` < 1 or an unknown ``sharing``; in
            :meth:`forward`, an input longer than ``max_length``.
    """

    supports_causal: ClassVar[bool] = False
    no_causal_reason: ClassVar[str] = (
        "has no causal form: its projections mix all positions, later ones included, "
        "before any query is compared"
    )

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        k: int = 256,
        sharing: Sharing = "headwise",
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        if max_length is None:
            raise SettingError(
                "max_length", None, "Linformer's projections need one", "task.max_length=1024"
            )
        if k < 1:
            raise SettingError("mixer.k", k, "at least 1", "mixer.k=64")
        if sharing not in ("none", "headwise", "key_value", "layerwise"):
            raise SettingError(
                "mixer.sharing",
                sharing,
                "none, headwise, key_value or layerwise",
                "mixer.sharing=headwise",
            )
        self.k, self.sharing, self.longest = k, sharing, max_length
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.length_proj_k = self._length_projection()
        shared = sharing in ("key_value", "layerwise")
        # One parameter, one name: FSDP shards a second name for it wrongly.
        self.length_proj_v = None if shared else self._length_projection()

    def _length_projection(self) -> nn.Parameter:
        heads = self.num_heads if self.sharing == "none" else 1
        weight = torch.empty(heads, self.k, self.longest)
        for head in weight:
            nn.init.xavier_uniform_(head)
        return nn.Parameter(weight)  # (H or 1, k, max_length)

    def tie(self, first: Mixer) -> None:
        """With ``sharing=layerwise``, take the first layer's projection along the length."""
        if self.sharing == "layerwise" and isinstance(first, Linformer):
            self.length_proj_k = first.length_proj_k

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n = x.shape[1]
        if n > self.longest:
            raise SettingError(
                "max_length",
                self.longest,
                f"a sequence of {n} positions needs as many columns in Linformer's projections",
                f"task.max_length={n}",
            )
        x = zero_masked(x, mask)  # padding adds nothing to the projected keys and values
        q, k, v = self.split_heads(self.q_proj(x)), *self._shortened(x)
        out = F.scaled_dot_product_attention(q, k, v)
        return zero_masked(self.out_proj(self.merge_heads(out)), mask)

    def _shortened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the k combinations, ``(B, H, k, head_dim)`` each."""
        n = x.shape[1]
        along_k = along_v = self.length_proj_k[..., :n]
        if self.length_proj_v is not None:
            along_v = self.length_proj_v[..., :n]
        if self.sharing == "none":
            keys, values = self.split_heads(self.k_proj(x)), self.split_heads(self.v_proj(x))
            return along_k @ keys, along_v @ values
        # E(xW) = (Ex)W, and the second needs W on k rows in place of N.
        mixed = along_k[0] @ x  # (B, k, d_model)
        other = mixed if self.length_proj_v is None else along_v[0] @ x
        return self.split_heads(self.k_proj(mixed)), self.split_heads(self.v_proj(other))
