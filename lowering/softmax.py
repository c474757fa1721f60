"""Softmax and its logarithm, forward and backward (contract sections 2 and 3).

    m = max x,  p = exp(x - m),  t = sum p on the static grid (p <= 1)
    softmax      y = p / t
    log_softmax  y = (x - m) - log t
    backward     dx = (g - sum(g y)) y         and    dx = g - exp(y) sum(g)

All in binary32, one rounding an operation, rounded once to the storage type. A row with an infinite
maximum or a NaN is NaN throughout, as in PyTorch.
"""

import contextlib
import contextvars

import torch

from . import prims as P
from .registry import rule

_sum_of = contextvars.ContextVar("carbon_sum_of_gradient", default=None)


@contextlib.contextmanager
def gradient_sums(sum_of):
    """`aten._log_softmax_backward_data` takes sum(g) from `sum_of(g)` instead of adding g up.

    sum_of: for a g of [..., C, ...], sum(g) over C by section 3, in float32, with C kept as 1; or None.
    """
    token = _sum_of.set(sum_of)
    try:
        yield
    finally:
        _sum_of.reset(token)


def _parts(x, dim):
    """(p, t, m) with `dim` kept."""
    m = P.amax(P.f32(x), [dim], True)
    p = P.exp_nonpositive(P.sub(x, m))
    return p, P.unit_sum(p, [dim]), m


def _along(formula, x, dim, *more):
    """Apply `formula(x, dim, ...)`, which needs at least one dimension and one element."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    if x.dim() > 0:
        return formula(x, dim, *more)
    more = [t.unsqueeze(0) if isinstance(t, torch.Tensor) else t for t in more]
    return formula(x.unsqueeze(0), 0, *more).squeeze(0)


@rule("aten._softmax.default", section="3")
def softmax(x, dim, half_to_float=False):
    return P.cast(_along(_softmax, x, dim), torch.float32 if half_to_float else x.dtype)


def _softmax(x, dim):
    p, total, _ = _parts(x, dim)
    return P.div(p, total)


@rule("aten._safe_softmax.default", section="3", integers="rule")
def safe_softmax(x, dim, dtype=None):
    """Softmax, but 0 where a whole row is -inf."""
    return P.cast(_along(_safe_softmax, x, dim), dtype or x.dtype)


def _safe_softmax(x, dim):
    p, total, m = _parts(x, dim)
    empty = P.eq(m, float("-inf"), dtype=torch.bool)
    return torch.ops.carbon.select(empty, P.scalar(0.0, x, torch.float32), P.div(p, total), dtype=torch.float32)


@rule("aten._log_softmax.default", section="3")
def log_softmax(x, dim, half_to_float=False):
    return P.cast(_along(_log_softmax, x, dim), torch.float32 if half_to_float else x.dtype)


def _log_softmax(x, dim):
    shifted = P.sub(x, P.amax(P.f32(x), [dim], True))
    return P.sub(shifted, P.log(P.unit_sum(P.exp_term(shifted), [dim])))


@rule("aten._softmax_backward_data.default", section="3")
def softmax_backward(g, y, dim, dtype):
    return P.cast(_along(_softmax_backward, g, dim, y), dtype)


def _softmax_backward(g, dim, y):
    return P.mul(P.sub(g, P.sum(P.mul(g, y), [dim], True)), y)


@rule("aten._log_softmax_backward_data.default", section="3")
def log_softmax_backward(g, y, dim, dtype):
    return P.cast(_along(_log_softmax_backward, g, dim, y), dtype)


def _log_softmax_backward(g, dim, y):
    sum_of = _sum_of.get()
    total = P.sum(g, [dim], True) if sum_of is None else sum_of(g)
    return P.sub(g, P.mul(P.exp(y), total))
