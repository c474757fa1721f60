"""Exact sums of the columns of a matrix (contract section 3), mostly read once on a GPU.

Computes     bias_j   = the exact sum of g_ij over rows i
             weight_j = the exact sum of g_ij h_ij, each product rounded to binary32: a norm's
                        gradients, h its input in standard units, or made of that, (x_ij - mean_i)
                        factor_i in binary32. Either, or both in one pass
Order        none: what depends on it is used only where it cannot show
Invariant to tiles, splits, threads, devices, strides
Rounds at    each operation on operands; each term, to 38 bits below the largest magnitude; the
             total; the output type

The first launch adds in binary64, which is nearly exact, and keeps for each column of a slab of rows, beside
the sum, its largest magnitude and how many of its elements may be too small to be whole terms. From these the
second launch knows the unit of a column, and how far the sum can be from the total of its terms. Where both
ends of that interval round to one binary32 number, that is the result. Columns where they don't are listed, and
the third launch adds their terms as integers. Which way a result came is no matter of bits.

How far that is, for a column of M elements, m their largest magnitude, 2^(e-1) <= m < 2^e, and u = 2^(e-38) the
unit: a binary32 number of at least 2^(e-15) is a multiple of u, as its last bit is, and one of a narrower type
with P bits of at least 2^(e-39+P). So

    terms      K elements that are smaller, and not zero, move the total by K u / 2 or less;
    additions  one of binary64 errs by 2^-53 of its result or less. A result that w elements are in is at most w m
               (1 + 2^-20). However n parts of p elements are added, the results' w make p n (n + 1) / 2 or less:
               for a chain, which no tree exceeds. So all additions err by 2^-53 m (1 + 2^-20) times the sum of that
               over the elements of a thread, a slab's threads and the slabs;
               or not at all, where no element is below 2^s, all hence multiples of 2^(s-P+1), and M 2^e
               <= 2^53 2^(s-P+1).

s is known before e: a slab's first rows tell the magnitudes of the others. Where they told too little, K is M; where
they were zeros, as rows of padding are, s is 127, so that K counts that slab's others. Of
what is not finite the sum in binary64, which no finite elements overflow, is the result. A result below 2^-126
is a multiple of 2^-149 and so exact, hence rounding before or after scaling is the same.

The definition in graph operations, `lowering.prims.sum`, is the twin. The sums of a 16-bit matrix alone are those of
`narrow_sums`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from carbon_compile.templates import launch
from carbon_compile.templates.matmul_recipe import (
    BIAS,
    OUT,
    RECEIVED,
    WORK,
    A,
    B,
    Block,
    Recipe,
    hooked,
)
from carbon_compile.templates.sum_kernels import store_bits

LIMIT = 1 << 18  # rows: 128 slabs
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Buffers: g, h, bias's gradient, weight's gradient, scratch; and what h is made of, besides x in its place.
_G, _H, _BIAS, _WEIGHT = A, B, BIAS, OUT
_MEAN, _FACTOR = RECEIVED, RECEIVED + 1

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_INFINITY_BITS = tl.constexpr(0x7F800000)
# How far below a column's exponent numbers of P bits are all whole terms: 39 - P, by a type, and of products.
BINADES = {torch.float32: 15, torch.bfloat16: 31, torch.float16: 28}
_BINADES = tl.constexpr(15)
# Binades above the largest magnitude of a slab's first rows in which that of its column is expected.
_HEADROOM = tl.constexpr(4)


# Adds one where twice the bits of $1 less one, as an unsigned number, are not below a limit: a carry, as they are less it.
_LARGE = tl.constexpr("""{ .reg .b32 twice;
mad.lo.u32 twice, $1, 2, 0xffffffff;
add.cc.u32 twice, twice, $3;
addc.u32 $0, $2, 0; }""")


@triton.jit
def _exponent(m):
    """Of magnitude bits; -125 for zeros, subnormals and what is not finite."""
    return tl.maximum((tl.where((m < 0) | (m >= _INFINITY_BITS), 0, m) >> 23) - 126, -125)


@triton.jit
def _power(k):
    """2^k, -126 <= k <= 127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _wide_power(k):
    """2^k in binary64, for normal numbers."""
    return ((k + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)


# --- operands ---


@triton.jit
def _tile(ptr, i, j, end, N, stride, EVICTION: tl.constexpr):
    """Elements of rows i and columns j, 0 outside."""
    present = (i < end)[:, None] & (j < N)[None, :]
    return tl.load(ptr + i.to(tl.int64)[:, None] * stride + j[None, :], mask=present, other=0, eviction_policy=EVICTION)


@triton.jit
def _tiles(at, j, N, stride, BM: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, EVICTION: tl.constexpr):
    """UNROLL tiles of BM rows each, from the rows `at` points to."""
    tiles = ()
    for u in tl.static_range(UNROLL):
        rows = at + u * BM * tl.cast(stride, tl.int64)
        if EVEN:
            tiles = tiles + (tl.load(rows, eviction_policy=EVICTION),)
        else:
            tiles = tiles + (tl.load(rows, mask=(j < N)[None, :], other=0, eviction_policy=EVICTION),)
    return tiles


@triton.jit
def _first_tiles(ptr, i, j, end, N, stride, BM: tl.constexpr, UNROLL: tl.constexpr, EVICTION: tl.constexpr):
    tiles = ()
    for u in tl.static_range(UNROLL):
        tiles = tiles + (_tile(ptr, i + u * BM, j, end, N, stride, EVICTION),)
    return tiles


@triton.jit
def _first_rows(ptr, i, end, BM: tl.constexpr, UNROLL: tl.constexpr):
    """A number for each row i, and for those of UNROLL - 1 more tiles; 0 outside."""
    rows = ()
    for u in tl.static_range(UNROLL):
        rows = rows + (tl.load(ptr + i + u * BM, mask=i + u * BM < end, other=0),)
    return rows


@triton.jit
def _h(x, mean, factor, STATS: tl.constexpr):
    """What g is multiplied by: x, or x less its rows' means (STATS = 2) times their factors (STATS > 0)."""
    h = x.to(tl.float32)
    if STATS == 2:
        h = h - mean[:, None]
    if STATS > 0:
        h = h * factor[:, None]
    return h


@triton.jit
def _first_h(
    x_ptr, mean_ptr, factor_ptr, i, j, end, N, stride, BM: tl.constexpr, UNROLL: tl.constexpr, STATS: tl.constexpr, EVICTION: tl.constexpr
):
    """(tiles of x, their rows' means, factors); what is absent is stood in for."""
    xs = _first_tiles(x_ptr, i, j, end, N, stride, BM, UNROLL, EVICTION)
    means = xs
    factors = xs
    if STATS > 0:
        factors = _first_rows(factor_ptr, i, end, BM, UNROLL)
    if STATS == 2:
        means = _first_rows(mean_ptr, i, end, BM, UNROLL)
    return xs, means, factors


# --- the first launch ---


@triton.jit
def _magnitude_bits(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _limits(gs, hs, UNROLL: tl.constexpr, BINADES: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, STATS: tl.constexpr):
    """The exponents of the smallest elements expected to be whole terms of g, and of g h, by some rows of them."""
    top = tl.zeros(gs[0].shape, tl.int32)
    top_h = top
    xs, means, factors = hs
    for u in tl.static_range(UNROLL):
        v = gs[u].to(tl.float32)
        if SHIFT:
            top = tl.maximum(top, _magnitude_bits(v))
        if SCALE:
            top_h = tl.maximum(top_h, _magnitude_bits(v * _h(xs[u], means[u], factors[u], STATS)))
    if SHIFT and SCALE:
        m, m_h = tl.split(tl.max(tl.join(top, top_h), axis=0))  # one reduction, for each waits for all warps
    else:
        m = tl.max(top + top_h, axis=0)
        m_h = m
    floor, floor_h = tl.maximum(_exponent(m) + (_HEADROOM - BINADES), -126), tl.maximum(_exponent(m_h) + (_HEADROOM - _BINADES), -126)
    return tl.where(m == 0, 127, floor), tl.where(m_h == 0, 127, floor_h)  # rows of zeros tell nothing: all that follow count


@triton.jit
def _twice_bits(k):
    """Those of 2^k without the sign, in the upper 31 bits, less one: so that zeros come last."""
    return ((k + 127) << 24) - 1


@triton.jit
def _marked(marks, v, limit):
    """(largest magnitudes, how many are zero or not below a limit) with those of v."""
    top, large = marks
    if _INTERPRETED:
        twice = v.to(tl.uint32, bitcast=True) * 2 - 1
        large += (twice >= limit.to(tl.uint32, bitcast=True)[None, :]).to(tl.int32)
    else:  # no predicates, which cost two instructions more
        large = tl.inline_asm_elementwise(
            _LARGE, "=r,r,r,r", [v.to(tl.int32, bitcast=True), large, -limit[None, :]], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.maximum(top, tl.abs(v), propagate_nan=tl.PropagateNan.ALL), large


@triton.jit
def _added(part, marks, v, w, limit, FIRST: tl.constexpr):
    """(a step's sums, marks) with those of v and w."""
    sums = v.to(tl.float64) + w.to(tl.float64)
    if FIRST == 0:
        sums = part + sums
    return sums, _marked(_marked(marks, v, limit), w, limit)


@triton.jit
def _both(
    part, part_h, marks, marks_h, gs, hs, limit, limit_h,
    u: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Sums and marks with those of two tiles of g and of g h."""
    v = gs[u].to(tl.float32)
    w = gs[u + 1].to(tl.float32)
    if SHIFT:
        part, marks = _added(part, marks, v, w, limit, u == 0)
    if SCALE:
        xs, means, factors = hs
        v = v * _h(xs[u], means[u], factors[u], STATS)
        w = w * _h(xs[u + 1], means[u + 1], factors[u + 1], STATS)
        part_h, marks_h = _added(part_h, marks_h, v, w, limit_h, u == 0)
    return part, part_h, marks, marks_h


@triton.jit
def _joined(total, top, small, total_2, top_2, small_2):
    return total + total_2, tl.maximum(top, top_2), small + small_2


@triton.jit
def _keep(total, marks, added, floor, sums_ptr, tops_ptr, marks_ptr, at, inside):
    """Store a slab's sums, largest magnitudes, and counts of small elements with the limits they are below of."""
    top, large = marks
    top, small = _magnitude_bits(top), added - large
    if _INTERPRETED:
        total, top, small = tl.sum(total, axis=0), tl.max(top, axis=0), tl.sum(small, axis=0)
    else:
        total, top, small = tl.reduce((total, top, small), 0, _joined)
    tl.store(sums_ptr + at, total, mask=inside)
    tl.store(tops_ptr + at, top, mask=inside)
    tl.store(marks_ptr + at, small | ((floor + 256) << 16), mask=inside)


@triton.jit(do_not_specialize=["M", "span", "splits"])
def slabs_kernel(
    g_ptr, h_ptr, mean_ptr, factor_ptr, sums_ptr, tops_ptr, marks_ptr, uncertain_ptr, M, N, g_stride, h_stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
    BINADES: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, STATS: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """What slabs of `span` rows, less than 2^16, hold: sums float64, largest magnitudes int32 and marks int32 [kinds,
    splits, N]; a mark is the number of elements, but zeros, below 2^s, and s + 256 in the upper half.

    Columns of g [M, N] (SHIFT) and of g h (SCALE) are summed: the kinds; rows of g and h are contiguous; EVEN: BN
    divides N. STATS as of `_h`, mean and factor [M]. Also a zero to the number of uncertain blocks.
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
    row = (full + rows).to(tl.int64)[:, None]
    g_at = g_ptr + row * g_stride + j[None, :]
    h_at = h_ptr + row * h_stride + j[None, :]
    gs = _first_tiles(g_ptr, start + rows, j, full, N, g_stride, BM, UNROLL, EVICTION)
    hs = gs, gs, gs
    if SCALE:
        hs = _first_h(h_ptr, mean_ptr, factor_ptr, start + rows, j, full, N, h_stride, BM, UNROLL, STATS, EVICTION)
    mean_at = mean_ptr + full + rows
    factor_at = factor_ptr + full + rows
    if tl.program_id(0) == 0:
        tl.store(uncertain_ptr, 0)
    floor, floor_h = _limits(gs, hs, UNROLL, BINADES, SHIFT, SCALE, STATS)
    limit, limit_h = _twice_bits(floor), _twice_bits(floor_h)
    none = tl.zeros((BM, BN), tl.float64)
    total = none
    total_h = none
    marks = (tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.int32))
    marks_h = marks
    for _ in range(0, steps):
        part = none
        part_h = none
        g_next = ()
        x_next = ()
        mean_next = ()
        factor_next = ()
        for u in tl.static_range(0, UNROLL, 2):  # the registers of tiles take the next ones as soon as they are added
            part, part_h, marks, marks_h = _both(part, part_h, marks, marks_h, gs, hs, limit, limit_h, u, SHIFT, SCALE, STATS)
            g_next = g_next + _tiles(g_at + u * BM * tl.cast(g_stride, tl.int64), j, N, g_stride, BM, 2, EVEN, EVICTION)
            if SCALE:
                x_next = x_next + _tiles(h_at + u * BM * tl.cast(h_stride, tl.int64), j, N, h_stride, BM, 2, EVEN, EVICTION)
            if STATS > 0:
                factor_next = factor_next + (tl.load(factor_at + u * BM), tl.load(factor_at + (u + 1) * BM))
            if STATS == 2:
                mean_next = mean_next + (tl.load(mean_at + u * BM), tl.load(mean_at + (u + 1) * BM))
        gs = g_next
        if SCALE and STATS == 2:
            hs = x_next, mean_next, factor_next
        elif SCALE and STATS == 1:
            hs = x_next, x_next, factor_next
        elif SCALE:
            hs = x_next, x_next, x_next
        else:
            hs = g_next, g_next, g_next
        mean_at += BM * UNROLL
        factor_at += BM * UNROLL
        total += part
        total_h += part_h
        g_at += BM * UNROLL * tl.cast(g_stride, tl.int64)
        h_at += BM * UNROLL * tl.cast(h_stride, tl.int64)
    part = none
    part_h = none
    for u in tl.static_range(0, UNROLL, 2):
        part, part_h, marks, marks_h = _both(part, part_h, marks, marks_h, gs, hs, limit, limit_h, u, SHIFT, SCALE, STATS)
    total += part
    total_h += part_h
    at = split.to(tl.int64) * N + j
    added = (steps + 1) * UNROLL
    if SHIFT:
        _keep(total, marks, added, floor, sums_ptr, tops_ptr, marks_ptr, at, j < N)
    if SCALE:
        _keep(total_h, marks_h, added, floor_h, sums_ptr, tops_ptr, marks_ptr, at + SHIFT * splits * tl.cast(N, tl.int64), j < N)


# --- the third launch: terms, where they are needed ---
#
# A term is RNE(x 2^(38 - e)). Let a column be scaled by 2^-g for g = e, or 123 where that is less, so that 2^-g is a
# normal number, and t = x 2^-g, k = e - g, v = 2^(k - 38). Its term is made in two parts:
#
#     near = t rounded to multiples of u = 2^-17, by adding 1.5 2^6: |t| < 2^5, so within its binade,
#     rest = t - near, exact, |rest| <= u / 2,
#     term = near / v + RNE(rest / v), the second one by adding 1.5 2^23 v:
#
# near is a multiple of u = 2^(21 - k) v and so an even number of units v, and RNE(n + r) = n + RNE(r) for even n, ties
# included. Bits of rounded numbers less those of their rounders are integers, whose sums may wrap on the way.


@triton.jit
def _integers(highs, number):
    """What is in sums of a number of high parts' bits besides those of their rounder."""
    return highs - (((6 + 127) << 23) | 0x400000) * number


@triton.jit
def _grid(m):
    """(2^-g, the bits of the rounder of low parts, the shift of high ones) of columns of magnitudes m."""
    e = _exponent(m)
    g = tl.minimum(e, 123)
    return _power(-g), ((e - g + (127 - 15)) << 23) | 0x400000, (21 - (e - g)).to(tl.int64)


@triton.jit
def _terms(sums, v, power, low):
    """(high parts, low parts) with those of v."""
    highs, lows = sums
    t = v * power[None, :]
    near = t + 1.5 * 2.0**6
    rest = t - (near - 1.5 * 2.0**6) + low.to(tl.float32, bitcast=True)[None, :]
    return highs + near.to(tl.int32, bitcast=True), lows + rest.to(tl.int32, bitcast=True)


@triton.jit
def _total(sums, low, shift, number):
    """The total of a part's terms, `number` of them in each place."""
    highs, lows = sums
    if _INTERPRETED:
        high, low = tl.sum(_integers(highs, number).to(tl.int64), axis=0), tl.sum((lows - (low * number)[None, :]).to(tl.int64), axis=0)
    else:
        high, low = tl.reduce((_integers(highs, number).to(tl.int64), (lows - (low * number)[None, :]).to(tl.int64)), 0, _sums)
    return (high << shift) + low


@triton.jit
def _sums(a, b, a_2, b_2):
    return a + a_2, b + b_2


@triton.jit
def _store(total, m, out_ptr, j, inside):
    """The total rounded, scaled and rounded to the type of the result; m is finite."""
    k = _exponent(m) - 38
    half = k >> 1
    y = total.to(tl.float32) * _power(half) * _power(k - half)
    store_bits(y.to(tl.int32, bitcast=True), j < 0, out_ptr + j, inside)


@triton.jit(do_not_specialize=["M", "chunk", "chunks"])
def again_kernel(
    g_ptr, h_ptr, mean_ptr, factor_ptr, uncertain_ptr, magnitudes_ptr, totals_ptr, arrived_ptr, weight_ptr, bias_ptr,
    M, N, g_stride, h_stride, chunk, chunks,
    BM: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """The sums that are uncertain, by their terms: `chunks` chunks of rows of each block of columns, by the programs in turn.

    A block's last chunk to be added stores its results.
    """
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()  # for all of the second launch
    blocks = tl.cdiv(N, BLOCK)
    for item in range(tl.program_id(0), tl.load(uncertain_ptr) * chunks, tl.num_programs(0)):
        place = tl.load(uncertain_ptr + 1 + item // chunks)  # of its kind and columns
        scaled = place >= SHIFT * blocks
        j = place % blocks * BLOCK + tl.arange(0, BLOCK)
        at = place // blocks * N + j
        m = tl.load(magnitudes_ptr + at, mask=j < N, other=-1)
        wanted = m >= 0
        power, low, shift = _grid(tl.maximum(m, 0))
        sums = (tl.zeros((BM, BLOCK), tl.int32), tl.zeros((BM, BLOCK), tl.int32))
        start = item % chunks * chunk
        end = tl.minimum(start + chunk, M)
        steps = tl.cdiv(tl.maximum(end - start, 0), BM * UNROLL)
        for step in range(0, steps):
            i = start + step * BM * UNROLL + tl.arange(0, BM)
            gs = _first_tiles(g_ptr, i, j, end, N, g_stride, BM, UNROLL, "")
            xs = gs
            means = gs
            factors = gs
            if SCALE:
                xs, means, factors = _first_h(h_ptr, mean_ptr, factor_ptr, i, j, tl.where(scaled, end, 0), N, h_stride, BM, UNROLL, STATS, "")
            for u in tl.static_range(UNROLL):
                v = gs[u].to(tl.float32)
                if SCALE:
                    v = v * tl.where(scaled, _h(xs[u], means[u], factors[u], STATS), 1.0)
                sums = _terms(sums, v, power, low)
        tl.atomic_add(totals_ptr + at, _total(sums, low, shift, steps * UNROLL), mask=wanted, sem="relaxed")
        tl.debug_barrier()  # all threads have added before the chunk counts as arrived
        if tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel") == chunks - 1:
            total = tl.load(totals_ptr + at, mask=wanted, other=0, cache_modifier=".cg")
            if scaled:
                _store(total, m, weight_ptr, j, wanted)
            else:
                _store(total, m, bias_ptr, j, wanted)


# --- the second launch ---


@triton.jit
def _gathered(total, top, small, above, total_2, top_2, small_2, above_2):
    return total + total_2, tl.maximum(top, top_2), small + small_2, tl.minimum(above, above_2)


@triton.jit(do_not_specialize=["M", "splits", "additions", "rows_exponent"])
def settle_kernel(
    sums_ptr, tops_ptr, marks_ptr, uncertain_ptr, magnitudes_ptr, totals_ptr, arrived_ptr, weight_ptr, bias_ptr,
    M, N, splits, additions, rows_exponent,
    BLOCK: tl.constexpr, SLABS: tl.constexpr, BINADES: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The sums that are certain by what SLABS slabs or fewer hold: of g to `bias_ptr` (SHIFT), of g h to `weight_ptr` (SCALE).

    `additions`: how many elements are in the results of all additions together; 2^rows_exponent >= M. A program takes
    BLOCK columns of a kind. Those with an uncertain one are listed behind the number of them, and the third launch
    finds there zeros to add to, and the columns' magnitudes, -1 where nothing is wanted.
    """
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        gdc_launch_dependents()
    place = tl.program_id(0)  # of its kind and columns
    blocks = tl.cdiv(N, BLOCK)
    scaled = place >= SHIFT * blocks
    j = place % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = j < N
    split = tl.arange(0, SLABS)
    present = (split < splits)[:, None] & inside[None, :]
    slab = (place // blocks * splits + split).to(tl.int64)[:, None] * N + j[None, :]
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()  # for all of the first launch
    tops = tl.load(tops_ptr + slab, mask=present, other=0)
    marks = tl.load(marks_ptr + slab, mask=present, other=0x7FFF0000)
    sums = tl.load(sums_ptr + slab, mask=present, other=0.0)
    small = marks & 0xFFFF
    if _INTERPRETED:
        total, m, small, above = tl.sum(sums, axis=0), tl.max(tops, axis=0), tl.sum(small, axis=0), tl.min(marks >> 16, axis=0)
    else:
        total, m, small, above = tl.reduce((sums, tops, small, marks >> 16), 0, _gathered)
    e = _exponent(m)
    # How far the limit that was counted by lies above the one that counts.
    reach = above - 256 + tl.where(scaled, _BINADES, BINADES) - e
    small = tl.where(reach < 0, M, small)
    exact = (small == 0) & (reach + 15 >= rows_exponent)
    # (1 + 2^-20) of the additions, and what is rounded here, are within 1 + 2^-9.
    error = additions.to(tl.float64) * (m.to(tl.float32, bitcast=True).to(tl.float64) * (2.0**-53 + 2.0**-62)) + small.to(tl.float64) * _wide_power(e - 39)
    error = tl.where(exact, 0.0, error + tl.abs(total) * 2.0**-51)
    low = (total - error).to(tl.float32).to(tl.int32, bitcast=True)
    high = (total + error).to(tl.float32).to(tl.int32, bitcast=True)
    special = m >= _INFINITY_BITS
    wanted = (low != high) & (special == 0) & inside
    y = tl.where(special, total.to(tl.float32).to(tl.int32, bitcast=True), low)
    stored = (wanted == 0) & inside
    if scaled:
        store_bits(y, total != total, weight_ptr + j, stored)
    else:
        store_bits(y, total != total, bias_ptr + j, stored)
    if tl.max(wanted.to(tl.int32), axis=0) != 0:
        at = place // blocks * N + j
        tl.store(magnitudes_ptr + at, tl.where(wanted, m, -1), mask=inside)
        tl.store(totals_ptr + at, tl.zeros((BLOCK,), tl.int64), mask=inside)
        tl.store(arrived_ptr + place, 0)
        tl.store(uncertain_ptr + 1 + tl.atomic_add(uncertain_ptr, 1, sem="relaxed"), place)


def column_sum(g: Tensor, dtype: torch.dtype) -> Tensor:
    """The exact sum over rows of g [M, N], [N] in `dtype`.

    g: float32, bfloat16 or float16, as is `dtype`; 0 < M <= LIMIT, 0 < N; rows contiguous.
    """
    return _run(g, None, None, dtype)[1]


def norm_gradients(
    g: Tensor, h: Tensor, weight: torch.dtype, bias: torch.dtype | None, mean: Tensor | None = None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Exact sums over rows of g h and, with a type `bias`, of g: ([N] in type `weight`, [N] in `bias` or None).

    g and h [M, N], as in `column_sum`, of equal or different types. With `factor`, h is (x - mean) factor of the x in
    its place, in binary32, or x factor without `mean`: both M numbers in float32, contiguous.
    """
    return _run(g, h, weight, bias, mean, factor)


def warmable(g: Tensor, h: Tensor | None, weight: torch.dtype | None, bias: torch.dtype | None, device: torch.device, stats: int = 0):
    """(recipe, types of its buffers) to compile before such a sum is launched on a device; meta tensors will do.

    stats: 1 with a `factor` of `norm_gradients`, 2 with a `mean` too.
    """
    recipe = _chosen(g, h, weight is not None, bias is not None, stats, device)
    return recipe, (g.dtype, None if h is None else h.dtype, bias, weight, None, None, torch.float32, torch.float32)


_prepared: dict[tuple, Recipe] = {}
_PREPARED = 4096


def _run(g, h, weight, bias, mean=None, factor=None):
    buffers = [g, h, None, None, None, None, mean, factor]
    n, device = g.shape[1], g.device
    if weight is not None:
        buffers[_WEIGHT] = torch.empty(n, dtype=weight, device=device)
    if bias is not None:
        buffers[_BIAS] = torch.empty(n, dtype=bias, device=device)
    stats = 0 if factor is None else 1 if mean is None else 2
    addresses = [0 if t is None else t.data_ptr() for t in buffers]
    rest = 0 if h is None else (h.stride(), h.dtype, addresses[_H] & 15, addresses[_MEAN] & 15, addresses[_FACTOR] & 15)
    signature = (weight, bias, stats, g.shape, g.stride(), g.dtype, addresses[_G] & 15, g.get_device(), rest)
    recipe = _prepared.get(signature)
    if recipe is None:
        recipe = _chosen(g, h, weight is not None, bias is not None, stats)
    buffers[WORK] = torch.empty(recipe.sizes[WORK], dtype=torch.uint8, device=device)
    addresses[WORK] = buffers[WORK].data_ptr()
    aligned = not (addresses[_WEIGHT] | addresses[_BIAS] | addresses[WORK]) & 15
    if aligned and recipe.replays and g.get_device() == _current_device() and not hooked():
        recipe.replay(addresses, _current_stream(g.get_device()))
    else:
        with torch.cuda.device_of(g):  # Triton launches on the current device
            recipe.run([g if t is None else t for t in buffers])
        if aligned and recipe.replays:
            if len(_prepared) >= _PREPARED:
                _prepared.clear()
            _prepared[signature] = recipe
    return buffers[_WEIGHT], buffers[_BIAS]


def _chosen(g, h, scale, shift, stats=0, device=None):
    """The launches of `narrow_sums` for a 16-bit matrix alone, whose terms mostly need no rounding; else this file's."""
    from carbon_compile.templates import narrow_sums

    return _recipe(g, h, scale, shift, stats, device) if scale or g.dtype not in narrow_sums.TYPES else narrow_sums.recipe(g, device)


def _recipe(g, h, scale, shift, stats=0, device=None):
    """All three launches. What is absent is stood in for by g, and not touched."""
    (m, n), kinds = g.shape, scale + shift
    plan = launch.column_sums_plan(m, n, sum(t.element_size() for t in (g, h) if t is not None), kinds, launch.hardware(device or g.device))
    tiles, splits, blocks = triton.cdiv(n, plan.columns), triton.cdiv(m, plan.span), triton.cdiv(n, plan.block)
    recipe = Recipe()
    held = [recipe.reserve(kinds * splits * n, dtype) for dtype in (torch.float64, torch.int32, torch.int32)]
    uncertain = recipe.reserve(1 + kinds * blocks, torch.int32)
    again = [uncertain, recipe.reserve(kinds * n, torch.int32), recipe.reserve(kinds * n, torch.int64), recipe.reserve(kinds * blocks, torch.int32)]
    g_block = Block(_G)
    operands = [g_block, Block(_H) if scale else g_block, Block(_MEAN) if stats == 2 else g_block, Block(_FACTOR) if stats else g_block]
    outputs = [Block(_WEIGHT) if scale else g_block, Block(_BIAS) if shift else g_block]
    strides = [g.stride(0), h.stride(0) if scale else 0]
    binades = BINADES[g.dtype if shift else torch.float32]
    options = {"SHIFT": int(shift), "SCALE": int(scale), "num_warps": plan.warps, **launch.STRICT}
    overlap = {"launch_pdl": True} if plan.overlap else {}
    recipe.launch(
        slabs_kernel, tiles * splits, *operands, *held, uncertain, m, n, *strides, plan.span, splits, **options, maxnreg=plan.registers,
        BM=plan.rows, BN=plan.columns, UNROLL=plan.unroll, EVEN=int(n % plan.columns == 0), BINADES=binades, STATS=stats, EVICTION=plan.eviction,
    )  # fmt: skip
    recipe.launch(
        settle_kernel, kinds * blocks, *held, *again, *outputs, m, n, splits, _additions(plan, splits), (m - 1).bit_length(), **options, **overlap,
        BLOCK=plan.block, SLABS=1 << (splits - 1).bit_length(), BINADES=binades,
    )  # fmt: skip
    chunk = triton.cdiv(m, 8192) * 4 * plan.again
    recipe.launch(
        again_kernel, plan.programs, *operands, *again, *outputs, m, n, *strides, chunk, triton.cdiv(m, chunk), **options, **overlap,
        BM=plan.again, BLOCK=plan.block, UNROLL=4, STATS=stats,
    )  # fmt: skip
    return recipe


def _additions(plan, splits):
    """How many elements of a column are in the results of all additions together, at most."""
    steps, pairs = -(-plan.span // (plan.rows * plan.unroll)), plan.unroll // 2
    of_thread = steps * (plan.unroll + pairs * (pairs + 1)) + plan.unroll * steps * (steps + 1) // 2
    each = steps * plan.unroll
    return splits * (plan.rows * of_thread + each * plan.rows * (plan.rows + 1) // 2) + plan.rows * each * splits * (splits + 1) // 2


_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
