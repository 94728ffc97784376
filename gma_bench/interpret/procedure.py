"""The cell ``task=interpretability``: get a trained GMA, read a text with it, write figures and a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from gma_bench.errors import SettingError, UserError
from gma_bench.interpret import page, pictures
from gma_bench.interpret.analysis import Analysis, analyze
from gma_bench.interpret.attention import softmax_attention
from gma_bench.interpret.capture import find_layers
from gma_bench.interpret.gradients import RoutingGradients
from gma_bench.interpret.reading import Reading, read
from gma_bench.mixer.model import SequenceModel, build_model, count_parameters
from gma_bench.results import BrokenRecord, Outcome, read_record, record_path
from gma_bench.run.compose import compose, resolved, run_id
from gma_bench.task import Task
from gma_bench.train.checkpoints import DamagedCheckpoint, load_checkpoint
from gma_bench.train.training import build_task, train

OWN = ("record", "checkpoint", "side", "num_tokens", "resamples", "companion")
"""Settings of this task that are not the text's."""
COMPANION = "sdpa"


def run(config: DictConfig) -> Outcome:
    """Read a validation text with a trained GMA and say what its components do.

    Writes ``interpretability.html`` and the pictures (SVG and PNG) under ``config.output_dir``.

    Returns:
        Metrics of split ``val``: those of :class:`~gma_bench.interpret.Analysis`, and, where the
        model was trained here, the gradient norms of
        :class:`~gma_bench.interpret.gradients.RoutingGradients`. Rows: one a layer and head.

    Raises:
        SettingError: the record or checkpoint is missing, or is none of a GMA.
    """
    _check(config)
    torch.set_num_threads(config.trainer.num_threads)
    cell, checkpoint, outcome = _trained(config)
    task = build_task(cell)
    model = _load(build_model(cell, task), checkpoint).to(_device(config))
    reading = read(task, config.task.num_tokens)
    analysis = analyze(
        model, reading.tokens, mask=reading.mask, categories=reading.kind,  # type: ignore[arg-type]
        documents=reading.documents, texts=reading.texts, side=config.task.side,
        resamples=config.task.resamples,
    )  # fmt: skip
    companion, about = _companion(config, cell, task, reading)
    outcome.metric, outcome.split, outcome.higher_is_better = "usage_entropy", "val", True
    outcome.metrics["val"] = outcome.metrics.get("val", {}) | analysis.metrics
    outcome.value = analysis.metrics["usage_entropy"]
    names = [str(name) for name in analysis.heads]
    outcome.rows = [
        dict(zip(names, row, strict=True)) for row in analysis.heads.itertuples(index=False)
    ]
    outcome.data = outcome.data or task.description() | {"fingerprint": task.fingerprint}
    outcome.parameters = count_parameters(model)
    outcome.extra |= {"companion": about, "categories": list(analysis.text.categories)}
    outcome.extra["artifacts"] = write(config, analysis, outcome, companion, about)
    return outcome


def _check(config: DictConfig) -> None:
    task = config.task
    if task.side not in ("key", "query"):
        raise SettingError("task.side", task.side, "must be key or query", "task.side=key")
    for name in ("num_tokens", "resamples"):
        if not isinstance(task[name], int) or task[name] < 1:
            raise SettingError(
                f"task.{name}",
                task[name],
                "must be a whole number of at least 1",
                f"task.{name}=1000",
            )
    if task.record and task.checkpoint:
        raise SettingError(
            "task.checkpoint",
            task.checkpoint,
            "task.record is given too; name one",
            "task.checkpoint=null",
        )


def _device(config: DictConfig) -> str:
    """CUDA where the cell may use it. Sums are in float64, which MPS does not have."""
    allowed = config.trainer.accelerator in ("auto", "gpu", "cuda")
    return "cuda" if allowed and torch.cuda.is_available() else "cpu"


# -- the model ---------------------------------------------------------------------------------


def _trained(config: DictConfig) -> tuple[DictConfig, Path, Outcome]:
    """The configuration of a trained model, its checkpoint, and what its training says."""
    nothing = Outcome(metric="usage_entropy", split="val")
    if config.task.record:
        return *_of_record(config), nothing
    cell = text_cell(config)
    if config.task.checkpoint:
        return cell, Path(config.task.checkpoint), nothing
    find_layers(build_model(cell, build_task(cell)))  # before the training, not after it
    gradients = RoutingGradients()
    outcome = train(cell, callbacks=[gradients])
    outcome.metrics.setdefault("val", {}).update(gradients.figures())
    outcome.curves["gradient_norm"] = gradients.at(outcome.curves["step"])
    return cell, Path(config.results_dir) / config.scale.name / outcome.extra["checkpoint"], outcome


def text_cell(config: DictConfig) -> DictConfig:
    """This cell as one that trains: the same, without what only interpretability knows."""
    cell = config.copy()
    with open_dict(cell):
        for name in OWN:
            cell.task.pop(name)
        cell.task.procedure = "gma_bench.train.training.train"
    return cell


def _of_record(config: DictConfig) -> tuple[DictConfig, Path]:
    """The configuration that a finished record was made with, and its checkpoint.

    What is built is named by ``conf/``; from the record come sizes and settings only, so that a
    record from elsewhere never names code.
    """
    name, folder = config.task.record, Path(config.results_dir) / config.scale.name
    try:
        record = read_record(record_path(config.results_dir, config.scale.name, name))
    except BrokenRecord as error:
        raise SettingError(
            "task.record",
            name,
            f"no record that can be read under {folder}/runs ({error})",
            "task.record=null",
        ) from error
    if record["status"] != "finished" or not record.get("extra", {}).get("checkpoint"):
        raise SettingError("task.record", name, "has no checkpoint", "task.record=null")
    cell = compose(
        [
            f"task={record['task']}", f"mixer={record['mixer']}", f"scale={record['scale']}",
            f"seed={int(record['seed'])}", f"results_dir={_quoted(config.results_dir)}",
            f"cache_dir={_quoted(config.cache_dir)}",
        ]
    )  # fmt: skip
    with open_dict(cell):
        for node in ("task", "mixer", "model", "training"):
            _overlay(cell[node], record["config"].get(node, {}))
        cell.run_id, cell.output_dir, cell.trainer = (
            config.run_id,
            config.output_dir,
            config.trainer,
        )
        cell.resolved = config.resolved
        for name in OWN:
            cell.task.pop(name, None)
        if "eval_stride" in cell.task:
            cell.task.eval_stride = None
        if config.task.get("data_dir"):
            cell.task.data_dir = config.task.data_dir
    return cell, folder / record["extra"]["checkpoint"]


def _overlay(node: DictConfig, values: Mapping[str, Any]) -> None:
    """Set the keys that both have, where the record's value is plain."""
    for key, value in values.items():
        plain = value is None or isinstance(value, bool | int | float | str) or (
            isinstance(value, list) and all(isinstance(v, int | float | str) for v in value)
        )  # fmt: skip
        if key in node and key not in ("_target_", "procedure", "name") and plain:
            node[key] = value


def _quoted(path: str) -> str:
    return "'" + str(path).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _load(model: SequenceModel, checkpoint: Path) -> SequenceModel:
    try:
        state = load_checkpoint(checkpoint)["state_dict"]
    except (OSError, DamagedCheckpoint) as error:
        raise SettingError(
            "task.checkpoint", checkpoint, str(error), "task.checkpoint=null"
        ) from error
    weights = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:200]
        raise SettingError(
            "task.checkpoint",
            checkpoint,
            f"is of another model than this configuration's ({first})",
            "task.record=RUN_ID, which brings its own",
        ) from error
    return model


# -- softmax attention beside it ---------------------------------------------------------------


def _companion(
    config: DictConfig, cell: DictConfig, task: Task, reading: Reading
) -> tuple[list[Any] | None, str]:
    """Softmax attention on the first sequence, a layer ``(H, n, n)``, and what it is of."""
    if not config.task.companion:
        return None, "none (task.companion=false)"
    found = _recorded_companion(config, task)
    if found is not None:
        other, checkpoint, about = found
        model = _load(build_model(other, task), checkpoint)
    else:
        other = cell.copy()
        with open_dict(other):
            mixer = compose(
                [f"task={cell.task.name}", f"mixer={COMPANION}", f"scale={cell.scale.name}"]
            ).mixer
            other.mixer = OmegaConf.to_container(mixer, resolve=True)
            other.run_id = f"{config.run_id}-{COMPANION}"
            other.logger = {"_target_": None}
        steps = other.training.steps
        outcome = train(other)
        checkpoint = Path(config.results_dir) / config.scale.name / outcome.extra["checkpoint"]
        model = _load(build_model(other, task), checkpoint)
        about = (
            f"an SDPA model of the same sizes, trained on the same text for the same {steps} steps"
        )
    length = int(reading.mask[0].sum())
    return softmax_attention(model, reading.tokens[:1, :length]), about


def _recorded_companion(config: DictConfig, task: Task) -> tuple[DictConfig, Path, str] | None:
    """A finished SDPA run on the same text, as the grid makes it."""
    source = config.task if config.task.record is None else None
    overrides = [
        "task=wikitext103", f"mixer={COMPANION}", f"scale={config.scale.name}", f"seed={config.seed}",
        f"results_dir={_quoted(config.results_dir)}", f"cache_dir={_quoted(config.cache_dir)}",
    ]  # fmt: skip
    try:
        other = compose(overrides)
        if source is not None:
            with open_dict(other):
                for key in ("source", "data_dir"):
                    other.task[key] = source.get(key)
        name = run_id(resolved(other))
        record = read_record(record_path(config.results_dir, config.scale.name, name))
    except (UserError, BrokenRecord):
        return None
    checkpoint = (
        Path(config.results_dir) / config.scale.name / str(record["extra"].get("checkpoint"))
    )
    if record["data"].get("fingerprint") != task.fingerprint or not checkpoint.is_file():
        return None
    return other, checkpoint, f"record {name}"


# -- what is written ---------------------------------------------------------------------------


def write(
    config: DictConfig,
    analysis: Analysis,
    outcome: Outcome,
    companion: list[Any] | None,
    about: str,
) -> list[str]:
    """Draw the pictures and the page into ``config.output_dir``; their names, the page first."""
    folder = Path(config.output_dir)
    drawn = pictures.draw(analysis, folder, companion=companion, companion_about=about)
    values = page.Values(
        run=str(config.run_id), scale=str(config.scale.name), mixer=str(config.mixer.name),
        data=outcome.data, metrics=outcome.metrics["val"],
        results_dir=Path(config.results_dir),
    )  # fmt: skip
    page.write(folder / page.NAME, analysis, values, drawn)
    return [page.NAME, *(name for picture in drawn for name in picture.files)]
