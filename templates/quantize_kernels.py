"""The GPU side of `quantize`: int8 digits, K-major, and one exponent a row.

Operands are read where they lie, in either stride order. A row that fits a program's registers is
read once; otherwise one pass finds the maxima and one writes the digits. All decisions are made on
bit patterns and integers, so flush-to-zero, NaN payloads and the order of maxima cannot matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.templates import launch
from carbon_compile.templates.quantize import BEXPO_BUMP, DIGITS, EMPTY, POISON

_BUMP = tl.constexpr(BEXPO_BUMP)
_POISON = tl.constexpr(POISON)
_EMPTY = tl.constexpr(EMPTY)
_INFINITY_BITS = tl.constexpr(0x7F800000)

BALANCES = {"none": 0, "weight": 1, "gradient": 2, "keys": 3}


class Digits(NamedTuple):
    """`digits` int8 [D, batch * rows, padded K], least significant plane first; `exponents` int32
    [batch * rows]; `padded` is K rounded up, the rest zero-filled."""

    digits: Tensor
    exponents: Tensor
    rows: int
    padded: int


class Balance(NamedTuple):
    """The maxima a balance is computed from, as bit patterns over the contraction; those of the
    second operand's next batch stand `stride` elements further."""

    mode: int
    first: Tensor
    second: Tensor
    stride: int = 0


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _exponents(bits, BUMP: tl.constexpr):
    """expo of binary32 magnitudes given as bits (bexpo with the bump); meaningless for zero."""
    # A subnormal is bits * 2^-149; converting the integer normalises it.
    normal = bits.to(tl.float32).to(tl.int32, bitcast=True) - (149 << 23)
    pattern = tl.where(bits < 0x00800000, normal, bits)
    return ((pattern + BUMP) >> 23) - 126


@triton.jit
def _balance(first, second, MODE: tl.constexpr):
    e2 = _exponents(second, 0)
    if MODE == 1:
        d = tl.where(second == 0, 0, e2)
    else:
        gap = e2 - _exponents(first, 0)
        toward_zero = (gap + tl.where(gap < 0, 1, 0)) >> 1
        d = tl.where((first == 0) | (second == 0), 0, toward_zero)
    return d


@triton.jit
def _load_balance(first_ptr, second_ptr, k, K, MODE: tl.constexpr, SIGN: tl.constexpr):
    second = tl.load(second_ptr + k, mask=k < K, other=0)
    first = second
    if MODE == 2:
        first = tl.load(first_ptr + k, mask=k < K, other=0)
    return SIGN * _balance(first, second, MODE)


@triton.jit
def _balanced_exponents(bits, d):
    """bexpo(|x|) + d elementwise, with the codes for zeros and for what is not finite."""
    e = tl.where(bits == 0, _EMPTY, _exponents(bits, _BUMP) + d)
    return tl.where(bits >= _INFINITY_BITS, _POISON, e)


@triton.jit
def _keys(second_ptr, k, K):
    """Of the second operand's rows: bexpo, which are zero, which are not finite."""
    largest = tl.load(second_ptr + k, mask=k < K, other=0)
    return _exponents(largest, _BUMP), largest == 0, largest >= _INFINITY_BITS


@triton.jit
def _folded_exponents(bits, d, empty, wild):
    """bexpo(|A_ik| 2^(d_k)); see `quantize.fold_keys`."""
    e = _balanced_exponents(bits, d)
    e = tl.where(empty & (bits < _INFINITY_BITS), _EMPTY, e)
    return tl.where(wild & (bits != 0), _POISON, e)


@triton.jit
def _dropped(x, empty, wild, SIGN: tl.constexpr):
    """x as binary32, 0 where its contraction index takes no part in the integers."""
    drop = empty
    if SIGN < 0:
        drop = empty | wild
    return tl.where(drop[None, :], 0.0, x.to(tl.float32))


@triton.jit
def _row_exponent(largest):
    """The same from a row's largest magnitude bits, without a balance."""
    return _balanced_exponents(largest, 0)


@triton.jit
def _power_of_two(e):
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _integers(x, shift):
    """RNE(x 2^shift) for results below 2^23, as int32."""
    # Beyond +-252 the result is 0 or x is; each half is then a normal power of two, and the product
    # is exact wherever it does not round to 0.
    shift = tl.minimum(tl.maximum(shift, -252), 252)
    half = shift >> 1
    y = x.to(tl.float32) * _power_of_two(half) * _power_of_two(shift - half)
    bits = y.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # In [2^23, 2^24) a binary32 ulp is 1: the addition rounds to an integer, ties to even, and the
    # integer is what the significand field then holds.
    q = (magnitude + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(bits < 0, -q, q)


@triton.jit
def _store_digits(q, pointers, plane, mask, D: tl.constexpr):
    for _ in tl.static_range(D):
        tl.store(pointers, q.to(tl.int8), mask=mask)  # the low byte, read as signed, is the digit
        q = (q + 128) >> 8
        pointers += plane


@triton.jit
def _stored_exponent(e, W: tl.constexpr):
    s = tl.where(e == _EMPTY, 0, e - (W - 1))
    return tl.where(e == _POISON, _POISON, s)


@triton.jit
def maxima_kernel(
    x_ptr, out_ptr, first_ptr, second_ptr, R, K, stride_b, stride_r, stride_k, stride_keys,
    MODE: tl.constexpr, SIGN: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    STEPS: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """Per row: the largest magnitude's bits, or with a balance the largest exponent."""
    spans = tl.cdiv(K, BK * STEPS)
    blocks = tl.cdiv(R, BR)
    pid = tl.program_id(0)
    span = pid % spans
    batch = pid // spans // blocks
    r = (pid // spans % blocks) * BR + tl.arange(0, BR)
    base = x_ptr + batch.to(tl.int64) * stride_b + r.to(tl.int64)[:, None] * stride_r
    second_ptr += batch.to(tl.int64) * stride_keys
    if MODE == 0:
        best = tl.zeros((BR, BK), tl.int32)
    else:
        best = tl.full((BR, BK), _EMPTY, tl.int32)
    for step in range(STEPS):
        k = (span * STEPS + step) * BK + tl.arange(0, BK)
        mask = (r < R)[:, None] & (k < K)[None, :]
        x = tl.load(base + k.to(tl.int64)[None, :] * stride_k, mask=mask, other=0)
        value = _magnitude_bits(x)
        if MODE == 3:
            d, empty, wild = _keys(second_ptr, k, K)
            value = _folded_exponents(value, d[None, :], empty[None, :], wild[None, :])
        elif MODE != 0:
            d = _load_balance(first_ptr, second_ptr, k, K, MODE, SIGN)
            value = _balanced_exponents(value, d[None, :])
        best = tl.maximum(best, value)
    largest = tl.max(best, axis=1)
    out = out_ptr + batch.to(tl.int64) * R + r
    if ATOMIC:
        tl.atomic_max(out, largest, mask=r < R, sem="relaxed")
    else:
        tl.store(out, largest, mask=r < R)


@triton.jit
def digits_kernel(
    x_ptr, largest_ptr, digits_ptr, exponents_ptr, first_ptr, second_ptr,
    R, K, KP, plane, stride_b, stride_r, stride_k, stride_keys,
    W: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr, SIGN: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Digits of one tile, given each row's maximum."""
    spans = tl.cdiv(KP, BK)
    blocks = tl.cdiv(R, BR)
    pid = tl.program_id(0)
    # Neighbouring programs take neighbouring row blocks: whole cache lines in either stride order.
    block = pid % blocks
    span = pid // blocks % spans
    batch = pid // blocks // spans
    r = block * BR + tl.arange(0, BR)
    k = span * BK + tl.arange(0, BK)
    row = batch.to(tl.int64) * R + r
    if MODE == 3 and SIGN < 0:
        e = tl.zeros((BR,), tl.int32)
    else:
        e = tl.load(largest_ptr + row, mask=r < R, other=0)
    if MODE == 0:
        e = _row_exponent(e)
    if span == 0:
        tl.store(exponents_ptr + row, _stored_exponent(e, W), mask=r < R)
    base = x_ptr + batch.to(tl.int64) * stride_b + r.to(tl.int64)[:, None] * stride_r
    mask = (r < R)[:, None] & (k < K)[None, :]
    x = tl.load(base + k.to(tl.int64)[None, :] * stride_k, mask=mask, other=0)
    shift = (W - 1) - e[:, None]
    if MODE == 3:
        d, empty, wild = _keys(second_ptr + batch.to(tl.int64) * stride_keys, k, K)
        x = _dropped(x, empty, wild, SIGN)
        shift += SIGN * d[None, :]
    elif MODE != 0:
        shift += _load_balance(first_ptr, second_ptr, k, K, MODE, SIGN)[None, :]
    pointers = digits_ptr + row[:, None] * KP + k[None, :]
    _store_digits(_integers(x, shift), pointers, plane, (r < R)[:, None] & (k < KP)[None, :], D)


@triton.jit
def rows_kernel(
    x_ptr, digits_ptr, exponents_ptr, first_ptr, second_ptr,
    R, K, KP, plane, stride_b, stride_r, stride_k, stride_keys,
    W: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr, SIGN: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Maximum and digits of whole rows in one read."""
    blocks = tl.cdiv(R, BR)
    pid = tl.program_id(0)
    batch = pid // blocks
    r = (pid % blocks) * BR + tl.arange(0, BR)
    k = tl.arange(0, BK)
    row = batch.to(tl.int64) * R + r
    base = x_ptr + batch.to(tl.int64) * stride_b + r.to(tl.int64)[:, None] * stride_r
    mask = (r < R)[:, None] & (k < K)[None, :]
    x = tl.load(base + k.to(tl.int64)[None, :] * stride_k, mask=mask, other=0)
    if MODE == 0:
        e = _row_exponent(tl.max(_magnitude_bits(x), axis=1))
        shift = (W - 1) - e[:, None]
    elif MODE == 3:
        d, empty, wild = _keys(second_ptr + batch.to(tl.int64) * stride_keys, k, K)
        if SIGN > 0:
            folded = _folded_exponents(
                _magnitude_bits(x), d[None, :], empty[None, :], wild[None, :]
            )
            e = tl.max(folded, axis=1)
        else:
            e = tl.zeros((BR,), tl.int32)
        x = _dropped(x, empty, wild, SIGN)
        shift = (W - 1) - e[:, None] + SIGN * d[None, :]
    else:
        d = _load_balance(first_ptr, second_ptr, k, K, MODE, SIGN)[None, :]
        e = tl.max(_balanced_exponents(_magnitude_bits(x), d), axis=1)
        shift = (W - 1) - e[:, None] + d
    tl.store(exponents_ptr + row, _stored_exponent(e, W), mask=r < R)
    pointers = digits_ptr + row[:, None] * KP + k[None, :]
    _store_digits(_integers(x, shift), pointers, plane, (r < R)[:, None] & (k < KP)[None, :], D)


def maxima(x: Tensor, dim: int, balance: Balance | None = None, sign: int = 0) -> Tensor:
    """Per row (the dimension that is not `dim`) of x [..., p, q]: the bits of max |x| along `dim`,
    or with a balance the largest exponent; int32 [batch * rows]."""
    batch, rows, k, strides = _view(x, dim)
    tile = launch.maxima_tile(batch, rows, k, strides[1], strides[2])
    grid = batch * triton.cdiv(rows, tile.rows) * triton.cdiv(k, tile.columns * tile.steps)
    atomic = k > tile.columns * tile.steps
    # Without atomics every element is stored; with them the buffer starts below any value.
    start = (torch.empty if not atomic else torch.zeros)(
        batch * rows, dtype=torch.int32, device=x.device
    )
    if atomic and balance is not None:
        start.fill_(EMPTY)
    mode, first, second, stride = balance or (0, start, start, 0)
    maxima_kernel[(grid,)](
        x, start, first, second, rows, k, *strides, stride, MODE=mode, SIGN=sign, BR=tile.rows,
        BK=tile.columns, STEPS=tile.steps, ATOMIC=atomic, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip
    return start


def quantize(
    x: Tensor, window: int, contraction: int, balance: Balance | None = None, sign: int = 0
) -> Digits:
    """Digits and exponents of x [rows, K] or [batch, rows, K] (or with K first), any strides.

    `contraction` is the dimension of K, -1 or -2; `sign` is that of the balance for this operand.
    """
    batch, rows, k, strides = _view(x, contraction)
    padded = launch.padded_contraction(k)
    planes = DIGITS[window]
    out = torch.empty((planes, batch * rows, padded), dtype=torch.int8, device=x.device)
    exponents = torch.empty(batch * rows, dtype=torch.int32, device=x.device)
    mode, first, second, stride = balance or (0, exponents, exponents, 0)
    where = (rows, k, padded, batch * rows * padded, *strides, stride)
    tile = launch.rows_tile(batch, rows, padded, strides[1], strides[2])
    if tile is not None:
        grid = batch * triton.cdiv(rows, tile.rows)
        rows_kernel[(grid,)](
            x, out, exponents, first, second, *where, W=window, D=planes, MODE=mode, SIGN=sign,
            BR=tile.rows, BK=tile.columns, num_warps=tile.warps, **launch.STRICT,
        )  # fmt: skip
        return Digits(out, exponents, rows, padded)
    static = mode == BALANCES["keys"] and sign < 0
    largest = exponents if static else maxima(x, contraction, balance, sign)
    tile = launch.digits_tile(strides[1], strides[2])
    grid = batch * triton.cdiv(rows, tile.rows) * triton.cdiv(padded, tile.columns)
    digits_kernel[(grid,)](
        x, largest, out, exponents, first, second, *where, W=window, D=planes, MODE=mode, SIGN=sign,
        BR=tile.rows, BK=tile.columns, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip
    return Digits(out, exponents, rows, padded)


def _view(x: Tensor, contraction: int) -> tuple[int, int, int, tuple[int, int, int]]:
    """Batch, rows, K and their strides."""
    other = -1 if contraction == -2 else -2
    batch, stride = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    return (
        batch,
        x.shape[other],
        x.shape[contraction],
        (stride, x.stride(other), x.stride(contraction)),
    )
