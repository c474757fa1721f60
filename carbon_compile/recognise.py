"""Nodes of the joint graph that are worth more together than each by its rule.

**Products whose partial results are summed over ranks** (contract section 8). A row-parallel layer, or
the input gradient of a column-parallel one, is written as a product of what a rank holds and an
all-reduce of the results. Each partial result would be rounded before the sum, so the bits would
depend on the number of ranks. Such a pair becomes one product cut by contraction, with the bits of the
product of the whole operands. It tells how its weight is cut, so the other products of that weight (the
layer's own, its input gradient, its weight gradient) follow: they exchange the maxima that their
balance takes over the whole.

**The gradient of a cross-entropy.** The derivative of log_softmax needs the sum of the incoming gradient over
all classes; that of nll_loss is zero at every class but the target's. The sum is known without adding, so the
gradient of the logits is pointwise.

**Attention in which no query sees a later key.** Its weights and their gradient are zero there, and so may be
its scores and the gradient that comes to the weights: the six products leave that half out. That a mask is such a
one is shown by its value, if it is made of nothing but sizes: `is_causal`, and the masks that libraries make.
No bit depends on it.

**The softmax of attention** on a GPU, with the scale before it and behind its derivative, where all keys are seen or
all up to the query: a kernel of ours takes the place of graph operations. No bit depends on it either.

**Heads side by side**, as the gradient of a layer has them that makes queries, keys and values at once: they are put
together before they are moved beside each other, so that each 16 bytes come from one of them. Bits only move.
"""

import math
import operator

import torch

from . import host
from .lowering import attention
from .lowering import prims as P
from .lowering.collective import MM_CUT, _group, c10d, process_group
from .templates import matmul as templates

MM = torch.ops.carbon.mm.default
_aten = torch.ops.aten
_SHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.clone.default}
_VIEWS = _SHAPES | {_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.alias.default, _aten.detach.default}
_MOVES = _VIEWS | {_aten.cat.default, _aten.slice.Tensor, _aten.split.Tensor, _aten._to_copy.default, torch.ops.prims.convert_element_type.default, operator.getitem}
_SUMS = {c10d.all_reduce.default, c10d.reduce_scatter_tensor.default}


def cut_products(graph):
    """Rewrite the products of a joint graph in place; returns how many were found by their collective."""
    products = []
    for node in list(graph.nodes):
        shared = node.target is c10d.reduce_scatter_tensor.default
        if not (shared or node.target is c10d.all_reduce.default) or node.args[1] != "sum":
            continue
        product = _product_behind(node.args[0], () if shared else _SHAPES)
        if product is not None:
            products.append((product, node, shared))
    known = {product for product, _, _ in products}
    for product, collective, shared in products:
        _follow(graph, product, collective, known)
        _join(graph, product, collective, shared)
    return len(products)


def _product_behind(node, shapes):
    """The product that reaches `node` through nothing but changes of shape, and goes nowhere else."""
    while node.target in shapes and len(node.users) == 1:
        node = node.args[0]
    if node.target is not MM or len(node.users) != 1:
        return None
    bias, balance = node.args[2], node.args[4]
    return node if bias is None and balance == "weight" else None


def rounded_partials(graph):
    """The sums over ranks, left by `cut_products`, that add parts of a product which ranks have rounded."""
    for node in graph.nodes:
        if node.target in _SUMS and node.args[1] == "sum" and _shows_product(node.args[0]):
            yield node


def _shows_product(node):
    """Whether nothing but moves, copies and casts is between `node` and a product other than a weight's
    gradient, whose sum over ranks is that of their tokens."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target is MM and node.args[4] == "weight":
            return True
        if node.target in _MOVES:
            waiting += node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    return False


def _base(node):
    """The tensor that a node shows in another shape."""
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _cut(graph, node, arguments, cut, group, shared=False):
    """A cut product before `node`."""
    a, b, bias, window, balance, dtype = arguments
    with graph.inserting_before(node):
        return graph.call_function(MM_CUT, (a, b, bias, window, balance, dtype, 0, 0, cut, group, process_group(group).size(), shared))


def _join(graph, product, collective, shared):
    joined = _cut(graph, product, product.args, "contraction", _group(collective.args[-1]), shared)
    joined.meta = {**product.meta, "val": collective.meta["val"] if shared else product.meta["val"]}
    product.replace_all_uses_with(joined)
    graph.erase_node(product)
    collective.replace_all_uses_with(collective.args[0])
    graph.erase_node(collective)


def _follow(graph, product, collective, known):
    """The other products of the weight, whose columns or rows are the contraction of this one."""
    activation, weight = _base(product.args[0]), _base(product.args[1])
    group = _group(collective.args[-1])
    for node in list(graph.nodes):
        if node.target is not MM or node in known:
            continue
        a, b, balance = node.args[0], node.args[1], node.args[4]
        if balance == "weight":
            if _base(b) is weight:
                _replace(graph, node, _cut(graph, node, node.args, "columns", group))
        elif balance == "gradient" and activation in (_base(a), _base(b)):
            _replace(graph, node, _cut(graph, node, node.args, "rows" if _base(a) is activation else "columns", group))
        elif balance == "gradient_transposed" and activation in (_base(a), _base(b)):
            _transposed(graph, node, "rows" if _base(b) is activation else "columns", group)


def _replace(graph, node, new):
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _transposed(graph, node, cut, group):
    """(A^T dC)^T from dC^T and A."""
    dc, a, _, window, _, dtype = node.args
    with graph.inserting_before(node):
        a_t, dc_t = (graph.call_function(_aten.permute.default, (t, [1, 0])) for t in (a, dc))
    for new, old in ((a_t, a), (dc_t, dc)):
        new.meta = {**node.meta, "val": old.meta["val"].t()}
    gradient = _cut(graph, node, (a_t, dc_t, None, window, "gradient", dtype), cut, group)
    gradient.meta = {**node.meta, "val": node.meta["val"].t()}
    with graph.inserting_before(node):
        back = graph.call_function(_aten.permute.default, (gradient, [1, 0]))
        whole = graph.call_function(_aten.clone.default, (back,), {"memory_format": torch.contiguous_format})
    back.meta = dict(node.meta)
    _replace(graph, node, whole)


# --- the gradient of a cross-entropy --------------------------------------------------------------------

TARGET_GRADIENTS = {_aten.nll_loss_backward.default, _aten.nll_loss2d_backward.default}
_LOG_SOFTMAX_BACKWARD = _aten._log_softmax_backward_data.default
_SAME = {_aten.clone.default, _aten.alias.default, _aten.detach.default}
_CASTS = {_aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def gradient_of_targets(node):
    """(nll_loss_backward's node, types it is cast to on the way) if `node` is a log_softmax's derivative over the
    classes of exactly that gradient, seen through copies, casts and foldings of the dimensions after the classes.
    None otherwise."""
    if node.target is not _LOG_SOFTMAX_BACKWARD:
        return None
    source, dtypes = node.args[0], []
    shape, dim = source.meta["val"].shape, node.args[2]
    while source.target not in TARGET_GRADIENTS:
        if source.op != "call_function" or source.meta["val"].dtype not in _FLOATS:
            return None
        if source.target in _CASTS:
            dtypes.insert(0, source.meta["val"].dtype)
        elif source.target not in _SAME | _SHAPES:
            return None
        source = source.args[0]
    log_p, target = (argument.meta["val"] for argument in source.args[1:3])
    classes = 0 if log_p.dim() == 1 else 1
    kept = len(shape) > classes and all(P.provably(a == b) for a, b in zip(shape[: classes + 1], log_p.shape, strict=False))
    if not kept or dim % len(shape) != classes or log_p.dtype not in _FLOATS:
        return None
    if target.dim() != log_p.dim() - 1 or target.dtype is not torch.int64:
        return None
    # A row of one dimension has nothing after the classes that could be folded.
    return (source, dtypes) if classes or len(shape) == 1 else None


# --- causal attention -----------------------------------------------------------------------------------

_WEIGHTS = torch.ops.carbon.attention_weights.default
_WEIGHTS_BACKWARD = torch.ops.carbon.attention_weights_backward.default
_MARKED = torch.ops.carbon.attention_weights_marked.default
_SCORES, _KEYS, _BMM = attention.SCORES, attention.KEYS, attention.BMM
_RENAMED = _SHAPES | {_aten.alias.default, _aten.detach.default}
_ANDS = {_aten.bitwise_and.Tensor, _aten.logical_and.default}
_MASK = 1 << 27  # elements of a mask that are worth computing while compiling


def causal_products(graph):
    """Tell the products of causal attention in a joint graph what is zero, in place; returns how many there are.

    The graph's nodes have `meta["val"]`. Attention of symbolic sizes is left as it is.
    """
    known, queries = {}, {}
    for node in graph.nodes:
        if node.target is _WEIGHTS and (length := _causal(node, known)):
            queries[node] = length
    found = 0
    for node in list(graph.nodes) if queries else ():
        product = None
        if node in queries:
            product, length = _behind(node.args[0], _SCORES, node), queries[node]
        elif node.target is _WEIGHTS_BACKWARD and (weights := _original(node.args[1])) in queries:
            product, length = _behind(node.args[0], _BMM, weights), queries[weights]
        elif node.target is _KEYS:
            length = _of_weights(graph, node, queries)
            product = node if length else None
        if product is not None and len(product.args) == (3 if product.target is _SCORES else 4):
            product.args = (*product.args, length)
            found += 1
    return found


def _causal(weights, known):
    """The number of queries, if none sees a later key; 0 otherwise."""
    mask, shape = weights.args[1], weights.meta["val"].shape
    if mask is None or not all(isinstance(n, int) for n in shape) or not math.prod(shape):
        return 0
    if mask not in known:
        known[mask] = _excludes_later(mask, *shape[-2:])
    return shape[-2] if known[mask] else 0


def _excludes_later(mask, queries, keys):
    """Whether the mask [..., queries, keys], true for keys that are seen, is provably false beyond each query."""
    value = mask.meta["val"]
    if value.dtype is not torch.bool or tuple(value.shape[-2:]) != (queries, keys):
        return False
    if mask.target in _ANDS and any(_excludes_later(each, queries, keys) for each in mask.all_input_nodes):
        return True
    if mask.target is _aten.expand.default or mask.target in _SAME:
        return _excludes_later(mask.args[0], queries, keys)
    with host.real_tensors():
        value = _constant(mask)
        return value is not None and not (value & templates.beyond(queries, keys, queries)).any()


def _constant(node):
    """The value, on a CPU, of what depends on no input of the graph and no random number; else None."""
    steps, waiting = set(), [node]
    while waiting:
        step = waiting.pop()
        if step in steps:
            continue
        value = step.meta.get("val")
        plain = isinstance(step.target, torch._ops.OpOverload) and step.target.namespace in ("aten", "prims")
        if not plain or torch.Tag.nondeterministic_seeded in step.target.tags or step.target._schema.is_mutable:
            return None
        if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape) or value.numel() > _MASK:
            return None
        steps.add(step)
        waiting += step.all_input_nodes
    values = {}
    for step in node.graph.nodes:
        if step in steps:
            here = {"device": torch.device("cpu")} if "device" in step.kwargs else {}
            args, kwargs = torch.fx.node.map_arg((step.args, {**step.kwargs, **here}), values.__getitem__)
            values[step] = step.target(*args, **kwargs)
    return values[node]


def _original(node):
    while node.target in _SAME:
        node = node.args[0]
    return node


def _behind(node, target, weights):
    """The product that reaches `node` element by element, and goes nowhere else; None if there is no such."""
    while node.target is not target:
        if len(node.users) != 1 or not (_keeps_zeros(node) or node.target is _aten.masked_fill.Scalar):
            return None
        node = node.args[0]
    return node if len(node.users) == 1 and _folded(node.meta["val"].shape, weights) else None


def _folded(shape, weights):
    """Whether elements in order of a [batch, queries, keys] are those of weights [..., queries, keys], each row a row."""
    queries, keys = weights.meta["val"].shape[-2:]
    return shape[-1] == keys and shape[-2] % queries == 0


def _keeps_zeros(node):
    """Whether a node shows or scales its argument: zeros stay zero, NaN stays NaN."""
    if node.target is _aten.mul.Tensor:
        return isinstance(node.args[1], int | float) and math.isfinite(node.args[1])
    return node.target in _RENAMED


def _of_weights(graph, product, queries):
    """`causal` of a product by keys whose first operand is made of causal weights or of their gradient; else 0.

    Weights that dropout has zeroed in places are marked.
    """
    node, sign, dropped = product.args[0], 1, None
    if node.target is _aten.transpose.int and {d % 3 for d in node.args[1:]} == {1, 2}:
        node, sign = node.args[0], -1
    while _keeps_zeros(node) or node.target is _aten.masked_fill.Scalar and node.args[2] == 0:
        dropped = dropped or (None if _keeps_zeros(node) else node)
        node = node.args[0]
    marked = node if node.target is _MARKED else None
    weights = _original(node.args[1] if marked or node.target is _WEIGHTS_BACKWARD else node)
    shape = product.args[0].meta["val"].shape
    if weights not in queries or not _folded(shape[1:] if sign > 0 else shape[:0:-1], weights):
        return 0
    if marked is None and dropped is not None and not _mark(graph, dropped, node):
        return 0
    return sign * queries[weights]


def _mark(graph, dropped, weights):
    """Mark the weights after dropout, if products by keys are all they are for, and they are weights."""
    if weights.target is not _WEIGHTS or not _only_multiplied(dropped):
        return False
    with graph.inserting_after(dropped):
        marked = graph.call_function(_MARKED, (dropped, weights))
    marked.meta = dict(dropped.meta)
    dropped.replace_all_uses_with(marked, delete_user_cb=lambda user: user is not marked)
    return True


def _only_multiplied(node):
    """Whether a node goes nowhere but into first operands of products by keys."""
    for user in node.users:
        if user.target is _KEYS:
            if user.args[1] is node:
                return False
        elif not (user.target is _aten.transpose.int or _keeps_zeros(user)) or not _only_multiplied(user):
            return False
    return True


# --- the softmax of attention ---------------------------------------------------------------------------


def attention_softmax(graph, suits=attention.suits):
    """Let kernels compute the softmax of attention and its derivative in a joint graph, in place, where they lie on
    devices and have sizes that `suits(weights)` accepts; returns how many there are.

    The graph's nodes have `meta["val"]`. Call it after `causal_products`, which looks for what it replaces.
    """
    causal, known = {}, {}
    for node in list(graph.nodes):
        if node.target is _WEIGHTS and suits(node.meta["val"]) and _laid_out_alike(node, node.args[:1]):
            sizes = node.meta["val"].shape[-2:]
            seen = node.args[1], *sizes  # a mask of one row is another one for each number of queries
            if seen not in known:
                known[seen] = _causality(*seen)
            if known[seen] is not None:
                scale = _take_scale(_before(node.args[0], node))
                causal[_put(graph, node, attention.SOFTMAX, node.args[0], scale, known[seen])] = known[seen]
        elif node.target is _WEIGHTS_BACKWARD and (weights := _original(node.args[1])) in causal and _laid_out_alike(node, node.args):
            scale = _take_scale(_after(node))
            _put(graph, node, attention.SOFTMAX_BACKWARD, *node.args, scale, causal[weights])
    return sum(node.target in (attention.SOFTMAX, attention.SOFTMAX_BACKWARD) for node in graph.nodes)


def _laid_out_alike(node, arguments):
    """Whether a node is contiguous, and its arguments have its shape and are of binary32, as the kernels have them:
    a mask may have more dimensions than scores, or another order of them."""
    val = node.meta["val"]
    return val.is_contiguous() and all(a.meta["val"].shape == val.shape and a.meta["val"].dtype is torch.float32 for a in arguments)


def _causality(mask, queries, keys):
    """False if the mask [..., queries, keys], or none, is provably true, True if it is so up to each query and false
    beyond, None elsewhere."""
    if mask is None:
        return False
    while mask.target is _aten.expand.default or mask.target in _SAME:
        mask = mask.args[0]
    with host.real_tensors():
        value = _constant(mask)
        if value is None or value.dtype is not torch.bool:
            return None
        if value.all():
            return False
        if queries * keys > _MASK:
            return None
        value = value.broadcast_to((*value.shape[:-2], queries, keys))
        return True if (value != templates.beyond(queries, keys, queries)).all() else None


def _before(node, user):
    """The multiplication by a number that nothing but views is between and `user`, which alone sees it; or None."""
    while node.target in _RENAMED and len(node.users) == 1:
        node = node.args[0]
    return node if _scales(node) and len(node.users) == 1 else None


def _after(node):
    """The multiplication by a number that is all a node is for, but for views; or None."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if _scales(node):
            return node
        if node.target not in _RENAMED:
            return None
    return None


def _scales(node):
    return node.target is _aten.mul.Tensor and isinstance(node.args[1], int | float) and node.args[0].meta["val"].dtype is torch.float32


def _take_scale(product):
    """The number of a multiplication, which the graph loses; 1 without one."""
    if product is None:
        return 1.0
    product.replace_all_uses_with(product.args[0])
    product.graph.erase_node(product)
    return float(product.args[1])


def _put(graph, node, target, *arguments):
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    _replace(graph, node, new)
    return new


# --- heads side by side ---------------------------------------------------------------------------------


def heads_side_by_side(graph):
    """Rewrite each cat of [B, L, H D] that are [B, H, L, D] moved as one such move of the cat of [B, H, L, D], in
    place; returns how many there are.

    Inductor's index of an element of the first kind divides by H D, of which Triton doesn't see that neighbours stay
    neighbours: a GPU would load single elements. The graph's nodes have `meta["val"]`. Symbolic sizes are left as they are:
    what they are in the cat need not be a node of the graph.
    """
    found = 0
    for node in list(graph.nodes):
        shape = node.meta["val"].shape if node.target is _aten.cat.default else ()
        if len(shape) != 3 or (*node.args, 0)[1] not in (2, -1) or not all(isinstance(n, int) for n in shape):
            continue
        heads = [_moved(part) for part in node.args[0]]
        if len(heads) < 2 or None in heads or len({h.meta["val"].shape[3] for h in heads}) > 1:
            continue
        with graph.inserting_before(node):
            together = _made(node, _aten.cat.default, heads, 1)
            moved = _made(node, _aten.clone.default, _made(node, _aten.permute.default, together, [0, 2, 1, 3]), memory_format=torch.contiguous_format)
            _replace(graph, node, _made(node, _aten.view.default, moved, list(shape)))
        found += 1
    return found


def _moved(node):
    """The [B, H, L, D] that a node [B, L, H D] of no other use is moved from; or None."""
    shape = node.meta["val"].shape
    if node.target not in _SHAPES - {_aten.clone.default} or len(node.users) != 1:
        return None
    if not all(isinstance(n, int) for n in (*shape, *node.args[0].meta["val"].shape)):
        return None
    node = node.args[0]
    while node.target in _SAME and len(node.users) == 1:
        node = node.args[0]
    swapped = node.target is _aten.transpose.int and {d % 4 for d in node.args[1:]} == {1, 2} or node.target is _aten.permute.default and list(node.args[1]) == [0, 2, 1, 3]
    if not swapped or node.meta["val"].dim() != 4 or len(node.users) != 1 or node.meta["val"].shape[:2] != shape[:2]:
        return None
    return node.args[0]


def _made(like, target, *arguments, **options):
    new = like.graph.call_function(target, arguments, options)
    values = torch.fx.node.map_arg(arguments, lambda n: n.meta["val"])
    new.meta = {**like.meta, "val": target(*values, **options)}
    return new
