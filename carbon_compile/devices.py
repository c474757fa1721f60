"""Whether a function has one graph on every device: traced as if on a CPU and as if on CUDA, and compared."""

import contextlib
import logging

import torch

from . import host
from .canonical import graph_text
from .diagnostics import Diagnostic
from .graph_lint import told

log = logging.getLogger(__name__)


def findings(trace, backward=None):
    """CB306 where the user's code takes another path on CUDA, CB903 where only our canonical graph does.

    trace: `analyze.trace` with its function and inputs. Without a GPU, PyTorch can't differentiate on
    CUDA, not even in a trace: then the forward is compared.
    """
    backward = backward if torch.cuda.is_available() else False
    on_cpu = trace(backward=backward, device="cpu")
    if not torch.cuda.is_available() and any(map(_differentiates, on_cpu)):
        return []
    try:
        with contextlib.nullcontext() if torch.cuda.is_available() else host.pretend_cuda():
            on_cuda = trace(backward=backward, device="cuda")
    except RuntimeError as error:
        if torch.cuda.is_available():
            return [Diagnostic("CB306", f"on CUDA it raised {told(error)}")]
        log.warning("the graphs of CPU and CUDA were not compared, which here needs a GPU: %s", told(error))
        return []
    except Exception as error:
        return [Diagnostic("CB306", f"on CUDA it raised {told(error)}")]
    found = [_difference(*pair) for pair in zip(on_cpu, on_cuda, strict=False)]
    if len(on_cpu) != len(on_cuda):
        found.append(Diagnostic("CB306", f"{len(on_cuda)} graphs on CUDA, {len(on_cpu)} on a CPU"))
    return [f for f in found if f is not None][:1]


def _differentiates(traced):
    """Whether a graph takes derivatives itself, which needs a GPU even in a trace."""
    gm, _ = traced
    return any("grad" in str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def _difference(on_cpu, on_cuda):
    (gm, joint), (other_gm, other_joint) = on_cpu, on_cuda
    lines, others = (graph_text(g.graph, "example_value").splitlines() for g in (gm, other_gm))
    at = _first_difference(lines, others)
    if at is not None:
        node = list(other_gm.graph.nodes)[min(at, len(others) - 1)]
        return Diagnostic.of("CB306", node, detail=_told(lines, others, at))
    lines, others = joint.splitlines(), other_joint.splitlines()
    at = _first_difference(lines, others)
    return None if at is None else Diagnostic("CB903", _told(lines, others, at))


def _first_difference(lines, others):
    if lines == others:
        return None
    same = [a == b for a, b in zip(lines, others, strict=False)]
    return same.index(False) if False in same else len(same)


def _told(lines, others, at):
    a, b = (part[at] if at < len(part) else "the end" for part in (lines, others))
    return f"{b} on CUDA, {a} on a CPU"
