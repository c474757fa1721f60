"""Products of few rows by a weight, as decoding has them: no digits of the weight in memory.

Reading the weight is what such a product costs, and the ordinary way moves it often: twice to balance
and measure it, once more to write its digits (as many bytes as bfloat16 has, three quarters of
float32's) and again to read them. Here it is read three times and nothing is written, and of a weight
that fits L2 the second and third read, which start where the one before ended, seldom reach memory:

1. `index_maxima_kernel`: the largest magnitude of each contraction index, from which the balance
   follows. Row blocks of the weight raise it by atomics.
2. `exponents_kernel`: the exponent of each output column, which needs the whole balance; and the
   digits of the few rows, which every program of (3) reads, from L2.
3. `product_kernel`: digits of a tile of the weight, made in registers and multiplied at once, all
   levels side by side. With split contraction `matmul_kernels.finish_kernel` follows.

All of it is C^T = B^T A^T: the weight's rows are the tall side of the tensor cores, the activations'
rows the narrow one. Instructions bound (1) in bfloat16 and (3): hence maxima of two values at a time,
and digits that come out of a float's bytes.

Integers, exponents and decisions are those of `quantize_kernels`, totals and results those of
`matmul_kernels`: the same bits. A row of the weight that the quick way of quantising cannot hold makes
the programs that meet it go the general way.

The interpreter has no inline assembly: there plain Triton takes its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from carbon_compile.templates import launch
from carbon_compile.templates import matmul_kernels as products
from carbon_compile.templates import quantize_kernels as kernels
from carbon_compile.templates.matmul_recipe import BIAS, OUT, ZEROS, A, B, Block, Recipe
from carbon_compile.templates.quantize import DIGITS


@triton.jit
def index_maxima_kernel(
    w_ptr, out_ptr, N, K, stride_r, stride_k,
    BR: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Raise the bits of each contraction index's largest magnitude to those of BR * STEPS rows."""
    across = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    k = (pid % across) * BK + tl.arange(0, BK)
    first = (pid // across) * (BR * STEPS)
    best = kernels._no_magnitudes((BR, BK), w_ptr)
    for step in tl.static_range(STEPS):
        r = first + step * BR + tl.arange(0, BR)
        base = w_ptr + r.to(tl.int64)[:, None] * stride_r
        best = kernels._largest(best, kernels._tile(base, r, k, N, K, stride_k))
    largest = tl.max(kernels._magnitude_bits(best), axis=0)
    tl.atomic_max(out_ptr + k, largest, mask=k < K, sem="relaxed")


@triton.jit
def _weight_exponents(
    block, w_ptr, exponents_ptr, general_ptr, N, K, stride_r, stride_k, maxima_ptr,
    W: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The exponents of BR rows of the weight, and whether their digits need the general way."""
    r = block * BR + tl.arange(0, BR)
    base = w_ptr + r.to(tl.int64)[:, None] * stride_r
    best = kernels._no_magnitudes((BR, BK), w_ptr)
    plain = tl.full((BK,), 1, tl.int32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = kernels._tile(base, r, k, N, K, stride_k)
        scales, now = kernels._plain_scales(maxima_ptr, k, K, -1, 1)
        best = kernels._larger(best, x, scales[None, :])
        plain = tl.minimum(plain, now)
    largest = tl.max(kernels._magnitude_bits(best), axis=1)
    quick = kernels._ordinary(largest) | (r >= N)
    if (tl.min(plain, axis=0) & tl.min(quick.to(tl.int32), axis=0)) != 0:
        tl.store(exponents_ptr + r, kernels._bexpo_of_normal(largest) - (W - 1), mask=r < N)
        tl.store(general_ptr + r, tl.zeros((BR,), tl.int32), mask=r < N)
    else:
        worst = tl.full((BR, BK), kernels._EMPTY, tl.int32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            x = kernels._tile(base, r, k, N, K, stride_k)
            worst = tl.maximum(worst, kernels._values(x, k, K, maxima_ptr, -1, 1))
        e = tl.max(worst, axis=1)
        tl.store(exponents_ptr + r, kernels._stored_exponent(e, W), mask=r < N)
        tl.store(general_ptr + r, tl.full((BR,), 1, tl.int32), mask=r < N)


@triton.jit
def exponents_kernel(
    a_ptr, digits_ptr, a_exponents, M, a_all, a_stride_r, a_stride_k,
    w_ptr, w_exponents, general_ptr, N, w_stride_r, w_stride_k,
    maxima_ptr, d_ptr, scales_ptr, K, KP, a_programs,
    W: tl.constexpr, D: tl.constexpr, A_BR: tl.constexpr, A_BK: tl.constexpr, A_LOOP: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Digits of the few rows, then d and 2^-d of the contraction indices, then the weight's exponents."""
    pid = tl.program_id(0)
    of_scales = tl.cdiv(KP, BLOCK)
    if pid < a_programs:
        kernels._quantize_rows(
            pid, a_ptr, digits_ptr, a_exponents, M, a_all, 0, a_stride_r, a_stride_k,
            maxima_ptr, 0, K, KP, 1, W, D, 1, A_BR, A_BK, A_LOOP, False,
        )  # fmt: skip
    elif pid < a_programs + of_scales:
        k = (pid - a_programs) * BLOCK + tl.arange(0, BLOCK)
        scales, _ = kernels._plain_scales(maxima_ptr, k, K, -1, 1)
        tl.store(scales_ptr + k, scales, mask=k < KP)
        tl.store(d_ptr + k, kernels._weights(maxima_ptr, k, K), mask=k < KP)
    else:
        _weight_exponents(
            # From the end, where the pass before left the weight in L2.
            tl.num_programs(0) - 1 - pid, w_ptr, w_exponents, general_ptr, N, K,
            w_stride_r, w_stride_k, maxima_ptr, W, BR, BK,
        )  # fmt: skip


@triton.jit
def _transposed(x):
    if len(x.shape) == 3:
        y = tl.permute(x, (0, 2, 1))
    else:
        y = tl.trans(x)
    return y


@triton.jit
def _multiplied(
    w0, w1, w2, a_ptr, plane, mask, l0, l1, l2, l3, l4, D: tl.constexpr,
):  # fmt: skip
    """The levels raised by the products of a tile's digits with the activations'."""
    a0 = _transposed(tl.load(a_ptr, mask=mask, other=0))
    a1 = _transposed(tl.load(a_ptr + plane, mask=mask, other=0))
    l0 = tl.dot(w0, a0, l0, out_dtype=tl.int32)
    l1 = tl.dot(w0, a1, l1, out_dtype=tl.int32)
    l1 = tl.dot(w1, a0, l1, out_dtype=tl.int32)
    l2 = tl.dot(w1, a1, l2, out_dtype=tl.int32)
    if D == 3:
        a2 = _transposed(tl.load(a_ptr + 2 * plane, mask=mask, other=0))
        l2 = tl.dot(w0, a2, l2, out_dtype=tl.int32)
        l2 = tl.dot(w2, a0, l2, out_dtype=tl.int32)
        l3 = tl.dot(w1, a2, l3, out_dtype=tl.int32)
        l3 = tl.dot(w2, a1, l3, out_dtype=tl.int32)
        l4 = tl.dot(w2, a2, l4, out_dtype=tl.int32)
    return l0, l1, l2, l3, l4


@triton.jit
def _along(x, axis: tl.constexpr, rank: tl.constexpr):
    """A vector as a tensor of this rank along this axis; a matrix [G, BK] along the outer two of 3."""
    if len(x.shape) == 2:
        y = x[:, None, :]
    elif rank == 3:
        y = x[None, :, None]
    elif axis == 0:
        y = x[:, None]
    else:
        y = x[None, :]
    return y


@triton.jit(do_not_specialize=["has_bias"])
def product_kernel(
    w_ptr, w_exponents, general_ptr, N, w_stride_r, w_stride_k,
    digits_ptr, a_exponents, M, scales_ptr, d_ptr, K, KP, span,
    out_ptr, total_ptr, bias_ptr, total_plane, out_n, out_m, bias_n, bias_m, has_bias,
    W: tl.constexpr, D: tl.constexpr, MP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    G: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """BR output columns of all M rows, over one span of the contraction.

    `digits_ptr` int8 [D, MP, KP] of the rows. G > 1: that many groups of warps share a step, each
    with BK indices of its own. WORDS as in `matmul_kernels.gemm_kernel`.
    """
    rank: tl.constexpr = 2 if G == 1 else 3
    blocks = tl.cdiv(N, BR)
    pid = tl.program_id(0)
    n = (pid % blocks) * BR + tl.arange(0, BR)
    start = (pid // blocks) * span
    end = tl.minimum(start + span, KP)
    m = tl.arange(0, MP)
    row = tl.minimum(n, N - 1)
    base = w_ptr + _along(row.to(tl.int64), 0, rank) * w_stride_r
    rows = digits_ptr + _along(m, 0, rank) * KP
    present = _along(m, 0, rank) < M
    shift = -tl.load(w_exponents + row)
    general = tl.max(tl.load(general_ptr + row), axis=0)
    if G == 1:
        l0 = tl.zeros((BR, MP), tl.int32)
        indices = tl.arange(0, BK)
    else:
        l0 = tl.zeros((G, BR, MP), tl.int32)
        indices = tl.arange(0, G)[:, None] * BK + tl.arange(0, BK)[None, :]
    l1 = l0
    l2 = l0
    l3 = l0
    l4 = l0
    if general == 0:
        power = _along(kernels._power_of_two(tl.minimum(tl.maximum(shift, -126), 126)), 0, rank)
        for k0 in range(start, end, BK * G):
            k = k0 + indices
            at = base + _along(k.to(tl.int64), 1, rank) * w_stride_k
            if EVEN:
                x = tl.load(at)
            else:
                x = tl.load(at, mask=_along(k, 1, rank) < K, other=0)
            w0, w1, w2 = kernels._quick_digits(x, _along(tl.load(scales_ptr + k), 1, rank), power, W)
            l0, l1, l2, l3, l4 = _multiplied(
                w0, w1, w2, rows + _along(k, 1, rank), MP * KP, present, l0, l1, l2, l3, l4, D
            )
    else:
        for k0 in tl.range(start, end, BK * G, num_stages=1):
            k = k0 + indices
            at = base + _along(k.to(tl.int64), 1, rank) * w_stride_k
            x = tl.load(at, mask=_along(k, 1, rank) < K, other=0)
            d = tl.load(d_ptr + k)
            q = kernels._integers(x, _along(shift, 0, rank) - _along(d, 1, rank))
            w0, w1, w2 = kernels._balanced_digits(q, D)
            l0, l1, l2, l3, l4 = _multiplied(
                w0, w1, w2, rows + _along(k, 1, rank), MP * KP, present, l0, l1, l2, l3, l4, D
            )
    if G > 1:
        l0 = tl.sum(l0, axis=0)
        l1 = tl.sum(l1, axis=0)
        l2 = tl.sum(l2, axis=0)
        l3 = tl.sum(l3, axis=0)
        l4 = tl.sum(l4, axis=0)
    top, low = products._total(l0, l1, l2, l3, l4, D)
    products._emit(
        top, low, KP, w_exponents, a_exponents, out_ptr, total_ptr, bias_ptr, n, m, N, M, total_plane,
        out_n, out_m, bias_n, bias_m, has_bias, D, WORDS, BIAS,
    )  # fmt: skip


def multiply_few_rows(recipe: Recipe, a, b, window: int, bias, plan: launch.Plan) -> None:
    """The launches of a [M, K] by a weight b [K, N] with its balance; `bias` [M, N], any strides."""
    x, w = kernels.operand(a, A, -1), kernels.operand(b, B, -2)
    planes, mp = DIGITS[window], launch.few_rows(x.rows)
    padded = triton.cdiv(launch.padded_contraction(x.k), plan.step) * plan.step
    maxima = recipe.reserve(x.k, torch.int32, ZEROS)
    digits = recipe.reserve(planes * mp * padded, torch.int8)
    d = recipe.reserve(padded, torch.int32)
    scales = recipe.reserve(padded, torch.float32)
    x_exponents, w_exponents, general = (recipe.reserve(r, torch.int32) for r in (x.rows, w.rows, w.rows))

    tile = launch.index_maxima_tile(w.rows * w.k, w.dtype == torch.bfloat16)
    recipe.launch(
        index_maxima_kernel, triton.cdiv(w.k, tile.columns) * triton.cdiv(w.rows, tile.rows * tile.steps),
        w.block, maxima, w.rows, w.k, w.stride_r, w.stride_k,
        BR=tile.rows, BK=tile.columns, STEPS=tile.steps, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip
    tile = launch.column_exponents_tile(w.stride_r < w.stride_k)
    few = launch.few_rows_tile(x.k, x.rows > 1 and x.stride_r < x.stride_k)
    programs = triton.cdiv(x.rows, few.rows)
    recipe.launch(
        exponents_kernel, programs + triton.cdiv(padded, launch.WORDS_BLOCK) + triton.cdiv(w.rows, tile.rows),
        x.block, digits, x_exponents, x.rows, mp, x.stride_r, x.stride_k,
        w.block, w_exponents, general, w.rows, w.stride_r, w.stride_k,
        maxima, d, scales, x.k, padded, programs,
        W=window, D=planes, A_BR=few.rows, A_BK=few.columns, A_LOOP=padded > few.columns,
        BR=tile.rows, BK=tile.columns, BLOCK=launch.WORDS_BLOCK, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip
    recipe.quantising = len(recipe.launches)

    strides = (w.rows, 1)  # of the result, along m and n
    bias_strides = (0, 1) if bias is None else bias.stride()
    along = 0 if bias_strides[1] == 0 else 1 if bias_strides[0] == 0 else 2
    out, added = Block(OUT), Block(OUT if bias is None else BIAS)
    elements = x.rows * w.rows
    total = recipe.reserve(plan.words * elements, torch.int64, ZEROS) if plan.words else out
    recipe.launch(
        product_kernel, triton.cdiv(w.rows, plan.bm) * triton.cdiv(padded, plan.span),
        w.block, w_exponents, general, w.rows, w.stride_r, w.stride_k,
        digits, x_exponents, x.rows, scales, d, x.k, padded, plan.span,
        out, total, added, elements, *strides[::-1], *bias_strides[::-1], int(bias is not None),
        W=window, D=planes, MP=mp, BR=plan.bm, BK=plan.bk, G=plan.groups, EVEN=x.k == padded,
        WORDS=plan.words, BIAS=along, num_warps=plan.warps, num_stages=plan.stages, **launch.STRICT,
    )  # fmt: skip
    if plan.words:
        columns, rows = launch.FINISH_TILE
        recipe.launch(
            products.finish_kernel, triton.cdiv(w.rows, rows) * triton.cdiv(x.rows, columns),
            out, total, added, w_exponents, x_exponents,
            w.rows, x.rows, 0, 0, elements, 0, *strides[::-1], 0, *bias_strides[::-1], int(bias is not None), 0,
            BM=rows, BN=columns, WORDS=plan.words, BIAS=along, CAUSAL=0, num_warps=4, **launch.STRICT,
        )  # fmt: skip
