"""Rows of results: ratios, the table, CSV, the README's speed table, and a plot.

A row is a dict of `FIELDS`. Ratios are times over a stock contender's: below 1 is faster than stock.
"""

import csv
import itertools
import math
from pathlib import Path

FIELDS = (
    "date", "card", "torch", "triton", "cuda", "carbon_compile", "caches",
    "group", "case", "shape", "dtype", "contender", "rounds", "median_ms", "spread_ms", "over_eager", "over_inductor",
    "rate", "rate_unit", "of_ceiling", "int8_per_second", "compile_s", "peak_bytes", "bits", "error",
)  # fmt: skip
NUMBERS = frozenset({"rounds", "median_ms", "spread_ms", "over_eager", "over_inductor", "rate", "of_ceiling", "int8_per_second", "compile_s", "peak_bytes"})
BASELINES = {"over_eager": "eager", "over_inductor": "inductor"}
MACHINE = ("card", "torch", "triton", "cuda", "date")
LEFT_OUT = "left out: "  # starts the error of who doesn't take part, which is nobody's failure
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"


class ReportError(ValueError):
    """A file that can't be read or written as asked, or a missing package."""


# --- rows


def measured(case, work, timings: dict, ceilings: dict, about: dict, bits: str) -> list[dict]:
    """A row for each contender of a work, with ratios; `about` holds the fields of machine and date."""
    rows = [_row(case, work, name, timing, ceilings, about, bits) for name, timing in timings.items()]
    return with_ratios(rows)


def failed(case, about: dict, problem: str, bits: str = "") -> dict:
    """The one row of a case without figures: carbon's, because the case stands or falls with it."""
    return {**dict.fromkeys(FIELDS), **about, "rate_unit": "", "group": case.group, "case": case.name, "shape": case.shape, "dtype": case.dtype, "contender": "carbon", "bits": bits, "error": problem}


def _row(case, work, name, timing, ceilings, about, bits):
    row = failed(case, about, timing.error, bits if name.startswith("carbon") else "")
    row.update(contender=name, case="/".join(filter(None, (case.name, work.name))), rounds=len(timing.rounds) or None)
    row.update(median_ms=timing.median, spread_ms=timing.spread, compile_s=timing.compile_seconds, peak_bytes=timing.peak_bytes)
    if work.cost and timing.median:
        seconds = timing.median / 1e3
        row.update(rate=work.cost.amount / seconds, rate_unit=f"{work.cost.unit}/s")
        if ceiling := ceilings.get(work.cost.unit):
            row["of_ceiling"] = row["rate"] / ceiling
        if work.cost.int8 and name == "carbon":
            row["int8_per_second"] = work.cost.int8 / seconds
    return row


def with_ratios(rows: list[dict]) -> list[dict]:
    """The rows, each with its time over that of the stock contenders of the same case; None without one."""
    times = {(row["case"], row["contender"]): row["median_ms"] for row in rows}
    for row in rows:
        for field, stock in BASELINES.items():
            base = times.get((row["case"], stock))
            row[field] = row["median_ms"] / base if base and row["median_ms"] is not None else None
    return rows


# --- the table

_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


def table(rows: list[dict], color: bool = False) -> str:
    """The rows for people: ms, ratios, TB/s or TFLOP/s, GiB. Rows without figures in red."""
    from tabulate import tabulate

    lines = []
    for row in rows:
        line = {
            "case": row["case"],
            "contender": row["contender"],
            "median ms": digits(row["median_ms"]),
            "spread": digits(row["spread_ms"], 2),
            "over eager": digits(row["over_eager"]),
            "over Inductor": digits(row["over_inductor"]),
            "rate": si(row["rate"], row["rate_unit"]),
            "of ceiling": "" if row["of_ceiling"] is None else f"{row['of_ceiling']:.0%}",
            "int8 rate": si(row["int8_per_second"], "OP/s"),
            "compile s": "" if row["compile_s"] is None else f"{row['compile_s']:.1f}",
            "peak GiB": digits(None if row["peak_bytes"] is None else row["peak_bytes"] / 2**30, 2),
            "bits, or why no figure": row["error"] or row["bits"],
        }
        if color and row["error"] and not row["error"].startswith(LEFT_OUT):
            line = {name: f"{_RED}{value}{_PLAIN}" if value else value for name, value in line.items()}
        lines.append(line)
    used = [name for name in lines[0] if any(line[name] for line in lines)] if lines else []
    return tabulate([[line[name] for name in used] for line in lines], headers=used, disable_numparse=True)


def digits(value: float | None, significant: int = 3) -> str:
    """A number with so many significant digits and no exponent; "" for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = significant - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):.{max(0, places)}f}"


def si(value: float | None, unit: str | None) -> str:
    """A rate with a prefix: 2.87 TB/s; "" for None."""
    if value is None:
        return ""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{digits(value / scale)} {prefix}{unit}"
    return f"{digits(value)} {unit}"


# --- CSV


def write_csv(path: str, rows: list[dict]) -> None:
    """One line a row, with a header; numbers as Python writes them, nothing for None.

    Raises ReportError where the file can't be written.
    """
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ReportError(f"can't write {path}: {error.strerror}") from error


def read_csv(path: str) -> list[dict]:
    """The rows that `write_csv` wrote. Raises ReportError for another file."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != FIELDS:
                raise ReportError(f"{path} is no CSV of `python -m bench --csv`: other columns")
            return [{name: _value(name, text) for name, text in row.items()} for row in reader]
    except OSError as error:
        raise ReportError(f"can't read {path}: {error.strerror}") from error


def _value(name, text):
    if name not in NUMBERS:
        return text
    if not text:
        return None
    number = float(text)
    return int(number) if name in ("rounds", "peak_bytes") else number


# --- README


def update_readme(path: str, rows: list[dict]) -> None:
    """Put the speed table of the rows between the README's markers, in place of what is there.

    Raises ReportError where the README hasn't exactly one pair of markers.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"can't read {path}: {error.strerror}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ReportError(f"{path} needs one {BEGIN} and, after it, one {END}")
    before, _, rest = text.partition(BEGIN)
    Path(path).write_text(f"{before}{BEGIN}\n{speed_table(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def speed_table(rows: list[dict]) -> str:
    """Markdown: for each machine and day, a line on it and a table with one line a case."""
    from tabulate import tabulate

    parts = []
    machine = lambda row: tuple(row[name] for name in MACHINE)  # noqa: E731
    for place, found in itertools.groupby(rows, machine):
        cases = [list(group) for _, group in itertools.groupby(found, lambda row: row["case"])]
        lines = tabulate([_readme_line(group) for group in cases], headers="keys", tablefmt="github", disable_numparse=True)
        parts.append(f"{_caption(*place)}\n\n{lines}")
    return "\n\n".join(parts)


def _caption(card, torch, triton, cuda, date):
    versions = [f"torch {torch}", triton and f"Triton {triton}", cuda and f"CUDA {cuda}", date]
    return f"{card}, {', '.join(filter(None, versions))}; medians of rounds in turns, ms:"


def _readme_line(rows):
    by_name = {row["contender"]: row for row in rows}
    carbon, first = by_name.get("carbon"), rows[0]
    work = first["case"].removeprefix(f"{first['group']}/").split("/")
    line = {"work": " ".join(word for word in work if word != first["dtype"]), "type": first["dtype"]}
    line["carbon"] = _figure(carbon)
    for stock in BASELINES.values():
        line["Inductor" if stock == "inductor" else stock] = _figure(by_name.get(stock))
    for field in BASELINES:
        line[field.replace("_", " ").replace("inductor", "Inductor")] = digits(carbon and carbon[field])
    return line


def _figure(row):
    if row is None:
        return ""
    return "no figure" if row["median_ms"] is None else digits(row["median_ms"])


# --- plot


def plotting():
    """The module matplotlib. Raises ReportError, which names the extra, where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ReportError('--plot needs matplotlib, the extra "plot": pip install -e ".[plot]"') from None
    return matplotlib


def plot(path: str, rows: list[dict]) -> None:
    """Bars of carbon's ratios, a case a line, on a logarithmic axis.

    Raises ReportError without matplotlib, or without a ratio to show.
    """
    matplotlib = plotting()
    bars = [row for row in rows if row["contender"] == "carbon" and any(row[field] for field in BASELINES)]
    if not bars:
        raise ReportError("no ratio to plot")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(bars)))
    places = range(len(bars))
    for offset, (field, stock) in zip((-0.2, 0.2), BASELINES.items(), strict=True):
        shown = [(place + offset, row[field]) for place, row in zip(places, bars, strict=True) if row[field]]
        if shown:
            places_shown, ratios = zip(*shown, strict=True)
            axes.barh(places_shown, [ratio - 1 for ratio in ratios], left=1, height=0.38, label=f"over {stock.replace('inductor', 'Inductor')}")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(places, [row["case"] for row in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="carbon's time over stock's", title=_caption(*(bars[0][name] for name in MACHINE)).partition(";")[0])
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ReportError(f"can't write {path}: {error}") from error
    finally:
        pyplot.close(figure)
