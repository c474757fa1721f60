"""Scans: one tree for every length, so a prefix never depends on what follows it."""

import math

import pytest
import torch

from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
from carbon_compile.diagnostics import Refused
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import registry
from carbon_compile.lowering import scan as L
from carbon_compile.templates import scan as templates

from .definition import check_accuracy, check_compiled

registry.load()


def draw(*shape, dtype=torch.float32, grad=False, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


# --- the tree ---------------------------------------------------------------------------------------------


def blocks(n):
    """The aligned blocks of powers of two that make up [0, n), the largest first."""
    start, found = 0, []
    while n:
        size = 1 << (n.bit_length() - 1)
        found.append((start, size))
        start, n = start + size, n - size
    return found


def tree(x, operation):
    """The last prefix of the 0-d tensors `x`, as templates/scan.py words it."""

    def block(start, size):
        if size == 1:
            return x[start]
        return operation(block(start, size // 2), block(start + size // 2, size // 2))

    parts = [block(*b) for b in blocks(len(x))]
    result = parts[0]
    for p in parts[1:]:
        result = operation(result, p)
    return result


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 13, 64, 101])
def test_a_prefix_is_the_tree_of_its_blocks(n):
    x = draw(n)
    for name, operation in ((L.CUMSUM, torch.add), (L.CUMPROD, torch.mul)):
        expected = torch.stack([tree(list(x[: i + 1]), operation) for i in range(n)])
        assert_bitwise(name(x, 0, torch.float32), expected)
    assert_bitwise(L.prod(x), tree(list(x), torch.mul))


@pytest.mark.parametrize("operation", [L.CUMSUM, L.CUMPROD, L.LOGCUMSUMEXP], ids=["cumsum", "cumprod", "logcumsumexp"])
def test_a_prefix_does_not_depend_on_what_follows_or_stands_beside(operation):
    x = draw(3, 300)
    x[1, 7] = -0.0
    whole = operation(x, 1, torch.float32)
    for n in (1, 2, 5, 64, 255, 256, 257):
        assert_bitwise(operation(x[:, :n], 1, torch.float32), whole[:, :n])
    assert_bitwise(operation(x[1], 0, torch.float32), whole[1])
    assert_bitwise(operation(x.t(), 0, torch.float32), whole.t())
    assert_bitwise(operation(x.t().contiguous(), -2, torch.float32), whole.t())


def test_a_product_is_the_last_prefix():
    x = draw(4, 37, 5) + 1.0
    assert_bitwise(L.prod_dim(x, 1, True), L.cumprod(x, 1)[:, -1:])
    assert_bitwise(L.prod_dim(x, -1), L.cumprod(x, 2)[..., -1])
    assert_bitwise(L.prod(x), L.cumprod(x.reshape(-1), 0)[-1])


def test_cumsum_of_a_million_floats_is_one_result():
    x = draw(1_000_003)
    step = torch.compile(lambda x: x.cumsum(0), backend=carbon, fullgraph=True)
    results = {fingerprint(step(x)) for _ in range(10)} | {fingerprint(L.cumsum(x, 0))}
    assert len(results) == 1
    exact = x.double().cumsum(0)
    assert (step(x).double() - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_narrow_types_are_rounded_once():
    x = draw(5, 400, dtype=torch.bfloat16)
    for rule in (L.cumsum, L.cumprod, L.prod_dim, L.logcumsumexp):
        assert_bitwise(rule(x, 1), rule(x.float(), 1).bfloat16())


def test_infinities_and_nan():
    inf, nan = math.inf, math.nan
    x = torch.tensor([1.0, inf, 2.0, -inf, 1.0, nan])
    assert_bitwise(L.cumsum(x, 0), torch.tensor([1.0, inf, inf, nan, nan, nan]))
    assert_bitwise(L.cumprod(x, 0), torch.tensor([1.0, inf, inf, -inf, -inf, nan]))
    y = torch.tensor([-inf, -inf, 0.0, -inf, inf, 1.0, nan])
    assert_bitwise(L.logcumsumexp(y, 0), torch.tensor([-inf, -inf, 0.0, 0.0, inf, inf, nan]))
    assert_bitwise(L.cumsum(torch.tensor([-0.0, -0.0]), 0), torch.tensor([-0.0, -0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_running_extremes_are_pytorchs(dtype):
    x = torch.randint(-3, 4, (4, 50), generator=torch.Generator().manual_seed(0)).to(dtype)
    for ours, theirs in ((L.cummax, torch.cummax), (L.cummin, torch.cummin)):
        for dim in (0, -1):
            for a, b in zip(ours(x, dim), theirs(x, dim), strict=True):
                assert_bitwise(a, b)


def test_running_extremes_of_nan_and_zeros():
    x = torch.tensor([0.0, -0.0, 1.0, math.nan, 2.0, math.nan])
    values, index = L.cummax(x, 0)
    assert_bitwise(index, torch.tensor([0, 1, 2, 3, 3, 5]))
    assert_bitwise(values, x[index])
    assert_bitwise(L.cummin(x, 0)[1], torch.tensor([0, 1, 1, 3, 3, 5]))


# --- compiled, and its derivatives ------------------------------------------------------------------------


def scans(x, z):
    y = [x.cumsum(1), x.cumsum(-3, dtype=torch.float32), torch.cumsum(x, 2), z.cumprod(1), torch.cumprod(z, -1), z.prod(), z.prod(1), z.prod(-1, keepdim=True)]
    y += [x.logcumsumexp(1), x.cummax(1).values, x.cummin(-1).values, torch.cumulative_trapezoid(x, dim=1), x[0, 0, 0].cumsum(0), z[0, 0, 0].cumprod(0)]
    return tuple(y)


def integers(k, x):
    y = [k.cumsum(0), k.cumprod(1), k.prod(), k.prod(1), k.cumsum(1, dtype=torch.float32), k.prod(1, dtype=torch.float32), *k.cummax(1), (k > 0).cumsum(1)]
    y += [x[:0].cumsum(0), x[:0].prod(), x[:0].prod(0), x[:, :0].cumprod(1), x.to(torch.float64).cumsum(1), x[0, 0].prod(), x[:, :0].cumsum(0)]
    return tuple(y)


def with_zeros(dtype):
    z = draw(3, 7, 5, dtype=dtype, seed=1)
    z[0, 2], z[1, 1, 3], z[1, 4, 3] = 0.0, 0.0, 0.0
    return z.requires_grad_()


COMPILED = {
    "float32": (scans, lambda: [draw(3, 7, 5, grad=True), with_zeros(torch.float32)]),
    "bfloat16": (scans, lambda: [draw(3, 7, 5, dtype=torch.bfloat16, grad=True), with_zeros(torch.bfloat16)]),
    "integers": (integers, lambda: [torch.arange(-12, 12).reshape(4, 6), draw(4, 6)]),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_is_the_definition(case):
    function, inputs = COMPILED[case][0], COMPILED[case][1]()
    tolerance = 3e-2 if inputs[0].dtype is torch.bfloat16 else 2e-6
    check_accuracy(function, inputs, check_compiled(function, inputs), tolerance)


def test_cumprods_derivative_with_zeros_is_exact_enough():
    for n in (1, 2, 9, 33):
        x = draw(4, n).double()
        x[1, n // 2], x[2, 0], x[2, n - 1] = 0.0, 0.0, 0.0
        x.requires_grad_()
        incoming = draw(4, n, seed=2)
        expected = torch.autograd.grad(x.cumprod(1), x, incoming.double())[0]
        ours = templates.cumprod_backward(incoming, x.detach().float(), 1)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_symbolic_sizes_and_threads_give_the_same_bits():
    step = torch.compile(lambda x: (x.cumsum(1), x.cumprod(1), x.prod(0)), backend=carbon, fullgraph=True, dynamic=True)
    before = torch.get_num_threads()
    try:
        for threads, shape in ((1, (3, 1003)), (2, (3, 1003)), (2, (20, 4999))):
            torch.set_num_threads(threads)
            x = draw(*shape)
            for ours, expected in zip(step(x), (L.cumsum(x, 1), L.cumprod(x, 1), L.prod_dim(x, 0)), strict=True):
                assert_bitwise(ours, expected)
    finally:
        torch.set_num_threads(before)


def test_refused():
    for function, x in ((lambda x: x.logcumsumexp(0), draw(4).double()), (lambda x: x.cumsum(0), torch.view_as_complex(draw(4, 2)))):
        with pytest.raises(Refused):
            torch.compile(function, backend=carbon, fullgraph=True)(x)


# --- devices ------------------------------------------------------------------------------------------------


LARGE = {
    "long": (lambda x: (x.cumsum(0), x.prod(), x.cummax(0).values), lambda: [draw(1_000_003)]),
    "rows": (lambda x: (x.cumsum(1), x.cumprod(1), x.logcumsumexp(1)), lambda: [draw(64, 5003, grad=True)]),
    "columns": (lambda x: (x.cumsum(0), x.prod(0)), lambda: [draw(1003, 300, dtype=torch.bfloat16, grad=True)]),
}


def check(device):
    """Hashes of forward and backward on `device`, after compiled is found to equal defined: {case: hash}."""
    hashes = {}
    for case, (function, make) in {**COMPILED, **LARGE}.items():
        inputs = [t.detach().to(device).requires_grad_(t.requires_grad) for t in make()]
        outputs, gradients = check_compiled(function, inputs)
        hashes[case] = fingerprint([*outputs, *gradients])
    return hashes


@pytest.mark.gpu
def test_devices_agree():
    assert check("cuda") == check("cpu")
