"""Normalisations (contract sections 0 and 3), forward and backward, one formula for all of them.

With n elements along the reduced dimensions, w and b broadcast against x:

    mean = sum(x) / n     d = x - mean     variance = sum(d d) / n
    rstd = 1 / sqrt(variance + eps)        h = d rstd               y = h w + b
    g' = g w    dx = ((g' - sum(g') / n) - h (sum(g' h) / n)) rstd
    w alike along n:    dx = ((g - sum(g) / n) - h (sum(g h) / n)) (rstd w)
    dw = sum(g h)         db = sum(g)

The root mean square norm has no mean: d = x, and dx loses its first sum. All in binary32, one
rounding an operation; y and dx are then rounded to the type of x, dw to that of w.
"""

import math

import torch
import torch.nn.functional as F

from . import columns
from . import prims as P
from .composed import compose, derivative
from .registry import composite, refuse, rule


def _rstd(variance, eps):
    return P.div(1.0, P.sqrt(P.add(variance, eps)))


def _affine(h, weight, bias, dtype):
    y = h if weight is None else P.mul(h, weight)
    return P.cast(y if bias is None else P.add(y, bias), dtype)


def _standard_again(x, mean, rstd):
    """The bits of `columns.standard` by other operations: on a GPU a backward pass makes h of x, which its weight's gradient reads. As
    operations of the forward pass their results are kept too, wherever PyTorch's partition takes them for dear."""
    if not columns.on_gpu(x):
        return columns.standard(x, mean, rstd)
    return P.mul(rstd, x if mean is None else P.add(P.neg(mean), x))


def _sum_to(t, like):
    """The sum of `t` over the dimensions along which `like` was broadcast, in the type of `like`."""
    lead = t.dim() - like.dim()
    dims = [d for d in range(t.dim()) if d < lead or (like.shape[d - lead] == 1 and t.shape[d] != 1)]
    total = P.sum(t, dims, True) if dims else P.f32(t)
    return P.cast(total.reshape(like.shape), like.dtype)


@compose("normalize(Tensor x, int[] dims, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)", "3")
def normalize(x, dims, weight, bias, eps):
    """(y, mean, variance, rstd), the statistics in binary32 with `dims` kept as 1."""
    mean = P.mean(x, dims, True)
    d = P.sub(x, mean)
    variance = P.mean(P.square(d), dims, True, signed=False)
    rstd = _rstd(variance, eps)
    return _affine(P.mul(d, rstd), weight, bias, x.dtype), mean, variance, rstd


@compose("rms_normalize(Tensor x, int[] dims, Tensor? weight, float eps) -> (Tensor, Tensor)", "3")
def rms_normalize(x, dims, weight, eps):
    """(y, rstd)."""
    rstd = _rstd(P.mean(P.square(x), dims, True, signed=False), eps)
    return _affine(P.mul(x, rstd), weight, None, x.dtype), rstd


@compose("normalize_by(Tensor x, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)", "3")
def normalize_by(x, mean, variance, weight, bias, eps):
    """(y, rstd) with given statistics, as batch norm has when it evaluates."""
    rstd = _rstd(P.f32(variance), eps)
    return _affine(columns.standard(x, mean, rstd), weight, bias, x.dtype), rstd


@compose("normalize_backward(Tensor g, Tensor x, int[] dims, Tensor? mean, Tensor rstd, Tensor? weight) -> Tensor", "3")
def normalize_backward(g, x, dims, mean, rstd, weight):
    """dx of `normalize`, and of `rms_normalize` where `mean` is None."""
    h = _standard_again(x, mean, rstd)
    scale = rstd
    if weight is not None and _alike(weight, dims, x.dim()):
        scale = P.mul(rstd, weight)
    elif weight is not None:
        g = P.mul(g, weight)
    dx = g if mean is None else P.sub(g, P.mean(g, dims, True))
    dx = P.sub(dx, P.mul(h, P.mean(P.mul(g, h), dims, True)))
    return P.mul(dx, scale, dtype=x.dtype)


def _alike(weight, dims, rank):
    """Whether `weight` is one number along all of `dims`, so that it may leave the sums."""
    lead = rank - weight.dim()
    return all(d < lead or weight.shape[d - lead] == 1 for d in dims)


@compose("normalize_by_backward(Tensor g, Tensor x, Tensor rstd, Tensor? weight) -> Tensor", "3")
def normalize_by_backward(g, x, rstd, weight):
    """dx of `normalize_by`: g (rstd w)."""
    return P.mul(g, rstd if weight is None else P.mul(rstd, weight), dtype=x.dtype)


@compose("normalize_scale_backward(Tensor g, Tensor x, Tensor? mean, Tensor rstd, Tensor weight) -> Tensor", "3")
def normalize_scale_backward(g, x, mean, rstd, weight):
    """dw: g h summed to the shape of the weight."""
    lead = x.dim() - weight.dim()
    of_rows = all(t is None or t.shape == (*x.shape[:lead], *[1] * weight.dim()) for t in (mean, rstd))
    if of_rows and g.shape == x.shape and x.shape[lead:] == weight.shape and all(columns.suits(t, list(range(lead)), weight.dtype) for t in (g, x)):
        return columns.scale_gradient(g, x, mean, rstd, lead, weight.dtype).reshape(weight.shape)
    return _sum_to(P.mul(g, columns.standard(x, mean, rstd)), weight)


@compose("normalize_shift_backward(Tensor g, Tensor bias) -> Tensor", "3")
def normalize_shift_backward(g, bias):
    """db: g summed to the shape of the bias."""
    return _sum_to(g, bias)


def _parameter_gradients(ctx, g, x, mean, rstd, weight, bias, at):
    """(dw, db) where the inputs at `at` and `at + 1` need them."""
    dw = torch.ops.carbon.normalize_scale_backward(g, x, mean, rstd, weight) if ctx.needs_input_grad[at] else None
    db = torch.ops.carbon.normalize_shift_backward(g, bias) if ctx.needs_input_grad[at + 1] else None
    return dw, db


def _save_normalize(ctx, inputs, output):
    x, ctx.dims, weight, bias, _ = inputs
    ctx.save_for_backward(x, output[1], output[3], weight, bias)
    ctx.mark_non_differentiable(*output[1:])


@derivative(normalize, _save_normalize)
def _normalize_backward(ctx, g, *_):
    x, mean, rstd, weight, bias = ctx.saved_tensors
    dx = torch.ops.carbon.normalize_backward(g, x, ctx.dims, mean, rstd, weight) if ctx.needs_input_grad[0] else None
    return dx, None, *_parameter_gradients(ctx, g, x, mean, rstd, weight, bias, 2), None


def _save_rms(ctx, inputs, output):
    x, ctx.dims, weight, _ = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])


@derivative(rms_normalize, _save_rms)
def _rms_backward(ctx, g, _):
    x, rstd, weight = ctx.saved_tensors
    dx = torch.ops.carbon.normalize_backward(g, x, ctx.dims, None, rstd, weight) if ctx.needs_input_grad[0] else None
    dw = torch.ops.carbon.normalize_scale_backward(g, x, None, rstd, weight) if ctx.needs_input_grad[2] else None
    return dx, None, dw, None


def _save_normalize_by(ctx, inputs, output):
    x, mean, _, weight, bias, _ = inputs
    ctx.save_for_backward(x, mean, output[1], weight, bias)
    ctx.mark_non_differentiable(output[1])


@derivative(normalize_by, _save_normalize_by)
def _normalize_by_backward(ctx, g, _):
    x, mean, rstd, weight, bias = ctx.saved_tensors
    dx = torch.ops.carbon.normalize_by_backward(g, x, rstd, weight) if ctx.needs_input_grad[0] else None
    return dx, None, None, *_parameter_gradients(ctx, g, x, mean, rstd, weight, bias, 3), None


# --- PyTorch's functions ------------------------------------------------------------------------------


def _last(x, normalized_shape):
    """The trailing dimensions that `normalized_shape` names. RuntimeError where it doesn't fit x."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise RuntimeError(f"normalized_shape {shape} is not the end of the input's shape {tuple(x.shape)}")
    return list(range(x.dim() - len(shape), x.dim()))


@composite(torch.layer_norm, section="3")
def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return torch.ops.carbon.normalize(x, _last(x, normalized_shape), weight, bias, eps)[0]


@composite(torch.rms_norm, section="3")
def rms_norm(x, normalized_shape, weight=None, eps=None):
    """Without an eps PyTorch takes that of binary32, also for narrower types."""
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return torch.ops.carbon.rms_normalize(x, _last(x, normalized_shape), weight, eps)[0]


def _grouped(x, weight, bias, groups):
    """x as [N, groups, channels a group, rest], and the parameters broadcast to it."""
    n, channels = x.shape[:2]
    if channels % groups:
        raise RuntimeError(f"{channels} channels cannot be split into {groups} groups")
    inner = channels // groups
    parameters = [p if p is None else p.reshape(1, groups, inner, 1) for p in (weight, bias)]
    return x.reshape(n, groups, inner, math.prod(x.shape[2:])), *parameters


@composite(torch.group_norm, section="3")
def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    rows, weight, bias = _grouped(x, weight, bias, num_groups)
    return torch.ops.carbon.normalize(rows, [2, 3], weight, bias, eps)[0].reshape(x.shape)


def _per_channel(p, rank):
    return None if p is None else p.reshape(1, -1, *[1] * (rank - 2))


@composite(torch.batch_norm, section="3")
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled=True):
    """Batch statistics when training, which also move the running ones; else the running ones."""
    weight, bias = _per_channel(weight, x.dim()), _per_channel(bias, x.dim())
    if not training:
        mean, variance = _per_channel(running_mean, x.dim()), _per_channel(running_var, x.dim())
        return torch.ops.carbon.normalize_by(x, mean, variance, weight, bias, eps)[0]
    dims = [d for d in range(x.dim()) if d != 1]
    y, mean, variance, _ = torch.ops.carbon.normalize(x, dims, weight, bias, eps)
    _move(running_mean, running_var, mean, variance, momentum, P.count(x, dims))
    return y


@composite(torch.instance_norm, section="3")
def instance_norm(x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled=True):
    """Batch norm of every sample by itself; the running statistics move by the mean over samples."""
    if not use_input_stats:
        return batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    dims = list(range(2, x.dim()))
    y, mean, variance, _ = torch.ops.carbon.normalize(x, dims, _per_channel(weight, x.dim()), _per_channel(bias, x.dim()), eps)
    _move(running_mean, running_var, mean, variance, momentum, P.count(x, dims))
    return y


@torch.no_grad()
def _move(running_mean, running_var, mean, variance, momentum, n):
    """running = (1 - momentum) running + momentum new, in place; new variances are n / (n - 1) larger."""
    for running, new in ((running_mean, mean), (running_var, variance)):
        if running is not None:
            running.copy_(moved(running, new if new is mean else unbiased(new, n), momentum))


def unbiased(variance, n):
    return P.div(P.mul(variance, n), n - 1)


def moved(running, new, momentum):
    """`new` holds one statistic a channel, or one a sample and channel, which are averaged."""
    new = new.reshape(-1, running.shape[0])
    new = new[0] if new.shape[0] == 1 else P.mean(new, [0])
    return P.add(P.mul(running, 1.0 - momentum), P.mul(new, momentum), dtype=running.dtype)


@composite(F.local_response_norm, section="3")
def local_response_norm(x, size, alpha=1e-4, beta=0.75, k=1.0):
    """x / (k + alpha mean)^beta, with the mean of the squares of `size` neighbouring channels, padded by zeros."""
    squares = F.pad((x * x).movedim(1, -1), (size // 2, (size - 1) // 2))
    channels = x.shape[1]
    mean = torch.stack([squares.narrow(-1, i, channels) for i in range(size)]).mean(0).movedim(-1, 1)
    return x / (mean * alpha + k).pow(beta)


# --- the same operations where they reach the joint graph by other ways -------------------------------


def _masked(mask, *gradients):
    return tuple(gradient() if wanted else None for wanted, gradient in zip(mask, gradients, strict=True))


@rule("aten.native_layer_norm.default", section="3")
def native_layer_norm(x, normalized_shape, weight, bias, eps):
    y, mean, _, rstd = normalize(x, _last(x, normalized_shape), weight, bias, eps)
    return y, mean, rstd


@rule("aten.native_layer_norm_backward.default", section="3")
def native_layer_norm_backward(g, x, normalized_shape, mean, rstd, weight, bias, mask):
    return _masked(
        mask,
        lambda: normalize_backward(g, x, _last(x, normalized_shape), mean, rstd, weight),
        lambda: normalize_scale_backward(g, x, mean, rstd, weight),
        lambda: normalize_shift_backward(g, bias),
    )


@rule("aten._fused_rms_norm.default", section="3")
def fused_rms_norm(x, normalized_shape, weight, eps):
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return rms_normalize(x, _last(x, normalized_shape), weight, eps)


@rule("aten._fused_rms_norm_backward.default", section="3")
def fused_rms_norm_backward(g, x, normalized_shape, rstd, weight, mask):
    return _masked(
        mask,
        lambda: normalize_backward(g, x, _last(x, normalized_shape), None, rstd, weight),
        lambda: normalize_scale_backward(g, x, None, rstd, weight),
    )


@rule("aten.native_group_norm.default", section="3")
def native_group_norm(x, weight, bias, n, channels, rest, groups, eps):
    rows, weight, bias = _grouped(x, weight, bias, groups)
    y, mean, _, rstd = normalize(rows, [2, 3], weight, bias, eps)
    return y.reshape(x.shape), mean.reshape(n, groups), rstd.reshape(n, groups)


@rule("aten.native_group_norm_backward.default", section="3")
def native_group_norm_backward(g, x, mean, rstd, weight, n, channels, rest, groups, mask):
    rows, scale, _ = _grouped(x, weight, None, groups)
    g = g.reshape(rows.shape)
    mean, rstd = mean.reshape(n, groups, 1, 1), rstd.reshape(n, groups, 1, 1)
    like = rows.new_zeros(1, groups, channels // groups, 1) if scale is None else scale
    return _masked(
        mask,
        lambda: normalize_backward(g, rows, [2, 3], mean, rstd, scale).reshape(x.shape),
        lambda: normalize_scale_backward(g, rows, mean, rstd, like).reshape(channels),
        lambda: normalize_shift_backward(g, like).reshape(channels),
    )


def _flat(*statistics):
    return [s.reshape(-1) for s in statistics]


@rule("aten._native_batch_norm_legit.no_stats", section="3")
def batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    dims = [d for d in range(x.dim()) if d != 1]
    y, mean, _, rstd = normalize(x, dims, _per_channel(weight, x.dim()), _per_channel(bias, x.dim()), eps)
    return y, *_flat(mean, rstd)


@rule("aten._native_batch_norm_legit_no_training.default", section="3")
def batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps):
    """Evaluation; there are no batch statistics to return."""
    weight, bias, mean, variance = (_per_channel(p, x.dim()) for p in (weight, bias, running_mean, running_var))
    y, _ = normalize_by(x, mean, variance, weight, bias, eps)
    return y, x.new_zeros(0), x.new_zeros(0)


@rule("aten._native_batch_norm_legit_functional.default", section="3")
def batch_norm_functional(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """With the new running statistics as results."""
    if not training:
        return *batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps), running_mean, running_var
    dims = [d for d in range(x.dim()) if d != 1]
    y, mean, variance, rstd = normalize(x, dims, _per_channel(weight, x.dim()), _per_channel(bias, x.dim()), eps)
    n = P.count(x, dims)
    return y, *_flat(mean, rstd), moved(running_mean, mean, momentum), moved(running_var, unbiased(variance, n), momentum)


@rule("aten.native_batch_norm_backward.default", section="3")
def native_batch_norm_backward(g, x, weight, running_mean, running_var, save_mean, save_rstd, training, eps, mask):
    dims = [d for d in range(x.dim()) if d != 1]
    scale = _per_channel(weight, x.dim())
    mean = _per_channel(save_mean if training else running_mean, x.dim())
    rstd = _per_channel(save_rstd, x.dim()) if training else _rstd(P.f32(_per_channel(running_var, x.dim())), eps)
    like = x.new_zeros(1, x.shape[1], *[1] * (x.dim() - 2)) if scale is None else scale
    return _masked(
        mask,
        lambda: normalize_backward(g, x, dims, mean, rstd, scale) if training else normalize_by_backward(g, x, rstd, scale),
        lambda: normalize_scale_backward(g, x, mean, rstd, like).reshape(-1),
        lambda: normalize_shift_backward(g, like).reshape(-1),
    )


refuse(
    "aten.native_batch_norm.default", "aten.cudnn_batch_norm.default", "aten.cudnn_batch_norm_backward.default",
    "aten.miopen_batch_norm.default", "aten._batch_norm_with_update_functional.default", "aten.batch_norm_backward.default",
    code="CB101", reason="a vendor's batch norm; torch.nn.functional.batch_norm has a rule",
)  # fmt: skip


@composite(torch._weight_norm, section="3")
def weight_norm(v, g, dim=0):
    """v (g / |v|) of torch.nn.utils.parametrizations.weight_norm, |v| over all dimensions but `dim`, or, for -1, all."""
    kept = None if dim == -1 else dim % v.dim()
    squares, others = v * v, [d for d in range(v.dim()) if d != kept]
    if others:  # an empty list means all dimensions to a sum
        squares = squares.sum(others, keepdim=kept is not None)
    return v * (g / squares.sqrt())
