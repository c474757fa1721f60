"""Elementary functions as programs (contract section 2).

Each `def f(o, x)` is a straight line of IEEE-754 operations, integer bit operations and selects over
the engine `o` of `engines.py`; its inputs are binary32 values and so is its result. The operations
and their order *are* the definition: reassociating one changes published bits.

Two tiers. What runs on every activation (the exponentials, logarithms, erf and rsqrt, the sigmoid and
gelu families and their derivatives) stays in binary32 and within 2 ulp: the bounds in
`tests/test_elementary.py` were measured over all inputs. The rest computes in binary64 and rounds
once, so its error is a hair above half an ulp and its special values fall out of the wider range.

Polynomials are minimax fits (Remez, relative error unless noted) with coefficients given lowest
degree first. Binary32 coefficients were rounded one after the other, lowest degree first, with the
rest refitted each time. "2^-k" in a comment is the error of the polynomial alone.

Three habits keep engines in step. Negation and absolute value never meet an operation that could
absorb a zero's sign. No program divides by a constant, which eager CUDA turns into a multiplication.
Integers are taken from floats by adding 1.5 * 2^(p-1), which cannot be out of range as a conversion can.
"""

import math

import torch

_INF = float("inf")
_NAN = float("nan")
_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_SIGN = -(2**31)


def _horner(x, coefficients):
    *rest, p = coefficients
    for c in reversed(rest):
        p = x * p + c
    return p


def _with_sign(o, magnitude, x):
    """`magnitude` (not negative) with the sign bit of `x`, both binary32."""
    return o.bits(o.bits(magnitude, torch.int32) | (o.bits(x, torch.int32) & _SIGN), torch.float32)


def _negative(o, x):
    """Whether the sign bit of `x` is set, unlike `x < 0` also for -0."""
    return o.bits(x, torch.int32) < 0


def _double(o, x):
    return o.to(x, torch.float64)


def _single(o, x):
    return o.to(x, torch.float32)


# --- exponentials in binary32 ----------------------------------------------------------------------

# 1.5 * 2^23 + 254: adding it leaves n + 254 in the low bits, and 254 is twice the exponent bias.
_SHIFT = 12583166.0
_SHIFT_BITS = 0x4B400000
# ln 2 in two parts. The high one has 9 bits, so its product with an integer below 2^15 is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = -0.00021219444
# (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, 2^-28.2 relative to e^r.
_EXP = (0.49999994, 0.16666517, 0.041668102, 0.00836919, 0.0013838833)


def _reduce(o, x):
    """t whose low bits hold n + 254, and r = x - n ln 2 with |r| <= ln(2) / 2. n times the high part of ln 2 is exact."""
    t = x * _LOG2E + _SHIFT
    n = t - _SHIFT
    return t, o.scaled(n, -_LN2_HIGH)(x) - n * _LN2_LOW


def _expm1_poly(r):
    return r * r * _horner(r, _EXP) + r


def _power_of_two(o, t, bias=127):
    """2^(n + bias - 127) of `_reduce`'s t, where that is a normal number."""
    return o.bits((o.bits(t, torch.int32) - (_SHIFT_BITS + 254 - bias)) << 23, torch.float32)


def _scale(o, y, t):
    """y 2^n in two steps: the first is exact, so a subnormal result is rounded once."""
    n = o.bits(t, torch.int32) - _SHIFT_BITS
    half = n >> 1
    return y * o.bits(half << 23, torch.float32) * o.bits((n - half) << 23, torch.float32)


def _exp_below(o, x):
    """exp for x <= 89. -104 already rounds to zero."""
    t, r = _reduce(o, o.where(x < -104.0, -104.0, x))
    return _scale(o, _expm1_poly(r) + 1.0, t)


def _exp_of_minus_abs(o, x):
    return _exp_below(o, o.where(x > 0.0, x * -1.0, x))


def exp(o, x):
    """e^x."""
    return _exp_below(o, o.where(x > 89.0, 89.0, x))


def exp_term(o, x):
    """`exp` of x <= 0 down to -87, and less than 2^-38 below, where it is no part of a sum of numbers up to 1."""
    t, r = _reduce(o, o.where(x < -87.0, -87.0, x))
    return (_expm1_poly(r) + 1.0) * _power_of_two(o, t)


# (2^r - 1) / r on |r| <= 1/2, 2^-27.5 relative to 2^r.
_EXP2 = (0.69314724, 0.24022655, 0.055502728, 0.009617065, 0.0013417645, 0.00015823911)


def _exp2_below(o, x):
    """exp2 for x <= 129. -151 already rounds to zero."""
    x = o.where(x < -151.0, -151.0, x)
    t = x + _SHIFT
    r = x - (t - _SHIFT)
    return _scale(o, r * _horner(r, _EXP2) + 1.0, t)


def exp2(o, x):
    """2^x."""
    return _exp2_below(o, o.where(x > 129.0, 129.0, x))


def expm1(o, x):
    """e^x - 1. Half of it is formed, so that the last doubling may overflow but no step before."""
    c = o.where(x > 89.0, 89.0, x)
    c = o.where(c < -30.0, -30.0, c)
    t, r = _reduce(o, c)
    half = _power_of_two(o, t, bias=126)
    y = (half * _expm1_poly(r) + (half - 0.5)) * 2.0
    return o.where(o.abs(x) < 2.0**-25, x, y)


# --- the sigmoid family ----------------------------------------------------------------------------


def sigmoid(o, x):
    """1 / (1 + e^-x). With z = e^-|x|, w = z / (1 + z): w = z - z w below zero, and 1 - w above."""
    z = _exp_of_minus_abs(o, x)
    w = z / (z + 1.0)
    top = o.where(x < 0.0, z, 1.0)
    return top - top * w


def silu(o, x):
    """x sigmoid(x)."""
    z = _exp_of_minus_abs(o, x)
    return o.where(x < 0.0, x * z, x) / (z + 1.0)


def silu_grad(o, x):
    """d silu / dx = s (1 + x (1 - s)), with 1 - s formed without cancellation."""
    z = _exp_of_minus_abs(o, x)
    r = 1.0 / (z + 1.0)
    s = o.where(x < 0.0, z, 1.0) * r
    return s + s * (x * (o.where(x < 0.0, 1.0, z) * r))


def tanh(o, x):
    """tanh x = u / (u + 2), u = e^2|x| - 1. Small u: u/2 - (u/2) tanh, which loses less."""
    a = o.abs(x)
    a = o.where(a > 10.0, 10.0, a)
    t, r = _reduce(o, a + a)
    s = _power_of_two(o, t)
    u = s * _expm1_poly(r) + (s - 1.0)
    y = u / (u + 2.0)
    half = u * 0.5
    return _with_sign(o, o.where(u < 1.0, half - half * y, y), x)


# (log(1 + v) - v) / v^2 on [-1/4, 1/2], 2^-27.5 relative to log(1 + z) of `_log1p_terms`.
_LOG1P_UNIT = (
    -0.5000001, 0.3333359, -0.2500001, 0.19985168, -0.16631363,
    0.14512594, -0.13387612, 0.108356856, -0.047143467,
)  # fmt: skip


def _log1p_terms(o, z):
    """c, v and w of about v^2 with log(1 + z) = c + (v + w), for z in [0, 1].

    Above 1/2 that is log 2 + log(1 + v) with v = (z - 1) / 2, which is exact and small.
    """
    upper = z > 0.5
    v = o.where(upper, z * 0.5 - 0.5, z)
    return upper, o.where(upper, _LN2, z * 0.0), v, v * v * _horner(v, _LOG1P_UNIT)


def softplus(o, x, beta, threshold):
    """log(1 + e^(beta x)) / beta, and x itself where beta x > threshold."""
    y = x * beta
    _, c, v, w = _log1p_terms(o, _exp_of_minus_abs(o, y))
    return o.where(y > threshold, x, (o.where(y > 0.0, y, 0.0) + (c + (v + w))) / beta)


def softplus_grad(o, x, beta, threshold):
    """d softplus / dx: sigmoid(beta x), and 1 where beta x > threshold."""
    y = x * beta
    return o.where(y > threshold, 1.0, sigmoid(o, y))


def log_sigmoid(o, x):
    """log sigmoid(x) = min(x, 0) - log(1 + e^-|x|). What e^-|x| rounds away counts while it is small."""
    a = o.where(x > 0.0, x * -1.0, x)
    t, r = _reduce(o, o.where(a < -104.0, -104.0, a))
    q = _expm1_poly(r)
    p = q + 1.0
    upper, c, v, w = _log1p_terms(o, _scale(o, p, t))
    w = o.where(upper, w, w + _scale(o, q - (p - 1.0), t))
    return o.where(x > 0.0, 0.0, x) - (c + (v + w))


def _mish_terms(o, x):
    """z = e^-|x|, n, b: tanh(softplus(x)) = n / (n + 2 b).

    Below zero n = e^2 + 2 e and b = 1; above zero the same over e^2.
    """
    z = _exp_of_minus_abs(o, x)
    square = z * z
    below = x < 0.0
    return z, o.where(below, square, 1.0) + (z + z), o.where(below, 1.0, square)


def mish(o, x):
    """x t with t = tanh(softplus(x)), as x t, x/2 + x (t - 1/2) or x + x (t - 1), whichever rounds least."""
    _, n, b = _mish_terms(o, x)
    low, high = x < -0.875, x > 0.5
    top = o.where(low, n, o.where(high, b * -2.0, n * 0.5 - b))
    start = o.where(low, x * 0.0, o.where(high, x, x * 0.5))
    return o.where(x > 20.0, x, start + (x * top) / (n + (b + b)))


def mish_grad(o, x):
    """d mish / dx = n / d + 4 x e (1 + e) / (e^2 + 2 e + 2)^2, in the terms of `_mish_terms`."""
    z, n, b = _mish_terms(o, x)
    r = 1.0 / (n + (b + b))
    w = z * (z + 1.0) * o.where(x < 0.0, 1.0, z)
    return n * r + x * (w * 4.0 * (r * r))


# --- erf and gelu in binary32 ----------------------------------------------------------------------

# Near zero erf is x plus x times a polynomial in x^2. Beyond, erfc^(1/8) is so smooth that degree 6
# reaches 1 - T^8 to the last place. The points where T is expanded make its constant term nearly
# exact in binary32, and near them the argument of the polynomial is small, so it hardly rounds.

# erf(x) / x - 1 in x^2 on [0, 1.09375], 2^-27.8; T on [1.09375, 4], 2^-26.7 relative to erf.
_ERF_SMALL = (0.12837917, -0.3761261, 0.11283371, -0.026843948, 0.005168681, -0.00078334677, 7.264619e-05)
_ERF_CENTRE = 1.154541015625
_ERF_LARGE = (0.7522288, -0.27290776, -0.03145161, 0.019987585, 0.0017102949, -0.0014661989, 0.00015889047)


def erf(o, x):
    """2 / sqrt(pi) times the integral of e^(-t^2) over [0, x]."""
    a = o.abs(x)
    small = x * _horner(x * x, _ERF_SMALL) + x
    t = _horner(a - _ERF_CENTRE, _ERF_LARGE)
    t = t * t
    t = t * t
    large = o.where(a > 3.925, 1.0, 1.0 - t * t)
    return o.where(a < 1.09375, small, _with_sign(o, large, x))


# (2 Phi(x) - 1) / x in x^2 on [0, 1.4], absolute 2^-28.7; T = (2 Phi(-a))^(1/8) on [1.4, 5.7], 2^-25.8.
_PHI_SMALL = (0.7978846, -0.13298108, 0.019948281, -0.0023762991, 0.00023165303, -1.8673873e-05, 1.0219778e-06)
_PHI_CENTRE = 1.498291015625
_PHI_LARGE = (0.7778779, -0.18836533, -0.018531619, 0.0068062507, 0.00058969465, -0.000267328, 1.8582014e-05)


def _twice_phi_of_minus(o, a):
    """2 Phi(-a) for a >= 1.4, for any a > 0 a number that is not NaN or an infinity."""
    t = _horner(a - _PHI_CENTRE, _PHI_LARGE)
    t = t * t
    t = t * t
    return t * t


def gelu(o, x):
    """x Phi(x) = x (1 + erf(x / sqrt 2)) / 2; below -5.625 the result is -0."""
    a = o.abs(x)
    small = x * _horner(x * x, _PHI_SMALL) + 1.0
    tail = o.where(a > 5.625, 0.0, _twice_phi_of_minus(o, a))
    large = o.where(x < 0.0, tail, 2.0 - tail)
    return x * 0.5 * o.where(a < 1.4, small, large)


# g = d gelu / dx = Phi + x phi. (g - 1/2) / x in x^2 on [0, 1.4], absolute 2^-27.7; beyond,
# (1 - g(a)) / (2 Phi(-a)) = 1/2 - a phi / (2 Phi(-a)), 2^-24.5 relative to its factor.
_GELU_GRAD_SMALL = (0.7978845, -0.26596075, 0.059836935, -0.009487592, 0.0011401249, -0.0001033549, 5.5895184e-06)
_GELU_GRAD_LARGE = (-0.9512623, -1.6056209, -0.45638055, -0.01347563, 0.003015172, -0.00035334812)


def gelu_grad(o, x):
    """d gelu / dx = Phi(x) + x phi(x); 0 below -6, 1 above 6."""
    a = o.abs(x)
    small = x * _horner(x * x, _GELU_GRAD_SMALL) + 0.5
    tail = _twice_phi_of_minus(o, a) * _horner(a - _PHI_CENTRE, _GELU_GRAD_LARGE)
    tail = o.where(a > 6.0, 0.0, tail)
    large = o.where(x < 0.0, tail, 1.0 - tail)
    return o.where(a < 1.4, small, large)


# sqrt(8 / pi) log2(e) and 0.044715 times it: sigmoid(2 u) is 1 / (1 + 2^-y) with y = x (A + B x^2).
_TANH_GELU = 2.302208198144325
_TANH_GELU_CUBE = 0.1029432395800235


def _exp2_of_minus_tanh_gelu(o, x):
    """z = 2^-|y|. 2 x is exact, so only the rest of A x rounds."""
    y = x * 2.0 + x * (x * x * _TANH_GELU_CUBE + (_TANH_GELU - 2.0))
    return _exp2_below(o, o.where(y > 0.0, y * -1.0, y))


def gelu_tanh(o, x):
    """x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    z = _exp2_of_minus_tanh_gelu(o, x)
    return o.where(x < 0.0, x * z, x) / (z + 1.0)


def gelu_tanh_grad(o, x):
    """s + x s (1 - s) (2 u)', s = sigmoid(2 u); x is clamped where the second term has vanished."""
    c = o.where(x > 16.0, 16.0, x)
    c = o.where(c < -16.0, -16.0, c)
    z = _exp2_of_minus_tanh_gelu(o, c)
    r = 1.0 / (z + 1.0)
    slope = c * (c * c * (3.0 * _LN2 * _TANH_GELU_CUBE) + _LN2 * _TANH_GELU)
    return o.where(x < 0.0, z, 1.0) * r + slope * (z * (r * r))


# --- logarithms in binary32 ------------------------------------------------------------------------

_SQRT_HALF_BITS = 0x3F3504F3
_EXPONENT = -(2**23)  # sign and exponent field
# (log(1 + f) - f + f^2/2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1], 2^-27.3 relative to log(1 + f).
_LOG = (0.3333333, -0.25000823, 0.20001261, -0.16623326, 0.14200933, -0.13159692, 0.12767358, -0.07643104)
# log2(1 + f) / f - 1 and log10(1 + f) / f - 1/2 there, 2^-26.3 and 2^-26.6.
_LOG2 = (
    0.44269505, -0.7213472, 0.4808944, -0.36070716, 0.28878716,
    -0.239548, 0.20056365, -0.18759511, 0.20948033, -0.14627677,
)  # fmt: skip
_LOG10 = (
    -0.065705515, -0.21714716, 0.14476383, -0.108582884, 0.08692183,
    -0.072123565, 0.060615607, -0.05659697, 0.0615129, -0.041798066,
)  # fmt: skip
_LOG10_2_HIGH = 0.301025390625
_LOG10_2_LOW = 4.605039e-06


def _split(o, x):
    """|x| = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); e as a float."""
    a = o.abs(x)
    subnormal = a < 2.0**-126
    b = o.bits(o.where(subnormal, a * 2.0**23, a), torch.int32)
    shift = (b - _SQRT_HALF_BITS) & _EXPONENT
    e = shift >> 23
    f = o.bits(b - shift, torch.float32) - 1.0
    return _single(o, o.where(subnormal, e - 23, e)), f


def _log_specials(o, x, y):
    y = o.where(x < 0.0, _NAN, o.where(x == 0.0, -_INF, y))
    return o.where(x < _INF, y, x)


def _log1p_reduced(e, f):
    """log(2^e (1 + f)), smallest terms first."""
    z = f * f
    y = (f * z * _horner(f, _LOG) + e * _LN2_LOW) - z * 0.5
    return (f + y) + e * _LN2_HIGH


def log(o, x):
    """Natural logarithm."""
    return _log_specials(o, x, _log1p_reduced(*_split(o, x)))


def log2(o, x):
    """Logarithm to base 2; exact at powers of two."""
    e, f = _split(o, x)
    return _log_specials(o, x, (f * _horner(f, _LOG2) + f) + e)


def log10(o, x):
    """Logarithm to base 10."""
    e, f = _split(o, x)
    y = (f * _horner(f, _LOG10) + e * _LOG10_2_LOW) + f * 0.5
    return _log_specials(o, x, y + e * _LOG10_2_HIGH)


def log1p(o, x):
    """log(1 + x). 1 + x picks e, then 1 + f = 2^-e (1 + x) is formed from x itself."""
    b = o.bits(o.abs(x + 1.0), torch.int32)
    shift = (b - _SQRT_HALF_BITS) & _EXPONENT
    scaled = o.bits(o.bits(x, torch.int32) - shift, torch.float32)
    # Above 2^30 the 1 is far below the last place.
    one = o.bits(0x3F800000 - o.where(shift > 30 << 23, 30 << 23, shift), torch.float32)
    y = _log1p_reduced(_single(o, shift >> 23), scaled + (one - 1.0))
    y = o.where(x < -1.0, _NAN, o.where(x == -1.0, -_INF, y))
    return o.where((o.abs(x) < 2.0**-25) | ~(x < _INF), x, y)


# --- square roots and quotients --------------------------------------------------------------------


def rsqrt(o, x):
    """1 / sqrt(x), two correctly rounded operations."""
    return 1.0 / o.sqrt(x)


def reciprocal(o, x):
    """1 / x, correctly rounded."""
    return 1.0 / x


# --- binary64 pieces -------------------------------------------------------------------------------

_SHIFT64 = 6755399441055744.0  # 1.5 * 2^52
_SHIFT64_BITS = 0x4338000000000000
_SQRT_HALF_BITS64 = 0x3FE6A09E667F3BCD
_LN2_HIGH64 = 0.6931471804855391  # 33 bits
_LN2_LOW64 = 7.440617110012397e-11
# (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2 and 2^r on |r| <= 1/2, both 2^-51.6.
_EXP64 = (
    0.49999999999998324, 0.16666666666611513, 0.04166666666813755, 0.008333333370892015,
    0.0013888888516028284, 0.00019841185202947124, 2.4801931832745543e-05, 2.7635006136981935e-06,
    2.747678830414773e-07,
)  # fmt: skip
_EXP2_64 = (
    1.0, 0.6931471805599516, 0.24022650695910472, 0.05550410866434659, 0.009618129107380595,
    0.001333355824648036, 0.00015403530800935412, 1.5252647747784923e-05, 1.3215235585745908e-06,
    1.0210506461331533e-07, 7.111766037951877e-09,
)  # fmt: skip
# 2 atanh(s) / s in s^2 for s = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)], 2^-52.2.
_LOG64 = (
    2.0, 0.6666666666658749, 0.40000000052135726, 0.28571417151336514,
    0.22223370214832758, 0.181236880063097, 0.16819298773787084,
)  # fmt: skip


def _two_to_the(o, t):
    """2^n from t = n + 1.5 * 2^52."""
    return o.bits((o.bits(t, torch.int64) - (_SHIFT64_BITS - 1023)) << 52, torch.float64)


def _exp64(o, x):
    """e^x in binary64 for a binary32 result: clamped where that is 0 or infinity anyway."""
    x = o.where(x > 200.0, 200.0, x)
    x = o.where(x < -200.0, -200.0, x)
    t = x * _LOG2E + _SHIFT64
    n = t - _SHIFT64
    r = (x - n * _LN2_HIGH64) - n * _LN2_LOW64
    return (r * r * _horner(r, _EXP64) + r + 1.0) * _two_to_the(o, t)


def _exp2_64(o, x):
    x = o.where(x > 200.0, 200.0, x)
    x = o.where(x < -200.0, -200.0, x)
    t = x + _SHIFT64
    return _horner(x - (t - _SHIFT64), _EXP2_64) * _two_to_the(o, t)


def _split64(o, x):
    """e and log m of |x| = 2^e m, m in [sqrt(1/2), sqrt(2)), for normal binary64 x."""
    b = o.bits(o.abs(x), torch.int64)
    shift = (b - _SQRT_HALF_BITS64) & -(2**52)
    f = o.bits(b - shift, torch.float64) - 1.0
    s = f / (f + 2.0)
    return _double(o, shift >> 52), s * _horner(s * s, _LOG64)


def _log64(o, x):
    """log x of a binary64 that is zero, normal or special."""
    e, y = _split64(o, x)
    y = (e * _LN2_LOW64 + y) + e * _LN2_HIGH64
    return _log_specials(o, x, y)


def _log1p64(o, z):
    """log(1 + z): the logarithm of the rounded sum, and what rounding lost over the sum."""
    u = z + 1.0
    lost = z - (u - 1.0)
    # Nothing is lost at -1 and at infinity, where the quotient or the difference is NaN.
    y = _log64(o, u) + o.where(o.abs(lost) > 0.0, lost / u, 0.0)
    return o.where(z == 0.0, z, y)


def _sqrt64(o, x):
    """sqrt to about 2^-50 for x in binary32's range: eager CPU's own binary64 root varies by build."""
    seed = _double(o, o.sqrt(_single(o, x)))
    root = (x / seed + seed) * 0.5
    return o.where(x == 0.0, x, root)


# --- trigonometric ---------------------------------------------------------------------------------

# 1 / (2 pi) in pieces of 28 bits: the product with a binary32 is exact, and whole turns drop out of
# each product exactly. Seven pieces leave 2^-65 of a turn at the largest input.
_TURN = tuple(
    piece * 2.0 ** (-28 * (i + 1))
    for i, piece in enumerate((42722829, 194220293, 78114973, 99908941, 58131309, 145057359, 17711367))
)
# sin(pi/2 r) / r and cos(pi/2 r) in r^2 on |r| <= 1/2, 2^-58 and 2^-53.9.
_SIN = (
    1.5707963267948966, -0.6459640975062443, 0.0796926262460396, -0.004681754132282966,
    0.0001604411502952724, -3.5986417653162062e-06, 5.633722217129125e-08,
)  # fmt: skip
_COS = (
    1.0, -1.2337005501361553, 0.2536695078999594, -0.020863480735868713,
    0.0009192599541584945, -2.5200143099324717e-05, 4.655337807805739e-07,
)  # fmt: skip


def _quarter_turns(o, x):
    """q and r with x = (q + r) pi/2 up to whole turns, |r| <= 1/2, for any finite binary32 x."""
    wide = _double(o, x)
    parts = []
    for piece in _TURN:
        p = wide * piece
        parts.append(p - o.rint(p))
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    q = o.rint(total * 4.0)
    # Largest parts first: near a multiple of pi/2 they cancel exactly before the small ones join.
    rest = parts[0] - q * 0.25
    for p in parts[1:]:
        rest = rest + p
    return q, rest * 4.0


def _sin_cos(o, q, r):
    """sin and cos of (q + r) pi/2 in binary64."""
    z = r * r
    s, c = r * _horner(z, _SIN), _horner(z, _COS)
    quadrant = q - o.floor(q * 0.25) * 4.0
    odd = (quadrant == 1.0) | (quadrant == 3.0)
    sine, cosine = o.where(odd, c, s), o.where(odd, s, c)
    sine = o.where(quadrant >= 2.0, sine * -1.0, sine)
    return sine, o.where((quadrant == 1.0) | (quadrant == 2.0), cosine * -1.0, cosine)


def sin(o, x):
    """Sine, for all magnitudes."""
    sine, _ = _sin_cos(o, *_quarter_turns(o, x))
    return o.where(x == 0.0, x, _single(o, sine))


def cos(o, x):
    """Cosine, for all magnitudes."""
    _, cosine = _sin_cos(o, *_quarter_turns(o, x))
    return _single(o, cosine)


def tan(o, x):
    """Tangent, for all magnitudes."""
    sine, cosine = _sin_cos(o, *_quarter_turns(o, x))
    return o.where(x == 0.0, x, _single(o, sine / cosine))


def _sin_pi(o, x):
    """sin(pi x) in binary64; the reduction is exact."""
    turns = (x - o.rint(x * 0.5) * 2.0) * 2.0
    q = o.rint(turns)
    sine, _ = _sin_cos(o, q, turns - q)
    return sine


def sinc(o, x):
    """sin(pi x) / (pi x), and 1 at zero."""
    a = o.abs(_double(o, x))
    return o.where(x == 0.0, 1.0, _single(o, _sin_pi(o, a) / (a * math.pi)))


# asin(s) / s in s^2 on [0, 1/2], 2^-43.9; atan(s) / s in s^2 on [0, 1], 2^-41.8.
_ASIN = (
    1.0, 0.16666666669636854, 0.07499999533201766, 0.044643109110546295, 0.030375305008999823,
    0.022470453810225933, 0.01648364915525443, 0.01860667345239808, -0.002807120381143097,
    0.03191347049984064,
)  # fmt: skip
_ATAN = (
    1.0, -0.333333333258267, 0.19999999293408144, -0.142856908702499, 0.11110716252395433,
    -0.09086924690163575, 0.07665952490679288, -0.06545594538621904, 0.054804277380070286,
    -0.04269688058063413, 0.028850620762012003, -0.015590760027286037, 0.006127618101545238,
    -0.0015269031678022957, 0.00017894481353475532,
)  # fmt: skip


def _asin_terms(o, x):
    """|x| > 1/2, and asin of |x| or else of sqrt((1 - |x|) / 2), in binary64."""
    a = o.abs(_double(o, x))
    large = a > 0.5
    z = o.where(large, (1.0 - a) * 0.5, a * a)
    s = o.where(large, _sqrt64(o, (1.0 - a) * 0.5), a)
    return large, s * _horner(z, _ASIN)


def asin(o, x):
    """Arc sine; NaN outside [-1, 1]."""
    large, p = _asin_terms(o, x)
    return _with_sign(o, _single(o, o.where(large, (math.pi / 2) - (p + p), p)), x)


def acos(o, x):
    """Arc cosine; NaN outside [-1, 1]."""
    large, p = _asin_terms(o, x)
    below = x < 0.0
    near = o.where(below, math.pi - (p + p), p + p)
    middle = o.where(below, p + (math.pi / 2), (math.pi / 2) - p)
    return _single(o, o.where(large, near, middle))


def atan(o, x):
    """Arc tangent."""
    a = o.abs(_double(o, x))
    large = a > 1.0
    s = o.where(large, 1.0 / a, a)
    p = s * _horner(s * s, _ATAN)
    return _with_sign(o, _single(o, o.where(large, (math.pi / 2) - p, p)), x)


def atan2(o, y, x):
    """Angle of the point (x, y), with C's table of zeros and infinities."""
    a, b = o.abs(_double(o, y)), o.abs(_double(o, x))
    steep = a > b
    top, bottom = o.where(steep, b, a), o.where(steep, a, b)
    s = o.where(top == bottom, o.where(bottom == 0.0, 0.0, bottom * 0.0 + 1.0), top / bottom)
    s = o.where((top == _INF) & (bottom == _INF), 1.0, s)
    p = s * _horner(s * s, _ATAN)
    p = o.where(steep, (math.pi / 2) - p, p)
    p = o.where(_negative(o, x), math.pi - p, p)
    return _with_sign(o, _single(o, p), y)


# --- hyperbolic ------------------------------------------------------------------------------------


def sinh(o, x):
    """Hyperbolic sine."""
    a = o.abs(_double(o, x))
    e = _exp64(o, a)
    y = o.where(a < 2.0**-10, a + a * a * a * (1 / 6), (e - 1.0 / e) * 0.5)
    return _with_sign(o, _single(o, y), x)


def cosh(o, x):
    """Hyperbolic cosine."""
    e = _exp64(o, o.abs(_double(o, x)))
    return _single(o, (e + 1.0 / e) * 0.5)


def asinh(o, x):
    """Inverse hyperbolic sine, log(a + sqrt(a^2 + 1)) for a = |x|."""
    a = o.abs(_double(o, x))
    y = _log64(o, a + _hypot64(o, a, a * 0.0 + 1.0))
    y = o.where(a < 2.0**-10, a - a * a * a * (1 / 6), y)
    return _with_sign(o, _single(o, y), x)


def acosh(o, x):
    """Inverse hyperbolic cosine, log(x + sqrt(x^2 - 1)); NaN below 1."""
    wide = _double(o, x)
    root = _sqrt64(o, (wide - 1.0) * (wide + 1.0))
    y = _log64(o, wide + o.where(wide > 2.0**30, wide, root))
    return _single(o, o.where(wide < 1.0, _NAN, y))


def atanh(o, x):
    """Inverse hyperbolic tangent, log((1 + a) / (1 - a)) / 2 for a = |x|; NaN beyond 1."""
    a = o.abs(_double(o, x))
    y = _log64(o, (a + 1.0) / (1.0 - a)) * 0.5
    y = o.where(a < 2.0**-10, a + a * a * a * (1 / 3), y)
    return _with_sign(o, _single(o, y), x)


def _hypot64(o, a, b):
    """sqrt(a^2 + b^2) for a, b >= 0."""
    steep = a > b
    top, bottom = o.where(steep, a, b), o.where(steep, b, a)
    r = bottom / o.where(top == 0.0, 1.0, top)
    y = top * _sqrt64(o, r * r + 1.0)
    return o.where((a == _INF) | (b == _INF), _INF, y)


def hypot(o, x, y):
    """sqrt(x^2 + y^2) without overflow on the way; an infinity wins over NaN."""
    return _single(o, _hypot64(o, o.abs(_double(o, x)), o.abs(_double(o, y))))


# --- error function's relatives --------------------------------------------------------------------

# e^(a^2) erfc(a) in t = (a - 5/2) / (a + 5/2) for a in [0, 10.1], 2^-35.0.
_ERFCX = (
    0.21080636406074008, -0.3717367338399789, 0.251713193112036, -0.12503305804392972,
    0.03992254395782772, -0.0039936162663980175, -0.0026424134026791267, 0.000875350511500064,
    0.00022849803423298206, -0.00012696195705717129, -3.3916050450142306e-05, 1.5336986585498197e-05,
    6.047707965470159e-06,
)  # fmt: skip
# erfinv(x) / x in w = -log(1 - x^2) on [0, 5], 2^-35.3; in sqrt(w) - 3 for w in [5, 16], 2^-29.6.
_ERFINV = (
    0.8862269254317315, 0.23201366826176623, 0.011549318790541272, -0.002334979622578268,
    -0.0001283744258332712, 4.714472748186179e-05, 1.4695946329236683e-06, -6.326401770802529e-07,
    -2.1581877407895761e-07, 7.941897983945167e-08, -1.0746907094004964e-08, 7.166305208053321e-10,
    -1.9767823310187298e-11,
)  # fmt: skip
_ERFINV_TAIL = (
    2.8329768000982107, 1.0016752349032108, 0.009445399124217513, -0.007642657342026617,
    0.005686662120545579, -0.003567999101921893, 0.0014790143771352007, -0.00011768717710309572,
    -0.00028362086437803616, 0.00015868334768349412, -2.6022844815592465e-05,
)  # fmt: skip


def erfc(o, x):
    """1 - erf(x), accurate in the tail."""
    a = o.abs(_double(o, x))
    a = o.where(a > 10.1, 10.1, a)
    y = _exp64(o, a * a * -1.0) * _horner((a - 2.5) / (a + 2.5), _ERFCX)
    return _single(o, o.where(x < 0.0, 2.0 - y, y))


def erfinv(o, x):
    """Inverse of erf; NaN beyond 1."""
    a = o.abs(_double(o, x))
    w = _log64(o, (1.0 - a) * (a + 1.0)) * -1.0
    tail = _horner(_sqrt64(o, w) - 3.0, _ERFINV_TAIL)
    y = a * o.where(w > 5.0, tail, _horner(w, _ERFINV))
    return _with_sign(o, _single(o, o.where(a == 1.0, _INF, y)), x)


# --- logarithms of sums and products ---------------------------------------------------------------


def _max_and_gap(o, x, y):
    """max(x, y) and |x - y| in binary64; equal infinities have no gap, and NaN shows in the gap."""
    a, b = _double(o, x), _double(o, y)
    return o.where(a > b, a, b), o.where(a == b, 0.0, o.abs(a - b))


def logaddexp(o, x, y):
    """log(e^x + e^y)."""
    top, gap = _max_and_gap(o, x, y)
    return _single(o, top + _log1p64(o, _exp64(o, gap * -1.0)))


def logaddexp2(o, x, y):
    """log2(2^x + 2^y)."""
    top, gap = _max_and_gap(o, x, y)
    return _single(o, top + _log1p64(o, _exp2_64(o, gap * -1.0)) * _LOG2E)


def logit(o, x):
    """log(x / (1 - x)); NaN outside [0, 1]."""
    wide = _double(o, x)
    return _single(o, _log64(o, wide / (1.0 - wide)))


def xlogy(o, x, y):
    """x log y, and 0 where x is 0 and y is not NaN."""
    product = _single(o, _double(o, x) * _log64(o, _double(o, y)))
    return o.where((x == 0.0) & (y == y), 0.0, product)


def xlog1py(o, x, y):
    """x log(1 + y), and 0 where x is 0 and y is not NaN."""
    product = _single(o, _double(o, x) * _log1p64(o, _double(o, y)))
    return o.where((x == 0.0) & (y == y), 0.0, product)


def pow(o, x, y):
    """x^y with C's table of special values."""
    wide = _double(o, x)
    e, log_m = _split64(o, wide)
    log2_x = o.where(x == 0.0, -_INF, log_m * _LOG2E + e)
    log2_x = o.where(o.abs(x) < _INF, log2_x, o.abs(wide))
    r = _single(o, _exp2_64(o, _double(o, y) * log2_x))
    half = y * 0.5
    whole = y == o.trunc(y)
    odd = whole & (half != o.trunc(half))
    r = o.where(odd & _negative(o, x), r * -1.0, r)
    r = o.where((x < 0.0) & (x > -_INF) & ~whole, _NAN, r)
    return o.where((y == 0.0) | (x == 1.0) | ((x == -1.0) & (o.abs(y) == _INF)), 1.0, r)


# --- remainders ------------------------------------------------------------------------------------


def fmod(o, x, y):
    """x - y trunc(x / y), exact, with the sign of x: ten steps of 28 quotient bits.

    A step divides by a power of two times |y|. Its quotient is below 2^28, so rounding cannot carry it
    to the next integer, and the product and the difference are exact in binary64.
    """
    r, b = o.abs(_double(o, x)), o.abs(_double(o, y))
    for step in range(9, -1, -1):
        t = b * 2.0 ** (28 * step)
        r = r - o.trunc(r / t) * t
    r = _single(o, o.where((b == _INF) & (o.abs(x) < _INF), o.abs(_double(o, x)), r))
    return _with_sign(o, r, x)


def remainder(o, x, y):
    """x - y floor(x / y) with the sign of y: fmod, plus y (rounded) where the signs differ."""
    r = fmod(o, x, y)
    return o.where((r != 0.0) & ((r < 0.0) != (y < 0.0)), r + y, r)


# --- log gamma -------------------------------------------------------------------------------------

# log(Gamma(2 + t)) / (t (t + 1)) on [-1, 1/2], 2^-53.
_LGAMMA = (
    0.4227843350984671, -0.10031730167435368, 0.03296500062117994, -0.012384192193406161,
    0.004998641162593193, -0.002108130833408735, 0.0009153769936450773, -0.0004057073603150923,
    0.000182551428737904, -8.309653681721346e-05, 3.8180055986692425e-05, -1.76414960621216e-05,
    8.16774570914366e-06, -3.9949304035313776e-06, 1.9082143719230147e-06, -2.809298840968704e-07,
    6.225122591069941e-07, -1.2183225970840707e-06, -1.1531469646375735e-06, 2.1519445784465644e-07,
    1.4455000462444663e-06, 1.0351922713457852e-06, 2.7482498259235835e-07,
)  # fmt: skip
# Stirling's remainder times y, in 1 / y^2 for y >= 8, absolute 2^-58.7.
_STIRLING = (
    0.0833333333333331, -0.002777777777358629, 0.00079365057648544,
    -0.0005951896849831118, 0.0008364587206652528, -0.001633434944153539,
)  # fmt: skip
_HALF_LOG_2PI = 0.9189385332046728


def _lgamma_positive(o, a):
    """log Gamma(a) in binary64, a > 0: a polynomial about 2, or Stirling after shifting by six."""
    small = a < 1.5
    t = o.where(small, a - 1.0, a - 2.0)
    near = t * (t + 1.0) * _horner(t, _LGAMMA)
    shifted = a < 8.0
    product = a * (a + 1.0) * (a + 2.0) * (a + 3.0) * (a + 4.0) * (a + 5.0)
    y = o.where(shifted, a + 6.0, a)
    # Both branches need log of one argument that the other does not.
    log_of = _log64(o, o.where(small, a, y))
    inverse = 1.0 / y
    far = (((y - 0.5) * log_of - y) + _HALF_LOG_2PI) + inverse * _horner(inverse * inverse, _STIRLING)
    far = far - o.where(shifted, _log64(o, o.where(shifted, product, 1.0)), 0.0)
    return o.where(small, near - log_of, o.where(a < 2.5, near, far))


def lgamma(o, x):
    """log |Gamma(x)|, by reflection below zero."""
    wide = _double(o, x)
    a = o.abs(wide)
    y = _lgamma_positive(o, a)
    mirrored = _log64(o, math.pi / (a * o.abs(_sin_pi(o, a)))) - y
    y = o.where(x < 0.0, mirrored, y)
    return _single(o, o.where(a == _INF, _INF, y))


PROGRAMS = {
    "exp": (exp, 1), "exp2": (exp2, 1), "expm1": (expm1, 1),
    "log": (log, 1), "log2": (log2, 1), "log10": (log10, 1), "log1p": (log1p, 1),
    "tanh": (tanh, 1), "sigmoid": (sigmoid, 1), "silu": (silu, 1), "mish": (mish, 1),
    "gelu": (gelu, 1), "gelu_tanh": (gelu_tanh, 1), "softplus": (softplus, 3), "log_sigmoid": (log_sigmoid, 1),
    "silu_grad": (silu_grad, 1), "mish_grad": (mish_grad, 1), "gelu_grad": (gelu_grad, 1),
    "gelu_tanh_grad": (gelu_tanh_grad, 1), "softplus_grad": (softplus_grad, 3),
    "erf": (erf, 1), "erfc": (erfc, 1), "erfinv": (erfinv, 1),
    "sin": (sin, 1), "cos": (cos, 1), "tan": (tan, 1), "sinc": (sinc, 1),
    "asin": (asin, 1), "acos": (acos, 1), "atan": (atan, 1), "atan2": (atan2, 2),
    "sinh": (sinh, 1), "cosh": (cosh, 1), "asinh": (asinh, 1), "acosh": (acosh, 1), "atanh": (atanh, 1),
    "rsqrt": (rsqrt, 1), "reciprocal": (reciprocal, 1), "hypot": (hypot, 2),
    "pow": (pow, 2), "fmod": (fmod, 2), "remainder": (remainder, 2),
    "logaddexp": (logaddexp, 2), "logaddexp2": (logaddexp2, 2), "logit": (logit, 1),
    "xlogy": (xlogy, 2), "xlog1py": (xlog1py, 2), "lgamma": (lgamma, 1),
}  # fmt: skip
# `exp` for what a softmax gives it, and only there: fewer instructions, the same bits of what is made of them.
RESTRICTED = {"exp_nonpositive": (_exp_below, 1), "exp_term": (exp_term, 1)}
