"""Plans of products chosen by measurement, and remembered on disk.

No plan can move a bit, so the fastest may be taken whatever it is. What was measured holds for a GPU, a
version of Triton and the text of the kernels: a file for each such combination.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from carbon_compile.templates import launch, matmul_kernels
from carbon_compile.templates.matmul_recipe import BIAS, OUT, WORK, ZEROS, A, B, Recipe, view
from carbon_compile.templates.quantize import DIGITS
from carbon_compile.templates.quantize_kernels import Digits

log = logging.getLogger(__name__)

CANDIDATES = 16  # plans that are timed for a product, the most promising by the model
_RUNS = 11
_ASLEEP = (1 << 20, 1 << 26)  # cycles, at first and at most: 0.5 and 35 ms


class Product(NamedTuple):
    """What a plan depends on: C [batch, m, n] over a contraction padded to `k`, in a window of bits."""

    m: int
    n: int
    k: int
    window: int
    batch: int
    engine: str = "int8"


def tune(products: Iterable[Product], device: torch.device, folder: str | os.PathLike, measure: Callable | None = None) -> int:
    """Pin the fastest plan of each product; returns how many had to be measured.

    Plans measured before are read from `folder`, new ones added to it. `measure(device, products)` returns
    for each product pairs of microseconds and plan. A file that can't be read or written costs another
    measurement, nothing else.
    """
    wanted = list(dict.fromkeys(products))
    path = _file(device, folder)
    known = _load(path)
    missing = [product for product in wanted if product not in known]
    for product, timed in zip(missing, (measure or _measure)(device, missing) if missing else (), strict=True):
        if timed:
            known[product] = min(timed, key=lambda pair: pair[0])[1]
    if missing:
        _store(path, known)
    _pin({product: known[product] for product in wanted if product in known})
    return len(missing)


def recall(device: torch.device, folder: str | os.PathLike) -> int:
    """Pin every plan that was measured before on such a device; returns how many there are."""
    known = _load(_file(device, folder))
    _pin(known)
    return len(known)


def _pin(plans):
    for product, plan in plans.items():
        launch.override(product.m, product.n, product.k, product.window, product.batch, plan)


def candidates(product: Product, hardware: launch.Hardware) -> list[launch.Plan]:
    """The chosen plan and the most promising others."""
    m, n, k, window, batch, engine = product
    chosen = launch.gemm_plan(m, n, k, window, batch, hardware, engine)
    if engine != "int8" or hardware.capability[0] != 9:
        return [chosen, *(dataclasses.replace(chosen, stages=stages) for stages in (2, 3, 4) if stages != chosen.stages)]
    rows, columns = (n, m) if chosen.swap else (m, n)
    others = launch.variants(chosen, k, window, hardware.sms)
    others = [plan for plan in others if plan.parts == 1 or launch.cuts(plan, rows, columns, batch)]
    others.sort(key=lambda plan: launch.expected(plan, rows, columns, k, window, batch, hardware))
    return list(dict.fromkeys([chosen, *others[:CANDIDATES]]))


def _measure(device, products):
    """(microseconds, plan) of each candidate of each product."""
    hardware, found = launch.hardware(device), []
    with torch.cuda.device(device):
        trials = [[_Trial(product, plan) for plan in candidates(product, hardware)] for product in products]
        matmul_kernels.precompile([(trial.recipe, trial.types) for each in trials for trial in each], device)
        for product, each in zip(products, trials, strict=True):
            timed = [(time, trial.plan) for trial in each if (time := trial.microseconds(device)) is not None]
            found.append(timed)
            if timed:
                log.info("%s: %.1f us by the model's plan, %.1f by %s", product, timed[0][0], *min(timed, key=lambda pair: pair[0]))
    return found


class _Trial:
    """A product by one plan, from digits and exponents that are there."""

    def __init__(self, product, plan):
        self.product, self.plan, self.recipe = product, plan, Recipe()
        self.operands = [self._digits(rows) for rows in (product.m, product.n)]
        self.out = torch.bfloat16 if product.window == 16 else torch.float32
        self.types = (torch.int8, torch.int8, None, self.out)
        matmul_kernels.multiply_digits(self.recipe, *self.operands, product.window, product.batch, None, plan)

    def _digits(self, rows):
        count, padded = rows * self.product.batch, self.product.k
        digits = self.recipe.reserve(DIGITS[self.product.window] * count * padded, torch.int8)
        return Digits(digits, self.recipe.reserve(count, torch.int32), count, rows, padded)

    def microseconds(self, device):
        """The median of some runs, or None where the plan doesn't fit the GPU."""
        work, zeros = self.recipe.scratch(device)
        out = torch.empty(self.product.batch * self.product.m * self.product.n, dtype=self.out, device=device)
        buffers = {A: None, B: None, BIAS: None, OUT: out, WORK: work.random_(0, 256), ZEROS: zeros}
        for operand in self.operands:
            view(buffers, operand.exponents).zero_()
        events, asleep = [], _ASLEEP[0]
        try:
            self.recipe.run(buffers)
            while len(events) < _RUNS:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(asleep)  # while Python launches
                begin.record()
                if zeros is not None:
                    zeros.zero_()
                self.recipe.run(buffers)
                end.record()
                if begin.query() and asleep < _ASLEEP[1]:  # the GPU waited for a host that others kept busy
                    asleep *= 2
                else:
                    events.append((begin, end))
            torch.cuda.synchronize()
        except OutOfResources:
            return None
        return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


def _file(device, folder):
    """Named by the GPU, Triton and the kernels' text."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    text = hashlib.sha256(triton.__version__.encode())
    for path in sorted(pathlib.Path(__file__).parent.glob("matmul*.py")):
        text.update(path.read_bytes())
    return pathlib.Path(folder) / f"plans-{re.sub('[^A-Za-z0-9]+', '-', name)}-{text.hexdigest()[:12]}.json"


def _load(path):
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {Product(*row["product"]): launch.Plan(**row["plan"]) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("plans in %s can't be read, so products are measured again: %s", path, error)
        return {}


def _store(path, known):
    """In one step, so that another process never reads half a file."""
    rows = [{"product": list(product), "plan": launch.plan_as_dict(plan)} for product, plan in known.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("plans can't be kept in %s: %s", path, error)
