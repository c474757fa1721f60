"""A script that shows one node's difference on its own, to paste into a report."""

import operator
import os

import torch
from torch import fx

from . import host
from .bits import canonical_bits

_INLINE = 256  # elements that a script spells out; more go into a file beside it


def reproducer(node: fx.Node, runs, settings, folder: str | None = None) -> str:
    """The script for a node whose output differs between two runs (replay.Run) under two settings.

    Inputs are spelled out as bits, or saved into `folder` where there is one and they are many; where
    neither can be, the script is a comment that says so.
    """
    maker = producer(node, runs[0])
    inputs = [n for n in maker.all_input_nodes if any(n.name in kept for kept in (runs[0].inputs, runs[0].outputs))]
    names = {n: f"x{i}" for i, n in enumerate(inputs)}
    drawn = maker.name in runs[0].randoms
    values = [[_value(run, n) for n in inputs] for run in runs]
    large = drawn or sum(v.numel() for v in values[0]) > _INLINE
    if large and folder is None:
        return f"# the inputs of {node.name} are large: give --output FOLDER, which they are written to"
    lines = ["import operator", "", "import torch", "", "import carbon_compile", "from carbon_compile.replay import Setting", ""]
    if large:
        path = os.path.join(folder, f"{node.name}.pt")
        os.makedirs(folder, exist_ok=True)
        torch.save({"inputs": values, "random": [run.randoms.get(maker.name) for run in runs]}, path)
        lines += [f"saved = torch.load({path!r})"]
    lines += ["", f"def node({', '.join(names.values())}):", f"    return {_call(node, names)}", "", "results = []"]
    for i, setting in enumerate(settings):
        lines += _one(i, setting, names.values(), values[i], large, drawn)
    return "\n".join([*lines, "carbon_compile.assert_bitwise(*results)"]) + "\n"


def producer(node: fx.Node, run) -> fx.Node:
    """The operation behind a node: of an item of several results, the one that gave them all."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].name not in {**run.inputs, **run.outputs}:
        node = node.args[0]
    return node


def _one(i, setting, names, values, large, drawn):
    given = f"*saved['inputs'][{i}]" if large else ", ".join(names)
    spelled = [] if large else [f"{name} = {_spelled(v)}" for name, v in zip(names, values, strict=True)]
    seeded = [f"torch.set_rng_state(saved['random'][{i}])"] if drawn else []
    return [*spelled, *seeded, f"with Setting.parse({str(setting)!r}).in_force():", f"    results.append(node({given}))"]


def _value(run, node):
    return run.outputs[node.name] if node.name in run.outputs else run.inputs[node.name]


def _spelled(value):
    """An expression that makes the tensor, bit for bit."""
    bits = canonical_bits(value).cpu()
    text = f"torch.tensor({bits.reshape(-1).tolist()}, dtype={bits.dtype})"
    if bits.dtype is not value.dtype:
        text += f".view({value.dtype})"
    text += f".reshape({tuple(value.shape)})"
    return text + (f".to({str(value.device)!r})" if value.device.type != "cpu" else "")


def _call(node, names):
    arguments = [_argument(a, names) for a in node.args] + [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    name = host.qualified_name(node.target).replace("_operator.", "operator.").replace("torch._C._nn.", "torch.nn.functional.")
    return f"{name}({', '.join(arguments)})"


def _argument(value, names):
    if isinstance(value, fx.Node):
        return names[value] if value in names else _call(value, names)  # several results have no name of their own
    if isinstance(value, (tuple, list)):
        inside = ", ".join(_argument(v, names) for v in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
    if isinstance(value, slice):
        return f"slice({', '.join(_argument(v, names) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    return repr(value)
