"""Quantisation fused into what computes a product's first operand (contract section 4; speed alone: no bit depends on it).

A product by a weight is one kernel call that reads its first operand from memory, for digits and exponents.
Where that operand is computed on the way (a norm, an activation) and nobody else wants it, its digits are
operations of the graph instead: Inductor computes them in the kernel that computes the operand, which is never
stored. They need the weight's balance, so the weight's digits are made first, as those of a kept weight are.
"""

import torch

from ..templates import kept as templates
from ..templates import launch
from ..templates.quantize import BEXPO_BUMP, EMPTY, POISON, RAW
from . import matmul, policy
from .columns import on_gpu
from .pointwise import PROGRAMS, inlined, register
from .registry import direct, kernels

aten = torch.ops.aten
ENABLED = True  # the only switch: the bits are the same without (caches keep what was compiled with another)
SHORTEST_ROW = 2048  # that is worth it
_INFINITY = 0x7F800000
_SMALLEST = 0x00800000  # bits of the smallest normal binary32 number
_BIAS = 126  # of binary32 exponents as `expo` counts them


# Programs have no branches: each element takes the general way, for magnitudes and balances of any size. So what
# can be left to the row is, and binary32 additions, of which a GPU does twice as many, take the place of integer ones.


def _digit_exponent(o, x, d):
    """bexpo(|x|) + d + _BIAS, with the codes for zero and for what is not finite."""
    m = o.bits(o.to(x, torch.float32), torch.int32) & 0x7FFFFFFF
    pattern = m + BEXPO_BUMP
    if o.dtype(x) is not torch.float16:  # whose smallest numbers are normal ones of binary32
        normal = o.bits(o.bits(m, torch.float32) * 2.0**24, torch.int32) + (BEXPO_BUMP - (24 << 23))
        pattern = o.where(m < _SMALLEST, normal, pattern)
    e = o.where(m == 0, EMPTY, (pattern >> 23) + d)
    return o.where(m >= _INFINITY, POISON, e)


def _row_exponent(window):
    def program(o, e):
        return o.where(e == POISON, POISON, o.where(e == EMPTY, 0, e - (window - 1 + _BIAS)))

    return program


def _scaled(o, x, d, e, window):
    """x 2^(d + window - 1 + _BIAS - e) in binary32: exact, or so small that it rounds to 0; anything in a poisoned row."""
    s = d + ((window - 1 + _BIAS) - e)
    s = o.where(s < -252, -252, s)
    s = o.where(s > 252, 252, s)
    h = s >> 1
    low, high = o.bits((h + 127) << 23, torch.float32), o.bits((s - h + 127) << 23, torch.float32)
    return o.to(x, torch.float32) * low * high


def _byte(z, number):
    """A byte of z as a number with a sign."""
    return (z << (24 - 8 * number)) >> 24


# Of numbers below 2^22 in magnitude, a sum with this is an integer that stands in the low bits; of those below 2^38,
# a sum with the other is a multiple of 2^16 that stands there likewise, but for a byte that `_word` wants.
_ONES, _HIGH = 1.5 * 2.0**23, 1.5 * 2.0**39 + 0xC0 * 2.0**16


def _word(o, y, window, number):
    """Of RNE(y), an integer whose byte of this number is the digit of this number: half a digit is added to what is below."""
    half = (0, 0x80, 0x8080)[number]
    if window == 16:
        return o.bits(y + (_ONES + half), torch.int32)
    high = y + _HIGH
    rest = o.bits((y - (high - _HIGH)) + (_ONES + half), torch.int32)
    # What carries from the rest goes to the last digit: 0x4B40 and the carry are above its lower two bytes, and 0xC0
    # and 0x40 make a whole one.
    return rest if number < 2 else (o.bits(high, torch.int32) + (rest >> 16)) << 16


def _digit(window, number):
    return lambda o, x, d, e: _byte(_word(o, _scaled(o, x, d, e, window), window, number), number)


# The quick way, of bfloat16 operands: balanced values in binary32, by factors of the weight, where the largest of a row
# tells that they are exact but for what rounds to 0. Other rows, of zeros or tiny numbers or what is not finite, or by a
# weight of extreme magnitudes, keep their bytes in place of digits and are left to the product. f are the bits of a
# factor, t the balance that all factors are without, m the bits of a row's largest balanced magnitude.
_SMALL = 27 << 23  # 2^-100


def _quick_magnitude(o, x, f):
    return o.bits(o.to(x, torch.float32) * o.bits(f, torch.float32), torch.int32) & 0x7FFFFFFF


def _is_quick(o, m):
    return (m >= _SMALL) & (m < _INFINITY)


def _quick_row_exponent(window):
    def program(o, m, t):
        return o.where(_is_quick(o, m), ((m + BEXPO_BUMP) >> 23) + (t - (window - 1 + _BIAS)), RAW)

    return program


def _quick_digit(window, number):
    def program(o, x, f, m):
        x = o.to(x, torch.float32)
        shift = (window - 1 + _BIAS + 127) - ((m + BEXPO_BUMP) >> 23)
        y = x * o.bits(f, torch.float32) * o.bits(o.where(_is_quick(o, m), shift, 127) << 23, torch.float32)
        word = _word(o, y, window, number)
        return _byte(word if number == 2 else o.where(_is_quick(o, m), word, o.bits(x, torch.int32) >> 16), number)

    return program


_DIGIT_EXPONENT = inlined(register("digit_exponent", _digit_exponent, 2, "4", widen=False))
_QUICK_MAGNITUDE = inlined(register("quick_magnitude", _quick_magnitude, 2, "4", widen=False))
_DIGITS, _EXPONENTS, _QUICK_DIGITS, _QUICK_EXPONENTS = {}, {}, {}, {}
for _window in (16, 24):
    _DIGITS[_window] = [register(f"digit{_window}_{i}", _digit(_window, i), 3, "4", widen=False) for i in range(_window // 8)]
    _EXPONENTS[_window] = register(f"row_exponent{_window}", _row_exponent(_window), 1, "4", widen=False)
    _QUICK_DIGITS[_window] = [register(f"quick_digit{_window}_{i}", _quick_digit(_window, i), 3, "4", widen=False) for i in range(_window // 8)]
    _QUICK_EXPONENTS[_window] = register(f"quick_row_exponent{_window}", _quick_row_exponent(_window), 2, "4", widen=False)


def quantized(x, d, window, call=lambda function, *args, **kwargs: function(*args, **kwargs)):
    """(digits int8 [planes * M, K], exponents int32 [M]) of x [M, K] as operations of the graph, d int32 [K]."""
    e = call(aten.amax.default, call(_DIGIT_EXPONENT, x, d, dtype=torch.int32), [1], True)
    planes = [call(op, x, d, e, dtype=torch.int8) for op in _DIGITS[window]]
    return call(aten.cat.default, planes, 0), call(aten.squeeze.dims, call(_EXPONENTS[window], e, dtype=torch.int32), [1])


def quickly_quantized(x, factors, window, call=lambda function, *args, **kwargs: function(*args, **kwargs)):
    """As `quantized`, of a bfloat16 x and `templates.kept.factors`; rows may be left to the product, with the exponent RAW."""
    k = x.meta["val"].shape[1] if isinstance(x, torch.fx.Node) else x.shape[1]
    f, t = call(aten.slice.Tensor, factors, 0, 0, k), call(aten.slice.Tensor, factors, 0, k, k + 1)
    m = call(aten.amax.default, call(_QUICK_MAGNITUDE, x, f, dtype=torch.int32), [1], True)
    planes = [call(op, x, f, m, dtype=torch.int8) for op in _QUICK_DIGITS[window]]
    return call(aten.cat.default, planes, 0), call(aten.squeeze.dims, call(_QUICK_EXPONENTS[window], m, t, dtype=torch.int32), [1])


def _operator(schema, implementation, fake):
    return direct(kernels("4")(schema, implementation, fake), implementation)


def _weight_digits(b, window):
    return templates.weight_digits(b, window)


def _weight_digits_fake(b, window):
    return b.new_empty(templates.layout(*b.shape, window).size, dtype=torch.uint8)


def _mm_digits(digits, exponents, kept, bias, n, window, raw, dtype):
    return templates.exact_mm_digits(digits, exponents, kept, n, window=window, raw=raw, bias=bias, out_dtype=dtype)


def _mm_digits_fake(digits, exponents, kept, bias, n, window, raw, dtype):
    return kept.new_empty((exponents.shape[0], n), dtype=dtype)


# A weight [k, n] as `templates.kept` keeps it, its balance, once more as factors, and its product with a first operand
# that is digits already.
WEIGHT_DIGITS = _operator("weight_digits(Tensor b, int window) -> Tensor", _weight_digits, _weight_digits_fake)
WEIGHT_BALANCE = _operator(
    "weight_balance(Tensor kept, int k, int n, int window) -> Tensor", templates.balance,
    lambda kept, k, n, window: kept.new_empty(k, dtype=torch.int32),
)  # fmt: skip
WEIGHT_FACTORS = _operator(
    "weight_factors(Tensor kept, int k, int n, int window) -> Tensor", templates.factors,
    lambda kept, k, n, window: kept.new_empty(k + 1, dtype=torch.int32),
)  # fmt: skip
MM_DIGITS = _operator(
    "mm_digits(Tensor digits, Tensor exponents, Tensor kept, Tensor? bias, int n, int window, bool raw, ScalarType dtype) -> Tensor",
    _mm_digits, _mm_digits_fake,
)  # fmt: skip


# --- the final graph ----------------------------------------------------------------------------------

_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}


def _worth(m, k):
    """Whether rows [m, k] become digits where they are computed.

    A row that registers don't hold would be computed twice, for its exponent and for its digits. Of few rows launches
    are what takes time, of which there are no fewer, and their products make a weight's digits in registers. A row whose
    length is no power of two leaves registers idle, and a short one has little to gain. GPU time with fusion beside
    without, of norm or activation and product together, 4096 and 16384 rows (H200): rows of 4096, float32 0.91 to 1.00,
    bfloat16 0.95 to 0.98; of 768 (norms) 0.94 to 0.99 and 1.02 to 1.10; of 3072 (activations) 1.05 to 1.08 and 1.20 to 1.24.
    """
    from carbon_compile import host

    return ENABLED and m > 64 and SHORTEST_ROW <= k <= host.LONGEST_ROW and k & (k - 1) == 0


def place(gm):
    """Let what computes the first operands of products in a final graph make their digits, in place."""
    products = {node: plan for node in gm.graph.nodes if (plan := _planned(node)) is not None}
    bases = {}
    for node in products:
        bases.setdefault(_base(node.args[0]), set()).add(node)
    taken = set().union(*(nodes for base, nodes in bases.items() if _computed(base) and _readers(base) == nodes))
    made = {}
    for node in products:
        if node in taken:
            _rewrite(gm, node, *products[node], made)
    if made:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _planned(node):
    """(kept form of the weight, or None, k, n, window, bias, type of the result) of a product that may take digits, else None."""
    if node.target is matmul.MM_KERNEL:
        a, b, bias, window, balance, dtype = node.args
        if balance != "weight":
            return None
        kept, (k, n) = None, b.meta["val"].shape
        window = policy.window_for(window, balance, k)
    elif node.target is matmul.MM_KEPT:
        a, kept, bias, n, window, dtype = node.args
        k = a.meta["val"].shape[1]
    else:
        return None
    value = a.meta["val"]
    m = value.shape[0]
    if not on_gpu(value) or not all(isinstance(size, int) for size in (m, k, n)) or not value.is_contiguous():
        return None
    if m < 1 or n < 1 or k < 2 or launch.padded_contraction(k) != k or not _worth(m, k):
        return None
    return kept, k, n, window, bias, dtype


def _base(node):
    while node.op == "call_function" and node.target in _VIEWS:
        node = node.args[0]
    return node


def _computed(node):
    """Whether Inductor computes a value in a kernel of its own, row after row."""
    program = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "carbon" and node.target._opname in PROGRAMS
    return program and node.meta["val"].is_contiguous()


def _readers(node):
    """Who reads a value, views of it included."""
    return {reader for user in node.users for reader in (_readers(user) if user.target in _VIEWS else [user])}


def _rewrite(gm, node, kept, k, n, window, bias, dtype, made):
    """`made`: by weight, and by operand, weight and window, what there is already."""
    from carbon_compile import host

    a = node.args[0]

    def call(function, *args, **kwargs):
        new = gm.graph.call_function(function, args, kwargs)
        new.meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
        new.meta["val"] = host.fake_result(function, *torch.fx.node.map_arg((args, kwargs), lambda x: x.meta["val"]))
        return new

    with gm.graph.inserting_before(node):
        quick = a.meta["val"].dtype is torch.bfloat16
        weight = (node.args[1], window, quick)
        if weight not in made:
            digits = kept if kept is not None else call(WEIGHT_DIGITS, node.args[1], window)
            made[weight] = digits, call(WEIGHT_FACTORS if quick else WEIGHT_BALANCE, digits, k, n, window)
        kept, balance = made[weight]
        if (a, weight) not in made:
            made[a, weight] = (quickly_quantized if quick else quantized)(a, balance, window, call)
        node.replace_all_uses_with(call(MM_DIGITS, *made[a, weight], kept, bias, n, window, quick, dtype))
    gm.graph.erase_node(node)
