"""Reductions and softmax: exact, order-free, and the same compiled as defined."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
from carbon_compile.diagnostics import Refused
from carbon_compile.lowering import prims as P
from carbon_compile.lowering import reduction as R
from carbon_compile.lowering import registry, unsigned

from .definition import (
    check_accuracy,
    check_compiled,
    compiled,
    defined,
    eager_engine,
    forward_and_backward,
)

registry.load()
NORMS = (0, 1, 2, 3, 0.5, math.inf, -math.inf)
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 1e15, -1e15, 1.0, -1.0]


def differentiable(x):
    """Every differentiable reduction, over several dims."""
    y = [x.sum(), x.sum((0, 2), keepdim=True), x.mean((1, 2)), x.nansum(0)]
    y += [x.var(), x.std((0, 1), keepdim=True), *torch.var_mean(x, 2, correction=0), *torch.std_mean(x, (0, 2), correction=2)]
    y += [torch.linalg.vector_norm(x, p, 1) for p in NORMS if p] + [F.normalize(x, dim=1), torch.dist(x, x.flip(0))]
    y += [x.amax(1), x.amin((0, 1)), x.max(), x.max(1).values, x.min(2, keepdim=True).values]
    y += [x.logsumexp((0, 2), keepdim=True), torch.cdist(x, x.flip(1)), torch.renorm(x, 2, 0, 1.0)]
    y += [F.softmax(x, 1), F.log_softmax(x, -1), F.softmax(x, 1, dtype=torch.float32)]
    return tuple(y)


def rounded_once(x):
    """Reductions whose result is narrower than the sums within."""
    y = [x.sum(1), x.mean((1, 2)), *torch.var_mean(x, 2), x.norm(dim=1), x.amax(1), x.logsumexp(0), F.softmax(x, 1), F.log_softmax(x, -1)]
    return (*y, F.softmax(x, 1, dtype=torch.float32))


def selective(x):
    """Reductions to indices, flags and counts."""
    y = [x.argmax(), x.argmin(), x.argmax(1), x.argmin(2, keepdim=True), x.max(1).indices, x.min(0, keepdim=True).indices]
    y += [x.any(), x.any(1), x.any((0, 2)), x.all(), x.all(2, keepdim=True), x.all((0, 1)), torch.count_nonzero(x), torch.count_nonzero(x, (0, 1))]
    return tuple(y)


def narrow_types(x):
    return x.sum(dtype=torch.float32), x.mean(1, dtype=torch.float32), x.long().sum(1), x.long().float().mean(), (x > 0).sum(0), (x > 0).sum(dtype=torch.float32), x.sum(1, dtype=torch.int64)


@pytest.mark.parametrize(
    "function, dtype, tolerance",
    [(differentiable, torch.float32, 2e-6), (rounded_once, torch.bfloat16, 2e-2), (rounded_once, torch.float16, 3e-3)],
    ids=["float32", "bfloat16", "float16"],
)
def test_compiled_is_the_definition(function, dtype, tolerance):
    x = torch.randn(5, 7, 6).to(dtype).requires_grad_(dtype is not torch.float16)
    check_accuracy(function, [x], check_compiled(function, [x]), tolerance)


def test_choices_and_types_are_pytorchs():
    x = torch.randn(5, 7, 6)
    x[x.abs() < 0.3] = 0.0
    for function in (selective, narrow_types):
        outputs, _ = check_compiled(function, [x])
        for a, b in zip(outputs, function(x), strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b)


def special_values(x):
    y = [x.sum(1), x.mean(1), x.var(1), x.amax(1), x.amin(1), *x.max(1), *x.min(1), x.argmax(1), x.argmin(1)]
    y += [torch.linalg.vector_norm(x, p, 1) for p in (1, math.inf, -math.inf)] + [x.any(1), x.all(1), torch.count_nonzero(x, 1)]
    y += [x.logsumexp(1), F.softmax(x, 1), F.log_softmax(x, 1), torch.ops.aten._safe_softmax(x, 1)]
    return tuple(y)


def test_special_values_are_pytorchs():
    rows = torch.tensor([list(pair) for pair in itertools.product(SPECIAL, SPECIAL)])
    outputs, _ = check_compiled(special_values, [rows])
    check_accuracy(special_values, [rows], (outputs, []), 1e-6)


SUMS = [
    P.sum, P.mean, R.var, R.std, R.logsumexp, lambda x, d: R.vector_norm(x, 2, d), lambda x, d: R.vector_norm(x, 1, d), lambda x, d: R.vector_norm(x, 3, d),
    lambda x, d: torch.cat(R.var_mean(x, d, correction=0)), P.amax, P.amin,
]  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-44], ids=["one", "huge", "subnormal"])
def test_order_does_not_matter(scale):
    x = torch.randn(8, 1000) * torch.exp(4 * torch.randn(8, 1000)) * scale
    order = torch.randperm(1000)
    for function in SUMS:
        dims = [1]
        assert_bitwise(function(x, dims), function(x[:, order], dims))
        assert_bitwise(function(x, dims), function(x.reshape(8, 50, 20).transpose(1, 2), [1, 2]).reshape(function(x, dims).shape))


@pytest.mark.parametrize("n", [1, 2, 3, 100, 4097])
def test_sum_is_the_exact_sum_rounded_once(n):
    """Exact on the grid of contract section 3: terms are rounded 38 bits below the largest."""
    x = torch.randn(n) * torch.exp(torch.randn(n))
    unit = Fraction(2) ** (math.frexp(x.abs().max().item())[1] - 38)
    total = sum(round(Fraction(v) / unit) for v in x.tolist()) * unit
    assert Fraction(P.sum(x).item()) == Fraction(torch.tensor(float(total), dtype=torch.float64).float().item())


def test_sums_at_the_edge_of_int32():
    """4096 terms add up in parts, 4097 in int64; where every term is the largest below a power of two, the
    sum of the high parts is 2^31, which an int32 can't tell from -2^31."""
    most = float(torch.tensor(1.0).nextafter(torch.tensor(0.0)))
    for n in (4095, 4096, 4097):
        rows = torch.full((2, n), most)
        rows[1].neg_()
        mixed = torch.where(torch.rand(3, n) < 0.5, 1.0, -1.0) * most
        mixed[1] *= torch.rand(n) * 2.0**-20
        check_sums(torch.cat([rows, mixed]))
        special = torch.full((4, n), 3.0e38)
        special[0, :] = math.inf
        special[1, :] = -math.inf
        special[2, -1] = -math.inf
        special[3, :2] = torch.tensor([math.inf, -math.inf])
        want = torch.tensor([math.inf, -math.inf, -math.inf, math.nan])
        assert_bitwise(P.sum(special, 1), want)
        assert_bitwise(compiled(lambda x: x.sum(1), [special])[0][0], want)


def check_sums(x):
    exact = torch.tensor([float(sum(map(Fraction, row), Fraction(0))) for row in x.tolist()], dtype=torch.float64)
    got = P.sum(x, 1)
    assert_bitwise(compiled(lambda x: x.sum(1), [x])[0][0], got)
    assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-24 + x.abs().amax(1) * x.shape[1] * 2.0**-38).all()


@pytest.mark.parametrize("n", [3, 700, 4096, 5000])
def test_parts_of_terms_are_the_terms(n):
    x = torch.randn(8, n) * torch.exp2(torch.randint(-45, 3, (8, n)).float())
    x[0] *= 2.0**-110
    x[1] = 3.0e38 * torch.sign(x[1])
    x[2, 1:] *= 2.0**-40
    m = P.largest_magnitude(x, [1])
    assert torch.equal(m, P.largest_magnitude(x.abs(), [1], signed=False))
    high, low = (op(x, m, dtype=torch.int32) for op in (torch.ops.carbon.sum_high, torch.ops.carbon.sum_low))
    e = torch.frexp(x.abs().amax(1, True))[1].clamp(min=-125)
    expected = (x.double() * torch.exp2((38 - e).double())).round().long()  # half to even, and exact before it
    for terms in (torch.ops.carbon.sum_term, torch.ops.carbon.sum_terms):
        assert torch.equal(terms(x, m, dtype=torch.int64), expected)
    assert torch.equal((high.long() << 19) + low, expected)
    p = torch.rand(8, n)
    p[:, 0] = 1.0
    units = (p.double() * 2.0**37).round().long()
    high, low = (op(p, dtype=torch.int32) for op in (torch.ops.carbon.unit_high, torch.ops.carbon.unit_low))
    assert torch.equal(torch.ops.carbon.unit_terms(p, dtype=torch.int64), units)
    assert torch.equal((high.long() << 19) + low, units)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_extremes_in_any_order(dtype):
    """A NaN of either sign wins, and a zero is +0 wherever -0 stands."""
    tiny = torch.finfo(dtype).tiny
    sets = torch.tensor([[-0.0, 0.0], [-0.0, -tiny], [-math.inf, -tiny], [-math.inf, -math.inf], [math.inf, 3.0], [0.0, tiny], [-0.0, -0.0], [0.0, math.inf]], dtype=dtype)
    sets.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])[-1, 0] = -1  # a NaN with a sign
    expected = torch.tensor([0.0, 0.0, -tiny, -math.inf, math.inf, tiny, 0.0, math.nan], dtype=dtype)
    for x in (sets, sets.flip(1)):
        assert_bitwise(P.amax(x, [1]), expected)
        assert_bitwise(P.amin(-x, [1]), torch.where(expected == 0, expected, -expected))


def test_smallest_keys_are_largest_unsigned_bits():
    """What a GPU takes instead of a minimum, see `lowering.unsigned`."""
    bits = torch.randint(-(2**31), 2**31, (4096, 5), dtype=torch.int64).to(torch.int32)
    bits[:1024] |= -(2**31)
    bits[1024:2048] &= 2**31 - 1
    x = bits.view(torch.float32)
    expected = torch.ops.carbon.negative_key(x, dtype=torch.int32).amin(1)
    largest = torch.ops.carbon.unsigned_bits(x, dtype=torch.uint32).to(torch.int64).amax(1).to(torch.uint32)
    assert torch.equal(torch.ops.carbon.negative_key_of(largest, dtype=torch.int32), expected)


def test_unsigned_maxima_are_said_to_be_unsigned(monkeypatch):
    """All that a graph tells of its nodes agrees, and sizes that only the data knows are no obstacle."""
    monkeypatch.setattr(unsigned, "_on_gpu_of_keys", lambda node: node.target is torch.ops.carbon.negative_key.default)
    gm = make_fx(lambda x: P.largest_magnitude(x[x[:, 0] > 0], [1]), tracing_mode="symbolic")(torch.randn(4, 5))
    unsigned.place(gm)
    told = [(n.meta["val"].dtype, n.meta.get("tensor_meta", n.meta["val"]).dtype) for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert sum(dtype is torch.uint32 for dtype, _ in told) == 2 and all(one is other for one, other in told)


def test_two_words_are_one_word(monkeypatch):
    x = torch.randn(300) * torch.exp(3 * torch.randn(300))
    p = torch.rand(300)
    special = torch.tensor([[1.0, math.inf], [math.inf, -math.inf], [-math.inf, 2.0], [math.nan, math.inf]])
    one = P.sum(x), P.unit_sum(p, [0]), P.sum(special, [1])
    monkeypatch.setattr(P.pointwise, "PARTS_IN_INT32", 0)
    assert_bitwise((P.sum(x), P.unit_sum(p, [0]), P.sum(special, [1])), one)
    monkeypatch.setattr(P, "SINGLE_WORD", 2)
    assert_bitwise((P.sum(x), P.unit_sum(p, [0]), P.sum(special, [1])), one)


def test_ties_go_to_the_lowest_index():
    x = torch.tensor([[1.0, 3.0, 3.0, -0.0], [0.0, -0.0, 0.0, -1.0], [math.nan, 5.0, math.nan, 1.0], [-0.0, 0.0, -0.0, 0.0]])
    i = torch.tensor([[2, 7, 7, 2], [5, 5, 5, 5]])

    def choose(x, i):
        return x.argmax(1), x.argmin(1), x.max(1).indices, x.min(1).indices, x.max(1).values, x.argmax(), i.argmax(1), i.argmin(1), *i.max(1), *i.min(1)

    (arg_max, arg_min, max_at, min_at, values, first, *integers), _ = check_compiled(choose, [x, i])
    assert arg_max.tolist() == max_at.tolist() == [1, 0, 0, 0]
    assert arg_min.tolist() == min_at.tolist() == [3, 3, 0, 0]
    assert values[3].item() == 0.0 and math.copysign(1.0, values[3].item()) == 1.0
    assert first.item() == 8
    assert [t.tolist() for t in integers] == [[1, 0], [0, 0], [7, 5], [1, 0], [2, 5], [0, 0]]


def empty_and_scalar(x, e):
    y = [x.sum(), x.mean(), x.amax(), x.max(), x.argmax(), x.logsumexp(0), F.softmax(x, 0), F.log_softmax(x, 0), x.norm(), x.any(), x.var(correction=0)]
    y += [e.sum(), e.sum(1), e.sum(0, keepdim=True), e.mean(), e.mean(1), e.nansum(), e.var(1), e.logsumexp(1), e.norm(), e.any(1), e.all(), F.softmax(e, 1)]
    y += [torch.count_nonzero(e), F.log_softmax(e, 0), e.amax(0), e.argmax(0)]
    return tuple(y)


def test_empty_and_zero_dimensional():
    inputs = [torch.randn(()), torch.randn(4, 0)]
    check_accuracy(empty_and_scalar, inputs, check_compiled(empty_and_scalar, inputs), 1e-6)


def rows(x):
    return F.softmax(x, -1), F.log_softmax(x, -1), x.sum(-1), x.mean(-1), x.var(-1), x.norm(dim=-1), x.amax(-1), x.argmax(-1), x.logsumexp(-1)


def test_rows_do_not_depend_on_the_batch():
    x = torch.randn(255, 97, requires_grad=True)
    function = torch.compile(rows, backend=carbon, fullgraph=True, dynamic=True)
    whole = function(x)
    whole_gradient = torch.autograd.grad(sum(y.float().sum() for y in whole[:2]), x)[0]
    for size in (1, 2, 7, 64):
        part = x[:size].detach().requires_grad_()
        result = function(part)
        assert_bitwise(list(result), [y[:size] for y in whole], f"batch {size}")
        gradient = torch.autograd.grad(sum(y.float().sum() for y in result[:2]), part)[0]
        assert_bitwise(gradient, whole_gradient[:size], f"gradient at batch {size}")
    assert_bitwise(list(whole), defined(rows, [x])[0])


def of_any_size(x, c, t):
    y = [x.mean(0), x.var(0), x.argmax(1), F.cross_entropy(x, t, ignore_index=1), F.mse_loss(x, x.flip(0))]
    return (*y, F.batch_norm(c, None, None, None, None, True), F.layer_norm(x, x.shape[1:]))


def test_symbolic_sizes():
    """One compilation, any size: the counts that means and variances divide by are symbols."""
    compiles = []

    def counting(*args, **kwargs):
        compiles.append(1)
        return carbon(*args, **kwargs)

    function = torch.compile(of_any_size, backend=counting, fullgraph=True, dynamic=True)
    for batch, classes, length in ((4, 7, 5), (9, 11, 6)):
        inputs = [torch.randn(batch, classes), torch.randn(batch, 8, length)]
        inputs = [*(t.requires_grad_() for t in inputs), torch.randint(0, classes, (batch,))]
        result = forward_and_backward(function, inputs)
        assert len(compiles) == 1
        with eager_engine():
            definition = torch.compile(of_any_size, backend=carbon, fullgraph=True, dynamic=False)
            assert_bitwise(result, forward_and_backward(definition, inputs), f"batch {batch}")


@pytest.mark.parametrize(
    "code, function",
    [
        ("CB202", lambda x: x.sum()), ("CB202", lambda x: x.norm()), ("CB202", lambda x: x.var(0)),
        ("CB202", lambda x: x.mean(dtype=torch.float64)), ("CB203", lambda x: x.logsumexp(0)), ("CB203", lambda x: F.softmax(x, 0)),
    ],
)  # fmt: skip
def test_float64_is_refused(code, function):
    with pytest.raises(Refused) as refused:
        compiled(function, [torch.randn(4, 3, dtype=torch.float64)])
    assert refused.value.report.diagnostics[0].code == code


def test_float64_extremes_are_exact():
    x = torch.randn(4, 5, dtype=torch.float64)
    choose = lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), *x.max(1), x.any(1))  # noqa: E731
    for a, b in zip(check_compiled(choose, [x])[0], choose(x), strict=True):
        assert_bitwise(a, b)


def test_gradients_of_expanded_outputs_are_exact_sums():
    """AOTAutograd replays the views of inputs outside the graph, where a derivative would be PyTorch's own."""
    x = torch.randn(3, 1, requires_grad=True)
    grad = torch.randn(3, 100_003) * torch.exp2(torch.randint(-40, 40, (3, 100_003)).float())
    for view in (lambda x: x.expand(3, 100_003), lambda x: x.broadcast_to(3, 100_003), lambda x: x.squeeze(1).unsqueeze(1).expand(3, 100_003)):
        torch.compiler.reset()
        y = torch.compile(view, backend=carbon)(x)
        assert_bitwise(torch.autograd.grad(y, x, grad)[0], torch.compile(lambda g: g.sum(1, keepdim=True), backend=carbon)(grad))
    torch.compiler.reset()
    v = torch.randn(50, requires_grad=True)
    windows = torch.compile(lambda v: v.unfold(0, 7, 1), backend=carbon)(v)
    grad = torch.randn(44, 7)
    (expected,) = torch.autograd.grad(torch.compile(lambda v: v.unfold(0, 7, 1) * 1.0, backend=carbon)(v), v, grad)
    assert_bitwise(torch.autograd.grad(windows, v, grad)[0], expected)


def test_selections_that_may_be_empty():
    """Sizes that only the data knows."""

    def chosen(x):
        y = x[x > 0]
        return y.sum(), y.mean(), y.var()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = torch.compile(chosen, backend="carbon", fullgraph=True)
        x = torch.randn(50)
        assert_bitwise(function(x), tuple(f(x[x > 0]) for f in (P.sum, P.mean, R.var)))
        empty = function(-torch.ones(50))
    assert empty[0] == 0 and empty[1].isnan() and empty[2].isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("n", [768, 3000, 4096, 4097, 50257])
def test_gpu_equals_cpu(n, dtype):
    """Rows in registers, rows in loops, sums in parts and in int64, and columns cut into pieces."""

    def every(x, w):
        y = F.layer_norm(x, x.shape[-1:], w, w), F.rms_norm(x, x.shape[-1:], w), F.softmax(x, -1), F.log_softmax(x, -1)
        return (*y, x.sum(1), x.sum(0), x.mean(), x.var(1), x.norm(dim=0), x.logsumexp(1))

    x = (torch.randn(300, n) * torch.exp2(torch.randint(-30, 3, (300, 1)).float())).to(dtype)
    x[1] *= 2.0**-110
    x[2] = 3.0e38
    special = x.clone()
    special[0, 0] = math.inf
    special[3, 5:7] = torch.tensor([math.inf, -math.inf])
    special[4, 9] = math.nan
    special[5, 1] = -math.inf
    for inputs in ([x.requires_grad_(), torch.rand(n).to(dtype).requires_grad_()], [special, torch.rand(n).to(dtype)]):
        want = compiled(every, inputs)
        got = compiled(every, [t.detach().cuda().requires_grad_(t.requires_grad) for t in inputs])
        for ours, theirs in zip(got, want, strict=True):
            assert_bitwise([t.cpu() for t in ours], theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm])
def test_gpu_weight_gradients_of_many_rows(function):
    """Rows enough that Inductor would sum rows and columns in one kernel, whose partial sums are float32."""
    inputs = [torch.randn(16384, 768).requires_grad_(), torch.randn(768).requires_grad_()]
    call = lambda x, w: function(x, (768,), w)  # noqa: E731
    want = compiled(call, inputs)
    got = compiled(call, [t.detach().cuda().requires_grad_() for t in inputs])
    for ours, theirs in zip(got, want, strict=True):
        assert_bitwise([t.cpu() for t in ours], theirs)


def test_no_kernel_keeps_partial_sums_in_another_type():
    with pytest.raises(Refused, match="CB303"):
        torch.compile(torch.sum, backend="carbon", options={"inductor": {"triton.mix_order_reduction": True}})(torch.ones(3))


def test_no_piece_of_a_sum_is_its_inputs_memory():
    x = torch.randn(5)
    for piece in ("magnitude", "float_bits", "negative_key"):
        y = getattr(torch.ops.carbon, piece)(x, dtype=torch.int32)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
