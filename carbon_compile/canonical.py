"""The canonical text of a graph, and its hash: what must be equal on every device.

A line a node, in order: its operator, its arguments, and the type and size of its result. Left out
is what may differ without changing a bit: devices, strides, copies (which strides and devices decide
about), and the names of nodes and sizes.
"""

import hashlib
import re

_SYMBOL = re.compile(r"\b(?:[su]|zuf|zf)\d+\b")
_SYMBOLIC = ("SymInt", "SymFloat", "SymBool")


class _Writer:
    """Numbers nodes and sizes in order of appearance."""

    def __init__(self):
        self.nodes: dict = {}
        self.written = 0
        self.symbols: dict[str, str] = {}

    def size(self, value) -> str:
        """An int, or an expression of sizes with its symbols renamed."""
        return _SYMBOL.sub(lambda match: self.symbols.setdefault(match[0], f"n{len(self.symbols)}"), str(value))

    def value(self, value) -> str:
        kind = type(value).__name__
        if kind == "Node":
            return self.nodes[value]
        if kind in _SYMBOLIC:
            return self.size(value)
        if kind == "device":
            return "device"
        if kind.endswith("ScriptObject"):  # a process group: its text is an address
            return "object"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self.value(item)}" for key, item in sorted(value.items())) + "}"
        if isinstance(value, slice):
            return f"{self.value(value.start)}:{self.value(value.stop)}:{self.value(value.step)}"
        return repr(value) if isinstance(value, bool | int | float | str | None) else str(value)

    def result(self, value) -> str:
        """float32[2, n0] of a tensor, and so on through lists."""
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(self.size, value.shape))}]"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self.result, value))})"
        return self.value(value)


_COPIES = ("aten.clone.default", "aten.detach.default", "aten.alias.default")


def _changes_nothing(node) -> bool:
    """A copy, if need be to another device: same elements, same type. Graphs at this stage write to nothing
    that they go on to read."""
    if str(node.target) in _COPIES:
        return True
    if str(node.target) != "aten._to_copy.default":
        return False
    given, made = node.args[0].meta.get("val"), node.meta.get("val")
    return given is not None and made is not None and given.dtype == made.dtype


def graph_text(graph, value: str = "val") -> str:
    """The canonical text of an FX graph whose nodes carry `meta[value]`: "example_value" in Dynamo's."""
    writer = _Writer()
    lines = []
    for node in graph.nodes:
        if _changes_nothing(node):
            writer.nodes[node] = writer.nodes[node.args[0]]
        else:
            lines.append(_line(node, writer, graph.owning_module, value))
    return "\n".join(lines)


def graph_hash(graph) -> str:
    """The sha256 of the canonical text."""
    return hashlib.sha256(graph_text(graph).encode()).hexdigest()


def _line(node, writer, module, value):
    arguments = [writer.value(argument) for argument in node.args]
    arguments += [f"{name}={writer.value(value)}" for name, value in sorted(node.kwargs.items())]
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    writer.nodes[node] = f"%{writer.written}"
    writer.written += 1
    called = {"placeholder": "input", "get_attr": _constant(node, module)}.get(node.op) or _target(node)
    shown = "" if node.op == "placeholder" else f"({', '.join(arguments)})"
    return f"{writer.nodes[node]} = {called}{shown} -> {writer.result(node.meta.get(value))}"


def _target(node):
    target = node.target
    if isinstance(target, str):
        return target
    if hasattr(target, "_schema"):
        return str(target).replace("aten._unsafe_view.", "aten.view.")
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _constant(node, module):
    """A constant by its content, or a subgraph by its text: their names say nothing."""
    if node.op != "get_attr" or module is None:
        return "constant"
    value = module
    for part in node.target.split("."):
        value = getattr(value, part)
    if hasattr(value, "graph"):
        return f"graph {graph_hash(value.graph)}"
    if type(value).__name__ == "FakeTensor" or not hasattr(value, "dtype"):
        return "constant"
    from carbon_compile import host
    from carbon_compile.hashing import fingerprint

    with host.real_tensors():
        return f"constant {fingerprint(value)}"
