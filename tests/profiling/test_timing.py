"""Interleaved timing: order, rounds, ratios, and that it stops."""

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from gma_bench.profiling import timing
from gma_bench.profiling.timing import interleaved

CPU = torch.device("cpu")


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_ratio_is_of_times_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    drift = iter(range(1, 1000))

    def clocked(run: object, calls: int, device: object, threads: int) -> float:
        # The machine slows down all the while; both contenders of a round feel the same.
        slow = (next(drift) + 1) // 2
        return float(slow * (3.0 if run is three else 1.0))

    def one() -> None: ...
    def three() -> None: ...

    monkeypatch.setattr(timing, "time_block", clocked)
    found = interleaved({"three": three, "one": one}, reference="one", device=CPU, threads=1,
                        cap_s=0, min_rounds=20)  # fmt: skip
    assert found["three"].ratio == 3.0
    assert found["three"].ratio_iqr == 0.0
    assert found["one"].ratio == 1.0
    assert found["one"].iqr_s > 0.3 * found["one"].median_s, "though the times themselves drift"
    assert not found["one"].converged


def test_order_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def clocked(run: object, calls: int, device: object, threads: int) -> float:
        seen.append("a" if run is a else "b")
        return 1.0

    def a() -> None: ...
    def b() -> None: ...

    monkeypatch.setattr(timing, "time_block", clocked)
    interleaved({"a": a, "b": b}, reference="b", device=CPU, threads=1, min_rounds=4)
    assert "".join(seen) == "abbaabba"


def test_rounds_end_when_settled_or_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([1.0, 2.0] * 10_000)

    def unsettled(run: object, calls: int, device: object, threads: int) -> float:
        busy(0.001)
        return next(values)

    monkeypatch.setattr(timing, "time_block", unsettled)
    start = time.perf_counter()
    found = interleaved({"a": lambda: None, "b": lambda: None}, reference="b", device=CPU, threads=1,
                        cap_s=0.1, max_rounds=10**6)  # fmt: skip
    assert time.perf_counter() - start < 5
    assert found["a"].rounds >= 5


def test_a_call_twice_as_long_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def takes(seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds

        return run

    # A clock of its own: on a real one, whatever else runs here would be measured with it.
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = interleaved({"long": takes(4e-4), "short": takes(2e-4)}, reference="short",
                        device=CPU, threads=1, block_s=0.0019, cap_s=1)  # fmt: skip
    assert found["long"].ratio == pytest.approx(2)
    assert found["short"].median_s == pytest.approx(2e-4)
    assert (found["long"].calls, found["short"].calls) == (5, 10)
