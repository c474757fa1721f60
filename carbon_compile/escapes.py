"""Work that would run where carbon doesn't see it: graph breaks, skipped frames, limits, stances.

Dynamo asks about every Python frame that it meets in a compiled call, and a `Watch`, one a compiled
function, listens: what Dynamo leaves to plain Python becomes a finding there and then, before that
Python runs, and is refused, warned of or allowed like any other.
"""

import contextlib
import os
import re
import sys
import sysconfig
import threading
import warnings
from dataclasses import replace

import torch

from . import dynamo, environment, host, recording
from .diagnostics import Diagnostic, Refused, Report
from .graph_lint import diagnose_break, diagnose_reason
from .location import is_torch, user_frame
from .options import Options
from .runlog import LOG


class Conversion:
    """One frame while Dynamo converts it.

    error: what ended the conversion, set by `dynamo.listen`. escaped: the code of what let the frame
    run uncompiled. suppressing, strict: the user's own settings for errors and for the recompile limit.
    """

    def __init__(self, watch, frame):
        self.watch, self.frame, self.error, self.escaped = watch, frame, None, ""
        self.name = dynamo.function_label(frame.f_code, frame.f_locals)
        self.suppressing = dynamo.setting("suppress_errors")
        self.strict = dynamo.setting("fail_on_recompile_limit_hit")
        self._breaks = len(dynamo.graph_breaks())
        self._settings = contextlib.ExitStack()
        for context in (host.lstm_states, dynamo.optimizers_unprofiled):
            self._settings.enter_context(context())
        self.set(**dynamo.unbroken_settings())

    def set(self, **settings):
        """Dynamo's settings for this conversion only."""
        self._settings.enter_context(dynamo.settings(**settings))

    def end(self):
        """Dynamo's settings are the user's again."""
        self._settings.close()

    def breaks(self):
        """Findings for the graph breaks that were met since this was asked last."""
        met = dynamo.graph_breaks()
        new, self._breaks = met[min(self._breaks, len(met)) :], len(met)
        # Dynamo traces a frame again after a break, and then notes it again.
        found = dict.fromkeys(map(diagnose_reason, new))
        return [self._placed(d) for d in found if d is not None]

    def skipped(self):
        """Findings for a frame that Dynamo leaves to Python although it may compute something."""
        if dynamo.is_unsupported(self.error):
            computes = dynamo.has_tensors(self.frame) and not _is_standard_library(self.frame.f_code.co_filename)
            computes = computes and not recording.is_only_ours(str(self.error), self.frame.f_locals.get("self"))
            return [self._placed(diagnose_break(self.error))] if computes else []
        module = self.frame.f_locals.get("self")
        if dynamo.setting("disable"):
            return environment.disabled_findings()
        if dynamo.in_dispatch_mode() and not dynamo.is_skipped_file(self.frame.f_code):
            return [self._here("CB607", "a torch dispatch mode is active")]
        if isinstance(module, torch.nn.Module) and self.frame.f_code.co_name == "forward" and any(p is not None for p in module._parameters.values()):
            return [self._here("CB607", "Dynamo skips its file")]
        return []

    def _placed(self, found):
        """A wrapper of Dynamo's is no place in the user's program: there, the function's name says more."""
        if found.file is None or not found.file.endswith("external_utils.py"):
            return found
        return replace(found, op=found.op and self.name, file=None, line=None, source_line="")

    def _here(self, code, detail):
        place, called_from = user_frame(dynamo.python_stack(self.frame))
        file, line, source = place or (None, None, "")
        return Diagnostic(code, detail, self.name, file, line, source, called_from=called_from)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def _is_standard_library(file):
    return file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file


class Listener:
    """What `dynamo.listen` tells of one compiled function; this one lets everything pass."""

    def begin(self, frame):
        return Conversion(self, frame)

    def failed(self, conversion, error):
        """Whether Dynamo shall try once more, by its own settings."""
        return False

    def done(self, conversion, result):
        pass

    def called(self, callback, chosen):
        """The callback under which a call runs: `callback`, or what a stance has `chosen` instead."""
        return chosen


# How Dynamo notes that the program itself raises, where it can't say with what.
_RAISES = re.compile(r"Observed exception|failed to find name|when making fake tensor call")


class LintListener(Listener):
    """Puts what Dynamo leaves to Python into a report.

    Python then goes on with fake tensors: what fails there next, on the same line or on none, is no news.
    """

    def __init__(self, report):
        self.report = report
        self.places = {}
        self.raising = []

    def done(self, conversion, result):
        for found in conversion.breaks() + (conversion.skipped() if result.guarded_code is None else []):
            self.raising.append(found) if _RAISES.search(found.detail) else self._add(found)

    def end(self, error=None):
        """The call is over. Raises the error if it is the program's own, and no consequence of a break."""
        if error is None:
            for found in self.raising:
                self._add(found)
        elif not dynamo.is_compilers(error) and not any(d.code != "CB607" for d in self.report):
            raise error
        else:
            self._add(diagnose_break(error))

    def _add(self, found):
        place = (found.file, found.line)
        first = self.places.setdefault(place, found)
        if first == found and (found.file is not None or len(self.places) == 1):
            self.report.add(found)


class Watch(Listener):
    """Keeps the promise of one compiled function, and counts its calls that run outside carbon."""

    def __init__(self, options: Options):
        self.policy = options.refusals()
        self.name = ""
        self.cause = ""
        self._thread = threading.local()

    def __getstate__(self):
        """Copies and pickles of a compiled model count for themselves."""
        return {name: value for name, value in self.__dict__.items() if name != "_thread"}

    def __setstate__(self, state):
        self.__dict__.update(state, _thread=threading.local())

    def begin(self, frame):
        conversion = Conversion(self, frame)
        if not self.name and not is_torch(frame.f_code.co_filename):
            self.name = conversion.name
        conversion.set(fail_on_recompile_limit_hit=True)
        if self.policy.decide(Diagnostic("CB603")) != "allow":
            conversion.set(suppress_errors=False)
        return conversion

    def failed(self, conversion, error):
        if not dynamo.is_recompile_limit(error):
            return False
        code = conversion.frame.f_code
        found = Diagnostic("CB602", str(error.__cause__ or "").partition("\n")[0], conversion.name, code.co_filename, code.co_firstlineno)
        self._judge([found], error)
        conversion.set(fail_on_recompile_limit_hit=conversion.strict)
        conversion.escaped = "CB602"
        return True

    def done(self, conversion, result):
        found = conversion.breaks()
        if result.guarded_code is None and not conversion.escaped:
            skipped = conversion.skipped()
            swallowed = conversion.error is not None and not dynamo.is_unsupported(conversion.error)
            conversion.escaped = "CB603" if swallowed else skipped[0].code if skipped else ""
            found += skipped
        self._judge(found)
        if conversion.escaped:
            self.name = self.name or conversion.name
            self.cause = conversion.escaped
            self._count()

    def _judge(self, found, error=None):
        report = Report(found, self.policy)
        if report.refused:
            raise Refused(report) from error
        announce(report)
        LOG.note(report)

    def called(self, callback, chosen):
        self._thread.counted = None
        stance = environment.stance_finding()
        if stance is None:
            if self.cause:
                self._count()
            return chosen
        self.name = self.name or dynamo.called_function()
        report = Report([stance], self.policy)
        if report.refused:
            return _refusing_callback(report, callback, chosen)
        announce(report)
        LOG.note(report)
        self.cause = "CB605"
        self._count()
        return chosen

    def _count(self):
        """Once something has escaped, each call counts as bypassed until a region of ours runs in it."""
        if getattr(self._thread, "counted", None) is None:
            self._thread.counted = LOG.bypass(self.name, self.cause)

    def ran(self):
        counted = getattr(self._thread, "counted", None)
        if counted is not None:
            counted.add(-1)
            self._thread.counted = None


def _refusing_callback(report, callback, chosen):
    """Raises where the stance would have let a frame run uncompiled."""

    def refuse(frame, *rest):
        raise Refused(report)

    if chosen is callback:  # guards are not looked at: what is compiled would run whether it fits or not
        raise Refused(report)
    if chosen is not None and environment.compiler_stance() != "default":
        # A stance that uses what is compiled already may go on using it.
        refuse._torchdynamo_orig_backend = callback
    return refuse


_announced: dict = {}


def announce(report):
    """One Python warning a finding that is only warned of, at the user's line."""
    for d in report.warned:
        file, line = (d.file, d.line) if d.file else _caller()
        warnings.warn_explicit(f"{d.code}: {d.message}", UserWarning, file, line, registry=_announced)


def _caller():
    place, _ = user_frame(dynamo.python_stack(sys._getframe()))
    return place[:2]


def surroundings(gm, devices):
    """Findings about where a graph is compiled: the breaks of its frame, and the process it runs in."""
    conversion = dynamo.conversion.get()
    if isinstance(conversion, Conversion):
        found = conversion.breaks() + ([Diagnostic("CB603")] if conversion.suppressing else [])
    else:
        found = [diagnose_reason(getattr(gm, "compile_subgraph_reason", None))]
    return [d for d in [*found, *environment.findings(devices), *wrappers()] if d is not None]


def wrappers():
    """Findings for what surrounds a running module and reduces its gradients by itself."""
    ddp = sys.modules.get("torch.nn.parallel.distributed")
    active = None if ddp is None else ddp.DistributedDataParallel._get_active_ddp_module()
    ours = sys.modules.get("carbon_compile.data_parallel")
    if active is not None and not (ours and ours.reduce_gradients in host.communication_hooks(active)):
        yield Diagnostic("CB502", op="DistributedDataParallel")


def watch(mode=None, options=None):
    """The watch for `torch.compile(..., backend="carbon")`; OptionError for a wrong option."""
    return Watch(Options.parse(mode, options))


def warn_if_disabled():
    """PyTorch looks a backend up even where it will never be called: the only moment to say so."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        found = Diagnostic("CB604", "TORCHDYNAMO_DISABLE=1")
        warnings.warn(f"{found.code}: {found.message}; nothing is compiled or promised", stacklevel=2)
