"""Performer: softmax attention approximated with positive orthogonal random features (FAVOR+)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from baselines.kernelized import CHUNK_SIZE, kernelized_attention, kernelized_step
from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, State, zero_masked

TINY = 1e-20  # keeps 0/0 at zero where no key is real; far below any sum of features


def orthogonal_random_matrix(
    num_features: int, head_dim: int, generator: torch.Generator | None = None
) -> Tensor:
    """Gaussian directions, orthogonal within blocks of ``head_dim``, with Gaussian vectors' norms.

    Source: Choromanski et al., *Rethinking Attention with Performers* (ICLR 2021), section 2.4.

    Returns:
        ``(num_features, head_dim)``, float32 on the CPU.
    """
    blocks = []
    for _ in range(math.ceil(num_features / head_dim)):
        q, r = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))
        blocks.append(q * r.diagonal().sign())  # without the sign, Q is not uniform
    norms = torch.randn(num_features, head_dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:num_features] * norms


def largest_of_position(exponent: Tensor) -> Tensor:
    """The largest exponent of each position, ``(B, H, N, m) -> (B, H, N, 1)``."""
    return exponent.amax(-1, keepdim=True)


def softmax_features(
    x: Tensor,
    projection: Tensor,
    stabilizer: Callable[[Tensor], Tensor] = largest_of_position,
    eps: float = 1e-4,
) -> Tensor:
    """Positive random features of the softmax kernel, ``E[φ(q)·φ(k)] ∝ exp(q·k / √d)``.

    ``φ(x) = (exp(w·x' − |x'|²/2 − c) + ε) / √m`` with ``x' = x / d^¼`` (lemma 1 of the paper; the
    ε as in the authors' code). c cancels between numerator and denominator, but for ε.

    Args:
        x: ``(B, H, N, d)``.
        projection: ``(m, d)``.
        stabilizer: gives c from the exponents ``w·x'`` ``(B, H, N, m)``.
        eps: ε.

    Returns:
        ``(B, H, N, m)``.
    """
    x = x * x.shape[-1] ** -0.25
    exponent = x @ projection.transpose(0, 1)
    ratio = projection.shape[0] ** -0.5
    below = 0.5 * x.square().sum(-1, keepdim=True) + stabilizer(exponent.detach()) - math.log(ratio)
    # In place, as nothing before the exponential is needed again and this is where the time goes.
    return exponent.sub_(below).exp_() + eps * ratio


class Performer(Mixer):
    """Multi-head FAVOR+ attention.

    Source: Choromanski et al. (ICLR 2021), sections 2.3–2.4, positive features. The maximum that
    stabilises the keys is taken over all real keys of a head, as in the authors' code; in a
    causal mixer it would let later tokens reach earlier ones through ε, so there it is a constant
    that depends on the projection alone.

    Args:
        d_model, num_heads, causal, max_length: as for every :class:`Mixer`; length is not limited.
        num_features: m, random features.
        redraw_interval: forward passes in training between two draws of the projection; ``None``
            keeps the first. Which matrix a pass uses depends on the seed and the number of passes
            only, and both are in the state dict: a resumed run goes on as it would have.
        chunk_size: positions a chunk of the causal form.
        eps: ε of the features.

    Raises:
        SettingError: ``num_features`` or ``redraw_interval`` below 1.
    """

    constant_state: ClassVar[bool] = True
    projection: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        num_features: int = 256,
        redraw_interval: int | None = 1000,
        chunk_size: int = CHUNK_SIZE,
        eps: float = 1e-4,
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        if num_features < 1:
            raise SettingError(
                "mixer.num_features", num_features, "at least 1", "mixer.num_features=64"
            )
        if redraw_interval is not None and redraw_interval < 1:
            raise SettingError(
                "mixer.redraw_interval",
                redraw_interval,
                "at least 1, or null",
                "mixer.redraw_interval=1000",
            )
        self.num_features, self.redraw_interval = num_features, redraw_interval
        self.chunk_size, self.eps = chunk_size, eps
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self._seed, self._passes = int(torch.randint(2**31, ())), 0
        self.register_buffer("projection", self._draw(0))

    def _draw(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed + number)
        return orthogonal_random_matrix(self.num_features, self.head_dim, generator)

    def get_extra_state(self) -> Tensor:
        """Seed and passes so far: which matrix comes next."""
        return torch.tensor([self._seed, self._passes])

    def set_extra_state(self, state: Tensor) -> None:
        self._seed, self._passes = (int(value) for value in state)

    @torch.compiler.disable  # else every pass has a new count, and compiles anew
    def _count_pass(self, interval: int) -> None:
        if self._passes and self._passes % interval == 0:
            self.projection.copy_(self._draw(self._passes // interval))
        self._passes += 1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.training and self.redraw_interval is not None:
            self._count_pass(self.redraw_interval)
        x = zero_masked(x, mask)
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        with torch.autocast(x.device.type, enabled=False):
            features_q, features_k = self._features(q, k, mask)
            out = kernelized_attention(
                features_q,
                features_k,
                v,
                causal=self.causal,
                mask=mask,
                chunk_size=self.chunk_size,
                eps=TINY,
            )
        return zero_masked(self.out_proj(self.merge_heads(out)), mask)

    def _features(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        # Exponentials of inner products: too coarse below float32.
        dtype = torch.promote_types(q.dtype, torch.float32)
        projection, q, k = self.projection.to(dtype), q.to(dtype), k.to(dtype)
        of_keys = partial(_constant, projection) if self.causal else partial(_largest, mask)
        return (
            softmax_features(q, projection, eps=self.eps),
            softmax_features(k, projection, of_keys, self.eps),
        )

    def init_state(self, batch_size: int) -> State:
        """``state (B, H, m, head_dim)`` and ``mass (B, H, m)``, zero."""
        weight, shape = self.q_proj.weight, (batch_size, self.num_heads, self.num_features)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return {
            "state": weight.new_zeros(*shape, self.head_dim, dtype=dtype),
            "mass": weight.new_zeros(shape, dtype=dtype),
        }

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        x = x_t.unsqueeze(1)
        q, k, v = (self.split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        with torch.autocast(x.device.type, enabled=False):
            features_q, features_k = self._features(q, k, None)
            out, memory, mass = kernelized_step(
                features_q.squeeze(2),
                features_k.squeeze(2),
                v.squeeze(2),
                state["state"],
                state["mass"],
                TINY,
            )
        return self.out_proj(out.flatten(1)), {"state": memory, "mass": mass}


def _largest(mask: Tensor | None, exponent: Tensor) -> Tensor:
    """The largest exponent over a head's real keys and features, ``(B, H, 1, 1)``."""
    if mask is not None:
        # A row without a real key would have no maximum at all.
        real = mask | ~mask.any(-1, keepdim=True)
        exponent = exponent.masked_fill(~real[:, None, :, None], float("-inf"))
    return exponent.amax((-1, -2), keepdim=True)


def _constant(projection: Tensor, _exponent: Tensor) -> Tensor:
    # w·x − |x|²/2 ≤ |w|²/2, which stays below 88, where float32's exp overflows, in heads of up to
    # about 100; in wider ones this much has to be taken off. Otherwise zero, and ε as published.
    return (projection.square().sum(-1).amax() / 2 - 60).clamp_min(0)
