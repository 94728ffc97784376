"""Context parallelism: several processes give what one gives, and send the same at any length."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gma_bench import GaussianMixtureAttention
from gma_bench.ops.parallel import TRAFFIC, context_parallel_gma
from tests.ops.cases import Case, evaluate, make

LENGTHS = {2: (70, 130), 4: (64, 1, 100, 35)}  # unequal shares, one of a single token
LENGTH, LONGER = 200, 2000
WORLDS = [pytest.param(2, id="two"), pytest.param(4, id="four", marks=pytest.mark.slow)]

pytestmark = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])


def _case(length: int, causal: bool) -> Case:
    return make(2, 2, length, causal=causal, masked=True, seed=3)


def _module(causal: bool) -> tuple[GaussianMixtureAttention, Any, Any, Any]:
    """A mixer, tokens ``(2, N, 16)``, a mask with a sequence of padding, a gradient from above."""
    torch.manual_seed(5)
    mixer = GaussianMixtureAttention(16, 2, causal, num_components=8)
    x, upstream = torch.randn(2, 2, LENGTH, 16)
    mask = torch.rand(2, LENGTH) > 0.3
    mask[0] = False
    return mixer, x, mask, upstream


def _share(rank: int, world: int, length: int) -> slice:
    shares = LENGTHS[world]
    scale = length // sum(shares)
    start = sum(shares[:rank]) * scale
    return slice(start, start + shares[rank] * scale)


def _worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    results = {}
    for causal in (False, True):
        for length in (LENGTH, LONGER):
            results[f"function {causal} {length}"] = _function(rank, world, causal, length)
        results[f"module {causal}"] = _mixer(rank, world, causal)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _function(rank: int, world: int, causal: bool, length: int) -> dict[str, Any]:
    """This process's part of output and gradients, and the bytes that it sent."""
    case, mine = _case(length, causal), _share(rank, world, length)
    tokens = [t[:, :, mine].float().requires_grad_() for t in case.tensors[:3]]
    parameters = [t.float().requires_grad_() for t in case.tensors[3:]]
    assert case.key_mask is not None
    TRAFFIC.sent_bytes = 0
    out = context_parallel_gma(*tokens, *parameters, causal=causal, key_mask=case.key_mask[:, mine])
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(*case.tensors[2].shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out, tokens + parameters, upstream[:, :, mine].float())
    sent_bytes = TRAFFIC.sent_bytes
    for grad in grads[3:]:
        dist.all_reduce(grad)
    return {"own": [out.detach(), *grads[:3]], "same": list(grads[3:]), "sent_bytes": sent_bytes}


def _mixer(rank: int, world: int, causal: bool) -> dict[str, Any]:
    mixer, x, mask, upstream = _module(causal)
    mixer.context_group = dist.group.WORLD
    mine = _share(rank, world, LENGTH)
    tokens = x[:, mine].clone().requires_grad_()
    TRAFFIC.sent_bytes = 0
    out = mixer(tokens, mask[:, mine])
    out.backward(upstream[:, mine])
    sent_bytes = TRAFFIC.sent_bytes
    for parameter in mixer.parameters():
        dist.all_reduce(parameter.grad)
    same = [parameter.grad for parameter in mixer.parameters()]
    return {"own": [out.detach(), tokens.grad], "same": same, "sent_bytes": sent_bytes}


@cache
def _run(world: int) -> list[dict[str, Any]]:
    """What each process gave; processes are started once for all the tests."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(world, folder), nprocs=world)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _whole(world: int, key: str, dim: int) -> list[torch.Tensor]:
    parts = [part[key] for part in _run(world)]
    own = [torch.cat(tensors, dim) for tensors in zip(*(p["own"] for p in parts), strict=True)]
    return own + parts[0]["same"]


def _assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("world", WORLDS)
def test_the_function_over_processes_agrees_with_one(world: int, causal: bool) -> None:
    got = _whole(world, f"function {causal} {LENGTH}", 2)
    _assert_close(got, evaluate(_case(LENGTH, causal), "reference", torch.float64))


@pytest.mark.parametrize("world", WORLDS)
def test_the_module_over_processes_agrees_with_one(world: int, causal: bool) -> None:
    mixer, x, mask, upstream = _module(causal)
    x.requires_grad_()
    out = mixer(x, mask)
    out.backward(upstream)
    want = [out.detach(), x.grad, *(p.grad for p in mixer.parameters())]
    _assert_close(_whole(world, f"module {causal}", 1), want)


@pytest.mark.parametrize("world", WORLDS)
def test_traffic_is_counted_and_does_not_grow_with_length(world: int, causal: bool) -> None:
    def sent(key: str) -> list[int]:
        return [part[key]["sent_bytes"] for part in _run(world)]

    state_bytes = 2 * 2 * 8 * (8 + 1) * 4  # B · H · K · (d_v + 1) float32
    once_each_way = [2 * state_bytes] * world
    for length in (LENGTH, LONGER):
        assert sent(f"function {causal} {length}") == once_each_way
    assert sent(f"module {causal}") == once_each_way
