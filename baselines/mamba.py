"""Mamba: a selective state space model with a short convolution and a gate."""

from __future__ import annotations

import importlib.util
import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.selective_scan import selective_scan
from gma_bench.errors import MissingExtra, SettingError
from gma_bench.mixer import Mixer, State, zero_masked

Backend = Literal["auto", "torch", "mamba_ssm"]


class Mamba(Mixer):
    """The Mamba block's mixer.

    Source: Gu and Dao, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces* (2023),
    sections 3.2–3.4, with the authors' initialisation. It has no heads; ``num_heads`` is ignored.

    Used bidirectionally (classification), it is two Mambas that share the projections in and out:
    each direction has its own convolution and state space, the backward one reads the reversed
    sequence, and the sum of both is gated (Zhu et al., *Vision Mamba*, 2024, algorithm 1).

    A masked position enters neither the convolution nor the state, and the state passes it as if
    no time had gone by (Δ = 0).

    Args:
        d_model, num_heads, causal, max_length: as for every :class:`Mixer`; length is not limited.
        d_state: S, states a channel.
        d_conv: width of the convolution.
        expand: channels, as a multiple of ``d_model``.
        backend: ``torch``, the scan in plain torch; ``mamba_ssm``, the authors' CUDA kernel;
            ``auto``, the kernel where it is installed and the input is on a CUDA device.

    Raises:
        SettingError: a size below 1, or an unknown ``backend``.
        MissingExtra: ``backend=mamba_ssm`` without that package.
    """

    constant_state: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        for name, value in (("d_state", d_state), ("d_conv", d_conv), ("expand", expand)):
            if value < 1:
                raise SettingError(f"mixer.{name}", value, "at least 1", f"mixer.{name}=2")
        if backend not in ("auto", "torch", "mamba_ssm"):
            raise SettingError(
                "mixer.backend", backend, "auto, torch or mamba_ssm", "mixer.backend=auto"
            )
        if backend == "mamba_ssm" and importlib.util.find_spec("mamba_ssm") is None:
            raise MissingExtra("mamba-ssm", "cuda", "mixer.backend=mamba_ssm")
        inner = expand * d_model
        self.in_proj = nn.Linear(d_model, 2 * inner, bias=False)
        sizes = (inner, math.ceil(d_model / 16), d_state, d_conv)
        self.ssm = SelectiveSSM(*sizes, backend)
        self.backward_ssm = None if causal else SelectiveSSM(*sizes, backend)
        self.out_proj = nn.Linear(inner, d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        inner, gate = self.in_proj(zero_masked(x, mask)).chunk(2, -1)
        y = self.ssm(inner, mask)
        if self.backward_ssm is not None:
            reversed_mask = None if mask is None else mask.flip(1)
            y = y + self.backward_ssm(inner.flip(1), reversed_mask).flip(1)
        return zero_masked(self.out_proj(y * F.silu(gate)), mask)

    def init_state(self, batch_size: int) -> State:
        """``inputs (B, D, d_conv)``, the convolution's window, and ``hidden (B, D, S)``; zero."""
        weight, (width, d_state) = self.ssm.A_log, self.ssm.A_log.shape
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return {
            "inputs": weight.new_zeros(batch_size, width, self.ssm.conv.weight.shape[-1]),
            "hidden": weight.new_zeros(batch_size, width, d_state, dtype=dtype),
        }

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        inner, gate = self.in_proj(x_t).chunk(2, -1)
        y, state = self.ssm.step(inner, state)
        return self.out_proj(y * F.silu(gate)), state


class SelectiveSSM(nn.Module):
    """One direction: causal depthwise convolution, SiLU, selective scan, skip.

    Args:
        width: D, channels.
        dt_rank: rank of the projection to Δ.
        d_state, d_conv, backend: as in :class:`Mamba`.
    """

    def __init__(
        self, width: int, dt_rank: int, d_state: int, d_conv: int, backend: Backend
    ) -> None:
        super().__init__()
        self.dt_rank, self.d_state, self.backend = dt_rank, d_state, backend
        self.conv = nn.Conv1d(width, width, d_conv, groups=width)
        self.x_proj = nn.Linear(width, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, width)
        # The authors' initialisation: A = −1 … −S, and Δ log-uniform in [0.001, 0.1].
        nn.init.uniform_(self.dt_proj.weight, -(dt_rank**-0.5), dt_rank**-0.5)
        dt = (torch.rand(width) * math.log(0.1 / 0.001) + math.log(0.001)).exp().clamp_min(1e-4)
        with torch.no_grad():
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus⁻¹(Δ)
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``(B, N, D)`` to the same shape; masked positions of ``x`` are already zero."""
        window = self.conv.weight.shape[-1]
        x = self.conv(F.pad(x.transpose(1, 2), (window - 1, 0))).transpose(1, 2)
        x = zero_masked(F.silu(x), mask)
        dt, b, c = self._selection(x)
        y = self._scan(x, zero_masked(dt, mask), -self.A_log.exp(), b, c)
        return (y + self.D * x).to(x.dtype)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """One position, ``(B, D)``."""
        inputs = torch.cat((state["inputs"][..., 1:], x_t.unsqueeze(-1)), -1)
        x = F.silu(self.conv(inputs).squeeze(-1))
        dt, b, c = (t.to(state["hidden"].dtype) for t in self._selection(x))
        decay = (dt.unsqueeze(-1) * -self.A_log.exp()).exp()  # (B, D, S)
        hidden = decay * state["hidden"] + (dt * x).unsqueeze(-1) * b.unsqueeze(1)
        y = (hidden @ c.unsqueeze(-1)).squeeze(-1) + self.D * x
        return y.to(x.dtype), {"inputs": inputs, "hidden": hidden}

    def _selection(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Δ ``(…, D)``, B and C ``(…, S)``, which depend on the input."""
        dt, b, c = self.x_proj(x).split((self.dt_rank, self.d_state, self.d_state), -1)
        return F.softplus(self.dt_proj(dt)), b, c

    def _scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        installed = importlib.util.find_spec("mamba_ssm") is not None
        if self.backend == "mamba_ssm" or (self.backend == "auto" and x.is_cuda and installed):
            return _mamba_ssm_scan(x, dt, a, b, c)
        return selective_scan(x, dt, a, b, c)


def _mamba_ssm_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The authors' kernel, which wants the length last, A in float32 and one dtype for the rest."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    x, dt, b, c = (t.to(x.dtype).transpose(1, 2).contiguous() for t in (x, dt, b, c))
    out: Tensor = selective_scan_fn(x, dt, a.float(), b, c)
    return out.transpose(1, 2)
