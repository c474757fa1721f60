"""The int8 engine for Hopper, with warps that only load and warps that only multiply.

Triton waits for every int8 wgmma before it issues the next. Here one warp keeps a ring of digit
tiles full through the whole contraction, over all levels, while one or two warpgroups multiply with
one step in flight. Totals, epilogue and bits are those of `matmul_kernels`.

Two schedules. `levels` goes through the levels one by one, each digit pair a pass over the
contraction. `joint` loads each digit tile once for several products: X2 in one pass with three
accumulators; X3 in two, levels 0 to 2 and then 3 and 4.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from carbon_compile.templates.matmul_kernels import (
    _all_beyond,
    _canonical,
    _emit,
    _moderate,
    _or_minus_zero,
    _placed,
    _rounded_total,
    _scaled_at_once,
    _scaled_in_steps,
    _store_part,
    _store_zeros,
    _with_zeros,
    _work,
)

# Triton 3.9 has another name for it, and keeps the old one only to say so.
_load_to_shared = getattr(tma, "async_load", tma.async_copy_global_to_shared)


@gluon.jit
def _pairs(level, D: gl.constexpr):
    """The first plane of a at a level, and how many digit pairs it has."""
    first = gl.maximum(0, level - (D - 1))
    return first, gl.minimum(level, D - 1) - first + 1


@gluon.jit
def _store_rows(value, out_ptr, m0, n0, M, N, out_m, BM: gl.constexpr, BN: gl.constexpr, L: gl.constexpr):
    """Store a tile of a row-major result.

    As tensor cores leave it, in layout L, a thread has two neighbours: of four bytes each a whole sector with the
    next three threads', of two bytes half of one. Those change places first, until a thread stores 16 bytes.
    """
    if value.dtype.primitive_bitwidth == 16:
        S: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], L.warps_per_cta, [1, 0])
        value = gl.convert_layout(value, S)
    else:
        S: gl.constexpr = L
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, S))
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, S))
    mask = (m < M)[:, None] & (n < N)[None, :]
    offset = m.to(gl.int64)[:, None] * out_m + n.to(gl.int64)[None, :]
    gl.store(out_ptr + offset, value, mask=mask)


@gluon.jit
def _store_results(
    top, low, K, ea_ptr, eb_ptr, out_ptr, bias_ptr, m0, n0, M, N, out_m, bias_m, bias_n, has_bias, length,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, L: gl.constexpr, BIAS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """`_store_result` for a row-major result and a bias along rows or columns, which is loaded early.

    With moderate exponents and a finite bias no result is NaN, and a conversion need not look for it.
    """
    element: gl.constexpr = out_ptr.dtype.element_ty
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    ea = gl.load(ea_ptr + m, mask=m < M, other=0)
    eb = gl.load(eb_ptr + n, mask=n < N, other=0)
    if BIAS == 0:
        present = n < N * has_bias
        bias = _or_minus_zero(gl.load(bias_ptr + n.to(gl.int64) * bias_n, mask=present, other=0), present)
    else:
        present = m < M * has_bias
        bias = _or_minus_zero(gl.load(bias_ptr + m.to(gl.int64) * bias_m, mask=present, other=0), present)
    rounded = _rounded_total(top, low, K, D)
    finite = gl.max(bias.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=0) < 0x7F800000
    bias = gl.expand_dims(bias, BIAS)
    if _moderate(ea, eb) & finite:
        value = _with_zeros(_scaled_at_once(rounded, ea, eb) + bias, m, n, length, CAUSAL).to(element)
    else:
        value = _canonical(_with_zeros(_scaled_in_steps(rounded, ea, eb) + bias, m, n, length, CAUSAL), element)
    _store_rows(value, out_ptr, m0, n0, M, N, out_m, BM, BN, L)


@gluon.jit
def _store_tile(
    top, low, K, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N, total_plane,
    out_m, out_n, bias_m, bias_n, has_bias, length,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, L: gl.constexpr, WORDS: gl.constexpr,
    BIAS: gl.constexpr, CAUSAL: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """What `_emit` does."""
    if ROWS:
        _store_results(top, low, K, ea_ptr, eb_ptr, out_ptr, bias_ptr, m0, n0, M, N, out_m, bias_m, bias_n, has_bias,
                       length, D, BM, BN, L, BIAS, CAUSAL)  # fmt: skip
    else:
        m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L))
        n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
        _emit(top, low, K, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m, n, M, N, total_plane,
              out_m, out_n, bias_m, bias_n, has_bias, D, WORDS, BIAS, length, CAUSAL)  # fmt: skip


@gluon.jit
def _leave(
    top, low, K, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N, total_plane,
    out_m, out_n, bias_m, bias_n, has_bias, length, part,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, L: gl.constexpr, WORDS: gl.constexpr,
    BIAS: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Store a tile, or of a part of one what `_store_part` does."""
    if REST:
        if part >= 0:
            _store_part(top, low, total_ptr, part, gl.arange(0, BM, layout=gl.SliceLayout(1, L)),
                        gl.arange(0, BN, layout=gl.SliceLayout(0, L)), BM, BN)  # fmt: skip
        else:
            _store_tile(top, low, K, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N, total_plane,
                        out_m, out_n, bias_m, bias_n, has_bias, length, D, BM, BN, L, WORDS, BIAS, CAUSAL, ROWS)  # fmt: skip
    else:
        _store_tile(top, low, K, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N, total_plane,
                    out_m, out_n, bias_m, bias_n, has_bias, length, D, BM, BN, L, WORDS, BIAS, CAUSAL, ROWS)  # fmt: skip


@gluon.jit
def _load_levels(
    count, a, b, sa, sb, full, empty, a_row, b_row, a_plane, b_plane, k_start, steps,
    D: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    for level in range(0, 2 * D - 1):
        first, pairs = _pairs(level, D)
        for t in range(0, pairs * steps):
            slot = count % STAGES
            i = first + t // steps
            k = k_start + (t % steps) * BK
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes)
            _load_to_shared(a, [i * a_plane + a_row, k], bar, sa.index(slot))
            _load_to_shared(b, [(level - i) * b_plane + b_row, k], bar, sb.index(slot))
            count += 1
    return count


@gluon.jit
def _multiply_levels(
    count, sa, sb, full, empty, steps, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N,
    total_plane, out_m, out_n, bias_m, bias_n, has_bias,
    length, part, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    L: gl.constexpr, WORDS: gl.constexpr, BIAS: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    acc = gl.zeros((BM, BN), gl.int32, L)
    low = gl.zeros((BM, BN), gl.int32, L)
    for level in range(0, 2 * D - 1):
        _, pairs = _pairs(level, D)
        for t in range(0, pairs * steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            acc = warpgroup_mma(sa.index(slot), sb.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # One step stays in flight: what is done is the step before.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=t > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        if level < 2 * D - 2:
            low = low | ((acc & 255) << (8 * level))
            acc = acc >> 8
    _leave(acc, low, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N, total_plane,
           out_m, out_n, bias_m, bias_n, has_bias, length, part, D, BM, BN, L, WORDS, BIAS, CAUSAL, REST, ROWS)  # fmt: skip
    return count


@gluon.jit
def _load_joint(
    count, a, b, sa, sb, full, empty, a_row, b_row, a_plane, b_plane, k_start, steps,
    D: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """All planes of a step into one slot; X3's second pass needs planes 1 and 2 only."""
    for first in gl.static_range(D - 1):
        for t in range(0, steps):
            slot = count % STAGES
            k = k_start + t * BK
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (D - first) * (a.block_type.nbytes + b.block_type.nbytes))
            for i in gl.static_range(first, D):
                at = slot * D + i
                _load_to_shared(a, [i * a_plane + a_row, k], bar, sa.index(at))
                _load_to_shared(b, [i * b_plane + b_row, k], bar, sb.index(at))
            count += 1
    return count


@gluon.jit
def _multiply_joint(
    count, sa, sb, full, empty, steps, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N,
    total_plane, out_m, out_n, bias_m, bias_n, has_bias,
    length, part, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    L: gl.constexpr, WORDS: gl.constexpr, BIAS: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    l0 = gl.zeros((BM, BN), gl.int32, L)
    l1 = gl.zeros((BM, BN), gl.int32, L)
    l2 = gl.zeros((BM, BN), gl.int32, L)
    for t in range(0, steps):
        slot = count % STAGES
        mbarrier.wait(full.index(slot), (count // STAGES) & 1)
        a0, a1 = sa.index(slot * D), sa.index(slot * D + 1)
        b0, b1 = sb.index(slot * D).permute((1, 0)), sb.index(slot * D + 1).permute((1, 0))
        l0 = warpgroup_mma(a0, b0, l0, is_async=True)
        l1 = warpgroup_mma(a0, b1, l1, is_async=True)
        l1 = warpgroup_mma(a1, b0, l1, is_async=True)
        l2 = warpgroup_mma(a1, b1, l2, is_async=True)
        if D == 3:
            l2 = warpgroup_mma(a0, sb.index(slot * D + 2).permute((1, 0)), l2, is_async=True)
            l2 = warpgroup_mma(sa.index(slot * D + 2), b0, l2, is_async=True)
        l0, l1, l2 = warpgroup_mma_wait(2 * D, deps=(l0, l1, l2))
        # One step stays in flight: what is done is the step before.
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=t > 0)
        count += 1
    l0, l1, l2 = warpgroup_mma_wait(0, deps=(l0, l1, l2))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
    low = l0 & 255
    l1 += l0 >> 8
    low = low | ((l1 & 255) << 8)
    top = l2 + (l1 >> 8)
    if D == 3:
        # Opaque, or the compiler computes `low` after the loop and keeps what it is made of; and l4
        # starts with its first product, since zeros would be made before the first pass. Either
        # costs 64 registers, spills, and with them every asynchronous step.
        low = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [low | ((top & 255) << 16)], gl.int32, is_pure=False, pack=1
        )
        l3 = top >> 8
        l4 = l3
        for t in range(0, steps):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            a1, a2 = sa.index(slot * D + 1), sa.index(slot * D + 2)
            b1, b2 = sb.index(slot * D + 1).permute((1, 0)), sb.index(slot * D + 2).permute((1, 0))
            l3 = warpgroup_mma(a1, b2, l3, is_async=True)
            l3 = warpgroup_mma(a2, b1, l3, is_async=True)
            l4 = warpgroup_mma(a2, b2, l4, use_acc=t > 0, is_async=True)
            l3, l4 = warpgroup_mma_wait(3, deps=(l3, l4))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=t > 0)
            count += 1
        l3, l4 = warpgroup_mma_wait(0, deps=(l3, l4))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        low = low | ((l3 & 255) << 24)
        top = l4 + (l3 >> 8)
    _leave(top, low, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N, total_plane,
           out_m, out_n, bias_m, bias_n, has_bias, length, part, D, BM, BN, L, WORDS, BIAS, CAUSAL, REST, ROWS)  # fmt: skip
    return count


@gluon.jit
def _place(
    index, M, N, KP, span, length, whole, rest, part_span,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """Batch, first row and column, first contraction index, steps and part of the `index`-th piece of work (see
    `_work`); no steps, where there is nothing to multiply."""
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    tiles = tiles_m * tiles_n
    batch, tile, k_start, span, part = _work(index, tiles, KP, span, whole, rest, part_span, REST)
    tile_m, tile_n = _placed(tile, tiles_m, tiles_n, GROUP)
    steps = gl.cdiv(gl.minimum(span, KP - k_start), BK)
    m0 = tile_m * BM
    n0 = tile_n * BN
    if CAUSAL != 0:
        # A program's tiles may have the same place in every batch, and so all of them be work or none.
        turn = batch * tiles // gl.num_programs(0)
        m0 = (m0 // BM + turn) % tiles_m * BM
        steps = gl.where(_all_beyond(m0, n0, BM, BN, M, N, length, CAUSAL), 0, steps)
    return batch, m0, n0, k_start, steps, part


@gluon.jit
def _load_tiles(
    tiles, a, b, sa, sb, full, empty, M, N, KP, span, a_plane, b_plane, a_batch, b_batch, length,
    whole, rest, part_span, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, JOINT: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, m0, n0, k_start, steps, part = _place(
            index, M, N, KP, span, length, whole, rest, part_span, BM, BN, BK, GROUP, CAUSAL, REST
        )
        a_row = batch * a_batch + m0
        b_row = batch * b_batch + n0
        if JOINT:
            count = _load_joint(count, a, b, sa, sb, full, empty, a_row, b_row, a_plane, b_plane,
                                k_start, steps, D, BK, STAGES)  # fmt: skip
        else:
            count = _load_levels(count, a, b, sa, sb, full, empty, a_row, b_row, a_plane, b_plane,
                                 k_start, steps, D, BK, STAGES)  # fmt: skip


@gluon.jit
def _multiply_tile(
    count, sa, sb, full, empty, steps, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N,
    total_plane, out_m, out_n, bias_m, bias_n, has_bias,
    length, part, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, JOINT: gl.constexpr,
    L: gl.constexpr, WORDS: gl.constexpr, BIAS: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    if JOINT:
        count = _multiply_joint(
            count, sa, sb, full, empty, steps, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N,
            total_plane, out_m, out_n, bias_m, bias_n, has_bias, length, part, D, BM, BN, STAGES, L, WORDS, BIAS, CAUSAL, REST, ROWS,
        )  # fmt: skip
    else:
        count = _multiply_levels(
            count, sa, sb, full, empty, steps, KP, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, m0, n0, M, N,
            total_plane, out_m, out_n, bias_m, bias_n, has_bias, length, part, D, BM, BN, STAGES, L, WORDS, BIAS, CAUSAL, REST, ROWS,
        )  # fmt: skip
    return count


@gluon.jit
def _multiply_tiles(
    tiles, sa, sb, full, empty, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr, M, N, KP, span,
    a_batch, b_batch, total_plane, out_b, out_m, out_n, bias_b, bias_m, bias_n, has_bias, length,
    whole, rest, part_span, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, JOINT: gl.constexpr, L: gl.constexpr, WORDS: gl.constexpr,
    BIAS: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, m0, n0, k_start, steps, part = _place(
            index, M, N, KP, span, length, whole, rest, part_span, BM, BN, BK, GROUP, CAUSAL, REST
        )
        start = batch.to(gl.int64)
        ea = ea_ptr + batch * a_batch
        eb = eb_ptr + batch * b_batch
        out = out_ptr + start * out_b
        total = total_ptr
        if not REST:
            total += start * out_b  # totals are laid out as the (contiguous) output is
        bias = bias_ptr + start * bias_b
        if CAUSAL != 0:
            if steps == 0:
                if WORDS == 0:
                    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L))
                    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
                    _store_zeros(out, m, n, M, N, out_m, out_n)
            else:
                count = _multiply_tile(
                    count, sa, sb, full, empty, steps, KP, ea, eb, out, total, bias, m0, n0, M, N,
                    total_plane, out_m, out_n, bias_m, bias_n, has_bias,
                    length, part, D, BM, BN, STAGES, JOINT, L, WORDS, BIAS, CAUSAL, REST, ROWS,
                )  # fmt: skip
        else:
            count = _multiply_tile(
                count, sa, sb, full, empty, steps, KP, ea, eb, out, total, bias, m0, n0, M, N,
                total_plane, out_m, out_n, bias_m, bias_n, has_bias,
                length, part, D, BM, BN, STAGES, JOINT, L, WORDS, BIAS, CAUSAL, REST, ROWS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["has_bias", "whole", "rest", "tiles"])
def specialised_kernel(
    a, b, out_ptr, total_ptr, bias_ptr, ea_ptr, eb_ptr,
    M, N, KP, span, a_plane, b_plane, a_batch, b_batch, total_plane,
    out_b, out_m, out_n, bias_b, bias_m, bias_n, has_bias, length, whole, rest, part_span, tiles,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, WORDS: gl.constexpr, JOINT: gl.constexpr, BIAS: gl.constexpr,
    CAUSAL: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """As `matmul_kernels.gemm_kernel`: output tiles over one span of the contraction each.

    A program takes every n-th of the `tiles` and parts of tiles, n the number of programs. With fewer programs than
    tiles the next tile is loaded while this one is stored. ROWS: the result (not its totals) is row-major and its
    bias, if any, a vector, so that `_store_results` may store it.
    """
    PLANES: gl.constexpr = D if JOINT else 1
    sa = gl.allocate_shared_memory(gl.int8, [STAGES * PLANES, BM, BK], a.layout)
    sb = gl.allocate_shared_memory(gl.int8, [STAGES * PLANES, BN, BK], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()

    # Triton's int8 wgmma goes up to 224 columns: 128 is its widest power of two.
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, min(BN, 128), 32]
    )
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (
                    tiles, sa, sb, full, empty, ea_ptr, eb_ptr, out_ptr, total_ptr, bias_ptr,
                    M, N, KP, span, a_batch, b_batch, total_plane,
                    out_b, out_m, out_n, bias_b, bias_m, bias_n, has_bias, length,
                    whole, rest, part_span,
                    D, BM, BN, BK, GROUP, STAGES, JOINT, L, WORDS, BIAS, CAUSAL, REST, ROWS,
                ),
            ),
            (
                _load_tiles,
                (
                    tiles, a, b, sa, sb, full, empty, M, N, KP, span,
                    a_plane, b_plane, a_batch, b_batch, length, whole, rest, part_span,
                    D, BM, BN, BK, GROUP, STAGES, JOINT, CAUSAL, REST,
                ),
            ),
        ],
        [1],
        [40 if NUM_WARPS == 8 else 24],
    )  # fmt: skip


def descriptor(digits: torch.Tensor, shape: list[int], strides: list[int], tile: list[int]):
    """TMA descriptor of digits, in tiles as the kernel lays them out in shared memory."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=tile[1], element_bitwidth=8, rank=2)
    return TensorDescriptor(digits, shape, strides, tile, layout)
