"""A transformer of two layers that is trained whole, cut over ranks, or on shards of its batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.training import initialise, text_batches

WIDTH, HEADS, LENGTH, VOCABULARY = 48, 24, 24, 96


class Block(nn.Module):
    def __init__(self, dropped=0.1):
        super().__init__()
        self.dropped = dropped
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.project = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.inner_dropout = nn.Dropout(0.1), nn.Dropout(dropped)
        self.mesh = None

    def attend(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.mesh is None:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropped, is_causal=True)
        else:
            from carbon_compile import parallel

            y = parallel.scaled_dot_product_attention(q, k, v, self.mesh, HEADS, dropout_p=self.dropped, is_causal=True)
        return y.transpose(1, 2).flatten(-2)

    def forward(self, x):
        x = x + self.dropout(self.project(self.attend(self.attention_norm(x))))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.dropout(self.down(self.inner_dropout(F.silu(gate) * up)))


class Transformer(nn.Module):
    def __init__(self, dropped=0.1):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(dropped), Block(dropped))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.mesh = None

    def forward(self, tokens):
        x = self.norm(self.blocks(self.embed(tokens[:, :-1]) + self.position.weight))
        logits, target = self.head(x).flatten(0, 1), tokens[:, 1:].reshape(-1)
        if self.mesh is None:
            return F.cross_entropy(logits, target)
        from carbon_compile import parallel

        return parallel.cross_entropy(logits, target, self.mesh, VOCABULARY)


def cut(model, mesh, sequence):
    """Tensor parallelism by `parallelize_module`, with sequence parallelism between cut layers or not."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from carbon_compile import parallel

    shared = Shard(1) if sequence else Replicate()
    column = lambda **more: parallel.ColwiseParallel(input_layouts=shared, **more)  # noqa: E731
    plan = {"embed": parallel.RowwiseParallel(), "head": parallel.ColwiseParallel()}
    for i in range(len(model.blocks)):
        layers = {
            "q": column(), "k": column(), "v": column(), "project": parallel.RowwiseParallel(output_layouts=shared),
            "gate_up": column(parts=2), "down": parallel.RowwiseParallel(output_layouts=shared),
            "inner_dropout": parallel.CutDropout(2 * WIDTH),
        }  # fmt: skip
        if sequence:
            layers |= {name: parallel.SequenceParallel() for name in ("attention_norm", "mlp_norm", "dropout")}
        plan |= {f"blocks.{i}.{name}": style for name, style in layers.items()}
    if sequence:
        plan["blocks"] = parallel.SharedSequence()
    for module in model.modules():
        if hasattr(module, "mesh"):
            module.mesh = mesh
    return parallelize_module(model, mesh, plan)


def cut_by_pytorch(model, mesh):
    """PyTorch's own styles for linear layers; what is cut between them must have no dropout."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {}
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in "qkv"} | {f"blocks.{i}.project": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 33), nn.GELU(), nn.LayerNorm(33), nn.Dropout(0.1))
        self.head = nn.Linear(33, 7)

    def forward(self, x):
        return self.head(self.layers(x))


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def build_small():
    return initialise(Small()).train()


def batches(steps, size=4):
    return [tokens % VOCABULARY for tokens in text_batches(steps, size, LENGTH + 1)]


def build(dropped=True):
    """dropped: whether attention and the inside of the MLP have dropout too."""
    return initialise(Transformer(0.1 if dropped else 0.0)).train()


def train(model, data, clip=None):
    """Losses as hex, and the hashes of gradients, weights and optimizer after the last step."""
    from carbon_compile import fingerprint

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    torch.manual_seed(3)
    losses = []
    for tokens in data:
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        losses.append(loss.item().hex())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": fingerprint(gradients), "weights": fingerprint(model), "optimizer": fingerprint(optimizer)}
