"""Digits of a product's first operand made where it is computed: the same bits, and nothing stored."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch
from torch._inductor import config

import carbon_compile
from carbon_compile import backend, host
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import producers, registry
from carbon_compile.templates import kept, launch
from carbon_compile.templates import quantize as twin
from carbon_compile.templates.matmul import exact_mm

from .offline import ROOT, printed

registry.load()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def special(m, k, dtype):
    """Rows of every kind: zeros, what is not finite, the smallest and largest numbers, all magnitudes, and ordinary ones."""
    g = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=g) * torch.exp(2 * torch.randn(m, k, generator=g))
    x[0] = 0.0
    x[1, 3], x[2, 5], x[3, ::7] = torch.inf, torch.nan, -torch.inf
    x[4] *= 1e-40
    x[5] = torch.randint(-3, 4, (k,), generator=g) * 2.0**-149
    x[6], x[6, 1] = -0.0, 2.0**-149
    x[7] = x[7].sign() * 3e38
    x[8] = 2.0 ** torch.randint(-149, 128, (k,), generator=g).float()
    x[9, ::2] = 0.0
    x[10] = torch.where(torch.rand(k, generator=g) < 0.5, 0.0, 1e-42)
    x[11] = torch.tensor([1.0, 1 + 127 / 128, 2.0 - 2**-23, 128 / 129]).repeat(k // 4)  # about where an exponent carries
    x[12] = torch.arange(k) + 0.5  # ties
    return x.to(dtype)


def weight(n, k, dtype, wild):
    """A weight [n, k]; a wild one has indices of any magnitude, zero and not finite ones."""
    g = torch.Generator().manual_seed(n)
    w = torch.randn(n, k, generator=g)
    if wild:
        w *= 2.0 ** torch.randint(-149, 120, (k,), generator=g).float()
        w[:, 5], w[:, 6], w[:, 7] = 0.0, 2.0**-149, 3e38
    w = w.to(dtype)
    if wild:
        w[1, 8], w[2, 9] = torch.inf, torch.nan
    return w


@pytest.mark.parametrize("dtype", DTYPES)
def test_digits_are_the_quantisers(dtype):
    x, g = special(24, 256, dtype), torch.Generator().manual_seed(0)
    for span in (0, 3, 40, 148):
        d = torch.randint(-span, span + 1, (256,), generator=g, dtype=torch.int32)
        for window in (16, 24):
            digits, exponents = producers.quantized(x, d, window)
            want = twin.quantize(x, window, -1, d)
            assert torch.equal(exponents, want.exponents)
            real = exponents != twin.POISON  # nobody looks at the digits of others
            assert 0 < real.sum() < 24
            assert torch.equal(digits.view(-1, 24, 256)[:, real], twin.digits(want.q, window)[:, real])


@pytest.mark.parametrize("window", [16, 24])
def test_quick_digits_are_the_quantisers_or_left(window):
    """Ordinary rows have digits, others their bytes; a weight of extreme magnitudes leaves all rows."""
    x, real = special(24, 256, torch.bfloat16), torch.tensor([False] * 7 + [True] * 3 + [False] + [True] * 13)
    for wild in (False, True):
        made = kept.weight_digits(weight(40, 256, torch.bfloat16, wild).t(), window)
        d, f = kept.balance(made, 256, 40, window), kept.factors(made, 256, 40, window)
        digits, exponents = producers.quickly_quantized(x, f, window)
        want = twin.quantize(x, window, -1, d)
        quick = exponents != twin.RAW
        assert torch.equal(quick, real & (not wild))
        assert torch.equal(exponents[quick], want.exponents[quick])
        digits = digits.view(-1, 24, 256)
        assert torch.equal(digits[:, quick], twin.digits(want.q, window)[:, quick])
        assert torch.equal(digits[:2, ~quick].permute(1, 2, 0).contiguous().view(torch.int16).squeeze(-1), x[~quick].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_digits(dtype):
    for window, wild, has_bias in ((16, False, True), (24, True, True), (24, False, False), (16, True, False)):
        x, w = special(24, 128, dtype), weight(19, 128, dtype, wild)
        bias = torch.randn(19).to(dtype) if has_bias else None
        made = producers.WEIGHT_DIGITS(w.t(), window)
        d = producers.WEIGHT_BALANCE(made, 128, 19, window)
        assert torch.equal(d, twin.weight_balance(w.t()))
        for out in (dtype, torch.float32):
            want = exact_mm(x, w.t(), window=window, balance="weight", bias=bias, out_dtype=out)
            assert_bitwise(producers.MM_DIGITS(*producers.quantized(x, d, window), made, bias, 19, window, False, out), want)
            if dtype is torch.bfloat16:
                digits = producers.quickly_quantized(x, producers.WEIGHT_FACTORS(made, 128, 19, window), window)
                assert_bitwise(producers.MM_DIGITS(*digits, made, bias, 19, window, True, out), want)


def test_operators():
    x, w = torch.randn(5, 64), torch.randn(7, 64)
    made = producers.WEIGHT_DIGITS(w.t(), 16)
    d = producers.WEIGHT_BALANCE(made, 64, 7, 16)
    digits, exponents = producers.quantized(x, d, 16)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(producers.WEIGHT_DIGITS, (w.t(), 16), test_utils=utils)
    torch.library.opcheck(producers.WEIGHT_BALANCE, (made, 64, 7, 16), test_utils=utils)
    torch.library.opcheck(producers.WEIGHT_FACTORS, (made, 64, 7, 16), test_utils=utils)
    torch.library.opcheck(producers.MM_DIGITS, (digits, exponents, made, None, 7, 16, False, torch.float32), test_utils=utils)
    assert producers.MM_DIGITS(digits[:0], exponents[:0], made, None, 7, 16, False, torch.float32).shape == (0, 7)
    with pytest.raises(ValueError, match="are not 2 of each of 5 rows"):
        kept.exact_mm_digits(digits[:9], exponents, made, 7, window=16)
    with pytest.raises(ValueError, match="not padded"):
        kept.exact_mm_digits(digits[:, :63].contiguous(), exponents, made, 7, window=16)
    with pytest.raises(ValueError, match="is no weight"):
        kept.exact_mm_digits(digits, exponents, made, 70, window=16)
    with pytest.raises(TypeError, match="int8"):
        kept.exact_mm_digits(digits.int(), exponents, made, 7, window=16)
    with pytest.raises(ValueError, match="exponents on meta"):
        kept.exact_mm_digits(digits, exponents.to("meta"), made, 7, window=16)


def test_rows_are_settled_in_digits_and_exponents_or_in_neither():
    """Where one of them has to be copied, the other is as well: else the next product finds digits and takes them for bytes."""
    digits, exponents = torch.zeros(8 * 64 + 16, dtype=torch.int8), torch.zeros(8, dtype=torch.int32)
    aligned, odd = digits[:512].view(8, 64), digits[1:513].view(8, 64)
    kept_as_they_are = kept._readable(aligned, exponents)
    assert kept_as_they_are[0] is aligned and kept_as_they_are[1] is exponents
    for given in ((odd, exponents[:4]), (aligned, exponents[::2]), (odd, exponents[::2])):
        made = kept._readable(*given)
        assert made[0].data_ptr() % 16 == 0 and all(x.is_contiguous() for x in made)
        assert all(x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr() and torch.equal(x, y) for x, y in zip(made, given, strict=True))


def test_products_are_replayed_for_the_same_operands_only():
    a, b = torch.zeros(8, 64, dtype=torch.int8), torch.zeros(8, dtype=torch.uint8)
    shapes = (torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64))
    assert len({kept._signature(a, b, 7, 16, None, torch.float32, exponents) for exponents in shapes}) == 3


# ---- compiled ----


class Layers(torch.nn.Module):
    """What feeds linear layers in a transformer: norms, one of them three layers, and activations."""

    def __init__(self, width=128):
        super().__init__()
        self.norm, self.other = torch.nn.LayerNorm(width), torch.nn.RMSNorm(width)
        self.q, self.k, self.v = (torch.nn.Linear(width, n, bias=n > 16) for n in (24, 16, 40))
        self.up, self.gate, self.down = torch.nn.Linear(width, width), torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, 24)
        self.last = torch.nn.Linear(width, 24)
        with torch.no_grad():
            self.q.weight.copy_(weight(24, width, torch.float32, False))
            self.k.weight[:, 3], self.k.weight[:, 4] = 0.0, 1e-40
            self.k.weight[:, 9] *= 2.0**60

    def forward(self, x):
        y, z = self.norm(x), self.other(x)
        gate, up = self.gate(z), self.up(z)
        return self.q(y), self.k(y), self.v(y), self.down(F.silu(gate) * up), self.last(F.gelu(up, approximate="tanh"))


@pytest.fixture(autouse=True)
def of_any_length(monkeypatch):
    monkeypatch.setattr(producers, "SHORTEST_ROW", 1)


@pytest.fixture
def everywhere(monkeypatch):
    """Digits are made in producers on a CPU too, and the rows of their products listed; caches don't know of it."""
    monkeypatch.setattr(producers, "on_gpu", lambda x: True)
    products, plain = [], kept.exact_mm_digits

    def counted(*args, **kwargs):
        products.append(args[1].shape[0])
        return plain(*args, **kwargs)

    monkeypatch.setattr(kept, "exact_mm_digits", counted)
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield products


@pytest.mark.parametrize(("dtype", "options"), [(torch.bfloat16, {}), (torch.float32, {"weights": "kept"})])
def test_the_same_bits(everywhere, dtype, options):
    model, x = Layers().to(dtype), special(72, 128, dtype)
    with torch.no_grad():
        got = torch.compile(model, backend="carbon", options=options)(x)
        assert everywhere == [72] * 7
        with carbon_compile.enable(seed=0):
            want = model(x)
    assert len(everywhere) == 7
    for one, other in zip(got, want, strict=True):
        assert one.isfinite().any() and one.isnan().any()
        assert_bitwise(one, other)


class Stop(Exception):
    pass


def operators(monkeypatch, f, *inputs, **options):
    """Names of the operators in the final graph of f, and how many of its products read digits."""
    names = []

    def stop(gm, inputs, **kwargs):
        names.extend(str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function" and "." in str(node.target))
        raise Stop

    monkeypatch.setattr(host, "compile_fx_inner", stop)
    torch.compiler.reset()
    with pytest.raises(Exception) as error:
        torch.compile(f, backend="carbon", **options)(*inputs)
    assert backend.cause(error.value, Stop)
    return names


def test_where(everywhere, monkeypatch):
    """Digits are made where nobody else wants the operand, of rows that are whole, long and many enough."""

    def count(f, *inputs, grad=False, **options):
        with torch.set_grad_enabled(grad):
            return operators(monkeypatch, f, *inputs, **options).count("mm_digits")

    w, v, x = torch.randn(32, 256), torch.randn(300, 32), torch.randn(80, 256)
    assert count(lambda x: F.linear(x.exp(), w), x) == 1
    assert count(lambda x: F.linear(x.view(2, 40, 256).exp(), w), x) == 1
    assert count(lambda x: F.linear(x.exp(), w) + F.linear(x.exp().view(80, 256), w + 1), x) == 2
    assert count(lambda x: F.linear(F.linear(x.exp(), w).exp(), v), x) == 1  # 32 is shorter than what tiles read
    assert count(lambda x: F.linear(x, w), x) == 0  # stored
    assert count(lambda x: (F.linear(y := x.exp(), w), y), x) == 0
    assert count(lambda x: F.linear(y := x.exp(), w).sum() + y.sum(), x) == 0
    assert count(lambda x: F.linear(y := x.exp(), w).t() @ F.linear(w, y).t(), x) == 0  # a second operand too
    assert count(lambda x: F.linear(y := x.exp(), y), x) == 0
    assert count(lambda x: F.linear(x.exp().t(), w), torch.randn(256, 80)) == 0
    assert count(lambda x: F.linear(x.exp()[:, :128], w[:, :128]), x) == 0
    assert count(lambda x: F.linear(x.exp(), w[:, :96]), x[:, :96]) == 0
    assert count(lambda x: F.linear(x.exp(), w), x[:64]) == 0
    assert count(lambda x: F.linear(x.exp(), w), x, dynamic=True) == 0
    assert count(lambda x: F.linear(x.exp(), w).sum(), x.requires_grad_(), grad=True) == 0  # the weight's gradient wants it
    monkeypatch.setattr(producers, "SHORTEST_ROW", 257)
    assert count(lambda x: F.linear(x.exp(), w), x.detach()) == 0
    monkeypatch.setattr(producers, "SHORTEST_ROW", 1)
    longer = torch.randn(80, 384)
    assert count(lambda x: F.linear(x.exp(), longer), longer) == 0  # no power of two
    monkeypatch.setattr(producers, "on_gpu", lambda x: x.device.type == "cuda")
    assert count(lambda x: F.linear(x.exp(), w), x.detach()) == 0


# ---- kernels ----

INTERPRETED = """
import torch
from tests.interpreter import patch
patch()
from carbon_compile.lowering import producers
from carbon_compile.templates import kept, kept_kernels
from carbon_compile.templates.matmul import exact_mm
from tests.test_producers import special, weight
from tests.test_small_products import same

for m, n, k, dtype, window, wild, added in (
    (20, 19, 128, torch.float32, 24, True, True), (70, 40, 256, torch.bfloat16, 16, False, False),
    (16, 40, 256, torch.bfloat16, 16, True, True), (20, 9, 64, torch.float16, 24, False, True),
    (20, 9, 2048, torch.bfloat16, 24, False, False), (14, 9, 2048, torch.bfloat16, 16, True, False),  # more than kernels take at a time
):
    a, b = special(m, k, dtype), weight(n, k, dtype, wild).t()
    made = kept_kernels.new_digits(b, window)
    twin, where = kept.weight_digits(b, window), kept.layout(k, n, window)
    for one, other in zip(kept.parts(made, where)[: 3 - wild], kept.parts(twin, where)):  # NaN has a pattern of the kernel's own in the maxima
        real = kept.parts(twin, where)[1] != 1 << 16
        assert torch.equal(*(x[:, real] if x.dim() == 3 else x for x in (one, other))), (m, n, k)
    d = kept_kernels.balance(made, where, window)
    assert torch.equal(d, kept.balance(twin, k, n, window))
    bias = torch.randn(n).expand(m, n) if added else None
    want = exact_mm(a, b, window=window, balance="weight", bias=bias, out_dtype=dtype)
    digits = producers.quantized(a, d, window)
    assert same(kept_kernels.multiply_digits(*digits, made, n, window, False, bias, dtype), want), (m, n, k, dtype, window)
    f = kept_kernels.factors(made, where, window)
    assert torch.equal(f, kept.factors(twin, k, n, window))
    if dtype == torch.bfloat16:
        digits, exponents = producers.quickly_quantized(a, f, window)
        left = exponents == 1 << 17
        assert left.any() and left.all() == wild
        for _ in range(2):  # what is settled stays
            assert same(kept_kernels.multiply_digits(digits, exponents, made, n, window, True, bias, dtype), want), (m, n, k, window)
            assert not (exponents == 1 << 17).any()
b = weight(9000, 64, torch.float32, False).t()
assert torch.equal(kept.parts(kept_kernels.new_digits(b, 16), kept.layout(64, 9000, 16))[2], b.abs().amax(1).view(torch.int32))
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


GENERATED = """
import contextlib
import torch
from carbon_compile import host, precompile
from carbon_compile.lowering import producers
from carbon_compile.templates.matmul_recipe import Recipe
from tests.offline import generated
from tests.test_producers import Layers

producers.on_gpu, producers.SHORTEST_ROW = lambda x: True, 1
graphs, launches, warm, compile_graph = [], [], Recipe.warm, host.compile_fx_inner

def kept(gm, inputs, **kwargs):
    graphs.append(gm)
    return compile_graph(gm, inputs, **kwargs)

def counted(recipe, types):
    launches.extend(step.kernel.__name__ for step in recipe.launches)
    warm(recipe, types)

model, x = Layers(256).bfloat16(), torch.randn(96, 256, dtype=torch.bfloat16)
host.compile_fx_inner = kept
with torch.no_grad():
    print(*generated(lambda: model(x), backward=False))
torch.cuda.device = lambda device: contextlib.nullcontext()
host.compile_processes = lambda device: None
Recipe.warm = counted
precompile.start(graphs[0].graph).join()
print("warmed:", *launches)
"""


def test_operands_are_not_stored():
    """Of each producer one kernel that stores digits, exponents and nothing else; and kernels are compiled before their first call."""
    pytest.importorskip("triton")
    code, warmed = printed(GENERATED).split("warmed:")
    kernels = re.findall(r"'signature': \{(.*?)\}.*?def triton_\w+\((.*?)(?=''')", code, re.DOTALL)
    stored = [[re.search(rf"'{name}': '\*(\w+)'", signature)[1] for name in re.findall(r"tl\.store\((\w+)", body)] for signature, body in kernels]
    calls = re.findall(r"carbon\.(\w+)\.default\.direct\(", code)
    assert {name: calls.count(name) for name in calls} == {"weight_digits": 7, "weight_factors": 7, "mm_digits": 7}
    for types in stored:
        assert set(types) == {"i8", "i32"} and types.count("i8") == 2 * types.count("i32")
    assert len(stored) == 2 and sum(types.count("i32") for types in stored) == 7  # those of the same input are one
    names = warmed.split()
    assert all(names.count(name) == 7 for name in ("maxima_kernel", "rows_kernel", "factors_kernel", "raw_rows_kernel"))
    assert names.count("gemm_kernel") + names.count("specialised_kernel") == 7


# ---- on a card ----


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["fresh", "kept"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_cpu(monkeypatch, dtype, weights):
    calls, plain = [], kept.exact_mm_digits
    monkeypatch.setattr(kept, "exact_mm_digits", lambda *args, **kwargs: (calls.append(args[0]), plain(*args, **kwargs))[1])
    model = Layers(256).to(dtype)
    there = Layers(256).to(dtype).cuda()
    there.load_state_dict(model.state_dict())
    compiled = torch.compile(there, backend="carbon", options={"weights": weights}, dynamic=False)
    on_cpu = torch.compile(model, backend="carbon", dynamic=True)
    for m in (300, 70):
        x = special(m, 256, dtype)
        with torch.no_grad():
            for _ in range(3):  # the ordinary way, and replayed
                for one, other in zip(compiled(x.cuda()), on_cpu(x), strict=True):
                    assert_bitwise(one.cpu(), other)
    assert len(calls) == 2 * 3 * 7 and all(digits.is_cuda for digits in calls)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [16, 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_products_of_digits(dtype, window):
    for m, n, k, wild, has_bias in ((300, 200, 512, True, True), (16, 640, 1024, False, True), (1, 300, 256, False, False), (64, 9000, 64, True, False), (5, 70, 128, False, True)):
        x, w = special(m, k, dtype) if m > 12 else torch.randn(m, k).to(dtype), weight(n, k, dtype, wild)
        bias = torch.randn(n).to(dtype) if has_bias else None
        want = exact_mm(x, w.t(), window=window, balance="weight", bias=bias, out_dtype=dtype)
        for _ in range(3):
            made = producers.WEIGHT_DIGITS(w.cuda().t(), window)
            d = producers.WEIGHT_BALANCE(made, k, n, window)
            assert torch.equal(d.cpu(), twin.weight_balance(w.t()))
            added = None if bias is None else bias.cuda()
            digits = producers.quantized(x.cuda(), d, window)
            assert_bitwise(producers.MM_DIGITS(*digits, made, added, n, window, False, dtype).cpu(), want)
            if dtype is torch.bfloat16:
                digits = producers.quickly_quantized(x.cuda(), producers.WEIGHT_FACTORS(made, k, n, window), window)
                assert_bitwise(producers.MM_DIGITS(*digits, made, added, n, window, True, dtype).cpu(), want)
            assert launch.padded_contraction(k) == k


@pytest.mark.gpu
def test_gpu_replays_in_cuda_graphs():
    model = Layers(256).bfloat16().cuda()
    compiled = torch.compile(model, backend="carbon", options={"inductor": {"triton.cudagraphs": True}}, dynamic=False)
    plain = torch.compile(model, backend="carbon", dynamic=True)
    with torch.no_grad():
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
            for one, other in zip(compiled(x), plain(x), strict=True):
                assert_bitwise(one.clone(), other)
