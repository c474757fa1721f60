"""Products of balance "keys" with few columns, as attention has them: no digits of the first operand
in memory.

The first operand [batch, M, K], attention's weights or their gradient, is by far the larger one: in
binary32 its digits are half as many bytes again, written once and read once, and most of what such a
product takes is moving them. Here it is read twice, the second time mostly from L2, and nothing of it
is written:

1. `keys_kernel`: of the second operand [batch, K, N], the largest magnitude and the digits of each
   row, in one read.
2. `product_kernel`: a program takes whole rows of the first operand, all columns of the result. It
   finds its rows' exponents, then makes the digits of a tile in registers and multiplies them at once,
   all levels side by side.

What causality makes zero is neither read nor multiplied, in blocks of the contraction: about half of it,
where queries and keys are the same tokens.

Integers, exponents and decisions are those of `quantize_kernels`, totals and results those of
`matmul_kernels`: the same bits. Rows that the quick way of quantising cannot hold make their program
go the general way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carbon_compile.templates import launch
from carbon_compile.templates import matmul_kernels as products
from carbon_compile.templates import quantize_kernels as kernels
from carbon_compile.templates import small_kernels as streams  # how tiles multiply
from carbon_compile.templates.matmul_recipe import BIAS, OUT, A, B, Block, Recipe
from carbon_compile.templates.quantize import DIGITS


@triton.jit
def keys_kernel(
    b_ptr, digits_ptr, maxima_ptr, N, K, KP, plane, stride_b, stride_r, stride_k,
    W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of BK keys, rows of b [batch, K, N]: the bits of their largest magnitudes, int32 [batch, KP],
    and their digits, int8 [D, batch * N, KP]; zeros beyond K."""
    blocks = tl.cdiv(KP, BK)
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    k = (pid % blocks) * BK + tl.arange(0, BK)
    n = tl.arange(0, BN)
    base = b_ptr + batch * stride_b + n.to(tl.int64)[:, None] * stride_r
    x = kernels._tile(base, n, k, N, K, stride_k)
    largest = tl.max(kernels._magnitude_bits(x), axis=0)
    tl.store(maxima_ptr + batch * KP + k, largest, mask=k < KP)
    x = kernels._dropped(x, largest == 0, largest >= kernels._INFINITY_BITS, -1)
    shift = (W - 1) - kernels._exponents(largest, kernels._BUMP)
    q = kernels._integers(x, tl.broadcast_to(shift[None, :], (BN, BK)))
    mask = (n < N)[:, None] & (k < KP)[None, :]
    digits = digits_ptr + (batch * N + n)[:, None] * KP + k[None, :]
    kernels._store_digits(q, digits, plane, mask, D)


@triton.jit
def _measured(best, plain, base, m, maxima_ptr, first, stop, M, K, stride_k, BP: tl.constexpr):
    """The largest balanced magnitudes so far, as bits, and which scales are plain, of contraction indices
    from `first` to `stop`."""
    for start in range(first, stop, BP):
        k = start + tl.arange(0, BP)
        x = kernels._tile(base, m, k, M, K, stride_k)
        y, now = kernels._balanced(x, k, K, maxima_ptr, 1, 3, BP)
        best = tl.maximum(best, kernels._magnitude_bits(y))
        plain = tl.minimum(plain, now)
    return best, plain


@triton.jit
def _quick_products(
    power, base, m, maxima_ptr, columns, plane, present, first, stop, M, K, stride_k, l0, l1, l2, l3, l4,
    W: tl.constexpr, D: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    for start in range(first, stop, BK):
        k = start + tl.arange(0, BK)
        x = kernels._tile(base, m, k, M, K, stride_k)
        scales, _ = kernels._plain_scales(maxima_ptr, k, K, 1, 3)
        a0, a1, a2 = kernels._quick_digits(x, scales[None, :], power[:, None], W)
        l0, l1, l2, l3, l4 = streams._multiplied(
            a0, a1, a2, columns + k[None, :], plane, present, l0, l1, l2, l3, l4, D
        )
    return l0, l1, l2, l3, l4


@triton.jit
def _measured_slowly(worst, base, m, maxima_ptr, first, stop, M, K, stride_k, BK: tl.constexpr):
    for start in range(first, stop, BK):
        k = start + tl.arange(0, BK)
        x = kernels._tile(base, m, k, M, K, stride_k)
        worst = tl.maximum(worst, kernels._values(x, k, K, maxima_ptr, 1, 3))
    return worst


@triton.jit
def _slow_products(
    e, base, m, maxima_ptr, columns, plane, present, first, stop, M, K, stride_k, l0, l1, l2, l3, l4,
    W: tl.constexpr, D: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    for start in tl.range(first, stop, BK, num_stages=1):
        k = start + tl.arange(0, BK)
        x = kernels._tile(base, m, k, M, K, stride_k)
        d, empty, wild = kernels._keys(maxima_ptr, k, K)
        x = kernels._dropped(x, empty, wild, 1)
        q = kernels._integers(x, (W - 1) - e[:, None] + d[None, :])
        a0, a1, a2 = kernels._balanced_digits(q, D)
        l0, l1, l2, l3, l4 = streams._multiplied(
            a0, a1, a2, columns + k[None, :], plane, present, l0, l1, l2, l3, l4, D
        )
    return l0, l1, l2, l3, l4


@triton.jit
def _says_more(x):
    """Whether an element of key 0 is NaN or -0: then its query may have more than zeros beyond."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return ((magnitude > kernels._INFINITY_BITS) | ((magnitude == 0) & (bits < 0))).to(tl.int32)


@triton.jit
def _keys_seen(m, M, K, length, a_ptr, stride_r):
    """By the queries m, the rows: all keys before this one."""
    stop = tl.minimum(tl.max(tl.where(m < M, m % length, 0), axis=0) + 1, K)
    more = _says_more(tl.load(a_ptr + m.to(tl.int64) * stride_r, mask=m < M, other=0))
    return tl.where(tl.max(more, axis=0) != 0, K, stop)


@triton.jit
def _queries_seeing(first_row, K, length, a_ptr, stride_k, BLOCK: tl.constexpr):
    """The keys from `first_row` on: in each group of `length` queries, the contraction, all from this one on."""
    more = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        skipped = (k < K) & (k % length < first_row)
        more = more | _says_more(tl.load(a_ptr + k.to(tl.int64) * stride_k, mask=skipped, other=0))
    return tl.where(tl.max(more, axis=0) != 0, 0, first_row)


@triton.jit
def _part(group, query, length, K, BLOCK: tl.constexpr):
    """Contraction indices of a group's queries from `query` on, the first at the beginning of a block, but not
    of a block that the group before had."""
    begin = group * length
    before = tl.cdiv(begin, BLOCK) * BLOCK
    first = tl.maximum(tl.minimum(begin + query, begin + length) // BLOCK * BLOCK, before)
    return first, tl.where(query < length, tl.minimum(begin + length, K), first)


@triton.jit(do_not_specialize=["has_bias"])
def product_kernel(
    a_ptr, stride_b, stride_r, stride_k, digits_ptr, maxima_ptr, M, N, K, KP, plane,
    out_ptr, out_b, out_m, out_n, bias_ptr, bias_b, bias_m, bias_n, has_bias, length, groups,
    W: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BP: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """BM rows of all N columns of a [batch, M, K] by the keys of `keys_kernel`.

    Exponents are found in steps of BP indices of the contraction, products made in steps of BK. Blocks
    of it that are zero by causality are left out: CAUSAL 1, rows are queries and the contraction goes
    over keys; 2, the other way round, from a multiple of ALIGN on; `groups` of `length` queries.
    """
    blocks = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    if CAUSAL == 0:
        block = pid % blocks
        batch = (pid // blocks).to(tl.int64)
    else:  # the longest programs begin
        batches = tl.num_programs(0) // blocks
        block = pid // batches
        batch = (pid % batches).to(tl.int64)
        if CAUSAL == 1:
            block = blocks - 1 - block
    m = block * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    a_ptr += batch * stride_b
    base = a_ptr + m.to(tl.int64)[:, None] * stride_r
    maxima_ptr += batch * KP
    columns = digits_ptr + (batch * N + n)[:, None] * KP
    present = (n < N)[:, None]
    query = 0
    first = 0
    stop = K
    if CAUSAL == 1:
        stop = _keys_seen(m, M, K, length, a_ptr, stride_r)
    elif CAUSAL == 2:
        query = _queries_seeing(block * BM, K, length, a_ptr, stride_k, 512)
        first, stop = _part(0, query, length, K, ALIGN)

    best = tl.zeros((BM, BP), tl.int32)
    plain = tl.full((BP,), 1, tl.int32)
    best, plain = _measured(best, plain, base, m, maxima_ptr, first, stop, M, K, stride_k, BP)
    if CAUSAL == 2:
        for group in range(1, groups):
            begin, end = _part(group, query, length, K, ALIGN)
            best, plain = _measured(best, plain, base, m, maxima_ptr, begin, end, M, K, stride_k, BP)
    largest = tl.max(best, axis=1)
    quick = kernels._ordinary(largest) | (m >= M)
    if tl.max(((largest == 0) & (m < M)).to(tl.int32), axis=0) != 0:
        if CAUSAL == 1:
            quick = quick | kernels._nothing(base, m, M, stop, stride_k, maxima_ptr, 3, BM, BP, False)
        else:
            quick = quick | kernels._nothing(base, m, M, K, stride_k, maxima_ptr, 3, BM, BP, False)

    l0 = tl.zeros((BM, BN), tl.int32)
    l1 = l0
    l2 = l0
    l3 = l0
    l4 = l0
    if (tl.min(plain, axis=0) & tl.min(quick.to(tl.int32), axis=0)) != 0:
        e = kernels._bexpo_of_normal(largest)
        power = kernels._power_of_two(tl.minimum(tl.maximum((W - 1) - e, -126), 126))
        ea = tl.where(largest == 0, 0, e - (W - 1))
        l0, l1, l2, l3, l4 = _quick_products(
            power, base, m, maxima_ptr, columns, plane, present, first, stop, M, K, stride_k,
            l0, l1, l2, l3, l4, W, D, BK,
        )  # fmt: skip
        if CAUSAL == 2:
            for group in range(1, groups):
                begin, end = _part(group, query, length, K, ALIGN)
                l0, l1, l2, l3, l4 = _quick_products(
                    power, base, m, maxima_ptr, columns, plane, present, begin, end, M, K, stride_k,
                    l0, l1, l2, l3, l4, W, D, BK,
                )  # fmt: skip
    else:
        worst = tl.full((BM, BK), kernels._EMPTY, tl.int32)
        worst = _measured_slowly(worst, base, m, maxima_ptr, 0, K, M, K, stride_k, BK)
        e = tl.max(worst, axis=1)
        ea = kernels._stored_exponent(e, W)
        l0, l1, l2, l3, l4 = _slow_products(
            e, base, m, maxima_ptr, columns, plane, present, 0, K, M, K, stride_k,
            l0, l1, l2, l3, l4, W, D, BK,
        )  # fmt: skip
    top, low = products._total(l0, l1, l2, l3, l4, D)
    products._store_result(
        products._rounded_total(top, low, KP, D), ea, tl.full((BN,), 1 - W, tl.int32),
        out_ptr + batch * out_b, bias_ptr + batch * bias_b, m, n, M, N,
        out_m, out_n, bias_m, bias_n, has_bias, BIAS,
    )  # fmt: skip


def multiply_keys(recipe: Recipe, a, b, window: int, bias, plan: launch.Plan, causal: int = 0) -> None:
    """The launches of a [batch, M, K] by b [batch, K, N], N <= plan.bn, with balance "keys";
    `bias` [batch, M, N], any strides; `causal` as of `matmul.exact_bmm`."""
    x, keys = kernels.operand(a, A, -1, once=False), kernels.operand(b, B, -2, once=False)
    planes, padded = DIGITS[window], launch.padded_contraction(x.k)
    plane = x.batch * keys.rows * padded
    groups = triton.cdiv(x.k, -causal) if causal < 0 else 1
    # Of one group, a last block may begin within the last of a row: what it reads beyond meets zeros.
    align = min(plan.bm, plan.bk) if groups == 1 else plan.bk
    digits = recipe.reserve(planes * plane + plan.bk, torch.int8)
    maxima = recipe.reserve(x.batch * padded, torch.int32)
    tile = launch.keys_tile(plan.bn)
    recipe.launch(
        keys_kernel, x.batch * triton.cdiv(padded, tile.columns),
        keys.block, digits, maxima, keys.rows, x.k, padded, plane,
        keys.stride_b, keys.stride_r, keys.stride_k,
        W=window, D=planes, BN=tile.rows, BK=tile.columns, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip
    recipe.quantising = len(recipe.launches)

    bias_strides = (0, 0, 1) if bias is None else bias.stride()
    along = 0 if bias_strides[1] == 0 else 1 if bias_strides[2] == 0 else 2
    recipe.launch(
        product_kernel, x.batch * triton.cdiv(x.rows, plan.bm),
        x.block, x.stride_b, x.stride_r, x.stride_k, digits, maxima,
        x.rows, keys.rows, x.k, padded, plane,
        Block(OUT), x.rows * keys.rows, keys.rows, 1,
        Block(OUT if bias is None else BIAS), *bias_strides, int(bias is not None),
        abs(causal), groups,
        W=window, D=planes, BM=plan.bm, BN=plan.bn, BK=plan.bk, BP=launch.exponents_width(x.k, plan),
        BIAS=along, CAUSAL=0 if causal == 0 else 1 if causal > 0 else 2, ALIGN=align,
        num_warps=plan.warps, num_stages=plan.stages, **launch.STRICT,
    )  # fmt: skip
