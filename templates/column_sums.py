"""Exact sums of the columns of a matrix (contract section 3), two launches on a GPU.

Computes     bias_j   = the exact sum of g_ij over rows i
             weight_j = the exact sum of g_ij h_ij, each product rounded to binary32: a norm's
                        gradients, h its input in standard units. Either, or both in one pass
Order        none: the largest magnitude and an integer sum
Invariant to tiles, splits, threads, devices, strides
Rounds at    each operation on operands; each term, to 38 bits below the largest magnitude; the
             total; the output type

A matrix is read once. A term's unit follows from the largest magnitude of its column, which is known
only afterwards; so a small sample of rows guesses it, the first launch sums the terms of several
neighbouring units at once and keeps the largest magnitude, and the second launch takes the right sums.
Where the guess was wrong, or something is not finite, the second launch reads those columns again, and
the last program to arrive makes results. Of a matrix that the L2 cache holds nothing is guessed: reading
it again costs less than what a guess leaves behind. Which of all this happens is no matter of bits. Terms are
made in two parts by adding binary32 constants, as `lowering.pointwise` does for one unit; its programs are
the twin. The sums of a 16-bit matrix alone are those of `narrow_sums`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.templates import launch
from carbon_compile.templates.matmul_recipe import BIAS, OUT, WORK, A, B, Block, Recipe, hooked
from carbon_compile.templates.sum_kernels import store_bits

LIMIT = 1 << 18  # rows: 132 slabs, over which a few programs add what they left
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Buffers: g, h, bias's gradient, weight's gradient, scratch.
_G, _H, _BIAS, _WEIGHT = A, B, BIAS, OUT

_INFINITY_BITS = tl.constexpr(0x7F800000)
_MINUS_INFINITY_BITS = tl.constexpr(-0x800000)


# --- a column's grid, and its terms ---
#
# A term is RNE(x 2^(38 - e)). Let a column be scaled by 2^-g, and |t| < 2^k after that for a k below
# GRIDS. Its exponent e is then at most g + k, and the terms of the grid e = g + k, for all k at once, are
#
#     near = t rounded to multiples of u = 2^(GRIDS - 23), by adding 1.5 2^23 u: within its binade, for
#            |near| <= 2^22 u,
#     rest = t - near, exact, |rest| <= u / 2,
#     term = near / v + RNE(rest / v) with v = 2^(k - 38), the second one by adding 1.5 2^23 v:
#
# near is a multiple of u = 2^(15 + GRIDS - k) v and so an even number of units v, and RNE(n + r) = n + RNE(r)
# for even n, ties included. So all grids share their high parts, and each has low parts of its own, which
# cost an addition and an integer addition. Bits of rounded numbers less those of their rounders are integers,
# whose sums may wrap on the way.


@triton.jit
def _exponent(m):
    """Of magnitude bits; -125 for zeros, subnormals and what is not finite."""
    return tl.maximum((tl.where((m < 0) | (m >= _INFINITY_BITS), 0, m) >> 23) - 126, -125)


@triton.jit
def _lowest(e, GRIDS: tl.constexpr):
    """The g of a grid e, which 2^-g can scale by as a normal number."""
    return tl.minimum(e, 129 - GRIDS)


@triton.jit
def _power(k):
    """2^k, -126 <= k <= 127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _halves(v, power, GRIDS: tl.constexpr):
    """(near as bits above its rounder's, rest)"""
    t = v * power[None, :]
    near = t + 1.5 * 2.0**GRIDS
    return near.to(tl.int32, bitcast=True), t - (near - 1.5 * 2.0**GRIDS)


@triton.jit
def _integers(bits, exponent, steps):
    """What is in sums of `steps` rounded numbers' bits besides those of the rounder 1.5 2^exponent."""
    return bits - (((exponent + 127) << 23) | 0x400000) * steps


@triton.jit
def _store(total, m, out_ptr, j, N):
    """The total rounded, scaled and rounded to the type of the result; where m is not finite, m."""
    special = (m < 0) | (m >= _INFINITY_BITS)
    k = _exponent(m) - 38
    half = k >> 1
    y = (total.to(tl.float32) * _power(half) * _power(k - half)).to(tl.int32, bitcast=True)
    store_bits(tl.where(special, m, y), m > _INFINITY_BITS, out_ptr + j, j < N)


# --- operands ---


@triton.jit
def _tile(ptr, i, j, end, N, stride):
    """Elements of rows i and columns j, 0 outside."""
    present = (i < end)[:, None] & (j < N)[None, :]
    return tl.load(ptr + i.to(tl.int64)[:, None] * stride + j[None, :], mask=present, other=0)


@triton.jit
def _tiles(at, j, N, stride, BM: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr):
    """UNROLL tiles of BM rows each, from the rows `at` points to."""
    tiles = ()
    for u in tl.static_range(UNROLL):
        rows = at + u * BM * tl.cast(stride, tl.int64)
        if EVEN:
            tiles = tiles + (tl.load(rows),)
        else:
            tiles = tiles + (tl.load(rows, mask=(j < N)[None, :], other=0),)
    return tiles


@triton.jit
def _first_tiles(ptr, i, j, end, N, stride, BM: tl.constexpr, UNROLL: tl.constexpr):
    tiles = ()
    for u in tl.static_range(UNROLL):
        tiles = tiles + (_tile(ptr, i + u * BM, j, end, N, stride),)
    return tiles


@triton.jit
def _zeros(BM: tl.constexpr, BN: tl.constexpr, NUMBER: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(NUMBER):
        tiles = tiles + (tl.zeros((BM, BN), tl.int32),)
    return tiles


# --- the first launch ---


@triton.jit
def _clear(tile, split, j, N, totals_ptr, arrived_ptr, BN: tl.constexpr, SUMS: tl.constexpr):
    """Zeros for the second launch, which may add to them: once for each column."""
    if split == 0:
        tl.store(arrived_ptr + tile, 0)
        for kind in tl.static_range(SUMS):
            tl.store(totals_ptr + kind * N + j, tl.zeros((BN,), tl.int64), mask=j < N)


@triton.jit
def _guess(g, h, SCALE: tl.constexpr, GRIDS: tl.constexpr):
    """The lowest grid of columns by a sample of them."""
    v = g.to(tl.float32)
    if SCALE:
        v = v * h.to(tl.float32)
    return _lowest(_exponent(tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)), GRIDS)


@triton.jit
def _added(sums, v, power, GRIDS: tl.constexpr):
    """(largest magnitude, high parts, low parts of every grid) with those of v."""
    top, highs, lows = sums
    near, rest = _halves(v, power, GRIDS)
    new = ()
    for k in tl.static_range(GRIDS):
        new = new + (lows[k] + (rest + 1.5 * 2.0 ** (k - 15)).to(tl.int32, bitcast=True),)
    return tl.maximum(top, tl.abs(v), propagate_nan=tl.PropagateNan.ALL), highs + near, new


@triton.jit
def _step(
    sums, sums_h, gs, hs, power, power_h,
    UNROLL: tl.constexpr, GRIDS: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Both sums with those of UNROLL tiles of g and h."""
    for u in tl.static_range(UNROLL):
        v = gs[u].to(tl.float32)
        if SHIFT:
            sums = _added(sums, v, power, GRIDS)
        if SCALE:
            sums_h = _added(sums_h, v * hs[u].to(tl.float32), power_h, GRIDS)
    return sums, sums_h


@triton.jit
def _keep(sums, guess, steps, maxima_ptr, guesses_ptr, parts_ptr, split, splits, j, N, GRIDS: tl.constexpr):
    """Store a slab's sums. Returns whether its columns lie on the grids that were guessed."""
    top, highs, lows = sums
    m = tl.max(top.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    inside = j < N
    at = split * N + j
    tl.store(maxima_ptr + at, m, mask=inside)
    # All others in one reduction, for each waits for all warps. High parts need more than 32 bits.
    words = ()
    for k in tl.static_range(6):
        if k < GRIDS:
            words = words + (_integers(lows[k], k - 15, steps),)
        else:
            words = words + (tl.zeros_like(highs),)
    high = _integers(highs, GRIDS, steps)
    words = words + (high & 0xFFF, high >> 12)
    even = tl.join(tl.join(words[0], words[4]), tl.join(words[2], words[6]))
    odd = tl.join(tl.join(words[1], words[5]), tl.join(words[3], words[7]))
    words = tl.reshape(tl.sum(tl.join(even, odd), axis=0), (highs.shape[1], 8))
    tl.store(parts_ptr + 8 * at.to(tl.int64)[:, None] + tl.arange(0, 8)[None, :], words, mask=inside[:, None])
    if split == 0:
        tl.store(guesses_ptr + j, guess, mask=inside)
    held = (m < _INFINITY_BITS) & (_exponent(m) - guess < GRIDS)
    return tl.min(held.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["M", "span", "splits"])
def guess_kernel(
    g_ptr, h_ptr, maxima_ptr, guesses_ptr, parts_ptr, held_ptr, totals_ptr, arrived_ptr,
    M, N, g_stride, h_stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr, SAMPLE: tl.constexpr, GRIDS: tl.constexpr,
    EVEN: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """What slabs of `span` rows hold: maxima [sums, splits, N] and sums of parts [sums, splits, N, 8].

    Columns of g [M, N] (SHIFT) and of g h (SCALE) are summed; rows of g and h are contiguous; EVEN: BN
    divides N. Parts are low ones by grid, of at most six, and high ones in two words. Also guesses
    [sums, N], held [tiles, splits], and zeros to the totals [sums, N] and arrivals.
    """
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    j = tile * BN + tl.arange(0, BN)
    start = split * span
    end = tl.minimum(start + span, M)
    _clear(tile, split, j, N, totals_ptr, arrived_ptr, BN, SHIFT + SCALE)

    # A full step's loads are on their way while the one before is added; the first step takes what is left over.
    steps = (end - start - 1) // (BM * UNROLL)
    full = end - steps * (BM * UNROLL)
    rows = tl.arange(0, BM)
    row = (full + rows).to(tl.int64)[:, None]
    g_at = g_ptr + row * g_stride + j[None, :]
    h_at = h_ptr + row * h_stride + j[None, :]
    # The sample: the same rows for all programs of these columns, spread by the golden ratio, for rows have periods.
    s = tl.arange(0, SAMPLE).to(tl.int64)
    i = ((((s * 0x9E3779B1) & 0xFFFFFFFF) * M) >> 32).to(tl.int32)
    g = _tile(g_ptr, i, j, M, N, g_stride)
    h = g
    if SCALE:
        h = _tile(h_ptr, i, j, M, N, h_stride)
    gs = _first_tiles(g_ptr, start + rows, j, full, N, g_stride, BM, UNROLL)
    hs = gs
    if SCALE:
        hs = _first_tiles(h_ptr, start + rows, j, full, N, h_stride, BM, UNROLL)
    guess = _guess(g, h, not SHIFT, GRIDS)  # of the only sum, or of both
    guess_h = guess
    if SHIFT and SCALE:
        guess_h = _guess(g, h, True, GRIDS)
    power = _power(-guess)
    power_h = _power(-guess_h)
    sums = (tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.int32), _zeros(BM, BN, GRIDS))
    sums_h = sums
    for _ in range(0, steps):
        g_next = _tiles(g_at, j, N, g_stride, BM, UNROLL, EVEN)
        h_next = g_next
        if SCALE:
            h_next = _tiles(h_at, j, N, h_stride, BM, UNROLL, EVEN)
        sums, sums_h = _step(sums, sums_h, gs, hs, power, power_h, UNROLL, GRIDS, SHIFT, SCALE)
        gs = g_next
        hs = h_next
        g_at += BM * UNROLL * tl.cast(g_stride, tl.int64)
        h_at += BM * UNROLL * tl.cast(h_stride, tl.int64)
    sums, sums_h = _step(sums, sums_h, gs, hs, power, power_h, UNROLL, GRIDS, SHIFT, SCALE)

    added = (steps + 1) * UNROLL
    held = 1
    if SHIFT:
        held &= _keep(sums, guess, added, maxima_ptr, guesses_ptr, parts_ptr, split, splits, j, N, GRIDS)
    if SCALE:
        skip = SHIFT * splits * N
        held &= _keep(
            sums_h, guess_h, added, maxima_ptr + skip, guesses_ptr + SHIFT * N, parts_ptr + 8 * skip,
            split, splits, j, N, GRIDS,
        )  # fmt: skip
    tl.store(held_ptr + tile * splits + split, held)


@triton.jit(do_not_specialize=["M", "span", "splits"])
def maxima_kernel(
    g_ptr, h_ptr, maxima_ptr, totals_ptr, arrived_ptr, M, N, g_stride, h_stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Without a guess: the largest magnitudes [sums, splits, N] of slabs, and zeros to the totals and arrivals."""
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    j = tile * BN + tl.arange(0, BN)
    start = split * span
    end = tl.minimum(start + span, M)
    _clear(tile, split, j, N, totals_ptr, arrived_ptr, BN, SHIFT + SCALE)
    top = tl.zeros((BM, BN), tl.float32)
    top_h = top
    for i0 in range(start, end, BM):
        i = i0 + tl.arange(0, BM)
        v = _tile(g_ptr, i, j, end, N, g_stride).to(tl.float32)
        if SHIFT:
            top = tl.maximum(top, tl.abs(v), propagate_nan=tl.PropagateNan.ALL)
        if SCALE:
            product = v * _tile(h_ptr, i, j, end, N, h_stride).to(tl.float32)
            top_h = tl.maximum(top_h, tl.abs(product), propagate_nan=tl.PropagateNan.ALL)
    at = maxima_ptr + split * N + j
    if SHIFT:
        tl.store(at, tl.max(top.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0), mask=j < N)
    if SCALE:
        tl.store(at + SHIFT * splits * N, tl.max(top_h.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0), mask=j < N)


# --- the second launch ---


@triton.jit
def _all_held(held_ptr, splits):
    held = 1
    for first in range(0, splits, 128):
        split = first + tl.arange(0, 128)
        held &= tl.min(tl.load(held_ptr + split, mask=split < splits, other=1), axis=0)
    return held


@triton.jit
def _largest(maxima_ptr, j, splits, N, BN: tl.constexpr):
    """Magnitudes of whole columns; many slabs at once, for each load waits for memory."""
    m = tl.zeros((32, BN), tl.int32)
    for first in range(0, splits, 32):
        split = first + tl.arange(0, 32)
        present = (split < splits)[:, None] & (j < N)[None, :]
        m = tl.maximum(m, tl.load(maxima_ptr + split[:, None] * N + j[None, :], mask=present, other=0))
    return tl.max(m, axis=0)


@triton.jit
def _finish(maxima_ptr, guesses_ptr, parts_ptr, out_ptr, j, N, splits, BN: tl.constexpr, GRIDS: tl.constexpr):
    """Columns whose grids were guessed: the sums of their slabs, in words that one reduction takes at once."""
    m = _largest(maxima_ptr, j, splits, N, BN)
    k = _exponent(m) - tl.load(guesses_ptr + j, mask=j < N, other=0)
    low = tl.zeros((32, BN), tl.int32)
    low_top = low
    high = low
    high_top = low
    for first in range(0, splits, 32):
        split = first + tl.arange(0, 32)
        present = (split < splits)[:, None] & (j < N)[None, :]
        at = parts_ptr + 8 * (split[:, None] * N + j[None, :]).to(tl.int64)
        word = tl.load(at + k[None, :], mask=present, other=0)
        low += word & 0xFFFF
        low_top += word >> 16
        high += tl.load(at + 6, mask=present, other=0)
        high_top += tl.load(at + 7, mask=present, other=0)
    lows, highs = tl.split(tl.sum(tl.join(tl.join(low, low_top), tl.join(high, high_top)), axis=0))
    low, low_top = tl.split(lows.to(tl.int64))
    high, high_top = tl.split(highs.to(tl.int64))
    total = (((high_top << 12) + high) << (15 + GRIDS - k).to(tl.int64)) + (low_top << 16) + low
    _store(total, m, out_ptr, j, N)


@triton.jit
def _grid(m, GRIDS: tl.constexpr):
    """(2^-g, the bits of the rounder of low parts, the shift of high ones) of columns of magnitudes m."""
    e = _exponent(m)
    g = _lowest(e, GRIDS)
    return _power(-g), ((e - g + (127 - 15)) << 23) | 0x400000, (15 + GRIDS - (e - g)).to(tl.int64)


@triton.jit
def _terms(sums, v, power, low, GRIDS: tl.constexpr):
    highs, lows, top, bottom = sums
    near, rest = _halves(v, power, GRIDS)
    rest += low.to(tl.float32, bitcast=True)[None, :]
    return highs + near, lows + rest.to(tl.int32, bitcast=True), tl.maximum(top, v), tl.minimum(bottom, v)


@triton.jit
def _total(sums, m, low, shift, steps, GRIDS: tl.constexpr):
    """A slab's total; of columns that are not finite 1 for +inf, and 2^32 for -inf."""
    highs, lows, top, bottom = sums
    total = (tl.sum(_integers(highs, GRIDS, steps).to(tl.int64), axis=0) << shift) + tl.sum((lows - (low * steps)[None, :]).to(tl.int64), axis=0)
    plus = (tl.max(top, axis=0) == float("inf")).to(tl.int64)
    minus = (tl.min(bottom, axis=0) == float("-inf")).to(tl.int64)
    return tl.where(m >= _INFINITY_BITS, plus + (minus << 32), total)


@triton.jit
def _store_total(at, m, out_ptr, j, N):
    total = tl.load(at, mask=j < N, other=0, cache_modifier=".cg")
    both = ((total & 0xFFFFFFFF) > 0) & ((total >> 32) > 0)
    infinity = tl.where(both, 0x7FFFFFFF, tl.where((total >> 32) > 0, _MINUS_INFINITY_BITS, _INFINITY_BITS))
    _store(total, tl.where(m == _INFINITY_BITS, infinity, m), out_ptr, j, N)


@triton.jit
def _read_again(
    tile, split, g_ptr, h_ptr, maxima_ptr, totals_ptr, arrived_ptr, weight_ptr, bias_ptr, M, N, g_stride, h_stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, GRIDS: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """A slab's part in the sums on the grids of whole columns; the last slab to arrive stores results.

    It goes backwards, for the slab's end is still in the L2 cache.
    """
    j = tile * BN + tl.arange(0, BN)
    start = split * span
    end = tl.minimum(start + span, M)
    steps = tl.cdiv(end - start, BM)
    if SHIFT:
        m = _largest(maxima_ptr, j, splits, N, BN)
        power, low, shift = _grid(m, GRIDS)
    if SCALE:
        m_h = _largest(maxima_ptr + SHIFT * splits * N, j, splits, N, BN)
        power_h, low_h, shift_h = _grid(m_h, GRIDS)
    none = tl.zeros((BM, BN), tl.int32)
    sums = (none, none, tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32))
    sums_h = sums
    for step in range(0, steps):
        i = start + (steps - 1 - step) * BM + tl.arange(0, BM)
        v = _tile(g_ptr, i, j, end, N, g_stride).to(tl.float32)
        if SHIFT:
            sums = _terms(sums, v, power, low, GRIDS)
        if SCALE:
            sums_h = _terms(sums_h, v * _tile(h_ptr, i, j, end, N, h_stride).to(tl.float32), power_h, low_h, GRIDS)
    at = totals_ptr + j
    at_h = totals_ptr + SHIFT * N + j
    if SHIFT:
        tl.atomic_add(at, _total(sums, m, low, shift, steps, GRIDS), mask=j < N, sem="relaxed")
    if SCALE:
        tl.atomic_add(at_h, _total(sums_h, m_h, low_h, shift_h, steps, GRIDS), mask=j < N, sem="relaxed")
    tl.debug_barrier()  # all threads have added before the program counts as arrived
    if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1:
        if SHIFT:
            _store_total(at, m, bias_ptr, j, N)
        if SCALE:
            _store_total(at_h, m_h, weight_ptr, j, N)


@triton.jit(do_not_specialize=["M", "span", "splits"])
def finish_kernel(
    g_ptr, h_ptr, maxima_ptr, guesses_ptr, parts_ptr, held_ptr, totals_ptr, arrived_ptr, weight_ptr, bias_ptr,
    M, N, g_stride, h_stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, GRIDS: tl.constexpr, GUESSED: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The sums: of g to `bias_ptr` (SHIFT), of g h to `weight_ptr` (SCALE), [N] each.

    From what slabs hold, or, where a guess failed or nothing was GUESSED, from g and h again.
    """
    tiles = tl.cdiv(N, BN)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = pid % tiles
    split = pid // tiles
    if GUESSED:
        if _all_held(held_ptr + tile * splits, splits) != 0:
            # Few columns a program, for nothing else is left to do meanwhile; the first programs to run.
            skip = SHIFT * splits * N
            for block in range(splits - 1 - split, BN // 16, splits):
                c = tile * BN + block * 16 + tl.arange(0, 16)
                if SHIFT:
                    _finish(maxima_ptr, guesses_ptr, parts_ptr, bias_ptr, c, N, splits, 16, GRIDS)
                if SCALE:
                    _finish(maxima_ptr + skip, guesses_ptr + SHIFT * N, parts_ptr + 8 * skip, weight_ptr, c, N, splits, 16, GRIDS)
        else:
            _read_again(
                tile, split, g_ptr, h_ptr, maxima_ptr, totals_ptr, arrived_ptr, weight_ptr, bias_ptr,
                M, N, g_stride, h_stride, span, splits, BM, BN, GRIDS, SHIFT, SCALE,
            )  # fmt: skip
    else:
        _read_again(
            tile, split, g_ptr, h_ptr, maxima_ptr, totals_ptr, arrived_ptr, weight_ptr, bias_ptr,
            M, N, g_stride, h_stride, span, splits, BM, BN, GRIDS, SHIFT, SCALE,
        )  # fmt: skip


def column_sum(g: Tensor, dtype: torch.dtype) -> Tensor:
    """The exact sum over rows of g [M, N], [N] in `dtype`.

    g: float32, bfloat16 or float16, as is `dtype`; 0 < M <= LIMIT, 0 < N; rows contiguous.
    """
    return _run(g, None, None, dtype)[1]


def norm_gradients(g: Tensor, h: Tensor, weight: torch.dtype, bias: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Exact sums over rows of g h and, with a type `bias`, of g: ([N] in type `weight`, [N] in `bias` or None).

    g and h [M, N], as in `column_sum`, of equal or different types.
    """
    return _run(g, h, weight, bias)


def warmable(g: Tensor, h: Tensor | None, weight: torch.dtype | None, bias: torch.dtype | None, device: torch.device):
    """(recipe, types of its buffers) to compile before such a sum is launched on a device; meta tensors will do."""
    recipe = _chosen(g, h, weight is not None, bias is not None, device)
    return recipe, (g.dtype, None if h is None else h.dtype, bias, weight, None, None)


_prepared: dict[tuple, Recipe] = {}
_PREPARED = 4096


def _run(g, h, weight, bias):
    buffers = [g, h, None, None, None, None]
    n, device = g.shape[1], g.device
    if weight is not None:
        buffers[_WEIGHT] = torch.empty(n, dtype=weight, device=device)
    if bias is not None:
        buffers[_BIAS] = torch.empty(n, dtype=bias, device=device)
    signature = (weight, bias, *((t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device()) for t in (g, h) if t is not None))
    recipe = _prepared.get(signature)
    if recipe is None:
        recipe = _chosen(g, h, weight is not None, bias is not None)
    buffers[WORK] = torch.empty(recipe.sizes[WORK], dtype=torch.uint8, device=device)
    addresses = [0 if t is None else t.data_ptr() for t in buffers]
    aligned = not any(address & 15 for address in addresses[2:])
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


def _chosen(g, h, scale, shift, device=None):
    """The launches of `narrow_sums` for a 16-bit matrix alone, whose terms mostly need no rounding; else this file's."""
    from carbon_compile.templates import narrow_sums

    return _recipe(g, h, scale, shift, device) if scale or g.dtype not in narrow_sums.TYPES else narrow_sums.recipe(g, device)


def _recipe(g, h, scale, shift, device=None):
    """Both launches. What is absent is stood in for by g, and not touched."""
    (m, n), sums = g.shape, scale + shift
    plan = launch.column_sums_plan(m, n, sum(t.element_size() for t in (g, h) if t is not None), sums, launch.hardware(device or g.device))
    tiles, splits = triton.cdiv(n, plan.columns), triton.cdiv(m, plan.span)
    recipe = Recipe()
    maxima = recipe.reserve(sums * splits * n, torch.int32)
    totals = recipe.reserve(sums * n, torch.int64)
    arrived = recipe.reserve(tiles, torch.int32)
    guesses = parts = held = maxima
    if plan.guess:
        guesses = recipe.reserve(sums * n, torch.int32)
        parts = recipe.reserve(sums * splits * n * 8, torch.int32)
        held = recipe.reserve(tiles * splits, torch.int32)
    g_block = Block(_G)
    operands = [g_block, Block(_H) if scale else g_block]
    outputs = [Block(_WEIGHT) if scale else g_block, Block(_BIAS) if shift else g_block]
    sizes = [m, n, g.stride(0), h.stride(0) if scale else 0, plan.span, splits]
    options = {"BN": plan.columns, "SHIFT": int(shift), "SCALE": int(scale), "num_warps": plan.warps, **launch.STRICT}
    kept = [maxima, guesses, parts, held, totals, arrived]
    if plan.guess:
        steps = {"BM": plan.rows, "UNROLL": plan.unroll, "SAMPLE": plan.sample, "GRIDS": plan.grids, "EVEN": int(n % plan.columns == 0)}
        recipe.launch(guess_kernel, tiles * splits, *operands, *kept, *sizes, **steps, **options, maxnreg=plan.registers)
    else:
        recipe.launch(maxima_kernel, tiles * splits, *operands, maxima, totals, arrived, *sizes, **options, BM=plan.rows)
    recipe.launch(
        finish_kernel, tiles * splits, *operands, *kept, *outputs, *sizes, **options,
        BM=plan.again, GRIDS=plan.grids, GUESSED=int(plan.guess),
    )  # fmt: skip
    return recipe


_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
