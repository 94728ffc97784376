"""What the data cost: loading a batch against a whole training step, on the CPU."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator

import torch
from omegaconf import DictConfig

from gma_bench.mixer.model import build_model
from gma_bench.run.compose import compose
from gma_bench.run.execute import identify
from gma_bench.task import Task
from gma_bench.train.training import build_task

STEPS, ROUNDS = 20, 5
CELLS = ("listops", "text", "wikitext103")


def rows(steps: int = STEPS, rounds: int = ROUNDS) -> Iterator[dict[str, object]]:
    """A row a task, at mini scale with GMA and no loader processes.

    Rounds of loading alone alternate with rounds of training on loaded batches, so that a busy
    machine slows both; ``start_s`` is a start from a warm cache.
    """
    for name in CELLS:
        with tempfile.TemporaryDirectory() as folder:
            config = compose(
                [f"task={name}", "mixer=gma", "scale=mini", "trainer=cpu", "logger=none",
                 f"results_dir={folder}", f"training.steps={steps * rounds}",
                 "training.num_workers=0"]
            )  # fmt: skip
            identify(config)
        torch.set_num_threads(config.trainer.num_threads)
        build_task(config)  # fills the cache
        began = time.perf_counter()
        task = build_task(config)
        start_s = time.perf_counter() - began
        loading, training = _measure(config, task, steps, rounds)
        shares = [a / (a + b) for a, b in zip(loading, training, strict=True)]
        yield {
            "benchmark": f"loading of {name}, mini",
            "load_ms": 1e3 * statistics.median(loading) / steps,
            "compute_ms": 1e3 * statistics.median(training) / steps,
            "share": statistics.median(shares),
            "share_max": max(shares),
            "start_s": start_s,
            "target": "share < 0.05, start < 2 s",
        }


def _measure(
    config: DictConfig, task: Task, steps: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of loading, and of forward, backward and update, in each round."""
    model = build_model(config, task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.training.lr)
    stream = iter(task.train_dataloader())
    loading, training = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        batches = [next(stream) for _ in range(steps)]
        loaded = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            task.loss(model(batch["tokens"], batch["mask"]), batch).backward()
            optimizer.step()
        loading.append(loaded - began)
        training.append(time.perf_counter() - loaded)
    return loading, training
