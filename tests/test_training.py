"""Real models, five AdamW steps: the hashes that an H100 gave, on this machine and this PyTorch."""

import json

import pytest
import torch

from tests import training

RECORDED = json.loads(training.GOLDEN.read_text())
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


def expect_recorded(case, precision, device):
    pytest.importorskip("timm" if case == "timm_vit" else "transformers")
    assert training.train(case, device, PRECISIONS[precision]) == RECORDED[f"{case}/{precision}"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", training.CASES)
def test_training_gives_the_recorded_hashes(case, precision):
    expect_recorded(case, precision, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", training.CASES)
def test_training_on_cuda_gives_the_recorded_hashes_three_times(case, precision):
    for _ in range(3):
        expect_recorded(case, precision, "cuda")
