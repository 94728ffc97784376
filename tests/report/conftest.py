"""Synthetic records: every cell of the grid, with known figures, written where a test asks."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gma_bench.results import record_path, write_record

Record = dict[str, Any]

QUALITY = {  # accuracy on ListOps and Text, validation perplexity
    "sdpa": (0.372, 0.641, 35.4),
    "linformer": (0.351, 0.602, None),
    "linear_transformer": (0.341, 0.628, 44.8),
    "performer": (0.333, 0.617, 47.5),
    "mamba": (0.389, 0.655, 35.5),
    "gma": (0.368, 0.645, 41.7),
}
STARTED = "2026-06-30T10:00:00+00:00"


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def record(
    task: str = "listops",
    mixer: str = "gma",
    seed: int = 0,
    *,
    scale: str = "mini",
    value: float | None = 0.4,
    metric: str = "accuracy",
    split: str = "test",
    settings: dict[str, dict[str, Any]] | None = None,
    **fields: Any,
) -> Record:
    """One record of schema 1: ``settings`` merges into its config, ``fields`` replace others."""
    config: dict[str, Any] = {
        "task": {"_target_": f"tasks.{task}.Task", "name": task, "max_length": 256},
        "mixer": {"_target_": f"baselines.{mixer}.Mixer", "name": mixer},
        "model": {"d_model": 64, "num_layers": 2, "num_heads": 4, "dropout": 0.1},
        "training": {"steps": 300, "lr": 0.001},
        "scale": {"name": scale},
    }
    if mixer == "gma":
        config["mixer"]["num_components"] = 64
    for section, values in copy.deepcopy(settings or {}).items():
        config[section] |= values
    digest = _hash({**config, "seed": seed})
    made: Record = {
        "schema": 1,
        "run_id": f"{task}-{mixer}-s{seed}-{digest[:12]}",
        "status": "finished",
        "task": task,
        "mixer": mixer,
        "scale": scale,
        "seed": seed,
        "config": {**config, "seed": seed},
        "config_hash": digest,
        "group_hash": _hash(config),
        "metric": metric,
        "split": split,
        "value": value,
        "higher_is_better": metric != "perplexity",
        "metrics": {split: {metric: value}} if value is not None else {},
        "rows": [],
        "curves": {},
        "data": {"source": "embedded", "name": f"{task} data", "fingerprint": _hash(task)[:16]},
        "parameters": 123_456,
        "tokens_per_s": 50_000.0,
        "peak_memory_bytes": 300 * 2**20,
        "duration_s": 12.5,
        "command": f"gma-bench run task={task} mixer={mixer} scale={scale} seed={seed}",
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "versions": {"torch": "2.13.0", "python": "3.12.1"},
        "machine": {"host": "bench-1", "device": "cpu", "cpu": "Synthetic CPU", "threads": 1},
        "started_at": STARTED,
        "finished_at": STARTED,
        "error": None,
        "extra": {},
    }
    return made | fields


def failed(task: str, mixer: str, seed: int, message: str = "the loss is not finite") -> Record:
    """A cell that did not get through."""
    error = {"type": "RuntimeError", "message": message, "step": 17}
    return record(
        task, mixer, seed, value=None, status="failed", error=error, data={}, metrics={},
        parameters=0, tokens_per_s=None, peak_memory_bytes=None,
    )  # fmt: skip


def learning_curve(end: float, rng: random.Random, points: int = 40) -> dict[str, list[float]]:
    """Training and validation losses that fall from 3 to ``end``."""
    step = [25.0 * i for i in range(points)]
    loss = [end + (3 - end) * math.exp(-i / 9) + rng.gauss(0, 0.03) for i in range(points)]
    val_step = step[4::5]
    return {
        "step": step,
        "train_loss": loss,
        "val_step": val_step,
        "val_loss": [loss[int(s / 25)] + 0.05 for s in val_step],
    }


def trained(mixer: str, seed: int, scale: str = "mini") -> list[Record]:
    """The trained cells of one mixer and seed, in the order of the paper's claims."""
    rng = random.Random(f"{mixer}{seed}")
    listops, text, perplexity = QUALITY.get(mixer, (0.36, 0.63, 43.0))
    shift = random.Random(seed).gauss(0, 0.004)  # what a seed does to every mixer alike
    speed = 20_000 + 6_000 * (len(mixer) % 5) + rng.random() * 800
    found = []
    for task, base, floor in (("listops", listops, 0.19), ("text", text, 0.52)):
        value = base + shift + rng.gauss(0, 0.002)
        data = {
            "source": "embedded", "name": f"generated {task}", "fingerprint": _hash(task)[:16],
            "test": {"majority_share": floor},
        }  # fmt: skip
        found.append(record(
            task, mixer, seed, scale=scale, value=value, data=data, tokens_per_s=speed,
            metrics={"val": {"accuracy": value + 0.01}, "test": {"accuracy": value}},
            curves=learning_curve(1.6 - base, rng),
        ))  # fmt: skip
    if perplexity is not None:
        value = perplexity * (1 + shift) + rng.gauss(0, 0.1)
        at = {"perplexity": value, "perplexity_per_word": value**1.3}
        at["bits_per_byte"] = 1.4 + value / 100
        test = {name: 1.03 * v for name, v in at.items()}
        found.append(record(
            "wikitext103", mixer, seed, scale=scale, value=value, metric="perplexity", split="val",
            metrics={"val": at, "test": test}, tokens_per_s=speed, higher_is_better=False,
            curves=learning_curve(1.2, rng),
        ))  # fmt: skip
    return found


def memory_rows(mixer: str) -> list[dict[str, Any]]:
    """Peak bytes up to a million tokens; the explicit matrix runs out of memory on the way."""
    rows = []
    for exponent in range(8, 21):
        n = 2**exponent
        peak = 4 * n * (64 * 6 + 32 * len(mixer)) + (8 * n * n if mixer == "mha" else 0)
        for method in ("simulated", "measured"):
            reached = method == "simulated" or peak < 2**33
            rows.append({
                "sweep": "length", "scope": "layer", "pass": "forward_backward", "method": method,
                "device": "cpu", "dtype": "float32", "causal": False, "batch_size": 1,
                "seq_len": n, "num_components": 32 if mixer == "gma" else None,
                "status": "ok" if reached else "OOM", "peak_bytes": peak if reached else None,
                "saved_bytes": peak // 2 if reached else None, "parameter_bytes": 65536,
                "seconds": 0.1 if reached else None, "reached": None if reached else n // 2,
                "reason": None if reached else "needs 16.0 GiB of 8.0 GiB",
            })  # fmt: skip
    return rows


def throughput_rows(mixer: str) -> list[dict[str, Any]]:
    """Tokens a second at four lengths; GMA with both of its backends."""
    rows = []
    for backend in ("chunked", "reference") if mixer == "gma" else (None,):
        for exponent in range(8, 12):
            n = 2**exponent
            quadratic = n / 4096 if mixer in ("sdpa", "mha") else 0
            slow = 40 if backend == "reference" else 1
            speed = 4e5 / (1 + quadratic + 0.1 * len(mixer)) / slow
            rows.append({
                "sweep": "length", "scope": "layer", "pass": "forward_backward", "device": "cpu",
                "dtype": "float32", "reference": "sdpa", "ratio": 4e5 / (1 + n / 4096 + 0.4) / speed,
                "causal": True, "batch_size": 4, "seq_len": n, "status": "ok", "backend": backend,
                "tokens_per_s": speed, "median_ms": 4000 * n / speed,
            })  # fmt: skip
    return rows


def interpretability(seed: int, scale: str = "mini") -> Record:
    """Figures near the paper's."""
    rng = random.Random(seed)
    nmi = 0.244 + rng.gauss(0, 0.01)
    figures = {
        "num_components": 64, "components_in_use": 52 + seed, "usage_entropy": 0.93,
        "components_in_use_fraction": (52 + seed) / 64, "nmi": nmi, "nmi_low": nmi - 0.02,
        "nmi_high": nmi + 0.02, "nmi_permuted": 0.031, "ami": nmi - 0.03, "affinity_rank_max": 61, "affinity_length": 256,
        "affinity_min": 0.0, "gradient_norm_max": 1.9, "gradient_norm_other_max": 2.5, "gradient_nonfinite_steps": 0, "gradient_norm_initial": 0.8,
        "lipschitz_empirical": 0.4, "lipschitz_bound": 2.2,
    }  # fmt: skip
    return record(
        "interpretability", "gma", seed, scale=scale, metric="nmi", split="val", value=nmi,
        metrics={"val": figures},
        curves={"step": [float(i) for i in range(20)],
                "gradient_norm": [1.9 - i / 20 for i in range(20)]},
    )  # fmt: skip


def profiling(mixers: Iterable[str] = ("mha", *QUALITY), scale: str = "mini") -> list[Record]:
    """Memory and throughput of each mixer, interpretability of GMA."""
    made = [
        record("memory", m, scale=scale, metric="memory_slope", value=None, rows=memory_rows(m))
        for m in mixers
    ]
    made += [
        record("throughput", m, scale=scale, metric="ratio", value=None, rows=throughput_rows(m))
        for m in mixers if m not in ("mha", "linformer")
    ]  # fmt: skip
    return made + [interpretability(seed, scale) for seed in range(3)]


def grid(
    seeds: Iterable[int] = range(3), mixers: Iterable[str] = tuple(QUALITY), scale: str = "mini"
) -> list[Record]:
    """Every trained cell."""
    return [r for mixer in mixers for seed in seeds for r in trained(mixer, seed, scale)]


def write(folder: Path, records: Iterable[Record]) -> Path:
    """Records where ``read_all`` finds them."""
    for made in records:
        write_record(record_path(folder, made["scale"], made["run_id"]), made)
    return folder


@pytest.fixture
def synthetic() -> Callable[..., Record]:
    """Makes one record."""
    return record


@pytest.fixture
def make_failed() -> Callable[..., Record]:
    """Makes the record of a failed cell."""
    return failed


@pytest.fixture
def make_grid() -> Callable[..., list[Record]]:
    """Makes the trained cells."""
    return grid


@pytest.fixture
def write_records() -> Callable[[Path, Iterable[Record]], Path]:
    """Writes records into a results folder."""
    return write


@pytest.fixture
def make_profiling() -> Callable[..., list[Record]]:
    """Makes the profiling cells."""
    return profiling


@pytest.fixture(scope="session")
def writer() -> Callable[[Path, Iterable[Record]], Path]:
    """:func:`write`, for fixtures that outlive a test."""
    return write


@pytest.fixture(scope="session")
def records_for_page() -> Callable[[str], list[Record]]:
    """Everything that the page shows: all cells, a variant, a failed run, a mixer of any name."""

    def make(name: str) -> list[Record]:
        made = [
            r for r in grid() if (r["task"], r["mixer"], r["seed"]) != ("listops", "performer", 2)
        ]
        made.append(failed("listops", "performer", 2))
        data = made[0]["data"]
        for seed in range(3):
            changed = record(
                "listops", "gma", seed, settings={"mixer": {"num_components": 32}},
                value=0.35 + seed / 1000, data=data,
            )  # fmt: skip
            changed["command"] += " mixer.num_components=32"
            made.append(changed)
        made.append(record("mqar", "gma", value=0.9, data=data | {"name": name}))
        return made + profiling()

    return make
