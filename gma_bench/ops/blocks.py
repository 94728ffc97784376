"""GMA over blocks of tokens that fit the cache: forward and backward in plain torch.

Nothing of size ``N × K`` outlives a block: backward computes the responsibilities again. Inside a
block tensors are laid out ``(H, g·n, ·)``: n tokens of each of g sequences, g > 1 where sequences
are short.

The bidirectional read is softmax attention over K fixed keys. As responsibilities sum to one,
``Γ_Q Z + ε = Γ_Q (Z + ε)``, so ``O = softmax(L + log(Z + ε)) U`` with ``U = Ṽ / (Z + ε)``.
The causal form is chunked linear attention with the feature map γ: a state between chunks, a
masked product inside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gma_bench.ops.mixture import Mixture, MixtureGradients, compute_dtype

CHUNK = 64
"""Tokens of a causal chunk."""

BLOCK_BYTES = 13 * 2**17
"""Most that the tensors of a block take, counted as :func:`block_rows` does."""

Group = slice
"""Consecutive sequences of the batch that are worked on together."""


def block_rows(rows: int, heads: int, width: int, components: int) -> int:
    """Rows (heads × tokens) of a block, for ``rows`` in all.

    At most what the cache holds, at least what a matrix product likes. Between the two, as many as
    keep all that backward holds (the parameters in several forms, and a block) below a share of its
    inputs' gradients: the peak of memory is set by what goes in and comes out.
    """
    spare = 4 * rows * width - 48 * heads * components * width  # bytes of float32
    return max(min(spare, BLOCK_BYTES) // (8 * width + 12 * components), 192)


def plan(x: Tensor, components: int, multiple: int = 16) -> tuple[int, int]:
    """``(sequences of a group, tokens of a block)`` for ``x (B, H, N, d_r)``."""
    batch, heads, length, width = x.shape
    rows = block_rows(batch * heads * length, heads, width, components)
    group = max(1, min(batch, rows // max(1, heads * length)))
    return group, max(multiple, rows // heads // multiple * multiple)


def groups(batch: int, size: int) -> Iterator[Group]:
    """Slices of the batch."""
    return (slice(start, min(start + size, batch)) for start in range(0, batch, size))


def spans(length: int, size: int) -> list[slice]:
    """Slices of the sequence."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def causal_spans(length: int, size: int) -> list[slice]:
    """Slices of whole chunks, then what is left."""
    whole = length // CHUNK * CHUNK
    return spans(whole, size) + ([slice(whole, length)] if whole < length else [])


def by_head(x: Tensor, group: Group) -> Tensor:
    """The sequences of a group, ``(B, H, N, ·) -> (H, g, N, ·)``; a view."""
    return x[group].transpose(0, 1)


def num_causal_blocks(q: Tensor, components: int) -> int:
    """How many blocks :func:`causal` works through, ``len(causal_spans(…))``."""
    tokens = plan(q, components, CHUNK)[1]
    whole, left = q.shape[2] // CHUNK, q.shape[2] % CHUNK
    return (whole * CHUNK + tokens - 1) // tokens + (1 if left else 0)


def take(x: Tensor, span: slice, dtype: torch.dtype) -> Tensor:
    """A block of ``x (H, g, N, d)`` as ``(H, g·n, d)``; a view where that is possible."""
    block = x[:, :, span].flatten(1, 2)
    return block if block.dtype == dtype else block.to(dtype)


def put(x: Tensor, span: slice, block: Tensor) -> None:
    """Write a block ``(H, g·n, d)`` or ``(H·g, n, d)`` back into ``x (H, g, N, d)``."""
    target = x[:, :, span]
    target.copy_(block.view(target.shape))


def padding(key_mask: Tensor | None, span: slice) -> Tensor | None:
    """True where a row of a block is padding: ``(g, N) -> (1, g·n, 1)``."""
    return None if key_mask is None else key_mask[:, span].flatten()[None, :, None].logical_not()


def per_sequence(x: Tensor, count: int) -> Tensor:
    """``(H, g·n, d) -> (H·g, n, d)``."""
    return x if count == 1 else x.reshape(x.shape[0] * count, -1, x.shape[-1])


def like_layout(q: Tensor, v: Tensor) -> Tensor:
    """An empty output ``(B, H, N, d_v)`` that lies in memory as ``q`` does: by head or by token."""
    batch, heads, length, _ = q.shape
    if q.stride(1) < q.stride(2):  # a view of (B, N, H·d): merging the heads stays free
        return v.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
    return v.new_empty(batch, heads, length, v.shape[-1])


def rows_contiguous(x: Tensor) -> Tensor:
    """``x``, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def copy_back(tensors: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Give ``tensors`` what was written to their :func:`rows_contiguous`, where that was a copy."""
    for tensor, written in zip(tensors, rows, strict=True):
        if tensor is not written:
            tensor.copy_(written)


def lone_values(v: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """What is taken from the values of each sequence: that of its only real key, zero if there are more.

    Every query that sees a lone key reads the key's value, so that gradients for queries, keys and
    the mixture are of order ε: less than what float32 rounds away of the value. With it taken out
    beforehand they are exact. From many values nothing is taken: the first of them lies further
    from what is read, their mean, than zero mostly does, and would cost a digit. (Nor in context
    parallelism, where no process knows who holds the key, nor by the kernels from values in 16
    bits, of which it is no more than the rounding.)

    Args:
        v: ``(B, H, M, d_v)``.
        key_mask: ``(B, M)``, as for :func:`gma_bench.ops.gma`.

    Returns:
        ``(B, H, 1, d_v)`` in the dtype of computation; None where no sequence can have a lone key.
    """
    if v.shape[2] == 1 and key_mask is None:
        return v.to(compute_dtype(v)).contiguous()
    if v.shape[2] == 0 or key_mask is None:
        return None
    first = v[torch.arange(len(v), device=v.device), :, key_mask.int().argmax(1)]
    lone = (key_mask.sum(1) == 1)[:, None, None]
    return torch.where(lone, first.to(compute_dtype(v)), 0.0).unsqueeze(2)


class Sources(NamedTuple):
    """What :class:`Keys` takes its blocks from: the sequences of a group."""

    k: Tensor  # (H, g, M, d_r)
    v: Tensor  # (H, g, M, d_v)
    key_mask: Tensor | None  # (g, M)
    centre: Tensor | None  # (H, g, 1, d_v), taken from the values

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, key_mask: Tensor | None, centre: Tensor | None, group: Group
    ) -> Sources:
        """Those of a group."""
        return cls(
            by_head(k, group),
            by_head(v, group),
            None if key_mask is None else key_mask[group],
            None if centre is None else by_head(centre, group),
        )


class Keys:
    """A block of keys and values, with padding taken out, and ``centre`` from the values."""

    def __init__(
        self,
        mixture: Mixture,
        sources: Sources,
        span: slice,
        magnitude: float,
    ) -> None:
        k, v, key_mask, centre = sources
        self.padding = padding(key_mask, span)
        self.x = take(k, span, mixture.dtype)
        self.values = take(v, span, mixture.dtype)
        if centre is not None:
            self.values = (self.values.view(*v.shape[:2], -1, v.shape[3]) - centre).flatten(1, 2)
        if self.padding is not None:
            self.x = self.x.masked_fill(self.padding, 0.0)
            self.values = self.values.masked_fill(self.padding, 0.0)
        self.gamma, self.features = mixture.responsibilities(self.x, magnitude=magnitude)
        self.clear_padding(self.gamma)

    def clear_padding(self, block: Tensor) -> Tensor:
        """Zero the rows of padding, in place."""
        return block if self.padding is None else block.masked_fill_(self.padding, 0.0)

    def backward(self, grad_logits: Tensor, gradients: MixtureGradients, target: Tensor) -> None:
        """Gradient for the keys into ``target (H, g, n, d_r)``, given that of their logits."""
        grad_logits = self.clear_padding(grad_logits.view(self.gamma.shape))
        gradients.backward(grad_logits, self.x, self.features, target)


def softmax_backward(grad: Tensor, output: Tensor) -> Tensor:
    """``y ∘ (g − Σ g y)`` along the last dimension, into ``grad``."""
    return torch.ops.aten._softmax_backward_data.out(
        grad, output, -1, output.dtype, grad_input=grad
    )


# ---------------------------------------------------------------- bidirectional


def write(
    k: Tensor,
    v: Tensor,
    mixture: Mixture,
    key_mask: Tensor | None,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``Ṽ = Γ_Kᵀ (V − c) (B, H, K, d_v)`` and ``Z = Γ_Kᵀ 1 (B, H, K)``.

    c is ``centre``, see :func:`lone_values`.
    """
    batch, heads, length, _ = k.shape
    components = mixture.constant.shape[-1]
    written = v.new_empty(batch, heads, components, v.shape[-1], dtype=mixture.dtype)
    mass = written.new_empty(batch, heads, components)
    size, tokens = plan(k, mixture.components)
    magnitude = mixture.magnitude(k)
    for group in groups(batch, size):
        count = group.stop - group.start
        total = written.new_zeros(heads * count, components, v.shape[-1])
        total_mass = written.new_zeros(heads * count, components)
        sources = Sources.of(k, v, key_mask, centre, group)
        for span in spans(length, tokens):
            keys = Keys(mixture, sources, span, magnitude)
            gamma = per_sequence(keys.gamma, count)
            total.baddbmm_(gamma.transpose(1, 2), per_sequence(keys.values, count))
            total_mass += gamma.sum(1)
        written[group] = total.view(heads, count, components, -1).transpose(0, 1)
        mass[group] = total_mass.view(heads, count, components).transpose(0, 1)
    return written, mass


class Memory:
    """What the queries of a group read: ``U = Ṽ / (Z + ε)`` weighted by ``Z + ε``.

    Where c was taken from the values, ``Ṽ`` is smaller by ``Z c``. Forward adds that again; backward
    wants ``U − c = (Ṽ − ε c) / (Z + ε)``, which keeps what tells keys apart.
    """

    def __init__(
        self,
        written: Tensor,
        mass: Tensor,
        centre: Tensor | None,
        group: Group,
        eps: float,
        backward: bool,
    ) -> None:
        mass = by_head(mass, group)  # (H, g, K)
        scale = mass + eps
        self.log_weight = scale.log().unsqueeze(2)  # (H, g, 1, K)
        self.scale = scale.flatten(0, 1).unsqueeze(-1)  # (H·g, K, 1)
        values = merge(written[group])  # (H·g, K, d_v)
        if centre is not None:
            share = -eps if backward else mass.flatten(0, 1).unsqueeze(-1)
            values = values + share * by_head(centre, group).flatten(0, 1)
        self.values = values / self.scale


def read(
    q: Tensor,
    written: Tensor,
    mass: Tensor,
    mixture: Mixture,
    eps: float,
    out: Tensor,
    centre: Tensor | None = None,
) -> None:
    """``O = Γ_Q Ṽ / (Γ_Q Z + ε)`` into ``out (B, H, N, d_v)``; ``centre`` as for :func:`write`."""
    size, tokens = plan(q, mixture.components)
    magnitude = mixture.magnitude(q)
    for group in groups(len(q), size):
        memory = Memory(written, mass, centre, group, eps, backward=False)
        count = group.stop - group.start
        source, target = by_head(q, group), by_head(out, group)
        for span in spans(q.shape[2], tokens):
            x = take(source, span, mixture.dtype)
            weights, _ = mixture.responsibilities(x, memory.log_weight, magnitude)
            put(target, span, torch.bmm(per_sequence(weights, count), memory.values))


def read_backward(
    grad_out: Tensor,
    q: Tensor,
    written: Tensor,
    mass: Tensor,
    gradients: MixtureGradients,
    eps: float,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`read` for ``q``, ``Ṽ`` and ``Z``; the mixture's go to ``gradients``."""
    mixture = gradients.mixture
    grad_q = torch.empty_like(q)
    grad_written, grad_mass = torch.empty_like(written), torch.empty_like(mass)
    size, tokens = plan(q, mixture.components)
    magnitude = mixture.magnitude(q)
    for group in groups(len(q), size):
        memory = Memory(written, mass, centre, group, eps, backward=True)
        count = group.stop - group.start
        grad_values = torch.zeros_like(memory.values)
        grad_bias = grad_values.new_zeros(grad_values.shape[:2])  # (H·g, K)
        source, upstream, target = (by_head(t, group) for t in (q, grad_out, grad_q))
        for span in spans(q.shape[2], tokens):
            x = take(source, span, mixture.dtype)
            weights, features = mixture.responsibilities(x, memory.log_weight, magnitude)
            weights = per_sequence(weights, count)
            grad = per_sequence(take(upstream, span, mixture.dtype), count)
            grad_values.baddbmm_(weights.transpose(1, 2), grad)
            grad_logits = torch.bmm(grad, memory.values.transpose(1, 2))
            # twice: where one weight is nearly 1 its gradient is what rounding leaves of the rest
            grad_logits.sub_(dot(grad_logits, weights))
            softmax_backward(grad_logits, weights)
            del weights
            grad_bias += grad_logits.sum(1)
            gradients.backward(grad_logits.view(*x.shape[:2], -1), x, features, target[:, :, span])
            del x, features, grad, grad_logits  # before the next block needs its own
        grad_bias = grad_bias.view(-1, count, grad_bias.shape[-1])
        grad_scale = grad_bias - dot(grad_values, memory.values).view(grad_bias.shape)
        grad_mass[group] = (grad_scale / memory.scale.view(grad_bias.shape)).transpose(0, 1)
        by_head(grad_written, group).copy_(
            grad_values.div_(memory.scale).view(*grad_bias.shape, -1)
        )
    return grad_q, grad_written, grad_mass


def write_backward(
    grad_written: Tensor,
    grad_mass: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    gradients: MixtureGradients,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`write` for ``k`` and ``v``; the mixture's go to ``gradients``."""
    mixture = gradients.mixture
    grad_k, grad_v = torch.empty_like(k), torch.empty_like(v)
    size, tokens = plan(k, mixture.components)
    magnitude = mixture.magnitude(k)
    for group in groups(len(k), size):
        count = group.stop - group.start
        total = merge(grad_written[group])
        total_mass = merge(grad_mass[group].unsqueeze(2))  # (H·g, 1, K)
        sources = Sources.of(k, v, key_mask, centre, group)
        target_k, target_v = by_head(grad_k, group), by_head(grad_v, group)
        for span in spans(k.shape[2], tokens):
            keys = Keys(mixture, sources, span, magnitude)
            gamma = per_sequence(keys.gamma, count)
            put(target_v, span, torch.bmm(gamma, total))
            grad_logits = torch.baddbmm(
                total_mass, per_sequence(keys.values, count), total.transpose(1, 2)
            )
            softmax_backward(grad_logits, gamma)
            del gamma
            keys.backward(grad_logits, gradients, target_k[:, :, span])
            del keys, grad_logits  # before the next block needs its own
    return grad_k, grad_v


# ---------------------------------------------------------------- responsibilities alone


def responsibilities(x: Tensor, mixture: Mixture) -> Tensor:
    """Posteriors of every token, ``(B, H, N, d_r) -> (B, H, N, K)``."""
    out = x.new_empty(*x.shape[:3], mixture.constant.shape[-1], dtype=mixture.dtype)
    size, tokens = plan(x, mixture.components)
    magnitude = mixture.magnitude(x)
    for group in groups(len(x), size):
        source, target = by_head(x, group), by_head(out, group)
        for span in spans(x.shape[2], tokens):
            put(
                target,
                span,
                mixture.responsibilities(take(source, span, mixture.dtype), magnitude=magnitude)[0],
            )
    return out


def responsibilities_backward(grad: Tensor, x: Tensor, gradients: MixtureGradients) -> Tensor:
    """Gradient of :func:`responsibilities` for ``x``; the mixture's go to ``gradients``."""
    mixture = gradients.mixture
    grad_x = torch.empty_like(x)
    size, tokens = plan(x, mixture.components)
    magnitude = mixture.magnitude(x)
    for group in groups(len(x), size):
        source, upstream, target = (by_head(t, group) for t in (x, grad, grad_x))
        for span in spans(x.shape[2], tokens):
            block = take(source, span, mixture.dtype)
            gamma, features = mixture.responsibilities(block, magnitude=magnitude)
            # one token of many sequences: a plain clone keeps strides that softmax_backward ignores
            grad_logits = take(upstream, span, mixture.dtype).clone(
                memory_format=torch.contiguous_format
            )
            softmax_backward(grad_logits, gamma)
            gradients.backward(grad_logits, block, features, target[:, :, span])
    return grad_x


# ---------------------------------------------------------------- causal


def chunked(x: Tensor, chunk: int) -> Tensor:
    """``(E, n, d) -> (E·c, chunk, d)``."""
    return x.reshape(-1, chunk, x.shape[-1])


class Causal:
    """What a causal block computes in both directions, ``E = H·g`` sequences of c chunks."""

    def __init__(
        self,
        mixture: Mixture,
        q: Tensor,
        keys: Keys,
        count: int,
        state: Tensor,
        mass: Tensor,
        eps: float,
        centre: Tensor | None,
        magnitude: float,
    ) -> None:
        self.query_gamma, self.query_features = mixture.responsibilities(q, magnitude=magnitude)
        length = q.shape[1] // count
        chunk = min(CHUNK, length)
        self.count, self.chunks = count, length // chunk
        self.gamma_q, self.gamma_k = chunked(self.query_gamma, chunk), chunked(keys.gamma, chunk)
        self.values = chunked(keys.values, chunk)
        self.states, self.next_state = self.scan(
            torch.bmm(self.gamma_k.transpose(1, 2), self.values), state
        )
        masses, self.next_mass = self.scan(self.gamma_k.sum(1), mass)
        self.masses = masses.unsqueeze(1)  # (E·c, 1, K)
        self.affinity = torch.bmm(self.gamma_q, self.gamma_k.transpose(1, 2)).tril_()
        found = dot(self.gamma_q, self.masses).add_(self.affinity.sum(-1, keepdim=True))
        self.denominator = found + eps  # (E·c, chunk, 1)
        self.centre = None  # of each query, (E·c, chunk, d_v)
        if centre is not None:  # a key that is still to come leaves nothing
            of_chunk = centre.flatten(0, 1).repeat_interleave(self.chunks, 0)
            self.centre = torch.where(found > 0, of_chunk, 0.0)
        self.found, self.eps = found, eps

    def output(self) -> Tensor:
        """What the queries read, ``(E·c, chunk, d_v)``."""
        numerator = torch.bmm(self.affinity, self.values)
        numerator.baddbmm_(self.gamma_q, self.states)
        if self.centre is not None:
            numerator.addcmul_(self.centre, self.found)
        return numerator.div_(self.denominator)

    def scan(self, parts: Tensor, state: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """Exclusive prefix (or suffix) sums over the chunks of a block, from ``state (E, …)``.

        Returns the state before each chunk ``(E·c, …)`` and the state after the block.
        """
        flat = parts.view(len(state), self.chunks, *state.shape[1:])
        states = torch.empty_like(flat)
        own, before = list(flat.unbind(1)), list(states.unbind(1))
        if reverse:
            own.reverse()
            before.reverse()
        before[0].copy_(state)
        for chunk in range(self.chunks - 1):
            torch.add(before[chunk], own[chunk], out=before[chunk + 1])
        after = before[-1] + own[-1]
        return states.view(parts.shape), after


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixture: Mixture,
    key_mask: Tensor | None,
    eps: float,
    out: Tensor,
    state: Tensor | None = None,
    mass: Tensor | None = None,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal GMA into ``out (B, H, N, d_v)``; from a state, or with ``centre`` taken from the values.

    Returns the state before each block and its mass: ``(blocks + 1, B, H, K, d_v)`` and
    ``(blocks + 1, B, H, K)``; the last one is the state after the sequence.
    """
    assert state is None or centre is None, "a state is of values as they are"
    size, tokens = plan(q, mixture.components, CHUNK)
    parts = causal_spans(q.shape[2], tokens)
    magnitudes = mixture.magnitude(q), mixture.magnitude(k)
    states, masses = empty_states(q, v, mixture, len(parts))
    for group in groups(len(q), size):
        count = group.stop - group.start
        current, current_mass = initial_state(states[0, group], state, mass, group)
        sources = Sources.of(k, v, key_mask, centre, group)
        queries, target = by_head(q, group), by_head(out, group)
        for index, span in enumerate(parts):
            store(states[index, group], masses[index, group], current, current_mass)
            keys = Keys(mixture, sources, span, magnitudes[1])
            block = Causal(
                mixture,
                take(queries, span, mixture.dtype),
                keys,
                count,
                current,
                current_mass,
                eps,
                sources.centre,
                magnitudes[0],
            )
            put(target, span, block.output())
            current, current_mass = block.next_state, block.next_mass
            del keys, block  # before the next block needs its own
        store(states[-1, group], masses[-1, group], current, current_mass)
    return states, masses


def causal_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    masses: Tensor,
    key_mask: Tensor | None,
    gradients: MixtureGradients,
    eps: float,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`causal` for q, k, v and for the state and mass it started from."""
    mixture = gradients.mixture
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_state, grad_mass = torch.empty_like(states[0]), torch.empty_like(masses[0])
    size, tokens = plan(q, mixture.components, CHUNK)
    parts = causal_spans(q.shape[2], tokens)
    magnitudes = mixture.magnitude(q), mixture.magnitude(k)
    for group in groups(len(q), size):
        count = group.stop - group.start
        later = states.new_zeros(q.shape[1] * count, *states.shape[-2:])
        later_mass = later.new_zeros(later.shape[:2])
        sources = Sources.of(k, v, key_mask, centre, group)
        queries, upstream = by_head(q, group), by_head(grad_out, group)
        target_q, target_k, target_v = (by_head(t, group) for t in (grad_q, grad_k, grad_v))
        for index, span in reversed(list(enumerate(parts))):
            keys = Keys(mixture, sources, span, magnitudes[1])
            x = take(queries, span, mixture.dtype)
            block = Causal(
                mixture,
                x,
                keys,
                count,
                merge(states[index, group]),
                merge(masses[index, group]),
                eps,
                sources.centre,
                magnitudes[0],
            )
            grad = chunked(take(upstream, span, mixture.dtype), block.values.shape[1])
            back = CausalBackward(block, grad, later, later_mass)
            grad_values = back.grad_values().view(keys.values.shape)
            put(target_v, span, keys.clear_padding(grad_values))
            grad_logits = back.grad_query_logits().view(block.query_gamma.shape)
            gradients.backward(grad_logits, x, block.query_features, target_q[:, :, span])
            keys.backward(back.grad_key_logits(), gradients, target_k[:, :, span])
            later, later_mass = back.earlier_state, back.earlier_mass
            del keys, block, back, grad, grad_values, grad_logits  # before the next block's
        store(grad_state[group], grad_mass[group], later, later_mass)
    return grad_q, grad_k, grad_v, grad_state, grad_mass


class CausalBackward:
    """Gradients inside a causal block, given those of the state after it."""

    def __init__(self, block: Causal, grad: Tensor, later: Tensor, later_mass: Tensor) -> None:
        self.block = block
        self.grad = grad / block.denominator  # of the numerator
        self.read = torch.bmm(self.grad, block.states.transpose(1, 2))  # (E·c, chunk, K)
        self.affinity = torch.bmm(self.grad, block.values.transpose(1, 2))  # (E·c, chunk, chunk)
        inner = dot(self.affinity, block.affinity).add_(dot(self.read, block.gamma_q))
        if block.centre is not None:
            inner.sub_(dot(self.grad, block.eps * block.centre))
        self.grad_denominator = inner.div_(block.denominator).neg_()  # (E·c, chunk, 1)
        self.affinity.add_(self.grad_denominator).tril_()
        query = block.gamma_q.transpose(1, 2)
        self.states, self.earlier_state = block.scan(
            torch.bmm(query, self.grad), later, reverse=True
        )
        masses, self.earlier_mass = block.scan(
            (block.gamma_q * self.grad_denominator).sum(1), later_mass, reverse=True
        )
        self.masses = masses.unsqueeze(1)  # (E·c, 1, K)

    def grad_values(self) -> Tensor:
        """Of the values of the block."""
        return torch.bmm(self.block.affinity.transpose(1, 2), self.grad).baddbmm_(
            self.block.gamma_k, self.states
        )

    def grad_query_logits(self) -> Tensor:
        """Of the logits of the queries."""
        grad = self.read.addcmul_(self.grad_denominator, self.block.masses)
        grad.baddbmm_(self.affinity, self.block.gamma_k)
        return softmax_backward(grad, self.block.gamma_q)

    def grad_key_logits(self) -> Tensor:
        """Of the logits of the keys."""
        grad = torch.baddbmm(self.masses, self.block.values, self.states.transpose(1, 2))
        grad.baddbmm_(self.affinity.transpose(1, 2), self.block.gamma_q)
        return softmax_backward(grad, self.block.gamma_k)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products along the last dimension, kept."""
    return (a * b).sum(-1, keepdim=True)


def empty_states(q: Tensor, v: Tensor, mixture: Mixture, blocks: int) -> tuple[Tensor, Tensor]:
    """Room for the states of :func:`causal`."""
    shape = blocks + 1, *q.shape[:2], mixture.constant.shape[-1]
    masses = q.new_empty(shape, dtype=mixture.dtype)
    return masses.new_empty(*shape, v.shape[-1]), masses


def merge(x: Tensor) -> Tensor:
    """``(g, H, K, ·) -> (H·g, K, ·)``."""
    return x.transpose(0, 1).flatten(0, 1)


def initial_state(
    like: Tensor, state: Tensor | None, mass: Tensor | None, group: Group
) -> tuple[Tensor, Tensor]:
    """The state that a group starts from, ``(H·g, K, d_v)`` and ``(H·g, K)``."""
    if state is None or mass is None:
        zeros = like.new_zeros(like.shape[0] * like.shape[1], *like.shape[2:])
        return zeros, zeros.new_zeros(zeros.shape[:2])
    return merge(state[group]).to(like.dtype), merge(mass[group]).to(like.dtype)


def store(target: Tensor, target_mass: Tensor, state: Tensor, mass: Tensor) -> None:
    """``(H·g, K, ·)`` into ``(g, H, K, ·)``."""
    for whole, part in ((target, state), (target_mass, mass)):
        turned = whole.transpose(0, 1)
        turned.copy_(part.view(turned.shape))
