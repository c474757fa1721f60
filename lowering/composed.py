"""Composed operations: one node in the canonical graph, expanded by a pinned formula (contract section 0)."""

import torch

from .pointwise import LIBRARY
from .registry import rule


def compose(schema, section):
    """Define `carbon::<schema>` by the decorated formula, written in `prims`.

    The formula is the eager definition, the fake implementation and the rule that expands the node
    in the joint graph. Returns the operator; give it a derivative with `derivative`.
    """

    def define(formula):
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, formula, "CompositeExplicitAutograd")
        torch.library.register_fake(f"carbon::{name}", formula, lib=LIBRARY)
        rule(f"carbon.{name}.default", section=section, integers="rule")(formula)
        return getattr(torch.ops.carbon, name).default

    return define


def derivative(op, setup):
    """Register the decorated `backward(ctx, *grads)` for `op`; `setup(ctx, inputs, output)` saves its inputs."""

    def register(backward):
        torch.library.register_autograd(f"carbon::{op._opname}", backward, setup_context=setup, lib=LIBRARY)
        return backward

    return register
