"""How fast every mixer is at 4096 tokens, beside the packages that three of them are known from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gma_bench.mixer.model import build_mixer
from gma_bench.run.compose import choices, compose

SEQ_LEN, D_MODEL, NUM_HEADS, STATE = 4096, 256, 4, 256
ROUNDS = 5


class Subject(NamedTuple):
    """Something timed; ``against`` names the subject that it is measured against."""

    mixer: str
    form: str
    module: nn.Module
    against: str | None = None


def subjects(seq_len: int = SEQ_LEN) -> list[Subject]:
    """Every mixer in every form it has, and the packages."""
    found = []
    packages = {"mamba": ("causal", "mambapy"), "linformer": ("bidirectional", "linformer package"),
                "performer": ("bidirectional", "performer-pytorch")}  # fmt: skip
    for name in choices("mixer"):
        if name == "external":
            continue
        config = compose([f"mixer={name}", f"scale.listops.num_components={STATE}"])
        for form in config.mixer.get("forms", ("bidirectional", "causal")):
            torch.manual_seed(0)
            mixer = build_mixer(
                config.mixer, d_model=D_MODEL, num_heads=NUM_HEADS, causal=form == "causal",
                max_length=seq_len,
            )  # fmt: skip
            known = packages.get(name, ("", ""))
            found.append(Subject(name, form, mixer, known[1] if known[0] == form else None))
    return found + [Subject(label, form, build(seq_len)) for label, form, build in _packages()]


def _packages() -> list[tuple[str, str, Callable[[int], nn.Module]]]:
    from linformer import LinformerSelfAttention
    from mambapy.mamba import MambaBlock, MambaConfig
    from performer_pytorch import SelfAttention

    def mambapy(seq_len: int) -> nn.Module:
        return MambaBlock(MambaConfig(d_model=D_MODEL, n_layers=1))

    def performer(seq_len: int) -> nn.Module:
        head_dim = D_MODEL // NUM_HEADS
        return SelfAttention(D_MODEL, heads=NUM_HEADS, dim_head=head_dim, nb_features=STATE)

    def linformer(seq_len: int) -> nn.Module:
        return LinformerSelfAttention(D_MODEL, seq_len, k=STATE, heads=NUM_HEADS)

    return [
        ("mambapy", "causal", mambapy), ("performer-pytorch", "bidirectional", performer),
        ("linformer package", "bidirectional", linformer),
    ]  # fmt: skip


def once(module: nn.Module, x: Tensor) -> tuple[float, float]:
    """Milliseconds of a forward pass, and of that and its backward pass."""
    start = time.perf_counter()
    y = module(x)
    forward = time.perf_counter()
    y.sum().backward()
    end = time.perf_counter()
    module.zero_grad(set_to_none=True)
    return 1e3 * (forward - start), 1e3 * (end - start)


def rows(rounds: int = ROUNDS, seq_len: int = SEQ_LEN) -> Iterator[dict[str, object]]:
    """Measure; a row a mixer and form.

    Subjects take turns within a round, so that whatever else the machine does hits all alike, and
    a ratio is the median of the rounds' ratios. Below one is faster than the package.
    """
    torch.manual_seed(0)
    x = torch.randn(1, seq_len, D_MODEL, requires_grad=True)
    timed = subjects(seq_len)
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):
        for subject in timed:
            times = once(subject.module, x)
            if number:  # the first round warms up
                taken.setdefault((subject.mixer, subject.form), []).append(times)
    for subject in timed:
        mine = taken[subject.mixer, subject.form]
        theirs = taken.get((subject.against or "", subject.form))
        yield {
            "benchmark": "mixers",
            "mixer": subject.mixer,
            "form": subject.form,
            "seq_len": seq_len,
            "parameters": sum(p.numel() for p in subject.module.parameters()),
            "forward_ms": statistics.median(f for f, _ in mine),
            "forward_backward_ms": statistics.median(b for _, b in mine),
            "against": subject.against,
            "forward_ratio": _ratio(mine, theirs, 0),
            "forward_backward_ratio": _ratio(mine, theirs, 1),
        }


def _ratio(
    mine: list[tuple[float, float]], theirs: list[tuple[float, float]] | None, which: int
) -> float | None:
    if theirs is None:
        return None
    return statistics.median(a[which] / b[which] for a, b in zip(mine, theirs, strict=True))
