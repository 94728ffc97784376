"""What a profiling cell measures: a layer or a whole model, with inputs of one length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor, nn

from gma_bench.errors import SettingError
from gma_bench.mixer.model import build_mixer, build_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCOPES = ("layer", "model")
PASSES = ("forward", "forward_backward")


@dataclass(frozen=True)
class Subject:
    """A module with what it is called on.

    Attributes:
        module: a mixer, or a model around one.
        inputs: its arguments.
        gradient: of the output, allocated beforehand; None where only the forward pass is run.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    gradient: Tensor | None

    def run(self) -> Tensor:
        """One forward pass, without autograd unless a backward pass is to follow."""
        with torch.set_grad_enabled(self.gradient is not None):
            return self.module(*self.inputs)

    def run_pass(self) -> Tensor:
        """The whole pass: forward, and backward where there is a gradient."""
        out = self.run()
        if self.gradient is not None:
            out.backward(self.gradient)
        return out

    def parameter_bytes(self) -> int:
        """Bytes of parameters and buffers, a shared storage once; their gradients are as large again."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()
        )

    def standing_bytes(self) -> int:
        """Bytes that are there before the call: parameters, gradients' buffers, inputs, gradient."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        given = [*self.inputs, *grads, *([] if self.gradient is None else [self.gradient])]
        return self.parameter_bytes() + sum(t.numel() * t.element_size() for t in given)


@dataclass(frozen=True)
class _ProfiledTask:
    """The attributes of a task that :func:`gma_bench.mixer.model.build_model` reads."""

    causal: bool
    max_length: int
    vocab_size: int
    num_outputs: int
    pooling: Literal["sequence", "token"]


def build_subject(
    config: DictConfig,
    mixer: DictConfig,
    *,
    scope: str,
    seq_len: int,
    backward: bool,
    device: torch.device,
    causal: bool,
    max_length: int | None = None,
) -> Subject:
    """A fresh layer or model of ``mixer`` and random inputs, ``config.task.batch_size`` sequences.

    Gradient buffers of the parameters are allocated here, as they are from the second step of a
    training run on: they count with the parameters, not with what the call needs.

    Args:
        config: the cell's; ``task.dtype``, ``task.batch_size``, ``task.vocab_size`` and ``model`` are read.
        scope: ``layer`` (input ``(B, N, d_model)``, which receives a gradient too) or ``model``
            (input ``(B, N)`` token ids; causal models have an output a token, the others one a sequence).
        max_length: the mixer's; ``seq_len`` by default.
    """
    sizes, task = config.model, config.task
    length = max_length or seq_len
    with torch.device(device), default_dtype(task.dtype):
        if scope == "layer":
            module: nn.Module = build_mixer(
                mixer,
                d_model=sizes.d_model,
                num_heads=sizes.num_heads,
                causal=causal,
                max_length=length,
            )
            x = torch.randn(task.batch_size, seq_len, sizes.d_model, requires_grad=backward)
            gradient = torch.ones(x.shape) if backward else None
        else:
            module = build_model(_unmatched(config, mixer), _profiled(config, causal, length))
            x = torch.randint(task.vocab_size, (task.batch_size, seq_len))
            shape = (*x.shape, task.vocab_size) if causal else (task.batch_size, task.vocab_size)
            gradient = torch.ones(shape) if backward else None
        if backward:
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter)
    return Subject(module.train(backward), (x,), gradient)


def _unmatched(config: DictConfig, mixer: DictConfig) -> DictConfig:
    # Equal parameters would narrow the MLP as a mixer's own parameters grow with the length.
    copy = OmegaConf.create({"model": OmegaConf.to_container(config.model, resolve=True)})
    with open_dict(copy):
        copy.mixer, copy.model.match_parameters = mixer, False
    return copy


def _profiled(config: DictConfig, causal: bool, max_length: int) -> Any:
    vocab = config.task.vocab_size
    return _ProfiledTask(causal, max_length, vocab, vocab, "token" if causal else "sequence")


def resolve_mixer(mixer: DictConfig, **changes: Any) -> DictConfig:
    """A mixer's config with interpolations resolved and some settings changed."""
    values = OmegaConf.to_container(mixer, resolve=True)
    assert isinstance(values, dict)
    return OmegaConf.create({**values, **changes})


def form_of(mixer: DictConfig, causal: bool) -> bool:
    """Whether to build the mixer causal: as asked, or the only form it has."""
    kind: Any = get_class(mixer["_target_"])
    forms = mixer.get("forms") or ("bidirectional", "causal")
    if not causal and not (kind.supports_bidirectional and "bidirectional" in forms):
        return True
    return causal and kind.supports_causal and "causal" in forms


def resolve_device(name: str) -> torch.device:
    """``auto`` takes CUDA where there is one.

    Raises:
        SettingError: CUDA was asked for and this build of torch knows none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise SettingError("task.device", name, "must be auto, cpu or cuda", "task.device=auto")
    if name == "cuda" and not torch.backends.cuda.is_built():
        raise SettingError(
            "task.device", name, "this build of torch has no CUDA, not even to simulate it",
            "task.device=cpu",
        )  # fmt: skip
    return torch.device("cuda:0" if name == "cuda" else "cpu")


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """Build floating-point tensors in the dtype of that name while the body runs."""
    if name not in DTYPES:
        raise SettingError(
            "task.dtype", name, f"must be one of {', '.join(DTYPES)}", "task.dtype=float32"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[name])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run the body with that many CPU threads inside operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
