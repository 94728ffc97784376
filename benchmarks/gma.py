"""GMA against the paper's broadcast form, attention and a Linear Transformer; time and memory."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from baselines.linear_transformer import linear_attention
from gma_bench.mixer.gma import GaussianMixtureAttention
from gma_bench.ops import gma
from gma_bench.profiling.storages import StorageTracker

NUM_THREADS = 2
BATCH, HEADS, WIDTH, COMPONENTS = 1, 4, 64, 64
SEQ_LEN, MEMORY_LEN, LONG_LEN = 4096, 1024, 262_144
ROUNDS, SLOW_ROUNDS = 9, 3

Call = Callable[[], Tensor]


class Comparison(NamedTuple):
    """One row: the time of ``other`` over that of GMA, or the other way round."""

    name: str
    causal: bool
    other: str
    slower_than: bool
    target: str | None


COMPARISONS = (
    Comparison("broadcast form / GMA", False, "broadcast", False, ">= 120"),
    Comparison("GMA in plain torch / GMA", False, "chunked", False, None),
    Comparison("fused SDPA / GMA", False, "sdpa", False, ">= 15"),
    Comparison("GMA / Linear Transformer", False, "linear", True, "<= 1.5"),
    Comparison("causal fused SDPA / causal GMA", True, "sdpa", False, ">= 6"),
    Comparison("causal GMA in plain torch / causal GMA", True, "chunked", False, None),
    Comparison("causal GMA / causal Linear Transformer", True, "linear", True, "<= 1.3"),
)

LINEAR = f"{0.9 * LONG_LEN / SEQ_LEN:.0f} to {1.1 * LONG_LEN / SEQ_LEN:.0f}"
"""Within a tenth of the ratio of the two lengths."""


class Inputs:
    """Tokens as a normalised projection leaves them, and a mixture as the module starts with."""

    def __init__(self, seq_len: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def tokens() -> Tensor:
            x = torch.randn(BATCH, seq_len, HEADS, WIDTH, generator=generator)
            return F.layer_norm(x, (WIDTH,)).transpose(1, 2).contiguous()

        self.tokens = [tokens().requires_grad_() for _ in range(3)]
        self.upstream = tokens()
        torch.manual_seed(1)  # not the tokens' seed: means would be tokens
        mixer = GaussianMixtureAttention(HEADS * WIDTH, HEADS, num_components=COMPONENTS)
        start = mixer.means, mixer.variances(), mixer.priors().log()
        self.mixture = [t.detach().clone().requires_grad_() for t in start]

    def call(self, name: str, causal: bool) -> Call:
        """The forward pass of one subject."""
        q, k, v = self.tokens
        return {
            "gma": lambda: gma(q, k, v, *self.mixture, causal=causal),
            "chunked": lambda: gma(q, k, v, *self.mixture, causal=causal, backend="chunked"),
            "broadcast": lambda: gma(q, k, v, *self.mixture, causal=causal, backend="reference"),
            "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
            "linear": lambda: linear_attention(q, k, v, causal=causal),
        }[name]

    def forward_backward(self, name: str, causal: bool) -> None:
        """A pass in both directions, gradients of everything that has one."""
        leaves = self.tokens + ([] if name in ("sdpa", "linear") else self.mixture)
        torch.autograd.grad(self.call(name, causal)(), leaves, self.upstream)


def seconds(run: Callable[[], object], threads: int) -> float:
    """Wall-clock time of a run; on one thread, processor time, which other processes leave alone."""
    torch.set_num_threads(threads)
    clock = time.perf_counter if threads > 1 else time.thread_time
    gc.collect()
    start = clock()
    run()
    return clock() - start


def peak_bytes(inputs: Inputs, name: str, causal: bool) -> int:
    """The most that was allocated above the inputs during a pass in both directions.

    Counted by torch's profiler from every allocation and release, those inside operators included.
    """
    inputs.forward_backward(name, causal)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        inputs.forward_backward(name, causal)
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def storage_bytes(inputs: Inputs, name: str, causal: bool) -> int:
    """The most that tensors held above the inputs, what operators use inside themselves left out."""
    with StorageTracker() as tracker:
        inputs.forward_backward(name, causal)
    return tracker.peak_bytes


def rows() -> Iterator[dict[str, object]]:
    """Measure; ratios are medians over rounds in which all subjects take turns."""
    yield from _compared(Inputs(SEQ_LEN), COMPARISONS)
    yield from _memory()
    yield from _growth()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        yield from alone.submit(_in_kept_memory).result()


def _compared(inputs: Inputs, comparisons: Sequence[Comparison]) -> Iterator[dict[str, object]]:
    wall, processor = (_rounds(inputs, comparisons, threads) for threads in (NUM_THREADS, 1))
    for comparison in comparisons:
        mine, theirs = (
            1e3 * statistics.median(wall[subject, comparison.causal])
            for subject in ("gma", comparison.other)
        )
        yield {
            "benchmark": comparison.name,
            "seq_len": SEQ_LEN,
            "gma_ms": mine,
            "other_ms": theirs,
            **_spread(_ratios(comparison, wall), _ratios(comparison, processor)),
            "target": comparison.target,
        }


def _rounds(
    inputs: Inputs, comparisons: Sequence[Comparison], threads: int
) -> dict[tuple[str, bool], list[float]]:
    """Times of every subject, round by round."""
    subjects = [("gma", c.causal) for c in comparisons] + [(c.other, c.causal) for c in comparisons]
    taken: dict[tuple[str, bool], list[float]] = {subject: [] for subject in subjects}
    for number in range(ROUNDS + 1):
        for subject, times in taken.items():
            if subject[0] == "broadcast" and number > SLOW_ROUNDS:
                continue  # seconds each
            elapsed = seconds(partial(inputs.forward_backward, *subject), threads)
            if number:  # the first round warms up
                times.append(elapsed)
    return taken


def _ratios(comparison: Comparison, taken: dict[tuple[str, bool], list[float]]) -> list[float]:
    """One a round."""
    mine, theirs = (taken[name, comparison.causal] for name in ("gma", comparison.other))
    pairs = zip(mine, theirs, strict=False)
    return [a / b if comparison.slower_than else b / a for a, b in pairs]


def _spread(ratios: list[float], one_thread: list[float]) -> dict[str, float]:
    return {
        "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios),
        "one_thread_ratio": statistics.median(one_thread),
    }  # fmt: skip


def _memory() -> Iterator[dict[str, object]]:
    torch.set_num_threads(NUM_THREADS)  # each has memory of its own
    inputs = Inputs(MEMORY_LEN)
    theirs = storage_bytes(inputs, "sdpa", False)  # the lower of its two counts
    for causal, target in ((False, "<= 1.15"), (True, None)):
        mine = peak_bytes(inputs, "gma", causal)
        yield {
            "benchmark": f"peak memory, {'causal ' if causal else ''}GMA / fused SDPA",
            "seq_len": MEMORY_LEN,
            "gma_mb": mine / 2**20,
            "other_mb": theirs / 2**20,
            "ratio": mine / theirs,
            "target": target,
        }


def _growth() -> Iterator[dict[str, object]]:
    short, long = Inputs(SEQ_LEN), Inputs(LONG_LEN)
    yield _time_growth(short, long)
    torch.set_num_threads(NUM_THREADS)
    few_bytes, many_bytes = (peak_bytes(x, "gma", False) for x in (short, long))
    yield {
        "benchmark": f"peak memory at {LONG_LEN:,} tokens / at {SEQ_LEN:,}",
        "seq_len": LONG_LEN,
        "gma_mb": many_bytes / 2**20,
        "other_mb": few_bytes / 2**20,
        "ratio": many_bytes / few_bytes,
        "target": LINEAR,
    }


def _time_growth(short: Inputs, long: Inputs) -> dict[str, object]:
    ratios: dict[int, list[float]] = {NUM_THREADS: [], 1: []}
    for number in range(ROUNDS + 1):
        for threads, found in ratios.items():
            few, many = (partial(x.forward_backward, "gma", False) for x in (short, long))
            once = statistics.median(seconds(few, threads) for _ in range(5))
            ratio = seconds(many, threads) / once
            if number:
                found.append(ratio)
    return {
        "benchmark": f"time at {LONG_LEN:,} tokens / at {SEQ_LEN:,}",
        "seq_len": LONG_LEN,
        **_spread(ratios[NUM_THREADS], ratios[1]),
        "target": LINEAR,
    }


def _in_kept_memory() -> list[dict[str, object]]:
    """Rows of a process of its own, which keeps what is freed instead of giving it back.

    With glibc's defaults 4 MB lie where earlier tensors did, and 256 MB in pages that the system
    must find and clear at every call: a time of its own, which depends on the machine. There is no
    way back to the defaults, hence the process.
    """
    libc, trim_threshold, mmap_max = ctypes.CDLL(None), -1, -4  # as malloc.h numbers them
    if not hasattr(libc, "mallopt"):  # not glibc
        return []
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)
    short = Inputs(SEQ_LEN)
    form = COMPARISONS[0]._replace(target=None)
    rows = [*_compared(short, [form]), _time_growth(short, Inputs(LONG_LEN))]
    return [row | {"benchmark": f"{row['benchmark']}, memory kept"} for row in rows]
