"""Verdicts: what the contract says of every node of the joint graph, all findings at once."""

import contextlib
from dataclasses import asdict, dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_map

from .diagnostics import Diagnostic, Policy, Report, locate, operator_name
from .lowering import composites, registry
from .runlog import NodeRow
from .verify import classify, is_host_arithmetic

_INITIALISERS = ("fill", "copy", "zero", "uniform", "normal_functional", "bernoulli", "exponential", "full_like", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty", "sym_size", "random")


class Judge(fx.Interpreter):
    """Runs the joint graph under a retrace, judging each node and applying its rule.

    A refused node is replaced by an empty stand-in, so that one pass finds everything; the graph
    that comes out is used only if the report refuses nothing.
    """

    def __init__(self, gm, policy: Policy):
        super().__init__(gm)
        self.report = Report(policy=policy)
        self.rows = []
        self.stock = set()

    def run_node(self, node):
        if node.op != "call_function" or is_host_arithmetic(node.target):
            return super().run_node(node)
        verdict, section, reason, code = classify(node)
        if verdict == "refuse":
            return self._refuse(node, refusal_code(node, code), reason)
        try:
            result = super().run_node(node)
        except registry.Refusal as refusal:
            return self._refuse(node, refusal.code, refusal.reason)
        self._row(node, verdict, section)
        return result

    def _refuse(self, node, code, reason):
        finding = Diagnostic.of(code, node, detail=reason if reason != "no rule" else "")
        self.report.add(finding)
        if self.report.policy.decide(finding) == "refuse":
            self._row(node, "refuse", "9", code)
            return tree_map(_stand_in, node.meta["val"])
        self._row(node, "allowed", "9", code)
        self.stock.add(node.target)
        with registry.as_stock():
            return super().run_node(node)

    def _row(self, node, verdict, section, code=""):
        where = locate(node)
        self.rows.append(
            NodeRow(
                operator_name(node), verdict, section, code=code, file=where.file, line=where.line,
                module_path=where.module_path, direction=where.direction, **_chosen(node),
            )
        )  # fmt: skip


def _stand_in(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value


_PRODUCTS = {"mm": 3, "bmm": 2}  # where the window stands among the arguments


def _chosen(node):
    """Template, engine, tile and split-K of a product, for tables and certificates."""
    if node.target not in registry.TEMPLATES:
        return {}
    facts = {"template": node.target._opname}
    value = node.meta.get("val")
    if facts["template"] not in _PRODUCTS or not isinstance(value, torch.Tensor):
        return facts
    sizes = [value.shape[-2], value.shape[-1], node.args[0].meta["val"].shape[-1]]
    if not all(isinstance(s, int) for s in sizes):
        return facts
    from .templates.matmul import describe

    window = node.args[_PRODUCTS[facts["template"]]]
    device = value.device if value.device.type == "cpu" or torch.cuda.is_available() else None
    chosen = describe(*sizes, window=window, batch=value.shape[0] if value.dim() == 3 else 1, device=device)
    tile = "x".join(map(str, chosen["tile"])) if chosen["tile"] else ""
    return {**facts, "engine": chosen["engine"], "tile": tile, "split_k": chosen["split_k"] or 0}


def refusal_code(node, code):
    """The most telling code for a node that no rule covers."""
    name = str(node.target).removeprefix("aten.")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return "CB611" if "triton" in name else "CB110"
    if code and code != "CB101":
        return code
    dtypes = _dtypes(node)
    if any(d.is_complex for d in dtypes) and "fft" not in name:
        return "CB204"
    if any("float8" in str(d) for d in dtypes):
        return "CB205"
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims", "carbon", "_c10d_functional"):
        return "CB610"
    if node.target.namespace == "_c10d_functional":
        return "CB501"
    if name.startswith(("_fft", "fft_")):
        return "CB104"
    if name.startswith(("linalg_", "_linalg", "cholesky", "geqrf", "orgqr", "ormqr", "lu_", "triangular_solve", "_cdist")):
        return "CB103"
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return "CB402"
    return "CB101"


def _dtypes(node):
    values = [getattr(a, "meta", {}).get("val") for a in [node, *node.all_input_nodes]]
    return {v.dtype for v in values if isinstance(v, torch.Tensor)}


def uninitialised_reads(graph):
    """`empty` nodes whose contents something reads."""
    for node in graph.nodes:
        if node.op == "call_function" and "empty" in str(node.target) and "aten" in str(node.target):
            readers = [u for u in node.users if u.op != "output" and not str(u.target).removeprefix("aten.").startswith(_INITIALISERS)]
            if (readers or any(u.op == "output" for u in node.users)) and node.meta["val"].numel() != 0:
                yield node


@dataclass
class Record:
    """What is known of one compiled region: kept beside Inductor's caches for warm starts."""

    graph: str = ""
    rows: tuple = ()
    report: str = "[]"

    def as_dict(self):
        return {"graph": self.graph, "rows": [asdict(r) for r in self.rows], "report": self.report}

    @staticmethod
    def of(data):
        return Record(data["graph"], tuple(NodeRow(**r) for r in data["rows"]), data["report"])


@contextlib.contextmanager
def composite_findings(report):
    """Adds the refusals of composite functions met while AOTAutograd traces."""
    with composites.collecting() as met:
        yield
    for refusal, name, meta in met:
        node = _Bare(name, meta)
        report.add(Diagnostic.of(refusal.code, node, detail=refusal.reason, op=name))


class _Bare:
    """As much of an FX node as `locate` reads, for a function that AOTAutograd was tracing."""

    op = "call_function"

    def __init__(self, name, meta):
        self.name, self.meta, self.target = name, meta, name
        self.users, self.all_input_nodes = {}, []
