"""Context parallelism: several processes give what one gives, and send the same at any length."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gma_bench.ops.parallel import TRAFFIC, context_parallel_gma
from tests.ops.cases import Case, evaluate, make

LENGTHS = {2: (70, 130), 4: (64, 1, 100, 35)}  # unequal shares, one of a single token


def _case(length: int, causal: bool) -> Case:
    return make(2, 2, length, causal=causal, masked=True, seed=3)


def _share(rank: int, world: int, length: int) -> slice:
    shares = LENGTHS[world]
    scale = length // sum(shares)
    start = sum(shares[:rank]) * scale
    return slice(start, start + shares[rank] * scale)


def _worker(rank: int, world: int, folder: str, causal: bool, length: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    case = _case(length, causal)
    mine = _share(rank, world, length)
    tokens = [t[:, :, mine].float().requires_grad_() for t in case.tensors[:3]]
    parameters = [t.float().requires_grad_() for t in case.tensors[3:]]
    assert case.key_mask is not None
    out = context_parallel_gma(*tokens, *parameters, causal=causal, key_mask=case.key_mask[:, mine])
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(*case.tensors[2].shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out, tokens + parameters, upstream[:, :, mine].float())
    for grad in grads[3:]:
        dist.all_reduce(grad)
    torch.save((out.detach(), grads, TRAFFIC.sent_bytes), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _run(world: int, causal: bool, length: int = 200) -> tuple[list[torch.Tensor], list[int]]:
    """Output and gradients of the whole sequence, and the bytes that each process sent."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(world, folder, causal, length), nprocs=world)
        parts = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
    tokens = [torch.cat([part[1][i] for part in parts], 2).double() for i in range(3)]
    out = torch.cat([part[0] for part in parts], 2).double()
    return [out, *tokens, *(g.double() for g in parts[0][1][3:])], [part[2] for part in parts]


def _agree(world: int, causal: bool) -> None:
    got, _ = _run(world, causal)
    want = evaluate(_case(200, causal), "reference", torch.float64)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_two_processes_agree_with_one(causal: bool) -> None:
    _agree(2, causal)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_four_processes_agree_with_one(causal: bool) -> None:
    _agree(4, causal)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_traffic_does_not_grow_with_length(causal: bool) -> None:
    _, short = _run(2, causal, 200)
    _, long = _run(2, causal, 2000)
    assert short == long
    state_bytes = 2 * 2 * 8 * (8 + 1) * 4  # B · H · K · (d_v + 1) float32
    assert short == [2 * state_bytes] * 2  # once forward, once backward
