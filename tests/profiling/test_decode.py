"""States of a long context, read off two steps, are the ones that streaming would give."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gma_bench.mixer import Mixer, State, state_bytes
from gma_bench.mixer.model import build_mixer
from gma_bench.profiling.decode import UnknownGrowth, state_at
from gma_bench.profiling.subject import form_of, resolve_mixer
from gma_bench.run.compose import choices, compose

CONTEXT = 37


def shapes(state: Any) -> Any:
    if isinstance(state, Tensor):
        return (
            tuple(state.shape),
            state.dtype,
            None if state.is_floating_point() else state.tolist(),
        )
    if isinstance(state, dict):
        return {name: shapes(value) for name, value in state.items()}
    return state


def streamed(mixer: Mixer, context: int) -> State:
    state = mixer.init_state(2)
    with torch.no_grad():
        for _ in range(context):
            _, state = mixer.step(torch.randn(2, mixer.d_model), state)
    return state


@pytest.mark.parametrize("name", [name for name in choices("mixer") if name != "external"])
def test_a_made_up_state_is_like_a_streamed_one(name: str) -> None:
    config = resolve_mixer(compose(["task=throughput", "scale=smoke", f"mixer={name}"]).mixer)
    if not form_of(config, True):
        pytest.skip("has no causal form")
    mixer = build_mixer(config, d_model=32, num_heads=2, causal=True, max_length=64).eval()
    made, real = state_at(mixer, CONTEXT, 2), streamed(mixer, CONTEXT)
    assert shapes(made) == shapes(real)
    assert state_bytes(made) == state_bytes(real)
    out, _ = mixer.step(torch.randn(2, 32), made)
    assert out.isfinite().all()


def test_a_made_up_cache_is_not_copied_by_the_steps_that_are_timed() -> None:
    mixer = build_mixer(
        resolve_mixer(compose(["mixer=sdpa"]).mixer), d_model=32, num_heads=2, causal=True, max_length=64
    )  # fmt: skip
    made, x = state_at(mixer, CONTEXT, 2), torch.randn(2, 32)
    with torch.no_grad():
        after = [mixer.step(x, made)[1] for _ in range(3)]
    assert {s["keys"].data_ptr() for s in after} == {made["keys"].data_ptr()}
    assert {s["keys"].shape[2] for s in after} == {CONTEXT + 1}, "each at the same context"


class Doubling(Mixer):
    """A cache that doubles when it is full: two steps do not tell how it grows."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.weight = torch.nn.Parameter(torch.ones(4))

    def init_state(self, batch_size: int) -> State:
        return {"cache": torch.zeros(batch_size, 1, 4), "used": 0}

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        cache, used = state["cache"], state["used"]
        if used == cache.shape[1]:
            cache = torch.cat((cache, torch.zeros(len(cache), 2 * used, 4)), 1)
        return x_t, {"cache": cache, "used": used + 1}


def test_a_state_that_grows_otherwise_is_streamed_or_refused() -> None:
    made = state_at(Doubling(), 10, 1)
    assert made["used"] == 10
    assert made["cache"].shape[1] >= 10
    with pytest.raises(UnknownGrowth):
        state_at(Doubling(), 100_000, 1)
