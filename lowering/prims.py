"""The vocabulary of rules: carbon's pointwise operations and exact reductions as plain functions.

Arguments are tensors or Python scalars; a scalar is rounded once to the compute type. Results are
binary32 (binary64 if an argument is) unless `dtype` says otherwise. Works on real, fake and traced
tensors, so a pinned formula is written once for eager execution and for the graph.
"""

import math
import struct

import torch

from . import elementary, pointwise
from .registry import Refusal

FLOAT32_MAX = 3.4028235677973366e38  # halfway between the largest binary32 and 2^128


def wide(*tensors):
    """The compute type: binary64 if any argument is, else binary32."""
    return torch.float64 if any(isinstance(t, torch.Tensor) and t.dtype is torch.float64 for t in tensors) else torch.float32


def rounded(value, dtype):
    """A Python scalar rounded to binary32 and then to the floating `dtype`, as a Python number.

    Inductor writes the constants of a kernel down as they come, and folds their conversions: a
    constant meant for binary32 or bfloat16 must already be one.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return value
    bits = struct.unpack("<I", struct.pack("<f", value if math.fabs(value) < FLOAT32_MAX else math.copysign(math.inf, value)))[0]
    if dtype is torch.bfloat16:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if dtype is torch.float16:
        return struct.unpack("<e", struct.pack("<e", value))[0] if math.fabs(value) < 65520.0 else math.copysign(math.inf, value)
    return value


def scalar(value, like, dtype=None):
    """A Python number as a 0-d tensor on the device of `like`, rounded once."""
    dtype = dtype or wide(like)
    return torch.full((), rounded(value, dtype), dtype=dtype, device=like.device)


def apply(name, *args, dtype=None):
    """`carbon::<name>` on tensors and scalars."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    compute = wide(*tensors)
    if compute is torch.float64 and pointwise.PROGRAMS[name][2] == "2":
        raise Refusal("CB203", f"{name} has no program for float64 in the contract; convert to float32 first")
    like = next((t for t in tensors if t.dim() > 0), tensors[0])
    operands = [a if isinstance(a, torch.Tensor) else scalar(a, like, compute) for a in args]
    return getattr(torch.ops.carbon, name)(*operands, dtype=dtype or compute)


def _function(name):
    def function(*args, dtype=None):
        return apply(name, *args, dtype=dtype)

    function.__name__ = name
    function.__doc__ = f"`carbon::{name}`; see its program."
    return function


for _name, (_program, _inputs) in {**elementary.PROGRAMS, **elementary.RESTRICTED}.items():
    pointwise.register(_name, _program, _inputs, "2")
for _name in pointwise.PROGRAMS:
    globals()[_name] = _function(_name)


def cast(x, dtype):
    """`x` converted to `dtype` with one rounding; float to integer saturates, NaN to 0."""
    return x if x.dtype is dtype else torch.ops.carbon.cast(x, dtype=dtype)


def f32(x):
    """`x` widened exactly to binary32 (binary64 stays)."""
    return x if x.dtype in (torch.float32, torch.float64) else torch.ops.carbon.cast(x, dtype=torch.float32)


def normal_dims(x, dims):
    """Dimensions as a sorted list of non-negative integers; None or an empty list is all of them."""
    if isinstance(dims, int):
        dims = [dims]
    if dims is None or len(dims) == 0:
        return list(range(x.dim()))
    return sorted({d % max(x.dim(), 1) for d in dims})


def count(x, dims):
    """How many elements a reduction over `dims` combines."""
    return math.prod(x.shape[d] for d in normal_dims(x, dims)) if x.dim() else 1


# Contract section 3: an int64 holds 2^25 terms of 38 bits.
SINGLE_WORD = 2**25


def sum(x, dims=None, keepdim=False, dtype=None, *, signed=True):  # noqa: A001
    """Exact sum of `x` over `dims`, rounded once to binary32, then to `dtype` (contract section 3).

    The maximum is exact and order-free, and so is the integer total: every schedule gives these bits.
    `signed=False` promises that no element is negative, which saves looking for the most negative one.
    """
    if x.dtype is torch.float64:
        raise Refusal("CB202", "sums of float64 have no rule in the contract; convert to float32 first")
    dims = normal_dims(x, dims)
    if x.dim() == 0:
        return cast(add(f32(x), 0.0), dtype or torch.float32)  # noqa: F821
    if provably(count(x, dims) == 0):
        shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
        return torch.zeros(shape, dtype=dtype or torch.float32, device=x.device)
    out = dtype or torch.float32
    from . import columns

    if signed and columns.suits(x, dims, out):  # squares and the like are computed on the way
        result = columns.sum_leading(x, len(dims), out)
        return result[(None,) * len(dims)] if keepdim else result
    result = sum_of_graph(x, dims, out, signed)
    return result if keepdim else squeeze(result, dims)


def sum_of_graph(x, dims, out, signed=True):
    """`sum` as operations of the graph, which fuse with what computes `x`; `dims` are kept as 1."""
    carbon = torch.ops.carbon
    x = _never_empty(x, dims)
    m = largest_magnitude(x, dims, signed)
    if _parts_fit(x, dims):
        parts = _sums_of_parts(dims, carbon.sum_high(x, m, dtype=torch.int32), carbon.sum_low(x, m, dtype=torch.int32))
        return carbon.sum_of_parts(*parts, m, dtype=out)
    total = _integer_sum(carbon.sum_term(x, m, dtype=torch.int64), x, dims)
    return carbon.sum_of_terms(*total, m, dtype=out) if len(total) == 1 else carbon.sum_of_words(*total, m, dtype=out)


def _never_empty(x, dims):
    """x with one more zero along a dimension whose size only the data knows: a maximum needs an element."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for d in dims:
        if isinstance(x.shape[d], torch.SymInt) and free_unbacked_symbols(x.shape[d]):
            shape = [1 if i == d else n for i, n in enumerate(x.shape)]
            x = torch.ops.aten.cat.default([x, torch.zeros(shape, dtype=x.dtype, device=x.device)], d)
    return x


def largest_magnitude(x, dims, signed=True):
    """Bits of the largest |x| over `dims`, kept as dimensions of size 1; what isn't finite as `largest` says."""
    carbon, aten = torch.ops.carbon, torch.ops.aten
    if not signed:
        return aten.amax.default(carbon.magnitude(x, dtype=torch.int32), dims, True)
    top = aten.amax.default(carbon.float_bits(x, dtype=torch.int32), dims, True)
    bottom = aten.amin.default(carbon.negative_key(x, dtype=torch.int32), dims, True)
    return carbon.largest(top, bottom, dtype=torch.int32)


def unit_sum(p, dims, keepdim=True):
    """Exact sum of values in [0, 1] on the static grid 2^-37; no pass for the maximum."""
    dims = normal_dims(p, dims)
    if _parts_fit(p, dims):
        parts = _sums_of_parts(dims, torch.ops.carbon.unit_high(p, dtype=torch.int32), torch.ops.carbon.unit_low(p, dtype=torch.int32))
        result = torch.ops.carbon.unit_total_of_parts(*parts, dtype=torch.float32)
        return result if keepdim else squeeze(result, dims)
    total = _integer_sum(torch.ops.carbon.unit_terms(p, dtype=torch.int64), p, dims)
    result = torch.ops.carbon.unit_total(total[0], dtype=torch.float32) if len(total) == 1 else torch.ops.carbon.unit_total2(*total, dtype=torch.float32)
    return result if keepdim else squeeze(result, dims)


def _parts_fit(x, dims):
    """Whether the parts of terms add up in int32, which is faster than their int64 everywhere."""
    return provably(count(x, dims) <= pointwise.PARTS_IN_INT32)


def _sums_of_parts(dims, *parts):
    return [torch.ops.aten.sum.dim_IntList(part, dims, True, dtype=torch.int32) for part in parts]


def _integer_sum(q, x, dims):
    """The exact total of int64 terms: one word where it provably fits, else (high, low) words."""
    n = count(x, dims)
    if provably(n < SINGLE_WORD):
        return (torch.ops.aten.sum.dim_IntList(q, dims, True),)
    words = (torch.ops.carbon.high_word(q, dtype=torch.int64), torch.ops.carbon.low_word(q, dtype=torch.int64))
    return tuple(torch.ops.aten.sum.dim_IntList(w, dims, True) for w in words)


def provably(condition):
    """Whether a condition on sizes holds for every value that symbolic sizes may take."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return condition if isinstance(condition, bool) else statically_known_true(condition)


def squeeze(x, dims):
    return torch.ops.aten.squeeze.dims(x, dims) if dims else x


def mean(x, dims=None, keepdim=False, dtype=None, *, signed=True):
    """Exact sum over the count; the division rounds once in binary32."""
    return div(sum(x, dims, keepdim, signed=signed), count(x, dims), dtype=dtype)  # noqa: F821


def amax(x, dims=None, keepdim=False):
    """Largest value of floating `x`; NaN wins, a zero is +0. Taken on integer keys, so order-free."""
    key = torch.ops.carbon.amax_key(x, dtype=key_type(x.dtype))
    return value_of_key(torch.ops.aten.amax.default(key, normal_dims(x, dims), keepdim), x.dtype)


def key_type(dtype):
    """The integer that holds the order keys of floats of `dtype`."""
    return torch.int64 if dtype is torch.float64 else torch.int32


def value_of_key(key, dtype):
    """The floating value behind an order key; zeros are +0."""
    back = torch.ops.carbon.from_order_key64 if key.dtype is torch.int64 else torch.ops.carbon.from_order_key
    return back(key, dtype=dtype)


def amin(x, dims=None, keepdim=False):
    """Smallest value of floating `x`; NaN wins, a zero is +0."""
    largest = amax(neg(x, dtype=x.dtype), dims, keepdim)  # noqa: F821
    return sub(0.0, largest, dtype=x.dtype)  # noqa: F821  (0 - 0 is +0, where -0 would be -0)


def square(x):
    return mul(x, x)  # noqa: F821


def chain(op, *terms):
    """`op` applied left to right, one rounding a step."""
    result = terms[0]
    for t in terms[1:]:
        result = op(result, t)
    return result
