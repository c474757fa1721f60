"""Activations and elementary functions (contract sections 0 to 2), forward and backward.

Every formula is computed in binary32 and rounded once to the storage type. g is the incoming
gradient, x the input, y the result. Functions named here without a formula are programs of
`elementary.py`.
"""

import math

import torch
import torch.nn.functional as F

from . import prims as P
from .arithmetic import promoted, where
from .composed import compose, derivative
from .registry import Refusal, composite, overload, refuse, rule

aten = torch.ops.aten


def _float(*args):
    return promoted(*args, kind="INT_TO_FLOAT")


def _function(name, *overloads):
    """A rule that applies the program `name`; integers are converted first."""

    @rule(*overloads, section="2", integers="rule")
    def apply(*args):
        return P.apply(name, *args, dtype=_float(*args))

    return apply


for _name in """
    exp exp2 expm1 log log2 log10 log1p tanh sigmoid erf erfc erfinv sin cos tan sinc asin acos atan
    sinh cosh asinh acosh atanh rsqrt lgamma silu mish
""".split():
    _function(_name, f"aten.{_name}.default")


@rule("aten.reciprocal.default", section="1", integers="rule")
def reciprocal(x):
    """1 / x: a division, so float64 has it too."""
    return P.div(1.0, x, dtype=_float(x)) if x.dtype is torch.float64 else P.apply("reciprocal", x, dtype=_float(x))


for _name in ("atan2", "hypot", "logaddexp", "logaddexp2"):
    _function(_name, f"aten.{_name}.default")
_function("xlogy", "aten.xlogy.Tensor", "aten.xlogy.Scalar_Other", "aten.xlogy.Scalar_Self")
_function("xlog1py", "aten.special_xlog1py.default", "aten.special_xlog1py.other_scalar", "aten.special_xlog1py.self_scalar")

for _names, _what in {
    "digamma polygamma igamma igammac": "the derivatives and integrals of the gamma function",
    "i0 special_i0e special_i1 special_i1e special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
    "special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai": "Bessel functions",
    "special_erfcx special_log_ndtr special_ndtri special_zeta nextafter frexp": "this function",
    " ".join(
        f"special_{p}" for p in "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
        "hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t "
        "shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w".split()
    ): "orthogonal polynomials",
}.items():
    for _name in _names.split():
        _packet = getattr(aten, _name, None)
        for _overload in _packet.overloads() if _packet else ():
            if "out" not in _overload:
                refuse(f"aten.{_name}.{_overload}", code="CB109", reason=f"no program yet for {_what}")


def select(condition, a, b, dtype):
    """`a` where `condition` holds, else `b`, in binary32 and then rounded; both may be numbers."""
    wide = torch.float64 if torch.float64 in [getattr(v, "dtype", None) for v in (a, b)] else torch.float32
    a, b = (P.cast(v, wide) if isinstance(v, torch.Tensor) else P.scalar(v, condition, wide) for v in (a, b))
    return torch.ops.carbon.select(condition, a, b, dtype=dtype)


def _is(comparison, a, b):
    return P.apply(comparison, a, b, dtype=torch.bool)


# --- powers -------------------------------------------------------------------------------------------


def power(x, exponent, dtype=None):
    """x^exponent for a number `exponent`. Exponents that need no logarithm, all in one place:
    0: 1, 1: x, 2: x x, 3: (x x) x, -1: 1 / x, -2: 1 / (x x), 1/2: sqrt x, -1/2: rsqrt x."""
    if exponent == 0:
        return torch.full_like(x, 1.0, dtype=dtype or P.wide(x))
    if exponent == 1:
        return P.cast(P.add(x, 0.0) if not x.is_floating_point() else x, dtype or P.wide(x))
    if exponent == 2:
        return P.mul(x, x, dtype=dtype)
    if exponent == 3:
        return P.mul(P.square(x), x, dtype=dtype)
    if exponent == -1:
        return P.div(1.0, x, dtype=dtype)
    if exponent == -2:
        return P.div(1.0, P.square(x), dtype=dtype)
    if exponent == 0.5:
        return P.sqrt(x, dtype=dtype)
    if exponent == -0.5:
        return P.rsqrt(x, dtype=dtype)
    return P.pow(x, exponent, dtype=dtype)


@rule("aten.pow.Tensor_Scalar", section="2", integers="rule")
def pow_number(x, exponent):
    dtype = promoted(x, exponent)
    if not dtype.is_floating_point:
        return NotImplemented
    return power(x, exponent, dtype)


@rule("aten.pow.Scalar", section="2", integers="rule")
def number_pow(base, exponent):
    """base^exponent; 2^x is exp2."""
    dtype = promoted(base, exponent)
    if not dtype.is_floating_point:
        return NotImplemented
    return P.exp2(exponent, dtype=dtype) if base == 2 else P.pow(base, exponent, dtype=dtype)


@rule("aten.pow.Tensor_Tensor", section="2", integers="rule")
def pow_tensor(x, exponent):
    dtype = promoted(x, exponent)
    return P.pow(x, exponent, dtype=dtype) if dtype.is_floating_point else NotImplemented


@rule("aten.deg2rad.default", section="1", integers="rule")
def deg2rad(x):
    return P.mul(x, math.pi / 180.0, dtype=_float(x))


@rule("aten.rad2deg.default", section="1", integers="rule")
def rad2deg(x):
    return P.mul(x, 180.0 / math.pi, dtype=_float(x))


@rule("aten.ldexp.Tensor", section="2", integers="rule")
def ldexp(x, exponent):
    """x times 2^exponent, which is exact for whole exponents."""
    return P.mul(x, P.exp2(exponent), dtype=_float(x, exponent))


@rule("aten.angle.default", section="1", integers="rule")
def angle(x):
    """pi below zero, else 0; NaN stays."""
    if x.is_complex():
        raise Refusal("CB204", "the angle of complex numbers has no rule")
    if not x.is_floating_point():
        x = P.f32(x)
    y = select(_is("lt", x, 0.0), math.pi, 0.0, P.wide(x))
    return select(_is("ne", x, x), x, y, x.dtype)


@rule("aten.mvlgamma.default", section="2", integers="rule")
def mvlgamma(x, p):
    """p (p - 1) / 4 log pi + lgamma(x) + lgamma(x - 1/2) + ..., added in this order."""
    terms = [P.lgamma(P.sub(x, 0.5 * i)) for i in range(p)]
    return P.cast(P.add(P.chain(P.add, *terms), p * (p - 1) / 4.0 * math.log(math.pi)), _float(x))


@rule("aten.special_entr.default", section="2", integers="rule")
def entr(x):
    """-x log x; 0 at 0, -inf below."""
    y = select(_is("eq", x, 0.0), 0.0, P.mul(P.neg(x), P.log(x)), P.wide(x))
    return select(_is("lt", x, 0.0), -math.inf, y, _float(x))


# --- smooth activations -------------------------------------------------------------------------------


@rule("aten.gelu.default", section="2")
def gelu(x, *, approximate="none"):
    return P.apply("gelu_tanh" if approximate == "tanh" else "gelu", x, dtype=x.dtype)


@rule("aten.gelu_backward.default", section="2")
def gelu_backward(g, x, *, approximate="none"):
    """g gelu'(x)."""
    return P.mul(g, P.apply("gelu_tanh_grad" if approximate == "tanh" else "gelu_grad", x), dtype=x.dtype)


@rule("aten.silu_backward.default", section="2")
def silu_backward(g, x):
    return P.mul(g, P.silu_grad(x), dtype=x.dtype)


@rule("aten.mish_backward.default", section="2")
def mish_backward(g, x):
    return P.mul(g, P.mish_grad(x), dtype=x.dtype)


@rule("aten.softplus.default", section="2")
def softplus(x, beta=1, threshold=20):
    return P.softplus(x, beta, threshold, dtype=x.dtype)


@rule("aten.softplus_backward.default", section="2")
def softplus_backward(g, x, beta, threshold):
    return P.mul(g, P.softplus_grad(x, beta, threshold), dtype=x.dtype)


@rule("aten.sigmoid_backward.default", section="2")
def sigmoid_backward(g, y):
    """(g (1 - y)) y."""
    return P.mul(P.mul(g, P.sub(1.0, y)), y, dtype=y.dtype)


@rule("aten.tanh_backward.default", section="2")
def tanh_backward(g, y):
    """g (1 - y y)."""
    return P.mul(g, P.sub(1.0, P.square(y)), dtype=y.dtype)


@compose("logsigmoid(Tensor x) -> Tensor", "2")
def logsigmoid(x):
    return P.log_sigmoid(x, dtype=x.dtype)


@compose("logsigmoid_backward(Tensor g, Tensor x) -> Tensor", "2")
def logsigmoid_backward(g, x):
    """g sigmoid(-x)."""
    return P.mul(g, P.sigmoid(P.neg(x)), dtype=x.dtype)


@derivative(logsigmoid, lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
def _logsigmoid_backward(ctx, g):
    return torch.ops.carbon.logsigmoid_backward(g, *ctx.saved_tensors)


# PyTorch's own operator has a second result, which is empty on CUDA only.
@composite(F.logsigmoid, section="2")
def log_sigmoid(x):
    return torch.ops.carbon.logsigmoid(x)


@rule("aten.log_sigmoid_forward.default", section="2")
def log_sigmoid_forward(x):
    return logsigmoid(x), x.new_zeros(0)


@rule("aten.log_sigmoid_backward.default", section="2")
def log_sigmoid_backward(g, x, buffer):
    return logsigmoid_backward(g, x)


@rule("aten.logit.default", section="2", integers="rule")
def logit(x, eps=None):
    """log(x / (1 - x)), x clamped to [eps, 1 - eps] first."""
    dtype = _float(x)
    return P.logit(x if eps is None else P.clamp(x, eps, 1.0 - eps), dtype=dtype)


@rule("aten.logit_backward.default", section="2")
def logit_backward(g, x, eps=None):
    """g / (x (1 - x)); outside [eps, 1 - eps] it is 0, or NaN without an eps."""
    low, high = (0.0, 1.0) if eps is None else (eps, 1.0 - eps)
    outside = torch.logical_or(_is("lt", x, low), _is("gt", x, high))
    dx = P.div(g, P.mul(x, P.sub(1.0, x)))
    return select(outside, math.nan if eps is None else 0.0, dx, x.dtype)


@rule("aten.glu.default", section="2")
def glu(x, dim=-1):
    """a sigmoid(b) for the halves a, b of x along `dim`."""
    a, b = x.chunk(2, dim)
    return P.mul(a, P.sigmoid(b), dtype=x.dtype)


@rule("aten.glu_backward.default", section="2")
def glu_backward(g, x, dim):
    """da = g s, db = (((1 - s) s) g) a, with s = sigmoid(b)."""
    a, b = x.chunk(2, dim)
    s = P.sigmoid(b)
    db = P.mul(P.mul(P.mul(P.sub(1.0, s), s), g), a, dtype=x.dtype)
    return aten.cat.default([P.mul(g, s, dtype=x.dtype), db], dim)


# --- activations in pieces ----------------------------------------------------------------------------


@rule("aten.elu.default", section="2")
def elu(x, alpha=1, scale=1, input_scale=1):
    """x scale above 0, else expm1(x input_scale) (alpha scale)."""
    below = P.mul(P.expm1(P.mul(x, input_scale)), alpha * scale)
    return select(_is("gt", x, 0.0), P.mul(x, scale), below, x.dtype)


@rule("aten.celu.default", section="2")
def celu(x, alpha=1.0):
    return elu(x, alpha, 1, 1.0 / alpha)


@rule("aten.elu_backward.default", section="2")
def elu_backward(g, alpha, scale, input_scale, is_result, x):
    """g scale above 0; else (g input_scale) (y + alpha scale), or (g (input_scale alpha scale)) exp(x input_scale)."""
    if is_result:
        below = P.mul(P.mul(g, input_scale), P.add(x, alpha * scale))
    else:
        below = P.mul(P.mul(g, input_scale * alpha * scale), P.exp(P.mul(x, input_scale)))
    return select(_is("gt", x, 0.0), P.mul(g, scale), below, x.dtype)


@rule("aten.leaky_relu.default", section="1")
def leaky_relu(x, negative_slope=0.01):
    return select(_is("gt", x, 0.0), x, P.mul(x, negative_slope), x.dtype)


@rule("aten.leaky_relu_backward.default", section="1")
def leaky_relu_backward(g, x, negative_slope, self_is_result):
    return select(_is("gt", x, 0.0), g, P.mul(g, negative_slope), x.dtype)


@rule("aten._prelu_kernel.default", section="1")
def prelu(x, weight):
    return select(_is("gt", x, 0.0), x, P.mul(weight, x), promoted(x, weight))


@rule("aten._prelu_kernel_backward.default", section="1")
def prelu_backward(g, x, weight):
    positive = _is("gt", x, 0.0)
    return select(positive, g, P.mul(weight, g), x.dtype), select(positive, 0.0, P.mul(x, g), weight.dtype)


@rule("aten.hardswish.default", section="1")
def hardswish(x):
    """(x clamp(x + 3, 0, 6)) / 6."""
    return P.div(P.mul(x, P.clamp(P.add(x, 3.0), 0.0, 6.0)), 6.0, dtype=x.dtype)


@rule("aten.hardswish_backward.default", section="1")
def hardswish_backward(g, x):
    """0 up to -3, g from 3 on, g (x / 3 + 0.5) between."""
    between = P.mul(g, P.add(P.div(x, 3.0), 0.5))
    y = select(_is("lt", x, 3.0), between, g, P.wide(x))
    return select(_is("le", x, -3.0), 0.0, y, x.dtype)


@rule("aten.hardsigmoid.default", section="1")
def hardsigmoid(x):
    """clamp(x + 3, 0, 6) / 6."""
    return P.div(P.clamp(P.add(x, 3.0), 0.0, 6.0), 6.0, dtype=x.dtype)


def _inside(x, low, high, g, dtype):
    """g strictly between `low` and `high`, else 0."""
    return select(torch.logical_and(_is("gt", x, low), _is("lt", x, high)), g, 0.0, dtype)


@rule("aten.hardsigmoid_backward.default", section="1")
def hardsigmoid_backward(g, x):
    return _inside(x, -3.0, 3.0, P.div(g, 6.0), x.dtype)


@rule("aten.hardtanh_backward.default", section="1")
def hardtanh_backward(g, x, low, high):
    return _inside(x, low, high, g, x.dtype)


@rule("aten.threshold.default", section="1", integers="rule")
def threshold(x, limit, value):
    keeps = torch.logical_not(_is("le", x, limit) if x.is_floating_point() else aten.le.Scalar(x, limit))
    return where(keeps, x, P.scalar(value, x, x.dtype))


@rule("aten.threshold_backward.default", section="1")
def threshold_backward(g, x, limit):
    return select(_is("le", x, limit), 0.0, g, g.dtype)


@rule("aten.softshrink_backward.default", "aten.hardshrink_backward.default", section="1")
def shrink_backward(g, x, limit):
    """0 for |x| <= limit, else g."""
    return select(_is("le", P.abs(x), limit), 0.0, g, x.dtype)


# PyTorch unrolls these under autograd, so their rule without it is the same decomposition.
for _name in ("aten.softshrink.default", "aten.hardshrink.default"):
    rule(_name, section="1")(torch._decomp.decomposition_table[overload(_name)])


@composite(torch.rrelu, section="1")
def rrelu(x, lower=0.125, upper=1 / 3, training=False, generator=None):
    """Leaky relu with the middle slope; random slopes have no rule."""
    if training:
        raise Refusal("CB402", "the random slopes of rrelu have no rule; evaluate, or use leaky_relu")
    return F.leaky_relu(x, (lower + upper) / 2)
