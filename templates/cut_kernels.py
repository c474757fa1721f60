"""The GPU side of `cut`: the int8 tensor-core engine of whole products, stopped where ranks exchange.

One recipe makes maxima, exponents, digits, totals and results; between its launches other ranks raise
the maxima and the exponents, and the totals travel. Where the contraction is cut, each rank's
share of the rows is a batch of the product, so that totals are written where they are sent from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from carbon_compile.templates import launch, matmul, matmul_kernels
from carbon_compile.templates import quantize_kernels as kernels
from carbon_compile.templates.matmul_recipe import (
    BIAS,
    OUT,
    RECEIVED,
    A,
    B,
    Block,
    Recipe,
    hooked,
    view,
)


class Prepared(NamedTuple):
    """A recipe and where it stops: before `totalled` are the digits, before `finished` the totals.

    `sent` are the totals, int16 [ranks, words, share, N]; None where the contraction is whole.
    """

    recipe: Recipe
    steps: kernels.CutQuantisation
    sent: Block | None
    finished: int


def prepare(a, b, bias, window, balance, words, size, rank, contraction, plan=None) -> Prepared:
    """The launches of a [M, K] by b [K, N], nothing empty; `bias` [N] or None.

    words: how many 16-bit words a rank's total takes. size, rank: of the group that cuts the
    contraction, if `contraction`.
    """
    recipe = Recipe()
    tokens = kernels.operand(a, A, -2), kernels.operand(b, B, -1)
    steps = kernels.quantize_cut(recipe, kernels.operand(a, A, -1), kernels.operand(b, B, -2), tokens, window, balance)
    m, n = a.shape[0], b.shape[1]
    share = -(-m // size) if contraction else m
    plan = plan or launch.gemm_plan(share, n, a.shape[1], window, size if contraction else 1, launch.hardware(a.device), totals=contraction)
    recipe.plan = plan
    along_n = None if bias is None else (0, 0, bias.stride(0))
    if not contraction:
        matmul_kernels.multiply_digits(recipe, steps.qa, steps.qb, window, 1, along_n, plan)
        return Prepared(recipe, steps, None, len(recipe.launches))
    sent = recipe.reserve(size * words * share * n, torch.int16)
    matmul_kernels.multiply_digits(recipe, steps.qa._replace(rows=share), steps.qb, window, size, None, plan, (sent, words))
    finished = len(recipe.launches)
    start, own = _own_rows(m, share, rank)
    if own:
        e = steps.qa.exponents
        bm, bn = launch.FINISH_TILE
        recipe.launch(
            matmul_kernels.finish_words_kernel, triton.cdiv(own, bm) * triton.cdiv(n, bn),
            Block(OUT), Block(RECEIVED), Block(OUT if bias is None else BIAS),
            e._replace(offset=e.offset + 4 * start, length=own), steps.qb.exponents,
            own, n, size, words * share * n, share * n, 0, along_n[2] if along_n else 1, int(bias is not None),
            BM=bm, BN=bn, WORDS=words, BIAS=0, num_warps=4, **launch.STRICT,
        )  # fmt: skip
    return Prepared(recipe, steps, sent, finished)


def _own_rows(m: int, share: int, rank: int) -> tuple[int, int]:
    """The first of a rank's rows, and how many it has; the last ranks may have fewer than a share."""
    start = min(rank * share, m)
    return start, min(share, m - start)


def multiply(a, b, bias, window, balance, out_dtype, words, exchanges, plan=None) -> Tensor:
    """As `cut.multiply`, on the device of a and b; `words` as `cut.words_of_total` says."""
    contraction = exchanges.contraction is not None
    signature = None
    if a.is_cuda:
        signature = (
            "cut", *matmul._signature(a, b, window, balance, bias, out_dtype, "int8"), words,
            exchanges.size, exchanges.rank, contraction,
        )  # fmt: skip
    prepared = launch.prepared.get(signature)
    if prepared is None:
        prepared = prepare(a, b, bias, window, balance, words, exchanges.size, exchanges.rank, contraction, plan)
        if signature is not None:
            launch.keep(signature, prepared)
    if not a.is_cuda:  # the interpreter
        return _run(prepared, a, b, bias, out_dtype, exchanges)
    with torch.cuda.device_of(a):
        return _run(prepared, a, b, bias, out_dtype, exchanges)


def _run(prepared: Prepared, a, b, bias, out_dtype, exchanges) -> Tensor:
    recipe, steps, sent, finished = prepared
    m, n = a.shape[0], b.shape[1]
    share = -(-m // exchanges.size) if sent else m
    # Rows beyond the last one travel too, so they must not be whatever memory held.
    new = torch.zeros if share * exchanges.size != m and sent else torch.empty
    out = new((share, n), dtype=out_dtype, device=a.device)
    buffers = [a, b, bias, out, *recipe.scratch(a.device), None]

    def exchange(block, function):
        if block is not None and function is not None:
            part = view(buffers, block)
            part.copy_(function(part))

    _launch(recipe, buffers, slice(0, steps.balanced))
    exchange(steps.first, exchanges.rows)
    exchange(steps.second, exchanges.columns)
    _launch(recipe, buffers, slice(steps.balanced, steps.quantised))
    exchange(steps.largest, exchanges.contraction)
    _launch(recipe, buffers, slice(steps.quantised, finished))
    if sent is not None:
        buffers[RECEIVED] = exchanges.swap(view(buffers, sent).view(exchanges.size, -1))
        _launch(recipe, buffers, slice(finished, None))
    return out


def _launch(recipe: Recipe, buffers, launches: slice) -> None:
    """Once every launch is compiled, without Triton's own call; see `matmul_recipe`."""
    if recipe.replays and not hooked():
        pointers = [0 if x is None else x.data_ptr() for x in buffers]
        if not any(pointer & 15 for pointer in pointers[OUT:]):  # those of a, b and bias are in the signature
            recipe.replay(pointers, _current_stream(buffers[OUT].get_device()), launches)
            return
    recipe.run(buffers, launches)


_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
