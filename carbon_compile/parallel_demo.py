"""The demo on several ranks: whatever cuts the model or the batch, one hash.

    torchrun --nproc_per_node 1 -m carbon_compile.parallel_demo
    torchrun --nproc_per_node 8 -m carbon_compile.parallel_demo --tp 2 --data fsdp --sequence

Trains the transformer of `carbon-compile demo` on logical shards of its batches, with `--tp` ranks a
model and the rest of the ranks sharing the batch. Rank 0 prints the hashes of weights and optimizer.
Without logical shards (`--shards 0`, one rank a batch), what comes out is the hash of the demo itself.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import carbon_compile
from carbon_compile import demo
from carbon_compile.data import digits
from carbon_compile.data_parallel import LogicalShards, clip_grad_norm_
from carbon_compile.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    SharedSequence,
)

DATA = ("plain", "ddp", "fsdp")


def arguments(words):
    parser = argparse.ArgumentParser(prog="torchrun ... -m carbon_compile.parallel_demo", description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a model: 1, 2 or 4")
    parser.add_argument("--sequence", action="store_true", help="let them share the sequence between cut layers")
    parser.add_argument("--data", choices=DATA, default="plain", help="how the other ranks share the batch")
    parser.add_argument("--shards", type=int, default=8, help="logical shards of a batch of 64; 0: none")
    parser.add_argument("--microbatches", type=int, default=1, help="cut a rank's part of the batch further")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the blocks instead of running them eagerly")
    return parser.parse_args(words)


def cut(model, mesh, sequence):
    """Tensor parallelism of a DigitTransformer."""
    shared = Shard(1) if sequence else Replicate()
    plan = {"pixel": RowwiseParallel()}
    for i in range(len(model.blocks)):
        plan |= {
            f"blocks.{i}.qkv": ColwiseParallel(input_layouts=shared, parts=3),
            f"blocks.{i}.project": RowwiseParallel(output_layouts=shared),
            f"blocks.{i}.up": ColwiseParallel(input_layouts=shared),
            f"blocks.{i}.down": RowwiseParallel(output_layouts=shared),
        }
        if sequence:
            plan |= {f"blocks.{i}.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm", "dropout")}
    if sequence:
        plan["blocks"] = SharedSequence()
    return parallelize_module(model, mesh, plan)


def build(options, device, mesh):
    """(the bare model, the model as it is called)."""
    model = demo.DigitTransformer()
    demo.initialise(model)
    model.to(device)
    if options.tp > 1:
        cut(model, mesh["tp"], options.sequence)
    if options.compile:
        from carbon_compile.backend import carbon

        for block in model.blocks:
            block.compile(backend=carbon, fullgraph=True, dynamic=False)
    if options.data == "ddp":
        return model, DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    if options.data == "fsdp":
        # FSDP2 does not know in which order a rank holds chunks of queries, keys and values.
        fused = {p for block in model.blocks for p in block.qkv.parameters()} if options.tp > 1 else set()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"], ignored_params=fused)
    return model, model


def train(options, device, mesh):
    """{"weights", "optimizer", "loss"} after the training; hashes are of whole tensors."""
    data = digits.load()
    images, labels = data.train_images.to(device), data.train_labels.to(device)
    model, called = build(options, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.01)
    part, parts = mesh["dp"].get_local_rank(), mesh["dp"].size()
    shards = LogicalShards(called, options.shards, group=mesh["dp"].get_group()) if options.shards else None

    def loss_of(images, labels):
        return F.cross_entropy(called(images), labels)

    torch.manual_seed(demo.SEED)
    for chosen in demo.batches(len(images), options.steps):
        if shards is None:
            optimizer.zero_grad()
            loss = loss_of(images[chosen.to(device)], labels[chosen.to(device)])
            loss.backward()
        else:
            mine = chosen.chunk(parts)[part].to(device)
            with shards.step() as step:
                for some in mine.chunk(options.microbatches):
                    step.backward(loss_of, images[some], labels[some], shards=options.shards // parts // options.microbatches)
            loss = step.loss
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {"weights": carbon_compile.fingerprint(model), "optimizer": carbon_compile.fingerprint(optimizer), "loss": loss.item()}


def problem(options, world):
    """One line saying why these ranks can't share the work, or None."""
    if options.tp not in (1, 2, 4) or world % options.tp:
        return f"--tp {options.tp}: must be 1, 2 or 4 and divide the {world} ranks"
    parts = world // options.tp
    if options.shards == 0:
        return None if parts == 1 and options.data == "plain" else "--shards 0 needs one rank a batch and --data plain"
    if options.shards % (parts * options.microbatches) or demo.BATCH % options.shards:
        return f"--shards {options.shards}: must divide {demo.BATCH} and be a multiple of {parts} ranks x {options.microbatches} microbatches"
    if options.data == "ddp" and options.tp > 1:
        return "DistributedDataParallel takes no DTensors: use --data fsdp or plain with --tp"
    return None


def main(words=None):
    options = arguments(words)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    wrong = problem(options, world)
    if wrong:
        print(f"parallel_demo: {wrong}", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world)
    mesh = init_device_mesh(device.type, (world // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    try:
        with carbon_compile.enable(seed=None):
            result = train(options, device, mesh)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(f"loss {result['loss']:.6f}  weights {result['weights']}  optimizer {result['optimizer']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
