"""Products of balance "keys" whose first operand is never stored as digits: the bits of the CPU twin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from carbon_compile.templates import launch, matmul
from carbon_compile.templates.matmul import exact_bmm

from .offline import printed

ROOT = Path(__file__).resolve().parents[1]
H100 = launch.Hardware((9, 0), 132)
LAYOUTS = ("rows", "columns", "padded", "expanded")
KINDS = ("tame", "causal", "wild", "subnormal", "far", "dropped")


def operands(batch, m, n, k, dtype, kind, layout, seed=0):
    """a [batch, m, k] float32 as weights are, b [batch, k, n]; "causal": nothing above the diagonal and
    a zero row, as in a gradient of weights; "wild": rows that are zero, tiny, or not finite; "dropped": rows that are
    zero, or not finite, where they meet anything but zeros."""
    g = torch.Generator().manual_seed(seed + m * n + k)
    a = torch.randn(batch, m, k, generator=g) * torch.exp(torch.randn(batch, m, k, generator=g))
    b = torch.randn(batch, k, n, generator=g) * torch.exp2(torch.randint(-6, 7, (batch, k, 1), generator=g))
    if kind == "causal":
        a = a.tril()
        a[:, 0] = 0
    elif kind == "wild":
        a[0, 3], b[0, 5], b[-1, :, 2] = 0, 0, 0
        a[0, 4, 7], b[0, 9, 3], b[-1, 11, 0] = float("inf"), float("nan"), float("-inf")
        a[:, : m // 2, 9] = 0
        a[-1, :, 11] = 0
        a[-1, 6] *= 2.0**-126  # lost in the balance, or nearly
    elif kind == "subnormal":
        a[0, 2] *= 1e-40
        b[0, 8] *= 1e-40
        b[-1] *= 1e-39 if dtype == torch.float32 else 2.0**-100
    elif kind == "far":
        a[0] *= 2.0**110
        b[-1] *= 2.0**120
        a[0, 1] *= 2.0**-120
    elif kind == "dropped":
        b[0, ::2], b[-1] = 0, 0
        a[:, 2:6, 1::2] = 0
        a[0, 3, 4], a[-1, 1, 2], a[:, 4, 0] = float("nan"), float("inf"), float("nan")
    b = b.to(dtype)
    if layout == "columns":
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    elif layout == "padded":
        a = torch.nn.functional.pad(a, (0, 3))[:, :, :k]
        b = torch.nn.functional.pad(b, (0, 5))[:, :, :n]
    elif layout == "expanded":
        a, b = a[:1].expand(batch, m, k), b
    return a, b


def bits(x):
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def test_plans(monkeypatch):
    plan = launch.keys_plan(512, 64, 512, 16, H100)
    assert plan.streamed and plan.bn == 64 and plan.span == 512
    assert (plan.bm, plan.bk, plan.warps, plan.stages) == (64, 128, 4, 1)
    assert plan == launch.keys_plan(512, 64, 512, 16, H100, side_by_side=False)
    wide = [launch.keys_plan(512, 100, 512, 16, H100, side_by_side=side_by_side) for side_by_side in (True, False)]
    assert [(plan.bm, plan.bn, plan.bk, plan.warps, plan.stages) for plan in wide] == [(64, 128, 64, 8, 3), (64, 128, 128, 8, 2)]
    assert launch.keys_plan(512, 64, 60, 16, H100).bk == 64
    monkeypatch.setattr(launch, "hardware", lambda device: H100)
    weights = torch.empty(96, 512, 512, device="meta")
    named = [matmul.describe(512, 100, 512, window=16, batch=96, device="cuda", keys=keys) for keys in (weights, weights.transpose(1, 2), None)]
    assert [facts["schedule"].startswith("streamed") for facts in named] == [True, True, False]
    assert named[0]["tile"] != named[1]["tile"]
    for other in (
        launch.keys_plan(512, 129, 512, 16, H100), launch.keys_plan(16, 64, 512, 16, H100),
        launch.keys_plan(512, 64, 512, 24, H100), launch.keys_plan(512, 64, 512, 16, H100, "bf16"),
        launch.keys_plan(512, 64, 70_000, 16, H100), launch.keys_plan(512, 64, 512, 16, launch.Hardware((7, 5), 40)),
    ):  # fmt: skip
        assert other is None


INTERPRETED = """
import itertools
from tests.interpreter import patch
patch()
import torch
import triton
import triton.language as tl
from carbon_compile.templates import launch, matmul_kernels
from carbon_compile.templates.matmul import exact_bmm
from tests.test_key_products import KINDS, LAYOUTS, operands, same

launch.keys_tile = lambda bn: launch.Tile(bn, 32, 4)
launch.exponents_width = lambda k, plan: 64
sizes = itertools.cycle([(19, 9, 50), (21, 16, 150), (33, 12, 64)])
types = itertools.cycle([(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)])
windows, added = itertools.cycle([16, 16, 24, 16, 24]), itertools.cycle([None, None, (1, 1, 0), (2, 0, 1), (2, 1, 1), (1, 0, 1)])
g = torch.Generator().manual_seed(0)
for kind, layout in itertools.product(KINDS, LAYOUTS):
    (m, n, k), (dtype, out), window, shape = next(sizes), next(types), next(windows), next(added)
    if kind == "subnormal":
        dtype = torch.float32  # the interpreter misreads subnormal bfloat16
    a, b = operands(2, m, n, k, dtype, kind, layout)
    bias = None
    if shape is not None:
        bias = torch.randn([(2, m, n)[i] if s else 1 for i, s in enumerate(shape)], generator=g).expand(2, m, n)
    plan = launch.Plan(16, 16, 32, 4, 1, joint=True, streamed=True, span=launch.padded_contraction(k))
    got = matmul_kernels.multiply(a, b, window, "keys", bias, out, plan=plan)
    want = exact_bmm(a, b, window=window, balance="keys", bias=bias, out_dtype=out)
    assert same(got, want), (kind, layout, m, n, k, dtype, window, shape, (got != want).nonzero()[:5], got[got != want][:5], want[got != want][:5])


@triton.jit
def rounded(top_ptr, low_ptr, out_ptr, K, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, matmul_kernels._rounded_total(tl.load(top_ptr + i), tl.load(low_ptr + i), K, 2))


for bits, k in ((24, 1024), (24, 64), (31, 4096)):
    top = torch.randint(-(1 << bits), 1 << bits, (1 << 14,), generator=g) >> torch.randint(0, bits, (1 << 14,), generator=g)
    low = torch.randint(0, 1 << 16, (1 << 14,), generator=g)
    low[::3] = 1 << torch.randint(0, 16, low[::3].shape, generator=g)
    top[:4], low[:4] = torch.tensor([0, -1, -(1 << bits), (1 << bits) - 1]), torch.tensor([0, 65535, 0, 65535])
    top[4:4096] = top[4:4096] & -512  # half an ulp, and a little beside it
    out = torch.empty(1 << 14)
    rounded[(1,)](top.int(), low.int(), out, k, BLOCK=1 << 14)
    assert same(out, (top * 65536 + low).float()), (bits, k)
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


OFFLINE = """
import torch
from carbon_compile.templates import matmul_kernels
from tests.offline import pretend

pretend({capability})
meta = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device="meta")
for dtype in (torch.bfloat16, torch.float32):
    a, b = meta(torch.float32, 96, 512, 512), meta(dtype, 96, 512, 64)
    for x in (a, a.mT):
        recipe = matmul_kernels.prepare(x, b, 16, "keys", None, device="cuda")
        recipe.warm((torch.float32, dtype, None, torch.bfloat16))
        print([step.kernel.__name__ for step in recipe.launches])
"""


@pytest.mark.parametrize("capability", (80, 90, 120))
def test_kernels_compile_for_gpus_that_are_not_here(capability):
    pytest.importorskip("triton")
    assert printed(OFFLINE.format(capability=capability)) == "['keys_kernel', 'product_kernel']\n" * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_equals_cpu(kind):
    for layout in LAYOUTS:
        for dtype, m, n, k in ((torch.bfloat16, 512, 64, 512), (torch.float16, 130, 80, 333), (torch.float32, 64, 20, 1500), (torch.bfloat16, 257, 128, 64)):
            a, b = operands(3, m, n, k, dtype, kind, layout)
            x, y = (on_gpu(t) for t in (a, b))
            for out in (dtype, torch.float32):
                want = exact_bmm(a, b, window=16, balance="keys", out_dtype=out)
                for _ in range(2):  # recorded, then replayed
                    got = exact_bmm(x, y, window=16, balance="keys", out_dtype=out)
                    assert same(got.cpu(), want), (kind, layout, dtype, m, n, k, out)


def on_gpu(x):
    """With the same strides."""
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((size,), (1,)).cuda().as_strided(x.shape, x.stride())
