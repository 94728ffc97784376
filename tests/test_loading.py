"""The order of batches: complete, seeded, resumable at any step, shared between ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gma_bench.task.loading import EvaluationBatches, TrainingBatches

sizes = st.integers(1, 300)


def batches(
    size: int, batch_size: int, total: int, seed: int = 0, **more: object
) -> list[list[int]]:
    return list(TrainingBatches(size, batch_size, total, seed, **more))  # type: ignore[arg-type]


@given(sizes, st.integers(1, 16), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_example_is_seen_before_any_is_seen_twice(
    size: int, batch_size: int, seed: int
) -> None:
    passes = 3
    stream = [
        i for b in batches(size, batch_size, -(-passes * size // batch_size), seed) for i in b
    ]
    for p in range(passes):
        assert sorted(stream[p * size : (p + 1) * size]) == list(range(size))


@given(sizes, st.integers(1, 16), st.integers(1, 200), st.data())
@settings(max_examples=60, deadline=None)
def test_a_run_goes_on_where_it_was_stopped(
    size: int, batch_size: int, total: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, total))
    lengths = data.draw(st.sampled_from([None, np.arange(size) % 7]))
    whole = batches(size, batch_size, total, 5, lengths=lengths)
    assert len(whole) == total
    assert batches(size, batch_size, total, 5, lengths=lengths, start=start) == whole[start:]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_each_batch(world_size: int) -> None:
    whole = batches(50, 8, 20, 3)
    parts = [batches(50, 8, 20, 3, rank=r, world_size=world_size) for r in range(world_size)]
    for i, batch in enumerate(whole):
        assert sorted(x for part in parts for x in part[i]) == sorted(batch)


def test_buckets_hold_sequences_of_about_one_length_and_lose_none() -> None:
    size, batch_size = 640, 10
    lengths = np.random.default_rng(0).integers(1, 1000, size)
    found = batches(size, batch_size, size // batch_size, lengths=lengths)
    assert sorted(i for b in found for i in b) == list(range(size))
    spread = np.mean([np.ptp(lengths[b]) for b in found])
    plain = np.mean([np.ptp(lengths[b]) for b in batches(size, batch_size, size // batch_size)])
    assert spread < plain / 5
    middles = [lengths[b].mean() for b in found]
    assert middles != sorted(middles), "batches must not come in order of length"


def test_seeds_differ() -> None:
    assert batches(100, 10, 10, 0) != batches(100, 10, 10, 1)


@given(sizes, st.integers(1, 16), st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_evaluation_takes_every_example_once_over_all_ranks(
    size: int, batch_size: int, world_size: int, bucketed: bool
) -> None:
    lengths = np.arange(size)[::-1] % 5 if bucketed else None
    parts = [
        EvaluationBatches(size, batch_size, rank=r, world_size=world_size, lengths=lengths)
        for r in range(world_size)
    ]
    assert sorted(i for p in parts for b in p for i in b) == list(range(size))
    assert all(len(list(p)) == len(p) for p in parts)
