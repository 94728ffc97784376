"""Slopes on log–log axes, their intervals, and where curves cross."""

import math

import pytest

from gma_bench.results.growth import crossing, fit, growth_of

LENGTHS = [2**i for i in range(8, 21)]


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_power_is_recovered_with_a_narrow_interval(power: float) -> None:
    found = fit(LENGTHS, [3 * n**power for n in LENGTHS])
    assert found is not None
    assert found.slope == pytest.approx(power)
    assert found.within(power, 1e-6)


def test_constant_terms_do_not_weigh_in_the_upper_half() -> None:
    ys = [1e5 + 100 * n for n in LENGTHS]
    found = fit(LENGTHS, ys)
    assert found is not None
    whole = (math.log(ys[-1]) - math.log(ys[0])) / (math.log(LENGTHS[-1]) - math.log(LENGTHS[0]))
    assert abs(found.slope - 1) < 0.02 < 0.1 < abs(whole - 1)
    assert found.from_x >= math.sqrt(LENGTHS[0] * LENGTHS[-1])


def test_noise_widens_the_interval_and_the_interval_holds_the_truth() -> None:
    noise = [1.1, 0.9] * len(LENGTHS)
    found = fit(LENGTHS, [n * e for n, e in zip(LENGTHS, noise, strict=False)])
    assert found is not None
    assert found.low < 1 < found.high
    assert found.high - found.low > 0.01
    assert not found.within(1, 0.005)


def test_too_few_points_have_no_slope() -> None:
    assert fit([4], [1]) is None
    assert fit([4, 4], [1, 2]) is None
    two = fit([4, 8], [1, 2])
    assert two is not None
    assert (two.low, two.slope, two.high) == (1, 1, 1)


def test_rows_that_were_not_reached_are_left_out() -> None:
    rows = [
        {"status": "ok", "seq_len": n, "peak_bytes": n, "pass": "forward"} for n in (1, 2, 4, 8)
    ]
    rows += [{"status": "OOM", "seq_len": 16, "peak_bytes": None, "pass": "forward"}]
    rows += [{"status": "ok", "seq_len": 8, "peak_bytes": 9999, "pass": "forward_backward"}]
    found = growth_of(rows, **{"pass": "forward"})
    assert found is not None
    assert found.slope == pytest.approx(1)
    assert found.to_x == 8


def test_crossing_is_where_ours_becomes_and_stays_cheaper() -> None:
    xs = [float(n) for n in LENGTHS]
    linear, square = [1000 * x for x in xs], [x * x for x in xs]
    at = crossing(xs, linear, square)
    assert at == pytest.approx(1000)
    assert crossing(xs, square, linear) is None, "dearer at the end: nowhere"
    assert crossing(xs, [x / 2 for x in square], square) == xs[0], "cheaper everywhere"
    dips = [2.0, 0.5, 2.0, 0.5]
    assert crossing([1.0, 2.0, 4.0, 8.0], dips, [1.0] * 4) == pytest.approx(math.sqrt(4 * 8))
