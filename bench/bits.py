"""The check that comes before any figure."""

import torch

from carbon_compile.bits import assert_bitwise, canonical_bits


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors on one device hold the same bits. It never leaves the device, unlike the
    messages of `assert_bitwise`."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(canonical_bits(a), canonical_bits(b))


def assert_equal(a, b, what: str) -> None:
    """AssertionError with the first difference unless tensors, or sequences of them, hold equal bits."""
    pairs = [(a, b)] if isinstance(a, torch.Tensor) else list(zip(a, b, strict=True))
    for x, y in pairs:
        if x.device != y.device:
            x, y = x.cpu(), y.cpu()
        if not equal_bits(x, y):
            assert_bitwise(x, y, what)


def twice(call):
    """The result of a call (a tensor or a tuple), which a second call must repeat bit for bit."""
    first = call()
    assert_equal(first, call(), "two runs")
    return first
