"""The same search of learning rates for every mixer: grid in ``conf/tuned.yaml``, choice on validation.

    gma-bench run -m task=listops mixer=gma,sdpa training.lr=0.001,0.002 … \\
        training.test=false results_dir=tuning
    python -m gma_bench.run.tuning tuning mini

The first runs the search, the second writes each cell's best rate into ``conf/tuned.yaml``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from gma_bench.results import read_all
from gma_bench.results.store import write_atomic
from gma_bench.run.compose import CONF

TUNED = CONF / "tuned.yaml"


def choose(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The best learning rate of each task and mixer, by the mean over seeds of validation.

    Test figures are not read. A rate at which a seed diverged or failed is out.
    """
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    out: set[tuple[str, str, float]] = set()
    upwards: dict[str, bool] = {}
    for record in records:
        task, mixer = record["task"], record["mixer"]
        rate = record["config"]["training"]["lr"]
        if record["status"] != "finished":
            out.add((task, mixer, rate))
            continue
        upwards[task] = record["higher_is_better"]
        value = record["metrics"]["val"][record["metric"]]
        found.setdefault((task, mixer), {}).setdefault(rate, []).append(value)
    chosen: dict[str, dict[str, float]] = {}
    for (task, mixer), values in sorted(found.items()):
        means = {r: mean(v) for r, v in values.items() if (task, mixer, r) not in out}
        if means:
            best = (max if upwards[task] else min)(means, key=lambda r: means[r])
            chosen.setdefault(task, {})[mixer] = best
    return chosen


def write(scale: str, chosen: dict[str, dict[str, float]], path: Path = TUNED) -> None:
    """Put the rates of a scale into ``conf/tuned.yaml``; its comments and other scales stay."""
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    rates = content["lr"].setdefault(scale, {})
    for task, mixers in chosen.items():
        rates.setdefault(task, {}).update(mixers)
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    write_atomic(path, "\n".join(head) + "\n" + body)


def main() -> None:
    """Choose and write."""
    options = argparse.ArgumentParser(prog="python -m gma_bench.run.tuning", description=__doc__)
    options.add_argument("results_dir", type=Path)
    options.add_argument("scale")
    given = options.parse_args()
    records, _ = read_all(given.results_dir, given.scale)
    write(given.scale, choose(records))


if __name__ == "__main__":
    main()
