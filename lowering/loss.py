"""Losses (contract sections 0, 2 and 3): binary32 formulas, exact sums, means that divide them.

Each formula stands in the docstring of its rule; x is the input, t the target, g the incoming
gradient. Under reduction "mean", g is divided by the count first. Losses that PyTorch writes in
terms of other operations are computed in binary32 and rounded once, whatever type they are given.
"""

import math

import torch
import torch.nn.functional as F

from . import prims as P
from .arithmetic import promoted
from .composites import NARROW, body
from .registry import composite, overload, refuse, rule

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def _reduced(loss, reduction, dtype):
    if reduction == NONE:
        return P.cast(loss, dtype)
    return P.mean(loss, dtype=dtype) if reduction == MEAN else P.sum(loss, dtype=dtype)


def _incoming(g, count, reduction):
    return P.div(g, count) if reduction == MEAN else P.f32(g)


def _count(*tensors):
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return math.prod(shape)


def select(condition, a, b):
    """Binary32 select; `a` and `b` are tensors or numbers."""
    like = next((v for v in (a, b) if isinstance(v, torch.Tensor)), condition)
    a, b = (P.f32(v) if isinstance(v, torch.Tensor) else P.scalar(v, like, torch.float32) for v in (a, b))
    return torch.ops.carbon.select(condition, a, b, dtype=P.wide(a, b))


def less(a, b):
    return P.lt(a, b, dtype=torch.bool)


# --- pairs of numbers: mse, smooth l1, huber ----------------------------------------------------------


@rule("aten.mse_loss.default", section="3")
def mse_loss(x, t, reduction=MEAN):
    """(x - t)^2."""
    return _reduced(P.square(P.sub(x, t)), reduction, promoted(x, t))


@rule("aten.mse_loss_backward.default", section="3")
def mse_loss_backward(g, x, t, reduction):
    """(2 (x - t)) g."""
    return P.mul(P.mul(2.0, P.sub(x, t)), _incoming(g, _count(x, t), reduction), dtype=x.dtype)


@rule("aten.smooth_l1_loss.default", section="3")
def smooth_l1_loss(x, t, reduction=MEAN, beta=1.0):
    """With z = |x - t|: ((0.5 z) z) / beta below beta, else z - 0.5 beta."""
    z = P.abs(P.sub(x, t))
    loss = select(less(z, beta), P.div(P.mul(P.mul(0.5, z), z), beta), P.sub(z, 0.5 * beta))
    return _reduced(loss, reduction, promoted(x, t))


@rule("aten.smooth_l1_loss_backward.default", section="3")
def smooth_l1_loss_backward(g, x, t, reduction, beta):
    """g sign(d) from |d| = beta on, else (d g) / beta, with d = x - t."""
    d = P.sub(x, t)
    g = _incoming(g, _count(x, t), reduction)
    return P.cast(select(less(P.abs(d), beta), P.div(P.mul(d, g), beta), P.mul(P.sign(d), g)), x.dtype)


@rule("aten.huber_loss.default", section="3")
def huber_loss(x, t, reduction=MEAN, delta=1.0):
    """With z = |x - t|: (0.5 z) z below delta, else delta (z - 0.5 delta)."""
    z = P.abs(P.sub(x, t))
    loss = select(less(z, delta), P.mul(P.mul(0.5, z), z), P.mul(delta, P.sub(z, 0.5 * delta)))
    return _reduced(loss, reduction, promoted(x, t))


@rule("aten.huber_loss_backward.default", section="3")
def huber_loss_backward(g, x, t, reduction, delta):
    """d g below delta, else (delta sign(d)) g, with d = x - t."""
    d = P.sub(x, t)
    g = _incoming(g, _count(x, t), reduction)
    return P.cast(select(less(P.abs(d), delta), P.mul(d, g), P.mul(P.mul(delta, P.sign(d)), g)), x.dtype)


# --- probabilities: binary cross-entropy, with and without logits --------------------------------------


@rule("aten.binary_cross_entropy.default", section="3")
def binary_cross_entropy(x, t, weight=None, reduction=MEAN):
    """(t - 1) max(log1p(-x), -100) - t max(log x, -100), times the weight."""
    no = P.mul(P.sub(t, 1.0), P.clamp_min(P.log1p(P.neg(x)), -100.0))
    loss = P.sub(no, P.mul(t, P.clamp_min(P.log(x), -100.0)))
    return _reduced(loss if weight is None else P.mul(loss, weight), reduction, promoted(x, t))


@rule("aten.binary_cross_entropy_backward.default", section="3")
def binary_cross_entropy_backward(g, x, t, weight=None, reduction=MEAN):
    """(g (x - t)) / max((1 - x) x, 1e-12), times the weight."""
    slope = P.clamp_min(P.mul(P.sub(1.0, x), x), 1e-12)
    dx = P.div(P.mul(_incoming(g, _count(x, t), reduction), P.sub(x, t)), slope)
    return P.cast(dx if weight is None else P.mul(dx, weight), x.dtype)


@rule("aten.binary_cross_entropy_with_logits.default", section="3")
def binary_cross_entropy_with_logits(x, t, weight=None, pos_weight=None, reduction=MEAN):
    """(p t) softplus(-x) + (1 - t) softplus(x), times the weight; p is 1 or the positive weight.

    Both softplus share l = log1p(exp(-|x|)): max(-x, 0) + l and max(x, 0) + l. Nothing cancels.
    """
    tail = P.log1p(P.exp(P.neg(P.abs(x))))
    yes = P.mul(t if pos_weight is None else P.mul(pos_weight, t), P.add(P.relu(P.neg(x)), tail))
    loss = P.add(yes, P.mul(P.sub(1.0, t), P.add(P.relu(x), tail)))
    return _reduced(loss if weight is None else P.mul(loss, weight), reduction, promoted(x, t))


@rule("aten.soft_margin_loss.default", section="3")
def soft_margin_loss(x, t, reduction=MEAN):
    """-log_sigmoid(t x)."""
    return _reduced(P.neg(P.log_sigmoid(P.mul(t, x))), reduction, promoted(x, t))


@rule("aten.soft_margin_loss_backward.default", section="3")
def soft_margin_loss_backward(g, x, t, reduction):
    """(-t sigmoid(-t x)) g."""
    slope = P.mul(P.neg(t), P.sigmoid(P.neg(P.mul(t, x))))
    return P.mul(slope, _incoming(g, _count(x, t), reduction), dtype=x.dtype)


# --- classes: the negative log likelihood ---------------------------------------------------------------


def _targets(x, t, weight, ignore):
    """(targets that index, weight of each in binary32 with 0 where ignored)."""
    ignored = aten.eq.Scalar(t, ignore)
    safe = aten.where.self(ignored, P.scalar(0, t, t.dtype), t)
    one = P.scalar(1.0, x, torch.float32)
    each = one if weight is None else P.f32(aten.index.Tensor(weight, [safe]))
    return safe, select(ignored, 0.0, each)


def _class_dim(x):
    return 0 if x.dim() == 1 else 1


@rule("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default", section="3")
def nll_loss(x, t, weight, reduction, ignore_index):
    """-w[t] x[t] a target, 0 where ignored; the mean divides by the sum of the weights.

    x [C], [N, C] or [N, C, ...]; t is x without its class dimension.
    """
    safe, each = _targets(x, t, weight, ignore_index)
    chosen = aten.gather.default(x, _class_dim(x), safe.unsqueeze(_class_dim(x))).squeeze(_class_dim(x))
    loss = P.mul(P.neg(each), chosen)
    loss = select(aten.eq.Scalar(t, ignore_index), 0.0, loss)
    if reduction == NONE:
        return P.cast(loss, x.dtype), P.scalar(0.0, x, x.dtype)
    total, weights = P.sum(loss), P.sum(each)
    return P.div(total, weights, dtype=x.dtype) if reduction == MEAN else P.cast(total, x.dtype), P.cast(weights, x.dtype)


@rule("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default", section="3")
def nll_loss_backward(g, x, t, weight, reduction, ignore_index, total_weight):
    """-w[t] g at the target, 0 elsewhere. The mean's g is divided by the exact sum of the weights,
    computed anew because `total_weight` has been rounded to the type of x."""
    dim = _class_dim(x)
    value = _target_gradient(g, x, t, weight, reduction, ignore_index)
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    classes = aten.arange.default(x.shape[dim], dtype=torch.int64, device=x.device).view(shape)
    hit = aten.eq.Tensor(classes, t.unsqueeze(dim))
    return P.cast(select(hit, value.unsqueeze(dim), 0.0), x.dtype)


def _target_gradient(g, x, t, weight, reduction, ignore_index):
    """The gradient of x at the targets, in binary32 and the shape of t."""
    _, each = _targets(x, t, weight, ignore_index)
    if reduction == MEAN:
        g = P.div(g, P.sum(each))
    return select(aten.eq.Scalar(t, ignore_index), 0.0, P.mul(P.neg(each), g))


def sum_over_classes(total_of, dtypes, g, x, t, weight, reduction, ignore_index, total_weight):
    """The sum over classes of what `nll_loss_backward` gives for the arguments from g on, without adding anything up.

    All elements but the target's are +0, so section 3's sum is the target's gradient: an integer of 38 bits
    holds its 24, whatever its exponent. A sum that is zero is +0, and a target outside the classes has none.

    total_of: that gradient as it is summed: converted to `dtypes`, one after the other, and with the dimensions
    after the classes folded in any way. The result is float32 and has its shape, with the class dimension as 1.
    """
    dim = _class_dim(x)
    inside = aten.logical_and.default(aten.ge.Scalar(t, 0), aten.lt.Scalar(t, x.shape[dim]))
    total = P.cast(select(inside, _target_gradient(g, x, t, weight, reduction, ignore_index), 0.0), x.dtype)
    for dtype in dtypes:
        total = P.cast(total, dtype)
    return P.add(aten.reshape.default(P.f32(total), [*total_of.shape[:dim], 1, *total_of.shape[dim + 1 :]]), 0.0)


# PyTorch unrolls these under autograd, so their rule without it is the same decomposition.
for _name in ("aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default"):
    rule(_name, section="3")(torch._decomp.decomposition_table[overload(_name)])

refuse(
    "aten._ctc_loss.default", "aten._ctc_loss.Tensor", "aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor",
    "aten._cudnn_ctc_loss.default", "aten._cudnn_ctc_loss.Tensor", "aten._use_cudnn_ctc_loss.default",
    code="CB101", reason="this loss has no pinned formula yet",
)  # fmt: skip


# --- losses that PyTorch writes in terms of other operations --------------------------------------------


def _widened(function):
    """`function` in binary32 on whatever it is given, rounded once to the type of its first argument."""

    def loss(x, *args, **kwargs):
        if x.dtype not in NARROW:
            return body(function)(x, *args, **kwargs)
        wide = lambda v: v.float() if isinstance(v, torch.Tensor) and v.dtype in NARROW else v  # noqa: E731
        y = body(function)(wide(x), *map(wide, args), **{k: wide(v) for k, v in kwargs.items()})
        return y.to(x.dtype)

    loss.__name__ = function.__name__
    return loss


for _loss in (
    F.cross_entropy, F.nll_loss, F.l1_loss, F.kl_div, F.poisson_nll_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
    F.soft_margin_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.multilabel_soft_margin_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.multi_margin_loss, F.multilabel_margin_loss,
):  # fmt: skip
    composite(_loss, section="3")(_widened(_loss))
