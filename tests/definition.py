"""The definition of a result: carbon's own rewritten graphs, run node by node by eager PyTorch.

What Inductor makes of the same graphs must have the same bits.
"""

import contextlib
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config

from carbon_compile import host
from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise


@contextlib.contextmanager
def eager_engine():
    """Compile with every pass but the last: graphs run eagerly instead of through Inductor."""
    with (
        mock.patch.object(host, "compile_fx_inner", lambda gm, inputs, **options: make_boxed_func(gm.forward)),
        inductor_config.patch(force_disable_caches=True),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def forward_and_backward(function, inputs, seed=0, under=contextlib.nullcontext):
    """(outputs, gradients of the inputs that require them) under random incoming gradients.

    under: makes the contexts in which both passes run, such as `carbon_compile.enable`.
    """
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]
    with under():
        outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    roots = [y for y in outputs if y.requires_grad]
    wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if not roots or not wanted:
        return list(outputs), []
    generator = torch.Generator().manual_seed(seed)
    incoming = [torch.randn(y.shape, generator=generator).to(y.dtype).to(y.device) for y in roots]
    with under():
        gradients = torch.autograd.grad(roots, wanted, incoming, allow_unused=True)
    return list(outputs), [g for g in gradients if g is not None]


def compiled(function, inputs, **options):
    """`forward_and_backward` of the function compiled by carbon."""
    torch._dynamo.reset()
    return forward_and_backward(torch.compile(function, backend=carbon, fullgraph=True, **options), inputs)


def defined(function, inputs, **options):
    """`forward_and_backward` of the definition."""
    with eager_engine():
        return compiled(function, inputs, **options)


def check_compiled(function, inputs, **options):
    """Compiled and defined agree bit for bit, forward and backward; returns the compiled results."""
    result, reference = compiled(function, inputs, **options), defined(function, inputs, **options)
    for kind, ours, theirs in zip(("output", "gradient"), result, reference, strict=True):
        assert len(ours) == len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_bitwise(a, b, f"{kind} {i}")
    return result


def check_accuracy(function, inputs, results, tolerance):
    """The results are within `tolerance` of PyTorch's in float64, relative to the largest of each tensor."""
    wide = [t.double().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs]
    for kind, ours, theirs in zip(("output", "gradient"), results, forward_and_backward(function, wide), strict=True):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.shape == b.shape, f"{kind} {i}: {tuple(a.shape)} is not {tuple(b.shape)}"
            a, b = a.double(), b.double()
            finite, same = b.isfinite(), (a == b) | (a.isnan() & b.isnan())
            assert same[~finite].all(), f"{kind} {i}: infinities or NaN differ"
            scale = b[finite].abs().max().clamp_min(1e-30) if finite.any() else 1.0
            error = ((a - b)[finite].abs() / scale).max().item() if finite.any() else 0.0
            assert error <= tolerance, f"{kind} {i}: error {error:.2e} above {tolerance:.0e}"
