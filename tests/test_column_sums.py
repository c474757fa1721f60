"""Exact sums of columns: the kernels beside the definition in graph operations, and which sums take them."""

import os
import pathlib

import pytest
import torch

from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import norm, registry
from carbon_compile.lowering import prims as P

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
                h = norm._standard(x, average, rstd)
                weight = norm.normalize_scale_backward(g, x, average, rstd, torch.empty(columns, dtype=h_type))
                bias = norm.normalize_shift_backward(g, torch.empty(columns))
                for bias_type in (torch.float32, None):
                    found = column_sums.norm_gradients(g.to(device), h.to(device), h_type, bias_type)
                    assert_bitwise(found[0].cpu(), weight)
                    assert (found[1] is None) == (bias_type is None)
                    if bias_type is not None:
                        assert_bitwise(found[1].cpu(), bias)
            narrow = column_sums.norm_gradients(g.to(device), x.to(device), h_type, None)[0]  # h in any type is widened
            assert_bitwise(narrow.cpu(), P.sum(P.mul(g.float(), x.float()), [0], dtype=h_type))


# --- guesses of grids: what the first launch takes the magnitudes of a column for ---


def sampled(rows, sample):
    """A mask of the rows that the first launch looks at before it reads the others."""
    chosen = torch.zeros(rows, dtype=torch.bool)
    chosen[torch.tensor([((s * 0x9E3779B1 & 0xFFFFFFFF) * rows) >> 32 for s in range(sample)])] = True
    return chosen


def exponent(x):
    """The exponents of columns, as far down as grids go."""
    largest = x.abs().amax(0)
    return torch.where(largest > 0, torch.frexp(largest)[1], -200).clamp(min=-125)


def guessed(rows, factor, seen, seed=0, width=16):
    """[rows, 8 width] float32: a sample of magnitudes below 2^b, and one number outside it that is 2^factor times
    larger. Each block of columns has a b of its own, from subnormals to 2^(128 - factor). Most numbers have few
    bits, and lie at the end of any grid, where ties are."""
    g = torch.Generator().manual_seed(seed + factor)
    rand = lambda low, high, *size: torch.randint(low, high, size, generator=g)  # noqa: E731
    low, high = -140, 128 - factor
    b = torch.tensor([low, -125, -124, -60, 0, 65, high - 1, high])[torch.arange(8 * width) // width]
    down = torch.where(rand(0, 8, rows, 8 * width) > 0, rand(0, 36, rows, 8 * width), 0)
    mantissa = rand(128, 256, rows, 8 * width) * (1 - 2 * rand(0, 2, rows, 8 * width))
    mantissa = torch.where(rand(0, 4, rows, 8 * width) == 0, mantissa * 65536 + rand(0, 65536, rows, 8 * width), mantissa * 65536)
    x = torch.ldexp(mantissa.double(), b - 24 - down)
    x[int(seen.nonzero()[-1])] = torch.ldexp(rand(129, 256, 8 * width).double(), b - 8)
    x[int((~seen).nonzero()[rows // 3])] = torch.ldexp(rand(129, 256, 8 * width).double(), b - 8 + factor)
    return x.float()


def run_recipe(g, h, weight, bias):
    """(sums of g h, sums of g, which tiles of columns held): both launches, with a look at what they left."""
    from carbon_compile.templates import column_sums
    from carbon_compile.templates.matmul_recipe import view

    n, recipe = g.shape[1], column_sums._recipe(g, h, weight is not None, bias is not None)
    results = [None if dtype is None else torch.empty(n, dtype=dtype, device=g.device) for dtype in (bias, weight)]
    buffers = [g, g if h is None else h, *(g if r is None else r for r in results), *recipe.scratch(g.device)]
    recipe.run(buffers)
    tiles = recipe.launches[0].grid
    held = view(buffers, recipe.launches[0].arguments[5]).cpu()
    splits = recipe.launches[0].arguments[-1]
    return results[1], results[0], held.view(tiles // splits, splits).amin(1).bool()


def compare_guesses(device, columns=32, sample=16, grids=6):
    rows, outcomes = 150, set()
    seen = sampled(rows, sample)
    for factor in (*range(grids + 1), 12):
        dtype = TYPES[factor % 2]
        x = guessed(rows, factor, seen).to(dtype)
        x = torch.where(x.isinf(), 1.0, x)  # rounded up
        largest = exponent(x.float())
        right = largest - exponent(x.float()[seen]).clamp(max=129 - grids) < grids
        expected = torch.stack([block.all() for block in right.split(columns)])
        _, found, held = run_recipe(x.to(device), None, None, torch.float32)
        assert_bitwise(found.cpu(), P.sum(x, [0]))
        assert torch.equal(held, expected), (factor, dtype)
        outcomes |= {(factor, v) for v in expected.tolist()}
    assert {(f, True) for f in range(grids)} <= outcomes and {(grids, False), (12, False)} <= outcomes


def compare_pairs(device, columns=32, sample=16, grids=6):
    """Both sums of a norm, of which the one, the other, both or neither fail."""
    rows, found = 150, set()
    seen = sampled(rows, sample)
    ones, outlier = torch.ones(rows, 8 * 16), int((~seen).nonzero()[7])
    for factor_g, factor_h in ((0, 0), (9, 0), (0, 9), (9, -9)):
        g, h = guessed(rows, 2, seen, 1), ones.clone()
        g[:, :] = g.where(g.abs() > 2.0**-60, 0.0).clamp(-(2.0**60), 2.0**60)
        g[outlier], h[outlier] = 1.5 * 2.0**factor_g * g[seen].abs().amax(0), 2.0**factor_h
        right = [exponent(x) - exponent(x[seen]) < grids for x in (g, g * h)]
        for h_type in (torch.float32, torch.bfloat16):
            weight, bias, held = run_recipe(g.to(device), h.to(h_type).to(device), torch.float32, torch.float32)
            assert_bitwise(weight.cpu(), P.sum(P.mul(g, h), [0]))
            assert_bitwise(bias.cpu(), P.sum(g, [0]))
            assert torch.equal(held, torch.stack([block.all() for block in (right[0] & right[1]).split(columns)]))
            found |= set(zip(right[0].tolist(), right[1].tolist(), strict=True))
    assert len(found) == 4


def compare_unseen(device):
    """Columns that are zero wherever the sample looks, and what is not finite where it doesn't, or only there."""
    rows = 150
    for sample in (1, 32):
        plan(sample=sample, span=80)
        seen = sampled(rows, sample)
        for inside in (True, False):
            for value in (0.0, -0.0, 1.0, -(2.0**-149), 2.0**-122, 3e38, float("inf"), float("-inf"), float("nan")):
                x = torch.zeros(rows, 40)
                x[:, ::2] = torch.randn(rows, 20, generator=torch.Generator().manual_seed(1))
                places = (seen if inside else ~seen).nonzero()
                x[int(places[-1]), ::3] = value
                x[int(places[0]), ::5] = -value
                y = x.bfloat16() if sample == 1 else x
                assert_bitwise(run_recipe(y.to(device), None, None, y.dtype)[1].cpu(), P.sum(y, [0], dtype=y.dtype))
    x = torch.zeros(rows, 64)
    x[int((~sampled(rows, 32)).nonzero()[5])] = 2.0**-121  # the last one of the grids that zeros stand for
    total, held = run_recipe(x.to(device), None, None, torch.float32)[1:]
    assert held.all() and torch.equal(total.cpu(), x[0] + 2.0**-121)


def compare_extremes(device):
    """The longest slabs of the largest parts: all but the sample lies at the end of the last grid, or just off the first."""
    plan(columns=16, span=2000, rows=32, unroll=4)
    seen, x = sampled(2000, 16)[:, None], torch.full((2000, 16), -31.999999)
    x[:, 1::2] *= -1.0
    x[:, 2:4] = x[:, 2:4] / 32 * (0.5 - 2.0**-20 + 2.0**-30)
    x = torch.where(seen, 0.99999, x)
    total, held = run_recipe(x.to(device), None, None, torch.float32)[1:]
    assert held.all()
    assert_bitwise(total.cpu(), P.sum(x, [0]))


def plan(columns=32, span=150, rows=8, warps=4, unroll=2, sample=16, grids=6, again=16, registers=128):
    """Any choices for the matrices here: several slabs, and several steps of each."""
    from carbon_compile.templates import launch

    launch.column_sums_plan = lambda m, n, itemsize, sums, hw: launch.Slab(columns, span, rows, warps, unroll, sample, grids, again, registers)


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
    ["compare_sums", "compare_norms", "plan(); compare_norms", "plan(span=80); compare_guesses", "plan(span=80); compare_pairs",
     "plan(); narrow_plan(span=150, rows=32, again=64); compare_sums", "narrow_plan(span=2048, rows=256, unroll=8, again=512); compare_tall", "compare_edges('cpu'); compare_mixed",
     "compare_unseen", "compare_extremes", "plan(columns=16, span=70, rows=16, unroll=3, sample=64, grids=5, again=8); compare_guesses(columns=16, sample=64, grids=5, device=",
     "plan(columns=64, span=150, rows=4, unroll=1, sample=32, grids=4); compare_guesses(columns=64, sample=32, grids=4, device=",
     "plan(columns=32, span=64, rows=4, unroll=4, sample=8, grids=3); compare_guesses(sample=8, grids=3, device="],
)  # fmt: skip
def test_in_the_interpreter(check, interpreted, tmp_path):
    call = f"{check}'cpu')" if check.endswith("=") else f"{check}('cpu')"
    script = tmp_path / "check.py"
    script.write_text(f"from tests.test_column_sums import *; {call}; print('equal')")
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
        found.extend(str(n.target).removeprefix("carbon.").removesuffix(".default") for n in gm.graph.nodes if n.target in (*columns._OURS, columns.NORM_GRADIENTS))
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
    assert sorted(placed) == ["column_sum", "column_sum", "norm_gradients", "norm_scale_gradient"]


def test_what_is_computed_on_the_way_stays_in_the_graph(placed):
    x, scale = torch.randn(300, 40), torch.randn(40, requires_grad=True)
    run = lambda function: [y := function(x, scale), *torch.autograd.grad(y.sum(), scale)]  # noqa: E731
    torch._dynamo.reset()
    found = run(torch.compile(lambda x, scale: (x * scale).exp().sum(0), backend="carbon"))
    assert placed == []
    columns = torch.stack([P.sum(P.exp(P.mul(x[:, j], scale[j])), [0]) for j in range(40)])
    assert_bitwise(found[0], columns)


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


# --- other machines -----------------------------------------------------------------------------------

OFFLINE = """
import itertools

import torch
from triton.runtime.jit import MockTensor

from carbon_compile.templates import column_sums, narrow_sums
from carbon_compile.templates.matmul_recipe import Block
from tests.offline import pretend

types, sums = (torch.float32, torch.bfloat16, torch.float16), ((0, 1), (1, 0), (1, 1))
guessed, read_twice = (16384, 3072), (4096, 768)
# Every type and sum where rows are guessed; read twice, and on older GPUs, each type and each sum, and the narrow kernels.
cases = {90: [*itertools.product(types, sums, (guessed,)), *((dtype, sums[i - 1], read_twice) for i, dtype in enumerate(types))]}
cases[80] = [(dtype, sums[i], guessed) for i, dtype in enumerate(types)] + [(types[1], sums[0], read_twice)]
for capability, chosen in cases.items():
    pretend(capability)
    for dtype, (scale, shift), (rows, columns) in chosen:
        g = torch.empty(rows, columns, dtype=dtype, device="meta")
        h = torch.empty(rows, columns, device="meta") if scale else None
        recipe, stored = column_sums.warmable(g, h, torch.float32 if scale else None, torch.float32 if shift else None, "cuda")
        narrow = dtype in narrow_sums.TYPES and not scale
        first, last = (narrow_sums.slabs_kernel, narrow_sums.settle_kernel) if narrow else (column_sums.guess_kernel, column_sums.finish_kernel)
        assert (recipe.launches[0].kernel is first) == (narrow or rows == 16384)
        for step in recipe.launches:
            arguments = [MockTensor(getattr(a, "dtype", None) or stored[a.buffer]) if isinstance(a, Block) else a for a in step.arguments]
            compiled = step.kernel.warmup(*arguments, grid=(step.grid,), **step.constants)
            ptx = compiled.asm["ptx"]
            assert "fma.rn.f32" not in ptx and "ld.global.v4.b32" in ptx
            assert ("gpu.acq_rel.add.u32" in ptx) == (step.kernel is last)
            if step.kernel is narrow_sums.slabs_kernel:
                assert ("max.u16x2" in ptx) == (capability == 90) and "cvt.f64" not in ptx
            if step.kernel is narrow_sums.settle_kernel:  # nothing is read before the first launch has ended
                assert ("griddepcontrol.wait" in ptx.split("ld.global")[0]) == (capability == 90) == step.constants.get("launch_pdl", False)
            if step.kernel is column_sums.guess_kernel:
                assert "max.NaN.f32" in ptx and "ftz" not in ptx and f"ld.global.v{dtype.itemsize}.b32" in ptx
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
        compare_unseen("cuda")
        compare_extremes("cuda")
        plan(span=80)
        compare_guesses("cuda")
        compare_pairs("cuda")
        plan(columns=16, span=70, rows=16, unroll=3, sample=64, grids=5, again=8)
        compare_guesses("cuda", columns=16, sample=64, grids=5)
    finally:
        launch.column_sums_plan, launch.narrow_sums_plan = chosen, narrow
    for rows, columns in ((16384, 3072), (4096, 768), (5000, 8)):  # guessed, and read twice
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
g, h = (graph.placeholder(name) for name in ("g", "h"))
nodes = [
    graph.call_function(columns.COLUMN_SUM, (g,), {"dtype": torch.float32}),
    graph.call_function(columns.SCALE_GRADIENT, (g, h), {"dtype": torch.float32}),
    graph.call_function(columns.NORM_GRADIENTS, (g, h), {"weight": torch.float32, "bias": torch.bfloat16}),
]
with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
    for node, dtype in ((g, torch.bfloat16), (h, torch.float32)):
        node.meta["val"] = torch.empty(16384, 3072, device="cuda", dtype=dtype)
pretend(90)
import contextlib
from carbon_compile import host
torch.cuda.device = lambda device: contextlib.nullcontext()
host.compile_processes = lambda device: None
from carbon_compile.templates import column_sums, narrow_sums
compiled = []
for kernel in (column_sums.guess_kernel, column_sums.finish_kernel, narrow_sums.slabs_kernel, narrow_sums.settle_kernel):
    kernel.warmup = lambda *arguments, warmup=kernel.warmup, **options: compiled.append(warmup(*arguments, **options))
precompile.start(graph).join()
print("compiled", len(compiled))
"""


def test_kernels_are_compiled_before_their_first_call():
    pytest.importorskip("triton")
    code = "from carbon_compile import host\nwith host.pretend_cuda():\n" + "".join(f"    {line}\n" for line in WARMED.splitlines())
    assert printed(code).endswith("compiled 6\n")
