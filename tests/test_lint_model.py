"""The graph lint of whole models: clean, quick, and without their weights."""

import time

import pytest
import torch

from carbon_compile.graph_lint import lint, told

SECONDS = 20  # on two cores; this counts both


@pytest.fixture
def gpt2():
    """GPT-2 at its full width; on the device "meta", 124 million weights cost nothing."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def test_twelve_layers_are_clean_and_quick(gpt2):
    with torch.device("meta"):
        tokens = torch.zeros(2, 128, dtype=torch.int64)
    start = time.process_time()
    report = lint(gpt2, tokens)
    assert report.clean and len(report) == 0, str(report)
    assert time.process_time() - start < SECONDS


class Pooled(torch.nn.Module):
    def forward(self, x):
        return x.double().logsumexp(0, keepdim=True).float()


def test_equal_calls_are_tried_once_and_refusals_all_found():
    report = lint(torch.nn.Sequential(torch.nn.Linear(4, 4), Pooled(), torch.nn.Linear(4, 4), Pooled()), torch.ones(4, 4))
    assert {(d.code, d.module_path, d.direction) for d in report} == {
        ("CB203", path, direction) for path in ("1", "3") for direction in ("forward", "backward")
    }


# --- programs that can't run


class Linear(torch.nn.Linear):
    def forward(self, x):
        if x is None:
            raise ValueError("no input\nat all")
        return super().forward(x)


@pytest.mark.parametrize(
    "args,message",
    [
        ((), "TypeError: "),
        ((None,), "ValueError: no input"),
        ((3,), "TypeError: linear(): argument 'input' (position 1) must be Tensor, not int"),
        ((torch.ones(3, 5),), "RuntimeError: a and b must have same reduction dim, but got [3, 5] X [4, 4]."),
    ],
)
def test_what_the_program_raises_is_no_finding(args, message, caplog):
    with pytest.raises(Exception) as caught:
        lint(Linear(4, 4), *args)
    assert told(caught.value).startswith(message)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_exception_that_is_caught_is_a_break():
    def fn(x):
        try:
            return undefined(x)  # noqa: F821
        except NameError:
            return x + 1

    assert set(lint(fn, torch.ones(2)).counts()) <= {"CB601"}


def test_what_is_compiled_already_is_looked_at_itself():
    fourier = torch.compile(lambda x: torch.fft.fft(x).real, backend="eager")
    assert list(lint(fourier, torch.ones(2)).counts()) == ["CB104"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert lint(torch.compile(model, backend="carbon"), torch.ones(2, 4)).clean
    model.compile(backend="carbon")
    assert lint(model, torch.ones(2, 4)).clean
