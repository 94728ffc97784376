"""ListOps expressions: their grammar, their value, and the generator of the Long-Range Arena.

Needs numpy alone, so that expressions can be made and checked without torch.

The law (Tay et al., 2021, "Long Range Arena", ListOps; after Nangia & Bowman, 2018): a node is an
operator with probability 1/4, else a digit drawn evenly; an operator is one of MIN, MAX, MED, SM,
drawn evenly, and has 2 to ``max_args`` arguments, drawn evenly; nodes at depth ``max_depth`` (the
root has depth 1) are digits. Trees whose length lies strictly between ``min_length`` and
``max_length`` are kept, each once. Length counts what is fed to a model: digits, operators and
closing brackets.

How it is fast: most trees are thrown away, and whether a tree is kept depends on its shape alone.
So shapes are drawn first, many at once and level by level (a branching process); a tree is dropped
as soon as it is too long; only for kept ones are operators and digits drawn, values computed from
the deepest level upwards, and tokens put in their places.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from gma_bench.errors import SettingError, UserError

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = ("<pad>", *"0123456789", *OPERATORS, "]")
"""What each token id stands for."""
PAD, CLOSE = SYMBOLS.index("<pad>"), SYMBOLS.index("]")
FIRST_DIGIT, FIRST_OPERATOR = SYMBOLS.index("0"), SYMBOLS.index("[MIN")
OPERATOR_PROBABILITY = 0.25

TOKEN_IDS = {symbol: i for i, symbol in enumerate(SYMBOLS) if i != PAD}
SHARD = 1024
"""Trees that one random stream yields. Part of what a seed means: a change gives other data."""
CANDIDATES = 8192
"""Shapes drawn at once. Part of what a seed means, as :data:`SHARD` is."""
HOPELESS = 400 * CANDIDATES
"""After so many shapes with none kept, the bounds on the length are taken to be out of reach."""

Tokens = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Expressions(Sequence[tuple[str, int]]):
    """Expressions with their values: a read-only sequence of ``(expression, target)``.

    All tokens lie in one flat array, one byte a token; the text of an expression is made when it is
    asked for.

    Attributes:
        tokens: ``(total,)`` token ids, expression after expression (see :data:`SYMBOLS`).
        offsets: ``(n + 1,)``; expression i is ``tokens[offsets[i]:offsets[i + 1]]``.
        targets: ``(n,)`` what each evaluates to, 0 to 9.
        depths: ``(n,)`` how many operators lie inside one another; 0 for a single digit.
    """

    tokens: Tokens
    offsets: NDArray[np.int64]
    targets: NDArray[np.uint8]
    depths: NDArray[np.uint8]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``(n,)`` tokens in each expression."""
        return np.diff(self.offsets)

    def row(self, index: int) -> Tokens:
        """The token ids of one expression."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def part(self, start: int, stop: int) -> Expressions:
        """The expressions from ``start`` up to ``stop``, sharing memory with this set."""
        first, last = self.offsets[start], self.offsets[stop]
        return Expressions(
            self.tokens[first:last],
            self.offsets[start : stop + 1] - first,
            self.targets[start:stop],
            self.depths[start:stop],
        )

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> Expressions:
        """A copy of the chosen expressions, in the order given."""
        rows = [self.row(int(i)) for i in indices]
        index = np.asarray(indices, dtype=np.int64)
        return Expressions(
            np.concatenate(rows) if rows else self.tokens[:0],
            _offsets([len(row) for row in rows]),
            self.targets[index],
            self.depths[index],
        )

    def __len__(self) -> int:
        return len(self.targets)

    @overload
    def __getitem__(self, index: int) -> tuple[str, int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, int]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, int] | list[tuple[str, int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return decode(self.row(position)), int(self.targets[position])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Expressions):
            return (
                np.array_equal(self.offsets, other.offsets)
                and np.array_equal(self.tokens, other.tokens)
                and np.array_equal(self.targets, other.targets)
            )
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]


def join(parts: Sequence[Expressions]) -> Expressions:
    """Several sets as one."""
    return Expressions(
        np.concatenate([part.tokens for part in parts]),
        _offsets(np.concatenate([part.lengths for part in parts])),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.depths for part in parts]),
    )


def _offsets(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


# ------------------------------------------------------------------------------------ the grammar


def encode(expression: str) -> bytes:
    """Token ids of an expression, one a byte; without the parentheses of the published files.

    Raises:
        ValueError: a symbol that is none of ListOps; parentheses that do not fit the expression.
    """
    symbols = expression.replace("(", " ").replace(")", " ").split()
    try:
        tokens = bytes(map(TOKEN_IDS.__getitem__, symbols))
    except KeyError as unknown:
        raise ValueError(f"unknown symbol {unknown.args[0]!r}") from None
    # The published form pairs up a node's parts two at a time: one pair fewer than tokens.
    opening, closing = expression.count("("), expression.count(")")
    if opening != closing or opening not in (0, len(tokens) - 1):
        raise ValueError(
            f"{opening} opening and {closing} closing parentheses around {len(tokens)} tokens"
        )
    return tokens


def decode(tokens: Tokens | bytes) -> str:
    """An expression as text, without parentheses."""
    return " ".join([SYMBOLS[token] for token in tokens])


def evaluate(expression: str) -> int:
    """The value of an expression, 0 to 9, as the published generator computes it.

    MED of an even number of values is the mean of the middle two, rounded towards zero; SM is the
    sum modulo 10.

    Raises:
        ValueError: the expression is malformed; says how.
    """
    return value_and_depth(encode(expression))[0]


def value_and_depth(tokens: bytes) -> tuple[int, int]:
    """The value of encoded tokens, and how many operators lie inside one another.

    Raises:
        ValueError: the tokens are no expression.
    """
    operators: list[int] = []
    arguments: list[list[int]] = [[]]
    depth = 0
    for token in tokens:
        if token < FIRST_OPERATOR:
            arguments[-1].append(token - FIRST_DIGIT)
        elif token != CLOSE:
            operators.append(token - FIRST_OPERATOR)
            arguments.append([])
            depth = max(depth, len(operators))
        else:
            if not operators:
                raise ValueError("a closing bracket without an operator")
            values = arguments.pop()
            if not values:
                raise ValueError(f"{OPERATORS[operators[-1]]} without arguments")
            arguments[-1].append(_apply(operators.pop(), values))
    if operators:
        raise ValueError(f"{len(operators)} operators are never closed")
    if len(arguments[0]) != 1:
        raise ValueError(f"{len(arguments[0])} expressions where one is expected")
    return arguments[0][0], depth


def _apply(operator: int, values: list[int]) -> int:
    match operator:
        case 0:
            return min(values)
        case 1:
            return max(values)
        case 2:
            ordered = sorted(values)
            middle = len(ordered) // 2
            return (ordered[(len(ordered) - 1) // 2] + ordered[middle]) // 2
        case _:
            return sum(values) % 10


# ---------------------------------------------------------------------------------- the generator


def check_settings(
    num_samples: int, min_length: int, max_length: int, max_depth: int, max_args: int, seed: int = 0
) -> None:
    """Refuse settings that no expression satisfies.

    Raises:
        SettingError: names the setting, what is allowed, and an override that mends it.
    """
    if num_samples < 0:
        raise SettingError("num_samples", num_samples, "must be ≥ 0", "num_samples=1000")
    if seed < 0:
        raise SettingError("task.data_seed", seed, "must be ≥ 0", "task.data_seed=0")
    if max_depth < 1:
        raise SettingError("task.max_depth", max_depth, "must be ≥ 1", "task.max_depth=10")
    if max_args < 2:
        raise SettingError("task.max_args", max_args, "must be ≥ 2", "task.max_args=10")
    if min_length < 0:
        raise SettingError("task.min_length", min_length, "must be ≥ 0", "task.min_length=0")
    if max_length < min_length + 2:
        raise SettingError(
            "task.max_length",
            max_length,
            f"must be at least task.min_length + 2 = {min_length + 2}, "
            "as lengths lie strictly between the two",
            f"task.max_length={max(4 * min_length, min_length + 2)}",
        )
    longest = 1
    for _ in range(max_depth - 1):
        longest = 2 + max_args * longest
        if longest > min_length:
            break
    if longest <= min_length:
        raise SettingError(
            "task.min_length",
            min_length,
            f"must be below {longest}, the longest expression at task.max_depth={max_depth} "
            f"and task.max_args={max_args}",
            f"task.min_length={longest // 2}",
        )


def generate(
    num_samples: int,
    *,
    min_length: int = 500,
    max_length: int = 2000,
    max_depth: int = 10,
    max_args: int = 10,
    seed: int = 0,
    workers: int | None = None,
) -> Expressions:
    """Draw distinct expressions with the law of the Long-Range Arena's generator.

    The first n of a longer set are the set of n: the result depends on the seed and on the law's
    four settings, not on ``workers``.

    Args:
        num_samples: how many.
        min_length, max_length: tokens lie strictly between the two, brackets counted.
        max_depth: depth at which every node is a digit; the root has depth 1.
        max_args: most arguments of an operator.
        seed: any non-negative integer.
        workers: threads; by default one a core.

    Returns:
        A sequence of ``(expression, target)``, e.g. ``("[MAX 4 3 [MIN 2 3 ] 1 0 ]", 4)``; its
        arrays are what a model is fed.

    Raises:
        SettingError: no expression satisfies the settings.
        UserError: fewer than ``num_samples`` distinct expressions were found.
    """
    check_settings(num_samples, min_length, max_length, max_depth, max_args, seed)
    law = Law(min_length, max_length, max_depth, max_args)
    seen: set[bytes] = set()
    kept: list[Expressions] = []
    shards = 0
    with ThreadPoolExecutor(workers or _cores()) as pool:
        while len(seen) < num_samples:
            before, wanted = len(seen), -(-(num_samples - len(seen)) // SHARD)
            numbers = range(shards, shards + wanted)
            shards += wanted
            for shard in pool.map(lambda number: _shard(seed, number, law), numbers):
                kept.append(_new(shard, seen, num_samples))
            if len(seen) == before:
                raise UserError(
                    f"only {before} distinct ListOps expressions found with "
                    f"task.min_length={min_length} task.max_length={max_length} "
                    f"task.max_depth={max_depth}, {num_samples} wanted. "
                    "Try: fewer examples, or a larger task.max_length"
                )
    return join(kept) if kept else _nothing()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nothing() -> Expressions:
    empty = np.zeros(0, np.uint8)
    return Expressions(empty, np.zeros(1, np.int64), empty, empty)


def _new(shard: Expressions, seen: set[bytes], limit: int) -> Expressions:
    """The expressions of a shard that were not seen before, up to the limit on all together."""
    fresh = []
    data, offsets = shard.tokens.tobytes(), shard.offsets.tolist()
    for i in range(len(shard)):
        digest = blake2b(data[offsets[i] : offsets[i + 1]], digest_size=16).digest()
        if len(seen) == limit:
            break
        if digest not in seen:
            seen.add(digest)
            fresh.append(i)
    return shard if len(fresh) == len(shard) else shard.take(fresh)


class Law(NamedTuple):
    """What, beside the seed, decides which expressions come."""

    min_length: int
    max_length: int
    max_depth: int
    max_args: int


class Level(NamedTuple):
    """The nodes of many trees at one depth; siblings stand together, in their parents' order."""

    tree: NDArray[np.int32]
    """``(nodes,)`` the tree that a node belongs to."""
    is_operator: NDArray[np.bool_]
    """``(nodes,)``."""
    arity: NDArray[np.int64]
    """``(operators,)`` number of arguments."""


def _shard(seed: int, number: int, law: Law) -> Expressions:
    """The trees that one random stream yields: :data:`SHARD` of them, not yet told apart."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number,)))
    parts: list[Expressions] = []
    kept = drawn = 0
    while kept < SHARD:
        levels = _keep(*_shapes(rng, law), law, SHARD - kept)
        drawn += CANDIDATES
        if len(levels[0].tree):
            parts.append(_fill(rng, levels, law.max_args))
            kept += len(parts[-1])
        elif not kept and drawn >= HOPELESS:
            raise UserError(
                f"none of {drawn} random ListOps trees has between {law.min_length} and "
                f"{law.max_length} tokens. Try: task.min_length={law.min_length // 2}"
            )
    return join(parts)


def _shapes(rng: np.random.Generator, law: Law) -> tuple[list[Level], NDArray[np.int64]]:
    """Draw the shapes of :data:`CANDIDATES` trees, level by level.

    Returns:
        The levels, and the length of each tree. A tree that is too long is not grown further, and
        its length is then a lower bound (``max_length`` or more).
    """
    tree = np.arange(CANDIDATES, dtype=np.int32)
    lengths = np.zeros(CANDIDATES, np.int64)
    levels = []
    for depth in range(1, law.max_depth + 1):
        if depth < law.max_depth:  # one byte in four is below 64
            is_operator = np.frombuffer(rng.bytes(len(tree)), np.uint8) < 256 * OPERATOR_PROBABILITY
        else:
            is_operator = np.zeros(len(tree), np.bool_)
        parents = tree[is_operator]
        arity = rng.integers(2, law.max_args, len(parents), endpoint=True)
        levels.append(Level(tree, is_operator, arity))
        if not len(parents):
            lengths += np.bincount(tree, minlength=CANDIDATES)
            break
        lengths += np.bincount(tree, minlength=CANDIDATES)
        lengths += np.bincount(parents, minlength=CANDIDATES)  # closing brackets
        children = np.repeat(parents, arity)
        bound = lengths + np.bincount(children, minlength=CANDIDATES)
        lengths = np.where(bound < law.max_length, lengths, bound)
        tree = children[bound[children] < law.max_length]
    return levels, lengths


def _keep(levels: list[Level], lengths: NDArray[np.int64], law: Law, most: int) -> list[Level]:
    """The levels with the first ``most`` trees alone whose length is allowed, numbered from 0."""
    allowed = np.flatnonzero((lengths > law.min_length) & (lengths < law.max_length))[:most]
    number = np.full(len(lengths), -1, np.int32)
    number[allowed] = np.arange(len(allowed))
    kept = []
    for tree, is_operator, arity in levels:
        tree = number[tree]
        stays = tree >= 0
        kept.append(Level(tree[stays], is_operator[stays], arity[stays[is_operator]]))
    return kept


def _fill(rng: np.random.Generator, levels: list[Level], max_args: int) -> Expressions:
    """Draw operators and digits for shapes, and lay the trees out as tokens with their values."""
    starts, sizes, offsets = _places(levels)
    tokens = rng.integers(FIRST_DIGIT, FIRST_DIGIT + 10, offsets[-1], dtype=np.uint8)
    depths = np.zeros(len(offsets) - 1, np.uint8)
    values = np.zeros(0, np.uint8)
    for level, start, size in zip(levels[::-1], starts[::-1], sizes[::-1], strict=True):
        below = values
        values = tokens[start] - np.uint8(FIRST_DIGIT)
        opening = start[level.is_operator]
        operators = rng.integers(0, len(OPERATORS), len(opening), dtype=np.uint8)
        values[level.is_operator] = _reduce(operators, below, level.arity, max_args)
        tokens[opening] = operators + np.uint8(FIRST_OPERATOR)
        tokens[opening + size[level.is_operator] - 1] = CLOSE
    for depth, level in enumerate(levels, start=1):
        depths[level.tree[level.is_operator]] = depth
    return Expressions(tokens, offsets, values, depths)


def _places(
    levels: list[Level],
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], NDArray[np.int64]]:
    """Where each node's tokens start and how many it has, per level; and the trees' offsets."""
    sizes: list[NDArray[np.int64]] = []
    for level in levels[::-1]:  # from the leaves up
        size = np.ones(len(level.tree), np.int64)
        if len(level.arity):
            size[level.is_operator] = 2 + np.add.reduceat(sizes[-1], _offsets(level.arity)[:-1])
        sizes.append(size)
    sizes.reverse()
    offsets = _offsets(sizes[0])
    starts = [offsets[:-1]]
    for level, size in zip(levels[:-1], sizes[1:], strict=True):  # from the roots down
        before = _offsets(size)[:-1]
        first = starts[-1][level.is_operator] + 1  # where an operator's first argument stands
        shift = first - before[_offsets(level.arity)[:-1]]
        starts.append(before + np.repeat(shift, level.arity))
    return starts, sizes, offsets


def _reduce(
    operators: Tokens, arguments: Tokens, arity: NDArray[np.int64], max_args: int
) -> Tokens:
    """Values of operators, whose arguments stand one operator after the other."""
    values = np.empty(len(operators), np.uint8)
    if not len(operators):
        return values
    first = _offsets(arity)[:-1]
    folds = (np.minimum.reduceat, np.maximum.reduceat, None, np.add.reduceat)
    for operator, fold in enumerate(folds):
        chosen = operators == operator
        if fold is not None:
            dtype = np.int64 if operator == 3 else np.uint8
            values[chosen] = fold(arguments, first, dtype=dtype)[chosen] % 10
        else:
            values[chosen] = _medians(arguments, first[chosen], arity[chosen], max_args)
    return values


def _medians(
    arguments: Tokens, first: NDArray[np.int64], arity: NDArray[np.int64], max_args: int
) -> Tokens:
    """Medians of runs of ``arguments``, rounded towards zero."""
    column = np.arange(max_args)
    rows = arguments[np.minimum(first[:, None] + column, len(arguments) - 1)]
    rows[column >= arity[:, None]] = 255  # sorts behind every digit
    rows.sort(axis=1)
    each = np.arange(len(rows))
    return (rows[each, (arity - 1) // 2] + rows[each, arity // 2]) // 2
