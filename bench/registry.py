"""What is measured: a case prepares inputs, who competes on them, and the check of the bits.

A case's name is group/operation/shape/dtype. Its shapes belong to the device: a CPU gets small ones,
so that every case can be run, and tested, anywhere.
"""

import difflib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from bench.measure import wait


@dataclass(frozen=True)
class Cost:
    """The work of one call: `amount` in bytes moved ("B") or floating-point operations ("FLOP").

    Bytes are what has to be moved, each input read once and each output written once a pass; FLOP are
    those of the mathematical product. `int8` counts the int8 operations carbon makes of them.
    """

    amount: float
    unit: str
    int8: float = 0.0


class Contender:
    """One way to do a piece of work. `make()` gives the call, and is itself not timed.

    The first call's seconds are kept wherever it happens, because that is when compilers compile.
    """

    def __init__(self, name: str, make: Callable[[], Callable]):
        self.name, self.make = name, make
        self.call = None
        self.first_seconds = None

    def __call__(self):
        if self.call is not None:
            return self.call()
        call = self.make()
        wait()
        start = time.perf_counter()
        result = call()
        wait()
        self.call, self.first_seconds = call, time.perf_counter() - start
        return result


@dataclass(frozen=True)
class Work:
    """What its contenders all do; `name` tells works of one case apart ("" where there is one).

    `compiles` is False where an earlier work of the case has already compiled the same code.
    """

    name: str
    contenders: tuple[Contender, ...]
    cost: Cost | None = None
    compiles: bool = True


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs in memory.

    `check(names)` compares carbon's bits, and returns what it compared; it raises AssertionError where
    they differ. `names` are the contenders to be timed, so that it needn't compile others. `absent` are
    contenders left out, with the reason.
    """

    works: tuple[Work, ...]
    check: Callable[[Collection[str]], str]
    absent: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """One entry of the registry. `prepare()` allocates and may raise ImportError for what is missing."""

    group: str
    operation: str
    shape: str
    dtype: str
    prepare: Callable[[], Prepared]

    @property
    def name(self) -> str:
        return "/".join((self.group, self.operation, self.shape, self.dtype))


def cases(device: str) -> list[Case]:
    """All cases, with shapes for "cuda" or "cpu"."""
    from bench import cases_models, cases_products, cases_reductions

    return [*cases_products.cases(device), *cases_reductions.cases(device), *cases_models.cases(device)]


def select(cases: list, substrings: list[str], *, explicit: str = "e2e") -> list:
    """The cases whose name holds any of the substrings, in the registry's order; without any, all.

    Those of the group `explicit` cost minutes each: they are selected only by a substring that fits
    nothing else. Raises ValueError for a substring that fits no case.
    """
    if not substrings:
        return [case for case in cases if case.group != explicit]
    found = set()
    for text in substrings:
        fitting = [case for case in cases if text in case.name]
        if not fitting:
            raise ValueError(f"no case has {text!r} in its name{_hint(text, cases)}")
        cheap = [case for case in fitting if case.group != explicit]
        found.update(case.name for case in cheap or fitting)
    return [case for case in cases if case.name in found]


def taking_part(name: str, wanted: list[str], names: Collection[str]) -> bool:
    """Whether the contender is wanted: by its whole name, or by a part that is nobody's whole name."""
    return not wanted or any(text == name or (text in name and text not in names) for text in wanted)


def _hint(text, cases):
    words = {word for case in cases for word in (*case.name.split("/"), case.name)}
    near = difflib.get_close_matches(text, sorted(words), 1)
    return f"; did you mean {near[0]}?" if near else "; --list shows them all"
