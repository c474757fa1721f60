"""One canonical graph: the same on a CPU, on CUDA and in every PyTorch that is supported.

`python -m tests.test_canonical` writes the hashes anew.
"""

import difflib
import functools
import hashlib
import json
import pathlib

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from carbon_compile import host, runlog
from carbon_compile.analyze import trace
from carbon_compile.backend import carbon
from carbon_compile.graph_lint import lint
from carbon_compile.lowering import registry

from .definition import eager_engine

GOLDEN = pathlib.Path(__file__).parent / "golden" / "canonical.json"


class Call(nn.Module):
    """A function as a module, with what it needs."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def mlp_under_autocast(self, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return self.layers(x).square().mean()


def attention(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_with_mask_and_dropout(self, q, k, v):
    mask = torch.ones(6, 6, device=q.device).tril().bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1)


def tensors_made_elsewhere(self, x):
    return x + torch.zeros(4, 8).to(x.device) + torch.rand_like(x)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def floats(*shape):
    return torch.zeros(*shape)


LAYERS = {
    "linear": lambda: (nn.Linear(8, 16), floats(4, 8)),
    "linear of three dimensions": lambda: (nn.Linear(8, 16), floats(2, 4, 8)),
    "layer_norm": lambda: (nn.LayerNorm(8), floats(4, 8)),
    "rms_norm": lambda: (nn.RMSNorm(8), floats(4, 8)),
    "batch_norm": lambda: (nn.BatchNorm2d(3), floats(2, 3, 4, 4)),
    "batch_norm in evaluation": lambda: (nn.BatchNorm1d(8).eval(), floats(4, 8)),
    "group_norm": lambda: (nn.GroupNorm(2, 4), floats(2, 4, 3, 3)),
    "attention": lambda: (Call(attention), *(floats(2, 2, 6, 8).requires_grad_() for _ in range(3))),
    "attention, mask, dropout": lambda: (Call(attention_with_mask_and_dropout), *(floats(2, 2, 6, 8).requires_grad_() for _ in range(3))),
    "multi-head attention": lambda: (Call(lambda self, x: self.layer(x, x, x)[0], layer=nn.MultiheadAttention(8, 2, batch_first=True)), floats(2, 5, 8)),
    "dropout": lambda: (nn.Dropout(0.3), floats(4, 8).requires_grad_()),
    "embedding": lambda: (nn.Embedding(11, 8, padding_idx=0), torch.zeros(4, 6, dtype=torch.int64)),
    "cross_entropy": lambda: (nn.CrossEntropyLoss(label_smoothing=0.1), floats(4, 7).requires_grad_(), torch.zeros(4, dtype=torch.int64)),
    "gelu": lambda: (nn.GELU(), floats(4, 8).requires_grad_()),
    "softmax": lambda: (nn.Softmax(-1), floats(4, 8).requires_grad_()),
    "mlp": lambda: (mlp(), floats(4, 8)),
    "mlp under bfloat16 autocast": lambda: (Call(mlp_under_autocast, layers=mlp()), floats(4, 8)),
    "patch embedding": lambda: (nn.Conv2d(3, 8, 4, stride=4), floats(2, 3, 8, 8)),
    "einsum": lambda: (Call(lambda self, a, b: torch.einsum("bij,bjk->bik", a, b)), floats(2, 3, 4).requires_grad_(), floats(2, 4, 5).requires_grad_()),
    "scatter": lambda: (Call(lambda self, x, i: x.index_add(0, i, x)), floats(4, 8).requires_grad_(), torch.zeros(4, dtype=torch.int64)),
    "tensors made elsewhere": lambda: (Call(tensors_made_elsewhere), floats(4, 8).requires_grad_()),
}


def canonical(layer, device="cpu", backward=None):
    """The canonical text of a layer's joint graph, or without a backward, of its forward."""
    torch.manual_seed(0)
    fn, *inputs = LAYERS[layer]()
    ((_, text),) = trace(fn, inputs, device=device, backward=backward)
    return text


def hashed(text):
    return hashlib.sha256(text.encode()).hexdigest()


def check(device):
    """{layer: hash of its canonical joint graph}, for a device that exists."""
    return {layer: hashed(canonical(layer, device)) for layer in LAYERS}


def adamw_step():
    """The hash in the log of one compiled step."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model(torch.ones(2, 8)).sum().backward()
    with eager_engine():
        torch.compile(optimizer.step, backend=carbon)()
    return runlog.LOG.graphs[-1].hash


def same(a, b):
    assert a == b, "\n".join(difflib.unified_diff(a.splitlines(), b.splitlines(), lineterm=""))


@functools.cache
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("layer", LAYERS)
def test_every_version_has_the_recorded_graph(layer):
    text = canonical(layer)
    assert hashed(text) == golden()[layer], text


@pytest.mark.parametrize("layer", LAYERS)
def test_cuda_has_the_same_forward(layer):
    """No GPU is needed: tensors are fake."""
    with host.pretend_cuda():
        try:
            on_cuda = canonical(layer, "cuda", backward=False)
        except RuntimeError as error:
            if torch.cuda.is_available() or torch.backends.cuda.is_built():
                raise
            pytest.skip(f"this build has no CUDA: {str(error)[:60]}")
    same(canonical(layer, "cpu", backward=False), on_cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_cuda_has_the_same_joint_graph(layer):
    same(canonical(layer, "cpu"), canonical(layer, "cuda"))


def test_an_optimizer_has_the_recorded_graph():
    assert adamw_step() == golden()["AdamW step"]


def test_the_certificate_names_this_graph():
    fn, *inputs = LAYERS["mlp"]()
    with eager_engine():
        torch.compile(fn, backend=carbon)(*inputs)
    assert runlog.LOG.graphs[-1].hash == golden()["mlp"]


def test_the_lint_compares_the_devices(monkeypatch):
    fn, *inputs = LAYERS["layer_norm"]()
    assert lint(fn, *inputs, device="cuda").clean
    monkeypatch.setitem(registry.COMPOSITES, F.layer_norm, lambda x, *rest, **more: x + 1 if x.device.type == "cuda" else x * 1)
    report = lint(fn, *inputs, device="cuda")
    assert list(report.counts()) == ["CB903"], str(report)
    assert "aten.add.Tensor(%2, 1) -> float32[4, 8] on CUDA, %3 = aten.mul.Tensor" in str(report), str(report)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(check("cpu") | {"AdamW step": adamw_step()}, indent=1, sort_keys=True) + "\n")
