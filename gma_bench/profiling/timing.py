"""Timing calls side by side, so that drift of the machine hits all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils import benchmark

LONG_S = 0.1
"""A call that takes longer is not called again to see how often it fits a block."""
MOST_CALLS = 1000


@dataclass(frozen=True)
class Timing:
    """Seconds a call, over rounds.

    Attributes:
        median_s, iqr_s: of the rounds.
        ratio, ratio_iqr: median and IQR of this call's time over the reference's in the same round.
        rounds: how many there were.
        calls: calls that one round's figure is the mean of.
        converged: whether IQR / median fell below the tolerance before the time cap.
    """

    median_s: float
    iqr_s: float
    ratio: float
    ratio_iqr: float
    rounds: int
    calls: int
    converged: bool


def time_block(run: Callable[[], object], calls: int, device: torch.device, threads: int) -> float:
    """Mean seconds of ``calls`` calls in a row: device events on CUDA, else ``torch.utils.benchmark``."""
    if device.type == "cuda":
        run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3 / calls
    # Runs the call before it times it: each contender finds the caches as it leaves them itself.
    timer = benchmark.Timer(
        "run()", globals={"run": run}, num_threads=threads, timer=time.perf_counter
    )
    return float(timer.timeit(calls).mean)


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    device: torch.device,
    threads: int,
    block_s: float = 0.02,
    tolerance: float = 0.05,
    min_rounds: int = 5,
    max_rounds: int = 100,
    cap_s: float = 2.0,
) -> dict[str, Timing]:
    """Time every call once a round, in alternating order, until all have settled.

    A round gives each contender as many calls as fill ``block_s``. Rounds are repeated until the
    interquartile range of every contender's times is below ``tolerance`` of its median, or until
    ``cap_s`` seconds have gone by (not before ``min_rounds``).

    Args:
        runs: name to a call without arguments. All are called before anything is timed.
        reference: the name that ratios refer to.
    """
    calls = {name: _calls_for(run, block_s, device) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    start, names = time.perf_counter(), list(runs)
    for done in range(max_rounds):
        settled = done >= min_rounds and all(_spread(t) <= tolerance for t in times.values())
        if settled or (done >= min_rounds and time.perf_counter() - start > cap_s):
            break
        for name in names if done % 2 == 0 else reversed(names):
            times[name].append(time_block(runs[name], calls[name], device, threads))
    return {name: _summary(times[name], times[reference], calls[name], tolerance) for name in names}


def _calls_for(run: Callable[[], object], block_s: float, device: torch.device) -> int:
    run()  # libraries and caches warm up
    once = math.inf
    for _ in range(3):  # whoever else runs here may have taken one of them
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        once = min(once, max(time.perf_counter() - start, 1e-7))
        if once > LONG_S:
            break
    return min(MOST_CALLS, max(1, math.ceil(block_s / once)))


def _iqr(values: list[float]) -> float:
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low)


def _spread(values: list[float]) -> float:
    return _iqr(values) / float(np.median(values))


def _summary(times: list[float], reference: list[float], calls: int, tolerance: float) -> Timing:
    ratios = [t / r for t, r in zip(times, reference, strict=True)]
    return Timing(
        float(np.median(times)), _iqr(times), float(np.median(ratios)), _iqr(ratios),
        len(times), calls, _spread(times) <= tolerance,
    )  # fmt: skip
