"""Sorting and selection: NaN is largest, zeros are equal, ties go to the lowest index."""

import math

import pytest
import torch

from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
from carbon_compile.diagnostics import Refused
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import registry
from carbon_compile.lowering import sort as L

from .definition import check_accuracy, check_compiled

registry.load()
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]


def ties(*shape, dtype=torch.float32, seed=0):
    """Values of which many are equal; floats with both zeros, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, shape, generator=g).float()
    if dtype.is_floating_point:
        odd = torch.tensor([-0.0, math.nan, math.inf, -math.inf])[torch.randint(0, 4, shape, generator=g)]
        x = torch.where(torch.rand(shape, generator=g) < 0.2, odd, x)
    return x.abs().to(dtype) if dtype is torch.uint8 else x.to(dtype)


def rank(v):
    return (1, 0.0) if v != v else (0, v)


def by_python(row, descending=False):
    """Indices of a stable sort."""
    row = row.tolist()
    return sorted(range(len(row)), key=lambda i: rank(row[i]), reverse=False) if not descending else sorted(range(len(row)), key=lambda i: (-rank(row[i])[0], -rank(row[i])[1]))


def lowest(row, index):
    """The lowest index that holds the value at `index`."""
    return next(i for i, v in enumerate(row.tolist()) if rank(v) == rank(row[index].item()))


@pytest.mark.parametrize("dtype", TYPES)
def test_sorted_is_stable_with_nan_last(dtype):
    x = ties(4, 60, dtype=dtype)
    for descending in (False, True):
        order = torch.tensor([by_python(row, descending) for row in x])
        values, index = L.sort(x, 1, descending)
        assert_bitwise(index, order)
        assert_bitwise(values, x.gather(1, order))
        assert_bitwise(L.sort(x.t(), 0, descending)[1], order.t())
        for k in (0, 1, 7, 60):
            values, index = L.topk(x, k, -1, descending)
            assert_bitwise(index, order[:, :k])
            assert_bitwise(values, x.gather(1, order[:, :k]))


@pytest.mark.parametrize("dtype", TYPES)
def test_selected_is_the_lowest_index_that_holds_it(dtype):
    x = ties(6, 31, dtype=dtype)
    x[0], x[1] = x[0, x[0] == x[0]][0], ties(31, dtype=torch.uint8).to(dtype)
    for r, row in enumerate(x):
        order = by_python(row)
        k = 5
        nans = int((row != row).sum())
        middle = order[(31 - nans - 1) // 2] if nans < 31 else order[0]
        chosen = {L.kthvalue: order[k - 1], L.median_dim: order[-1] if nans else order[15], L.nanmedian_dim: middle}
        for rule, index in chosen.items():
            value, got = rule(x, *([k] if rule is L.kthvalue else []), 1)
            assert got[r] == lowest(row, index)
            assert_bitwise(value[r], row[got[r]])
        assert_bitwise(L.median(row), L.median_dim(row, 0)[0])
        assert_bitwise(L.nanmedian(row), L.nanmedian_dim(row, 0)[0])
        counts = {}
        for v in row.tolist():
            counts[rank(v)] = counts.get(rank(v), 0) + 1
        best = min((-n, v) for v, n in counts.items())[1]
        value, got = L.mode(x, 1)
        assert rank(value[r].item()) == best and got[r] == lowest(row, int(got[r]))


def test_permuting_equal_elements_permutes_nothing_else():
    x = ties(1000)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    a, b = L.sort(x, 0)[0], L.sort(x[order], 0)[0]
    assert_bitwise(a + 0.0, b + 0.0)  # both zeros are equal, so they may change places


def orders(x):
    y = [*x.sort(1), *x.sort(dim=0, descending=True, stable=True), x.argsort(-1), torch.argsort(x, dim=1, stable=True), x.msort()]
    y += [*x.topk(3, 1), *x.topk(2, 0, largest=False), *x.kthvalue(2, 1), *x.median(1), *x.nanmedian(0, keepdim=True), x.median(), x.nanmedian()]
    y += [x.mode(1).values, x[0, 0].sort().values, x[0, 0].median(), x[0, 0].topk(1).values, x[:0].sort(0).values, x[:, :0].topk(0).values, x[:0].sum(0).median()]
    y += [torch.searchsorted(x[0].detach().sort().values, 1), torch.bucketize(x.detach()[0, 0], x[0].detach().sort().values, right=True)]
    y += [torch.searchsorted(x[0].detach().sort().values, x[1].detach()), torch.bucketize(x.detach(), x[0].detach().sort().values)]
    return tuple(y)


def quantiles(x):
    return torch.quantile(x, 0.3, dim=1), torch.nanquantile(x, torch.tensor([0.1, 0.9], device=x.device, dtype=x.dtype))


def draw(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(grad)


COMPILED = {
    "float32": (orders, lambda: [draw(6, 31)]),
    "bfloat16": (orders, lambda: [(torch.arange(186.0).reshape(6, 31) * 37 % 186 - 93).bfloat16().requires_grad_()]),
    "integers": (orders, lambda: [torch.arange(186).reshape(6, 31) * 37 % 186]),
    "ties": (orders, lambda: [ties(6, 31)]),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_is_the_definition(case):
    function, inputs = COMPILED[case][0], COMPILED[case][1]()
    results = check_compiled(function, inputs)
    if case != "ties":
        check_accuracy(function, inputs, results, 2e-2 if case == "bfloat16" else 2e-6)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="older PyTorch breaks the graph in quantile")
def test_quantiles_compiled():
    inputs = [draw(6, 31)]
    check_accuracy(quantiles, inputs, check_compiled(quantiles, inputs), 2e-6)


def test_symbolic_sizes_give_the_same_bits():
    step = torch.compile(lambda x: (*x.sort(1), *x.topk(2, 1), *x.median(1)), backend=carbon, fullgraph=True, dynamic=True)
    for shape in ((3, 17), (5, 40)):
        x = ties(*shape)
        for a, b in zip(step(x), (*L.sort(x, 1), *L.topk(x, 2, 1), *L.median_dim(x, 1)), strict=True):
            assert_bitwise(a, b)


def test_unique_integers_compiled_and_floats_refused():
    x = torch.tensor([3, 1, 3, 2, 1])
    step = torch.compile(lambda x: torch.unique(x, return_inverse=True, return_counts=True), backend=carbon, fullgraph=True)
    for ours, theirs in zip(step(x), torch.unique(x, return_inverse=True, return_counts=True), strict=True):
        assert_bitwise(ours, theirs)
    with pytest.raises(Refused, match="which zero"):
        torch.compile(lambda x: torch.unique(x) * 2.0, backend=carbon, fullgraph=True)(x.float())


LARGE = {
    "vocabulary": (lambda x: (*x.topk(50, 1), x.sort(1).indices), lambda: [ties(16, 50257)]),
    "long": (lambda x: (x.sort(0).values, x.median(), x.kthvalue(1000).values), lambda: [draw(300_001)]),
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


@pytest.mark.parametrize("right, expected", [(False, [0, 1, 3, 3]), (True, [0, 2, 3, 5])])
def test_places_of_nan_are_behind_all_numbers(right, expected):
    ordered, values = torch.tensor([-1.0, 0.0, 2.0, math.nan, math.nan]), torch.tensor([-2.0, -0.0, 3.0, math.nan])
    step = torch.compile(lambda o, v: torch.searchsorted(o, v, right=right), backend=carbon, fullgraph=True)
    assert step(ordered, values).tolist() == expected
