"""What recording costs: steps of GPT-2 with a ledger and without, in turns.

    python -m bench.ledger [--device cuda] [--layers 12] [--batch 8] [--length 512] [--backend carbon] [--bfloat16]

The same trainer makes both kinds of steps, round after round, so that a drifting clock touches both
alike. The overhead is the median, over pairs of neighbouring rounds, of what the round with a ledger
took more. Beside it: what the host spends in `record` and in writing lines, and what the digests of
all that is recorded take on the device. On CUDA the host waits for no line, so a round is timed as a
whole, until the device is done.
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
from carbon_compile.digest import prepared

STEPS = 5  # a round: short, so that a busy host spoils few pairs


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


class HostTime:
    """Seconds that the host spends in a ledger: in `record` less the lines it writes, and writing lines."""

    def __init__(self, log):
        self.record = self.lines = 0.0
        record, catch_up = log.record, log.catch_up

        def timed_record(*given):
            start, lines = time.perf_counter(), self.lines
            record(*given)
            self.record += time.perf_counter() - start - (self.lines - lines)

        def timed_catch_up():
            start = time.perf_counter()
            catch_up()
            self.lines += time.perf_counter() - start

        log.record, log.catch_up = timed_record, timed_catch_up


def recorded_tensors(trainer, device):
    """Tensors as a step's record reads them on the device: weights, as many gradients, optimizer state."""
    weights = [p.detach() for p in trainer.model.parameters()]
    state = [v for entry in trainer.optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor) and v.device.type == device]
    return [torch.empty_like(w).copy_(w) for w in weights] + state + weights


def digest_seconds(tensors, device):
    """(seconds on the device, seconds of the host) of the digests of `tensors`, medians of 20."""
    batch, out = prepared(tensors), torch.zeros(len(tensors), dtype=torch.int64, device=device)
    batch.start(tensors, out)
    cold = torch.empty(1 << 28, dtype=torch.int8, device=device) if device == "cuda" else None
    times, host_times = [], []
    for _ in range(20):
        wait(device)
        start = time.perf_counter()
        if device == "cuda":
            # Half a millisecond of other work, so that the launch is queued before its turn; it also empties the caches.
            for _ in range(8):
                cold.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        launched = time.perf_counter()
        batch.start(tensors, out)
        host_times.append(time.perf_counter() - launched)
        if device == "cuda":
            end.record()
            wait(device)
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            times.append(time.perf_counter() - start)
    return statistics.median(times), statistics.median(host_times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=0, help="of the model, for a small one (default: GPT-2's)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=25, help="pairs of rounds")
    parser.add_argument("--backend", default="carbon", help="for torch.compile, or none")
    parser.add_argument("--bfloat16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--json")
    options = parser.parse_args()
    options.device = torch.device(options.device).type
    trainer = made(options)
    tokens = torch.randint(0, 50257, (options.batch, options.length), device=options.device)
    times = {"without": [], "with a ledger": []}
    # The hook of a ledger is part of what is compiled, so it stays; recording is switched by `every`.
    with tempfile.TemporaryDirectory() as folder, ledger(os.path.join(folder, "run.jsonl"), trainer.model) as log:
        seconds(trainer, tokens, options.device)
        host = HostTime(log)
        for number in range(options.rounds):
            turns = [("without", 2**62), ("with a ledger", 1)]
            for name, every in turns if number % 2 else turns[::-1]:
                log.every = every
                times[name].append(seconds(trainer, tokens, options.device))
        log.flush()
        line_bytes = os.path.getsize(log.path) / max(1, log.recorded)
    plain, recorded = (statistics.median(times[name]) for name in times)
    ratios = [100 * (b / a - 1) for a, b in zip(*times.values(), strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    made_steps = options.rounds * STEPS
    tensors = recorded_tensors(trainer, options.device)
    alone, launching = digest_seconds(tensors, options.device)
    size = sum(t.numel() * t.element_size() for t in tensors)
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    result = {
        "step ms": round(plain * 1e3, 3),
        "step with a ledger ms": round(recorded * 1e3, 3),
        "overhead %": round(statistics.median(ratios), 2),
        "overhead %, quartiles": [round(low, 2), round(high, 2)],
        "host: record ms": round(host.record / made_steps * 1e3, 3),
        "host: a line ms": round(host.lines / made_steps * 1e3, 3),
        "host: launch of digests ms": round(launching * 1e3, 3),
        "device: digests ms": round(alone * 1e3, 3),
        "device: tensors": len(tensors),
        "device: GB/s": round(size / alone / 1e9, 1),
        "bytes a line": round(line_bytes),
    }
    print(f"{card}, torch {torch.__version__}, {options.layers} layers, batch {options.batch} x {options.length}, backend {options.backend}")
    print(tabulate(result.items()))
    print(f"A ledger of every step costs {result['overhead %']}% of a step (quartiles {low:.2f}% to {high:.2f}% of {options.rounds} pairs of {STEPS} steps).")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"card": card, "torch": torch.__version__, **result}, file, indent=1)


if __name__ == "__main__":
    main()
