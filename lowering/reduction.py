"""Reductions (contract section 3): exact integer sums, order-free extremes, index trees elsewhere."""

from . import prims as P
from .registry import rule


@rule("aten.sum.default", "aten.sum.dim_IntList", section="3")
def sum(x, dims=None, keepdim=False, *, dtype=None):  # noqa: A001
    return P.sum(x, dims, keepdim, dtype or x.dtype)


@rule("aten.mean.default", "aten.mean.dim", section="3")
def mean(x, dims=None, keepdim=False, *, dtype=None):
    return P.mean(x, dims, keepdim, dtype or x.dtype)


@rule("aten.amax.default", section="3")
def amax(x, dims=(), keepdim=False):
    return P.amax(x, dims, keepdim)


@rule("aten.amin.default", section="3")
def amin(x, dims=(), keepdim=False):
    return P.amin(x, dims, keepdim)
