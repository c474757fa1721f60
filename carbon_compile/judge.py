"""Verdicts: what the contract says of every node of the joint graph, all findings at once."""

import contextlib
import re
from dataclasses import asdict, dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from . import host
from .diagnostics import Diagnostic, Policy, Report, locate, operator_name
from .lowering import composites, loss, policy, registry, softmax
from .recognise import TARGET_GRADIENTS, gradient_of_targets
from .runlog import NodeRow
from .verify import classify, is_host_arithmetic


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
        self._target_gradients = {}  # nodes that their rule expanded: what they were given

    def run_node(self, node):
        if node.op != "call_function" or is_host_arithmetic(node.target):
            return super().run_node(node)
        verdict, section, reason, code = classify(node)
        if verdict == "refuse":
            return self._refuse(node, refusal_code(node, code), reason)
        misfit = dtype_misfit(node, verdict)
        if misfit is not None:
            return self._refuse(node, *misfit)
        try:
            result = self._apply(node)
        except registry.Refusal as refusal:
            return self._refuse(node, refusal.code, refusal.reason)
        self._row(node, verdict, section)
        return result

    def _apply(self, node):
        """The node's value, by its rule, which may know more where it meets another's result."""
        given = self.fetch_args_kwargs_from_env(node)[0] if node.target in TARGET_GRADIENTS else None
        with softmax.gradient_sums(self._known_sum(node)):
            result = super().run_node(node)
        if given is not None:
            self._target_gradients[node] = given
        return result

    def _known_sum(self, node):
        """What gives the sum over classes of a cross-entropy's gradient; None at any other node."""
        source, dtypes = gradient_of_targets(node) or (None, None)
        given = self._target_gradients.get(source)
        return None if given is None else lambda g: loss.sum_over_classes(g, dtypes, *given)

    def _refuse(self, node, code, reason):
        finding = Diagnostic.of(code, node, detail=reason if reason != "no rule" else "")
        self.report.add(finding)
        if self.report.policy.decide(finding) == "refuse":
            self._row(node, "refuse", "9", code)
            if not host.data_dependent(node.meta["val"]):
                return tree_map(_stand_in, node.meta["val"])
            with registry.as_stock():  # only the operator itself can make a size that the data decides
                return super().run_node(node)
        self._row(node, "allowed", "9", code)
        with registry.as_stock(), host.new_targets(self.stock):
            return super().run_node(node)

    def _row(self, node, verdict, section, code=""):
        where = locate(node)
        self.rows.append(
            NodeRow(
                operator_name(node), verdict, section, code=code, file=where.file, line=where.line,
                module_path=where.module_path, direction=where.direction, **_chosen(node),
            )
        )  # fmt: skip


class Assessor(Judge):
    """Judges without rewriting: whether a rule refuses depends on types and sizes alone, so of equal
    calls, as in the layers of a model, only the first is tried."""

    def __init__(self, gm, policy: Policy):
        super().__init__(gm, policy)
        self._tried = set()

    def assess(self, table):
        """Judge the graph on the fake values that its nodes carry."""
        fakes = [n.meta["val"] for n in self.module.graph.nodes if n.op == "placeholder"]
        with host.dry_run(fakes, table):
            self.run(*fakes)

    def _apply(self, node):
        call = host.described((node.target, *self.fetch_args_kwargs_from_env(node)))
        if call in self._tried:
            return node.meta["val"]
        result = super()._apply(node)
        self._tried.add(call)
        return result


def _stand_in(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value


_PRODUCTS = {"mm": 3, "bmm": 2, "attention_scores": 2, "bmm_keys": 2}  # where the window stands among the arguments


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
    weight = node.args[1].meta["val"] if facts["template"] == "mm" and node.args[4] == "weight" else None
    window = policy.window_for(window, "none" if weight is None else "weight", sizes[2])
    keys = node.args[0].meta["val"] if facts["template"] == "bmm_keys" else None
    chosen = describe(*sizes, window=window, batch=value.shape[0] if value.dim() == 3 else 1, device=device, weight=weight, keys=keys)
    tile = "x".join(map(str, chosen["tile"])) if chosen["tile"] else ""
    return {**facts, "engine": chosen["engine"], "tile": tile, "split_k": chosen["split_k"] or 0}


# What the name of an ATen operator without a rule says about it: the first that matches.
_TELLING = tuple(
    (re.compile(pattern), code)
    for pattern, code in (
        (r"_?fft_", "CB104"),
        (r"_?linalg_|_?cholesky|geqrf|orgqr|ormqr|lu_unpack|triangular_solve|_spsolve|_?cdist|_?pdist", "CB103"),
        (r"_cudnn_rnn|mkldnn_rnn|miopen_rnn|_thnn_fused|quantized_(gru|lstm)|lstm|gru|rnn_", "CB107"),
        (r"_?sparse_|_to_sparse|_?coalesce|_nested|mkldnn_|to_mkldnn|quantize_|dequantize|quantized_|q_|int_repr", "CB108"),
        (r"max_unpool", "CB102"),
        (r".*(pool\dd|pool\dd_with_indices|_pad\dd|grid_sampler\w*|segment_reduce)_backward|_?upsample\w*_backward|col2im|_embedding_bag", "CB106"),
        (r"special_|polygamma|mvlgamma|_standard_gamma_grad|_dirichlet_grad", "CB109"),
        (r"resize|set$|set_|sparse_resize", "CB608"),
        (r"_?unique|nonzero|masked_select", "CB606"),
        (r"_scaled_(grouped_)?mm", "CB205"),
        (r"\w*convolution|slow_conv|conv_|_nnpack", "CB105"),
    )
)
_KNOWN = ("aten", "prims", "carbon")


def refusal_code(node, code):
    """The most telling code for a node that no rule covers."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "CB611" if "triton" in str(target) else "CB110"
    if code and code != "CB101":
        return code
    if "c10d" in target.namespace:
        return "CB501"
    if target.namespace not in _KNOWN:
        return "CB610"
    name = target._opname
    telling = next((code for pattern, code in _TELLING if pattern.match(name)), None)
    misfit = None if telling == "CB104" else dtype_misfit(node, "refuse")
    if misfit is not None:
        return misfit[0]
    if telling is None and torch.Tag.nondeterministic_seeded in target.tags:
        return "CB402"
    return telling or "CB101"


def dtype_misfit(node, verdict):
    """(code, reason) of a node that computes in a type for which there are no rules; None otherwise.

    Moving such elements about is exact, and so is looking at complex numbers as pairs.
    """
    given, made = _dtypes(node.all_input_nodes), _dtypes([node])
    dtypes = given | made
    odd = [d for d in dtypes if not _has_rules(d)]
    if not odd or verdict != "refuse" and _only_moves(node, given, made):
        return None
    if any(d.is_complex for d in odd):
        return "CB204", ""
    if any(d.is_floating_point for d in odd):
        return "CB205", ""
    return "CB208", str(odd[0]).removeprefix("torch.")


def _only_moves(node, given, made):
    rule = registry.RULES.get(node.target)
    if rule is None:
        return False
    if rule.verdict == "keep":
        return len(given | made) == 1 or any(d.is_complex for d in given | made)
    return rule.moves and made <= given and len((given | made) - _INDICES) == 1


_INDICES = {torch.bool, torch.int64, torch.int32}
_RULED = re.compile(r"torch\.(bool|uint8|int(8|16|32|64)|bfloat16|float(16|32|64))")


def _has_rules(dtype):
    return _RULED.fullmatch(str(dtype)) is not None


def _dtypes(nodes):
    values = tree_leaves([node.meta.get("val") for node in nodes])
    return {v.dtype for v in values if isinstance(v, torch.Tensor)}


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


def custom_operators(gm):
    """Findings for the custom operators of a Dynamo graph: where one lacks a derivative or a fake
    implementation, AOTAutograd fails on it before there is a joint graph to judge."""
    for node in gm.graph.nodes:
        namespace = getattr(node.target, "namespace", None) or str(node.target).partition(".")[0]
        if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) and namespace not in _KNOWN and "c10d" not in namespace:
            yield Diagnostic.of("CB610", node)


def setting_calls(gm):
    """Nodes of a Dynamo graph that change a setting of the process, each with its finding.

    Such a call takes effect once, while the graph is traced, and never again when it runs.
    """
    for node in gm.graph.nodes:
        if node.target is torch.set_float32_matmul_precision:
            yield node, Diagnostic.of("CB207", node)


def without_echoes(graph_findings, composite_findings):
    """The findings of a graph without those of operators that stand for a composite found already."""
    known = {(d.code, d.file, d.line) for d in composite_findings}
    return [d for d in graph_findings if d.direction == "backward" or (d.code, d.file, d.line) not in known]


@contextlib.contextmanager
def composite_findings(report):
    """Adds the refusals of composite functions met while AOTAutograd traces: when the context ends, and
    when the function that it yields is called."""

    def add():
        while met:
            refusal, name, meta = met.pop(0)
            report.add(Diagnostic.of(refusal.code, _Bare(name, meta), detail=refusal.reason, op=name))

    with composites.collecting() as met:
        try:
            yield add
        finally:
            add()


class _Bare:
    """As much of an FX node as `locate` reads, for a function that AOTAutograd was tracing."""

    op = "call_function"

    def __init__(self, name, meta):
        self.name, self.meta, self.target = name, meta, name
        self.users, self.all_input_nodes = {}, []
