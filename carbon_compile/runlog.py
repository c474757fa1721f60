"""What was compiled and run in this process: filled by the runtime, read by the certificate.

The pytest plugin reads it too, and must not import PyTorch: functions here do.
"""

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from carbon_compile.diagnostics import Diagnostic, Finding, Report


@dataclass(frozen=True)
class NodeRow:
    """One node of the joint graph and its verdict.

    section: of the contract. engine, tile, split_k: what a template chose; they don't change bits.
    code: of the finding, where the node was allowed to run without a rule.
    """

    op: str
    verdict: str
    section: str = ""
    template: str = ""
    engine: str = ""
    tile: str = ""
    split_k: int = 0
    code: str = ""
    file: str | None = None
    line: int | None = None
    module_path: str = ""
    direction: str = "forward"


@dataclass
class GraphRecord:
    """One compiled graph.

    hash: of its canonical text (canonical.graph_hash). function: what was compiled, as the user
    knows it. kind: "training" or "inference". precision: the class of products by type, such as
    {"float32": "X3"}. kept: of how many weights the digits are kept between calls. parameters: weak
    references to the parameters it took, by id, to find it by model; models of one architecture share
    a graph.
    """

    hash: str
    function: str = ""
    kind: str = "inference"
    device: str = "cpu"
    precision: dict = field(default_factory=dict)
    nodes: tuple[NodeRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    calls: int = 0
    kept: int = 0
    parameters: dict = field(default_factory=dict)

    def called(self, inputs: Iterable = ()) -> None:
        """Counts a call, and notes whose parameters are among its inputs."""
        from torch.nn import Parameter

        with _COUNTING:
            self.calls += 1
        first = next((value for value in inputs if isinstance(value, Parameter)), None)
        known = self.parameters.get(id(first))
        if first is not None and (known is None or known() is not first):
            with _COUNTING:
                self.parameters = {key: ref for key, ref in self.parameters.items() if ref() is not None} | _references(inputs)


@dataclass
class Bypass:
    """Calls of a compiled function that ran outside carbon (CB613), with the code of the cause."""

    function: str
    code: str = "CB613"
    calls: int = 1
    file: str | None = None
    line: int | None = None

    def add(self, calls: int) -> None:
        with _COUNTING:
            self.calls += calls


def _references(values):
    from torch.nn import Parameter

    return {id(value): weakref.ref(value) for value in values if isinstance(value, Parameter)}


_COUNTING = threading.Lock()  # a compiled function may be called by several threads


class Log:
    """What happened in this process, in order."""

    def __init__(self):
        self.graphs: list[GraphRecord] = []
        self.bypassed: dict[tuple, Bypass] = {}
        self.findings: list[Finding] = []
        self.eager = 0  # operators that eager code ran by the contract's rules, under `enable`

    def graph(
        self,
        hash: str,
        *,
        function: str = "",
        kind: str = "inference",
        device: str = "cpu",
        precision: dict | None = None,
        nodes: Iterable[NodeRow] = (),
        report: Report | None = None,
        parameters: Iterable = (),
        kept: int = 0,
    ) -> GraphRecord:
        """Records a compiled graph. Call `.called()` on what it returns at each call of the graph."""
        record = GraphRecord(
            hash, function, kind, device, dict(precision or {}), tuple(nodes), report.findings if report else (),
            parameters=_references(parameters), kept=kept,
        )
        self.graphs.append(record)
        return record

    def note(self, report: Report) -> None:
        """Keeps findings that belong to no graph, such as a graph break before the first operation."""
        self.findings += [finding for finding in report.findings if finding not in self.findings]

    def bypass(
        self, function: str, code: str = "CB613", calls: int = 1, file: str | None = None, line: int | None = None
    ) -> Bypass:
        """Counts calls of a compiled function for which no graph of ours ran."""
        known = self.bypassed.setdefault((function, code, file, line), Bypass(function, code, 0, file, line))
        known.add(calls)
        return known

    def reset(self) -> None:
        self.__init__()


LOG = Log()


def allowed_row(row: NodeRow, diagnostic: Diagnostic) -> NodeRow:
    """The row of a node that runs as stock PyTorch because its finding was allowed."""
    return replace(row, verdict="allowed", code=diagnostic.code)
