"""START HERE: the torch.compile backend, a page of named passes.

    Dynamo graph -> composites -> AOTAutograd -> joint graph -> judge and rewrite -> verify -> Inductor
"""

import contextlib
import functools
import hashlib
import json
import logging
import pathlib
import time

import torch

from . import dtensor, dynamo, escapes, host, modes, precompile, weights
from .analyze import analyze  # noqa: F401  (part of the backend's face)
from .canonical import graph_hash
from .diagnostics import CODES, Diagnostic, Refused, Report
from .judge import (
    Judge,
    Record,
    composite_findings,
    custom_operators,
    setting_calls,
    without_echoes,
)
from .location import lines
from .lowering import (
    columns,
    composites,
    optimizer,
    padding,
    partial,
    pointwise,
    producers,
    registry,
    unsigned,
)
from .lowering.policy import float32_class, matmul_precision
from .options import Options
from .recognise import (
    attention_softmax,
    causal_products,
    cut_products,
    heads_side_by_side,
    rounded_partials,
)
from .rewrite import (
    ambient_policy,
    copy_expanded_outputs,
    replace_graph,
    rewrite_dynamo,
    rewrite_joint,
)
from .runlog import LOG
from .runtime import Region, refusing
from .uninitialised import uninitialised_reads
from .verify import offenders

log = logging.getLogger(__name__)


def carbon(gm, example_inputs, *, mode=None, options=None):
    """Compile one Dynamo graph so that its bits depend on nothing but the graph and its inputs.

    The entry point behind `torch.compile(..., backend="carbon")`; see `Options` for `options`.
    """
    options = Options.parse(mode, options)
    registry.load()
    pointwise.install_lowerings()
    policy = ambient_policy(options)
    guard_matmul_precision()
    with logged("composites"):
        copy_expanded_outputs(rewrite_dynamo(gm, policy))
    region = Region(gm, options, policy, source_hash())
    region.keeps = options.weights == "kept" and not region.trains(example_inputs) and not host.from_fsdp(gm)
    region.report.extend(escapes.surroundings(gm, devices_of(example_inputs)))
    region.report.extend(unsafe_overrides(options))
    region.report.extend(found for _, found in setting_calls(gm))
    try:
        if any(found.code == "CB207" for found in region.report.refused):  # tracing would make the change
            region.raise_if_refused()
        region.compiled = compile_region(gm, example_inputs, region)
    except Exception as error:
        refused = cause(error, Refused)
        report = region.everything()
        report.extend(refused.report if refused else custom_operators(gm))
        if not report.refused:
            raise
        log.info("refused:\n%s", report)
        region.dump("report.txt", lambda: str(report))
        return refusing(report)
    finish(region, gm, example_inputs)
    return region


def compile_region(gm, example_inputs, region, caches=True):
    """Trace, judge, rewrite and compile; on a warm cache, recall the verdicts instead."""
    joint = JointPass(region)
    config = {**inductor_config(), **dict(region.options.inductor), "joint_custom_pre_pass": joint, **host.cacheable(composites.call, source_hash())}
    # A warm cache has no graphs to show, and none to take weights' digits out of.
    caches = caches and not region.options.dump and not region.keeps
    if region.options.tune == "on":
        precompile.recall_plans(example_inputs)
    with host.no_autocast(), dtensor.reporting(region.graph_report), composite_findings(region.graph_report) as joint.collect, host.autograd_cache(caches), logged("compile"):
        compiled = host.compile_fx(
            gm,
            example_inputs,
            inner=functools.partial(compile_inner, region),
            decompositions=Decompositions(),
            config=host.known_config(config),
            recomputable=pointwise.recomputable(),
        )
    if joint.ran:
        region.remember(Record(joint.identity, joint.rows, region.graph_report.dump()))
    elif region.recall() is not None:
        region.graph_report.extend(Report.load(region.record.report))
    elif caches:
        return compile_region(gm, example_inputs, region, caches=False)
    else:
        raise Refused(Report([Diagnostic("CB902", "it was not called", "judge")]))
    region.raise_if_refused()
    return compiled


def finish(region, gm, example_inputs):
    """Report what was found and compiled: log, warnings, table, dump, trace."""
    report = region.everything()
    unused = unused_allows(report, gm)
    if region.trains(example_inputs):
        report.extend(unused)
    for found in unused:
        log.info("%s: %s, %s:%s", found.code, found.message, found.file, found.line)
    region.enter(example_inputs, report)
    escapes.announce(report)
    region.show()
    region.dump("report.txt", lambda: f"{report}\n{region.table()}")
    host.trace_artifact("carbon_verdicts", lambda: json.dumps({**region.record.as_dict(), "function": region.name, "report": report.render("json")}))
    log.info("compiled %s: graph %s", region.name, region.record.graph)


def unused_allows(report, gm):
    """CB001 for the allow comments on a graph's lines that allowed nothing, here or in a graph before.

    One that is meant for the backward is unused in inference: there, it is no more than logged. What
    only a run can find is left to the certificate.
    """
    known = {finding.diagnostic for finding in (*LOG.findings, *(f for graph in LOG.graphs for f in graph.findings))}
    checked = Report([*report, *(d for d in known if d.code != "CB001")])
    checked.check_allows(lines([gm]))
    found = [d for d in checked if d.code == "CB001" and d not in known]
    return [d for d in found if "run" not in CODES[d.detail].seen_in]


class JointPass(host.custom_graph_pass()):
    """Judge and rewrite the joint graph; its uuid is our identity in Inductor's caches."""

    def __init__(self, region=None):
        self.region, self.ran, self.collect = region, False, None

    def __call__(self, graph):
        self.ran = True
        region, gm = self.region, graph.owning_module
        region.dump("before.txt", lambda: readable(gm))
        cut_products(graph)
        self.identity = graph_hash(graph)
        causal_products(graph)  # not part of the identity, nor are the next: no bit depends on them
        attention_softmax(graph)
        heads_side_by_side(graph)
        judge = Judge(gm, region.graph_report.policy)
        with logged("judge and rewrite"):
            for node in uninitialised_reads(graph):
                judge.report.add(Diagnostic.of("CB609", node))
            for node in rounded_partials(graph):
                judge.report.add(Diagnostic.of("CB501", node, partial.PRODUCT))
            rewritten = rewrite_joint(gm, judge)
        self.rows, region.stock = tuple(judge.rows), judge.stock
        self.collect()
        region.graph_report.extend(without_echoes(judge.report, region.graph_report))
        region.raise_if_refused()
        region.dump("after.txt", lambda: readable(rewritten))
        replace_graph(graph, rewritten)

    def uuid(self):
        return source_hash()


def readable(gm):
    return gm.print_readable(print_output=False)


@contextlib.contextmanager
def logged(name):
    """TORCH_LOGS="+carbon_compile" shows each pass and its time."""
    start = time.perf_counter()
    yield
    log.debug("%s: %.3f s", name, time.perf_counter() - start)


def devices_of(inputs):
    return tuple({v.device.type: None for v in inputs if isinstance(v, torch.Tensor)})


def unsafe_overrides(options):
    """Findings for Inductor settings of the user's that take back what carbon pins."""
    pinned = inductor_config()
    for name, value in options.inductor:
        if (name in pinned and pinned[name] != value) or name.endswith("_pass"):
            yield Diagnostic("CB303", f"options={{'inductor': {{{name!r}: {value!r}}}}}")


def compile_inner(region, gm, example_inputs, **kwargs):
    """Inductor on one final graph (forward, backward or inference), after the closed-world check."""
    with modes.suspended():  # a backward graph is compiled where eager code may keep the contract
        columns.place(gm)
        left = [n for n in offenders(gm.graph) if n.target not in region.stock]
        if left:
            raise Refused(Report([Diagnostic.of("CB901", n) for n in left]))
        unsigned.place(gm)
        registry.call_kernels_directly()
        if region.keeps and kwargs.get("is_inference"):
            return compile_keeping(region, gm, example_inputs, **kwargs)
        padding.place(gm, example_inputs)
        producers.place(gm)
        precompile.start(gm.graph, region.options.tune)
        return host.compile_fx_inner(gm, example_inputs, **kwargs)


def compile_keeping(region, gm, example_inputs, *, static_input_idxs=(), **kwargs):
    """As `compile_inner`, with the digits of weights as further inputs that stay where they are."""
    slots, digits = weights.hoist(gm, example_inputs, static_input_idxs)
    region.kept = len(slots)
    producers.place(gm)
    precompile.start(gm.graph, region.options.tune)
    first = len(example_inputs)
    fixed = [*static_input_idxs, *range(first, first + len(slots))]
    compiled = host.compile_fx_inner(gm, [*example_inputs, *digits], static_input_idxs=fixed, **kwargs)
    return weights.KeptWeights(slots).around(compiled) if slots else compiled


class Decompositions(dict):
    """The decompositions that AOTAutograd may apply: none of arithmetic. Pickles by our version, so
    that the caches of both supported PyTorch lines hold it."""

    def __reduce_ex__(self, protocol):
        return Decompositions._load, (source_hash(),)

    @staticmethod
    def _load(version):
        return Decompositions()


def guard_matmul_precision():
    """Compile anew when `torch.set_float32_matmul_precision` changes the class of float32 products."""
    compiled = float32_class(matmul_precision())
    host.guard_on(
        lambda: float32_class(matmul_precision()) == compiled,
        f"float32 matmul precision gives products of class {compiled}",
    )


def cause(error, kind):
    """The exception of `kind` that `error` is or was raised from, or None."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


@functools.cache
def source_hash():
    """sha256 over every source file that can change a result, in name order."""
    root = pathlib.Path(__file__).parent
    folders = [root, pathlib.Path(registry.__file__).parent, pathlib.Path(pointwise.__file__).parent.parent / "templates"]
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def inductor_config():
    """The Inductor config under which carbon's operations keep their bits, for use with stock Inductor.

    `torch.compile(f, options=carbon_compile.inductor_config())` fixes rounding (no fused
    multiply-add, IEEE division, no flush to zero, signed zeros); it does not fix the order of sums.
    """
    return host.known_config(
        {
            "emulate_precision_casts": True,
            "emulate_precision_casts_on_saved_tensors": False,
            "eager_numerics.division_rounding": True,
            "eager_numerics.disable_ftz": True,
            "use_fast_math": False,
            "cpp.enable_unsafe_math_opt_flag": False,
            "cpp.enable_floating_point_contract_flag": host.STRICT_CPP,
            # It keeps partial sums of integers as float32.
            "triton.mix_order_reduction": False,
            "pattern_matcher": False,
            "joint_graph_constant_folding": False,
        }
    )


# Dynamo traces a step before it calls the backend, so this can't wait for the first call.
optimizer.install(host.tracing_for(carbon), modes.in_force)

carbon.listener = escapes.watch
dynamo.listen()
dynamo.around_calls(modes.suspended, modes.in_force)
escapes.warn_if_disabled()
