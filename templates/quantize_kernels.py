"""The GPU side of `quantize`: int8 digits, K-major, and one exponent a row.

Operands are read where they lie, in either stride order, and both of a product in one launch. A row
that fits a program's registers is read once, a longer one twice by the same program. All decisions are made on
bit patterns and integers, so flush-to-zero, NaN payloads and the order of maxima cannot matter.

A load is as wide as its mask is alike over neighbours: one that ends at an odd length reads single elements,
however well its rows are aligned. Such rows are read in whole chunks of 16 bytes, the last of which may hold
a few elements of padding, or of the next row; what isn't the operand's is dropped (CHUNK).

Integer instructions, not bytes, bound the general way. Where every scale is a normal power of two and
each row's largest magnitude lies in [2^-100, 2^128), a program takes the quick way: balanced values
are binary32 products, exact unless so small that they round to 0. Both ways give the same digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from carbon_compile.templates import launch
from carbon_compile.templates.matmul_recipe import WORK, ZEROS, Block, Recipe
from carbon_compile.templates.quantize import BEXPO_BUMP, DIGITS, EMPTY, EXPO_ZERO, POISON

_BUMP = tl.constexpr(BEXPO_BUMP)
_POISON = tl.constexpr(POISON)
_EMPTY = tl.constexpr(EMPTY)
_ZERO = tl.constexpr(EXPO_ZERO)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_SMALL_BITS = tl.constexpr(27 << 23)  # 2^-100
# 1.5 2^23, where an ulp is 1 on both sides of zero, and half a digit.
_MAGIC = tl.constexpr(12582912.0 + 128.0)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

BALANCES = {"none": 0, "weight": 1, "gradient": 2, "keys": 3}


class Operand(NamedTuple):
    """Where the rows of an operand lie: [batch, rows, K], in any strides."""

    block: Block
    batch: int
    rows: int
    k: int
    stride_b: int
    stride_r: int
    stride_k: int
    dtype: torch.dtype
    aligned: bool = True  # the first element lies at a multiple of 16 bytes

    def like(self, other: Operand) -> bool:
        """Whether a kernel reads both by the same code."""

        def code(x: Operand) -> tuple:
            return x.dtype, x.stride_r == 1, x.stride_k == 1, x.crooked

        return code(self) == code(other)

    @property
    def side_by_side(self) -> bool:
        """Whether rows rather than contraction indices are neighbours in memory."""
        return self.stride_r < self.stride_k

    @property
    def crooked(self) -> bool:
        """Whether rows start at addresses that a kernel knows nothing of."""
        strides = [self.stride_r] * (self.rows > 1) + [self.stride_b] * (self.batch > 1)
        return self.stride_k == 1 and any(stride % 16 for stride in strides)

    @property
    def chunk(self) -> int:
        """In chunks of how many elements memory may be read along the neighbours: of contiguous indices k, or
        with a minus sign of side by side rows. 0 where a chunk isn't one of 16 aligned bytes, of which the
        operand has at least one: only then is it sure that there is memory."""
        if 1 not in (self.stride_r, self.stride_k) or not self.aligned:
            return 0
        along_k = self.stride_k == 1
        others = (self.rows, self.stride_r) if along_k else (self.k, self.stride_k)
        if any(size > 1 and stride % 16 for size, stride in (others, (self.batch, self.stride_b))):
            return 0
        return (16 if along_k else -16) // self.dtype.itemsize

    @property
    def ragged(self) -> bool:
        """Whether loads that end where the operand does would be narrow, and those of chunks are not."""
        chunk = self.chunk
        return chunk != 0 and (self.k if chunk > 0 else self.rows) % chunk != 0


class Digits(NamedTuple):
    """`digits` int8 [D, all_rows, padded K], least significant plane first; `exponents` int32
    [all_rows]; `padded` is K rounded up, the rest zero-filled; `rows` are those of one batch."""

    digits: Block
    exponents: Block
    all_rows: int
    rows: int
    padded: int


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
def _chunks(n, CHUNK: tl.constexpr):
    """n rounded up to whole chunks."""
    return (n + (CHUNK - 1)) // CHUNK * CHUNK


@triton.jit
def _weights(second_ptr, k, K):
    """The balance of a weight's contraction indices k, from their maxima."""
    largest = tl.load(second_ptr + k, mask=k < K, other=0)
    return tl.where(largest == 0, 0, _exponents(largest, 0))


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
def _dropped(x, empty, wild, sign):
    """x as binary32, 0 where its contraction index takes no part in the integers."""
    drop = empty | (wild & (sign < 0))
    return tl.where(drop[None, :], 0.0, x.to(tl.float32))


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
    return _rounded(x.to(tl.float32) * _power_of_two(half) * _power_of_two(shift - half))


@triton.jit
def _plain_scales(second_ptr, k, K, sign, MODE: tl.constexpr, CHUNK: tl.constexpr = 0):
    """2^(sign d) of the contraction indices k, and where that holds: d's maximum is normal, or zero.

    With keys a zero row of the second operand drops its index from the first. With a CHUNK of memory the maxima
    of a weight, a block of scratch, are read in such chunks too.
    """
    if (CHUNK > 0) & (MODE == 1):
        largest = tl.load(second_ptr + k, mask=k < _chunks(K, CHUNK), other=0)
        largest = tl.where(k < K, largest, 0)
    else:
        largest = tl.load(second_ptr + k, mask=k < K, other=0)
    if MODE == 3:
        field = (largest + _BUMP) & _INFINITY_BITS
    else:
        field = largest & _INFINITY_BITS
    bits = tl.where(sign > 0, field + (1 << 23), (253 << 23) - field)
    bits = tl.where(largest == 0, 0 if MODE == 3 else 127 << 23, bits)
    plain = (largest == 0) | ((largest >= (1 << 23)) & (largest < (252 << 23)))
    return bits.to(tl.float32, bitcast=True), plain.to(tl.int32)


@triton.jit
def _balanced(x, k, K, second_ptr, sign, MODE: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr = 0):
    """x 2^(sign d) in binary32, and per contraction index whether its scale is plain."""
    if MODE == 0:
        y = x.to(tl.float32)
        plain = tl.full((BK,), 1, tl.int32)
    else:
        scales, plain = _plain_scales(second_ptr, k, K, sign, MODE, CHUNK)
        y = x.to(tl.float32) * scales[None, :]
    return y, plain


@triton.jit
def _ordinary(largest):
    """Whether a row's largest balanced magnitude, as bits, is in the quick way's range."""
    return (largest >= _SMALL_BITS) & (largest < _INFINITY_BITS)


@triton.jit
def _bexpo_of_normal(bits):
    return ((bits + _BUMP) >> 23) - 126


@triton.jit
def _nearest(y, e, W: tl.constexpr):
    """RNE(y 2^(W - 1 - e)) as int32 for |y| below 2^e 128/129, e per row."""
    shift = tl.minimum(tl.maximum((W - 1) - e, -126), 126)  # out of range only where y is 0
    z = y * _power_of_two(shift)[:, None]
    if W == 16:
        # 1.5 2^23: an ulp is 1 on both sides of zero.
        q = (z + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        q = _rounded(z)
    return q


@triton.jit
def _rounded(y):
    """RNE of magnitudes below 2^23, as int32."""
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
def _no_magnitudes(shape: tl.constexpr, like):
    """Where `_larger` starts: zeros, of bfloat16 for such values on a GPU that compares them."""
    if like.dtype.element_ty == tl.bfloat16 and not _INTERPRETED and cuda_capability_geq(8, 0):
        best = tl.zeros(shape, tl.bfloat16)
    else:
        best = tl.zeros(shape, tl.float32)
    return best


@triton.jit
def _larger(best, x, scales):
    """The larger magnitude of `best` and x scales, powers of two; NaN wins, with whichever bits."""
    if best.dtype == tl.bfloat16:
        # Two at a time. What a product loses to underflow is far below any maximum that counts.
        best = tl.inline_asm_elementwise(
            """{ .reg .b32 y, zero;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 y, $2, $3, zero;
            and.b32 y, y, 0x7fff7fff;
            max.NaN.bf16x2 $0, $1, y; }""",
            "=r,r,r,r", [best, x, scales.to(tl.bfloat16).broadcast_to(x.shape)], dtype=tl.bfloat16,
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = tl.abs(x.to(tl.float32) * scales)
        best = tl.maximum(best, y, propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit
def _largest(best, x):
    """The larger magnitude of `best` and x; NaN wins, with whichever bits."""
    if best.dtype == tl.bfloat16:
        best = tl.inline_asm_elementwise(
            """{ .reg .b32 y;
            and.b32 y, $2, 0x7fff7fff;
            max.NaN.bf16x2 $0, $1, y; }""",
            "=r,r,r", [best, x], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        best = tl.maximum(best, tl.abs(x.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit
def _balanced_digits(q, D: tl.constexpr):
    """Balanced digits of integers, the least significant first; D = 2 repeats the second."""
    d0 = q.to(tl.int8)
    q = (q + 128) >> 8
    d1 = q.to(tl.int8)
    if D == 3:
        q = (q + 128) >> 8
    return d0, d1, q.to(tl.int8)


@triton.jit
def _two_digits(y, power):
    """Both digits of RNE(y power), y in binary32."""
    # The product is exact unless the sum does not notice: one instruction for both. The sum is the
    # integer and half a digit, so its second byte is the second digit, and the first byte is the first
    # digit with its sign bit flipped.
    z = tl.fma(y, power.broadcast_to(y.shape), _MAGIC).to(tl.int32, bitcast=True)
    if _INTERPRETED:
        d0 = (z ^ 128).to(tl.int8)
        d1 = (z >> 8).to(tl.int8)
    else:
        d0, d1 = tl.inline_asm_elementwise(
            """{ .reg .b32 x, y;
            prmt.b32 x, $2, $3, 0x5140;
            prmt.b32 y, $4, $5, 0x5140;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632;
            xor.b32 $0, $0, 0x80808080; }""",
            "=&r,=&r,r,r,r,r", [z], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return d0, d1


@triton.jit
def _quick_digits(x, scales, power, W: tl.constexpr):
    """Digits of RNE(x scales power)."""
    if W == 16 and x.dtype == tl.bfloat16 and not _INTERPRETED:
        d0, d1 = tl.inline_asm_elementwise(
            """{ .reg .f32 a, b, c, d;
            .reg .b32 x, y;
            shl.b32 x, $2, 16;
            and.b32 y, $2, 0xffff0000;
            mov.b32 a, x;
            mov.b32 b, y;
            shl.b32 x, $3, 16;
            and.b32 y, $3, 0xffff0000;
            mov.b32 c, x;
            mov.b32 d, y;
            mul.rn.f32 a, a, $4;
            mul.rn.f32 b, b, $5;
            mul.rn.f32 c, c, $6;
            mul.rn.f32 d, d, $7;
            fma.rn.f32 a, a, $8, 0f4B400080;
            fma.rn.f32 b, b, $9, 0f4B400080;
            fma.rn.f32 c, c, $10, 0f4B400080;
            fma.rn.f32 d, d, $11, 0f4B400080;
            prmt.b32 x, a, b, 0x5140;
            prmt.b32 y, c, d, 0x5140;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632;
            xor.b32 $0, $0, 0x80808080; }""",
            "=&r,=&r,r,r,f,f,f,f,f,f,f,f",
            [x, scales.broadcast_to(x.shape), power.broadcast_to(x.shape)],
            dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
        d2 = d1
    elif W == 16:
        d0, d1 = _two_digits(x.to(tl.float32) * scales, power)
        d2 = d1
    elif _INTERPRETED:
        d0, d1, d2 = _balanced_digits(_rounded(x.to(tl.float32) * scales * power), 3)
    else:
        # First the nearest multiple of 2^16 (1.5 2^39 has such an ulp), then as above the integer that
        # is left and half a digit in each of two, whose third byte tells of a carry into the top digit.
        y = x.to(tl.float32) * scales
        d0, d1, d2 = tl.inline_asm_elementwise(
            """{ .reg .f32 a, b, c, d, e, f, g, h;
            .reg .b32 x, y;
            fma.rn.f32 a, $3, $7, 0f53400080;
            fma.rn.f32 b, $4, $8, 0f53400080;
            fma.rn.f32 c, $5, $9, 0f53400080;
            fma.rn.f32 d, $6, $10, 0f53400080;
            prmt.b32 x, a, b, 0x0040;
            prmt.b32 y, c, d, 0x0040;
            prmt.b32 $2, x, y, 0x5410;
            sub.rn.f32 e, 0f53400080, a;
            sub.rn.f32 f, 0f53400080, b;
            sub.rn.f32 g, 0f53400080, c;
            sub.rn.f32 h, 0f53400080, d;
            fma.rn.f32 a, $3, $7, e;
            fma.rn.f32 b, $4, $8, f;
            fma.rn.f32 c, $5, $9, g;
            fma.rn.f32 d, $6, $10, h;
            add.rn.f32 a, a, 0f4B408080;
            add.rn.f32 b, b, 0f4B408080;
            add.rn.f32 c, c, 0f4B408080;
            add.rn.f32 d, d, 0f4B408080;
            prmt.b32 x, a, b, 0x0062;
            prmt.b32 y, c, d, 0x0062;
            prmt.b32 x, x, y, 0x5410;
            xor.b32 x, x, 0x40404040;
            add.s32 $2, $2, x;
            xor.b32 $2, $2, 0x80808080;
            prmt.b32 x, a, b, 0x5140;
            prmt.b32 y, c, d, 0x5140;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632;
            xor.b32 $0, $0, 0x80808080;
            xor.b32 $1, $1, 0x80808080; }""",
            "=&r,=&r,=&r,f,f,f,f,f,f,f,f", [y, power.broadcast_to(y.shape)],
            dtype=(tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return d0, d1, d2


@triton.jit
def _store_quick_digits(y, e, pointers, plane, mask, W: tl.constexpr, D: tl.constexpr):
    """Digits of RNE(y 2^(W - 1 - e)) for binary32 |y| below 2^e 128/129, e per row."""
    if W == 16:
        shift = tl.minimum(tl.maximum((W - 1) - e, -126), 126)  # out of range only where y is 0
        d0, d1 = _two_digits(y, _power_of_two(shift)[:, None])
        tl.store(pointers, d0, mask=mask)
        tl.store(pointers + plane, d1, mask=mask)
    else:
        _store_digits(_nearest(y, e, W), pointers, plane, mask, D)


@triton.jit
def _stored_exponent(e, W: tl.constexpr):
    s = tl.where(e == _EMPTY, 0, e - (W - 1))
    return tl.where(e == _POISON, _POISON, s)


@triton.jit
def _tile(base, r, k, R, K, stride_k, last=True, CHUNK: tl.constexpr = 0):
    """Elements [r, k], zeros beyond R and K; `base` points at row r.

    CHUNK: see `Operand.chunk`. Where it is negative, rows beyond R hold anything. `last`: whether the tile may
    reach beyond K; others are spared the work.
    """
    if CHUNK < 0:
        mask = (r < _chunks(R, -CHUNK))[:, None] & (k < K)[None, :]
    elif CHUNK > 0:
        mask = (r < R)[:, None] & (k < _chunks(K, CHUNK))[None, :]
    else:
        mask = (r < R)[:, None] & (k < K)[None, :]
    x = tl.load(base + k.to(tl.int64)[None, :] * stride_k, mask=mask, other=0)
    if CHUNK > 0:
        if last:
            x = tl.where((k < K)[None, :], x, tl.zeros_like(x))
    return x


@triton.jit
def _row_tile(
    base, r, start, R, K, stride_k,
    BR: tl.constexpr, BK: tl.constexpr, SPREAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`_tile` from contraction index `start` on.

    SPREAD is for rows too crooked for vector loads. A thread's elements would still be neighbours,
    as the stores of their digits want them: each load of a warp would touch eight cache lines. A
    tile of a shape of its own is loaded in its own layout, lanes side by side.
    """
    if SPREAD:
        half: tl.constexpr = BK // 2
        k = start + tl.arange(0, 2)[:, None] * half + tl.arange(0, half)[None, :]
        mask = (r < R)[:, None, None] & (k < K)[None, :, :]
        x = tl.load(base[:, :, None] + k.to(tl.int64)[None, :, :] * stride_k, mask=mask, other=0)
        x = tl.reshape(x, (BR, BK))
    else:
        x = _tile(base, r, start + tl.arange(0, BK), R, K, stride_k, start + BK > K, CHUNK)
    return x


@triton.jit(do_not_specialize=["steps"])
def maxima_kernel(
    x_ptr, out_ptr, R, K, stride_b, stride_r, stride_k, steps,
    BR: tl.constexpr, BK: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    """The largest magnitude's bits of each row, over BK * steps elements a program."""
    pid = tl.program_id(0)
    spans = tl.cdiv(K, BK * steps)
    blocks = tl.cdiv(R, BR)
    span = pid % spans
    batch = pid // spans // blocks
    r = (pid // spans % blocks) * BR + tl.arange(0, BR)
    base = x_ptr + batch.to(tl.int64) * stride_b + r.to(tl.int64)[:, None] * stride_r
    best = tl.zeros((BR, BK), tl.int32)
    for step in range(0, steps):
        k = (span * steps + step) * BK + tl.arange(0, BK)
        best = tl.maximum(best, _magnitude_bits(_tile(base, r, k, R, K, stride_k)))
    largest = tl.max(best, axis=1)
    out = out_ptr + batch.to(tl.int64) * R + r
    if ATOMIC:
        tl.atomic_max(out, largest, mask=r < R, sem="relaxed")
    else:
        tl.store(out, largest, mask=r < R)


@triton.jit
def _values(x, k, K, second_ptr, sign, MODE: tl.constexpr):
    """What a row's exponent is the maximum of: magnitude bits, or with a balance exponents."""
    value = _magnitude_bits(x)
    if MODE == 3:
        d, empty, wild = _keys(second_ptr, k, K)
        value = _folded_exponents(value, d[None, :], empty[None, :], wild[None, :])
    elif MODE == 1:
        value = _balanced_exponents(value, sign * _weights(second_ptr, k, K)[None, :])
    return value


@triton.jit
def _store_tile(
    x, e, digits, k, r, R, K, KP, plane, second_ptr, sign,
    W: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Digits of elements [r, k] whose rows have the exponents e; `digits` points at row r."""
    shift = (W - 1) - e[:, None]
    if MODE == 3:
        d, empty, wild = _keys(second_ptr, k, K)
        x = _dropped(x, empty, wild, sign)
        shift += sign * d[None, :]
    elif MODE == 1:
        shift += sign * _weights(second_ptr, k, K)[None, :]
    elif MODE == 2:
        shift += sign * tl.load(second_ptr + k, mask=k < K, other=0)[None, :]
    mask = (r < R)[:, None] & (k < KP)[None, :]
    _store_digits(_integers(x, shift), digits + k[None, :], plane, mask, D)


@triton.jit
def _store_slowly(
    base, e, digits, start, stop, r, R, K, KP, stride_k, plane, second_ptr, sign,
    W: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    for first in range(start, stop, BK):
        k = first + tl.arange(0, BK)
        x = _tile(base, r, k, R, K, stride_k)
        _store_tile(x, e, digits, k, r, R, K, KP, plane, second_ptr, sign, W, D, MODE)


@triton.constexpr_function
def _slow_block(rows, columns):
    return min(columns, max(32, 1024 // rows))


@triton.jit
def _nothing(
    base, r, R, K, stride_k, second_ptr,
    MODE: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPREAD: tl.constexpr, CHUNK: tl.constexpr = 0,
):  # fmt: skip
    """Which rows are zero, or dropped with the keys that they meet, rather than lost in the balance.

    In the tiles of the quick way: in another layout, which joins what is known of the rows, the
    compiler would make all before it twice, once in each.
    """
    best = tl.zeros((BR, BK), tl.int32)
    for start in range(0, K, BK):
        bits = _magnitude_bits(_row_tile(base, r, start, R, K, stride_k, BR, BK, SPREAD, CHUNK))
        if MODE == 3:
            k = start + tl.arange(0, BK)
            dropped = (tl.load(second_ptr + k, mask=k < K, other=0) == 0)[None, :]
            bits = tl.where(dropped & (bits < _INFINITY_BITS), 0, bits)  # see `quantize.fold_keys`
        best = best | bits
    return tl.max(best, axis=1) == 0


@triton.jit
def _quantize_rows(
    block, x_ptr, digits_ptr, exponents_ptr, R, all_rows, stride_b, stride_r, stride_k,
    second_ptr, stride_keys, K, KP, sign,
    W: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, LOOP: tl.constexpr, SPREAD: tl.constexpr, CHUNK: tl.constexpr = 0,
):  # fmt: skip
    """BR whole rows: exponents and digits. A row longer than BK is read twice."""
    # Narrow, so that the slow way does not set how many registers the kernel takes.
    SB: tl.constexpr = _slow_block(BR, BK)
    blocks = tl.cdiv(R, BR)
    batch = block // blocks
    r = (block % blocks) * BR + tl.arange(0, BR)
    row = batch.to(tl.int64) * R + r
    base = x_ptr + batch.to(tl.int64) * stride_b + r.to(tl.int64)[:, None] * stride_r
    second_ptr += batch.to(tl.int64) * stride_keys
    digits = digits_ptr + row[:, None] * KP
    plane = tl.cast(all_rows, tl.int64) * KP  # an argument of 1 is a plain int here
    k = tl.arange(0, BK)
    if LOOP:
        most = _no_magnitudes((BR, BK), x_ptr)
        plain = tl.full((BK,), 1, tl.int32)
        for start in range(0, K, BK):
            x = _row_tile(base, r, start, R, K, stride_k, BR, BK, SPREAD, CHUNK)
            if MODE == 0:
                most = _largest(most, x)
            else:
                scales, now = _plain_scales(second_ptr, start + k, K, sign, MODE, CHUNK)
                most = _larger(most, x, scales[None, :])
                plain = tl.minimum(plain, now)
        best = _magnitude_bits(most)
    else:
        x = _row_tile(base, r, 0, R, K, stride_k, BR, BK, SPREAD, CHUNK)
        y, plain = _balanced(x, k, K, second_ptr, sign, MODE, BK, CHUNK)
        best = _magnitude_bits(y)
    largest = tl.max(best, axis=1)
    quick = _ordinary(largest) | (r >= R)
    if MODE == 0:
        quick = quick | (largest == 0)
    else:
        if MODE == 3:  # the second operand's exponents went to the first
            quick = quick | (largest < tl.where(sign < 0, _INFINITY_BITS, 0))
        if tl.max(((largest == 0) & (r < R)).to(tl.int32), axis=0) != 0:
            quick = quick | _nothing(base, r, R, K, stride_k, second_ptr, MODE, BR, BK, SPREAD, CHUNK)
    if (tl.min(plain, axis=0) & tl.min(quick.to(tl.int32), axis=0)) != 0:
        e = _bexpo_of_normal(largest)
        stored = tl.where(largest == 0, 0, e - (W - 1))
        if MODE == 3:
            e = tl.where(sign < 0, 0, e)
            stored = tl.where(sign < 0, 1 - W, stored)
        tl.store(exponents_ptr + row, stored, mask=r < R)
        if LOOP:
            for start in range(0, KP, BK):
                x = _row_tile(base, r, start, R, K, stride_k, BR, BK, SPREAD, CHUNK)
                y, _ = _balanced(x, start + k, K, second_ptr, sign, MODE, BK, CHUNK)
                mask = (r < R)[:, None] & (start + k < KP)[None, :]
                _store_quick_digits(y, e, digits + (start + k)[None, :], plane, mask, W, D)
        else:
            mask = (r < R)[:, None] & (k < KP)[None, :]
            _store_quick_digits(y, e, digits + k[None, :], plane, mask, W, D)
    else:
        _quantize_rows_slowly(
            base, digits, exponents_ptr + row, plane, r, R, K, KP, stride_k, second_ptr, sign,
            W, D, MODE, BR, SB,
        )  # fmt: skip


@triton.jit
def _quantize_rows_slowly(
    base, digits, exponents, plane, r, R, K, KP, stride_k, second_ptr, sign,
    W: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The general way, for magnitudes and balances of any size, zeros and what is not finite."""
    k = tl.arange(0, BK)
    best = tl.full((BR, BK), 0 if MODE == 0 else _EMPTY, tl.int32)
    for start in range(0, K, BK):
        x = _tile(base, r, start + k, R, K, stride_k)
        best = tl.maximum(best, _values(x, start + k, K, second_ptr, sign, MODE))
    e = tl.max(best, axis=1)
    if MODE == 0:
        e = _balanced_exponents(e, 0)
    elif MODE == 3:
        e = tl.where(sign < 0, 0, e)
    tl.store(exponents, _stored_exponent(e, W), mask=r < R)
    _store_slowly(
        base, e, digits, 0, KP, r, R, K, KP, stride_k, plane, second_ptr, sign, W, D, MODE, BK
    )


@triton.jit
def quantize_kernel(
    a_ptr, a_digits, a_exponents, a_rows, a_all, a_stride_b, a_stride_r, a_stride_k,
    b_ptr, b_digits, b_exponents, b_rows, b_all, b_stride_b, b_stride_r, b_stride_k, b_programs,
    second_ptr, stride_keys, K, KP,
    W: tl.constexpr, D: tl.constexpr, MODE: tl.constexpr, ALIKE: tl.constexpr,
    A_BR: tl.constexpr, A_BK: tl.constexpr, A_LOOP: tl.constexpr, A_SPREAD: tl.constexpr, A_CHUNK: tl.constexpr,
    B_BR: tl.constexpr, B_BK: tl.constexpr, B_LOOP: tl.constexpr, B_SPREAD: tl.constexpr, B_CHUNK: tl.constexpr,
):  # fmt: skip
    """Both operands of a product: first the programs of b, which may be few and long.

    ALIKE operands differ in nothing that the code depends on, and share it.
    """
    pid = tl.program_id(0)
    of_b = pid < b_programs
    if ALIKE:
        _quantize_rows(
            tl.where(of_b, pid, pid - b_programs), tl.where(of_b, b_ptr, a_ptr),
            tl.where(of_b, b_digits, a_digits), tl.where(of_b, b_exponents, a_exponents),
            tl.where(of_b, b_rows, a_rows), tl.where(of_b, b_all, a_all),
            tl.where(of_b, b_stride_b, a_stride_b), tl.where(of_b, b_stride_r, a_stride_r),
            tl.where(of_b, b_stride_k, a_stride_k),
            second_ptr, stride_keys, K, KP, tl.where(of_b, -1, 1),
            W, D, MODE, A_BR, A_BK, A_LOOP, A_SPREAD, A_CHUNK,
        )  # fmt: skip
    elif of_b:
        _quantize_rows(
            pid, b_ptr, b_digits, b_exponents, b_rows, b_all, b_stride_b, b_stride_r, b_stride_k,
            second_ptr, stride_keys, K, KP, -1, W, D, MODE, B_BR, B_BK, B_LOOP, B_SPREAD, B_CHUNK,
        )  # fmt: skip
    else:
        _quantize_rows(
            pid - b_programs, a_ptr, a_digits, a_exponents, a_rows, a_all,
            a_stride_b, a_stride_r, a_stride_k,
            second_ptr, stride_keys, K, KP, 1, W, D, MODE, A_BR, A_BK, A_LOOP, A_SPREAD, A_CHUNK,
        )  # fmt: skip


@triton.jit
def _token_maxima(
    x_ptr, k, R, K, stride_r, stride_k, BK: tl.constexpr, BR: tl.constexpr, CHUNK: tl.constexpr
):
    """Bits of the largest magnitude of each contraction index k over all rows."""
    base = x_ptr + k.to(tl.int64)[:, None] * stride_k
    best = _no_magnitudes((BK, BR), x_ptr)
    for start in range(0, R, BR):
        # Tokens are the rows of this tile, which may hold anything beyond K.
        tile = _tile(base, k, start + tl.arange(0, BR), K, R, stride_r, start + BR > R, -CHUNK)
        best = _largest(best, tile)
    return tl.max(_magnitude_bits(best), axis=1)


@triton.jit
def tokens_kernel(
    a_ptr, b_ptr, d_ptr, largest_ptr, K,
    a_rows, a_stride_r, a_stride_k, b_rows, b_stride_r, b_stride_k,
    BK: tl.constexpr, BR: tl.constexpr, ZB: tl.constexpr, A_CHUNK: tl.constexpr, B_CHUNK: tl.constexpr,
):  # fmt: skip
    """Of a weight's gradient: the balance d of BK tokens. Clears `largest` on the way, for
    `exponents_kernel`: a launch of its own would cost more."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    first = _token_maxima(a_ptr, k, a_rows, K, a_stride_r, a_stride_k, BK, BR, A_CHUNK)
    second = _token_maxima(b_ptr, k, b_rows, K, b_stride_r, b_stride_k, BK, BR, B_CHUNK)
    tl.store(d_ptr + k, _between(first, second), mask=k < K)
    rows = a_rows + b_rows
    for start in range(tl.program_id(0) * ZB, rows, tl.num_programs(0) * ZB):
        r = start + tl.arange(0, ZB)
        tl.store(largest_ptr + r, tl.zeros((ZB,), tl.int32), mask=r < rows)


@triton.jit
def balance_kernel(
    first_ptr, second_ptr, d_ptr, K, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """The balance d of contraction indices from the bits of their maxima in both operands, or, of a
    weight, in the second alone."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if GRADIENT:
        first = tl.load(first_ptr + k, mask=k < K, other=0)
        second = tl.load(second_ptr + k, mask=k < K, other=0)
        d = _between(first, second)
    else:
        d = _weights(second_ptr, k, K)
    tl.store(d_ptr + k, d, mask=k < K)


@triton.jit
def _between(first, second):
    """The balance of a gradient's token; see `quantize.between`."""
    gap = tl.where(second == 0, _ZERO, _exponents(second, 0))
    gap -= tl.where(first == 0, _ZERO, _exponents(first, 0))
    return (gap + tl.where(gap < 0, 1, 0)) >> 1  # toward zero


@triton.jit
def _raise_exponents(
    pid, x_ptr, d_ptr, largest_ptr, R, K, stride_r, stride_k, steps, sign,
    BR: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    spans = tl.cdiv(K, BK * steps)
    r = (pid // spans) * BR + tl.arange(0, BR)
    first = (pid % spans) * steps * BK
    base = x_ptr + r.to(tl.int64)[:, None] * stride_r
    best = _no_magnitudes((BR, BK), x_ptr)
    seen = _no_magnitudes((BR, BK), x_ptr)
    plain = tl.full((BK,), 1, tl.int32)
    for step in range(0, steps):
        k = first + step * BK + tl.arange(0, BK)
        d = sign * tl.load(d_ptr + k, mask=k < K, other=0)
        plain = tl.minimum(plain, (tl.abs(d) <= 126).to(tl.int32))
        x = _tile(base, r, k, R, K, stride_k, first + step * BK + BK > K, CHUNK)
        seen = _largest(seen, x)
        best = _larger(best, x, _power_of_two(d)[None, :])
    largest = tl.max(_magnitude_bits(best), axis=1)
    zero = tl.max(_magnitude_bits(seen), axis=1) == 0
    quick = zero | _ordinary(largest) | (r >= R)
    if (tl.min(quick.to(tl.int32), axis=0) & tl.min(plain, axis=0)) != 0:
        e = tl.where(zero, 0, _bexpo_of_normal(largest) - _EMPTY)
        tl.atomic_max(largest_ptr + r, e, mask=r < R, sem="relaxed")
    else:
        SB: tl.constexpr = _slow_block(BR, BK)
        some = tl.full((BR, SB), _EMPTY, tl.int32)
        for start in range(first, tl.minimum(first + steps * BK, K), SB):
            k = start + tl.arange(0, SB)
            d = sign * tl.load(d_ptr + k, mask=k < K, other=0)
            bits = _magnitude_bits(_tile(base, r, k, R, K, stride_k, True, CHUNK))
            some = tl.maximum(some, _balanced_exponents(bits, d[None, :]))
        e = tl.max(some, axis=1) - _EMPTY
        tl.atomic_max(largest_ptr + r, e, mask=r < R, sem="relaxed")


@triton.jit(do_not_specialize=["a_steps", "b_steps"])
def exponents_kernel(
    a_ptr, a_largest, a_rows, a_stride_r, a_stride_k, a_steps,
    b_ptr, b_largest, b_rows, b_stride_r, b_stride_k, b_steps, b_programs,
    d_ptr, K, ALIKE: tl.constexpr,
    A_BR: tl.constexpr, A_BK: tl.constexpr, A_CHUNK: tl.constexpr,
    B_BR: tl.constexpr, B_BK: tl.constexpr, B_CHUNK: tl.constexpr,
):  # fmt: skip
    """Raise the largest exponent, counted from EMPTY, of each row of a balanced by d and of b by -d,
    to that of BK * steps elements a program."""
    pid = tl.program_id(0)
    of_b = pid < b_programs
    if ALIKE:
        _raise_exponents(
            tl.where(of_b, pid, pid - b_programs), tl.where(of_b, b_ptr, a_ptr), d_ptr,
            tl.where(of_b, b_largest, a_largest), tl.where(of_b, b_rows, a_rows), K,
            tl.where(of_b, b_stride_r, a_stride_r), tl.where(of_b, b_stride_k, a_stride_k),
            tl.where(of_b, b_steps, a_steps), tl.where(of_b, -1, 1), A_BR, A_BK, A_CHUNK,
        )  # fmt: skip
    elif of_b:
        _raise_exponents(
            pid, b_ptr, d_ptr, b_largest, b_rows, K, b_stride_r, b_stride_k, b_steps,
            -1, B_BR, B_BK, B_CHUNK,
        )  # fmt: skip
    else:
        _raise_exponents(
            pid - b_programs, a_ptr, d_ptr, a_largest, a_rows, K, a_stride_r, a_stride_k, a_steps,
            1, A_BR, A_BK, A_CHUNK,
        )  # fmt: skip


@triton.jit
def _digits_of_tile(
    pid, x_ptr, largest_ptr, digits_ptr, exponents_ptr, R, stride_r, stride_k, d_ptr, K, KP, sign,
    W: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs take neighbouring row blocks: whole cache lines of side by side rows.
    blocks = tl.cdiv(R, BR)
    r = (pid % blocks) * BR + tl.arange(0, BR)
    first = (pid // blocks) * BK
    k = first + tl.arange(0, BK)
    e = tl.load(largest_ptr + r, mask=r < R, other=0) + _EMPTY
    if pid < blocks:
        tl.store(exponents_ptr + r, _stored_exponent(e, W), mask=r < R)
    x = _tile(x_ptr + r.to(tl.int64)[:, None] * stride_r, r, k, R, K, stride_k, first + BK > K, CHUNK)
    digits = digits_ptr + r.to(tl.int64)[:, None] * KP
    plane = tl.cast(R, tl.int64) * KP
    d = tl.load(d_ptr + k, mask=k < K, other=0)
    moderate = tl.min((tl.abs(d) <= 126).to(tl.int32), axis=0)
    quick = ((e >= -99) & (e <= 127)) | (e == _EMPTY) | (r >= R)
    if (tl.min(quick.to(tl.int32), axis=0) & moderate) != 0:
        y = x.to(tl.float32) * _power_of_two(sign * d)[None, :]
        mask = (r < R)[:, None] & (k < KP)[None, :]
        _store_quick_digits(y, e, digits + k[None, :], plane, mask, W, D)
    else:
        _store_slowly(
            x_ptr + r.to(tl.int64)[:, None] * stride_r, e, digits, first, tl.minimum(first + BK, KP),
            r, R, K, KP, stride_k, plane, d_ptr, sign, W, D, 2, _slow_block(BR, BK),
        )  # fmt: skip


@triton.jit
def digits_kernel(
    a_ptr, a_largest, a_digits, a_exponents, a_rows, a_stride_r, a_stride_k,
    b_ptr, b_largest, b_digits, b_exponents, b_rows, b_stride_r, b_stride_k, b_programs,
    d_ptr, K, KP,
    W: tl.constexpr, D: tl.constexpr, ALIKE: tl.constexpr,
    A_BR: tl.constexpr, A_BK: tl.constexpr, A_CHUNK: tl.constexpr,
    B_BR: tl.constexpr, B_BK: tl.constexpr, B_CHUNK: tl.constexpr,
):  # fmt: skip
    """Digits of both operands of a weight's gradient, a tile a program."""
    pid = tl.program_id(0)
    of_b = pid < b_programs
    if ALIKE:
        _digits_of_tile(
            tl.where(of_b, pid, pid - b_programs), tl.where(of_b, b_ptr, a_ptr),
            tl.where(of_b, b_largest, a_largest), tl.where(of_b, b_digits, a_digits),
            tl.where(of_b, b_exponents, a_exponents), tl.where(of_b, b_rows, a_rows),
            tl.where(of_b, b_stride_r, a_stride_r), tl.where(of_b, b_stride_k, a_stride_k),
            d_ptr, K, KP, tl.where(of_b, -1, 1), W, D, A_BR, A_BK, A_CHUNK,
        )  # fmt: skip
    elif of_b:
        _digits_of_tile(
            pid, b_ptr, b_largest, b_digits, b_exponents, b_rows, b_stride_r, b_stride_k,
            d_ptr, K, KP, -1, W, D, B_BR, B_BK, B_CHUNK,
        )  # fmt: skip
    else:
        _digits_of_tile(
            pid - b_programs, a_ptr, a_largest, a_digits, a_exponents, a_rows,
            a_stride_r, a_stride_k, d_ptr, K, KP, 1, W, D, A_BR, A_BK, A_CHUNK,
        )  # fmt: skip


def operand(x: Tensor, buffer: int, contraction: int, once: bool = True) -> Operand:
    """`x` as [batch, rows, K], whichever dimension is contracted; a batch of stride 0 once."""
    other = -1 if contraction == -2 else -2
    batch, stride = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    if once and stride == 0:
        batch = 1
    return Operand(
        Block(buffer), batch, x.shape[other], x.shape[contraction],
        stride, x.stride(other), x.stride(contraction), x.dtype, x.data_ptr() % 16 == 0,
    )  # fmt: skip


def _together(a: Operand, b: Operand, same_tile: bool) -> tuple[bool, int, int]:
    """Whether one code reads both, and the chunks of a and b in which it does."""
    alike = same_tile and a.like(b)
    if alike and (a.ragged or b.ragged) and a.chunk == b.chunk:
        return True, a.chunk, a.chunk
    chunks = [x.chunk if x.ragged else 0 for x in (a, b)]
    return alike and chunks[0] == chunks[1], *chunks


def maxima(recipe: Recipe, x: Operand, out: Block | None = None) -> Block:
    """Per row of each batch: the bits of max |x| along the contraction, int32; in `out`, if given, which
    need not hold zeros."""
    tile = launch.maxima_tile(x.k, x.side_by_side)
    if out is not None:
        tile = tile._replace(steps=triton.cdiv(x.k, tile.columns))
    spans = triton.cdiv(x.k, tile.columns * tile.steps)
    if out is None:
        out = recipe.reserve(x.batch * x.rows, torch.int32, ZEROS if spans > 1 else WORK)
    recipe.launch(
        maxima_kernel, x.batch * triton.cdiv(x.rows, tile.rows) * spans,
        x.block, out, x.rows, x.k, x.stride_b, x.stride_r, x.stride_k, tile.steps,
        BR=tile.rows, BK=tile.columns, ATOMIC=spans > 1, num_warps=tile.warps, **launch.STRICT,
    )  # fmt: skip
    return out


def quantize(
    recipe: Recipe, a: Operand, b: Operand, window: int, balance: str = "none",
    transposed: Operand | None = None,
) -> tuple[Digits, Digits]:  # fmt: skip
    """Digits of both operands. Of "weight" and "keys", `transposed` is b with its contraction
    indices as rows: its maxima are the balance."""
    if balance == "gradient":
        return _quantize_gradient(recipe, a, b, window)
    qa, qb = _reserve(recipe, a, window), _reserve(recipe, b, window)
    second = qb.exponents if transposed is None else maxima(recipe, transposed)
    warps = launch.rows_warps(a.side_by_side)
    tiles = [launch.rows_tile(x.rows, x.k, x.side_by_side, warps) for x in (a, b)]
    programs = [
        x.batch * triton.cdiv(x.rows, tile.rows) for x, tile in zip((a, b), tiles, strict=True)
    ]
    alike, *chunks = _together(a, b, tiles[0] == tiles[1])
    recipe.launch(
        quantize_kernel, sum(programs),
        a.block, qa.digits, qa.exponents, a.rows, qa.all_rows, a.stride_b, a.stride_r, a.stride_k,
        b.block, qb.digits, qb.exponents, b.rows, qb.all_rows, b.stride_b, b.stride_r, b.stride_k,
        programs[1], second, b.k if b.batch > 1 else 0, a.k, qa.padded,
        W=window, D=DIGITS[window], MODE=BALANCES[balance],
        ALIKE=alike, A_CHUNK=chunks[0], B_CHUNK=chunks[1],
        A_BR=tiles[0].rows, A_BK=tiles[0].columns, A_LOOP=a.k > tiles[0].columns, A_SPREAD=a.crooked,
        B_BR=tiles[1].rows, B_BK=tiles[1].columns, B_LOOP=b.k > tiles[1].columns, B_SPREAD=b.crooked,
        num_warps=warps, **launch.STRICT,
    )  # fmt: skip
    return qa, qb


def _quantize_gradient(
    recipe: Recipe, a: Operand, b: Operand, window: int
) -> tuple[Digits, Digits]:
    """Two reads of both operands: tokens for balance and exponents, then tiles for digits."""
    qa, qb = _reserve(recipe, a, window), _reserve(recipe, b, window)
    d = recipe.reserve(a.k, torch.int32)
    largest = recipe.reserve(a.rows + b.rows, torch.int32)
    each = _parts(largest, a, b)
    block = launch.TOKENS_TILE
    recipe.launch(
        tokens_kernel, triton.cdiv(a.k, block.rows), a.block, b.block, d, largest, a.k,
        a.rows, a.stride_r, a.stride_k, b.rows, b.stride_r, b.stride_k,
        BK=block.rows, BR=block.columns, ZB=128, A_CHUNK=a.chunk if a.ragged else 0, B_CHUNK=b.chunk if b.ragged else 0,
        num_warps=block.warps, **launch.STRICT,
    )  # fmt: skip
    _exponents_of(recipe, a, b, each, d)
    _digits(recipe, a, b, qa, qb, each, d, window)
    return qa, qb


class _Tiling(NamedTuple):
    """How two operands are cut into programs of one launch, a first."""

    blocks: tuple[tuple[int, int], ...]  # rows by contraction
    steps: tuple[int, ...]
    programs: tuple[int, ...]
    warps: int
    alike: bool  # one code for both
    chunks: tuple[int, int]

    def constants(self) -> dict:
        """By the names of a kernel's parameters."""
        (a_br, a_bk), (b_br, b_bk) = self.blocks
        a_chunk, b_chunk = self.chunks
        return {
            "ALIKE": self.alike, "A_BR": a_br, "A_BK": a_bk, "A_CHUNK": a_chunk,
            "B_BR": b_br, "B_BK": b_bk, "B_CHUNK": b_chunk,
        }  # fmt: skip


def _raising(a: Operand, b: Operand) -> _Tiling:
    rows = max(a.rows, b.rows)
    return _tiling(a, b, [launch.exponents_tile(rows, x.side_by_side) for x in (a, b)], a.k)


def _digit_tiles(a: Operand, b: Operand, padded: int) -> _Tiling:
    return _tiling(a, b, [launch.digits_tile(x.side_by_side) for x in (a, b)], padded)


def _tiling(a: Operand, b: Operand, tiles: list[launch.Tile], k: int) -> _Tiling:
    alike, *chunks = _together(a, b, tiles[0][:3] == tiles[1][:3])
    return _Tiling(
        tuple(tile[:2] for tile in tiles), tuple(tile.steps for tile in tiles),
        tuple(
            triton.cdiv(x.rows, tile.rows) * triton.cdiv(k, tile.columns * tile.steps)
            for x, tile in zip((a, b), tiles, strict=True)
        ),
        tiles[0].warps, alike, tuple(chunks),
    )  # fmt: skip


def _parts(largest: Block, a: Operand, b: Operand) -> tuple[Block, Block]:
    """The rows of a, the rows of b."""
    behind = largest.offset + 4 * a.rows
    return largest._replace(length=a.rows), largest._replace(offset=behind, length=b.rows)


def _exponents_of(recipe: Recipe, a: Operand, b: Operand, largest, d: Block) -> None:
    """Raise each row's largest exponent, counted from EMPTY, to what the balance d makes of it."""
    tiling = _raising(a, b)
    recipe.launch(
        exponents_kernel, sum(tiling.programs),
        a.block, largest[0], a.rows, a.stride_r, a.stride_k, tiling.steps[0],
        b.block, largest[1], b.rows, b.stride_r, b.stride_k, tiling.steps[1], tiling.programs[1],
        d, a.k, **tiling.constants(), num_warps=tiling.warps, **launch.STRICT,
    )  # fmt: skip


def _digits(recipe: Recipe, a: Operand, b: Operand, qa: Digits, qb: Digits, largest, d: Block, window: int) -> None:
    """Digits from the balance d and each row's largest exponent, counted from EMPTY."""
    tiling = _digit_tiles(a, b, qa.padded)
    recipe.launch(
        digits_kernel, sum(tiling.programs),
        a.block, largest[0], qa.digits, qa.exponents, a.rows, a.stride_r, a.stride_k,
        b.block, largest[1], qb.digits, qb.exponents, b.rows, b.stride_r, b.stride_k,
        tiling.programs[1], d, a.k, qa.padded,
        W=window, D=DIGITS[window], **tiling.constants(), num_warps=tiling.warps, **launch.STRICT,
    )  # fmt: skip


class CutQuantisation(NamedTuple):
    """What `quantize_cut` reserves: `first` and `second` are bits of each contraction index's largest
    magnitude in the operands, int32 [K], `first` of a gradient only; `largest` the largest exponents
    of the rows of both, counted from EMPTY, int32 [rows of a + rows of b]. Each is complete after
    the launches before `balanced`, `quantised`, in this order."""

    first: Block | None
    second: Block
    balanced: int
    largest: Block
    quantised: int
    qa: Digits
    qb: Digits


def quantize_cut(recipe: Recipe, a: Operand, b: Operand, tokens: tuple[Operand, Operand], window: int, balance: str) -> CutQuantisation:
    """Digits in three steps, between which ranks may raise the maxima to those of the whole.

    `tokens` are a and b with their contraction indices as rows.
    """
    first = maxima(recipe, tokens[0]) if balance == "gradient" else None
    second = maxima(recipe, tokens[1])
    balanced = len(recipe.launches)
    d = recipe.reserve(a.k, torch.int32)
    recipe.launch(
        balance_kernel, triton.cdiv(a.k, launch.WORDS_BLOCK), first or second, second, d, a.k,
        GRADIENT=first is not None, BLOCK=launch.WORDS_BLOCK, num_warps=4, **launch.STRICT,
    )  # fmt: skip
    largest = recipe.reserve(a.rows + b.rows, torch.int32, ZEROS)
    each = _parts(largest, a, b)
    _exponents_of(recipe, a, b, each, d)
    quantised = len(recipe.launches)
    qa, qb = _reserve(recipe, a, window), _reserve(recipe, b, window)
    _digits(recipe, a, b, qa, qb, each, d, window)
    return CutQuantisation(first, second, balanced, largest, quantised, qa, qb)


def _reserve(recipe: Recipe, x: Operand, window: int) -> Digits:
    rows, padded = x.batch * x.rows, launch.padded_contraction(x.k)
    digits = recipe.reserve(DIGITS[window] * rows * padded, torch.int8)
    exponents = recipe.reserve(-(-rows // 16) * 16, torch.int32)._replace(length=rows)  # whole chunks may be read
    return Digits(digits, exponents, rows, x.rows, padded)
