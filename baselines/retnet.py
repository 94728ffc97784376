"""RetNet: retention, linear attention whose past fades at a fixed rate a head."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baselines.kernelized import CHUNK_SIZE
from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, State, zero_masked


def decay_rates(num_heads: int) -> Tensor:
    """``log γ`` of each head, ``γ_h = 1 − 2^(−5−h)`` (equation 8), ``(H,)``."""
    return torch.log1p(-(2.0 ** (-5.0 - torch.arange(num_heads))))


def retention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, chunk_size: int = CHUNK_SIZE
) -> Tensor:
    """``o_i = Σ_{j≤i} γ^{i−j} (q_i·k_j) v_j``, chunk by chunk (equation 7).

    Args:
        q, k: ``(B, H, N, d)``.
        v: ``(B, H, N, d_v)``.
        log_decay: ``log γ`` of each head, ``(H,)``.
        chunk_size: positions a chunk.

    Returns:
        ``(B, H, N, d_v)``.
    """
    n = q.shape[-2]
    chunk_size = min(chunk_size, n)
    q, k, v = (
        F.pad(t, (0, 0, 0, -n % chunk_size)).unflatten(2, (-1, chunk_size)) for t in (q, k, v)
    )
    position = torch.arange(chunk_size, device=q.device)
    rate = log_decay.to(q.dtype)[:, None]  # (H, 1)
    distance = position[:, None] - position  # (C, C)
    within = (rate[:, None] * distance.clamp_min(0)).exp() * (distance >= 0)  # (H, C, C)
    to_end = (rate * (chunk_size - 1 - position)).exp()[:, None, :, None]  # (H, 1, C, 1)
    from_start = (rate * (position + 1)).exp()[:, None, :, None]
    written = (k * to_end).transpose(-1, -2) @ v  # (B, H, T, d, d_v)
    state = _faded_sums(written, (rate * chunk_size).exp())
    out = ((q @ k.transpose(-1, -2)) * within[:, None]) @ v + (q * from_start) @ state
    return out.flatten(2, 3)[:, :, :n]


def _faded_sums(written: Tensor, decay: Tensor) -> Tensor:
    """State before each chunk, ``S_t = decay · S_{t−1} + written_{t−1}``, from zero."""
    states = [torch.zeros_like(written[:, :, 0])]
    for chunk in written[:, :, :-1].unbind(2):
        states.append(torch.addcmul(chunk, decay[..., None], states[-1]))
    return torch.stack(states, 2)


class RetNet(Mixer):
    """Multi-scale retention with a gate.

    Source: Sun et al., *Retentive Network* (2023), section 2: rotated queries and keys, a decay a
    head, a norm a head in place of a denominator, and a SiLU gate. Used bidirectionally, weights
    are ``γ^|i−j|``: both directions, with the position itself counted once.

    Args:
        d_model, num_heads, causal, max_length: as for every :class:`Mixer`; length is not limited.
        chunk_size: positions a chunk.

    Raises:
        SettingError: an odd head width, which cannot be rotated in pairs.
    """

    constant_state: ClassVar[bool] = True
    log_decay: Tensor
    frequency: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        if self.head_dim % 2:
            raise SettingError(
                "model.d_model",
                d_model,
                "an even multiple of model.num_heads",
                f"model.d_model={2 * d_model}",
            )
        self.chunk_size = chunk_size
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.gate_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        half = torch.linspace(0, 1, self.head_dim // 2)
        self.register_buffer("log_decay", decay_rates(num_heads), persistent=False)
        self.register_buffer("frequency", 10000.0**-half, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = zero_masked(x, mask)
        q, k, v = self._project(x, torch.arange(x.shape[1], device=x.device))
        with torch.autocast(x.device.type, enabled=False):
            out = retention(q, k, v, self.log_decay, self.chunk_size)
            if not self.causal:
                later = retention(
                    q.flip(2), k.flip(2), v.flip(2), self.log_decay, self.chunk_size
                ).flip(2)
                out = out + later - (q * k).sum(-1, keepdim=True) * v
        return zero_masked(self._gate(out, x), mask)

    def init_state(self, batch_size: int) -> State:
        """``state (B, H, head_dim, head_dim)``, zero, and ``position``."""
        weight = self.q_proj.weight
        shape = (batch_size, self.num_heads, self.head_dim, self.head_dim)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return {"state": weight.new_zeros(shape, dtype=dtype), "position": 0}

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        x = x_t.unsqueeze(1)
        q, k, v = self._project(x, torch.full((1,), state["position"], device=x.device))
        decay = self.log_decay.to(q.dtype).exp()[:, None, None]
        with torch.autocast(x.device.type, enabled=False):
            memory = decay * state["state"] + k.transpose(-1, -2) * v
            out = q @ memory
        state = {"state": memory, "position": state["position"] + 1}
        return self._gate(out, x).squeeze(1), state

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, ``(B, H, N, head_dim)``, in float32 at least."""
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        dtype = torch.promote_types(q.dtype, torch.float32)
        angle = positions.to(dtype).unsqueeze(-1) * self.frequency.to(dtype)  # (N, head_dim / 2)
        q, k = (_rotate(t.to(dtype), angle.cos(), angle.sin()) for t in (q, k))
        return q, k * self.head_dim**-0.5, v.to(dtype)

    def _gate(self, out: Tensor, x: Tensor) -> Tensor:
        """A norm a head, the gate, and the projection out (equation 8)."""
        out = self.merge_heads(F.rms_norm(out, (self.head_dim,), eps=1e-6))
        gate = F.silu(self.gate_proj(x))
        gated: Tensor = self.out_proj(gate * out.to(gate.dtype))
        return gated


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)
