"""ATen's arithmetic, comparisons, selects and conversions (contract section 1)."""

import math

import torch
from torch._inductor import inductor_prims  # noqa: F401  (defines prims.fma)
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from . import prims as P
from .registry import rule


def promoted(*args, kind="DEFAULT"):
    """The result type of an elementwise operator by PyTorch's promotion rules."""
    return elementwise_dtypes(*args, type_promotion_kind=getattr(KIND, kind))[1]


def _expand(names, program, kind="DEFAULT", integers="keep"):
    @rule(*names, section="1", integers=integers)
    def apply(*args):
        return P.apply(program, *args, dtype=promoted(*args, kind=kind))

    return apply


def _names(packet, *suffixes):
    return [f"aten.{packet}.{s}" for s in suffixes]


for _packet in ("mul", "maximum", "minimum", "fmax", "fmin"):
    _expand(_names(_packet, "default", "Tensor", "Scalar"), _packet)
for _packet in ("neg", "abs", "floor", "ceil", "trunc", "sign"):
    _expand(_names(_packet, "default"), _packet)
_expand(["aten.sgn.default"], "sign")
_expand(["aten.frac.default"], "frac")
_expand(["aten.round.default"], "round")
_expand(["aten.relu.default"], "relu")
_expand(_names("copysign", "Tensor", "Scalar"), "copysign", "INT_TO_FLOAT", "rule")
_expand(["aten.heaviside.default"], "heaviside")
_expand(["aten.sqrt.default"], "sqrt", "INT_TO_FLOAT", "rule")
_expand(_names("div", "Tensor", "Scalar"), "div", "INT_TO_FLOAT", "rule")
_expand(["aten.true_divide.Tensor"], "div", "INT_TO_FLOAT", "rule")
for _packet in ("fmod", "remainder"):
    _expand(_names(_packet, "Tensor", "Scalar", "Scalar_Tensor"), _packet)
for _packet in ("lt", "le", "gt", "ge", "eq", "ne"):
    _expand(_names(_packet, "Tensor", "Scalar"), _packet, "ALWAYS_BOOL")


@rule("aten.add.Tensor", "aten.add.Scalar", section="1")
def add(a, b, alpha=1):
    """a + alpha b; alpha b is rounded first, never fused."""
    return P.add(a, b if alpha == 1 else P.mul(b, alpha), dtype=promoted(a, b))


@rule("aten.sub.Tensor", "aten.sub.Scalar", section="1")
def sub(a, b, alpha=1):
    """a - alpha b; alpha b is rounded first, never fused."""
    return P.sub(a, b if alpha == 1 else P.mul(b, alpha), dtype=promoted(a, b))


@rule("aten.rsub.Tensor", "aten.rsub.Scalar", section="1")
def rsub(a, b, alpha=1):
    """b - alpha a."""
    return P.sub(b, a if alpha == 1 else P.mul(a, alpha), dtype=promoted(a, b))


@rule("aten.div.Tensor_mode", "aten.div.Scalar_mode", section="1", integers="rule")
def div_mode(a, b, *, rounding_mode=None):
    """Division, then floor or trunc; without a mode, plain division. Integers stay integers."""
    if rounding_mode is None:
        return P.div(a, b, dtype=promoted(a, b, kind="INT_TO_FLOAT"))
    dtype = promoted(a, b)
    if not dtype.is_floating_point:
        return NotImplemented
    return P.apply("floor_div" if rounding_mode == "floor" else "trunc_div", a, b, dtype=dtype)


@rule("aten.floor_divide.default", "aten.floor_divide.Scalar", section="1")
def floor_divide(a, b):
    return P.floor_div(a, b, dtype=promoted(a, b))


@rule("aten.addcmul.default", section="1")
def addcmul(x, a, b, *, value=1):
    """x + value (a b), one rounding an operation: what Dynamo makes of `addcmul_`."""
    product = P.mul(a, b)
    return P.add(x, product if value == 1 else P.mul(product, value), dtype=promoted(x, a, b))


@rule("aten.addcdiv.default", section="1")
def addcdiv(x, a, b, *, value=1):
    """x + value (a / b), one rounding an operation: what Dynamo makes of `addcdiv_`."""
    quotient = P.div(a, b)
    return P.add(x, quotient if value == 1 else P.mul(quotient, value), dtype=promoted(x, a, b))


@rule("prims.fma.default", section="1")
def fma(a, b, c):
    """a b, then plus c. Newer PyTorch versions write it where older ones write two operations: the last
    step of `addcmul_`, `addcdiv_`, and `add_` with a tensor for alpha. Rounded like those two."""
    return P.add(P.mul(a, b, dtype=promoted(a, b)), c, dtype=promoted(a, b, c))


@rule("aten.lerp.Scalar", "aten.lerp.Tensor", section="1")
def lerp(start, end, weight):
    """start + weight (end - start) for every weight: one formula, no branch on the weight."""
    return P.add(start, P.mul(weight, P.sub(end, start)), dtype=promoted(start, end))


@rule("aten.clamp.default", "aten.clamp.Tensor", section="1")
def clamp(x, low=None, high=None):
    dtype = promoted(*(a for a in (x, low, high) if a is not None))
    if low is None:
        return P.clamp_max(x, high, dtype=dtype)
    if high is None:
        return P.clamp_min(x, low, dtype=dtype)
    return P.clamp(x, low, high, dtype=dtype)


@rule("aten.clamp_min.default", "aten.clamp_min.Tensor", section="1")
def clamp_min(x, low):
    return P.clamp_min(x, low, dtype=promoted(x, low))


@rule("aten.clamp_max.default", "aten.clamp_max.Tensor", section="1")
def clamp_max(x, high):
    return P.clamp_max(x, high, dtype=promoted(x, high))


@rule("aten.hardtanh.default", section="1")
def hardtanh(x, low=-1, high=1):
    return P.clamp(x, low, high, dtype=x.dtype)


@rule("aten.round.decimals", section="1")
def round_decimals(x, *, decimals):
    """rint(x 10^d) / 10^d, or rint(x / 10^-d) 10^-d for negative d."""
    scale = 10.0 ** abs(decimals)
    if decimals >= 0:
        return P.div(P.round(P.mul(x, scale)), scale, dtype=x.dtype)
    return P.mul(P.round(P.div(x, scale)), scale, dtype=x.dtype)


@rule("aten.nan_to_num.default", section="1")
def nan_to_num(x, nan=None, posinf=None, neginf=None):
    info = torch.finfo(x.dtype)
    y = P.f32(x)
    y = where(P.ne(y, y, dtype=torch.bool), 0.0 if nan is None else nan, y)
    y = where(P.eq(y, float("inf"), dtype=torch.bool), info.max if posinf is None else posinf, y)
    y = where(P.eq(y, float("-inf"), dtype=torch.bool), info.min if neginf is None else neginf, y)
    return P.cast(y, x.dtype)


@rule("aten.isinf.default", section="1")
def isinf(x):
    return P.eq(P.abs(x), float("inf"), dtype=torch.bool)


@rule("aten.isnan.default", section="1")
def isnan(x):
    return P.ne(x, x, dtype=torch.bool)


@rule("aten.isposinf.default", section="1")
def isposinf(x):
    return P.eq(x, float("inf"), dtype=torch.bool)


@rule("aten.isneginf.default", section="1")
def isneginf(x):
    return P.eq(x, float("-inf"), dtype=torch.bool)


@rule("aten.signbit.default", section="1")
def signbit(x):
    return P.lt(P.copysign(1.0, P.f32(x)), 0.0, dtype=torch.bool)


@rule("aten.where.self", "aten.where.Scalar", "aten.where.ScalarSelf", "aten.where.ScalarOther", section="1")
def where(condition, a, b):
    """A select; operands are brought to their common type first, each with one rounding."""
    dtype = promoted(a, b)
    device = condition
    a, b = (P.cast(v, dtype) if isinstance(v, torch.Tensor) else P.scalar(v, device, dtype) for v in (a, b))
    return torch.ops.carbon.select(condition, a, b, dtype=dtype)


@rule("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", section="1")
def masked_fill(x, mask, value):
    value = P.cast(value, x.dtype) if isinstance(value, torch.Tensor) else P.scalar(value, x, x.dtype)
    return torch.ops.carbon.select(mask, value, x, dtype=x.dtype)


@rule("aten.full.default", section="1", integers="rule", moves=True)
def full(size, value, *, dtype=None, **options):
    if dtype is None:
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, (int, torch.SymInt)) else torch.get_default_dtype()
        return torch.ops.aten.full.default(size, value, dtype=dtype, **options)
    rounded = P.rounded(value, dtype)
    return NotImplemented if rounded == value or value != value else torch.ops.aten.full.default(size, rounded, dtype=dtype, **options)


@rule("aten.full_like.default", section="1", integers="rule", moves=True)
def full_like(x, value, *, dtype=None, **options):
    rounded = P.rounded(value, dtype or x.dtype)
    return NotImplemented if rounded == value or value != value else torch.ops.aten.full_like.default(x, rounded, dtype=dtype, **options)


@rule("aten.new_full.default", section="1", integers="rule", moves=True)
def new_full(x, size, value, *, dtype=None, **options):
    rounded = P.rounded(value, dtype or x.dtype)
    return NotImplemented if rounded == value or value != value else torch.ops.aten.new_full.default(x, size, rounded, dtype=dtype, **options)


@rule("aten.scalar_tensor.default", section="1", integers="rule", moves=True)
def scalar_tensor(value, *, dtype=None, **options):
    rounded = P.rounded(value, dtype)
    return NotImplemented if rounded == value or value != value else torch.ops.aten.scalar_tensor.default(rounded, dtype=dtype, **options)


@rule("aten.zero.default", section="1", integers="rule", moves=True)
def zero(x):
    """What `x.zero_()` leaves, whatever x held."""
    return torch.ops.aten.zeros_like.default(x)


@rule("aten._efficientzerotensor.default", section="1", integers="rule", moves=True)
def efficientzerotensor(size, *, dtype=None, layout=None, device=None, pin_memory=None):
    """The gradient of `sign`: ordinary zeros."""
    return torch.ops.aten.zeros.default(size, dtype=dtype, device=device)


@rule("aten.fill.Scalar", section="1", moves=True)
def fill(x, value):
    rounded = P.rounded(value, x.dtype)
    return NotImplemented if rounded == value or value != value else torch.ops.aten.fill.Scalar(x, rounded)


@rule("aten.arange.default", section="1", integers="rule")
def arange(end, *, dtype=None, **options):
    return arange_step(0, end, 1, dtype=dtype, **options)


@rule("aten.arange.start", section="1", integers="rule")
def arange_start(start, end, *, dtype=None, **options):
    return arange_step(start, end, 1, dtype=dtype, **options)


@rule("aten.arange.start_step", section="1", integers="rule", moves=True)
def arange_step(start, end, step=1, *, dtype=None, device=None, layout=None, pin_memory=None):
    """start + step i. Where a number is not an integer, in binary64 and rounded once to `dtype`."""
    whole = all(isinstance(v, (int, torch.SymInt)) for v in (start, end, step))
    dtype = dtype or (torch.int64 if whole else torch.get_default_dtype())
    if whole or not dtype.is_floating_point:
        start, end, step = (v if isinstance(v, torch.SymInt) else int(v) for v in (start, end, step))
        n = end - start if step == 1 else -((start - end) // step)
        return _whole(_count(n, device, start, step), dtype)
    index = P.cast(_count(math.ceil((end - start) / step), device), torch.float64)
    return P.cast(P.add(P.mul(index, step), start), dtype)


def _count(n, device, start=0, step=1):
    device = torch.device("cpu") if device is None else torch.device(device)
    return torch.ops.prims.iota.default(n, start=start, step=step, dtype=torch.int64, device=device, requires_grad=False)


def _whole(index, dtype):
    return P.cast(index, dtype) if dtype.is_floating_point else torch.ops.prims.convert_element_type.default(index, dtype)


@rule("aten.linspace.default", section="1", integers="rule")
def linspace(start, end, steps, *, dtype=None, device=None, layout=None, pin_memory=None):
    """From both ends, in binary64: start + step i in the first half, end - step (steps - 1 - i) in the second."""
    dtype = dtype or torch.get_default_dtype()
    i = P.cast(_count(steps, device), torch.float64)
    step = (end - start) / (steps - 1) if steps > 1 else 0.0
    low, high = P.add(P.mul(i, step), start), P.sub(end, P.mul(P.sub(steps - 1, i), step))
    return P.cast(torch.ops.carbon.select(P.lt(i, steps // 2, dtype=torch.bool), low, high, dtype=torch.float64), dtype)


@rule("aten._to_copy.default", section="1", integers="rule", moves=True)
def to_copy(x, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    """A conversion: one rounding (section 1). Copies between devices keep their bits."""
    if dtype is None or dtype is x.dtype or not (dtype.is_floating_point or x.is_floating_point()):
        return NotImplemented
    y = P.cast(x, dtype)
    if device is None and memory_format in (None, torch.preserve_format):
        return y
    return torch.ops.aten._to_copy.default(y, device=device, non_blocking=non_blocking, memory_format=memory_format)


@rule("prims.convert_element_type.default", section="1", integers="rule", moves=True)
def convert_element_type(x, dtype):
    if dtype is x.dtype or not (dtype.is_floating_point or x.is_floating_point()):
        return NotImplemented
    return P.cast(x, dtype)


@rule("aten.copy.default", section="1", moves=True)
def copy(destination, source, non_blocking=False):
    if destination.dtype is source.dtype or not (destination.is_floating_point() or source.is_floating_point()):
        return NotImplemented
    return torch.ops.aten.copy.default(destination, P.cast(source, destination.dtype))


@rule("aten.copy_.default", section="1", moves=True)
def copy_(destination, source, non_blocking=False):
    """The write of a mutated input at the end of a graph."""
    if destination.dtype is source.dtype or not (destination.is_floating_point() or source.is_floating_point()):
        return NotImplemented
    return torch.ops.aten.copy_.default(destination, P.cast(source, destination.dtype))
