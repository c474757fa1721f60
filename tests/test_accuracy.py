"""How near the exact products come to float64, on the distributions that matter (contract section 4)."""

import pytest
import torch

from bench.accuracy import distributions
from carbon_compile.bits import assert_bitwise
from carbon_compile.templates.matmul import exact_mm


def relative(c, truth):
    return ((c.double() - truth).norm() / truth.norm()).item()


@pytest.fixture(scope="module")
def data():
    return distributions(64, 64, 4096, torch.Generator().manual_seed(0))


def errors(data, name, dtype, window):
    a, b, balance = data[name]
    a, b = a.to(dtype), b.to(dtype)
    truth = a.double() @ b.double()
    return relative(exact_mm(a, b, window=window, balance=balance, out_dtype=torch.float32), truth), relative(a.float() @ b.float(), truth)


def test_float32_products_of_gaussians_are_as_accurate_as_stock(data):
    exact, stock = errors(data, "Gaussian", torch.float32, 24)
    assert exact <= 1.5 * stock


def test_bfloat16_products_of_gaussians(data):
    exact, _ = errors(data, "Gaussian", torch.bfloat16, 16)
    assert exact < 2e-5


def test_outlier_channels_cost_at_most_a_digit(data):
    exact, stock = errors(data, "100x outlier channels", torch.float32, 24)
    assert exact <= 10 * stock


def test_the_balance_saves_outliers_that_small_weights_meet(data):
    exact, stock = errors(data, "outliers met by small weights", torch.float32, 24)
    assert exact <= 2 * stock
    exact, _ = errors(data, "outliers met by small weights", torch.bfloat16, 16)
    assert exact < 1e-4


def test_weight_gradients_keep_their_accuracy_over_token_scales(data):
    exact, stock = errors(data, "weight gradient, token scales", torch.float32, 24)
    assert exact <= 2 * stock


def test_a_small_count_survives_a_large_row():
    # Row and column maxima set the grid, so it is the window that keeps small terms of a K = 1 product.
    y = exact_mm(torch.ones(1, 1), torch.arange(8192.0)[None], window=24, balance="weight", out_dtype=torch.float32)
    assert y[0, 2049] == 2049.0


# --- long contractions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [16384, 16385])
def test_a_contraction_beyond_16384_has_a_wider_window(classes):
    """The gradient of bfloat16 rows behind a layer of many outputs; their weight's stays as it was."""
    torch.manual_seed(0)
    x = torch.randn(3, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, 32, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(3, classes).square().square().bfloat16()
    torch._dynamo.reset()
    y = torch.compile(torch.nn.functional.linear, backend="carbon")(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), g)
    product = lambda window: exact_mm(g, weight.detach(), window=window, balance="weight", out_dtype=torch.bfloat16)  # noqa: E731
    assert not torch.equal(product(16), product(24))
    assert_bitwise(dx, product(24 if classes > 16384 else 16))
    assert_bitwise(dw, exact_mm(x.detach().t(), g, window=16, balance="gradient", out_dtype=torch.bfloat16).t().contiguous())
    with torch.no_grad():  # and so forward, with digits that are kept or not
        wide = weight.t().contiguous()
        for options in ({}, {"weights": "kept"}):
            module = torch.nn.Linear(classes, 32, bias=False, dtype=torch.bfloat16)
            module.weight.copy_(wide)
            torch._dynamo.reset()
            assert_bitwise(torch.compile(module, backend="carbon", options=options)(g), product(24 if classes > 16384 else 16))


def test_gradients_behind_a_large_vocabulary_are_as_good_as_stock():
    """Even predictions of 50,257 classes: one large number a row, and many small ones."""
    torch.manual_seed(0)
    weight, x = torch.randn(50257, 64) * 0.02, torch.randn(16, 64).bfloat16()
    target = torch.randint(0, 50257, (16,))

    def gradient(function, x, weight):
        x = x.detach().requires_grad_()
        loss = function(x, weight)
        return torch.autograd.grad(loss, x)[0].double()

    def loss(x, weight):
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight).float(), target)

    torch._dynamo.reset()
    exact = gradient(lambda x, w: torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w), target), x.double(), weight.bfloat16().double())
    error = lambda found: (found.sum(0) - exact.sum(0)).norm() / exact.sum(0).norm()  # noqa: E731
    ours = error(gradient(torch.compile(loss, backend="carbon"), x, weight.bfloat16()))
    stock = error(gradient(loss, x, weight.bfloat16()))
    assert ours <= 2 * stock, (ours, stock)
