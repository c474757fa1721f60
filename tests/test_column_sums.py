"""Exact sums of columns: the kernels beside the definition in graph operations, and which sums take them."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import norm
from carbon_compile.lowering import prims as P
from carbon_compile.lowering import registry

from .offline import printed

registry.load()
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix(rows, columns, dtype, seed=0):
    """[rows, columns]: magnitudes that differ a little or by everything, ties, subnormals, zeros of both signs,
    columns of one magnitude (whose high parts all round up), and what is not finite, alone and together."""
    g = torch.Generator().manual_seed(seed + rows)
    spread = torch.randint(-30, 31, (rows, columns), generator=g) * (torch.arange(columns) % 3)
    x = torch.randn(rows, columns, generator=g) * torch.exp2(spread.float().clamp(-120, 120))
    bits = torch.randint(-(2**31), 2**31, (rows, columns), generator=g).to(torch.int32)
    special = [
        lambda c: c.copy_(bits[:, 1].view(torch.float32)),
        lambda c: c.clamp_(-1, 1).mul_(1e-41),
        lambda c: c.copy_(torch.randint(-3, 4, (rows,), generator=g) * 2.0**-15 + torch.randint(0, 2, (rows,), generator=g) * 2.0**24),
        lambda c: c.fill_(-0.0),
        lambda c: c.fill_(0.0),
        lambda c: c.fill_(torch.finfo(torch.float32).max),
        lambda c: c.fill_(-1.9999998807907104),
        lambda c: c.abs_().neg_(),
        lambda c: c.mul_(1e-30).mul_(1e-8),
        lambda c: c.mul_(1e30),
        lambda c: c[-1:].fill_(float("inf")),
        lambda c: c[:1].fill_(float("-inf")),
        lambda c: (c[:1].fill_(float("-inf")), c[-1:].fill_(float("inf"))),
        lambda c: c[rows // 2 :].fill_(float("nan")),
        lambda c: (c[:1].copy_(torch.tensor([-1], dtype=torch.int32).view(torch.float32)), c[-1:].fill_(float("-inf"))),  # a negative NaN
    ]
    for place, change in enumerate(special):
        if 2 * place + 1 < columns:
            change(x[:, 2 * place + 1])
    return x.to(dtype)


def compare_sums(device):
    from carbon_compile.templates import column_sums

    for rows, columns in ((1, 40), (2, 33), (129, 40), (700, 70)):
        for dtype in TYPES:
            x = matrix(rows, columns, dtype)
            padded = torch.nn.functional.pad(x, (0, 5))[:, :columns]  # rows apart
            for out in TYPES:
                assert_bitwise(column_sums.column_sum(x.to(device), out).cpu(), P.sum(x, [0], dtype=out))
            moved = torch.empty_strided(padded.shape, padded.stride(), dtype=dtype, device=device).copy_(padded)
            assert_bitwise(column_sums.column_sum(moved, torch.float32).cpu(), P.sum(x, [0]))
            assert_bitwise(column_sums.column_sum(moved, torch.float32).cpu(), P.sum(x, [0]))  # by what the first one prepared


def compare_norms(device):
    from carbon_compile.templates import column_sums

    for rows, columns in ((3, 40), (300, 70)):
        for g_type, x_type in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
            g, x = matrix(rows, columns, g_type), matrix(rows, columns, x_type, 1)
            x[:, 12:] = torch.randn(rows, columns - 12).to(x_type)
            mean, rstd = x[:, 12:].float().mean(1), x[:, 12:].float().std(1).reciprocal()
            for average in (mean, None):
                kept = None if average is None else average[:, None]
                weight = norm.normalize_scale_backward(g, x, kept, rstd[:, None], torch.empty(columns, dtype=x_type))
                bias = norm.normalize_shift_backward(g, torch.empty(columns))
                operands = [t if t is None else t.to(device) for t in (g, x, average, rstd)]
                for bias_type in (torch.float32, None):
                    found = column_sums.norm_gradients(*operands, x_type, bias_type)
                    assert_bitwise(found[0].cpu(), weight)
                    assert (found[1] is None) == (bias_type is None)
                    if bias_type is not None:
                        assert_bitwise(found[1].cpu(), bias)


def small_slabs():
    """Several slabs and steps of the matrices here."""
    from carbon_compile.templates import launch

    launch.column_sums_plan = lambda m, n, two, hw: launch.Slab(32, 160, 16 if two else 32, 4)


@pytest.mark.parametrize("check", ["compare_sums", "compare_norms", "small_slabs(); compare_sums", "small_slabs(); compare_norms"])
def test_in_the_interpreter(check):
    pytest.importorskip("triton")
    code = f"from tests import interpreter; interpreter.patch(); from tests.test_column_sums import *; {check}('cpu'); print('equal')"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=pathlib.Path(__file__).parent.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]
