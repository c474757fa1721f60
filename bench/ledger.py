"""What recording costs: steps of GPT-2 with a ledger and without, in turns.

    python -m bench.ledger [--device cuda] [--layers 12] [--batch 8] [--length 512] [--backend carbon] [--bfloat16]

The same trainer makes both kinds of steps, so that a drifting clock touches both alike. Also timed:
the digests alone, and how many bytes they read. On CUDA, a step with a ledger is one that the host
doesn't wait for: the table gives whole rounds of steps, divided.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
from tabulate import tabulate

from bench.step import wait
from carbon_compile import DeterministicTrainer, ledger
from carbon_compile.digest import digests

STEPS = 5  # a round


def made(options):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    width = {"n_embd": options.width, "n_head": options.width // 64} if options.width else {}
    config = GPT2Config(n_layer=options.layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa", **width)
    model = GPT2LMHeadModel(config).to(options.device).train()
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    backend = None if options.backend == "none" else options.backend
    autocast = torch.bfloat16 if options.bfloat16 else None
    return DeterministicTrainer(model, optimizer, forward=lambda model, x: model(x, labels=x).loss, autocast=autocast, backend=backend)


def seconds(trainer, tokens, device):
    """One step of a round."""
    wait(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        trainer.step(tokens)
    wait(device)
    return (time.perf_counter() - start) / STEPS


def digest_seconds(trainer, device):
    tensors = [p.detach() for p in trainer.model.parameters()]
    tensors += [v for entry in trainer.optimizer.state.values() for v in entry.values() if v.device.type == torch.device(device).type and v.dim()]
    digests(tensors)
    wait(device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        digests(tensors)
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times), sum(t.numel() * t.element_size() for t in tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=0, help="of the model, for a small one (default: GPT-2's)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="carbon", help="for torch.compile, or none")
    parser.add_argument("--bfloat16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--json")
    options = parser.parse_args()
    trainer = made(options)
    tokens = torch.randint(0, 50257, (options.batch, options.length), device=options.device)
    times = {"without": [], "with a ledger": []}
    # The hook of a ledger is part of what is compiled, so it stays; recording is switched by `every`.
    with tempfile.TemporaryDirectory() as folder, ledger(os.path.join(folder, "run.jsonl"), trainer.model) as log:
        seconds(trainer, tokens, options.device)
        for _ in range(options.rounds):
            for name, every in (("without", 2**62), ("with a ledger", 1)):
                log.every = every
                times[name].append(seconds(trainer, tokens, options.device))
        log.flush()
        line_bytes = os.path.getsize(log.path) / max(1, log.recorded)
    plain, recorded = (statistics.median(times[name]) for name in times)
    alone, size = digest_seconds(trainer, options.device)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    result = {
        "step ms": round(plain * 1e3, 3),
        "step with a ledger ms": round(recorded * 1e3, 3),
        "overhead %": round(100 * (recorded / plain - 1), 2),
        "digests of weights and optimizer ms": round(alone * 1e3, 3),
        "GB/s": round(size / alone / 1e9, 1),
        "bytes a line": round(line_bytes),
    }
    print(f"{card}, torch {torch.__version__}, {options.layers} layers, batch {options.batch} x {options.length}, backend {options.backend}")
    print(tabulate(result.items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"card": card, "torch": torch.__version__, **result}, file, indent=1)


if __name__ == "__main__":
    main()
