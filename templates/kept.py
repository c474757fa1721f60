"""Products by a weight whose digits are kept from call to call (contract section 4).

What the definition takes from a weight B [K, N] alone, its balance and its integers, is made once by
`weight_digits`, and `exact_mm_kept` multiplies by that: the integers, exponents and roundings of
`exact_mm(a, b, balance="weight")`, hence its bits.

A kept weight is one tensor of bytes, the same on every device, so that it has one address:

    digits      int8 [D, N, padded K], balanced, radix 256, the least significant plane first
    exponents   int32 [N], of the columns, with the code POISON for one that is not finite
    maxima      int32 [K], the bits of max_j |B_kj| in binary32, from which the balance follows

Each part starts at a multiple of 256 bytes. X2 takes two bytes an element, X3 three.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from carbon_compile.templates import launch, matmul
from carbon_compile.templates import quantize as twin
from carbon_compile.templates.quantize import DIGITS

_ALIGNMENT = 256
_INTEGERS = 1 << 18  # that the CPU twin works on at a time
_ROWS = 256  # and at least as many rows, since each block makes the weight's integers again


class Layout(NamedTuple):
    """Where the parts of a kept weight [k, n] start, in bytes, and how many bytes there are."""

    k: int
    n: int
    padded: int
    planes: int
    exponents: int
    maxima: int
    size: int

    @property
    def digits(self) -> int:
        """How many there are; they stand first."""
        return self.planes * self.n * self.padded


def layout(k: int, n: int, window: int) -> Layout:
    """The layout of a kept weight [k, n]. ValueError for k < 2, whose product is no sum of digits, or another window."""
    if window not in DIGITS:
        raise ValueError(f"window must be one of {tuple(DIGITS)}, got {window}")
    if k < 2:
        raise ValueError(f"a contraction of {k} has no digits to keep")
    padded, planes = launch.padded_contraction(k), DIGITS[window]
    exponents = _aligned(planes * n * padded)
    maxima = exponents + _aligned(4 * n)
    return Layout(k, n, padded, planes, exponents, maxima, maxima + _aligned(4 * k))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def weight_digits(b: Tensor, window: int, out: Tensor | None = None) -> Tensor:
    """The kept form of a weight b [K, N], any strides, K > 1: uint8 [size], as `layout` describes it.

    `out` is overwritten, if given: with the bytes that stand there already, if the weight is the same, at no
    time with others, so that somebody who reads it meanwhile isn't disturbed. Raises TypeError for types that no product takes, ValueError for
    shapes.
    """
    if b.dtype not in matmul.OPERANDS:
        raise TypeError(f"exact products take {matmul.OPERANDS}, got {b.dtype}")
    if b.dim() != 2:
        raise ValueError(f"a weight has two dimensions, got {tuple(b.shape)}")
    where = layout(*b.shape, window)
    if out is None and b.is_cuda and b.numel():
        from carbon_compile.templates import kept_kernels

        with torch.cuda.device_of(b):
            return kept_kernels.new_digits(b, window)
    if out is None:
        out = torch.empty(where.size, dtype=torch.uint8, device=b.device)
    if out.shape != (where.size,) or out.dtype != torch.uint8 or out.device != b.device:
        raise ValueError(f"the digits of this weight are uint8 [{where.size}] on {b.device}, not {out.dtype} {tuple(out.shape)} on {out.device}")
    if b.is_cuda and b.numel():
        from carbon_compile.templates import kept_kernels

        with torch.cuda.device_of(b):
            kept_kernels.write_digits(b, window, out)
    else:
        _write_digits(b, window, out, where)
    return out


def _write_digits(b, window, out, where) -> None:
    """The CPU twin, some columns at a time: each is quantised by itself, given the balance."""
    digits, exponents, maxima = parts(out, where)
    digits[..., where.k :] = 0
    if b.numel() == 0:
        maxima.zero_()
        return
    maxima.copy_(twin.maxima(b, 1).float().abs().view(torch.int32))
    minus = -_balance(maxima)
    for columns in _slices(where.n, _INTEGERS // where.k):
        q, e = twin.quantize(b[:, columns], window, -2, minus)
        digits[:, columns, : where.k] = twin.digits(q.t(), window)
        exponents[columns] = e


def parts(kept: Tensor, where: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a kept weight: digits int8 [D, n, padded k], exponents int32 [n], maxima int32 [k]."""
    digits = kept[: where.digits].view(torch.int8).view(where.planes, where.n, where.padded)
    exponents = kept[where.exponents : where.exponents + 4 * where.n].view(torch.int32)
    return digits, exponents, kept[where.maxima : where.maxima + 4 * where.k].view(torch.int32)


def _balance(maxima: Tensor) -> Tensor:
    """`quantize.weight_balance` from the bits of the largest magnitudes."""
    e = twin.exponents(maxima.view(torch.float32).double())
    return e.masked_fill_(e == twin.EMPTY, 0)


def _check_kept(kept: Tensor, where: Layout, device: torch.device) -> None:
    if kept.shape != (where.size,) or kept.dtype != torch.uint8 or kept.device != device:
        raise ValueError(f"{kept.dtype} {tuple(kept.shape)} on {kept.device} is no weight [{where.k}, {where.n}] of {where.planes} digits on {device}")


def exact_mm_kept(
    a: Tensor, kept: Tensor, n: int, *, window: int, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> Tensor:  # fmt: skip
    """The exact product of a [M, K], any strides, by the kept form of a weight [K, n]: [M, n] in `out_dtype`.

    `bias` broadcasts to [M, n] and is added in binary32 before the one rounding to `out_dtype`. The
    bits are those of `exact_mm(a, b, window=window, balance="weight", ...)`. Raises TypeError for
    other operand types and ValueError where `kept` belongs to another weight's shape or window.
    """
    signature = None
    if a.is_cuda:
        signature = _signature(a, kept, n, window, bias, out_dtype)
        prepared = launch.prepared.get(signature)
        if prepared is not None:
            out = prepared(a, kept, bias)
            if out is not None:
                return out
    if a.dtype not in matmul.OPERANDS:
        raise TypeError(f"exact products take {matmul.OPERANDS}, got {a.dtype}")
    if a.dim() != 2:
        raise ValueError(f"the first operand has two dimensions, got {tuple(a.shape)}")
    where = layout(a.shape[1], n, window)
    _check_kept(kept, where, a.device)
    shape = (a.shape[0], n)
    if bias is not None:
        bias = bias.expand(shape)
    if not a.shape[0] or not n:
        return torch.empty(shape, dtype=out_dtype, device=a.device)
    if a.is_cuda:
        from carbon_compile.templates import kept_kernels

        with torch.cuda.device_of(a):
            return kept_kernels.multiply(a, kept, n, window, bias, out_dtype, signature=signature)
    d = _balance(parts(kept, where)[2])
    return _multiply(a.shape[0], lambda rows: twin.quantize(a[rows], window, -1, d), kept, where, bias, window, out_dtype)


def _multiply(rows, quantized, kept, where, bias, window, out_dtype) -> Tensor:
    """The CPU twin, a block of rows and columns at a time so that what is in between stays in cache; `quantized`
    gives some of the rows."""
    digits, exponents, _ = parts(kept, where)
    out = torch.empty((rows, where.n), dtype=out_dtype, device=kept.device)
    for block in _slices(rows, max(_ROWS, _INTEGERS // where.k)):
        qa = quantized(block)
        for columns in _slices(where.n, _INTEGERS // where.k):
            rounded = matmul.rounded_total(qa.q, _integers(digits[:, columns, : where.k]).t(), window)
            scaled, poisoned = matmul._scale(rounded, qa.exponents, exponents[columns])
            out[block, columns] = matmul._finish(scaled, None if bias is None else bias[block, columns], out_dtype, nans=poisoned)
    return out


def balance(kept: Tensor, k: int, n: int, window: int) -> Tensor:
    """The balance d of the contraction indices of a kept weight [k, n], int32 [k]."""
    where = layout(k, n, window)
    _check_kept(kept, where, kept.device)
    if kept.is_cuda:
        from carbon_compile.templates import kept_kernels

        with torch.cuda.device_of(kept):
            return kept_kernels.balance(kept, where, window)
    return _balance(parts(kept, where)[2])


def factors(kept: Tensor, k: int, n: int, window: int) -> Tensor:
    """Of a kept weight [k, n], for operands whose balanced magnitudes binary32 holds: bits of the factors 2^(d_k - t),
    t the largest balance, and t itself; int32 [k + 1]. All factors are NaN where one would not be a normal number."""
    where = layout(k, n, window)
    _check_kept(kept, where, kept.device)
    if kept.is_cuda:
        from carbon_compile.templates import kept_kernels

        with torch.cuda.device_of(kept):
            return kept_kernels.factors(kept, where, window)
    d = _balance(parts(kept, where)[2])
    top = d.amax()
    bits = torch.where(top - d.amin() > 126, 0x7FC00000, (d - top + 127) << 23)
    return torch.cat([bits, top.view(1)]).to(torch.int32)


def exact_mm_digits(
    digits: Tensor, exponents: Tensor, kept: Tensor, n: int, *, window: int, raw: bool = False, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """`exact_mm_kept` of rows that are digits already: int8 [D * M, K], contiguous, K a multiple of what
    contractions are padded to, the least significant digits of all rows first, and exponents int32 [M]; both as
    `quantize` gives them for the weight's `balance`. Digits of a row with the exponent POISON may be any. `raw`: rows of
    a bfloat16 operand with the exponent RAW hold its bytes; on a GPU they get digits and exponents in place (or both in
    copies), which a further product by a weight of the same balance may read as well.

    Raises TypeError for other types and ValueError for shapes that do not match.
    """
    signature = None
    if digits.is_cuda:
        digits, exponents = _readable(digits, exponents)
        signature = (raw, *_signature(digits, kept, n, window, bias, out_dtype, exponents))
        prepared = launch.prepared.get(signature)
        if prepared is not None:
            out = prepared(digits, kept, bias, exponents)
            if out is not None:
                return out
    if digits.dtype != torch.int8 or exponents.dtype != torch.int32:
        raise TypeError(f"digits are int8 and exponents int32, got {digits.dtype} and {exponents.dtype}")
    if exponents.device != digits.device:
        raise ValueError(f"digits on {digits.device} and exponents on {exponents.device} are no operand")
    m = exponents.numel()
    if digits.dim() != 2 or exponents.dim() != 1 or digits.shape[0] != m * DIGITS[window] or not digits.is_contiguous():
        raise ValueError(f"digits {tuple(digits.shape)} with strides {digits.stride()} are not {DIGITS[window]} of each of {m} rows")
    k = digits.shape[1]
    if launch.padded_contraction(k) != k:
        raise ValueError(f"rows of {k} digits are not padded")
    where = layout(k, n, window)
    _check_kept(kept, where, digits.device)
    if bias is not None:
        bias = bias.expand(m, n)
    if not m or not n:
        return torch.empty((m, n), dtype=out_dtype, device=digits.device)
    if digits.is_cuda:
        from carbon_compile.templates import kept_kernels

        with torch.cuda.device_of(digits):
            return kept_kernels.multiply_digits(digits, exponents, kept, n, window, raw, bias, out_dtype, signature=signature)
    planes = digits.view(-1, m, k)

    def quantized(rows):
        found = twin.Quantized(_integers(planes[:, rows]), exponents[rows].clone())
        left = found.exponents == twin.RAW
        if raw and left.any():
            numbers = planes[:2, rows][:, left].permute(1, 2, 0).contiguous().view(torch.bfloat16).squeeze(-1)
            found.q[left], found.exponents[left] = twin.quantize(numbers, window, -1, _balance(parts(kept, where)[2]))
        return found

    return _multiply(m, quantized, kept, where, bias, window, out_dtype)


def _readable(digits: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Both where kernels read them (TMA wants whole 16 bytes), or copies of both: rows that are settled in one of them
    alone would be settled once more by the next product, from digits."""
    if digits.data_ptr() % 16 == 0 and exponents.is_contiguous():
        return digits, exponents
    return digits.clone(), exponents.clone(memory_format=torch.contiguous_format)


def _slices(length: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    return (slice(start, start + step) for start in range(0, length, step))


def _integers(digits: Tensor) -> Tensor:
    """The integers [N, K] of digits [D, N, K], in float64, which holds them exactly."""
    q = digits[-1].double()
    for plane in digits[:-1].flip(0):
        q.mul_(256.0).add_(plane)
    return q


def _signature(a, kept, n, window, bias, out_dtype, exponents=None) -> tuple:
    """As `matmul._signature`; `kept` is contiguous and its size follows from the rest."""
    key = ("kept", a.shape, a.stride(), a.dtype, a.data_ptr() & 15, a.get_device(), kept.shape, kept.data_ptr() & 15, kept.get_device(), n, window, out_dtype)
    if exponents is not None:
        key = (*key, exponents.shape, exponents.dtype, exponents.data_ptr() & 15, exponents.get_device())
    return key if bias is None else (*key, bias.shape, bias.stride(), bias.dtype, bias.data_ptr() & 15, bias.get_device())


def warmable(a: Tensor, n: int, window: int, bias: Tensor | None, out_dtype: torch.dtype, device) -> tuple:
    """The recipe of a product that is not empty and the types of its buffers, for `matmul.precompilation`. Of
    `a` and `bias` only sizes, strides and types are read."""
    from carbon_compile.templates import kept_kernels

    recipe = kept_kernels.prepare(a, n, window, None if bias is None else bias.expand(a.shape[0], n), device=device)
    return recipe, (a.dtype, torch.uint8, None if bias is None else bias.dtype, out_dtype)


def warmable_digits(b: Tensor, window: int, device) -> tuple:
    """As `warmable`, for the digits of a weight in new memory, as a first call makes them: those of a weight that
    changed have maxima of another kernel where its rows are longer than a program takes."""
    from carbon_compile.templates import kept_kernels

    return kept_kernels.prepare_new_digits(b, window), (b.dtype, None, None, torch.uint8)


def warmable_balance(k: int, n: int, window: int, device, *, factors: bool = False) -> tuple:
    """As `warmable`, for the balance of a kept weight, or for its factors."""
    from carbon_compile.templates import kept_kernels

    prepare = kept_kernels.prepare_factors if factors else kept_kernels.prepare_balance
    return prepare(layout(k, n, window)), (torch.uint8, None, None, torch.int32)


def warmable_product(m: int, k: int, n: int, window: int, raw: bool, bias: Tensor | None, out_dtype: torch.dtype, device) -> tuple:
    """As `warmable`, for a product of digits."""
    from carbon_compile.templates import kept_kernels

    recipe = kept_kernels.prepare_product(m, k, n, window, raw, None if bias is None else bias.expand(m, n), device=device)
    return recipe, (torch.int8, torch.uint8, None if bias is None else bias.dtype, out_dtype, None, None, torch.int32)
