"""What a training step costs: parameters, operations, peak memory without running it; its time by running it."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig
from torch import Tensor, nn

from gma_bench.mixer.model import build_model, count_parameters
from gma_bench.profiling.flops import count_flops
from gma_bench.profiling.memory import simulate
from gma_bench.profiling.subject import Subject
from gma_bench.task import NOT_ARGUMENTS, Task

ADAM_COPIES = 4
"""Weights, gradients and AdamW's two moments, each as large as the parameters."""


@dataclass(frozen=True)
class StepCost:
    """A training step (forward and backward) at full length, one part of an accumulated batch.

    Attributes:
        parameters: trainable ones of the whole model.
        mixer_parameters: of the first layer's mixer.
        mlp_hidden: width of the MLPs, as ``model.match_parameters`` made it.
        flops: of a whole step, every part of the batch (matrix products; two a multiply-add).
        tokens: of a whole step.
        peak_bytes: weights, gradients, optimizer state, and what is alive at the worst moment.
    """

    parameters: int
    mixer_parameters: int
    mlp_hidden: int
    flops: int
    tokens: int
    peak_bytes: int

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.tokens


def unprepared_task(config: DictConfig) -> Task:
    """A cell's task without its data: settings, and sizes as far as they are known beforehand."""
    target = get_class(config.task._target_)
    # A procedure may add settings of its own to those of the task that it builds upon.
    taken = inspect.signature(target).parameters
    own = {k: v for k, v in config.task.items() if k in taken and k not in NOT_ARGUMENTS}
    return target(cache_dir=config.cache_dir, **own)


def planned_shape(task: Task) -> Any:
    """What :func:`gma_bench.mixer.model.build_model` asks of a task, for one that has no data yet."""
    vocab_size, num_outputs = task.planned_sizes()
    return SimpleNamespace(
        causal=task.causal, pooling=task.pooling, max_length=task.max_length,
        vocab_size=vocab_size, num_outputs=num_outputs,
    )  # fmt: skip


def step_cost(config: DictConfig, task: Task | None = None) -> StepCost:
    """The cost of a training step of a cell, on tensors without data: no memory, no GPU, no download.

    Args:
        config: a checked configuration of a trained task.
        task: its task, when it is at hand and set up.
    """
    task = task or unprepared_task(config)
    shape = planned_shape(task)
    training = config.training
    part = training.batch_size // training.accumulate
    models: list[nn.Module] = []

    def build() -> Subject:
        model = build_model(config, shape)
        models.append(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens = torch.zeros(part, task.max_length, dtype=torch.long)
        mask = torch.ones(part, task.max_length, dtype=torch.bool)
        return Subject(_Loss(model), (tokens, mask), torch.ones(()))

    flops = count_flops(build) * training.accumulate
    peak = simulate(build).peak_bytes
    model: Any = models[-1]
    parameters = count_parameters(model)
    return StepCost(
        parameters=parameters,
        mixer_parameters=count_parameters(model.blocks[0].mixer),
        mlp_hidden=model.blocks[0].mlp[0].out_features,
        flops=flops,
        tokens=training.batch_size * task.max_length,
        peak_bytes=peak + ADAM_COPIES * 4 * parameters,
    )


def step_seconds(config: DictConfig, most_steps: int = 8, cap_s: float = 5.0) -> float:
    """The least time of a few training steps on this CPU, at full length and without data.

    The least, as what else runs here now need not run later.
    """
    shape = planned_shape(task := unprepared_task(config))
    model = _Loss(build_model(config, shape))
    part = config.training.batch_size // config.training.accumulate
    tokens = torch.zeros(part, task.max_length, dtype=torch.long)
    mask = torch.ones(part, task.max_length, dtype=torch.bool)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.trainer.num_threads or threads)
    times: list[float] = []
    try:
        while len(times) < most_steps and sum(times) < cap_s:
            started = time.perf_counter()
            model(tokens, mask).backward()
            times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return min(times) * config.training.accumulate


class _Loss(nn.Module):
    """A model with a cross-entropy on top, as a training step has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logits = self.model(tokens, mask).flatten(0, -2)
        target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return nn.functional.cross_entropy(logits.float(), target)
