"""The engines that run a program: eager tensors, and the inside of Inductor's fused kernels.

A *program* is a straight line of IEEE-754 and integer operations, written once as
`def exp(o, x)` with ordinary operators on values and the namespace `o` for the rest. The engine
decides what a value is; it never decides what the bits are.
"""

import torch

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INT_MAX = {torch.int8: 127, torch.uint8: 255, torch.int16: 32767, torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}
_INT_MIN = {torch.int8: -128, torch.uint8: 0, torch.int16: -32768, torch.int32: -(2**31), torch.int64: -(2**63)}


class TorchEngine:
    """Eager tensors. This is the definition that every other engine must match."""

    where = staticmethod(torch.where)
    rint = staticmethod(torch.round)
    floor = staticmethod(torch.floor)
    trunc = staticmethod(torch.trunc)
    isnan = staticmethod(torch.isnan)
    abs = staticmethod(torch.abs)

    @staticmethod
    def sqrt(x):
        # Eager CPU sqrt is a vendor's vector code, not always correctly rounded. For binary32 it is
        # through binary64, because 53 >= 2 * 24 + 2 makes the double rounding harmless.
        if x.dtype is torch.float64:
            return x.sqrt() if x.is_cuda else _sqrt_float64(x)
        return x.double().sqrt().to(x.dtype)

    @staticmethod
    def scaled(x, factor):
        """A function of c that is x factor + c, rounded once: the product is exact, or too small to count."""
        product = x * factor
        return lambda c: product + c

    @staticmethod
    def to(x, dtype):
        return x.to(dtype)

    @staticmethod
    def bits(x, dtype):
        return x.view(dtype)

    @staticmethod
    def dtype(x):
        return x.dtype


def _sqrt_float64(x):
    """The correctly rounded square root, from one that is off by at most an ulp.

    For m in [1, 4) and s near its root, with u = 2^-52 the spacing of s: the root lies above
    s + u/2 exactly when m - s^2 > s u, and below s - u/2 exactly when m - s^2 <= -s u, since both
    sides are multiples of u^2. Dekker's product gives s^2 without error.
    """
    mantissa, exponent = torch.frexp(x)
    odd = exponent & 1
    m, half = mantissa * torch.where(odd == 1, 2.0, 4.0).to(x.dtype), (exponent - 2 + odd) >> 1
    s = m.sqrt()
    split = s * (2.0**27 + 1)
    high = split - (split - s)
    low = s - high
    square = s * s
    residue = (m - square) - (((high * high - square) + 2 * high * low) + low * low)
    s = torch.where(residue > s * 2.0**-52, s + 2.0**-52, torch.where(residue <= s * -(2.0**-52), s - 2.0**-52, s))
    root = s * ((half.long() + 1023) << 52).view(torch.float64)
    return torch.where((x > 0) & (x < float("inf")), root, x.sqrt())


class Value:
    """A scalar inside an Inductor kernel: the step of a tape that makes it, its dtype, Python's operators."""

    __slots__ = ("tape", "step", "dtype")

    def __init__(self, tape, step, dtype):
        self.tape, self.step, self.dtype = tape, step, dtype


class Tape:
    """The calls of Inductor's operations that a program makes, `(name, steps of operands, constants, keywords)`,
    each made once. Its inputs are the first steps."""

    def __init__(self, inputs):
        self.inputs, self.calls, self.steps = inputs, [], {}

    def call(self, name, dtype, operands=(), constants=(), **keywords):
        call = (name, tuple(value.step for value in operands), constants, keywords)
        fresh = self.inputs + len(self.calls)
        step = self.steps.setdefault(repr(call), fresh)  # by text: 0.0 equals -0.0, and 1 True
        if step == fresh:
            self.calls.append(call)
        return Value(self, step, dtype)

    def needed(self, result):
        """The calls that step `result` needs, and which of the steps it is among them."""
        used = {result}
        for step in range(result, self.inputs - 1, -1):
            if step in used:
                used.update(self.calls[step - self.inputs][1])
        steps = [*range(self.inputs), *sorted(step for step in used if step >= self.inputs)]
        place = {step: n for n, step in enumerate(steps)}
        calls = [self.calls[step - self.inputs] for step in steps[self.inputs :]]
        return [(name, tuple(place[step] for step in operands), *rest) for name, operands, *rest in calls], place[result]


class Program:
    """A straight line of Inductor's operations: `calls`, each `(name, places of operands, constants, keywords)`,
    makes one value more than there are `inputs` before it, and `result` is the place of the program's."""

    def __init__(self, inputs, calls, result):
        self.inputs, self.calls, self.result = inputs, calls, result

    def play(self, handler, *inputs):
        """Let a handler of Inductor's compute the program."""
        from carbon_compile import host

        quick = host.quick_player(handler)
        if quick is not None and (found := quick(self, handler, inputs)) is not NotImplemented:
            return found
        values = list(inputs)
        for name, operands, constants, keywords in self.calls:
            values.append(getattr(handler, name)(*[values[place] for place in operands], *constants, **keywords))
        return values[self.result]


def record(evaluate, dtypes):
    """`evaluate(values)`, for inputs of these dtypes, as a Program.

    Inductor runs the inside of an operation some ten times: for sizes, for dependencies, for code. A program
    is a straight line, so it is run once, and what it needs is played.
    """
    tape = Tape(len(dtypes))
    result = evaluate([Value(tape, step, dtype) for step, dtype in enumerate(dtypes)]).step
    return Program(len(dtypes), *tape.needed(result))


def _call(name, dtype, *operands, constants=(), **keywords):
    """The value of one more operation on the tape of its operands."""
    return operands[0].tape.call(name, dtype, operands, constants, **keywords)


def _constant(c, like):
    dtype = like.dtype
    c = bool(c) if dtype is torch.bool else float(c) if dtype.is_floating_point else int(c)
    return like.tape.call("constant", dtype, constants=(c, dtype))


def _coerce(a, b):
    if not isinstance(a, Value):
        a = _constant(a, b)
    if not isinstance(b, Value):
        b = _constant(b, a)
    if a.dtype != b.dtype:
        raise TypeError(f"a program mixes {a.dtype} and {b.dtype}; convert with o.to first")
    return a, b


def _operator(name, result=None, reflected=False, logical=None):
    def method(self, other):
        a, b = _coerce(other, self) if reflected else _coerce(self, other)
        op = logical if logical and a.dtype is torch.bool else name
        return _call(op, result or a.dtype, a, b)

    return method


for _name, _op in {"add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv"}.items():
    setattr(Value, f"__{_name}__", _operator(_op))
    setattr(Value, f"__r{_name}__", _operator(_op, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _operator(_name, torch.bool))
for _name, _op in {"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"}.items():
    setattr(Value, f"__{_name}__", _operator(_op))
for _name in ("and", "or", "xor"):
    setattr(Value, f"__{_name}__", _operator(f"bitwise_{_name}", logical=f"logical_{_name}"))
Value.__hash__ = None


def _flip_sign(self):
    if not self.dtype.is_floating_point:
        return _call("neg", self.dtype, self)
    # By its bit, so that no compiler can merge the negation with a neighbour and lose a zero's sign.
    integer = torch.int32 if self.dtype is torch.float32 else torch.int64
    sign = _INT_MIN[integer]
    return InductorEngine.bits(InductorEngine.bits(self, integer) ^ sign, self.dtype)


def _invert(self):
    return _call("logical_not" if self.dtype is torch.bool else "bitwise_not", self.dtype, self)


Value.__neg__ = _flip_sign
Value.__invert__ = _invert


class InductorEngine:
    """Inside a fused kernel, C++ or Triton. One call of Inductor's an operation, so one rounding each."""

    @staticmethod
    def where(c, a, b):
        a, b = _coerce(a, b)
        return _call("where", a.dtype, c, a, b)

    @staticmethod
    def rint(x):
        return _call("round", x.dtype, x)

    @staticmethod
    def floor(x):
        return _call("floor", x.dtype, x)

    @staticmethod
    def trunc(x):
        return _call("trunc", x.dtype, x)

    @staticmethod
    def sqrt(x):
        return _call("sqrt", x.dtype, x)

    @staticmethod
    def isnan(x):
        return x != x

    @staticmethod
    def abs(x):
        return _call("abs", x.dtype, x)

    @staticmethod
    def scaled(x, factor):
        product = x * factor
        return lambda c: product + c

    @staticmethod
    def to(x, dtype):
        if dtype is x.dtype:
            return x
        return _call("to_dtype", dtype, x, constants=(dtype,), src_dtype=x.dtype)

    @staticmethod
    def bits(x, dtype):
        return _call("to_dtype_bitcast", dtype, x, constants=(dtype, x.dtype))

    @staticmethod
    def dtype(x):
        return x.dtype


class TritonEngine(InductorEngine):
    """On a GPU, where rounding to a narrow type is an instruction that Triton writes down itself, and so is
    an exact product together with a sum."""

    @staticmethod
    def scaled(x, factor):
        x, factor = _coerce(x, factor)
        return lambda c: _call("fma", x.dtype, x, factor, c)

    @staticmethod
    def narrowed(x, dtype):
        """Binary32 `x` rounded to `dtype`, again in a binary32 register."""
        stored = _call("to_dtype", dtype, x, constants=(dtype,), src_dtype=x.dtype, use_compute_types=False)
        return InductorEngine.to(stored, torch.float32)


def round_to(o, x, dtype):
    """Convert the value `x` to `dtype` with one rounding to nearest even (contract section 1).

    Float to float is RN, float to integer truncates and saturates with NaN to 0, float to bool is
    `x != 0`. A fused kernel keeps bfloat16 and float16 values in binary32 registers. C++ compilers
    may drop a conversion there and back, so there the narrow roundings are done in integers.
    """
    source = o.dtype(x)
    if dtype is source:
        return x
    if o is TorchEngine and (dtype.is_floating_point or not source.is_floating_point):
        return o.to(x, dtype)
    if source is torch.float64 and dtype in (torch.bfloat16, torch.float16):
        x, source = _odd_to_float32(o, x), torch.float32
    if o is TritonEngine and dtype in (torch.bfloat16, torch.float16) and source is torch.float32:
        return o.to(o.narrowed(x, dtype), dtype)
    if dtype is torch.bfloat16 and source is torch.float32:
        return o.to(_keep_bits(o, x, 16), dtype)
    if dtype is torch.float16 and source is torch.float32:
        return o.to(_round_float16(o, x), dtype)
    if source.is_floating_point and dtype is torch.bool:
        return x != 0.0
    if source.is_floating_point and not dtype.is_floating_point:
        return _saturate(o, x, dtype)
    if source not in FLOATS and source is not torch.bool and dtype in (torch.bfloat16, torch.float16):
        # The integer is rounded to binary32 and then to the storage type, as eager PyTorch does.
        return round_to(o, o.to(x, torch.float32), dtype)
    return o.to(x, dtype)


def _keep_bits(o, x, drop):
    """Round binary32 `x` to nearest even at bit `drop` of its representation."""
    b = o.bits(x, torch.int32)
    b = o.where(o.isnan(x), 0x7FC00000, b)
    half = (1 << (drop - 1)) - 1
    b = (b + (((b >> drop) & 1) + half)) & -(1 << drop)
    return o.bits(b, torch.float32)


def _round_float16(o, x):
    a = o.abs(x)
    normal = _keep_bits(o, a, 13)
    # Below 2^-14 the grid is 2^-24, which is binary32's own grid in [0.5, 1).
    y = o.where(a < 2.0**-14, (a + 0.5) - 0.5, normal)
    y = o.where(y > 65504.0, float("inf"), y)
    sign = o.bits(x, torch.int32) & -(2**31)
    return o.bits(o.bits(y, torch.int32) | sign, torch.float32)


def _odd_to_float32(o, x):
    """Binary64 to binary32 rounding to odd, so that a second rounding is the only one that counts."""
    y = o.to(x, torch.float32)
    back = o.to(y, torch.float64)
    b = o.bits(y, torch.int32)
    inexact = (back != x) & ~o.isnan(x)
    away = o.abs(back) > o.abs(x)
    towards = o.where(away, b - 1, b)
    return o.bits(o.where(inexact, towards | 1, b), torch.float32)


def _saturate(o, x, dtype):
    top, bottom = float(_INT_MAX[dtype] + 1), float(_INT_MIN[dtype])
    t = o.trunc(x)
    high, low = t >= top, t < bottom
    safe = o.where(high | low | o.isnan(x), 0.0, t)
    y = o.to(safe, dtype)
    y = o.where(high, _INT_MAX[dtype], y)
    return o.where(low, _INT_MIN[dtype], y)
