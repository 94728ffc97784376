"""What the harness costs: a training step under it, against a bare torch loop of the same model."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from omegaconf import DictConfig

from gma_bench.mixer.model import build_model
from gma_bench.run.compose import compose
from gma_bench.run.execute import identify
from gma_bench.train.training import ResumePoint, TrainingModule, _quiet, build_task, build_trainer

STEPS, ROUNDS = 40, 7
CELLS = ("listops", "text", "wikitext103")


def rows(steps: int = STEPS, rounds: int = ROUNDS) -> Iterator[dict[str, object]]:
    """A row a task, at mini scale: milliseconds a step either way, interleaved, and the ratio."""
    for task in CELLS:
        with tempfile.TemporaryDirectory() as folder:
            config = _config(task, folder, steps)
            torch.set_num_threads(config.trainer.num_threads)
            bare, harness = [], []
            for _ in range(rounds):
                bare.append(_bare(config) / steps)
                harness.append(_harness(config) / steps)
        ratios = [h / b for h, b in zip(harness, bare, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        yield {
            "benchmark": f"step of {task}, mini, GMA",
            "bare_ms": 1e3 * statistics.median(bare),
            "harness_ms": 1e3 * statistics.median(harness),
            "ratio": statistics.median(ratios),
            "ratio_iqr": high - low,
            "target": "< 1.05",
        }


def _config(task: str, folder: str, steps: int) -> DictConfig:
    config = compose(
        [f"task={task}", "mixer=gma", "scale=mini", "trainer=cpu", "logger=none",
         f"results_dir={folder}", f"training.steps={steps}"]
    )  # fmt: skip
    identify(config)
    return config


def _bare(config: DictConfig) -> float:
    """Seconds of the loop that one would write by hand, loading included."""
    L.seed_everything(0, verbose=False)
    task = build_task(config)
    module = TrainingModule(build_model(config, task), task, config.training)
    built = module.configure_optimizers()
    optimizer, schedule = built["optimizer"], built["lr_scheduler"]["scheduler"]
    batches = iter(task.train_dataloader())
    start = time.perf_counter()
    for batch in itertools.islice(batches, config.training.steps):
        loss = task.loss(module.model(batch["tokens"], batch["mask"]), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.model.parameters(), config.training.clip)
        optimizer.step()
        schedule.step()
        loss.item()
    return time.perf_counter() - start


def _harness(config: DictConfig) -> float:
    """Seconds of the same steps under the harness, from the first batch to the last; no validation."""
    L.seed_everything(0, verbose=False)
    task = build_task(config)
    module = TrainingModule(build_model(config, task), task, config.training)
    clock = _Clock()
    resume = ResumePoint(Path(config.output_dir) / "resume.ckpt", minutes=10)
    with _quiet(), resume.listening():
        trainer = build_trainer(config, [resume, clock], None)
        trainer.limit_val_batches = 0
        task.trainer = trainer
        trainer.fit(module)
    return clock.seconds


class _Clock(L.Callback):
    seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.start
