"""What a diagnostic is, and what becomes of one: refused, warned of, or allowed.

Needs no torch, so that the source lint and `carbon-compile explain` start at once.
"""

import difflib
import json
import linecache
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property

from carbon_compile.allow import Allow, allow_at, allows_of_file
from carbon_compile.codes import CODES, Code, find_code, find_codes
from carbon_compile.location import Location, locate, operator_name

__all__ = [
    "CODES",
    "ON_UNSAFE",
    "Code",
    "Diagnostic",
    "Finding",
    "Location",
    "Policy",
    "Refused",
    "Report",
    "comment_finding",
    "find_code",
    "find_codes",
    "locate",
    "operator_name",
    "unused_codes",
]

ON_UNSAFE = ("refuse", "warn", "allow")


@dataclass(frozen=True)
class Diagnostic:
    """One finding. ValueError for a code that isn't in the table.

    op: the operator or call, as the user would write it. detail: what is particular to this
    finding. file, line, source_line: the user's. module_path: "layers.3.router". direction:
    "forward" or "backward". node: the graph node's name. called_from: see Location.
    """

    code: str
    detail: str = ""
    op: str = ""
    file: str | None = None
    line: int | None = None
    source_line: str = ""
    module_path: str = ""
    direction: str = "forward"
    node: str = ""
    called_from: tuple[str, int] | None = None

    def __post_init__(self):
        object.__setattr__(self, "code", find_code(self.code).id)

    @classmethod
    def of(cls, code: str, node, detail: str = "", op: str | None = None) -> "Diagnostic":
        """The finding `code` at an FX node, with all that `locate` knows of it."""
        where = locate(node)
        place = {field.name: getattr(where, field.name) for field in fields(where)}
        return cls(code, detail, operator_name(node) if op is None else op, **place)

    @property
    def kind(self) -> Code:
        return CODES[self.code]

    @property
    def message(self) -> str:
        return self.kind.message.format(op=self.op or "this operation", detail=self.detail or "this")

    @property
    def note(self) -> str:
        """The detail, where the message doesn't already say it."""
        return "" if "{detail}" in self.kind.message else self.detail

    def _order(self):
        return (self.file or "", self.line or 0, self.code, self.op, self.direction, self.module_path, self.detail)


@dataclass(frozen=True)
class Policy:
    """What to do about findings: one vocabulary for options, comments, command line and reports.

    on_unsafe: "refuse", "warn" or "allow", for findings that nothing else allows. allow: codes
    (ids or names). ValueError for an unknown word, an unknown code, or one that nobody may allow.
    """

    on_unsafe: str = "refuse"
    allow: frozenset = frozenset()

    def __post_init__(self):
        if self.on_unsafe not in ON_UNSAFE:
            near = difflib.get_close_matches(str(self.on_unsafe), ON_UNSAFE, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"on_unsafe must be one of {', '.join(ON_UNSAFE)}, not {self.on_unsafe!r}{hint}")
        given = (self.allow,) if isinstance(self.allow, str) else self.allow
        allowed = [find_code(code) for text in given for code in text.split(",")]
        for code in allowed:
            if not code.allowable:
                raise ValueError(f"{code.id} can't be allowed: it is a bug of carbon's, please report it")
        object.__setattr__(self, "allow", frozenset(code.id for code in allowed))

    def inline(self, diagnostic: Diagnostic) -> tuple[str, Allow] | None:
        """The comment for a finding, with its file: at the user's line, or where that is inside an
        installed package, at the line that calls it."""
        for file, line in _places(diagnostic):
            found = allow_at(file, line, diagnostic.code)
            if found is not None:
                return file, found
        return None

    def decide(self, diagnostic: Diagnostic) -> str:
        """"refuse", "warn" or "allow"."""
        return self.judge(diagnostic)[0]

    def judge(self, diagnostic: Diagnostic) -> tuple[str, str]:
        """The decision, and the reason where the user allowed it."""
        if not diagnostic.kind.allowable:
            return "refuse", ""
        if diagnostic.code in self.allow:
            return "allow", f"allow={diagnostic.code}"
        _, comment = self.inline(diagnostic) or (None, None)
        if comment is not None and comment.reason:
            return "allow", comment.reason
        if self.on_unsafe == "allow":
            return "allow", "on_unsafe=allow"
        warned = self.on_unsafe == "warn" or diagnostic.kind.severity == "warning"
        return ("warn" if warned else "refuse"), ""


@dataclass(frozen=True)
class Finding:
    """A diagnostic, how often it was met, what was decided, and the user's reason for an allow."""

    diagnostic: Diagnostic
    decision: str
    reason: str = ""
    count: int = 1


class Report:
    """Findings, sorted by place and without duplicates, each with its decision."""

    def __init__(self, diagnostics: Iterable[Diagnostic] = (), policy: Policy | None = None):
        self.policy = policy or Policy()
        self._seen: dict[Diagnostic, tuple[Diagnostic, int]] = {}
        self.extend(diagnostics)

    def add(self, diagnostic: Diagnostic, count: int = 1) -> None:
        # Two nodes on one line, or one node in two compilations, are one finding met twice.
        key = replace(diagnostic, node="")
        first, met = self._seen.get(key, (diagnostic, 0))
        self._seen[key] = first, met + count
        self.__dict__.pop("findings", None)
        if not met:
            self._report_comment_without_reason(diagnostic)

    def extend(self, diagnostics: "Iterable[Diagnostic] | Report") -> None:
        for diagnostic in diagnostics:
            self.add(diagnostic)

    def _report_comment_without_reason(self, diagnostic):
        file, comment = self.policy.inline(diagnostic) or (None, None)
        if comment is not None and not comment.reason:
            self.add(comment_finding("CB002", file, comment.line, ", ".join(comment.codes)))

    def check_allows(self, traced: Iterable[tuple[str, int]], seen_in: str = "graph") -> None:
        """Adds CB001 for inline allows on traced lines that allowed nothing.

        traced: (file, line) of every node looked at. Only codes that `seen_in` finds are judged.
        """
        used = {(file, line, d.code) for d in self for file, line in _places(d)}
        lines: dict[str, set[int]] = {}
        for file, line in traced:
            lines.setdefault(file, set()).add(line)
        for file, touched in lines.items():
            for comment in allows_of_file(file):
                covered = range(comment.first, comment.last + 1)
                if touched.intersection(covered):
                    here = {code for f, n, code in used if f == file and n in covered}
                    self.extend(unused_codes(file, comment, here, (seen_in,)))

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        ordered = sorted(self._seen.values(), key=lambda seen: seen[0]._order())
        return tuple(Finding(d, *self.policy.judge(d), count) for d, count in ordered)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return tuple(finding.diagnostic for finding in self.findings)

    def _decided(self, decision):
        return tuple(f.diagnostic for f in self.findings if f.decision == decision)

    @property
    def refused(self) -> tuple[Diagnostic, ...]:
        return self._decided("refuse")

    @property
    def warned(self) -> tuple[Diagnostic, ...]:
        return self._decided("warn")

    @property
    def allowed(self) -> tuple[Diagnostic, ...]:
        return self._decided("allow")

    @property
    def clean(self) -> bool:
        """Nothing to report, apart from what the user allowed."""
        return not (self.refused or self.warned)

    def counts(self) -> dict[str, int]:
        """How often each code was found, in code order."""
        total: dict[str, int] = {}
        for finding in self.findings:
            code = finding.diagnostic.code
            total[code] = total.get(code, 0) + finding.count
        return dict(sorted(total.items()))

    def select(self, select: Iterable[str] = (), ignore: Iterable[str] = ()) -> "Report":
        """The report reduced to some codes: ids, names, or starts of ids such as "CB1"."""
        wanted = {code.id for text in select for code in find_codes(text)} or set(CODES)
        wanted -= {code.id for text in ignore for code in find_codes(text)}
        kept = Report(policy=self.policy)
        kept._seen = {key: seen for key, seen in self._seen.items() if key.code in wanted}
        return kept

    def render(self, fmt: str = "text", *, color: bool = False, root: str | None = None) -> str:
        """The report as "text", "json", "sarif" or "github"; paths relative to root (default: cwd)."""
        from carbon_compile import render

        return render.render(self, fmt, color=color, root=root)

    def raise_if_refused(self) -> None:
        if self.refused:
            raise Refused(self)

    def dump(self) -> str:
        """JSON that `load` reads back, to keep a report beside a compilation cache."""
        return json.dumps([[asdict(d), count] for d, count in self._seen.values()], sort_keys=True)

    @classmethod
    def load(cls, text: str, policy: Policy | None = None) -> "Report":
        """A dumped report, judged anew: comments and options may have changed since."""
        report = cls(policy=policy)
        for row, count in json.loads(text):
            row["called_from"] = row["called_from"] and tuple(row["called_from"])
            if row["code"] not in ("CB001", "CB002"):
                report.add(Diagnostic(**row), count)
        return report

    def __iter__(self):
        return iter(self.diagnostics)

    def __len__(self):
        return len(self._seen)

    def __str__(self):
        return self.render("text")


def _places(diagnostic):
    if diagnostic.file is not None and diagnostic.line is not None:
        yield diagnostic.file, diagnostic.line
    if diagnostic.called_from:
        yield diagnostic.called_from


def comment_finding(code: str, file: str | None, line: int, detail: str) -> Diagnostic:
    source = linecache.getline(file, line).strip() if file else ""
    return Diagnostic(code, detail, file=file, line=line, source_line=source)


def unused_codes(file: str, comment: Allow, used: set[str], seen_in: tuple[str, ...]) -> list[Diagnostic]:
    """CB001 for each code of a comment that isn't `used`, if one of `seen_in` would have found it."""
    unused = [
        code for code in comment.codes
        if code in CODES and code not in used and set(seen_in) & set(CODES[code].seen_in)
    ]
    return [comment_finding("CB001", file, comment.line, code) for code in unused]


class Refused(RuntimeError):
    """Raised instead of running something that would break the promise; reads as its report."""

    def __init__(self, report: Report):
        super().__init__(report)
        self.report = report

    def __str__(self):  # another process's error comes back as its text
        return self.report if isinstance(self.report, str) else self.report.render("text")
