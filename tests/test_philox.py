"""Random programs: published vectors, a plain-integer oracle, and sanity of the distributions."""

import math

import pytest
import torch

from carbon_compile.lowering import philox
from carbon_compile.lowering.engines import TorchEngine as engine

KEY = (0x243F6A88, 0x85A308D3)
MASK = 0xFFFFFFFF


def draw(name, n=None, *arguments, key=KEY, index=None):
    program, _, dtype = philox.PROGRAMS[name]
    index = torch.arange(n) if index is None else index
    key_lo, key_hi = (torch.tensor(k) for k in key)
    out = program(engine, key_lo, key_hi, index, *arguments)
    assert out.dtype is dtype and out.shape == index.shape
    return out


def oracle(key, counter):
    """Philox4x32-10 as the paper writes it, in unbounded integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


# Known-answer vectors of Random123 (kat_vectors, philox 4x32 10): counter, key, words.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK, MASK), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", VECTORS)
def test_published_vectors(counter, key, words):
    number = counter[0] | counter[1] << 32
    assert philox.block(*key, number, counter[2:]) == words
    tensors = philox.block(*map(torch.tensor, key), torch.tensor(number & MASK), (counter[2], counter[3]))
    if counter[1] == 0:
        assert tuple(map(int, tensors)) == words
    assert oracle(key, counter) == words


def test_an_element_takes_its_word_of_its_block():
    index = torch.tensor([0, 1, 2, 3, 4, 1001, 2**31 + 6, 2**34, 2**34 + 7, 2**63 - 1])
    words = draw("philox", index=index).tolist()
    for i, word in zip(index.tolist(), words, strict=True):
        assert word == oracle(KEY, ((i >> 2) & MASK, i >> 34, 0, 0))[i & 3]


def test_a_part_of_the_tensor_draws_what_the_whole_draws():
    whole = draw("normal", 1000)
    assert torch.equal(whole[617:], draw("normal", index=torch.arange(617, 1000)))
    assert torch.equal(whole.view(40, 25).T, draw("normal", index=torch.arange(1000).view(40, 25).T))


def test_uniform_is_the_top_bits_of_the_word():
    words = draw("philox", 4096)
    for name, bits, dtype in [
        ("uniform_float32", 24, torch.float32),
        ("uniform_bfloat16", 8, torch.bfloat16),
        ("uniform_float16", 11, torch.float16),
    ]:
        u = draw(name, 4096)
        assert torch.equal(u, u.to(dtype).float()), "the storage type must hold the draw exactly"
        assert torch.equal(u.double() * 2.0**bits, (words >> (32 - bits)).double())
    u = draw("uniform_float64", 4)
    w = oracle(KEY, (0, 0, 0, 0)) + oracle(KEY, (1, 0, 0, 0))
    assert [int(x * 2.0**53) for x in u.tolist()] == [(w[2 * i] << 32 | w[2 * i + 1]) >> 11 for i in range(4)]


def test_threshold():
    assert [philox.threshold(p) for p in (0.0, 0.5, 1.0)] == [0, 2**31, 2**32]
    assert philox.threshold(2.0**-33) == 0 and philox.threshold(3 * 2.0**-33) == 2, "ties go to even"
    p = torch.tensor([0.0, 2.0**-33, 0.1, 0.5, 1.0, -1.0, 2.0, math.nan])
    expected = [philox.threshold(x) for x in p[:5].tolist()] + [0, 2**32, 0]
    assert philox.threshold_of(engine, p).tolist() == expected
    for bad in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="probability"):
            philox.threshold(bad)


def test_keep_and_bernoulli():
    n = 200_000
    for p in (0.1, 0.5, 0.9):
        kept = draw("keep", n, philox.threshold(p))
        assert torch.equal(kept, ~draw("bernoulli", n, philox.threshold(p)))
        assert abs(kept.double().mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / n)
    assert draw("keep", n, philox.threshold(0.0)).all()
    assert not draw("keep", n, philox.threshold(1.0)).any()
    each = philox.threshold_of(engine, torch.linspace(0, 1, n))
    assert abs(draw("bernoulli", n, each).double().mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    "low, high",
    [(0, 1), (0, 10), (-5, 6), (0, 2**31 + 3), (7, 2**32), (-(2**40), 3**30), (0, 2**63 - 1), (-(2**62), 2**62 - 1)],
)
def test_randint_is_the_scaled_64_bits(low, high):
    got = draw("randint", 256, low, high)
    for i, value in enumerate(got.tolist()):
        w = oracle(KEY, (i >> 1, 0, 0, 0))[2 * (i & 1) :]
        assert value == low + (((w[0] << 32 | w[1]) * (high - low)) >> 64)
    bounds = torch.tensor(low), torch.tensor(high)
    assert torch.equal(got, draw("randint", 256, *bounds)), "bounds may be values too"


def test_randint_is_even_and_refuses_bad_ranges():
    counts = draw("randint", 100_000, 0, 10).bincount(minlength=10).double()
    assert ((counts - 1e4) ** 2 / 1e4).sum() < 27.9  # chi-square, 9 degrees, p = 0.001
    for low, high in [(3, 3), (4, 1), (-(2**63), 2**63)]:
        with pytest.raises(ValueError, match="randint"):
            draw("randint", 4, low, high)


def test_sincos2pi_on_its_grid():
    eighths = torch.arange(0, 2**24 + 1, 2**21)
    near = (eighths[:, None] + torch.arange(-(2**12), 2**12 + 1)).flatten()
    k = torch.cat([near[(near >= 0) & (near <= 2**24)], torch.arange(1, 2**24, 13)])
    sine, cosine = philox.sincos2pi(engine, k.float() * 2.0**-24)
    # The reference reduces exactly too, so that it is accurate near the zeros.
    turn = (k + 2**21) >> 22
    f = (k - (turn << 22)).double() * (2 * math.pi * 2.0**-24)
    s, c = torch.sin(f), torch.cos(f)
    odd = (turn & 1) != 0
    for got, exact, flip in [
        (sine, torch.where(odd, c, s), turn & 2),
        (cosine, torch.where(odd, s, c), (turn + 1) & 2),
    ]:
        exact = torch.where(flip != 0, -exact, exact)
        ulp = torch.ldexp(torch.ones_like(exact), torch.frexp(exact.abs())[1] - 24)
        assert ((got.double() - exact).abs() <= 2 * ulp).all()


def distance_from(cdf, sample):
    """Kolmogorov and Smirnov's statistic times sqrt(n); 1.95 is the 0.1 % point."""
    x = sample.double().sort().values
    n = x.numel()
    f = cdf(x)
    steps = torch.arange(n).double() / n
    return float(torch.maximum(f - steps, steps + 1 / n - f).max()) * math.sqrt(n)


def test_uniform_distribution():
    u = draw("uniform_float32", 100_000)
    assert distance_from(lambda x: x, u) < 1.95
    assert 0 <= u.min() and u.max() < 1


def test_normal_distribution():
    z = draw("normal", 200_000)
    assert distance_from(lambda x: 0.5 * torch.erfc(-x / math.sqrt(2)), z) < 1.95
    assert abs(z.double().mean()) < 4 / math.sqrt(z.numel())
    assert abs(z.double().var() - 1) < 4 * math.sqrt(2 / z.numel())
    pairs = z.view(-1, 2).double()
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 4 / math.sqrt(len(pairs))


def test_normal_is_box_muller_of_the_pair():
    z = draw("normal", 8).double()
    words = oracle(KEY, (0, 0, 0, 0)) + oracle(KEY, (1, 0, 0, 0))
    for i in range(0, 8, 2):
        u, v = (((w >> 8) + 1) * 2.0**-24 for w in words[i : i + 2])
        r = math.sqrt(-2 * math.log(u))
        expected = torch.tensor([r * math.cos(2 * math.pi * v), r * math.sin(2 * math.pi * v)])
        torch.testing.assert_close(z[i : i + 2], expected.double(), rtol=1e-6, atol=1e-6)


def test_exponential_distribution():
    e = draw("exponential", 200_000)
    assert distance_from(lambda x: -torch.expm1(-x), e) < 1.95
    assert e.min() > 0


def test_keys_and_neighbours_are_independent():
    n = 100_000
    a = draw("uniform_float32", n, key=(0, 0)).double() - 0.5
    for other in [(1, 0), (0, 1), (0, 1 << 31), (MASK, MASK)]:
        b = draw("uniform_float32", n, key=other).double() - 0.5
        assert abs((a * b).mean()) * 12 < 4 / math.sqrt(n)
    for lag in (1, 2, 3, 4, 8):
        assert abs((a[lag:] * a[:-lag]).mean()) * 12 < 4 / math.sqrt(n)
