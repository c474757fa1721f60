"""Matrix products: X3 of float32 and X2 of bfloat16 (X3 over long contractions), quantisation and balance included, against cuBLAS.

The shapes are those of `bench.gemm`, which also takes a product apart. "eager" is cuBLAS, in float32
without TF32. The check compares what is timed: its first rows, or first two matrices, with the CPU twin.
"""

import functools

import torch

from bench import gemm
from bench.bits import equal_bits, twice
from bench.contenders import peers
from bench.registry import Case, Contender, Cost, Prepared, Work
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import policy
from carbon_compile.templates import kept as kept_weights
from carbon_compile.templates import matmul

WINDOWS = {"float32": 24, "bfloat16": 16}
_CPU_DIVISOR = 32
_ROWS = 96
_FEW_ROWS = 64


def cases(device: str) -> list[Case]:
    """A case for each shape and type."""
    found = []
    for label, shape in gemm.SHAPES.items():
        shape = _scaled(shape, 1 if device == "cuda" else _CPU_DIVISOR)
        for dtype in WINDOWS:
            prepare = functools.partial(_prepare, shape, dtype, device)
            found.append(Case("products", _operation(label), _dims(shape), dtype, prepare))
    return found


def _operation(label):
    words = [word for word in label.split() if not word[0].isdigit()]
    return "-".join(words) or "square"


def _scaled(shape, divisor):
    """(m, n, k, balance or batch, layouts) with every large size divided."""
    small = lambda n: n if n <= 64 else max(16, n // divisor)  # noqa: E731
    m, n, k, balance, layouts = shape
    return small(m), small(n), small(k), min(balance, 4) if isinstance(balance, int) and divisor > 1 else balance, layouts


def _dims(shape):
    m, n, k, balance, _ = shape
    return "x".join(map(str, ([balance] if isinstance(balance, int) else []) + [m, n, k]))


def _prepare(shape, dtype, device):
    a, b, batch, balance = gemm.inputs(shape, getattr(torch, dtype), device)
    window, dtype = policy.window_for(WINDOWS[dtype], balance, shape[2]), a.dtype
    if batch:
        exact = functools.partial(matmul.exact_bmm, a, b, window=window, out_dtype=dtype)
    else:
        exact = functools.partial(matmul.exact_mm, a, b, window=window, balance=balance, out_dtype=dtype)
    carbon = Contender("carbon", lambda: exact)
    others, absent = peers("product", device, (a, b))
    m, n, k, *_ = shape
    flop = 2 * m * n * k * (batch or 1)
    cost = Cost(flop, "FLOP", int8=flop * (window // 8) ** 2)
    eager = Contender("eager", lambda: lambda: a @ b)
    works, check = [Work("", (eager, carbon, *others), cost)], functools.partial(_check, carbon, a, b, window, balance, batch)
    if balance == "weight" and m <= _FEW_ROWS:  # as decoding has them, where weights don't change
        kept = Contender("carbon", lambda: functools.partial(kept_weights.exact_mm_kept, a, kept_weights.weight_digits(b, window), n, window=window, out_dtype=dtype))
        works.append(Work("with kept digits", (eager, kept), cost))
        check = functools.partial(_check, carbon, a, b, window, balance, batch, kept=kept)
    return Prepared(tuple(works), check, tuple(absent))


def _check(carbon, a, b, window, balance, batch, names, kept=None):
    got = twice(carbon)
    if kept is not None:
        assert_bitwise(kept(), got, "kept and fresh digits")
    if batch:
        n = min(2, batch)
        reference = matmul.exact_bmm(a[:n].cpu(), b[:n].cpu(), window=window, out_dtype=a.dtype)
        compared = f"{n} matrices"
    else:
        n = min(_ROWS, a.shape[0])
        reference = gemm.twin_rows(a, b, window, balance, n).to(a.dtype)
        compared = f"{n} rows"
    if not equal_bits(got[:n].cpu(), reference):
        assert_bitwise(got[:n], reference, "device and CPU twin")
    return f"{compared} as the CPU twin, two runs alike"
