"""Launch parameters: tiles, warps, stages, split-K. Nothing here can change a bit.

Every engine of an exact product gives the same integers, so these are speed choices only; tests may
replace a plan by any other. Figures were chosen for an H100; `gemm_plan` weighs candidates with a
small cost model, and `override` is the seam for an autotuner's verdicts.
"""

from __future__ import annotations

import functools
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


@dataclass(frozen=True)
class Hardware:
    """What a plan depends on."""

    capability: tuple[int, int]
    sms: int

    @property
    def tma(self) -> bool:
        return self.capability[0] >= 9


@dataclass(frozen=True)
class Plan:
    """How one product runs; `swap` computes C^T = B^T A^T, `span` is a split's contraction."""

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

    def describe(self) -> dict:
        """The verdict table's columns."""
        return {
            "engine": f"{self.engine} tensor cores",
            "tile": (self.bm, self.bn, self.bk),
            "split_k": self.splits,
            "warps": self.warps,
            "stages": self.stages,
            "schedule": ("joint" if self.joint else "levels")
            + (", specialised" if self.specialised else "")
            + (", swapped" if self.swap else ""),
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


@functools.lru_cache(4096)
def rows_tile(batch: int, rows: int, padded: int, stride_r: int, stride_k: int) -> Tile | None:
    """Whole rows in registers, or None where they are too long for that."""
    columns = _power_of_two(padded)
    if stride_k > stride_r and rows > 1:
        # Rows lie side by side: read at least 32 of them together.
        return Tile(max(32, 4096 // columns), columns, 8) if columns <= 256 else None
    if columns > 8192:
        return None
    return Tile(max(1, min(64, 4096 // columns)), columns, 8 if columns >= 4096 else 4)


@functools.lru_cache(4096)
def maxima_tile(batch: int, rows: int, k: int, stride_r: int, stride_k: int) -> Tile:
    side_by_side = stride_k > stride_r and rows > 1
    tile_rows, columns = (128, 32) if side_by_side else (4, 1024)
    if not side_by_side and k <= 256:
        tile_rows, columns = 16, 256
    steps, programs = 1, batch * -(-rows // tile_rows)
    # Long programs save atomics; stop while there are a few for every multiprocessor.
    while steps < 16 and columns * steps < k and programs * (k // (columns * steps * 2)) >= 512:
        steps *= 2
    if not side_by_side and k <= columns * 8:
        steps = max(steps, _power_of_two(-(-k // columns)))  # no atomics, no start value
    return Tile(tile_rows, columns, 4, steps)


def digits_tile(stride_r: int, stride_k: int) -> Tile:
    return Tile(64, 128, 8) if stride_k > stride_r else Tile(8, 1024, 8)


# ---- products ----


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
        if window == 16:
            return [Plan(128, bn, 128, 4 if bn <= 32 else 8, 4, joint=True, tma=True)]
        return [Plan(128, bn, 64, 4 if bn <= 32 else 8, 5, joint=True, tma=True)]
    return [
        Plan(128, 256, 128, 16, 3, tma=True),
        Plan(256, 128, 128, 16, 3, tma=True),
        Plan(128, 128, 128, 8, 4, tma=True),
        Plan(128, 64, 128, 8, 4, tma=True),
        Plan(64, 64, 128, 4, 4, tma=True),
    ]


_overrides: dict[tuple, Plan] = {}


def override(m: int, n: int, k: int, window: int, batch: int, plan: Plan | None) -> None:
    """Pin (or with None release) the plan of one product."""
    key = (m, n, k, window, batch)
    _overrides.pop(key, None)
    if plan is not None:
        _overrides[key] = plan
    gemm_plan.cache_clear()


@functools.lru_cache(4096)
def gemm_plan(
    m: int, n: int, k: int, window: int, batch: int, hw: Hardware, engine: str = "int8"
) -> Plan:
    """The plan of C[batch, m, n] over K = k."""
    padded = padded_contraction(k)
    pinned = _overrides.get((m, n, k, window, batch))
    if pinned is not None:
        return split(replace(pinned, engine=engine), padded, window, pinned.splits)
    # Tensor-core tiles are tall; a product of few rows is computed as its transpose.
    swap = m < n and m <= 64 and hw.capability != (0, 0)
    rows, columns = (n, m) if swap else (m, n)
    plans = [
        split(replace(plan, engine=engine, swap=swap, bk=min(plan.bk, padded)), padded, window, s)
        for plan in _candidates(window, m, n, hw, engine)
        for s in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 22, 24, 32)
        if s == 1 or padded // plan.bk >= 4 * s
    ]
    return min(
        plans, key=lambda plan: _microseconds(plan, rows, columns, padded, window, batch, hw)
    )


def split(plan: Plan, padded: int, window: int, splits: int) -> Plan:
    """`plan` with the contraction cut in about `splits`, at least as often as int32 needs."""
    span = -(-padded // (splits * plan.bk)) * plan.bk
    span = min(max(span, plan.bk), SPAN_LIMIT[window] // plan.bk * plan.bk)
    splits = -(-padded // span)
    words = 0 if splits == 1 else 1 if padded <= WORD_LIMIT[window] else 2
    return replace(plan, span=span, splits=splits, words=words)


def _microseconds(
    plan: Plan, m: int, n: int, padded: int, window: int, batch: int, hw: Hardware
) -> float:
    """A rough time on an H100: tiles stream from L2, waves are whole, splits pay for atomics."""
    digits = window // 8
    loads = digits if plan.joint else digits**2
    tile_bytes = plan.span * loads * (plan.bm + plan.bn)
    tile_ops = 2 * plan.span * digits**2 * plan.bm * plan.bn
    resident = 1 if plan.bm * plan.bn > 128 * 64 else 2
    tile_time = max(tile_bytes / 45e3, tile_ops / 11e6) * resident
    store_time = plan.bm * plan.bn * (8 if plan.words else 4) / 22e3
    tiles = -(-m // plan.bm) * -(-n // plan.bn) * plan.splits * batch
    waves = -(-tiles // (hw.sms * resident))
    time = waves * (tile_time + store_time + 2.0)
    if plan.words:
        time += 6.0 + m * n * batch * (plan.splits * 8 / 1e6 + 20 / 2.5e6)
    return time


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
_SPECIALISED_JOINT = {
    16: [(128, 128, 64, 8, 6), (128, 128, 128, 8, 3)],
    24: [(128, 128, 64, 8, 4), (128, 64, 128, 8, 3), (128, 128, 128, 8, 2)],
}


def variants(chosen: Plan, padded: int, window: int) -> list[Plan]:
    """Plans worth timing beside a chosen one: tiles and schedules, splits around its own."""
    splits = {chosen.splits, max(1, chosen.splits // 2), chosen.splits * 2}
    families = (
        (False, False, _LEVELS),
        (True, False, _JOINT[window]),
        (False, True, _SPECIALISED),
        (True, True, _SPECIALISED_JOINT[window]),
    )
    return [
        split(
            replace(chosen, bm=bm, bn=bn, bk=min(bk, padded), warps=warps, stages=stages,
                    joint=joint, specialised=specialised, tma=True),
            padded, window, s,
        )
        for joint, specialised, shapes in families
        for bm, bn, bk, warps, stages in shapes
        if chosen.swap == (bn <= 32)
        for s in sorted(splits if chosen.splits > 1 else {1})
    ]  # fmt: skip


def plan_as_dict(plan: Plan) -> dict:
    """Every field, for reports."""
    return asdict(plan)
