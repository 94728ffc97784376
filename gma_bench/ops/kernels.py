"""Triton kernels of GMA, forward and backward. :mod:`gma_bench.ops.fused` launches them.

Tokens come in blocks of ``BLOCK`` and in parts of whole blocks. Each part has a state, ``Ṽ`` and
``Z`` of its keys: bidirectional, the states are added up and everyone reads the sum; causal, a scan
leaves before each part the sum of the parts before it, and inside a part a masked product of
responsibilities does the rest.

A block holds the responsibilities of all components, ``(BLOCK, COMPONENTS)``, and never writes them
out. What is summed over tokens goes into memory that belongs to one program, so that nothing is
atomic and results repeat to the bit.

Logits are float32. ``far`` chooses how, for a whole call: as products over ``[x², x]``, or, where
that cancels, term by term (see :mod:`gma_bench.ops.mixture`).

Arguments in capitals are compile-time: ``COMPONENTS`` is a power of two that holds ``components``;
widths are walked in steps of ``WIDTH_TILE`` and ``VALUE_TILE``. Loops keep what does not change
inside them where it is used (``disable_licm``): hoisted, the addresses of every tile would live in
registers throughout.

Products with values that come in 16 bits are tf32 where ``COARSE`` is 1 (2: rounded to it by hand,
for the interpreter, which knows only float32). Every logit, and every gradient of a responsibility,
has ``PRECISION``: full float32. (Three tf32 products in place of one would be quicker on paper, but
Triton gives every warp of such a chain the whole right operand, in two halves: kilobytes of spills.)
"""

# mypy: ignore-errors
# (arguments of kernels have no Python types)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, COARSE: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b`` of float32 operands, summed in float32."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    if COARSE == 1:
        return tl.dot(a, b, input_precision="tf32")
    if COARSE == 2:
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def to_tf32(x):
    """Rounded to the 10 bits of mantissa that a tf32 product takes."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def tile(base, stride, rows, columns, num_rows, num_columns):
    """Rows and columns of a matrix whose rows are contiguous; zero outside it."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    where = rows[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(base + where, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def shift(centre, columns, num_columns):
    """What is taken from every value, ``(1, VALUE_TILE)``."""
    return tl.load(centre + columns, mask=columns < num_columns, other=0.0)[None, :]


@triton.jit
def value_tile(v, centre, stride, rows, columns, real, num_rows, num_columns, COARSE: tl.constexpr):
    """Values of the keys that are real, zero elsewhere; in float32 less ``centre``."""
    values = tile(v, stride, rows, columns, num_rows, num_columns)
    if COARSE == 0:
        values -= shift(centre, columns, num_columns)
    return tl.where(real[:, None], values, 0.0)


@triton.jit
def put(base, stride, rows, columns, num_rows, num_columns, values):
    """Store what :func:`tile` loads."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    where = rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(base + where, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def add(base, stride, rows, columns, num_rows, num_columns, values, rounds):
    """Add to a matrix of this program's own; start it in round 0."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    where = rows[:, None].to(tl.int64) * stride + columns[None, :]
    before = tl.load(base + where, mask=inside & (rows[:, None] < num_rows * rounds), other=0.0)
    tl.store(base + where, before + values, mask=inside)


@triton.jit
def responsibilities(
    x,
    stride,
    rows,
    num_rows,
    half_precision,
    linear,
    means,
    constant,
    far,
    components,
    width,
    COMPONENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Posteriors of a block, ``(BLOCK, COMPONENTS)``; zero for components that do not exist."""
    slots = tl.arange(0, COMPONENTS)
    constants = tl.load(constant + slots, mask=slots < components, other=float("-inf"))
    logits = tl.zeros((BLOCK, COMPONENTS), tl.float32) + constants[None, :]
    if far:
        # Compensated (Kahan): a hundred terms sum to a hundred times what decides between two.
        lost = tl.zeros((BLOCK, COMPONENTS), tl.float32)
        for i in tl.range(width, disable_licm=True):
            column = tl.load(
                x + rows.to(tl.int64) * stride + i, mask=rows < num_rows, other=0.0
            ).to(tl.float32)
            mean = tl.load(means + slots * width + i, mask=slots < components, other=0.0)
            half = tl.load(half_precision + slots * width + i, mask=slots < components, other=0.0)
            difference = column[:, None] - mean[None, :]
            term = difference * difference * half[None, :] + lost
            total = logits - term
            lost = tl.where(total == float("-inf"), 0.0, (total - logits) + term)
            logits = total
        logits -= tl.max(logits, 1)[:, None]
        logits -= lost
    else:
        for start in tl.range(0, width, WIDTH_TILE, disable_licm=True):
            columns = start + tl.arange(0, WIDTH_TILE)
            block = tile(x, stride, rows, columns, num_rows, width)
            first = tl.trans(tile(linear, width, slots, columns, components, width))
            second = tl.trans(tile(half_precision, width, slots, columns, components, width))
            logits += product(block, first, 0, PRECISION)
            logits -= product(block * block, second, 0, PRECISION)
        logits -= tl.max(logits, 1)[:, None]
    weights = tl.exp(logits)
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def logits_backward(
    grad,
    x,
    grad_x,
    stride,
    grad_stride,
    rows,
    num_rows,
    half_precision,
    linear,
    means,
    far,
    grad_square,
    grad_linear,
    grad_constant,
    rounds,
    components,
    width,
    COMPONENTS: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient for the tokens of a block, and its share of the sums for the mixture.

    These are ``Σ dL x²`` and ``Σ dL x``, or ``Σ dL (x − μ)²`` and ``Σ dL (x − μ)`` where far.
    """
    slots = tl.arange(0, COMPONENTS)
    present = slots < components
    if far:
        for i in tl.range(width, disable_licm=True):
            where = rows.to(tl.int64) * stride + i
            column = tl.load(x + where, mask=rows < num_rows, other=0.0).to(tl.float32)
            mean = tl.load(means + slots * width + i, mask=present, other=0.0)
            half = tl.load(half_precision + slots * width + i, mask=present, other=0.0)
            difference = column[:, None] - mean[None, :]
            weighted = grad * difference
            result = tl.sum(weighted * half[None, :], 1) * -2.0
            tl.store(
                grad_x + rows.to(tl.int64) * grad_stride + i,
                result.to(grad_x.dtype.element_ty),
                mask=rows < num_rows,
            )
            mine = present & (slots < components * rounds)
            first = tl.load(grad_linear + slots * width + i, mask=mine, other=0.0)
            second = tl.load(grad_square + slots * width + i, mask=mine, other=0.0)
            tl.store(grad_linear + slots * width + i, first + tl.sum(weighted, 0), mask=present)
            second += tl.sum(weighted * difference, 0)
            tl.store(grad_square + slots * width + i, second, mask=present)
    else:
        turned = tl.trans(grad)
        for start in tl.range(0, width, WIDTH_TILE, disable_licm=True):
            columns = start + tl.arange(0, WIDTH_TILE)
            block = tile(x, stride, rows, columns, num_rows, width)
            first = tile(linear, width, slots, columns, components, width)
            second = tile(half_precision, width, slots, columns, components, width)
            result = product(grad, first, 0, PRECISION)
            result -= 2.0 * block * product(grad, second, 0, PRECISION)
            put(grad_x, grad_stride, rows, columns, num_rows, width, result)
            add(grad_linear, width, slots, columns, components, width,
                product(turned, block, 0, PRECISION), rounds)  # fmt: skip
            add(grad_square, width, slots, columns, components, width,
                product(turned, block * block, 0, PRECISION), rounds)  # fmt: skip
    total = tl.load(grad_constant + slots, mask=present & (slots < components * rounds), other=0.0)
    tl.store(grad_constant + slots, total + tl.sum(grad, 0), mask=present)
    tl.debug_barrier()  # the sums are read again by other threads of this program


@triton.jit
def softmax_backward(grad, weights):
    """``γ (g − Σ γ g)``, centred first: what is left next to a weight near 1 is all there is."""
    grad -= tl.sum(grad * weights, 1)[:, None]
    return weights * (grad - tl.sum(grad * weights, 1)[:, None])


@triton.jit
def write(
    k,
    v,
    centre,
    key_mask,
    half_precision,
    linear,
    means,
    constant,
    far_flag,
    states,
    masses,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    heads,
    length,
    components,
    width,
    value_width,
    parts,
    part_blocks,
    program_parts,
    MASKED: tl.constexpr,
    COMPONENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COARSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``Γᵀ V`` into ``states (B·H, parts, K, d_v)`` and ``Γᵀ 1`` into ``masses (B·H, parts, K)``."""
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    centre += sequence * value_width
    half_precision += head * components * width
    linear += head * components * width
    means += head * components * width
    constant += head * components
    far = tl.load(far_flag)
    slots = tl.arange(0, COMPONENTS)
    first_part = tl.program_id(0) * program_parts
    for part in tl.range(
        first_part, tl.minimum(first_part + program_parts, parts), disable_licm=True
    ):
        place = sequence * parts + part
        mass = tl.zeros((COMPONENTS,), tl.float32)
        for index in tl.range(part_blocks, disable_licm=True):
            rows = (part * part_blocks + index) * BLOCK + tl.arange(0, BLOCK)
            gamma = responsibilities(
                k,
                k_row,
                rows,
                length,
                half_precision,
                linear,
                means,
                constant,
                far,
                components,
                width,
                COMPONENTS,
                BLOCK,
                WIDTH_TILE,
                PRECISION,
            )
            real = rows < length
            if MASKED:
                real = real & (tl.load(key_mask + batch * length + rows, mask=real, other=0) != 0)
            gamma = tl.where(real[:, None], gamma, 0.0)
            mass += tl.sum(gamma, 0)
            for start in tl.range(0, value_width, VALUE_TILE, disable_licm=True):
                columns = start + tl.arange(0, VALUE_TILE)
                values = value_tile(
                    v, centre, v_row, rows, columns, real, length, value_width, COARSE
                )
                add(
                    states + place * components * value_width,
                    value_width,
                    slots,
                    columns,
                    components,
                    value_width,
                    product(tl.trans(gamma), values, COARSE, PRECISION),
                    index,
                )
            tl.debug_barrier()
        tl.store(masses + place * components + slots, mass, mask=slots < components)


@triton.jit
def scan(states, size, parts, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the earlier (or later) parts in place of each part's own, ``(B·H, parts, size)``."""
    first = tl.program_id(1).to(tl.int64) * parts
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.range(parts, disable_licm=True):
        part = parts - 1 - index if REVERSE else index
        where = states + (first + part) * size + columns
        own = tl.load(where, mask=columns < size, other=0.0)
        tl.store(where, total, mask=columns < size)
        total += own


@triton.jit
def read(
    q,
    k,
    v,
    centre,
    key_mask,
    out,
    exact,
    denominators,
    half_precision,
    linear,
    means,
    constant,
    far_flag,
    states,
    masses,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    heads,
    length,
    components,
    width,
    value_width,
    parts,
    part_blocks,
    eps,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    COMPONENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COARSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``O = Γ_Q Ṽ / (Γ_Q Z + ε)``, a block a program.

    Also the denominators ``(B·H, N)``, and O in float32 ``(B·H, N, d_v)``, less ``centre`` where the
    values were: backward takes differences of it, which O itself does not carry.
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    centre += sequence * value_width
    out += batch * o_batch + head * o_head
    half_precision += head * components * width
    linear += head * components * width
    means += head * components * width
    constant += head * components
    block = tl.program_id(0)
    source = sequence * parts + block // part_blocks if CAUSAL else sequence
    states += source * components * value_width
    masses += source * components
    far = tl.load(far_flag)
    slots = tl.arange(0, COMPONENTS)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    gamma = responsibilities(
        q,
        q_row,
        rows,
        length,
        half_precision,
        linear,
        means,
        constant,
        far,
        components,
        width,
        COMPONENTS,
        BLOCK,
        WIDTH_TILE,
        PRECISION,
    )
    mass = tl.load(masses + slots, mask=slots < components, other=0.0)
    for start in tl.range(0, value_width, VALUE_TILE, disable_licm=True):
        columns = start + tl.arange(0, VALUE_TILE)
        found = tl.sum(gamma * mass[None, :], 1)
        state = tile(states, value_width, slots, columns, components, value_width)
        numerator = product(gamma, state, COARSE, PRECISION)
        if CAUSAL:
            for other in tl.range(block // part_blocks * part_blocks, block + 1, disable_licm=True):
                keys = other * BLOCK + tl.arange(0, BLOCK)
                gamma_k = responsibilities(
                    k,
                    k_row,
                    keys,
                    length,
                    half_precision,
                    linear,
                    means,
                    constant,
                    far,
                    components,
                    width,
                    COMPONENTS,
                    BLOCK,
                    WIDTH_TILE,
                    PRECISION,
                )
                real = keys < length
                if MASKED:
                    real = real & (
                        tl.load(key_mask + batch * length + keys, mask=real, other=0) != 0
                    )
                affinity = product(gamma, tl.trans(gamma_k), COARSE, PRECISION)
                seen = (keys[None, :] <= rows[:, None]) & real[None, :]
                affinity = tl.where(seen, affinity, 0.0)
                values = value_tile(
                    v, centre, v_row, keys, columns, real, length, value_width, COARSE
                )
                found += tl.sum(affinity, 1)
                numerator += product(affinity, values, COARSE, PRECISION)
        denominator = found + eps
        result = numerator / denominator[:, None]
        if COARSE == 0:  # nothing of a later key where nothing was found yet
            taken = tl.where(found[:, None] > 0, shift(centre, columns, value_width), 0.0)
            whole = result + taken * (found / denominator)[:, None]
            put(out, o_row, rows, columns, length, value_width, whole)
            result -= taken * (eps / denominator)[:, None]
        else:
            put(out, o_row, rows, columns, length, value_width, result)
        put(
            exact + sequence * length * value_width,
            value_width,
            rows,
            columns,
            length,
            value_width,
            result,
        )
        if start == 0:
            tl.store(denominators + sequence * length + rows, denominator, mask=rows < length)


@triton.jit
def read_backward(
    q,
    k,
    v,
    centre,
    key_mask,
    out,
    grad_out,
    grad_q,
    denominators,
    ratios,
    half_precision,
    linear,
    means,
    constant,
    far_flag,
    states,
    masses,
    grad_states,
    grad_masses,
    grad_square,
    grad_linear,
    grad_constant,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    g_batch,
    g_head,
    g_row,
    dq_batch,
    dq_head,
    dq_row,
    heads,
    length,
    components,
    width,
    value_width,
    grad_parts,
    part_blocks,
    program_parts,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    COMPONENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COARSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients for the queries, and for the state of each part from the part's queries.

    ``ratios (B·H, N)`` receives ``Σ dO O / denominator``, which the keys need too.
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    centre += sequence * value_width
    out += batch * o_batch + head * o_head
    grad_out += batch * g_batch + head * g_head
    grad_q += batch * dq_batch + head * dq_head
    half_precision += head * components * width
    linear += head * components * width
    means += head * components * width
    constant += head * components
    program = sequence * tl.num_programs(0) + tl.program_id(0)
    grad_square += program * components * width
    grad_linear += program * components * width
    grad_constant += program * components
    far = tl.load(far_flag)
    slots = tl.arange(0, COMPONENTS)
    first_part = tl.program_id(0) * program_parts
    for part in tl.range(
        first_part, tl.minimum(first_part + program_parts, grad_parts), disable_licm=True
    ):
        place = sequence * grad_parts + part
        source = place if CAUSAL else sequence
        mass = tl.load(masses + source * components + slots, mask=slots < components, other=0.0)
        grad_mass = tl.zeros((COMPONENTS,), tl.float32)
        for index in tl.range(part_blocks, disable_licm=True):
            block = part * part_blocks + index
            rows = block * BLOCK + tl.arange(0, BLOCK)
            gamma = responsibilities(
                q,
                q_row,
                rows,
                length,
                half_precision,
                linear,
                means,
                constant,
                far,
                components,
                width,
                COMPONENTS,
                BLOCK,
                WIDTH_TILE,
                PRECISION,
            )
            inverse = 1.0 / tl.load(
                denominators + sequence * length + rows, mask=rows < length, other=1.0
            )
            ratio = tl.zeros((BLOCK,), tl.float32)
            grad = tl.zeros((BLOCK, COMPONENTS), tl.float32)
            for start in tl.range(0, value_width, VALUE_TILE, disable_licm=True):
                columns = start + tl.arange(0, VALUE_TILE)
                upstream = tile(grad_out, g_row, rows, columns, length, value_width)
                upstream *= inverse[:, None]
                ratio += tl.sum(upstream * tile(out, o_row, rows, columns, length, value_width), 1)
                state = tile(
                    states + source * components * value_width,
                    value_width,
                    slots,
                    columns,
                    components,
                    value_width,
                )
                grad += product(upstream, tl.trans(state), 0, PRECISION)
                add(
                    grad_states + place * components * value_width,
                    value_width,
                    slots,
                    columns,
                    components,
                    value_width,
                    product(tl.trans(gamma), upstream, COARSE, PRECISION),
                    index,
                )
            grad -= ratio[:, None] * mass[None, :]
            grad_mass -= tl.sum(gamma * ratio[:, None], 0)
            tl.store(ratios + sequence * length + rows, ratio, mask=rows < length)
            if CAUSAL:
                for other in tl.range(part * part_blocks, block + 1, disable_licm=True):
                    keys = other * BLOCK + tl.arange(0, BLOCK)
                    gamma_k = responsibilities(
                        k,
                        k_row,
                        keys,
                        length,
                        half_precision,
                        linear,
                        means,
                        constant,
                        far,
                        components,
                        width,
                        COMPONENTS,
                        BLOCK,
                        WIDTH_TILE,
                        PRECISION,
                    )
                    real = keys < length
                    if MASKED:
                        real = real & (
                            tl.load(key_mask + batch * length + keys, mask=real, other=0) != 0
                        )
                    affinity = tl.zeros((BLOCK, BLOCK), tl.float32) - ratio[:, None]
                    for start in tl.range(0, value_width, VALUE_TILE, disable_licm=True):
                        columns = start + tl.arange(0, VALUE_TILE)
                        upstream = tile(grad_out, g_row, rows, columns, length, value_width)
                        values = value_tile(
                            v, centre, v_row, keys, columns, real, length, value_width, COARSE
                        )
                        affinity += product(
                            upstream * inverse[:, None], tl.trans(values), 0, PRECISION
                        )
                    seen = (keys[None, :] <= rows[:, None]) & real[None, :]
                    affinity = tl.where(seen, affinity, 0.0)
                    grad += product(affinity, gamma_k, 0, PRECISION)
            grad = tl.where((rows < length)[:, None], softmax_backward(grad, gamma), 0.0)
            logits_backward(
                grad,
                q,
                grad_q,
                q_row,
                dq_row,
                rows,
                length,
                half_precision,
                linear,
                means,
                far,
                grad_square,
                grad_linear,
                grad_constant,
                (part - first_part) * part_blocks + index,
                components,
                width,
                COMPONENTS,
                WIDTH_TILE,
                PRECISION,
            )
        tl.store(grad_masses + place * components + slots, grad_mass, mask=slots < components)


@triton.jit
def write_backward(
    q,
    k,
    v,
    centre,
    key_mask,
    grad_out,
    grad_k,
    grad_v,
    denominators,
    ratios,
    half_precision,
    linear,
    means,
    constant,
    far_flag,
    grad_states,
    grad_masses,
    grad_square,
    grad_linear,
    grad_constant,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    g_batch,
    g_head,
    g_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    heads,
    length,
    components,
    width,
    value_width,
    key_parts,
    part_blocks,
    program_parts,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    COMPONENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    COARSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients for keys and values, from those of the state that holds them."""
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    centre += sequence * value_width
    grad_out += batch * g_batch + head * g_head
    grad_k += batch * dk_batch + head * dk_head
    grad_v += batch * dv_batch + head * dv_head
    half_precision += head * components * width
    linear += head * components * width
    means += head * components * width
    constant += head * components
    program = sequence * tl.num_programs(0) + tl.program_id(0)
    grad_square += program * components * width
    grad_linear += program * components * width
    grad_constant += program * components
    far = tl.load(far_flag)
    slots = tl.arange(0, COMPONENTS)
    first_part = tl.program_id(0) * program_parts
    for part in tl.range(
        first_part, tl.minimum(first_part + program_parts, key_parts), disable_licm=True
    ):
        source = sequence * key_parts + part if CAUSAL else sequence
        grad_mass = tl.load(
            grad_masses + source * components + slots, mask=slots < components, other=0.0
        )
        for index in tl.range(part_blocks, disable_licm=True):
            block = part * part_blocks + index
            rows = block * BLOCK + tl.arange(0, BLOCK)
            real = rows < length
            if MASKED:
                real = real & (tl.load(key_mask + batch * length + rows, mask=real, other=0) != 0)
            gamma = responsibilities(
                k,
                k_row,
                rows,
                length,
                half_precision,
                linear,
                means,
                constant,
                far,
                components,
                width,
                COMPONENTS,
                BLOCK,
                WIDTH_TILE,
                PRECISION,
            )
            gamma = tl.where(real[:, None], gamma, 0.0)
            grad = tl.zeros((BLOCK, COMPONENTS), tl.float32) + grad_mass[None, :]
            for start in tl.range(0, value_width, VALUE_TILE, disable_licm=True):
                columns = start + tl.arange(0, VALUE_TILE)
                grad_state = tile(
                    grad_states + source * components * value_width,
                    value_width,
                    slots,
                    columns,
                    components,
                    value_width,
                )
                values = value_tile(
                    v, centre, v_row, rows, columns, real, length, value_width, COARSE
                )
                grad += product(values, tl.trans(grad_state), 0, PRECISION)
                result = product(gamma, grad_state, COARSE, PRECISION)
                if CAUSAL:
                    for other in tl.range(block, (part + 1) * part_blocks, disable_licm=True):
                        queries = other * BLOCK + tl.arange(0, BLOCK)
                        inside = queries < length
                        gamma_q = responsibilities(
                            q,
                            q_row,
                            queries,
                            length,
                            half_precision,
                            linear,
                            means,
                            constant,
                            far,
                            components,
                            width,
                            COMPONENTS,
                            BLOCK,
                            WIDTH_TILE,
                            PRECISION,
                        )
                        seen = (rows[:, None] <= queries[None, :]) & inside[None, :]
                        affinity = product(gamma, tl.trans(gamma_q), COARSE, PRECISION)
                        affinity = tl.where(seen, affinity, 0.0)
                        where = sequence * length + queries
                        denominator = tl.load(denominators + where, mask=inside, other=1.0)
                        upstream = tile(grad_out, g_row, queries, columns, length, value_width)
                        upstream /= denominator[:, None]
                        result += product(affinity, upstream, COARSE, PRECISION)
                        share = product(values, tl.trans(upstream), 0, PRECISION)
                        if start == 0:
                            ratio = tl.load(ratios + where, mask=inside, other=0.0)
                            share -= ratio[None, :]
                        share = tl.where(seen, share, 0.0)
                        grad += product(share, gamma_q, 0, PRECISION)
                result = tl.where(real[:, None], result, 0.0)
                put(grad_v, dv_row, rows, columns, length, value_width, result)
            grad = tl.where(real[:, None], softmax_backward(grad, gamma), 0.0)
            logits_backward(
                grad,
                k,
                grad_k,
                k_row,
                dk_row,
                rows,
                length,
                half_precision,
                linear,
                means,
                far,
                grad_square,
                grad_linear,
                grad_constant,
                (part - first_part) * part_blocks + index,
                components,
                width,
                COMPONENTS,
                WIDTH_TILE,
                PRECISION,
            )
