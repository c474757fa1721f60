"""Real models, five AdamW steps: the hashes that an H100 gave, on this machine and this PyTorch."""

import functools
import json

import pytest
import torch

from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
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


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_wider_gpt2_has_the_states_of_the_cpu_layer_by_layer(precision):
    """4 layers of 256 on 16 x 128 tokens: products and kernels of other tiles than the recorded cases have."""
    transformers = pytest.importorskip("transformers")

    def states(device):
        torch.compiler.reset()
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=128, n_embd=256, n_layer=4, n_head=8, bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation="sdpa"
        )
        model = training.initialise(transformers.GPT2LMHeadModel(config)).to(device).eval()
        body = model.transformer
        tokens = (training.uniform((16, 128), 77) * 8388608).long().abs() % 256

        def forward(x):
            with torch.autocast(device, PRECISIONS[precision] or torch.bfloat16, enabled=PRECISIONS[precision] is not None):
                hidden = body.wte(x) + body.wpe(torch.arange(128, device=x.device))
                found = [hidden]
                for block in body.h:
                    hidden = block(hidden)
                    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
                    found.append(hidden)
                return (*found, model.lm_head(body.ln_f(hidden)))

        with torch.no_grad():
            return [t.cpu() for t in torch.compile(forward, backend="carbon")(tokens.to(device))]

    for i, (ours, theirs) in enumerate(zip(states("cuda"), states("cpu"), strict=True)):
        assert_bitwise(ours, theirs, f"state {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_cuda_graphs_give_the_recorded_hashes(precision):
    """The third call of a graph is its first replay, so that two of five steps are replays. The optimizer reads
    what the graphs wrote, and has no graph of its own: PyTorch's don't take another graph's outputs."""
    backend = functools.partial(carbon, mode="reduce-overhead")
    results = training.train("gpt2", "cuda", PRECISIONS[precision], backend=backend, step_backend=carbon)
    assert results == RECORDED[f"gpt2/{precision}"]
