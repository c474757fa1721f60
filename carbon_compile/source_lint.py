"""The source lint: what can be told from source text alone, without importing torch or the code.

It is quick enough for a pre-commit hook and knows less than the graph lint, which sees every
operator that runs.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from carbon_compile.allow import allows_in
from carbon_compile.codes import CODES, find_code
from carbon_compile.diagnostics import Diagnostic, Policy, Report, comment_finding, unused_codes
from carbon_compile.source import Source
from carbon_compile.source_checks import CHECKS

_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


def lint_source(text: str, file: str = "<source>") -> list[Diagnostic]:
    """Findings in one source text, those about allow comments included. SyntaxError if it isn't Python."""
    source = Source(text, file)
    found = [d for node in source.nodes for check in CHECKS for d in check(source, node)]
    return [*found, *_comment_findings(text, file, found)]


def _comment_findings(text, file, found):
    lines = text.splitlines()
    for comment in allows_in(text):
        covered = range(comment.first, comment.last + 1)
        used = {d.code for d in found if d.line in covered}
        for d in _judge_comment(file, comment, used):
            yield Diagnostic(d.code, d.detail, file=file, line=d.line, source_line=lines[d.line - 1].strip())


def _judge_comment(file, comment, used):
    if not comment.codes:
        yield comment_finding("CB003", file, comment.line, "no code")
    for code in comment.codes:
        if code not in CODES:
            yield comment_finding("CB003", file, comment.line, _unknown(code))
    if comment.codes and not comment.reason:
        yield comment_finding("CB002", file, comment.line, ", ".join(comment.codes))
    # What the graph lint can find too may be excused here for its sake: only it can say unused.
    only_here = {code for code in comment.codes if code in CODES and "graph" not in CODES[code].seen_in}
    yield from (d for d in unused_codes(file, comment, used, ("source",)) if d.detail in only_here)


def _unknown(text):
    try:
        return find_code(text).id
    except ValueError as error:
        return str(error)


def python_files(paths: Iterable[str]) -> Iterator[str]:
    """The files given, and every .py file below the folders given, sorted, hidden folders left out."""
    for path in map(Path, paths):
        if not path.is_dir():
            yield str(path)
            continue
        for file in sorted(path.rglob("*.py")):
            parts = file.relative_to(path).parts[:-1]
            if not any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in parts):
                yield str(file)


def lint_paths(paths: Iterable[str], policy: Policy | None = None) -> tuple[Report, list[str]]:
    """The report on files and folders, and one line for each file that couldn't be read or parsed."""
    report, failures = Report(policy=policy), []
    for file in python_files(paths):
        try:
            text = Path(file).read_text(encoding="utf-8")
            report.extend(lint_source(text, file))
        except SyntaxError as error:
            failures.append(f"{file}:{error.lineno}: not Python: {error.msg}")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            failures.append(f"{file}: {getattr(error, 'strerror', None) or error}")
    return report, failures
