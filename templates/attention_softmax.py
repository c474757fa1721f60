"""The softmax of attention and its derivative on a GPU (contract section 5), one launch each.

Computes     weights_k  = softmax of scale score_k over the keys k that a query sees, 0 elsewhere
             gradient_k = scale ((g_k - sum(g weights)) weights_k), 0 where a weight is 0
Order        none: the exact maximum, integer sums
Invariant to tiles, threads, devices
Rounds at    each operation of `lowering.attention`'s formulas, which are the twin

Graph operations say the same, but compute every masked weight and divide by general division. Here what no
query of a program sees is not read, only filled in, and a row's common divisor is inverted once: a product
with its reciprocal is a quotient after two corrections.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.templates import launch
from carbon_compile.templates.column_sums import _power
from carbon_compile.templates.matmul_kernels import Replay
from carbon_compile.templates.matmul_recipe import OUT, A, B, Block, Recipe

_INFINITY_BITS = tl.constexpr(0x7F800000)
_LINE = tl.constexpr(16)  # elements that are read together or not at all

# As `lowering.elementary` has them.
_LOG2E = tl.constexpr(1.4426950408889634)
_SHIFT = tl.constexpr(12583166.0)
_SHIFT_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exp(x):
    """e^x for x <= 0 or NaN, by the operations of `lowering.elementary.exp`.

    2^n is 2^(n + 64) 2^-64 here: as there, the first product is exact and the second one rounds.
    """
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    t = x * _LOG2E + _SHIFT
    n = t - _SHIFT
    r = (x - n * 0.693359375) - n * -0.00021219444
    poly = r * 0.0013838833 + 0.00836919
    poly = r * poly + 0.041668102
    poly = r * poly + 0.16666517
    poly = r * poly + 0.49999994
    y = r * r * poly + r + 1.0
    power = (t.to(tl.int32, bitcast=True) - (_SHIFT_BITS + 254 - 127 - 64)) << 23
    return y * power.to(tl.float32, bitcast=True) * 2.0**-64


@triton.jit
def _rounded_off(x, magic):
    """(x rounded to an integer of multiples of 2^-23 times the power of two in `magic`, what is left of x)"""
    near = x + magic
    return near.to(tl.int32, bitcast=True) - magic.to(tl.int32, bitcast=True), x + (magic - near)


@triton.jit
def _total(x, high_magic, low_magic):
    """The sum over rows of x [R, N], |x| <= 1, rounded to 2^-19 times the unit of `low_magic` and then to it:
    int64. `lowering.pointwise` has the proof."""
    high, rest = _rounded_off(x, tl.full((1, 1), high_magic, tl.float32))
    low, _ = _rounded_off(rest, tl.full((1, 1), low_magic, tl.float32))
    highs = tl.sum(high, axis=1)
    lows = tl.sum(low, axis=1)
    # All parts may be 2^19: their sum of 2^31 has wrapped, and their rests are negative.
    wrapped = (highs == -(2**31)) & (lows < 0)
    return (tl.where(wrapped, 2**31, highs.to(tl.int64)) << 19) + lows.to(tl.int64)


@triton.jit
def _quotients(p, total):
    """p / total, correctly rounded: p [R, N] in [0, 1] or NaN, total [R] in [1, 2^12] or anything where p is NaN.

    With RN(1 / total) two corrections give the quotient (Markstein), if what is left of p is no multiple of
    less than 2^-149: for p of 2^-100 and more, and for zeros.
    """
    below = (p.to(tl.int32, bitcast=True) - 1).to(tl.uint32, bitcast=True)  # of zeros, the largest
    t = tl.broadcast_to(total[:, None], p.shape)
    if tl.min(tl.min(below, axis=1), axis=0) < 0x0D800000 - 1:
        y = tl.div_rn(p, t)
    else:
        inverse = tl.broadcast_to(tl.div_rn(tl.full(total.shape, 1.0, tl.float32), total)[:, None], p.shape)
        y = p * inverse
        y = tl.fma(tl.fma(-t, y, p), inverse, y)
        y = tl.fma(tl.fma(-t, y, p), inverse, y)
    return y


@triton.jit
def _fill(out_ptr, r, rows, keys, start, value, W: tl.constexpr):
    """A row's value [R] from key `start` on."""
    for first in range(start, keys, W):
        k = first + tl.arange(0, W)[None, :]
        at = r.to(tl.int64)[:, None] * keys + k
        tl.store(out_ptr + at, tl.broadcast_to(value[:, None], at.shape), mask=(r < rows)[:, None] & (k < keys))


@triton.jit
def _places(r, rows, last, keys, W: tl.constexpr):
    """Where elements are, which are seen, and which lines of them are to be read."""
    k = tl.arange(0, W)[None, :]
    at = r.to(tl.int64)[:, None] * keys + k
    present = (r < rows)[:, None] & (k < keys)
    return at, present, present & (k <= last[:, None]), present & (k // _LINE <= (last // _LINE)[:, None])


@triton.jit
def _weights(x_ptr, out_ptr, r, rows, last, keys, scale, W: tl.constexpr):
    """Rows r of the weights, computed up to W keys and filled in beyond; row by row, keys up to `last` are seen."""
    at, present, seen, read = _places(r, rows, last, keys, W)
    x = tl.where(seen, tl.load(x_ptr + at, mask=read, other=0.0) * scale, float("-inf"))
    m = tl.reduce(x, 1, _larger)
    p = _exp(x - m[:, None])
    total = _total(p, 1.5 * 2.0**5, 1.5 * 2.0**-14).to(tl.float32) * 2.0**-37
    y = _quotients(p, total)
    other = tl.where(m == float("-inf"), 0.0, float("nan"))
    special = (m == float("-inf")) | (m == float("inf")) | (m != m)
    tl.store(out_ptr + at, tl.where(special[:, None], other[:, None], y), mask=present)
    _fill(out_ptr, r, rows, keys, W, tl.where(special, other, 0.0), W)


@triton.jit
def _gradient(g_ptr, w_ptr, out_ptr, r, rows, last, keys, scale, W: tl.constexpr):
    """Rows r of the scores' gradient, as `_weights` makes theirs."""
    at, present, _, read = _places(r, rows, last, keys, W)
    w = tl.load(w_ptr + at, mask=read, other=0.0)
    g = tl.where(w == 0.0, 0.0, tl.load(g_ptr + at, mask=read, other=0.0))
    v = g * w
    m = tl.reduce(tl.abs(v), 1, _larger).to(tl.int32, bitcast=True)
    finite = m < _INFINITY_BITS
    e = tl.maximum((tl.where(finite, m, 0) >> 23) - 126, -125)
    first = tl.minimum(e, 64)  # 2^-e in two factors, for it may be subnormal: what v loses then is below all rounding
    scaled = v * _power(-first)[:, None] * _power(first - e)[:, None]
    k = e - 38
    half = k >> 1
    total = _total(scaled, 1.5 * 2.0**4, 1.5 * 2.0**-15).to(tl.float32) * _power(half) * _power(k - half)
    if tl.min(finite.to(tl.int32), axis=0) == 0:
        infinities = tl.sum(tl.where(tl.abs(v) < float("inf"), 0.0, v), axis=1)  # NaN of both signs, and of NaN
        total = tl.where(finite, total, infinities)
    y = tl.where(w == 0.0, 0.0, (g - total[:, None]) * w) * scale
    # A query that is NaN is so throughout; what it doesn't see was not read.
    nan = tl.load(w_ptr + r.to(tl.int64) * keys, mask=r < rows, other=0.0)
    tl.store(out_ptr + at, tl.where((nan != nan)[:, None], float("nan"), y), mask=present)
    _fill(out_ptr, r, rows, keys, W, tl.where(nan != nan, nan, tl.zeros_like(total) * scale), W)


@triton.jit
def _queries(queries, keys, CAUSAL: tl.constexpr, ROWS: tl.constexpr):
    """A program's rows, the last key that each sees, and the last one that any does."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if CAUSAL:
        last = tl.minimum(r % queries, keys - 1)
    else:
        last = tl.zeros((ROWS,), tl.int32) + keys - 1
    return r, last, tl.max(last, axis=0)


@triton.jit
def weights_kernel(x_ptr, out_ptr, rows, queries, keys, scale, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Weights of scores x [rows, keys], binary32; CAUSAL: row r is query r modulo `queries`, which sees keys up to itself."""
    r, last, stop = _queries(queries, keys, CAUSAL, ROWS)
    if CAUSAL and stop < BLOCK // 4:
        _weights(x_ptr, out_ptr, r, rows, last, keys, scale, BLOCK // 4)
    elif CAUSAL and stop < BLOCK // 2:
        _weights(x_ptr, out_ptr, r, rows, last, keys, scale, BLOCK // 2)
    else:
        _weights(x_ptr, out_ptr, r, rows, last, keys, scale, BLOCK)


@triton.jit
def gradient_kernel(g_ptr, w_ptr, out_ptr, rows, queries, keys, scale, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The scores' gradient, from that of the weights w, g, both [rows, keys], binary32; CAUSAL as in `weights_kernel`."""
    r, last, stop = _queries(queries, keys, CAUSAL, ROWS)
    if CAUSAL and stop < BLOCK // 4:
        _gradient(g_ptr, w_ptr, out_ptr, r, rows, last, keys, scale, BLOCK // 4)
    elif CAUSAL and stop < BLOCK // 2:
        _gradient(g_ptr, w_ptr, out_ptr, r, rows, last, keys, scale, BLOCK // 2)
    else:
        _gradient(g_ptr, w_ptr, out_ptr, r, rows, last, keys, scale, BLOCK)


def weights(scores: Tensor, scale: float, causal: bool) -> Tensor:
    """Softmax over the last dimension of scale times scores [..., L, S], 0 < S <= launch.SOFTMAX_KEYS, of float32: the same, contiguous.

    `causal`: query l sees keys up to l; else all.
    """
    scores = scores.contiguous()
    return _run(scores, None, scale, causal)


def gradient(grad: Tensor, weights: Tensor, scale: float, causal: bool) -> Tensor:
    """The gradient of scores [..., L, S] from that of their `weights`, as the function of that name gives them."""
    return _run(grad.contiguous(), weights.contiguous(), scale, causal)


def _run(x, w, scale, causal):
    if not x.numel():
        return torch.empty_like(x)
    b = x if w is None else w
    # Zeros of both signs are equal, and what they multiply is not.
    signature = ("softmax", x.shape, w is None, scale or repr(scale), causal, x.get_device(), x.data_ptr() & 15, b.data_ptr() & 15)
    prepared = launch.prepared.get(signature)
    out = None if prepared is None else prepared(x, b, None)
    if out is None:
        recipe, out = _recipe(x, w is None, scale, causal), torch.empty_like(x)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            recipe.run((x, b, None, out, None, None))
        if recipe.replays:
            launch.keep(signature, Replay(recipe, out))
    return out


def warmable(x: Tensor, forward: bool, scale: float, causal: bool):
    """(recipe, types of its buffers) to compile before a softmax of x is launched; a meta tensor will do."""
    return _recipe(x, forward, scale, causal), (x.dtype, x.dtype, None, x.dtype)


def _recipe(x, forward, scale, causal):
    queries, keys = x.shape[-2:]
    kernel, operands = (weights_kernel, [Block(A)]) if forward else (gradient_kernel, [Block(A), Block(B)])
    rows, tile = x.numel() // keys, launch.softmax_tile(keys, len(operands))
    recipe = Recipe()
    recipe.launch(
        kernel, triton.cdiv(rows, tile.rows), *operands, Block(OUT), rows, queries, keys, float(scale),
        CAUSAL=int(causal), ROWS=tile.rows, BLOCK=tile.columns, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip
    return recipe
