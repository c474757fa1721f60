"""What a row's bits may not depend on: its neighbours, the batch, later tokens, how a product is cut."""

import pytest
import torch
import torch.nn.functional as F

from carbon_compile.backend import carbon
from tests import training

BATCHES = (1, 2, 7, 64, 255, 256, 257, 4096)


def layers(x, weight, bias, gain):
    """Linear, layer norm, rms norm and softmax of rows, in one graph."""
    y = F.linear(x, weight, bias)
    return y, F.layer_norm(x, (x.shape[-1],), gain, gain), F.rms_norm(x, (x.shape[-1],), gain), F.softmax(y, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_batch(bitwise, dtype):
    x = torch.randn(4096, 40).to(dtype)
    weight, bias, gain = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype), torch.randn(40).to(dtype)
    compiled = torch.compile(layers, backend=carbon, dynamic=True)
    with torch.no_grad():
        full = compiled(x, weight, bias, gain)
        for n in BATCHES:
            for part, whole in zip(compiled(x[:n].clone(), weight, bias, gain), full, strict=True):
                bitwise(part, whole[:n])
            for part, whole in zip(compiled(x[-n:].clone(), weight, bias, gain), full, strict=True):
                bitwise(part, whole[-n:])


def test_attention_does_not_depend_on_batch_or_later_tokens(bitwise):
    q, k, v = (torch.randn(256, 2, 9, 8) for _ in range(3))
    attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), backend=carbon, dynamic=True)
    with torch.no_grad():
        full = attend(q, k, v)
        for n in (1, 2, 7, 64, 255):
            bitwise(attend(q[:n].clone(), k[:n].clone(), v[:n].clone()), full[:n])
        later = [t.clone() for t in (q, k, v)]
        for t in later:
            t[:, :, 5:] = torch.randn(256, 2, 4, 8) * 1e3
        bitwise(attend(*later)[:, :, :5], full[:, :, :5])


def test_gpt2_rows_and_prefixes(bitwise):
    model = training.initialise(training.gpt2()).eval()
    tokens = next(training.text_batches(1, 257, 12))
    forward = torch.compile(lambda t: model(t).logits, backend=carbon, dynamic=True)
    with torch.no_grad():
        full = forward(tokens)
        for n in (2, 7, 64, 255, 256):
            bitwise(forward(tokens[:n].clone()), full[:n])
        bitwise(forward(tokens[:1].clone()), full[:1])
        later = tokens.clone()
        later[:, 8:] = 65
        bitwise(forward(later)[:, :8], full[:, :8])


def products(x, w, folded):
    return x @ w, folded @ w, x.transpose(0, 1).contiguous().transpose(0, 1) @ w, torch.einsum("bld,dn->bln", x, w)


def test_a_folded_batch_is_the_same_product(bitwise):
    x, w = torch.randn(5, 7, 33), torch.randn(33, 12)
    a, b, c, d = torch.compile(products, backend=carbon)(x, w, x.reshape(35, 33))
    for other in (b.reshape(5, 7, 12), c, d):
        bitwise(a, other)


def test_large_integers_survive_an_outer_product():
    y = torch.compile(lambda a, b: a @ b, backend=carbon)(torch.ones(1, 1), torch.arange(8192.0)[None])
    assert y[0, 2049].item() == 2049.0


def contractions(a, b, x):
    return a @ b, torch.einsum("ik,kj->ij", a, b), torch.bmm(a[None], b[None])[0], x.sum(), x.mean(), x.norm(), (a * a).sum(1)


def test_no_order_of_the_contraction_matters(bitwise):
    a, b, x = torch.randn(9, 513) * torch.exp(torch.randn(9, 513) * 3), torch.randn(513, 11), torch.randn(513) * 1e3
    compiled = torch.compile(contractions, backend=carbon)
    first = compiled(a, b, x)
    for seed in range(5):
        p = torch.randperm(513, generator=torch.Generator().manual_seed(seed))
        for one, other in zip(first, compiled(a[:, p].contiguous(), b[p].contiguous(), x[p].contiguous()), strict=True):
            bitwise(one, other)


def test_threads_and_fresh_memory_do_not_matter(bitwise, poisoned):
    a, b, x = torch.randn(65, 300), torch.randn(300, 70), torch.randn(300)
    compiled = torch.compile(contractions, backend=carbon)
    first = compiled(a, b, x)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for one, other in zip(first, compiled(a, b, x), strict=True):
            bitwise(one, other)
    finally:
        torch.set_num_threads(threads)
