"""Functions of tensors that are cut over ranks, with the bits of the same functions of whole tensors.

A group of ranks cuts a weight (tensor parallelism) and, between cut weights, the sequence dimension
of activations (sequence parallelism). Everything here is written so that no intermediate result is
rounded before the whole sum is known: products exchange maxima, then exact totals; statistics of
cut dimensions and gradients of parameters that see a share of the tokens are exact sums over ranks;
random numbers are those of the element's index in the whole tensor.

Every function takes and returns this rank's part, and `group`, the name of a process group. A part of
a dimension of n is the rank's chunk of ceil(n / ranks) indices; shares of a sequence must be equal.
"""

import functools

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from . import attention as attend
from . import philox, policy, random
from . import prims as P
from .collective import (
    ALL_REDUCE,
    GATHER_ROWS,
    MM_CUT,
    PICK,
    SUM_OVER,
    UNIT_SUM_OVER,
    process_group,
)
from .composites import NARROW
from .pointwise import LIBRARY
from .registry import composite, template

aten = torch.ops.aten


def cut_function(function):
    """A function that compiled graphs hold as one node, and that runs under the policy in force."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if has_torch_function(tensors):  # a mode is active: it comes back through COMPOSITES
            return handle_torch_function(call, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    composite(call, section="8")(function)
    return torch.compiler.allow_in_graph(call)


def _size(group):
    return process_group(group).size()


# A rank's number is read when a graph runs, so that all ranks run the same kernels.
LIBRARY.define("group_rank(str group, *, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("group_rank", lambda group, *, device: torch.tensor(process_group(group).rank(), device=device), "CompositeExplicitAutograd")
torch.library.register_fake("carbon::group_rank", lambda group, *, device: torch.empty((), dtype=torch.int64, device=device), lib=LIBRARY)
GROUP_RANK = template("group_rank", "8")


def _start(whole, group, device):
    """The first index of this rank's chunk of a dimension of `whole`, as a 0-d int64 tensor."""
    return aten.mul.Scalar(GROUP_RANK(group, device=device), -(-whole // _size(group)))


def _lowered(*tensors):
    """Operands of a product, in autocast's type where it is on."""
    low = policy.current().autocast_dtype
    return [t.to(low) if low is not None and t is not None and t.dtype in (torch.float32, *NARROW) else t for t in tensors]


def _raised(x):
    """x as autocast hands it to functions that it keeps in float32."""
    return x.float() if policy.current().autocast and x.dtype in NARROW else x


# --- shares of a dimension ------------------------------------------------------------------------------


def _share(x, dim, group):
    size = _size(group)
    if x.shape[dim] % size:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} can't be shared evenly by {size} ranks")
    index = aten.arange.default(x.shape[dim] // size, dtype=torch.int64, device=x.device)
    return aten.index_select.default(x, dim, aten.add.Tensor(index, _start(x.shape[dim], group, x.device)))


def _unshare(x, dim, group):
    return GATHER_ROWS(x.movedim(dim, 0).contiguous(), group, _size(group)).movedim(0, dim).contiguous()


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _share(x, dim, group)

    @staticmethod
    def backward(ctx, g):
        return _unshare(g, ctx.dim, ctx.group), None, None


class _Unshare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _unshare(x, dim, group)

    @staticmethod
    def backward(ctx, g):
        return _share(g, ctx.dim, ctx.group), None, None


@cut_function
def share(x, dim, group):
    """This rank's equal share of `dim` of a tensor that all ranks have; its gradient is gathered."""
    return _Share.apply(x, dim % x.dim(), group)


@cut_function
def unshare(x, dim, group):
    """The whole of a tensor shared along `dim`, on every rank. All ranks must use it alike: each keeps
    its share of one and the same gradient."""
    return _Unshare.apply(x, dim % x.dim(), group)


# --- products -------------------------------------------------------------------------------------------


@cut_function
def linear(x, weight, bias, whole, cut, group, shared=None):
    """F.linear with a weight [N, K] of which this rank holds a chunk.

    whole: (N, K). cut "columns": weight [N / ranks, K] and bias [N / ranks], x [..., K], result
    [..., N / ranks]. cut "contraction": weight [N, K / ranks], bias [N], x [..., K / ranks], result
    [..., N] on every rank. shared: the dimension of activations that ranks share (sequence
    parallelism), of x with "columns", of the result with "contraction".
    """
    x, weight, bias = _lowered(x, weight, bias)
    size = _size(group)
    if shared is not None:
        x = x.movedim(shared, 0)  # a rank's share are then consecutive rows
    lead = list(x.shape[:-1])
    window = policy.current().window(x.dtype)
    y = MM_CUT(x.reshape(-1, x.shape[-1]), weight.t(), bias, window, "weight", x.dtype, whole[1], whole[0], cut, group, size, shared is not None)
    if shared is not None:
        lead[0] = lead[0] * size if cut == "columns" else lead[0] // size
    y = y.reshape(*lead, weight.shape[0])
    return y if shared is None else y.movedim(0, shared)


# --- vocabularies cut over ranks ------------------------------------------------------------------------


def _pick_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


def _pick_backward(ctx, g):
    return torch.where(ctx.saved_tensors[0], g, 0.0), None, None, None


torch.library.register_autograd("carbon::pick", _pick_backward, setup_context=_pick_setup, lib=LIBRARY)


def _owned(index, n, whole, group):
    """(local index, whether it is this rank's); the index is 0 where it is not."""
    local = index - _start(whole, group, index.device)
    owned = (local >= 0) & (local < n)
    return torch.where(owned, local, 0), owned


@cut_function
def embedding(index, weight, whole, group, padding_idx=None):
    """F.embedding with a table of `whole` rows of which this rank holds a chunk: all ranks get the result.

    A gradient row is the exact sum of its contributions, all of which its owner sees.
    """
    local, owned = _owned(index, weight.shape[0], whole, group)
    rows = F.embedding(local, weight)
    if padding_idx is not None:  # its row is read, and learns nothing
        rows = torch.where((index == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return PICK(rows, owned.unsqueeze(-1), group, _size(group))


class _LogSoftmax(torch.autograd.Function):
    """log_softmax over a cut last dimension; formulas of lowering/softmax.py."""

    @staticmethod
    def forward(ctx, x, group):
        dim, size = x.dim() - 1, _size(group)
        m = ALL_REDUCE(P.amax(P.f32(x), [dim], True), "max", group, size)
        shifted = P.sub(x, m)
        y = P.sub(shifted, P.log(UNIT_SUM_OVER(P.exp_term(shifted), dim, group, size)), dtype=x.dtype)
        ctx.group = group
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        total = SUM_OVER(g, [g.dim() - 1], ctx.group, _size(ctx.group), torch.float32).unsqueeze(-1)
        return P.sub(g, P.mul(P.exp(y), total), dtype=y.dtype), None


class _Chosen(torch.autograd.Function):
    """y [N, C] at one column a row, from the rank that owns it: [N]."""

    @staticmethod
    def forward(ctx, y, local, owned, group):
        ctx.columns = y.shape[1]
        ctx.save_for_backward(local, owned)
        return PICK(aten.gather.default(y, 1, local.unsqueeze(1)).squeeze(1), owned, group, _size(group))

    @staticmethod
    def backward(ctx, g):
        local, owned = ctx.saved_tensors
        column = aten.arange.default(ctx.columns, dtype=torch.int64, device=g.device)
        hit = (column == local.unsqueeze(1)) & owned.unsqueeze(1)
        return torch.ops.carbon.select(hit, g.unsqueeze(1), P.scalar(0.0, g, g.dtype), dtype=g.dtype), None, None, None


@cut_function
def cross_entropy(logits, target, whole, group, ignore_index=-100, reduction="mean"):
    """F.cross_entropy of logits [N, C / ranks] cut by classes, `whole` = C; target [N] on every rank."""
    wide = logits.float() if logits.dtype in NARROW else logits
    y = _LogSoftmax.apply(wide, group)
    ignored = target == ignore_index
    local, owned = _owned(torch.where(ignored, 0, target), logits.shape[1], whole, group)
    chosen = _Chosen.apply(y, local, owned, group)
    loss = F.nll_loss(chosen.unsqueeze(1), torch.where(ignored, ignore_index, 0), ignore_index=ignore_index, reduction=reduction)
    return loss if policy.current().autocast else loss.to(logits.dtype)


# --- normalisation and dropout of shared sequences --------------------------------------------------------


class _Spread(torch.autograd.Function):
    """A parameter of which every token has a use, where ranks share the tokens: its gradient is summed
    over all of them at once."""

    @staticmethod
    def forward(ctx, p, shape, group):
        ctx.lead, ctx.group, ctx.dtype = list(range(len(shape) - p.dim())), group, p.dtype
        return p.expand(shape)

    @staticmethod
    def backward(ctx, g):
        return SUM_OVER(g.contiguous(), ctx.lead, ctx.group, _size(ctx.group), ctx.dtype), None, None


def _scaled(h, weight, bias, group, dtype):
    y = h if weight is None else h * _Spread.apply(weight, list(h.shape), group)
    return (y if bias is None else y + _Spread.apply(bias, list(h.shape), group)).to(dtype)


@cut_function
def layer_norm(x, shape, weight, bias, eps, group):
    """F.layer_norm of tokens that ranks share; the gradients of its parameters are those of all tokens."""
    x = _raised(x)
    return _scaled(F.layer_norm(x.float(), shape, None, None, eps), weight, bias, group, x.dtype)


@cut_function
def rms_norm(x, shape, weight, eps, group):
    """F.rms_norm of tokens that ranks share."""
    x = _raised(x)
    return _scaled(F.rms_norm(x.float(), shape, None, eps), weight, None, group, x.dtype)


def _logical_index(shape, dim, whole, group, device):
    """The row-major index, in the whole tensor, of every element of a chunk along `dim`."""
    lead, inner = 1, 1
    for n in shape[:dim]:
        lead = lead * n
    for n in shape[dim + 1 :]:
        inner = inner * n
    parts = [aten.arange.default(n, dtype=torch.int64, device=device) for n in (lead, shape[dim], inner)]
    along = aten.add.Tensor(parts[1], _start(whole, group, device)).unsqueeze(1)
    rows = aten.mul.Scalar(parts[0], whole).view(-1, 1, 1)
    index = aten.add.Tensor(aten.mul.Scalar(aten.add.Tensor(rows, along), inner), parts[2])
    return aten.view.default(index, list(shape))


@cut_function
def dropout(x, p, training, dim, whole, group):
    """F.dropout of a chunk along `dim` of a tensor whose dimension is `whole` there."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not training:
        return x
    if p == 1:
        return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)
    index = _logical_index(x.shape, dim % x.dim(), whole, group, x.device)
    key = random.KEY(device=x.device)
    threshold = torch.full((), philox.threshold(float(p)), dtype=torch.int64, device=x.device)
    keep = torch.ops.carbon.keep(aten.select.int(key, 0, 0), aten.select.int(key, 0, 1), index, threshold, dtype=torch.bool)
    return (x * (1.0 / (1.0 - p))).masked_fill(torch.logical_not(keep), 0.0)


@cut_function
def scaled_dot_product_attention(query, key, value, heads, group, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention of this rank's chunk of `heads` heads: only dropout needs to know."""
    query, key, value = _lowered(query, key, value)

    def drop(weights, p):
        return dropout(weights, p, True, -3, heads, group)

    return attend.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)[0]
