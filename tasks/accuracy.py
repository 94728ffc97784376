"""Accuracy over examples: a sum of right answers over a count, so that no batch size changes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Accuracy(Metric):
    """The share of right answers among all that were shown; NaN when none was.

    Counts are integers and add up over batches and ranks.
    """

    full_state_update = False
    right: Tensor
    shown: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("right", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("shown", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, right: Tensor, chosen: Tensor | None = None) -> None:
        """Add answers.

        Args:
            right: bool, any shape: whether each answer is right.
            chosen: bool, same shape: which answers count; all by default.
        """
        if chosen is None:
            self.right += right.sum()
            self.shown += right.numel()
        else:
            self.right += (right & chosen).sum()
            self.shown += chosen.sum()

    def compute(self) -> Tensor:
        """A scalar in [0, 1]."""
        return self.right.double() / self.shown
