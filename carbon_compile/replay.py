"""One training step run twice, node by node: where two runs, or two ways of running, part.

The forward pass is captured as a Dynamo graph and interpreted eagerly, under carbon's rules
(`carbon_compile.enable`) or as PyTorch's own; every node's output is kept, and on the way back every
output's gradient. The first that differs is reported with the user's line.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from . import checkpoint, dynamo
from .bits import Difference, canonical_bits, tensor_diff, ulp_distances
from .graph_lint import TargetError, made_by
from .location import locate, operator_name
from .render import relative
from .reproducer import producer, reproducer
from .snapshot import RandomState
from .trainer import DeterministicTrainer, slices


class ReplayError(ValueError):
    """A step that can't be replayed, in one line."""


# --- settings


@dataclass(frozen=True)
class Setting:
    """How a step is run: "carbon" or "stock", and what is set for it.

    For carbon: the options of `torch.compile(..., backend="carbon")`. For stock: float32_matmul_precision,
    deterministic, autocast.
    """

    name: str
    values: tuple = ()

    @staticmethod
    def parse(text: str) -> "Setting":
        """From "carbon", "carbon:float32_matmul=X2" or "stock:float32_matmul_precision=high,deterministic=1"."""
        name, _, rest = text.partition(":")
        pairs = [item.partition("=") for item in rest.split(",") if item]
        known = {"carbon": _CARBON, "stock": _STOCK}.get(name)
        if known is None:
            raise ReplayError(f"a setting is carbon or stock, with what is set behind a colon, not {text!r}")
        for key, _, value in pairs:
            if key not in known or not value:
                raise ReplayError(f"{name} has no setting {key!r} with a value; it has {', '.join(known)}")
        return Setting(name, tuple((key, value) for key, _, value in pairs))

    def __str__(self):
        return self.name + (":" + ",".join(f"{key}={value}" for key, value in self.values) if self.values else "")

    @contextlib.contextmanager
    def in_force(self):
        if self.name == "carbon":
            from .eager import enable

            options = {key: value.split("+") if key == "allow" else value for key, value in self.values}
            with enable(seed=None, options=options or None):
                yield
            return
        from .lowering.policy import matmul_precision

        values = dict(self.values)
        precision, strict = matmul_precision(), torch.are_deterministic_algorithms_enabled()
        torch.set_float32_matmul_precision(values.get("float32_matmul_precision", precision))
        torch.use_deterministic_algorithms(values.get("deterministic", "0") not in ("0", "false"))
        autocast = getattr(torch, values.get("autocast", "bfloat16"), None)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            with torch.autocast(device, autocast, enabled="autocast" in values):
                yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(strict)


_CARBON = ("float32_matmul", "bfloat16_matmul", "float16_matmul", "on_unsafe", "allow")
_STOCK = ("float32_matmul_precision", "deterministic", "autocast")


# --- one run


@dataclass
class Run:
    """Everything that a run computed: by node, in the order in which it came about.

    inputs, outputs, gradients: node name -> tensor. randoms: node name -> the random state before it.
    """

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    arguments: dict[str, tuple] = field(default_factory=dict)
    randoms: dict[str, torch.Tensor] = field(default_factory=dict)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps what every node gives, and the gradient that comes back to it."""

    def __init__(self, graph_module):
        super().__init__(graph_module, garbage_collect_values=False)
        self.run_of = Run()

    def run_node(self, node):
        if node.op in ("call_function", "call_method"):
            before = torch.get_rng_state()
        result = super().run_node(node)
        if node.op in ("call_function", "call_method") and not torch.equal(before, torch.get_rng_state()):
            self.run_of.randoms[node.name] = before
        if not isinstance(result, torch.Tensor) or node.op == "output":
            return result
        kept = self.run_of.inputs if node.op in ("placeholder", "get_attr") else self.run_of.outputs
        kept[node.name] = result.detach().clone()
        if result.requires_grad:
            result.register_hook(lambda gradient, name=node.name: self._came_back(name, gradient))
        return result

    def _came_back(self, name, gradient):
        self.run_of.gradients[name] = gradient.detach().clone()


class _Captured(Exception):
    """Ends a call once its graph and inputs are known, before anything is computed."""


def capture(function: Callable, *args) -> tuple[fx.GraphModule, list]:
    """The Dynamo graph of `function(*args)` and its inputs, without running it.

    ReplayError where it isn't one graph.
    """
    caught = []

    def backend(graph_module, example_inputs):
        def stop(*inputs):
            caught.append((graph_module, list(inputs)))
            raise _Captured

        return stop

    torch.compiler.reset()
    try:
        with dynamo.settings(allow_rnn=True):
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    except _Captured:
        return caught[0]
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise ReplayError(f"the step can't be captured as one graph: {first}") from error
    finally:
        torch.compiler.reset()
    raise ReplayError("the step computes nothing that could be captured")


def run(graph_module, inputs, setting: Setting, random: RandomState, scale: float = 1.0) -> Run:
    """Forward, and backward from `scale` where the first output is one number that requires a gradient."""
    before = RandomState.now()
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]
    recorder = _Recorder(graph_module)
    random.restore()
    try:
        with setting.in_force():
            outputs = recorder.run(*leaves)
            loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
                loss.backward(torch.full_like(loss, scale))
    finally:
        before.restore()
    return recorder.run_of


# --- two runs


_HEADINGS = {
    "input": "input that differs",
    "output": "first node whose output differs",
    "gradient": "outputs agree; first node whose backward gives another gradient",
}


@dataclass
class Parting:
    """Where two runs part.

    kind: "input", "output" or "gradient". node: its name. operator, file, line, source, module: what
    it is and where it comes from. histogram: distances in ulps and how many elements have them.
    """

    kind: str
    node: str
    operator: str
    difference: Difference | None
    file: str | None = None
    line: int | None = None
    source: str = ""
    module: str = ""
    histogram: tuple = ()
    random: bool = False

    def lines(self):
        place = f" at {relative(self.file, os.getcwd())}:{self.line}" if self.file else ""
        yield f"{_HEADINGS[self.kind]}: {self.operator} ({self.node}){place}{', ' + self.module if self.module else ''}"
        if self.source:
            yield f" {self.line} | {self.source}"
        yield f"  {self.difference or 'its shape or dtype differs'}"
        if self.random:
            yield "  its random numbers differ: the generators were not in the same state"
        widest = max((count for _, count in self.histogram), default=1)
        for label, count in self.histogram:
            yield f"  {label:>14} ulp  {count:>10}  {'#' * max(1, round(30 * count / widest))}"


def partings(graph_module: fx.GraphModule, one: Run, other: Run, names: dict[str, str]) -> list[Parting]:
    """The inputs that differ, and the first output, or else the first gradient. Empty where all agree.

    names: what the graph's inputs are called, by placeholder.
    """
    nodes = [node for node in graph_module.graph.nodes if node.op != "output"]
    found = [_parting("input", n, one.inputs, other.inputs, names) for n in nodes if _differs(one.inputs, other.inputs, n.name)]
    for kind, order, a, b in (("output", nodes, one.outputs, other.outputs), ("gradient", nodes[::-1], one.gradients, other.gradients)):
        first = next((n for n in order if _differs(a, b, n.name)), None)
        if first is not None:
            maker = producer(first, one).name
            drawn = maker in one.randoms and not torch.equal(one.randoms[maker], other.randoms.get(maker, one.randoms[maker]))
            found.append(_parting(kind, first, a, b, names, drawn, one))
            break
    return found


def _differs(a, b, name):
    if name not in a and name not in b:
        return False
    if name not in a or name not in b or a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
        return True
    return not torch.equal(canonical_bits(a[name]), canonical_bits(b[name]))


def _parting(kind, node, a, b, names, drawn=False, run=None):
    try:
        difference, histogram = tensor_diff(a[node.name], b[node.name]), ulp_histogram(a[node.name], b[node.name])
    except (KeyError, ValueError):
        difference, histogram = None, ()
    # A gradient that comes back to a node was made by the backward of those that read it.
    blamed = [user for user in node.users if user.op != "output"] if kind == "gradient" else [node]
    if kind == "input" or not blamed:
        return Parting(kind, node.name, names.get(node.name, node.name), difference, histogram=histogram)
    where = locate(blamed[0])
    operators = " or ".join(dict.fromkeys(operator_name(producer(n, run)) for n in blamed))
    module = where.module_path.removeprefix("trainer.model.")
    return Parting(kind, blamed[0].name, operators, difference, where.file, where.line, where.source_line, module, histogram, drawn)


def ulp_histogram(a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[str, int], ...]:
    """(distance in ulps, number of elements), in doubling bins; "" of equal elements are left out.

    "0 (sign)" counts +0 against -0, "nan" one NaN against a number. Floating tensors of one dtype and shape.
    """
    if not a.is_floating_point():
        return (("integers", int((a != b).sum())),)
    distances, nan = ulp_distances(a, b)
    unequal = canonical_bits(a).cpu() != canonical_bits(b).cpu()
    bins = {}
    for distance in distances[unequal & ~nan].tolist():
        bins[max(0, distance).bit_length()] = bins.get(distance.bit_length(), 0) + 1
    told = {0: "0 (sign)", 1: "1"}
    found = [(told.get(k, f"{2 ** (k - 1)}..{2**k - 1}"), bins[k]) for k in sorted(bins)]
    return (*found, *((("nan", int((unequal & nan).sum())),) if (unequal & nan).any() else ()))


# --- a step of a training run


class Target:
    """What `package.module:make` returned: (trainer, batches) or (module or function, inputs).

    batches: a function of the step's number, or the one batch itself.
    """

    def __init__(self, made, name):
        if not (isinstance(made, tuple) and len(made) == 2 and (callable(made[0]) or isinstance(made[0], DeterministicTrainer))):
            raise ReplayError(f"{name}() must return (trainer, batches) or (module or function, tuple of inputs), not {type(made).__name__}")
        self.subject, self.batches = made
        self.trainer = self.subject if isinstance(self.subject, DeterministicTrainer) else None
        if self.trainer is not None and self.trainer.shards is not None:
            raise ReplayError(f"{name}() returned a trainer with logical shards, which have a graph and random numbers each: return one without")

    @staticmethod
    def load(name: str) -> "Target":
        try:
            return Target(made_by(name), name)
        except TargetError as error:
            raise ReplayError(str(error)) from error

    @property
    def model(self):
        subject = self.trainer.model if self.trainer else self.subject
        return subject if isinstance(subject, torch.nn.Module) else None

    def at(self, content: dict | None, step: int | None):
        """(function, its arguments, random state) of a step from a checkpoint's state."""
        if self.trainer is not None:
            if content is not None:
                self._go(content, step)
            return self._loss, (self.trainer._moved(self._batch(step)),), self.trainer._random
        if content is not None:
            if self.model is None:
                raise ReplayError("a checkpoint needs a trainer or a module to be loaded into")
            self.model.load_state_dict(content["model"])
        random = RandomState.load(content["random"]) if content is not None else RandomState.seeded(0)
        inputs = self._batch(step)
        return self._value, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), random

    def _go(self, content, step):
        """Take up the checkpoint, and make the steps between it and `step`."""
        self.trainer.resume(content)
        if step is not None and self.trainer.steps >= step:
            raise ReplayError(f"the checkpoint is of step {self.trainer.steps}; step {step} needs one from before it (none at all for step 1)")
        while step is not None and self.trainer.steps < step - 1:
            if not callable(self.batches):
                raise ReplayError(f"the checkpoint is of step {self.trainer.steps}; give batches as a function of the step, or the checkpoint of step {step - 1}")
            self.trainer.step(self.batches(self.trainer.steps + 1))

    def _batch(self, step):
        return self.batches(step) if callable(self.batches) else self.batches

    def _loss(self, batch):
        losses = [self.trainer._slice_loss(piece) for piece in slices(batch, self.trainer.accumulate)]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def _value(self, *inputs):
        result = self.subject(*inputs)
        return result if isinstance(result, (torch.Tensor, tuple)) else result["loss"] if isinstance(result, dict) else result.loss


@dataclass
class Replay:
    """What a replay found; `lines()` tells it."""

    settings: tuple[Setting, Setting]
    step: int | None
    found: list[Parting]
    state: list[str]
    script: str = ""

    def lines(self):
        one, other = self.settings
        what = f"step {self.step}" if self.step is not None else "the step"
        yield f"replayed {what} under {one} and under {other}"
        yield from self.state
        if not self.found:
            yield "the replays agree bit for bit: forward, and every gradient"
            yield "so what parted the runs was not in their state and settings: other code, other data, or the machine"
            return
        inputs = [p for p in self.found if p.kind == "input"]
        for parting in [*inputs[:3], *(p for p in self.found if p.kind != "input")]:
            yield from parting.lines()
        if len(inputs) == len(self.found):
            yield "no node's output or gradient differs: rounding swallowed it"
        if self.script:
            yield from ["reproducer:", *("    " + line if line else "" for line in self.script.splitlines())]


def replay(target: Target, settings: tuple[Setting, Setting], contents=(None, None), step: int | None = None, folder: str | None = None) -> Replay:
    """Run a step from two states under two settings and compare. See `Target` for what is run.

    contents: the two checkpoints (checkpoint.load), or None for the state that the target comes in.
    folder: where a reproducer's large inputs are written.
    """
    runs, graph_module, names = [], None, {}
    for content, setting in zip(contents, settings, strict=True):
        function, arguments, random = target.at(content, step)
        graph_module, inputs = capture(function, *arguments)
        names = _names(graph_module, inputs, target.model)
        scaled = getattr(target.trainer, "loss_scale", None)
        runs.append(run(graph_module, inputs, setting, random, scaled.scale if scaled else 1.0))
    found = partings(graph_module, *runs, names)
    script = ""
    first = next((p for p in found if p.kind == "output"), None)
    if first is not None:
        node = next(n for n in graph_module.graph.nodes if n.name == first.node)
        script = reproducer(node, runs, settings, folder)
    return Replay(settings, step, found, list(state_differences(*contents)), script)


def _names(graph_module, inputs, model):
    """placeholder -> the parameter, buffer or input that it stands for."""
    known = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]} if model is not None else {}
    holders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return {node.name: known.get(id(value), f"input {node.name}") for node, value in zip(holders, inputs, strict=True)}


def state_differences(a: dict | None, b: dict | None):
    """Lines that say in what two checkpoints differ, besides their step's tensors."""
    if a is None or b is None or a is b:
        return
    for key in sorted(a["settings"].keys() | b["settings"].keys()):
        if a["settings"].get(key) != b["settings"].get(key):
            yield f"settings: {key} {a['settings'].get(key)} -> {b['settings'].get(key)}"
    for key in ("contract", "torch", "step", "data", "loss_scale"):
        if a.get(key) != b.get(key):
            yield f"checkpoints: {key} {a.get(key)} -> {b.get(key)}"
    if not torch.equal(a["random"]["cpu"], b["random"]["cpu"]):
        yield "checkpoints: the state of PyTorch's generator differs"
    yield from _tensor_lines("weights", a["model"], b["model"])
    for place in a["optimizer"]["state"].keys() & b["optimizer"]["state"].keys():
        yield from _tensor_lines(f"optimizer, parameter {place}", a["optimizer"]["state"][place], b["optimizer"]["state"][place])
    for i, (one, other) in enumerate(zip(a["optimizer"]["param_groups"], b["optimizer"]["param_groups"], strict=False)):
        yield from (f"optimizer: {key} of group {i} {one[key]} -> {other.get(key)}" for key in one if key != "params" and one[key] != other.get(key))


def _tensor_lines(what, a, b):
    for name in a:
        if name in b and isinstance(a[name], torch.Tensor) and isinstance(b[name], torch.Tensor):
            try:
                difference = tensor_diff(a[name], b[name])
            except ValueError as error:
                difference = error
            if difference is not None:
                yield f"{what}: {name}: {difference}"


def default_settings(contents) -> tuple[Setting, Setting]:
    """Each run as it ran, by its checkpoint; without checkpoints, carbon and stock PyTorch."""
    if contents[0] is None or contents[0] is contents[1]:
        return Setting("carbon"), Setting("stock")
    return tuple(map(_as_it_ran, contents))


def _as_it_ran(content):
    precision = content["settings"]["float32_matmul_precision"]
    if content["ran"] == "carbon":
        return Setting("carbon", (("float32_matmul", "X2"),) if precision == "medium" else ())
    return Setting("stock", () if precision == "highest" else (("float32_matmul_precision", precision),))


def read_checkpoint(path) -> dict:
    """A checkpoint for a replay. ReplayError where there is none or it can't be read."""
    try:
        return checkpoint.load(path)
    except FileNotFoundError:
        raise ReplayError(f"there is no {path}") from None
    except (OSError, ValueError) as error:
        raise ReplayError(str(error)) from error

