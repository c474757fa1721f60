"""Exact sums of columns: the kernels beside the definition in graph operations, and which sums take them."""

import os
import pathlib

import pytest
import torch

from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import norm, registry
from carbon_compile.lowering import prims as P
from carbon_compile.lowering.columns import standard

from .forks import Forks
from .offline import printed

registry.load()
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def matrix(rows, columns, dtype, seed=0):
    """[rows, columns]: magnitudes that differ a little or by everything, ties, subnormals, zeros of both signs,
    columns of one magnitude (whose high parts all round up), and what is not finite, alone and together."""
    g = torch.Generator().manual_seed(seed + rows)
    spread = torch.randint(-30, 31, (rows, columns), generator=g) * (torch.arange(columns) % 3)
    x = torch.randn(rows, columns, generator=g) * torch.exp2(spread.float().clamp(-120, 120))
    bits = torch.randint(-(2**31), 2**31, (rows, columns), generator=g).to(torch.int32)
    special = [
        lambda c: c.copy_(bits[:, 1].view(torch.float32)),
        lambda c: c.clamp_(-1, 1).mul_(1e-41),
        lambda c: c.copy_(torch.randint(-3, 4, (rows,), generator=g) * 2.0**-15 + torch.randint(0, 2, (rows,), generator=g) * 2.0**24),
        lambda c: c.fill_(-0.0),
        lambda c: c.fill_(0.0),
        lambda c: c.fill_(torch.finfo(torch.float32).max),
        lambda c: c.fill_(-1.9999998807907104),
        lambda c: c.abs_().neg_(),
        lambda c: c.mul_(1e-30).mul_(1e-8),
        lambda c: c.mul_(1e30),
        lambda c: c[-1:].fill_(float("inf")),
        lambda c: c[:1].fill_(float("-inf")),
        lambda c: (c[:1].fill_(float("-inf")), c[-1:].fill_(float("inf"))),
        lambda c: c[rows // 2 :].fill_(float("nan")),
        lambda c: (c[:1].copy_(torch.tensor([-1], dtype=torch.int32).view(torch.float32)), c[-1:].fill_(float("-inf"))),  # a negative NaN
    ]
    for place, change in enumerate(special):
        if 2 * place + 1 < columns:
            change(x[:, 2 * place + 1])
    return x.to(dtype)


def compare_sums(device):
    from carbon_compile.templates import column_sums

    for rows, columns in ((1, 40), (2, 33), (129, 40), (700, 70)):
        for dtype in TYPES:
            x = matrix(rows, columns, dtype)
            padded = torch.nn.functional.pad(x, (0, 5))[:, :columns]  # rows apart
            for out in TYPES:
                assert_bitwise(column_sums.column_sum(x.to(device), out).cpu(), P.sum(x, [0], dtype=out))
            moved = torch.empty_strided(padded.shape, padded.stride(), dtype=dtype, device=device).copy_(padded)
            assert_bitwise(column_sums.column_sum(moved, torch.float32).cpu(), P.sum(x, [0]))
            assert_bitwise(column_sums.column_sum(moved, torch.float32).cpu(), P.sum(x, [0]))  # by what the first one prepared


def compare_norms(device):
    from carbon_compile.templates import column_sums

    for rows, columns in ((3, 40), (300, 70)):
        for g_type, h_type in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
            g, x = matrix(rows, columns, g_type), matrix(rows, columns, h_type, 1)
            x[:, 12:] = torch.randn(rows, columns - 12).to(h_type)
            mean, rstd = x[:, 12:].float().mean(1, True), x[:, 12:].float().std(1, keepdim=True).reciprocal()
            for average in (mean, None):
                h = standard(x, average, rstd)
                weight = norm.normalize_scale_backward(g, x, average, rstd, torch.empty(columns, dtype=h_type))
                bias = norm.normalize_shift_backward(g, torch.empty(columns))
                for bias_type in (torch.float32, None):
                    found = column_sums.norm_gradients(g.to(device), h.to(device), h_type, bias_type)
                    assert_bitwise(found[0].cpu(), weight)
                    assert (found[1] is None) == (bias_type is None)
                    if bias_type is not None:
                        assert_bitwise(found[1].cpu(), bias)
                    stats = [t if t is None else t.to(device) for t in (average, rstd)]
                    made = column_sums.norm_gradients(g.to(device), x.to(device), h_type, bias_type, *stats)  # of x itself
                    assert_bitwise(made[0].cpu(), weight)
                    assert bias_type is None or (assert_bitwise(made[1].cpu(), bias) is None)
            narrow = column_sums.norm_gradients(g.to(device), x.to(device), h_type, None)[0]  # h in any type is widened
            assert_bitwise(narrow.cpu(), P.sum(P.mul(g.float(), x.float()), [0], dtype=h_type))


# --- how a sum comes about: by binary64 where that leaves no doubt ---


def plan(columns=32, span=40, rows=8, warps=4, unroll=2, registers=128, block=16, again=8, programs=3):
    """Any choices for the matrices here: several slabs, and several steps of each; few programs to read again."""
    from carbon_compile.templates import launch

    launch.column_sums_plan = lambda m, n, itemsize, sums, hw: launch.Slab(columns, span, rows, warps, unroll, registers, block, again, programs)


def run_recipe(g, h, weight, bias):
    """(sums of g h, sums of g, which columns of each kind were uncertain [kinds, N]), from scratch full of NaN."""
    from carbon_compile.templates import column_sums
    from carbon_compile.templates.matmul_recipe import view

    n, recipe = g.shape[1], column_sums._recipe(g, h, weight is not None, bias is not None)
    results = [None if dtype is None else torch.empty(n, dtype=dtype, device=g.device) for dtype in (bias, weight)]
    buffers = [g, g if h is None else h, *(g if r is None else r for r in results), *recipe.scratch(g.device)]
    buffers[4].fill_(255)
    recipe.run(buffers)
    settle = recipe.launches[1]
    listed, magnitudes, _, arrived = (view(buffers, block).cpu() for block in settle.arguments[3:7])
    kinds, block = len([r for r in results if r is not None]), settle.constants["BLOCK"]
    places, again = listed[1 : 1 + listed[0]], recipe.launches[2]
    assert len(set(places.tolist())) == len(places) and (arrived[places] == again.arguments[-1]).all()  # each chunk once
    blocks = torch.zeros(len(arrived), dtype=torch.bool).index_fill_(0, places.long(), True)
    inside = blocks.view(kinds, -1).repeat_interleave(block, 1)[:, :n]
    return results[1], results[0], inside & (magnitudes.view(kinds, n) >= 0)


# P of a type: the bits of a significand.
_BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def ties(rows, dtype, grown, down, exponent=0):
    """([rows, 32], whether a column's sum is open), 100 rows or more: all slabs' largest magnitude is 2^exponent, but a last one
    2^`grown` times that, A, and the sum of all that has no bit below the column's unit u lies halfway from A to its
    neighbour.

    Columns differ in what else they hold: 0-3 nothing; 4-15 two numbers, 2^-`down` times A, which differ by their
    last bit; 16-23 as those, negative; 24-27 zeros of both signs; 28-31 numbers of A's own binade that cancel.
    """
    bits, top = _BITS[dtype], exponent + grown
    x = torch.zeros(rows, 32, dtype=torch.float64)
    x[0:96:8], x[4:96:8] = 2.0**exponent, -(2.0**exponent)
    x[-1], x[-2] = 2.0**top, 2.0 ** (top - 24)
    if bits == 24:  # that is small itself
        x[-2], x[-3] = 2.0 ** (top - 1) + 2.0 ** (top - 24), -(2.0 ** (top - 1))
    one, other = 2.0 ** (top - down) * (1 + 2.0 ** (1 - bits)), -(2.0 ** (top - down))
    x[rows // 2, 4:16], x[rows // 2 + 1, 4:16] = one, other
    x[rows // 2, 16:24], x[rows // 2 + 1, 16:24] = -one, -other
    x[9:11, 24:28] = -0.0
    x[rows // 2, 28:], x[rows // 3, 28:] = 1.5 * 2.0 ** (top - 1), -1.5 * 2.0 ** (top - 1)
    narrow = x.to(dtype)
    assert torch.equal(narrow.double(), x)
    open_ = torch.zeros(32, dtype=torch.bool)
    open_[4:24] = top - down + 1 - bits < top + 1 - 38  # a last bit below the unit
    return narrow, open_


def compare_ties(device):
    """Where terms are rounded, the rounded sum of what they were is another number, by which each limit shows.

    The first rows tell less than later ones, by up to more binades than are expected; sums of products, too.
    """
    differ = 0
    for dtype, span, unroll, block in ((torch.float32, 40, 2, 16), (torch.bfloat16, 48, 4, 32)):
        plan(span=span, unroll=unroll, block=block)
        for grown in (0, 3, 4, 5, 9):
            for down in (38 - _BITS[dtype], 39 - _BITS[dtype], 40 - _BITS[dtype]):
                x, open_ = ties(100, dtype, grown, down, exponent=grown - 30)
                wanted = P.sum(x, [0])
                differ += int((x.double().sum(0).float() != wanted).sum())
                h = torch.ones(100, 32)
                found, bias, uncertain = run_recipe(x.to(device), h.to(device), torch.float32, torch.float32)
                assert_bitwise(found.cpu(), wanted)
                assert_bitwise(bias.cpu(), wanted)
                # The fewer binades later rows grow by, the more is counted; where they grow by too many all is open.
                small = (x.abs() > 0) & (x.double().abs() < 2.0 ** (grown - 30 + 5 - 39 + _BITS[dtype]))
                assert torch.equal(uncertain[0], small.any(0) | (grown > 4)), (dtype, grown, down)
                assert not (open_ & ~uncertain[0]).any() and (grown != 4 or torch.equal(open_, uncertain[0]))
                if dtype == torch.float32:
                    assert torch.equal(uncertain[0], uncertain[1])
    assert differ > 100


def compare_cancelled(device):
    """Sums of far fewer bits than their terms, that nothing but terms can settle; beside others, and what is not finite."""
    g = torch.Generator().manual_seed(3)
    inf, nan = float("inf"), float("nan")
    for rows, options in ((150, {}), (333, {"span": 96, "unroll": 4, "again": 16, "programs": 7, "block": 32})):
        plan(**options)
        half = torch.randn(rows // 3, 64, generator=g)
        x = torch.cat([half, -half[torch.randperm(rows // 3, generator=g)], 2.0**-24 * torch.randn(rows - 2 * (rows // 3), 64, generator=g)])
        x[:, 16:32] = torch.randn(rows, 16, generator=g)
        x[:, 40:44], x[3, 41], x[rows - 1, 42], x[rows - 2 :, 43] = x[:, 40:44].abs(), inf, nan, -inf
        x[5, 45], x[6, 45] = inf, -inf
        x[0, 50] = torch.finfo(torch.float32).max
        x[1, 51:53], x[2, 52] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).max
        for scale in (1.0, 2.0**-100, 2.0**-126, 2.0**-140):
            y = x * scale
            h = torch.randint(0, 3, (rows, 64), generator=g).float() - 1.0
            weight, bias, uncertain = run_recipe(y.to(device), h.to(device), torch.float32, torch.bfloat16)
            assert_bitwise(bias.cpu(), P.sum(y, [0], dtype=torch.bfloat16))
            assert_bitwise(weight.cpu(), P.sum(P.mul(y, h), [0]))
            if scale == 1.0:
                assert uncertain[0, :16].any() and not uncertain[0, 16:32].all() and not uncertain[:, [41, 42, 43, 45]].any()


def compare_first_rows(device):
    """Columns that are zero, or not finite, wherever a slab's first rows are, or only there."""
    plan(span=80, unroll=2)
    g = torch.Generator().manual_seed(1)
    for inside in (True, False):
        for value in (0.0, -0.0, 1.0, -(2.0**-149), 2.0**-122, 3e38, float("inf"), float("-inf"), float("nan")):
            x = torch.zeros(150, 40)
            x[:, ::2] = torch.randn(150, 20, generator=g)
            x[5 if inside else 77, ::3] = value
            x[81 if inside else 149, ::5] = -value
            for dtype in (torch.float32, torch.bfloat16):
                y = x.to(dtype)
                h = torch.ones(150, 40).to(dtype)
                weight, bias, _ = run_recipe(y.to(device), h.to(device), dtype, dtype)
                assert_bitwise(weight.cpu(), P.sum(y, [0], dtype=dtype))
                assert_bitwise(bias.cpu(), P.sum(y, [0], dtype=dtype))


def compare_padding(device):
    """Slabs that begin with zeros, or hold nothing else, leave no doubt about a column."""
    plan(columns=64, span=128, unroll=4, again=32)
    g = torch.Generator().manual_seed(0)
    x, h = 1e-3 * torch.randn(4096, 64, generator=g), torch.randn(4096, 64, generator=g)
    x[torch.arange(4096) % 512 >= 384] = 0.0
    weight, bias, uncertain = run_recipe(x.to(device), h.to(device), torch.float32, torch.float32)
    assert_bitwise(weight.cpu(), P.sum(P.mul(x, h), [0]))
    assert_bitwise(bias.cpu(), P.sum(x, [0]))
    assert not uncertain.any()


def compare_additions(device):
    """So many rows that additions err though all terms are whole: by a few units in the first 16 columns, across a tie."""
    plan(span=2048, rows=64, unroll=4, again=512)
    rows, low, unit = 100_000, 2.0**-14, 2.0**-37
    x = torch.where(torch.arange(rows) < rows // 2, 1.75, -1.75)[:, None].repeat(1, 32).double()
    x[torch.arange(rows) % 2048 < 256] /= 16  # from which a slab just knows that all others are whole
    x[-240:], x[-1] = 0.0, 1.0  # now the total is 1
    for slab in range(20, 28):  # sums are beyond 2^16 there, and of their last bit a unit is half
        x[2048 * slab + 300, :16], x[2048 * slab + 301, :16] = low + unit, -low
        x[2048 * slab + 300 : 2048 * slab + 302, 16:] = 0.0
    x[-9:-5, :16] = torch.tensor([low + 2.0**-24, -low, low, -low - 4 * unit], dtype=torch.float64)[:, None]
    x[-40:-36] = 1.75  # of those eight slabs five are of the first half: 1 again
    narrow = x.float()
    assert torch.equal(narrow.double(), x)
    definition = P.sum(narrow, [0])
    assert (definition[:16] == 1 + 2.0**-23).all() and (definition[16:] == 1).all()
    found, bias, uncertain = run_recipe(narrow.to(device), torch.ones(rows, 32, device=device), torch.float32, torch.float32)
    assert_bitwise(found.cpu(), definition)
    assert_bitwise(bias.cpu(), definition)
    assert uncertain[:, :16].all() and not uncertain[:, 16:].any()


def test_how_far_additions_can_err():
    """The sum over all additions of how many elements are in their results, by going through them."""
    from carbon_compile.templates import column_sums, launch

    for options in ((32, 40, 8, 4, 2), (32, 33, 8, 4, 4), (64, 2048, 8, 4, 4), (16, 70, 32, 4, 6)):
        slab = launch.Slab(*options, 128, 16, 8, 3)
        for rows in (1, 45, 300, 5000):
            splits, total = -(-rows // slab.span), 0
            for split in range(splits):
                steps = -(-slab.span // (slab.rows * slab.unroll))
                for _ in range(slab.rows):
                    held = 0
                    for _ in range(steps):
                        part = 0
                        for _ in range(0, slab.unroll, 2):
                            total += 2 + (part + 2 if part else 0)
                            part += 2
                        held += part
                        total += held
                total += sum(held * r for r in range(2, slab.rows + 1))
                total += held * slab.rows * (split + 1) if split else 0
            assert total <= column_sums._additions(slab, splits) <= 1.6 * total + 3 * splits * slab.rows * steps * slab.unroll


# --- 16-bit types: sums without rounding, and where they are not to be had ---


def narrow_plan(columns=32, span=40, rows=8, warps=4, unroll=2, block=16, group=2, helpers=2, again=32):
    """Several slabs, steps, chunks and helpers of the matrices here."""
    from carbon_compile.templates import launch

    launch.narrow_sums_plan = lambda m, n, aligned, hw: launch.NarrowSlab(columns, span, rows, warps, unroll, 128, block, group, helpers, again)


def settled(x, dtype):
    """(sums of columns of x, which of their blocks were read again), from scratch full of NaN."""
    from carbon_compile.templates import narrow_sums
    from carbon_compile.templates.matmul_recipe import view

    recipe, out = narrow_sums.recipe(x), torch.empty(x.shape[1], dtype=dtype, device=x.device)
    buffers = [x, x, out, x, *recipe.scratch(x.device)]
    buffers[4].fill_(255)
    recipe.run(buffers)
    arrived = view(buffers, recipe.launches[1].arguments[4]).cpu()
    assert set(arrived.tolist()) <= {0, recipe.launches[1].constants["HELPERS"]}
    return out.cpu(), arrived > 0


# (the largest magnitude's exponent, a small element, whether it needs rounding): its last bit is the column's unit, or
# half of it, a tie; subnormal numbers, too.
_BFLOAT16_EDGES = [(100, 129 * 2.0**63, False), (100, 129 * 2.0**62, True), (0, 129 * 2.0**-37, False), (0, 129 * 2.0**-38, True), (0, 129 * 2.0**-52, True),
                   (-60, 129 * 2.0**-97, False), (-60, 129 * 2.0**-98, True), (127, 129 * 2.0**90, False), (127, 129 * 2.0**89, True),
                   (-96, 2.0**-133, False), (-95, 2.0**-133, True)]  # fmt: skip
_FLOAT16_EDGES = [(15, 1025 * 2.0**-22, False), (15, 1025 * 2.0**-23, True), (15, 2.0**-24, True), (13, 2.0**-24, False), (14, 2.0**-24, True)]


def compare_edges(device, rows=150):
    """Just within the binades where no term is rounded, and just below. All that is larger cancels."""
    for dtype, edges, block in ((torch.bfloat16, _BFLOAT16_EDGES, 16), (torch.float16, _FLOAT16_EDGES, 32)):
        narrow_plan(block=block)
        x = torch.zeros(rows, block * len(edges), dtype=torch.float64)
        for place, (top, small, _) in enumerate(edges):
            some = slice(block * place + 3, block * place + 7)
            x[0, some], x[-1, some] = 1.5 * 2.0**top, -1.5 * 2.0**top
            x[rows // 2 + 2 : rows // 2 + 9, some] = small
        narrow = x.to(dtype)
        assert torch.equal(narrow.double(), x)
        rounded = torch.tensor([edge[2] for edge in edges])
        definition = P.sum(narrow, [0])
        assert torch.equal((definition.double() != x.sum(0)).view(-1, block).any(1), rounded)
        found, again = settled(narrow.to(device), torch.float32)
        assert_bitwise(found, definition)
        assert torch.equal(again, rounded), (dtype, block)


def compare_mixed(device):
    """Blocks of columns of which all, a few or no slabs hold terms that are rounded, or what is not finite."""
    inf, nan = float("inf"), float("nan")
    g = torch.Generator().manual_seed(5)
    for rows, options in ((150, {}), (333, {"span": 16, "unroll": 1, "group": 4, "helpers": 3, "again": 16}), (70, {"span": 80, "helpers": 1, "group": 1})):
        narrow_plan(**options)
        for dtype in TYPES[1:]:
            x = torch.randn(rows, 160, generator=g).clamp(-4, 4)
            x = torch.where(x.abs() < 2.0**-10, 0.0, x)
            low = 2.0**-40 if dtype == torch.bfloat16 else 2.0**-24
            x[:, 16:20], x[:, 20:24], x[:, 24:28] = 0.0, -0.0, x[:, 24:28] * low  # dead columns, and small ones
            x[:, 33:50] *= 2.0**13
            x[rows // 2, 33:35] = low
            x[::2, 48:64] = low * torch.randint(1, 200, (len(x[::2]), 16), generator=g)
            x[-1, 66], x[3, 70] = inf, -inf
            x[2, 81], x[-2, 81], x[2, 82], x[1, 82] = inf, -inf, -inf, low
            x[rows // 3, 97], x[0, 98], x[5, 98] = nan, nan, inf
            x[rows // 2, 113], x[1, 113] = torch.finfo(dtype).max, low
            x[:, 130], x[:, 135] = torch.finfo(dtype).max, 0.75 * torch.finfo(dtype).max  # finite terms, infinite totals
            x = x.to(dtype)
            again = torch.tensor([False, False, True, True, True, True, True, True, False, False])
            out = dtype if rows == 150 else torch.float32
            found, read = settled(x.to(device), out)
            assert_bitwise(found, P.sum(x, [0], dtype=out))
            assert torch.equal(read, again), (read, dtype)


def compare_tall(device):
    """More rows than leave binary64 room for all terms: fewer binades then."""
    from carbon_compile.templates import narrow_sums

    rows = 100_000
    assert narrow_sums.binades(torch.bfloat16, 1 << 15) == 30 and narrow_sums.binades(torch.float16, 1 << 15) == 27
    assert narrow_sums.binades(torch.bfloat16, rows) == 28 and narrow_sums.binades(torch.float16, rows) == 25
    x = torch.full((rows, 32), 255 / 128)
    x[rows // 2 :] *= -1.0
    x[7] = x[-1] = 129 * 2.0**-35
    x[8, 16:] = 129 * 2.0**-36
    x = x.bfloat16()
    found, again = settled(x.to(device), torch.float32)
    assert_bitwise(found, P.sum(x, [0]))
    assert torch.equal(again, torch.tensor([False, True]))


@pytest.fixture(scope="module")
def interpreted():
    """Forks of a process in which kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    imports = "from tests import interpreter; interpreter.patch(); import tests.test_column_sums"
    with Forks(imports, {**os.environ, "TRITON_INTERPRET": "1"}) as forks:
        yield forks


@pytest.mark.parametrize(
    "check",
    ["compare_sums", "compare_norms", "plan(); compare_norms", "compare_ties", "compare_cancelled", "compare_first_rows", "compare_additions", "compare_padding",
     "plan(); narrow_plan(span=150, rows=32, again=64); compare_sums", "narrow_plan(span=2048, rows=256, unroll=8, again=512); compare_tall", "compare_edges('cpu'); compare_mixed"],
)  # fmt: skip
def test_in_the_interpreter(check, interpreted, tmp_path):
    script = tmp_path / "check.py"
    script.write_text(f"from tests.test_column_sums import *; {check}('cpu'); print('equal')")
    returned, shown = interpreted.run(script, pathlib.Path(__file__).parents[1])
    assert returned == 0 and shown.endswith("equal\n"), shown[-3000:]


# --- which sums are one kernel ------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.rms, self.activation = torch.nn.RMSNorm(32), activation

    def forward(self, x):
        return self.rms(x + self.down(self.activation(self.up(self.norm(x)))))


def step(module, x, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    return torch.autograd.grad(y.float().square().mean(), [x, *module.parameters()])


@pytest.fixture
def placed(monkeypatch):
    """Graphs of CPUs take the nodes that those of GPUs do; counts of them in all final graphs."""
    from carbon_compile import backend
    from carbon_compile.lowering import columns

    found, place = [], columns.place

    def placing(gm):
        place(gm)
        found.extend(str(n.target).removeprefix("carbon.").removesuffix(".default") for n in gm.graph.nodes if n.target in (*columns._OURS, *columns._SCALES.values()))
        gm.graph.lint()

    monkeypatch.setattr(columns, "on_gpu", lambda x: True)
    monkeypatch.setattr(backend.columns, "place", placing)
    return found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_a_model(placed, monkeypatch, autocast, dynamic):
    torch.manual_seed(0)
    module, x = Model(torch.nn.functional.gelu), torch.randn(4, 80, 32, requires_grad=True)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        ours = step(torch.compile(module, backend="carbon", dynamic=dynamic), x, autocast)
    monkeypatch.undo()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        assert_bitwise(ours, step(torch.compile(module, backend="carbon", dynamic=dynamic), x, autocast))
    assert sorted(placed) == ["column_sum", "column_sum", "norm_gradients_of", "norm_scale_gradient_of"]


def test_what_is_computed_on_the_way_stays_in_the_graph(placed):
    x, scale = torch.randn(300, 40), torch.randn(40, requires_grad=True)
    run = lambda function: [y := function(x, scale), *torch.autograd.grad(y.sum(), scale)]  # noqa: E731
    torch._dynamo.reset()
    found = run(torch.compile(lambda x, scale: (x * scale).exp().sum(0), backend="carbon"))
    assert placed == []
    columns = torch.stack([P.sum(P.exp(P.mul(x[:, j], scale[j])), [0]) for j in range(40)])
    assert_bitwise(found[0], columns)


@pytest.mark.parametrize("average", [True, False])
def test_a_norm_whose_gradient_is_computed_on_the_way(placed, monkeypatch, average):
    """Its weight's gradient is graph operations, as on a CPU."""
    x, w = torch.randn(3, 100, 40, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 40)
    normalised = torch.nn.functional.layer_norm if average else torch.nn.functional.rms_norm

    def gradients():
        given = [t.clone().requires_grad_() for t in (x, w)]
        with torch._inductor.config.patch(force_disable_caches=True):
            y = torch.compile(lambda x, w: normalised(x, (40,), w).exp(), backend="carbon")(*given)
        return torch.autograd.grad(y.sum(), given)

    torch._dynamo.reset()
    ours = gradients()
    assert placed == []
    monkeypatch.undo()
    torch._dynamo.reset()
    assert_bitwise(ours, gradients())


def test_a_backward_pass_keeps_what_a_norm_read(placed, monkeypatch):
    """And nothing of what it made, in models too, where sums lie between: x once, and two numbers a row."""
    from carbon_compile.lowering import columns

    kept, place = [], columns.place

    def placing(gm):
        if any(n.target in columns._OURS for n in gm.graph.nodes):
            kept.extend((tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in gm.graph.nodes if n.op == "placeholder")
        place(gm)

    monkeypatch.setattr(columns, "place", placing)
    module = torch.nn.Sequential(*(torch.nn.LayerNorm(32, dtype=torch.bfloat16) for _ in range(3)))
    x = torch.randn(4, 80, 32).bfloat16().requires_grad_()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(module, backend="carbon")(x).float().square().sum().backward()
    large = [dtype for shape, dtype in kept if shape == (4, 80, 32)]
    assert large and set(large) == {torch.bfloat16}
    assert {dtype for shape, dtype in kept if shape == (4, 80, 1)} == {torch.float32}


@pytest.mark.parametrize("first", ["column_sum", "norm_scale_gradient"])
def test_a_pair_in_any_order(first):
    from carbon_compile.lowering import columns

    class Sums(torch.nn.Module):
        def forward(self, g, h):
            scale = lambda: torch.ops.carbon.norm_scale_gradient(g, h, dtype=torch.float32) + 1.0  # noqa: E731
            shift = lambda: torch.ops.carbon.column_sum(g, dtype=torch.bfloat16) + 1.0  # noqa: E731
            if first == "column_sum":
                b = shift() * 2.0
                return scale(), b
            w = scale() * 2.0
            return w, shift()

    inputs = matrix(300, 40, torch.float32), torch.randn(300, 40)
    gm = torch.fx.symbolic_trace(Sums())
    expected = gm(*inputs)
    for node in gm.graph.nodes:  # as a final graph has them
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverloadPacket):
            node.target = node.target.default
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        found = {}

        class Values(torch.fx.Interpreter):
            def run_node(self, n):
                value = super().run_node(n)
                found[n] = value
                return value

        Values(gm).run(*fakes)
    for node, value in found.items():
        node.meta["val"] = value
    columns.place(gm)
    gm.graph.lint()
    assert [n.target for n in gm.graph.nodes if n.target in registry.TEMPLATES] == [columns.NORM_GRADIENTS]
    assert_bitwise(gm(*inputs), expected)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_statistics_that_were_widened_are_not_narrowed(given):
    """The kernels take them in float32."""
    from carbon_compile.lowering import columns

    graph, cast, nodes = torch.fx.Graph(), torch.ops.carbon.cast.default, []
    with torch._subclasses.FakeTensorMode():
        for name, shape in {"g": (300, 40), "x": (300, 40), "mean": (300, 1), "rstd": (300, 1)}.items():
            node = graph.placeholder(name)
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16 if name in "gx" else given)
            if node.meta["val"].dtype is not torch.float32:
                node = graph.call_function(cast, (node,), {"dtype": torch.float32})
                node.meta["val"] = torch.empty(shape)
            nodes.append(node)
        made = graph.call_function(columns.SCALE_GRADIENT_OF, tuple(nodes), {"dtype": torch.float32})
        made.meta["val"] = torch.empty(40)
    graph.output(made)
    gm = torch.fx.GraphModule({}, graph)
    columns.place(gm)
    taken = [[a.meta["val"].dtype for a in n.args] for n in gm.graph.nodes if n.target is columns.SCALE_GRADIENT_OF]
    assert taken == ([[torch.bfloat16] * 2 + [torch.float32] * 2] if given is torch.float32 else [])


# --- other machines -----------------------------------------------------------------------------------

OFFLINE = """
import itertools

import torch
from triton.runtime.jit import MockTensor

from carbon_compile.templates import column_sums, narrow_sums
from carbon_compile.templates.matmul_recipe import Block
from tests.offline import pretend

types, sums = (torch.float32, torch.bfloat16, torch.float16), ((0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 2))
# On older GPUs each type, one of the narrow kernels, and each way to h.
cases = {90: [*itertools.product(types, sums)], 80: list(zip(types, sums[2:], strict=True)) + [(types[1], sums[0])]}
for capability, chosen in cases.items():
    pretend(capability)
    for dtype, (scale, shift, stats) in chosen:
        g = torch.empty(12288, 768, dtype=dtype, device="meta")
        h = torch.empty(12288, 768, device="meta") if scale else None
        recipe, stored = column_sums.warmable(g, h, torch.float32 if scale else None, torch.float32 if shift else None, "cuda", stats)
        narrow = dtype in narrow_sums.TYPES and not scale
        first, last = (narrow_sums.slabs_kernel, narrow_sums.settle_kernel) if narrow else (column_sums.slabs_kernel, column_sums.again_kernel)
        assert recipe.launches[0].kernel is first
        for step in recipe.launches:
            arguments = [MockTensor(getattr(a, "dtype", None) or stored[a.buffer]) if isinstance(a, Block) else a for a in step.arguments]
            compiled = step.kernel.warmup(*arguments, grid=(step.grid,), **step.constants)
            ptx = compiled.asm["ptx"]
            large = dtype is torch.float32 or scale  # for the cache, which the first kernel's operands then leave first
            assert ("ld.global.L1::evict_first" in ptx) == (step.kernel is first and bool(large))
            ptx = ptx.replace(".L1::evict_first", "").replace(".L2::cache_hint", "")
            assert "fma.rn" not in ptx and ("ld.global.v4.b32" in ptx or step.kernel is column_sums.settle_kernel)
            assert ("gpu.acq_rel.add.u32" in ptx) == (step.kernel is last)
            if step.kernel is narrow_sums.slabs_kernel:
                assert ("max.u16x2" in ptx) == (capability == 90) and "cvt.f64" not in ptx
            if step.kernel is not first:  # nothing is read before the launch before has ended
                assert ("griddepcontrol.wait" in ptx.split("ld.global")[0]) == (capability == 90) == step.constants.get("launch_pdl", False)
            if step.kernel is column_sums.slabs_kernel:
                assert "max.NaN.f32" in ptx and "ftz" not in ptx and f"ld.global.v{dtype.itemsize}.b32" in ptx and "addc.u32" in ptx
print("compiled")
"""


def test_compiles_for_gpus_that_are_not_here():
    pytest.importorskip("triton")
    assert printed(OFFLINE).startswith("compiled")


@pytest.mark.gpu
def test_on_a_gpu():
    from carbon_compile.templates import column_sums, launch

    compare_sums("cuda")
    compare_norms("cuda")
    compare_tall("cuda")
    chosen, narrow = launch.column_sums_plan, launch.narrow_sums_plan
    try:
        compare_edges("cuda")
        compare_mixed("cuda")
        for check in (compare_ties, compare_cancelled, compare_first_rows, compare_additions, compare_padding):
            check("cuda")
    finally:
        launch.column_sums_plan, launch.narrow_sums_plan = chosen, narrow
    for rows, columns in ((16384, 3072), (4096, 768), (5000, 8), (200_000, 40)):
        for dtype in TYPES:
            for x in (matrix(rows, columns, dtype), torch.randn(rows, columns).to(dtype)):
                for _ in range(3):
                    assert_bitwise(column_sums.column_sum(x.cuda(), dtype).cpu(), P.sum(x, [0], dtype=dtype))


WARMED = """
import torch
from carbon_compile import precompile
from carbon_compile.lowering import columns, registry
from carbon_compile.templates import launch
from tests.offline import pretend

registry.load()
graph = torch.fx.Graph()
g, h, x, mean = (graph.placeholder(name) for name in ("g", "h", "x", "mean"))
nodes = [
    graph.call_function(columns.COLUMN_SUM, (g,), {"dtype": torch.float32}),
    graph.call_function(columns.SCALE_GRADIENT, (g, h), {"dtype": torch.float32}),
    graph.call_function(columns.NORM_GRADIENTS, (g, h), {"weight": torch.float32, "bias": torch.bfloat16}),
    graph.call_function(columns.NORM_GRADIENTS_OF, (g, x, mean, mean), {"weight": torch.float32, "bias": torch.bfloat16}),
]
with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
    for node, dtype in ((g, torch.bfloat16), (h, torch.float32)):
        node.meta["val"] = torch.empty(16384, 3072, device="cuda", dtype=dtype)
    x.meta["val"] = torch.empty(4, 4096, 3072, device="cuda")
    mean.meta["val"] = torch.empty(4, 4096, 1, device="cuda")
pretend(90)
import contextlib
from carbon_compile import host
torch.cuda.device = lambda device: contextlib.nullcontext()
host.compile_processes = lambda device: None
from carbon_compile.templates import column_sums, narrow_sums
compiled = []
for kernel in (*(getattr(column_sums, f"{name}_kernel") for name in ("slabs", "settle", "again")), narrow_sums.slabs_kernel, narrow_sums.settle_kernel):
    kernel.warmup = lambda *arguments, warmup=kernel.warmup, **options: compiled.append(warmup(*arguments, **options))
precompile.start(graph).join()
print("compiled", len(compiled))
"""


def test_kernels_are_compiled_before_their_first_call():
    pytest.importorskip("triton")
    code = "from carbon_compile import host\nwith host.pretend_cuda():\n" + "".join(f"    {line}\n" for line in WARMED.splitlines())
    assert printed(code).endswith("compiled 11\n")
