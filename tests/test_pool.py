"""Pooling, padding and unfolding: exact averages, lowest index among the largest, exact derivatives."""

import math

import pytest
import torch
import torch.nn.functional as F

from carbon_compile.bits import assert_bitwise
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import pool, registry

from .definition import check_accuracy, check_compiled

registry.load()


def draw(*shape, dtype=torch.float32, grad=True, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


def planes(x):
    """x [2, 3, 9, 7]."""
    y = [F.max_pool2d(x, 2), *F.max_pool2d(x, 3, 2, 1, return_indices=True), F.max_pool2d(x, (3, 2), (1, 2), (1, 0), (2, 1), ceil_mode=True)]
    y += [F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, (3, 2), 1, (1, 1), False, False), F.avg_pool2d(x[0], 2, divisor_override=3)]
    return tuple(y)


def adapted(x):
    y = [F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (4, None)), *F.adaptive_max_pool2d(x, (2, 3), return_indices=True)]
    return (*y, F.lp_pool2d(x.abs() + 0.1, 2, 2))


def others(x):
    """Other numbers of dimensions, padding, unfolding."""
    line, cube = x[:, :, 0], x.unsqueeze(2).expand(2, 3, 4, 9, 7)[:, :1] * 1.0
    y = [F.max_pool1d(line, 3, 2, 1), F.adaptive_avg_pool1d(line, 3), F.avg_pool3d(cube, 2)]
    y += [F.pad(x, (2, 1, 3, 0), mode="reflect"), F.pad(x, (2, 1, 3, 0), mode="replicate"), F.pad(line, (1, 2), mode="circular"), F.pad(x, (1, -1), value=2.0)]
    y += [F.unfold(x[0], 3, padding=1, stride=2), F.fold(x.reshape(2, 9, 21)[:, :8, :9], (5, 5), 2, stride=2, padding=1, dilation=2)]
    return tuple(y)


COMPILED = {
    "planes": (planes, lambda: [draw(2, 3, 9, 7)]),
    "adapted": (adapted, lambda: [draw(2, 3, 9, 7)]),
    "others": (others, lambda: [draw(2, 3, 9, 7)]),
    "bfloat16": (lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1)), lambda: [draw(2, 3, 9, 7, dtype=torch.bfloat16)]),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_is_the_definition(case):
    function, inputs = COMPILED[case][0], COMPILED[case][1]()
    check_accuracy(function, inputs, check_compiled(function, inputs), 2e-2 if case == "bfloat16" else 3e-6)


def test_the_lowest_index_among_the_largest():
    x = torch.tensor([[[0.0, -0.0, 1.0, 1.0], [0.0, 0.0, math.nan, 1.0], [-math.inf, -math.inf, 2.0, 2.0], [-math.inf, -math.inf, 3.0, math.inf]]])
    values, index = pool._max_pool(2)(x, 2, return_indices=True)
    assert_bitwise(index, torch.tensor([[[0, 6], [8, 15]]]))
    assert_bitwise(values, torch.tensor([[[0.0, math.nan], [-math.inf, math.inf]]]))
    assert_bitwise(pool._max_pool(2)(x[:, 2:, :2], 2, 2, 1, return_indices=True)[1], torch.tensor([[[0, 1], [2, 3]]]))


def test_errors_say_what_does_not_fit():
    x = draw(1, 3, 3)
    with pytest.raises(RuntimeError, match="more than half"):
        pool._max_pool(2)(x, 2, padding=2)
    with pytest.raises(RuntimeError, match="does not fit"):
        pool._avg_pool(2)(x, 4)
    with pytest.raises(RuntimeError, match="reflect padding of 3"):
        pool.pad(x, (3, 0), "reflect")
    with pytest.raises(RuntimeError, match="takes 4 windows"):
        pool.fold(draw(1, 4, 5), 3, 2)


def check(device):
    """Hashes of forward and backward on `device`, after compiled is found to equal defined: {case: hash}."""
    hashes = {}
    for case, (function, make) in COMPILED.items():
        inputs = [t.detach().to(device).requires_grad_(t.requires_grad) for t in make()]
        outputs, gradients = check_compiled(function, inputs)
        hashes[case] = fingerprint([*outputs, *gradients])
    return hashes


@pytest.mark.gpu
def test_devices_agree():
    assert check("cuda") == check("cpu")
