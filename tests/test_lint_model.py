"""The graph lint of whole models: clean, quick, and without their weights."""

import time

import pytest
import torch

from carbon_compile.graph_lint import lint

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
