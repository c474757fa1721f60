"""How two certificates differ."""

import difflib
from collections.abc import Iterator

from carbon_compile.certify import Certificate


def diff(a: Certificate, b: Certificate) -> list[str]:
    """The differences, a line each; empty where there are none. What can change bits comes first."""
    return [
        *_diff_promise(a.data, b.data),
        *_diff_graphs(a.data["graphs"], b.data["graphs"]),
        *_diff_rest(a.data, b.data),
    ]


def _diff_promise(a, b):
    if a["identity"] != b["identity"]:
        yield "identity differs: not the same graphs by the same contract, so the bits may differ"
    for key in ("contract", "promise"):
        if a[key] != b[key]:
            yield f"{key}: {a[key]} -> {b[key]}"
    yield from (f"- {reason}" for reason in a["reasons"] if reason not in b["reasons"])
    yield from (f"+ {reason}" for reason in b["reasons"] if reason not in a["reasons"])


def _diff_graphs(a, b):
    if len(a) != len(b):
        yield f"number of graphs: {len(a)} -> {len(b)}"
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        for key in ("hash", "kind", "function", "precision", "device", "calls"):
            if one[key] != other[key]:
                yield f"graph {i}: {key} {_short(one[key])} -> {_short(other[key])}"
        yield from (f"graph {i}: {line}" for line in _diff_nodes(one["nodes"], other["nodes"]))


def _short(value):
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in sorted(value.items())) or "none"
    return value[:12] if isinstance(value, str) and len(value) == 64 else value


_SPEED = ("template", "engine", "tile", "split_k")


def _diff_nodes(a: list[dict], b: list[dict]) -> Iterator[str]:
    one, other = [_told(row) for row in a], [_told(row) for row in b]
    changes = list(difflib.unified_diff(one, other, n=0, lineterm=""))[2:]
    yield from (line for line in changes if not line.startswith("@@"))
    if one == other:
        for x, y in zip(a, b, strict=True):
            changed = [f"{key} {x[key]} -> {y[key]}" for key in _SPEED if x[key] != y[key]]
            if changed:
                yield f"{x['op']}: {', '.join(changed)} (speed only)"


def _told(row):
    place = f" ({row['file']}:{row['line']})" if row["file"] else ""
    return " ".join(part for part in (row["op"], row["verdict"], row["code"]) if part) + place


def _diff_rest(a, b):
    for key in ("carbon_compile", "source"):
        if a[key] != b[key]:
            yield f"{key}: {_short(a[key])} -> {_short(b[key])}"
    one, other = a["environment"], b["environment"]
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            yield f"environment: {key} {one.get(key, 'not told')} -> {other.get(key, 'not told')}"
