"""The memory task: peak bytes against sequence length and number of components."""

from __future__ import annotations

import gc
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gma_bench.profiling.storages import StorageTracker, saved_for_backward
from gma_bench.profiling.subject import (
    Subject,
    build_subject,
    form_of,
    num_threads,
    resolve_device,
    resolve_mixer,
)  # fmt: skip
from gma_bench.results import Outcome
from gma_bench.results.growth import Growth, growth_of

NOT_SIMULABLE = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)  # fmt: skip


class OutOfMemory(Exception):
    """An allocation that the machine refused; the message is the allocator's."""


@dataclass(frozen=True)
class Footprint:
    """What one call took.

    Attributes:
        peak_bytes: the most that was alive at once, above what was there before the call.
        saved_bytes: kept for the backward pass at the end of the forward pass.
        parameter_bytes: parameters and buffers; not part of the peak, nor are their gradients.
        standing_bytes: everything that was there before the call.
        operators: number of operators that the call ran.
        seconds: how long building and running took.
    """

    peak_bytes: int
    saved_bytes: int
    parameter_bytes: int
    standing_bytes: int
    operators: int
    seconds: float


def measure(build: Callable[[], Subject], device: torch.device) -> Footprint:
    """Build a subject, run its pass once and follow its storages.

    On CUDA the peak is the allocator's, taken after a first call that lets libraries allocate their
    workspaces; on the CPU it is that of :class:`StorageTracker`.

    Raises:
        OutOfMemory: an allocation failed. Everything of the call is freed by then.
    """
    start = time.perf_counter()
    message = ""
    try:
        with _no_garbage_collection():
            subject = build()
            if device.type == "cuda":
                _warm_up(subject)
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            peak, saved, operators = _follow(subject)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                peak = torch.cuda.max_memory_allocated(device) - before
            parameters, standing = subject.parameter_bytes(), subject.standing_bytes()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if message:  # raised here, where the frames that hold the tensors are gone
        gc.collect()
        raise OutOfMemory(message)
    return Footprint(peak, saved, parameters, standing, operators, time.perf_counter() - start)


def simulate(build: Callable[[], Subject]) -> Footprint:
    """The same as :func:`measure` on tensors without data: any length, any device, no memory.

    Raises:
        NOT_SIMULABLE: an operator has no fake implementation, or its output depends on data.
    """
    start = time.perf_counter()
    with _no_garbage_collection(), FakeTensorMode():
        with MadeUpScalars():
            subject = build()
        peak, saved, operators = _follow(subject)
        parameters, standing = subject.parameter_bytes(), subject.standing_bytes()
    return Footprint(peak, saved, parameters, standing, operators, time.perf_counter() - start)


class MadeUpScalars(TorchDispatchMode):
    """Lets a constructor read a number out of a fake tensor (a seed it drew): it reads zero."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.0 if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


def _follow(subject: Subject) -> tuple[int, int, int]:
    with StorageTracker() as tracker:
        if subject.gradient is None:
            out = subject.run()
            return tracker.peak_bytes, 0, tracker.operators
        with saved_for_backward(tracker) as saved:
            out = subject.run()
        saved_bytes = saved.num_bytes()
        out.backward(subject.gradient)
    return tracker.peak_bytes, saved_bytes, tracker.operators


def _warm_up(subject: Subject) -> None:
    subject.run_pass()
    for tensor in subject.inputs:
        tensor.grad = None  # as in a first call: the input's gradient is allocated, not added to
    torch.cuda.synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised it: Python's, torch's on the CPU, or CUDA's."""
    words = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "bad_alloc",
        "Cannot allocate",
    )
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in str(error) for word in words
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # A collection in the middle would free cycles early in one run and late in another.
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    # What torch and Hydra keep for good makes a collection cost more than a simulated cell.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# --- limits ----------------------------------------------------------------------------------


def available_bytes(budget_gib: float, device: torch.device) -> int:
    """What a measured call may use: the budget, or less where the machine has less.

    On the CPU that is what the kernel calls available and what ``ulimit -v`` leaves.
    """
    limits = [budget_gib * 2**30]
    if device.type == "cuda":
        limits.append(torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else 0)
        return int(min(limits))
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        used = next(
            (int(x.split()[1]) for x in _lines("/proc/self/status") if x.startswith("VmSize:")), 0
        )
        limits.append(max(0, soft - used * 1024))
    return int(min(limits))


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def extrapolate(
    done: list[tuple[int, float]], x: int, *, least_exponent: float = 1.0
) -> float | None:
    """A quantity at ``x`` from its last two values, as a power of ``x`` up to 3; None before that."""
    if len(done) < 2 or min(done[-2][1], done[-1][1]) <= 0:
        return None
    (x0, y0), (x1, y1) = done[-2:]
    exponent = math.log(y1 / y0) / math.log(x1 / x0)
    return float(y1 * (x / x1) ** min(max(exponent, least_exponent), 3.0))


# --- the sweep -------------------------------------------------------------------------------


def profile(config: DictConfig) -> Outcome:
    """Run one cell of ``task=memory``: one mixer at every length and number of components.

    Rows: ``sweep`` (``length`` or ``components``), ``scope`` (``layer``, ``model``), ``pass``
    (``forward``, ``forward_backward``), ``method`` (``measured``, ``simulated``), ``device``,
    ``dtype``, ``causal``, ``batch_size``, ``seq_len``, ``num_components``, ``status``,
    ``peak_bytes``, ``saved_bytes``, ``parameter_bytes``, ``standing_bytes``, ``operators``, ``seconds``,
    ``simulated_bytes`` (of a measured row), ``reached``, ``reason``. Status is ``ok``; ``OOM`` where
    the memory does not suffice; ``time`` where the call would take longer than is left of
    ``task.cell_seconds``, which all measured calls share, or where a simulation would run more than
    ``task.simulation_operators`` operators; ``unavailable`` where it cannot be simulated.
    ``reached`` is then the largest length (or K) that was done.
    """
    task = config.task
    device = resolve_device(task.device)
    series = [
        _Series(config, device, scope, step, sweep)
        for sweep in ("length", "components") for scope in task.scopes for step in task.passes
        if sweep == "length" or (task.components and scope == "layer" and "num_components" in config.mixer)
    ]  # fmt: skip
    with num_threads(config.trainer.num_threads), _frozen_garbage():
        torch.manual_seed(config.seed)
        for one in series:
            one.simulate()
        if task.measured and not (device.type == "cuda" and not torch.cuda.is_available()):
            _measure(series, task.cell_seconds)
    rows = [row for one in series for row in one.rows]
    growths = [g for one in series if (g := one.growth(rows)) is not None]
    metrics: dict[str, dict[str, float]] = {}
    for one, growth in growths:
        name = f"slope_{one.pass_}" if one.sweep == "length" else f"slope_components_{one.pass_}"
        metrics.setdefault(one.scope, {}).update(
            {name: growth.slope, f"{name}_low": growth.low, f"{name}_high": growth.high}
        )
    compared = [r for r in rows if r["method"] == "measured" and r["status"] == "ok"]
    equal = [r for r in compared if r["peak_bytes"] == r["simulated_bytes"]]
    return Outcome(
        metric="memory_slope",
        split="layer",
        value=metrics.get("layer", {}).get("slope_forward_backward"),
        higher_is_better=False,
        metrics=metrics,
        rows=rows,
        data={"source": "random inputs", "name": "profiling"},
        extra={
            "compared_with_simulation": len(compared),
            "equal_to_simulation": len(equal),
            "growth": [{**one.columns(), **growth.as_dict()} for one, growth in growths],
        },
    )


def _measure(series: list[_Series], seconds: float) -> None:
    """Measure the cheapest call of all curves, again and again, while they fit into ``seconds``."""
    while waiting := [one for one in series if one.unmeasured]:
        cheapest = min(waiting, key=lambda one: one.expected_seconds() or 0.0)
        seconds -= cheapest.measure_next(seconds)


class _Series:
    """One curve: a scope and a pass over lengths (or numbers of components), by both methods.

    Attributes:
        rows: simulated rows, then measured ones, each in order of length or K.
        unmeasured: lengths (or K) still to be measured, in order.
    """

    def __init__(
        self, config: DictConfig, device: torch.device, scope: str, pass_: str, sweep: str
    ) -> None:
        self.config, self.device, self.scope, self.pass_, self.sweep = (
            config,
            device,
            scope,
            pass_,
            sweep,
        )
        self.causal = form_of(config.mixer, config.task.causal)
        task = config.task
        self.points = sorted(task.lengths if sweep == "length" else task.components)
        self.rows: list[dict[str, Any]] = []
        self.unmeasured = [
            point for point in self.points
            if sweep == "components" or point <= task.measured_max_length
        ]  # fmt: skip
        self._simulated: dict[int, Footprint] = {}
        self._done: list[tuple[int, float]] = []  # point and seconds of every measured call
        self._failed = ""

    def columns(self) -> dict[str, Any]:
        """What all rows of the series share."""
        task = self.config.task
        return {
            "sweep": self.sweep, "scope": self.scope, "pass": self.pass_, "device": self.device.type,
            "dtype": task.dtype, "causal": self.causal, "batch_size": task.batch_size,
        }  # fmt: skip

    def growth(self, rows: list[dict[str, Any]]) -> tuple[_Series, Growth] | None:
        """Growth of the simulated curve, or of the measured one where it cannot be simulated."""
        x = "seq_len" if self.sweep == "length" else "num_components"
        for method in ("simulated", "measured"):
            found = growth_of(rows, "peak_bytes", x, method=method, **self.columns())
            if found is not None:
                return self, found
        return None

    def simulate(self) -> None:
        """Simulate every point, but for those that would run too many operators."""
        done: list[tuple[int, float]] = []
        for point in self.points:
            # Most mixers run the same operators at any length, some a loop over chunks.
            operators = extrapolate(done, point, least_exponent=0.0)
            if operators is not None and operators > self.config.task.simulation_operators:
                reason = f"would run {operators:,.0f} operators"
                self._add(point, "simulated", "time", reason=reason, done=done)
                continue
            try:
                found = simulate(self._builder(point))
            except self._not_simulable() as error:
                reason = f"cannot be simulated here: {str(error).splitlines()[0]}"
                self._add(point, "simulated", "unavailable", reason=reason, done=done)
                continue
            done.append((point, found.operators))
            self._simulated[point] = found
            self._add(point, "simulated", "ok", found)

    def _not_simulable(self) -> tuple[type[Exception], ...]:
        # Autograd asks the driver about fake CUDA tensors and raises a bare RuntimeError without one.
        bare = self.device.type == "cuda" and not torch.cuda.is_available()
        return (*NOT_SIMULABLE, RuntimeError) if bare else NOT_SIMULABLE

    def expected_seconds(self) -> float | None:
        """What the next measured call should take; None while there is nothing to tell it from."""
        return extrapolate(self._done, self.unmeasured[0])

    def measure_next(self, seconds_left: float) -> float:
        """Measure the next point, or note why not; returns the seconds that the measured call took."""
        expected, point = self.expected_seconds(), self.unmeasured.pop(0)
        simulated = self._simulated.get(point)
        self._failed = self._failed or self._too_large(simulated)
        if self._failed:
            self._add(point, "measured", "OOM", reason=self._failed, done=self._done)
            return 0.0
        if expected is not None and expected > seconds_left:
            left = max(0.0, seconds_left)
            reason = f"would take {expected:.0f} s, of {left:.0f} s left to the cell"
            self._add(point, "measured", "time", reason=reason, done=self._done)
            return 0.0
        try:
            found = measure(self._builder(point), self.device)
        except OutOfMemory as error:
            self._failed = str(error)
            self._add(point, "measured", "OOM", reason=self._failed, done=self._done)
            return 0.0
        self._done.append((point, found.seconds))
        self._add(point, "measured", "ok", found)
        self.rows[-1]["simulated_bytes"] = simulated and simulated.peak_bytes
        return found.seconds

    def _too_large(self, expected: Footprint | None) -> str:
        if expected is None:
            return ""
        needed = expected.standing_bytes + expected.peak_bytes
        budget = available_bytes(self.config.task.budget_gib, self.device)
        if needed <= budget:
            return ""
        return f"needs {needed / 2**30:.1f} GiB of {budget / 2**30:.1f} GiB"

    def _builder(self, point: int) -> Callable[[], Subject]:
        length, components = self._sizes(point)
        changes = {} if components is None else {"num_components": components}
        mixer = resolve_mixer(self.config.mixer, **changes)
        return lambda: build_subject(
            self.config, mixer, scope=self.scope, seq_len=length, device=self.device,
            backward=self.pass_ == "forward_backward", causal=self.causal,
        )  # fmt: skip

    def _sizes(self, point: int) -> tuple[int, int | None]:
        if self.sweep == "length":
            return point, self.config.mixer.get("num_components")
        return self.config.task.components_length, point

    def _add(
        self, point: int, method: str, status: str, found: Footprint | None = None, *,
        reason: str = "", done: list[tuple[int, float]] | None = None,
    ) -> None:  # fmt: skip
        length, components = self._sizes(point)
        self.rows.append({
            **self.columns(), "method": method, "seq_len": length, "num_components": components,
            "status": status,
            "peak_bytes": found and found.peak_bytes,
            "saved_bytes": found and found.saved_bytes,
            "parameter_bytes": found and found.parameter_bytes,
            "standing_bytes": found and found.standing_bytes,
            "operators": found and found.operators,
            "seconds": found and round(found.seconds, 4),
            "simulated_bytes": None,
            "reached": None if found else (done[-1][0] if done else 0),
            "reason": reason or None,
        })  # fmt: skip
