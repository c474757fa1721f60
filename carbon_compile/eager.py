"""`carbon_compile.enable`: eager code keeps the contract, from one seed, until it is switched off."""

import contextlib
import functools
import random
import threading

import torch

from . import backend, environment, escapes, host  # noqa: F401  (the backend puts the optimizers' formulas in place)
from .diagnostics import Report
from .lowering import registry
from .modes import Modes, Session, in_force
from .options import Options

_NUMPY_SEEDS = 2**32
_MATTERING = ("CB301", "CB302", "CB304")  # what about a process weakens the promise of eager code


def enable(seed=42, *, options=None):
    """Let eager code of this thread, and of threads that it starts, keep the contract.

    seed: seeds Python's `random`, NumPy where it is installed, and PyTorch; None leaves them alone.
    options: as for `torch.compile(..., backend="carbon", options=...)`; "table", "dump" and "inductor"
    have no meaning here. Takes effect at once. Ends with `disable()`, or with the `with` block whose
    context manager the result is; both bring back every setting and random state of before.

    An `enable` inside another one seeds anew and puts its own options in force until it ends.
    Raises OptionError for an unknown option, Refused where this process can't keep the contract.
    """
    enabled = Enabled(Options.parse(None, options))
    enabled.start(seed)
    return enabled


def disable():
    """End the latest `enable`; nothing happens where none is in force."""
    if _enabled:
        _enabled[-1].disable()


_enabled: list = []


class Enabled:
    """One `enable` in force, and what to restore when it ends."""

    def __init__(self, options):
        self.options = options
        self.thread = threading.get_ident()
        self.restore = contextlib.ExitStack()
        self.session = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.disable()

    def start(self, seed):
        if _enabled and not in_force():
            raise RuntimeError("carbon_compile.enable() is in force in another thread: enable it before that thread starts")
        registry.load()
        with contextlib.ExitStack() as undo:  # if anything fails, nothing has changed
            undo.enter_context(_settings())
            _check_process(self.options)
            if seed is not None:
                undo.enter_context(_seeded(seed))
            if _enabled:
                self.session = _enabled[-1].session
                undo.enter_context(self.session.using(self.options))
            else:
                self.session = Session(self.options)
                undo.callback(setattr, self.session, "on", False)
                undo.enter_context(_threads_join(self.session))
                undo.enter_context(Modes(self.session))
            self.restore = undo.pop_all()
        _enabled.append(self)

    def disable(self):
        """End this `enable` and those inside it; a second call does nothing.

        RuntimeError in another thread, or where another mode was entered since and not left.
        """
        if self not in _enabled:
            return
        if threading.get_ident() != self.thread:
            raise RuntimeError("carbon_compile.enable() ends in the thread that it started in")
        self.session.check_innermost()
        while self in _enabled:
            _enabled.pop().restore.close()


def _check_process(options):
    found = [d for d in environment.findings(("cpu",)) if d.code in _MATTERING]
    report = Report(found, options.refusals())
    report.raise_if_refused()
    escapes.announce(report)


@contextlib.contextmanager
def _settings():
    """Subnormals count; what the user allows to run as PyTorch's own is at least repeatable."""
    flushed, chosen = environment.subnormals_flushed(), host.cudnn_choices()
    torch.set_flush_denormal(False)
    host.set_cudnn_choices(benchmark=False, deterministic=True)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
        host.set_cudnn_choices(**chosen)


@contextlib.contextmanager
def _seeded(seed):
    """Random states of the whole process, seeded; afterwards they go on where they were."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = _numpy()
    numbers = numpy.random.get_state() if numpy else None
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy:
        numpy.random.seed(seed % _NUMPY_SEEDS)
    if gpus is not None:
        torch.cuda.manual_seed_all(seed)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy:
            numpy.random.set_state(numbers)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)


def _numpy():
    try:
        import numpy
    except ImportError:
        return None
    return numpy


@contextlib.contextmanager
def _threads_join(session):
    """Threads started meanwhile keep the contract too: modes belong to a thread, and none inherits them."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_under_modes(thread):
        run = thread.run

        @functools.wraps(run)
        def under_modes():
            with Modes(session):
                run()

        if in_force():
            thread.run = under_modes
        start(thread)

    threading.Thread.start = start_under_modes
    try:
        yield
    finally:
        if threading.Thread.start is start_under_modes:
            threading.Thread.start = start
