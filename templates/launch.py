"""Launch parameters: tiles, warps, stages, split-K. Nothing here can change a bit.

Every engine of an exact product gives the same integers, so these are speed choices only; tests may
replace a plan by any other. Figures were chosen for an H100; `gemm_plan` weighs candidates with a
small cost model, and `override` is the seam for an autotuner's verdicts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

# No contraction into fma: every rounding of the contract stays.
STRICT = {"enable_fp_fusion": False}

# An int32 level holds `pairs` digit products of at most 2^14 per contraction index and a carry:
# X2 2 pairs, X3 3. Multiples of 128.
SPAN_LIMIT = {16: 65408, 24: 43520}
# Contraction lengths whose total fits one int64.
WORD_LIMIT = {16: 1 << 33, 24: 1 << 17}

FINISH_TILE = (8, 256)
WORDS_BLOCK = 1024


@dataclass(frozen=True)
class Hardware:
    """What a plan depends on."""

    capability: tuple[int, int]
    sms: int

    @property
    def tma(self) -> bool:
        return self.capability[0] >= 9

    @property
    def shared(self) -> int:
        """Bytes of shared memory a plan may count on."""
        large = self.capability == (8, 0) or self.capability[0] in (9, 10)
        return 160 << 10 if large else 96 << 10


@dataclass(frozen=True)
class Plan:
    """How one product runs; `swap` computes C^T = B^T A^T, `span` is a split's contraction.

    `programs`, if any, limits how many a specialised schedule runs: they take turns on the tiles.
    `parts`: where the contraction isn't split, tiles beyond whole waves of `places` are cut along it, each
    in about so many parts, which leave their totals to another pass.
    `streamed`: by `small_kernels`, without digits of the weight in memory; `groups` of warps then
    share a step, each with `bk` indices of the contraction.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    joint: bool = False
    tma: bool = False
    specialised: bool = False
    swap: bool = False
    group: int = 8
    span: int = 0
    words: int = 0
    splits: int = 1
    engine: str = "int8"
    programs: int = 0
    streamed: bool = False
    groups: int = 1
    parts: int = 1
    places: int = 0

    @property
    def step(self) -> int:
        """Indices of the contraction that a program takes at a time."""
        return self.bk * self.groups

    def rest(self, tiles: int) -> int:
        """How many of so many tiles, over all batches, are cut in parts: the last ones."""
        return tiles % self.places if self.parts > 1 and self.places and self.splits == 1 else 0

    def cut(self, padded: int) -> tuple[int, int]:
        """In how many parts of how many indices of the contraction they are cut; the last may be shorter."""
        span = -(-padded // (self.parts * self.step)) * self.step
        return -(-padded // span), span

    def describe(self) -> dict:
        """The verdict table's columns."""
        return {
            "engine": f"{self.engine} tensor cores",
            "tile": (self.bm, self.bn, self.bk),
            "split_k": self.splits,
            "warps": self.warps,
            "stages": self.stages,
            "schedule": ("streamed" if self.streamed else "joint" if self.joint else "levels")
            + (", specialised" if self.specialised else "")
            + (", persistent" if self.programs else "")
            + (", swapped" if self.swap else "")
            + (f", last wave in {self.parts} parts" if self.parts > 1 else ""),
        }


class Tile(NamedTuple):
    """A quantisation program's block: rows by contraction, `steps` of them."""

    rows: int
    columns: int
    warps: int
    steps: int = 1


@functools.lru_cache
def hardware(device: torch.device) -> Hardware:
    if torch.device(device).type != "cuda":
        return Hardware((0, 0), 1)  # the interpreter
    properties = torch.cuda.get_device_properties(device)
    return Hardware((properties.major, properties.minor), properties.multi_processor_count)


def padded_contraction(k: int) -> int:
    """K rounded up to what the tiles read: whole 128-byte rows, or one of 64."""
    return 64 if k <= 64 else -(-k // 128) * 128


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


# ---- quantisation: memory-bound, 16 to 32 elements a thread ----


TOKENS_TILE = Tile(2, 1024, 4)  # tokens by features


def rows_warps(side_by_side: bool) -> int:
    """Of a program that quantises rows of either operand, by how the first one lies."""
    return 8 if side_by_side else 4


def rows_tile(rows: int, k: int, side_by_side: bool, warps: int) -> Tile:
    """A program's whole rows, 16 or 32 elements a thread, in few widths: few kernels to compile.

    Rows that fit are read once. Longer ones are better read twice (the second time mostly from L1)
    in blocks of several than once and alone: a scale is made for each column of a block. The code
    of both operands is one kernel, which takes the registers of the greedier: the second operand,
    mostly the smaller one, is not worth many.
    """
    if side_by_side and rows > 1:
        if rows <= 64 and k <= 512:
            return Tile(64, 64, warps)  # a head's: whole cache lines
        if warps == 8 and k > 512:
            return Tile(32, 128, warps)
        columns = min(64 * warps, max(64, _power_of_two(k)))
        return Tile(1024 * warps // columns, columns, warps)
    if k <= 64:
        return Tile(64, 64, warps)
    if 256 < k <= 512:
        return Tile(8, 512, warps)
    if k <= 1024:
        return Tile(8, 256, warps)
    return Tile(4, 512, warps) if k <= 8192 else Tile(4, 1024, warps)


def maxima_tile(k: int, side_by_side: bool) -> Tile:
    """Rows up to 8192 are one program's, which stores their maxima; longer ones need atomics."""
    if side_by_side:
        rows, columns = 16, 512
    else:
        columns = next((width for width in (64, 256) if k <= width), 1024)
        rows = 4096 // columns
    steps = -(-k // columns)
    return Tile(rows, columns, 4 if columns * rows <= 4096 else 8, steps if k <= 8192 else 4)


def exponents_tile(rows: int, side_by_side: bool) -> Tile:
    """Of balanced rows: an atomic for every `steps` blocks of one."""
    if not side_by_side:
        return Tile(4, 1024, 8)
    return Tile(64, 32, 4, 8) if rows <= 16384 else Tile(256, 16, 8, 8)


def digits_tile(side_by_side: bool) -> Tile:
    return Tile(32, 128, 4) if side_by_side else Tile(8, 1024, 8)


# ---- sums of columns: memory-bound, one wave of programs ----


class Slab(NamedTuple):
    """A program's columns, and the rows that it takes, `unroll` times `rows` at a time.

    `registers` of a thread, at most. Then a program takes a `block` of columns, and `programs` read again what needs it,
    four times `again` rows at a time. `overlap`: a launch begins during the one before, and waits for it.
    """

    columns: int
    span: int
    rows: int
    warps: int
    unroll: int
    registers: int
    block: int
    again: int
    programs: int
    overlap: bool = False
    eviction: str = ""  # of what is read, from the L2 cache


def eviction(size: int) -> str:
    """How `size` bytes that are read once should leave the L2 cache: first, if they don't stay there anyway."""
    return "evict_first" if size > 1 << 25 else ""


def column_sums_plan(m: int, n: int, itemsize: int, sums: int, hw: Hardware) -> Slab:
    """Of a matrix [M, N], or of the product of two: 128 bytes or more of a row, as many programs as run together.

    `itemsize`: bytes of an element, of both matrices' together; `sums`: one, or with the products' the first
    matrix's own. In the first launch a thread adds four neighbours of a row at a time; nothing spills. Slabs are of
    2048 rows or hardly more, hence 128 or fewer.

    RMS norm of float32 16384 x 768 with its backward pass, whose weight's gradient is one sum of two matrices, took
    114.3 us, with 64 columns and 4 warps 115.9; layer norm, two sums, 119.2 and 114.4 (cold, H200, in two runs).
    """
    columns, warps, unroll, (programs, registers) = 64, 4, 4, (3, 168) if sums == 2 else (4, 128)
    if itemsize >= 8 and sums == 1:
        columns, warps, programs, registers = 32, 8, 2, 128
    columns = min(columns, max(16, _power_of_two(n)))
    rows = 4 * 32 * warps // columns
    step = rows * unroll  # the first step's rows tell the magnitudes of the others, so it is a whole one
    span = -(-m // (_slabs(m, -(-n // columns), programs * hw.sms) * step)) * step
    return Slab(columns, span, rows, warps, unroll, registers, 16, 128 * warps // 16, 4 * hw.sms, hw.capability[0] >= 9, eviction(m * n * itemsize))


def _slabs(m, tiles, programs):
    """How many slabs of a matrix of m rows keep so many programs busy, in whole waves where tiles are many."""
    slabs = max(1, programs // tiles)
    if tiles > programs // 4:
        slabs = min(range(1, 5), key=lambda s: -(-tiles * s // programs) / s)
    return min(128, max(slabs, -(-m // 2048)))


class NarrowSlab(NamedTuple):
    """A program's columns, and the rows that it takes, `unroll` times `rows` at a time.

    Then `helpers` programs take a `block` of columns, and what they read again `again` rows at a time, in chunks of
    `group` slabs. `overlap`: the second launch begins during the first one, and waits for it.
    """

    columns: int
    span: int
    rows: int
    warps: int
    unroll: int
    registers: int
    block: int
    group: int
    helpers: int
    again: int
    overlap: bool = False


def narrow_sums_plan(m: int, n: int, aligned: bool, hw: Hardware) -> NarrowSlab:
    """Of a matrix [M, N] of 16-bit numbers: 128 bytes of a row, of which a thread takes 16, and as many programs as
    run together, two a multiprocessor; but slabs of no more than 2048 rows, hence 128 slabs or fewer. A thread has no
    more than eight rows on their way, or half where those that are not `aligned` come in eight loads.

    Gradients of a small transformer in training, 4096 rows: of keys and queries, one of two or three 16 columns has
    elements too small for the quick way, but 128 rows of it only one time in thirty. So chunks are as small as a
    helper can count: 32. A thread's integers hold the terms of 511 steps.

    Two programs a multiprocessor took 8 to 14 us of 4096 x 768 to 4096, three and four up to 2 us more, wider or
    fatter ones 2 to 7; 16384 x 3072 29 us, those 29 to 35 (cold, H200).
    """
    columns, warps, unroll = min(64, max(16, _power_of_two(n))), 4, 8
    rows = 8 * 32 * warps // columns
    tiles, programs = -(-n // columns), 2 * hw.sms
    span = max(-(-m // _slabs(m, tiles, programs)), 64)
    slabs = -(-m // span)
    steps = -(-span // (rows * (unroll if aligned else unroll // 2)))
    settling = 4 * hw.sms
    block = 16 if n <= 32 * settling else 64
    again = 512 * warps // block
    helpers = max(1, min(settling // -(-n // block), slabs), -(-m // (256 * again)))
    group = _power_of_two(-(-slabs // (32 * helpers)))
    return NarrowSlab(columns, span, rows, warps, -(-span // (rows * steps)), 128, block, group, helpers, again, hw.capability[0] >= 9)


# ---- softmax of attention ----

SOFTMAX_KEYS = 4096  # at most: the parts of an integer sum of so many fit 32 bits


def softmax_tile(keys: int, operands: int) -> Tile:
    """A program's queries by all keys, 32 numbers a thread; few warps, between which a row's sums need not pass."""
    columns = max(64, _power_of_two(keys))
    return Tile(max(1, min(8, 1024 // operands // columns)), columns, max(1, columns * operands // 1024))


# ---- products ----

class Cost(NamedTuple):
    """Microseconds of a plan: per index of the contraction and besides, a tile; how many tiles a
    multiprocessor works at together; and of a product, however small."""

    per_index: float
    per_tile: float
    resident: int = 1
    once: float = 0.0


# Of a last wave that is cut in parts, in us and bytes per us: what a program takes to fill its stages and to
# drain them; how fast a multiprocessor stores totals; another launch; and how fast that reads them, mostly from
# L2. Reckoned from what an H100 can do. Of 193 plans of these tiles that were expected to take 180 us or more, the
# better half took 0.84 to 1.04 times as long as these and the costs below say; those far above have other steps
# (H200).
_PART = 2.5
_PARTS_STORED = 30e3
_PARTS_LAUNCH = 3.0
_PARTS_READ = 4e6
_PART_BYTES = 8  # of an element's total
_PARTS_SCRATCH = 36 << 20  # bytes, of an H100's 50 MB of L2: a part of 128 x 256 a multiprocessor, or two of 128 x 128
_PARTS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16)

# Hopper's plans for wide products; `programs` counts those of a multiprocessor. Fitted to an H200 at 2048^3 to
# 8192^3, 8192 and 16384 x 3072 x 768, 16384 x 768 x 3072 and the products of GPT-2 with 4096 tokens; what isn't
# specialised (but X3's 128 x 64), to an H100. Small tiles with two programs a multiprocessor multiply while others
# store, and programs that go on load while they store. X3's of 64 x 64 were timed at 96 x 512 x 512 x 64 alone,
# attention's scores: 122 us beside 124, 136 and 179 (H100).
_HOPPER = {
    16: {
        Plan(128, 128, 64, 8, 6, joint=True, tma=True, specialised=True, programs=1): Cost(0.0095, 4.4, 1, 3.0),
        Plan(128, 128, 128, 8, 3, joint=True, tma=True): Cost(0.0124, 4.6),
        Plan(64, 128, 64, 4, 4, joint=True, tma=True, specialised=True): Cost(0.0048, 2.5, 1, 4.0),
        Plan(64, 128, 64, 4, 4, joint=True, tma=True, specialised=True, programs=2): Cost(0.0104, 1.8, 2, 2.0),
        Plan(64, 64, 128, 4, 3, joint=True, tma=True): Cost(0.0056, 4.2, 2),
        Plan(128, 256, 128, 16, 3, tma=True): Cost(0.0289, 15.4),
    },
    24: {
        Plan(128, 128, 64, 8, 4, joint=True, tma=True, specialised=True, programs=1): Cost(0.0208, 6.8),
        Plan(128, 64, 128, 8, 3, joint=True, tma=True): Cost(0.0142, 3.9),
        Plan(64, 64, 64, 4, 4, joint=True, tma=True): Cost(0.0200, 3.6, 2, 5.0),
        Plan(128, 256, 128, 16, 3, tma=True): Cost(0.0636, 19.3),
    },
}


def _candidates(window: int, m: int, n: int, hw: Hardware, engine: str) -> list[Plan]:
    if hw.capability == (0, 0):
        return [Plan(32, 32, 64, 4, 1), Plan(32, 32, 64, 4, 1, joint=True, tma=True)][:1]
    if engine == "bf16":
        return [Plan(128, 128, 64, 8, 3, tma=hw.tma)]
    narrow = min(m, n)
    if not hw.capability[0] == 9:
        bn = 64 if narrow <= 64 else 128
        return [Plan(128, bn, 64, 8, 3, tma=hw.tma)]
    if narrow <= 64:
        bn = max(16, _power_of_two(narrow))
        if window == 16 and bn == 64:
            return [Plan(64, 64, 128, 4, 3, joint=True, tma=True)]
        if window == 16:
            return [Plan(128, bn, 128, 4, 4, joint=True, tma=True)]
        return [Plan(128, bn, 64, 4 if bn <= 32 else 8, 5, joint=True, tma=True)]
    return [replace(plan, programs=plan.programs * hw.sms) for plan in _HOPPER[window]]


def _stages(plan: Plan, padded: int) -> int:
    """As many as there are steps, and one more that another tile may begin with."""
    return 1 + max(1, -(-padded // plan.bk))


_overrides: dict[tuple, Plan] = {}
prepared: dict[tuple, Callable] = {}  # products ready to replay, by signature
_PREPARED = 4096


def keep(signature: tuple, product: Callable) -> None:
    """Remember a prepared product; with very many signatures, start anew."""
    if len(prepared) >= _PREPARED:
        prepared.clear()
    prepared[signature] = product


def override(m: int, n: int, k: int, window: int, batch: int, plan: Plan | None) -> None:
    """Pin (or with None release) the plan of one product."""
    key = (m, n, padded_contraction(k), window, batch)
    _overrides.pop(key, None)
    if plan is not None:
        _overrides[key] = plan
    gemm_plan.cache_clear()
    prepared.clear()


# Short contractions are mostly storing, which no line through longer ones tells. 96 x 512 x 512 x 64 took, in us on
# an H100, causal in tiles of 64 x 64 60 (X2) and 91 (X3), in 64 x 128 that take turns 66, in 128 x 128 80 and 103,
# in 128 x 256 156; not causal X3 122, 136 and 179.
_SHORT = 128


@functools.lru_cache(4096)
def gemm_plan(
    m: int, n: int, k: int, window: int, batch: int, hw: Hardware, engine: str = "int8",
    weight: int = 0, causal: bool = False, totals: bool = False,
) -> Plan:  # fmt: skip
    """The plan of C[batch, m, n] over K = k; `weight` as `streamable` says; `causal`: half of C is zero;
    `totals`: C's exact totals are wanted, which another pass could not make of parts."""
    padded = padded_contraction(k)
    pinned = _overrides.get((m, n, padded, window, batch))
    weight = weight if engine == "int8" else 0
    if pinned is not None and (weight or not pinned.streamed):
        if causal or totals:
            pinned = replace(pinned, parts=1, places=0)
        return split(replace(pinned, engine=engine), padded, window, pinned.splits)
    if weight and _worth_streaming(m, n, padded, window, hw):
        return streamed_plan(m, n, padded, window, hw, weight)
    # Tensor-core tiles are tall; a product of few rows is computed as its transpose.
    swap = m < n and m <= 64 and hw.capability != (0, 0)
    rows, columns = (n, m) if swap else (m, n)
    candidates = _candidates(window, m, n, hw, engine)
    if padded <= _SHORT and (causal or window == 24):
        candidates = [plan for plan in candidates if (plan.bm, plan.bn) == (64, 64)] or candidates
    plans = [
        split(replace(plan, engine=engine, swap=swap, bk=min(plan.bk, padded), stages=min(plan.stages, _stages(plan, padded))), padded, window, s)
        for plan in candidates
        for s in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 22, 24, 32)
        if s == 1 or padded // plan.bk >= 4 * s
    ]
    if hw.capability[0] == 9 and engine == "int8" and not (causal or totals):
        plans += [
            cut
            for plan in plans
            for cut in cut_last_wave(plan, padded, window, hw)
            if cuts(cut, rows, columns, batch)
        ]
    return min(
        plans, key=lambda plan: expected(plan, rows, columns, padded, window, batch, hw)
    )


def _tiles(plan: Plan, m: int, n: int, batch: int) -> int:
    return -(-m // plan.bm) * -(-n // plan.bn) * batch


def rest(plan: Plan, m: int, n: int, batch: int) -> int:
    """How many tiles of C[batch, m, n] the plan cuts in parts."""
    return plan.rest(_tiles(plan, m, n, batch))


def cuts(plan: Plan, m: int, n: int, batch: int) -> bool:
    """Whether it cuts any, into what scratch may hold."""
    tiles = rest(plan, m, n, batch)
    return 0 < tiles * plan.parts * _PART_BYTES * plan.bm * plan.bn <= _PARTS_SCRATCH


def cut_last_wave(plan: Plan, padded: int, window: int, hw: Hardware) -> list[Plan]:
    """A plan of Hopper that doesn't split, and cuts what is left over after whole waves in parts."""
    if plan.splits > 1 or plan.swap:
        return []
    places = plan.programs or hw.sms * _cost(plan, window, hw).resident
    plans = [replace(plan, parts=parts, places=places) for parts in _PARTS if padded // plan.step >= 2 * parts]
    return [replace(plan, parts=plan.cut(padded)[0]) for plan in plans]


def split(plan: Plan, padded: int, window: int, splits: int) -> Plan:
    """`plan` with the contraction cut in about `splits`, at least as often as int32 needs."""
    step = plan.step
    span = -(-padded // (splits * step)) * step
    span = min(max(span, step), SPAN_LIMIT[window] // step * step)
    splits = -(-padded // span)
    words = 0 if splits == 1 else 1 if padded <= WORD_LIMIT[window] else 2
    if splits > 1:
        plan = replace(plan, parts=1, places=0)
    return replace(plan, span=span, splits=splits, words=words)


def expected(
    plan: Plan, m: int, n: int, padded: int, window: int, batch: int, hw: Hardware
) -> float:
    """A rough time on an H100 or H200: waves are whole, splits pay for zeros, atomics and another pass, parts of the
    last wave for two."""
    cost = _cost(plan, window, hw)
    tiles, places = _tiles(plan, m, n, batch), hw.sms * cost.resident
    cut = plan.rest(tiles)
    waves = -(-(tiles - cut) * plan.splits // places)
    # Rows stored in single elements.
    ragged = 3.0 * cost.resident * plan.bm * plan.bn / 128**2 if plan.specialised and n % 8 else 0.0
    time = cost.once + waves * (plan.span * cost.per_index + cost.per_tile + ragged)
    if plan.words:
        time += 6.0 + m * n * batch * (plan.splits * 8 / 1e6 + 20 / 2.5e6)
    if cut:
        parts, span = plan.cut(padded)
        bytes_of_a_part = _PART_BYTES * plan.bm * plan.bn
        part = span * cost.per_index + _PART + cost.resident * bytes_of_a_part / _PARTS_STORED
        time += -(-cut * parts // places) * part + _PARTS_LAUNCH + cut * parts * bytes_of_a_part / _PARTS_READ
    return time


def _cost(plan: Plan, window: int, hw: Hardware) -> Cost:
    """What a plan costs that was measured, or one whose tile was, or by the bytes and operations of any."""
    known = list(_HOPPER[window].items()) if hw.capability[0] == 9 else []
    for traits in (_traits, _tile_of):
        for other, cost in known:
            if traits(plan) == traits(other):
                return cost
    digits = window // 8
    loads = digits if plan.joint else digits**2
    bytes_per_index = loads * (plan.bm + plan.bn)
    operations_per_index = 2 * digits**2 * plan.bm * plan.bn
    resident = 1 if plan.bm * plan.bn > 128 * 64 else 2
    per_index = max(bytes_per_index / 45e3, operations_per_index / 11e6) * resident
    return Cost(per_index, plan.bm * plan.bn * (8 if plan.words else 4) / 22e3 + 2.0, resident)


def _tile_of(plan: Plan) -> tuple:
    return plan.bm, plan.bn, plan.joint, plan.specialised


def _traits(plan: Plan) -> tuple:
    return *_tile_of(plan), plan.bk, plan.warps, bool(plan.programs)


# ---- products of few rows by a weight: `small_kernels` ----

# Elements of a weight below which the ordinary way is faster, M = 16 on an H100: at 768x3072 X2 took
# 26.0 us against 23.2, at 4096x4096 47 against 66; X3 29.0 against 42.1 and 80 against 112.
_WORTH_STREAMING = {16: 1 << 22, 24: 1 << 20}
_STREAMED_ROWS = 64
_STREAMED_COLUMNS = 512  # fewer leave most multiprocessors without a program
_STREAMED_CONTRACTION = 1 << 22  # offsets into the digits stay within int32


def streamable(b) -> int:
    """Bytes an element of the second operand b [K, N] of balance "weight" if its digits may stay in
    registers, else 0: it must be read along the contraction, 16 elements at a time. Any other weight
    would give the same bits, but has not been timed."""
    wide = b.dim() == 2 and b.stride(0) == 1 and b.shape[0] % 16 == 0 and b.stride(1) % 16 == 0
    return b.element_size() if wide else 0


def _worth_streaming(m: int, n: int, padded: int, window: int, hw: Hardware) -> bool:
    return (
        hw.capability >= (8, 0)  # maxima of two bfloat16 at a time
        and m <= _STREAMED_ROWS
        and n >= _STREAMED_COLUMNS
        and padded <= _STREAMED_CONTRACTION
        and n * padded >= _WORTH_STREAMING[window]
    )


def few_rows(m: int) -> int:
    """Rows of the activations as the narrow side of the tensor cores."""
    return max(8, _power_of_two(m))


def streamed_plan(m: int, n: int, padded: int, window: int, hw: Hardware, itemsize: int) -> Plan:
    """Tiles of the product by a weight [N, K] that is read, not stored as digits.

    A tall tile and two programs a multiprocessor, by splits if need be; one where each has much to
    add up. With X2 and few rows of a moderate weight four groups of warps share a low tile instead:
    no total goes through memory (4096x4096: 17.2 us against 18.5).
    """
    bn, programs = few_rows(m), 2 if m <= 32 else 1
    groups = 1
    if window == 16 and m <= 16 and n * padded <= 1 << 24:
        bm, bk, groups, warps, stages = 32, 64, 4, 4, 3
    elif window == 16:
        bm, bk, warps, stages = 64, 128, 4, 4
    elif m <= 32:
        bm, bk, warps, stages = 64, 64, 4, 4
    else:
        bm, bk, warps, stages = 128, 64, 8, 3
    bytes_a_stage = bk * groups * (bm * itemsize + window // 8 * bn)
    plan = Plan(
        bm, bn, bk, warps, max(1, min(stages, hw.shared // bytes_a_stage)),
        swap=True, streamed=True, groups=groups,
    )  # fmt: skip
    splits = 1 if groups > 1 else round(programs * hw.sms / -(-n // bm))
    return split(plan, padded, window, max(1, min(splits, padded // (3 * plan.step), 16)))


def kept_plan(m: int, n: int, padded: int, window: int, hw: Hardware) -> Plan:
    """The plan of few or many rows by a weight [n, padded] whose digits are kept: `kept_kernels`.

    Low tiles are programs enough without a split for the weights of a model, and long steps keep enough bytes
    on their way. Of a 4096 x 4096 weight, H100, in us: M = 16 X2 26.6 (of 29 to 37 with other tiles), X3 36.2
    (37 to 52); M = 64 X2 31.8 (34 to 48), X3 46.5 (50 to 105).
    """
    if m > _STREAMED_ROWS or padded > _STREAMED_CONTRACTION or hw.capability < (8, 0):
        return gemm_plan(m, n, padded, window, 1, hw)
    bm, bn, bk, stages = 32, few_rows(m), min(128, padded), 4
    if window == 16 and m <= 16:
        bk, stages = (256, 4) if padded % 256 == 0 else (bk, 6)
    elif window == 24 and m > 32:
        bk, stages = 64, 5
    bytes_a_stage = bk * window // 8 * (bm + bn)
    plan = Plan(bm, bn, bk, 4, max(1, min(stages, hw.shared // bytes_a_stage)), swap=True, streamed=True)
    splits = round(hw.sms / -(-n // bm))
    return split(plan, padded, window, max(1, min(splits, padded // (3 * plan.step), 16)))


def index_maxima_tile(elements: int, bfloat16: bool) -> Tile:
    """bfloat16 is compared two at a time, in half the registers."""
    if not bfloat16:
        return Tile(32, 512, 8, 2)
    if elements <= 1 << 24:
        return Tile(64, 128, 4, 4)
    return Tile(32, 512, 8, 4)


def few_rows_tile(k: int, side_by_side: bool) -> Tile:
    """Of the few rows themselves, which are over before the weight's: whole rows that lie contiguously."""
    if side_by_side:
        columns = min(512, max(64, _power_of_two(k)))
        return Tile(max(16, 8192 // columns), columns, 8)
    columns = next((width for width in (64, 256, 512, 1024) if k <= width), 4096)
    return Tile(4096 // columns, columns, 8)


def column_exponents_tile(side_by_side: bool) -> Tile:
    return Tile(32, 128, 8) if side_by_side else Tile(8, 512, 8)


# ---- batches of products by few keys: `key_kernels` ----

_KEYS_COLUMNS = 128


def keys_plan(
    m: int, n: int, k: int, window: int, hw: Hardware, engine: str = "int8", side_by_side: bool = True
) -> Plan | None:
    """The plan of balance "keys" whose first operand is quantised in registers, or None.

    Of as many columns as one tile has: others would quantise the first operand again. X3 keeps five
    accumulators and multiplies nine times what it loads: that has not been timed. `side_by_side`: a
    row's elements are neighbours; else its columns are read, of which wider tiles take whole lines.
    Long steps without a pipeline took 60 us each of 96 x 512 x 512 x 64, causal, short ones with three
    stages, or long ones with two, 66 (H200).
    """
    padded = padded_contraction(k)
    if engine != "int8" or window != 16 or n > _KEYS_COLUMNS or m < 64 or padded > SPAN_LIMIT[window] or hw.capability < (8, 0):
        return None
    bn = max(16, _power_of_two(n))
    bk, stages = min(128, padded), 1
    if bn > 64:
        bk, stages = (64, 3) if side_by_side else (bk, 2)
    return Plan(64, bn, bk, 4 if bn <= 64 else 8, stages, joint=True, streamed=True, span=padded)


def exponents_width(k: int, plan: Plan) -> int:
    """Indices of the contraction that are measured at a time, no accumulators being kept meanwhile."""
    return max(plan.bk, 32 * plan.warps * 64 // plan.bm) if k > plan.bk else plan.bk


def keys_tile(bn: int) -> Tile:
    """Columns by keys: all columns of a row, whose maximum is wanted."""
    return Tile(bn, max(32, 4096 // bn), 4)


# (bm, bn, bk, warps, stages) worth timing, by (schedule, specialised); joint ones by window.
_LEVELS = [
    (128, 256, 128, 16, 3), (128, 256, 128, 8, 4), (128, 256, 256, 16, 2), (256, 128, 128, 16, 3),
    (128, 128, 128, 8, 3), (128, 128, 128, 8, 4), (128, 128, 256, 8, 3), (128, 64, 128, 4, 4),
    (128, 64, 128, 8, 4), (64, 128, 128, 4, 4), (64, 64, 128, 4, 4),
]  # fmt: skip
_JOINT = {
    16: [(128, 128, 128, 8, 3), (128, 128, 64, 8, 5), (128, 64, 128, 8, 4), (128, 64, 128, 4, 3),
         (64, 64, 128, 4, 3), (128, 32, 128, 4, 4), (128, 16, 128, 4, 4), (64, 16, 128, 4, 6)],
    24: [(128, 64, 64, 8, 5), (128, 64, 128, 8, 3), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3),
         (128, 32, 64, 4, 5), (128, 32, 128, 4, 3), (128, 16, 64, 4, 6), (128, 16, 128, 4, 3),
         (64, 16, 128, 4, 4)],
}  # fmt: skip
_SPECIALISED = [(128, 256, 128, 8, 4), (256, 128, 128, 8, 4), (128, 128, 128, 8, 6)]
# Four warps: two programs a multiprocessor, so that one multiplies while the other stores.
_SPECIALISED_JOINT = {
    16: [(128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (64, 128, 64, 4, 4), (64, 128, 128, 4, 2)],
    24: [(128, 128, 64, 8, 4), (128, 64, 128, 8, 3), (128, 128, 128, 8, 2), (64, 128, 64, 4, 3)],
}

# (bm, bk, groups, warps, stages)
_STREAMED = {
    16: [(32, 64, 4, 4, 3), (64, 128, 1, 4, 4), (64, 128, 1, 4, 3), (128, 128, 1, 8, 3), (16, 64, 4, 4, 4)],
    24: [(64, 64, 1, 4, 4), (64, 128, 1, 4, 3), (128, 64, 1, 8, 3), (32, 32, 4, 4, 3), (16, 64, 4, 4, 3)],
}


def variants(chosen: Plan, padded: int, window: int, sms: int = 132) -> list[Plan]:
    """Plans worth timing beside a chosen one: tiles and schedules, splits around its own, and last waves in
    parts, some of them and around its own."""
    splits = {chosen.splits, max(1, chosen.splits // 2), chosen.splits * 2}
    parts = {2, 5, 11} | ({chosen.parts // 2, chosen.parts, 2 * chosen.parts} if chosen.parts > 1 else set())
    families = (
        (False, False, _LEVELS),
        (True, False, _JOINT[window]),
        (False, True, _SPECIALISED),
        (True, True, _SPECIALISED_JOINT[window]),
    )
    plans = [
        split(
            replace(chosen, bm=bm, bn=bn, bk=min(bk, padded), warps=warps, stages=stages,
                    joint=joint, specialised=specialised, tma=True, programs=programs,
                    streamed=False, groups=1, parts=1, places=0),
            padded, window, s,
        )
        for joint, specialised, shapes in families
        for bm, bn, bk, warps, stages in shapes
        if chosen.swap == (bn <= 32)
        for s in sorted(splits if chosen.splits > 1 else {1})
        for programs in ((0, sms) if specialised and warps == 8 else (0,))
    ]  # fmt: skip
    if chosen.engine == "int8":
        hopper = Hardware((9, 0), sms)
        plans += [cut for plan in plans for cut in cut_last_wave(plan, padded, window, hopper) if cut.parts in parts]
    if chosen.streamed:
        plans += [
            split(replace(chosen, bm=bm, bk=bk, groups=groups, warps=warps, stages=stages), padded, window, s)
            for bm, bk, groups, warps, stages in _STREAMED[window]
            for s in sorted({1, 2, 4} | splits)
        ]
    return list(dict.fromkeys(plans))


def plan_as_dict(plan: Plan) -> dict:
    """Every field, for reports."""
    return asdict(plan)
