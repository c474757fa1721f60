"""The command `carbon-compile bench`: what its options, given in `carbon_compile.cli`, do."""

import contextlib
import datetime
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from bench import report

README = Path(__file__).resolve().parent.parent / "README.md"
CLEAN, FINDINGS = 0, 1


def run(arguments, color: bool = False) -> int:
    """Lists, measures or reports; returns 1 if a case has no figure because carbon failed, in its bits or
    in running at all.

    Raises ValueError for options that can't be followed.
    """
    if arguments.plot:
        report.plotting()  # before minutes of measuring, not after
    if arguments.readme:
        return _from_files(arguments)
    device = arguments.device or _default_device()
    from bench import registry

    chosen = registry.select(registry.cases(device), arguments.select)
    if arguments.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in chosen))
        return CLEAN
    _prepare_process(device)
    if arguments.csv:
        report.write_csv(arguments.csv, [])
    with _caches() as kept:
        rows, left_out = _measure_all(chosen, device, arguments, kept)
    if arguments.json:
        print(json.dumps({"rows": rows, "left_out": left_out}, indent=1))
    elif rows:
        print(report.table(rows, color))
    if arguments.plot:
        report.plot(arguments.plot, rows)
    return FINDINGS if any(map(_fails, rows)) else CLEAN


def _fails(row):
    """Whether carbon should have had a figure here and has none."""
    return row["contender"] == "carbon" and bool(row["error"]) and not row["error"].startswith(report.LEFT_OUT)


def _from_files(arguments):
    rows = [row for path in arguments.readme for row in report.read_csv(path)]
    if arguments.select:
        rows = [row for row in rows if any(text in row["case"] for text in arguments.select)]
    if not rows:
        raise report.ReportError("no rows to put into the README")
    report.update_readme(str(README), rows)
    if arguments.plot:
        report.plot(arguments.plot, rows)
    return CLEAN


def _default_device():
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _prepare_process(device):
    """Settings that have to come before the first GPU call, the same for every contender."""
    import torch

    if device == "cuda":
        # Deterministic algorithms refuse cuBLAS without it; it is as large as the default of a Hopper.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if not torch.cuda.is_available():
            raise ValueError("no CUDA device here; --device cpu measures small cases")
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def _caches():
    """Compilers start cold, or compile seconds would tell of an earlier run; unless the user says where
    the caches are. Gives "fresh" or "kept"."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        yield "kept"
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield "fresh"
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def about(device: str, caches: str) -> dict:
    """The fields of a row that say where and when: card, versions, date in UTC."""
    import torch

    from carbon_compile import __version__, environment

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name() if device == "cuda" else environment.machine(),
        "torch": str(torch.__version__),
        "triton": environment.installed("triton") or "",
        "cuda": torch.version.cuda or "",
        "carbon_compile": __version__,
        "caches": caches,
    }


def _measure_all(chosen, device, arguments, caches):
    """(rows of all cases, names of those that the budget left out)."""
    from bench.contenders import missing_peers
    from bench.measure import Clock, ceilings

    began = time.monotonic()
    clock, facts, rows = Clock(device), about(device, caches), []
    reached = ceilings(clock)
    _release(device)
    _say(f"{facts['card']}, torch {facts['torch']}; ceilings: {report.si(reached['B'], 'B/s')}, {report.si(reached['FLOP'], 'FLOP/s')}")
    if missing := missing_peers():
        _say(f"peers not installed: {', '.join(missing)}")
    for number, case in enumerate(chosen):
        if arguments.budget and time.monotonic() - began > arguments.budget:
            left_out = [case.name for case in chosen[number:]]
            _say(f"budget of {arguments.budget:g} s spent; left out: {', '.join(left_out)}")
            return rows, left_out
        start = time.monotonic()
        found = measure_case(case, clock, reached, facts, arguments.rounds, arguments.contenders)
        rows += found
        _release(device)
        if arguments.csv:
            report.write_csv(arguments.csv, rows)  # after every case: whoever is stopped keeps what there is
        _say(f"[{number + 1}/{len(chosen)}] {case.name} {time.monotonic() - start:.1f} s: {_summary(found)}")
    return rows, []


def _summary(rows):
    carbon = next((row for row in rows if row["contender"] == "carbon"), None)
    if carbon is None:
        return "bits checked; carbon not timed"
    return carbon["error"] or f"carbon {report.digits(carbon['median_ms'])} ms, {carbon['bits']}"


def _say(line):
    print(line, file=sys.stderr, flush=True)


def _release(device):
    import torch

    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def measure_case(case, clock, ceilings: dict, facts: dict, rounds: int | None = None, contenders=()) -> list[dict]:
    """The rows of one case: bits first, and no figure where they fail.

    `contenders` are names of those who take part, or parts of names; all do without any.
    """
    from bench.contenders import NOT_INSTALLED
    from bench.measure import first_line, measure
    from bench.registry import Work, taking_part

    try:
        prepared = case.prepare()
    except ImportError as error:
        return [report.failed(case, facts, f"{report.LEFT_OUT}{first_line(error)}")]
    except Exception as error:
        return [report.failed(case, facts, f"not prepared: {first_line(error)}")]
    names = {contender.name for work in prepared.works for contender in work.contenders}
    chosen = {name for name in names if taking_part(name, contenders, names)}
    try:
        bits = prepared.check(chosen)
    except Exception as error:
        return [report.failed(case, facts, f"check failed: {first_line(error)}", "differ" if isinstance(error, AssertionError) else "")]
    rows = []
    for work in prepared.works:
        timed = tuple(contender for contender in work.contenders if contender.name in chosen)
        timings = measure(Work(work.name, timed, work.cost, work.compiles), clock, rounds or (20 if clock.device == "cuda" else 5))
        rows += report.measured(case, work, timings, ceilings, facts, bits)
    for name, reason in prepared.absent:
        if reason != NOT_INSTALLED and taking_part(name, contenders, names):
            rows.append({**report.failed(case, facts, f"{report.LEFT_OUT}{reason}"), "contender": name})
    return rows
