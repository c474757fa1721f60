"""Exact sums of the columns of a bfloat16 or float16 matrix (contract section 3), read once on a GPU.

Computes     y_j = the exact sum of x_ij over rows i, rounded to binary32 and then to the output type
Order        none: all additions are exact
Invariant to tiles, splits, threads, devices, strides
Rounds at    each term, to 38 bits below the largest magnitude; the total; the output type

Terms need no rounding where they are multiples of the column's unit as they stand. Let 2^(e-1) <= m < 2^e for
the largest magnitude m of a column, u = 2^(e-38) its unit, P the bits of a significand (8 or 11), and let no
element but zeros lie more than W binades below m. Then each element is a multiple of 2^(e-W-P) and less than
2^e, so that

    W + P <= 38                every element is a multiple of u: RNE(x / u) = x / u, and T u = sum of x;
    W + P + log2(rows) <= 53   every sum of any of the column's elements is a binary64 number: binary64
                               additions in any order are exact.

So the first launch adds in binary64, without knowing any unit, and keeps for each column of a slab of rows its
sum and its largest and smallest magnitude. The second launch knows the column: where the smallest one lies
within W binades of the largest, it rounds the total once. Else both conditions still hold for most slabs: only
chunks of slabs with smaller elements (or with what is not finite) are read again, by the terms of
`column_sums`, and integers are added. A result below 2^-126 is a multiple of 2^-149, so it is exact; hence
rounding before or after scaling is the same.

A number becomes binary64 without a conversion: its sign, and its exponent and fraction in the upper word, are
that number times 2^(15 - 1023) or 2^(127 - 1023), subnormal numbers included. What is infinite or NaN becomes
some finite number, and is known by its magnitude.

The definition in graph operations, `lowering.prims.sum`, is the twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from carbon_compile.templates import column_sums as general
from carbon_compile.templates import launch
from carbon_compile.templates.matmul_recipe import BIAS, A, Block, Recipe
from carbon_compile.templates.sum_kernels import store_bits

TYPES = (torch.bfloat16, torch.float16)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_MINUS_INFINITY_BITS = tl.constexpr(-0x800000)
# Of two columns at a time: the largest magnitudes; the smallest ones less one, so that zeros come last; and sums.
_PAIRS = """{ .reg .b32 magnitude, first, second, zero, ones; .reg .b64 wide;
mov.b32 zero, 0;
mov.b32 ones, 0xffffffff;
and.b32 magnitude, $4, 0x7fff7fff;
max.u16x2 $0, $5, magnitude;
add.u16x2 magnitude, magnitude, ones;
min.u16x2 $1, $6, magnitude;
shl.b32 first, $4, 16;
shr.s32 first, first, UP;
and.b32 first, first, UPPER;
mov.b64 wide, {zero, first};
add.rn.f64 $2, $7, wide;
shr.s32 second, $4, UP;
and.b32 second, second, UPPER;
mov.b64 wide, {zero, second};
add.rn.f64 $3, $8, wide; }"""
_BFLOAT16_PAIRS = tl.constexpr(_PAIRS.replace("UPPER", "0x8fffe000").replace("UP", "3"))
_FLOAT16_PAIRS = tl.constexpr(_PAIRS.replace("UPPER", "0x81fffc00").replace("UP", "6"))


def binades(dtype: torch.dtype, rows: int) -> int:
    """W: how far below the largest magnitude the elements of a column of that many rows may lie."""
    significand = 8 if dtype == torch.bfloat16 else 11
    return min(38, 53 - (rows - 1).bit_length()) - significand


# --- the first launch ---


@triton.jit
def _nothing(BM: tl.constexpr, BN: tl.constexpr):
    """(largest magnitudes, smallest ones less one, sums) of nothing: halves of words where a GPU compares those."""
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        state = (tl.zeros((BM, BN), tl.int16), tl.full((BM, BN), -1, tl.int16), tl.zeros((BM, BN), tl.float64))
    else:
        state = (tl.zeros((BM, BN), tl.int32), tl.full((BM, BN), 0xFFFF, tl.int32), tl.zeros((BM, BN), tl.float64))
    return state


@triton.jit
def _with(state, x):
    """A state with a tile of elements."""
    top, low, total = state
    bits = x.to(tl.int16, bitcast=True)
    if top.dtype == tl.int16:
        PAIRS: tl.constexpr = _BFLOAT16_PAIRS if x.dtype == tl.bfloat16 else _FLOAT16_PAIRS
        top, low, total = tl.inline_asm_elementwise(
            PAIRS, "=&r,=&r,=&d,=&d,r,r,r,d,d", [bits, top, low, total], dtype=(tl.int16, tl.int16, tl.float64), is_pure=True, pack=2
        )
    else:
        word = bits.to(tl.int32)
        magnitude = word & 0x7FFF
        top = tl.maximum(top, magnitude)
        low = tl.minimum(low, (magnitude - 1) & 0xFFFF)
        if x.dtype == tl.bfloat16:
            word = (word << 13) & -0x70000001
        else:
            word = (word << 10) & -0x7E000001
        total += (word.to(tl.int64) << 32).to(tl.float64, bitcast=True)
    return top, low, total


@triton.jit(do_not_specialize=["M", "span", "splits"])
def slabs_kernel(
    x_ptr, sums_ptr, marks_ptr, totals_ptr, arrived_ptr, M, N, stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """What slabs of `span` rows of x [M, N] hold: sums float64 [splits, N], and marks int32 [splits, N], the largest
    magnitude in the lower half and the smallest less one in the upper half.

    Rows of x are contiguous; EVEN: BN divides N. Also zeros to the totals int64 [N] and, for each BLOCK
    columns, arrivals int32, which the second launch may add to.
    """
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        gdc_launch_dependents()  # once all programs have begun; without effect unless the second launch may overlap
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    j = tile * BN + tl.arange(0, BN)
    start = split * span
    end = tl.minimum(start + span, M)
    # A full step's loads are on their way while the one before is added; the first step takes what is left over.
    steps = (end - start - 1) // (BM * UNROLL)
    full = end - steps * (BM * UNROLL)
    rows = tl.arange(0, BM)
    at = x_ptr + (full + rows).to(tl.int64)[:, None] * stride + j[None, :]
    xs = general._first_tiles(x_ptr, start + rows, j, full, N, stride, BM, UNROLL, EVICTION)
    if split == 0:
        block = tile * (BN // BLOCK) + tl.arange(0, BN // BLOCK)
        tl.store(arrived_ptr + block, tl.zeros((BN // BLOCK,), tl.int32), mask=block * BLOCK < N)
        tl.store(totals_ptr + j, tl.zeros((BN,), tl.int64), mask=j < N)
    state = _nothing(BM, BN)
    for _ in range(0, steps):
        following = general._tiles(at, j, N, stride, BM, UNROLL, EVEN, EVICTION)
        for u in tl.static_range(UNROLL):
            state = _with(state, xs[u])
        xs = following
        at += BM * UNROLL * tl.cast(stride, tl.int64)
    for u in tl.static_range(UNROLL):
        state = _with(state, xs[u])
    top, low, total = state
    # One reduction of both marks, for each waits for all warps.
    both = tl.max(tl.join(top.to(tl.int32) & 0xFFFF, (low.to(tl.int32) & 0xFFFF) ^ 0xFFFF), axis=0)
    top, low = tl.split(both)
    place = split.to(tl.int64) * N + j
    tl.store(marks_ptr + place, top | ((low ^ 0xFFFF) << 16), mask=j < N)
    tl.store(sums_ptr + place, tl.sum(total, axis=0), mask=j < N)


# --- the second launch ---


@triton.jit
def _field(magnitude, BFLOAT16: tl.constexpr):
    """The exponent field, of which subnormal numbers and zeros have 1 as the lowest normal ones do."""
    if BFLOAT16:
        field = magnitude >> 7
    else:
        field = magnitude >> 10
    return tl.maximum(field, 1)


@triton.jit
def _magnitude_bits(magnitude, like):
    """Of binary32, from those of the type of `like`."""
    element: tl.constexpr = like.dtype.element_ty
    return magnitude.to(tl.int16).to(element, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _power(k):
    """2^k in binary64, for normal numbers."""
    return ((k + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _scaled(total, BFLOAT16: tl.constexpr):
    """Sums as they are, of sums of elements as they were added."""
    if BFLOAT16:
        y = total * 2.0**896
    else:
        y = total * 2.0**1008
    return y


@triton.jit
def _store_total(at, m, out_ptr, j, N):
    """A total; of columns that are not finite how many helpers met +inf, and 2^32 times how many met -inf."""
    total = tl.load(at, mask=j < N, other=0, cache_modifier=".cg")
    both = ((total & 0xFFFFFFFF) > 0) & ((total >> 32) > 0)
    special = tl.where(both, 0x7FFFFFFF, tl.where((total >> 32) > 0, _MINUS_INFINITY_BITS, _INFINITY_BITS))
    special = tl.where(m == _INFINITY_BITS, special, m)
    finite = m < _INFINITY_BITS
    general._store(total, m, out_ptr, j, finite & (j < N))
    store_bits(special, special > _INFINITY_BITS, out_ptr + j, (finite == 0) & (j < N))


@triton.jit
def _settle_again(
    x_ptr, sums_ptr, marks_ptr, totals_ptr, arrived_ptr, out_ptr, block, helper, j, m, top, limit, M, N, stride, span, splits,
    BM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, HELPERS: tl.constexpr,
):  # fmt: skip
    """A helper's part in columns of which some terms are not whole; the last one to arrive stores results."""
    BFLOAT16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    # A chunk's slabs, if they hold whole terms in all columns. Of a column that is not finite, only the signs of
    # infinities matter.
    slab = (tl.arange(0, CHUNKS) * HELPERS + helper)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    present = (slab < splits)[:, :, None] & (j < N)[None, None, :]
    place = slab.to(tl.int64)[:, :, None] * N + j[None, None, :]
    marks = tl.load(marks_ptr + place, mask=present, other=-0x10000)
    sums = tl.load(sums_ptr + place, mask=present, other=0.0)
    finite = (m < _INFINITY_BITS)[None, None, :]
    small = finite & (_field(((marks >> 16) & 0xFFFF) + 1, BFLOAT16) < limit[None, None, :])
    infinite = (m == _INFINITY_BITS)[None, None, :] & ((marks & 0xFFFF) == top[None, None, :])
    again = tl.max(tl.max((small | infinite).to(tl.int32), axis=2), axis=1)
    e = general._exponent(m)
    terms = _scaled(sums, BFLOAT16) * _power(38 - e)[None, None, :]
    terms = tl.where(finite & (again == 0)[:, None, None], terms, 0.0).to(tl.int64)
    total = tl.sum(tl.sum(terms, axis=1), axis=0)
    chunks = tl.sum(again << tl.arange(0, CHUNKS), axis=0)
    power, rounder, shift = general._grid(m)
    none = tl.zeros((BM, BLOCK), tl.int32)
    read = (none, none)
    plus = tl.zeros((BM, BLOCK), tl.float32)
    minus = plus
    steps = 0
    for chunk in range(0, CHUNKS):
        start = (chunk * HELPERS + helper) * GROUP * span
        end = tl.minimum(start + GROUP * span, M)
        count = tl.where(((chunks >> chunk) & 1) != 0, tl.cdiv(end - start, BM), 0)
        end = tl.where(count > 0, end, 0)
        i = start + tl.arange(0, BM)
        x = general._tile(x_ptr, i, j, end, N, stride, "")
        for _ in range(0, count):
            i += BM
            following = general._tile(x_ptr, i, j, end, N, stride, "")  # on its way meanwhile
            v = x.to(tl.float32)
            read = general._terms(read, v, power, rounder)
            plus = tl.maximum(plus, v)
            minus = tl.minimum(minus, v)
            x = following
        steps += count
    plus = (tl.max(plus, axis=0) == float("inf")).to(tl.int64)
    minus = (tl.min(minus, axis=0) == float("-inf")).to(tl.int64)
    total += tl.where(m >= _INFINITY_BITS, plus + (minus << 32), general._total(read, rounder, shift, steps))
    at = totals_ptr + j
    tl.atomic_add(at, total, mask=j < N, sem="relaxed")
    tl.debug_barrier()  # all threads have added before the program counts as arrived
    if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel") == HELPERS - 1:
        _store_total(at, m, out_ptr, j, N)


@triton.jit(do_not_specialize=["M", "span", "splits", "binades"])
def settle_kernel(
    x_ptr, sums_ptr, marks_ptr, totals_ptr, arrived_ptr, out_ptr, M, N, stride, span, splits, binades,
    BM: tl.constexpr, BLOCK: tl.constexpr, SLABS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, HELPERS: tl.constexpr,
):  # fmt: skip
    """The sums [N] to `out_ptr`, from what SLABS slabs or fewer hold.

    HELPERS programs take BLOCK columns. Where not all terms are whole ones, each takes every HELPERS-th chunk of
    GROUP slabs, CHUNKS or fewer: what they hold, or, BM rows at a time, x again. The last one stores.
    """
    BFLOAT16: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16
    block = tl.program_id(0) // HELPERS
    helper = tl.program_id(0) % HELPERS
    j = block * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SLABS)
    present = (split < splits)[:, None] & (j < N)[None, :]
    place = split.to(tl.int64)[:, None] * N + j[None, :]
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()  # for all of the first launch
    marks = tl.load(marks_ptr + place, mask=present, other=-0x10000)  # zeros
    needed = (split < tl.where(helper == 0, splits, 0))[:, None] & (j < N)[None, :]
    sums = tl.load(sums_ptr + place, mask=needed, other=0.0)
    top, low = tl.split(tl.max(tl.join(marks & 0xFFFF, ((marks >> 16) & 0xFFFF) ^ 0xFFFF), axis=0))
    m = _magnitude_bits(top, x_ptr)
    limit = _field(top, BFLOAT16) - binades
    whole = (m < _INFINITY_BITS) & (_field((low ^ 0xFFFF) + 1, BFLOAT16) >= limit)
    if tl.min(whole.to(tl.int32), axis=0) != 0:
        if helper == 0:
            y = _scaled(tl.sum(sums, axis=0), BFLOAT16).to(tl.float32)
            store_bits(y.to(tl.int32, bitcast=True), m > _INFINITY_BITS, out_ptr + j, j < N)
    else:
        _settle_again(
            x_ptr, sums_ptr, marks_ptr, totals_ptr, arrived_ptr, out_ptr, block, helper, j, m, top, limit, M, N, stride, span, splits,
            BM, BLOCK, GROUP, CHUNKS, HELPERS,
        )  # fmt: skip


def _power_of_two(n):
    return 1 << (n - 1).bit_length()


def recipe(x, device=None) -> Recipe:
    """Both launches, of x [M, N], bfloat16 or float16, 0 < M <= column_sums.LIMIT, 0 < N, rows contiguous."""
    m, n = x.shape
    plan = launch.narrow_sums_plan(m, n, x.stride(0) % 16 == 0, launch.hardware(device or x.device))
    tiles, splits, blocks = triton.cdiv(n, plan.columns), triton.cdiv(m, plan.span), triton.cdiv(n, plan.block)
    chunks = _power_of_two(triton.cdiv(triton.cdiv(splits, plan.group), plan.helpers))
    made = Recipe()
    sums = made.reserve(splits * n, torch.float64)
    marks = made.reserve(splits * n, torch.int32)
    totals = made.reserve(n, torch.int64)
    arrived = made.reserve(blocks, torch.int32)
    kept, sizes = (Block(A), sums, marks, totals, arrived), (m, n, x.stride(0), plan.span, splits)
    made.launch(
        slabs_kernel, tiles * splits, *kept, *sizes, **launch.STRICT, num_warps=plan.warps, maxnreg=plan.registers,
        BM=plan.rows, BN=plan.columns, BLOCK=plan.block, UNROLL=plan.unroll, EVEN=int(n % plan.columns == 0), EVICTION=launch.eviction(m * n * x.element_size()),
    )  # fmt: skip
    overlap = {"launch_pdl": True} if plan.overlap else {}
    made.launch(
        settle_kernel, blocks * plan.helpers, *kept, Block(BIAS), *sizes, binades(x.dtype, m),
        **launch.STRICT, **overlap, num_warps=plan.warps, maxnreg=plan.registers,
        BM=plan.again, BLOCK=plan.block, SLABS=_power_of_two(splits), GROUP=plan.group, CHUNKS=chunks, HELPERS=plan.helpers,
    )  # fmt: skip
    return made
