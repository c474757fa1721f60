"""Matrix products cut over ranks (contract sections 4 and 8): the bits of the uncut product.

Each rank holds a slice of A [M, K], of B [K, N], or of both. What the definition takes as a maximum
over the whole (a balance over all of a row, an exponent over all of a contraction) is exchanged
first, as integers; then, if the contraction is cut, the exact totals T are added; then every rank
rounds. So no degree and no way of cutting changes a bit.

Computes       C_ij = RN(T_ij) 2^(sa_i + sb_j), T_ij = sum over ranks of sum_k qa_ik qb_kj
Exchanges      largest magnitudes for the balance (where rows of A or columns of B are cut), largest
               exponents of rows and columns and T (where the contraction is cut)
Order          none: maxima and integer sums
Engine         on a GPU int8 tensor cores (`cut_kernels`), on a CPU float64 BLAS on the integers

Where the contraction is cut, each rank adds and rounds a share of the rows. What it needs for that are
the totals of its rows from all ranks, each in as many 16-bit words as its bound asks for: X2 takes 6
bytes an element up to 2^17 indices a rank, X3 takes 8.

An exchange is a function from a rank's integers to those of all; `None` stands for a dimension that
is whole on every rank. Ranks with either engine exchange the same integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from carbon_compile.templates import matmul
from carbon_compile.templates import quantize as twin
from carbon_compile.templates.quantize import EMPTY, POISON

UNKNOWN = 1 << 31  # a contraction whose whole length no rank knows: no rank's part is longer


class Exchanges(NamedTuple):
    """What ranks tell each other, by the dimension that is cut.

    rows, columns, contraction: elementwise maximum of int32 over the ranks that cut M, N or K.
    swap: of int16 [size, n], row r goes to rank r; what arrives, in the order of ranks.
    size, rank: of the group that cuts K.
    """

    rows: Callable[[Tensor], Tensor] | None = None
    columns: Callable[[Tensor], Tensor] | None = None
    contraction: Callable[[Tensor], Tensor] | None = None
    swap: Callable[[Tensor], Tensor] | None = None
    size: int = 1
    rank: int = 0


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, window: int, balance: str, out_dtype: torch.dtype, k: int, exchanges: Exchanges) -> Tensor:
    """This rank's part of the exact product: [M, N], or if the contraction is cut its share of the rows,
    [ceil(M / size), N], zeros behind the last row of all.

    a [M, K] and b [K, N] are this rank's slices; k is the length of the whole contraction. balance
    is "weight" or "gradient", as in `exact_mm`. Raises ValueError where a rank has no part of a cut
    contraction, as the rule for K = 1 could not be told from the others then, or more than its chunk.
    """
    if exchanges.contraction is None and k <= 1:
        return matmul.exact_mm(a, b, window=window, bias=bias, out_dtype=out_dtype)
    words = 0
    if exchanges.contraction is not None:
        longest = k if k == UNKNOWN else -(-k // exchanges.size)
        if not 0 < a.shape[1] <= longest:
            what = f"{a.shape[1]} of the {longest} indices of the contraction that it may hold" if a.shape[1] else "no part of the contraction"
            raise ValueError(f"a rank holds {what}; use as many ranks as have a chunk of ceil(K / ranks), and no more")
        words = words_of_total(window, longest)
    if a.is_cuda and a.numel() and b.numel():
        from carbon_compile.templates import cut_kernels

        return cut_kernels.multiply(a, b, bias, window, balance, out_dtype, words, exchanges)
    d = _balance(a, b, balance, exchanges)
    qa, qb = _quantize(a, b, window, d, exchanges.contraction)
    if exchanges.contraction is None:
        rounded, rows = matmul.rounded_total(qa.q, qb.q, window), qa.exponents
    else:
        rounded, rows = _exchanged_total(qa.q, qb.q, window, words, exchanges), _own_rows(qa.exponents, exchanges)
    scaled, poisoned = matmul._scale(rounded, rows, qb.exponents)
    return matmul._finish(scaled, bias, out_dtype, nans=poisoned)


def words_of_total(window: int, k: int) -> int:
    """How many 16-bit words hold a sum of k products: each is below 2^(2 window - 2), and there is a sign."""
    return -(-(2 * window - 2 + (k - 1).bit_length() + 1) // 16)


def _largest(x: Tensor, dim: int) -> Tensor:
    """The bits of max |x| along `dim`, int32; 0 where there is nothing."""
    if x.shape[dim] == 0:
        return x.new_zeros(x.shape[1 - dim], dtype=torch.int32)
    return twin.maxima(x, dim).float().abs().view(torch.int32)


def _balance(a: Tensor, b: Tensor, balance: str, exchanges: Exchanges) -> Tensor:
    """`weight_balance` or `gradient_balance` of the uncut operands: int32 [K]."""
    eb = _exponents(_exchanged(_largest(b, 1), exchanges.columns))
    if balance == "weight":
        return eb.masked_fill(eb == EMPTY, 0)
    return twin.between(_exponents(_exchanged(_largest(a, 0), exchanges.rows)), eb)


def _exponents(bits: Tensor) -> Tensor:
    return twin.exponents(bits.view(torch.float32).double())


def _exchanged(x: Tensor, exchange) -> Tensor:
    return x if exchange is None else exchange(x)


def _quantize(a: Tensor, b: Tensor, window: int, d: Tensor, exchange) -> tuple[twin.Quantized, twin.Quantized]:
    """`twin.quantize` of both operands, largest exponents taken over all ranks."""
    balanced = [x.to(torch.float64, copy=True).mul_(twin.powers_of_two(e).unsqueeze(1 - dim)) for x, dim, e in ((a, 1, d), (b, 0, -d))]
    found = torch.cat([_row_exponents(q, dim) for q, dim in zip(balanced, (1, 0), strict=True)])
    # Counted from EMPTY, as kernels do.
    e = _exchanged(found - EMPTY, exchange) + EMPTY
    ea, eb = e.split((a.shape[0], b.shape[1]))
    return _integers(balanced[0], ea, window, 1), _integers(balanced[1], eb, window, 0)


def _row_exponents(x: Tensor, dim: int) -> Tensor:
    largest = twin.maxima(x, dim)
    return twin.exponents(largest, twin.BEXPO_BUMP).masked_fill_(~largest.isfinite(), POISON)


def _integers(x: Tensor, e: Tensor, window: int, dim: int) -> twin.Quantized:
    empty, poisoned = e == EMPTY, e == POISON
    e = (e - (window - 1)).masked_fill_(empty | poisoned, 0)
    x.mul_(twin.powers_of_two(-e).unsqueeze(dim)).round_()
    x.masked_fill_(poisoned.unsqueeze(dim), 0)
    return twin.Quantized(x, e.masked_fill_(poisoned, POISON))


def _total(qa: Tensor, qb: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """This rank's total as int64 words: high 2^32 + low, 0 <= low < 2^32."""
    span = matmul._SPAN[window]
    high = low = 0
    for start in range(0, qa.shape[1], span):
        n = min(span, qa.shape[1] - start)
        part = matmul._total(qa.narrow(1, start, n), qb.narrow(0, start, n), window).to(torch.int64)
        high = high + (part >> 32)
        low = low + (part & 0xFFFFFFFF)
    return high + (low >> 32), low & 0xFFFFFFFF


def _exchanged_total(qa: Tensor, qb: Tensor, window: int, words: int, exchanges: Exchanges) -> Tensor:
    """RN(T) of the whole contraction for this rank's rows, float32."""
    high, low = (_padded(x, exchanges.size) for x in _total(qa, qb, window))
    size, share, n = exchanges.size, high.shape[0] // exchanges.size, high.shape[1]
    halves = [low, low >> 16, *(high >> 16 * i for i in range(words - 2))]
    sent = torch.stack([((x & 0xFFFF) ^ 0x8000) - 0x8000 for x in halves]).to(torch.int16)
    sent = sent.view(words, size, share * n).transpose(0, 1).reshape(size, words * share * n)
    received = exchanges.swap(sent).view(size, words, share, n).to(torch.int64)
    received[:, :-1] &= 0xFFFF  # the highest word has the sign
    high = low = 0
    for i, word in enumerate(received.sum(0)):
        if i < 2:
            low = low + (word << 16 * i)
        else:
            high = high + (word << 16 * (i - 2))
    return matmul.round_two_words(high, low)


def _padded(x: Tensor, size: int) -> Tensor:
    rest = -x.shape[0] % size
    return torch.cat((x, x.new_zeros((rest, *x.shape[1:])))) if rest else x


def _own_rows(e: Tensor, exchanges: Exchanges) -> Tensor:
    return _padded(e, exchanges.size).chunk(exchanges.size)[exchanges.rank] if e.numel() else e
