"""cosFormer: linear attention with ReLU features, weighted by the cosine of the distance."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.kernelized import CHUNK_SIZE, kernelized_attention, kernelized_step
from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, State, zero_masked


class CosFormer(Mixer):
    """Multi-head attention with ``relu(q)·relu(k) cos(π/2 · (i − j) / M)`` for weights.

    Source: Qin et al., *cosFormer: Rethinking Softmax in Attention* (ICLR 2022), equations 9–12.
    The cosine of a difference splits into products, so this is linear attention with features
    twice as wide. The authors' code takes M from the length of the batch at hand; here M is
    ``max_length``, or the result would change with padding and with later tokens.

    Args:
        d_model, num_heads, causal: as for every :class:`Mixer`.
        max_length: M; longer inputs are refused, since weights would turn negative.
        chunk_size: positions a chunk of the causal form.
        eps: added to the denominator.

    Raises:
        SettingError: no ``max_length``; in :meth:`forward` and :meth:`step`, a longer input.
    """

    constant_state: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        chunk_size: int = CHUNK_SIZE,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        if max_length is None:
            raise SettingError(
                "max_length", None, "cosFormer's weights need one", "task.max_length=1024"
            )
        self.longest, self.chunk_size, self.eps = max_length, chunk_size, eps
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self._check_length(x.shape[1])
        x = zero_masked(x, mask)
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        positions = torch.arange(x.shape[1], device=x.device)
        out = kernelized_attention(
            self._features(q, positions),
            self._features(k, positions),
            v,
            causal=self.causal,
            mask=mask,
            chunk_size=self.chunk_size,
            eps=self.eps,
        )
        return zero_masked(self.out_proj(self.merge_heads(out)), mask)

    def init_state(self, batch_size: int) -> State:
        """``state (B, H, 2·head_dim, head_dim)``, ``mass (B, H, 2·head_dim)``, ``position``."""
        weight, shape = self.q_proj.weight, (batch_size, self.num_heads, 2 * self.head_dim)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return {
            "state": weight.new_zeros(*shape, self.head_dim, dtype=dtype),
            "mass": weight.new_zeros(shape, dtype=dtype),
            "position": 0,
        }

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        self._check_length(state["position"] + 1)
        x = x_t.unsqueeze(1)
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        position = torch.full((1,), state["position"], device=x.device)
        features_q, features_k = self._features(q, position), self._features(k, position)
        out, memory, mass = kernelized_step(
            features_q.squeeze(2),
            features_k.squeeze(2),
            v.squeeze(2),
            state["state"],
            state["mass"],
            self.eps,
        )
        state = {"state": memory, "mass": mass, "position": state["position"] + 1}
        return self.out_proj(out.flatten(1)), state

    def _features(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[relu(x) cos θ, relu(x) sin θ]``, ``(B, H, N, d) -> (B, H, N, 2d)``."""
        x = F.relu(x.to(torch.promote_types(x.dtype, torch.float32)))
        angle = (math.pi / 2 / self.longest) * positions.to(x.dtype).unsqueeze(-1)
        return torch.cat((x * angle.cos(), x * angle.sin()), -1)

    def _check_length(self, n: int) -> None:
        if n > self.longest:
            raise SettingError(
                "max_length",
                self.longest,
                f"a sequence of {n} positions would get negative weights from cosFormer",
                f"task.max_length={n}",
            )
