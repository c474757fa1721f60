"""The pytest plugin: tests that say "the same bits" and mean it.

    from carbon_compile import assert_bitwise

    @pytest.mark.bitwise(repeats=2)
    def test_training_repeats():
        model, optimizer, best_epoch, metrics = train()
        return {"model": model, "optimizer": optimizer, "best_epoch": best_epoch, "metrics": metrics}

    @pytest.mark.needs_cuda
    def test_on_a_gpu(): ...

pytest loads this file wherever the package is installed, so it imports torch only for tests that
are marked.
"""

import inspect

import pytest

MARKERS = (
    "bitwise(repeats=2, seed=0): run the test `repeats` times, each after seeding Python, NumPy and PyTorch with "
    "`seed` (None: don't), and compare what it returns bit for bit: modules, optimizers, tensors, metrics",
    "needs_cuda: skip where there is no CUDA device",
)


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_report_header(config):
    from carbon_compile import certify, environment

    torch = environment.installed("torch") or "not installed"
    return f"carbon: contract {certify.contract_version()}, carbon-compile {environment.package_version()}, torch {torch}, {environment.machine()}"


def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_cuda") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    marker = pyfuncitem.get_closest_marker("bitwise")
    if marker is None:
        return None
    repeats, seed = _arguments(marker)
    function = pyfuncitem.obj
    if inspect.iscoroutinefunction(function):
        pytest.fail("@pytest.mark.bitwise can't run a coroutine function", pytrace=False)
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    runs = [_run(function, _copied(given), seed) for _ in range(repeats)]
    if runs[0] is None:
        pytest.fail('it returned None: return what has to be the same, such as {"model": model, "optimizer": optimizer, "metrics": metrics}', pytrace=False)
    _compare(runs)
    return True


def _arguments(marker, repeats=2, seed=0):
    try:
        repeats, seed = (lambda repeats=repeats, seed=seed: (repeats, seed))(*marker.args, **marker.kwargs)
    except TypeError:
        pytest.fail(f"@pytest.mark.bitwise takes repeats and seed, not {marker.args or marker.kwargs}", pytrace=False)
    if not isinstance(repeats, int) or repeats < 2:
        pytest.fail(f"@pytest.mark.bitwise(repeats={repeats!r}): give a whole number from 2", pytrace=False)
    return repeats, seed


def _run(function, arguments, seed):
    """What one run returns, copied at once: the next run may train the same model on."""
    from carbon_compile.bits import frozen

    if seed is not None:
        _seed(seed)
    return frozen(function(**arguments))


def _seed(seed):
    import random

    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed % 2**32)


def _copied(given):
    """Fixtures as they were set up, for each run anew: models, optimizers, schedulers and tensors,
    together, so that an optimizer goes on to belong to its model. Other fixtures are shared."""
    import copy

    import torch

    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Tensor)

    def holds(value):
        if isinstance(value, (list, tuple)):
            return any(map(holds, value))
        return any(map(holds, value.values())) if isinstance(value, dict) else isinstance(value, kinds)

    return {**given, **copy.deepcopy({name: value for name, value in given.items() if holds(value)})}


def _compare(runs):
    from carbon_compile.bits import assert_bitwise

    for i, other in enumerate(runs[1:], 2):
        try:
            assert_bitwise(runs[0], other, "result")
        except AssertionError as difference:
            pytest.fail(f"run {i} of {len(runs)} differs from the first: {difference}", pytrace=False)
