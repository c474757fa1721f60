"""Sums over the leading dimensions of a matrix on a GPU (contract section 3): bias and norm gradients.

A sum reads its operand twice, and Inductor cuts a sum of columns in two stages: four launches. Where the
operand lies in memory anyway, kernels of ours mostly read it once (`templates.column_sums`), and a norm's
two sums are one pass, which makes h, x in standard units, of x as it lies in memory. Where it is computed
on the way, graph operations fuse with what computes it. Which of both is known when the final graph is:
until then such a sum is one node.
"""

import functools
import math
import operator

import torch

from . import prims as P
from .registry import TEMPLATES, direct, kernels

aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Fewer rows are one stage, and narrow matrices no columns worth whole lines of memory.
_ROWS, _COLUMNS = 256, 32


def on_gpu(x):
    """Whether x is, or is to be, where the kernels run."""
    return x.device.type == "cuda"  # a fake tensor's `is_cuda` is an operator to the modes of eager code


def suits(x, dims, out):
    """Whether a sum of x over `dims` to the type `out` is one of columns that a kernel of ours may take."""
    lead = len(dims)
    if not on_gpu(x) or dims != list(range(lead)) or lead >= x.dim() or x.dtype not in _FLOATS or out not in _FLOATS:
        return False
    rows, columns = _known(x.shape[:lead]), _known(x.shape[lead:])
    return bool(rows and columns) and rows >= _ROWS and columns >= _COLUMNS and _in_rows(x, lead)


def _known(sizes):
    """The product of sizes, symbolic ones as they are in the call being compiled; None where only the data knows."""
    from carbon_compile import host

    hints = [host.size_hint(n) for n in sizes]
    return None if None in hints else math.prod(hints)


def _in_rows(x, lead):
    """Whether x lies in memory as a matrix with contiguous rows."""
    return x.is_contiguous() or lead == 1 and x.dim() == 2 and P.provably(x.stride(1) == 1)


def as_matrix(x, lead):
    """x with its first `lead` dimensions folded into one, and all others too."""
    rows, columns = (math.prod(sizes) for sizes in (x.shape[:lead], x.shape[lead:]))
    return x if x.dim() == 2 else aten.reshape.default(x, [rows, columns])


def sum_leading(x, lead, dtype):
    """Exact sum of x over its first `lead` dimensions."""
    total = torch.ops.carbon.column_sum(as_matrix(x, lead), dtype=dtype)
    return total if x.dim() == lead + 1 else aten.reshape.default(total, x.shape[lead:])


@functools.cache
def _templates():
    from ..templates import column_sums  # needs Triton

    return column_sums


def _in_one_kernel(x):
    if not x.is_cuda:
        return False
    rows, columns = x.shape
    return 0 < rows <= _templates().LIMIT and columns > 0


def _rows(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _column_sum(x, *, dtype):
    if not _in_one_kernel(x):
        return P.squeeze(P.sum_of_graph(x, [0], dtype), [0])
    return _templates().column_sum(_rows(x), dtype)


def _scale_gradient_of_graph(g, h, dtype):
    return P.squeeze(P.sum_of_graph(P.mul(g, h), [0], dtype), [0])


def _norm_gradients(g, h, *, weight, bias):
    if not _in_one_kernel(g):
        return _scale_gradient_of_graph(g, h, weight), _column_sum(g, dtype=bias)
    return _templates().norm_gradients(_rows(g), _rows(h), weight, bias)


def _scale_gradient(g, h, *, dtype):
    if not _in_one_kernel(g):
        return _scale_gradient_of_graph(g, h, dtype)
    return _templates().norm_gradients(_rows(g), _rows(h), dtype, None)[0]


def _operator(schema, implementation, fake):
    return direct(kernels("3")(schema, implementation, fake), implementation)


def standard(x, mean, rstd):
    """x in standard units: (x - mean) rstd, or x rstd where there is no mean."""
    return P.mul(x if mean is None else P.sub(x, mean), rstd)


def _scale_gradient_of_graph_of(g, x, mean, rstd, dtype):
    return _scale_gradient_of_graph(g, aten.reshape.default(standard(x, mean, rstd), g.shape), dtype)


def _norm_gradients_of(g, x, mean, rstd, *, weight, bias):
    if not _in_one_kernel(g):
        return _scale_gradient_of_graph_of(g, x, mean, rstd, weight), _column_sum(g, dtype=bias)
    return _templates().norm_gradients(_rows(g), _rows(x if x.dim() == 2 else x.reshape(g.shape)), weight, bias, _flat(mean), _flat(rstd))


def _scale_gradient_of(g, x, mean, rstd, *, dtype):
    if not _in_one_kernel(g):
        return _scale_gradient_of_graph_of(g, x, mean, rstd, dtype)
    return _templates().norm_gradients(_rows(g), _rows(x if x.dim() == 2 else x.reshape(g.shape)), dtype, None, _flat(mean), _flat(rstd))[0]


def _flat(t):
    return t if t is None or t.is_contiguous() else t.contiguous()


COLUMN_SUM = _operator(
    "column_sum(Tensor x, *, ScalarType dtype) -> Tensor", _column_sum,
    lambda x, *, dtype: x.new_empty(x.shape[1], dtype=dtype),
)  # fmt: skip
SCALE_GRADIENT = _operator(
    "norm_scale_gradient(Tensor g, Tensor h, *, ScalarType dtype) -> Tensor", _scale_gradient,
    lambda g, h, *, dtype: g.new_empty(g.shape[1], dtype=dtype),
)  # fmt: skip
NORM_GRADIENTS = _operator(
    "norm_gradients(Tensor g, Tensor h, *, ScalarType weight, ScalarType bias) -> (Tensor, Tensor)", _norm_gradients,
    lambda g, h, *, weight, bias: (g.new_empty(g.shape[1], dtype=weight), g.new_empty(g.shape[1], dtype=bias)),
)  # fmt: skip
# The same two of what h is made of: x of any shape whose last dimensions fold into the columns of g [M, N], and mean,
# if any, and factor of its rows, which broadcast against it. A backward pass that needs h can then make it of what is
# kept for this one, and x is in memory before.
SCALE_GRADIENT_OF = _operator(
    "norm_scale_gradient_of(Tensor g, Tensor x, Tensor? mean, Tensor rstd, *, ScalarType dtype) -> Tensor", _scale_gradient_of,
    lambda g, x, mean, rstd, *, dtype: g.new_empty(g.shape[1], dtype=dtype),
)  # fmt: skip
NORM_GRADIENTS_OF = _operator(
    "norm_gradients_of(Tensor g, Tensor x, Tensor? mean, Tensor rstd, *, ScalarType weight, ScalarType bias) -> (Tensor, Tensor)", _norm_gradients_of,
    lambda g, x, mean, rstd, *, weight, bias: (g.new_empty(g.shape[1], dtype=weight), g.new_empty(g.shape[1], dtype=bias)),
)  # fmt: skip


def scale_gradient(g, x, mean, rstd, lead, dtype):
    """Exact sum of g h over the first `lead` dimensions, h = x in standard units by mean, or 0 for None, and factor of its rows."""
    g = as_matrix(g, lead)
    if any(t is not None and t.dtype is not torch.float32 for t in (mean, rstd)):
        return SCALE_GRADIENT(g, as_matrix(standard(x, mean, rstd), lead), dtype=dtype)
    return SCALE_GRADIENT_OF(g, x, mean, rstd, dtype=dtype)


# --- the final graph ----------------------------------------------------------------------------------

VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.t.default, aten.permute.default, aten.transpose.int,
          aten.squeeze.dims, aten.unsqueeze.default, aten.slice.Tensor, aten.alias.default, aten.detach.default, operator.getitem}  # fmt: skip
_SCALES = {SCALE_GRADIENT: NORM_GRADIENTS, SCALE_GRADIENT_OF: NORM_GRADIENTS_OF}
_OURS = (COLUMN_SUM, *_SCALES)


def place(gm):
    """Decide on each sum of columns in a final graph, in place: a kernel of ours, or graph operations."""
    nodes, seen = [n for n in gm.graph.nodes if n.target in _OURS], {}
    for node in nodes:
        operands, statistics = node.args[:2], node.args[2:]  # of which the kernels take float32 alone
        sources = [seen[n] if n in seen else seen.setdefault(n, _narrowest(n)) for n in operands]
        if all(n is None or _stored(n) for n in (*sources, *statistics)):
            node.args = (*sources, *statistics)
    _pair([n for n in nodes if _taken(n)])
    for node in nodes:
        if node.users and not _taken(node):
            _expand(gm, node)
    if nodes:
        gm.graph.eliminate_dead_code()
        gm.recompile()


def _taken(node):
    return all(n is None or _stored(_base(n)) for n in node.args)


def _base(node):
    """What a view shows."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    return node


def _stored(node):
    """Whether a value is in memory whatever else happens: an input, a result, or what a kernel of ours makes or reads."""
    node = _base(node)
    return node.op in ("placeholder", "get_attr") or node.target in TEMPLATES or _read(node)


def _read(node):
    for user in node.users:
        if user.op == "output" or user.target in TEMPLATES and user.target not in _OURS:
            return True
        if user.target in VIEWS and _read(user):
            return True
    return False


def _narrowest(node):
    """The same numbers before they were widened, if those lie in memory."""
    if node.op != "call_function":
        return node
    if node.target is torch.ops.carbon.cast.default and _widens(node) and _stored(node.args[0]):
        return node.args[0]
    if node.target in (aten.view.default, aten.reshape.default) and (source := _narrowest(node.args[0])) is not node.args[0]:
        with node.graph.inserting_before(node):
            view = node.graph.call_function(aten.reshape.default, (source, node.args[1]))
        view.meta = {**node.meta, "val": node.meta["val"].to(source.meta["val"].dtype)}
        return view
    return node


def _widens(node):
    return node.kwargs["dtype"] is torch.float32 and node.args[0].meta["val"].dtype in (torch.bfloat16, torch.float16)


def _pair(nodes):
    """A norm's two sums of one gradient as one pass."""
    for node in nodes:
        if node.target not in _SCALES:
            continue
        partner = next((n for n in nodes if n.target is COLUMN_SUM and n.args[0] is node.args[0] and n.users), None)
        if partner is None:
            continue
        with node.graph.inserting_before(node):
            both = node.graph.call_function(_SCALES[node.target], node.args, {"weight": node.kwargs["dtype"], "bias": partner.kwargs["dtype"]})
            both.meta = {**node.meta, "val": (node.meta["val"], partner.meta["val"])}
            for i, n in enumerate((node, partner)):
                result = node.graph.call_function(operator.getitem, (both, i))
                result.meta = dict(n.meta)
                n.replace_all_uses_with(result)
                _behind(result)


def _behind(node):
    """Move the users of a node, and theirs, behind it where they stand before."""
    for user in list(node.users):
        if user < node:
            node.append(user)
            _behind(user)


def _expand(gm, node):
    from carbon_compile import host

    formula = {
        COLUMN_SUM: lambda x, dtype: P.squeeze(P.sum_of_graph(x, [0], dtype), [0]),
        SCALE_GRADIENT: _scale_gradient_of_graph,
        SCALE_GRADIENT_OF: _scale_gradient_of_graph_of,
    }[node.target]
    given = [a for a in node.args if isinstance(a, torch.fx.Node)]

    def run(*tensors):
        tensors = iter(tensors)
        return formula(*[next(tensors) if isinstance(a, torch.fx.Node) else a for a in node.args], node.kwargs["dtype"])

    pieces = host.retrace(run, [a.meta["val"] for a in given], {})
    inputs = [n for n in pieces.graph.nodes if n.op == "placeholder"]
    with gm.graph.inserting_before(node):
        result = gm.graph.graph_copy(pieces.graph, dict(zip(inputs, given, strict=True)))
    node.replace_all_uses_with(result)
