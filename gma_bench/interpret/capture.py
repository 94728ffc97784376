"""Reads routing out of a model while it runs: forward hooks on every GMA, and sums over its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from gma_bench import ops
from gma_bench.errors import UserError
from gma_bench.mixer.gma import GaussianMixtureAttention

Side = Literal["query", "key"]
Forward = Callable[[nn.Module, Tensor, Tensor | None], object]

CHUNK_ELEMENTS = 1 << 22
"""Responsibilities held at a time, over heads, tokens and components."""


@dataclass
class Windows:
    """What a layer did with the first few sequences, kept whole: W sequences of n tokens.

    Attributes:
        query, key: responsibilities, ``(W, H, n, K)`` float32.
        routed_query, routed_key: routing vectors, ``(W, H, n, d_r)`` float32.
    """

    query: list[np.ndarray] = field(default_factory=list)
    key: list[np.ndarray] = field(default_factory=list)
    routed_query: list[np.ndarray] = field(default_factory=list)
    routed_key: list[np.ndarray] = field(default_factory=list)


class LayerTrace:
    """Sums over the tokens that one GMA layer has seen, and details of the first of them.

    Args:
        name: the module's name in the model.
        module: the layer.
        num_documents: D.
        side: whose posterior is summed.
        detail_tokens: tokens for which the leading components are kept.
        top: how many leading components.
    """

    def __init__(
        self, name: str, module: GaussianMixtureAttention, num_documents: int, side: Side,
        detail_tokens: int, top: int,
    ) -> None:  # fmt: skip
        self.name, self.module, self.side = name, module, side
        self.num_heads, self.num_components = module.num_heads, module.num_components
        self.detail_tokens, self.top = detail_tokens, min(top, module.num_components)
        self.mass = torch.zeros(
            self.num_heads, num_documents, self.num_components, dtype=torch.float64
        )
        """Responsibilities summed by document, ``(H, D, K)``."""
        self.entropy = torch.zeros(self.num_heads, dtype=torch.float64)
        self.overlap = torch.zeros(self.num_heads, dtype=torch.float64)
        self.radius = torch.zeros(self.num_heads, dtype=torch.float64)
        self.seen = 0
        self.windows = Windows()
        self._winners: list[np.ndarray] = []
        self._top_components: list[np.ndarray] = []
        self._top_values: list[np.ndarray] = []

    def add(
        self, x: Tensor, mask: Tensor, documents: Tensor, windows: int, window_length: int
    ) -> None:
        """Add one batch.

        Args:
            x: ``(B, N, d_model)``, what the layer was fed.
            mask: ``(B, N)`` bool.
            documents: ``(B, N)`` index of each token's document.
            windows: how many sequences of this batch to keep whole.
            window_length: their first n tokens (real ones).
        """
        x = torch.where(mask.unsqueeze(-1), x, 0.0)
        query = self.module.responsibilities(x, "query")  # (B, H, N, K)
        key = self.module.responsibilities(x, "key")
        routed = {side: self.module.routing(x, side) for side in ("query", "key")}
        self._keep_windows(query, key, routed, mask, windows, window_length)
        chosen = (
            (query if self.side == "query" else key).transpose(0, 1)[:, mask].double()
        )  # (H, n, K)
        self.mass.index_add_(1, documents[mask].cpu(), chosen.cpu())
        self.entropy -= torch.special.xlogy(chosen, chosen).sum((1, 2)).cpu()
        self.overlap += (
            torch.minimum(query, key).transpose(0, 1)[:, mask].double().sum((1, 2)).cpu()
        )
        for vectors in routed.values():
            norms = vectors.transpose(0, 1)[:, mask].double().norm(dim=-1)  # (H, n)
            if norms.numel():
                self.radius = torch.maximum(self.radius, norms.amax(1).cpu())
        self._winners.append(chosen.argmax(-1).to(torch.int32).cpu().numpy())
        self._keep_leading(chosen)
        self.seen += chosen.shape[1]

    def _keep_leading(self, chosen: Tensor) -> None:
        room = self.detail_tokens - self.seen
        if room > 0:
            values, components = chosen[:, :room].topk(self.top, dim=-1)
            self._top_components.append(components.to(torch.int32).cpu().numpy())
            self._top_values.append(values.float().cpu().numpy())

    def _keep_windows(
        self, query: Tensor, key: Tensor, routed: dict[str, Tensor], mask: Tensor, windows: int,
        window_length: int,
    ) -> None:  # fmt: skip
        for row in range(min(windows, len(mask))):
            real = mask[row].nonzero()[:window_length, 0]
            keep = self.windows
            for target, tensor in (
                (keep.query, query), (keep.key, key),
                (keep.routed_query, routed["query"]), (keep.routed_key, routed["key"]),
            ):  # fmt: skip
                target.append(tensor[row][:, real].float().cpu().numpy())

    @property
    def winners(self) -> np.ndarray:
        """The component with the largest responsibility for each token, ``(H, N)`` int32."""
        return np.concatenate(self._winners, axis=1)

    @property
    def leading(self) -> tuple[np.ndarray, np.ndarray]:
        """Leading components and their responsibilities, ``(H, n, top)`` each, largest first."""
        return np.concatenate(self._top_components, axis=1), np.concatenate(
            self._top_values, axis=1
        )

    def mixture(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means and variances ``(H, K, d_r)`` and log priors ``(H, K)``, float64."""
        module = self.module
        means = module.means.expand(self.num_heads, -1, -1)
        tensors = (means, module.variances(), module.priors().log())
        return tuple(t.detach().double().cpu().numpy() for t in tensors)  # type: ignore[return-value]

    def implied_affinity(self, window: int) -> np.ndarray:
        """The affinity of a kept window as the operator applies it, ``(H, n, n)`` float64.

        One-hot values come out of ``gma`` as the matrix that it multiplies values by. It is
        bidirectional whatever the model: the prefix sums of a causal layer have no bound on rank.
        """
        q, k = (
            torch.from_numpy(w[window]).double().unsqueeze(0)
            for w in (self.windows.routed_query, self.windows.routed_key)
        )
        mixture = [torch.from_numpy(t) for t in self.mixture()]
        one_hot = torch.eye(k.shape[2], dtype=torch.float64).expand(1, self.num_heads, -1, -1)
        return ops.gma(q, k, one_hot, *mixture, eps=self.module.eps)[0].numpy()


def find_layers(model: nn.Module) -> list[tuple[str, GaussianMixtureAttention]]:
    """The GMA layers of a model by name, in order of registration.

    Raises:
        UserError: there is none.
    """
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, GaussianMixtureAttention)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} holds no GaussianMixtureAttention, so there are no components to read. "
            "Try: mixer=gma"
        )
    return layers


def call_with_mask(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> object:
    """``model(tokens, mask)``: how the harness's models and mixers are called."""
    return model(tokens, mask)


def trace(
    model: nn.Module, tokens: Tensor, mask: Tensor | None, documents: np.ndarray, *, side: Side,
    detail_tokens: int, top: int, windows: int, window_length: int,
    forward: Forward = call_with_mask,
) -> list[LayerTrace]:  # fmt: skip
    """Run a model over a text, in evaluation mode and without gradients, and sum up its GMA layers.

    Args:
        model: holds GMA layers that attend to themselves; is left in the mode it was in.
        tokens: ``(B, N)`` ids or ``(B, N, d)`` vectors, whatever the model is fed.
        mask: ``(B, N)`` bool, or None when every token is real.
        documents: ``(B, N)`` index of each token's document.
        side, detail_tokens, top: see :class:`LayerTrace`.
        windows, window_length: sequences to keep whole, and how much of them.
        forward: how to call the model with a batch.

    Raises:
        UserError: no GMA layer, one that never ran or ran with other positions than the tokens'
            (cross-attention, a CLS vector in front).
    """
    layers = find_layers(model)
    traces = [
        LayerTrace(name, m, int(documents.max()) + 1, side, detail_tokens, top)
        for name, m in layers
    ]
    device = next(model.parameters()).device
    widest = max(m.num_heads * m.num_components for _, m in layers)
    rows = max(1, CHUNK_ELEMENTS // (widest * tokens.shape[1]))
    real = torch.ones(tokens.shape[:2], dtype=torch.bool) if mask is None else mask.cpu().bool()
    was_training = model.training
    model.eval()
    inputs: dict[str, Tensor] = {}
    handles = [
        m.register_forward_pre_hook(_remember(inputs, n), with_kwargs=True) for n, m in layers
    ]
    try:
        for start in range(0, len(tokens), rows):
            part = slice(start, start + rows)
            inputs.clear()
            with torch.no_grad():
                batch_mask = None if mask is None else mask[part].to(device)
                forward(model, tokens[part].to(device), batch_mask)
                for layer in traces:
                    x = _input_of(layer.name, inputs, real[part])
                    layer.add(
                        x, real[part].to(device), torch.from_numpy(documents[part]).to(device),
                        max(0, windows - start), window_length,
                    )  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return traces


def _remember(inputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if kwargs.get("memory") is not None or (len(args) > 2 and args[2] is not None):
            raise UserError(f"{name} reads another sequence; analyze reads self-attention only")
        x = args[0] if args else kwargs["x"]
        assert isinstance(x, Tensor)
        inputs[name] = x.detach()

    return hook


def _input_of(name: str, inputs: dict[str, Tensor], real: Tensor) -> Tensor:
    if name not in inputs:
        raise UserError(f"{name} did not run; pass forward=… to say how the model is called")
    if inputs[name].shape[:2] != real.shape:
        raise UserError(
            f"{name} was fed {inputs[name].shape[1]} positions and the text has {real.shape[1]}; "
            "positions must be the tokens' (no CLS vector: model.pooling=mean)"
        )
    return inputs[name]
