"""Perplexity and its kin, from one sum of negative log-likelihoods over a split."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

NATS = 1 << 20
"""Steps a nat: sums are whole numbers of 2⁻²⁰ nats."""
MOST_NATS = 1 << 20
"""What one token adds at most; NaN and infinity add this."""


class Likelihood(Metric):
    """Total negative log-likelihood and the number of tokens it is over.

    Sums are integers (64 bits, fixed point), so that neither the order of tokens nor the batches and
    ranks they come in changes the result, on devices without float64 as well. A token's rounding is
    below 5e-7 nats.

    Args:
        units_per_token: how many units (tokens, words, bytes) of the split stand for one token of it.
    """

    full_state_update = False
    nats: Tensor
    tokens: Tensor

    def __init__(self, units_per_token: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units_per_token = units_per_token
        self.add_state("nats", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, losses: Tensor) -> None:
        """Add the negative log-likelihoods (natural logarithm) of tokens, any shape."""
        bounded = losses.float().nan_to_num(nan=MOST_NATS, posinf=MOST_NATS).clamp(max=MOST_NATS)
        self.nats += (bounded * NATS).round().long().sum()
        self.tokens += losses.numel()

    def nats_per_unit(self) -> float:
        """Mean negative log-likelihood of a unit; NaN before the first token."""
        units = self.tokens.item() * self.units_per_token
        return self.nats.item() / NATS / units if units else math.nan


class Perplexity(Likelihood):
    """``exp(total negative log-likelihood / units)``; infinite beyond what a float holds."""

    def compute(self) -> Tensor:
        """A float64 scalar."""
        return torch.tensor(self.nats_per_unit(), dtype=torch.float64).exp()


class BitsPerUnit(Likelihood):
    """``total negative log-likelihood / (units · ln 2)``."""

    def compute(self) -> Tensor:
        """A float64 scalar."""
        return torch.tensor(self.nats_per_unit() / math.log(2), dtype=torch.float64)
