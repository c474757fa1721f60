"""A whole training step of GPT-2 124M, side by side: eager, Inductor and carbon.

    python -m bench.step [--device cuda] [--batch 8] [--length 512] [--select carbon] [--json OUT]

Interleaved in one process: every round times each contender once, and the table gives medians, so
that a drifting clock touches all of them alike. Compile time is the first step less a warm one.
"""

import argparse
import functools
import json
import statistics
import time

import torch
from tabulate import tabulate

from bench.cases_models import MODELS, PRECISIONS, Training, gpt2
from bench.contenders import engines
from bench.measure import wait

CONTENDERS = {f"{engine} {precision}": (engine, precision) for precision in PRECISIONS for engine in ("eager", "inductor", "inductor+graphs", "carbon", "carbon+graphs")}


class Contender:
    """One model with its optimizer, and a step that can be timed."""

    def __init__(self, name, device, model):
        engine, precision = CONTENDERS[name]
        self.device, self.times = device, []
        self.training = Training(engines()[engine], PRECISIONS[precision], device, model, MODELS["gpt2-124m"].loss)

    def step(self, tokens):
        return self.training.step((tokens,))

    def timed(self, tokens):
        wait(self.device)
        start = time.perf_counter()
        loss = self.step(tokens)
        wait(self.device)
        self.times.append(time.perf_counter() - start)
        return loss


@functools.cache
def _model(layers):
    torch.manual_seed(0)
    return gpt2(layers=layers)


def run(names, device, batch, length, rounds, layers, profiled=""):
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 50257, (batch, length), generator=generator).to(device) for _ in range(rounds + 3)]
    contenders, rows = {}, []
    for name in names:
        contender = contenders[name] = Contender(name, device, _model(layers))
        contender.timed(data[0])
        contender.timed(data[1])
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        contender.timed(data[2])
        contender.memory = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    for tokens in data[3:]:
        for contender in contenders.values():
            contender.loss = contender.timed(tokens).item()  # now: a replayed graph writes the next one over it
    for name, contender in contenders.items():
        if profiled and profiled in name:
            print(name, profile(contender, data[0]), sep="\n")
        steady = contender.times[3:]
        rows.append(
            {
                "step": name,
                "median ms": round(statistics.median(steady) * 1e3, 2),
                "spread ms": round((max(steady) - min(steady)) * 1e3, 2),
                "compile s": round(contender.times[0] - statistics.median(steady), 1),
                # Graphs have a pool of their own, which isn't counted.
                "peak GiB over weights": None if "+graphs" in name else round(contender.memory / 2**30, 2),
                "loss": round(contender.loss, 5),
            }
        )
    return rows


def profile(contender, tokens):
    """Where one step spends its time on the GPU, as the profiler's table."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as trace:
        contender.step(tokens)
        wait(contender.device)
    return trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70)


def with_ratios(rows):
    """Each row's time over stock PyTorch's in the same precision."""
    times = {r["step"]: r["median ms"] for r in rows}
    for row in rows:
        precision = row["step"].split()[1]
        for stock in ("eager", "inductor", "inductor+graphs"):
            base = times.get(f"{stock} {precision}")
            row[f"over {stock}"] = round(row["median ms"] / base, 3) if base else None
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--select", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--profile", default="", metavar="NAME", help="print where the contenders of this name spend a step")
    parser.add_argument("--json")
    options = parser.parse_args()
    names = [n for n in CONTENDERS if any(s in n for s in options.select)]
    rows = with_ratios(run(names, options.device, options.batch, options.length, options.rounds, options.layers, options.profile))
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, batch {options.batch} x {options.length}, {options.layers} layers")
    print(tabulate(rows, headers="keys"))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"card": card, "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
