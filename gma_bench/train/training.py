"""Training a cell: one Lightning module for every task, and the procedure around it."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gma_bench.errors import DataError, SettingError, UserError
from gma_bench.mixer import state_bytes
from gma_bench.mixer.model import SequenceModel, build_model, count_parameters
from gma_bench.results import Outcome
from gma_bench.results.store import require_disk
from gma_bench.task import NOT_ARGUMENTS, Batch, Task
from gma_bench.task.loading import EvaluationBatches
from gma_bench.train.checkpoints import DamagedCheckpoint, SealedCheckpointIO, load_checkpoint
from gma_bench.train.sharding import ShardedStrategy, gathered, is_sharded, load_whole, shard

T = TypeVar("T")

WANDB_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")

TRIM_STEPS = 100
"""Batches of ever new lengths tear the heap: the free pieces between them go back so often."""


class Diverged(Exception):
    """A loss, a logit or a metric became NaN or infinite: no figure is made of it."""

    def __init__(self, step: int, what: str) -> None:
        self.step = step
        super().__init__(f"{what} at step {step}")


class Stopped(BaseException):
    """The run was asked to stop; its resume point is on disk. Not an Exception: nothing swallows it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


def build_task(config: DictConfig) -> Task:
    """The task of a cell, its data prepared and set up."""
    try:
        return _build_task(config)
    except DataError as error:
        if not (folder := config.task.get("data_dir")):
            raise
        raise SettingError(
            "task.data_dir", folder, str(error),
            "task.data_dir=<folder of sound files>, or task.source=embedded task.data_dir=null",
        ) from error  # fmt: skip


def _build_task(config: DictConfig) -> Task:
    training = config.training
    world_size = max(1, config.trainer.devices) if isinstance(config.trainer.devices, int) else 1
    if training.batch_size % (world_size * training.accumulate):
        raise SettingError(
            "training.batch_size", training.batch_size,
            f"must be a multiple of devices × accumulate = {world_size * training.accumulate}",
            f"training.batch_size={world_size * training.accumulate * 8}",
        )  # fmt: skip
    own = {k: v for k, v in config.task.items() if k not in NOT_ARGUMENTS}
    try:
        task: Task = instantiate(
            own,
            batch_size=training.batch_size,
            eval_batch_size=training.eval_batch_size,
            num_steps=training.steps,
            parts=training.accumulate,
            num_workers=training.num_workers,
            worker_timeout_s=training.worker_timeout_s,
            order_seed=config.seed,
            bucket_by_length=training.bucket_by_length,
            cache_dir=config.cache_dir,
        )
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):  # the task's own words, not Hydra's around them
            raise error.__cause__ from None
        raise
    task.prepare_data()
    task.setup("fit")
    return task


class TrainingModule(L.LightningModule):
    """A model on a task. All that is particular to the task is the task's own.

    Attributes:
        curves: ``step, train_loss, lr`` and ``val_step, val_<metric>`` so far; kept in checkpoints.
        tokens, seconds: real tokens trained on, and the time that took, validation left out.
    """

    def __init__(self, model: SequenceModel, task: Task, training: DictConfig) -> None:
        super().__init__()
        self.model, self.training_config = model, training
        self.task = task
        self.curves: dict[str, list[float]] = {
            "step": [],
            "train_loss": [],
            "lr": [],
            "val_step": [],
        }
        self.test_figures: dict[str, float] = {}
        self.tokens: int | Tensor = 0
        self.seconds = 0.0
        self._pending: dict[int, Tensor] = {}
        self._finite = torch.tensor(True)
        self._split_metrics = nn.ModuleDict()
        self._started, self._forwards = 0.0, 0

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(tokens, mask)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ShardedStrategy):
            shard(self.model, self.trainer.strategy.device_mesh["data_parallel"])

    # --- training ---

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._started = time.perf_counter()
        step, part = divmod(batch_idx, self.task.parts)
        # Dropout draws from the seed and the step alone: no worker, validation or resumption moves it.
        drawn = (self.task.order_seed, step, part, self.global_rank)
        torch.manual_seed(int(np.random.SeedSequence(drawn).generate_state(1, np.uint64)[0] >> 1))
        self._set_validation(step + 1, batch_idx)

    def _set_validation(self, step: int, batch_idx: int) -> None:
        """Let Lightning, which knows a fixed interval only, validate after this batch or not."""
        ends_step = (batch_idx + 1) % self.task.parts == 0
        due = ends_step and step in validation_steps(self.training_config)
        self.trainer.val_check_batch = batch_idx + 1 if due else batch_idx + 2

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        step, part = divmod(batch_idx, self.task.parts)
        weight = self.task.part_weight(step, part)
        logits = self.model(batch["tokens"], batch["mask"])
        # A part without targets has no mean.
        loss = self.task.loss(logits, batch) * weight if weight else logits.sum() * 0.0
        share = loss.detach() / self.task.parts
        self._pending[step + 1] = self._pending.get(step + 1, 0) + share
        self.tokens = self.tokens + batch["mask"].sum()  # no look at the device
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        whole = (batch_idx + 1) % self.task.parts == 0
        many = len(self._pending) >= self.training_config.log_every
        if whole and (many or self.device.type == "cpu"):
            self._flush_losses()
        if self.device.type == "cpu" and self.global_step % TRIM_STEPS == 0:
            trim_heap()
        self.seconds += time.perf_counter() - self._started

    def _flush_losses(self) -> None:
        """Look at the losses since the last look (a device is asked once, not every step)."""
        if not self._pending:
            return
        losses = torch.stack(list(self._pending.values()))
        losses = self.trainer.strategy.reduce(losses, reduce_op="mean")
        for step, loss in zip(self._pending, losses.tolist(), strict=True):
            if not math.isfinite(loss):
                raise Diverged(step, f"loss {loss}")
            if step % self.training_config.log_every == 0:
                rate = self.training_config.lr * self._rate(step - 1)
                self.curves["step"].append(step)
                self.curves["train_loss"].append(loss)
                self.curves["lr"].append(rate)
                for logger in self.loggers:
                    logger.log_metrics({"train/loss": loss, "train/lr": rate}, step=step)
        self._pending.clear()

    def configure_optimizers(self) -> Any:
        training = self.training_config
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for parameter in self.model.parameters():
            exempt = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
            (plain if exempt else decayed).append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": training.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=training.lr,
            betas=tuple(training.betas),
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        """Share of the peak rate at a step: linear warm-up, then the schedule."""
        training = self.training_config
        warmup = max(1, round(training.warmup * training.steps))
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, training.steps - warmup))
        if training.schedule == "constant":
            return 1.0
        shape = 0.5 * (1 + math.cos(math.pi * done)) if training.schedule == "cosine" else 1 - done
        return training.final_lr + (1 - training.final_lr) * shape

    # --- evaluation ---

    def on_validation_epoch_start(self) -> None:
        self._start_split("val")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def on_validation_epoch_end(self) -> None:
        figures = self._finish_split("val")
        self.log(f"val/{self.task.metric}", figures[self.task.metric], prog_bar=True, logger=False)
        self.curves["val_step"].append(self.global_step)
        for name, value in figures.items():
            self.curves.setdefault(f"val_{name}", []).append(value)
        self._log_figures("val", figures)

    def on_test_epoch_start(self) -> None:
        self._start_split("test")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def on_test_epoch_end(self) -> None:
        self.test_figures = self._finish_split("test")
        self._log_figures("test", self.test_figures)

    def _log_figures(self, split: str, figures: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.log_metrics({f"{split}/{k}": v for k, v in figures.items()}, self.global_step)

    def _start_split(self, split: str) -> None:
        self._forwards = 0
        self._finite = torch.tensor(True, device=self.device)
        self._split_metrics = nn.ModuleDict(self.task.new_metrics(split)).to(self.device)

    def _evaluate(self, split: str, batch: Batch) -> None:
        logits = self.model(batch["tokens"], batch["mask"])
        self._forwards += 1
        self._finite &= logits.isfinite().all()
        self.task.update(dict(self._split_metrics.items()), logits, batch)  # type: ignore[arg-type]

    def _keep_pace(self, split: str) -> None:
        """Where a forward pass is a collective (FSDP), run as many on every rank.

        Ranks share the examples of a split, none twice and none dropped, so one may have a batch
        more than another, which would wait for ever.
        """
        if not is_sharded(self.model):
            return
        size, world = len(self.task.splits[split]), self.trainer.world_size  # type: ignore[arg-type]
        most = len(EvaluationBatches(size, self.task.eval_batch_size, world_size=world))  # rank 0's
        for _ in range(most - self._forwards):
            self.model(torch.zeros(1, 1, dtype=torch.long, device=self.device))

    def _finish_split(self, split: str) -> dict[str, float]:
        self._keep_pace(split)
        if not self.trainer.strategy.reduce_boolean_decision(bool(self._finite), all=True):
            raise Diverged(self.global_step, f"{split} logits that are not finite")
        figures = self.task.compute(dict(self._split_metrics.items()))  # type: ignore[arg-type]
        self._split_metrics = nn.ModuleDict()
        if not math.isfinite(figure := figures[self.task.metric]):
            raise Diverged(self.global_step, f"{split} {self.task.metric} {figure}")
        return figures

    # --- data: the task is set up by then, and knows the step to start from ---

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.task.train_dataloader()

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.task.val_dataloader()

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.task.test_dataloader()

    # --- resuming: what Lightning does not keep by itself ---

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._flush_losses()  # callbacks may save before this step's loss was looked at
        checkpoint["curves"] = self.curves
        checkpoint["ranks"] = _of_all_ranks({"tokens": int(self.tokens), "seconds": self.seconds})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "optimizer_states" not in checkpoint:  # weights alone: the best checkpoint
            return
        self.curves = checkpoint["curves"]
        own = checkpoint["ranks"][self.global_rank]
        self.tokens, self.seconds = own["tokens"], own["seconds"]


def validation_steps(training: DictConfig) -> frozenset[int]:
    """The steps after which to validate: as many as asked, evenly spaced, the last one at the end."""
    number = min(training.evaluations, training.steps)
    return frozenset(round(training.steps * (i + 1) / number) for i in range(number))


def _of_all_ranks(own: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank has of a thing, in order; all ranks must ask."""
    if not dist.is_initialized():
        return [own]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


QUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What queues send before a time limit or a preemption; Lightning and submitit listen to one each."""


class ResumePoint(Callback):
    """Keeps one sealed checkpoint to resume from: every few minutes, and when asked to stop.

    Args:
        path: where.
        minutes: the time between two.
    """

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.interval_s = path, 60 * minutes
        self.signum: int | None = None
        self._last = time.monotonic()
        self._before: dict[int, Any] = {}
        self._listeners: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While the body runs, a signal asks for a stop at the end of the step; a second one stops at once.

        SIGTERM and SIGINT end the run. What a queue sends is handed on, once the resume point is
        written, to whoever listened before (submitit, or Lightning under Slurm): they queue the job
        again.
        """
        self._take_over()
        try:
            yield
        finally:
            for signum, handler in self._before.items():
                signal.signal(signum, handler)

    def _take_over(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # whoever owns it gets the signals
        for signum in (signal.SIGTERM, signal.SIGINT, *QUEUE_SIGNALS):
            handler = signal.getsignal(signum)
            if handler == self._ask or (signum in QUEUE_SIGNALS and not callable(handler)):
                continue
            self._before.setdefault(signum, handler)
            self._listeners[signum] = handler
            signal.signal(signum, self._ask)

    def _ask(self, signum: int, frame: Any) -> None:
        if self.signum is not None:
            raise Stopped(signum)
        self.signum = signum
        print("stopping at the end of this step; once more stops at once", file=sys.stderr)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        # Lightning has put its own handlers over ours. On SIGTERM they broadcast from within the
        # handler, between whatever collectives the ranks are in, and wait for each other for ever.
        self._take_over()

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._take_over()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._between_steps(trainer, batch_idx):
            return
        due = self.signum is not None or time.monotonic() - self._last >= self.interval_s
        if not trainer.strategy.reduce_boolean_decision(due, all=False):  # ranks save together
            return
        trainer.save_checkpoint(self.path)
        self._last = time.monotonic()
        # Ranks may be asked one step apart, or one alone: they stop together, for one reason.
        asked = torch.tensor(float(self.signum or 0), device=trainer.strategy.root_device)
        signum = int(trainer.strategy.reduce(asked, reduce_op="max"))
        if signum:
            self._stop(trainer, signum)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)  # a stop within the test costs no training

    def on_test_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.signum is not None and trainer.world_size == 1:
            self._stop(trainer, self.signum)

    def _stop(self, trainer: L.Trainer, signum: int) -> None:
        listener = self._listeners.get(signum)
        if signum in QUEUE_SIGNALS and callable(listener):
            listener(signum, None)  # submitit's does not return
            remove_hpc_checkpoints(trainer.default_root_dir)
        raise Stopped(signum)

    @staticmethod
    def _between_steps(trainer: L.Trainer, batch_idx: int) -> bool:
        """Not within an accumulated step, nor where a validation is due before the next one."""
        done = batch_idx + 1
        assert isinstance(trainer.val_check_batch, int)
        return done % trainer.accumulate_grad_batches == 0 and done % trainer.val_check_batch != 0


def remove_hpc_checkpoints(folder: Path | str) -> None:
    """Remove what Lightning's Slurm handler saves beside our resume point, and would prefer to it."""
    for path in Path(folder).glob("hpc_ckpt_*.ckpt"):
        path.unlink(missing_ok=True)


def train(config: DictConfig, callbacks: Sequence[Callback] = ()) -> Outcome:
    """Train, select on validation, test once with the best checkpoint.

    Resumes by itself from the run's resume point where there is one.

    Raises:
        Diverged: the loss is NaN or infinite.
        Stopped: a signal asked for it; the resume point is on disk.
    """
    torch.set_num_threads(config.trainer.num_threads)
    L.seed_everything(config.seed, workers=True, verbose=False)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # a worker runs one cell after another
    task = build_task(config)
    model = build_model(config, task)
    module = TrainingModule(model, task, config.training)
    folder = Path(config.results_dir) / config.scale.name
    require_disk(folder, 16 * 4 * count_parameters(model) + (64 << 20), "training a cell")
    best = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        filename=config.run_id,
        monitor=f"val/{task.metric}",
        mode="max" if task.higher_is_better else "min",
        save_weights_only=True,
        enable_version_counter=False,
    )
    resume = ResumePoint(
        folder / "resume" / f"{config.run_id}.ckpt", config.training.checkpoint_minutes
    )
    remove_hpc_checkpoints(config.output_dir)
    logger = build_logger(config)
    with _quiet(), _closing(logger), resume.listening():
        trainer = build_trainer(config, [best, resume, *callbacks], logger)
        task.trainer = trainer
        trainer.fit(module, ckpt_path=_resume_path(resume.path), weights_only=True)
        module._flush_losses()
        load_weights(module, Path(best.best_model_path))
        if config.training.test:
            trainer.test(module, verbose=False)
    resume.path.unlink(missing_ok=True)
    return _outcome(config, module, best, trainer)


def build_trainer(
    config: DictConfig, callbacks: Sequence[Callback], logger: Logger | None
) -> L.Trainer:
    """Lightning's trainer for a cell; one epoch is the whole run, counted in steps."""
    training = config.training
    if config.trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise SettingError(
            "trainer.accelerator", config.trainer.accelerator, "no CUDA device is visible here",
            "trainer=cpu",
        )  # fmt: skip
    bar = [TQDMProgressBar(refresh_rate=5)] if shows_progress() else []
    trainer = L.Trainer(
        accelerator=config.trainer.accelerator,
        devices=config.trainer.devices,
        strategy=ShardedStrategy()
        if config.trainer.strategy == "fsdp"
        else config.trainer.strategy,
        precision=config.trainer.precision,
        max_steps=training.steps,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip or None,
        val_check_interval=1,  # set anew before each batch: TrainingModule._set_validation
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, *bar],
        enable_progress_bar=bool(bar),
        enable_model_summary=False,
        log_every_n_steps=min(training.log_every, training.steps),
        logger=logger or False,
        use_distributed_sampler=False,  # batches are shared between ranks by the task
        plugins=[SealedCheckpointIO()],
        default_root_dir=config.output_dir,
    )
    if trainer.strategy.root_device.type == "cpu" and str(config.trainer.precision).startswith(
        "16"
    ):
        raise SettingError(
            "trainer.precision", config.trainer.precision, "a CPU has no float16 of its own",
            "trainer.precision=bf16-mixed",
        )  # fmt: skip
    return trainer


def shows_progress() -> bool:
    """A bar for a person who looks on: standard error is a terminal, and this is no worker."""
    from multiprocessing import parent_process

    return sys.stderr.isatty() and parent_process() is None


def build_logger(config: DictConfig) -> Logger | None:
    """The cell's logger: one W&B run a cell, named by the run; offline where there is no key."""
    target = config.logger.get("_target_")
    if not target:
        return None
    if target.endswith("WandbLogger"):
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        if (mode := wandb_mode()) == "disabled":
            return None
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        logger = instantiate(
            config.logger, id=config.run_id, name=config.run_id, save_dir=config.output_dir,
            group=f"{config.scale.name}/{config.task.name}", mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        logger._wandb_init.pop("anonymous", None)  # Lightning passes it on; wandb warns of it
    else:
        logger = instantiate(config.logger, save_dir=config.output_dir, name="", version="csv")
    logger.log_hyperparams(OmegaConf.to_container(config.resolved))
    return logger


def wandb_mode() -> str:
    """What W&B's own variables ask for; without them online where there is a key, else offline."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on"):
        return "disabled"
    mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
    if mode not in WANDB_MODES:
        raise SettingError(
            "WANDB_MODE", mode, f"must be one of {', '.join(WANDB_MODES)}", "WANDB_MODE=offline"
        )
    return {"dryrun": "offline", "run": "online"}.get(mode, mode)


def has_wandb_key() -> bool:
    """Whether W&B would find credentials without asking: the environment's, or netrc's."""
    from requests.utils import get_netrc_auth

    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return bool(os.environ.get("WANDB_API_KEY") or get_netrc_auth(server))


@contextmanager
def _closing(logger: Logger | None) -> Iterator[None]:
    """Close the logger however the body ends, and let a failure be seen as one."""
    try:
        yield
    except BaseException:
        _finish(logger, failed=True)
        raise
    _finish(logger, failed=False)


def _finish(logger: Logger | None, *, failed: bool) -> None:
    if logger is None:
        return
    logger.finalize("failed" if failed else "success")
    if isinstance(logger, WandbLogger):
        import wandb

        wandb.finish(exit_code=int(failed))


def _resume_path(path: Path) -> Path | None:
    if not path.exists():
        return None
    try:
        load_checkpoint(path)
    except DamagedCheckpoint as error:
        warnings.warn(f"resume point not used, starting over: {error}", stacklevel=2)
        path.unlink(missing_ok=True)  # another rank may have been faster
        return None
    return path


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a sealed checkpoint's ``state_dict`` into a :class:`TrainingModule`."""
    load_whole(module, load_checkpoint(path)["state_dict"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's advice that does not apply here."""
    import logging

    loggers = [
        logging.getLogger(f"lightning.{name}")
        for name in (
            "pytorch",
            "pytorch.utilities.rank_zero",
            "fabric",
            "fabric.utilities.rank_zero",
        )
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for message in (
            ".*does not have many workers.*",  # CPU cells load in the training process
            ".*your dataloader is not resumable.*",  # its order is a function of the step
            ".*Checkpoint directory.*exists and is not empty.*",  # one folder, a file a run
            ".*isinstance.*LeafSpec.*",
            ".*sync_dist=True.*",  # the metrics themselves are summed over ranks
        ):
            warnings.filterwarnings("ignore", message=message)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _outcome(
    config: DictConfig, module: TrainingModule, best: ModelCheckpoint, trainer: L.Trainer
) -> Outcome:
    task, curves = module.task, module.curves
    chosen = curves["val_step"].index(_best_step(module, task))
    validation = {
        name.removeprefix("val_"): values[chosen]
        for name, values in curves.items()
        if name.startswith("val_") and name != "val_step"
    }
    metrics = {"val": validation}
    if config.training.test:
        metrics["test"] = module.test_figures
    peak = _described("peak memory", lambda: peak_memory(config, task, trainer))
    peak_bytes, peak_method = peak or (None, None)
    return Outcome(
        metric=task.metric,
        split=task.split,
        value=metrics[task.split][task.metric] if task.split in metrics else None,
        higher_is_better=task.higher_is_better,
        metrics=metrics,
        curves=curves,
        data=task.description() | {"fingerprint": task.fingerprint},
        parameters=count_parameters(module.model),
        tokens_per_s=all_tokens(module, trainer) / module.seconds if module.seconds else None,
        peak_memory_bytes=peak_bytes,
        extra={
            "checkpoint": f"checkpoints/{Path(best.best_model_path).name}",
            "peak_memory_method": peak_method,
            "process_peak_bytes": process_peak_bytes(),
            "state_bytes": _described(
                "state bytes", lambda: streaming_state_bytes(module.model, task)
            ),
            "best_step": curves["val_step"][chosen],
            "mlp_hidden": module.model.blocks[0].mlp[0].out_features,  # type: ignore[union-attr, index]
        },
    )


def _described(what: str, describe: Callable[[], T]) -> T | None:
    """What only describes a run may fail without costing it its figures."""
    try:
        return describe()
    except Exception as error:
        warnings.warn(f"{what} not recorded: {type(error).__name__}: {error}", stacklevel=2)
        return None


def trim_heap() -> None:
    """Give the pages that lie free in the heap back to the system, where the allocator is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def process_peak_bytes() -> int:
    """The most memory that this process has held so far, as the system counts it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _best_step(module: TrainingModule, task: Task) -> float:
    figures = list(zip(module.curves[f"val_{task.metric}"], module.curves["val_step"], strict=True))
    value = (max if task.higher_is_better else min)(v for v, _ in figures)
    return next(step for v, step in figures if v == value)


def streaming_state_bytes(model: SequenceModel, task: Task) -> int | None:
    """Bytes that decoding one sequence carries at full length, all layers; None where not causal."""
    from gma_bench.profiling.decode import UnknownGrowth, state_at

    if not task.causal:
        return None
    try:
        mixers: list[Any] = [block.mixer for block in model.blocks]
        with gathered(model):
            return sum(state_bytes(state_at(mixer, task.max_length, 1)) for mixer in mixers)
    except (NotImplementedError, UnknownGrowth):
        return None


def all_tokens(module: TrainingModule, trainer: L.Trainer) -> float:
    """Real tokens trained on, over all ranks."""
    own = torch.tensor(float(module.tokens), device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(own, reduce_op="sum"))


def peak_memory(config: DictConfig, task: Task, trainer: L.Trainer) -> tuple[int, str]:
    """Peak bytes of training, and how they were found.

    On CUDA the allocator's peak over the run; elsewhere the simulated peak of a training step at
    full length (:func:`gma_bench.profiling.cost.step_cost`), which depends on no other process.
    """
    from gma_bench.profiling.cost import step_cost

    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "CUDA allocator"
    return step_cost(config, task).peak_bytes, "simulated training step"
