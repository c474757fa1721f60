"""Reports as text, JSON, SARIF 2.1.0 and GitHub annotations: pure functions of report and root."""

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path, PurePath
from urllib.parse import quote

from carbon_compile.codes import FIX, LOST, WHY, Code
from carbon_compile.diagnostics import Diagnostic, Finding, Report

FORMATS = ("text", "json", "sarif", "github")

_HEAD = {"refuse": "error", "warn": "warning", "allow": "allowed"}
_COLOR = {"error": "1;31", "warning": "1;33", "allowed": "1;32", "place": "1;34"}
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


def render(report: Report, fmt: str = "text", *, color: bool = False, root: str | None = None) -> str:
    """The report in one of FORMATS, ending in a newline unless empty. ValueError for another format.

    root: what paths are relative to; by default the working directory for text and JSON, and the
    repository for SARIF and GitHub, which look files up there.
    """
    if fmt == "text":
        return text(report, root=root or os.getcwd(), color=color)
    if fmt == "json":
        return json.dumps(as_json(report, root=root or os.getcwd()), indent=2) + "\n"
    if fmt == "sarif":
        return json.dumps(sarif(report, root=root or repository_root()), indent=2) + "\n"
    if fmt == "github":
        return github(report, root=root or repository_root())
    raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {fmt!r}")


def repository_root(start: str | None = None) -> str:
    """The nearest folder above that holds .git, else the working directory."""
    here = Path(start or os.getcwd()).resolve()
    return str(next((p for p in (here, *here.parents) if (p / ".git").exists()), here))


def relative(file: str, root: str) -> str:
    """A path with forward slashes: from root where it lies below, from the package's folder where
    it is installed elsewhere, else as it is."""
    path = os.path.abspath(file) if os.path.exists(file) else file
    try:
        return PurePath(path).relative_to(root).as_posix()
    except ValueError:
        return _INSTALLED.sub("", path).replace("\\", "/")


# --- text


def text(report: Report, *, root: str, color: bool = False) -> str:
    """What a person reads. Findings that differ only in the module are shown once, and why, fix and
    loss only at the first finding of a code."""
    explained: set[str] = set()
    blocks = []
    for group in _groups(report):
        blocks.append(_block(group, root, color, explain=group[0].diagnostic.code not in explained))
        explained.add(group[0].diagnostic.code)
    return "\n\n".join([*blocks, summary(report)]) + "\n"


def summary(report: Report) -> str:
    """One line: how many findings were refused, warned of and allowed, and their codes."""
    numbers = {"refused": report.refused, "warned of": report.warned, "allowed": report.allowed}
    told = [f"{len(found)} {word}" for word, found in numbers.items() if found]
    if not told:
        return "no findings"
    codes = Counter(diagnostic.code for diagnostic in report)
    listed = [code if n == 1 else f"{code} x{n}" for code, n in sorted(codes.items())]
    return f"{', '.join(told)} ({', '.join(listed)})"


def _groups(report):
    groups: dict[tuple, list[Finding]] = {}
    for finding in report.findings:
        d = finding.diagnostic
        key = (d.code, d.op, d.detail, d.file, d.line, d.direction, d.called_from, finding.decision, finding.reason)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _block(group, root, color, explain):
    def paint(text, role):
        return f"\x1b[{_COLOR[role]}m{text}\x1b[0m" if color else text

    finding, d = group[0], group[0].diagnostic
    head = _HEAD[finding.decision]
    lines = [f"{paint(f'{head}[{d.code}]', head)}: {d.message}"]
    place = [relative(d.file, root) + f":{d.line}" if d.file else "", _modules(group)]
    place.append("(backward)" if d.direction == "backward" else "")
    if any(place):
        lines.append(f"  {paint('-->', 'place')} {'  '.join(part for part in place if part)}")
    if d.source_line:
        lines.append(f" {paint(f'{d.line} |', 'place')}     {d.source_line}")
    lines += [f"{label}: {said}" for label, said in _remarks(finding, root, explain)]
    return "\n".join(lines)


def _modules(group):
    paths = list(dict.fromkeys(f.diagnostic.module_path for f in group if f.diagnostic.module_path))
    if len(paths) <= 3:
        return ", ".join(paths)
    return f"{paths[0]}, {paths[1]} and {len(paths) - 2} more"


def _remarks(finding, root, explain):
    d, page = finding.diagnostic, finding.diagnostic.kind.page()
    if d.called_from:
        yield "called from", f"{relative(d.called_from[0], root)}:{d.called_from[1]}"
    if d.note:
        yield "note", d.note
    if finding.reason:
        yield "allowed because", finding.reason
    if explain:
        yield "why", page.short(WHY)
        yield "fix", page.short(FIX)
        if d.kind.allowable:
            yield "if allowed", page.short(LOST)
        yield "more", f"carbon-compile explain {d.code}"


def statistics(report: Report) -> str:
    """Findings counted by code, most frequent first."""
    from tabulate import tabulate

    counts = sorted(report.counts().items(), key=lambda item: (-item[1], item[0]))
    names = {d.code: d.kind.name for d in report}
    return tabulate([(n, code, names[code]) for code, n in counts], tablefmt="plain") + "\n" if counts else ""


# --- JSON


def as_json(report: Report, *, root: str) -> dict:
    """{"version": 1, "findings": [...], "summary": {...}}; every key is always there."""
    return {
        "version": 1,
        "findings": [_json_finding(finding, root) for finding in report.findings],
        "summary": {
            "refused": len(report.refused),
            "warned": len(report.warned),
            "allowed": len(report.allowed),
            "codes": report.counts(),
        },
    }


def _json_finding(finding, root):
    d, page = finding.diagnostic, finding.diagnostic.kind.page()
    return {
        "code": d.code,
        "name": d.kind.name,
        "severity": d.kind.severity,
        "decision": finding.decision,
        "reason": finding.reason,
        "message": d.message,
        "detail": d.detail,
        "op": d.op,
        "file": relative(d.file, root) if d.file else None,
        "line": d.line,
        "source_line": d.source_line,
        "called_from": [relative(d.called_from[0], root), d.called_from[1]] if d.called_from else None,
        "module_path": d.module_path,
        "direction": d.direction,
        "node": d.node,
        "count": finding.count,
        "why": page.short(WHY),
        "fix": page.short(FIX),
        "lost_if_allowed": page.short(LOST),
    }


# --- SARIF


def sarif(report: Report, *, root: str) -> dict:
    """A SARIF 2.1.0 log of one run. Paths are relative to %SRCROOT%, which is `root`."""
    from carbon_compile import __version__

    codes = sorted({d.code: d.kind for d in report}.values(), key=lambda code: code.id)
    driver = {"name": "carbon-compile", "version": __version__, "rules": [_sarif_rule(code) for code in codes]}
    index = {code.id: i for i, code in enumerate(codes)}
    met: Counter = Counter()
    results = []
    for finding in report.findings:
        mark = _fingerprint(finding.diagnostic, root)
        met[mark] += 1
        results.append(_sarif_result(finding, index, f"{mark}:{met[mark]}", root))
    run = {"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _sarif_rule(code: Code):
    page = code.page()
    parts = [page.sections[""], page.sections[WHY], page.sections[FIX], page.sections.get(LOST, "")]
    return {
        "id": code.id,
        "name": code.name.title().replace("-", ""),
        "shortDescription": {"text": code.name.replace("-", " ")},
        "fullDescription": {"text": page.short("")},
        "help": {"text": "\n\n".join(part for part in parts if part), "markdown": page.text},
        "defaultConfiguration": {"level": code.severity},
    }


def _sarif_result(finding, index, mark, root):
    d = finding.diagnostic
    result = {
        "ruleId": d.code,
        "ruleIndex": index[d.code],
        "level": "error" if finding.decision == "refuse" or d.kind.severity == "error" else "warning",
        "message": {"text": f"{d.message}. {d.note}".rstrip(". ") + "."},
        "partialFingerprints": {"primaryLocationLineHash": mark},
    }
    location = _sarif_location(d, root)
    if location:
        result["locations"] = [location]
    if finding.decision == "allow":
        kind = "external" if finding.reason.startswith(("allow=", "on_unsafe=")) else "inSource"
        result["suppressions"] = [{"kind": kind, "justification": finding.reason}]
    return result


def _sarif_location(d: Diagnostic, root):
    location: dict = {}
    if d.file:
        path = relative(d.file, root)
        artifact = {"uri": Path(path).as_uri()} if os.path.isabs(path) else {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
        location["physicalLocation"] = {"artifactLocation": artifact}
        if d.line:
            region: dict = {"startLine": d.line}
            if d.source_line:
                region["snippet"] = {"text": d.source_line}
            location["physicalLocation"]["region"] = region
    if d.module_path:
        location["logicalLocations"] = [{"fullyQualifiedName": d.module_path, "kind": "module"}]
    return location


def _fingerprint(d: Diagnostic, root):
    # Without the line number, so that a finding keeps its identity when code above it moves.
    parts = (d.code, relative(d.file, root) if d.file else "", d.source_line, d.op, d.detail, d.module_path, d.direction)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


# --- GitHub


def github(report: Report, *, root: str) -> str:
    """Workflow commands, a line each; findings that differ only in the module share one, because
    GitHub shows few annotations."""
    return "".join(_annotation(group, root) + "\n" for group in _groups(report))


def _annotation(group, root):
    finding, d, page = group[0], group[0].diagnostic, group[0].diagnostic.kind.page()
    command = {"refuse": "error", "warn": "warning", "allow": "notice"}[finding.decision]
    properties = {"file": relative(d.file, root), "line": str(d.line or 1)} if d.file else {}
    properties["title"] = f"{d.code} {d.kind.name}"
    modules = _modules(group)
    where = (f" in {modules}" if modules else "") + (" (backward)" if d.direction == "backward" else "")
    lines = [d.message + where, d.note, f"why: {page.short(WHY)}", f"fix: {page.short(FIX)}"]
    listed = ",".join(f"{key}={_escape_property(value)}" for key, value in properties.items())
    return f"::{command} {listed}::{_escape(chr(10).join(line for line in lines if line))}"


def _escape(text):
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text):
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
