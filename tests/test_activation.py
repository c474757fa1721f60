"""Activations and elementary functions through their ATen names: types, pieces, derivatives, refusals."""

import math

import pytest
import torch
import torch.nn.functional as F

from carbon_compile.bits import assert_bitwise
from carbon_compile.diagnostics import Refused
from carbon_compile.lowering import activation as A
from carbon_compile.lowering import registry

from .definition import check_accuracy, check_compiled, compiled

registry.load()
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, 20.5, -20.5, 88.0, -104.0, 1e-30, -1e-30, math.inf, -math.inf, math.nan]


def smooth(x):
    y = [F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.softplus(x), F.softplus(x, 2.0, 1.0), torch.sigmoid(x), torch.tanh(x)]
    return (*y, F.logsigmoid(x), F.glu(x), F.softsign(x), F.tanhshrink(x))


def pieces(x, w):
    y = [F.relu(x), F.relu6(x * 3), F.elu(x, 1.3), F.selu(x), F.celu(x, 0.7), F.leaky_relu(x, 0.1), F.hardswish(x * 2), F.hardsigmoid(x * 2), F.hardtanh(x)]
    return (*y, F.threshold(x, 0.1, 0.2), F.softshrink(x), F.hardshrink(x), F.prelu(x, w), F.rrelu(x))


def elementary(x, y):
    p, u = x.abs() + 0.1, torch.sigmoid(x) * 0.8 + 0.1
    z = [x.exp(), x.exp2(), x.expm1(), p.log(), p.log2(), p.log10(), p.log1p(), x.sin(), x.cos(), x.tan(), u.asin(), u.acos(), x.atan()]
    z += [x.sinh(), x.cosh(), x.asinh(), (p + 1).acosh(), u.atanh(), x.erf(), x.erfc(), u.erfinv(), x.sinc(), p.rsqrt(), p.reciprocal()]
    z += [torch.logit(u), torch.logit(u, 0.3), torch.atan2(x, y), torch.hypot(x, y), torch.logaddexp(x, y), torch.logaddexp2(x, y)]
    z += [torch.xlogy(y, p), torch.special.xlog1py(y, p), torch.special.entr(u), torch.special.ndtr(x), torch.deg2rad(x), torch.rad2deg(x)]
    return tuple(z)


def powers(x, y):
    p = x.abs() + 0.1
    z = [p**n for n in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.7)] + [x**2, x**3, x**4, p**y, 2.0**x, 3.0**x, x.square(), torch.float_power(p.detach().float(), 2)]
    return tuple(z[:-1])


# Two halves, and no tail behind the vectors: a C++ compiler's time grows faster than its kernel.
HALVES = {"elementary": (lambda x, y: elementary(x, y)[::2], [(8, 8)] * 2), "other elementary": (lambda x, y: elementary(x, y)[1::2], [(8, 8)] * 2)}
CASES = {"smooth": (smooth, [(6, 8)]), "pieces": (pieces, [(6, 8), (8,)]), "powers": (powers, [(6, 8)] * 2), **HALVES}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_is_the_definition(case, dtype, tolerance):
    function, shapes = CASES[case]
    inputs = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
    results = check_compiled(function, inputs)
    assert all(y.dtype is dtype for y in results[0])
    check_accuracy(function, inputs, results, tolerance)


def test_special_values_are_pytorchs():
    x = torch.tensor(SPECIAL)
    functions = [  # not gelu: PyTorch's vector code gives NaN at infinity, its scalar code infinity
        F.silu, F.mish, F.softplus, torch.sigmoid, torch.tanh, F.logsigmoid, F.relu6, F.elu, F.selu, F.celu, F.leaky_relu, F.hardswish,
        F.hardsigmoid, F.hardtanh, F.softshrink, F.hardshrink, torch.special.entr, torch.logit, lambda x: F.threshold(x, 0.1, 0.2), lambda x: x**2,
        lambda x: x**3, lambda x: x**-1, lambda x: x**0, lambda x: x**2.5, lambda x: 2.0**x, lambda x: torch.xlogy(x, x), lambda x: F.prelu(x, x[:1] + 0.5),
    ]  # fmt: skip
    outputs, _ = check_compiled(lambda x: tuple(f(x) for f in functions), [x])
    for i, (a, f) in enumerate(zip(outputs, functions, strict=True)):
        torch.testing.assert_close(a, f(x), equal_nan=True, msg=lambda m, i=i: f"function {i}: {m}")


def test_derivatives_at_special_values_are_pytorchs():
    x = torch.tensor([v for v in SPECIAL if math.isfinite(v)])
    functions = [F.relu, F.relu6, F.elu, F.selu, F.leaky_relu, F.hardswish, F.hardsigmoid, F.hardtanh, F.softshrink, F.hardshrink, F.silu, F.gelu, torch.sigmoid, F.logsigmoid]
    leaves = [x.clone().requires_grad_() for _ in functions]
    run = lambda *xs: tuple(f(x) for f, x in zip(functions, xs, strict=True))  # noqa: E731
    _, gradients = check_compiled(run, leaves)
    expected = [torch.autograd.grad(f(t), t, torch.ones_like(t))[0] for f, t in zip(functions, leaves, strict=True)]
    ones = torch.autograd.grad(torch.compile(run, backend="carbon")(*leaves), leaves, [torch.ones_like(x)] * len(leaves))
    assert len(gradients) == len(functions)
    for i, (a, b) in enumerate(zip(ones, expected, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-8, msg=lambda m, i=i: f"function {i}: {m}")


def test_integers_become_floats():
    n = torch.arange(1, 9)
    function = lambda n: (n.exp(), n.sqrt(), n.rsqrt(), n.sigmoid(), n**0.5, 10.0**n, n**2, 2**n, torch.atan2(n, n), torch.xlogy(n, n), n.log(), F.threshold(n, 3, 0))  # noqa: E731
    for a, b in zip(check_compiled(function, [n])[0], function(n), strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_powers_without_a_logarithm_are_products():
    x = torch.randn(1000)
    assert_bitwise([A.power(x, n) for n in (1, 2, 3, -1, -2)], [x, x * x, x * x * x, 1 / x, 1 / (x * x)])
    assert_bitwise(A.power(x.double(), 2), x.double() * x.double())
    assert A.power(x, 0).eq(1).all()


@pytest.mark.parametrize(
    "code, function",
    [
        ("CB203", torch.exp), ("CB203", F.gelu), ("CB203", lambda x: x**1.5), ("CB203", F.elu), ("CB109", lambda x: torch.digamma(x.float())),
        ("CB109", lambda x: torch.special.i0(x.float())), ("CB402", lambda x: F.rrelu(x.float(), training=True)),
    ],
)  # fmt: skip
def test_refusals_name_their_code(code, function):
    with pytest.raises(Refused) as refused:
        compiled(function, [torch.rand(4, dtype=torch.float64)])
    assert refused.value.report.diagnostics[0].code == code


def test_float64_pieces_are_ieee():
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    function = lambda x: (F.relu(x), F.leaky_relu(x), F.hardtanh(x), F.hardshrink(x), F.hardsigmoid(x), x**2, x**-1)  # noqa: E731
    outputs, _ = check_compiled(function, [x])
    assert_bitwise(outputs, list(function(x)))


def test_zeros_that_autograd_and_in_place_calls_make():
    """`zero_` on a computed value, and the derivative of `sgn`, which is a tensor without elements."""
    x = torch.randn(5, requires_grad=True)
    outputs, gradients = check_compiled(lambda x: ((x * 2).zero_() + x, torch.sgn(x)), [x])
    assert_bitwise(outputs, [x.detach() + 0, torch.sgn(x.detach())])
    assert gradients[0].isfinite().all()
