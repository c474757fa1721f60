"""Judge a function without running it: Dynamo and AOTAutograd on fake tensors, and no Inductor."""

import copy
import functools

import torch

from . import devices, dynamo, environment, host
from .canonical import graph_text
from .diagnostics import Diagnostic, Policy, Report
from .escapes import LintListener, Listener
from .judge import (
    Assessor,
    composite_findings,
    custom_operators,
    setting_calls,
    without_echoes,
)
from .location import lines
from .lowering import pointwise, registry
from .options import Options
from .rewrite import ambient_policy, rewrite_dynamo, rewriting_table
from .uninitialised import uninitialised_reads


def analyze(fn, args=(), *, kwargs=None, backward=None, device=None, policy=None):
    """Every finding of `fn(*args, **kwargs)`, forward and backward, as a Report.

    Args:
        fn: a module or function. args, kwargs: example inputs; only types and sizes matter.
        backward: judge the backward too. None: where an input or parameter requires a gradient.
        device: "cpu" or "cuda" to judge as if everything were there. "cuda" also asks whether the graph
            is that of the CPU: with a GPU, of forward and backward; without one, of the forward.
        policy: what to do about findings.

    What the function itself raises is raised. Nothing of the user's is run on real data or changed: parameters and inputs are fake copies, and may
    have been made on the device "meta". What this process has compiled is dropped, as by
    `torch.compiler.reset()`, and compiles anew when called.
    """
    report = Report(policy=policy or Policy())
    graphs = []
    listener = LintListener(report)
    work = (fn, tuple(args), dict(kwargs or {}))
    try:
        _compile(work, functools.partial(_judge_only, report, graphs), listener, backward, _real_device(device))
    except Exception as error:
        listener.end(error)
    else:
        listener.end()
    if not graphs:  # all is well with nothing if nothing could be looked at
        report.extend(d for d in environment.disabled_findings() if d not in report.diagnostics)
    if device == "cuda" and not report.refused:
        report.extend(devices.findings(functools.partial(trace, *work), backward))
    report.check_allows(lines(graphs))
    return report


def trace(fn, args=(), kwargs=None, *, backward=None, device=None):
    """[(Dynamo graph with composites, canonical text of its joint graph)] of what analyze would judge."""
    made = []

    def backend(gm, inputs):
        original = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        rewrite_dynamo(gm, ambient_policy(Options()))
        with host.no_autocast():
            host.trace_only(gm, inputs, lambda traced: made.append((gm, graph_text(traced.graph))))
        return original

    _compile((fn, tuple(args), dict(kwargs or {})), backend, Listener(), backward, torch.device(device) if device else None)
    return made


def _compile(work, backend, listener, backward, device):
    """Call a function by a backend on fake copies of its inputs, on `device` unless None."""
    registry.load()
    pointwise.install_lowerings()
    with host.fake_mode() as fakes, torch.set_grad_enabled(backward is not False):
        fn, args, kwargs = _fake_copies(fakes, work, device)
        if backward:
            _require_gradients(fn, args)
        torch.compiler.reset()

        def looking(gm, inputs, **options):
            seen = backend(gm, inputs)
            return lambda *inputs: _call_in(fakes, seen, inputs)

        looking.listener = lambda: listener
        try:
            with host.quiet(), host.strict_recompiles(), torch.compiler.set_stance("default"):
                torch.compile(fn, backend=looking, dynamic=None)(*args, **kwargs)
        finally:
            torch.compiler.reset()


def _call_in(mode, fn, inputs):
    """Runs a graph on fake tensors, of which also those are that it makes, and asks no library about a device."""
    with mode, host.unrolling(), host.lstm_states():
        return fn(*inputs)


def _real_device(device):
    return torch.device(device) if device and (device == "cpu" or torch.cuda.is_available()) else None


def _fake_copies(mode, tree, device):
    fn, args, kwargs = tree
    fn = dynamo.uncompiled(fn)
    with mode:
        if isinstance(fn, torch.nn.Module):
            # The copies of tensors are ready when deepcopy looks for them: it would copy their storage.
            fn = copy.deepcopy(fn, {id(t): _fake(mode, t, device) for t in _tensors_of(fn)})
            for part in fn.modules():
                part._compiled_call_impl = None
        convert = lambda t: _fake(mode, t, device)  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, convert, (args, kwargs))
    return fn, args, kwargs


def _tensors_of(module):
    """Parameters, buffers and plain attributes."""
    for part in module.modules():
        for values in (part._parameters, part._buffers, part.__dict__):
            yield from (t for t in values.values() if isinstance(t, torch.Tensor))


def _fake(mode, tensor, device):
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return tensor
    fake = mode.from_tensor(tensor, static_shapes=True)
    if device is None and tensor.device.type == "meta":
        device = torch.device("cpu")  # made there to save memory; nobody runs it there
    if device is None:
        return fake
    gradient = tensor.requires_grad and torch.is_grad_enabled()
    # Unlike a copy from another device, this needs no GPU.
    moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device).requires_grad_(gradient)
    return torch.nn.Parameter(moved, gradient) if isinstance(tensor, torch.nn.Parameter) else moved


def _require_gradients(fn, args):
    """Without a module, it is the floating inputs that a backward is for."""
    if isinstance(fn, torch.nn.Module) and any(p.requires_grad for p in fn.parameters()):
        return
    for a in torch.utils._pytree.tree_leaves(args):
        if isinstance(a, torch.Tensor) and a.is_floating_point() and a.is_leaf:
            a.requires_grad_(True)


def _judge_only(report, graphs, gm, inputs):
    """A backend that traces, judges, and runs the graph on its fake inputs."""
    graphs.append(gm)
    for node, found in list(setting_calls(gm)):
        report.add(found)
        gm.graph.erase_node(node)
    original = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    rewrite_dynamo(gm, ambient_policy(Options()))

    def judge(traced):
        for node in uninitialised_reads(traced.graph):
            report.add(Diagnostic.of("CB609", node))
        judged = Assessor(traced, report.policy)
        judged.assess(rewriting_table())
        collect()
        report.extend(without_echoes(judged.report, report))

    try:
        with host.no_autocast(), composite_findings(report) as collect:
            host.trace_only(gm, inputs, judge)
    except Exception:
        met = list(custom_operators(gm))
        if not met:
            raise
        report.extend(met)
    return original
