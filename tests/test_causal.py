"""Products of causal attention that leave out what is zero: the bits of those that don't."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from carbon_compile import backend, recognise
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import registry
from carbon_compile.templates import matmul
from carbon_compile.templates.matmul import exact_bmm

from .definition import check_compiled, compiled, defined
from .offline import printed
from .test_key_products import on_gpu, same

registry.load()

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


def forgetful(a, b, **options):
    """`exact_bmm` of a first operand without what is promised to be zero: no bit may depend on it."""
    causal = options.get("causal", 0)
    if causal and options.get("balance") == "keys":
        key = a[:, :, :1] if causal > 0 else a[:, :1]
        more = key.isnan() | (key == 0) & key.signbit()
        a = torch.where(matmul.beyond(*a.shape[1:], causal) & ~more, 0.0, a)
    return exact_bmm(a, b, **options)


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
tiles = itertools.cycle([(16, 32), (32, 16), (64, 64)])
windows = itertools.cycle([16, 16, 24])
schedules = itertools.cycle([(True, False, 0), (False, True, 0), (True, True, 1), (False, False, 0), (True, False, 1)])
left_out = dict.fromkeys(itertools.product((True, False), repeat=2), 0)
for kind, (batch, groups, queries, keys, features) in itertools.product(KINDS, SIZES):
    (dtype, out), window = next(types), next(windows)
    for a, b, causal in promised(groups, queries, keys, kind, dtype, batch, features):
        bm, bk = (16, 16) if kind == "plain" else next(tiles)
        plan = launch.Plan(bm, 16, bk, 4, 1, joint=True, streamed=True, span=launch.padded_contraction(a.shape[2]))
        want = exact_bmm(a, b, window=window, balance="keys", out_dtype=out)
        got = matmul_kernels.multiply(a, b, window, "keys", None, out, plan=plan, causal=causal)
        assert same(got, want), ("keys", kind, groups, queries, keys, causal, bm, bk, window, (got != want).nonzero()[:5])
        bm, bn = next(tiles)
        joint, swap, words = next(schedules)
        long = launch.padded_contraction(a.shape[2])
        digits = launch.Plan(bm, bn, 16, 4, 1, joint=joint, swap=swap, span=32 if words else long, words=words, splits=long // 32 if words else 1)
        got = matmul_kernels.multiply(a, b, 24, "keys", None, out, plan=digits, causal=causal)
        assert same(got, exact_bmm(a, b, window=24, balance="keys", out_dtype=out)), ("digits", kind, groups, queries, keys, causal, digits)
        # Zeros that are not: it shows that they were not read.
        if kind == "plain" and queries in (50, 21):
            lie = a + torch.where(a == 0, 1.0, 0.0)
            for each in (plan, digits):
                both = [matmul_kernels.multiply(lie, b, 16, "keys", None, out, plan=each, causal=c) for c in (0, causal)]
                left_out[each.streamed, causal > 0] += not same(*both)
    for a, b, causal in scored(groups, queries, keys, kind, dtype, batch, features):
        bm, bn = next(tiles)
        joint, swap, words = next(schedules)
        plan = launch.Plan(bm, bn, 32, 4, 1, joint=joint, swap=swap, span=32 if words else 64, words=words, splits=2 if words else 1)
        want = zeroed(exact_bmm(a, b, window=window, out_dtype=out), causal)
        got = matmul_kernels.multiply(a, b, window, "none", None, out, plan=plan, causal=causal)
        assert same(got, want), ("scores", kind, groups, queries, keys, causal, plan, window, (got != want).nonzero()[:5])
assert min(left_out.values()), left_out
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


# --- which products of a graph are told -----------------------------------------------------------------


def is_causal(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def seen(q, k):
    return torch.arange(k.shape[-2]) <= torch.arange(q.shape[-2]).unsqueeze(1)


def padded(q, k, v, padding):
    """What is not padding, as libraries write it."""
    mask = (seen(q, k).expand(q.shape[0], 1, -1, -1) & padding[:, None, None, :]).expand(q.shape[0], -1, -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def window(q, k, v):
    """Keys too far back are not seen, nor is the first one by most queries."""
    near = torch.arange(k.shape[-2]) > torch.arange(q.shape[-2]).unsqueeze(1) - 4
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.logical_and(near, seen(q, k)), scale=-0.7)


def both(q, k, v):
    return is_causal(q, k, v) + F.scaled_dot_product_attention(q, k, v)


def shown(q, k, v):
    """Weights after dropout that somebody else sees too."""
    scores = torch.ops.carbon.attention_scores(q.flatten(0, 1), k.flatten(0, 1), 24)
    weights = F.dropout(torch.ops.carbon.attention_weights(scores, seen(q, k)), 0.3)
    return torch.ops.carbon.bmm_keys(weights, v.flatten(0, 1), 24, torch.float32), weights.signbit()


def later_too(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[-2]) <= torch.arange(q.shape[-2]).unsqueeze(1) + 1)


def given(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def tensors(queries=11, keys=11, heads=3, kv_heads=None, features=8, dtype=torch.float32, kind="plain", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, n, features, generator=g).to(dtype) for h, n in ((heads, queries), (kv_heads or heads, keys), (kv_heads or heads, keys)))
    if kind == "wild":
        k[0, 0, keys // 2, 0], v[0, -1, keys // 2, 1], q[1, 0, queries // 2, 2] = torch.nan, torch.inf, -torch.inf
        q[1, 1, 0, 0], q[0, 1] = torch.nan, q[0, 1] * 1e3
        k[1, -1, 0, 3] = torch.inf
    return [t.requires_grad_() for t in (q, k, v)]


def counted(monkeypatch):
    """The numbers of products that are told, one a graph."""
    found = []

    def count(graph):
        found.append(recognise.causal_products(graph))
        return found[-1]

    monkeypatch.setattr(backend, "causal_products", count)
    return found


def check_told(monkeypatch, function, inputs, products):
    """Outputs and gradients are those of a graph that is told nothing, and `products` products are told."""
    with monkeypatch.context() as patch:
        patch.setattr(backend, "causal_products", lambda graph: 0)
        torch.manual_seed(5)
        want = defined(function, inputs)
    with monkeypatch.context() as patch:
        found = counted(patch)
        patch.setattr(matmul, "exact_bmm", forgetful)
        torch.manual_seed(5)
        got = defined(function, inputs)
    for kind, ours, theirs in zip(("output", "gradient"), got, want, strict=True):
        assert len(ours) == len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_bitwise(a, b, f"{kind} {i}")
    assert sum(found) == products


@pytest.mark.parametrize("kind", ("plain", "wild"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_all_six_products_are_told_and_no_bit_changes(monkeypatch, kind, dtype):
    for queries, keys in ((11, 11), (9, 14), (14, 5), (1, 1)):
        check_told(monkeypatch, is_causal, tensors(queries, keys, dtype=dtype, kind=kind), 6)


@pytest.mark.parametrize("kind", ("plain", "wild"))
def test_shared_heads_dropout_and_other_scales(monkeypatch, kind):
    check_told(monkeypatch, lambda *x: is_causal(*x, enable_gqa=True), tensors(heads=6, kv_heads=2, kind=kind), 6)
    for p in (0.0, 0.4, 0.9, 1.0):
        check_told(monkeypatch, lambda *x, p=p: is_causal(*x, dropout_p=p), tensors(kind=kind), 6)
    check_told(monkeypatch, lambda *x: is_causal(*x, scale=-0.25), tensors(kind=kind), 6)
    check_told(monkeypatch, lambda *x: is_causal(*x, dropout_p=0.4, enable_gqa=True), tensors(heads=6, kv_heads=2, dtype=torch.bfloat16, kind=kind), 6)


@pytest.mark.parametrize("kind", ("plain", "wild"))
def test_masks_that_are_made_of_sizes(monkeypatch, kind):
    padding = torch.rand(2, 11) > 0.3
    padding[0, :3] = False  # queries without keys
    check_told(monkeypatch, padded, [*tensors(kind=kind), padding], 6)
    check_told(monkeypatch, window, tensors(kind=kind), 6)
    check_told(monkeypatch, both, tensors(kind=kind), 6)


def test_what_is_not_causal_is_not_told(monkeypatch):
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    check_told(monkeypatch, later_too, tensors(), 0)
    check_told(monkeypatch, given, [*tensors(), causal], 0)
    check_told(monkeypatch, lambda *x: is_causal(*x, scale=float("inf")), tensors(), 3)  # O, dV and dP
    check_told(monkeypatch, shown, [t.detach() for t in tensors(kind="wild")], 1)  # the scores
    check_told(monkeypatch, lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tensors(), 0)


def test_compiled_code_is_the_definition(monkeypatch):
    found = counted(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        check_compiled(is_causal, tensors(dtype=dtype, kind="wild"))
    check_compiled(is_causal, tensors(dtype=dtype), dynamic=True)
    assert found[:4] == [6] * 4 and set(found) <= {0, 6}


def test_dropout_has_equal_bits_compiled(monkeypatch):
    results = []
    for tell in (recognise.causal_products, lambda graph: 0):
        monkeypatch.setattr(backend, "causal_products", tell)
        torch.manual_seed(4)
        results.append(compiled(lambda *x: is_causal(*x, dropout_p=0.5), tensors(kind="wild", dtype=torch.bfloat16)))
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_bitwise(a, b)


PLACES = """
import types
from carbon_compile.templates import matmul_hopper, matmul_kernels

def seen_by_none(row, column):
    return column > row % 512 + 63

def place(index, batches, m, n, causal, programs, BM, BN):
    cdiv = lambda a, b: -(-a // b)
    gl = types.SimpleNamespace(cdiv=cdiv, minimum=min, num_programs=lambda axis: programs, where=lambda c, a, b: a if c else b)
    beyond = lambda row, column, *rest: seen_by_none(row, column)
    parts = {name: types.FunctionType(getattr(matmul_kernels, name).fn.__code__, {"tl": gl}) for name in ("_work", "_placed")}
    function = types.FunctionType(matmul_hopper._place.fn.__code__, {"gl": gl, "_all_beyond": beyond, **parts})
    return function(index, m, n, 64, 64, 64, 0, 0, 0, BM, BN, 64, 8, causal, 0)

for batches, m, n, programs in ((96, 512, 512, 264), (5, 200, 70, 132), (3, 1200, 300, 264)):
    count = batches * -(-m // 64) * -(-n // 128)
    found = [[place(i, batches, m, n, causal, programs, 64, 128) for i in range(count)] for causal in (0, 1)]
    assert all(sorted(x[:3] for x in each) == sorted({x[:3] for x in found[0]}) for each in found)
    assert all(x[4] == (not seen_by_none(x[1], x[2])) for x in found[1]) and all(x[4] == 1 for x in found[0])
    if count > 20 * programs // 2:
        # No program is left with work alone, or with none.
        work = [sum(x[4] for x in found[1][p::programs]) for p in range(programs)]
        assert 0 < min(work) and max(work) < count // programs, (min(work), max(work))
print("placed")
"""


def test_tiles_of_a_specialised_schedule():
    pytest.importorskip("triton")
    assert printed(PLACES) == "placed\n"


OFFLINE = """
import torch
from carbon_compile.templates import matmul_kernels
from tests.offline import pretend

pretend({capability})
meta = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device="meta")
names = []
for dtype, window in ((torch.bfloat16, 16), (torch.float32, 24)):
    a, b = meta(torch.float32, 24, 512, 512), meta(dtype, 24, 512, 64)
    long = meta(torch.float32, 24, 1536, 512), meta(dtype, 24, 1536, 64)
    cases = [(b, b.mT, "none", 512), (meta(dtype, 96, 40, 32), meta(dtype, 96, 32, 300), "none", 40), (long[1], b.mT, "none", 512)]
    cases += [(meta(dtype, 96, 512, 256), meta(dtype, 96, 256, 512), "none", 512)]  # wide heads, by other schedules
    if window == 24:
        cases += [(a, b, "keys", 512), (a.mT, b, "keys", -512)]
    else:
        cases += [(a, b, "keys", 512), (a.mT, b, "keys", -512), (long[0], b, "keys", 512), (long[0].mT, long[1], "keys", -512)]
    if {capability} < 90:  # each kind with one of the types
        cases = cases[dtype is torch.float32 :: 2]
    for x, y, balance, causal in cases:
        recipe = matmul_kernels.prepare(x, y, window, balance, None, device="cuda", causal=causal)
        recipe.warm((x.dtype, y.dtype, None, torch.float32))
        names.append(recipe.launches[-1].kernel.__name__)
print(len(names), *sorted(set(names)))
"""


@pytest.mark.parametrize("capability", (80, 90))
def test_kernels_compile_for_gpus_that_are_not_here(capability):
    pytest.importorskip("triton")
    names = printed(OFFLINE.format(capability=capability)).split()
    assert names[0] == ("14" if capability == 90 else "7") and set(names[1:]) == {"gemm_kernel", "product_kernel", *(["specialised_kernel"] if capability == 90 else [])}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_equals_cpu(kind):
    for window, dtype, batch, groups, queries, keys, features in (
        (16, torch.bfloat16, 3, 1, 512, 512, 64), (16, torch.bfloat16, 2, 3, 130, 200, 32), (16, torch.float16, 2, 4, 128, 96, 64),
        (16, torch.bfloat16, 2, 1, 300, 70, 100), (24, torch.float32, 3, 1, 300, 512, 64), (24, torch.float32, 2, 3, 64, 40, 24),
        (16, torch.bfloat16, 24, 1, 512, 384, 256),
    ):  # fmt: skip
        for options, pairs in (({"balance": "keys", "out_dtype": dtype}, promised), ({}, scored)):
            for a, b, causal in pairs(groups, queries, keys, kind, dtype, batch, features):
                want = exact_bmm(a, b, window=window, causal=causal, **options)
                for _ in range(2):  # recorded, then replayed
                    got = exact_bmm(on_gpu(a), on_gpu(b), window=window, causal=causal, **options)
                    assert same(got.cpu(), want), (window, dtype, groups, queries, keys, causal, options)
