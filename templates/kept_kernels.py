"""The GPU side of `kept`: digits of a weight into one buffer, and products of rows by them.

A product is quantising its rows, by the balance that was kept, and multiplying. For more than a few rows
that is what `matmul_kernels` does with any digits. Of few rows the digits of the weight are all
that takes time, as many bytes as bfloat16 has with X2: `product_kernel` reads each of them once, all
planes of a tile together, several steps ahead, and where there are columns enough it needs no split
of the contraction, so that no totals go through memory: two launches.

C^T = B^T A^T: the weight's columns are the tall side of the tensor cores. Totals and results are those
of `matmul_kernels`: the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.templates import kept, launch
from carbon_compile.templates import matmul_kernels as products
from carbon_compile.templates import quantize_kernels as kernels
from carbon_compile.templates import small_kernels as small
from carbon_compile.templates.matmul_recipe import (
    BIAS,
    EXPONENTS,
    OUT,
    ZEROS,
    A,
    B,
    Block,
    Recipe,
    view,
)
from carbon_compile.templates.quantize import DIGITS, RAW
from carbon_compile.templates.quantize_kernels import Digits, Operand


@triton.jit
def rows_kernel(
    x_ptr, digits_ptr, exponents_ptr, maxima_ptr, R, all_rows, stride_r, stride_k, K, KP,
    SIGN: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, LOOP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Digits and exponents of BR rows, balanced by a weight's maxima: 2^d (SIGN 1) or 2^-d (SIGN -1, the
    weight itself)."""
    kernels._quantize_rows(
        tl.program_id(0), x_ptr, digits_ptr, exponents_ptr, R, all_rows, 0, stride_r, stride_k,
        maxima_ptr, 0, K, KP, SIGN, W, D, 1, BR, BK, LOOP, SPREAD,
    )  # fmt: skip


@triton.jit
def factors_kernel(maxima_ptr, out_ptr, K, BLOCK: tl.constexpr):
    """See `kept.factors`; every program looks for the largest and the smallest balance of all."""
    top = -1024
    low = 1024
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        d = kernels._weights(maxima_ptr, k, K)
        top = tl.maximum(top, tl.max(tl.where(k < K, d, -1024), axis=0))
        low = tl.minimum(low, tl.min(tl.where(k < K, d, 1024), axis=0))
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = (kernels._weights(maxima_ptr, k, K) - top + 127) << 23
    tl.store(out_ptr + k, tl.where(top - low > 126, 0x7FC00000, bits), mask=k < K)
    if tl.program_id(0) == 0:
        tl.store(out_ptr + K, top)


@triton.jit
def _raw_numbers(row, plane, k, K):
    """bfloat16 numbers of which two planes hold the bytes."""
    low = tl.load(row + k, mask=k < K, other=0).to(tl.int32) & 255
    high = tl.load(row + plane + k, mask=k < K, other=0).to(tl.int32) & 255
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@triton.jit
def raw_rows_kernel(
    digits_ptr, exponents_ptr, maxima_ptr, R, K,
    CODE: tl.constexpr, W: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Digits and exponents of those of BR rows that have none yet, in place, by the general way. There are hardly any."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    codes = tl.load(exponents_ptr + rows, mask=rows < R, other=0)
    if tl.max(codes, axis=0) == CODE:
        plane = tl.cast(R, tl.int64) * K
        for r in range(tl.program_id(0) * BR, tl.minimum(tl.program_id(0) * BR + BR, R)):
            if tl.load(exponents_ptr + r) == CODE:
                row = digits_ptr + tl.cast(r, tl.int64) * K
                best = tl.full((BK,), kernels._EMPTY, tl.int32)
                for start in range(0, K, BK):
                    k = start + tl.arange(0, BK)
                    bits = kernels._magnitude_bits(_raw_numbers(row, plane, k, K))
                    best = tl.maximum(best, kernels._balanced_exponents(bits, kernels._weights(maxima_ptr, k, K)))
                e = tl.max(best, axis=0)
                tl.debug_barrier()
                tl.store(exponents_ptr + r, kernels._stored_exponent(e, W))
                for start in range(0, K, BK):
                    k = start + tl.arange(0, BK)
                    x = _raw_numbers(row, plane, k, K)
                    q = kernels._integers(x, (W - 1) - e + kernels._weights(maxima_ptr, k, K))
                    kernels._store_digits(q, row + k, plane, k < K, D)


@triton.jit(do_not_specialize=["has_bias"])
def product_kernel(
    w_ptr, w_exponents, N, a_ptr, a_exponents, M, KP, span,
    out_ptr, total_ptr, bias_ptr, total_plane, out_n, out_m, bias_n, bias_m, has_bias,
    D: tl.constexpr, MP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, G: tl.constexpr,
    EVEN: tl.constexpr, WORDS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """BR output columns of all M rows, over one span of the contraction.

    `w_ptr` int8 [D, N, KP], `a_ptr` int8 [D, MP, KP]. G > 1: that many groups of warps share a step,
    each with BK indices of its own. EVEN: steps of BK * G cover KP exactly. WORDS as in
    `matmul_kernels.gemm_kernel`.
    """
    rank: tl.constexpr = 2 if G == 1 else 3
    blocks = tl.cdiv(N, BR)
    pid = tl.program_id(0)
    n = (pid % blocks) * BR + tl.arange(0, BR)
    start = (pid // blocks) * span
    end = tl.minimum(start + span, KP)
    m = tl.arange(0, MP)
    row = tl.minimum(n, N - 1)
    w0_ptr = w_ptr + small._along(row.to(tl.int64), 0, rank) * KP
    w1_ptr = w0_ptr + tl.cast(N, tl.int64) * KP
    w2_ptr = w1_ptr + tl.cast(N, tl.int64) * KP
    rows = a_ptr + small._along(m, 0, rank) * KP
    present = small._along(m, 0, rank) < M
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
    for k0 in range(start, end, BK * G):
        k = small._along(k0 + indices, 1, rank)
        if EVEN:
            mask = present
            w0 = tl.load(w0_ptr + k)
            w1 = tl.load(w1_ptr + k)
            w2 = w1
            if D == 3:
                w2 = tl.load(w2_ptr + k)
        else:
            mask = present & (k < KP)
            w0 = tl.load(w0_ptr + k, mask=k < KP, other=0)
            w1 = tl.load(w1_ptr + k, mask=k < KP, other=0)
            w2 = w1
            if D == 3:
                w2 = tl.load(w2_ptr + k, mask=k < KP, other=0)
        l0, l1, l2, l3, l4 = small._multiplied(
            w0, w1, w2, rows + k, MP * KP, mask, l0, l1, l2, l3, l4, D
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


_FACTORS = 1024  # of a program
_RAW_ROWS = 64  # a program looks at


def _parts(where: kept.Layout, buffer: int) -> tuple[Digits, Block]:
    """The parts of a kept weight in a buffer: its digits and exponents, and its maxima."""
    digits = Block(buffer, 0, torch.int8, where.digits)
    exponents = Block(buffer, where.exponents, torch.int32, where.n)
    return Digits(digits, exponents, where.n, where.n, where.padded), Block(buffer, where.maxima, torch.int32, where.k)


def _quantize(recipe: Recipe, x: Operand, q: Digits, maxima: Block, sign: int, window: int, tile: launch.Tile) -> None:
    recipe.launch(
        rows_kernel, triton.cdiv(x.rows, tile.rows),
        x.block, q.digits, q.exponents, maxima, x.rows, q.all_rows, x.stride_r, x.stride_k, x.k, q.padded,
        SIGN=sign, W=window, D=DIGITS[window], BR=tile.rows, BK=tile.columns,
        LOOP=x.k > tile.columns, SPREAD=x.crooked, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip


def prepare_digits(b: Tensor, window: int) -> tuple[Recipe, Block]:
    """The launches that write digits and exponents of b [K, N] into the buffer OUT, and where they leave the
    maxima: made in scratch, so that what stands in OUT is at no time anything but old or new."""
    recipe = Recipe()
    maxima = kernels.maxima(recipe, kernels.operand(b, A, -1))
    _quantize_weight(recipe, b, window, maxima)
    return recipe, maxima


def prepare_new_digits(b: Tensor, window: int) -> Recipe:
    """The launches that write all of a kept weight into the buffer OUT, which nobody reads yet."""
    recipe = Recipe()
    maxima = _parts(kept.layout(*b.shape, window), OUT)[1]
    _quantize_weight(recipe, b, window, kernels.maxima(recipe, kernels.operand(b, A, -1), maxima))
    return recipe


def _quantize_weight(recipe: Recipe, b: Tensor, window: int, maxima: Block) -> None:
    columns = kernels.operand(b, A, -2)
    tile = launch.rows_tile(columns.rows, columns.k, columns.side_by_side, launch.rows_warps(columns.side_by_side))
    _quantize(recipe, columns, _parts(kept.layout(*b.shape, window), OUT)[0], maxima, -1, window, tile)


def write_digits(b: Tensor, window: int, out: Tensor) -> None:
    """`kept.weight_digits` on a GPU: rare, so the ordinary way through Triton."""
    recipe, maxima = prepare_digits(b, window)
    buffers = (b, None, None, out, *recipe.scratch(b.device))
    recipe.run(buffers)
    kept.parts(out, kept.layout(*b.shape, window))[2].copy_(view(buffers, maxima))


def new_digits(b: Tensor, window: int) -> Tensor:
    """`kept.weight_digits` on a GPU, into new memory: as often as a product, so it is replayed."""
    where = kept.layout(*b.shape, window)
    signature = ("digits", b.shape, b.stride(), b.dtype, b.data_ptr() & 15, b.get_device(), window)
    return _replayed(signature, lambda: prepare_new_digits(b, window), b, (where.size,), torch.uint8)


def balance(weight: Tensor, where: kept.Layout, window: int) -> Tensor:
    """`kept.balance` on a GPU."""
    signature = ("balance", where, weight.data_ptr() & 15, weight.get_device(), window)
    return _replayed(signature, lambda: prepare_balance(where), weight, (where.k,), torch.int32)


def _replayed(signature: tuple, prepare, x: Tensor, shape: tuple, dtype: torch.dtype) -> Tensor:
    """What a recipe makes of the buffer A alone."""
    prepared = launch.prepared.get(signature)
    out = None if prepared is None else prepared(x, x, None)
    if out is None:
        recipe, out = prepare(), torch.empty(shape, dtype=dtype, device=x.device)
        recipe.run((x, None, None, out, *recipe.scratch(x.device)))
        if recipe.replays:
            launch.keep(signature, products.Replay(recipe, out))
    return out


def prepare_balance(where: kept.Layout) -> Recipe:
    """The launch that makes the balance, int32 [k], of the kept weight in the buffer A."""
    recipe, maxima = Recipe(), _parts(where, A)[1]
    recipe.launch(
        kernels.balance_kernel, triton.cdiv(where.k, launch.WORDS_BLOCK), maxima, maxima, Block(OUT), where.k,
        GRADIENT=False, BLOCK=launch.WORDS_BLOCK, num_warps=4, **launch.STRICT,
    )  # fmt: skip
    return recipe


def factors(weight: Tensor, where: kept.Layout, window: int) -> Tensor:
    """`kept.factors` on a GPU."""
    signature = ("factors", where, weight.data_ptr() & 15, weight.get_device(), window)
    return _replayed(signature, lambda: prepare_factors(where), weight, (where.k + 1,), torch.int32)


def prepare_factors(where: kept.Layout) -> Recipe:
    """The launch that makes the factors, int32 [k + 1], of the kept weight in the buffer A."""
    recipe, maxima = Recipe(), _parts(where, A)[1]
    recipe.launch(factors_kernel, triton.cdiv(where.k, _FACTORS), maxima, Block(OUT), where.k, BLOCK=_FACTORS, num_warps=8, **launch.STRICT)
    return recipe


def prepare(a: Tensor, n: int, window: int, bias: Tensor | None, plan: launch.Plan | None = None, device=None) -> Recipe:
    """The launches of a [M, K] by a kept weight [K, n] in the buffer B; `bias` has the result's shape."""
    recipe = Recipe()
    m, k = a.shape
    plan = plan or launch.kept_plan(m, n, launch.padded_contraction(k), window, launch.hardware(device or a.device))
    recipe.plan = plan
    x = kernels.operand(a, A, -1)
    q, maxima = _parts(kept.layout(k, n, window), B)
    if plan.streamed:
        rows, tile = launch.few_rows(m), launch.few_rows_tile(k, m > 1 and x.side_by_side)
    else:
        rows, tile = m, launch.rows_tile(m, k, x.side_by_side, launch.rows_warps(x.side_by_side))
    digits = recipe.reserve(DIGITS[window] * rows * q.padded, torch.int8)
    qa = Digits(digits, recipe.reserve(m, torch.int32), rows, m, q.padded)
    _quantize(recipe, x, qa, maxima, 1, window, tile)
    recipe.quantising = len(recipe.launches)
    if plan.streamed:
        _multiply_few_rows(recipe, qa, q, window, bias, plan)
    else:
        bias_strides = None if bias is None else (0, *bias.stride())
        products.multiply_digits(recipe, qa, q, window, 1, bias_strides, plan)
    return recipe


def prepare_product(m: int, k: int, n: int, window: int, raw: bool, bias: Tensor | None, plan: launch.Plan | None = None, device=None) -> Recipe:
    """The launches of digits [planes * m, k] in the buffer A, their exponents in EXPONENTS, by a kept weight [k, n] in
    the buffer B; `bias` has the result's shape. `raw`: some rows may have no digits yet, and get them in place."""
    recipe = Recipe()
    recipe.product = m, n, k, window, 1, "int8"
    recipe.plan = plan = plan or launch.gemm_plan(m, n, k, window, 1, launch.hardware(device))
    q, maxima = _parts(kept.layout(k, n, window), B)
    if raw:
        recipe.launch(
            raw_rows_kernel, triton.cdiv(m, _RAW_ROWS), Block(A), Block(EXPONENTS), maxima, m, k,
            CODE=RAW, W=window, D=DIGITS[window], BR=_RAW_ROWS, BK=1024, num_warps=4, **launch.STRICT,
        )  # fmt: skip
        recipe.quantising = 1
    bias_strides = None if bias is None else (0, *bias.stride())
    products.multiply_digits(recipe, Digits(Block(A), Block(EXPONENTS), m, m, k), q, window, 1, bias_strides, plan)
    return recipe


def _multiply_few_rows(recipe: Recipe, qa: Digits, qw: Digits, window: int, bias: Tensor | None, plan: launch.Plan) -> None:
    m, n = qa.rows, qw.rows
    strides = (n, 1)  # of the result, along m and n
    bias_strides = (0, 1) if bias is None else bias.stride()
    along = 0 if bias_strides[1] == 0 else 1 if bias_strides[0] == 0 else 2
    out, added = Block(OUT), Block(OUT if bias is None else BIAS)
    total = recipe.reserve(plan.words * m * n, torch.int64, ZEROS) if plan.words else out
    recipe.launch(
        product_kernel, triton.cdiv(n, plan.bm) * triton.cdiv(qw.padded, plan.span),
        qw.digits, qw.exponents, n, qa.digits, qa.exponents, m, qw.padded, plan.span,
        out, total, added, m * n, *strides[::-1], *bias_strides[::-1], int(bias is not None),
        D=DIGITS[window], MP=qa.all_rows, BR=plan.bm, BK=plan.bk, G=plan.groups,
        EVEN=qw.padded % plan.step == 0, WORDS=plan.words, BIAS=along,
        num_warps=plan.warps, num_stages=plan.stages, **launch.STRICT,
    )  # fmt: skip
    if plan.words:
        columns, rows = launch.FINISH_TILE
        recipe.launch(
            products.finish_kernel, triton.cdiv(n, rows) * triton.cdiv(m, columns),
            out, total, added, qw.exponents, qa.exponents,
            n, m, 0, 0, m * n, 0, *strides[::-1], 0, *bias_strides[::-1], int(bias is not None), 0,
            BM=rows, BN=columns, WORDS=plan.words, BIAS=along, CAUSAL=0, num_warps=4, **launch.STRICT,
        )  # fmt: skip


def multiply(
    a: Tensor, weight: Tensor, n: int, window: int, bias: Tensor | None, out_dtype: torch.dtype,
    plan: launch.Plan | None = None, signature: tuple | None = None,
) -> Tensor:  # fmt: skip
    """The product by a kept weight; by its signature, where it has one, later ones replay it."""
    recipe = prepare(a, n, window, bias, plan)
    out = torch.empty((a.shape[0], n), dtype=out_dtype, device=a.device)
    recipe.run((a, weight, bias, out, *recipe.scratch(a.device)))
    if signature is not None and recipe.replays:
        launch.keep(signature, products.Replay(recipe, out))
    return out


def multiply_digits(
    digits: Tensor, exponents: Tensor, weight: Tensor, n: int, window: int, raw: bool, bias: Tensor | None, out_dtype: torch.dtype,
    plan: launch.Plan | None = None, signature: tuple | None = None,
) -> Tensor:  # fmt: skip
    """As `multiply`, of digits and exponents."""
    m, k = exponents.numel(), digits.shape[1]
    recipe = prepare_product(m, k, n, window, raw, bias, plan, digits.device)
    out = torch.empty((m, n), dtype=out_dtype, device=digits.device)
    recipe.run((digits, weight, bias, out, *recipe.scratch(digits.device), exponents))
    if signature is not None and recipe.replays:
        launch.keep(signature, products.Replay(recipe, out))
    return out
