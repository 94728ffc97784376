"""Softmax attention with the N×N matrix formed explicitly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baselines.sdpa import SDPA, readable


class MHA(SDPA):
    """Multi-head softmax attention that forms its attention matrix: memory quadratic in length.

    The same function and parameters as :class:`~baselines.sdpa.SDPA` (its state dict loads here);
    it is what 'quadratic' means in the memory profile.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        # Scaled before the product: N×N numbers fewer to write, forward and backward.
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-1, -2)  # (B, H, N, N)
        allowed = None if mask is None else readable(mask)[:, None, None]
        if self.causal:
            n = q.shape[-2]
            allowed = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            if mask is not None:
                # A padded position may see padding: it needs something to be normalised over,
                # and its output is zeroed.
                allowed = allowed & (mask[:, None, None] | ~mask[:, None, :, None])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        return scores.softmax(-1) @ v
