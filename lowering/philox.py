"""Random draws as programs (contract section 7): a draw is a function of a key and an index.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
with the 64-bit key of the random call and the counter (block, 0). An element's draw depends on
nothing else: not on the thread, the grid, the device, or how the tensor is cut over ranks.

Every program takes `key_lo`, `key_hi` in [0, 2^32) and `index`, the global logical element index in
[0, 2^63), all int64. Which of its block's four 32-bit words w0..w3 an element takes:

| draw | block | words |
|---|---|---|
| 32 bits: uniform, keep, bernoulli, exponential | index >> 2 | w[index & 3] |
| 64 bits: randint, float64 uniform | index >> 1 | w[2 (index & 1)] (high), the next (low) |
| normal | index >> 2 | pair (w0, w1) or (w2, w3) by index & 2, shared by an even element and the next |

Words live in int64 and every intermediate stays below 2^63, where C++ would call it undefined.
"""

import torch

_ROUND_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def _product(x, m):
    """High and low 32-bit halves of x * m, both below 2^32, by 16-bit halves of m."""
    low = x * (m & 0xFFFF)
    middle = x * (m >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def block(key_lo, key_hi, number, draw=(0, 0)):
    """The four 32-bit words of Philox4x32-10 at counter (lo32(number), hi32(number), *draw)."""
    c0, c1, (c2, c3) = number & _MASK, number >> 32, draw
    for _ in range(10):
        hi0, lo0 = _product(c0, _ROUND_MULTIPLIERS[0])
        hi1, lo1 = _product(c2, _ROUND_MULTIPLIERS[1])
        # The key leads each chain: the counter's constant half is still a Python int at first.
        c0, c1, c2, c3 = key_lo ^ c1 ^ hi1, lo1, key_hi ^ c3 ^ hi0, lo0
        key_lo = (key_lo + _KEY_STEPS[0]) & _MASK
        key_hi = (key_hi + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def philox(o, key_lo, key_hi, index):
    """The 32-bit word of element `index`, as int64 in [0, 2^32)."""
    w0, w1, w2, w3 = block(key_lo, key_hi, index >> 2)
    odd = (index & 1) != 0
    return o.where((index & 2) != 0, o.where(odd, w3, w2), o.where(odd, w1, w0))


def philox64(o, key_lo, key_hi, index):
    """The 64 bits of element `index`, as two int64 words (high, low) in [0, 2^32)."""
    w0, w1, w2, w3 = block(key_lo, key_hi, index >> 1)
    odd = (index & 1) != 0
    return o.where(odd, w2, w0), o.where(odd, w3, w1)


def uniform_float32(o, key_lo, key_hi, index):
    """float32 in [0, 1): a multiple of 2^-24."""
    return o.to(philox(o, key_lo, key_hi, index) >> 8, torch.float32) * 2.0**-24


def uniform_bfloat16(o, key_lo, key_hi, index):
    """float32 in [0, 1) that bfloat16 holds exactly: a multiple of 2^-8."""
    return o.to(philox(o, key_lo, key_hi, index) >> 24, torch.float32) * 2.0**-8


def uniform_float16(o, key_lo, key_hi, index):
    """float32 in [0, 1) that float16 holds exactly: a multiple of 2^-11."""
    return o.to(philox(o, key_lo, key_hi, index) >> 21, torch.float32) * 2.0**-11


def uniform_float64(o, key_lo, key_hi, index):
    """float64 in [0, 1): a multiple of 2^-53, from 64 bits an element."""
    high, low = philox64(o, key_lo, key_hi, index)
    return o.to((high << 21) | (low >> 11), torch.float64) * 2.0**-53


def threshold(p):
    """round(p 2^32), ties to even: what a word is compared with. `p` is a float in [0, 1].

    Raises ValueError outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"a probability must be in [0, 1], got {p}")
    return round(float(p) * 2.0**32)


def threshold_of(o, p):
    """`threshold` of a float32 value inside a program; outside [0, 1] it clamps, NaN is 0."""
    p = o.where(p > 0.0, p, 0.0)
    p = o.where(p < 1.0, p, 1.0)
    return o.to(o.rint(p * 2.0**32), torch.int64)


def keep(o, key_lo, key_hi, index, threshold):
    """Dropout's mask: True where the word >= threshold, so with probability 1 - p."""
    return philox(o, key_lo, key_hi, index) >= threshold


def bernoulli(o, key_lo, key_hi, index, threshold):
    """True where the word < threshold, so with probability p."""
    return philox(o, key_lo, key_hi, index) < threshold


def randint(o, key_lo, key_hi, index, low, high):
    """int64 in [low, high): low + floor(V (high - low) / 2^64), V the element's 64 bits.

    No value's probability is off by more than the fraction (high - low) / 2^64. `low` and `high`
    are Python ints or int64 values. Raises ValueError for an empty range or one beyond 2^63.
    """
    span = high - low
    if isinstance(span, int) and not 0 < span <= 2**63:
        raise ValueError(f"randint needs 0 < high - low <= 2^63, got low={low}, high={high}")
    v1, v0 = philox64(o, key_lo, key_hi, index)
    s1, s0 = span >> 32, span & _MASK
    carry, _ = _product(v0, s0)
    top, part = _product(v1, s0)
    carry = carry + part
    if not (isinstance(s1, int) and s1 == 0):
        high0, low0 = _product(v0, s1)
        carry = carry + low0
        top = v1 * s1 + top + high0
    return (top + (carry >> 32)) + low


def sincos2pi(o, u):
    """sin(2 pi u) and cos(2 pi u) of float32 `u` in [0, 1] that is a multiple of 2^-24.

    The reduction to an eighth of a turn is exact on that grid. Polynomials: Chebyshev interpolants
    of (sin(2 pi f) - 2 pi f) / f^3 and (cos(2 pi f) - 1) / f^2 in f^2 on [0, 1/64], computed with
    mpmath and rounded to binary32.
    """
    quarters = o.rint(u * 4.0)
    f = u - quarters * 0.25
    t = f * f
    s = (t * float.fromhex("0x1.4cb762p+5") + float.fromhex("-0x1.32ce1ep+6")) * t
    s = (s + float.fromhex("0x1.466bc2p+6")) * t + float.fromhex("-0x1.4abbcep+5")
    s = f * (float.fromhex("0x1.921fb6p+2") + t * s)
    c = (t * float.fromhex("0x1.e1ec72p+5") + float.fromhex("-0x1.55d3c2p+6")) * t
    c = (c + float.fromhex("0x1.03c1f0p+6")) * t + float.fromhex("-0x1.3bd3ccp+4")
    c = t * c + 1.0
    turn = o.to(quarters, torch.int64)
    swap = (turn & 1) != 0
    sine, cosine = o.where(swap, c, s), o.where(swap, s, c)
    sine = o.where((turn & 2) != 0, -sine, sine)
    cosine = o.where(((turn + 1) & 2) != 0, -cosine, cosine)
    return sine, cosine


def normal(o, key_lo, key_hi, index):
    """float32 standard normal by Box and Muller (1958): sqrt(-2 log u) times cos or sin of 2 pi v.

    u and v are ((word >> 8) + 1) 2^-24 of the pair's first and second word; an even element takes
    the cosine, the odd one after it the sine.
    """
    from .elementary import log

    w0, w1, w2, w3 = block(key_lo, key_hi, index >> 2)
    second = (index & 2) != 0
    u = o.to((o.where(second, w2, w0) >> 8) + 1, torch.float32) * 2.0**-24
    v = o.to((o.where(second, w3, w1) >> 8) + 1, torch.float32) * 2.0**-24
    # log u <= 0, and abs also makes the zero at u = 1 a positive one.
    radius = o.sqrt(o.abs(log(o, u)) * 2.0)
    sine, cosine = sincos2pi(o, v)
    return radius * o.where((index & 1) != 0, sine, cosine)


def exponential(o, key_lo, key_hi, index):
    """float32 of rate 1: -log u, u = (2 (word >> 9) + 1) 2^-24, the middle of one of 2^23 cells.

    Never zero, so a race `probability / draw` has no 0 / 0.
    """
    from .elementary import log

    cell = philox(o, key_lo, key_hi, index) >> 9
    return o.abs(log(o, o.to(cell * 2 + 1, torch.float32) * 2.0**-24))


# name: (program, number of inputs, dtype of the result). The inputs after key_lo, key_hi, index are
# int64 values or Python ints; those called uniform_<dtype> are the rule for that storage dtype.
PROGRAMS = {
    "philox": (philox, 3, torch.int64),
    "uniform_float32": (uniform_float32, 3, torch.float32),
    "uniform_bfloat16": (uniform_bfloat16, 3, torch.float32),
    "uniform_float16": (uniform_float16, 3, torch.float32),
    "uniform_float64": (uniform_float64, 3, torch.float64),
    "keep": (keep, 4, torch.bool),
    "bernoulli": (bernoulli, 4, torch.bool),
    "randint": (randint, 5, torch.int64),
    "normal": (normal, 3, torch.float32),
    "exponential": (exponential, 3, torch.float32),
}
