"""Losses: pinned formulas forward and backward, in every reduction, compiled as defined."""

import pytest
import torch
import torch.nn.functional as F

from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import loss as L
from carbon_compile.lowering import registry

from .definition import check_accuracy, check_compiled, compiled

registry.load()
TYPES = [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)]


def regression(x, t):
    far = 3 * t
    y = [F.mse_loss(x, far), F.mse_loss(x, far, reduction="none"), F.l1_loss(x, far, reduction="sum"), F.l1_loss(x, far)]
    y += [F.smooth_l1_loss(x, far, beta=0.7), F.smooth_l1_loss(x, far, beta=0.0, reduction="sum"), F.smooth_l1_loss(x, far, reduction="none")]
    y += [F.huber_loss(x, far, delta=0.5), F.huber_loss(x, far, reduction="none"), F.poisson_nll_loss(x, t.exp()), F.triplet_margin_loss(x, t, x * t)]
    return tuple(y)


def probability(x, t):
    p, q, sign = torch.sigmoid(x), torch.sigmoid(t), t.detach().sign()
    y = [F.binary_cross_entropy(p, q.detach()), F.binary_cross_entropy(p, q.detach(), weight=q.detach(), reduction="none")]
    y += [F.binary_cross_entropy_with_logits(x, q), F.binary_cross_entropy_with_logits(x, q.detach(), weight=p.detach(), pos_weight=p.detach()[0] * 3, reduction="sum")]
    y += [F.kl_div(F.log_softmax(x, 1), F.softmax(t, 1), reduction="batchmean"), F.kl_div(F.log_softmax(x, 1), F.log_softmax(t, 1), log_target=True)]
    y += [F.soft_margin_loss(x, sign), F.hinge_embedding_loss(x, sign), F.cosine_embedding_loss(x, t, sign[:, 0]), F.multilabel_soft_margin_loss(x, q.detach())]
    y += [F.margin_ranking_loss(x, t, sign, margin=0.1)]
    return tuple(y)


def classes(x, image, labels, pixels, weight):
    y = [F.cross_entropy(x, labels), F.cross_entropy(x, labels, weight, ignore_index=2), F.cross_entropy(x, labels, weight, reduction="none")]
    y += [F.cross_entropy(x, labels, label_smoothing=0.1), F.cross_entropy(x, labels, weight, ignore_index=2, label_smoothing=0.2, reduction="sum")]
    y += [F.cross_entropy(x, F.softmax(x.detach() * 2, 1)), F.cross_entropy(x[0], labels[0]), F.cross_entropy(image, pixels, weight[:4], ignore_index=1)]
    y += [F.nll_loss(F.log_softmax(x, 1), labels), F.nll_loss(F.log_softmax(image, 1), pixels, reduction="none"), F.multi_margin_loss(x, labels, p=2, margin=0.4)]
    return tuple(y)


@pytest.mark.parametrize("dtype, tolerance", TYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", [regression, probability])
def test_pairs(function, dtype, tolerance):
    inputs = [torch.randn(7, 5).to(dtype).requires_grad_() for _ in range(2)]
    check_accuracy(function, inputs, check_compiled(function, inputs), tolerance)


@pytest.mark.parametrize("dtype, tolerance", TYPES, ids=["float32", "bfloat16"])
def test_classes(dtype, tolerance):
    inputs = [torch.randn(6, 9), torch.randn(2, 4, 3, 5)]
    inputs = [t.to(dtype).requires_grad_() for t in inputs]
    inputs += [torch.tensor([0, 2, 5, 8, 2, 1]), torch.randint(0, 4, (2, 3, 5)), torch.rand(9).to(dtype)]
    check_accuracy(classes, inputs, check_compiled(classes, inputs), tolerance)


def test_order_and_batch_do_not_matter():
    x, t, order = torch.randn(500, 7), torch.randint(0, 7, (500,)), torch.randperm(500)
    loss, weights = L.nll_loss(x, t, torch.rand(7), L.MEAN, -100)
    assert_bitwise(L.mse_loss(x, x.flip(0)), L.mse_loss(x[order], x.flip(0)[order]))
    assert_bitwise(L.nll_loss(x, t, None, L.MEAN, -100), L.nll_loss(x[order], t[order], None, L.MEAN, -100))
    g = torch.tensor(0.7)
    whole = L.nll_loss_backward(g, x, t, None, L.SUM, -100, weights)
    for size in (1, 2, 7, 64, 255):
        assert_bitwise(L.nll_loss_backward(g, x[:size], t[:size], None, L.SUM, -100, weights), whole[:size])


def test_all_ignored_is_nan_and_its_gradient_zero():
    x = torch.randn(3, 5, requires_grad=True)
    labels = torch.full((3,), -100)
    (loss, total), (gradient,) = compiled(lambda x, t: (F.cross_entropy(x, t), F.cross_entropy(x, t, reduction="sum")), [x, labels])
    assert loss.isnan() and total.item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 5))


def test_mean_weights_are_not_rounded_to_the_inputs_type():
    """1001 samples: bfloat16 cannot hold the count, the gradient's divisor must."""
    x, t = torch.zeros(1001, 2, dtype=torch.bfloat16), torch.zeros(1001, dtype=torch.int64)
    g = torch.tensor(1001.0)
    gradient = L.nll_loss_backward(g, x, t, None, L.MEAN, -100, torch.tensor(1000.0, dtype=torch.bfloat16))
    assert gradient[0].tolist() == [-1.0, 0.0]


def test_confident_logits_keep_their_small_losses():
    x, t = torch.tensor([-30.0, 30.0, -90.0, 8.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    ours = L.binary_cross_entropy_with_logits(x, t, reduction=L.NONE)
    exact = F.softplus(torch.where(t == 1, -x, x).double(), threshold=1000)
    assert ((ours - exact).abs() / exact).max() < 1e-6


def test_extreme_logits():
    x = torch.tensor([[float("inf"), 0.0], [float("-inf"), 0.0], [1e30, -1e30], [float("nan"), 0.0]])
    function = lambda x, t: (F.cross_entropy(x, t, reduction="none"), F.binary_cross_entropy_with_logits(x[2], t[:2].float(), reduction="none"))  # noqa: E731
    inputs = [x, torch.tensor([0, 1, 1, 0])]
    outputs, _ = check_compiled(function, inputs)
    for a, b in zip(outputs, function(*inputs), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
