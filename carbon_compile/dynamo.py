"""What carbon reads of Dynamo's private interfaces, and the three places where it listens.

Like host.py; checked on 2.11.0 and 2.13.0.
"""

import contextlib
import contextvars
import functools
import logging
import os
import re
import sys
import traceback
import types
import warnings
from unittest import mock

import torch

conversion = contextvars.ContextVar("carbon_conversion", default=None)
"""What the listener of the conversion in progress made of it, or None."""


def setting(name):
    """One of Dynamo's settings."""
    from torch._dynamo import config

    return getattr(config, name)


def settings(**values):
    """A context in which Dynamo's settings are these."""
    from torch._dynamo import config

    return config.patch(**values)


_MESSAGES = re.compile(r"(debug|info|warn|error|exception|critical|fatal|log)")


class _Functions(dict):
    """A set of functions that 2.11 can write into its log: as JSON it is an empty dict."""

    def items(self):
        return ()


def unbroken_settings():
    """Settings under which output breaks no graph: what is printed or warned of appears when the graph
    has run, and messages to loggers are dropped. Nor do recurrent layers, which have rules of ours."""
    from torch._dynamo import config

    loggers = {f for owner in (logging, logging.Logger) for name, f in vars(owner).items() if callable(f) and _MESSAGES.match(name)}
    return {
        "reorderable_logging_functions": config.reorderable_logging_functions | {print, warnings.warn},
        "allow_rnn": True,
        "ignore_logging_functions": _Functions.fromkeys([*config.ignore_logging_functions, *loggers]),
    }


@contextlib.contextmanager
def optimizers_unprofiled():
    """Dynamo leaves out the profiler's range around an optimizer's step and `zero_grad` without a warning:
    a range that a user opens is another matter."""
    from torch._dynamo import config
    from torch._dynamo.variables.ctx_manager import (
        ProfilerRecordFunctionContextVariable as Range,
    )

    plain = Range.create

    def create(func, record_args, record_kwargs, **keywords):
        name = record_args[0] if record_args else None
        theirs = name is not None and name.is_python_constant() and str(name.as_python_constant()).startswith(_RANGES)
        if theirs and not config.capture_profiler_record_function:
            return Range(**keywords)
        return plain(func, record_args, record_kwargs, **keywords)

    with mock.patch.object(Range, "create", staticmethod(create)):
        yield


_RANGES = ("Optimizer.step#", "Optimizer.zero_grad#")


def graph_breaks():
    """Dynamo's notes of the graph breaks since its last reset, oldest first."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def is_unsupported(error):
    """Whether a frame was left to Python because of something that Dynamo can't follow."""
    from torch._dynamo.exc import Unsupported, UserError

    return isinstance(error, (Unsupported, UserError))


def is_compilers(error):
    """Whether an exception comes from compiling or from fake tensors, and not from the program itself."""
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    fakes = (
        fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException,
    )  # fmt: skip
    return isinstance(error, (TorchDynamoException, GuardOnDataDependentSymNode, *fakes)) and not isinstance(error, TorchRuntimeError)


def uncompiled(fn):
    """What was given to torch.compile, of what came back."""
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    return fn._orig_mod if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule) else fn


def is_recompile_limit(error):
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def has_tensors(frame):
    """Whether Dynamo thinks that the frame may compute with tensors."""
    from torch._dynamo.convert_frame import has_tensor_in_frame

    return has_tensor_in_frame(frame)


def is_skipped_file(code):
    from torch._dynamo import trace_rules

    return trace_rules.check(code)


def in_dispatch_mode():
    """Whether a torch dispatch mode is active under which Dynamo compiles nothing."""
    from torch._dynamo import config, convert_frame

    if config.inline_torch_dispatch_torch_compile:
        return convert_frame.any_torch_dispatch_mode_on_stack()
    return convert_frame.is_in_any_mode_without_ignore_compile_internals()


def python_stack(frame):
    """(file, line, source) of a frame and its callers, outermost first."""
    summary = traceback.StackSummary.extract([(f, f.f_lineno) for f in _callers(frame)])
    return [(entry.filename, entry.lineno, entry.line or "") for entry in summary]


def _callers(frame):
    found = []
    while frame is not None:
        found.insert(0, frame)
        frame = frame.f_back
    return found


def function_label(code, names):
    """A function as its user knows it, "Net.forward (model.py:12)", by its code and local names.

    A module of torch.nn that is compiled itself runs in a wrapper of Dynamo's, whose `fn` is its method.
    """
    function = names.get("fn")
    if code.co_name == "inner" and code.co_filename.endswith("external_utils.py") and callable(function):
        return label(function)
    return _labelled(code, names.get("self"))


def label(function):
    """`function_label` of a function, method or module."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", type(function).__qualname__)
    return _labelled(code, getattr(function, "__self__", None))


def _labelled(code, owner):
    name = code.co_name
    if isinstance(owner, torch.nn.Module):
        name = type(owner).__qualname__ if name in ("_call_impl", "_wrapped_call_impl") else f"{type(owner).__qualname__}.{name}"
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def compiled_function():
    """Label of the frame that Dynamo is compiling; "" outside of Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        code = InstructionTranslator.current_tx().f_code
    except AttributeError:
        return ""
    return _labelled(code, None)


def called_function():
    """Label of the function whose compiled form is being called."""
    frame = sys._getframe()
    while frame is not None and "fn" not in frame.f_locals:
        frame = frame.f_back
    return label(frame.f_locals["fn"]) if frame is not None else ""


def listener_of(callback):
    """The listener of a callback of Dynamo's: what its backend's `listener` attribute makes of the
    backend's keywords. None for a backend without one."""
    known = callback.__dict__.get("carbon_listener", callback)
    if known is not callback:
        return known
    backend = callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    keywords = getattr(backend, "kwargs", None) or {}
    backend = getattr(backend, "compiler_fn", backend)
    while isinstance(backend, functools.partial) and not hasattr(backend, "listener"):
        keywords, backend = {**backend.keywords, **keywords}, backend.func
    listen = getattr(backend, "listener", None)
    callback.carbon_listener = listen(**keywords) if listen is not None else None
    return callback.carbon_listener


def stand_aside():
    """Whether functions compiled by other backends run as they are written."""
    return False


@functools.cache
def listen():
    """Tell the listeners of compiled functions (see escapes.Listener) what Dynamo does with each frame
    that it meets, what ends a conversion, and which callback a call runs under."""
    from torch._dynamo import convert_frame, eval_frame

    convert, trace, choose = convert_frame.CatchErrorsWrapper.__call__, convert_frame.ConvertFrameAssert.__call__, eval_frame._callback_from_stance

    def listening_convert(self, frame, *rest):
        listener = listener_of(self)
        if listener is None:
            return convert(self, frame, *rest)
        begun = listener.begin(frame)
        token = conversion.set(begun)
        try:
            try:
                result = convert(self, frame, *rest)
            except Exception as error:
                if not listener.failed(begun, error):
                    raise
                result = convert(self, frame, *rest)
            listener.done(begun, result)
        finally:
            conversion.reset(token)
            begun.end()
        return result

    def listening_trace(self, frame, *rest, **keywords):
        try:
            return trace(self, frame, *rest, **keywords)
        except Exception as error:
            if conversion.get() is not None:
                conversion.get().error = error
            raise

    def listening_choose(callback):
        chosen = choose(callback)
        if not isinstance(callback, convert_frame.CatchErrorsWrapper):
            return chosen
        listener = callback.__dict__.get("carbon_listener") if chosen is callback else listener_of(callback)
        if listener is None and stand_aside() and listener_of(callback) is None:
            return None
        return chosen if listener is None else listener.called(callback, chosen)

    # Dynamo looks for its caller by skipping frames of files that are called so.
    for function in (listening_convert, listening_trace):
        function.__code__ = function.__code__.replace(co_filename="<carbon in torch/_dynamo/convert_frame.py>")
    convert_frame.CatchErrorsWrapper.__call__ = listening_convert
    convert_frame.ConvertFrameAssert.__call__ = listening_trace
    eval_frame._callback_from_stance = listening_choose


@functools.cache
def around_calls(context, eager):
    """Run every call of a function that carbon compiled inside `context()`, and so its compilation.

    Where `eager()` says so, functions of other backends run as they are written: under a mode Dynamo
    would skip their frames, and remember that for every backend. Not done by Dynamo's own
    `enter_exit_hooks`: 2.13 puts the dispatch keys back after it has called these.
    """
    global stand_aside
    stand_aside = eager
    from torch._dynamo import eval_frame

    wrap = eval_frame._TorchDynamoContext.__call__

    def listening_wrap(self, function):
        wrapped = wrap(self, function)
        callback = getattr(self, "callback", None)
        if not isinstance(wrapped, types.FunctionType) or not hasattr(callback, "__dict__"):
            return wrapped

        @functools.wraps(wrapped)
        def called(*args, **keywords):
            if listener_of(callback) is None:
                return function(*args, **keywords) if eager() else wrapped(*args, **keywords)
            with context():
                return wrapped(*args, **keywords)

        called._torchdynamo_wrapper_id = id(called)
        eval_frame.skip_code(called.__code__)
        return called

    eval_frame._TorchDynamoContext.__call__ = listening_wrap
