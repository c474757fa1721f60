"""Products by kept digits of a weight, and when they are made anew: always the bits of fresh ones."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from carbon_compile.templates import kept, launch, quantize
from carbon_compile.templates.matmul import exact_mm

from .offline import printed
from .test_small_products import operands, same

ROOT = Path(__file__).resolve().parents[1]
H100 = launch.Hardware((9, 0), 132)


# ---- the twin ----


@pytest.mark.parametrize(("dtype", "window"), ((torch.bfloat16, 16), (torch.float32, 24), (torch.float32, 16), (torch.float16, 24)))
@pytest.mark.parametrize("kind", ("tame", "rows", "wild"))
def test_twin(dtype, window, kind, monkeypatch):
    monkeypatch.setattr(kept, "_INTEGERS", 4000)  # several blocks of columns
    for m, n, k, side_by_side, bias in ((1, 70, 129, False, None), (9, 40, 300, True, torch.randn(40)), (300, 70, 64, False, torch.randn(300, 1))):
        a, b = operands(m, n, k, dtype, kind, side_by_side)
        digits = kept.weight_digits(b, window)
        assert digits.numel() == kept.layout(k, n, window).size
        want = exact_mm(a, b, window=window, balance="weight", bias=None if bias is None else bias.expand(m, n), out_dtype=dtype)
        assert same(kept.exact_mm_kept(a, digits, n, window=window, bias=bias, out_dtype=dtype), want)


def test_layout_holds_what_the_definition_takes_from_a_weight():
    b = operands(4, 50, 200, torch.float32, "rows")[1]
    where = kept.layout(200, 50, 24)
    digits, exponents, maxima = kept.parts(kept.weight_digits(b, 24), where)
    d = quantize.weight_balance(b)
    want = quantize.quantize(b, 24, -2, -d)
    assert torch.equal(sum(digits[i].double() * 256.0**i for i in range(3))[:, :200], want.q.t())
    assert torch.equal(exponents, want.exponents) and not digits[..., 200:].any()
    assert all(start % 256 == 0 for start in (where.exponents, where.maxima, where.size))
    assert torch.equal(kept._balance(maxima), d)


def test_what_does_not_fit_is_refused():
    a, b = torch.randn(3, 100), torch.randn(100, 8)
    digits = kept.weight_digits(b, 24)
    with pytest.raises(ValueError, match="is no weight"):
        kept.exact_mm_kept(a, digits, 8, window=16)
    with pytest.raises(ValueError, match="is no weight"):
        kept.exact_mm_kept(torch.randn(3, 300), digits, 8, window=24)
    with pytest.raises(ValueError, match="no digits to keep"):
        kept.weight_digits(torch.randn(1, 8), 24)
    with pytest.raises(ValueError, match="one of"):
        kept.weight_digits(b, 17)
    with pytest.raises(TypeError, match="float64"):
        kept.weight_digits(b.double(), 24)
    with pytest.raises(TypeError, match="float64"):
        kept.exact_mm_kept(a.double(), digits, 8, window=24)
    with pytest.raises(ValueError, match="uint8"):
        kept.weight_digits(b, 24, torch.empty(5, dtype=torch.uint8))
    assert kept.exact_mm_kept(a[:0], digits, 8, window=24).shape == (0, 8)


# ---- plans ----


def test_plans():
    few = launch.kept_plan(16, 4096, 4096, 16, H100)
    assert few.streamed and (few.bm, few.groups, few.splits, few.words) == (32, 4, 1, 0)
    assert launch.kept_plan(16, 1024, 4096, 16, H100).splits == 4
    assert not launch.kept_plan(65, 4096, 4096, 16, H100).streamed
    assert not launch.kept_plan(16, 4096, 4096, 16, launch.Hardware((7, 5), 40)).streamed
    for window in (16, 24):
        for m in (1, 5, 16, 17, 33, 64):
            for n, k in ((4096, 4096), (4096, 14336), (512, 1 << 20), (128_256, 4096), (1000, 5001), (7, 64)):
                for hw in (H100, launch.Hardware((8, 6), 84)):
                    padded = launch.padded_contraction(k)
                    plan = launch.kept_plan(m, n, padded, window, hw)
                    assert plan.span % plan.step == 0 and plan.span <= launch.SPAN_LIMIT[window]
                    assert plan.splits == -(-padded // plan.span)
                    assert plan.stages * plan.step * window // 8 * (plan.bm + plan.bn) <= hw.shared


# ---- kernels in the Triton interpreter ----

INTERPRETED = """
from dataclasses import replace
import torch
from tests.interpreter import patch
patch()
from carbon_compile.templates import kept, kept_kernels, launch
from carbon_compile.templates.matmul import exact_mm
from tests.test_small_products import operands, same

BF, F32, F16 = torch.bfloat16, torch.float32, torch.float16
# m, n, k, type, window, kind, is the weight side by side, bias, (rows, contraction, groups) or the ordinary plan, splits, words
cases = [
    (1, 70, 129, BF, 16, "tame", False, "row", (32, 64, 4), 1, 0),
    (5, 70, 300, BF, 16, "rows", False, None, (32, 64, 1), 3, 1),
    (16, 40, 700, BF, 16, "wild", True, "row", (32, 64, 4), 2, 2),
    (33, 70, 40, F32, 24, "rows", False, "column", (16, 64, 1), 1, 0),
    (64, 35, 200, F32, 24, "tame", True, "both", (64, 64, 1), 2, 1),
    (5, 70, 256, F32, 24, "rows", True, None, (16, 32, 4), 1, 0),
    (9, 70, 333, F32, 24, "wild", False, "row", (32, 32, 2), 3, 2),
    (5, 70, 128, F32, 16, "rows", False, None, (32, 64, 1), 1, 0),
    (7, 70, 100, F16, 24, "tame", False, None, (32, 64, 1), 2, 1),
    (1, 70, 9000, F16, 16, "tame", False, "row", (32, 512, 1), 1, 0),
    (70, 40, 300, BF, 16, "rows", False, "row", None, 1, 0),
    (3, 40, 2, F32, 24, "tame", True, "column", None, 1, 0),
]
g = torch.Generator().manual_seed(1)
for m, n, k, dtype, window, kind, side_by_side, added, tile, splits, words in cases:
    if k == 2:
        a, b = torch.randn(m, k, generator=g).to(dtype), torch.randn(k, n, generator=g).to(dtype)
    else:
        a, b = operands(m, n, k, dtype, kind, side_by_side)
    bias = {None: None, "row": torch.randn(n, generator=g).expand(m, n), "column": torch.randn(m, 1, generator=g).expand(m, n),
            "both": torch.randn(m, n, generator=g)}[added]
    twin, digits = kept.weight_digits(b, window), torch.full((kept.layout(k, n, window).size,), 77, dtype=torch.uint8)
    kept_kernels.write_digits(b, window, digits)
    if kind == "tame":  # else NaN has a pattern of the kernel's own in the maxima
        for one, other in zip(kept.parts(digits, kept.layout(k, n, window)), kept.parts(twin, kept.layout(k, n, window))):
            assert torch.equal(one, other), (m, n, k, dtype, window)
    plan = None
    if tile:
        bm, bk, groups = tile
        plan = launch.Plan(bm, 0, bk, 4, 1, swap=True, streamed=True, groups=groups)
        plan = launch.split(plan, launch.padded_contraction(k), window, splits)
        assert plan.splits == splits and (plan.words > 0) == (words > 0), plan
        plan = replace(plan, words=words)
    got = kept_kernels.multiply(a, digits, n, window, bias, dtype, plan=plan)
    want = exact_mm(a, b, window=window, balance="weight", bias=bias, out_dtype=dtype)
    assert same(got, want), (m, n, k, dtype, window, kind)
    assert same(kept.exact_mm_kept(a, digits, n, window=window, bias=bias, out_dtype=dtype), want)  # the twin, with the kernel's digits
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]
