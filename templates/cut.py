"""Matrix products cut over ranks (contract sections 4 and 8): the bits of the uncut product.

Each rank holds a slice of A [M, K], of B [K, N], or of both. What the definition takes as a maximum
over the whole (a balance over all of a row, an exponent over all of a contraction) is exchanged
first, as integers; then, if the contraction is cut, the exact totals T are added; then every rank
rounds. So no degree and no way of cutting changes a bit.

Computes       C_ij = RN(T_ij) 2^(sa_i + sb_j), T_ij = sum over ranks of sum_k qa_ik qb_kj
Exchanges      balances (where rows of A or columns of B are cut), row and column exponents and T
               (where the contraction is cut)
Order          none: maxima and integer sums
Engine         ordinary float64 BLAS on the integers, on a CPU and on a GPU alike

An exchange is a function from a rank's integers to those of all; `None` stands for a dimension that
is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from carbon_compile.templates import matmul
from carbon_compile.templates import quantize as twin
from carbon_compile.templates.quantize import EMPTY, POISON

UNKNOWN = 1 << 62  # a contraction whose whole length no rank knows: totals take two words


class Exchanges(NamedTuple):
    """What ranks tell each other, by the dimension that is cut.

    rows, columns, contraction: elementwise maximum of int32 over the ranks that cut M, N or K.
    total: elementwise sum of int64 over the ranks that cut K, either whole or scattered over rows.
    own_rows: the rows of a vector [M] that `total` leaves on this rank.
    """

    rows: Callable[[Tensor], Tensor] | None = None
    columns: Callable[[Tensor], Tensor] | None = None
    contraction: Callable[[Tensor], Tensor] | None = None
    total: Callable[[Tensor], Tensor] | None = None
    own_rows: Callable[[Tensor], Tensor] | None = None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, window: int, balance: str, out_dtype: torch.dtype, k: int, exchanges: Exchanges) -> Tensor:
    """This rank's part of the exact product, [M, N], or its rows where `total` scatters them.

    a [M, K] and b [K, N] are this rank's slices; k is the length of the whole contraction. balance
    is "weight" or "gradient", as in `exact_mm`. Raises ValueError where a rank has no part of a cut
    contraction: the rule for K = 1 could not be told from the others then.
    """
    if exchanges.contraction is not None and a.shape[1] == 0:
        raise ValueError("a rank holds no part of the contraction; use fewer ranks than its length")
    if exchanges.contraction is None and k <= 1:
        return matmul.exact_mm(a, b, window=window, bias=bias, out_dtype=out_dtype)
    d = _balance(a, b, balance, exchanges)
    qa = _quantize(a, window, 1, d, exchanges.contraction)
    qb = _quantize(b, window, 0, -d, exchanges.contraction)
    rounded = _rounded_total(qa.q, qb.q, window, k, exchanges.total)
    rows = qa.exponents if exchanges.own_rows is None else exchanges.own_rows(qa.exponents)
    scaled, poisoned = matmul._scale(rounded, rows, qb.exponents)
    return matmul._finish(scaled, bias, out_dtype, nans=poisoned)


def _largest(x: Tensor, dim: int) -> Tensor:
    """expo(max |x|) along `dim`, int32; EMPTY where there is nothing, which no maximum prefers."""
    if x.shape[dim] == 0:
        return torch.full((x.shape[1 - dim],), EMPTY, dtype=torch.int32, device=x.device)
    return twin.exponents(twin.maxima(x, dim))


def _balance(a: Tensor, b: Tensor, balance: str, exchanges: Exchanges) -> Tensor:
    """`weight_balance` or `gradient_balance` of the uncut operands: int32 [K]."""
    eb = _exchanged(_largest(b, 1), exchanges.columns)
    if balance == "weight":
        return eb.masked_fill(eb == EMPTY, 0)
    ea = _exchanged(_largest(a, 0), exchanges.rows)
    return twin.between(ea, eb)


def _exchanged(e: Tensor, exchange) -> Tensor:
    return e if exchange is None else exchange(e)


def _quantize(x: Tensor, window: int, dim: int, d: Tensor, exchange) -> twin.Quantized:
    """`twin.quantize`, its row maxima taken over all ranks."""
    q = x.to(torch.float64, copy=True)
    q.mul_(twin.powers_of_two(d).unsqueeze(1 - dim))
    largest = twin.maxima(q, dim)
    e = twin.exponents(largest, twin.BEXPO_BUMP).masked_fill_(~largest.isfinite(), POISON)
    e = _exchanged(e, exchange)
    empty, poisoned = e == EMPTY, e == POISON
    e = (e - (window - 1)).masked_fill_(empty | poisoned, 0)
    q.mul_(twin.powers_of_two(-e).unsqueeze(dim)).round_()
    q.masked_fill_(poisoned.unsqueeze(dim), 0)
    return twin.Quantized(q, e.masked_fill_(poisoned, POISON))


def _rounded_total(qa: Tensor, qb: Tensor, window: int, k: int, exchange) -> Tensor:
    """RN(T) of the whole contraction, float32."""
    if exchange is None:
        return matmul.rounded_total(qa, qb, window)
    span = matmul._SPAN[window]
    if k <= span or window == 16 and k == UNKNOWN:
        return exchange(matmul._total(qa, qb, window).to(torch.int64)).float()
    high = low = 0
    for start in range(0, qa.shape[1], span):
        n = min(span, qa.shape[1] - start)
        part = matmul._total(qa.narrow(1, start, n), qb.narrow(0, start, n), window).to(torch.int64)
        high = high + (part >> 32)
        low = low + (part & 0xFFFFFFFF)
    return matmul.round_two_words(exchange(high), exchange(low))
