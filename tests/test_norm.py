"""Normalisations: exact statistics, pinned derivatives, running statistics, one result for any batch."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import norm as N
from carbon_compile.lowering import registry

from .definition import check_accuracy, check_compiled, compiled

registry.load()
TYPES = {"float32": (torch.float32, torch.float32, 3e-6), "mixed": (torch.bfloat16, torch.float32, 3e-2)}


def by_row(x, w, b):
    return (
        F.layer_norm(x, (16,), w, b), F.layer_norm(x, x.shape[1:], None, None, 1e-3), F.layer_norm(x, (16,), w),
        F.rms_norm(x, (16,), w), F.rms_norm(x, (16,), None, 1e-3),
    )  # fmt: skip


def by_channel(x, w, b):
    mean, var = b.detach() * 0.5, w.detach().square() + 0.1
    return (
        F.group_norm(x, 2, w, b), F.group_norm(x, 8), F.batch_norm(x, None, None, w, b, True), F.batch_norm(x, mean, var, w, b, False),
        F.instance_norm(x, weight=w, bias=b), F.local_response_norm(x, 3, alpha=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("function, shape, n", [(by_row, (6, 5, 16), 16), (by_channel, (4, 8, 3, 5), 8)], ids=["rows", "channels"])
def test_compiled_is_the_definition(function, shape, n, types):
    dtype, parameters, tolerance = TYPES[types]
    inputs = [(torch.randn(shape) * 2 + 1).to(dtype), torch.randn(n).to(parameters), torch.randn(n).to(parameters)]
    inputs = [t.requires_grad_() for t in inputs]
    outputs, gradients = check_compiled(function, inputs)
    assert all(y.dtype is dtype for y in outputs)
    assert [g.dtype for g in gradients] == [dtype, parameters, parameters]
    check_accuracy(function, inputs, (outputs, gradients), tolerance)


def test_rows_do_not_depend_on_the_batch():
    x, w, b = torch.randn(255, 16, requires_grad=True), torch.randn(16), torch.randn(16)
    rows = lambda x: (F.layer_norm(x, (16,), w, b), F.rms_norm(x, (16,), w))  # noqa: E731
    function = torch.compile(rows, backend=carbon, fullgraph=True, dynamic=True)
    run = lambda x: [*function(x), torch.autograd.grad(sum((y * y).sum() for y in function(x)), x)[0]]  # noqa: E731
    whole = run(x)
    for size in (1, 2, 7, 64):
        part = run(x[:size].detach().requires_grad_())
        assert_bitwise(part, [t[:size] for t in whole], f"batch {size}")


def test_order_does_not_matter():
    x, g = torch.randn(64, 48), torch.randn(64, 48)
    order = torch.randperm(48)
    y, mean, variance, rstd = N.normalize(x, [1], None, None, 1e-5)
    shuffled = N.normalize(x[:, order], [1], None, None, 1e-5)
    assert_bitwise([y[:, order], mean, variance, rstd], list(shuffled))
    dx = N.normalize_backward(g, x, [1], mean, rstd, None)
    assert_bitwise(dx[:, order], N.normalize_backward(g[:, order], x[:, order], [1], mean, rstd, None))
    w = torch.randn(48)
    dw = N.normalize_scale_backward(g, x, mean, rstd, w)
    rows = torch.randperm(64)
    assert_bitwise(dw, N.normalize_scale_backward(g[rows], x[rows], mean[rows], rstd[rows], w))


@pytest.mark.parametrize("layer", [lambda: nn.BatchNorm2d(6), lambda: nn.BatchNorm2d(6, momentum=0.3, affine=False), lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)])
def test_running_statistics(layer):
    torch.manual_seed(1)
    ours, theirs = layer(), layer().double()
    theirs.load_state_dict(ours.state_dict())
    function = torch.compile(ours, backend=carbon, fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 6, 3, 5) * 3 + 2
        y, expected = function(x), theirs(x.double())
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(function(x).double(), theirs(x.double()), rtol=1e-5, atol=1e-5)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value.double(), theirs.state_dict()[name].double(), rtol=1e-6, atol=1e-6)
        assert value.dtype is (torch.int64 if "num" in name else torch.float32)


def test_a_constant_row_and_large_values():
    x = torch.tensor([[3.0] * 8, [1e4 + i for i in range(8)], [1e18, -1e18, 0, 0, 0, 0, 0, 0], [1e-30 * i for i in range(8)]])
    function = lambda x: (F.layer_norm(x, (8,)), F.rms_norm(x, (8,), None, 1e-6))  # noqa: E731
    outputs, _ = check_compiled(function, [x])
    assert_bitwise(outputs[0][0], torch.zeros(8))
    check_accuracy(function, [x], (outputs, []), 1e-5)


def test_infinities_stay_in_their_row():
    x = torch.randn(3, 8)
    x[1, 3] = float("inf")
    y = compiled(lambda x: F.layer_norm(x, (8,)), [x])[0][0]
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


NATIVE = torch.ops.aten


def native(x, w, b, c, v, m):
    """The operators that composites normally keep away."""
    y = [NATIVE.native_layer_norm(x, (16,), w, b, 1e-5)[0]]
    y += [NATIVE.native_group_norm(c, v, m, 4, 8, 15, 2, 1e-5)[0], NATIVE._native_batch_norm_legit.no_stats(c, v, m, True, 0.1, 1e-5)[0]]
    return tuple(y)


def functional(x, w, b, c, v, m):
    return F.layer_norm(x, (16,), w, b), F.group_norm(c, 2, v, m), F.batch_norm(c, None, None, v, m, True)


def test_native_operators_obey_the_same_formulas():
    inputs = [torch.randn(6, 16), torch.randn(16), torch.randn(16), torch.randn(4, 8, 3, 5), torch.randn(8), torch.randn(8)]
    inputs = [t.requires_grad_() for t in inputs]
    assert_bitwise(compiled(native, inputs), compiled(functional, inputs))


def test_fused_rms_norm_obeys_the_same_formula():
    x, g, w = torch.randn(6, 16), torch.randn(6, 16), torch.randn(16)
    y, rstd = N.fused_rms_norm(x, (16,), w, None)
    assert_bitwise(y, N.rms_norm(x, (16,), w))
    dx, dw = N.fused_rms_norm_backward(g, x, (16,), rstd, w, [True, True])
    assert_bitwise(dx, N.normalize_backward(g, x, [1], None, rstd, w))
    assert N.fused_rms_norm_backward(g, x, (16,), rstd, w, [True, False])[1] is None
    assert_bitwise(dw, N.normalize_scale_backward(g, x, None, rstd, w))


@pytest.mark.parametrize("dim", [0, 1, -1, "vector"])
def test_weight_norm(dim):
    """As torch.nn.utils.parametrizations.weight_norm calls it."""
    torch.manual_seed(0)
    v, dim = (torch.randn(5), 0) if dim == "vector" else (torch.randn(5, 7), dim)
    g = torch.randn_like(torch.norm_except_dim(v, 2, dim))
    inputs, weights = [v.requires_grad_(), g.requires_grad_()], torch.rand_like(v)

    def function(v, g):
        return torch._weight_norm(v, g, dim) + 0.1 * v * weights  # the norm alone has no gradient along itself

    check_accuracy(function, inputs, compiled(function, inputs), 2e-6)
