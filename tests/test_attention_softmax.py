"""The softmax of attention as a kernel: the bits of the formula, and where graphs get it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from carbon_compile import backend, recognise
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import attention, registry

from .definition import compiled, defined
from .offline import printed
from .test_causal import given, is_causal, later_too, padded, seen, tensors, window

registry.load()

ROOT = Path(__file__).resolve().parents[1]


def scores(batch, queries, keys, g):
    """float32: rows of small and large numbers, far apart ones whose weights are subnormal or vanish, equal ones, and
    what is not finite."""
    x = torch.randn(batch, queries, keys, generator=g) * torch.exp2(torch.randint(-2, 9, (batch, queries, 1), generator=g).float())
    x[0, ::5] = torch.where(torch.rand(keys, generator=g) < 0.5, x[0, ::5], -700.0 * torch.rand(keys, generator=g))
    changes = [
        lambda r: r.fill_(torch.nan), lambda r: r.fill_(-torch.inf), lambda r: r.fill_(torch.inf), lambda r: r.fill_(-3.0),
        lambda r: r[-1:].fill_(torch.nan), lambda r: r[:1].fill_(torch.inf), lambda r: r[:1].fill_(-torch.inf), lambda r: r[1:].fill_(-torch.inf),
        lambda r: (r.fill_(-torch.inf), r[-1:].fill_(torch.nan)), lambda r: r.fill_(-0.0),
    ]  # fmt: skip
    for i, change in enumerate(changes):
        if i + 1 < queries:
            change(x[-1, queries - 1 - i])
    return x


def incoming(weights, causal, g):
    """The gradient of weights, whose products with them differ by everything; zero beyond, if there is a beyond."""
    batch, queries, keys = weights.shape
    grad = torch.randn(batch, queries, keys, generator=g) * torch.exp2(torch.randint(-140, 120, (batch, queries, 1), generator=g).float())
    for i, values in enumerate(([torch.inf], [-torch.inf], [torch.nan], [3e38, -3e38], [-torch.inf, torch.inf], [1e-42, 2e-42])):
        if i < queries:
            grad[0, i, : len(values)] = torch.tensor(values[:keys])
    return torch.where(seen(grad, grad.mT), grad, 0.0) if causal else grad


def cases(sizes, seed=0):
    """(scores, gradient of weights, scale, causal, weights, gradient of scores) by the formulas."""
    g = torch.Generator().manual_seed(seed)
    for batch, queries, keys in sizes:
        for causal, scale in ((False, 0.125), (True, 0.125), (True, -0.7), (False, 1.0)):
            x = scores(batch, queries, keys, g)
            want = attention._softmax(x, scale, causal)
            grad = incoming(want, causal, g)
            yield x, grad, scale, causal, want, attention._softmax_backward(grad, want, scale, causal)


def test_the_operations_are_the_formulas():
    """Of the mask, the scale and the softmax that a graph has one by one."""
    for x, grad, scale, causal, want, back in cases(((2, 9, 14), (1, 20, 7))):
        mask = seen(x, x.mT) if causal else None
        assert_bitwise(torch.ops.carbon.attention_weights(torch.mul(x, scale), mask), want)
        assert_bitwise(torch.ops.carbon.attention_softmax(x, scale, causal), want)
        assert_bitwise(torch.mul(torch.ops.carbon.attention_weights_backward(grad, want), scale), back)
        assert_bitwise(torch.ops.carbon.attention_softmax_backward(grad, want, scale, causal), back)


INTERPRETED = """
from tests.interpreter import patch
patch()
from carbon_compile.bits import assert_bitwise
from carbon_compile.templates import attention_softmax, launch
from tests.test_attention_softmax import cases

launch.softmax_tile = lambda keys, operands: launch.Tile(2, max(64, launch._power_of_two(keys)), 1)
for x, grad, scale, causal, want, back in cases(((1, 21, 9), (1, 70, 130))):
    name = (tuple(x.shape), scale, causal)
    assert_bitwise(attention_softmax.weights(x, scale, causal), want, f"weights of {name}")
    assert_bitwise(attention_softmax.gradient(grad, want, scale, causal), back, f"gradient of {name}")
print("equal")
"""


def test_kernels_in_the_interpreter():
    """130 keys are a program's in three widths."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.stdout.endswith("equal\n"), run.stderr[-3000:]


OFFLINE = """
import torch
from carbon_compile.templates import attention_softmax
from tests.offline import pretend

pretend({capability})
for keys in (50, 1024):
    for forward in (True, False):
        recipe, types = attention_softmax.warmable(torch.empty(8, keys, keys, device="meta"), forward, 0.125, True)
        recipe.warm(types)
print("compiled")
"""


def test_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton")
    assert printed(OFFLINE.format(capability=90)) == "compiled\n"


# --- which graphs get the kernel -------------------------------------------------------------------------


def check_placed(monkeypatch, function, inputs, placed, run=defined):
    """Outputs and gradients are those of graphs without it, and the kernel is `placed` times in all graphs."""
    results, found = [], []

    def place(graph):
        found.append(recognise.attention_softmax(graph, suits=lambda weights: True))
        return found[-1]

    for each in (lambda graph: 0, place):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "attention_softmax", each)
            torch.manual_seed(5)
            with inductor_config.patch(force_disable_caches=True), functorch_config.patch(enable_autograd_cache=False):
                results.append(run(function, inputs))
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_bitwise(a, b)
    assert sum(found) == placed


@pytest.mark.parametrize("kind", ("plain", "wild"))
def test_forward_and_backward_are_one_kernel_each(monkeypatch, kind):
    for dtype in (torch.float32, torch.bfloat16):
        check_placed(monkeypatch, is_causal, tensors(9, 14, dtype=dtype, kind=kind), 2)
    check_placed(monkeypatch, lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tensors(kind=kind), 2)
    check_placed(monkeypatch, lambda *x: is_causal(*x, enable_gqa=True), tensors(heads=6, kv_heads=2, kind=kind), 2)
    check_placed(monkeypatch, lambda *x: is_causal(*x, scale=-0.25), tensors(kind=kind), 2)
    check_placed(monkeypatch, lambda *x: is_causal(*x, dropout_p=0.4), tensors(kind=kind), 2)
    check_placed(monkeypatch, is_causal, [t.detach() for t in tensors(kind=kind)], 1)


def test_a_mask_of_all_keys(monkeypatch):
    def all_of_them(q, k, v):
        mask = (torch.arange(q.shape[-2]).unsqueeze(1) >= 0).expand(q.shape[0], 1, -1, k.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    check_placed(monkeypatch, all_of_them, tensors(kind="wild"), 2)


def test_a_mask_of_one_row_is_read_for_each_number_of_queries(monkeypatch):
    """Of the first key, which is all that the first of several queries sees."""

    def one_and_all(q, k, v):
        mask = torch.arange(k.shape[-2]).unsqueeze(0) < 1
        return tuple(F.scaled_dot_product_attention(x, k, v, attn_mask=mask) for x in (q[..., :1, :], q))

    check_placed(monkeypatch, one_and_all, tensors(), 2)


def test_weights_that_are_not_laid_out_as_scores_keep_their_operations(monkeypatch):
    def more_dimensions(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(1, 1, 1, *q.shape[-2:-1], k.shape[-2], dtype=torch.bool).tril())

    def transposed(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(k.shape[-2], q.shape[-2], dtype=torch.bool).triu().t())

    check_placed(monkeypatch, more_dimensions, tensors(), 0)
    check_placed(monkeypatch, transposed, tensors(), 0)


def test_two_layers(monkeypatch):
    def layers(q, k, v):
        return is_causal(is_causal(q, k, v), k, v, scale=1.0)

    check_placed(monkeypatch, layers, tensors(), 4)


def test_compiled(monkeypatch):
    check_placed(monkeypatch, is_causal, tensors(dtype=torch.bfloat16, kind="wild"), 2, run=compiled)


def test_other_masks_keep_their_operations(monkeypatch):
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    check_placed(monkeypatch, given, [*tensors(), mask], 0)
    check_placed(monkeypatch, given, [*tensors(), mask.float()], 2)  # added to the scores, which are then all seen
    check_placed(monkeypatch, later_too, tensors(), 0)
    check_placed(monkeypatch, window, tensors(), 0)
    check_placed(monkeypatch, padded, [*tensors(), torch.rand(2, 11) > 0.3], 0)


def test_scores_that_somebody_else_sees_keep_their_scale(monkeypatch):
    def both(q, k):
        scaled = torch.ops.carbon.attention_scores(q.flatten(0, 1), k.flatten(0, 1), 24) * 0.3
        return torch.ops.carbon.attention_weights(scaled, None), scaled

    check_placed(monkeypatch, both, tensors()[:2], 2)


def test_nothing_is_placed_on_a_cpu_or_where_rows_are_too_long():
    meta = lambda *shape: torch.empty(shape, device="meta")  # noqa: E731
    assert not attention.suits(torch.empty(2, 3, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "on_gpu", lambda x: True)
        assert attention.suits(meta(2, 3, 4096)) and not attention.suits(meta(2, 3, 4097)) and not attention.suits(meta(2, 0, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_equals_cpu():
    for x, grad, scale, causal, want, back in cases(((3, 70, 33), (2, 256, 512), (1, 64, 1030), (1, 40, 4096), (2, 130, 130))):
        for _ in range(2):  # recorded, then replayed
            assert_bitwise(torch.ops.carbon.attention_softmax(x.cuda(), scale, causal).cpu(), want)
            assert_bitwise(torch.ops.carbon.attention_softmax_backward(grad.cuda(), want.cuda(), scale, causal).cpu(), back)
    for scale in (0.0, -0.0):
        back = attention._softmax_backward(grad, want, scale, False)
        assert_bitwise(torch.ops.carbon.attention_softmax_backward(grad.cuda(), want.cuda(), scale, False).cpu(), back)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_compiled():
    for dtype in (torch.float32, torch.bfloat16):
        for function in (is_causal, lambda q, k, v: F.scaled_dot_product_attention(q, k, v)):
            inputs = tensors(70, 70, dtype=dtype, kind="wild")
            want = defined(function, inputs)
            got = compiled(function, [t.detach().cuda().requires_grad_() for t in inputs])
            for ours, theirs in zip(got, want, strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    assert_bitwise(a.cpu(), b)
