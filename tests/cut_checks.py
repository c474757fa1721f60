"""Cut products of ranks that are threads of one process, so that no group is needed.

    TRITON_INTERPRET=1 python -m tests.cut_checks

runs the kernels of `templates/cut_kernels.py` on a CPU and compares them with the uncut product. One
rank runs at a time, up to where it exchanges: Triton's interpreter takes no more.
"""

import os
import threading
from dataclasses import replace

import torch

from carbon_compile.templates import cut, launch, matmul
from tests import interpreter


def bits(x):
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x.cpu()), bits(y.cpu()))


def chunk(x, dim, size, rank):
    """The rank's chunk of ceil(n / size) indices; the last ones may be shorter or empty."""
    n = x.shape[dim]
    step = -(-n // size)
    start = min(rank * step, n)
    return x.narrow(dim, start, min(step, n - start))


class Group:
    """Threads that take turns; each collective is a meeting of all."""

    def __init__(self, size):
        self.size, self.turn = size, threading.Lock()
        self.meeting, self.brought = threading.Barrier(size, timeout=120), [None] * size

    def meet(self, rank, x):
        """What every rank brought, in order."""
        self.brought[rank] = x
        self.turn.release()
        try:
            self.meeting.wait()
            brought = list(self.brought)
            self.meeting.wait()
        finally:
            self.turn.acquire()
        return brought

    def exchanges(self, rank, cut_dimension):
        def largest(x):
            return torch.stack(self.meet(rank, x)).amax(0)

        def swap(x):
            return torch.stack([rows[rank] for rows in self.meet(rank, x)])

        if cut_dimension == "contraction":
            return cut.Exchanges(contraction=largest, swap=swap, size=self.size, rank=rank)
        return cut.Exchanges(**{cut_dimension: largest})

    def run(self, function):
        """[function(rank) of each]; what a rank raises is raised here."""
        results, errors = [None] * self.size, []

        def member(rank):
            with self.turn:
                try:
                    results[rank] = function(rank)
                except BaseException as error:
                    errors.append(error)
                    self.meeting.abort()

        threads = [threading.Thread(target=member, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


def by_kernels(plan=None):
    """The engine of `cut_kernels`, on any device and with a plan of one's own; words that no smaller
    total would need may be asked for by an unknown length."""
    from carbon_compile.templates import cut_kernels

    def engine(a, b, bias, window, balance, dtype, k, exchanges):
        longest = k if k == cut.UNKNOWN else -(-k // exchanges.size)
        words = cut.words_of_total(window, longest) if exchanges.contraction else 0
        return cut_kernels.multiply(a, b, bias, window, balance, dtype, words, exchanges, plan)

    return engine


def product(a, b, bias, window, balance, dtype, dimension, engines, unknown=False, device="cpu"):
    """The whole result of a product cut along `dimension`, one engine a rank."""
    size, group = len(engines), Group(len(engines))
    k = cut.UNKNOWN if unknown else a.shape[1]

    def part(rank):
        x, y, z = a, b, bias
        if dimension == "contraction":
            x, y = chunk(a, 1, size, rank), chunk(b, 0, size, rank)
        elif dimension == "rows":
            x = chunk(a, 0, size, rank)
        else:
            y, z = chunk(b, 1, size, rank), None if bias is None else chunk(bias, 0, size, rank)
        x, y, z = (None if t is None else t.to(device) for t in (x, y, z))
        return engines[rank](x, y, z, window, balance, dtype, k, group.exchanges(rank, dimension)).cpu()

    parts = group.run(part)
    return torch.cat(parts, 1 if dimension == "columns" else 0)[: a.shape[0]]


def operands(m, n, k, seed=0):
    """Values over many binades, with zero, subnormal, huge, infinite and undefined ones among them."""
    g = torch.Generator().manual_seed(seed)

    def wild(*shape):
        return torch.randn(shape, generator=g) * torch.exp2(torch.randint(-12, 12, shape, generator=g).float())

    a, b = wild(m, k), wild(k, n)
    if m > 8 and n > 8 and k > 8:
        a[3], b[:, 5], b[2], a[6], a[7], b[4] = 0, 0, 0, a[6] * 1e-42, a[7] * 1e33, b[4] * 1e-41
        a[:, 1] = 0
        a[4, k - 1], a[5, 0], b[k // 2, 3] = float("inf"), -float("nan"), float("-inf")
    return a, b, wild(n)


LEVELS = launch.Plan(32, 32, 64, 4, 1)
LONG = launch.Plan(16, 16, 4096, 4, 1)  # few steps, of which a rank's padded contraction must be whole ones
PARTS = launch.Plan(16, 16, 64, 4, 1, parts=2, places=2)  # a last wave that only whole contractions have in parts
JOINT = launch.Plan(32, 16, 64, 4, 1, joint=True, swap=True, tma=True)


def check(m, n, k, window, balance, dimension, size, plan=None, splits=1, words=None, unknown=False, layout=0, dtype=torch.float32, device="cpu"):
    """None, or what differs: kernels on all ranks, and kernels and the twin by turns."""
    a, b, bias = operands(m, n, k, seed=m + k)
    if layout:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    want = matmul.exact_mm(a, b, window=window, balance=balance, bias=bias, out_dtype=dtype)
    if plan is not None:
        local = -(-k // size) if dimension == "contraction" else k
        plan = launch.split(plan, launch.padded_contraction(local), window, splits)
        plan = replace(plan, words=words or plan.words)
    kernels = by_kernels(plan)
    by_turns = [cut.multiply if r % 2 else kernels for r in range(size)]
    for engines in ([kernels] * size, by_turns):
        if engines is by_turns and device == "cuda" or engines is not by_turns and device == "cpu" and k > 1000:
            continue  # on a GPU there is one engine; what is long takes the interpreter seconds
        got = product(a, b, bias, window, balance, dtype, dimension, engines, unknown, device)
        if not same(got, want):
            return f"{int((bits(got) != bits(want)).sum())} of {got.numel()} differ"
    return None


def cases():
    for window in (16, 24):
        for balance in ("weight", "gradient"):
            for dimension in ("contraction", "columns", "rows"):
                yield dict(m=21, n=19, k=150, window=window, balance=balance, dimension=dimension, size=2, layout=balance == "gradient")
        more = dict(n=10, window=window, balance="weight", dimension="contraction")
        yield dict(more, m=11, k=300, size=3, plan=LEVELS, splits=2, dtype=torch.bfloat16)  # rows that don't divide
        yield dict(more, m=11, k=300, size=3, plan=LEVELS, splits=2, words=2)
        yield dict(more, m=40, k=140, size=2, plan=JOINT)
        yield dict(more, m=40, k=140, size=2, plan=PARTS)
        yield dict(more | {"dimension": "columns", "n": 40}, m=40, k=140, size=2, plan=PARTS)
        yield dict(more, m=9, k=140, size=2, plan=JOINT, splits=2, words=2, unknown=True, dtype=torch.float16)
        yield dict(more, m=9, k=70, size=2, unknown=True)
        yield dict(more, m=1, k=70, size=4)  # ranks without a row
        yield dict(more, m=5, k=2, size=2)  # one index a rank
    yield dict(m=2, n=10, k=90_000, window=24, balance="weight", dimension="contraction", size=2, plan=LONG)  # int32 is emptied on the way


def interpreted():
    interpreter.patch()
    count = 0
    for case in cases():
        wrong = check(**case)
        assert wrong is None, (wrong, case)
        count += 1
    print(count, "equal")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "these kernels run in Triton's interpreter"
    interpreted()
