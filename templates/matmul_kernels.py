"""Tensor-core engines for exact products: digit pairs into int32, the exact total in registers.

A total is T = sum_l 256^l L_l, where level l sums the digit products of planes i + j = l. Taken
least significant level first, one int32 accumulator carries into the next level by `>> 8` and the
8 bits left behind collect in one more int32, so T needs two registers an element whatever K is.
int32 holds a level while K stays within SPAN; longer or split contractions add their totals, as
int64 words, in memory. Where tiles are left that are too few for another wave of programs, those alone
may be cut along the contraction: totals of their parts stand side by side in memory until they are added.

The int8 engine multiplies digits as they are. The bf16 engine multiplies the same digits as bf16
numbers and empties its binary32 accumulator before it can round: same integers, same bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile import host
from carbon_compile.templates import launch
from carbon_compile.templates import quantize_kernels as kernels
from carbon_compile.templates.elsewhere import Elsewhere
from carbon_compile.templates.matmul import empty
from carbon_compile.templates.matmul_recipe import (
    BIAS,
    OUT,
    WORK,
    ZEROS,
    A,
    B,
    Block,
    Recipe,
    Tiles,
    hooked,
)
from carbon_compile.templates.quantize import DIGITS, POISON
from carbon_compile.templates.quantize_kernels import Digits

_POISONED = tl.constexpr(POISON // 2)  # any sum of exponents above this includes a POISON
# The bf16 engine: FLUSH products of two digits, each at most 2^14, stay within 2^22.
_FLUSH = tl.constexpr(256)
# Products whose total in units of 2^16 is below 2^24: K (2^15 128/129)^2 / 2^16.
_SHORT = tl.constexpr(1024)


@triton.jit
def _load_tile(operand, row, k, limit, KP, ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """Digits [ROWS, BK] from row `row` on. Rows of another plane or batch may follow: such results
    are never stored."""
    if TMA:
        tile = operand.load([row, k])
    else:
        r = tl.minimum(row + tl.arange(0, ROWS), limit - 1).to(tl.int64)
        tile = tl.load(operand + r[:, None] * KP + (k + tl.arange(0, BK))[None, :])
    return tile


@triton.jit
def _rounded_words(high, low):
    """RN(high 2^32 + low), low >= 0; see `matmul.round_two_words`."""
    high += low >> 32
    low = low & 0xFFFFFFFF
    one_word = (high >= -(1 << 30)) & (high < (1 << 30))
    small = ((high << 32) | low).to(tl.float32)
    large = (high | (low != 0).to(tl.int64)).to(tl.float32) * 4294967296.0
    return tl.where(one_word, small, large)


@triton.jit
def _moderate(ea, eb):
    """Whether `_scaled_at_once` holds: all exponents in [-100, 60]."""
    return (tl.max(tl.abs(ea + 20), axis=0) <= 80) & (tl.max(tl.abs(eb + 20), axis=0) <= 80)


@triton.jit
def _scaled_at_once(rounded, ea, eb):
    """What `_scaled` gives for moderate exponents: a row's and a column's power of two do the same, since nothing
    is clamped, the first product is exact and the second one rounds as the definition's second does."""
    return rounded * kernels._power_of_two(ea)[:, None] * kernels._power_of_two(eb)[None, :]


@triton.jit
def _scaled_in_steps(rounded, ea, eb):
    """(RN(T) 2^h) 2^(k-h), k = ea + eb clamped to +-250, h = floor(k / 2)."""
    exponent = ea[:, None] + eb[None, :]
    k = tl.minimum(tl.maximum(exponent, -250), 250)
    half = k >> 1
    c = rounded * kernels._power_of_two(half) * kernels._power_of_two(k - half)
    return tl.where(exponent > _POISONED, float("nan"), c)


@triton.jit
def _scaled(rounded, ea, eb):
    if _moderate(ea, eb):
        c = _scaled_at_once(rounded, ea, eb)
    else:
        c = _scaled_in_steps(rounded, ea, eb)
    return c


@triton.jit
def _or_minus_zero(x, present):
    """x as binary32 where present; elsewhere -0.0, which changes nothing it is added to."""
    bits = tl.where(present, x.to(tl.float32).to(tl.int32, bitcast=True), -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _with_bias(c, bias_ptr, m, n, M, N, bias_m, bias_n, has_bias, BIAS: tl.constexpr):
    """c plus a bias along n (BIAS = 0), along m (1) or of both (2), if there is one."""
    if BIAS == 0:
        present = n < N * has_bias
        bias = tl.load(bias_ptr + n.to(tl.int64) * bias_n, mask=present, other=0)
        c += _or_minus_zero(bias, present)[None, :]
    elif BIAS == 1:
        present = m < M * has_bias
        bias = tl.load(bias_ptr + m.to(tl.int64) * bias_m, mask=present, other=0)
        c += _or_minus_zero(bias, present)[:, None]
    else:
        offset = m.to(tl.int64)[:, None] * bias_m + n.to(tl.int64)[None, :] * bias_n
        mask = (m < M)[:, None] & (n < N)[None, :]
        c += tl.load(bias_ptr + offset, mask=mask, other=0).to(tl.float32)
    return c


@triton.jit
def _last_query(first, length, BLOCK: tl.constexpr, rows):
    """The last of the queries from row `first` on, which are in groups of `length`."""
    last = tl.minimum(first + BLOCK, rows) - 1
    # A tile that goes on into the next group has the last query of its own.
    return tl.where(first // length == last // length, last % length, length - 1)


@triton.jit
def _all_beyond(row, column, BM: tl.constexpr, BN: tl.constexpr, M, N, length, CAUSAL: tl.constexpr):
    """Whether all of the tile [BM, BN] at `row`, `column` is beyond what queries see of keys.

    CAUSAL as of `gemm_kernel`: queries are rows (1) or columns (2), in groups of `length`.
    """
    if CAUSAL == 1:
        beyond = column > _last_query(row, length, BM, M)
    else:
        beyond = row > _last_query(column, length, BN, N)
    return beyond


@triton.jit
def _seen_contraction(
    start, stop, row, column, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, M, N, length,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """From where to where, of a contraction over keys (CAUSAL 3, 4) or queries (5, 6), the digits of the tile
    at `row`, `column` are not zero by causality; the others are rows (3, 5) or columns (4, 6). What is NaN
    has told its row's exponent."""
    if CAUSAL == 3:
        stop = tl.minimum(stop, _last_query(row, length, BM, M) + 1)
    elif CAUSAL == 4:
        stop = tl.minimum(stop, _last_query(column, length, BN, N) + 1)
    elif CAUSAL == 5:
        start = tl.maximum(start, row // BK * BK)
    else:
        start = tl.maximum(start, column // BK * BK)
    return start, tl.maximum(start, stop)


@triton.jit
def _store_zeros(out_ptr, m, n, M, N, out_m, out_n):
    mask = (m < M)[:, None] & (n < N)[None, :]
    offset = m.to(tl.int64)[:, None] * out_m + n.to(tl.int64)[None, :] * out_n
    tl.store(out_ptr + offset, 0.0, mask=mask)


@triton.jit
def _with_zeros(c, m, n, length, CAUSAL: tl.constexpr):
    """c, but +0 where a key is beyond its query; CAUSAL as of `gemm_kernel`."""
    if CAUSAL == 1:
        c = tl.where(n[None, :] > (m % length)[:, None], 0.0, c)
    elif CAUSAL == 2:
        c = tl.where(m[:, None] > (n % length)[None, :], 0.0, c)
    return c


@triton.jit
def _canonical(c, element: tl.constexpr):
    """c rounded to the type `element`.

    Narrow types are made from bits, so that NaN has one pattern (and an interpreter agrees).
    """
    nan = c != c
    if element == tl.bfloat16:
        bits = c.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(nan, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif element == tl.float16:
        bits = c.to(tl.float16).to(tl.int16, bitcast=True)
        value = tl.where(nan, 0x7E00, bits.to(tl.int32)).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        bits = c.to(tl.int32, bitcast=True)
        value = tl.where(nan, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _store_result(
    rounded, ea, eb, out_ptr, bias_ptr, m, n, M, N,
    out_m, out_n, bias_m, bias_n, has_bias, BIAS: tl.constexpr, length=1, CAUSAL: tl.constexpr = 0,
):  # fmt: skip
    """Scale in two exact steps, add the bias, round to the output type, store; +0 beyond."""
    c = _with_bias(_scaled(rounded, ea, eb), bias_ptr, m, n, M, N, bias_m, bias_n, has_bias, BIAS)
    value = _canonical(_with_zeros(c, m, n, length, CAUSAL), out_ptr.dtype.element_ty)
    mask = (m < M)[:, None] & (n < N)[None, :]
    offset = m.to(tl.int64)[:, None] * out_m + n.to(tl.int64)[None, :] * out_n
    tl.store(out_ptr + offset, value, mask=mask)


@triton.jit
def _levels(
    a, b, a_row, b_row, a_plane, b_plane, k_start, steps, KP,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TMA: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """T = top 256^(2 D - 2) + low of one tile over BK * steps of the contraction, one level after
    another: few registers.

    A dynamic loop over levels: unrolled, the compiler keeps too much alive and spills.
    """
    acc = tl.zeros((BM, BN), tl.int32)
    low = tl.zeros((BM, BN), tl.int32)
    for level in range(0, 2 * D - 1):
        first = tl.maximum(0, level - (D - 1))
        pairs = tl.minimum(level, D - 1) - first + 1
        if BF16:
            flush: tl.constexpr = _FLUSH // BK
            for t0 in range(0, pairs * steps, flush):
                part = tl.zeros((BM, BN), tl.float32)
                for t in range(t0, tl.minimum(t0 + flush, pairs * steps)):
                    i = first + t // steps
                    k = k_start + (t % steps) * BK
                    x = _load_tile(a, i * a_plane + a_row, k, D * a_plane, KP, BM, BK, TMA)
                    y = _load_tile(
                        b, (level - i) * b_plane + b_row, k, D * b_plane, KP, BN, BK, TMA
                    )
                    part = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16).T, part)
                acc += part.to(tl.int32)
        else:
            for t in range(0, pairs * steps):
                i = first + t // steps
                k = k_start + (t % steps) * BK
                x = _load_tile(a, i * a_plane + a_row, k, D * a_plane, KP, BM, BK, TMA)
                y = _load_tile(b, (level - i) * b_plane + b_row, k, D * b_plane, KP, BN, BK, TMA)
                acc = tl.dot(x, y.T, acc, out_dtype=tl.int32)
        if level < 2 * D - 2:
            low = low | ((acc & 255) << (8 * level))
            acc = acc >> 8
    return acc, low


@triton.jit
def _total(l0, l1, l2, l3, l4, D: tl.constexpr):
    """Levels of a total kept apart, as top 256^(2 D - 2) + low; l3 and l4 of three digits only."""
    low = l0 & 255
    l1 += l0 >> 8
    low = low | ((l1 & 255) << 8)
    l2 += l1 >> 8
    if D == 3:
        low = low | ((l2 & 255) << 16)
        l3 += l2 >> 8
        low = low | ((l3 & 255) << 24)
        top = l4 + (l3 >> 8)
    else:
        top = l2
    return top, low


@triton.jit
def _joint(
    a, b, a_row, b_row, a_plane, b_plane, k_start, steps, KP,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The same total from one pass over the contraction, every digit loaded once and all levels
    kept apart: less traffic, 2 D - 1 accumulators."""
    l0 = tl.zeros((BM, BN), tl.int32)
    l1 = tl.zeros((BM, BN), tl.int32)
    l2 = tl.zeros((BM, BN), tl.int32)
    l3 = l0
    l4 = l0
    if D == 3:
        l3 = tl.zeros((BM, BN), tl.int32)
        l4 = tl.zeros((BM, BN), tl.int32)
    for step in range(0, steps):
        k = k_start + step * BK
        a0 = _load_tile(a, a_row, k, D * a_plane, KP, BM, BK, TMA)
        b0 = _load_tile(b, b_row, k, D * b_plane, KP, BN, BK, TMA)
        a1 = _load_tile(a, a_plane + a_row, k, D * a_plane, KP, BM, BK, TMA)
        b1 = _load_tile(b, b_plane + b_row, k, D * b_plane, KP, BN, BK, TMA)
        l0 = tl.dot(a0, b0.T, l0, out_dtype=tl.int32)
        l1 = tl.dot(a0, b1.T, l1, out_dtype=tl.int32)
        l1 = tl.dot(a1, b0.T, l1, out_dtype=tl.int32)
        l2 = tl.dot(a1, b1.T, l2, out_dtype=tl.int32)
        if D == 3:
            a2 = _load_tile(a, 2 * a_plane + a_row, k, D * a_plane, KP, BM, BK, TMA)
            b2 = _load_tile(b, 2 * b_plane + b_row, k, D * b_plane, KP, BN, BK, TMA)
            l2 = tl.dot(a0, b2.T, l2, out_dtype=tl.int32)
            l2 = tl.dot(a2, b0.T, l2, out_dtype=tl.int32)
            l3 = tl.dot(a1, b2.T, l3, out_dtype=tl.int32)
            l3 = tl.dot(a2, b1.T, l3, out_dtype=tl.int32)
            l4 = tl.dot(a2, b2.T, l4, out_dtype=tl.int32)
    return _total(l0, l1, l2, l3, l4, D)


@triton.jit
def _placed(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile, counted in tiles: groups of GROUP rows, walked column by column, so that
    neighbours share operands in L2."""
    group = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = tile % (GROUP * tiles_n)
    return group * GROUP + inside % height, inside // height


@triton.jit
def _work(index, tiles, KP, span, whole, rest, part_span, REST: tl.constexpr):
    """What the `index`-th piece of work is: batch, tile, first index of the contraction and how many there are
    at most, and the number of the part, where it is one of those that the last `rest` tiles of all are cut in, or -1."""
    if REST:
        part = tl.maximum(index - whole, -1)
        if part < 0:
            place = index
            k_start = 0
        else:
            place = whole + part % rest
            k_start = part // rest * part_span
            span = part_span
        tile = place % tiles
        batch = place // tiles
    else:
        splits = tl.cdiv(KP, span)
        tile = index % tiles
        k_start = index // tiles % splits * span
        batch = index // tiles // splits
        part = -1
    return batch, tile, k_start, span, part


@triton.jit
def _store_part(top, low, part_ptr, part, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """The total of one part of a tile, for `finish_parts_kernel`; m and n count from the tile's corner.

    A place of its own costs less than int64 atomics, and nothing has to be zero before.
    """
    pointers = part_ptr + tl.cast(part, tl.int64) * (2 * BM * BN) + m[:, None] * BN + n[None, :]
    tl.store(pointers, top)
    tl.store(pointers + BM * BN, low)


@triton.jit
def _store_words(high, low, pointers, plane, mask, WORDS: tl.constexpr):
    """high 2^32 + low, 0 <= low < 2^32, as WORDS words of 16 bits, the lowest first."""
    for i in tl.static_range(WORDS):
        if i < 2:
            word = low >> (16 * i)
        else:
            word = high >> (16 * (i - 2))
        tl.store(pointers, word.to(tl.int16), mask=mask)
        pointers += plane


@triton.jit
def _rounded_total(top, low, K, D: tl.constexpr):
    """RN(T) of T = top 256^(2 D - 2) + low, a sum of K products.

    Conversions of 64 bits run at a quarter of the rate of others. Of two digits and a short
    contraction both parts are binary32 numbers, and their sum rounds once.
    """
    if D == 2:
        if K <= _SHORT:
            rounded = top.to(tl.float32) * 65536.0 + low.to(tl.float32)
        else:
            rounded = _joined(top, low, D).to(tl.float32)
    else:
        rounded = _joined(top, low, D).to(tl.float32)
    return rounded


@triton.jit
def _joined(top, low, D: tl.constexpr):
    return (top.to(tl.int64) << (16 * (D - 1))) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _emit(
    top, low, K, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m, n, M, N, total_plane,
    out_m, out_n, bias_m, bias_n, has_bias,
    D: tl.constexpr, WORDS: tl.constexpr, BIAS: tl.constexpr, length=1, CAUSAL: tl.constexpr = 0,
):  # fmt: skip
    """Store results (WORDS = 0), add totals of K products to WORDS int64 words in memory, or store
    each as -WORDS words of 16 bits, the lowest first."""
    if WORDS == 0:
        ea = tl.load(ea_ptr + m, mask=m < M, other=0)
        eb = tl.load(eb_ptr + n, mask=n < N, other=0)
        rounded = _rounded_total(top, low, K, D)
        _store_result(rounded, ea, eb, out_ptr, bias_ptr, m, n, M, N,
                      out_m, out_n, bias_m, bias_n, has_bias, BIAS, length, CAUSAL)  # fmt: skip
    else:
        total = _joined(top, low, D)
        pointers = total_ptr + m.to(tl.int64)[:, None] * out_m + n.to(tl.int64)[None, :] * out_n
        mask = (m < M)[:, None] & (n < N)[None, :]
        if WORDS < 0:
            _store_words(total >> 32, total & 0xFFFFFFFF, pointers, total_plane, mask, -WORDS)
        elif WORDS == 1:
            tl.atomic_add(pointers, total, mask=mask, sem="relaxed")
        else:
            tl.atomic_add(pointers, total & 0xFFFFFFFF, mask=mask, sem="relaxed")
            tl.atomic_add(pointers + total_plane, total >> 32, mask=mask, sem="relaxed")


@triton.jit
def _halves(top, low, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right columns of a tile's totals."""
    top0, top1 = tl.split(tl.permute(tl.reshape(top, (BM, 2, BN // 2)), (0, 2, 1)))
    low0, low1 = tl.split(tl.permute(tl.reshape(low, (BM, 2, BN // 2)), (0, 2, 1)))
    return top0, top1, low0, low1


@triton.jit(do_not_specialize=["has_bias", "whole", "rest"])
def gemm_kernel(
    a, b, out_ptr, total_ptr, bias_ptr, ea_ptr, eb_ptr,
    M, N, KP, span, a_plane, b_plane, a_batch, b_batch, total_plane,
    out_b, out_m, out_n, bias_b, bias_m, bias_n, has_bias, length, whole, rest, part_span,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    WORDS: tl.constexpr, TMA: tl.constexpr, JOINT: tl.constexpr, BF16: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One output tile over one span of the contraction.

    WORDS = 0: the span is all of it, and the result is stored; -WORDS > 0: the total, as words of 16
    bits. Else the tile's total is added to one or two int64 words in memory, for `finish_kernel`
    or `words_kernel`. CAUSAL: rows (1) or columns (2) are queries, in groups of `length`, the others
    keys, and results are +0 where the key comes after the query; there, nothing is multiplied. 3 to 6:
    of balance "keys", see `_seen_contraction`. REST, of a product with WORDS = 0 and CAUSAL = 0: the
    first `whole` tiles are programs that store results; the other `rest` are cut into parts of
    `part_span` of the contraction, programs too, which leave their totals at `total_ptr`, int32
    [parts, rest, 2, BM, BN], for `finish_parts_kernel`.
    """
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    pid = tl.program_id(0)
    if CAUSAL >= 3:  # the longest programs of all batches begin
        each = tiles * tl.cdiv(KP, span)
        batches = tl.num_programs(0) // each
        pid = pid % batches * each + pid // batches
    batch, tile, k_start, span, part = _work(pid, tiles, KP, span, whole, rest, part_span, REST)
    if (CAUSAL == 3) | (CAUSAL == 4):
        tile = tiles - 1 - tile
    tile_m, tile_n = _placed(tile, tiles_m, tiles_n, GROUP)

    if (CAUSAL == 1) | (CAUSAL == 2):
        if _all_beyond(tile_m * BM, tile_n * BN, BM, BN, M, N, length, CAUSAL):
            if WORDS == 0:
                _store_zeros(out_ptr + batch.to(tl.int64) * out_b, tile_m * BM + tl.arange(0, BM),
                             tile_n * BN + tl.arange(0, BN), M, N, out_m, out_n)  # fmt: skip
            return

    a_row = batch * a_batch + tile_m * BM
    b_row = batch * b_batch + tile_n * BN
    if CAUSAL >= 3:
        k_start, k_stop = _seen_contraction(
            k_start, tl.minimum(k_start + span, KP), tile_m * BM, tile_n * BN, BM, BN, BK, M, N, length, CAUSAL
        )
        steps = tl.cdiv(k_stop - k_start, BK)
    else:
        steps = tl.cdiv(tl.minimum(span, KP - k_start), BK)
    if JOINT:
        top, low = _joint(
            a, b, a_row, b_row, a_plane, b_plane, k_start, steps, KP, D, BM, BN, BK, TMA
        )
    else:
        top, low = _levels(
            a, b, a_row, b_row, a_plane, b_plane, k_start, steps, KP, D, BM, BN, BK, TMA, BF16
        )

    if REST:
        if part >= 0:
            m = tl.arange(0, BM)
            if BM * BN > 128 * 128:
                top0, top1, low0, low1 = _halves(top, low, BM, BN)
                n = tl.arange(0, BN // 2)
                _store_part(top0, low0, total_ptr, part, m, n, BM, BN)
                _store_part(top1, low1, total_ptr, part, m, n + BN // 2, BM, BN)
            else:
                _store_part(top, low, total_ptr, part, m, tl.arange(0, BN), BM, BN)
            return

    out_ptr += batch.to(tl.int64) * out_b
    total_ptr += batch.to(tl.int64) * out_b  # totals are laid out as the (contiguous) output is
    bias_ptr += batch.to(tl.int64) * bias_b
    ea_ptr += batch * a_batch
    eb_ptr += batch * b_batch
    m = tile_m * BM + tl.arange(0, BM)
    if BM * BN > 128 * 128:
        # Half a tile at a time: int64 totals of a whole one exceed shared memory on their way out.
        top0, top1, low0, low1 = _halves(top, low, BM, BN)
        n = tile_n * BN + tl.arange(0, BN // 2)
        _emit(top0, low0, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m, n, M, N, total_plane,
              out_m, out_n, bias_m, bias_n, has_bias, D, WORDS, BIAS, length, CAUSAL)  # fmt: skip
        _emit(top1, low1, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m, n + BN // 2, M, N,
              total_plane, out_m, out_n, bias_m, bias_n, has_bias, D, WORDS, BIAS, length, CAUSAL)  # fmt: skip
    else:
        n = tile_n * BN + tl.arange(0, BN)
        _emit(top, low, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m, n, M, N, total_plane,
              out_m, out_n, bias_m, bias_n, has_bias, D, WORDS, BIAS, length, CAUSAL)  # fmt: skip


@triton.jit(do_not_specialize=["has_bias"])
def finish_kernel(
    out_ptr, total_ptr, bias_ptr, ea_ptr, eb_ptr,
    M, N, a_batch, b_batch, total_plane, out_b, out_m, out_n, bias_b, bias_m, bias_n, has_bias, length,
    BM: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Results from totals in memory; `length` and CAUSAL as of `gemm_kernel`."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    batch = pid // (tiles_m * tiles_n)
    m = (pid // tiles_n % tiles_m) * BM + tl.arange(0, BM)
    n = (pid % tiles_n) * BN + tl.arange(0, BN)
    mask = (m < M)[:, None] & (n < N)[None, :]
    offset = (
        batch.to(tl.int64) * out_b
        + m.to(tl.int64)[:, None] * out_m
        + n.to(tl.int64)[None, :] * out_n
    )
    total = tl.load(total_ptr + offset, mask=mask, other=0)
    if WORDS == 1:
        rounded = total.to(tl.float32)
    else:
        rounded = _rounded_words(
            tl.load(total_ptr + total_plane + offset, mask=mask, other=0), total
        )
    ea = tl.load(ea_ptr + batch * a_batch + m, mask=m < M, other=0)
    eb = tl.load(eb_ptr + batch * b_batch + n, mask=n < N, other=0)
    out_ptr += batch.to(tl.int64) * out_b
    bias_ptr += batch.to(tl.int64) * bias_b
    _store_result(
        rounded, ea, eb, out_ptr, bias_ptr, m, n, M, N,
        out_m, out_n, bias_m, bias_n, has_bias, BIAS, length, CAUSAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["has_bias", "whole", "rest", "parts"])
def finish_parts_kernel(
    out_ptr, part_ptr, bias_ptr, ea_ptr, eb_ptr,
    M, N, whole, rest, parts, a_batch, b_batch, out_b, out_m, out_n, bias_b, bias_m, bias_n, has_bias,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Results of the `rest` tiles from number `whole` on, from the totals of their parts; ROWS rows of a
    tile each. A total is of a contraction that int32 levels hold: one int64."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    number = pid // (BM // ROWS)
    place = whole + number
    batch = place // (tiles_m * tiles_n)
    tile_m, tile_n = _placed(place % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    row = pid % (BM // ROWS) * ROWS
    inside = (row + tl.arange(0, ROWS))[:, None] * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((ROWS, BN), tl.int64)
    for first in range(0, parts, 4):
        for i in tl.static_range(4):  # loads on their way together
            part = first + i
            pointers = part_ptr + tl.cast(part * rest + number, tl.int64) * (2 * BM * BN) + inside
            mask = inside < (parts - part) * (BM * BN)  # all of them, or beyond the last part none
            top = tl.load(pointers, mask=mask, other=0)
            total += _joined(top, tl.load(pointers + BM * BN, mask=mask, other=0), D)
    m = tile_m * BM + row + tl.arange(0, ROWS)
    n = tile_n * BN + tl.arange(0, BN)
    ea = tl.load(ea_ptr + batch * a_batch + m, mask=m < M, other=0)
    eb = tl.load(eb_ptr + batch * b_batch + n, mask=n < N, other=0)
    out_ptr += batch.to(tl.int64) * out_b
    bias_ptr += batch.to(tl.int64) * bias_b
    _store_result(
        total.to(tl.float32), ea, eb, out_ptr, bias_ptr, m, n, M, N,
        out_m, out_n, bias_m, bias_n, has_bias, BIAS,
    )  # fmt: skip


@triton.jit
def words_kernel(
    words_ptr, total_ptr, elements, per_slice, total_plane, BLOCK: tl.constexpr,
    WORDS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Totals of WORDS int64 words in memory as KEPT words of 16 bits, plane after plane in each slice."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < elements
    low = tl.load(total_ptr + i, mask=mask, other=0)
    high = low >> 32
    if WORDS == 2:
        high += tl.load(total_ptr + total_plane + i, mask=mask, other=0)
    pointers = words_ptr + (i // per_slice) * (KEPT * per_slice) + i % per_slice
    _store_words(high, low & 0xFFFFFFFF, pointers, per_slice, mask, KEPT)


@triton.jit(do_not_specialize=["has_bias"])
def finish_words_kernel(
    out_ptr, words_ptr, bias_ptr, ea_ptr, eb_ptr,
    M, N, ranks, slice_size, plane, bias_m, bias_n, has_bias,
    BM: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Results [M, N] from the totals of all ranks, each WORDS words of 16 bits an element."""
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    m = (pid // tiles_n) * BM + tl.arange(0, BM)
    n = (pid % tiles_n) * BN + tl.arange(0, BN)
    mask = (m < M)[:, None] & (n < N)[None, :]
    offset = m.to(tl.int64)[:, None] * N + n.to(tl.int64)[None, :]
    high = tl.zeros((BM, BN), tl.int64)
    low = tl.zeros((BM, BN), tl.int64)
    for rank in range(0, ranks):
        words = words_ptr + tl.cast(rank, tl.int64) * slice_size + offset
        for i in tl.static_range(WORDS):
            word = tl.load(words, mask=mask, other=0).to(tl.int64)
            if i < WORDS - 1:  # the highest has the sign
                word = word & 0xFFFF
            if i < 2:
                low += word << (16 * i)
            else:
                high += word << (16 * (i - 2))
            words += plane
    ea = tl.load(ea_ptr + m, mask=m < M, other=0)
    eb = tl.load(eb_ptr + n, mask=n < N, other=0)
    _store_result(
        _rounded_words(high, low), ea, eb, out_ptr, bias_ptr, m, n, M, N, N, 1,
        bias_m, bias_n, has_bias, BIAS,
    )  # fmt: skip


def quantize_operands(
    recipe: Recipe, a: Tensor, b: Tensor, window: int, balance: str
) -> tuple[Digits, Digits]:
    """Digits of a [..., M, K] by rows and of b [..., K, N] by columns; a batch of stride 0 once."""
    columns = kernels.operand(b, B, -2)
    # Keys of several batches balance a first operand even where it is the same for all of them.
    once = balance == "none" or columns.batch == 1
    rows = kernels.operand(a, A, -1, once=once)
    transposed = kernels.operand(b, B, -1) if balance in ("weight", "keys") else None
    return kernels.quantize(recipe, rows, columns, window, balance, transposed)


def prepare(
    a, b, window, balance, bias, engine="int8", transposed=False, plan=None, device=None, causal=0, row=0
) -> Recipe:
    """The launches of a [..., M, K] by b [..., K, N], 2-D or 3-D, K > 1, nothing empty; `bias` has
    the result's shape. The first `quantising` of them make digits. A `transposed` result is laid
    out as C^T. A streamed `plan` is for the balance it was made for, "weight" or "keys", and a result
    that is contiguous. `causal` as of `exact_bmm`, `row` as of `exact_mm`."""
    recipe = Recipe()
    batch = a.shape[0] if a.dim() == 3 else 1
    if plan is None and balance == "keys":
        plan = launch.keys_plan(
            a.shape[-2], b.shape[-1], a.shape[-1], window, launch.hardware(device or a.device), engine, a.stride(-1) == 1
        )  # fmt: skip
    if plan is None:
        hardware = launch.hardware(device or a.device)
        m, n = a.shape[-2], _stored_columns(b.shape[-1], row, bias is not None, hardware.tma)
        product = (*((n, m) if transposed else (m, n)), launch.padded_contraction(a.shape[-1]), window, batch)
        plan = launch.gemm_plan(
            *product, hardware, engine,
            launch.streamable(b) if balance == "weight" and not (transposed or row) else 0, bool(causal) and balance != "keys",
        )  # fmt: skip
        recipe.product = None if plan.streamed else (*product, engine)
    recipe.plan = plan
    if plan.streamed and balance == "keys":
        from carbon_compile.templates import key_kernels

        key_kernels.multiply_keys(recipe, a, b, window, bias, plan, causal)
        return recipe
    if plan.streamed:
        from carbon_compile.templates import small_kernels

        small_kernels.multiply_few_rows(recipe, a, b, window, bias, plan)
        return recipe
    qa, qb = quantize_operands(recipe, a, b, window, balance)
    recipe.quantising = len(recipe.launches)
    bias_strides = None if bias is None else (0, *bias.stride())[-3:]
    if transposed:  # the row-major C^T = B^T A^T
        qa, qb = qb, qa
        if bias is not None:
            bias_strides = (bias_strides[0], bias_strides[2], bias_strides[1])
    multiply_digits(recipe, qa, qb, window, batch, bias_strides, plan, None, causal, balance == "keys", row)
    return recipe


def _stored_columns(n: int, row: int, has_bias: bool, tma: bool) -> int:
    """How many columns of a product [M, n] are stored in rows of `row` elements, if those are padded.

    A store is as wide as its mask is alike over neighbours. What comes behind the last column is made of whatever
    follows its digits, which TMA ends with zeros, and its exponents, which have room for 16 at a time, and is
    stored where nobody reads; a bias ends where it ends.
    """
    return n if has_bias or not row or not tma else min(-(-n // 16) * 16, row)


def multiply_digits(
    recipe: Recipe, qa: Digits, qb: Digits, window: int, batch: int,
    bias_strides: tuple[int, int, int] | None, plan: launch.Plan, words: tuple[Block, int] | None = None,
    causal: int = 0, keys: bool = False, row: int = 0,
) -> None:  # fmt: skip
    """The product of quantised operands into the result [..., M, N], contiguous or in rows of `row` elements.

    `words`: instead of results their exact totals, into a block of int16 [batch, count, M, N], as
    `count` words of 16 bits, the lowest first; a count that holds them is the caller's affair. `causal`
    as of `exact_bmm`, `keys` for the balance.
    """
    m, has_bias = qa.rows, bias_strides is not None
    n = _stored_columns(qb.rows, row, has_bias, plan.tma)
    elements = batch * m * (row or n)
    strides = (m * n, row or n, 1)
    bias_strides = bias_strides or (0, 0, 1)  # as a vector's: one kernel for both
    if plan.swap:
        # Tensor cores have a tall side; few rows go on the other one, as C^T = B^T A^T.
        qa, qb, m, n = qb, qa, n, m
        strides = (strides[0], strides[2], strides[1])
        bias_strides = (bias_strides[0], bias_strides[2], bias_strides[1])
        causal = causal if keys else -causal
    along = 0 if bias_strides[1] == 0 else 1 if bias_strides[2] == 0 else 2
    planes = DIGITS[window]
    out, bias = Block(OUT), Block(BIAS if has_bias else OUT)
    total = recipe.reserve(plan.words * elements, torch.int64, ZEROS) if plan.words else out
    total_plane, kept = elements, plan.words
    if words and not plan.words:
        total, total_plane, kept = words[0], m * n, -words[1]
        strides = (words[1] * m * n, *strides[1:])
    a_batch, b_batch = (m if qa.all_rows > m else 0), (n if qb.all_rows > n else 0)
    splits = triton.cdiv(qa.padded, plan.span)
    tiles = triton.cdiv(m, plan.bm) * triton.cdiv(n, plan.bn) * batch
    rest = 0 if words or causal else plan.rest(tiles)
    parts, part_span = plan.cut(qa.padded)
    grid = tiles * splits
    if rest:
        grid = tiles - rest + rest * parts
        total = recipe.reserve(parts * rest * 2 * plan.bm * plan.bn, torch.int32)
    operands = [q.digits for q in (qa, qb)]
    if plan.tma or plan.specialised:
        operands = [
            Tiles(q.digits, planes * q.all_rows, q.padded, height, plan.bk, plan.specialised)
            for q, height in ((qa, plan.bm), (qb, plan.bn))
        ]
    arguments = (
        *operands, out, total, bias, qa.exponents, qb.exponents,
        m, n, qa.padded, plan.span, qa.all_rows, qb.all_rows, a_batch, b_batch, total_plane,
        *strides, *bias_strides, int(has_bias), abs(causal), tiles - rest, rest, part_span,
    )  # fmt: skip
    if causal == 0 or keys and plan.specialised:  # whose warps count on as many steps
        queries = 0
    elif keys:
        queries = (3 if causal > 0 else 5) + plan.swap
    else:
        queries = 1 if causal > 0 else 2
    constants = dict(
        D=planes, BM=plan.bm, BN=plan.bn, BK=plan.bk, GROUP=plan.group, WORDS=kept,
        JOINT=plan.joint, BIAS=along, CAUSAL=queries, REST=rest > 0, **launch.STRICT,
    )  # fmt: skip
    if plan.specialised:
        from carbon_compile.templates import matmul_hopper

        if plan.warps == 4:
            constants["maxnreg"] = 128  # two programs a multiprocessor
        recipe.launch(
            matmul_hopper.specialised_kernel, min(grid, plan.programs or grid), *arguments, grid,
            **constants, ROWS=kept == 0 and strides[2] == 1 and along != 2,
            STAGES=plan.stages, NUM_WARPS=plan.warps, num_warps=plan.warps,
        )  # fmt: skip
    else:
        recipe.launch(
            gemm_kernel, grid, *arguments, **constants, TMA=plan.tma, BF16=plan.engine == "bf16",
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
    if rest:
        rows = min(plan.bm, max(1, 1024 // plan.bn))
        recipe.launch(
            finish_parts_kernel, rest * (plan.bm // rows), out, total, bias, qa.exponents, qb.exponents,
            m, n, tiles - rest, rest, parts, a_batch, b_batch, *strides, *bias_strides, int(has_bias),
            D=planes, BM=plan.bm, BN=plan.bn, GROUP=plan.group, ROWS=rows, BIAS=along, num_warps=4, **launch.STRICT,
        )  # fmt: skip
    elif plan.words and words:
        recipe.launch(
            words_kernel, triton.cdiv(elements, launch.WORDS_BLOCK),
            words[0], total, elements, m * n, elements, BLOCK=launch.WORDS_BLOCK, WORDS=plan.words,
            KEPT=words[1], num_warps=4, **launch.STRICT,
        )  # fmt: skip
    elif plan.words:
        bm, bn = launch.FINISH_TILE
        if plan.swap:
            bm, bn = bn, bm
        recipe.launch(
            finish_kernel, triton.cdiv(m, bm) * triton.cdiv(n, bn) * batch,
            out, total, bias, qa.exponents, qb.exponents,
            m, n, a_batch, b_batch, elements, *strides, *bias_strides, int(has_bias), abs(causal),
            BM=bm, BN=bn, WORDS=plan.words, BIAS=along, CAUSAL=queries, num_warps=4, **launch.STRICT,
        )  # fmt: skip


def multiply(
    a, b, window, balance, bias, out_dtype, engine="int8", transposed=False, plan=None,
    signature=None, causal=0, row=0,
) -> Tensor:  # fmt: skip
    """The product by the ordinary way; by its signature, where it has one, later ones replay it."""
    recipe = prepare(a, b, window, balance, bias, engine, transposed, plan, causal=causal, row=row)
    out = empty(a, b, out_dtype, transposed, row)
    recipe.run((a, b, bias, out, *recipe.scratch(a.device)))
    if signature is not None and recipe.replays:
        launch.keep(signature, Replay(recipe, out))
    return out


def precompile(
    recipes: Iterable[tuple[Recipe, tuple]], device: torch.device, processes: Executor | None = None
) -> None:
    """Compile the launches of recipes, each with the types of its operands, bias and result; in
    `processes`, where there are some."""
    from triton.runtime._async_compile import AsyncCompileMode

    with torch.cuda.device(device), ThreadPoolExecutor(os.cpu_count()) as threads:
        pool = threads
        if processes is not None:
            pool = Elsewhere(threads, processes)
        with AsyncCompileMode(pool, ignore_errors=True):
            for recipe, types in recipes:
                recipe.warm(types)


class Replay:
    """A prepared product."""

    def __init__(self, recipe: Recipe, out: Tensor):
        self.recipe, self.index, self.launches = recipe, out.get_device(), recipe.steps()
        self.device, self.shape, self.strides, self.dtype = out.device, tuple(out.shape), tuple(out.stride()), out.dtype
        # Padded rows are whole ones, the last one too: so they are written.
        self.whole = (self.shape[0] * self.strides[0],) if out.dim() == 2 and out.stride(0) > out.shape[1] and out.stride(1) == 1 else None
        self.work, self.zeros = ((recipe.sizes[buffer],) for buffer in (WORK, ZEROS))

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None, exponents: Tensor | None = None) -> Tensor | None:
        """The product of operands with the same signature; None where it cannot be replayed."""
        index = self.index
        if index != _current_device() or hooked():
            return None
        stream = _current_stream(index)
        if self.whole is None:
            out = _empty(self.shape, self.strides, self.dtype)
        else:
            out = _empty(self.whole, (1,), self.dtype).as_strided(self.shape, self.strides)
        work = _empty(self.work, (1,), torch.uint8)
        at = [a.data_ptr(), b.data_ptr(), 0, out.data_ptr(), work.data_ptr(), 0]
        if bias is not None:
            at[BIAS] = bias.data_ptr()
        if exponents is not None:
            at.append(exponents.data_ptr())
        if self.zeros[0]:
            zeros = torch.zeros(self.zeros, dtype=torch.uint8, device=self.device)
            at[ZEROS] = zeros.data_ptr()
        if (at[OUT] | at[WORK] | at[ZEROS]) & 15:
            return None  # an allocator of one's own
        for launch_again in self.launches:
            launch_again(at, stream)
        return out


_empty = host.empty_cuda()
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
