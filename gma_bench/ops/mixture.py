"""The mixture in the form that matrix products want, and the error that this form may make.

``log π_k + log N(x; μ_k, σ²_k) = [x², x] · [−½/σ²_k ; μ_k/σ²_k] + c_k`` turns the log-density into
matrix products, but cancels where ``x²/σ²`` is much larger than ``(x − μ)²/σ²``: far from the
origin, with small variances. A block of tokens where that would cost accuracy is evaluated in
float64 instead, on the parameter side as well, so its error is below that of the direct form.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

SAFE_MAGNITUDE = 4.0
"""Sum of the terms of a logit up to which float32 keeps all that the direct form keeps."""

SAFE_RATIO = 3.0
"""How many times the logit its terms may sum to beyond that."""

LARGEST_MAGNITUDE = 256.0
"""Sum of the terms from which on a matrix product adds up worse than the direct form does."""


def has_no_values(x: Tensor) -> bool:
    """Whether a tensor is fake or meta."""
    return isinstance(x, FakeTensor) or x.is_meta


def is_true(condition: Tensor) -> bool:
    """The value of a one-element tensor; True where there is none."""
    return has_no_values(condition) or bool(condition.item())


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is, float32 otherwise: logits never have less than that."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``; what float64 holds and float32 would call infinite becomes its largest."""
    if x.dtype == torch.float64 and dtype != torch.float64:
        largest = torch.finfo(torch.float32).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


class Mixture:
    """Parameters of the H mixtures, prepared once for many blocks of tokens.

    Args:
        means, variances: ``(H, K, d_r)``.
        log_priors: ``(H, K)``.
        dtype: what blocks are computed in where that is accurate enough.
    """

    def __init__(
        self, means: Tensor, variances: Tensor, log_priors: Tensor, dtype: torch.dtype
    ) -> None:
        self.parameters = means, variances, log_priors
        self.components, self.dtype = means.shape[1], dtype
        mean, variance = means.double(), variances.double()
        precision = variance.reciprocal()
        norm = (mean.square() * precision).sum(-1)  # Σ μ²/σ², (H, K)
        constant = log_priors.double() - 0.5 * (norm + variance.log().sum(-1))
        self.matrix = torch.cat((-0.5 * precision, mean * precision), -1).to(dtype).transpose(1, 2)
        self.constant = constant.to(dtype)[:, None, None]  # (H, 1, 1, K)
        self.half_norm = (0.5 * norm).to(dtype).unsqueeze(1)  # (H, 1, K)
        self.largest_half_norm = self.half_norm.amax(-1, keepdim=True)
        self.reach = self.matrix[:, : means.shape[2]].amin(-1, keepdim=True)  # −½ max 1/σ²
        self._wide: Mixture | None = None

    @property
    def wide(self) -> Mixture:
        """The same mixture in float64."""
        if self._wide is None:
            self._wide = Mixture(*self.parameters, torch.float64)
        return self._wide

    def magnitude(self, x: Tensor) -> float:
        """A bound on the sum of a logit's terms, for every token of ``x (B, H, N, d_r)``.

        Zero where nobody need ask: in float64, without tokens, and for fake tensors.
        """
        if self.dtype == torch.float64 or x.numel() == 0 or has_no_values(x):
            return 0.0
        length = torch.linalg.vector_norm(x, dim=-1, dtype=self.dtype).amax()
        return float(self.largest_half_norm.amax() - length * length * self.reach.amin())

    def responsibilities(
        self, x: Tensor, log_weight: Tensor | None = None, magnitude: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Posteriors of a block and what their gradients are made of.

        Args:
            x: ``(H, g·n, d_r)``, n tokens of g sequences for each head.
            log_weight: ``(H, g, 1, K)``, added to the logits.
            magnitude: of the tokens, see :meth:`magnitude`; zero: no block needs a closer look.

        Returns:
            ``(H, g·n, K)`` and ``[x², x] (H, g·n, 2·d_r)``, the latter in the dtype that was used.
        """
        features = torch.cat((x.square(), x), -1)
        gamma = torch.bmm(features, self.matrix)
        logits = self.doubtful(features, gamma, magnitude)
        bias = self.constant if log_weight is None else self.constant + log_weight
        gamma.view(*bias.shape[:2], -1, gamma.shape[-1]).add_(bias)
        torch.softmax(gamma, -1, out=gamma)
        if logits is None or self.is_accurate(features, logits, gamma):
            return gamma, features
        del features, logits, gamma
        gamma, features = self.wide.responsibilities(
            x.double(), None if log_weight is None else log_weight.double()
        )
        return gamma.to(self.dtype), features

    def doubtful(self, features: Tensor, products: Tensor, magnitude: float) -> Tensor | None:
        """What :meth:`is_accurate` must look at, or None where bounds that cost less say that it holds.

        First a bound for the whole block: the largest sum of terms with the least distance, −½(x−μ)²/σ²,
        of any token from any mean. Then the same for each token.
        """
        if magnitude <= SAFE_MAGNITUDE:
            return None
        nearest = (products.amax(1, keepdim=True) - self.half_norm).amax()
        if magnitude <= LARGEST_MAGNITUDE and is_true(
            nearest <= (SAFE_MAGNITUDE - magnitude) / SAFE_RATIO
        ):
            return None
        logits = products - self.half_norm
        square = features[..., : self.reach.shape[1]]
        terms = torch.baddbmm(self.largest_half_norm, square, self.reach, alpha=-1)
        excess = excess_magnitude(logits.amax(-1, keepdim=True), terms)
        return None if is_true(excess.amax() <= SAFE_MAGNITUDE) else logits

    def is_accurate(self, features: Tensor, logits: Tensor, gamma: Tensor) -> bool:
        """Whether the logits of a block, −½(x−μ)²/σ², lose no more than the direct form does.

        The terms of a logit sum to S and the logit itself to −m. An error in it counts as far as
        its component is used.
        """
        width = features.shape[-1] // 2
        magnitude = torch.baddbmm(
            self.half_norm, features[..., :width], self.matrix[:, :width], alpha=-1
        )
        excess = excess_magnitude(logits, magnitude)
        return is_true(excess.mul_(gamma).amax() <= SAFE_MAGNITUDE)


def excess_magnitude(logits: Tensor, magnitude: Tensor) -> Tensor:
    """How far the terms of logits −m, which sum to S, outweigh them; at most SAFE_MAGNITUDE is accurate.

    ``S − SAFE_RATIO · m``, or S where that is nearer to its own bound. Overwrites both arguments.
    """
    excess = logits.mul_(SAFE_RATIO).add_(magnitude)
    return torch.maximum(excess, magnitude.mul_(SAFE_MAGNITUDE / LARGEST_MAGNITUDE), out=excess)


class MixtureGradients:
    """Sums of what the parameters' gradients are made of, block after block."""

    def __init__(self, mixture: Mixture) -> None:
        heads, width, components = mixture.matrix.shape
        self.mixture = mixture
        self.matrix = mixture.matrix.new_zeros(heads, components, width)  # Σ_n dL [x², x]
        self.constant = mixture.matrix.new_zeros(heads, components, dtype=torch.float64)  # Σ_n dL

    def backward(self, grad_logits: Tensor, x: Tensor, features: Tensor, target: Tensor) -> None:
        """Add a block's ``dL (H, g·n, K)``, write its gradient for x into ``target (H, g, n, d_r)``."""
        mixture = self.mixture
        if features.dtype != mixture.dtype:
            mixture, grad_logits, x = mixture.wide, grad_logits.double(), x.double()
            self.matrix = self.matrix.double()
        if self.matrix.dtype == features.dtype:
            self.matrix.baddbmm_(grad_logits.transpose(1, 2), features)
        else:  # an earlier block was wide, this one is not
            self.matrix += torch.bmm(grad_logits.transpose(1, 2), features)
        self.constant += grad_logits.sum(1)
        grad = torch.bmm(grad_logits, mixture.matrix.transpose(1, 2), out=features)
        square, linear = grad.view(*target.shape[:-1], -1).chunk(2, -1)
        same = target.dtype == grad.dtype
        grad_x = torch.addcmul(
            linear, square, x.view(target.shape), value=2, out=target if same else None
        )
        if not same:
            target.copy_(narrow(grad_x, self.mixture.dtype))

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of means, variances and log priors, in the dtypes of these."""
        means, variances, log_priors = self.mixture.parameters
        dtype = self.matrix.dtype
        mean, precision = means.to(dtype), variances.to(dtype).reciprocal()
        square, linear = self.matrix.chunk(2, -1)
        total = self.constant.to(dtype).unsqueeze(-1)
        first = torch.addcmul(linear, total, mean, value=-1)  # Σ dL (x − μ)
        second = square.sub_(linear.add_(first).mul_(mean))  # Σ dL (x − μ)²
        grad_variances = second.mul_(precision).sub_(total).mul_(precision).mul_(0.5)
        return (
            narrow(first.mul_(precision), means.dtype),
            narrow(grad_variances, variances.dtype).clone(memory_format=torch.contiguous_format),
            narrow(self.constant, log_priors.dtype),
        )
