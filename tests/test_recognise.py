"""Nodes of a joint graph that are worth more together: heads side by side."""

import pytest
import torch

from carbon_compile import backend, recognise
from carbon_compile.bits import assert_bitwise
from carbon_compile.lowering import registry

from .definition import defined

registry.load()


def rewritten(monkeypatch, function, inputs, **options):
    """How many cats are rewritten in all graphs of a function, whose results and gradients stay as they are."""
    results, found = [], []

    def rewrite(graph):
        found.append(recognise.heads_side_by_side(graph))
        return found[-1]

    for each in (lambda graph: 0, rewrite):
        with monkeypatch.context() as patch:
            patch.setattr(backend, "heads_side_by_side", each)
            results.append(defined(function, inputs, **options))
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_bitwise(a, b)
            assert a.stride() == b.stride()
    return sum(found)


def heads(*counts, features=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, 5, features, generator=generator, requires_grad=True) for h in counts]


def beside(t):
    return t.transpose(1, 2).reshape(t.shape[0], t.shape[2], -1)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_the_gradient_of_one_layer_for_queries_keys_and_values(monkeypatch, dtype):
    def attention(x, weight):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in torch.nn.functional.linear(x, weight).chunk(3, -1))
        return beside(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    x, weight = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((2, 5, 8), (24, 8)))
    assert rewritten(monkeypatch, attention, [x, weight]) == 1


def test_what_is_rewritten_and_what_is_not(monkeypatch):
    count = lambda function, inputs: rewritten(monkeypatch, function, inputs)  # noqa: E731
    assert count(lambda a, b, c: torch.cat([beside(a), beside(b), beside(c)], -1).sin(), heads(2, 2, 2)) == 1
    assert count(lambda a, b: torch.cat([beside(a), beside(b)], 2), heads(4, 1)) == 1  # as grouped queries have them
    assert count(lambda a, b: torch.cat([beside(a), beside(b)], 1), heads(2, 2)) == 0
    assert count(lambda a: torch.cat([beside(a), beside(a).cos()], 2), heads(2)) == 0
    assert count(lambda a, b: torch.cat([beside(a), b.flatten(1, 2)[:, :5]], 2), heads(2, 2)) == 0

    def seen_twice(a, b):
        first = beside(a)
        return torch.cat([first, beside(b)], 2), first

    assert count(seen_twice, heads(2, 2)) == 0
    torch._dynamo.reset()
    dynamic = torch.compile(lambda a, b: torch.cat([beside(a), beside(b)], 2), backend="carbon", dynamic=True)
    a, b = heads(2, 2)
    assert_bitwise(dynamic(a, b).detach(), torch.cat([beside(a), beside(b)], 2).detach())
    other = heads(2, features=6)
    assert count(lambda a, b: torch.cat([beside(a), beside(b)], 2), [*heads(2), *other]) == 0


def test_symbolic_sizes_are_left_as_they_are(monkeypatch):
    """The cat's last size, of heads and features together, is in no node."""
    assert rewritten(monkeypatch, lambda a, b: torch.cat([beside(a), beside(b)], 2), heads(4, 1), dynamic=True) == 0
