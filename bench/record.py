"""Everything that only a card can show, in one go: bits first and side by side, then times one by one.

    python -m bench.record --out DIR [--text FILE] [--select bits]

Writes to DIR, each with a log of the same name: `training.json`, `demo.json` and `elementary.json` (the
goldens), `gpu-tests`, `rules`, then the timings `gemm.json`, `step-float32.json`, `step-bfloat16.json`,
`ledger.json` and the accuracy of gradients and curves; and `summary.json` with card, versions, exit
codes and seconds. A part that fails or takes too long costs no other part. Exit code: how many failed.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import torch
from tabulate import tabulate

from carbon_compile.lowering.elementary import PROGRAMS

GPU_TESTS = "matmul_template cut sum_kernels column_sums attention optimizer random scatter scan sort pool convolution enable trainer ledger replay collective training"
SWEEPS = 4  # processes that share the elementary functions


def parts(out, text):
    """{phase: {name: (seconds allowed, arguments behind `python -m`)}}; phases follow each other."""
    tests = [str(p) for name in GPU_TESTS.split() for p in pathlib.Path("tests").glob(f"test_{name}.py")]
    names = list(PROGRAMS)
    sweeps = {
        f"elementary-{i}": (240, ["bench.sweep", "--device", "cuda", "--json", str(out / f"elementary-{i}.json"), "--functions", *names[i::SWEEPS]])
        for i in range(SWEEPS)
    }
    training = ["--device", "cuda", "--text", text, "--json"]
    return {
        "bits": {
            "gpu-tests": (420, ["pytest", "-p", "no:cacheprovider", "-q", "-n", "8", "-m", "gpu", *tests]),
            "training": (420, ["tests.training", "--device", "cuda", "--out", str(out / "training.json")]),
            "demo": (300, ["carbon_compile.cli", "demo", "--device", "cuda", "--json"]),
            "rules": (300, ["tests.rules_on_device", "cuda", "--compare"]),
            **sweeps,
        },
        "gemm": {"gemm": (120, ["bench.gemm", "--device", "cuda", "--json", str(out / "gemm.json")])},
        "step": {
            f"step-{precision}": (200, ["bench.step", "--select", precision, "--rounds", "6", "--json", str(out / f"step-{precision}.json")])
            for precision in ("float32", "bfloat16")
        },
        "ledger": {"ledger": (150, ["bench.ledger", "--device", "cuda", "--json", str(out / "ledger.json")])},
        "accuracy": {what: (400, ["bench.accuracy", what, *training, str(out / f"{what}.json")]) for what in ("gradients", "curves") if text},
    }


def run(phase, jobs, out):
    """Run a phase's jobs side by side, or one after another where they measure time."""
    together = phase in ("bits", "accuracy")
    rows, running = [], []
    for name, (limit, arguments) in jobs.items():
        running.append((name, time.monotonic(), start(name, arguments, out, threads=1 if together else None), limit))
        if not together:
            rows += finish(phase, running, out)
            running = []
    return rows + finish(phase, running, out)


def start(name, arguments, out, threads):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(out.resolve() / "cache" / name), "PYTHONUNBUFFERED": "1"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    suffix = "json" if name == "demo" else "log"
    with open(out / f"{name}.{suffix}", "w") as log, open(out / f"{name}.err", "w") as errors:
        return subprocess.Popen([sys.executable, "-m", *arguments], stdout=log, stderr=errors, env=environment, start_new_session=True)


def finish(phase, running, out):
    rows = []
    for name, began, process, limit in running:
        try:
            code = process.wait(max(0.1, began + limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            process.wait()
            code = f"stopped after {limit} s"
        row = {"phase": phase, "part": name, "exit code": code, "seconds": round(time.monotonic() - began, 1)}
        print(*row.values(), flush=True)
        rows.append(row)
    return rows


def merge_sweeps(out):
    """One elementary.json of what the processes wrote."""
    found = [json.loads(p.read_text()) for i in range(SWEEPS) if (p := out / f"elementary-{i}.json").exists()]
    if found:
        functions = {name: hashes for each in found for name, hashes in each["functions"].items()}
        (out / "elementary.json").write_text(json.dumps({**found[0], "functions": dict(sorted(functions.items()))}, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--text", help="a text file, for the accuracy of training")
    parser.add_argument("--select", nargs="*", help="phases: bits gemm step ledger accuracy")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("recording needs a CUDA device")
    phases = parts(options.out, options.text)
    if unknown := set(options.select or ()) - set(phases):
        parser.error(f"no phase {', '.join(sorted(unknown))}; there are {', '.join(phases)}")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [row for phase in options.select or phases for row in run(phase, phases[phase], options.out)]
    merge_sweeps(options.out)
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda, "parts": rows}
    (options.out / "summary.json").write_text(json.dumps(about, indent=1) + "\n")
    print(tabulate(rows, headers="keys"))
    sys.exit(sum(row["exit code"] != 0 for row in rows))


if __name__ == "__main__":
    main()
