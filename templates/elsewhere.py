"""Triton kernels compiled in other processes.

Compiling holds Python's lock for a good part, and so would hold up whoever traces and schedules
meanwhile. Another process leaves the kernel in Triton's cache on disk; here it is only loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

_PATIENCE = 120.0  # seconds, for a process that has died


class Elsewhere(Executor):
    """For Triton's `AsyncCompileMode`: a pool of processes compiles, threads wait and load.

    What can't be compiled there, or failed there, is compiled by its thread.
    """

    def __init__(self, threads: Executor, processes: Executor):
        self.threads, self.processes, self.settings = threads, processes, _triton_settings()

    def submit(self, compile: Callable) -> Future:
        job = _job(compile)
        compiled = None if job is None else self.processes.submit(compile_kernel, self.settings, *job)

        def load():
            if compiled is not None:
                wait([compiled], _PATIENCE)
            return compile()

        return self.threads.submit(load)


def _job(compile):
    """What `compile_kernel` needs of a closure of Triton's, or None. Checked on Triton 3.6."""
    found = inspect.getclosurevars(compile).nonlocals
    try:
        source, target, options = found["src"], found["target"], found["options"]
        environment, kernel = found["env_vars"], source.fn
        place = (kernel.__module__, kernel.__name__)
        if getattr(importlib.import_module(place[0]), place[1]) is not kernel:
            return None
    except (KeyError, AttributeError, ImportError):
        return None
    given = (source.signature, source.constants, source.attrs)
    return type(source), place, given, target, dict(options.__dict__), environment


def compile_kernel(settings, kind, place, given, target, options, environment) -> None:
    """Compile one kernel and the C function that launches it into Triton's cache, as a process with these
    settings of Triton's would."""
    from triton.compiler.compiler import compile, get_cache_invalidating_env_vars

    with _settings_of_another(settings):
        if get_cache_invalidating_env_vars() == environment:
            kernel = getattr(importlib.import_module(place[0]), place[1])
            compiled = compile(kind(kernel, *given), target=target, options=options, _env_vars=environment)
            _build_launcher(compiled)


def _build_launcher(compiled) -> None:
    """Let a C compiler build a kernel's launcher, for which its first launch would wait: a matter of half a
    second each. Checked on Triton 3.6; where another version does it otherwise, the launch does it."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def _triton_settings():
    return {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}


@contextlib.contextmanager
def _settings_of_another(settings):
    """Triton finds its cache and ptxas by the environment, and keeps the version of the latter."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    own = _triton_settings()
    _exchange(own, settings)
    get_ptxas_version.cache_clear()
    try:
        yield
    finally:
        _exchange(_triton_settings(), own)
        get_ptxas_version.cache_clear()


def _exchange(old, new):
    for name in old:
        del os.environ[name]
    os.environ.update(new)
