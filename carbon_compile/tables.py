"""What is shown as a table: operator coverage, certificates, codes. Plain text through tabulate."""

import json
from collections import Counter

from carbon_compile.codes import CODES

COVERAGE_FORMATS = ("text", "markdown", "json")
_COVERAGE_COLUMNS = ("op", "verdict", "template", "section", "reason")


def _table(rows, headers, fmt="plain"):
    from tabulate import tabulate

    return tabulate(rows, headers=headers, tablefmt=fmt, disable_numparse=True) + "\n"


def coverage(rows: list[dict], fmt: str = "text") -> str:
    """The operators and their verdicts, with a count of each verdict below the text table.

    rows: dicts with op, verdict, template, section, reason, as `lowering.registry.coverage()` gives.
    """
    rows = sorted(rows, key=lambda row: row["op"])
    if fmt == "json":
        return json.dumps(rows, indent=1, sort_keys=True) + "\n"
    cells = [[row.get(column) or "" for column in _COVERAGE_COLUMNS] for row in rows]
    if fmt == "markdown":
        return _table(cells, _COVERAGE_COLUMNS, "github")
    return _table(cells, _COVERAGE_COLUMNS, "simple") + "\n" + verdict_counts(rows) + "\n"


_SECTIONS = {
    "0": "composites", "1": "pointwise, views, copies", "2": "elementary functions", "3": "sums and reductions",
    "4": "matrix products", "5": "attention", "6": "scatter", "7": "randomness", "8": "collectives", "9": "no rule",
}  # fmt: skip
_VERDICTS = ("keep", "expand", "template", "decomposed", "refuse")


def coverage_summary(rows: list[dict]) -> str:
    """Counts of verdicts by contract section, as a Markdown table: the README's."""
    counts = Counter((row["section"], row["verdict"]) for row in rows)
    sections = sorted({section for section, _ in counts})
    cells = [[s, _SECTIONS[s], *(counts[s, verdict] or "" for verdict in _VERDICTS)] for s in sections]
    return _table(cells, ("section", "operators", *_VERDICTS), "github")


def verdict_counts(rows: list[dict]) -> str:
    """"312 operators: 120 keep, 150 expand, 12 template, 30 refuse"."""
    counts = Counter(row["verdict"] for row in rows)
    order = ("keep", "expand", "template", "decomposed", "allowed", "refuse")
    rest = sorted(counts.keys() - set(order))
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (*order, *rest) if counts[verdict])
    return f"{counted(len(rows), 'operator')}: {told}"


def counted(n, noun):
    """"1 graph", "3 graphs"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def codes() -> str:
    """Every code with its name and severity."""
    return _table([(code.id, code.name, code.severity) for code in CODES.values()], ("code", "name", "severity"), "simple")


def certificate_text(data: dict) -> str:
    """A certificate for a person: the promise first, then why, then what ran."""
    graphs, calls = data["graphs"], sum(graph["calls"] for graph in data["graphs"])
    outside = sum(bypass["calls"] for bypass in data["bypassed"])
    lines = [f"promise {data['promise']}: {counted(len(graphs), 'graph')}, {counted(calls, 'call')}, {outside or 'none'} outside carbon"]
    if data.get("eager"):
        lines.append(f"  eager code ran {counted(data['eager'], 'operator')} by the contract's rules")
    lines += [f"  because {reason}" for reason in data["reasons"]]
    environment = data["environment"]
    machine = environment.get("gpus") or environment.get("cpu") or environment.get("system")
    lines.append(f"contract {data['contract']}, carbon-compile {data['carbon_compile']}, torch {environment['torch']}, {machine}")
    lines.append(f"identity {data['identity'][:16]}, source {data['source'][:16]}")
    return "\n".join([*lines, "", _graphs(graphs).rstrip()]) + "\n" if graphs else "\n".join(lines) + "\n"


def _graphs(graphs):
    rows = [
        (i, g["hash"][:12], g["function"], _kind(g), g["device"], _precision(g["precision"]), g["calls"], _verdicts(g["nodes"]))
        for i, g in enumerate(graphs)
    ]
    return _table(rows, ("graph", "hash", "function", "kind", "device", "products", "calls", "nodes"))


def _kind(graph):
    kept = graph.get("kept")
    return f"{graph['kind']}, {counted(kept, 'weight')} kept" if kept else graph["kind"]


def _precision(precision):
    return " ".join(f"{dtype}={name}" for dtype, name in sorted(precision.items()))


def _verdicts(nodes):
    counts = Counter(node["verdict"] for node in nodes)
    return " ".join(f"{verdict}:{n}" for verdict, n in sorted(counts.items()))


def nodes(rows: list[dict]) -> str:
    """The nodes of one graph of a certificate: verdict, section, what a template chose, and where."""
    cells = [
        (
            row["op"], row["verdict"], row["section"], row["template"], row["engine"], row["tile"], row["split_k"] or "",
            row["code"], f"{row['file']}:{row['line']}" if row["file"] else "", row["module_path"],
            "backward" if row["direction"] == "backward" else "",
        )
        for row in rows
    ]
    headers = ("op", "verdict", "section", "template", "engine", "tile", "split-K", "code", "line", "module", "")
    return _table(cells, headers, "simple")
