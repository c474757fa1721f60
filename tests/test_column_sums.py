"""Exact sums of columns: the kernels beside the definition in graph operations, and which sums take them."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import norm, registry
from carbon_compile.lowering import prims as P

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


def small_slabs():
    """Several slabs and steps of the matrices here."""
    from carbon_compile.templates import launch

    launch.column_sums_plan = lambda m, n, two, hw: launch.Slab(32, 160, 16 if two else 32, 4)


@pytest.mark.parametrize("check", ["compare_sums", "compare_norms", "small_slabs(); compare_sums", "small_slabs(); compare_norms"])
def test_in_the_interpreter(check):
    pytest.importorskip("triton")
    code = f"from tests import interpreter; interpreter.patch(); from tests.test_column_sums import *; {check}('cpu'); print('equal')"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=pathlib.Path(__file__).parent.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


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
import torch
from triton.runtime.jit import MockTensor

from carbon_compile.templates import column_sums, launch
from tests.offline import pretend

for capability in (80, 90):
    pretend(capability)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scale, shift in ((0, 1), (1, 0), (1, 1)):
            plan = launch.column_sums_plan(4096, 768, bool(scale), launch.hardware(None))
            g, f32, i32 = MockTensor(dtype), MockTensor(torch.float32), MockTensor(torch.int32)
            operands, scratch, sizes = (g, f32), (i32, MockTensor(torch.int64), i32), (4096, 768, 768, 768, plan.span, -(-4096 // plan.span))
            options = {"BM": plan.rows, "BN": plan.columns, "SHIFT": shift, "SCALE": scale, "num_warps": plan.warps, "grid": (1,), **launch.STRICT}
            column_sums.maxima_kernel.warmup(*operands, *scratch, *sizes, **options)
            terms = column_sums.terms_kernel.warmup(*operands, *scratch, g, g, *sizes, **options)
            ptx = terms.asm["ptx"]
            assert "fma.rn.f32" not in ptx and "ld.global.v4.b32" in ptx and "gpu.acq_rel.add.u32" in ptx
print("compiled")
"""


def test_compiles_for_gpus_that_are_not_here():
    pytest.importorskip("triton")
    assert printed(OFFLINE).startswith("compiled")


@pytest.mark.gpu
def test_on_a_gpu():
    compare_sums("cuda")
    compare_norms("cuda")
    from carbon_compile.templates import column_sums

    for rows, columns in ((16384, 3072), (4096, 768), (5000, 8)):
        for dtype in TYPES:
            x = matrix(rows, columns, dtype)
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
        node.meta["val"] = torch.empty(4096, 768, device="cuda", dtype=dtype)
pretend(90)
import contextlib
from carbon_compile import host
torch.cuda.device = lambda device: contextlib.nullcontext()
host.compile_processes = lambda device: None
from carbon_compile.templates import column_sums
compiled = []
for kernel in (column_sums.maxima_kernel, column_sums.terms_kernel):
    kernel.warmup = lambda *arguments, warmup=kernel.warmup, **options: compiled.append(warmup(*arguments, **options))
precompile.start(graph).join()
print("compiled", len(compiled))
"""


def test_kernels_are_compiled_before_their_first_call():
    pytest.importorskip("triton")
    code = "from carbon_compile import host\nwith host.pretend_cuda():\n" + "".join(f"    {line}\n" for line in WARMED.splitlines())
    assert printed(code).endswith("compiled 6\n")
