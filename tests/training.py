"""Small real models and one training loop, shared by the CPU tests, the GPU tests and the recorder of goldens.

`python -m tests.training --device cuda --out FILE` prints and writes the hashes of every case.
"""

import argparse
import json
import math
import os
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F

from carbon_compile.backend import carbon
from carbon_compile.lowering import philox
from carbon_compile.lowering.engines import TorchEngine

GOLDEN = pathlib.Path(__file__).parent / "golden" / "training.json"
STEPS = 5
TEXT = (
    "From fairest creatures we desire increase, That thereby beauty's rose might never die, But as the "
    "riper should by time decease, His tender heir might bear his memory: But thou contracted to thine "
    "own bright eyes, Feed'st thy light's flame with self-substantial fuel, Making a famine where "
    "abundance lies, Thy self thy foe, to thy sweet self too cruel: "
)


def uniform(shape, key):
    """Values in [-1, 1) on a grid of 2^-23 from Philox words: PyTorch's own draws depend on the CPU's vectors."""
    n = math.prod(shape)
    word = philox.philox(TorchEngine, torch.tensor(key), torch.tensor(0), torch.arange(n))
    return ((word >> 8).to(torch.float32) * 2.0**-23 - 1.0).reshape(shape)


def initialise(model):
    """Weights of two and more dimensions from `uniform`; norms and biases keep their constants."""
    with torch.no_grad():
        for key, p in enumerate(model.parameters()):
            if p.dim() > 1:
                p.copy_(uniform(p.shape, key) * 0.0625)
            elif not bool((p == p.flatten()[0]).all()):
                p.zero_()
    return model


def text_batches(steps, batch, length, seed=1):
    """Byte sequences of public-domain verse, [batch, length] int64, at seeded offsets."""
    data = torch.frombuffer(bytearray(TEXT.encode() * 8), dtype=torch.uint8).long()
    for step in range(steps):
        starts = (uniform((batch,), 1000 * seed + step) * 8388608).long() % (len(data) - length - 1)
        yield torch.stack([data[s : s + length] for s in starts.tolist()])


def image_batches(steps, batch, size, classes, seed=2):
    for step in range(steps):
        labels = (uniform((batch,), 1000 * seed + 500 + step) * 8388608).long() % classes
        yield uniform((batch, 3, size, size), 1000 * seed + step) * 2, labels


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 7))

    def forward(self, x):
        return self.layers(x)


class Recurrent(nn.Module):
    """A gated recurrent cell written with linear layers, run over 12 steps."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.gates = nn.Linear(32 + 48, 2 * 48)
        self.candidate = nn.Linear(32 + 48, 48)
        self.head = nn.Linear(48, 256)

    def forward(self, tokens):
        h = torch.zeros(tokens.shape[0], 48, device=tokens.device)
        losses = []
        x = self.embed(tokens)
        for t in range(tokens.shape[1] - 1):
            both = torch.cat([x[:, t], h.to(x.dtype)], dim=1)
            r, z = torch.sigmoid(self.gates(both)).chunk(2, dim=1)
            n = torch.tanh(self.candidate(torch.cat([x[:, t], (r * h).to(x.dtype)], dim=1)))
            h = (1 - z) * n + z * h
            losses.append(F.cross_entropy(self.head(h), tokens[:, t + 1]))
        return torch.stack(losses).mean()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False, attn_implementation="sdpa")
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # unset, the library logs a warning, which breaks the graph
    return model


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=16, patch_size=4, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        num_labels=10, hidden_dropout_prob=0.1, attn_implementation="sdpa",
    )  # fmt: skip
    return ViTForImageClassification(config)


def timm_vit():
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=4, num_classes=10, drop_rate=0.1)


def _language_loss(model, batch):
    return model(batch, labels=batch).loss


def _image_loss(model, batch):
    images, labels = batch
    out = model(images)
    return F.cross_entropy(out if isinstance(out, torch.Tensor) else out.logits, labels)


CASES = {
    "mlp": (MLP, _image_loss, lambda n: [(x.flatten(1)[:, :20], y % 7) for x, y in image_batches(n, 16, 4, 10)]),
    "recurrent": (Recurrent, lambda m, b: m(b), lambda n: list(text_batches(n, 4, 13))),
    "gpt2": (gpt2, _language_loss, lambda n: list(text_batches(n, 4, 32))),
    "llama": (llama, _language_loss, lambda n: list(text_batches(n, 4, 32))),
    "vit": (vit, _image_loss, lambda n: list(image_batches(n, 4, 16, 10))),
    "timm_vit": (timm_vit, _image_loss, lambda n: list(image_batches(n, 4, 32, 10))),
}


def train(case, device, autocast=None, steps=STEPS, backend=carbon, step_backend=None):
    """Train a case and return {"weights", "optimizer", "loss"} as hashes (loss as hex)."""
    from carbon_compile import fingerprint

    torch.compiler.reset()
    build, loss_of, batches = CASES[case]
    torch.manual_seed(0)
    model = initialise(build()).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def forward(batch):
        with torch.autocast(torch.device(device).type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            return loss_of(model, batch)

    forward = torch.compile(forward, backend=backend, fullgraph=True)
    step = torch.compile(optimizer.step, backend=step_backend or backend)
    move = lambda b: tuple(t.to(device) for t in b) if isinstance(b, tuple) else b.to(device)  # noqa: E731
    torch.manual_seed(3)
    for batch in batches(steps):
        loss = forward(move(batch))
        loss.backward()
        step()
        optimizer.zero_grad()
    return {"weights": fingerprint(model), "optimizer": fingerprint(optimizer), "loss": loss.item().hex()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    results = {}
    for case in options.cases:
        for name, autocast in (("float32", None), ("bfloat16", torch.bfloat16)):
            try:
                results[f"{case}/{name}"] = train(case, options.device, autocast)
            except Exception as error:
                results[f"{case}/{name}"] = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
                if os.environ.get("CARBON_RAISE"):
                    raise
            print(case, name, results[f"{case}/{name}"], flush=True)
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
