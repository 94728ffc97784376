"""The throughput task: time, tokens a second and FLOP/s, each beside the reference mixer's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from gma_bench.mixer import Mixer, State, state_bytes
from gma_bench.mixer.model import build_mixer, count_parameters
from gma_bench.profiling.decode import UnknownGrowth, state_at
from gma_bench.profiling.flops import count_flops, peak_flops_per_s
from gma_bench.profiling.memory import NOT_SIMULABLE, extrapolate, is_out_of_memory
from gma_bench.profiling.subject import (
    Subject,
    build_subject,
    default_dtype,
    form_of,
    num_threads,
    resolve_device,
    resolve_mixer,
)  # fmt: skip
from gma_bench.profiling.timing import Timing, interleaved
from gma_bench.results import Outcome
from gma_bench.results.growth import growth_of
from gma_bench.results.store import locked

Run = Callable[[], object]


def profile(config: DictConfig) -> Outcome:
    """Run one cell of ``task=throughput``: one mixer, interleaved with ``task.reference``.

    Rows: ``sweep`` (``length``, ``components``, ``context``), ``scope``, ``pass`` (``forward``,
    ``forward_backward``, ``decode``), ``backend``, ``device``, ``device_name``, ``dtype``,
    ``causal``, ``batch_size``, ``seq_len`` (of ``decode``: tokens in the context),
    ``num_components``, ``num_threads``, ``status``, ``median_ms``, ``iqr_ms``, ``rounds``,
    ``calls``, ``converged``, ``tokens_per_s``, ``reference``, ``reference_median_ms``, ``ratio``
    and ``ratio_iqr`` (time over the reference's in the same round), ``flops``, ``flops_per_s``,
    ``peak_share`` (of a known GPU's data sheet), ``state_bytes``, ``timer``, ``clock_mhz``,
    ``reached``, ``reason``. Status is ``ok``; ``time`` where one call would take longer than
    ``task.call_seconds``; ``OOM``; ``unavailable`` where the mixer has no such form.
    """
    device = resolve_device(config.task.device)
    if device.type == "cuda":
        torch.cuda.init()
    cell = _Cell(config, device)
    with locked(Path(config.cache_dir) / "timing"), num_threads(config.trainer.num_threads):
        torch.manual_seed(config.seed)
        rows = [*cell.lengths(), *cell.components(), *cell.contexts()]
    return _outcome(config, cell, rows)


def _outcome(config: DictConfig, cell: _Cell, rows: list[dict[str, Any]]) -> Outcome:
    metrics: dict[str, dict[str, float]] = {}
    main = [r for r in rows if r["status"] == "ok" and r["backend"] == config.mixer.get("backend")]
    for pass_ in dict.fromkeys(r["pass"] for r in main):
        mine = [r for r in main if r["pass"] == pass_ and r["sweep"] != "components"]
        if not mine:
            continue
        longest = max(mine, key=lambda r: r["seq_len"])
        metrics[pass_] = {
            f"{name}_longest": longest[name]
            for name in ("seq_len", "tokens_per_s", "ratio") if longest[name] is not None
        }  # fmt: skip
        growth = growth_of(mine, "median_ms")
        if growth is not None:
            metrics[pass_] |= {
                "slope": growth.slope, "slope_low": growth.low, "slope_high": growth.high
            }  # fmt: skip
    return Outcome(
        metric="ratio_longest",
        split="forward_backward",
        value=metrics.get("forward_backward", {}).get("ratio_longest"),
        higher_is_better=False,
        metrics=metrics,
        rows=rows,
        data={"source": "random inputs", "name": "profiling"},
        parameters=cell.parameters(),
        extra={"reference": config.task.reference.name},
    )


class _Cell:
    """One mixer (with its backends) beside the reference."""

    def __init__(self, config: DictConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.mixer, self.reference = (
            resolve_mixer(config.mixer),
            resolve_mixer(config.task.reference),
        )
        self.threads = config.trainer.num_threads

    def parameters(self) -> int:
        """Trainable parameters of the layer at the shortest length."""
        with torch.device("cpu"):
            return count_parameters(
                self._build_mixer(self.mixer, False, min(self.config.task.lengths))
            )

    def lengths(self) -> Iterator[dict[str, Any]]:
        """Time against sequence length, for the mixer's backend and those measured beside it."""
        yield from self._sweeps("length", self.config.task.lengths)

    def components(self) -> Iterator[dict[str, Any]]:
        """Time against the number of components at one length, for mixers that have them."""
        if "num_components" in self.mixer:
            yield from self._sweeps("components", self.config.task.components)

    def _sweeps(self, sweep: str, points: list[int]) -> Iterator[dict[str, Any]]:
        variants = [self.mixer]
        if sweep == "length":
            beside = self.config.task.backends.get(self.mixer.name, [])
            variants += [
                resolve_mixer(self.mixer, backend=b) for b in beside if b != self.mixer.backend
            ]
        for pass_ in self.config.task.passes:
            for mixer in variants:
                done: list[tuple[int, float]] = []
                for point in sorted(points):
                    changes = {"num_components": point} if sweep == "components" else {}
                    yield self._timed(sweep, pass_, resolve_mixer(mixer, **changes), point, done)

    def _timed(
        self, sweep: str, pass_: str, mixer: DictConfig, point: int, done: list[tuple[int, float]]
    ) -> dict[str, Any]:
        task = self.config.task
        length = point if sweep == "length" else task.components_length
        causal = form_of(mixer, task.causal)
        row = self._row(sweep, pass_, mixer, length, causal)
        expected = extrapolate(done, point)
        if expected is not None and expected > task.call_seconds:
            reached = done[-1][0] if done else 0
            return row | {
                "status": "time",
                "reason": f"would take {expected:.1f} s",
                "reached": reached,
            }

        def build(which: DictConfig) -> Subject:
            return build_subject(
                self.config, which, scope="layer", seq_len=length, device=self.device,
                backward=pass_ == "forward_backward", causal=form_of(which, causal),
            )  # fmt: skip

        try:
            ours, theirs = build(mixer), build(self.reference)
            timing, other = self._compare(_clearing(ours), _clearing(theirs))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            return row | {"status": "OOM", "reason": reason, "reached": done[-1][0] if done else 0}
        done.append((point, timing.median_s))
        row |= self._columns(timing, other, tokens=task.batch_size * length)
        return row | self._flops(lambda: build(mixer), timing)

    def contexts(self) -> Iterator[dict[str, Any]]:
        """Streaming: time of one token and bytes of state, at each length of the context."""
        for context in sorted(self.config.task.contexts):
            yield self._decoded(context)

    def _decoded(self, context: int) -> dict[str, Any]:
        task = self.config.task
        row = self._row("context", "decode", self.mixer, context, True)
        if not form_of(self.mixer, True):
            return row | {"status": "unavailable", "reason": "has no causal form"}
        try:
            mixer, x, state = self._streaming(self.mixer, context)
            runs = [lambda: mixer.step(x, state)]
            if form_of(self.reference, True):
                their_mixer, their_x, their_state = self._streaming(self.reference, context)
                runs.append(lambda: their_mixer.step(their_x, their_state))
            with torch.no_grad():
                timing, other = self._compare(*runs)
        except (UnknownGrowth, NotImplementedError) as error:
            return row | {"status": "unavailable", "reason": str(error)}
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return row | {"status": "OOM", "reason": str(error).splitlines()[0]}
        row |= self._columns(timing, other, tokens=task.batch_size)
        return row | {"state_bytes": state_bytes(state)}

    def _streaming(self, which: DictConfig, context: int) -> tuple[Mixer, Tensor, State]:
        with torch.device(self.device), default_dtype(self.config.task.dtype):
            mixer = self._build_mixer(which, True, context + 1).eval()
            x = torch.randn(self.config.task.batch_size, mixer.d_model)
        return mixer, x, state_at(mixer, context, self.config.task.batch_size)

    def _build_mixer(self, which: DictConfig, causal: bool, max_length: int) -> Mixer:
        sizes = self.config.model
        return build_mixer(
            which, d_model=sizes.d_model, num_heads=sizes.num_heads,
            causal=form_of(which, causal), max_length=max_length,
        )  # fmt: skip

    def _compare(self, ours: Run, theirs: Run | None = None) -> tuple[Timing, Timing | None]:
        task = self.config.task
        runs = {"ours": ours}
        if theirs is not None and self.mixer != self.reference:
            runs["theirs"] = theirs
        gc.collect()
        found = interleaved(
            runs, reference=list(runs)[-1], device=self.device, threads=self.threads,
            block_s=task.block_ms / 1e3, tolerance=task.tolerance, cap_s=task.cap_seconds,
            min_rounds=task.min_rounds,
        )  # fmt: skip
        if theirs is None:
            return found["ours"], None
        return found["ours"], found[list(runs)[-1]]

    def _row(
        self, sweep: str, pass_: str, mixer: DictConfig, length: int, causal: bool
    ) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        empty = dict.fromkeys((
            "median_ms", "iqr_ms", "rounds", "calls", "converged", "tokens_per_s", "reference",
            "reference_median_ms", "ratio", "ratio_iqr", "flops", "flops_per_s", "peak_share",
            "state_bytes", "reached", "reason",
        ))  # fmt: skip
        return {
            "sweep": sweep, "scope": "layer", "pass": pass_, "backend": mixer.get("backend"),
            "device": self.device.type, "device_name": _device_name(self.device),
            "dtype": self.config.task.dtype, "causal": causal,
            "batch_size": self.config.task.batch_size, "seq_len": length,
            "num_components": mixer.get("num_components"), "num_threads": self.threads,
            "timer": "cuda events" if cuda else "torch.utils.benchmark (perf_counter)",
            "clock_mhz": _clock_mhz(self.device), "status": "ok", **empty,
        }  # fmt: skip

    def _columns(self, timing: Timing, other: Timing | None, tokens: int) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "median_ms": timing.median_s * 1e3, "iqr_ms": timing.iqr_s * 1e3,
            "rounds": timing.rounds, "calls": timing.calls, "converged": timing.converged,
            "tokens_per_s": tokens / timing.median_s,
        }  # fmt: skip
        if other is not None:
            columns |= {
                "reference": self.reference.name, "reference_median_ms": other.median_s * 1e3,
                "ratio": timing.ratio, "ratio_iqr": timing.ratio_iqr,
            }  # fmt: skip
        return columns

    def _flops(self, build: Callable[[], Subject], timing: Timing) -> dict[str, Any]:
        try:
            flops = count_flops(build)
        except (*NOT_SIMULABLE, RuntimeError):
            return {}  # an operator that cannot be simulated: the time stands without a count
        rate = flops / timing.median_s
        peak = peak_flops_per_s(_device_name(self.device), self.config.task.dtype)
        return {"flops": flops, "flops_per_s": rate, "peak_share": peak and rate / peak}


def _clearing(subject: Subject) -> Run:
    """The subject's pass, without adding to the input's gradient of the call before."""

    def run() -> None:
        subject.run_pass()
        for tensor in subject.inputs:
            tensor.grad = None

    return run


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")),
        "cpu",
    )


def _clock_mhz(device: torch.device) -> float | None:
    """The clock at this moment, where the machine tells it."""
    if device.type == "cuda":
        try:
            return float(torch.cuda.clock_rate(device))
        except (RuntimeError, ModuleNotFoundError):  # needs NVIDIA's management library
            return None
    found = [line.partition(":")[2] for line in _cpuinfo() if line.startswith("cpu MHz")]
    return max(map(float, found)) if found else None


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []
