"""Where in the user's program a graph node comes from."""

import linecache
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_FRAME = re.compile(r'\s*File "(.+)", line (\d+)(?:, in (.*))?')
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Location:
    """called_from: the nearest line outside installed packages, where the finding is inside one."""

    file: str | None = None
    line: int | None = None
    source_line: str = ""
    module_path: str = ""
    direction: str = "forward"
    node: str = ""
    called_from: tuple[str, int] | None = None


def _own_directories():
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(here)
    return tuple(path + os.sep for path in (here, os.path.join(root, "lowering"), os.path.join(root, "templates")))


_OWN = _own_directories()


def is_torch(path):
    torch = sys.modules.get("torch")
    home = getattr(torch, "__file__", None)
    return home is not None and path.startswith(os.path.dirname(home) + os.sep)


def _is_user(path):
    generated = path.startswith(("<eval_with_key", "<frozen", "<string"))
    return not (generated or is_torch(path) or path.startswith(_OWN))


@lru_cache(maxsize=4096)
def stack_frames(stack_trace: str) -> tuple[tuple[str, int, str], ...]:
    """(file, line, source line) of a formatted stack, outermost first."""
    frames: list[tuple[str, int, str]] = []
    for text in stack_trace.splitlines():
        match = _FRAME.match(text)
        if match:
            frames.append((match[1], int(match[2]), ""))
        elif frames and not frames[-1][2] and text.strip().strip("^~"):
            frames[-1] = (*frames[-1][:2], text.strip())
    return tuple((file, line, source or linecache.getline(file, line).strip()) for file, line, source in frames)


def user_frame(frames: Sequence[tuple[str, int, str]]):
    """(frame, called_from): the innermost frame of the user's, and the nearest editable one.

    Frames of PyTorch and of this package are skipped, unless there is nothing else, as when an
    optimizer's step is compiled on its own.
    """
    users = [frame for frame in frames if _is_user(frame[0])]
    users = users or [frame for frame in frames if not is_torch(frame[0])] or frames
    if not users:
        return None, None
    innermost = users[-1]
    editable = [frame for frame in users if not _INSTALLED.search(frame[0])]
    outside = editable[-1] if editable and _INSTALLED.search(innermost[0]) else None
    return innermost, outside and outside[:2]


def clean_module_path(path: str) -> str:
    """"layers.3.router" of Dynamo's "L['self'].layers.3.router"; "" for the outermost module.

    A module of torch.nn that is compiled itself, such as a Sequential, is called L['fn'] there.
    """
    path = re.sub(r"\._modules\['([^']+)'\]", r".\1", path)
    path = re.sub(r"^[LG]\['([^']+)'\]", r"\1", path)
    path = re.sub(r"@\d+", "", path).replace("_orig_mod.", "")
    return re.sub(r"^(?:self|fn)(?:\.|$)", "", path)


def _module_path(meta):
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    innermost = list(stack.values())[-1]
    return clean_module_path(innermost if isinstance(innermost, str) else innermost[0])


def _direction(meta):
    backward = meta.get("autograd_backward") or "backward" in str(meta.get("partitioner_tag", ""))
    return "backward" if backward else "forward"


def _stack_trace(node, depth=4):
    """The node's stack, or that of the nearest neighbour: nodes that passes insert have none."""
    ring, seen = [node], {node}
    for _ in range(depth):
        for near in ring:
            if near.meta.get("stack_trace"):
                return near.meta["stack_trace"]
        ring = [n for near in ring for n in (*near.users, *near.all_input_nodes) if n not in seen]
        seen.update(ring)
    return ""


def locate(node) -> Location:
    """Where an FX node comes from: the user's line, module path and direction, from its meta."""
    frame, called_from = user_frame(stack_frames(_stack_trace(node)))
    file, line, source = frame or (None, None, "")
    return Location(file, line, source, _module_path(node.meta), _direction(node.meta), node.name, called_from)


def operator_name(node) -> str:
    """How a node's operator is called in reports: "aten.index_add", "torch.fft.fft", "Tensor.item"."""
    target = node.target
    if node.op == "call_method":
        return f"Tensor.{target}"
    if isinstance(target, str):
        return target
    if hasattr(target, "_schema") or hasattr(target, "overloads"):
        return str(target).removesuffix(".default")
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", str(target))
    return f"{module}.{name}" if module.startswith("torch") else name


def lines(graphs):
    """(file, line) of every frame behind the nodes of graph modules."""
    for gm in graphs:
        for node in gm.graph.nodes:
            for file, line, _ in stack_frames(node.meta.get("stack_trace") or ""):
                yield file, line
