"""A small model whose routing is planted, and a text to read with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gma_bench import GaussianMixtureAttention
from gma_bench.interpret import Analysis, analyze

WORDS = [",", ".", "the", "of", "Paris", "NASA", "1914", "house", "<unk>", "</script><b>$x_1$"]


class Lookup(nn.Module):
    """Embedding and GMA layers: the smallest thing that takes ids."""

    def __init__(self, vocabulary: int, width: int, layers: list[GaussianMixtureAttention]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


def planted(
    num_components: int, width: int = 8, *, causal: bool = False
) -> GaussianMixtureAttention:
    """One head that sends the i-th unit vector (times ten) to component i, surely."""
    layer = GaussianMixtureAttention(
        width,
        1,
        causal=causal,
        num_components=num_components,
        routing_norm="none",
        init_variance=0.1,
    )
    with torch.no_grad():
        layer.q_proj.weight.copy_(torch.eye(width))
        layer.k_proj.weight.copy_(torch.eye(width))
        layer.means.zero_()
        count = min(num_components, width)
        layer.means[0, :count] = 10 * torch.eye(width)[:count]
        layer.means[0, count:] = -10.0
    return layer


@dataclass
class Case:
    model: nn.Module
    tokens: Tensor
    mask: Tensor
    documents: np.ndarray
    texts: list[list[str]]

    def analyze(self, **options: object) -> Analysis:
        settings: dict[str, object] = {
            "mask": self.mask, "documents": self.documents, "texts": self.texts, "categories": "word",
            "resamples": 50, "permutations": 3, "window_length": 24,
        }  # fmt: skip
        return analyze(self.model, self.tokens, **(settings | options))  # type: ignore[arg-type]


@pytest.fixture
def case() -> Case:
    return make_case()


def make_case() -> Case:
    """Two layers of two heads, five sequences of 30 tokens, the last one padded."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    layers = [
        GaussianMixtureAttention(16, 2, causal=True, num_components=k, init_variance=0.5)
        for k in (12, 20)
    ]
    tokens = torch.from_numpy(rng.integers(0, len(WORDS), (5, 30)))
    mask = torch.ones(5, 30, dtype=torch.bool)
    mask[4, 21:] = False
    texts = [[WORDS[i] for i in row] for row in tokens.tolist()]
    documents = np.repeat([[7], [7], [3], [9], [11]], 30, axis=1)
    return Case(Lookup(len(WORDS), 16, layers), tokens, mask, documents, texts)
