"""Products of causal attention that leave out what is zero: the bits of those that don't."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from carbon_compile.templates import launch, matmul
from carbon_compile.templates.matmul import exact_bmm

from .offline import printed
from .test_key_products import on_gpu, same

ROOT = Path(__file__).resolve().parents[1]
# batch, groups, queries, keys, features: more keys than queries and fewer, groups that end within tiles
SIZES = ((2, 1, 50, 50, 16), (2, 3, 21, 33, 9), (1, 2, 40, 17, 12), (3, 1, 1, 1, 5), (1, 4, 16, 64, 16), (2, 1, 70, 3, 16))
KINDS = ("plain", "dropped", "wild")


def visible(groups, queries, keys):
    return ~matmul.beyond(groups * queries, keys, queries)


def weights(batch, groups, queries, keys, kind, g):
    """float32 [batch, groups * queries, keys] as attention has them: zeros beyond; "dropped" ones are zero in
    places; of "wild" ones some queries are NaN throughout, with what is dropped of them -0."""
    rows = groups * queries
    a = torch.randn(batch, rows, keys, generator=g) * torch.exp2(torch.randint(-9, 2, (batch, rows, 1), generator=g))
    a = torch.where(visible(groups, queries, keys), a, 0.0)
    if kind == "wild":
        a[-1, rows // 3] = a[0, rows - 1] = a[0, 0] = torch.nan
    if kind != "plain":
        a = torch.where(torch.rand(a.shape, generator=g) < 0.4, torch.where(a.isnan(), -0.0, 0.0), a)
    if kind == "wild":
        a[0, 0, 0] = -0.0  # the one key it sees
    return a


def values(batch, rows, columns, kind, dtype, g):
    """[batch, rows, columns]; of "wild" ones rows are zero, tiny, or not finite."""
    b = torch.randn(batch, rows, columns, generator=g) * torch.exp2(torch.randint(-6, 7, (batch, rows, 1), generator=g))
    if kind == "wild":
        b[0, rows // 2, 3], b[-1, rows - 1, 0], b[-1, 0] = torch.inf, torch.nan, 0
    return b.to(dtype)


def promised(groups, queries, keys, kind, dtype, batch=2, features=16, seed=0):
    """Pairs of operands for balance "keys", each with its `causal`: O = P V and dV = P^T dO."""
    g = torch.Generator().manual_seed(seed)
    a = weights(batch, groups, queries, keys, kind, g)
    v, grad = (values(batch, n, features, kind, dtype, g) for n in (keys, groups * queries))
    return (a, v, queries), (a.transpose(1, 2), grad, -queries)


def scored(groups, queries, keys, kind, dtype, batch=2, features=16, seed=0):
    """(q, k transposed, causal) and the same transposed."""
    g = torch.Generator().manual_seed(seed)
    q, k = (values(batch, n, features, kind, dtype, g) for n in (groups * queries, keys))
    return (q, k.transpose(1, 2), queries), (k, q.transpose(1, 2), -queries)


def zeroed(product, causal):
    return torch.where(matmul.beyond(*product.shape[1:], causal), 0.0, product)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", (16, 24))
def test_the_definition(kind, window):
    for batch, groups, queries, keys, features in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for a, b, causal in promised(groups, queries, keys, kind, dtype, batch, features):
                want = exact_bmm(a, b, window=window, balance="keys", out_dtype=dtype)
                assert same(exact_bmm(a, b, window=window, balance="keys", out_dtype=dtype, causal=causal), want)
            for a, b, causal in scored(groups, queries, keys, kind, dtype, batch, features):
                want = zeroed(exact_bmm(a, b, window=window), causal)
                got = exact_bmm(a, b, window=window, causal=causal)
                assert same(got, want) and not got.signbit()[got == 0].any() and (got != 0).any()


def test_beyond():
    assert matmul.beyond(4, 3, 2).tolist() == [[False, True, True], [False, False, True]] * 2
    assert torch.equal(matmul.beyond(3, 4, -2), matmul.beyond(4, 3, 2).t())
    with pytest.raises(ValueError, match="bias"):
        exact_bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2), window=16, bias=torch.ones(2), causal=2)


INTERPRETED = """
import itertools
from tests.interpreter import patch
patch()
import torch
import triton
from carbon_compile.templates import launch, matmul_kernels
from carbon_compile.templates.matmul import exact_bmm
from tests.test_causal import KINDS, SIZES, promised, scored, zeroed
from tests.test_key_products import same

launch.keys_tile = lambda bn: launch.Tile(bn, 32, 4)
launch.exponents_width = lambda k, plan: 64
types = itertools.cycle([(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
tiles = itertools.cycle([(16, 16), (16, 32), (32, 16), (64, 64)])
windows = itertools.cycle([16, 16, 24])
left_out = {True: 0, False: 0}
for kind, (batch, groups, queries, keys, features) in itertools.product(KINDS, SIZES):
    (dtype, out), window = next(types), next(windows)
    for a, b, causal in promised(groups, queries, keys, kind, dtype, batch, features):
        bm, bk = next(tiles)
        plan = launch.Plan(bm, 16, bk, 4, 1, joint=True, streamed=True, span=launch.padded_contraction(a.shape[2]))
        want = exact_bmm(a, b, window=window, balance="keys", out_dtype=out)
        got = matmul_kernels.multiply(a, b, window, "keys", None, out, plan=plan, causal=causal)
        assert same(got, want), ("keys", kind, groups, queries, keys, causal, bm, bk, window, (got != want).nonzero()[:5])
        # Zeros that are not: it shows that they were not read.
        if kind == "plain":
            lie = a + torch.where(a == 0, 1.0, 0.0)
            left_out[causal > 0] += not same(matmul_kernels.multiply(lie, b, window, "keys", None, out, plan=plan), matmul_kernels.multiply(lie, b, window, "keys", None, out, plan=plan, causal=causal))
    for a, b, causal in scored(groups, queries, keys, kind, dtype, batch, features):
        for joint, swap, words, engine in ((True, False, 0, "int8"), (False, True, 0, "int8"), (True, True, 1, "int8")):
            bm, bn = next(tiles)
            plan = launch.Plan(bm, bn, 32, 4, 1, joint=joint, swap=swap, engine=engine, span=32 if words else 64, words=words, splits=2 if words else 1)
            want = zeroed(exact_bmm(a, b, window=window, out_dtype=out), causal)
            got = matmul_kernels.multiply(a, b, window, "none", None, out, plan=plan, causal=causal)
            assert same(got, want), ("scores", kind, groups, queries, keys, causal, plan, window, (got != want).nonzero()[:5])
assert min(left_out.values()) >= 2, left_out
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]
