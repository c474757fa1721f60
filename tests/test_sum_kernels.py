"""Exact sums of few contributions to many elements: the kernel beside the definition in graph operations."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import prims as P
from carbon_compile.lowering import registry

from .offline import printed

registry.load()
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def contributions(rows, dtype):
    """[rows, 2000]: magnitudes that differ a little or by everything, ties, subnormals and what is not finite."""
    g = torch.Generator().manual_seed(rows)
    spread = torch.randint(-30, 31, (rows, 2000), generator=g) * (torch.arange(2000) % 3)
    x = torch.randn(rows, 2000, generator=g) * torch.exp2(spread.float().clamp(-120, 120))
    x[:, 1::7] = torch.randint(-(2**31), 2**31, (rows, x[:, 1::7].shape[1]), generator=g).to(torch.int32).view(torch.float32)  # any pattern
    x[:, 2::11] = x[:, 2::11].clamp(-1, 1) * 1e-41
    x[:, 3::13] = torch.randint(-3, 4, x[:, 3::13].shape, generator=g) * 2.0**-15 + torch.randint(0, 2, x[:, 3::13].shape, generator=g) * 2.0**24
    x[:, 4] = 0.0
    x[-1, 5], x[0, 6], x[-1, 6], x[0, 7] = float("inf"), float("-inf"), float("inf"), float("nan")
    x[0, 8] = float("-inf")
    x[:, 9] = -0.0
    x[:, 10] = torch.finfo(torch.float32).max
    return x.to(dtype)


def compare(device):
    from carbon_compile.templates import sum_kernels

    for rows in (1, 2, 3, 8):
        for dtype in TYPES:
            x = contributions(rows, dtype)
            for out in TYPES:
                assert_bitwise(sum_kernels.sum_rows(x.to(device), out).cpu(), P.sum(x, [0], dtype=out))


def test_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", "from tests import interpreter; interpreter.patch(); from tests.test_sum_kernels import compare; compare('cpu'); print('equal')"],
        cwd=pathlib.Path(__file__).parent.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


OFFLINE = """
import torch
from triton.runtime.jit import MockTensor

from carbon_compile.templates.sum_kernels import sum_kernel
from tests.offline import pretend

for capability in (80, 90):
    pretend(capability)
    for rows in (1, 2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            sum_kernel.warmup(MockTensor(dtype), MockTensor(dtype), rows, 1 << 20, BLOCK=1024, grid=(1024,), num_warps=4, enable_fp_fusion=False)
print("compiled")
"""


def test_compiles_for_gpus_that_are_not_here():
    pytest.importorskip("triton")
    assert printed(OFFLINE).startswith("compiled")


@pytest.mark.gpu
def test_on_a_gpu():
    compare("cuda")
