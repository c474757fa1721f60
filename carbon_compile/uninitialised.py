"""Fresh memory that is read before it is written: which elements of an `empty` were written so far.

Graphs are functional at this stage: a write into a slice gives a new tensor. So what is known of an
`empty` is a mask with its shape, and what moves elements moves the mask.
"""

import operator

import torch
from torch.utils._pytree import tree_leaves, tree_map

from . import host

_LARGEST = 1 << 26  # elements of a mask; beyond, fresh memory counts as unwritten as a whole

_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "view.default _unsafe_view.default reshape.default expand.default t.default transpose.int permute.default slice.Tensor "
        "select.int narrow.default squeeze.default squeeze.dim squeeze.dims unsqueeze.default diagonal.default as_strided.default "
        "alias.default detach.default clone.default split.Tensor split_with_sizes.default unbind.int unfold.default flip.default "
        "slice_scatter.default select_scatter.default diagonal_scatter.default as_strided_scatter.default cat.default "
        "view_as_real.default view_as_complex.default movedim.intlist"
    ).split()
)
# Calls that take the shape of their first argument and none of its elements.
_OVERWRITES = ("fill.", "zero.", "uniform.", "normal_functional.", "bernoulli.", "exponential.", "random.", "log_normal.", "geometric.", "cauchy.")
_SHAPES = ("full_like.", "zeros_like.", "ones_like.", "empty_like.", "rand_like.", "randn_like.", "randint_like.", "new_", "sym_")
_FRESH = ("empty.", "empty_like.", "empty_strided.", "empty_permuted.", "new_empty.", "new_empty_strided.")


def uninitialised_reads(graph):
    """The `empty` nodes whose contents something reads before they are written."""
    masks, sources, found = {}, {}, {}
    for node in graph.nodes:
        read = [n for n in node.all_input_nodes if n in masks] if masks else ()
        if node.op == "call_function" and _name(node).startswith(_FRESH):
            mask = _unwritten(node.meta["val"])
            if mask is not False:
                masks[node], sources[node] = mask, {node: None}
        elif not read:
            continue
        else:
            mask = _after(node, masks)
            met = dict.fromkeys(source for n in read for source in sources[n])
            if mask is None:
                found.update(met)
            elif mask is not True:
                masks[node], sources[node] = mask, met
    return list(found)


def _name(node):
    """"slice.Tensor" of an ATen operator; "" of anything else."""
    target = str(node.target)
    return target.removeprefix("aten.") if isinstance(node.target, torch._ops.OpOverload) and target.startswith("aten.") else ""


def _unwritten(value):
    """A mask of False in the shape of fresh memory; False where it has no elements."""
    shape = [host.size_hint(n) for n in value.shape]
    if 0 in shape:
        return False
    if None in shape or torch.Size(shape).numel() > _LARGEST:
        return None
    with host.real_tensors():
        return torch.zeros(shape, dtype=torch.bool)


def _after(node, masks):
    """The mask of a node's result: True where all is written, None where it reads what isn't."""
    name = _name(node)
    first = node.args[0] if node.args else None
    if name.startswith(_SHAPES) or name.startswith(_OVERWRITES) and not any(n in masks for n in node.all_input_nodes if n is not first):
        return True
    if name == "_to_copy.default":
        return masks[first]
    if node.target is operator.getitem:
        return _settled(masks[first][node.args[1]]) if isinstance(masks[first], (list, tuple)) else None
    if name == "copy.default":
        source = node.args[1]
        return True if source not in masks else _moved(lambda a, b: b.expand(a.shape), [node.args[0], source], {}, masks, node)
    if str(node.target) in _MOVES and not (name.startswith("as_strided.") and _restrided(first, masks)):
        return _moved(node.target, node.args, node.kwargs, masks, node)
    return None


def _restrided(node, masks):
    """Whether a mask lies otherwise in memory than what it is about."""
    return masks[node] is None or masks[node].stride() != tuple(map(host.size_hint, node.meta["val"].stride()))


def _moved(function, args, kwargs, masks, node):
    """The mask that moves as the elements do; None where a size is unknown."""

    def mask_of(argument):
        if isinstance(argument, torch.fx.Node):
            value = argument.meta.get("val")
            if not isinstance(value, torch.Tensor):
                return host.size_hint(value)
            known = masks.get(argument)
            return torch.ones([host.size_hint(n) for n in value.shape], dtype=torch.bool) if known is None and argument not in masks else known
        return host.size_hint(argument) if isinstance(argument, torch.SymInt) else argument

    with host.real_tensors():
        args, kwargs = tree_map(mask_of, (tuple(args), dict(kwargs)), is_leaf=lambda a: isinstance(a, torch.fx.Node))
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        unknown = any(n in masks and masks[n] is None for n in node.all_input_nodes)
        if unknown or not given:
            return None
        kwargs.pop("memory_format", None)
        try:
            return _settled(function(*args, **kwargs))
        except (RuntimeError, TypeError, IndexError):
            return None


def _settled(mask):
    with host.real_tensors():
        return True if isinstance(mask, torch.Tensor) and bool(mask.all()) else mask
