"""Scans (contract section 3): sums, products and log-sums of prefixes, as fixed index trees.

The tree is written down in templates/scan.py; a prefix never depends on later elements. The whole
scan is in binary32 and is rounded once to its type; binary64 stays as it is. Scans of integers are
exact in any order and are left to PyTorch.
"""

import torch

from ..templates import scan as templates
from . import prims as P
from .engines import TorchEngine
from .pointwise import LIBRARY, PROGRAMS
from .registry import Refusal, composite, kernels, rule

aten = torch.ops.aten


_operator = kernels("3")


def _logaddexp(left, right, out):
    """log(e^a + e^b) = max + log1p(e^(min - max)); the maximum itself where it is infinite or NaN."""
    high, low = P.maximum(left[0], right[0]), P.minimum(left[0], right[0])
    sum_ = P.add(high, P.log1p(P.exp(P.sub(low, high))))
    out[0].copy_(torch.where(torch.isfinite(high), sum_, high))


def _cumulative(combine):
    def scan(x, dim, dtype):
        return templates.cumulative(x, dim, dtype, combine)

    return scan


def _like(x, dim, dtype):
    return x.new_empty(x.shape, dtype=dtype)


CUMSUM = _operator("cumsum(Tensor x, int dim, ScalarType dtype) -> Tensor", _cumulative(templates.add), _like)
CUMPROD = _operator("cumprod(Tensor x, int dim, ScalarType dtype) -> Tensor", _cumulative(templates.multiply), _like)
LOGCUMSUMEXP = _operator("logcumsumexp(Tensor x, int dim, ScalarType dtype) -> Tensor", _cumulative(_logaddexp), _like)
CUMPROD_BACKWARD = _operator(
    "cumprod_backward(Tensor grad, Tensor x, int dim) -> Tensor",
    templates.cumprod_backward,
    lambda grad, x, dim: x.new_empty(x.shape),
)


def _prod_fake(x, dim, keepdim, dtype):
    dim = dim % max(x.dim(), 1)
    return x.new_empty([1 if d == dim else n for d, n in enumerate(x.shape) if keepdim or d != dim], dtype=dtype)


PROD = _operator("prod(Tensor x, int dim, bool keepdim, ScalarType dtype) -> Tensor", templates.product, _prod_fake)


def _running_extreme(x, dim, smallest):
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    index = templates.running_extreme(order_key(x, smallest), dim)[1].contiguous()
    return x.gather(dim, index), index


def order_key(x, smallest=False):
    """Integers in the order of `x`, NaN last and both zeros equal; reversed but for NaN if `smallest`."""
    if not x.is_floating_point():
        x = x.to(torch.uint8) if x.dtype is torch.bool else x
        return ~x if smallest else x
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    return PROGRAMS["order_key"][0](TorchEngine, -wide if smallest else wide)


RUNNING_EXTREME = _operator(
    "running_extreme(Tensor x, int dim, bool smallest) -> (Tensor, Tensor)",
    _running_extreme,
    lambda x, dim, smallest: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)),
)


# --- rules ----------------------------------------------------------------------------------------------


def _result_type(x, dtype):
    """The type of a sum or product; None where its integers are left to PyTorch."""
    dtype = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    if dtype.is_complex:
        raise Refusal("CB204", "scans of complex numbers have no rule")
    return dtype if dtype.is_floating_point else None


@rule("aten.cumsum.default", section="3", verdict="template", integers="rule")
def cumsum(x, dim, *, dtype=None):
    dtype = _result_type(x, dtype)
    return NotImplemented if dtype is None else CUMSUM(x, dim, dtype)


@rule("aten.cumprod.default", section="3", verdict="template", integers="rule")
def cumprod(x, dim, *, dtype=None):
    dtype = _result_type(x, dtype)
    return NotImplemented if dtype is None else CUMPROD(x, dim, dtype)


@rule("aten.prod.default", section="3", verdict="template", integers="rule")
def prod(x, *, dtype=None):
    """The product of all elements in row-major order."""
    dtype = _result_type(x, dtype)
    return NotImplemented if dtype is None else PROD(x.reshape(-1), 0, False, dtype)


@rule("aten.prod.dim_int", section="3", verdict="template", integers="rule")
def prod_dim(x, dim, keepdim=False, *, dtype=None):
    dtype = _result_type(x, dtype)
    return NotImplemented if dtype is None else PROD(x, dim, keepdim, dtype)


@rule("aten.logcumsumexp.default", section="3", verdict="template")
def logcumsumexp(x, dim):
    if x.dtype is torch.float64 or x.is_complex():
        raise Refusal("CB203", "logcumsumexp has a program for binary32 only; convert to float32 first")
    return LOGCUMSUMEXP(x, dim, x.dtype)


@rule("aten.cummax.default", section="3", verdict="template", integers="rule")
def cummax(x, dim):
    """Running maximum and its last index, as PyTorch counts; NaN is largest and zeros are equal."""
    return RUNNING_EXTREME(x, dim, False)


@rule("aten.cummin.default", section="3", verdict="template", integers="rule")
def cummin(x, dim):
    """Running minimum and its last index, as PyTorch counts; NaN is smallest and zeros are equal."""
    return RUNNING_EXTREME(x, dim, True)


# --- above autograd: PyTorch's derivative of cumprod branches on the data and differs by version --------


def _cumprod_setup(ctx, inputs, output):
    x, ctx.dim, _ = inputs
    ctx.save_for_backward(x)


def _cumprod_derivative(ctx, grad):
    (x,) = ctx.saved_tensors
    return CUMPROD_BACKWARD(grad, x, ctx.dim), None, None


torch.library.register_autograd("carbon::cumprod", _cumprod_derivative, setup_context=_cumprod_setup, lib=LIBRARY)


@composite(torch.cumprod, torch.Tensor.cumprod, section="3")
def cumprod_composite(x, dim, *, dtype=None, out=None):
    """Products of prefixes; the derivative divides by nothing, so zeros need no case of their own."""
    result = _result_type(x, dtype)
    y = aten.cumprod.default(x, dim, dtype=dtype) if result is None else CUMPROD(x, dim, result)
    return y if out is None else out.copy_(y)
