"""Products cut over ranks: every engine's exact totals, how they travel, and the uncut product's bits."""

import os
import pathlib
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from carbon_compile.templates import cut, launch, matmul
from tests import cut_checks as checks
from tests.offline import printed
from tests.test_matmul_template import Recorded, rn

WINDOWS = (16, 24)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("k", (1, 2, 3, 1 << 17, (1 << 17) + 1, cut.UNKNOWN))
def test_words_hold_every_total_and_no_fewer_would(window, k):
    words, largest = cut.words_of_total(window, k), k * (2 ** (window - 1) - 1) ** 2
    assert largest < 2 ** (16 * words - 1)
    # Between the bound and the largest total there is less than the binade that rounds K up.
    assert 4 * largest >= 2 ** (16 * (words - 1) - 1)


def test_bytes_that_travel():
    assert [cut.words_of_total(16, k) for k in (1, 1 << 17, (1 << 17) + 1, cut.UNKNOWN)] == [2, 3, 4, 4]
    assert [cut.words_of_total(24, k) for k in (2, 1 << 17, (1 << 17) + 1, cut.UNKNOWN)] == [3, 4, 5, 5]


@pytest.mark.parametrize(("window", "words"), ((16, 3), (16, 4), (24, 4), (24, 5)))
def test_the_largest_totals_come_back_as_they_were_sent(window, words):
    """Of both signs and from three ranks, against Python's integers: together they leave the words of one."""
    q, lengths = 2 ** (window - 1) - 1, ((1 << 17) - 5, (1 << 17) - 1, 1 << 17)
    group = checks.Group(3)

    def part(rank):
        k = lengths[rank]
        qa = torch.tensor([q, -q, 1, 0, -1], dtype=torch.float64).unsqueeze(1).expand(5, k)
        qb = torch.tensor([q, -q, 3], dtype=torch.float64).expand(k, 3)
        return cut._exchanged_total(qa, qb, window, words, group.exchanges(rank, "contraction"))

    got = torch.cat(group.run(part))[:5]
    assert got.tolist() == [[rn(Fraction(sum(lengths) * x * y)) for y in (q, -q, 3)] for x in (q, -q, 1, 0, -1)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", (2, 3, 5))
def test_the_twin_is_the_uncut_product(window, size):
    for m, n, k in ((21, 19, 150), (2, 9, 13), (7, 1, 2 * size)):
        a, b, bias = checks.operands(m, n, k, seed=size)
        for dimension in ("contraction", "columns", "rows"):
            for balance in ("weight", "gradient"):
                for dtype in (torch.float32, torch.bfloat16):
                    want = matmul.exact_mm(a, b, window=window, balance=balance, bias=bias, out_dtype=dtype)
                    got = checks.product(a, b, bias, window, balance, dtype, dimension, [cut.multiply] * size)
                    assert checks.same(got, want), (m, n, k, dimension, balance, dtype)


def test_a_rank_without_its_part_is_an_error():
    a, b, _ = checks.operands(4, 3, 5)
    alone = checks.Group(4).exchanges(0, "contraction")
    for x, y, told in ((a[:, :0], b[:0], "no part of the contraction"), (a[:, :3], b[:3], "3 of the 2 indices")):
        with pytest.raises(ValueError, match=told):
            cut.multiply(x, y, None, 24, "weight", torch.float32, 5, alone)


def test_no_rows_and_no_columns():
    for m, n in ((0, 3), (3, 0)):
        a, b = torch.ones(m, 4), torch.ones(4, n)
        got = checks.product(a, b, None, 24, "weight", torch.float32, "contraction", [cut.multiply] * 2)
        assert got.shape == (m, n)


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.cut_checks"], env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=pathlib.Path(__file__).parent.parent, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert run.stdout.endswith(f"{len(list(checks.cases()))} equal\n"), run.stderr[-3000:]


def test_a_product_replayed_in_parts_launches_the_same():
    pytest.importorskip("triton")
    from carbon_compile.templates import cut_kernels

    a, b, bias = checks.operands(21, 19, 150)
    for balance, dimension in (("weight", True), ("gradient", True), ("gradient", False)):
        prepared = cut_kernels.prepare(a, b, bias, 24, balance, 4, 2, 1, dimension)
        recipe, steps, _, finished = prepared
        ordinary, replayed = [], []
        recipe.launches = [x._replace(kernel=Recorded(x.kernel, ordinary)) for x in recipe.launches]
        buffers = [a, b, bias, torch.empty(11, 19), *recipe.scratch("cpu"), torch.empty(2, 4 * 11 * 19, dtype=torch.int16)]
        parts = [slice(0, steps.balanced), slice(steps.balanced, steps.quantised), slice(steps.quantised, finished), slice(finished, None)]
        for part in parts:
            assert not recipe.replays
            recipe.run(buffers, part)
            if not recipe._compiled:
                pytest.skip("this Triton's launcher has not been compared: products take the ordinary way")
            if len(ordinary) == len(recipe.launches):
                break
        for step in recipe.launches:
            step.kernel.calls = replayed
        for part in parts:
            recipe.replay([0 if x is None else x.data_ptr() for x in buffers], 7, part)
        assert recipe.replays and ordinary == replayed and len(ordinary) == len(recipe.launches)


OFFLINE = """
import torch

from carbon_compile.templates import cut_kernels
from tests.offline import pretend

def meta(*shape, dtype): return torch.empty(shape, dtype=dtype, device="meta")

compiled = 0
for capability in (80, 90):
    pretend(capability)
    plans = []
    # A wide product takes the specialised schedule, a deep one adds totals in memory, a flat one is swapped.
    for m, n, k, window, words in ((4096, 2048, 4096, 16, 3), (4096, 2048, 1024, 24, 4), (64, 128, 16384, 24, 4), (8, 1024, 512, 16, 4)):
        dtype = torch.bfloat16 if window == 16 else torch.float32
        for balance in ("weight", "gradient"):
            a, b = meta(m, k, dtype=dtype), meta(k, n, dtype=dtype)
            recipe = cut_kernels.prepare(a, b, None, window, balance, words, 2, 1, True).recipe
            recipe.warm((dtype, dtype, None, dtype, torch.uint8, torch.uint8, torch.uint8, torch.int16))
            compiled += len(recipe.launches)
            plans.append(recipe.plan)
    assert capability == 80 or {(p.specialised, p.swap, p.words) for p in plans} == {(True, False, 0), (False, True, 1), (False, True, 0)}
print("compiled", compiled)
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    pytest.importorskip("triton")
    assert printed(OFFLINE).startswith("compiled")




@pytest.mark.gpu
@pytest.mark.parametrize("window", WINDOWS)
def test_gpu_is_the_uncut_product_on_a_cpu(window):
    """Twice each: the second call replays what the first one compiled."""
    wide = [
        dict(m=m, n=n, k=k, window=window, balance=balance, dimension=dimension, size=2, layout=layout, dtype=dtype)
        for m, n, k, layout, dtype in ((256, 384, 1024, 0, torch.bfloat16), (129, 257, 515, 1, torch.float32), (16, 512, 4096, 0, torch.float16), (300, 40, 20000, 0, torch.float32))
        for balance in ("weight", "gradient")
        for dimension in ("contraction", "columns", "rows")
    ]
    launch.prepared.clear()
    for case in [*(c for c in checks.cases() if c["window"] == window and "plan" not in c), *wide]:
        for call in ("first", "replayed"):
            wrong = checks.check(**case, device="cuda")
            assert wrong is None, (wrong, call, case)
