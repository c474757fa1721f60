"""Pointwise operations (contract sections 1 and 2): programs, and the operators made of them.

`register` turns a program into `torch.ops.carbon.<name>(Tensor a, ..., *, ScalarType dtype)`, with
an eager implementation (the definition), a fake one and an Inductor lowering that fuses like any
other pointwise operation. Floating inputs are widened exactly to binary32 (binary64 if one of them
is), integers are rounded once to it, and the result is rounded once to `dtype`.
"""

import functools
import struct
from string import ascii_lowercase

import torch

from .engines import InductorEngine, TorchEngine, TritonEngine, record, round_to

LIBRARY = torch.library.Library("carbon", "DEF")
PROGRAMS = {}


def register(name, program, inputs, section, widen=True):
    """Define `carbon::<name>` from `program(o, *inputs)`. `widen=False` hands inputs over as they are."""
    arguments = ", ".join(f"Tensor {c}" for c in ascii_lowercase[:inputs])
    LIBRARY.define(f"{name}({arguments}, *, ScalarType dtype) -> Tensor", tags=(torch.Tag.pointwise, torch.Tag.pt2_compliant_tag))
    PROGRAMS[name] = (program, inputs, section)

    def evaluate(o, values, dtype):
        if widen:
            wide = torch.float64 if any(o.dtype(v) is torch.float64 for v in values) else torch.float32
            values = [o.to(v, wide) for v in values]
        return round_to(o, program(o, *values), dtype)

    def eager(*tensors, dtype):
        return evaluate(TorchEngine, tensors, dtype)

    @functools.cache
    def recorded(engine, dtypes, dtype):
        return record(lambda values: evaluate(engine, values, dtype), dtypes)

    def lowered(*tensors, dtype):
        device = next((t.get_device() for t in tensors if t.get_device().type != "cpu"), tensors[0].get_device())
        engine = InductorEngine if device.type == "cpu" else TritonEngine
        return _fused(recorded(engine, tuple(t.get_dtype() for t in tensors), dtype), tensors, device, dtype)

    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"carbon::{name}", _elementwise_fake, lib=LIBRARY)
    op = getattr(torch.ops.carbon, name).default
    _LOWERINGS[op] = lowered
    return op


_LOWERINGS = {}


def inlined(op):
    """Let Inductor compute `op` inside the reduction that reads it, however long its program: for operations
    with one reader each, which cost less than their result's way to memory and back."""
    fused = _LOWERINGS[op]

    def lowered(*tensors, dtype):
        from carbon_compile import host

        result = fused(*tensors, dtype=dtype)
        host.never_large(result)
        return result

    _LOWERINGS[op] = lowered
    return op


def stored(op):
    """Let Inductor write the result of `op` to memory instead of computing it anew in every kernel that
    reads it: for long programs over few elements."""
    fused = _LOWERINGS[op]

    def lowered(*tensors, dtype):
        result = fused(*tensors, dtype=dtype)
        result.realize()
        return result

    _LOWERINGS[op] = lowered
    return op


def recomputable():
    """Operators that cost less than what keeping their result takes: all but random draws (section 7)."""
    return [getattr(torch.ops.carbon, name) for name, (_, _, section) in PROGRAMS.items() if section != "7"]


def install_lowerings():
    """Give Inductor the lowerings of every registered operation; Inductor is imported only here."""
    from torch._inductor.lowering import lowerings, register_lowering

    for op, lowered in _LOWERINGS.items():
        if op not in lowerings:
            register_lowering(op, broadcast=True, type_promotion_kind=None)(lowered)


def _fused(program, tensors, device, dtype):
    from torch._inductor import ir
    from torch._inductor.virtualized import OpsValue, V

    loaders = [t.make_loader() for t in tensors]

    def inner(index):
        inputs = [value.value if isinstance(value, OpsValue) else value for value in [load(index) for load in loaders]]
        return OpsValue(program.play(V.get_ops_handler(), *inputs))

    return ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=list(tensors[0].get_size()))


def _elementwise_fake(*tensors, dtype):
    """Shape, strides and device of an elementwise result, by PyTorch's own rule."""
    layouts = tuple((tuple(t.shape), t.stride()) for t in tensors)
    static = all(isinstance(n, int) for layout in layouts for numbers in layout for n in numbers)
    shape, order = _known_layout(layouts) if static else _elementwise_layout(tensors)
    device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    return torch.empty_permuted(shape, order, dtype=dtype, device=device)


def _elementwise_layout(tensors):
    """The shape of an elementwise result, and the order of its dimensions in memory."""
    import torch._prims_common as prims

    if len(tensors) > 1:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        like = [t for t in tensors if t.dim() > 0] or list(tensors)
        like = [t.expand(shape) for t in like]
    else:
        shape, like = tensors[0].shape, list(tensors)
    order = prims.compute_elementwise_output_logical_to_physical_perm(*like)
    if isinstance(order, tuple):  # older versions also return whether it is a plain layout
        order = order[0]
    return shape, order


@functools.lru_cache(4096)
def _known_layout(layouts):
    """`_elementwise_layout` of tensors of these sizes and strides: a graph has few, and asks thousands of times."""
    return _elementwise_layout([torch.empty_strided(*layout, device="meta") for layout in layouts])


# --- section 1: IEEE arithmetic, selects, conversions ---------------------------------------------


def _add(o, x, y):
    return x + y


def _sub(o, x, y):
    return x - y


def _mul(o, x, y):
    return x * y


def _div(o, x, y):
    return x / y


def _sqrt(o, x):
    return o.sqrt(x)


def _neg(o, x):
    return -x


def _abs(o, x):
    return o.abs(x)


def _cast(o, x):
    return x


def _round(o, x):
    return o.rint(x)


def _floor(o, x):
    return o.floor(x)


def _ceil(o, x):
    return -o.floor(-x)


def _trunc(o, x):
    return o.trunc(x)


def _frac(o, x):
    return x - o.trunc(x)


def _sign(o, x):
    one = o.where(x > 0.0, x * 0.0 + 1.0, x * 0.0)
    return o.where(o.isnan(x), 0.0, o.where(x < 0.0, -1.0, o.where(x > 0.0, 1.0, one)))


def _maximum(o, x, y):
    return o.where((x > y) | o.isnan(x), x, y)


def _minimum(o, x, y):
    return o.where((x < y) | o.isnan(x), x, y)


def _fmax(o, x, y):
    return o.where((x > y) | o.isnan(y), x, y)


def _fmin(o, x, y):
    return o.where((x < y) | o.isnan(y), x, y)


def _relu(o, x):
    return o.where(x <= 0.0, 0.0, x)


def _clamp(o, x, low, high):
    return _clamp_max(o, _clamp_min(o, x, low), high)


def _clamp_min(o, x, low):
    return o.where((x < low) | o.isnan(low), low, x)


def _clamp_max(o, x, high):
    return o.where((x > high) | o.isnan(high), high, x)


def _copysign(o, x, y):
    integer, sign = (torch.int32, -(2**31)) if o.dtype(x) is torch.float32 else (torch.int64, -(2**63))
    return o.bits((o.bits(x, integer) & ~sign) | (o.bits(y, integer) & sign), o.dtype(x))


def _heaviside(o, x, at_zero):
    return o.where(x == 0.0, at_zero, o.where(o.isnan(x), x, o.where(x > 0.0, 1.0, x * 0.0)))


def _floor_div(o, x, y):
    return o.floor(x / y)


def _trunc_div(o, x, y):
    return o.trunc(x / y)


def _lt(o, x, y):
    return x < y


def _le(o, x, y):
    return x <= y


def _gt(o, x, y):
    return x > y


def _ge(o, x, y):
    return x >= y


def _eq(o, x, y):
    return x == y


def _ne(o, x, y):
    return x != y


def _select(o, c, x, y):
    return o.where(c, x, y)


for _name, _program, _inputs in (
    ("add", _add, 2), ("sub", _sub, 2), ("mul", _mul, 2), ("div", _div, 2), ("sqrt", _sqrt, 1),
    ("neg", _neg, 1), ("abs", _abs, 1), ("round", _round, 1), ("floor", _floor, 1), ("ceil", _ceil, 1),
    ("trunc", _trunc, 1), ("frac", _frac, 1), ("sign", _sign, 1), ("maximum", _maximum, 2),
    ("minimum", _minimum, 2), ("fmax", _fmax, 2), ("fmin", _fmin, 2), ("relu", _relu, 1),
    ("clamp", _clamp, 3), ("clamp_min", _clamp_min, 2), ("clamp_max", _clamp_max, 2),
    ("copysign", _copysign, 2), ("heaviside", _heaviside, 2), ("floor_div", _floor_div, 2),
    ("trunc_div", _trunc_div, 2), ("lt", _lt, 2), ("le", _le, 2), ("gt", _gt, 2), ("ge", _ge, 2),
    ("eq", _eq, 2), ("ne", _ne, 2),
):  # fmt: skip
    register(_name, _program, _inputs, "1")
register("cast", _cast, 1, "1", widen=False)
register("select", _select, 3, "1", widen=False)


# --- section 3: the pieces of an exact sum ---------------------------------------------------------

WINDOW = 38
_INFINITY = 0x7F800000


def _magnitude(o, x):
    """Bits of |x| as int32: an order-free key, with infinity and NaN above every finite value."""
    return o.bits(x, torch.int32) & 0x7FFFFFFF


def _two_power(o, k):
    """2^k as two binary32 factors, for int32 k in [-252, 254]."""
    h = k >> 1
    return o.bits((h + 127) << 23, torch.float32), o.bits((k - h + 127) << 23, torch.float32)


def _expo(o, m):
    """expo of the magnitude bits m. Subnormals share the exponent of the smallest normal binade: with
    a window of 38 bits both grids hold every subnormal exactly, so the sum is the same."""
    e = (m >> 23) - 126
    return o.where(e < -125, -125, e)


# A term q is made in two parts, q = high 2^19 + low, because processors convert binary32 to int64 much more
# slowly than they add binary32: adding 1.5 2^(23 + k) to a number below 2^(22 + k) rounds it to a multiple
# of 2^k, to nearest even, which then stands in the low bits. What that lost is exact, and is rounded the same
# way to a grid 2^19 finer. Ties stay ties to even, since high 2^19 is even.
PART_BITS = 19
# Up to this many terms the parts add up in int32: |low| <= 2^18, and |high| <= 2^19 reaches +2^31 only
# where all are 2^19. Their terms are below 2^38 (m < 2^e), so all low parts are negative, which tells.
PARTS_IN_INT32 = 2**12
_NEGATIVE_INFINITY = -0x800000


def _rounder(k):
    """The bits of 1.5 2^(23 + k), which rounds to multiples of 2^k."""
    return ((k + 150) << 23) | 0x400000


def _parts(o, plus, e):
    """(high, low) as int32 with high 2^19 + low = RNE(t 2^(W - e)), for |t| <= 2^e and -64 <= e <= 64;
    `plus(c)` is t + c."""
    high, rest = _rounded_off(o, plus, _rounder(e - (WINDOW - PART_BITS)))
    low, _ = _rounded_off(o, lambda c: rest + c, _rounder(e - WINDOW))
    return high, low


def _rounded_off(o, plus, rounder):
    """(t rounded to an integer of the rounder's multiple, what is left of t)"""
    r = struct.unpack("<f", struct.pack("<i", rounder))[0] if isinstance(rounder, int) else o.bits(rounder, torch.float32)
    near = plus(r)
    return o.bits(near, torch.int32) - rounder, plus(r - near)


def _sum_parts(o, x, m):
    """The parts of q = RNE(x 2^(W - e)); anything where m isn't finite."""
    e = _expo(o, o.where((m < 0) | (m >= _INFINITY), 0, m))
    shift = o.where(e > 64, -64, o.where(e < -64, 64, e * 0))  # e * 0: a value, as one side must be
    return _parts(o, o.scaled(x, o.bits((shift + 127) << 23, torch.float32)), e + shift)


def _term(o, high, low):
    return (o.to(high, torch.int64) << PART_BITS) + o.to(low, torch.int64)


def _negative_key(o, x):
    """An int32 that falls as a negative x grows in magnitude, down to its NaNs; not negative for other x."""
    return o.bits(x, torch.int32) ^ 0x7FFFFFFF


def _largest(o, top, bottom):
    """The magnitude bits of a set of numbers, from the largest of their bits and the smallest of their
    negative keys; -inf's own bits where it is the only infinity, and a NaN's where there are both."""
    below = bottom ^ -1  # magnitude bits of the largest negative number, or negative
    m = o.where(top > below, top, below)
    m = o.where((below == _INFINITY) & (top < _INFINITY), _NEGATIVE_INFINITY, m)
    return o.where((below == _INFINITY) & (top == _INFINITY), 0x7FFFFFFF, m)


def _sum_of_terms(o, t, m):
    """RN(T) 2^(e - W), scaled in two steps; m says what is not finite, see `_largest`."""
    special = (m < 0) | (m >= _INFINITY)
    low, high = _two_power(o, _expo(o, o.where(special, 0, m)) - WINDOW)
    return o.where(special, o.bits(m, torch.float32), o.to(t, torch.float32) * low * high)


def _sum_of_parts(o, high, low, m):
    """`_sum_of_terms` of the sums of at most 2^12 high and low parts, which may have wrapped in int32."""
    wrapped = (high == -(2**31)) & (low < 0)
    high = o.where(wrapped, 2**31, o.to(high, torch.int64))
    return _sum_of_terms(o, (high << PART_BITS) + o.to(low, torch.int64), m)


def _sum_of_words(o, high, low, m):
    """`_sum_of_terms` for 2^25 terms and more, in two words."""
    special = (m < 0) | (m >= _INFINITY)
    down, up = _two_power(o, _expo(o, o.where(special, 0, m)) - WINDOW)
    return o.where(special, o.bits(m, torch.float32), _two_words_to_float(o, high, low) * down * up)


# Where maxima are exchanged without their signs (scatters, collectives), the terms count the infinities.


def _sum_terms(o, x, m):
    """q = RNE(x 2^(W - e)) as int64; where m is infinite, 1 for +inf and 2^32 for -inf, else 0."""
    counts = o.where(x == float("inf"), 1, o.where(x == float("-inf"), 1 << 32, o.to(m, torch.int64) * 0))
    return o.where(m >= _INFINITY, counts, _term(o, *_sum_parts(o, x, m)))


def _sum_total(o, t, m):
    """RN(T) 2^(e - W), scaled in two steps; NaN and infinities by the counts `_sum_terms` made."""
    special = m >= _INFINITY
    low, high = _two_power(o, _expo(o, o.where(special, 0, m)) - WINDOW)
    finite = o.to(t, torch.float32) * low * high
    plus, minus = (t & 0xFFFFFFFF) > 0, (t >> 32) > 0
    infinite = o.where(plus, o.where(minus, finite * 0.0 + float("nan"), float("inf")), float("-inf"))
    infinite = o.where(m > _INFINITY, float("nan"), infinite)
    return o.where(special, infinite, finite)


LOW_BITS = 19


def _high_word(o, q):
    return q >> LOW_BITS


def _low_word(o, q):
    return q & ((1 << LOW_BITS) - 1)


def _two_words_to_float(o, high, low):
    """RN(high 2^19 + low) for low >= 0: exact in one word, or with the lost bits made sticky."""
    high = high + (low >> LOW_BITS)
    low = low & ((1 << LOW_BITS) - 1)
    far = (high >= 2**40) | (high < -(2**40))
    near = (o.where(far, 0, high) << LOW_BITS) + low
    sticky = o.where(low > 0, high | 1, high)
    return o.where(far, o.to(sticky, torch.float32) * 2.0**LOW_BITS, o.to(near, torch.float32))


def _sum_total2(o, high, low, m):
    """`_sum_total` for 2^25 terms and more."""
    special = m >= _INFINITY
    down, up = _two_power(o, _expo(o, o.where(special, 0, m)) - WINDOW)
    finite = _two_words_to_float(o, high, low) * down * up
    counts = (o.where(special, high, 0) << LOW_BITS) + low
    return o.where(special, _sum_total(o, counts, o.where(special, m, _INFINITY)), finite)


def _unit_total2(o, high, low):
    return _two_words_to_float(o, high, low) * 2.0 ** (1 - WINDOW)


def _unit_terms(o, p):
    """q = RNE(p 2^37) for 0 <= p <= 1: the terms of a sum whose exponent is known to be 1."""
    return _term(o, *_unit_parts(o, p))


def _unit_parts(o, p):
    p = o.where(o.isnan(p), 0.0, p)
    return _parts(o, lambda c: p + c, 1)


def _unit_total_of_parts(o, high, low):
    return _unit_total(o, _term(o, high, low))


def _unit_total(o, t):
    return o.to(t, torch.float32) * 2.0 ** (1 - WINDOW)


def _order_key(o, x):
    """An integer that orders floats: -inf < ... < 0 < ... < inf < NaN, both zeros equal."""
    integer, mask = (torch.int32, 2**31 - 1) if o.dtype(x) is torch.float32 else (torch.int64, 2**63 - 1)
    b = o.bits(o.where(x == 0.0, 0.0, x), integer)
    return o.where(o.isnan(x), mask, o.where(b < 0, b ^ mask, b))


def _amax_key(o, x):
    """As `_order_key`, with -0 below 0, which takes fewer instructions; back from both, a zero is +0."""
    integer, sign, mask = (torch.int32, 31, 2**31 - 1) if o.dtype(x) is torch.float32 else (torch.int64, 63, 2**63 - 1)
    b = o.bits(x, integer)
    return o.where(o.isnan(x), mask, b ^ ((b >> sign) & mask))


def _from_order_key(o, k):
    y = o.bits(o.where(k < -1, k ^ (2**31 - 1), o.where(k < 0, 0, k)), torch.float32)
    return o.where(k == 2**31 - 1, float("nan"), y)


def _from_order_key64(o, k):
    y = o.bits(o.where(k < -1, k ^ (2**63 - 1), o.where(k < 0, 0, k)), torch.float64)
    return o.where(k == 2**63 - 1, float("nan"), y)


register("magnitude", lambda o, x: _magnitude(o, o.to(x, torch.float32)), 1, "3", widen=False)
# "& -1": an operation must not return its input's memory.
register("float_bits", lambda o, x: o.bits(o.to(x, torch.float32), torch.int32) & -1, 1, "3", widen=False)
register("negative_key", lambda o, x: _negative_key(o, o.to(x, torch.float32)), 1, "3", widen=False)
register("largest", _largest, 2, "3", widen=False)
inlined(register("sum_high", lambda o, x, m: _sum_parts(o, o.to(x, torch.float32), m)[0], 2, "3", widen=False))
inlined(register("sum_low", lambda o, x, m: _sum_parts(o, o.to(x, torch.float32), m)[1], 2, "3", widen=False))
inlined(register("sum_term", lambda o, x, m: _term(o, *_sum_parts(o, o.to(x, torch.float32), m)), 2, "3", widen=False))
register("sum_of_parts", _sum_of_parts, 3, "3", widen=False)
register("sum_of_terms", _sum_of_terms, 2, "3", widen=False)
register("sum_of_words", _sum_of_words, 3, "3", widen=False)
register("sum_terms", lambda o, x, m: _sum_terms(o, o.to(x, torch.float32), m), 2, "3", widen=False)
register("sum_total", _sum_total, 2, "3", widen=False)
inlined(register("unit_terms", _unit_terms, 1, "3"))
register("unit_total", _unit_total, 1, "3", widen=False)
inlined(register("unit_high", lambda o, p: _unit_parts(o, p)[0], 1, "3"))
inlined(register("unit_low", lambda o, p: _unit_parts(o, p)[1], 1, "3"))
register("unit_total_of_parts", _unit_total_of_parts, 2, "3", widen=False)
register("high_word", _high_word, 1, "3", widen=False)
register("low_word", _low_word, 1, "3", widen=False)
register("sum_total2", _sum_total2, 3, "3", widen=False)
register("unit_total2", _unit_total2, 2, "3", widen=False)
register("order_key", _order_key, 1, "3")
register("amax_key", _amax_key, 1, "3")
register("from_order_key", _from_order_key, 1, "3", widen=False)
register("from_order_key64", _from_order_key64, 1, "3", widen=False)
