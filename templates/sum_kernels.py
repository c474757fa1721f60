"""Exact sums of few contributions to many elements (contract section 3), one pass on a GPU.

Computes     y_j = the exact sum of x_lj over l, rounded to binary32 and then to the output type
Order        none: the largest magnitude and an integer sum
Invariant to blocks, threads, devices
Rounds at    each term, to 38 bits below the largest magnitude; the total; the output type

It is what the owner of an element does with the contributions of all ranks. `prims.sum` computes the
same from graph operations, which nobody fuses in eager code. Terms are made from bits by integer
instructions, so that neither flushing nor a library's conversions can matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.templates import launch

LIMIT = 1 << 25  # contributions whose total fits one int64

_INFINITY_BITS = tl.constexpr(0x7F800000)
_BLOCK = 1024


@triton.jit
def _term(bits, e):
    """RNE(x 2^(38 - e)) of binary32 patterns whose magnitude is below 2^e, as int64."""
    magnitude = bits & 0x7FFFFFFF
    field = magnitude >> 23
    significand = ((magnitude & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)).to(tl.int64)
    shift = tl.maximum(field, 1) - 112 - e  # at most 14
    left = tl.minimum(tl.maximum(shift, 0), 14).to(tl.int64)
    right = tl.minimum(tl.maximum(-shift, 0), 31).to(tl.int64)  # from 25 on nothing is left
    one = tl.full(right.shape, 1, tl.int64)
    tie = tl.where(right > 0, ((one << right) >> 1) - 1 + ((significand >> right) & 1), 0)
    q = ((significand << left) + tie) >> right
    return tl.where(bits < 0, -q, q)


@triton.jit
def sum_kernel(x_ptr, out_ptr, L, N, BLOCK: tl.constexpr):
    """Columns of x [L, N], contiguous."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = j < N
    largest = tl.zeros((BLOCK,), tl.int32)
    for row in range(0, L):
        x = tl.load(x_ptr + tl.cast(row, tl.int64) * N + j, mask=mask, other=0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    e = tl.maximum((largest >> 23) - 126, -125)
    total = tl.zeros((BLOCK,), tl.int64)
    plus = tl.zeros((BLOCK,), tl.int32)
    minus = tl.zeros((BLOCK,), tl.int32)
    for row in range(0, L):
        x = tl.load(x_ptr + tl.cast(row, tl.int64) * N + j, mask=mask, other=0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        total += _term(bits, e)
        plus = plus | (bits == _INFINITY_BITS).to(tl.int32)
        minus = minus | (bits == -0x800000).to(tl.int32)
    k = e - 38
    half = k >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((k - half + 127) << 23).to(tl.float32, bitcast=True)
    y = (total.to(tl.float32) * low * high).to(tl.int32, bitcast=True)
    y = tl.where(largest == _INFINITY_BITS, tl.where(plus > 0, 0x7F800000, -0x800000), y)
    nan = (largest > _INFINITY_BITS) | ((plus + minus) == 2)
    store_bits(y, nan, out_ptr + j, mask)


@triton.jit
def store_bits(y, nan, pointers, mask):
    """Store binary32 patterns, NaN where `nan` says so, rounded to the type that is pointed to."""
    element: tl.constexpr = pointers.dtype.element_ty
    # Narrow types are made from bits, so that NaN has one pattern (and an interpreter agrees).
    if element == tl.bfloat16:
        rounded = tl.where(nan, 0x7FC0, (y + 0x7FFF + ((y >> 16) & 1)) >> 16)
        value = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif element == tl.float16:
        rounded = y.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
        rounded = tl.where(nan, 0x7E00, rounded.to(tl.int32))
        value = rounded.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        value = tl.where(nan, 0x7FC00000, y).to(tl.float32, bitcast=True)
    tl.store(pointers, value, mask=mask)


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The exact sum over rows of x [L, N], float32, bfloat16 or float16, L < LIMIT: [N] in `dtype`, one of them too."""
    x = x.contiguous()
    out = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    if out.numel():
        sum_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            x, out, x.shape[0], x.shape[1], BLOCK=_BLOCK, num_warps=4, **launch.STRICT
        )
    return out
