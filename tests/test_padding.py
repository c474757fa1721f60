"""Rows of products that end at odd places: padded within a graph, to the same bits and with nothing to be seen."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from carbon_compile import host
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import matmul, padding
from carbon_compile.templates import matmul as templates

from .offline import ROOT, printed

VOCABULARY = 1037


class Model(torch.nn.Module):
    """Tokens to logits, the embedding tied to the head; the loss as libraries form it."""

    def __init__(self, vocabulary=VOCABULARY, width=32):
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)

    def forward(self, tokens, keep=False):
        logits = F.linear(self.embed(tokens).tanh(), self.embed.weight)
        shifted = logits[:, :-1].float().flatten(0, 1)
        loss = F.cross_entropy(shifted, tokens[:, 1:].flatten())
        return (loss, logits) if keep else loss


@pytest.fixture
def padded(monkeypatch, poisoned, tmp_path):
    """Rows are padded on a CPU too, with NaN; those of padded products are listed. Caches don't know of it."""
    rows = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def direct(*args, plain=templates.exact_mm, **kwargs):
        if kwargs.get("row"):
            rows.append(kwargs["row"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(padding, "on_gpu", lambda x: True)
    monkeypatch.setattr(templates, "exact_mm", direct)
    return rows


def trained(model, tokens, autocast, **options):
    """The loss, what else the model returns, and gradients, of a fresh compilation."""
    torch.compiler.reset()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = torch.compile(model, backend="carbon", **options)(tokens)
    loss, *others = results if isinstance(results, tuple) else (results,)
    loss.backward()
    return [loss.detach(), *(x.detach() for x in others), *(p.grad.clone() for p in model.parameters())]


def test_the_same_bits_without_a_trace(padded, monkeypatch, tmp_path):
    model, tokens = Model(), torch.randint(0, VOCABULARY, (3, 8))
    got = trained(model, tokens, True)
    assert padded == [1088]
    padded.clear()
    monkeypatch.setattr(padding, "on_gpu", lambda x: False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "plain"))
    want = trained(model, tokens, True)
    assert not padded
    for one, other in zip(got, want, strict=True):
        assert one.stride() == other.stride()
        assert_bitwise(one, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_user_sees_is_as_it_was(padded, dynamic):
    class Returning(Model):
        def forward(self, tokens):
            return super().forward(tokens, keep=True)

    model, tokens = Returning(), torch.randint(0, VOCABULARY, (3, 8))
    loss, logits, *_ = trained(model, tokens, True, dynamic=dynamic)
    assert not padded and logits.is_contiguous() and loss.isfinite()
    with torch.no_grad():
        seen = torch.compile(lambda x: F.linear(x, model.embed.weight).view(2, 3, VOCABULARY)[1].t(), backend="carbon")(torch.randn(6, 32))
    assert not padded and seen.stride() == (1, VOCABULARY)


def test_rows_of_any_number(padded):
    """Symbolic sizes but for the classes'; afterwards everything comes out of the caches."""
    from torch._dynamo.utils import counters

    model = Model()
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        compiled = torch.compile(model, backend="carbon", dynamic=True)
        for batch in (3, 5):
            tokens = torch.randint(0, VOCABULARY, (batch, 8), generator=torch.Generator().manual_seed(1))
            loss = compiled(tokens)
            loss.backward()
            assert padded.pop() == 1056 and not padded
            alone = torch.compile(model, backend="carbon", dynamic=False)
            assert_bitwise(loss.detach(), alone(tokens).detach())
            padded.clear()
    if host.functorch_config().enable_autograd_cache:
        assert counters["aot_autograd"]["autograd_cache_hit"] > 0


def test_results_that_leave_by_other_ways(padded):
    """Operators of others, views of storage and what is written to keep contiguous rows; reshapes copy."""

    @torch.library.custom_op("padding_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return x * 2

    scaled.register_fake(torch.empty_like)
    weight, x = torch.randn(VOCABULARY, 16), torch.randn(4, 16)
    kept = [lambda y: scaled(y), lambda y: y.as_strided((2,), (VOCABULARY,)) + 1]
    freed = [lambda y: y.reshape(-1) + 1, lambda y: y.view(2, 2, -1).transpose(0, 2).exp(), lambda y: torch.sort(y).values, lambda y: y.sum(0) + y.amax(0)]
    for function in (*kept, *freed):
        with torch.no_grad():
            got = torch.compile(lambda x, f=function: f(F.linear(x, weight)), backend="carbon", options={"on_unsafe": "allow"})(x)
            assert bool(padded) == (function in freed)
            padded.clear()
            plain = templates.exact_mm(x, weight.t(), window=24, balance="weight")
            if function not in freed[1:2] + freed[3:]:  # exp and sums are carbon's own
                assert_bitwise(got, function(plain))
        torch.compiler.reset()


def test_the_product_itself(poisoned):
    a, b = torch.randn(7, 20), torch.randn(20, 33)
    got = templates.exact_mm(a, b, window=24, row=48)
    assert got.stride() == (48, 1) and got._base[:, 33:].isnan().all()
    assert_bitwise(got, templates.exact_mm(a, b, window=24))
    assert templates.exact_mm(a[:, :1], b[:1], window=24, row=48).stride() == (48, 1)
    assert templates.exact_mm(a[:0], b, window=24, row=48).stride() == (48, 1)
    for wrong in ({"row": 32}, {"row": 48, "transposed": True}):
        with pytest.raises(ValueError, match="rows of 33"):
            templates.exact_mm(a, b, window=24, **wrong)
    torch.library.opcheck(matmul.MM_PADDED, (a, b, None, 24, "none", torch.float32, 48), test_utils=("test_schema", "test_faketensor"))


# ---- kernels ----


def test_products_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "tests.padding_checks"], env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.stdout == "42 equal\n", run.stderr[-3000:]


WIDTHS = """
import re
import torch
from carbon_compile.templates import matmul_kernels, matmul_recipe
from tests.offline import pretend

pretend(90)

def matrix(rows, columns, dtype, row): return torch.empty_strided((rows, columns), (row, 1), dtype=dtype, device="meta")

for dtype, window, row in ((torch.bfloat16, 16, 50304), (torch.float32, 24, 50272)):
    x, w, g = matrix(4096, 768, dtype, 768), matrix(50257, 768, dtype, 768), matrix(4096, 50257, dtype, row)
    for a, b, balance, options in ((g, w, "weight", {{}}), (x.t(), g, "gradient", {{"transposed": True}}), (x, w.t(), "weight", {{"row": row}})):
        recipe = matmul_kernels.prepare(a, b, window, balance, None, **options)
        for step in recipe.launches:
            if step.kernel.__name__ in ("gemm_kernel", "specialised_kernel") and not options.get("row"):
                continue  # only how the others read is asked, and these take long to compile
            arguments = [matmul_recipe._stand_ins((dtype, dtype, None, dtype), x) for x in step.arguments]
            ptx = step.kernel.warmup(*arguments, grid=(step.grid,), **step.constants).asm["ptx"]
            name = re.search(r"entry (\\w+)", ptx).group(1)
            stores = {{width for width in re.findall(r"st.global[.\\w:]*?((?:v\\d[.])?b\\d+)", ptx)}}
            print(name, dtype.itemsize, balance, len(re.findall(r"ld.global[.\\w:]*v4.b32", ptx)), *sorted(stores))
"""


def test_widths_of_accesses():
    """Of a head with 50257 classes: its gradient is loaded 16 bytes at a time, its result stored so in 16-bit types, and else in pairs, as tensor cores hold it."""
    pytest.importorskip("triton")
    lines = [line.split() for line in printed(WIDTHS.format()).splitlines()]
    loads = {(name, int(size), balance): int(wide) for name, size, balance, wide, *_ in lines}
    for size in (2, 4):
        assert loads["tokens_kernel", size, "gradient"] >= 4 * size // 2  # of both operands
        assert loads["exponents_kernel", size, "gradient"] >= 2 * size // 2
        assert loads["digits_kernel", size, "gradient"] >= 2 * size // 2
    assert loads["quantize_kernel", 2, "weight"] > 0 and loads["quantize_kernel", 4, "weight"] > 0
    results = [(int(size), stores) for name, size, balance, _, *stores in lines if name in ("gemm_kernel", "specialised_kernel")]
    assert results == [(2, ["v4.b32"]), (4, ["v2.b32"])]


# ---- on a card ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_products_on_a_gpu(dtype):
    g = torch.Generator().manual_seed(0)
    window, row = (24, 5152) if dtype == torch.float32 else (16, 5184)
    for m in (5, 300):  # few rows, and more than a tile
        a, b = torch.randn(m, 200, generator=g).to(dtype), torch.randn(5137, 200, generator=g).to(dtype)
        want = templates.exact_mm(a, b.t(), window=window, balance="weight", out_dtype=dtype)
        for _ in range(3):  # the ordinary way, and replayed
            got = templates.exact_mm(a.cuda(), b.cuda().t(), window=window, balance="weight", out_dtype=dtype, row=row)
            assert got.stride() == (row, 1)
            assert_bitwise(got.cpu(), want)
        for poison in (0.0, torch.nan, torch.inf):  # what is read of a gradient's padding
            room = torch.full((m, row), poison, dtype=dtype, device="cuda")
            grad = room[:, :5137].copy_(want)
            assert_bitwise(
                templates.exact_mm(grad, b.cuda(), window=window, balance="weight", out_dtype=dtype).cpu(),
                templates.exact_mm(want, b, window=window, balance="weight", out_dtype=dtype),
            )
            assert_bitwise(
                templates.exact_mm(a.cuda().t(), grad, window=window, balance="gradient", out_dtype=dtype, transposed=True).cpu(),
                templates.exact_mm(a.t(), want, window=window, balance="gradient", out_dtype=dtype, transposed=True),
            )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("autocast", [False, True])
def test_losses_on_a_gpu(autocast, mode):
    """Forward and backward of a padded head, beside a CPU's, whose rows are plain."""
    model, tokens = Model(vocabulary=5003), torch.randint(0, 5003, (3, 40))
    want = trained(model, tokens, autocast)
    torch.compiler.reset()
    there = Model(vocabulary=5003).cuda()
    there.load_state_dict(model.state_dict())
    compiled = torch.compile(there, backend="carbon", mode=mode)
    for _ in range(4):
        there.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = compiled(tokens.cuda())
        loss.backward()
        for one, other in zip((loss.detach(), *(p.grad for p in there.parameters())), want, strict=True):
            assert_bitwise(one.cpu(), other)
