"""Sums, softmax, norms and cross-entropy: eager, Inductor and carbon, forward alone and with backward.

Cross-entropy keeps a loss a row, so that the kernel that is timed can be checked on some of its rows.
Bytes are those that have to be moved: forward reads x and writes y, the backward pass reads x and dy
and writes dx; what is smaller than x by a whole dimension is not counted.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import carbon_compile
from bench.bits import assert_equal, twice
from bench.contenders import FUNCTIONS, engines, peers
from bench.registry import Case, Contender, Cost, Prepared, Work

_CPU_DIVISORS = 256, 16  # of rows and columns
_CHECKED = 1 << 18  # elements of a slice compared with the definition; all of them where weights have gradients


def row_sum(x):
    return x.sum(1)


def column_sum(x):
    return x.sum(0)


def softmax(x):
    return F.softmax(x, -1)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-6)


def cross_entropy(x, target):
    return F.cross_entropy(x, target, reduction="none")


@dataclass(frozen=True)
class Operation:
    """A function of x [rows, columns] and smaller operands.

    `passes` counts how often forward reads or writes a tensor of x's size, and `backward_passes` how
    often backward does. `axis` is the dimension of x along which results are independent.
    """

    function: Callable
    shapes: tuple[tuple[int, int], ...]
    passes: int
    backward_passes: int = 0  # 0 where only forward is measured
    axis: int = 0

    @property
    def name(self):
        return self.function.__name__.replace("_", "-")


_WIDE, _SQUARE, _FEED, _VOCABULARY = (16384, 768), (4096, 4096), (16384, 3072), (8192, 50257)
OPERATIONS = (
    Operation(row_sum, (_FEED, _SQUARE), 1),
    Operation(column_sum, (_FEED, _SQUARE), 1, axis=1),
    Operation(softmax, (_SQUARE, _FEED), 2),
    Operation(layer_norm, (_WIDE, _SQUARE), 2, 3),
    Operation(rms_norm, (_WIDE, _SQUARE), 2, 3),
    Operation(cross_entropy, (_VOCABULARY,), 1, 2),
)


def cases(device: str) -> list[Case]:
    """A case for each operation, direction, shape and type."""
    divisors = (1, 1) if device == "cuda" else _CPU_DIVISORS
    found = []
    for operation in OPERATIONS:
        for shape in operation.shapes:
            shape = tuple(max(1, n // divisor) for n, divisor in zip(shape, divisors, strict=True))
            for backward in (False, True) if operation.backward_passes else (False,):
                name = f"{operation.name}+backward" if backward else operation.name
                for dtype in ("float32", "bfloat16"):
                    prepare = functools.partial(_prepare, operation, shape, dtype, backward, device)
                    found.append(Case("reductions", name, "x".join(map(str, shape)), dtype, prepare))
    return found


def inputs(operation: Operation, shape: tuple[int, int], dtype: torch.dtype, backward: bool, device: str):
    """((x, other operands), incoming gradient or None); drawn on the device, the same every time."""
    rows, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *size: torch.randn(*size, generator=generator, device=device).to(dtype)  # noqa: E731
    x = normal(rows, columns)
    if operation.function is cross_entropy:
        operands = (x, torch.randint(0, columns, (rows,), generator=generator, device=device))
        incoming = normal(rows)
    else:
        small = {layer_norm: 2, rms_norm: 1}.get(operation.function, 0)
        operands = (x, *(normal(columns) for _ in range(small)))
        incoming = normal(rows, columns)
    if backward:
        operands = tuple(t.requires_grad_() if t.is_floating_point() else t for t in operands)
    return operands, incoming if backward else None


def run(function: Callable, operands: tuple, incoming: torch.Tensor | None) -> tuple:
    """(y,) or, with an incoming gradient, (y, gradients of the floating-point operands)."""
    y = function(*operands)
    if incoming is None:
        return (y,)
    return (y.detach(), *torch.autograd.grad(y, [t for t in operands if t.requires_grad], incoming))


def _prepare(operation, shape, dtype, backward, device):
    operands, incoming = inputs(operation, shape, getattr(torch, dtype), backward, device)
    contenders = []
    for name in FUNCTIONS:
        engine = engines()[name]
        function = engine.compiled(operation.function, fullgraph=True)
        call = engine.running(functools.partial(run, function, operands, incoming))
        contenders.append(Contender(name, lambda call=call: call))
        if name == "carbon":
            carbon = contenders[-1]
    others, absent = peers(operation.name, device, operands, backward)
    passes = operation.passes + (operation.backward_passes if backward else 0)
    cost = Cost(passes * operands[0].numel() * operands[0].element_size(), "B")
    check = functools.partial(_check, operation, operands, incoming, carbon)
    return Prepared((Work("", (*contenders, *others), cost),), check, tuple(absent))


def _check(operation, operands, incoming, carbon, names):
    got = twice(carbon)
    available = operands[0].shape[operation.axis]
    n = min(available, max(1, _CHECKED // operands[0].shape[1 - operation.axis]))
    if len(got) > 2:
        n = available  # gradients of weights are sums over all rows: a part of them says nothing
    reference = _definition(operation, operands, incoming, n)
    ours = got if n == available else [t[:n] for t in got]
    assert_equal(ours, reference, "device and CPU definition")
    return f"{n} {'columns' if operation.axis else 'rows'} as the CPU's definition, two runs alike"


def _definition(operation, operands, incoming, n):
    """The first n rows (or columns) by carbon's rules, one operation after another, on the CPU."""
    x, *others = operands
    part = (x.narrow(operation.axis, 0, n), *(t if t.is_floating_point() else t[:n] for t in others))
    part = tuple(t.detach().cpu().requires_grad_(t.requires_grad) for t in part)
    with carbon_compile.enable(seed=None):
        return run(operation.function, part, None if incoming is None else incoming[:n].cpu())
