"""Where rules meet operators: one table for ATen operators, one for functions above autograd.

A rule file registers itself with `@rule` (ATen overloads in the joint graph) or `@composite`
(functions caught before autograd, autocast and device dispatch see them). `MODULES` is the explicit
list of rule files; nothing is found by scanning.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

MODULES = (
    "arithmetic", "activation", "view", "reduction", "columns", "softmax", "norm", "loss", "matmul", "producers", "attention",
    "convolution", "recurrent", "scatter", "scan", "sort", "pool", "random", "optimizer", "collective", "cut", "refused",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """How one operator is brought under the contract.

    verdict: "keep" (exact as it is), "expand" (rewritten as pointwise programs and integer sums),
    "template" (a kernel of ours with a CPU twin) or "refuse". `function` takes the operator's
    arguments; `NotImplemented` from it means that this call is exact as it is.
    """

    verdict: str
    section: str
    function: Callable | None = None
    reason: str = ""
    code: str = ""
    moves: bool = False  # a call that the function leaves alone may hold floating tensors, of one type


class Refusal(NotImplementedError):
    """Raised by a rule for a call that has no order-free form. Carries a diagnostic code."""

    def __init__(self, code, reason):
        super().__init__(reason)
        self.code = code
        self.reason = reason


_stock = contextvars.ContextVar("carbon_stock", default=False)


@contextlib.contextmanager
def as_stock():
    """Rules stand aside: the user allowed this call to run as PyTorch's own."""
    token = _stock.set(True)
    try:
        yield
    finally:
        _stock.reset(token)


RULES: dict[torch._ops.OpOverload, Rule] = {}
COMPOSITES: dict[Callable, Callable] = {}
TEMPLATES: dict[torch._ops.OpOverload, Rule] = {}
SECTIONS: dict[Callable, str] = {}


def overload(name):
    """The OpOverload of a dotted name ("aten.add.Tensor"), or None where this PyTorch has none."""
    namespace, packet, suffix = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), packet, None)
    return getattr(packet, suffix, None) if packet is not None else None


def _add(name, rule):
    op = overload(name)
    if op is None:  # not in this PyTorch
        return
    if op in RULES:
        raise ValueError(f"{name} has two rules; one rule, one place")
    RULES[op] = rule


def has_float(args, kwargs=None):
    """Whether any tensor among the arguments (lists included) is floating or complex."""
    for a in [*args, *(kwargs or {}).values()]:
        if isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex()):
            return True
        if isinstance(a, (list, tuple)) and has_float(a):
            return True
    return False


def rule(*names, section, verdict="expand", integers="keep", moves=False):
    """Register the decorated function for ATen overloads.

    integers: "keep" leaves calls without floating tensors as they are; "rule" sends them through.
    """

    def register(function):
        def guarded(*args, **kwargs):
            if _stock.get() or integers == "keep" and not has_float(args, kwargs):
                return NotImplemented
            return function(*args, **kwargs)

        guarded.__name__ = function.__name__
        guarded.__doc__ = function.__doc__
        for name in names:
            _add(name, Rule(verdict, section, guarded, moves=moves))
        return function

    return register


def keep(*names, section="1", reason="exact as it is"):
    """Operators that move, select or count bits: every engine gives the same result."""
    for name in names:
        _add(name, Rule("keep", section, None, reason))


def refuse(*names, code, reason):
    """Operators with no order-free form."""
    for name in names:
        _add(name, Rule("refuse", "9", None, reason, code))


def composite(*functions, section):
    """Register the decorated function in place of functions (callables or dotted names) above autograd."""

    def register(function):
        for f in functions:
            if f is not None:
                COMPOSITES[f] = function
        SECTIONS[function] = section
        return function

    return register


def template(name, section):
    """Declare `carbon::<name>` as one of our own kernels."""
    op = getattr(torch.ops.carbon, name).default
    TEMPLATES[op] = Rule("template", section)
    return op


def kernels(section):
    """A function (schema, implementation, fake) that defines an operator of carbon's own, `carbon::<name of the
    schema>`, and declares it as a kernel of this section of the contract."""
    from .pointwise import LIBRARY

    def define(schema, implementation, fake):
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
        LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"carbon::{name}", fake, lib=LIBRARY)
        return template(name, section)

    return define


# Operations that compiled code calls by their attribute `direct`.
DIRECT = []


def direct(overload, implementation):
    """Give `overload` the attribute `direct`, which does the same without the dispatcher wherever that
    has nothing to do but to call `implementation`: for a small kernel its way there and back is the
    larger part of the host's time. Compiled code calls it from then on."""
    from carbon_compile import host

    watched = host.watched

    def call(*args, **kwargs):
        if args[0].is_cuda and not watched():
            return implementation(*args, **kwargs)
        return overload(*args, **kwargs)

    overload.direct = call
    DIRECT.append(overload)
    return overload


def call_kernels_directly():
    """Before a graph is lowered; again has no effect."""
    from carbon_compile import host

    for overload in DIRECT:
        host.call_directly(overload, f"torch.ops.{overload._schema.name.replace('::', '.')}.default.direct")


_loaded = False


def load():
    """Import every rule file once and return the table of ATen rules."""
    global _loaded
    if not _loaded:
        for module in MODULES:
            importlib.import_module(f"{__package__}.{module}")
        _loaded = True
    return RULES


def coverage():
    """The verdict of every ATen operator; see `lowering/coverage.py`."""
    from .coverage import coverage as rows

    return rows()
