"""The two rewrites: composites in the Dynamo graph, and rules in the joint graph."""

import functools
import operator

import torch
from torch import fx

from . import host
from .lowering import composites, registry
from .lowering.policy import Policy
from .lowering.random import collect_keys

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


def rewrite_dynamo(gm: fx.GraphModule, policy: Policy):
    """Turn calls of composite functions into `composites.call` nodes and resolve autocast regions.

    Works in place, also on the bodies of higher-order operators such as activation checkpointing.
    """
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            rewrite_dynamo(child, policy)
    regions = [policy]
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is _ENTER:
            regions.append(_entered(regions[-1], *node.args))
        elif node.op == "call_function" and node.target is _EXIT:
            regions.pop()
            entered = node.args[0]
            gm.graph.erase_node(node)
            gm.graph.erase_node(entered)
        elif node.op in ("call_function", "call_method"):
            _catch(node, regions[-1])
    gm.recompile()
    return gm


def copy_expanded_outputs(gm: fx.GraphModule):
    """Copy every differentiable output that shows an element more than once, such as `x.expand(8, 4)`.

    AOTAutograd makes views anew outside the graph, so the derivative of such an output, a sum, would
    be PyTorch's own. All other views only move bits.
    """
    output = next(n for n in gm.graph.nodes if n.op == "output")
    copies = {}
    for node in output.all_input_nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.requires_grad and _overlaps(value):
            with gm.graph.inserting_before(output):
                copies[node] = gm.graph.call_function(torch.clone, (node,), {"memory_format": torch.contiguous_format})
            copies[node].meta.update(node.meta)
    output.args = fx.node.map_arg(output.args, lambda n: copies.get(n, n))
    if copies:
        gm.recompile()
    return gm


def _overlaps(value):
    if value.layout is not torch.strided:
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return host.unless_known_false(value.numel() > extent)


def _entered(policy, device_type, dtype, enabled, cache_enabled):
    if dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    return policy.with_autocast(dtype if enabled else None)


def _catch(node, policy):
    function = node.target if node.op == "call_function" else getattr(torch.Tensor, node.target, None)
    if function is None or function is operator.getitem or not composites.wants(function, bool(policy.autocast)):
        return
    name = f"torch.Tensor.{node.target}" if node.op == "call_method" else host.qualified_name(function)
    node.op, node.target = "call_function", composites.call
    node.args = (name, policy.encode(), *node.args)


def ambient_policy(options):
    """The policy in force where the compile happens: matmul precision, options, surrounding autocast."""
    policy = options.policy()
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return policy.with_autocast(torch.get_autocast_dtype(device))
    return policy


def rewrite_joint(gm: fx.GraphModule, interpreter: fx.Interpreter):
    """Retrace the joint graph, run by `interpreter`, with every rule applied; returns a new graph module.

    Node metadata (user lines, module paths, recompute and partitioner tags) follow their nodes.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta["val"] for n in placeholders]
    with fx.traceback.preserve_node_meta(), host.no_autocast(), torch.no_grad():
        rewritten = host.retrace(interpreter.run, fakes, rewriting_table())
    collect_keys(rewritten.graph)
    return rewritten


@functools.cache
def rewriting_table():
    """Rules as a decomposition table. A kept operator that Inductor cannot lower by itself takes
    PyTorch's own decomposition: those move bits and compute nothing."""
    table = {}
    theirs, lowerings = host.inductor_decompositions(), host.inductor_lowerings()
    for op, rule in registry.load().items():
        pieces = theirs.get(op) if op not in lowerings else None
        if rule.function is not None:
            table[op] = _with_fallback(rule.function, pieces)
        elif rule.verdict == "keep" and pieces is not None:
            table[op] = pieces
    return table


def _with_fallback(rule, pieces):
    """The rule, then PyTorch's decomposition for the calls that the rule leaves as they are."""
    if pieces is None:
        return rule

    @functools.wraps(rule)
    def function(*args, **kwargs):
        result = rule(*args, **kwargs)
        return pieces(*args, **kwargs) if result is NotImplemented else result

    return function


def _adopt(owner, name, value):
    """Give `owner` the constant under a free name."""
    while hasattr(owner, name) and getattr(owner, name) is not value:
        name += "_"
    setattr(owner, name, value)
    return name


def replace_graph(graph: fx.Graph, new: fx.GraphModule):
    """Put the nodes of `new` into `graph`, in place; placeholders and output keep their identity."""
    owner = graph.owning_module
    old_inputs = [n for n in graph.nodes if n.op == "placeholder"]
    new_inputs = [n for n in new.graph.nodes if n.op == "placeholder"]
    output = next(n for n in graph.nodes if n.op == "output")
    for node in new.graph.nodes:
        if node.op == "get_attr":
            node.target = _adopt(owner, node.target, getattr(new, node.target))
    old_nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    with graph.inserting_before(output):
        output.args = (graph.graph_copy(new.graph, dict(zip(new_inputs, old_inputs, strict=True))),)
    for node in reversed(old_nodes):
        graph.erase_node(node)
    return graph
