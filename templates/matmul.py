"""Matrix products as exact integer sums (contract section 4).

Computes       C_ij = RN(T_ij) * 2^(sa_i + sb_j), T_ij = sum_k qa_ik qb_kj, q from `quantize`
Order          none: T is an exact integer, any engine and any schedule gives it
Invariant to   M, N, batch folding, strides, tiles, split-K, threads, device
Rounds at      q (to the window), T to binary32, the scaled result where it is subnormal, the sum
               with the bias, the output type
Refuses        operand types other than float32, bfloat16 and float16

`exact_mm` and `exact_bmm` run the CPU twin below, ordinary float64 BLAS on the integers, or the
kernels in `matmul_kernels`. K = 1 is the IEEE product. Every NaN returned is the canonical one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor

import torch
from torch import Tensor

from carbon_compile.templates import launch
from carbon_compile.templates import quantize as twin
from carbon_compile.templates.quantize import DIGITS, POISON, powers_of_two

OPERANDS = (torch.float32, torch.bfloat16, torch.float16)
BALANCES = ("none", "weight", "gradient")
BATCHED_BALANCES = ("none", "keys")

# Contraction lengths one float64 (X3: one factor cut into 12-bit halves) or one int64 can hold:
# K 2^15 2^15 and K 2^11 2^23 stay within 2^53, K 2^23 2^23 within 2^63.
_SPAN = {16: 1 << 23, 24: 1 << 17}
_ONE_PIECE = 1 << 7  # up to here X3 needs no cut: K 2^23 2^23 stays within 2^53
_BLOCK = 1 << 18  # float64 elements the CPU twin works on at a time


def exact_mm(
    a: Tensor,
    b: Tensor,
    *,
    window: int,
    balance: str = "none",
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    engine: str = "int8",
    transposed: bool = False,
    row: int = 0,
) -> Tensor:
    """The exact product of a [M, K] and b [K, N], any strides: [M, N] in `out_dtype`.

    `window` is 16 (X2) or 24 (X3). `balance` is "none"; "weight", when b is a weight; or
    "gradient", when a is A^T [features, tokens] and b is dC [tokens, N] of a weight's gradient.
    `bias` broadcasts to [M, N] and is added in binary32 before the one rounding to `out_dtype`.
    `engine` ("int8" or "bf16" tensor cores) cannot change a bit; CPU has one engine. The result is
    contiguous, or if `transposed` the transpose of a contiguous [N, M], or its rows lie `row` >= N
    elements apart, with anything in between.

    Raises TypeError for other operand types and ValueError for shapes that do not match.
    """
    if row and (transposed or row < b.shape[-1]):
        raise ValueError(f"rows of {b.shape[-1]} elements cannot lie {row} apart{', transposed' * transposed}")
    return _product(a, b, 2, BALANCES, window, balance, bias, out_dtype, engine, transposed, row=row)


def exact_bmm(
    a: Tensor,
    b: Tensor,
    *,
    window: int,
    balance: str = "none",
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    engine: str = "int8",
    causal: int = 0,
) -> Tensor:
    """The exact product of a [B, M, K] and b [B, K, N], any strides (0 too): [B, M, N].

    As `exact_mm`; an operand expanded over the batch is quantised once. `balance` is "none" or
    "keys" (contract section 5): b is quantised by its rows k, whose exponents are folded into a, so
    that row i of the result depends on no b[k] with a[i, k] = 0; K = 1 is no exception to it.

    `causal` is for products of attention [queries, keys] in which query l sees no key beyond l: L > 0
    where rows are queries (in groups of L, so that query r is r modulo L), -L where rows are keys.
    Without a balance, elements of the result beyond are +0, whatever the operands hold; there may be
    no bias. With "keys" it is the first operand, [queries, keys] or [keys, queries], of which the
    caller promises that nothing but zeros is beyond, or NaN in queries whose element of key 0 is NaN
    or -0; what is promised need not be read, and no bit depends on it.
    """
    return _product(a, b, 3, BATCHED_BALANCES, window, balance, bias, out_dtype, engine, causal=causal)


def beyond(rows: int, columns: int, causal: int, device=None) -> Tensor:
    """Which elements of [rows, columns] are beyond: bool; `causal` as of `exact_bmm`."""
    r = torch.arange(rows, device=device).unsqueeze(1)
    c = torch.arange(columns, device=device)
    return c > r % causal if causal > 0 else r > c % -causal


def precompilation(
    products: Iterable[tuple[Tensor, Tensor, dict]], device: torch.device, processes: Executor | None = None,
    plans: str | None = None, others: Iterable[Callable[[], tuple]] = (),
) -> Callable[[], None]:  # fmt: skip
    """A function, to call in any thread, that compiles what later products on a CUDA `device` launch,
    in a pool of processes if there is one.

    `products` are (a, b, options), the options those of `exact_mm` or `exact_bmm`. Only sizes,
    strides and types of tensors are read, and only here: meta tensors do. With a folder `plans`
    products without a plan in it are timed here, and the fastest plan of each is kept there. `others`
    make recipes of more kernels, with the types of their buffers.
    """
    from carbon_compile.templates import matmul_kernels

    products, others = list(products), list(others)

    def made():
        return [*_recipes(products, device), *(make() for make in others)]

    recipes = made()
    if plans:
        from carbon_compile.templates import tuning

        tuning.tune([tuning.Product(*recipe.product) for recipe, _ in recipes if recipe.product], device, plans)
        recipes = made()
    return lambda: matmul_kernels.precompile(recipes, device, processes)


def _recipes(products, device):
    """The recipe of each product that has one, with the types of its buffers."""
    from carbon_compile.templates import matmul_kernels

    for a, b, options in products:
        shape = (*a.shape[:-1], b.shape[-1])
        bias, engine = options.get("bias"), options.get("engine", "int8")
        if not math.prod(shape) or a.shape[-1] <= 1:
            continue
        recipe = matmul_kernels.prepare(
            a, b, options["window"], options.get("balance", "none"),
            None if bias is None else bias.expand(shape), engine,
            options.get("transposed", False), device=device, causal=options.get("causal", 0), row=options.get("row", 0),
        )  # fmt: skip
        yield recipe, (a.dtype, b.dtype, None if bias is None else bias.dtype, options.get("out_dtype", torch.float32))


def describe(
    m: int, n: int, k: int, *, window: int, batch: int = 1, device=None, weight: Tensor | None = None,
    keys: Tensor | None = None,
) -> dict:  # fmt: skip
    """What would run: {"engine", "tile", "split_k", "warps", "stages", "schedule"}.

    `weight` is the second operand, where the balance is "weight", `keys` the first, where it is "keys";
    only strides and types are read.
    """
    if device is None or torch.device(device).type != "cuda":
        return {"engine": "float64 BLAS", "tile": None, "split_k": 1, "warps": None, "stages": None}
    hardware = launch.hardware(device)
    if keys is not None and (plan := launch.keys_plan(m, n, k, window, hardware, side_by_side=keys.stride(-1) == 1)) is not None:
        return plan.describe()
    itemsize = 0 if weight is None else launch.streamable(weight)
    return launch.gemm_plan(m, n, k, window, batch, hardware, weight=itemsize).describe()


def _product(
    a, b, dim, balances, window, balance, bias, out_dtype, engine, transposed=False, causal=0, row=0
) -> Tensor:
    signature = None
    if a.is_cuda:
        # What was checked and prepared once is replayed: this is all the Python of a product.
        signature = _signature(a, b, window, balance, bias, out_dtype, engine, transposed, causal, row)
        prepared = launch.prepared.get(signature)
        if prepared is not None:
            out = prepared(a, b, bias)
            if out is not None:
                return out
    _check(a, b, dim, window)
    if balance not in balances:
        raise ValueError(f"balance must be one of {balances}, got {balance!r}")
    if causal and balance == "none" and bias is not None:
        raise ValueError("a causal product takes no bias")
    return _dispatch(a, b, window, balance, bias, out_dtype, engine, transposed, causal, row, signature)


def _signature(a, b, window, balance, bias, out_dtype, engine, transposed=False, causal=0, row=0) -> tuple:
    """All that the launches of a product depend on: also the alignment of addresses, for which
    kernels are specialised."""
    key = (
        a.shape, a.stride(), a.dtype, a.data_ptr() & 15, a.get_device(),
        b.shape, b.stride(), b.dtype, b.data_ptr() & 15, b.get_device(),
        window, balance, out_dtype, engine, transposed, causal, row,
    )  # fmt: skip
    if bias is None:
        return key
    return *key, bias.shape, bias.stride(), bias.dtype, bias.data_ptr() & 15, bias.get_device()


def _check(a: Tensor, b: Tensor, dim: int, window: int) -> None:
    if window not in DIGITS:
        raise ValueError(f"window must be one of {tuple(DIGITS)}, got {window}")
    for operand in (a, b):
        if operand.dtype not in OPERANDS:
            raise TypeError(f"exact products take {OPERANDS}, got {operand.dtype}")
    if (
        a.dim() != dim
        or b.dim() != dim
        or a.shape[-1] != b.shape[-2]
        or a.shape[:-2] != b.shape[:-2]
    ):
        raise ValueError(f"cannot multiply {tuple(a.shape)} and {tuple(b.shape)}")


def _dispatch(a, b, window, balance, bias, out_dtype, engine, transposed, causal, row, signature) -> Tensor:
    shape = (*a.shape[:-1], b.shape[-1])
    k = a.shape[-1]
    if bias is not None:
        bias = bias.expand(shape)
    if math.prod(shape) == 0:
        return empty(a, b, out_dtype, transposed, row)
    if k == 0 or k == 1 and balance != "keys":
        product = a.float() * b.float() if k else a.new_zeros(shape, dtype=torch.float32)
        product = _zero_beyond(_finish(product, bias, out_dtype, nans=True), causal)
        return empty(a, b, out_dtype, transposed, row).copy_(product) if transposed or row else product
    if a.is_cuda:
        from carbon_compile.templates import matmul_kernels

        with torch.cuda.device_of(a):  # Triton launches on the current device
            return matmul_kernels.multiply(
                a, b, window, balance, bias, out_dtype, engine, transposed, signature=signature, causal=causal, row=row
            )
    product = _multiply(a, b, window, balance, bias, out_dtype, transposed, row)
    return product if balance == "keys" else _zero_beyond(product, causal)


def _zero_beyond(product: Tensor, causal: int) -> Tensor:
    """`product` [B, M, N], overwritten, with +0 where a causal product has it."""
    return product.masked_fill_(beyond(*product.shape[1:], causal, product.device), 0.0) if causal else product


def _multiply(a, b, window, balance, bias, out_dtype, transposed, row) -> Tensor:
    """The CPU twin, a block of rows at a time so that what is in between stays in cache."""
    d = None
    if balance == "weight":
        d = twin.weight_balance(b)
    elif balance == "gradient":
        d = twin.gradient_balance(a, b)
    elif balance == "keys":
        d = twin.key_exponents(b)
    qb = twin.quantize_keys(b, window, d) if balance == "keys" else _quantize_once(b, window, d)
    out = empty(a, b, out_dtype, transposed, row)
    for rows in _row_blocks(a, b):
        if balance == "keys":
            qa = twin.quantize(twin.fold_keys(a[rows], d[rows[0]]), window, -1, owned=True)
        else:
            qa = twin.quantize(a[rows], window, -1, d)
        columns = twin.Quantized(qb.q[rows[:-1]], qb.exponents[rows[:-1]])
        rounded = rounded_total(qa.q, columns.q, window)
        scaled, poisoned = _scale(rounded, qa.exponents, columns.exponents)
        block_bias = None if bias is None else bias[rows]
        out[rows] = _finish(scaled, block_bias, out_dtype, nans=poisoned)
    return out


def empty(a: Tensor, b: Tensor, dtype: torch.dtype, transposed: bool, row: int = 0) -> Tensor:
    """Room for the product: contiguous, or the transpose of what is, or in whole rows of `row` elements."""
    shape = (*a.shape[:-1], b.shape[-1])
    if row:
        return torch.empty((shape[0], row), dtype=dtype, device=a.device)[:, : shape[1]]
    if not transposed:
        return torch.empty(shape, dtype=dtype, device=a.device)
    return torch.empty_strided(shape, (1, shape[0]), dtype=dtype, device=a.device)


def _row_blocks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, ...]]:
    """Index tuples that cut [M, K] into blocks of rows, [B, M, K] into groups of batches."""
    area = max(a.shape[-1], b.shape[-1])
    if a.dim() == 3:
        step = max(1, _BLOCK // (area * a.shape[1]))
        yield from ((slice(i, i + step), slice(None)) for i in range(0, a.shape[0], step))
    else:
        step = max(256, _BLOCK // area)
        yield from ((slice(i, i + step),) for i in range(0, a.shape[0], step))


def _quantize_once(b: Tensor, window: int, d: Tensor | None) -> twin.Quantized:
    """The second operand by columns; one copy if it is expanded over the batch."""
    minus = None if d is None else -d
    if b.dim() == 3 and b.stride(0) == 0:
        one = twin.quantize(b[:1], window, -2, minus)
        return twin.Quantized(one.q.expand(b.shape), one.exponents.expand(b.shape[0], b.shape[-1]))
    return twin.quantize(b, window, -2, minus)


def rounded_total(qa: Tensor, qb: Tensor, window: int) -> Tensor:
    """RN(T), float32, for integers in float64: qa [..., M, K], qb [..., K, N]."""
    k, span = qa.shape[-1], _SPAN[window]
    if k <= span:
        total = _total(qa, qb, window)
        return total.float()
    high = low = 0
    for start in range(0, k, span):
        n = min(span, k - start)
        part = _total(qa.narrow(-1, start, n), qb.narrow(-2, start, n), window).to(torch.int64)
        high = high + (part >> 32)
        low = low + (part & 0xFFFFFFFF)
    return round_two_words(high, low)


def _total(qa: Tensor, qb: Tensor, window: int) -> Tensor:
    """T within one span, exact: float64 where every partial sum fits it, int64 otherwise."""
    if window == 16 or qa.shape[-1] <= _ONE_PIECE:
        return qa @ qb
    # 24 x 24 bits times K do not fit a float64: cut one factor into 12-bit halves.
    high = (qa * 2.0**-12).round_()
    low = torch.add(qa, high, alpha=-4096.0)
    return (high @ qb).to(torch.int64).mul_(4096).add_((low @ qb).to(torch.int64))


def round_two_words(high: Tensor, low: Tensor) -> Tensor:
    """RN(high 2^32 + low) of int64 words, low >= 0: float32, correctly rounded."""
    high = high + (low >> 32)
    low = low & 0xFFFFFFFF
    one_word = (high >= -(1 << 30)) & (high < 1 << 30)
    small = torch.where(one_word, (high << 32) | low, 0).float()
    # At least 31 bits are left in `high`; a sticky last bit rounds as the dropped word would.
    large = (high | (low != 0)).float() * 4294967296.0
    return torch.where(one_word, small, large)


def _scale(rounded: Tensor, sa: Tensor, sb: Tensor) -> tuple[Tensor, bool]:
    """(RN(T) 2^h) 2^(k-h), k = sa + sb clamped to +-250, and whether there is a poisoned row.

    Written as one exact float64 product and one rounding, which is the same: the first of the two
    steps is inexact only where the result overflows anyway, and outside +-250 it is 0 or infinite.
    """
    scales, poisoned = [], False
    for s in (sa, sb):
        bad = s == POISON
        scale = powers_of_two(s.masked_fill(bad, 0))
        if bad.any():
            scale.masked_fill_(bad, math.nan)
            poisoned = True
        scales.append(scale)
    product = rounded.double().mul_(scales[0].unsqueeze(-1)).mul_(scales[1].unsqueeze(-2))
    return product.float(), poisoned


def _finish(product: Tensor, bias: Tensor | None, out_dtype: torch.dtype, nans: bool) -> Tensor:
    """Add the bias in binary32, round once to `out_dtype`, give NaN its one pattern."""
    if bias is not None:
        product = product + bias.float()
    out = product.to(out_dtype)
    if nans or bias is not None:
        out = torch.nan_to_num_(out, nan=math.nan, posinf=math.inf, neginf=-math.inf)
    return out
