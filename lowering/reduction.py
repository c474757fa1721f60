"""Reductions (contract section 3): exact integer sums, order-free extremes, and what is built of them.

Formulas are in binary32, one rounding an operation, and are rounded once to the result's type.
"""

import math

import torch

from . import prims as P
from .registry import composite, rule

aten = torch.ops.aten


def converted(x, dtype):
    """PyTorch converts the operand of a reduction to `dtype` before it reduces."""
    return x if dtype is None else P.cast(x, dtype)


def _counts(x, dtype):
    return not (dtype or x.dtype).is_floating_point


@rule("aten.sum.default", "aten.sum.dim_IntList", section="3", integers="rule")
def sum(x, dims=None, keepdim=False, *, dtype=None):  # noqa: A001
    if _counts(x, dtype):
        return aten.sum.dim_IntList(P.cast(x, dtype), dims, keepdim, dtype=dtype) if x.is_floating_point() else NotImplemented
    return P.sum(converted(x, dtype), dims, keepdim, dtype or x.dtype)


@rule("aten.nansum.default", section="3", integers="rule")
def nansum(x, dims=None, keepdim=False, *, dtype=None):
    if not x.is_floating_point():
        return aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
    zero = P.scalar(0.0, x, x.dtype)
    kept = torch.ops.carbon.select(P.ne(x, x, dtype=torch.bool), zero, x, dtype=x.dtype)
    return aten.sum.dim_IntList(kept, dims, keepdim, dtype=dtype)


@rule("aten.mean.default", "aten.mean.dim", section="3", integers="rule")
def mean(x, dims=None, keepdim=False, *, dtype=None):
    """sum / n, divided in binary32."""
    return P.mean(converted(x, dtype), dims, keepdim, dtype or x.dtype)


@rule("aten.trace.default", section="3")
def trace(x):
    return P.sum(aten.diagonal.default(x), dtype=x.dtype)


@rule("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList", section="3", integers="rule")
def count_nonzero(x, dims=None):
    dims = [dims] if isinstance(dims, int) else dims
    hit = P.ne(x, 0.0, dtype=torch.bool) if x.is_floating_point() else aten.ne.Scalar(x, 0)
    return aten.sum.dim_IntList(hit, dims)


# --- var, std -----------------------------------------------------------------------------------------


def moments(x, dims, keepdim=False, correction=1):
    """(variance, mean) in binary32, in two passes.

    mean = sum(x) / n; d = x - mean; variance = sum(d d) / max(0, n - correction).
    """
    average = P.mean(x, dims, True)
    squares = P.sum(P.square(P.sub(x, average)), dims, keepdim, signed=False)
    free = torch.sym_max(P.count(x, dims) - (1 if correction is None else correction), 0)
    return P.div(squares, free), average if keepdim else P.squeeze(average, P.normal_dims(x, dims))


@rule("aten.var.correction", section="3")
def var(x, dims=None, *, correction=None, keepdim=False):
    return P.cast(moments(x, dims, keepdim, correction)[0], x.dtype)


@rule("aten.std.correction", section="3")
def std(x, dims=None, *, correction=None, keepdim=False):
    return P.sqrt(moments(x, dims, keepdim, correction)[0], dtype=x.dtype)


@rule("aten.var_mean.correction", section="3")
def var_mean(x, dims=None, *, correction=None, keepdim=False):
    variance, average = moments(x, dims, keepdim, correction)
    return P.cast(variance, x.dtype), P.cast(average, x.dtype)


@rule("aten.std_mean.correction", section="3")
def std_mean(x, dims=None, *, correction=None, keepdim=False):
    variance, average = moments(x, dims, keepdim, correction)
    return P.sqrt(variance, dtype=x.dtype), P.cast(average, x.dtype)


# --- norms --------------------------------------------------------------------------------------------


@rule("aten.linalg_vector_norm.default", section="3")
def vector_norm(x, order=2, dims=None, keepdim=False, *, dtype=None):
    """The order-p norm: count for 0, sum |x| for 1, sqrt(sum(x x)) for 2, extremes of |x| for the
    infinities, else (sum |x|^p)^(1/p)."""
    out = dtype or x.dtype
    x = converted(x, dtype)
    if order == math.inf:
        return P.cast(P.amax(P.abs(x), dims, keepdim), out)
    if order == -math.inf:
        return P.cast(P.amin(P.abs(x), dims, keepdim), out)
    if order == 0:
        return P.cast(aten.sum.dim_IntList(P.ne(x, 0.0, dtype=torch.bool), dims, keepdim), out)
    if order == 1:
        return P.sum(P.abs(x), dims, keepdim, out, signed=False)
    if order == 2:
        return P.sqrt(P.sum(P.square(x), dims, keepdim, signed=False), dtype=out)
    return P.pow(P.sum(P.pow(P.abs(x), order), dims, keepdim, signed=False), 1.0 / order, dtype=out)


@rule("aten.linalg__powsum.default", section="3")
def power_sum(x, order=2, dims=None, keepdim=False, *, dtype=None):
    """sum |x|^p, without the root."""
    x = converted(x, dtype)
    terms = P.square(x) if order == 2 else P.abs(x) if order == 1 else P.pow(P.abs(x), order)
    return P.sum(terms, dims, keepdim, dtype or x.dtype, signed=False)


@rule("aten.norm.Scalar", "aten.norm.ScalarOpt_dtype", "aten.norm.ScalarOpt_dim", "aten.norm.ScalarOpt_dim_dtype", section="3")
def norm(x, order=2, dims=None, keepdim=False, *, dtype=None):
    return vector_norm(x, 2 if order is None else order, dims, keepdim, dtype=dtype)


@rule("aten.dist.default", section="3")
def dist(x, y, order=2):
    difference = P.sub(x, y)
    return P.cast(vector_norm(difference, order), torch.promote_types(x.dtype, y.dtype))


@composite(torch.cdist, section="3")
def cdist(x, y, p=2.0, compute_mode=None):
    """Distances of all pairs of rows, each the norm of a difference; never by a matrix product."""
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


@composite(torch.pdist, section="3")
def pdist(x, p=2.0):
    """Distances of the pairs i < j of rows."""
    i, j = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return torch.linalg.vector_norm(x[i] - x[j], p, -1)


rule("aten._cdist_forward.default", section="3")(cdist)
rule("aten._pdist_forward.default", section="3")(pdist)


# Above autograd, because PyTorch's derivative accumulates in another type on CPU than on CUDA.
@composite(torch.renorm, torch.Tensor.renorm, section="3")
def renorm(x, p, dim, maxnorm):
    """Slices whose norm exceeds `maxnorm` are multiplied by maxnorm / (norm + 1e-7)."""
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    size = torch.linalg.vector_norm(x, p, others, True, dtype=P.wide(x))
    factor = torch.where(size > maxnorm, maxnorm / (size + 1e-7), 1.0)
    return (x * factor).to(x.dtype)


rule("aten.renorm.default", section="3")(renorm)


# --- extremes -----------------------------------------------------------------------------------------


@rule("aten.amax.default", section="3")
def amax(x, dims=(), keepdim=False):
    return P.amax(x, dims, keepdim)


@rule("aten.amin.default", section="3")
def amin(x, dims=(), keepdim=False):
    return P.amin(x, dims, keepdim)


@rule("aten.aminmax.default", section="3", integers="rule")
def aminmax(x, *, dim=None, keepdim=False):
    dims = [] if dim is None else [dim]
    return aten.amin.default(x, dims, keepdim), aten.amax.default(x, dims, keepdim)


@rule("aten.max.default", section="3", integers="rule")
def max_all(x):
    return aten.amax.default(x)


@rule("aten.min.default", section="3", integers="rule")
def min_all(x):
    return aten.amin.default(x)


def _ascending(x):
    """An integer of the same order: NaN is the largest, both zeros are equal."""
    if x.is_floating_point():
        return torch.ops.carbon.order_key(x, dtype=torch.int64 if x.dtype is torch.float64 else torch.int32)
    return P.cast(x, torch.int32) if x.dtype is torch.bool else x


def _first(key, best, dim, keepdim):
    """The lowest index along `dim` at which `key` is `best`."""
    n = key.shape[dim] if key.dim() else 1
    shape = [1] * key.dim()
    if key.dim():
        shape[dim] = n
    index = aten.arange.default(n, dtype=torch.int64, device=key.device).view(shape)
    last = P.scalar(n - 1, key, torch.int64)
    index = aten.where.self(aten.eq.Tensor(key, best), index, last)
    # The bound changes nothing here. Inductor's check of an index runs in lanes beyond the last row
    # too, where this minimum is over nothing: without the bound, gathering by it traps on a GPU.
    return aten.minimum.default(aten.amin.default(index, [dim], keepdim), last)


def _extreme(x, dim, keepdim, smallest):
    """(value, lowest index) of the largest or smallest element along `dim`; NaN is both."""
    if not x.is_floating_point():
        key = _ascending(x)
        best = (aten.amin if smallest else aten.amax).default(key, [dim], True)
        value = P.cast(best, x.dtype)
    else:
        key = _ascending(P.neg(x, dtype=x.dtype) if smallest else x)
        best = aten.amax.default(key, [dim], True)
        value = P.value_of_key(best, x.dtype)
        value = P.sub(0.0, value, dtype=x.dtype) if smallest else value
    return value if keepdim else P.squeeze(value, [dim]), _first(key, best, dim, keepdim)


def _index(x, dim, keepdim, smallest):
    if dim is not None:
        return _extreme(x, dim, keepdim, smallest)[1]
    index = _extreme(x.reshape(-1), 0, False, smallest)[1]
    return index.reshape([1] * x.dim()) if keepdim else index


@rule("aten.argmax.default", section="3", integers="rule")
def argmax(x, dim=None, keepdim=False):
    """The lowest index among the largest; NaN is largest, zeros are equal."""
    return _index(x, dim, keepdim, False)


@rule("aten.argmin.default", section="3", integers="rule")
def argmin(x, dim=None, keepdim=False):
    """The lowest index among the smallest; NaN is smallest, zeros are equal."""
    return _index(x, dim, keepdim, True)


@rule("aten.max.dim", section="3", integers="rule")
def max_dim(x, dim, keepdim=False):
    return _extreme(x, dim, keepdim, False)


@rule("aten.min.dim", section="3", integers="rule")
def min_dim(x, dim, keepdim=False):
    return _extreme(x, dim, keepdim, True)


@rule("aten.any.default", "aten.any.dim", "aten.any.dims", section="3")
def any_of(x, *where):
    return _truth(aten.any, x, where)


@rule("aten.all.default", "aten.all.dim", "aten.all.dims", section="3")
def all_of(x, *where):
    return _truth(aten.all, x, where)


def _truth(op, x, where):
    true = P.ne(x, 0.0, dtype=torch.bool)
    if not where:
        return op.default(true)
    return (op.dim if isinstance(where[0], int) else op.dims)(true, *where)


# --- logsumexp ----------------------------------------------------------------------------------------


@rule("aten.logsumexp.default", section="3", integers="rule")
def logsumexp(x, dims, keepdim=False):
    """log(sum exp(x - m)) + m with the exact maximum m; m itself where it is infinite or NaN."""
    out = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    x = P.f32(x)
    dims = P.normal_dims(x, dims)
    if P.count(x, dims) == 0:
        return P.cast(P.log(P.sum(x, dims, keepdim)), out)  # of a sum without terms
    m = P.amax(x, dims, True)
    total = P.add(P.log(P.unit_sum(P.exp_term(P.sub(x, m)), dims)), m)
    finite = P.lt(P.abs(m), math.inf, dtype=torch.bool)
    y = torch.ops.carbon.select(finite, total, m, dtype=out)
    return y if keepdim else P.squeeze(y, dims)
