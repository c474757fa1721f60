"""Exact products against an oracle in Python integers, and the freedoms the contract promises."""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from carbon_compile.templates import launch, matmul, quantize
from carbon_compile.templates.matmul import exact_bmm, exact_mm

from .offline import printed

WINDOWS = (16, 24)
NAN = 0x7FC00000


def bits(x):
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def wild(*shape, dtype=torch.float32, seed=0):
    """Values of many magnitudes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g) * torch.exp(2 * torch.randn(*shape, generator=g))
    return x.to(dtype)


# ---- the oracle: rationals, one element at a time ----


def expo(m: Fraction) -> int:
    e = m.numerator.bit_length() - m.denominator.bit_length()
    while m >= Fraction(2) ** e:
        e += 1
    while m < Fraction(2) ** (e - 1):
        e -= 1
    return e


def rn(x: Fraction):
    """To binary32, ties to even, gradual underflow; a float that holds it."""
    if x == 0:
        return 0.0
    quantum = Fraction(2) ** max(expo(abs(x)) - 24, -149)
    rounded = round(x / quantum) * quantum
    if abs(rounded) >= 2**128:
        return float("inf") if x > 0 else float("-inf")
    return float(rounded) if rounded or x > 0 else -0.0


def times(x, power):
    return x if x in (0, float("inf"), float("-inf")) else rn(Fraction(x) * Fraction(2) ** power)


def rationals(x):
    finite = [[torch.tensor(v).isfinite().item() for v in row] for row in x.float().tolist()]
    return [
        [Fraction(v) if ok else None for v, ok in zip(row, oks, strict=True)]
        for row, oks in zip(x.float().tolist(), finite, strict=True)
    ]


def integers(row, d, window):
    """(q, s) of one row, None if poisoned."""
    if any(v is None for v in row):
        return None
    row = [v * Fraction(2) ** e for v, e in zip(row, d, strict=True)]
    largest = max(abs(v) for v in row)
    if largest == 0:
        return [0] * len(row), 0
    s = expo(largest * Fraction(129, 128)) - (window - 1)
    return [round(v / Fraction(2) ** s) for v in row], s


def balance_of(a, b, balance):
    """d_k from rational rows of a and b; a None counts as an infinity."""

    def exponent(values):
        if any(v is None for v in values):
            return 129
        m = max(abs(v) for v in values)
        return -150 if m == 0 else expo(m)

    d = []
    for k in range(len(b)):
        eb, ea = exponent(b[k]), exponent([row[k] for row in a])
        if balance == "gradient":
            d.append(int((eb - ea) / 2))
        else:
            d.append(eb if balance == "weight" and any(b[k]) else 0)
    return d


def oracle(a, b, window, balance="none", bias=None):
    """float32, before any narrower type."""
    a, b = rationals(a), rationals(b)
    d = balance_of(a, b, balance)
    rows = [integers(row, d, window) for row in a]
    columns = [integers(list(c), [-e for e in d], window) for c in zip(*b, strict=True)]
    out = torch.empty(len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if row is None or column is None:
                bits(out)[i, j] = NAN
                continue
            total = sum(x * y for x, y in zip(row[0], column[0], strict=True))
            k = min(250, max(-250, row[1] + column[1]))
            c = times(times(rn(Fraction(total)), k // 2), k - k // 2)
            if bias is not None:
                c = c if abs(c) == float("inf") else rn(Fraction(c) + Fraction(bias[j].item()))
            out[i, j] = c
    return out


def keys_oracle(a, b, window):
    """float32, for the balance "keys" of one matrix pair."""
    a, b = rationals(a), rationals(b)
    d, q = [], []
    for row in b:
        largest = None if any(v is None for v in row) else max(abs(v) for v in row)
        d.append(
            "poison"
            if largest is None
            else expo(largest * Fraction(129, 128))
            if largest
            else "drop"
        )
        scale = Fraction(2) ** (window - 1 - d[-1]) if largest else 0
        q.append([round(v * scale) if scale else 0 for v in row])
    out = torch.empty(len(a), len(b[0]))
    for i, row in enumerate(a):
        if any(v is None or (v != 0 and e == "poison") for v, e in zip(row, d, strict=True)):
            bits(out)[i] = NAN
            continue
        folded = [
            0 if isinstance(e, str) else v * Fraction(2) ** e for v, e in zip(row, d, strict=True)
        ]
        qa, s = integers([Fraction(v) for v in folded], [0] * len(folded), window)
        for j in range(len(b[0])):
            total = sum(x * y[j] for x, y in zip(qa, q, strict=True))
            k = min(250, max(-250, s - (window - 1)))
            out[i, j] = times(times(rn(Fraction(total)), k // 2), k - k // 2)
    return out


# ---- bits ----


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("balance", matmul.BALANCES)
def test_oracle(window, balance):
    a, b = wild(7, 13, seed=1), wild(13, 6, seed=2)
    b[4] = 0
    a[:, 5] = 0
    bias = wild(6, seed=3)
    got = exact_mm(a, b, window=window, balance=balance, bias=bias)
    assert same(got, oracle(a, b, window, balance, bias))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_oracle_narrow_types(window, dtype):
    a, b = wild(5, 9, dtype=dtype), wild(9, 4, dtype=dtype, seed=1)
    a[2] = 6e-8 if dtype == torch.float16 else 1e-39
    want = oracle(a, b, window)
    assert same(exact_mm(a, b, window=window), want)
    assert same(exact_mm(a, b, window=window, out_dtype=dtype), want.to(dtype))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("balance", matmul.BALANCES)
def test_extremes_and_poison(window, balance):
    big = torch.finfo(torch.float32).max
    a, b = wild(9, 8, seed=4), wild(8, 7, seed=5)
    a[0] = 0
    a[1] *= 1e-41  # subnormal rows, normalised first
    a[2, 3] = big
    a[3] = big
    a[4, 2] = float("inf")
    a[5] = 2.0**-149
    a[6] = 1.984375  # 127/64: the significand where bexpo steps
    b[:, 1] = 0
    b[:, 2] *= 1e-43
    b[6, 3] = float("nan")
    b[5, 4] = -big
    b[7] = 0
    got = exact_mm(a, b, window=window, balance=balance)
    want = oracle(a, b, window, balance)
    assert same(got, want)
    assert (bits(got[4]) == NAN).all() and (bits(got[:, 3]) == NAN).all()
    assert got[0, 0].item() == 0 and bits(got)[0, 0] == 0
    for dtype, nan in ((torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)):
        narrow = exact_mm(a, b, window=window, balance=balance, out_dtype=dtype)
        assert (bits(narrow[4]) == nan).all()
        assert same(
            narrow,
            torch.where(
                want.isnan(), torch.tensor(nan, dtype=torch.int16).view(dtype), want.to(dtype)
            ),
        )


def test_bexpo_formula():
    """The integer formula against the definition, around the step and at the ends."""
    patterns = torch.cat([
        torch.arange(0x3FFE0000 - 4000, 0x3FFE0000 + 4000) - 0x2F0,
        torch.tensor([1, 2, 3, 0x7FFFFF, 0x800000, 0x7F7FFFFF]),
    ]).to(torch.int32)  # fmt: skip
    m = patterns.view(torch.float32)
    got = quantize.exponents(m.double(), quantize.BEXPO_BUMP)
    want = [expo(Fraction(v) * Fraction(129, 128)) for v in m.tolist()]
    assert got.tolist() == want
    assert quantize.exponents(m.double()).tolist() == [expo(Fraction(v)) for v in m.tolist()]


@pytest.mark.parametrize("window", WINDOWS)
def test_overflow_to_infinity_and_bias(window):
    a = torch.full((1, 4), 3e38)
    b = torch.tensor([[3e38], [3e38], [3e38], [-1.0]])
    assert exact_mm(a, b, window=window).item() == float("inf")
    got = exact_mm(a, b, window=window, bias=torch.tensor([float("-inf")]))
    assert bits(got).item() == NAN


# ---- freedoms ----


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("balance", matmul.BALANCES)
def test_contraction_order_and_splits(window, balance):
    a, b = wild(33, 301), wild(301, 29, seed=1)
    want = exact_mm(a, b, window=window, balance=balance)
    order = torch.randperm(301, generator=torch.Generator().manual_seed(7))
    assert same(exact_mm(a[:, order], b[order], window=window, balance=balance), want)
    d = {
        "none": None,
        "weight": quantize.weight_balance(b),
        "gradient": quantize.gradient_balance(a, b),
    }[balance]
    qa = quantize.quantize(a, window, -1, d)
    qb = quantize.quantize(b, window, -2, None if d is None else -d)
    total = 0
    for start, end in ((0, 1), (1, 120), (120, 300), (300, 301)):
        total = total + qa.q[:, start:end].to(torch.int64) @ qb.q[start:end].to(torch.int64)
    assert torch.equal(matmul.rounded_total(qa.q, qb.q, window), total.float())


@pytest.mark.parametrize("window", WINDOWS)
def test_threads_strides_and_row_slices(window):
    a, b = wild(257, 200), wild(200, 31, seed=1)
    want = exact_mm(a, b, window=window, balance="weight")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert same(exact_mm(a, b, window=window, balance="weight"), want)
    finally:
        torch.set_num_threads(threads)
    wide = torch.zeros(514, 401)
    wide[::2, 1::2] = a
    for left in (a.t().contiguous().t(), wide[::2, 1::2]):
        for right in (b.t().contiguous().t(), torch.cat([b, b], 1)[:, :31]):
            assert same(exact_mm(left, right, window=window, balance="weight"), want)
    for m in (*range(1, 20), 31, 64, 65, 128, 255, 256, 257):
        assert same(exact_mm(a[:m], b, window=window, balance="weight"), want[:m])
    row = exact_mm(a[:1].expand(5, 200), b, window=window)
    assert same(row, exact_mm(a[:1], b, window=window).expand(5, 31))


@pytest.mark.parametrize("window", WINDOWS)
def test_transposed_result(window):
    for k in (0, 1, 30):
        a, b, bias = wild(20, k), wild(k, 9, seed=1), wild(9, seed=2)
        for m in (0, 1, 20):
            want = exact_mm(a[:m], b, window=window, balance="gradient", bias=bias)
            got = exact_mm(a[:m], b, window=window, balance="gradient", bias=bias, transposed=True)
            assert same(got, want) and got.t().is_contiguous()


@pytest.mark.parametrize("window", WINDOWS)
def test_bmm_is_mm_per_batch(window):
    a, b = wild(4, 9, 33), wild(4, 33, 10, seed=1)
    got = exact_bmm(a, b, window=window)
    for i in range(4):
        assert same(got[i], exact_mm(a[i], b[i], window=window))
    shared = exact_bmm(a, b[:1].expand(4, 33, 10), window=window)
    assert same(shared.flatten(0, 1), exact_mm(a.flatten(0, 1), b[0], window=window))
    swapped = exact_bmm(b.transpose(1, 2), a.transpose(1, 2), window=window)
    assert same(swapped.transpose(1, 2), got)


@pytest.mark.parametrize("window", WINDOWS)
def test_keys_oracle(window):
    """The second operand by its rows: subnormal, huge, zero, and not finite where others don't look."""
    a, b = wild(9, 13, seed=1), wild(13, 6, seed=2)
    big = torch.finfo(torch.float32).max
    b[1], b[2], b[3], b[4, 2], b[5, 0] = 0, b[2] * 1e-42, big, float("inf"), float("nan")
    b[6] = 1.984375
    a[1], a[2] = 0, a[2] * 1e-42
    a[:6, 4:6] = 0
    a[3, 7], a[4, 3], a[8, 1] = big, big, float("inf")
    got = exact_bmm(a[None], b[None], window=window, balance="keys")[0]
    assert same(got, keys_oracle(a, b, window))
    assert not got[:6].isnan().any() and (bits(got[6:]) == NAN).all()


@pytest.mark.parametrize("window", WINDOWS)
def test_keys_that_take_no_part_change_nothing(window):
    a, b = wild(3, 7, 20), wild(3, 20, 5, seed=1)
    a[:, :4, 9:] = 0
    a[:, 0, 1:] = 0
    want = exact_bmm(a, b, window=window, balance="keys")
    other = b.clone()
    other[:, 9:] = torch.tensor([1e30, float("nan"), -1e-30, float("inf"), 0.0])
    got = exact_bmm(a, other, window=window, balance="keys")
    assert same(got[:, :4], want[:, :4]) and got[:, 4:].isnan().all()
    short = exact_bmm(a[:, :4, :9], b[:, :9], window=window, balance="keys")
    assert same(short, want[:, :4])
    assert same(exact_bmm(a[:, :1, :1], b[:, :1], window=window, balance="keys"), want[:, :1])
    order = torch.randperm(20)
    assert same(exact_bmm(a[..., order], b[:, order], window=window, balance="keys"), want)
    shared = exact_bmm(a, b[:1].expand(3, 20, 5), window=window, balance="keys")
    assert same(shared[1:2], exact_bmm(a[1:2], b[:1], window=window, balance="keys"))


@pytest.mark.parametrize("window", WINDOWS)
def test_short_contractions_and_empty_shapes(window):
    a, b = wild(5, 1), wild(1, 6, seed=1)
    a[0], b[0, 0], b[0, 1] = float("inf"), 0.0, float("nan")
    want = a * b
    want[want.isnan()] = float("nan")
    assert same(exact_mm(a, b, window=window, balance="weight"), want)
    bias = wild(6, seed=2)
    assert same(exact_mm(a[1:], b[:, 2:], window=window, bias=bias[2:]), want[1:, 2:] + bias[2:])
    none = exact_mm(
        torch.empty(5, 0), torch.empty(0, 6), window=window, bias=bias, out_dtype=torch.bfloat16
    )
    assert same(none, bias.expand(5, 6).bfloat16())
    assert same(exact_mm(torch.empty(5, 0), torch.empty(0, 6), window=window), torch.zeros(5, 6))
    assert exact_mm(torch.empty(0, 3), torch.empty(3, 6), window=window).shape == (0, 6)
    assert exact_bmm(torch.empty(2, 4, 3), torch.empty(2, 3, 0), window=window).shape == (2, 4, 0)


def test_totals_beyond_int64():
    """K > 2^17 in X3: all products alike and as large as they come, so T leaves int64."""
    k = 160_001
    a = torch.full((2, k), 1.984375)
    b = torch.full((k, 2), 1.984375)
    a[0, ::3] = -1.3
    b[5, 1] = 0.7
    got = exact_mm(a, b, window=24)
    qa, qb = quantize.quantize(a, 24, -1), quantize.quantize(b, 24, -2)
    for i in range(2):
        for j in range(2):
            total = sum(
                int((x.to(torch.int64) * y.to(torch.int64)).sum())
                for x, y in zip(qa.q[i].split(60_000), qb.q[:, j].split(60_000), strict=True)
            )
            power = int(qa.exponents[i] + qb.exponents[j])
            assert got[i, j].item() == times(rn(Fraction(total)), power)
            assert j or not i or abs(total) >= 2**63


def test_two_word_rounding():
    """Ties, and a dropped word that breaks one, on both sides of int64."""
    g = torch.Generator().manual_seed(0)
    totals = [sign * ((m << shift) + low) for sign in (1, -1) for shift in (0, 7, 38, 39, 40, 52)
              for m in (1 << 24, (1 << 24) + 1, (1 << 25) - 1, (1 << 25) - 2, (1 << 25) + 2)
              for low in (-1, 0, 1) + ((1 << shift - 1, (1 << shift - 1) + 1) if shift else ())]  # fmt: skip
    totals += [int(v) * (1 << 15) for v in torch.randint(-(2**62), 2**62, (200,), generator=g)]
    high = torch.tensor([t >> 32 for t in totals])
    low = torch.tensor([t & 0xFFFFFFFF for t in totals])
    assert matmul.round_two_words(high, low).tolist() == [rn(Fraction(t)) for t in totals]
    fits = torch.tensor([t for t in totals if abs(t) < 2**63])
    assert fits.float().tolist() == [rn(Fraction(int(t))) for t in fits]


# ---- quantisation ----


@pytest.mark.parametrize("window", WINDOWS)
def test_digits_round_trip(window):
    x = wild(50, 200)
    x[7] = torch.linspace(1.9, 1.9844, 200)
    q = quantize.quantize(x, window, -1).q
    limit = 2 ** (window - 1) * 128 / 129 + 0.5
    assert q.abs().max() <= limit
    planes = quantize.digits(q, window)
    assert planes.shape[0] == quantize.DIGITS[window]
    assert torch.equal(sum(p.double() * 256.0**i for i, p in enumerate(planes)), q)


def test_caller_tensors_are_untouched():
    a, b = wild(4, 6), wild(6, 4)
    keep = a.clone(), b.clone()
    exact_mm(a, b, window=24, balance="weight", bias=b[0])
    assert same(a, keep[0]) and same(b, keep[1])


def test_refusals():
    x = torch.ones(3, 3)
    with pytest.raises(TypeError, match="float64"):
        exact_mm(x.double(), x, window=24)
    with pytest.raises(ValueError, match="window"):
        exact_mm(x, x, window=20)
    with pytest.raises(ValueError, match="balance"):
        exact_mm(x, x, window=24, balance="both")
    with pytest.raises(ValueError, match="balance"):
        exact_bmm(x[None], x[None], window=24, balance="weight")
    with pytest.raises(ValueError, match="cannot multiply"):
        exact_mm(x, x[:2], window=24)
    with pytest.raises(ValueError, match="cannot multiply"):
        exact_bmm(x[None], x[None].expand(2, 3, 3), window=24)


# ---- accuracy, relative Frobenius error against float64 ----


def error(got, a, b):
    want = a.double() @ b.double()
    return ((got.double() - want).norm() / want.norm()).item()


def test_accuracy_gaussian():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 4096, generator=g), torch.randn(4096, 64, generator=g)
    assert error(exact_mm(a, b, window=24), a, b) <= 1.5 * error(a @ b, a, b)
    a, b = a.bfloat16(), b.bfloat16()
    assert error(exact_mm(a, b, window=16), a, b) < 2e-5


def test_balances_keep_accuracy():
    """Outlier channels meeting small weights; token scales that differ in a weight gradient."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 1024, generator=g), torch.randn(1024, 64, generator=g)
    x[:, ::100] *= 1000
    w[::100] /= 1000
    plain, balanced = (
        error(exact_mm(x, w, window=16, balance=b), x, w) for b in ("none", "weight")
    )
    assert balanced < 1e-4 and balanced < plain / 100
    tokens = torch.exp(2 * torch.randn(1024, 1, generator=g))
    a, dc = torch.randn(1024, 64, generator=g) / tokens, torch.randn(1024, 64, generator=g) * tokens
    plain, balanced = (
        error(exact_mm(a.t(), dc, window=16, balance=b), a.t(), dc) for b in ("none", "gradient")
    )
    assert balanced < 1e-4 and balanced < plain / 100


# ---- plans ----


@pytest.mark.parametrize("window", WINDOWS)
def test_plans_cannot_overflow(window):
    h100 = launch.Hardware((9, 0), 132)
    pairs = window // 8
    for m, n, k in (
        (4096, 4096, 4096),
        (16, 4096, 4096),
        (768, 3072, 16384),
        (1, 1, 200_000),
        (64, 64, 1 << 20),
    ):
        plan = launch.gemm_plan(m, n, k, window, 1, h100)
        for other in launch.variants(plan, launch.padded_contraction(k), window):
            assert other.span % other.bk == 0 and other.span <= launch.SPAN_LIMIT[window]
        assert plan.span % plan.bk == 0 and plan.splits == -(
            -launch.padded_contraction(k) // plan.span
        )
        assert pairs * plan.span * 2**14 + 2**31 // 256 * (pairs - 1) / pairs < 2**31
        assert plan.words == (0 if plan.splits == 1 else 1 if k <= launch.WORD_LIMIT[window] else 2)
        assert set(plan.describe()) >= {"engine", "tile", "split_k", "warps", "stages"}
    assert launch.gemm_plan(256, 768, 16384, window, 1, h100, totals=True).splits > 1
    assert launch.gemm_plan(4096, 4096, 4096, window, 1, h100).specialised
    assert launch.gemm_plan(16, 4096, 4096, window, 1, h100).swap


@pytest.mark.parametrize("window", WINDOWS)
def test_a_last_wave_is_cut_where_that_pays(window):
    h100 = launch.Hardware((9, 0), 132)
    plan = functools.partial(launch.gemm_plan, window=window, batch=1, hw=h100)

    # 144 tiles of 128 x 128 are one wave and twelve tiles, and those of 64 x 128, two a multiprocessor, as much.
    gradient = plan(768, 3072, 4096)
    rest = launch.rest(gradient, 768, 3072, 1)
    assert (gradient.bm * rest, gradient.bn, gradient.splits, gradient.words) == (128 * 12, 128, 1, 0)
    assert gradient.places // 2 <= rest * gradient.parts <= 2 * gradient.places
    assert f"last wave in {gradient.parts} parts" in gradient.describe()["schedule"]
    time = functools.partial(launch.expected, m=768, n=3072, padded=4096, window=window, batch=1, hw=h100)
    assert time(gradient) < 0.9 * time(plan(768, 3072, 4096, totals=True))

    for options in ({"totals": True}, {"causal": True}, {"engine": "bf16"}, {"hw": launch.Hardware((8, 0), 108)}):
        assert plan(768, 3072, 4096, **options).parts == 1, options
    for m, n, k in ((768, 2304, 4096), (512, 512, 512), (256, 768, 16384), (4096, 50257, 768), (130, 70, 9001)):
        padded = launch.padded_contraction(k)
        base = [launch.split(replace(x, programs=x.programs * 132), padded, window, 1) for x in launch._HOPPER[window]]
        for cut in [x for y in base for x in launch.cut_last_wave(y, padded, window, h100)]:
            parts, span = cut.cut(padded)
            assert parts == cut.parts > 1 and span % cut.bk == 0 and (parts - 1) * span < padded <= parts * span
            tiles, rest = -(-m // cut.bm) * -(-n // cut.bn), launch.rest(cut, m, n, 1)
            assert (tiles - rest) % cut.places == 0 and 0 <= rest < cut.places
            assert launch.split(cut, padded, window, 2).rest(tiles) == 0
        chosen = plan(m, n, k)
        assert (chosen.parts > 1) == launch.cuts(chosen, m, n, 1)
    launch.override(768, 3072, 4096, window, 1, gradient)
    try:
        pinned = [plan(768, 3072, 4096, **options).parts for options in ({}, {"totals": True}, {"causal": True})]
    finally:
        launch.override(768, 3072, 4096, window, 1, None)
    assert pinned == [gradient.parts, 1, 1]
    assert {x.parts for x in launch.variants(gradient, 4096, window)} >= {1, 2, 5, gradient.parts}


# ---- kernels in the Triton interpreter ----

INTERPRETED = """
from tests.interpreter import patch
patch()
import torch
from dataclasses import replace
from carbon_compile.templates import launch, matmul, matmul_kernels, matmul_recipe, quantize
from carbon_compile.templates import quantize_kernels as kernels

g = torch.Generator().manual_seed(0)
a = torch.randn(21, 150, generator=g) * torch.exp(2 * torch.randn(21, 150, generator=g))
b = torch.randn(150, 19, generator=g) * torch.exp(2 * torch.randn(150, 19, generator=g))
a[3], b[:, 5], b[20], a[6], a[7] = 0, 0, 0, a[6] * 1e-42, a[7] * 3e37
a[4, 7], b[9, 3] = float("inf"), float("nan")
b[21] *= 1e-41
b[:, 4] *= 1e-40  # products that vanish keep their sign
bias = torch.randn(19, generator=g)

def bits(x):
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])

levels = launch.Plan(32, 32, 64, 4, 1)
joint = launch.Plan(32, 16, 64, 4, 1, joint=True, swap=True, tma=True)
cases = [("none", torch.float32, levels, 1, a, b), ("weight", torch.bfloat16, joint, 1, a, b.t().contiguous().t()),
         ("gradient", torch.float16, levels, 3, a.t().contiguous().t(), b), ("weight", torch.float32, joint, 2, a, b)]
for window in (16, 24):
    for balance, dtype, plan, splits, x, y in cases:
        want = matmul.exact_mm(x, y, window=window, balance=balance, bias=bias, out_dtype=dtype)
        plan = launch.split(plan, 256, window, splits)
        for words in ({1, 2} if plan.words else {0}):
            got = matmul_kernels.multiply(x, y, window, balance, bias.expand(21, 19), dtype, plan=replace(plan, words=words))
            assert torch.equal(bits(got), bits(want)), (window, balance, dtype, plan, words)
    for plan in (levels, joint):
        plan = launch.split(plan, 256, window, 1)
        got = matmul_kernels.multiply(a, b, window, "weight", bias.expand(21, 19), torch.float32, transposed=True, plan=plan)
        assert got.t().is_contiguous()
        assert torch.equal(bits(got), bits(matmul.exact_mm(a, b, window=window, balance="weight", bias=bias)))
    x, y = a[:20].view(2, 10, 150), b[:, :8].expand(2, 150, 8)
    got = matmul_kernels.multiply(x, y, window, "none", None, torch.float32, plan=launch.split(levels, 256, window, 1))
    assert torch.equal(bits(got), bits(matmul.exact_bmm(x, y, window=window)))

    x, y = a[:20].view(2, 10, 150).clone(), b[:, :16].reshape(150, 2, 8).transpose(0, 1)
    x[0, :4, 9] = 0
    for y in (y, b[:, :8].expand(2, 150, 8)):
        got = matmul_kernels.multiply(x, y, window, "keys", None, torch.float32, plan=launch.split(levels, 256, window, 1))
        assert torch.equal(bits(got), bits(matmul.exact_bmm(x, y, window=window, balance="keys"))), window

# A last wave in parts, of several sizes, after whole tiles and alone; the edges of tiles are beyond the result's.
pieces = launch.Plan(16, 16, 64, 4, 1, parts=4, places=3, group=1)
wide = launch.Plan(128, 256, 64, 4, 1, parts=2, places=2)
cases = [("none", torch.float32, pieces, a, b), ("weight", torch.bfloat16, replace(pieces, joint=True, tma=True, places=8), a, b.t().contiguous().t()),
         ("gradient", torch.float16, replace(pieces, parts=2, group=8), a.t().contiguous().t(), b),
         ("weight", torch.float32, replace(pieces, bn=32, swap=True, places=4), a, b), ("weight", torch.float32, wide, a, b)]
for window in (16, 24):
    for balance, dtype, plan, x, y in cases:
        plan = launch.split(plan, 256, window, 1)
        recipe = matmul_kernels.prepare(x, y, window, balance, bias.expand(21, 19), plan=plan)
        names = [step.kernel.__name__ for step in recipe.launches[recipe.quantising :]]
        assert names == ["gemm_kernel", "finish_parts_kernel"], (names, plan)
        assert not recipe.sizes[matmul_recipe.ZEROS]
        buffers = [x, y, bias.expand(21, 19), torch.empty(21, 19, dtype=dtype), *recipe.scratch("cpu")]
        buffers[matmul_recipe.WORK].random_(0, 256)
        recipe.run(buffers)
        want = matmul.exact_mm(x, y, window=window, balance=balance, bias=bias, out_dtype=dtype)
        assert torch.equal(bits(buffers[matmul_recipe.OUT]), bits(want)), (window, balance, dtype, plan)
    plan = launch.split(pieces, 256, window, 1)
    got = matmul_kernels.multiply(a, b, window, "weight", bias.expand(21, 19), torch.float32, transposed=True, plan=plan)
    assert got.t().is_contiguous()
    assert torch.equal(bits(got), bits(matmul.exact_mm(a, b, window=window, balance="weight", bias=bias)))
    x, y, column = a[:20].view(2, 10, 150).repeat(1, 2, 1), b[:, :8].expand(2, 150, 8), torch.randn(2, 20, 1, generator=g).expand(2, 20, 8)
    got = matmul_kernels.multiply(x, y, window, "none", column, torch.float32, plan=plan)  # four tiles over two batches
    assert torch.equal(bits(got), bits(matmul.exact_bmm(x, y, window=window, bias=column)))
    # What causality has zeros in is not cut in parts.
    got = matmul_kernels.multiply(x, y, window, "none", None, torch.float32, plan=plan, causal=20)
    assert torch.equal(bits(got), bits(matmul.exact_bmm(x, y, window=window, causal=20)))

# The quick way of quantising, up to its limits and beyond.
small = launch.split(levels, 64, 24, 1)
for ea, eb, spread in ((0, 0, 0), (-98, 0, 3), (-101, 30, 2), (120, -60, 6), (3, -125, 8), (0, 124, 3), (-60, -60, 40)):
    x = torch.randn(21, 40, generator=g) * torch.exp2(ea + torch.randint(-spread, spread + 1, (21, 40), generator=g))
    y = torch.randn(40, 9, generator=g) * torch.exp2(eb + torch.randint(-spread, spread + 1, (40, 1), generator=g))
    x[13], x[:, 3], y[5], y[:, 2] = 0, 0, 0, 0
    for window in (16, 24):
        for balance in ("none", "weight", "gradient"):
            got = matmul_kernels.multiply(x, y, window, balance, None, torch.float32, plan=replace(small))
            assert torch.equal(bits(got), bits(matmul.exact_mm(x, y, window=window, balance=balance))), (ea, eb, spread, window, balance)
        got = matmul_kernels.multiply(x[None], y[None], window, "keys", None, torch.float32, plan=replace(small))
        assert torch.equal(bits(got), bits(matmul.exact_bmm(x[None], y[None], window=window, balance="keys"))), (ea, eb, spread, window)

long = torch.randn(3, 9000, generator=g)
tall = torch.randn(9000, 3, generator=g)
tall[7], tall[8, 1], tall[9] = 0, float("inf"), tall[9] * 1e-42
long[:2, 8] = 0
got = matmul_kernels.multiply(long[None], tall[None], 24, "keys", None, torch.float32)
assert torch.equal(bits(got), bits(matmul.exact_bmm(long[None], tall[None], window=24, balance="keys")))
long = torch.randn(3, 9000, generator=g)
for x, dim in ((long, -1), (long.t().contiguous(), -2)):
    recipe = matmul_recipe.Recipe()
    one = kernels.operand(x, matmul_recipe.A, dim)
    d, _ = kernels.quantize(recipe, one, one, 24)
    buffers = (x, None, None, None, *recipe.scratch("cpu"))
    recipe.run(buffers)
    q = quantize.quantize(x, 24, dim)
    planes = quantize.digits(q.q if dim == -1 else q.q.t(), 24)
    digits = matmul_recipe.view(buffers, d.digits).view(3, 3, d.padded)
    assert torch.equal(digits[:, :, :9000], planes) and not digits[:, :, 9000:].any()
    assert torch.equal(matmul_recipe.view(buffers, d.exponents), q.exponents)
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        capture_output=True,
        text=True,
    )
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


def test_quantisation_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.quantize_checks"], env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.stdout == "60 equal\n", run.stdout + run.stderr[-3000:]


OFFLINE = """
import torch

from carbon_compile.templates import matmul_kernels
from tests.offline import pretend


def meta(*shape, dtype=torch.float32): return torch.empty(shape, dtype=dtype, device="meta")

def products():
    # Sizes and strides of 1 reach a kernel as constants.
    for m, n, k in ((1, 1, 2), (1, 260, 300), (70, 1, 130)):
        yield meta(m, k), meta(k, n), "weight", meta(n).expand(m, n), torch.bfloat16
        yield meta(k, m).t(), meta(k, n), "gradient", None, torch.float32
        yield meta(1, m, k), meta(1, k, n), "keys", None, torch.float32
    yield meta(3, 20, 50, dtype=torch.float16), meta(1, 50, 9, dtype=torch.float16).expand(3, 50, 9), "none", None, torch.float16

compiled = 0
for capability in (80, 90, 100):
    pretend(capability)
    for a, b, balance, bias, dtype in list(products())[:: 1 if capability == 90 else 3]:
        recipe = matmul_kernels.prepare(a, b, 24, balance, bias, device=torch.device("cuda"))
        recipe.warm((a.dtype, b.dtype, None if bias is None else bias.dtype, dtype))
        compiled += len(recipe.launches)
print("compiled", compiled)
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    pytest.importorskip("triton")
    assert printed(OFFLINE).startswith("compiled")


ELSEWHERE = """
import contextlib, os, torch, triton

from carbon_compile import host
from carbon_compile.templates import matmul
from tests.offline import pretend

pretend(90)
torch.cuda.device = lambda device: contextlib.nullcontext()
found = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: found.append((src.name, cache_hit))

def meta(*shape): return torch.empty(shape, dtype=torch.bfloat16, device="meta")

device = torch.device("cuda")
products = [(meta(4096, 768), meta(768, 3072), dict(window=16, balance="weight"))] * 2
matmul.precompilation(products, device, host.compile_processes(device))()
assert {name for name, _ in found} >= {"quantize_kernel", "specialised_kernel"}, found
assert all(hit for _, hit in found) and os.environ["TRITON_CACHE_DIR"].startswith(os.environ["TORCHINDUCTOR_CACHE_DIR"]), found
print("compiled", len(found))
"""


def test_kernels_are_compiled_in_other_processes(tmp_path):
    """This process only loads them; no process needs a GPU for it."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "2", "TORCHINDUCTOR_WORKER_START": "subprocess"}
    run = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=300, cwd=os.path.dirname(os.path.dirname(__file__)), env=environment)
    assert run.stdout.startswith("compiled"), run.stderr[-3000:]


RESOURCES = """
import os, subprocess, tempfile, torch, triton
from dataclasses import replace
from tests.offline import pretend

pretend(90)
from carbon_compile.templates import launch, matmul_kernels, matmul_recipe

dump = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")

def meta(*shape, dtype): return torch.empty(shape, dtype=dtype, device="meta")

def used(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([dump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(word.split(":")[:2] for word in text.split() if word.startswith(("REG:", "STACK:")))
    return int(found["REG"]), int(found["STACK"])

for window, dtype in ((16, torch.bfloat16), (24, torch.float32)):
    a, b = meta(4096, 768, dtype=dtype).t(), meta(4096, 3072, dtype=dtype)
    for plan in launch._HOPPER[window]:
        if not plan.specialised:
            continue
        plan = replace(launch.split(plan, 4096, window, 1), programs=132 * plan.programs, parts=11, places=132 * (plan.programs or 1))
        recipe = matmul_kernels.prepare(a, b, window, "gradient", None, plan=plan)
        for step in recipe.launches[recipe.quantising :]:
            arguments = [matmul_recipe._stand_ins((dtype, dtype, None, dtype), x) for x in step.arguments]
            kernel = step.kernel.warmup(*arguments, grid=(step.grid,), **step.constants)
            registers, stack = used(kernel)
            threads = 32 * (4 if step.kernel.__name__ == "finish_parts_kernel" else plan.warps + 4)  # the loader has a group of warps too
            together = plan.programs // 132 or 1
            print(window, step.kernel.__name__, plan.bm, plan.bn, plan.bk, registers, stack, kernel.metadata.shared)
            assert stack == 0 and registers * threads * together <= 65536 and kernel.metadata.shared * together <= 227 << 10
print("fit")
"""


def test_parts_neither_spill_nor_keep_programs_apart():
    """What stores results or the totals of parts fits where what only stores results does."""
    pytest.importorskip("triton")
    assert printed(RESOURCES).endswith("fit\n")


class Recorded:
    """A kernel that notes what it is launched with, the ordinary way or by its compiled form."""

    def __init__(self, kernel, calls):
        self.arg_names, self.calls = kernel.arg_names, calls
        self.function, self.packed_metadata, self.key = object(), object(), kernel

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            names = self.arg_names[len(arguments) :]
            self.note(grid[0], [*arguments, *(constants[name] for name in names)])
            return self

        return launch

    def run(self, x, y, z, stream, function, metadata, given, enter, leave, *arguments):
        assert (y, z, stream) == (1, 1, 7) and (given, enter, leave) == (None, None, None)
        assert function is self.function and metadata is self.packed_metadata
        self.note(x, arguments)

    def note(self, grid, arguments):
        self.calls.append((self.key, grid, [self.plain(x) for x in arguments]))

    def plain(self, x):
        if hasattr(x, "base"):  # a tensor descriptor
            return x.base.data_ptr(), x.shape, x.strides, x.padding
        return x.data_ptr() if isinstance(x, torch.Tensor) else x


def recipes():
    """Products whose recipes differ: operands, balance, bias, plan."""
    a, b = wild(21, 150), wild(150, 19, seed=1)
    bias = wild(19, seed=2).expand(21, 19)
    levels = launch.split(launch.Plan(128, 128, 128, 8, 3, tma=True), 256, 24, 1)
    joint = launch.Plan(128, 128, 64, 8, 4, joint=True, specialised=True)
    swapped = launch.split(
        launch.Plan(128, 32, 128, 4, 4, joint=True, tma=True, swap=True), 256, 24, 2
    )
    yield a, b, "none", None, launch.split(launch.Plan(32, 32, 64, 4, 1), 256, 24, 3)
    yield a, b, "weight", bias, levels
    yield a.t().contiguous().t(), b, "gradient", None, launch.split(joint, 256, 24, 2)
    yield a, b, "none", None, launch.split(replace(joint, programs=1), 256, 24, 2)
    yield a, b, "weight", bias, replace(launch.split(joint, 256, 24, 1), parts=4, places=8)
    yield a, b, "weight", bias, replace(levels, bm=16, bn=16, parts=2, places=3)
    yield a, b, "weight", bias, swapped
    streamed = launch.Plan(32, 32, 64, 4, 3, swap=True, streamed=True, groups=2)
    yield a, b, "weight", bias, launch.split(streamed, 256, 24, 2)
    yield (
        wild(2, 5, 9000),
        wild(2, 9000, 6, seed=3),
        "keys",
        None,
        launch.split(levels, 9088, 24, 1),
    )


def test_a_replayed_product_launches_the_same():
    pytest.importorskip("triton")
    from carbon_compile.templates import matmul_kernels

    for a, b, balance, bias, plan in recipes():
        recipe = matmul_kernels.prepare(a, b, 24, balance, bias, plan=plan)
        ordinary, replayed = [], []
        recipe.launches = [x._replace(kernel=Recorded(x.kernel, ordinary)) for x in recipe.launches]
        out = torch.empty(*a.shape[:-1], b.shape[-1])
        buffers = (a, b, bias, out, *recipe.scratch("cpu"))
        recipe.run(buffers)
        if not recipe.replays:
            pytest.skip("this Triton's launcher has not been compared: products take the ordinary way")
        for step in recipe.launches:
            step.kernel.calls = replayed
        recipe.replay([0 if x is None else x.data_ptr() for x in buffers], 7)
        assert ordinary == replayed and len(ordinary) == len(recipe.launches)


NATIVE = """
import torch, triton
if not triton.__version__.startswith("3.6."):
    raise SystemExit(print("skipped"))
from triton.backends.nvidia import driver
from tests.offline import pretend

pretend(90)
from carbon_compile.templates import matmul_kernels, matmul_recipe as recipes


class Launch:  # the C function
    def __call__(self, *arguments):
        calls.append(arguments)

class Utils:
    def fill_tma_descriptor(self, *arguments):
        encoded.append(arguments)
        return ("encoded", repr(arguments))

class Kernel:
    def __init__(self, compiled):
        self.run, self.function, self.packed_metadata = driver.CudaLauncher(compiled.src, compiled.metadata), 5, (8, 1, 0)

driver.compile_module_from_src = lambda *args, **kwargs: type("Module", (), {"launch": Launch()})
driver.library_dirs = lambda: []
triton.runtime.driver.active.utils = Utils()

def meta(*shape, dtype=torch.bfloat16): return torch.empty(shape, dtype=dtype, device="meta")

T = 4096
products = [
    (meta(T, 768), meta(3072, 768).t(), "weight", meta(3072).expand(T, 3072)),
    (meta(T, 3072), meta(3072, 768), "weight", None),
    (meta(T, 3072).t(), meta(T, 768), "gradient", None),
    (meta(8, 256, 256, dtype=torch.float32).mT, meta(8, 256, 64), "keys", None),
]
at, launches, described = [(i + 1) << 20 for i in range(7)], 0, 0
for a, b, balance, bias in products:
    recipe = matmul_kernels.prepare(a, b, 16, balance, bias, device=torch.device("cuda"))
    for step in recipe.launches:
        stand_ins = [recipes._stand_ins((a.dtype, b.dtype, torch.bfloat16, torch.bfloat16), x) for x in step.arguments]
        kernel = Kernel(step.kernel.warmup(*stand_ins, grid=(step.grid,), **step.constants))
        calls, encoded = [], []
        plain = []
        for x in [*step.arguments, *(step.constants[n] for n in step.kernel.arg_names[len(step.arguments):])]:
            if isinstance(x, recipes.Tiles):
                x = recipes._Address(at[x.block.buffer] + x.block.offset, [x.rows, x.columns], [x.columns, 1])
            plain.append(at[x.buffer] + x.offset if isinstance(x, recipes.Block) else x)
        kernel.run(step.grid, 1, 1, 7, kernel.function, kernel.packed_metadata, None, None, None, *plain)
        assert recipes._native_launcher(kernel) is not None
        again = recipes._compiled(step, kernel)
        ordinary = len(encoded)
        again(at, 7)
        again(at, 7)
        assert calls[0] == calls[1] == calls[2], (step.kernel, calls)
        assert len(encoded) == 2 * ordinary  # once, not at every launch
        launches, described = launches + 1, described + ordinary
print("the same", launches, described)
"""


def test_replays_reach_the_launcher_as_triton_does():
    """With what Triton's own Python makes of the arguments, tensor descriptors included."""
    pytest.importorskip("triton")
    out = printed(NATIVE)
    if out == "skipped\n":
        pytest.skip("only Triton 3.6 is launched without its own Python")
    assert out.startswith("the same 13 6"), out


def test_signatures_tell_products_apart():
    a, b, bias = torch.zeros(8, 12), torch.zeros(12, 5), torch.zeros(5)
    wide = torch.zeros(8, 13)
    options = dict(window=24, balance="weight", bias=None, out_dtype=torch.float32, engine="int8")
    changes = [
        {}, {"a": wide[:, :12]}, {"a": wide[:, 1:]}, {"a": a.t().contiguous().t()}, {"a": a[:7]},
        {"a": a.bfloat16()}, {"b": torch.zeros(61)[1:].view(12, 5)}, {"b": b[:, :4]},
        {"window": 16}, {"balance": "none"},
        {"bias": bias}, {"bias": bias.bfloat16()}, {"bias": torch.zeros(6)[1:]}, {"bias": bias[None]},
        {"out_dtype": torch.float16}, {"engine": "bf16"}, {"transposed": True},
    ]  # fmt: skip
    keys = [matmul._signature(**{"a": a, "b": b, **options, **change}) for change in changes]
    assert len(set(keys)) == len(keys)
    assert matmul._signature(a + 1, b + 1, **options) == keys[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("engine", ("int8", "bf16"))
def test_gpu_equals_cpu(window, engine):
    for m, n, k in ((1, 1, 2), (17, 129, 257), (64, 300, 1000), (300, 200, 77), (130, 70, 9001)):
        for balance in matmul.BALANCES:
            for dtype in matmul.OPERANDS:
                a, b = wild(m, k, dtype=dtype, seed=m), wild(k, n, dtype=dtype, seed=n)
                want = exact_mm(a, b, window=window, balance=balance, out_dtype=dtype)
                for x, y in ((a, b), (a.t().contiguous().t(), b.t().contiguous().t())):
                    got = exact_mm(
                        x.cuda(),
                        y.cuda(),
                        window=window,
                        balance=balance,
                        out_dtype=dtype,
                        engine=engine,
                    )
                    assert same(got.cpu(), want)
        if engine == "int8":
            a, b = wild(2, m, k, seed=m), wild(2, k, n, seed=n)
            want = exact_bmm(a, b, window=window, balance="keys")
            for x, y in ((a, b), (a.mT.contiguous().mT, b.mT.contiguous().mT)):
                got = exact_bmm(x.cuda(), y.cuda(), window=window, balance="keys")
                assert same(got.cpu(), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", WINDOWS)
def test_gpu_last_waves_in_parts(window):
    """Whole tiles and parts of others in one launch, by each of Hopper's plans and as replayed; also parts alone,
    and tiles over several batches."""
    from carbon_compile.templates import matmul_kernels

    if launch.hardware(torch.device("cuda")).capability[0] != 9:
        pytest.skip("plans of Hopper")
    a, b, bias = wild(300, 1000, seed=1), wild(1000, 401, seed=2), wild(401, seed=3)
    a[1], a[2, 5], b[:, 3] = 0, float("inf"), b[:, 3] * 1e-40
    x, y = wild(3, 150, 600, seed=4), wild(3, 600, 130, seed=5)
    dtype = torch.bfloat16 if window == 16 else torch.float32
    mm = exact_mm(a, b, window=window, balance="gradient", bias=bias, out_dtype=dtype)
    bmm = exact_bmm(x, y, window=window, out_dtype=dtype)
    plans = [replace(plan, programs=n) for plan in launch._HOPPER[window] for n in ((0, 3, 5) if plan.specialised else (0,))]
    wrong = []
    for plan in plans:
        for parts, places in ((2, 5), (4, 7), (3, 1000)):
            cut = replace(launch.split(plan, 1024, window, 1), parts=parts, places=places)
            on = a.cuda(), b.cuda(), bias.cuda().expand(300, 401)
            for transposed in (False, True):
                got = matmul_kernels.multiply(*on[:2], window, "gradient", on[2], dtype, transposed=transposed, plan=cut)
                if not same(got.cpu(), mm):
                    wrong.append((cut, transposed))
            cut = replace(launch.split(plan, 640, window, 1), parts=parts, places=places)
            if not same(matmul_kernels.multiply(x.cuda(), y.cuda(), window, "none", None, dtype, plan=cut).cpu(), bmm):
                wrong.append((cut, "batches"))
    assert not wrong, "\n".join(map(str, wrong))
    a, b = wild(768, 2048, seed=6), wild(2048, 3072, seed=7)  # chosen by the model, and replayed
    assert launch.rest(launch.gemm_plan(768, 3072, 2048, window, 1, launch.Hardware((9, 0), 132)), 768, 3072, 1)
    want = exact_mm(a, b, window=window)
    assert all(same(exact_mm(a.cuda(), b.cuda(), window=window).cpu(), want) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", WINDOWS)
def test_gpu_replays_are_the_product(window):
    """First call, replay and CPU twin on alignments, strides and sizes of every kind."""

    def layouts(rows, k, dtype, seed):
        x = wild(rows, k + 1, dtype=dtype, seed=seed)
        yield x[:, :k].contiguous()
        yield x[:, 1:]
        yield x[:, :k]
        yield x.t().contiguous().t()[:, 1:]
        yield x[:, :1].expand(rows, k)

    for dtype in matmul.OPERANDS:
        for m, n, k in ((33, 48, 128), (16, 129, 257), (200, 96, 1000)):
            for a, b in zip(
                layouts(m, k, dtype, 1), reversed([*layouts(n, k, dtype, 2)]), strict=True
            ):
                for balance, bias in (("weight", wild(n + 1)[1:]), ("gradient", None)):
                    options = dict(window=window, balance=balance, out_dtype=dtype)
                    launch.prepared.clear()
                    for scale in (1, -3, 0):  # other values, other addresses
                        x, y = a * scale if scale != 1 else a, b.t()
                        want = exact_mm(x, y, bias=bias, **options)
                        on = [t if t is None else on_gpu(t) for t in (x, y, bias)]
                        got = exact_mm(on[0], on[1], bias=on[2], **options)
                        assert same(got.cpu(), want), (dtype, m, n, k, balance, scale, a.stride())
                    assert len(launch.prepared) >= 1


def on_gpu(x):
    """A copy with the same strides and the same alignment."""
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).cuda()
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_precompiled_products_compile_nothing_more(monkeypatch):
    from triton.runtime.jit import JITFunction

    a, b, bias = wild(96, 640), wild(640, 80, seed=1), wild(80, seed=2)
    cases = [
        (a, b, dict(window=16, balance="weight", bias=bias)),
        (a, b, dict(window=24, balance="gradient", transposed=True, out_dtype=torch.bfloat16)),
        (a.expand(2, 96, 640), b.expand(2, 640, 80), dict(window=24, balance="keys")),
    ]
    matmul.precompilation([(x.to("meta"), y.to("meta"), o) for x, y, o in cases], torch.device("cuda"))()
    monkeypatch.setattr(JITFunction, "_do_compile", None)
    for x, y, o in cases:
        product = exact_mm if x.dim() == 2 else exact_bmm
        want = product(x, y, **o)
        o = {k: v.cuda() if k == "bias" else v for k, v in o.items()}
        assert same(product(x.cuda(), y.cuda(), **o).cpu(), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_products_in_a_graph():
    a, b = wild(200, 512).cuda(), wild(512, 300, seed=1).cuda()
    want = [exact_mm(a, b, window=24, balance=balance) for balance in matmul.BALANCES]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [exact_mm(a, b, window=24, balance=balance) for balance in matmul.BALANCES]
    for x in got:
        x.zero_()
    graph.replay()
    assert all(same(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_gpu_products_of_a_bfloat16_transformer(window):
    """The products of a GPT-2 256 wide, 2048 tokens, as autocast makes them: their tiles are larger than those above,
    results are bfloat16, and attention multiplies float32 weights by bfloat16 values."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=g) * scale).to(dtype)

    x, wide = draw(2048, 256), draw(2048, 1024)
    cases = {
        "qkv": (x, draw(256, 768, scale=0.02), {"balance": "weight", "bias": draw(768)}),
        "up": (x, draw(256, 1024, scale=0.02), {"balance": "weight", "bias": draw(1024)}),
        "down": (wide, draw(1024, 256, scale=0.02), {"balance": "weight", "bias": draw(256)}),
        "head": (x, draw(256, 256, scale=0.02).t(), {"balance": "weight"}),
        "input gradient": (wide, draw(256, 1024, scale=0.02).t(), {"balance": "weight"}),
        "weight gradient": (x.t(), wide, {"balance": "gradient"}),
        "scores": (draw(128, 128, 32), draw(128, 128, 32).mT, {"out_dtype": torch.float32}),
        "values": (torch.softmax(draw(128, 128, 128, dtype=torch.float32), -1), draw(128, 128, 32), {"balance": "keys"}),
        "keys' gradient": (draw(128, 128, 128, dtype=torch.float32).mT, draw(128, 128, 32), {"balance": "keys"}),
    }
    wrong = []
    for name, (a, b, options) in cases.items():
        product = exact_mm if a.dim() == 2 else exact_bmm
        options = {"window": window, "out_dtype": torch.bfloat16, **options}
        want = product(a, b, **options)
        moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        for call in ("first", "replayed"):
            got = product(on_gpu(a), on_gpu(b), **moved).cpu()
            if not same(got, want):
                wrong.append(f"{name}, {call}: {int((bits(got) != bits(want)).sum())} of {got.numel()} differ")
    assert not wrong, "\n".join(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_gpu_streams_and_graphs(window):
    """Prepared products on two streams at once, and in graphs: the bits of the first call and of the CPU."""

    x, w, dy = wild(4096, 384).bfloat16(), wild(1536, 384, seed=1).bfloat16(), wild(4096, 1536, seed=2).bfloat16()
    p, v = wild(24, 512, 512, seed=3), wild(24, 512, 64, seed=4).bfloat16()
    cases = [
        (x, w.t(), "weight"), (dy, w, "weight"), (dy.t(), x, "gradient"), (p, v, "keys"), (p.mT, v, "keys"),
        (wild(100, 9000).bfloat16(), wild(9000, 64, seed=1).bfloat16(), "weight"),
    ]  # fmt: skip
    cases = [(on_gpu(a), on_gpu(b), balance) for a, b, balance in cases]

    def products():
        return [(exact_mm if a.dim() == 2 else exact_bmm)(a, b, window=window, balance=balance, out_dtype=torch.bfloat16) for a, b, balance in cases]

    launch.prepared.clear()
    want = products()
    for a, b, balance in cases[3:]:
        on_cpu = (exact_mm if a.dim() == 2 else exact_bmm)(a.cpu(), b.cpu(), window=window, balance=balance, out_dtype=torch.bfloat16)
        assert any(same(on_cpu, x.cpu()) for x in want)
    got = [products() for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(products())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products()
    for _ in range(2):
        for out in captured:
            out.zero_()
        graph.replay()
    got.append(captured)
    assert all(same(x, y) for row in got for x, y in zip(row, want, strict=True))


def test_compiled_code_calls_products_directly():
    """Not by the dispatcher; where a mode wants to see operations, or on a CPU, by it after all."""
    from torch._inductor.utils import run_and_get_code
    from torch.utils._python_dispatch import TorchDispatchMode

    weight = wild(5, 8)
    compiled = torch.compile(lambda x: torch.nn.functional.linear(x, weight), backend="carbon")
    x = wild(3, 8, seed=1)
    out, (code,) = run_and_get_code(lambda: compiled(x))
    assert "torch.ops.carbon.mm_kernel.default.direct(" in code
    assert same(out, exact_mm(x, weight.t(), window=24, balance="weight"))

    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    overload, transposed = torch.ops.carbon.mm_kernel.default, weight.t()
    with Seen():
        again = overload.direct(x, transposed, None, 24, "weight", torch.float32)
    assert seen == [overload] and same(again, out)
