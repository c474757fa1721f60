"""Windows and balances: how a floating operand becomes integers (contract section 4).

A row of the first operand (a column of the second) is the unit: its largest magnitude over the
whole contraction fixes one exponent s, and every element becomes q = RNE(x 2^(d_k - s)) with
|q| < 2^(w-1), where d_k is the balance of contraction index k (0 when there is none). With "keys"
the second operand's unit is its row instead, and its exponents go to the first operand.

Everything here is the CPU twin in float64, which holds every value met on the way exactly: an
operand has at most 24 significant bits and exponents within +-149, a balance moves it by at most
149 more. `quantize_kernels` does the same on a GPU in binary32 and integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DIGITS = {16: 2, 24: 3}  # window in bits -> balanced radix-256 digits

# Codes a row exponent can carry beside its value; real ones stay within +-1000.
POISON = 1 << 16  # the row holds an infinity or a NaN: everything it meets becomes NaN
EMPTY = -(1 << 16)  # nothing but zeros
RAW = 1 << 17  # digits that a graph made: the row has none yet, but the two bytes of each of its bfloat16 numbers

# bexpo(m) = expo(m * 129/128): added to the bits of a binary32 significand, this carries into the
# exponent field exactly when the significand reaches 2 * 128/129. It keeps |q| <= 2^(w-1) * 128/129,
# which is what lets balanced digits stay within int8.
BEXPO_BUMP = 130055
# An infinity or NaN has no exponent, yet its row still takes part in balances: it counts as the
# binade above the largest finite one, which is what its exponent field reads as.
EXPO_NONFINITE = 129
# In a gradient's balance a zero counts as the binade below the smallest subnormal.
EXPO_ZERO = -150


class Quantized(NamedTuple):
    """Integers `q` (float64, shaped as the operand) and the exponent of each row, [..., rows]."""

    q: Tensor
    exponents: Tensor


def exponents(magnitudes: Tensor, bump: int = 0) -> Tensor:
    """expo(m) of float64 magnitudes m >= 0 that have 24 significant bits; bexpo(m) with the bump.

    Zero gives EMPTY, an infinity or NaN EXPO_NONFINITE. int32, shaped as the input.
    """
    # The upper 35 bits of a binary64 are a binary32 pattern with a wider exponent field.
    pattern = magnitudes.contiguous().view(torch.int64) >> 29
    e = ((pattern + bump) >> 23) - 1022
    e = torch.where(magnitudes.isfinite(), e, EXPO_NONFINITE)
    return torch.where(magnitudes == 0, EMPTY, e).to(torch.int32)


def powers_of_two(e: Tensor) -> Tensor:
    """2^e exactly, float64; |e| <= 1022."""
    return ((e.to(torch.int64) + 1023) << 52).view(torch.float64)


def maxima(x: Tensor, dim: int) -> Tensor:
    """max |x| along `dim` in float64. Exact, so its order is free; NaN wins."""
    return torch.maximum(x.amax(dim), -x.amin(dim)).double()


def weight_balance(b: Tensor) -> Tensor:
    """d_k = expo(max_j |B_kj|) of a weight B [K, N], 0 for a zero row; int32 [K]."""
    e = exponents(maxima(b, 1))
    return e.masked_fill_(e == EMPTY, 0)


def gradient_balance(a: Tensor, b: Tensor) -> Tensor:
    """d_m = trunc((expo(max|dC_m|) - expo(max|A_m|)) / 2), with expo(0) = -150; int32 [tokens].

    `a` is A^T [features, tokens], `b` is dC [tokens, N].
    """
    return between(exponents(maxima(a, 0)), exponents(maxima(b, 1)))


def between(ea: Tensor, eb: Tensor) -> Tensor:
    """The gradient balance of tokens whose maxima have these exponents (EMPTY for zero).

    A token without a gradient still has activations. Taking zero for the smallest magnitude there
    is keeps them out of the window, which would otherwise be theirs.
    """
    ea, eb = (e.masked_fill(e == EMPTY, EXPO_ZERO) for e in (ea, eb))
    return torch.div(eb - ea, 2, rounding_mode="trunc")


def key_exponents(b: Tensor) -> Tensor:
    """bexpo(max_j |B_kj|) of b [..., K, N]; EMPTY for a zero row, POISON for one not finite; int32."""
    largest = maxima(b, -1)
    return exponents(largest, BEXPO_BUMP).masked_fill_(~largest.isfinite(), POISON)


def fold_keys(a: Tensor, d: Tensor) -> Tensor:
    """A_ik 2^(d_k) in float64, for a [..., M, K] and `key_exponents` d [..., K].

    A zero row of B drops its index. A row of B that is not finite makes every A_ik infinite that is
    not zero: it poisons those who take part in it, and nobody else.
    """
    scale = powers_of_two(d.masked_fill((d == EMPTY) | (d == POISON), 0))
    folded = a.double() * scale.masked_fill_(d == EMPTY, 0.0).unsqueeze(-2)
    poisoned = (d == POISON).unsqueeze(-2)
    return folded.masked_fill_(poisoned & (a != 0), torch.inf) if poisoned.any() else folded


def quantize_keys(b: Tensor, window: int, d: Tensor) -> Quantized:
    """RNE(B_kj 2^(w-1-d_k)) of b [..., K, N] and `key_exponents` d [..., K]; one static exponent."""
    special = ((d == EMPTY) | (d == POISON)).unsqueeze(-1)
    scale = powers_of_two(window - 1 - d.unsqueeze(-1).masked_fill(special, 0))
    q = b.double().mul(scale).round_().masked_fill_(special, 0.0)
    columns = (*b.shape[:-2], b.shape[-1])
    return Quantized(q, torch.full(columns, 1 - window, dtype=torch.int32, device=b.device))


def quantize(x: Tensor, window: int, contraction: int, balance: Tensor | None = None, owned: bool = False) -> Quantized:
    """Integers and row exponents of `x`, contracted along dimension `contraction`.

    `balance` is an int32 vector over the contraction, already signed for this operand. A poisoned
    row gets q = 0 and the exponent POISON, a zero row the exponent 0. An `owned` float64 `x` is
    overwritten instead of copied.
    """
    q = x.to(torch.float64, copy=not owned)  # scaled and rounded in place
    if balance is None:
        largest = maxima(x, contraction)
    else:
        shape = [1] * x.dim()
        shape[contraction] = -1
        q.mul_(powers_of_two(balance).view(shape))
        largest = maxima(q, contraction)
    e = exponents(largest, BEXPO_BUMP)
    empty, poisoned = e == EMPTY, ~largest.isfinite()
    e = (e - (window - 1)).masked_fill_(empty | poisoned, 0)
    q.mul_(powers_of_two(-e).unsqueeze(contraction)).round_()
    if poisoned.any():
        q.masked_fill_(poisoned.unsqueeze(contraction), 0)
        e.masked_fill_(poisoned, POISON)
    return Quantized(q, e)


def digits(q: Tensor, window: int) -> Tensor:
    """Balanced radix-256 digits of integers, least significant first: int8 [D, *q.shape].

    The digit split is an engine's choice and not part of the contract.
    """
    rest, planes = q.to(torch.int32), []
    for _ in range(DIGITS[window]):
        low = ((rest + 128) & 255) - 128
        planes.append(low.to(torch.int8))
        rest = (rest - low) >> 8
    return torch.stack(planes)
