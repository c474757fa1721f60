"""What Dynamo calls: a counted region, or a refusal that stays final."""

import hashlib
import json
import os
import sys
from dataclasses import asdict

import torch

from . import dynamo, environment, host, tables
from .diagnostics import Diagnostic, Refused, Report
from .judge import Record
from .render import relative
from .runlog import LOG


class Region:
    """One compiled Dynamo graph: its policy, its findings, its verdicts and its entry in the log.

    report: every finding. graph_report: those that belong to the graph itself, and are thus kept for
    warm starts. record: the verdicts. stock: operators that the user allowed. keeps: whether digits of
    weights may be kept. kept: how many weights' digits are.
    """

    def __init__(self, gm, options, policy, version):
        self.options, self.policy = options, policy
        self.key = region_key(gm, options, version)
        conversion = dynamo.conversion.get()
        self.name = getattr(conversion, "name", None) or dynamo.compiled_function()
        self.watch = getattr(conversion, "watch", None)
        self.report = Report(policy=options.refusals())
        self.graph_report = Report(policy=options.refusals())
        self.entry = None
        self.record = None
        self.stock = set()
        self.keeps, self.kept = False, 0
        self.compiled = None

    def __call__(self, *args):
        if environment.subnormals_flushed():  # a call of set_flush_denormal takes effect at any time
            self.met(Diagnostic("CB302"))
        self.entry.called(args)
        if self.watch is not None:
            self.watch.ran()
        return self.compiled(*args)

    def met(self, found):
        """A finding about this call: refused before it runs, or kept for the certificate."""
        report = Report([found], self.report.policy)
        report.raise_if_refused()
        LOG.note(report)

    def raise_if_refused(self):
        if self.report.refused or self.graph_report.refused:
            raise Refused(self.everything())

    def everything(self):
        """The report of the surroundings and of the graph."""
        return Report([*self.report, *self.graph_report], self.report.policy)

    def dump(self, kind, text):
        """Write `text()` beside the other files of this region, where the user asked for it."""
        if self.options.dump:
            os.makedirs(self.options.dump, exist_ok=True)
            with open(os.path.join(self.options.dump, f"{self.key[:12]}.{kind}"), "w", encoding="utf-8") as file:
                file.write(text())

    def show(self):
        """The table of verdicts on standard error, where the user asked for it."""
        if self.options.table:
            kept = f", digits of {tables.counted(self.kept, 'weight')} kept" if self.kept else ""
            print(f"{self.name}: graph {self.record.graph[:12]}{kept}\n{self.table()}", file=sys.stderr)

    def table(self):
        rows = [asdict(row) for row in self.record.rows]
        return tables.nodes([row | {"file": row["file"] and relative(row["file"], os.getcwd())} for row in rows])

    @staticmethod
    def trains(inputs):
        """Whether there is a backward."""
        return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)

    def enter(self, inputs, report):
        """Put the region into the log that certificates are made of."""
        values = [v for v in inputs if isinstance(v, torch.Tensor)]
        self.entry = LOG.graph(
            self.record.graph,
            function=self.name,
            kind="training" if self.trains(inputs) else "inference",
            device=next((v.device.type for v in values if v.device.type != "cpu"), "cpu"),
            precision={k: getattr(self.policy, k) for k in ("float32", "bfloat16", "float16")},
            nodes=self.record.rows,
            report=report,
            parameters=values,
            kept=self.kept,
        )

    def remember(self, record):
        """Keep the verdicts beside Inductor's caches, whose hits skip our passes."""
        self.record = record
        path = self._path()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w") as file:
            json.dump(record.as_dict(), file)
        os.replace(temporary, path)

    def recall(self):
        """The verdicts of an earlier process for this very graph, or None."""
        try:
            with open(self._path()) as file:
                self.record = Record.of(json.load(file))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return self.record

    def _path(self):
        return os.path.join(host.cache_dir(), "carbon", self.key + ".json")


def region_key(gm, options, version):
    """sha256 of the Dynamo graph with its types, the options, and carbon's and PyTorch's versions."""
    parts = [version, torch.__version__, repr(options), gm.print_readable(print_output=False)]
    for name, child in gm.named_children():
        if isinstance(child, torch.fx.GraphModule):
            parts.append(name + child.print_readable(print_output=False))
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            parts.append(f"{node.name} {value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device} {value.requires_grad}")
    parts.append(str(torch.is_grad_enabled()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def refusing(report):
    """A callable that raises: unlike an exception at compile time, `suppress_errors` can't swallow it."""

    def refused(*args):
        raise Refused(report)

    return refused
