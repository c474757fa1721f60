"""Products by kept digits of a weight, and when they are made anew: always the bits of fresh ones."""

import functools
import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from carbon_compile import weights
from carbon_compile.templates import kept, launch, quantize
from carbon_compile.templates.matmul import exact_mm

from .offline import printed
from .test_small_products import operands, same

ROOT = Path(__file__).resolve().parents[1]
H100 = launch.Hardware((9, 0), 132)


# ---- the twin ----


@pytest.mark.parametrize(("dtype", "window"), ((torch.bfloat16, 16), (torch.float32, 24), (torch.float32, 16), (torch.float16, 24)))
@pytest.mark.parametrize("kind", ("tame", "rows", "wild"))
def test_twin(dtype, window, kind, monkeypatch):
    monkeypatch.setattr(kept, "_INTEGERS", 4000)  # several blocks
    monkeypatch.setattr(kept, "_ROWS", 100)
    for m, n, k, side_by_side, bias in ((1, 70, 129, False, None), (9, 40, 300, True, torch.randn(40)), (300, 70, 64, False, torch.randn(300, 1))):
        a, b = operands(m, n, k, dtype, kind, side_by_side)
        digits = kept.weight_digits(b, window)
        assert digits.numel() == kept.layout(k, n, window).size
        want = exact_mm(a, b, window=window, balance="weight", bias=None if bias is None else bias.expand(m, n), out_dtype=dtype)
        assert same(kept.exact_mm_kept(a, digits, n, window=window, bias=bias, out_dtype=dtype), want)


def test_layout_holds_what_the_definition_takes_from_a_weight():
    b = operands(4, 50, 200, torch.float32, "rows")[1]
    where = kept.layout(200, 50, 24)
    digits, exponents, maxima = kept.parts(kept.weight_digits(b, 24), where)
    d = quantize.weight_balance(b)
    want = quantize.quantize(b, 24, -2, -d)
    assert torch.equal(sum(digits[i].double() * 256.0**i for i in range(3))[:, :200], want.q.t())
    assert torch.equal(exponents, want.exponents) and not digits[..., 200:].any()
    assert all(start % 256 == 0 for start in (where.exponents, where.maxima, where.size))
    assert torch.equal(kept._balance(maxima), d)


def test_what_does_not_fit_is_refused():
    a, b = torch.randn(3, 100), torch.randn(100, 8)
    digits = kept.weight_digits(b, 24)
    with pytest.raises(ValueError, match="is no weight"):
        kept.exact_mm_kept(a, digits, 8, window=16)
    with pytest.raises(ValueError, match="is no weight"):
        kept.exact_mm_kept(torch.randn(3, 300), digits, 8, window=24)
    with pytest.raises(ValueError, match="no digits to keep"):
        kept.weight_digits(torch.randn(1, 8), 24)
    with pytest.raises(ValueError, match="one of"):
        kept.weight_digits(b, 17)
    with pytest.raises(TypeError, match="float64"):
        kept.weight_digits(b.double(), 24)
    with pytest.raises(TypeError, match="float64"):
        kept.exact_mm_kept(a.double(), digits, 8, window=24)
    with pytest.raises(ValueError, match="uint8"):
        kept.weight_digits(b, 24, torch.empty(5, dtype=torch.uint8))
    assert kept.exact_mm_kept(a[:0], digits, 8, window=24).shape == (0, 8)


# ---- plans ----


def test_plans():
    few = launch.kept_plan(16, 4096, 4096, 16, H100)
    assert few.streamed and (few.bm, few.bk, few.splits, few.words) == (32, 256, 1, 0)
    assert launch.kept_plan(16, 1024, 4096, 16, H100).splits == 4
    assert not launch.kept_plan(65, 4096, 4096, 16, H100).streamed
    assert not launch.kept_plan(16, 4096, 4096, 16, launch.Hardware((7, 5), 40)).streamed
    for window in (16, 24):
        for m in (1, 5, 16, 17, 33, 64):
            for n, k in ((4096, 4096), (4096, 14336), (512, 1 << 20), (128_256, 4096), (1000, 5001), (7, 64)):
                for hw in (H100, launch.Hardware((8, 6), 84)):
                    padded = launch.padded_contraction(k)
                    plan = launch.kept_plan(m, n, padded, window, hw)
                    assert plan.span % plan.step == 0 and plan.span <= launch.SPAN_LIMIT[window]
                    assert plan.splits == -(-padded // plan.span)
                    assert plan.stages * plan.step * window // 8 * (plan.bm + plan.bn) <= hw.shared


# ---- kernels in the Triton interpreter ----

INTERPRETED = """
from dataclasses import replace
import torch
from tests.interpreter import patch
patch()
from carbon_compile.templates import kept, kept_kernels, launch
from carbon_compile.templates.matmul import exact_mm
from tests.test_small_products import operands, same

BF, F32, F16 = torch.bfloat16, torch.float32, torch.float16
# m, n, k, type, window, kind, is the weight side by side, bias, (rows, contraction, groups) or the ordinary plan, splits, words
cases = [
    (1, 70, 129, BF, 16, "tame", False, "row", (32, 64, 4), 1, 0),
    (5, 70, 300, BF, 16, "rows", False, None, (32, 64, 1), 3, 1),
    (16, 40, 700, BF, 16, "wild", True, "row", (32, 64, 4), 2, 2),
    (33, 70, 40, F32, 24, "rows", False, "column", (16, 64, 1), 1, 0),
    (64, 35, 200, F32, 24, "tame", True, "both", (64, 64, 1), 2, 1),
    (5, 70, 256, F32, 24, "rows", True, None, (16, 32, 4), 1, 0),
    (9, 70, 333, F32, 24, "wild", False, "row", (32, 32, 2), 3, 2),
    (5, 70, 128, F32, 16, "rows", False, None, (32, 64, 1), 1, 0),
    (7, 70, 100, F16, 24, "tame", False, None, (32, 64, 1), 2, 1),
    (1, 70, 9000, F16, 16, "tame", False, "row", (32, 512, 1), 1, 0),
    (70, 40, 300, BF, 16, "rows", False, "row", None, 1, 0),
    (3, 40, 2, F32, 24, "tame", True, "column", None, 1, 0),
]
g = torch.Generator().manual_seed(1)
for m, n, k, dtype, window, kind, side_by_side, added, tile, splits, words in cases:
    if k == 2:
        a, b = torch.randn(m, k, generator=g).to(dtype), torch.randn(k, n, generator=g).to(dtype)
    else:
        a, b = operands(m, n, k, dtype, kind, side_by_side)
    bias = {None: None, "row": torch.randn(n, generator=g).expand(m, n), "column": torch.randn(m, 1, generator=g).expand(m, n),
            "both": torch.randn(m, n, generator=g)}[added]
    twin, digits = kept.weight_digits(b, window), torch.full((kept.layout(k, n, window).size,), 77, dtype=torch.uint8)
    kept_kernels.write_digits(b, window, digits)
    if kind == "tame":  # else NaN has a pattern of the kernel's own in the maxima
        for one, other in zip(kept.parts(digits, kept.layout(k, n, window)), kept.parts(twin, kept.layout(k, n, window))):
            assert torch.equal(one, other), (m, n, k, dtype, window)
    plan = None
    if tile:
        bm, bk, groups = tile
        plan = launch.Plan(bm, 0, bk, 4, 1, swap=True, streamed=True, groups=groups)
        plan = launch.split(plan, launch.padded_contraction(k), window, splits)
        assert plan.splits == splits and (plan.words > 0) == (words > 0), plan
        plan = replace(plan, words=words)
    got = kept_kernels.multiply(a, digits, n, window, bias, dtype, plan=plan)
    want = exact_mm(a, b, window=window, balance="weight", bias=bias, out_dtype=dtype)
    assert same(got, want), (m, n, k, dtype, window, kind)
    assert same(kept.exact_mm_kept(a, digits, n, window=window, bias=bias, out_dtype=dtype), want)  # the twin, with the kernel's digits
print("equal")
"""


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


# ---- compiled ----


class Count:
    """How often digits are made."""

    def __init__(self, monkeypatch):
        self.n, plain = 0, kept.weight_digits

        def weight_digits(*args):
            self.n += 1
            return plain(*args)

        monkeypatch.setattr(kept, "weight_digits", weight_digits)

    def __call__(self):
        n, self.n = self.n, 0
        return n


@pytest.fixture
def made(monkeypatch):
    return Count(monkeypatch)


def mlp(*widths, **options):
    layers = [layer for k, n in zip(widths, widths[1:], strict=False) for layer in (torch.nn.Linear(k, n, **options), torch.nn.GELU())]
    return torch.nn.Sequential(*layers[:-1])


def compiled(f, **options):
    return torch.compile(f, backend="carbon", dynamic=True, options={"weights": "kept"} | options)


def check(model, kept_model, *inputs):
    """Equal to fresh digits, in no_grad."""
    with torch.no_grad():
        got = kept_model(*inputs)
        assert same(got, torch.compile(model, backend="carbon", dynamic=True)(*inputs))
    return got


class Tied(torch.nn.Module):
    """An embedding that is the head, a fused projection that is cut, and a weight [K, N]."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24)
        self.qkv = torch.nn.Parameter(torch.randn(72, 24))
        self.register_buffer("up", torch.randn(24, 24))

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = (torch.nn.functional.linear(x, w) for w in self.qkv.chunk(3))
        return torch.nn.functional.linear((q * k + v) @ self.up, self.embedding.weight)


@pytest.mark.parametrize("window", ("X2", "X3"))
@pytest.mark.parametrize("autocast", (False, True))
def test_equal_to_fresh(window, autocast, made):
    model = mlp(20, 64, 7)
    f = torch.compile(model, backend="carbon", dynamic=True, options={"float32_matmul": window, "bfloat16_matmul": window})
    g = compiled(model, float32_matmul=window, bfloat16_matmul=window)
    for n in (5, 1, 70):
        x = torch.randn(n, 20)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert same(f(x), g(x))
    assert made() == 2


def test_chains_ties_and_buffers(made):
    model = Tied()
    f = compiled(model)
    for n in (3, 9):
        check(model, f, torch.randint(50, (n, 4)))
    assert made() == 5  # q, k, v, up, head
    with torch.no_grad():
        model.up.mul_(3)
    check(model, f, torch.randint(50, (2, 4)))
    assert made() == 1


def test_layers_share_a_graph_and_graphs_share_digits(made):
    layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def run(layer, x):
        return layer(x)

    f = compiled(run)
    for _ in range(2):
        x = torch.randn(3, 16)
        for layer in layers:
            x = check(layer, lambda x, layer=layer: f(layer, x), x)
    assert made() == 4
    with torch.no_grad():
        compiled(torch.nn.Sequential(*layers))(x)  # another graph
    assert made() == 0


def changes():
    def optimizer(make, **options):
        def change(model):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            make(model.parameters(), lr=0.1, **options).step()

        return change

    def data(model):
        for p in model.parameters():
            p.data = p.data * 2

    def data_back_and_forth(model):
        """Storages that are freed before the next call: the last one may lie where the first one did."""
        for p in model.parameters():
            for _ in range(4):
                p.data = torch.randn_like(p.data)

    def replaced(model):
        model[0].weight = torch.nn.Parameter(torch.randn_like(model[0].weight))

    def in_inference_mode(model):
        with torch.inference_mode():
            model[0].weight.mul_(3)

    def vector(model):
        flat = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(flat.detach() * 2, model.parameters())

    def compiled_step(model):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        torch.compile(torch.optim.AdamW(model.parameters(), lr=0.1).step, backend="carbon")()

    def enabled_step(model):
        import carbon_compile

        with carbon_compile.enable(seed=1):
            optimizer(torch.optim.AdamW)(model)

    return {
        "sgd": optimizer(torch.optim.SGD), "fused sgd": optimizer(torch.optim.SGD, fused=True),
        "adamw": optimizer(torch.optim.AdamW), "fused adamw": optimizer(torch.optim.AdamW, fused=True),
        "fused adam": optimizer(torch.optim.Adam, fused=True), "fused adagrad": optimizer(torch.optim.Adagrad, fused=True),
        "foreach": optimizer(torch.optim.AdamW, foreach=True), "for loop": optimizer(torch.optim.AdamW, foreach=False),
        "compiled step": compiled_step, "eager mode": enabled_step,
        "load_state_dict": lambda model: model.load_state_dict(mlp(20, 64, 7).state_dict()),
        "assigned": lambda model: model.load_state_dict(mlp(20, 64, 7).state_dict(), assign=True),
        "copy_": lambda model: torch.no_grad()(model[2].weight.copy_)(torch.randn(7, 64)),
        "view": lambda model: torch.no_grad()(model[2].weight[3:].add_)(1),
        ".data": data, ".data again": data_back_and_forth, "replaced": replaced, "inference mode": in_inference_mode,
        "vector": vector,
    }  # fmt: skip


@pytest.mark.parametrize("change", changes().values(), ids=changes())
def test_changes_are_noticed(change, made):
    model = mlp(20, 64, 7)
    f, x = compiled(model), torch.randn(3, 20)
    before = check(model, f, x)
    assert same(check(model, f, x), before) and made() == 2
    for _ in range(2):
        change(model)
        after = check(model, f, x)
        assert not same(after, before) and made() >= 1
        before = after


def test_other_layouts_of_the_same_memory(made):
    """Without Dynamo, of which 2.11 guards no strides of parameters (Inductor's code refuses them then)."""
    transposed = ((torch.ops.aten.permute.default, ((1, 0),), ()),)
    first, second = (weights.KeptWeights([weights.Slot(0, weights.Recipe(transposed, 24, 12, 12), torch.device("cpu"))]) for _ in range(2))
    w, x, found = torch.nn.Parameter(torch.randn(13, 12)[:12]), torch.randn(3, 12), []
    for change in (
        lambda w: w, lambda w: w.t(), lambda w: w.t(), lambda w: w.as_strided((12, 12), (12, 1), 12), lambda w: w.as_strided((12, 12), (1, 12), 0),
        lambda w: w.as_strided((12, 12), (12, 1), 0), lambda w: w.view(torch.int32).view(torch.float32),
    ):  # fmt: skip
        w.data = change(w.data)
        for kept_weights in (first, second):
            (digits,) = kept_weights.digits([w])
            found.append(kept.exact_mm_kept(x, digits, 12, window=24))
            assert same(found[-1], exact_mm(x, w.detach().t(), window=24, balance="weight"))
    assert len({bytes(y.numpy()) for y in found}) == 3 and made() == 6
    w = torch.nn.Parameter(torch.randn(12, 12).bfloat16())
    for dtype in (torch.bfloat16, torch.float16):
        w.data = w.data.view(dtype)
        assert same(*(kept.exact_mm_kept(x.to(dtype), d, 12, window=24) for d in (*first.digits([w]), kept.weight_digits(w.detach().t(), 24))))
    assert made() == 4


def test_changes_that_nobody_sees_have_to_be_told(made):
    import carbon_compile

    model = mlp(20, 64, 7)
    f, x = compiled(model), torch.randn(3, 20)
    before = check(model, f, x)
    addresses = [digits.buffer.data_ptr() for digits in weights._DIGITS.values()]
    for p in model.parameters():
        p.data.mul_(2)
    made()
    with torch.no_grad():
        assert not same(f(x), torch.compile(model, backend="carbon", dynamic=True)(x))  # as documented: old digits, new biases
    carbon_compile.weights_changed()
    assert not same(check(model, f, x), before) and made() == 2
    assert [digits.buffer.data_ptr() for digits in weights._DIGITS.values()] == addresses
    carbon_compile.weights_changed(free=True)
    assert all(digits.buffer is None for digits in weights._DIGITS.values())
    check(model, f, x)
    assert made() == 2


def test_digits_die_with_the_weight_and_with_the_graph(made):
    def run(model, x):
        return model(x)

    f, x = compiled(run), torch.randn(3, 20)
    model, other = mlp(20, 64, 7), mlp(20, 64, 7)
    check(model, functools.partial(f, model), x)
    check(other, functools.partial(f, other), x)
    buffers = [weakref.ref(digits.buffer.untyped_storage()) for digits in weights._DIGITS.values()]
    assert len(buffers) == 4
    del other
    gc.collect()
    assert sum(buffer() is not None for buffer in buffers) == 2
    check(model, functools.partial(f, model), x)
    assert made() == 4
    del f
    torch.compiler.reset()
    gc.collect()
    assert sum(buffer() is not None for buffer in buffers) == 0 and not weights._DIGITS


def test_training_graphs_make_their_own(made):
    import carbon_compile

    model, other = mlp(20, 64, 7), mlp(20, 64, 7)
    other.load_state_dict(model.state_dict())
    f, g, x = compiled(model), torch.compile(other, backend="carbon", dynamic=True), torch.randn(3, 20)
    for h in (f, g):
        h(x).square().sum().backward()
    assert made() == 0
    assert all(same(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    check(model, f, x)
    assert made() == 2
    certificate = carbon_compile.certificate(model)
    assert [(graph["kind"], graph["kept"]) for graph in certificate.data["graphs"]][:2] == [("training", 0), ("inference", 2)]
    assert "inference, 2 weights kept" in str(certificate) and certificate.held


def test_the_table_says_it(capsys):
    model = mlp(20, 7)
    with torch.no_grad():
        compiled(model, table=True)(torch.randn(3, 20))
    assert ", digits of 1 weight kept\n" in capsys.readouterr().err


def test_wrong_values():
    from carbon_compile.options import OptionError, Options

    with pytest.raises(OptionError, match="did you mean 'kept'"):
        Options.parse(options={"weights": "keep"})
    assert Options.parse().weights == "fresh"


def test_weights_that_the_graph_changes_are_fresh(made):
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.randn(20, 7))

        def forward(self, x):
            y = x @ self.w
            self.w.mul_(1.5)
            return y

    model, x = Counter(), torch.randn(3, 20)
    twin = Counter()
    twin.load_state_dict(model.state_dict())
    f = compiled(model)
    for _ in range(3):
        with torch.no_grad():
            assert same(f(x), torch.compile(twin, backend="carbon", dynamic=True)(x))
    assert made() == 0


def test_weights_without_a_count_of_changes(made):
    with torch.inference_mode():
        model = mlp(20, 64, 7)
    f, x = compiled(model), torch.randn(3, 20)
    before = check(model, f, x)
    with torch.inference_mode():
        model[0].weight.mul_(2)
        assert same(f(x), torch.compile(model, backend="carbon", dynamic=True)(x))
    assert not same(check(model, f, x), before) and made() == 6


def test_calls_in_inference_mode(made):
    model = mlp(20, 64, 7)
    f, x = compiled(model), torch.randn(3, 20)
    with torch.inference_mode():
        f(x)
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.mul_(2)
        want = check(model, f, x)
        with torch.inference_mode():
            assert same(f(x).clone(), want)
    assert made() == 4


def test_other_inputs_and_computed_weights_are_fresh(made):
    w, scale = torch.randn(20, 7), torch.nn.Parameter(torch.randn(20, 7))
    for f in (lambda x: x @ w, lambda x: x @ (scale * 2), lambda x: (x[:, :1] @ scale[:1])):
        check(f, compiled(f), torch.randn(3, 20))
    assert made() == 0


def test_fsdp_modules_are_fresh(made):
    """Their weights are gathered into memory whose changes nobody counts; here a module that says it is one."""
    model = mlp(20, 7)
    for module in model.modules():
        module._is_fsdp_managed_module = module._fsdp_use_orig_params = True
    check(model, compiled(model), torch.randn(3, 20))
    assert made() == 0


def test_threads_make_digits_once(made):
    model = mlp(20, 64, 7)
    f, x = compiled(model), torch.randn(3, 20)
    want = check(model, f, x)
    for _ in range(5):
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.clone())
        made()
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: torch.no_grad()(f)(x), range(8)))
        assert all(same(result, want) for result in results) and made() == 1


@pytest.mark.parametrize("kind", ("gpt2", "llama"))
def test_generation(kind, made):
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model.eval()

    def logits(tokens):
        return model(tokens, use_cache=False).logits

    f, g = compiled(logits), torch.compile(logits, backend="carbon", dynamic=True)
    for _ in range(2):
        tokens = torch.randint(97, (2, 5))
        for _ in range(3):
            with torch.no_grad():
                found = f(tokens)
                assert same(found, g(tokens))
            tokens = torch.cat([tokens, found[:, -1].argmax(-1, keepdim=True)], 1)
        assert made() == (9 if kind == "gpt2" else 15)
        with torch.no_grad():  # a step of training between two rollouts
            for p in model.parameters():
                p.mul_(1.01)


# ---- compiled without a card ----

OFFLINE = """
import sys, torch
from carbon_compile.templates import kept, matmul_recipe
from tests.offline import pretend

BF, F32 = torch.bfloat16, torch.float32
SHARED = {80: 163, 86: 99, 90: 227}
cases = [(16, 4096, 4096, BF, 16), (64, 1000, 4224, F32, 24)]
capabilities = {80: cases[:1], 90: cases}
if "everything" in sys.argv:
    cases += [(m, n, k, dtype, window) for m in (1, 17, 64, 300) for n, k in ((4096, 4096), (1000, 5001)) for dtype, window in ((BF, 16), (BF, 24), (F32, 16), (F32, 24))]
    capabilities = dict.fromkeys(SHARED, cases)
for capability, chosen in capabilities.items():
    pretend(capability)
    for m, n, k, dtype, window in chosen:
        a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta").t()
        bias = torch.empty(n, dtype=dtype, device="meta")
        product, digits = kept.warmable(a, n, window, bias, dtype, None), kept.warmable_digits(b, window, None)
        for plan, step, types in [(recipe.plan, step, types) for recipe, types in (product, digits) for step in recipe.launches]:
            arguments = [matmul_recipe._stand_ins(types, x) for x in step.arguments]
            kernel = step.kernel.warmup(*arguments, grid=(step.grid,), **step.constants)
            used = kernel.metadata.shared
            assert used <= SHARED[capability] << 10, (capability, plan, used)
            if step.kernel.__name__ == "product_kernel" and (m, capability) == (16, 90):
                assert "cp.async" in kernel.asm["ptx"]  # steps ahead
print("compiled")
"""


def test_kernels_compile_for_gpus_that_are_not_here():
    """Also that they fit; `python -c OFFLINE everything` compiles every kind of product, for minutes."""
    pytest.importorskip("triton")
    assert printed(OFFLINE) == "compiled\n"


WARMED = """
import contextlib
import torch
from carbon_compile import host, precompile, weights
from carbon_compile.lowering import matmul, registry
from carbon_compile.templates import kept_kernels, quantize_kernels
from tests.offline import pretend

registry.load()
graph = torch.fx.Graph()
x, w, bias = (graph.placeholder(name) for name in ("x", "w", "bias"))
b = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
graph.output((graph.call_function(matmul.MM_KERNEL, (x, b, bias, 16, "weight", torch.bfloat16)),))
with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
    for node, shape in ((x, (16, 4096)), (w, (9216, 4096)), (bias, (9216,))):
        node.meta["val"] = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    b.meta["val"] = w.meta["val"].t()
gm = torch.fx.GraphModule(torch.nn.Module(), graph)
slots, fakes = weights.hoist(gm, [node.meta["val"] for node in (x, w, bias)], [1, 2])
assert len(slots) == len(fakes) == 1 and slots[0].index == 1 and len(slots[0].recipe.steps) == 1
assert [str(node.target) for node in gm.graph.nodes if node.op == "call_function"] == ["carbon.mm_kept.default"]
pretend(90)
torch.cuda.device = lambda device: contextlib.nullcontext()
host.compile_processes = lambda device: None
compiled = []
for kernel in (quantize_kernels.maxima_kernel, kept_kernels.rows_kernel, kept_kernels.product_kernel):
    def warmup(*arguments, warmup=kernel.warmup, **options):
        compiled.append((options.get("ATOMIC"), warmup(*arguments, **options)))
    kernel.warmup = warmup
precompile.start(gm.graph).join()
assert [atomic for atomic, _ in compiled if atomic is not None] == [False]  # as in `kept.weight_digits` without memory of its own
print("compiled", len(compiled))
"""


def test_kernels_are_compiled_before_their_first_call():
    """Of the weight its maxima and digits, of the rows their digits and the product."""
    pytest.importorskip("triton")
    code = "from carbon_compile import host\nwith host.pretend_cuda():\n" + "".join(f"    {line}\n" for line in WARMED.splitlines())
    assert printed(code).endswith("compiled 4\n")


# ---- on a card ----

# m, n, k, type, window, is the weight side by side, bias
CASES = [
    (1, 300, 768, torch.bfloat16, 16, False, False),
    (16, 4096, 1040, torch.bfloat16, 16, False, True),
    (5, 70, 129, torch.bfloat16, 16, True, True),
    (64, 1030, 512, torch.bfloat16, 16, False, False),
    (300, 333, 1000, torch.bfloat16, 16, False, True),
    (16, 260, 1024, torch.float32, 24, False, True),
    (33, 520, 700, torch.float32, 24, False, False),
    (64, 300, 777, torch.float32, 24, True, False),
    (300, 200, 640, torch.float32, 24, False, True),
    (9, 129, 512, torch.float16, 24, False, False),
    (16, 129, 9000, torch.float32, 16, False, False),
    (2, 70, 50_000, torch.bfloat16, 24, False, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_equals_cpu(case):
    from carbon_compile.templates import kept_kernels

    m, n, k, dtype, window, side_by_side, has_bias = case
    padded = launch.padded_contraction(k)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1)) if has_bias else None
    chosen = launch.kept_plan(m, n, padded, window, launch.hardware(torch.device("cuda")))
    plans = dict.fromkeys([chosen, *(launch.split(chosen, padded, window, s) for s in (1, 3) if chosen.streamed)])
    for kind in ("tame", "rows", "wild"):
        a, b = operands(m, n, k, dtype, kind, side_by_side)
        want = exact_mm(a, b, window=window, balance="weight", bias=None if bias is None else bias.expand(m, n), out_dtype=dtype)
        x, y = a.cuda(), b.cuda() if side_by_side else b.t().cuda().t()
        z = None if bias is None else bias.cuda().expand(m, n)
        digits = kept.weight_digits(y, window)
        if kind == "tame":
            assert torch.equal(digits[: kept.layout(k, n, window).digits].cpu(), kept.weight_digits(b, window)[: kept.layout(k, n, window).digits])
        for plan in plans:
            for words in {1, 2} if plan.words else {0}:
                got = kept_kernels.multiply(x, digits, n, window, z, dtype, plan=replace(plan, words=words))
                assert same(got.cpu(), want), (kind, plan, words)
        for _ in range(3):  # replayed
            assert same(kept.exact_mm_kept(x, digits, n, window=window, bias=z, out_dtype=dtype).cpu(), want), kind


@pytest.mark.gpu
@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
def test_gpu_compiled(mode, made):
    model = mlp(256, 1024, 512)
    on_cpu = torch.compile(model, backend="carbon", dynamic=True)
    card = mlp(256, 1024, 512).cuda()
    f = torch.compile(card, backend="carbon", options={"weights": "kept"} | ({"inductor": {"triton.cudagraphs": True}} if mode else {}))
    for round in range(3):
        card.load_state_dict(model.state_dict())
        for m in (1, 16, 300):
            x = torch.randn(m, 256)
            with torch.no_grad():
                want = on_cpu(x)
                for _ in range(4):
                    assert same(f(x.cuda()).cpu(), want), (round, m)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
    assert made() == 6


@pytest.mark.gpu
def test_gpu_graphs_and_streams(made):
    model = mlp(256, 1024, 512).cuda()
    f, g = compiled(model), torch.compile(model, backend="carbon", dynamic=True)
    x = torch.randn(16, 256, device="cuda")
    with torch.no_grad():
        assert same(f(x), g(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = f(x)
        made()
        for _ in range(2):  # a replay asks nobody, so the graph makes the digits
            model[0].weight.mul_(2)
            want = g(x)
            graph.replay()
            assert same(got, want) and same(f(x), want)
        assert made() == 2
        for _ in range(5):
            model[0].weight.mul_(2)
            want = g(x)
            torch.cuda.synchronize()
            results = []
            for _ in range(3):
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    results.append(f(x))
            torch.cuda.synchronize()
            assert all(same(result, want) for result in results)
