"""The norm of the gradients that reach the model through the responsibilities, at every step."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gma_bench.mixer.gma import GaussianMixtureAttention

ROUTING = ("q_proj", "k_proj", "means", "raw_variance", "log_priors")
"""Parameters of a GMA that act on its output through the responsibilities alone."""


class RoutingGradients(Callback):
    """Records, before clipping, the 2-norm of the loss's gradient by all routing parameters.

    Those are the projections to routing vectors, the means, the free variances and the free priors:
    the loss depends on them through Γ_Q and Γ_K only, so their gradient is what comes through the
    responsibilities (PAPER: "gradients are modulated by responsibilities and bounded").

    At the start posteriors are nearly even and embeddings small, so the first norms are close to
    zero; the norm of the gradient by all other parameters is therefore kept beside it.

    Attributes:
        steps, norms, others: one entry an optimiser step; kept in checkpoints, so that a resumed run
            has all.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.norms: list[float] = []
        self.others: list[float] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        self.steps.append(trainer.global_step + 1)
        routing, other = gradient_norms(pl_module)
        self.norms.append(routing)
        self.others.append(other)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "norms": self.norms, "others": self.others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in ("steps", "norms", "others"):
            setattr(self, name, list(state_dict[name]))

    def figures(self) -> dict[str, float]:
        """What the steps come to; nothing if none ran.

        ``gradient_norm_initial`` (first step), ``gradient_norm_max``, ``gradient_norm_final``,
        ``gradient_norm_other_max`` (all other parameters), ``gradient_norm_ratio_max`` (the largest
        of routing against others within a step), ``gradient_nonfinite_steps``.
        """
        if not self.norms:
            return {}
        return {
            "gradient_norm_initial": self.norms[0],
            "gradient_norm_max": max(self.norms),
            "gradient_norm_final": self.norms[-1],
            "gradient_norm_other_max": max(self.others),
            "gradient_norm_ratio_max": max(
                n / o for n, o in zip(self.norms, self.others, strict=True) if o > 0
            ),
            "gradient_nonfinite_steps": float(sum(not math.isfinite(n) for n in self.norms)),
        }

    def at(self, steps: list[float]) -> list[float]:
        """The largest norm up to each of ``steps`` since the one before: no spike falls between two."""
        largest, start = [], 0
        for step in steps:
            upto = [n for s, n in zip(self.steps, self.norms, strict=True) if start < s <= step]
            largest.append(max(upto, default=float("nan")))
            start = int(step)
        return largest


def gradient_norms(model: nn.Module) -> tuple[float, float]:
    """2-norms of the gradients by all routing parameters in ``model``, and by all other parameters."""
    routing = {
        id(parameter)
        for layer in model.modules() if isinstance(layer, GaussianMixtureAttention)
        for name, parameter in layer.named_parameters() if name.split(".")[0] in ROUTING
    }  # fmt: skip
    squares = [torch.zeros(()).double(), torch.zeros(()).double()]
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        if grad is not None:
            other = id(parameter) not in routing
            squares[other] = squares[other].to(parameter.device) + grad.double().square().sum()
    return float(squares[0].sqrt()), float(squares[1].sqrt())
