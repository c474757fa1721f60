"""The pytest plugin, run on small test files of its own."""

import subprocess
import sys

import pytest
import torch

from carbon_compile import assert_bitwise
from carbon_compile.bits import frozen

pytest_plugins = ["pytester"]


@pytest.fixture
def outcome(pytester):
    """Run a test file under the plugin: (counts of outcomes, output)."""

    def run(source, *options):
        pytester.makepyfile(source)
        # By its file under one name, whether or not its entry point is installed.
        result = pytester.runpytest_inprocess("-p", "no:carbon", "-p", "carbon_compile.pytest_plugin", "-p", "no:cacheprovider", "-W", "error::pytest.PytestUnknownMarkWarning", "-o", "addopts=", *options)
        outcomes = {} if "--markers" in options else result.parseoutcomes()
        outcomes.pop("warnings", None)  # a plugin that this very process has loaded can't be rewritten
        return outcomes, result.stdout.str()

    return run


TRAIN = """
import random
import pytest
import torch

calls = []

def train(model, noise=0.0):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        model.weight[1, 2] += noise
    return {"model": model, "optimizer": optimizer, "best_epoch": 2, "metrics": {"loss": random.random(), "nan": float("nan")}}
"""


def test_a_training_function_that_repeats_passes(outcome):
    counts, _ = outcome(
        TRAIN
        + """
@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)

@pytest.mark.bitwise
def test_twice(model, tmp_path):
    calls.append(tmp_path)
    return train(model)

@pytest.mark.bitwise(repeats=3)
def test_three_times(model):
    calls.append(0)
    return train(model)

class TestClass:
    @pytest.mark.bitwise(2)
    def test_method(self, model):
        return list(train(model).values())

def test_calls():
    assert len(calls) == 5
"""
    )
    assert counts == {"passed": 4}


def test_what_differs_is_named(outcome):
    counts, out = outcome(
        TRAIN
        + """
state = iter(range(100))

@pytest.mark.bitwise
def test_weight():
    return train(torch.nn.Linear(3, 2), noise=next(state) * 1e-3)

@pytest.mark.bitwise
def test_metric():
    return {"loss": next(state) * 1.0}

@pytest.mark.bitwise
def test_epoch():
    return {"best_epoch": next(state)}

@pytest.mark.bitwise(seed=None)
def test_unseeded():
    return torch.randn(3)
""",
    )
    assert counts == {"failed": 4}
    assert "run 2 of 2 differs from the first: result['model']['weight']: 1 of 6 elements differ; first at (1, 2): " in out
    assert "result['loss']: 1 of 1 elements differ; first at (): 2.0 (0x4000000000000000) and 3.0 (0x4008000000000000)" in out
    assert "result['best_epoch']: 4 against 5" in out
    assert "result: 3 of 3 elements differ" in out


def test_wrong_uses_are_explained(outcome):
    counts, out = outcome(
        """
import pytest

@pytest.mark.bitwise
def test_none():
    pass

@pytest.mark.bitwise(repeats=1)
def test_once():
    return 1

@pytest.mark.bitwise(repeat=2)
def test_word():
    return 1

@pytest.mark.bitwise
def test_raises():
    raise KeyError("its own")
"""
    )
    assert counts == {"failed": 4}
    assert "it returned None: return what has to be the same" in out
    assert "repeats=1): give a whole number from 2" in out
    assert "takes repeats and seed, not {'repeat': 2}" in out
    assert "KeyError: 'its own'" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_skips_without_cuda(outcome):
    counts, out = outcome("import pytest\n\n@pytest.mark.needs_cuda\ndef test_gpu():\n    raise SystemExit\n", "-rs")
    assert counts == {"skipped": 1} and "needs a CUDA device" in out


def test_header_and_markers(outcome):
    _, out = outcome("def test_nothing():\n    pass\n")
    (line,) = [line for line in out.splitlines() if line.startswith("carbon: contract ")]
    assert f", torch {torch.__version__.partition('+')[0]}" in line
    _, out = outcome("", "--markers")
    assert "@pytest.mark.bitwise(repeats=2, seed=0):" in out and "@pytest.mark.needs_cuda:" in out


def test_the_plugin_does_not_import_torch():
    probe = "import sys, carbon_compile.pytest_plugin as p; p.pytest_report_header(None); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


# --- assert_bitwise


def message(a, b):
    with pytest.raises(AssertionError) as caught:
        assert_bitwise(a, b)
    return str(caught.value)


def test_assert_bitwise_compares_modules_and_optimizers():
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert_bitwise(one, other)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=f) for m, f in ((one, True), (other, False))]
    assert_bitwise(*optimizers)
    other.bias.data[1] = -one.bias[1]
    assert message({"m": [one]}, {"m": [other]}).startswith("results['m'][0]['bias']: 1 of 2 elements differ; first at (1,): ")
    optimizers[1].param_groups[0]["lr"] = 0.2
    assert "results['param_groups'][0]['lr']" in message(*optimizers)


def test_assert_bitwise_of_numbers():
    assert_bitwise([float("nan"), 1, None, "a"], [-float("nan"), 1, None, "a"])
    assert "0 ulp apart" in message(0.0, -0.0)
    assert message(1, 1.0) == "results: 1 against 1.0"
    assert message({"a": 1}, {}) == "results: only one has [\"'a'\"]"


def test_frozen_is_a_copy():
    model = torch.nn.Linear(2, 2)
    kept = frozen({"model": model})
    model.weight.data += 1
    assert "['weight']: 4 of 4" in message(kept, {"model": model})
