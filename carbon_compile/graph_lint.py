"""The graph lint's outer part: finds what to lint, and says what Dynamo's own errors mean.

The module isn't called `lint`, because importing it would hide the function `carbon_compile.lint`.
"""

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from carbon_compile.diagnostics import Diagnostic, Policy, Report
from carbon_compile.location import stack_frames, user_frame


class TargetError(Exception):
    """A target that can't be linted; reads as one line, with the exception behind it as its cause."""


def lint(
    fn: Callable,
    *args,
    kwargs: dict | None = None,
    backward: bool | None = None,
    device: str | None = None,
    policy: Policy | None = None,
) -> Report:
    """Judge a module or function as `backend="carbon"` would, without running it.

    args, kwargs: example inputs, of which only types and sizes matter. backward: whether to judge
    the backward too; None means where an input or parameter requires a gradient. device: "cpu" or
    "cuda" to judge as if everything were there. policy: what to do about findings.
    """
    from carbon_compile.backend import analyze

    return analyze(fn, args, kwargs=kwargs or {}, backward=backward, device=device, policy=policy or Policy())


# --- package.module:make


def is_graph_target(target: str) -> bool:
    """Whether a command-line target names a factory ("package.module:make") and not a path."""
    module, colon, factory = target.partition(":")
    return bool(colon) and not os.path.exists(target) and _is_dotted(module) and _is_dotted(factory)


def _is_dotted(name):
    return bool(name) and all(part.isidentifier() for part in name.split("."))


def load_target(target: str) -> tuple[Callable, tuple]:
    """The (module or function, args) that the factory "package.module:make" returns.

    TargetError, in one line, for a module that can't be imported, a name it doesn't have, a factory
    that raises, and a return value of another shape.
    """
    return _checked(target, made_by(target))


def made_by(target: str):
    """What the factory "package.module:make" returns. TargetError as for `load_target`."""
    module_name, _, factory_name = target.partition(":")
    value = _import(module_name)
    for name in factory_name.split("."):
        value = _attribute(value, name, module_name)
    if not callable(value):
        raise TargetError(f"{target} is a {type(value).__name__}, not a function that returns (module, args)")
    return _call(target, value)


def _import(name):
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, which a console script doesn't
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        where = "" if missing == name else f", which {name} imports"
        raise TargetError(f"no module named {missing!r}{where}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"importing {name} raised {told(error)}") from error


def _attribute(value, name, module_name):
    try:
        return getattr(value, name)
    except AttributeError as error:
        near = difflib.get_close_matches(name, dir(value), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TargetError(f"{module_name} has no {name!r}{hint}") from error


def _call(target, factory):
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target}() raised {told(error)}") from error


def _checked(target, made):
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], list | tuple):
        return made[0], tuple(made[1])
    shape = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
    if isinstance(made, tuple) and len(made) == 2:
        shape = f"({type(made[0]).__name__}, {type(made[1]).__name__})"
    raise TargetError(f"{target}() must return (module or function, tuple of inputs), not {shape}")


def told(error: BaseException) -> str:
    """An exception on one line; Dynamo's about a program that can't run, as PyTorch would have said it."""
    inner = re.search(r": got (\w+)\((['\"])(.*)\2\)", str(error)) if type(error).__name__ == "TorchRuntimeError" else None
    if inner:
        return f"{inner[1]}: {inner[3]}"
    first = (str(error).strip() or "nothing more").splitlines()[0]
    return f"{type(error).__name__}: {first}"


# --- graph breaks

# What Dynamo says, looked for in this order in its message and in the user's line, and what it is.
_CAUSES = (
    (re.compile(r"RNN, GRU, or LSTM|pack(ed)?(_padded)?_sequence|_VF\.(lstm|gru|rnn_tanh|rnn_relu)"), "CB107"),
    (re.compile(r"\(Generator\)|torch\.Generator"), "CB403"),
    (re.compile(r"sparse Tensor", re.I), "CB108"),
    (re.compile(r"resize_|\.set_\b"), "CB608"),
    (re.compile(r"\b(?:np|numpy)\.random\.|\bRandom\.\w+|\brandom\.\w+\("), "CB401"),
    (re.compile(r"manual_seed|torch\.seed"), "CB404"),
    (re.compile(r"\.item\(\)|_local_scalar_dense|tolist|data-dependent (?:branching|expression|jump)|generic_jump .*(?:Tensor|SymNode)", re.I), "CB612"),
    (re.compile(r"data.dependent operator|dynamic shape operator|dynamic output shape", re.I), "CB606"),
)


# Breaks at which nothing is computed outside a graph: backward() runs the graphs that were compiled
# with their forward, and an optimizer's step stops once to switch gradients off. A learning-rate
# scheduler wraps the step in a function that Dynamo leaves to Python; what it calls is compiled. What
# is printed or logged doesn't come back.
_HARMLESS = (
    re.compile(r"logging\.Logger method|builtin operator `print`|`_?warnings\.warn`"),
    re.compile(r"Unsupported Tensor\.backward\(\)|torch\.autograd\.grad"),
    re.compile(r"`Optimizer\.zero_grad`"),
    re.compile(r"the function `\w+\.step` in file `[^`]*torch[/\\]optim[/\\]"),
)
# Libraries whose code Dynamo may enter before it gives up: the call that led there is what matters.
_LIBRARIES = (
    (re.compile(r"torch[/\\]distributed[/\\]fsdp[/\\]"), "CB502", "fully_shard"),
    (re.compile(r"torch[/\\]nn[/\\]parallel[/\\]"), "CB502", "DistributedDataParallel"),
    (re.compile(r"[/\\]triton[/\\](?:runtime|compiler|backends)[/\\]"), "CB611", ""),
)
_HARMLESS_FILES = re.compile(r"torch[/\\]optim[/\\]optimizer\.py$|[/\\]logging[/\\]__init__\.py$|[/\\]warnings\.py$")


def diagnose_break(error: BaseException) -> Diagnostic:
    """The finding for an exception that ends a compilation: Dynamo's own (Unsupported, UserError,
    recompile limit …), or a backend's, which is our bug unless a size depends on values."""
    name = type(error).__name__
    if name == "FailOnRecompileLimitHit":
        return Diagnostic("CB602")
    if name == "BackendCompilerFailed":
        return _backend_failure(error.inner_exception)
    frames = [(frame.filename, frame.lineno, frame.line or "") for frame in getattr(error, "real_stack", None) or ()]
    text = getattr(error, "msg", None) or str(error)
    return _break_at(text, frames or stack_frames(str(error)))


def _backend_failure(error):
    if type(error).__name__ != "GuardOnDataDependentSymNode":
        return Diagnostic("CB902", told(error), "backend")
    found = _break_at(str(error), stack_frames(str(error)))
    return replace(found, code="CB606", op=found.op or "a result")


def diagnose_reason(reason) -> Diagnostic | None:
    """The finding for `gm.compile_subgraph_reason`, Dynamo's note of why a graph ends where it does;
    None where it ends because the function does, or where Python then computes nothing."""
    if reason is None or not reason.graph_break or any(pattern.search(reason.reason) for pattern in _HARMLESS):
        return None
    if reason.user_stack and _HARMLESS_FILES.search(reason.user_stack[-1].filename):
        return None
    frames = [(frame.filename, frame.lineno, frame.line or "") for frame in reason.user_stack]
    return _break_at(reason.reason, frames)


def _break_at(text: str, frames: Iterable[tuple[str, int, str]]) -> Diagnostic:
    frames, code, op = _library_call(list(frames))
    frame, called_from = user_frame(frames)
    file, line, source = frame or (None, None, "")
    if not code:
        shown = f"{text}\n{source}"
        code = next((code for pattern, code in _CAUSES if pattern.search(shown)), "CB601")
    detail = text.strip().partition("\n")[0].strip()
    if detail == "step_unsupported":
        detail = "Dynamo can't resume after this line, so the rest of the function runs in Python"
    op = op or ("" if code == "CB601" else _named(text) or _called(source))
    return Diagnostic(code, detail, op, file, line, source.strip(), called_from=called_from)


def _library_call(frames):
    """(frames up to the call into a library of _LIBRARIES, code, operator); the code is "" elsewhere."""
    for i, frame in enumerate(frames):
        for pattern, code, op in _LIBRARIES:
            if pattern.search(frame[0]):
                return frames[:i] or frames, code, op
    return frames, "", ""


def _named(text):
    """The operator that Dynamo's message names: "aten.nonzero" or "Tensor.item"."""
    named = re.search(r"debug context: (aten\.[\w.]+)", text) or re.match(r"(?:Unsupported )?(Tensor\.\w+)\(\)", text)
    return named[1].removesuffix(".default") if named else ""


def _called(source):
    """The call that a source line is about, as far as one can see: its last `name(` or `name[grid](`."""
    calls = re.findall(r"([A-Za-z_][\w.]*)\s*(?:\[[^\]]*\])?\(", source)
    return calls[-1] if calls else ""
