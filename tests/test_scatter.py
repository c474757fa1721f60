"""Gather's derivatives and scatter: exact sums of what each destination receives, in any order."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
from carbon_compile.diagnostics import Refused
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import prims as P
from carbon_compile.lowering import registry
from carbon_compile.lowering import scatter as S
from carbon_compile.templates import scatter as templates

from .definition import check_accuracy, check_compiled, defined

registry.load()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
both_types = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def draw(*shape, dtype=torch.float32, grad=False, seed=0, spread=0):
    """Gaussian values, over `spread` binades more."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-spread, spread + 1, shape, generator=g)
    return x.to(dtype).requires_grad_(grad)


def indices(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# --- the definition against rational arithmetic -------------------------------------------------------


def exact_sum(values):
    """Contract section 3 in rational arithmetic: a Python float with binary32's value."""
    terms = [Fraction(v) for v in values]
    m = max((abs(t) for t in terms), default=Fraction(0))
    if m == 0:
        return 0.0
    e = 0
    while m >= Fraction(2) ** e:
        e += 1
    while m < Fraction(2) ** (e - 1):
        e -= 1
    total = sum(round(t * Fraction(2) ** (38 - e)) for t in terms)
    shift = max(total.__abs__().bit_length() - 24, 0)
    return float(Fraction(round(Fraction(total, 2**shift)) * 2**shift) * Fraction(2) ** (e - 38))


def destination_sums(x, index, source, own=True):
    """index_add on matrices, by `exact_sum`; destinations that receive nothing stay."""
    out = x.clone()
    for s in range(x.shape[0]):
        hits = (index == s).nonzero().flatten().tolist()
        for c in range(x.shape[1]):
            if hits:
                out[s, c] = exact_sum([x[s, c].item()] * own + [source[h, c].item() for h in hits])
    return out


@both_types
@pytest.mark.parametrize("segments", [4, 300], ids=["few", "many"])
def test_a_destination_is_the_exact_sum_of_what_it_receives(dtype, segments):
    x, source = draw(segments, 2, dtype=dtype), draw(60, 2, dtype=dtype, seed=2, spread=20)
    index = indices(segments, 60) // 3 * 3
    assert_bitwise(S.index_add(x, 0, index, source), destination_sums(x, index, source))
    assert_bitwise(S.index_put(x, [index - segments], source, True), destination_sums(x, index, source))
    zeros = torch.zeros_like(x)
    assert_bitwise(S.embedding_dense_backward(source, index, segments, -1, False), destination_sums(zeros, index, source))
    along = index.unsqueeze(1).expand(60, 2)
    assert_bitwise(S.scatter_add(x, 0, along, source), destination_sums(x, index, source))
    assert_bitwise(S.scatter_reduce(x, 0, along, source, "sum", include_self=False), destination_sums(x, index, source, own=False))


def test_layouts_agree():
    """Slots, rows and the layout along a dimension are engines of one rule."""
    x, source, index = draw(50, 3), draw(40, 3, seed=2), indices(50, 40) // 2
    along = index.unsqueeze(1).expand(40, 3)
    results = [S.accumulate(groups, source, x) for groups in (S.Slots(index, 50), S.Rows(index, 50), S.Along(along, 0, x.shape))]
    results += [S.accumulate(S.Slots(S._flat(x, 0, along), 150), source.reshape(-1, 1), x.reshape(-1, 1)).reshape(50, 3)]
    for r in results[1:]:
        assert_bitwise(r, results[0])


def test_two_words_give_the_same_sum(monkeypatch):
    x, source, index = draw(7, 3), draw(400, 3, seed=2, spread=15), indices(7, 400)
    source[3], source[9, 1], source[11, 1], source[12, 0] = float("nan"), float("inf"), float("-inf"), float("inf")
    one = S.index_add(x, 0, index, source)
    monkeypatch.setattr(P, "SINGLE_WORD", 1)
    assert_bitwise(S.index_add(x, 0, index, source), one)


def test_positions_by_table_and_by_sorting_agree(monkeypatch):
    index = indices(40, 100)
    for last in (False, True):
        by_table = templates.positions(index, 40, last)
        expected = torch.tensor([[j for j in range(100) if index[j] == i][-1 if last else 0] for i in index.tolist()])
        assert_bitwise(by_table, expected)
        monkeypatch.setattr(templates, "TABLE_FACTOR", 0)
        assert_bitwise(templates.positions(index, 40, last), expected)
        monkeypatch.undo()


def test_special_values_by_destination():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0], [0.0], [1.0], [inf], [-0.0], [-0.0], [3e38], [1e-45]])
    index = torch.tensor([0, 0, 1, 1, 2, 3, 4, 6, 7])
    source = torch.tensor([[inf], [1.0], [inf], [-inf], [nan], [1.0], [-0.0], [3e38], [1e-45]])
    expected = torch.tensor([[inf], [nan], [nan], [inf], [0.0], [-0.0], [inf], [3e-45]])
    for own in (S.index_add(x, 0, index, source), S.scatter_add(x, 0, index.unsqueeze(1), source)):
        assert_bitwise(own, expected)


@both_types
def test_order_of_contributions_does_not_matter(dtype):
    x, source, index = draw(9, 5, dtype=dtype), draw(500, 5, dtype=dtype, seed=2, spread=10), indices(9, 500)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(3))
    along, shuffled = index.unsqueeze(1).expand(500, 5), index[order].unsqueeze(1).expand(500, 5)
    assert_bitwise(S.index_add(x, 0, index, source), S.index_add(x, 0, index[order], source[order]))
    for reduce in ("sum", "mean", "amax", "amin"):
        a, b = (S.scatter_reduce(x, 0, i, s, reduce) for i, s in ((along, source), (shuffled, source[order])))
        assert_bitwise(a, b)
        if reduce != "sum":
            assert_bitwise(S.index_reduce(x, 0, index, source, reduce), a)


def test_last_write_in_index_order_stays():
    x, source, index = draw(6, 4), draw(50, 4, seed=2), indices(6, 50)
    expected = x.clone()
    for i, row in zip(index.tolist(), source, strict=True):
        expected[i] = row
    assert_bitwise(S.index_put(x, [index], source), expected)
    assert_bitwise(S.index_copy(x, 0, index, source), expected)
    assert_bitwise(S.scatter(x, 0, index.unsqueeze(1).expand(50, 4), source), expected)
    assert_bitwise(S.put(x.reshape(-1), index, source[:, 0].contiguous()), S.scatter(x.reshape(-1), 0, index, source[:, 0]))


def test_a_destination_without_contributions_keeps_its_bits():
    x = torch.tensor([[-0.0, float("nan")], [1.0, -0.0]])
    for index in (torch.tensor([0]), torch.tensor([], dtype=torch.int64)):
        y = S.index_add(x, 0, index, torch.ones(len(index), 2))
        assert_bitwise(y[1], x[1])


# --- compiled ---------------------------------------------------------------------------------------------


def gathers(w, i, j):
    """Forward gathers; the derivatives accumulate."""
    w = w.unbind(0)
    y = [F.embedding(i, w[0]), F.embedding(i, w[1], padding_idx=2, scale_grad_by_freq=True), w[2][i], w[3][:, i % 5], w[4][i, -1 - i % 5]]
    y += [w[5][i, :, None], w[6].index_select(-1, i % 5), w[7].gather(0, j), w[8].take(i - 3), torch.take_along_dim(w[9], j % 5, 1)]
    y += [w[10][i.view(4, 6), 1:4], w[11].repeat_interleave(2, 0), w[12].unfold(1, 3, 1).contiguous(), (w[13] * 1.5).as_strided((3, 3), (1, 1), 2).contiguous(), w[14][[1, 1, 3]]]
    return tuple(y)


def scatters(x, s, v, i, j):
    """Accumulating and writing scatters, several contributions a destination."""
    x, s = x.unbind(0), s.unbind(0)
    rows, once = j[:, 0], torch.arange(7, device=j.device).flip(0)
    y = [x[0].index_add(0, i, v), x[1].index_add(-1, rows[:5] % 5, s[0], alpha=0.3), x[2].scatter_add(0, j, s[1]), x[3].scatter_add(1, j % 5, s[2])]
    y += [x[4].index_put((rows,), s[3], accumulate=True), x[5].index_put((rows, rows % 5), s[4][:, 0], accumulate=True), x[6].put(rows, s[5][:, 0], accumulate=True)]
    y += [x[7].scatter_reduce(0, j, s[6], r, include_self=r in ("mean", "amin")) for r in ("sum", "mean", "amax", "amin")]
    y += [x[8].index_reduce(0, rows, s[7], "mean")]
    y += [x[9].index_put((once,), s[8]), x[10].index_copy(0, once, s[9]), x[11].scatter(0, once[:, None].expand(7, 5), s[10]), x[12].scatter(0, j, 2.0)]
    y += [x[13].index_fill(1, rows % 5, -1.0), x[14].masked_scatter(s[10] > 0, s[11]), x[15].index_put((rows > 2,), s[12][0])]
    y += [F.one_hot(rows, 9).to(v.dtype) * s[13][:, :1], x[16].diagonal(), F.pad(x[16], (1, -1)), x[17].scatter_add(0, j[:1, :1], s[14][:1, :1])]
    return tuple(y)


def bags(w, i, offsets, weights):
    """F.embedding_bag in every mode, with empty bags, weights and padding."""
    w = w.unbind(0)
    y = [F.embedding_bag(i.view(4, 6), w[k], mode=m) for k, m in enumerate(("sum", "mean", "max"))]
    y += [F.embedding_bag(i, w[3 + k], offsets, mode=m) for k, m in enumerate(("sum", "mean", "max"))]
    y += [F.embedding_bag(i, w[6], offsets, mode="sum", per_sample_weights=weights), F.embedding_bag(i, w[7], offsets, padding_idx=2)]
    return tuple(y)


def selections(x, mask, v):
    """Masks whose counts only the data knows."""
    return x[mask] * 2.0, x.index_put((mask,), v[mask]), x.index_put((mask[:, 0],), v[0], accumulate=True), v.index_put((mask,), x[mask], accumulate=True)


def narrow(w, v, i, j):
    """A few of each, for a storage type that rounds."""
    w = w.unbind(0)
    y = [F.embedding(i, w[0], padding_idx=2, scale_grad_by_freq=True), w[1][i], w[2].gather(0, j), w[3].index_add(0, i, v, alpha=0.3)]
    y += [w[4].scatter_reduce(0, j, w[5], "mean"), w[6].scatter_reduce(0, j, w[7], "amin"), F.embedding_bag(i.view(4, 6), w[7], mode="mean")]
    return tuple(y)


COMPILED = {
    "gathers": (gathers, lambda: [draw(15, 7, 5, grad=True), indices(7, 24), indices(7, 7, 5, seed=2)]),
    "scatters": (scatters, lambda: [draw(18, 7, 5, grad=True), draw(15, 7, 5, grad=True, seed=4), draw(24, 5, grad=True, seed=5), indices(7, 24), indices(7, 7, 5, seed=2)]),
    "bfloat16": (narrow, lambda: [draw(8, 7, 5, dtype=torch.bfloat16, grad=True), draw(24, 5, dtype=torch.bfloat16, grad=True), indices(7, 24), indices(7, 7, 5, seed=2)]),
    "bags": (bags, lambda: [draw(8, 7, 5, grad=True), indices(7, 24), torch.tensor([0, 3, 3, 10]), draw(24, grad=True)]),
    "masks": (selections, lambda: [draw(7, 5, grad=True), draw(7, 5) > 0.3, draw(7, 5, grad=True, seed=2)]),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_is_the_definition(case):
    function, inputs = COMPILED[case][0], COMPILED[case][1]()
    check_accuracy(function, inputs, check_compiled(function, inputs), TOLERANCE[inputs[0].dtype])


def moves(x, i, j, k):
    """Integers and shapes that hold nothing or one element."""
    y = [x.index_put((i,), k), x.scatter(0, j, k[0, 0] + j), x.index_add(0, i, x[i]), x.scatter_add(0, j, j), x.put(i, k[:, 0])]
    y += [torch.bincount(i, minlength=9), torch.repeat_interleave(x, i[:7] + 1, 0, output_size=28), x.index_copy(1, i[:1] % 5, k[:7, :1])]
    y += [x.index_add(0, i, k, alpha=3), x.index_put((i,), k, accumulate=True), *(x.index_reduce(0, i, k, r, include_self=r == "mean") for r in ("mean", "amin", "prod"))]
    y += [x.int().scatter_reduce(0, j, j.int(), "amax"), x.scatter_reduce(1, j % 5, j, "sum", include_self=False), (x > 0).index_put((i,), k > 50, accumulate=True)]
    f = x.float()
    y += [f.index_add(0, i[:0], f[:0]), f[0, 0].scatter_add(0, i[0] * 0, f[1, 1]), f[:, :0].index_add(0, i, f[i, :0]), f[0, 0].index_add(0, i[:1] * 0, f[0, 1])]
    y += [f[:0].scatter(0, j[:0], 1.0), f.index_put((i[:0],), f[:0]), f.index_put((x > 100,), f[0, 0])]
    y += [torch.bincount(i, f[i, 0], 9), torch.histc(f, 7, -20, 20), torch.histc(f, 5), F.one_hot(i % 7, 7)]
    return tuple(y)


def test_integers_and_odd_shapes_compiled():
    x, k = indices(30, 7, 5, seed=3) - 15, indices(100, 24, 5, seed=4)
    i = torch.arange(24).clamp(max=6)
    k[7:] = k[6]  # what is written twice is equal, so that PyTorch's own result is known
    inputs = [x, i, torch.arange(7).flip(0)[:, None].expand(7, 5), k]
    outputs, _ = check_compiled(moves, inputs)
    for a, b in zip(outputs, moves(*inputs), strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b)


def test_symbolic_sizes_give_the_same_bits():
    def step(w, x, i):
        return F.embedding(i, w), x.index_add(0, i, w[i]), x.scatter_add(0, i[:, None].expand(i.shape[0], 3), w[i]), x.index_put((i,), w[i])

    dynamic = torch.compile(step, backend=carbon, fullgraph=True, dynamic=True)
    for n, m in ((5, 40), (9, 17)):
        inputs = [draw(n, 3, grad=True), draw(n, 3), indices(n, m)]
        outputs, gradients = defined(step, inputs)
        ours = dynamic(*inputs)
        for a, b in zip(ours, outputs, strict=True):
            assert_bitwise(a, b)
        generator = torch.Generator().manual_seed(0)
        incoming = [torch.randn(y.shape, generator=generator) for y in ours]
        assert_bitwise(torch.autograd.grad(ours, inputs[0], incoming)[0], gradients[0])


def test_threads_do_not_change_the_bits():
    x, source, index = draw(50, 64), draw(4000, 64, seed=2), indices(50, 4000)
    step = torch.compile(lambda x, i, s: (x.index_add(0, i, s), x.index_put((i,), s, accumulate=True)), backend=carbon, fullgraph=True)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([*step(x, index, source), S.index_add(x, 0, index, source)])
    finally:
        torch.set_num_threads(before)
    for r in (*results[0][1:], *results[1]):
        assert_bitwise(r, results[0][0])


def test_an_index_out_of_range_is_an_error():
    x, source = draw(6, 4), draw(2, 4)
    for index in (torch.tensor([0, 6]), torch.tensor([0, -1])):
        with pytest.raises((IndexError, RuntimeError)):
            S.index_add(x, 0, index, source)
        with pytest.raises((IndexError, RuntimeError)):
            S.scatter_add(x, 0, index.reshape(2, 1), source)
    with pytest.raises((IndexError, RuntimeError)):
        S.index_put(x, [torch.tensor([0, 1]), torch.tensor([0, 4])], torch.ones(2), True)
    with pytest.raises(RuntimeError, match="classes from 0 to 2"):
        S.one_hot(torch.tensor([0, 3]), 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.scatter_reduce(0, i, x, "prod"),
        lambda x, i: x.index_reduce(0, i[:, 0], x, "prod"),
        lambda x, i: x.double().scatter_add(0, i, x.double()),
        lambda x, i: F.embedding(i, x.clone(), max_norm=1.0),
    ],
    ids=["scatter_reduce prod", "index_reduce prod", "float64", "max_norm"],
)
def test_refused(function):
    with pytest.raises(Refused):
        torch.compile(function, backend=carbon, fullgraph=True)(draw(6, 4), indices(4, 6, 4))


# --- devices ----------------------------------------------------------------------------------------------


LARGE = {
    "embedding": (lambda w, i: F.embedding(i, w), lambda: [draw(50257, 64, grad=True), indices(50257, 4, 512) // 100]),
    "gather": (lambda x, i: x.gather(1, i), lambda: [draw(64, 5003, grad=True), indices(50, 64, 700)]),
    "nodes": (lambda x, i, v: x.index_add(0, i, v), lambda: [draw(100, 32, grad=True), indices(100, 20000), draw(20000, 32, grad=True, spread=8)]),
}


def check(device):
    """Hashes of forward and backward on `device`, after compiled is found to equal defined: {case: hash}."""
    hashes = {}
    for case, (function, make) in {**COMPILED, **LARGE}.items():
        inputs = [t.detach().to(device).requires_grad_(t.requires_grad) for t in make()]
        outputs, gradients = check_compiled(function, inputs)
        hashes[case] = fingerprint([*outputs, *gradients])
    return hashes


@pytest.mark.gpu
def test_devices_agree():
    assert check("cuda") == check("cpu")
