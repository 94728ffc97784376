"""Gaussian Mixture Attention as a module (PAPER: Huang & Raza, arXiv 2606.18283)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gma_bench import ops
from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, State, zero_masked
from gma_bench.ops import streaming
from gma_bench.ops.parallel import context_parallel_gma


class GaussianMixtureAttention(Mixer):
    """Attention whose weights are agreements of two posteriors over a learned Gaussian mixture.

    Queries and keys are projected to routing vectors, and each gets a posterior over the K
    components of its head's mixture. Keys write their values into K slots by it, queries read the
    slots by it: ``O = Γ_Q (Γ_Kᵀ V) / (Γ_Q Γ_Kᵀ 1 + ε)``, linear in the sequence length.

    Args:
        d_model, num_heads, causal, max_length: as for every :class:`Mixer`; length is not limited.
        num_components: K, components of a head's mixture.
        routing_dim: d_r, width of the routing vectors; ``None`` takes the head's width.
        routing_norm: ``layernorm`` brings every routing vector to zero mean and unit variance (no
            affine part: means and variances already shift and scale); ``none`` leaves it.
        variance_floor: added to softplus of the free parameter, so that densities stay bounded.
        init_variance: every variance at the start; ``None`` takes d_r / 8. A squared distance
            between routing vectors is of order d_r, so with unit variances the posteriors start
            nearly one-hot and most components are never used again; with d_r itself they start
            nearly even and stay so (of d_r, d_r/4, d_r/8, d_r/16 and below, on validation, d_r / 8 was
            best on ListOps and on embedded text).
        share_components_across_heads: one mixture for all heads instead of one each.
        eps: ε of the read.
        backend: which form of :func:`gma_bench.ops.gma` computes it.
        context_group: processes that share each sequence (context parallelism). ``forward`` then takes
            this process's consecutive tokens, mask and memory alike, and the processes exchange
            states of K × d_v a head; parameters' gradients are this process's share, to be added up.
            See :func:`gma_bench.ops.parallel.context_parallel_gma`.

    Raises:
        SettingError: a setting outside what is allowed.
    """

    constant_state: ClassVar[bool] = True

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        num_components: int = 64,
        routing_dim: int | None = None,
        routing_norm: Literal["layernorm", "none"] = "layernorm",
        variance_floor: float = 1e-2,
        init_variance: float | None = None,
        share_components_across_heads: bool = False,
        eps: float = 1e-6,
        backend: str = "auto",
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        self.num_components = num_components
        self.routing_dim = self.head_dim if routing_dim is None else routing_dim
        self.routing_norm, self.variance_floor = routing_norm, variance_floor
        self.init_variance = self.routing_dim / 8 if init_variance is None else init_variance
        self.share_components_across_heads, self.eps, self.backend = (
            share_components_across_heads,
            eps,
            backend,
        )
        self.context_group = context_group
        self._check_settings()
        routing_width = num_heads * self.routing_dim
        self.q_proj = nn.Linear(d_model, routing_width, bias=False)
        self.k_proj = nn.Linear(d_model, routing_width, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        shape = (1 if share_components_across_heads else num_heads, num_components)
        # All means at one distance from the origin, as normalised routing vectors are: a shorter mean
        # is nearer to everything, and its component would win more than its share from the start.
        means = torch.randn(*shape, self.routing_dim)
        means *= self.routing_dim**0.5 / means.norm(dim=-1, keepdim=True)
        self.means = nn.Parameter(means)
        above_floor = self.init_variance - variance_floor
        inverse_softplus = above_floor + math.log(-math.expm1(-above_floor))
        self.raw_variance = nn.Parameter(torch.full((*shape, self.routing_dim), inverse_softplus))
        self.log_priors = nn.Parameter(torch.zeros(shape))
        for parameter in (self.means, self.raw_variance, self.log_priors):
            # Decay would pull the mixture together at the origin, whatever the routing vectors do.
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def _check_settings(self) -> None:
        def require(ok: bool, name: str, allowed: str, fix: object) -> None:
            if not ok:
                setting = f"mixer.{name}"
                raise SettingError(setting, getattr(self, name), allowed, f"{setting}={fix}")

        require(self.num_components >= 1, "num_components", "at least 1", 64)
        require(self.routing_dim >= 1, "routing_dim", "at least 1", self.head_dim)
        require(
            self.routing_norm in ("layernorm", "none"),
            "routing_norm",
            "layernorm or none",
            "layernorm",
        )
        require(self.variance_floor > 0, "variance_floor", "above 0", 0.01)
        require(
            self.init_variance > self.variance_floor,
            "init_variance",
            f"above mixer.variance_floor={self.variance_floor}",
            self.routing_dim,
        )
        require(self.eps > 0, "eps", "above 0", 1e-6)
        require(self.backend in ops.BACKENDS, "backend", " or ".join(ops.BACKENDS), "auto")

    def variances(self) -> Tensor:
        """Diagonal variances of every head's components, ``(H, K, d_r)``."""
        return self._per_head(F.softplus(self.raw_variance) + self.variance_floor)

    def priors(self) -> Tensor:
        """Mixture weights of every head, ``(H, K)``; rows sum to one."""
        return self._log_priors().exp()

    def responsibilities(self, x: Tensor, which: Literal["query", "key"] = "key") -> Tensor:
        """Posterior over components of each position, as it reads or as it is read.

        Args:
            x: ``(B, N, d_model)``, what :meth:`forward` is fed.
            which: ``query`` or ``key``.

        Returns:
            ``(B, H, N, K)``; rows sum to one.
        """
        return ops.responsibilities(self.routing(x, which), *self._mixture())

    def routing(self, x: Tensor, which: Literal["query", "key"] = "key") -> Tensor:
        """Routing vectors of each position, ``(B, N, d_model) -> (B, H, N, d_r)``; see above."""
        return self._route({"query": self.q_proj, "key": self.k_proj}[which], x)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Mix along the sequence, or read from another one.

        Args:
            x: ``(B, N, d_model)``; queries, and keys and values too unless ``memory`` is given.
            mask: ``(B, N)`` bool, True = a real token.
            memory: ``(B, M, d_model)``; keys and values come from it (cross-attention).
            memory_mask: ``(B, M)`` bool, True = a real token of the memory.

        Returns:
            ``(B, N, d_model)``; zero where ``mask`` is False.

        Raises:
            ValueError: ``memory`` for a causal mixer, or ``memory_mask`` without ``memory``.
        """
        if memory is None and memory_mask is not None:
            raise ValueError("memory_mask was given without memory")
        if memory is not None and self.causal:
            raise ValueError("causal=True with memory: positions of two sequences have no order")
        x = source = zero_masked(x, mask)
        if memory is None:
            memory_mask = mask
        else:
            source = zero_masked(memory, memory_mask)
        arguments = (
            self._route(self.q_proj, x),
            self._route(self.k_proj, source),
            self.split_heads(self.v_proj(source)),
            *self._mixture(),
        )
        how: dict[str, Any] = {"causal": self.causal, "key_mask": memory_mask, "eps": self.eps}
        if self.context_group is None:
            out = ops.gma(*arguments, **how, backend=self.backend)
        else:
            out = context_parallel_gma(*arguments, **how, group=self.context_group)
        return zero_masked(self.out_proj(self.merge_heads(out)), mask)

    def init_state(self, batch_size: int) -> State:
        """Empty slots: ``written (B, H, K, d_v)`` and ``mass (B, H, K)``."""
        self.check_streaming()
        return streaming.init_state(batch_size, self._per_head(self.means), self.head_dim)._asdict()

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        """One token: write its value, then read; the slots never grow."""
        self.check_streaming()
        q, k, v = (t.squeeze(2) for t in self._project(x_t.unsqueeze(1)))
        before = streaming.StreamingState(**state)
        out, after = streaming.step(q, k, v, *self._mixture(), before, eps=self.eps)
        return self.out_proj(out.flatten(1)), after._asdict()

    def prefill(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Tokens in chunks, with the outputs and the state that :meth:`step` would give."""
        self.check_streaming()
        self.check_input(x)
        before = streaming.StreamingState(**(state or self.init_state(len(x))))
        out, after = streaming.prefill(*self._project(x), *self._mixture(), before, eps=self.eps)
        return self.out_proj(self.merge_heads(out)), after._asdict()

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routing vectors as query and as key, and values, of each head."""
        values = self.split_heads(self.v_proj(x))
        return self.routing(x, "query"), self.routing(x, "key"), values

    def _route(self, projection: nn.Linear, x: Tensor) -> Tensor:
        routed = self.split_heads(projection(x))  # (B, H, N, d_r)
        if self.routing_norm == "layernorm":
            return F.layer_norm(routed, (self.routing_dim,))
        return routed

    def _mixture(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._per_head(self.means), self.variances(), self._log_priors()

    def _log_priors(self) -> Tensor:
        return self._per_head(self.log_priors.log_softmax(-1))

    def _per_head(self, parameter: Tensor) -> Tensor:
        return parameter.expand(self.num_heads, *parameter.shape[1:])
