"""The closed world: after the rewrite, nothing is left that has no rule."""

import operator

import torch

from .lowering import registry
from .lowering.pointwise import PROGRAMS

_STRUCTURE = (operator.getitem,)


def is_carbon(target):
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "carbon"


def is_host_arithmetic(target):
    """Sizes and flags computed on the host: Python's operators on numbers and symbolic sizes."""
    module = getattr(target, "__module__", "") or ""
    return module in ("_operator", "math", "builtins") or module.startswith("torch.fx.experimental") or getattr(target, "__name__", "").startswith("sym_")


def offenders(graph):
    """Nodes of a rewritten graph that are neither carbon's nor exact as they are."""
    rules = registry.load()
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target in _STRUCTURE or is_carbon(node.target) or is_host_arithmetic(node.target):
            continue
        rule = rules.get(node.target)
        if rule is None or rule.verdict == "refuse" or (rule.function is not None and not _exact(node, rule)):
            found.append(node)
    return found


def _exact(node, rule):
    """Whether a rule may have left this very call as it is: integers, or floats that only move."""
    tensors = _tensors(node)
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return True
    return rule.moves and len({t.dtype for t in tensors}) == 1


def _tensors(node):
    values = [getattr(a, "meta", {}).get("val") for a in [node, *_flat(node.args), *_flat(list(node.kwargs.values()))]]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _flat(args):
    return [x for a in args for x in (_flat(a) if isinstance(a, (list, tuple)) else [a])]


def summary(graph):
    """Rows (operator, verdict, section) of a graph before the rewrite, in order."""
    rows = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target in _STRUCTURE or is_host_arithmetic(node.target):
            continue
        rows.append((node, *classify(node)))
    return rows


def classify(node):
    """Verdict and contract section of one node of the joint graph: (verdict, section, reason, code)."""
    target = node.target
    rules = registry.load()
    if is_carbon(target):
        name = target._opname
        if target in registry.TEMPLATES:
            return "template", registry.TEMPLATES[target].section, "", ""
        if name in PROGRAMS:
            return "expand", PROGRAMS[name][2], "", ""
    rule = rules.get(target)
    if rule is None:
        return "refuse", "9", "no rule", "CB101"
    if rule.verdict == "expand" and _integer_only(node):
        return "keep", rule.section, "integers are exact", ""
    return rule.verdict, rule.section, rule.reason, rule.code


def _integer_only(node):
    tensors = _tensors(node)
    return bool(tensors) and not any(t.is_floating_point() or t.is_complex() for t in tensors)
