"""Losses: pinned formulas forward and backward, in every reduction, compiled as defined."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import carbon_compile
from carbon_compile import host, runlog
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import loss as L
from carbon_compile.lowering import prims as P
from carbon_compile.lowering import registry

from .definition import check_accuracy, check_compiled, compiled
from .offline import printed

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


# --- the gradient of a cross-entropy: the sum over classes is known without adding ----------------------

TINY = 2.0**-149
AWKWARD = (1.0, -0.7, 0.0, -0.0, TINY, -3 * TINY, 1e-39, 2.0**-126, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 1e-8, -65519.0, 6e-8)


def bits(function, inputs, incoming):
    """Results and gradients; the incoming gradients are the first of `incoming`, in the shape of each result."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    ys = function(*leaves)
    ys = ys if isinstance(ys, tuple) else (ys,)
    wanted = [t for t in leaves if t.requires_grad]
    return *(t.detach() for t in ys), *torch.autograd.grad(ys, wanted, [incoming[: t.numel()].reshape(t.shape).to(t.dtype) for t in ys])


def compiled_bits(function, inputs, incoming):
    """(results and gradients, targets of the backward graph) of carbon's compiled code."""
    torch._dynamo.reset()
    graphs, compile_graph = [], host.compile_fx_inner

    def look(gm, *args, **kwargs):
        graphs.append([str(node.target) for node in gm.graph.nodes])
        return compile_graph(gm, *args, **kwargs)

    with mock.patch.object(host, "compile_fx_inner", look), torch._inductor.config.patch(force_disable_caches=True):
        results = bits(torch.compile(function, backend="carbon", fullgraph=True), inputs, incoming)
    return results, graphs[-1]


def assert_same(ours, theirs):
    """The same bits, zeros with their signs."""
    assert_bitwise(ours, theirs)
    zero = ours == 0
    assert torch.equal(ours[zero].signbit(), theirs[zero].signbit())


def check_sums(function, inputs, sums=0):
    """Compiled code has the bits of eager code, which adds, and `sums` sums of many terms in its backward."""
    incoming = torch.tensor(AWKWARD)
    ours, targets = compiled_bits(function, inputs, incoming)
    left = [target for target in targets if "sum_of_" in target]
    assert len(left) == sums, left
    with carbon_compile.enable(seed=None):
        theirs = bits(function, inputs, incoming)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


def logits(*shape, dtype=torch.float32):
    x = 3 * torch.randn(*shape)
    x.view(-1)[::37] = -200.0  # probabilities that are zero
    return x.to(dtype).requires_grad_()


N, C = len(AWKWARD), 7
LABELS = torch.tensor([0, 3, 6, 2] * 4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("ignored", (-100, 3, 9))
@pytest.mark.parametrize("weighted", (False, True))
def test_cross_entropy_of_awkward_gradients(dtype, ignored, weighted):
    labels = LABELS.clone()
    labels[5] = ignored
    weight = torch.tensor([1.0, 0.5, -0.0, 0.0, TINY, math.inf, -2.5]) if weighted else None
    check_sums(lambda x, t: F.cross_entropy(x, t, weight, ignore_index=ignored, reduction="none"), [logits(N, C, dtype=dtype), labels])


WEIGHT = torch.tensor([1.0, 0.5, 0.25, -0.0, 1e-39, 3.0, 7.0])


@pytest.mark.parametrize("options", ({"reduction": "sum"}, {"weight": WEIGHT, "ignore_index": 6}), ids=("sum", "weighted mean"))
def test_reductions_of_awkward_gradients(options):
    torch._dynamo.reset()
    loss, x = lambda x, t: F.cross_entropy(x, t, **options), logits(N, C, dtype=torch.bfloat16)
    function = torch.compile(loss, backend="carbon", fullgraph=True)
    for value in AWKWARD:
        with carbon_compile.enable(seed=None):
            theirs = bits(loss, [x, LABELS], torch.tensor([value]))
        for a, b in zip(bits(function, [x, LABELS], torch.tensor([value])), theirs, strict=True):
            assert_same(a, b)


def test_extreme_logits_with_awkward_gradients():
    x = torch.randn(N, C)
    x[0, 1], x[1], x[2, 2], x[3], x[4, 0], x[5, :3] = math.inf, -math.inf, math.nan, 1e38, -math.inf, 3e38
    check_sums(lambda x, t: F.cross_entropy(x, t, reduction="none"), [x.requires_grad_(), LABELS])


@pytest.mark.parametrize("shape", ((2, C, 8), (2, C, 2, 4), (1, C, 2, 2, 4), (C,)), ids=str)
def test_classes_before_other_dimensions(shape):
    labels = LABELS[: math.prod(shape) // C].view(shape[:1] + shape[2:] if len(shape) > 1 else ())
    check_sums(lambda x, t: F.cross_entropy(x, t, ignore_index=2, reduction="none"), [logits(*shape), labels])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_cast_between_both(dtype):
    """The gradient of nll_loss is rounded, to infinity or zero as it may be, before the derivative of log_softmax."""
    check_sums(lambda x, t: F.nll_loss(F.log_softmax(x, 1), t, reduction="none").float(), [logits(N, C, dtype=dtype), LABELS])


def test_sizes_that_change():
    """Symbolic sizes, also that of the classes."""
    loss = lambda x, t: F.cross_entropy(x, t)  # noqa: E731
    function = torch.compile(loss, backend="carbon", fullgraph=True, dynamic=True)
    for n, c in ((5, 11), (9, 8), (16, 33)):
        inputs, incoming = [logits(n, c), torch.randint(0, c, (n,))], torch.tensor([-0.3])
        with carbon_compile.enable(seed=None):
            theirs = bits(loss, inputs, incoming)
        for a, b in zip(bits(function, inputs, incoming), theirs, strict=True):
            assert_same(a, b)


def test_a_gradient_that_is_used_elsewhere():
    function = lambda x, z, t: F.nll_loss(F.log_softmax(x, 1) + z, t, reduction="none")  # noqa: E731
    check_sums(function, [logits(N, C), logits(N, C), LABELS])


@pytest.mark.parametrize(
    "function",
    (
        lambda x, t: F.nll_loss(F.log_softmax(x, 0), t, reduction="none"),  # sums over samples
        lambda x, t: F.nll_loss(F.log_softmax(x.t(), 0).t(), t, reduction="none"),
        lambda x, t: F.nll_loss(F.log_softmax(x, 1).exp(), t, reduction="none"),
        lambda x, t: F.nll_loss(F.log_softmax(x.view(C, N), 1).view(N, C), t, reduction="none"),  # rows of others' classes
        lambda x, t: F.nll_loss(F.log_softmax(x.view(N // 2, C, 2), 1).view(N, C), t, reduction="none"),
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
        lambda x, t: (lambda y: (F.nll_loss(y, t, reduction="none"), y[:, 0] * 2))(F.log_softmax(x, 1)),
    ),
)
def test_other_gradients_are_summed(function):
    check_sums(function, [logits(N, C), LABELS], sums=1)


def test_the_sum_of_one():
    """Against section 3's sum itself, for targets in and out of the range of classes."""
    g, x = torch.tensor(AWKWARD), torch.zeros(N, C)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shift in range(-C, 2 * C):
            for ignored in (-100, 3):
                given = (g, x, LABELS + shift, None, L.NONE, ignored, torch.tensor(0.0))
                dx = L.nll_loss_backward(*given).to(dtype)
                assert_same(L.sum_over_classes(dx, [dtype], *given), P.sum(dx, [1], True))


def test_verdicts_and_lines_stay():
    compiled_bits(lambda x, t: F.cross_entropy(x, t), [logits(N, C), LABELS], torch.ones(1))
    for name in ("nll_loss_backward", "_log_softmax_backward_data"):
        row = next(row for row in runlog.LOG.graphs[-1].nodes if name in row.op)
        assert (row.verdict, row.section) == ("expand", "3")
        assert row.file.endswith("test_loss.py") and row.direction == "backward"


ON_A_GPU = """
import torch, torch.nn.functional as F
from tests.offline import generated
h, w, t = torch.zeros(64, 16), torch.zeros(5003, 16, requires_grad=True), torch.zeros(64, dtype=torch.int64)

def loss():
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(F.linear(h, w), t)

print(generated(loss)[1])
"""


def test_the_gradient_of_logits_is_pointwise_on_a_gpu():
    source = printed(ON_A_GPU)
    (kernel,) = (part for part in source.split("@triton_heuristics.")[1:] if "log_softmax_backward_data" in part.partition("def triton")[2][:300])
    assert kernel.startswith("pointwise") and kernel.partition("async_compile")[0].count("tl.store(") == 1
    made = [line for line in source.splitlines() if "empty_strided_cuda((64, 5003)" in line]
    assert len(made) == 1 and "torch.bfloat16" in made[0]


@pytest.mark.gpu
def test_known_sums_on_a_gpu():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for function in (
            lambda x, t: F.cross_entropy(x, t, reduction="none"),
            lambda x, t: F.cross_entropy(x, t, ignore_index=2),
            lambda x, t: F.nll_loss(F.log_softmax(x, 1), t, reduction="none"),
        ):
            inputs, incoming = [logits(N, 5003, dtype=dtype), LABELS * 700], torch.tensor(AWKWARD)
            there = [t.detach().cuda().requires_grad_(t.requires_grad) for t in inputs]
            ours, _ = compiled_bits(function, there, incoming.cuda())
            with carbon_compile.enable(seed=None):
                theirs = bits(function, inputs, incoming)
            for a, b in zip(ours, theirs, strict=True):
                assert_same(a.cpu(), b)
