"""Softmax attention through torch's fused kernel."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gma_bench.mixer import Mixer, State, zero_masked

FIRST_ROWS = 16
"""Tokens that a KV cache has room for when the first one is written."""


class SDPA(Mixer):
    """Multi-head softmax attention, fused (``torch.nn.functional.scaled_dot_product_attention``).

    Source: Vaswani et al., *Attention Is All You Need* (2017), section 3.2. Memory is linear in
    the sequence length wherever torch has a fused kernel, masks included; time is quadratic.
    Streaming keeps every key and value (a KV cache), so its state grows with the context.
    """

    overwrites_state: ClassVar[bool] = True

    def __init__(
        self, d_model: int, num_heads: int, causal: bool = False, max_length: int | None = None
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_masked(x, mask)
        out = self.attend(*self.project(x), mask)
        return zero_masked(self.out_proj(self.merge_heads(out)), mask)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each head, ``(B, H, N, head_dim)`` each."""
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """``softmax(q kᵀ / √d) v`` over the keys that are real and, if causal, not later."""
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        if self.causal:
            return _masked_causal(q, k, v, mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=readable(mask)[:, None, None])

    def init_state(self, batch_size: int) -> State:
        """An empty KV cache: ``keys`` and ``values`` ``(B, H, 0, head_dim)``."""
        empty = self.q_proj.weight.new_empty(batch_size, self.num_heads, 0, self.head_dim)
        return {"keys": empty, "values": empty}

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """One token, read against everything so far.

        ``keys`` and ``values`` are the filled rows of longer buffers. Unless gradients are being
        recorded, a step writes one row into each in place, so that two steps from one state share
        that row; a full buffer doubles.
        """
        q, k, v = self.project(x_t.unsqueeze(1))
        keys, values = append(state["keys"], k), append(state["values"], v)
        out = F.scaled_dot_product_attention(q, keys, values)
        return self.out_proj(self.merge_heads(out)).squeeze(1), {"keys": keys, "values": values}


def append(cache: Tensor, row: Tensor) -> Tensor:
    """``cache (B, H, t, d)`` with ``row (B, H, 1, d)`` at its end, in place where there is room.

    There is room where ``cache`` is the first ``t`` rows of a buffer that :func:`append` made; its
    storage tells how many it has. Otherwise, rows are copied into a buffer twice as long: over
    ``t`` tokens that is less than two copied rows a token.
    """
    if torch.is_grad_enabled() and (row.requires_grad or cache.requires_grad):
        return torch.cat((cache.to(row.dtype), row), 2)
    cache = cache.to(row.dtype)
    batch, heads, length, width = cache.shape
    row_bytes = batch * heads * width * cache.element_size()
    capacity = cache.untyped_storage().nbytes() // row_bytes
    strides = (heads * capacity * width, capacity * width, width, 1)
    if length == capacity or cache.stride() != strides or cache.storage_offset():
        buffer = row.new_empty(batch, heads, max(FIRST_ROWS, 2 * length), width)
        buffer[:, :, :length] = cache
        return append(buffer[:, :, :length], row)
    longer = cache.as_strided((batch, heads, length + 1, width), strides)
    longer[:, :, length:] = row
    return longer


def readable(mask: Tensor) -> Tensor:
    """``mask``, but all True in a row that has no real token.

    Softmax over no key at all is 0/0. The outputs of such a row are zeroed afterwards, so what it
    reads does not matter as long as it and its gradients are finite.
    """
    return mask | ~mask.any(-1, keepdim=True)


def _masked_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    # The fused kernels take a causal flag or a mask, not both, and a mask that combines the two is
    # N×N. So padding is told through one more coordinate: 1 in every query, 0 in a real key, hugely
    # negative in a padded one. Values are widened too because the kernels want one width for all.
    head_dim = q.shape[-1]
    padding = torch.where(mask, 0.0, torch.finfo(k.dtype).min / 4).to(k.dtype)
    k = torch.cat((k, padding[:, None, :, None].expand(*k.shape[:-1], 1)), -1)
    q, v = F.pad(q, (0, 1), value=1.0), F.pad(v, (0, 1))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(head_dim))
    return out[..., :head_dim]
