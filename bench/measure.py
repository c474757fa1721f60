"""Time, side by side: every round gives each contender one turn, so a drifting clock touches all alike."""

import functools
import statistics
import time
from dataclasses import dataclass, field

import torch

WARM_CALLS = 3  # the first compiles, CUDA graphs record at the second and replay from the third
_FLUSHED = 1 << 28  # bytes, several times any L2 cache
_FLUSHES = 20  # of 0.07 to 0.1 ms each on a current card


def wait(device: str | None = None) -> None:
    """Until the GPU has nothing left to do; nothing where none is in use."""
    if device != "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass
class Timing:
    """One contender's result: milliseconds of each round, or the first line of why there are none."""

    rounds: list[float] = field(default_factory=list)  # ms
    compile_seconds: float | None = None  # the first call less a warm one; who comes later may find kernels of who came before
    peak_bytes: int | None = None  # allocated at most in a warm call, over what was allocated before
    error: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def spread(self) -> float | None:
        """The interquartile range in ms."""
        if not self.rounds:
            return None
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive") if len(self.rounds) > 1 else self.rounds * 3
        return high - low


def first_line(error: BaseException) -> str:
    """`Type: first line`, which is what a table has room for."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Clock:
    """Times calls on a device.

    CUDA: events around the call, on a GPU that has just overwritten its caches several times. That takes
    1 to 2 ms, by which the host is ahead when the call's first kernel starts; a call that takes the host
    longer than that is timed with its waits for the host, as it would be in a program. CPU: wall clock.
    """

    def __init__(self, device: str):
        self.device = device
        self.cold = torch.empty(_FLUSHED, dtype=torch.int8, device=device) if device == "cuda" else None

    def round(self, calls) -> list:
        """One turn for each call, in order: ms, or the exception that it raised."""
        turns = [self._turn(call) for call in calls]
        wait(self.device)
        return [turn() if callable(turn) else turn for turn in turns]

    def _turn(self, call):
        try:
            return self._on_cuda(call) if self.device == "cuda" else self._on_cpu(call)
        except Exception as error:
            return error

    def _on_cuda(self, call):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_FLUSHES):
            self.cold.zero_()
        start.record()
        call()
        end.record()
        return functools.partial(start.elapsed_time, end)

    def _on_cpu(self, call):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


def measure(work, clock: Clock, rounds: int) -> dict[str, Timing]:
    """A Timing for each contender of the work, all warm before the first round."""
    timings = {contender.name: Timing() for contender in work.contenders}
    running = [contender for contender in work.contenders if _warm(contender, timings[contender.name], clock.device)]
    for number in range(rounds):
        # Nobody always follows the same neighbour.
        turn = number % max(1, len(running))
        order = running[turn:] + running[:turn]
        for contender, result in zip(order, clock.round(order), strict=True):
            if isinstance(result, Exception):
                timings[contender.name] = Timing(error=first_line(result))
            else:
                timings[contender.name].rounds.append(result)
        running = [contender for contender in running if not timings[contender.name].error]
    for contender in running:
        timing = timings[contender.name]
        if work.compiles and timing.rounds and contender.first_seconds is not None:
            timing.compile_seconds = max(0.0, contender.first_seconds - timing.median / 1e3)
    return timings


def _warm(contender, timing, device) -> bool:
    try:
        for _ in range(WARM_CALLS):
            contender()
        wait(device)
        if device == "cuda":
            timing.peak_bytes = _peak(contender)
    except Exception as error:
        timing.error = first_line(error)
    return not timing.error


def _peak(call):
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    wait()
    return torch.cuda.max_memory_allocated() - before


def ceilings(clock: Clock, rounds: int = 10) -> dict[str, float]:
    """What this machine reaches now: bytes/s ("B") of a large copy, FLOP/s ("FLOP") of a large product.

    The copy counts bytes read and written. The product is cuBLAS in bfloat16; on a CPU, BLAS in float32.
    """
    large = clock.device == "cuda"
    source = torch.empty(1 << (30 if large else 25), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    n = 8192 if large else 512
    a = torch.randn(n, n, device=clock.device).to(torch.bfloat16 if large else torch.float32)
    copy, product = lambda: target.copy_(source), lambda: a @ a
    clock.round([copy, product])
    turns = [clock.round([copy, product]) for _ in range(rounds)]
    copied, multiplied = (statistics.median(times) / 1e3 for times in zip(*turns, strict=True))
    return {"B": 2 * source.numel() / copied, "FLOP": 2 * n**3 / multiplied}
