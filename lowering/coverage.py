"""The verdict of every ATen operator: what `carbon-compile coverage`, the tests and the docs read."""

import torch

from . import registry

DECOMPOSED = "written with other operators before it is judged"


def coverage():
    """One row an operator: {"op", "verdict", "template", "section", "reason"}, in name order.

    In-place and out= overloads take the verdict of their functional form, because AOTAutograd
    makes graphs functional; composite operators take none of their own.
    """
    registry.load()
    return [_row(name) for name in sorted(_aten_names())]


def _aten_names():
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == "aten" and not rest.startswith("_test_"):
            packet, _, overload = rest.partition(".")
            yield f"aten.{packet}.{overload or 'default'}"


def _row(name):
    op = registry.overload(name)
    rule = registry.RULES.get(op)
    if rule is not None:
        return _entry(name, rule.verdict, rule.section, rule.reason)
    functional = _functional(op)
    if functional is not None and functional in registry.RULES:
        rule = registry.RULES[functional]
        return _entry(name, rule.verdict, rule.section, f"as {str(functional).removesuffix('.default')}")
    if op is not None and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return _entry(name, "decomposed", "0", DECOMPOSED)
    return _entry(name, "refuse", "9", "no rule")


def _entry(op, verdict, section, reason=""):
    return {"op": op, "verdict": verdict, "template": "", "section": section, "reason": reason}


def _functional(op):
    """The functional overload that an in-place or out= overload becomes, if it can be told."""
    if op is None or not op._schema.is_mutable:
        return None
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::").rstrip("_"), None)
    if packet is None:
        return None
    wanted = [str(a.type) for a in op._schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and [str(a.type) for a in candidate._schema.arguments] == wanted:
            return candidate
    return None
