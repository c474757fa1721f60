"""Exact sums of the columns of a matrix (contract section 3), two launches on a GPU.

Computes     bias_j   = the exact sum of g_ij over rows i
             weight_j = the exact sum of g_ij h_ij, each product rounded to binary32: a norm's
                        gradients, h its input in standard units. Either, or both in one pass
Order        none: the largest magnitude and an integer sum
Invariant to tiles, splits, threads, devices, strides
Rounds at    each operation on operands; each term, to 38 bits below the largest magnitude; the
             total; the output type

The first launch writes the largest magnitude of each column of each slab of rows, and zeros where
the second adds its totals, of which the last program to arrive makes results. Terms are made in two
parts by adding binary32 constants, as `lowering.pointwise` explains; its programs are the twin.
Slabs are gone through backwards the second time, for their ends are still in the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.templates import launch
from carbon_compile.templates.matmul_recipe import BIAS, OUT, WORK, A, B, Block, Recipe, hooked
from carbon_compile.templates.sum_kernels import store_bits

LIMIT = 1 << 18  # rows; with more, programs would read more largest magnitudes than elements
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# Buffers: g, h, bias's gradient, weight's gradient, scratch.
_G, _H, _BIAS, _WEIGHT = A, B, BIAS, OUT

_INFINITY_BITS = tl.constexpr(0x7F800000)
_MINUS_INFINITY_BITS = tl.constexpr(-0x800000)


@triton.jit
def _tile(
    g_ptr, h_ptr, i, j, end, N, g_stride, h_stride, SCALE: tl.constexpr,
):  # fmt: skip
    """(g, g h) of rows i and columns j, 0 outside; without SCALE g twice."""
    present = (i < end)[:, None] & (j < N)[None, :]
    row = i.to(tl.int64)[:, None]
    g = tl.load(g_ptr + row * g_stride + j[None, :], mask=present, other=0).to(tl.float32)
    product = g
    if SCALE:
        product = g * tl.load(h_ptr + row * h_stride + j[None, :], mask=present, other=0).to(tl.float32)
    return g, product


@triton.jit
def _widened(top, bottom, v):
    """The largest bits and the smallest negative key so far, of v too."""
    bits = v.to(tl.int32, bitcast=True)
    return tl.maximum(top, bits), tl.minimum(bottom, bits ^ 0x7FFFFFFF)


@triton.jit
def _signed(largest, least):
    """Magnitude bits; -inf's own bits where it is the only infinity, and a NaN's where there are both."""
    m = tl.where(least < 0, _MINUS_INFINITY_BITS, largest)
    m = tl.where((least < 0) & (largest == _INFINITY_BITS), 0x7FFFFFFF, m)
    return tl.where(largest > _INFINITY_BITS, largest, m)


@triton.jit
def _key(top, bottom):
    """Of a slab's columns, one word that says what `_signed` says."""
    above = tl.max(top, axis=0)
    below = tl.min(bottom, axis=0) ^ -1  # magnitude bits of the largest negative number, or negative
    minus = tl.where(below == _INFINITY_BITS, -1, 0)
    others = tl.where(below == _INFINITY_BITS, above, tl.maximum(above, below))
    return _signed(others, minus)


@triton.jit
def _largest(keys_ptr, j, splits, N, BN: tl.constexpr):
    """`_signed` magnitudes of whole columns; many slabs at once, for each load waits for memory."""
    largest = tl.zeros((BN,), tl.int32)
    least = tl.zeros((BN,), tl.int32)
    for first in range(0, splits, 32):
        split = first + tl.arange(0, 32)
        present = (split < splits)[:, None] & (j < N)[None, :]
        keys = tl.load(keys_ptr + split[:, None] * N + j[None, :], mask=present, other=0)
        largest = tl.maximum(largest, tl.max(keys, axis=0))
        least = tl.minimum(least, tl.min(keys, axis=0))
    return _signed(largest, least)


@triton.jit
def _special(m):
    return (m < 0) | (m >= _INFINITY_BITS)


@triton.jit
def _exponent(m):
    return tl.maximum((tl.where(_special(m), 0, m) >> 23) - 126, -125)


@triton.jit
def _grid(m):
    """(a power of two that brings terms near 1, the bits of two binary32 numbers that round to parts)"""
    e = _exponent(m)
    shift = tl.where(e > 64, -64, tl.where(e < -64, 64, 0))
    high = ((e + shift + (150 - 19)) << 23) | 0x400000
    low = ((e + shift + (150 - 38)) << 23) | 0x400000
    return ((shift + 127) << 23).to(tl.float32, bitcast=True), high, low


@triton.jit
def _parts(v, power, high, low):
    """The bits of v's two parts, each above its rounder's."""
    t = v * power[None, :]
    rounder = high.to(tl.float32, bitcast=True)[None, :]
    near = t + rounder
    rest = (t - (near - rounder)) + low.to(tl.float32, bitcast=True)[None, :]
    return near.to(tl.int32, bitcast=True), rest.to(tl.int32, bitcast=True)


@triton.jit
def _total(highs, lows, steps, high, low):
    """A slab's integer total: sums of bits less the rounders in them, which wrapped."""
    top = tl.sum(highs - (high * steps)[None, :], axis=0).to(tl.int64)
    return (top << 19) + tl.sum(lows - (low * steps)[None, :], axis=0).to(tl.int64)


@triton.jit
def _store(total, m, out_ptr, j, N):
    """The total rounded, scaled and rounded to the type of the result."""
    k = _exponent(m) - 38
    half = k >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((k - half + 127) << 23).to(tl.float32, bitcast=True)
    y = (total.to(tl.float32) * first * second).to(tl.int32, bitcast=True)
    y = tl.where(_special(m), m, y)
    store_bits(y, m > _INFINITY_BITS, out_ptr + j, j < N)


@triton.jit(do_not_specialize=["M", "span", "splits"])
def maxima_kernel(
    g_ptr, h_ptr, keys_ptr, totals_ptr, arrived_ptr,
    M, N, g_stride, h_stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Keys [sums, splits, N] of slabs of `span` rows; zeros to the totals [sums, N] and arrivals.

    Columns of g [M, N] (SHIFT) and of g h (SCALE) are summed; rows of g and h are contiguous.
    """
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    j = tile * BN + tl.arange(0, BN)
    start = split * span
    end = tl.minimum(start + span, M)
    if split == 0:
        tl.store(arrived_ptr + tile, 0)
        for kind in tl.static_range(SHIFT + SCALE):
            tl.store(totals_ptr + kind * N + j, tl.zeros((BN,), tl.int64), mask=j < N)
    top = tl.full((BM, BN), -0x80000000, tl.int32)  # of -0.0
    bottom = tl.full((BM, BN), 0x7FFFFFFF, tl.int32)  # of +0.0
    top_h = top
    bottom_h = bottom
    for i0 in range(start, end, BM):
        i = i0 + tl.arange(0, BM)
        g, product = _tile(g_ptr, h_ptr, i, j, end, N, g_stride, h_stride, SCALE)
        if SHIFT:
            top, bottom = _widened(top, bottom, g)
        if SCALE:
            top_h, bottom_h = _widened(top_h, bottom_h, product)
    at = keys_ptr + split * N + j
    if SHIFT:
        tl.store(at, _key(top, bottom), mask=j < N)
    if SCALE:
        tl.store(at + SHIFT * splits * N, _key(top_h, bottom_h), mask=j < N)


@triton.jit(do_not_specialize=["M", "span", "splits"])
def terms_kernel(
    g_ptr, h_ptr, keys_ptr, totals_ptr, arrived_ptr, weight_ptr, bias_ptr,
    M, N, g_stride, h_stride, span, splits,
    BM: tl.constexpr, BN: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The sums: of g to `bias_ptr` (SHIFT), of g h to `weight_ptr` (SCALE), [N] each."""
    tiles = tl.cdiv(N, BN)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = pid % tiles
    split = pid // tiles
    j = tile * BN + tl.arange(0, BN)
    start = split * span
    end = tl.minimum(start + span, M)
    steps = tl.cdiv(end - start, BM)
    keys_h_ptr = keys_ptr + SHIFT * splits * N
    if SHIFT:
        m = _largest(keys_ptr, j, splits, N, BN)
        power, high, low = _grid(m)
    if SCALE:
        m_h = _largest(keys_h_ptr, j, splits, N, BN)
        power_h, high_h, low_h = _grid(m_h)
    highs = tl.zeros((BM, BN), tl.int32)
    lows = highs
    highs_h = highs
    lows_h = highs
    for step in range(0, steps):
        i = start + (steps - 1 - step) * BM + tl.arange(0, BM)
        g, product = _tile(g_ptr, h_ptr, i, j, end, N, g_stride, h_stride, SCALE)
        if SHIFT:
            near, rest = _parts(g, power, high, low)
            highs += near
            lows += rest
        if SCALE:
            near_h, rest_h = _parts(product, power_h, high_h, low_h)
            highs_h += near_h
            lows_h += rest_h
    at = totals_ptr + j
    at_h = totals_ptr + SHIFT * N + j
    if SHIFT:
        tl.atomic_add(at, _total(highs, lows, steps, high, low), mask=j < N, sem="relaxed")
    if SCALE:
        tl.atomic_add(at_h, _total(highs_h, lows_h, steps, high_h, low_h), mask=j < N, sem="relaxed")
    tl.debug_barrier()  # all threads have added before the program counts as arrived
    if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1:
        if SHIFT:
            _store(tl.load(at, mask=j < N, other=0, cache_modifier=".cg"), m, bias_ptr, j, N)
        if SCALE:
            _store(tl.load(at_h, mask=j < N, other=0, cache_modifier=".cg"), m_h, weight_ptr, j, N)


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
    recipe = _recipe(g, h, weight is not None, bias is not None, device)
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
        recipe = _recipe(g, h, weight is not None, bias is not None)
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


def _recipe(g, h, scale, shift, device=None):
    """Both launches. What is absent is stood in for by g, and not touched."""
    (m, n), sums = g.shape, scale + shift
    plan = launch.column_sums_plan(m, n, scale, launch.hardware(device or g.device))
    tiles, splits = triton.cdiv(n, plan.columns), triton.cdiv(m, plan.span)
    recipe = Recipe()
    keys = recipe.reserve(sums * splits * n, torch.int32)
    totals = recipe.reserve(sums * n, torch.int64)
    arrived = recipe.reserve(tiles, torch.int32)
    g_block = Block(_G)
    operands = [g_block, Block(_H) if scale else g_block]
    outputs = [Block(_WEIGHT) if scale else g_block, Block(_BIAS) if shift else g_block]
    sizes = [m, n, g.stride(0), h.stride(0) if scale else 0, plan.span, splits]
    flags = {"BM": plan.rows, "BN": plan.columns, "SHIFT": int(shift), "SCALE": int(scale)}
    options = {**flags, "num_warps": plan.warps, **launch.STRICT}
    recipe.launch(maxima_kernel, tiles * splits, *operands, keys, totals, arrived, *sizes, **options)
    recipe.launch(terms_kernel, tiles * splits, *operands, keys, totals, arrived, *outputs, *sizes, **options)
    return recipe


_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
