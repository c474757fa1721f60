"""Quantisation kernels in Triton's interpreter against the twin, in tiles that small operands fill.

    TRITON_INTERPRET=1 python -m tests.quantize_checks
"""

import itertools

import torch

from carbon_compile.templates import launch, quantize
from carbon_compile.templates.launch import Tile
from tests import interpreter

interpreter.patch()

from carbon_compile.templates import quantize_kernels as kernels  # noqa: E402
from carbon_compile.templates.matmul_recipe import WORK, A, B, Recipe, view  # noqa: E402

SMALL = {  # several blocks, spans and steps of operands about 20 by 50
    "TOKENS_TILE": Tile(16, 8, 4),
    "exponents_tile": lambda rows, side_by_side: Tile(16, 8, 4, 3) if side_by_side else Tile(8, 16, 4, 2),
    "digits_tile": lambda side_by_side: Tile(16, 32, 4) if side_by_side else Tile(8, 64, 4),
    "maxima_tile": lambda k, side_by_side: Tile(16, 16, 4, 3),
    "rows_tile": lambda rows, k, side_by_side, warps: Tile(16, 16, 4) if side_by_side else Tile(8, 32, 4),
}  # fmt: skip
CHUNKS = set()  # that were read
KINDS = ("mild", "zeros", "poison", "subnormal", "far", "faint")


def operands(kind: str, m: int, n: int, k: int, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    a = torch.randn(m, k, generator=g) * torch.exp2(torch.randint(-6, 7, (m, k), generator=g))
    b = torch.randn(k, n, generator=g) * torch.exp2(torch.randint(-6, 7, (k, 1), generator=g))
    if kind != "mild":
        a[3], b[:, 5] = 0, 0
        a[:, 7], b[11], b[21], a[:, 21] = 0, 0, 0, 0
    if kind == "poison":
        a[4, 8], a[5, 2], b[k - 1, 3], b[13, 0] = torch.inf, torch.nan, -torch.inf, torch.nan
    elif kind == "subnormal":
        a[6], b[:, 4], b[9], a[:, 9] = a[6] * 1e-42, b[:, 4] * 1e-41, b[9] * 1e-42, a[:, 9] * 1e-41
    elif kind == "far":  # balances beyond +-126, and exponents at both ends
        a[:, 12], b[12], a[:, 13], b[13] = 1.5 * 2.0**127, 2.0**-149, 2.0**-149, 1.7e38
        a[:, 11] = 3e38
    elif kind == "faint":  # rows that a balance alone takes out of, or back into, the quick way
        a *= 2.0**-100
        b[:30] *= 2.0**60
        b[30:] *= 2.0**-60
    return a.to(dtype), b.to(dtype)


def padded(x, poison: float):
    """x [M, N], in rows that lie a multiple of 16 elements apart, with `poison` in between."""
    room = x.new_full((x.shape[0], (x.shape[1] // 16 + 1) * 16), poison)
    room[:, : x.shape[1]] = x
    return room[:, : x.shape[1]]


def laid_out(a, b, layout: int):
    """Contraction indices neighbours in neither, one or both; in rows aligned or not, or padded."""
    if layout & 8:
        a = padded(a.t(), torch.nan).t() if layout & 1 else padded(a, torch.inf)
        b = padded(b, torch.nan) if not layout & 2 else padded(b.t(), -torch.inf).t()
        return a, b
    if layout & 1:
        a = a.t().contiguous().t()
    if layout & 2:
        b = b.t().contiguous().t()
    if layout & 4:
        a, b = torch.nn.functional.pad(a, (0, 3))[:, : a.shape[1]], torch.nn.functional.pad(b, (0, 5))[:, : b.shape[1]]
    return a, b


def twins(a, b, window: int, balance: str):
    """The integers of both, rows first, and their exponents."""
    if balance == "keys":
        d = quantize.key_exponents(b)
        qa, qb = quantize.quantize(quantize.fold_keys(a, d), window, -1), quantize.quantize_keys(b, window, d)
    else:
        d = {"weight": quantize.weight_balance(b), "gradient": quantize.gradient_balance(a, b)}.get(balance)
        qa = quantize.quantize(a, window, -1, d)
        qb = quantize.quantize(b, window, -2, None if d is None else -d)
    return (qa.q, qa.exponents), (qb.q.mT, qb.exponents)


def check(a, b, window: int, balance: str) -> bool:
    recipe = Recipe()
    left, columns = kernels.operand(a, A, -1), kernels.operand(b, B, -2)
    transposed = kernels.operand(b, B, -1) if balance in ("weight", "keys") else None
    got = kernels.quantize(recipe, left, columns, window, balance, transposed)
    buffers = (a, b, None, None, *recipe.scratch("cpu"))
    twin = twins(a, b, window, balance)
    if buffers[WORK] is not None:
        buffers[WORK].fill_(0x5A)  # whoever reads what nobody wrote is found out
    recipe.run(buffers)
    chunks = [launched.constants[name] for launched in recipe.launches for name in ("A_CHUNK", "B_CHUNK") if name in launched.constants]
    CHUNKS.update(chunks)
    for digits, (q, exponents) in zip(got, twin, strict=True):
        planes = view(buffers, digits.digits).view(-1, digits.all_rows, digits.padded)
        real = exponents != quantize.POISON  # nobody looks at the digits of others
        k = q.shape[-1]
        if not torch.equal(view(buffers, digits.exponents), exponents):
            return False
        if not torch.equal(planes[:, real, :k], quantize.digits(q[real].contiguous(), window)) or planes[:, real, k:].any():
            return False
    return True


def cases():
    """Every kind with every balance; layouts, types, windows and sizes by turns, which share no factor."""
    sizes, layouts = itertools.cycle([(21, 9, 50), (16, 18, 48), (9, 17, 67)]), itertools.cycle((*range(8), *range(8, 12), *range(8, 12)))
    types = itertools.cycle([(torch.float32, 24), (torch.bfloat16, 16), (torch.float32, 16), (torch.bfloat16, 24), (torch.float16, 24)])
    for balance, kind in itertools.product(("gradient", "none", "weight", "gradient", "keys") * 2, KINDS):
        size, layout, (dtype, window) = next(sizes), next(layouts), next(types)
        if kind == "subnormal" and dtype == torch.bfloat16:
            dtype = torch.float32  # the interpreter misreads subnormal bfloat16
        yield kind, balance, size, layout, dtype, window


def failures() -> list:
    wrong, count = [], 0
    for name, value in SMALL.items():
        setattr(launch, name, value)
    for case in cases():
        kind, balance, (m, n, k), layout, dtype, window = case
        a, b = laid_out(*operands(kind, m, n, k, dtype), layout)
        count += 1
        if not check(a, b, window, balance):
            wrong.append(case)
    assert CHUNKS == {0, 4, -4, 8, -8}
    print(count, "equal" if not wrong else wrong)
    return wrong


if __name__ == "__main__":
    failures()
