"""Backbone and heads: pre-norm blocks around a mixer, the same for every mixer."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gma_bench.errors import SettingError, UserError
from gma_bench.mixer import Mixer

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from gma_bench.task import Task

NOT_ARGUMENTS = ("name", "forms", "forms_reason", "reproduce")
"""Keys of a mixer's file that the harness reads; its constructor gets those that it names."""


def build_mixer(
    config: DictConfig,
    *,
    d_model: int,
    num_heads: int,
    causal: bool,
    max_length: int | None,
    layer_index: int = 0,
) -> Mixer:
    """Instantiate ``config`` (a node of ``conf/mixer``) as one layer's mixer.

    ``layer_index`` is passed on to mixers whose constructor takes it (hybrids).

    Raises:
        SettingError: the target cannot be imported, or does not take one of the settings.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    target = mixer_class(config["_target_"])
    accepted = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    own = own_settings(config, accepted)
    hydras = {k: v for k, v in config.items() if str(k).startswith("_")}  # _recursive_ and the like
    for key in own:
        if key not in accepted and not takes_any:
            allowed = ", ".join(
                k for k in accepted if k not in ("d_model", "num_heads", "causal", "max_length")
            )
            raise SettingError(
                f"mixer.{key}",
                own[key],
                f"{target.__name__} takes: {allowed or 'no settings'}",
                f"~mixer.{key}",
            )
    layer = {"layer_index": layer_index} if "layer_index" in accepted else {}
    try:
        return instantiate(
            {**hydras, **own},
            d_model=d_model, num_heads=num_heads, causal=causal, max_length=max_length, **layer,
        )  # fmt: skip
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):  # the mixer's own words, not Hydra's around them
            raise error.__cause__ from None
        raise


def own_settings(config: DictConfig, accepted: Collection[str]) -> dict[str, Any]:
    """The arguments that a mixer's config gives its class, resolved; ``accepted`` are the class's."""
    from omegaconf import OmegaConf

    settings: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    ours = {k for k in settings if k.startswith("_") or (k in NOT_ARGUMENTS and k not in accepted)}
    return {k: v for k, v in settings.items() if k not in ours}


def mixer_class(path: str) -> type[Mixer]:
    """The mixer that a dotted path names.

    Raises:
        SettingError: it cannot be imported, or is no mixer.
    """
    module, _, name = path.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise SettingError(
            "mixer._target_", path, f"must be an importable class ({said})", "mixer=gma"
        ) from error
    if not (isinstance(target, type) and issubclass(target, Mixer)):
        raise SettingError(
            "mixer._target_", path, "must be a subclass of gma_bench.mixer.Mixer", "mixer=gma"
        )
    return target


class Positions(nn.Module):
    """Adds positions to ``(B, N, d_model)``: a learned table, or fixed sines (Vaswani et al. 2017).

    A learned table starts with the standard deviation ``std`` of the embedding that it is added to:
    much below it, the first layers see tokens and no places (on ListOps that cost GMA, which routes by
    what it sees, 8 points of accuracy and half its components).
    """

    def __init__(
        self,
        kind: Literal["learned", "sinusoidal", "none"],
        max_length: int,
        d_model: int,
        std: float,
    ) -> None:
        super().__init__()
        self.kind, self.max_length, self.d_model = kind, max_length, d_model
        if kind == "learned":
            self.table = nn.Parameter(torch.randn(max_length, d_model) * std)
        elif kind == "sinusoidal":
            self.register_buffer("table", sinusoids(max_length, d_model), persistent=False)
        elif kind != "none":
            raise SettingError(
                "model.positions",
                kind,
                "must be learned, sinusoidal or none",
                "model.positions=learned",
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "none":
            return x
        if x.shape[1] > self.max_length:
            raise SettingError(
                "task.max_length",
                self.max_length,
                f"a batch holds {x.shape[1]} tokens",
                f"task.max_length={x.shape[1]}",
            )
        return x + self.table[: x.shape[1]]


def sinusoids(length: int, width: int) -> Tensor:
    """``(length, width)`` sines and cosines of geometrically spaced frequencies."""
    position = torch.arange(length, dtype=torch.float32)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency[: width // 2])
    return table


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, mixer: Mixer, d_model: int, mlp_hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm_mixer, self.mixer = nn.LayerNorm(d_model), mixer
        self.norm_mlp = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            nn.Linear(d_model, mlp_hidden), nn.GELU(), nn.Linear(mlp_hidden, d_model)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.mixer(self.norm_mixer(x), mask))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class SequenceModel(nn.Module):
    """Embedding, positions, blocks, norm, head.

    Args:
        mixers: one a layer; all alike, or as a hybrid mixer wants them.
        vocab_size: number of token ids.
        num_outputs: width of the head.
        max_length: longest sequence, without the CLS vector.
        d_model, mlp_hidden, dropout: the backbone's sizes.
        positions: ``learned``, ``sinusoidal`` or ``none``.
        pooling: ``mean`` (over real tokens), ``cls`` (a learned vector put first), or ``token``.
        tie_embeddings: the head shares the embedding's weights (language models).
    """

    def __init__(
        self,
        mixers: list[Mixer],
        *,
        vocab_size: int,
        num_outputs: int,
        max_length: int,
        d_model: int,
        mlp_hidden: int,
        dropout: float = 0.0,
        positions: Literal["learned", "sinusoidal", "none"] = "learned",
        pooling: Literal["mean", "cls", "token"] = "mean",
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "cls", "token"):
            raise SettingError(
                "model.pooling", pooling, "must be mean or cls", "model.pooling=mean"
            )
        self.pooling = pooling
        self.embedding = nn.Embedding(vocab_size, d_model)
        std = 0.02 if tie_embeddings else 1.0
        self.cls = nn.Parameter(torch.randn(d_model) * std) if pooling == "cls" else None
        self.positions = Positions(positions, max_length + (pooling == "cls"), d_model, std)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(m, d_model, mlp_hidden, dropout) for m in mixers)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, num_outputs, bias=not tie_embeddings)
        nn.init.normal_(self.embedding.weight, std=std)
        if tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits for ``tokens (B, N)`` and ``mask (B, N)``, True = a real token.

        Returns:
            ``(B, num_outputs)`` with mean or cls pooling, ``(B, N, num_outputs)`` with token pooling.
        """
        x = self.embedding(tokens)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1)
            if mask is not None:
                mask = nn.functional.pad(mask, (1, 0), value=True)
        x = self.dropout(self.positions(x))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self._pool(self.norm(x), mask))

    def _pool(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.pooling == "token":
            return x
        if self.pooling == "cls":
            return x[:, 0]
        if mask is None:
            return x.mean(dim=1)
        weights = mask.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def build_model(config: DictConfig, task: Task) -> SequenceModel:
    """The model of a cell: ``config.mixer`` in a backbone of ``config.model``, for a set-up ``task``.

    With ``model.match_parameters`` the MLPs are made wider or narrower so that the model has as many
    parameters as the same backbone with softmax attention, whatever the mixer's own count.
    """
    sizes = config.model
    pooling: Any = "token" if task.pooling == "token" else sizes.pooling
    shape: dict[str, Any] = {
        "d_model": sizes.d_model, "num_heads": sizes.num_heads, "causal": task.causal,
        "max_length": task.max_length + (pooling == "cls"),
    }  # fmt: skip
    mixers = [build_mixer(config.mixer, **shape, layer_index=i) for i in range(sizes.num_layers)]
    for mixer in mixers[1:]:
        mixer.tie(mixers[0])
    return SequenceModel(
        mixers,
        vocab_size=task.vocab_size,
        num_outputs=task.num_outputs,
        max_length=task.max_length,
        d_model=sizes.d_model,
        mlp_hidden=mlp_width(sizes, mixers),
        dropout=sizes.dropout,
        positions=sizes.positions,
        pooling=pooling,
        tie_embeddings=task.pooling == "token" and sizes.tie_embeddings,
    )


def mlp_width(sizes: DictConfig, mixers: list[Mixer]) -> int:
    """Hidden width of the MLPs; see :func:`build_model`. At least a quarter of ``d_model``."""
    d_model = sizes.d_model
    hidden = int(sizes.mlp_ratio * d_model)
    if not sizes.match_parameters:
        return hidden
    attention = 4 * d_model * d_model  # SDPA: four projections without bias
    surplus = count_parameters(nn.ModuleList(mixers)) / len(mixers) - attention
    return max(d_model // 4, round(hidden - surplus / (2 * d_model + 1)))


def count_parameters(module: nn.Module) -> int:
    """Number of trainable parameters, a shared one counted once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
