"""Attention: accuracy, and what no output may depend on."""

import pytest
import torch
import torch.nn.functional as F

from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import composites, registry
from carbon_compile.lowering.policy import Policy
from carbon_compile.lowering.registry import Refusal

from .definition import check_accuracy, check_compiled, compiled, eager_engine

registry.load()
DTYPES = [torch.float32, torch.bfloat16]


def attention(q, k, v, **options):
    """The definition, by eager PyTorch."""
    with composites.Composites(Policy()):
        return F.scaled_dot_product_attention(q, k, v, **options)


def gradients(q, k, v, g, **options):
    """(output, dq, dk, dv) of the definition under the incoming gradient g."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    y = attention(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def inputs(*batch, queries=9, keys=9, features=8, dtype=torch.float32):
    return [torch.randn(*batch, n, features).to(dtype) for n in (queries, keys, keys, queries)]


def every_kind(q, k, v, grouped_q, keep, bias):
    few = q[..., :5, :]
    return (
        F.scaled_dot_product_attention(q, k, v),
        F.scaled_dot_product_attention(few, k, v, is_causal=True, scale=0.3),
        F.scaled_dot_product_attention(q, k, v, attn_mask=keep),
        F.scaled_dot_product_attention(q, k, v, bias),
        F.scaled_dot_product_attention(grouped_q, k, v, is_causal=True, enable_gqa=True),
        F.scaled_dot_product_attention(q, k[:, :1], v[:, :1, :, :3], attn_mask=keep),
        F.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0]),
    )


def every_argument(dtype):
    q, k, v, _ = inputs(2, 3, queries=6, dtype=dtype)
    keep = torch.rand(2, 1, 6, 9) > 0.3
    keep[0, 0, 2] = False  # a query without keys
    bias = torch.randn(3, 6, 9).to(dtype)
    grouped = torch.randn(2, 6, 6, 8).to(dtype)
    return [t.requires_grad_() if t.is_floating_point() else t for t in (q, k, v, grouped, keep, bias)]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_compiled_is_the_definition_and_accurate(dtype, tolerance):
    arguments = every_argument(dtype)
    results = check_compiled(every_kind, arguments)
    check_accuracy(every_kind, arguments, results, tolerance)
    assert (results[0][2][0, :, 2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_causal_output_does_not_know_later_tokens(dtype):
    q, k, v, g = inputs(2, 3, dtype=dtype)
    now = 5
    g[:, :, now:] = 0
    want = gradients(q, k, v, g, is_causal=True)
    for size in (1.0, 50.0, 1e-30, 1e20, float("inf"), float("nan")):
        changed = [torch.cat([t[:, :, :now], torch.randn(2, 3, 4, 8).to(dtype) * size], 2) for t in (q, k, v)]
        got = gradients(*changed, g, is_causal=True)
        # With later weights that are NaN, so is 0 times them in an earlier key's gradient.
        finite = size <= 50
        for a, b in zip(got[: 4 if finite else 1], want, strict=finite):
            assert_bitwise(a[:, :, :now], b[:, :, :now])
    for length in (1, 2, now):
        prefix = [t[:, :, :length].contiguous() for t in (q, k, v, g)]
        cut = torch.cat([prefix[3], torch.zeros_like(g[:, :, length:])], 2)
        longer = gradients(q, k, v, cut, is_causal=True)
        for a, b in zip(gradients(*prefix, is_causal=True), longer, strict=True):
            assert_bitwise(a, b[:, :, :length])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_keys_change_nothing(dtype):
    q, k, v, g = inputs(2, 3, queries=4, dtype=dtype)
    keep = torch.arange(9) < 6
    want = gradients(q, k[:, :, :6], v[:, :, :6], g)
    for filler in (0.0, 1e30, float("nan"), float("-inf")):
        padded = [torch.cat([t[:, :, :6], torch.full((2, 3, 3, 8), filler, dtype=dtype)], 2) for t in (k, v)]
        got = gradients(q, *padded, g, attn_mask=keep)
        for a, b in zip(got, want, strict=True):
            assert_bitwise(a[:, :, :6], b)
            assert a[:, :, 6:].count_nonzero() == 0
    order = torch.randperm(9)
    shuffled = gradients(q, k[:, :, order], v[:, :, order], g, attn_mask=keep[order])
    plain = gradients(q, k, v, g, attn_mask=keep)
    for a, b in zip(shuffled, plain, strict=True):
        assert_bitwise(a, b if a.shape[2] == 4 else b[:, :, order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_in_the_batch_change_nothing(dtype):
    q, k, v, g = inputs(7, 2, dtype=dtype)
    k[1], v[2] = k[1] * 1e10, v[2] * 1e-10
    want = gradients(q, k, v, g, is_causal=True)
    for n in (1, 2, 7):
        for a, b in zip(gradients(q[:n], k[:n], v[:n], g[:n], is_causal=True), want, strict=True):
            assert_bitwise(a, b[:n])
    one = attention(q[:, :, 3:4], k, v)
    assert_bitwise(one, attention(q, k, v)[:, :, 3:4])
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, g)]
    for a, b in zip(gradients(*strided, is_causal=True), want, strict=True):
        assert_bitwise(a, b)


def test_grouped_heads_are_repeated_heads():
    q, k, v, _ = inputs(2, 2)
    q = torch.randn(2, 6, 9, 8)
    mask = torch.rand(2, 6, 9, 9) > 0.4
    got = attention(q, k, v, attn_mask=mask, enable_gqa=True)
    repeated = [t.repeat_interleave(3, 1) for t in (k, v)]
    assert_bitwise(got, attention(q, *repeated, attn_mask=mask))


def test_a_value_that_is_not_finite_reaches_its_queries():
    q, k, v, _ = inputs(1)
    v[0, 4] = float("inf")
    y = attention(q, k, v, is_causal=True)
    assert y[0, :4].isfinite().all() and y[0, 4:].isnan().all()


def test_values_of_many_sizes_keep_their_accuracy():
    q, k, v, _ = inputs(2, 4, keys=64)
    v = v * torch.exp(4 * torch.randn(2, 4, 64, 1))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        a, b, c = (t.to(dtype) for t in (q, k, v))
        want = F.scaled_dot_product_attention(a.double(), b.double(), c.double())
        error = (attention(a, b, c) - want).norm() / want.norm()
        assert error < tolerance


def dropped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)


def test_dropout_draws_from_the_seed():
    q, k, v, g = inputs(2, 3)
    torch.manual_seed(3)
    want = gradients(q, k, v, g, dropout_p=0.4, is_causal=True)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    function = torch.compile(dropped, backend=carbon, fullgraph=True)
    torch.manual_seed(3)
    y = function(*leaves)
    assert_bitwise([y.detach(), *torch.autograd.grad(y, leaves, g)], want)
    assert not torch.equal(function(*leaves), y)
    # The first query has one key: it is dropped, or scaled up.
    first, none = want[0][:, :, 0], (want[0][:, :, 0] == 0).all(-1)
    assert none.any() and torch.allclose(first[~none], (v[:, :, 0] / 0.6)[~none])


def test_refusals():
    x = torch.randn(2, 4, 8)
    with pytest.raises(Refusal, match="float64"):
        attention(x.double(), x.double(), x.double())
    with pytest.raises(RuntimeError, match="is_causal"):
        attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool), is_causal=True)
    with pytest.raises(RuntimeError, match="same dtype"):
        attention(x, x.bfloat16(), x)
    with pytest.raises(RuntimeError, match="enable_gqa"):
        attention(x[:, None].expand(2, 3, 4, 8), x[:, None].expand(2, 2, 4, 8), x[:, None].expand(2, 2, 4, 8), enable_gqa=True)


def test_the_inference_path_of_transformer_layers_is_the_training_path():
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    masks = ({}, {"src_key_padding_mask": padding}, {"src_mask": later}, {"src_key_padding_mask": padding, "src_mask": later})
    layers = [torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation=a, norm_first=n).eval() for a, n in (("gelu", True), ("relu", False))]
    heads = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()

    def f(x):
        outputs = [layer(x, **mask) for layer in layers for mask in masks]
        for average in (True, False):
            outputs += heads(x, x, x, key_padding_mask=padding, average_attn_weights=average)
        return [*outputs, heads(x, x, x, need_weights=False)[0]]

    with eager_engine():
        function = torch.compile(f, backend=carbon, fullgraph=True)
        training = function(x)
        with torch.no_grad():
            inference = function(x)
    assert_bitwise([y.detach() for y in training], inference)
    for ours, theirs in zip(inference, f(x), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-6)


def check(device):
    """Fingerprints of outputs and gradients, on `device`."""
    found = {}
    for dtype in DTYPES:
        torch.manual_seed(0)
        arguments = [t.detach().to(device).requires_grad_(t.requires_grad) for t in every_argument(dtype)]
        found[f"kinds {dtype}"] = fingerprint([y.detach() for part in compiled(every_kind, arguments) for y in part])
        longer = [t.to(device).requires_grad_() for t in inputs(2, 4, queries=300, keys=300, features=64, dtype=dtype)[:3]]
        torch.manual_seed(1)
        found[f"dropout {dtype}"] = fingerprint([y.detach() for part in compiled(dropped, longer) for y in part])
    return found


@pytest.mark.gpu
def test_gpu_equals_cpu():
    assert check("cuda") == check("cpu")
