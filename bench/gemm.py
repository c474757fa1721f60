"""Exact products: bits first, then time.

    python -m bench.gemm --device cuda [--json out.json] [--tune]
    python -m bench.gemm --device cpu

Bits: every case of `check` on the device must hash as on the CPU twin, and rows of each timed shape
must equal the twin's. Time: medians in ms of the whole product, of quantising both operands and of
the integer product alone, beside cuBLAS.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
import time
from dataclasses import replace

import torch
from tabulate import tabulate

from carbon_compile.templates import launch, matmul
from carbon_compile.templates import quantize as twin

# m, n, k, balance, layout of a and b ("k": contraction contiguous, "r": rows contiguous)
SHAPES = {
    "4096^3": (4096, 4096, 4096, "none", "kk"),
    "forward 16384x768x3072": (16384, 768, 3072, "weight", "kk"),
    "dX 16384x3072x768": (16384, 3072, 768, "weight", "kr"),
    "dW 768x3072x16384": (768, 3072, 16384, "gradient", "rr"),
    "short 4096x2304x768": (4096, 2304, 768, "weight", "kr"),
    "narrow 4096x768x768": (4096, 768, 768, "weight", "kr"),
    "narrow 4096x768x3072": (4096, 768, 3072, "weight", "kr"),
    "dW 768x768x4096": (768, 768, 4096, "gradient", "rr"),
    "head 4096x50257x768": (4096, 50257, 768, "weight", "kk"),
    "head dX 4096x768x50257": (4096, 768, 50257, "weight", "kr"),
    "decode 16x4096x4096": (16, 4096, 4096, "weight", "kk"),
    "attention 96x512x512x64": (512, 512, 64, 96, "kk"),
    "values 96x512x64x512": (512, 64, 512, 96, "kr"),
}

# m, n, k, dtype, balance, layouts, output, bias
CHECKS = [
    (1, 1, 2, "float32", "none", "kk", "float32", False),
    (17, 129, 257, "float32", "weight", "kr", "float32", True),
    (300, 200, 77, "float32", "gradient", "rr", "float32", False),
    (130, 520, 1030, "float32", "weight", "kk", "bfloat16", True),
    (257, 384, 640, "bfloat16", "weight", "kk", "bfloat16", True),
    (260, 700, 900, "bfloat16", "gradient", "rr", "float32", False),
    (33, 300, 9001, "float16", "weight", "rk", "float16", False),
    (16, 1100, 4112, "bfloat16", "weight", "kk", "bfloat16", True),
    (64, 64, 20000, "float32", "gradient", "kr", "float32", False),
    (9, 70, 140000, "float32", "none", "kr", "float32", False),
]


def operand(rows: int, k: int, layout: str, dtype, seed: int, batch: int = 0) -> torch.Tensor:
    """[rows, K] (or [batch, rows, K]) drawn on the host, with zero, tiny, huge and poisoned rows."""
    g = torch.Generator().manual_seed(seed)
    shape = (batch, rows, k) if batch else (rows, k)
    x = torch.randn(shape, generator=g) * torch.exp(torch.randn(shape, generator=g))
    if rows > 8 and not batch:
        x[1] = 0
        x[2] *= 1e-6 if dtype == torch.float16 else 1e-41
        x[3] *= 1e3 if dtype == torch.float16 else 1e36
        x[4, k // 2] = float("nan")
        x[5, 0] = float("-inf")
        x[:, k // 3] = 0
    x = x.to(dtype)
    return x if layout == "k" else x.transpose(-1, -2).contiguous().transpose(-1, -2)


def product(case: tuple, window: int, device: str, engine: str = "int8") -> torch.Tensor:
    m, n, k, dtype, balance, layouts, out_dtype, has_bias = case
    dtype, out_dtype = getattr(torch, dtype), getattr(torch, out_dtype)
    a = operand(m, k, layouts[0], dtype, 1).to(device)
    b = operand(n, k, layouts[1], dtype, 2).to(device).t()
    bias = operand(1, n, "k", torch.float32, 3)[0].to(device) if has_bias else None
    options = dict(window=window, balance=balance, bias=bias, out_dtype=out_dtype, engine=engine)
    return matmul.exact_mm(a, b, **options)


def check(device: str, engine: str = "int8") -> dict[str, str]:
    """Hashes of ragged products over types, balances, strides and edge values."""
    hashes = {}
    for window in (16, 24):
        for case in CHECKS:
            out = product(case, window, device, engine)
            hashes[f"mm{window} {case}"] = digest(out)
        a = operand(70, 64, "k", torch.float32, 4, batch=6).to(device)
        b = operand(130, 64, "r", torch.float32, 5, batch=6).to(device).transpose(1, 2)
        for name, right in (("", b), (" shared", b[:1].expand(6, -1, -1))):
            out = matmul.exact_bmm(a, right, window=window, engine=engine)
            hashes[f"bmm{window}{name}"] = digest(out)
    return hashes


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def inputs(shape: tuple, dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, int, str]:
    """Gaussian operands of one timed shape; an attention shape has a batch for its balance."""
    m, n, k, balance, layouts = shape
    batch = balance if isinstance(balance, int) else 0
    g = torch.Generator(device).manual_seed(0)
    pair = []
    for rows, layout in ((m, layouts[0]), (n, layouts[1])):
        lead = (batch,) if batch else ()
        x = torch.randn(
            *lead, *((rows, k) if layout == "k" else (k, rows)), generator=g, device=device
        )
        pair.append((x if layout == "k" else x.transpose(-1, -2)).to(dtype))
    return pair[0], pair[1].transpose(-1, -2), batch, "none" if batch else balance


def twin_rows(a, b, window, balance, rows: int) -> torch.Tensor:
    """The first rows of a 2-D product by the CPU twin, with the balance of the whole."""
    a, b = a.cpu(), b.cpu()
    d = None
    if balance == "weight":
        d = twin.weight_balance(b)
    elif balance == "gradient":
        d = twin.gradient_balance(a, b)
    qa = twin.quantize(a[:rows], window, -1, d)
    qb = twin.quantize(b, window, -2, None if d is None else -d)
    return matmul._scale(matmul.rounded_total(qa.q, qb.q, window), qa.exponents, qb.exponents)[0]


def milliseconds(f) -> float:
    import triton

    return triton.testing.do_bench(f, warmup=10, rep=40, return_mode="median")


def time_shape(name: str, window: int) -> dict:
    from carbon_compile.templates import matmul_kernels as kernels

    dtype = torch.bfloat16 if window == 16 else torch.float32
    a, b, batch, balance = inputs(SHAPES[name], dtype, "cuda")
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    if batch:
        whole = lambda: matmul.exact_bmm(a, b, window=window, out_dtype=dtype)  # noqa: E731
        equal = torch.equal(
            matmul.exact_bmm(a, b, window=window)[:2].cpu(),
            matmul.exact_bmm(a[:2].cpu(), b[:2].cpu(), window=window),
        )
    else:
        whole = lambda: matmul.exact_mm(a, b, window=window, balance=balance, out_dtype=dtype)  # noqa: E731
        rows = min(m, 96)
        equal = torch.equal(
            matmul.exact_mm(a, b, window=window, balance=balance)[:rows].cpu(),
            twin_rows(a, b, window, balance, rows),
        )
    recipe = kernels.prepare(a, b, window, balance, None)
    out = torch.empty((*a.shape[:-1], n), dtype=dtype, device="cuda")
    quantise, product = parts(recipe, a, b, out)
    gemm = milliseconds(product)
    operations = 2 * m * n * k * (batch or 1) * (window // 8) ** 2
    return {
        "shape": name,
        "class": "X2" if window == 16 else "X3",
        "bits": "equal" if equal else "DIFFER",
        "whole": milliseconds(whole),
        "quantise": milliseconds(quantise),
        "gemm": gemm,
        "int8 TOP/s": operations / gemm / 1e9,
        "cuBLAS bf16": milliseconds(lambda: a.bfloat16() @ b.bfloat16()) if window == 16 else None,
        "cuBLAS fp32": milliseconds(lambda: a @ b) if window == 24 else None,
        "plan": recipe.plan.describe(),
    }


def parts(recipe, a, b, out):
    """The two halves of a prepared product on fixed scratch: quantising, and the integer product."""
    from carbon_compile.templates.matmul_recipe import ZEROS

    buffers = (a, b, None, out, *recipe.scratch(out.device))
    recipe.run(buffers)
    pointers = [0 if x is None else x.data_ptr() for x in buffers]

    def half(launches):
        if buffers[ZEROS] is not None:
            buffers[ZEROS].zero_()
        if recipe.replays:
            recipe.replay(pointers, torch.cuda.current_stream().cuda_stream, launches)
        else:
            recipe.run(buffers, launches)

    halves = slice(0, recipe.quantising), slice(recipe.quantising, None)
    return [functools.partial(half, launches) for launches in halves]


def host_overhead() -> dict[str, float]:
    """Python's share: microseconds a call of 200 tiny products back to back, nobody waiting."""
    rows = {}
    for window, balance in ((16, "weight"), (24, "weight"), (24, "gradient")):
        a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
        call = functools.partial(matmul.exact_mm, a, b, window=window, balance=balance)
        times = []
        for _ in range(7):
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            times.append((time.perf_counter() - start) / 200)
        rows[f"X{window // 8} {balance}"] = sorted(times)[3] * 1e6
    return rows


def tune(name: str, window: int) -> list[tuple[float, dict]]:
    """Every sensible plan of one shape, fastest first; plans that do not fit are skipped."""
    from carbon_compile.templates import matmul_kernels as kernels

    dtype = torch.bfloat16 if window == 16 else torch.float32
    a, b, batch, balance = inputs(SHAPES[name], dtype, "cuda")
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device="cuda")
    recipe = kernels.prepare(a, b, window, balance, None)
    recipe.run((a, b, None, out, *recipe.scratch(out.device)))
    reference, times = out.clone(), []
    for plan in launch.variants(recipe.plan, launch.padded_contraction(a.shape[-1]), window):
        if plan.parts > 1 and not launch.cuts(plan, a.shape[-2], b.shape[-1], batch or 1):
            continue
        out.zero_()
        try:
            _, run = parts(kernels.prepare(a, b, window, balance, None, plan=plan), a, b, out)
            assert torch.equal(out, reference), plan
            times.append((milliseconds(run), plan))
        except triton_errors() as e:
            print("skipped", plan, type(e).__name__, str(e)[:80], file=sys.stderr)
    return sorted(times, key=lambda t: t[0])


def check_plans() -> list[str]:
    """Names of plans whose bits differ from the twin's on a ragged product, each with two splits."""
    from carbon_compile.templates import matmul_kernels as kernels

    wrong = []
    for window in (16, 24):
        case = (300, 400, 1000, "float32", "none", "kk", "float32", False)
        want = product(case, window, "cpu").cuda()
        a = operand(300, 1000, "k", torch.float32, 1).cuda()
        b = operand(400, 1000, "k", torch.float32, 2).cuda().t()
        chosen = launch.gemm_plan(300, 400, 1000, window, 1, launch.hardware(a.device))
        for plan in launch.variants(replace(chosen, splits=2), 1024, window):
            if plan.programs:
                plan = replace(plan, programs=5)  # several tiles each
            if plan.parts > 1:
                plan = replace(plan, places=5)  # tiles of both kinds
            print("plan", plan, flush=True)  # the last line names a plan that hangs
            try:
                got = kernels.multiply(a, b, window, "none", None, torch.float32, plan=plan)
                torch.cuda.synchronize()
            except triton_errors() as e:
                print("  does not fit:", str(e)[:100])
                continue
            if not torch.equal(got.view(torch.int32), want.view(torch.int32)):
                wrong.append(f"X{window // 8} {plan}")
    return wrong


def triton_errors() -> tuple:
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError


def cpu_times() -> list[dict]:
    """The twin beside torch.mm at 1024^3."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def median(f):
        f()
        times = []
        for _ in range(15):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return sorted(times)[7] * 1e3

    base = median(lambda: a @ b)
    rows = [{"case": "torch.mm float32", "ms": base, "ratio": 1.0}]
    for window in (16, 24):
        for balance in matmul.BALANCES:
            ms = median(lambda: matmul.exact_mm(a, b, window=window, balance=balance))  # noqa: B023
            rows.append({"case": f"X{window // 8} {balance}", "ms": ms, "ratio": ms / base})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    parser.add_argument("--tune", nargs="*", metavar="SHAPE")
    options = parser.parse_args()
    if options.device == "cpu":
        print(tabulate(cpu_times(), headers="keys", floatfmt=".2f"))
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.perf_counter()
    want = check("cpu")
    wrong = [
        f"{engine} {key}"
        for engine in ("int8", "bf16")
        for key, value in check(options.device, engine).items()
        if want[key] != value
    ]
    print(
        f"bits: {2 * len(want) - len(wrong)} of {2 * len(want)} cases equal the CPU twin",
        *wrong,
        sep="\n  ",
    )
    print(f"({time.perf_counter() - start:.1f} s)", flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "wrong": wrong,
        "hashes": want,
    }
    if options.tune is not None:
        wrong += check_plans()
        print("plans that differ:", wrong or "none", flush=True)
        for name in options.tune or SHAPES:
            for window in (16, 24):
                fastest = tune(name, window)[:6]
                print(name, f"X{window // 8}")
                for ms, plan in fastest:
                    print(f"  {ms:.4f}", plan, flush=True)
                report[f"tune {name} {window}"] = [
                    (ms, launch.plan_as_dict(plan)) for ms, plan in fastest
                ]
    else:
        report["host us a call"] = host_overhead()
        print("host, us a call:", {k: round(v, 1) for k, v in report["host us a call"].items()})
        report["times"] = []
        for name in SHAPES:
            for window in (16, 24):
                report["times"].append(time_shape(name, window))
                torch.cuda.empty_cache()
        print(
            tabulate(
                [
                    {k: str(v) if k == "plan" else v for k, v in row.items()}
                    for row in report["times"]
                ],
                headers="keys",
                floatfmt=".3f",
            )
        )
    print(f"({time.perf_counter() - start:.1f} s)")
    if options.json:
        with open(options.json, "w") as f:
            json.dump(report, f, indent=1)
    return 1 if wrong or any(row["bits"] != "equal" for row in report.get("times", ())) else 0


if __name__ == "__main__":
    sys.exit(main())
