"""Products of few rows by a weight that is never stored as digits: the bits of the CPU twin."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from carbon_compile.templates import launch, matmul, quantize
from carbon_compile.templates.matmul import exact_mm

from .offline import printed

ROOT = Path(__file__).resolve().parents[1]
H100 = launch.Hardware((9, 0), 132)


def operands(m, n, k, dtype, kind, side_by_side=False, seed=0):
    """a [m, k] and a weight [k, n]; "rows": some columns of the weight need the general way, "wild": all do."""
    g = torch.Generator().manual_seed(seed + m * n + k)
    a = torch.randn(m, k, generator=g) * torch.exp(torch.randn(m, k, generator=g))
    w = torch.randn(n, k, generator=g) * torch.exp(torch.randn(n, k, generator=g))
    w *= torch.exp2(torch.randint(-8, 8, (k,), generator=g))
    if kind != "tame":
        w[1], w[2], w[:, 9] = 0, w[2] * 1e-40, 0
        w[3, 5], w[4, 7] = float("nan"), float("inf")
    if kind == "wild":
        w[:, 11] *= 1e-41
        w[33] *= 1e30
        if m > 4:
            a[0], a[1], a[2], a[3, 5] = 0, a[1] * 1e-41, a[2] * 1e36, float("nan")
            a[4, 8] = float("-inf")
    a, w = a.to(dtype), w.to(dtype)
    return a, w.t().contiguous() if side_by_side else w.t()


def bits(x):
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


# ---- plans ----


def test_plans():
    plan = lambda m, n, k, window, itemsize=2, hw=H100, **options: launch.gemm_plan(  # noqa: E731
        m, n, k, window, 1, hw, weight=itemsize, **options
    )
    few = plan(16, 4096, 4096, 16)
    assert few.streamed and (few.bm, few.groups, few.splits) == (32, 4, 1)
    assert "streamed" in few.describe()["schedule"]
    assert plan(64, 4096, 4096, 16).splits == 2 and plan(16, 11008, 4096, 16).splits == 2
    assert plan(16, 50257, 768, 16).splits == 1 and plan(16, 4096, 4096, 24, 4).splits == 4
    assert plan(1, 4096, 4096, 24, 4, launch.Hardware((8, 0), 108)).streamed
    ordinary = [
        plan(16, 4096, 4096, 16, 0), plan(65, 4096, 4096, 16), plan(16, 3072, 768, 16), plan(16, 256, 100_000, 16),
        plan(16, 4096, 4096, 16, hw=launch.Hardware((7, 5), 40)), plan(16, 4096, 4096, 16, engine="bf16"),
        launch.gemm_plan(16, 4096, 4096, 16, 1, H100),
    ]  # fmt: skip
    assert not any(p.streamed for p in ordinary)
    for window, itemsize in ((16, 2), (16, 4), (24, 2), (24, 4)):
        for m in (1, 5, 16, 33, 64):
            for n, k in ((4096, 4096), (512, 1 << 20), (200_000, 128), (1000, 5001)):
                for hw in (H100, launch.Hardware((8, 6), 84)):
                    chosen = plan(m, n, k, window, itemsize, hw)
                    padded = launch.padded_contraction(k)
                    for p in (chosen, *launch.variants(chosen, padded, window)):
                        assert p.span % p.step == 0 and p.span <= launch.SPAN_LIMIT[window]
                        assert p.splits == -(-padded // p.span)
                    assert chosen.streamed == (n * padded >= launch._WORTH_STREAMING[window])


def test_overrides_hold_for_streamed_products_alone():
    pinned = launch.split(launch.streamed_plan(16, 700, 384, 16, H100, 2), 384, 16, 2)
    try:
        launch.override(16, 700, 300, 16, 1, pinned)
        assert launch.gemm_plan(16, 700, 384, 16, 1, H100, weight=2) == pinned
        assert not launch.gemm_plan(16, 700, 384, 16, 1, H100).streamed
        assert not launch.gemm_plan(16, 700, 384, 16, 1, H100, "bf16", 2).streamed
    finally:
        launch.override(16, 700, 300, 16, 1, None)


def test_prepared_products():
    """Which products stream, and that a precompiled one is the one that runs."""
    matmul_kernels = pytest.importorskip("carbon_compile.templates.matmul_kernels")
    a, w = torch.empty(16, 4096, device="meta"), torch.empty(2048, 4096, device="meta")
    hardware = launch.hardware
    launch.hardware = lambda device: H100
    try:
        prepare = lambda *args, **options: matmul_kernels.prepare(*args, device="cuda", **options).plan.streamed  # noqa: E731
        assert prepare(a, w.t(), 24, "weight", None)
        assert not prepare(a, w.t(), 24, "none", None)
        assert not prepare(a, w.t(), 24, "weight", None, "bf16")
        assert not prepare(a, w.t(), 24, "weight", None, transposed=True)
        assert not prepare(a, w.t().contiguous(), 24, "weight", None)
        assert not prepare(a[:, :-1], w[:, :-1].t(), 24, "weight", None)
        facts = matmul.describe(16, 2048, 4096, window=24, device="cuda", weight=w.t())
        assert facts["schedule"].startswith("streamed")
    finally:
        launch.hardware = hardware


# ---- kernels in the Triton interpreter ----

INTERPRETED = """
from dataclasses import replace
import torch
from tests.interpreter import patch
patch()
from carbon_compile.templates import launch, matmul_kernels
from carbon_compile.templates.matmul import exact_mm
from tests.test_small_products import operands, same

BF, F32, F16 = torch.bfloat16, torch.float32, torch.float16
# m, n, k, type, window, kind, is the weight side by side, bias, (rows, contraction, groups), splits, words
cases = [
    (1, 70, 129, BF, 16, "tame", False, "row", (32, 64, 4), 1, 0),
    (5, 70, 300, BF, 16, "rows", False, None, (32, 64, 1), 3, 1),
    (16, 40, 300, BF, 16, "wild", True, "row", (32, 64, 4), 2, 2),
    (33, 70, 40, F32, 24, "rows", False, "column", (16, 64, 1), 1, 0),
    (64, 35, 200, F32, 24, "tame", True, "both", (64, 64, 1), 2, 1),
    (5, 70, 256, F32, 24, "rows", True, None, (16, 32, 4), 1, 0),
    (9, 70, 333, F32, 24, "wild", False, "row", (32, 32, 2), 3, 2),
    (5, 70, 128, F32, 16, "rows", False, None, (32, 64, 1), 1, 0),
    (7, 70, 100, F16, 24, "tame", False, None, (32, 64, 1), 2, 1),
    (1, 70, 100, F16, 16, "rows", False, "row", (32, 64, 1), 1, 0),
]
g = torch.Generator().manual_seed(1)
for m, n, k, dtype, window, kind, side_by_side, added, (bm, bk, groups), splits, words in cases:
    a, b = operands(m, n, k, dtype, kind, side_by_side)
    bias = {None: None, "row": torch.randn(n, generator=g).expand(m, n), "column": torch.randn(m, 1, generator=g).expand(m, n),
            "both": torch.randn(m, n, generator=g)}[added]
    plan = launch.Plan(bm, 0, bk, 4, 1, swap=True, streamed=True, groups=groups)
    plan = launch.split(plan, launch.padded_contraction(k), window, splits)
    assert plan.splits == splits and (plan.words > 0) == (words > 0), plan
    got = matmul_kernels.multiply(a, b, window, "weight", bias, dtype, plan=replace(plan, words=words))
    want = exact_mm(a, b, window=window, balance="weight", bias=bias, out_dtype=dtype)
    assert same(got, want), (m, n, k, dtype, window, kind)

# Magnitudes up to the limits of the quick way and beyond.
for ea, eb, spread in ((-98, 0, 3), (120, -60, 6), (3, -125, 8), (0, 124, 3), (-60, -60, 40)):
    a = torch.randn(5, 40, generator=g) * torch.exp2(ea + torch.randint(-spread, spread + 1, (5, 40), generator=g))
    b = torch.randn(20, 40, generator=g) * torch.exp2(eb + torch.randint(-spread, spread + 1, (40,), generator=g))
    for window in (16, 24):
        plan = launch.split(launch.Plan(16, 8, 64, 4, 1, streamed=True), 64, window, 1)
        got = matmul_kernels.multiply(a, b.t(), window, "weight", None, F32, plan=plan)
        assert same(got, exact_mm(a, b.t(), window=window, balance="weight")), (ea, eb, spread, window)
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


# ---- the digits in PTX, which the interpreter replaces by plain Triton ----


class Machine:
    """Runs the few PTX instructions below on arrays of 32-bit registers."""

    def __init__(self, operands):
        self.registers = {f"${i}": x for i, x in enumerate(operands)}

    def read(self, name):
        if re.fullmatch(r"0f[0-9A-F]{8}", name):
            return np.uint32(int(name[2:], 16))
        return np.uint32(int(name, 0)) if name[0].isdigit() else self.registers[name]

    def run(self, text):
        for line in (x.strip() for x in text.strip(" {}").split(";")):
            if line and not line.startswith(".reg"):
                name, rest = line.split(None, 1)
                out, *sources = (x.strip() for x in rest.split(","))
                method = getattr(self, name.replace(".", "_"))
                with np.errstate(over="ignore"):
                    self.registers[out] = method(*(self.read(x) for x in sources)).astype(np.uint32)

    def mov_b32(self, x):
        return x

    def shl_b32(self, x, n):
        return x << n

    def and_b32(self, x, y):
        return x & y

    def xor_b32(self, x, y):
        return x ^ y

    def add_s32(self, x, y):
        return x + y

    def prmt_b32(self, x, y, selector):
        pool = y.astype(np.uint64) << np.uint64(32) | x
        picks = [(int(selector) >> 4 * i) & 7 for i in range(4)]
        return sum(((pool >> np.uint64(8 * p)) & np.uint64(255)) << np.uint64(8 * i) for i, p in enumerate(picks))

    def mul_rn_f32(self, x, y):
        return (_float(x) * _float(y)).view(np.uint32)

    def add_rn_f32(self, x, y):
        return (_float(x) + _float(y)).view(np.uint32)

    def sub_rn_f32(self, x, y):
        return (_float(x) - _float(y)).view(np.uint32)

    def fma_rn_f32(self, x, y, z):
        a, b = _float(x).astype(np.float64) * _float(y), _float(z).astype(np.float64)
        total = a + b
        rest = total - a
        lost = (a - (total - rest)) + (b - rest)
        # Rounded to odd, so that the second rounding is the only one.
        odd = total.view(np.uint64) & np.uint64(1)
        toward = np.where(lost > 0, np.inf, -np.inf)
        total = np.where((lost != 0) & (odd == 0), np.nextafter(total, toward), total)
        return total.astype(np.float32).view(np.uint32)


def _float(x):
    return np.atleast_1d(x).astype(np.uint32).view(np.float32)


def ptx():
    """The inline assembly of `_quick_digits`: bfloat16 X2, the bytes of X2, X3."""
    source = (ROOT / "templates" / "quantize_kernels.py").read_text()
    source = source[source.index("def _two_digits") : source.index("def _store_quick_digits")]
    two, bfloat16, three = (x.replace("{", "", 1) for x in re.findall(r'"""(\{.*?)\}"""', source, re.S))
    return [bfloat16, two, three]


def magnitudes(limit, g):
    """Float32 of at most `limit`: everywhere, at ties and digits' edges, and small."""
    q = torch.randint(-limit, limit + 1, (4000,), generator=g).float()
    edges = torch.arange(-limit, limit + 1, 128)[:: max(1, 2 * limit // 128 // 8000)].clamp(-limit, limit).float()
    near = torch.cat([q, edges, edges + 0.5, edges - 0.5, edges + 1, q * 2.0**-9, q * 2.0**-30, q + 0.5])
    near = torch.cat([near, torch.nextafter(near, torch.tensor(torch.inf)), torch.zeros(64)])
    near = near[near.abs() <= limit]
    return near[: len(near) // 4 * 4]


@pytest.mark.parametrize("which", (0, 1, 2))
def test_digits_in_ptx(which):
    window = (16, 16, 24)[which]
    g = torch.Generator().manual_seed(which)
    limit = (1 << (window - 1)) * 128 // 129
    x = magnitudes(limit, g)
    if which == 0:
        x = x.bfloat16().float().clamp(-limit, limit).bfloat16().float()
        x = x[x.abs() <= limit]
        x = x[: len(x) // 4 * 4]
    scales = torch.exp2(torch.randint(-40, 40, x.shape, generator=g))
    power = torch.exp2(torch.randint(-30, 30, x.shape, generator=g))
    given = x / scales / power
    want = quantize.digits(x.double().round(), window)
    words = lambda t: list(t.view(-1, 4).t().contiguous().numpy().view(np.uint32))  # noqa: E731
    planes = window // 8
    if which == 0:
        pairs = given.bfloat16().view(torch.int16).view(-1, 2).view(torch.int32).view(-1, 2).t().contiguous()
        assert same(given.bfloat16().float(), given)
        inputs = [*pairs.numpy().view(np.uint32), *words(scales), *words(power)]
    elif which == 1:
        z = (x.double() + 12582912.0 + 128).float()  # two roundings, the first of them exact or idle
        inputs = words(z)
        want = quantize.digits(z.double() - 12582912.0 - 128, window)
    else:
        inputs = [*words(given * scales), *words(power)]
    machine = Machine([np.zeros_like(inputs[0])] * planes + inputs)
    machine.run(ptx()[which])
    for i in range(planes):
        got = torch.from_numpy(machine.registers[f"${i}"].view(np.int8))
        assert torch.equal(got, want[i]), i


# ---- compiled without a card ----

OFFLINE = """
import sys, torch
from carbon_compile.templates import launch, matmul_kernels, matmul_recipe
from tests.offline import pretend

def meta(*shape, dtype): return torch.empty(shape, dtype=dtype, device="meta")

BF, F32, F16 = torch.bfloat16, torch.float32, torch.float16
SHARED = {80: 163, 86: 99, 90: 227, 100: 227}
cases = [(16, 4096, 4096, BF, 16, False), (64, 4096, 4096, F32, 24, False)]
capabilities = {80: cases[:1], 90: cases[1:]}
if "everything" in sys.argv:
    cases += [(1, 4096, 4096, BF, 16, False), (64, 4096, 4096, BF, 16, False), (33, 11008, 4099, BF, 16, True), (64, 4096, 4096, F32, 16, True),
              (16, 4096, 4096, F32, 24, True), (64, 4096, 4096, BF, 24, False), (5, 4096, 4096, F16, 24, False), (5, 4096, 4096, F16, 16, True)]
    capabilities = dict.fromkeys(SHARED, cases)
for capability, chosen in capabilities.items():
    pretend(capability)
    hw = launch.hardware(None)
    for m, n, k, dtype, window, side_by_side in chosen:
        a, b = meta(m, k, dtype=dtype), meta(k, n, dtype=dtype) if side_by_side else meta(n, k, dtype=dtype).t()
        plan = launch.streamed_plan(m, n, launch.padded_contraction(k), window, hw, dtype.itemsize)
        recipe = matmul_kernels.prepare(a, b, window, "weight", meta(n, dtype=dtype).expand(m, n), plan=plan)
        for step in recipe.launches:
            arguments = [matmul_recipe._stand_ins((dtype,) * 4, x) for x in step.arguments]
            kernel = step.kernel.warmup(*arguments, grid=(step.grid,), **step.constants)
            used = kernel.metadata.shared
            print(capability, (m, n, k, dtype, window, side_by_side), plan.stages, step.kernel.__name__, used, file=sys.stderr)
            assert used <= SHARED[capability] << 10, (capability, plan, used)
print("compiled")
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    """Also that they fit; `python -c OFFLINE everything` compiles every kind of product, for minutes."""
    pytest.importorskip("triton")
    assert printed(OFFLINE) == "compiled\n"


# ---- on a card ----

# m, n, k, type, window, is the weight side by side, bias
CASES = [
    (16, 300, 768, torch.bfloat16, 16, False, False),
    (5, 70, 129, torch.bfloat16, 16, False, True),
    (64, 333, 1000, torch.bfloat16, 16, True, True),
    (40, 1030, 512, torch.bfloat16, 16, False, False),
    (33, 260, 1024, torch.float32, 24, False, True),
    (64, 520, 700, torch.float32, 24, False, False),
    (16, 300, 777, torch.float32, 24, True, False),
    (1, 200, 640, torch.float32, 24, False, True),
    (16, 129, 512, torch.float32, 16, False, False),
    (64, 129, 512, torch.float32, 16, True, False),
    (9, 129, 512, torch.float16, 24, False, False),
    (9, 129, 40, torch.float16, 16, False, True),
    (2, 70, 50_000, torch.bfloat16, 24, False, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_equals_cpu(case):
    """Every kind of tile and split, whatever the plan of so small a weight would be."""
    from carbon_compile.templates import matmul_kernels

    m, n, k, dtype, window, side_by_side, has_bias = case
    padded = launch.padded_contraction(k)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1)).expand(m, n) if has_bias else None
    chosen = launch.streamed_plan(m, n, padded, window, launch.hardware(torch.device("cuda")), dtype.itemsize)
    plans = dict.fromkeys([chosen, *(launch.split(chosen, padded, window, s) for s in (1, 3))])
    for kind in ("tame", "rows", "wild"):
        a, b = operands(m, n, k, dtype, kind, side_by_side)
        want = exact_mm(a, b, window=window, balance="weight", bias=bias, out_dtype=dtype)
        x, y = a.cuda(), b.cuda() if side_by_side else b.t().cuda().t()
        z = None if bias is None else bias[0].cuda().expand(m, n)
        for plan in plans:
            for words in {1, 2} if plan.words else {0}:
                got = matmul_kernels.multiply(x, y, window, "weight", z, dtype, plan=replace(plan, words=words))
                assert same(got.cpu(), want), (kind, plan, words)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "window"), ((torch.bfloat16, 16), (torch.float32, 24), (torch.float16, 24)))
def test_gpu_chosen_products(dtype, window, monkeypatch):
    """As `exact_mm` chooses, compiled ahead, replayed and in a graph."""
    from triton.runtime.jit import JITFunction

    for m, n, k in ((16, 1024, 4208), (64, 4096, 1040), (1, 5000, 1024)):
        options = {"window": window, "balance": "weight", "out_dtype": dtype}
        a, b = operands(m, n, k, dtype, "rows")
        want = exact_mm(a, b, **options)
        x, y = a.cuda(), b.t().cuda().t()
        assert matmul.describe(m, n, k, window=window, device="cuda", weight=y)["schedule"].startswith("streamed")
        matmul.precompilation([(a.to("meta"), b.to("meta"), options)], torch.device("cuda"))()
        with monkeypatch.context() as patched:
            patched.setattr(JITFunction, "_do_compile", None)
            for _ in range(3):
                assert same(exact_mm(x, y, **options).cpu(), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = exact_mm(x, y, **options)
        for _ in range(2):
            got.zero_()
            graph.replay()
            assert same(got.cpu(), want)
