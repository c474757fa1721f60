"""Sorting and selection (contract section 3): NaN is largest, zeros are equal, ties go to the lowest index.

Floats are ordered by integer keys, and a stable sort of integers has one result; values are taken
from the original, so they keep their bits.
"""

import torch

from ..templates.scan import places
from . import prims as P
from .registry import Refusal, kernels, rule
from .scan import order_key

aten = torch.ops.aten


_operator = kernels("3")


def _along(function):
    """A function of (x, ..., dim, ...) that may count on a dimension: 0-d tensors go through as 1-d."""

    def wrapped(x, dim, *rest):
        if x.dim():
            return tuple(y.contiguous() for y in function(x, dim % x.dim(), *rest))
        return tuple(y.reshape(()) for y in function(x.reshape(1), 0, *rest))

    return wrapped


@_along
def _sort(x, dim, descending):
    index = order_key(x).sort(dim=dim, descending=descending, stable=True).indices
    return x.gather(dim, index), index


@_along
def _topk(x, dim, k, largest):
    """The first k of a stable sort: by one key that holds the value and the index, where both fit."""
    key = order_key(x)
    if key.dtype is torch.int64 or x.shape[dim] >= 2**31:
        index = key.sort(dim=dim, descending=largest, stable=True).indices.narrow(dim, 0, k)
        return x.gather(dim, index), index
    key = key.to(torch.int64)
    # Index 0 wins a tie: its low word is the largest when the largest key is sought, else the smallest.
    low = 2**31 - 1 - places(x, dim) if largest else places(x, dim)
    best = (key * 2**32 + low).topk(k, dim, largest=largest, sorted=True).values & (2**31 - 1)
    index = 2**31 - 1 - best if largest else best
    return x.gather(dim, index), index


def _holding(x, key, best, dim):
    """(value, index) of the lowest index along `dim` at which `key` is `best` [1 along dim]."""
    index = torch.where(key == best, places(x, dim), x.shape[dim] - 1).amin(dim, keepdim=True)
    return x.gather(dim, index), index


@_along
def _kth(x, dim, k):
    key = order_key(x)
    return _holding(x, key, key.sort(dim=dim, stable=True).values.narrow(dim, k - 1, 1), dim)


@_along
def _median(x, dim, ignore_nan):
    """The lower middle; a NaN if there is one, or (`ignore_nan`) the lower middle of the others."""
    key, n = order_key(x), x.shape[dim]
    ordered = key.sort(dim=dim, stable=True).values
    if not x.is_floating_point():
        return _holding(x, key, ordered.narrow(dim, (n - 1) // 2, 1), dim)
    nans = x.isnan().sum(dim, keepdim=True)
    middle = torch.where(nans > 0, n - 1, (n - 1) // 2)
    if ignore_nan:
        middle = ((n - 1 - nans) // 2).clamp(min=0)
    return _holding(x, key, ordered.gather(dim, middle), dim)


@_along
def _mode(x, dim):
    """The value met most often, the smallest of several such."""
    key = order_key(x)
    ordered = key.sort(dim=dim, stable=True).values
    place = places(x, dim).expand(x.shape)
    new = torch.ones_like(ordered, dtype=torch.bool)
    n = x.shape[dim]
    new.narrow(dim, 1, n - 1).copy_(ordered.narrow(dim, 1, n - 1) != ordered.narrow(dim, 0, n - 1))
    run = place - torch.where(new, place, 0).cummax(dim).values
    longest = torch.where(run == run.amax(dim, keepdim=True), place, n).amin(dim, keepdim=True)
    return _holding(x, key, ordered.gather(dim, longest), dim)


def _same(x, dim, *rest):
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)


def _cut(x, dim, k):
    shape = list(x.shape)
    if shape:
        shape[dim] = k
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


SORT = _operator("sort(Tensor x, int dim, bool descending) -> (Tensor, Tensor)", _sort, _same)
TOPK = _operator("topk(Tensor x, int dim, SymInt k, bool largest) -> (Tensor, Tensor)", _topk, lambda x, dim, k, largest: _cut(x, dim, k))
KTH = _operator("kthvalue(Tensor x, int dim, SymInt k) -> (Tensor, Tensor)", _kth, lambda x, dim, k: _cut(x, dim, 1))
MEDIAN = _operator("median(Tensor x, int dim, bool ignore_nan) -> (Tensor, Tensor)", _median, lambda x, dim, ignore_nan: _cut(x, dim, 1))
MODE = _operator("mode(Tensor x, int dim) -> (Tensor, Tensor)", _mode, lambda x, dim: _cut(x, dim, 1))


# --- rules ------------------------------------------------------------------------------------------------


def _squeezed(pair, dim, keepdim):
    return pair if keepdim or not pair[0].dim() else tuple(y.squeeze(dim) for y in pair)


@rule("aten.sort.default", section="3", verdict="template", integers="rule")
def sort(x, dim=-1, descending=False):
    return SORT(x, dim, descending)


@rule("aten.sort.stable", section="3", verdict="template", integers="rule")
def sort_stable(x, *, stable=None, dim=-1, descending=False):
    return SORT(x, dim, descending)


@rule("aten.topk.default", section="3", verdict="template", integers="rule")
def topk(x, k, dim=-1, largest=True, sorted=True):  # noqa: A002
    return TOPK(x, dim, k, largest)


@rule("aten.kthvalue.default", section="3", verdict="template", integers="rule")
def kthvalue(x, k, dim=-1, keepdim=False):
    """The k-th smallest, and the lowest index that holds it."""
    return _squeezed(KTH(x, dim, k), dim, keepdim)


@rule("aten.median.dim", section="3", verdict="template", integers="rule")
def median_dim(x, dim, keepdim=False):
    """The lower middle and the lowest index that holds it; a NaN if there is one."""
    return _squeezed(MEDIAN(x, dim, False), dim, keepdim)


@rule("aten.nanmedian.dim", section="3", verdict="template", integers="rule")
def nanmedian_dim(x, dim, keepdim=False):
    return _squeezed(MEDIAN(x, dim, True), dim, keepdim)


def _median_of_all(x, ignore_nan):
    if isinstance(x.numel(), int) and x.numel() == 0:
        return P.scalar(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).min, x, x.dtype)
    return MEDIAN(x.reshape(-1), 0, ignore_nan)[0].reshape(())


@rule("aten.median.default", section="3", verdict="template", integers="rule")
def median(x):
    return _median_of_all(x, False)


@rule("aten.nanmedian.default", section="3", verdict="template", integers="rule")
def nanmedian(x):
    return _median_of_all(x, True)


@rule("aten.mode.default", section="3", verdict="template", integers="rule")
def mode(x, dim=-1, keepdim=False):
    """The value met most often, the smallest of several such, and the lowest index that holds it."""
    return _squeezed(MODE(x, dim), dim, keepdim)


@rule("aten.searchsorted.Scalar", section="3", integers="rule")
def searchsorted_scalar(sorted_sequence, value, **options):
    """Where the number goes, in the common type of both."""
    dtype = torch.result_type(sorted_sequence, value)
    return aten.searchsorted.Tensor(P.cast(sorted_sequence, dtype), P.scalar(value, sorted_sequence, dtype), **options)


@rule("aten.searchsorted.Tensor", section="3", integers="keep")
def searchsorted(sorted_sequence, value, **options):
    """Where each value goes, by the order of this section: a NaN behind all numbers, wherever it is."""
    if not sorted_sequence.is_floating_point() or sorted_sequence.dtype is not value.dtype:
        return NotImplemented
    keys = (torch.ops.carbon.order_key(x, dtype=P.key_type(x.dtype)) for x in (sorted_sequence, value))
    return aten.searchsorted.Tensor(*keys, **options)


@rule("aten.bucketize.Tensor", section="3", integers="keep")
def bucketize(value, boundaries, **options):
    return searchsorted(boundaries, value, **options)


@rule("aten.bucketize.Scalar", section="3", integers="rule")
def bucketize_scalar(value, boundaries, **options):
    return searchsorted_scalar(boundaries, value, **options)


@rule("aten._unique2.default", "aten.unique_dim.default", "aten.unique_consecutive.default", "aten.unique_dim_consecutive.default", section="3")
def unique(x, *arguments, **options):
    raise Refusal("CB101", "which zero and how many NaN are unique differs by device; integers have a rule")
