"""How near the exact products come to float64, on the distributions that matter (contract section 4)."""

import pytest
import torch

from bench.accuracy import distributions
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
