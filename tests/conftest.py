"""Shared fixtures: the backend registered by name, a clean compiler, and poisoned fresh memory."""

import gc

import pytest
import torch

from carbon_compile.bits import assert_bitwise


def pytest_configure(config):
    # Tracing makes millions of objects that live. Going through them after each 700 new ones took time, and freed little.
    gc.set_threshold(100_000)
    # An uninstalled checkout has no entry point; register the backend under its name all the same.
    from torch._dynamo.backends.registry import list_backends, register_backend

    if "carbon" not in list_backends():
        from carbon_compile.backend import carbon

        register_backend(carbon, name="carbon")


# Files that take minutes: where several processes share the tests by files, these must not begin last.
_LONGEST = ("test_training.py", "test_matmul_template.py")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))
    if "distributed" not in (config.option.markexpr or ""):
        skip = pytest.mark.skip(reason="starts up to eight processes: pytest -m distributed")
        for item in items:
            if "distributed" in item.keywords:
                item.add_marker(skip)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def clean_compiler():
    """Each test starts without compiled code, at the default precision, with a known seed."""
    torch.compiler.reset()
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory holds NaN, so that an element nobody writes is seen."""
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture
def bitwise():
    """`bitwise(a, b)`: equal bits, or a message with the first difference in hex and ulps."""
    return assert_bitwise
