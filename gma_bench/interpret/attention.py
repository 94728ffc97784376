"""The weights of softmax attention, for a picture: computed beside the fused kernel, which keeps none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from gma_bench.errors import UserError
from gma_bench.mixer import Mixer


def softmax_attention(model: nn.Module, tokens: Tensor) -> list[np.ndarray]:
    """``softmax(q kᵀ / √d)`` of every softmax mixer in a model, on one sequence without padding.

    Args:
        model: holds mixers with a ``project(x) -> (q, k, v)`` (SDPA, MHA).
        tokens: ``(1, n)``.

    Returns:
        A layer ``(H, n, n)`` float32; rows sum to one.

    Raises:
        UserError: there is no such mixer.
    """
    layers = [m for m in model.modules() if isinstance(m, Mixer) and hasattr(m, "project")]
    if not layers:
        raise UserError(f"{type(model).__name__} holds no softmax attention")
    weights: list[np.ndarray] = []
    handles = [layer.register_forward_pre_hook(_weigh(weights)) for layer in layers]
    model.eval()
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return weights


def _weigh(weights: list[np.ndarray]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        q, k, _ = module.project(args[0])  # type: ignore[operator]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (1, H, n, n)
        if module.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights.append(scores.softmax(-1)[0].float().cpu().numpy())

    return hook
