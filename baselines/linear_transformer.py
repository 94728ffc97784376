"""Linear Transformer: attention with the kernel ``elu + 1``."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.kernelized import CHUNK_SIZE, kernelized_attention, kernelized_step
from gma_bench.mixer import Mixer, State, zero_masked


def elu_plus_one(x: Tensor) -> Tensor:
    """``elu(x) + 1``, positive everywhere (equation 7 of the paper)."""
    # Not F.elu(x) + 1: under torch.compile (2.13) the strides of elu's gradient are predicted wrong.
    return F.relu(x) + x.clamp(max=0).exp()


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    eps: float = 1e-6,
) -> Tensor:
    """Linear attention with the feature map ``elu + 1``.

    Args:
        q: ``(B, H, N, d)``, before the feature map.
        k: ``(B, H, M, d)``, before the feature map.
        v: ``(B, H, M, d_v)``.
        causal: whether position i sees only j ≤ i (N = M).
        mask: ``(B, M)`` bool, True = a real key.
        chunk_size: positions a chunk, causal only.
        eps: added to the denominator, as in the published code.

    Returns:
        ``(B, H, N, d_v)``.
    """
    return kernelized_attention(
        elu_plus_one(q),
        elu_plus_one(k),
        v,
        causal=causal,
        mask=mask,
        chunk_size=chunk_size,
        eps=eps,
    )


class LinearTransformer(Mixer):
    """Multi-head linear attention.

    Source: Katharopoulos et al., *Transformers are RNNs* (ICML 2020), equations 5–12.

    Args:
        d_model, num_heads, causal, max_length: as for every :class:`Mixer`; length is not limited.
        chunk_size: positions a chunk of the causal form.
        eps: added to the denominator.
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
        self.chunk_size, self.eps = chunk_size, eps
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_masked(x, mask)
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = linear_attention(
            q, k, v, causal=self.causal, mask=mask, chunk_size=self.chunk_size, eps=self.eps
        )
        return zero_masked(self.out_proj(self.merge_heads(out)), mask)

    def init_state(self, batch_size: int) -> State:
        """``state (B, H, head_dim, head_dim)`` and ``mass (B, H, head_dim)``, zero."""
        weight, shape = self.q_proj.weight, (batch_size, self.num_heads, self.head_dim)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return {
            "state": weight.new_zeros(*shape, self.head_dim, dtype=dtype),
            "mass": weight.new_zeros(shape, dtype=dtype),
        }

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        heads = (self.num_heads, -1)
        q, k, v = (p(x_t).unflatten(-1, heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        out, memory, mass = kernelized_step(
            elu_plus_one(q), elu_plus_one(k), v, state["state"], state["mass"], self.eps
        )
        return self.out_proj(out.flatten(1)), {"state": memory, "mass": mass}
