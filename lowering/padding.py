"""Rows of products that end at odd places, in memory (speed alone: no bit depends on strides).

A matrix whose rows have an odd length starts each of them at another alignment, and whatever reads or writes it
takes its elements one by one. Inductor pads the rows of what it computes itself, such as the gradient of logits.
A product within a graph gets such rows here: logits [tokens, 50257] in bfloat16 lie 50304 elements apart. What a
user sees keeps its strides.
"""

import torch

from . import matmul
from .columns import VIEWS, on_gpu

aten = torch.ops.aten
_VIEWS = VIEWS | {aten.select.int}
_SHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SHORTEST = 1024  # of a row that is worth it, as Inductor's own
_BYTES = 128  # that a row is a multiple of: a cache line


def place(gm, inputs):
    """Pad the rows of products in a final graph, in place; `inputs` tell how those of its inputs lie."""
    moved = _strides_of_inputs(gm, inputs)
    products = [node for node in gm.graph.nodes if node.target is matmul.MM_KERNEL and _odd(node)]
    visible = _visible(gm.graph) if products else ()
    for node in products:
        row = _row(node.meta["val"])
        if not _stays_within(node, visible):
            continue
        node.target, node.args = matmul.MM_PADDED, (*node.args, row)
        moved.append(node)
        node.meta["val"] = _again(node)
    for node in moved:
        _follow(node)
    if products:
        gm.recompile()


def _strides_of_inputs(gm, inputs):
    """Matrices among the inputs whose rows lie further apart than when the graph was traced: what a forward graph
    keeps for its backward."""
    found = []
    for node, value in zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=False):
        traced = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or type(value) is not type(traced) or value.dim() != 2 or not _known(value) or not _known(traced):
            continue
        if value.shape == traced.shape and value.stride(1) == traced.stride(1) == 1 and value.stride(0) > traced.stride(0):
            node.meta["val"] = value
            found.append(node)
    return found


def _known(value):
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _odd(node):
    """Whether a product has long rows on a GPU that Triton doesn't know to be aligned."""
    value = node.meta["val"]
    n = value.shape[1]
    return on_gpu(value) and node.args[4] != "gradient_transposed" and isinstance(n, int) and n >= _SHORTEST and n % 16 != 0


def _row(value):
    step = _BYTES // value.dtype.itemsize
    return -(-value.shape[1] // step) * step


def _visible(graph):
    """The nodes of a final graph that its caller sees, rather than its backward graph."""
    output = next(node for node in graph.nodes if node.op == "output")
    results = output.args[0]
    seen = output.meta.get("user_visible_output_idxs", range(len(results)))
    return {results[i] for i in seen}


def _stays_within(node, visible):
    """Whether nobody but this graph and its backward sees how a value lies in memory."""
    if node in visible:
        return False
    for user in node.users:
        if user.op == "output":
            continue
        target = user.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims", "carbon"):
            return False
        if target._schema.is_mutable or target in (aten.as_strided.default, aten._reshape_alias.default):
            return False
        if target in _VIEWS and not _stays_within(user, visible):
            return False
    return True


def _again(node):
    """A node's fake result, computed anew."""
    from carbon_compile import host

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return host.fake_result(node.target, args, kwargs)


def _follow(node):
    """Let views tell the strides of what they show."""
    for user in node.users:
        if user.target not in _VIEWS:
            continue
        if user.target in _SHAPES:
            user.target = aten.reshape.default  # which copies where it must
        user.meta["val"] = _again(user)
        _follow(user)
