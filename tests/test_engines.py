"""The eager engine is the definition, so it is held to IEEE-754 by another oracle: Python's own floats."""

import math

import pytest
import torch

from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering.engines import TorchEngine

from .definition import compiled

SPECIAL = [0.0, -0.0, 1.0, 2.0, 4.0, 5e-324, 2.0**-1022, math.nextafter(1, 0), math.nextafter(1, 2), 1.7976931348623157e308, math.inf, -math.inf, -1.0, math.nan]


def near_squares(count):
    """Values whose roots lie near the midpoints of two neighbours, of every exponent."""
    x = torch.rand(count, dtype=torch.float64) + 1
    bits = (x * x).view(torch.int64) + torch.randint(-2, 3, (count,))
    return bits.view(torch.float64) * 2.0 ** torch.randint(-500, 500, (count,)).double()


def root(v):
    return math.sqrt(v) if v >= 0 else math.nan


@pytest.mark.parametrize("kind", ["special", "near squares", "any bits"])
def test_sqrt_of_float64_is_correctly_rounded(kind):
    x = {
        "special": torch.tensor(SPECIAL, dtype=torch.float64),
        "near squares": near_squares(50_000),
        "any bits": torch.randint(0, 2**63 - 1, (50_000,)).view(torch.float64),
    }[kind]
    assert_bitwise(TorchEngine.sqrt(x), torch.tensor([root(v) for v in x.tolist()], dtype=torch.float64))


def test_compiled_sqrt_of_float64_is_the_same():
    x = near_squares(5_000)
    outputs, _ = compiled(torch.sqrt, [x])
    assert_bitwise(outputs, [TorchEngine.sqrt(x)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sqrt_of_narrow_types_is_the_nearest(dtype):
    x = torch.rand(20_000).mul(100).to(dtype)
    wide = torch.tensor([root(v) for v in x.tolist()], dtype=torch.float64)
    assert_bitwise(TorchEngine.sqrt(x.float()).to(dtype), wide.float().to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_rounds_every_pattern_as_a_cpu_does(dtype):
    """Inside a kernel, where the rounded value is used again, and at its end."""
    x = torch.arange(-(2**31), 2**31, 251).to(torch.int32).view(torch.float32)

    def rounded(x):
        y = x.to(dtype)
        return y, y.float() - 1.0

    for found, expected in zip(torch.compile(rounded, backend="carbon")(x.cuda()), rounded(x), strict=True):
        assert_bitwise(found.cpu(), expected)
