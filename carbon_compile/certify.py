"""The certificate: what was compiled and run, by which rules, and whether the promise held.

The module isn't called `certificate`, because importing it would hide the function
`carbon_compile.certificate`.
"""

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from carbon_compile import environment
from carbon_compile.codes import CODES
from carbon_compile.diagnostics import Report
from carbon_compile.render import relative
from carbon_compile.runlog import LOG, Log

FORMAT = 1


class Certificate:
    """A certificate as plain data, with what can be asked of it."""

    def __init__(self, data: dict):
        self.data = data

    @property
    def held(self) -> bool:
        return self.data["promise"] == "held"

    @property
    def reasons(self) -> list[str]:
        """Why the promise is broken; empty where it held."""
        return self.data["reasons"]

    @property
    def identity(self) -> str:
        """Equal on any two machines that compiled the same graphs by the same contract."""
        return self.data["identity"]

    def to_json(self) -> str:
        """Canonical: sorted keys, ASCII, no floats, so equal certificates are equal bytes."""
        return canonical_json(self.data)

    def write(self, path: str | os.PathLike) -> None:
        Path(path).write_text(self.to_json(), encoding="ascii")

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Certificate":
        """ValueError where the file isn't a certificate; OSError where it can't be read."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} isn't a certificate: {error}") from None
        if not isinstance(data, dict) or "promise" not in data:
            raise ValueError(f"{path} isn't a certificate: it has no \"promise\"")
        if data.get("certificate") != FORMAT:
            raise ValueError(f"{path} is a certificate of format {data.get('certificate')}; this release reads {FORMAT}")
        return cls(data)

    def __str__(self):
        from carbon_compile.tables import certificate_text

        return certificate_text(self.data)


def certificate(model=None, log: Log | None = None) -> Certificate:
    """What ran of a module or optimizer, or in the whole process where `model` is None.

    A graph belongs to a model if it takes one of its parameters. A function, or a module without
    parameters, can't be told from others: for these, too, the whole process counts.
    """
    log = log or LOG
    graphs = _graphs_of(model, log.graphs)
    bypassed = list(log.bypassed.values())
    findings = _breaking(graphs, log.findings)
    data = {
        "certificate": FORMAT,
        "carbon_compile": environment.package_version(),
        "contract": contract_version(),
        "source": source_hash(),
        "environment": environment.describe(),
        "graphs": [_graph_data(graph) for graph in graphs],
        "eager": log.eager,
        "bypassed": [_placed(asdict(bypass)) for bypass in bypassed],
        "findings": [_finding_data(finding) for finding in findings],
        "reasons": _reasons(graphs, bypassed, findings, log.eager),
    }
    data["promise"] = "broken" if data["reasons"] else "held"
    data["identity"] = _identity(data)
    return Certificate(data)


def _graphs_of(model, graphs):
    parameters = _parameters(model)
    if not parameters:
        return list(graphs)
    return [g for g in graphs if any(key in parameters and ref() is not None for key, ref in g.parameters.items())]


def _parameters(model):
    if hasattr(model, "parameters") and callable(model.parameters):
        return {id(parameter) for parameter in model.parameters()}
    groups = getattr(model, "param_groups", None) or ()
    return {id(parameter) for group in groups for parameter in group["params"]}


def _graph_data(graph):
    data = asdict(replace(graph, nodes=(), findings=(), parameters={}))
    del data["findings"], data["parameters"]
    return data | {"nodes": [_placed(asdict(row)) for row in graph.nodes]}


def _placed(row):
    # A certificate may be published, and two machines' certificates are compared: no machine paths.
    return row | {"file": relative(row["file"], os.getcwd()) if row["file"] else None}


def _breaking(graphs, others):
    """Findings that weaken the promise of what ran: the graphs' own, and those of the process now."""
    found = [finding for graph in graphs for finding in graph.findings]
    found += others
    known = {finding.diagnostic.code for finding in found}
    found += [finding for finding in Report(environment.findings()).findings if finding.diagnostic.code not in known]
    return [f for f in dict.fromkeys(found) if f.diagnostic.kind.severity == "error"]


def _finding_data(finding):
    d = finding.diagnostic
    row = {"code": d.code, "message": d.message, "op": d.op, "decision": finding.decision, "reason": finding.reason}
    return _placed(row | {"file": d.file, "line": d.line, "module_path": d.module_path, "direction": d.direction})


def _reasons(graphs, bypassed, findings, eager):
    reasons = [_finding_reason(finding) for finding in findings]
    for bypass in bypassed:
        where = f" ({_place(bypass.file, bypass.line)})" if bypass.file else ""
        calls = "1 call" if bypass.calls == 1 else f"{bypass.calls} calls"
        cause = "" if bypass.code == "CB613" else f", because of {bypass.code} {CODES[bypass.code].name}"
        reasons.append(f"CB613: {calls} of {bypass.function}{where} ran outside carbon{cause}")
    if not graphs and not eager:
        reasons.append("CB607: carbon compiled no graph")
    elif graphs and not any(graph.calls for graph in graphs):
        reasons.append("no compiled graph has run yet")
    return list(dict.fromkeys(reasons))


def _finding_reason(finding):
    d = finding.diagnostic
    where = f" at {_place(d.file, d.line)}" if d.file else ""
    because = {"allow": f"; allowed: {finding.reason}", "warn": "; on_unsafe=warn"}.get(finding.decision, "")
    return f"{d.code}: {d.message}{where}{because}"


def _place(file, line):
    return f"{relative(file, os.getcwd())}:{line}"


def _identity(data):
    graphs = [[graph["hash"], graph["kind"], graph["precision"]] for graph in data["graphs"]]
    return hashlib.sha256(canonical_json([data["contract"], graphs]).encode()).hexdigest()


def contract_version() -> str:
    """"1 (draft until 1.0 is tagged)": what the title of contract.md says."""
    title = (Path(__file__).parent / "contract.md").read_text(encoding="utf-8").partition("\n")[0]
    return title.partition("version ")[2].strip()


def source_hash() -> str:
    """The sha256 of every .py and .md file of the package, by name."""
    digest = hashlib.sha256()
    for name, path in sorted(_sources()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _sources():
    from carbon_compile import lowering, templates

    here = Path(__file__).parent
    for prefix, folder in (
        ("carbon_compile", here),
        ("carbon_compile/codes", here / "codes"),
        ("lowering", Path(lowering.__file__).parent),
        ("templates", Path(templates.__file__).parent),
    ):
        for path in folder.iterdir():
            if path.suffix in (".py", ".md"):
                yield f"{prefix}/{path.name}", path


def canonical_json(data) -> str:
    """One text for one value: sorted keys, ASCII, one blank indent, a final newline.

    TypeError for a float, whose text would be a choice.
    """
    _refuse_floats(data, "")
    return json.dumps(data, sort_keys=True, indent=1, ensure_ascii=True) + "\n"


def _refuse_floats(value, path):
    if isinstance(value, float):
        raise TypeError(f"{path or 'the value'} is a float; certificates hold none")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        _refuse_floats(item, f"{path}.{key}" if path else str(key))
