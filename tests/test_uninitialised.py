"""Fresh memory that is read before it is written, and fresh memory that only seems to be."""

import pytest
import torch

from carbon_compile.graph_lint import lint


def halves(x):
    y = torch.empty(4, 6)
    y[:2], y[2:] = x, x + 1
    return y * 2


def columns(x):
    y = torch.empty(2, 3, device=x.device)
    for i in range(3):
        y[:, i] = x[:, i]
    return y.sum()


def transposed(x):
    y = torch.empty(6, 2)
    y.t().copy_(x)
    return y + 1


def cat_of_fresh(x):
    a, b = torch.empty(2, 6), torch.empty(2, 6)
    a.copy_(x)
    both = torch.cat([a, b], 1)
    both[:, 6:] = 0
    return both + 1


def filled(x):
    return torch.empty_like(x).fill_(3) + x


def out_argument(x):
    y = torch.empty(2, 6)
    torch.add(x, 1, out=y)
    return y


def diagonals(x):
    y = x.new_empty(2, 2)
    y.diagonal().fill_(1.0)
    y[0, 1], y[1, 0] = x[0, 1], x[1, 0]
    return y * 2


def empty_of_nothing(x):
    return torch.cat([torch.empty(0, 6), x]) + 1


@pytest.mark.parametrize("fn", [halves, columns, transposed, cat_of_fresh, filled, out_argument, diagonals, empty_of_nothing, lambda x: torch.vander(x[0])])
def test_what_is_written_completely_may_be_read(fn):
    report = lint(fn, torch.ones(2, 6))
    assert "CB609" not in report.counts(), str(report)


def half(x):
    y = torch.empty(4, 6)
    y[:2] = x
    return y * 2


def written_afterwards(x):
    y = torch.empty(2, 6)
    z = y + x
    y.copy_(x)
    return z + y


def a_gap(x):
    y = torch.empty(2, 3)
    y[:, 0], y[:, 2] = x[:, 0], x[:, 1]
    return y.sum()


def copied_from_fresh(x):
    return torch.empty(2, 6).copy_(torch.empty(2, 6)) + x


def accumulated(x):
    return torch.empty(2, 6).add_(x)


def returned(x):
    return x + 1, torch.empty(3)


def repeated(x):
    return torch.as_strided(torch.empty(6), (2, 3), (3, 1)) + x[:, :3]


@pytest.mark.parametrize("fn", [half, written_afterwards, a_gap, copied_from_fresh, accumulated, returned, repeated])
def test_what_is_not_is_reported_where_it_is_made(fn):
    report = lint(fn, torch.ones(2, 6))
    assert list(report.counts()) == ["CB609"], str(report)
    assert all("empty" in d.source_line for d in report)


def test_sizes_may_be_symbolic():
    def fn(x):
        y = torch.empty(2 * x.shape[0], 6)
        y[: x.shape[0]], y[x.shape[0] :] = x, x
        return y * 2

    x = torch.ones(5, 6)
    torch._dynamo.mark_dynamic(x, 0)
    from carbon_compile.backend import carbon

    from .definition import eager_engine

    with eager_engine():
        assert torch.compile(fn, backend=carbon)(x).sum() == 120
