"""Check and time GMA's kernels on a GPU, in one call of a few minutes: ``python -m benchmarks.gma_cuda``.

Needs torch, triton and ``gma_bench.ops`` alone; ``flash-linear-attention`` and ``mamba-ssm`` are
compared with where they are installed. Prints tables and writes JSON with the device's name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gma_bench.ops import LOGITS, gma

Row = dict[str, Any]
ROUNDS = 20
PRECISIONS = ("ieee", "tf32x3")
"""Precisions of the kernels' logits to compare: float32, and three tf32 products in its place."""


# ---------------------------------------------------------------- correctness


def tokens(
    batch: int, heads: int, length: int, width: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Vectors as a normalised projection leaves them."""
    x = torch.randn(batch, length, heads, width, device=device)
    return F.layer_norm(x, (width,)).to(dtype).transpose(1, 2)


def mixture(heads: int, components: int, width: int, variance: float, device: str) -> list[Tensor]:
    """Means, variances and log priors."""
    shape = heads, components, width
    variances = torch.rand(shape, device=device).add(0.5).mul(variance)
    return [torch.randn(shape, device=device), variances, torch.zeros(shape[:2], device=device)]


def evaluate(leaves: list[Tensor], upstream: Tensor, call: Callable[..., Tensor]) -> list[Tensor]:
    """Output and gradients, in float64."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = call(*leaves)
    grads = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    return [t.detach().double() for t in (out, *grads)]


def checks(device: str, small: bool) -> Iterator[Row]:
    """Relative errors of output and gradients against the float64 reference, and repeatability.

    Within 1e-5 (bfloat16: 1e-2), or four times what the direct form loses in float32: between
    components that share a token equally, gradients cancel to little and no float32 carries them.
    """
    sizes = [(64, 64), (128, 64), (256, 128), (512, 128), (48, 80)]
    for dtype in (torch.float32, torch.bfloat16):
        for components, width in sizes[: 1 if small else None]:
            for causal in (False, True):
                for variance in (1.0, float(width)):
                    yield _check(device, dtype, components, width, causal, variance, small)


def _check(
    device: str,
    dtype: torch.dtype,
    components: int,
    width: int,
    causal: bool,
    variance: float,
    small: bool,
) -> Row:
    torch.manual_seed(0)
    length = 40 if small else 333
    batch = 1 if small or components * width > 128 * 64 else 2
    leaves = [tokens(batch, 2, length, width, dtype, device) for _ in range(3)]
    leaves += mixture(2, components, width, variance, device)
    key_mask = torch.rand(batch, length, device=device) > 0.3
    upstream = tokens(batch, 2, length, width, dtype, device)

    def call(backend: str) -> Callable[..., Tensor]:
        return lambda *x: gma(*x, causal=causal, key_mask=key_mask, backend=backend)

    want = evaluate([leaf.double() for leaf in leaves], upstream, call("reference"))
    direct = evaluate([leaf.float() for leaf in leaves], upstream, call("reference"))
    got, again = (evaluate(leaves, upstream, call("triton")) for _ in range(2))
    errors, floor = ([_error(a, b) for a, b in zip(x, want, strict=True)] for x in (got, direct))
    allowed = 1e-5 if dtype == torch.float32 else 1e-2
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "K": components,
        "d": width,
        "causal": causal,
        "variance": variance,
        "error_out": errors[0],
        "error_grads": max(errors[1:]),
        "direct_out": floor[0],
        "direct_grads": max(floor[1:]),
        "within": all(e < max(allowed, 4 * f) for e, f in zip(errors, floor, strict=True)),
        "repeats": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
    }


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


# ---------------------------------------------------------------- speed


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    """Median time on the device; NaN without one."""
    if not torch.cuda.is_available():
        run()
        return float("nan")
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def subjects(
    q: Tensor, k: Tensor, v: Tensor, parameters: list[Tensor], causal: bool
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """What is timed: a forward pass, and the tensors that it has gradients for."""
    everything = [q, k, v, *parameters]
    found: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {}
    for precision in PRECISIONS:
        name = "gma" if precision == LOGITS else f"gma, {precision} logits"
        found[name] = (
            lambda precision=precision: torch.ops.gma_bench.gma_fused(  # type: ignore[misc]
                *everything, None, causal, 1e-6, precision
            )[0],
            everything,
        )
    found["gma, chunked"] = (
        lambda: gma(q, k, v, *parameters, causal=causal, backend="chunked"),
        everything,
    )
    found["FlashAttention"] = (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        [q, k, v],
    )
    if causal and importlib.util.find_spec("fla"):
        from fla.ops.linear_attn import chunk_linear_attn

        by_token = [x.transpose(1, 2) for x in (q, k, v)]
        found["fla chunk_linear_attn"] = lambda: chunk_linear_attn(*by_token)[0], [q, k, v]
    if causal and importlib.util.find_spec("mamba_ssm"):
        found["mamba-ssm scan"] = _mamba_scan(q)
    return found


def _mamba_scan(q: Tensor) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """The selective scan of as many channels, with the state size of Mamba's own default."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    batch, heads, length, width = q.shape
    options: dict[str, Any] = {"device": q.device, "dtype": q.dtype}
    shape = batch, heads * width, length
    u, delta = (torch.randn(shape, **options).requires_grad_() for _ in range(2))
    b, c = (torch.randn(batch, 16, length, **options) for _ in range(2))
    a = -torch.rand(heads * width, 16, device=q.device)
    return lambda: selective_scan_fn(u, delta, a, b, c, delta_softplus=True), [u, delta]


def counted_bytes(q: Tensor, v: Tensor, parameters: list[Tensor], backward: bool) -> int:
    """Bytes that have to move: every tensor that a pass is given or gives, once.

    Forward is given q, k, v and the parameters, and gives O. Backward is given these, O and its
    gradient, and gives the gradients of the rest.
    """
    tokens_bytes, values_bytes = 2 * q.nbytes, v.nbytes
    parameters_bytes = sum(t.nbytes for t in parameters)
    forward = tokens_bytes + 2 * values_bytes + parameters_bytes
    if not backward:
        return forward
    return forward + 2 * (tokens_bytes + values_bytes + parameters_bytes) + 2 * values_bytes


def counted_flops(run: Callable[[], object]) -> int:
    """Operations of the matrix products, by the operators' own formulas."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def bandwidth(device: str, small: bool) -> float:
    """Bytes a second of a large copy: the roof of what is limited by memory."""
    source = torch.zeros(1 << (16 if small else 28), device=device)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / milliseconds(lambda: target.copy_(source), ROUNDS)


def throughput(device: str, dtype: torch.dtype, small: bool) -> float:
    """Operations a second of a large square product: the roof of what is limited by arithmetic."""
    n = 64 if small else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2e3 * n**3 / milliseconds(lambda: a @ a, ROUNDS)


def timings(device: str, small: bool) -> Iterator[Row]:
    """Forward, and forward and backward, at several lengths, beside the roofline of GMA's counts."""
    dtype = torch.bfloat16
    components, width, heads = (16, 16, 2) if small else (64, 64, 16)
    roofs = bandwidth(device, small), throughput(device, dtype, small)
    for length in (48,) if small else (4096, 16384, 65536):
        batch = 1 if small else 65536 // length
        for causal in (False, True):
            torch.manual_seed(0)
            q, k, v, upstream = (
                tokens(batch, heads, length, width, dtype, device).contiguous() for _ in range(4)
            )
            parameters = mixture(heads, components, width, float(width), device)
            for leaf in (q, k, v, *parameters):
                leaf.requires_grad_()
            for name, (call, leaves) in subjects(q, k, v, parameters, causal).items():
                size = {"subject": name, "batch": batch, "N": length, "causal": causal}
                counts = None if name == "gma, chunked" or "gma" not in name else parameters
                yield size | _timing(call, leaves, upstream, counts, roofs)


def _timing(
    call: Callable[[], Tensor],
    leaves: list[Tensor],
    upstream: Tensor,
    counts: list[Tensor] | None,
    roofs: tuple[float, float],
) -> Row:
    """Times of one subject, and with ``counts`` (the mixture) the share of the roofline reached."""

    def both() -> object:
        out = call()
        return torch.autograd.grad(out, leaves, upstream.reshape(out.shape))

    row: Row = {}
    for kind, run in (("forward", call), ("both", both)):
        row[f"{kind}_ms"] = milliseconds(run, ROUNDS)
        if counts is not None:
            flops = counted_flops(run)
            moved = counted_bytes(leaves[0], leaves[2], counts, kind == "both")
            roof = max(moved / roofs[0], flops / roofs[1])
            row |= {f"{kind}_flops": flops, f"{kind}_bytes": moved}
            row[f"{kind}_roofline"] = 1e3 * roof / row[f"{kind}_ms"]
    return row


# ---------------------------------------------------------------- output


def show(title: str, rows: list[Row]) -> None:
    """A table of plain text."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [columns] + [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def main() -> int:
    """Run everything; 1 if a check fails."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.gma_cuda", description=__doc__)
    options.add_argument("--out", type=Path, default=Path("results/gma_cuda.json"))
    options.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny sizes on the CPU under TRITON_INTERPRET=1: whether the script runs, no times",
    )
    chosen = options.parse_args()
    if not chosen.dry_run and not torch.cuda.is_available():
        options.error("no CUDA device here (--dry-run tries the script without one)")
    device = "cpu" if chosen.dry_run else "cuda"
    name = platform.machine() if chosen.dry_run else torch.cuda.get_device_name()
    checked = list(checks(device, chosen.dry_run))
    show(f"accuracy on {name}", checked)
    timed = list(timings(device, chosen.dry_run))
    show(f"time on {name}", timed)
    record = {
        "device": name,
        "torch": torch.__version__,
        "dry_run": chosen.dry_run,
        "checks": checked,
        "timings": timed,
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    failed = [row for row in checked if not (row["repeats"] and row["within"])]
    if failed:
        show("FAILED", failed)
    else:
        print("\nall checks passed")
    print(f"written: {chosen.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
