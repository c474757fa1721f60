"""Inline allows: `# carbon: allow[CB101] reason` at the end of a line, or alone on the line before.

A comment reaches every physical line of the statement it stands in, because a formatter may move
it to the statement's last line while Python reports the first.
"""

import io
import os
import re
import tokenize
from dataclasses import dataclass
from functools import lru_cache

from carbon_compile.codes import find_code

_COMMENT = re.compile(r"#\s*carbon:\s*allow\s*(?:\[([^\]]*)\])?(.*)", re.S)


@dataclass(frozen=True)
class Allow:
    """codes: ids, or the text as it stands where no code is called so. first..last: the lines it
    covers; line: the comment's own. Without a reason it has no effect."""

    codes: tuple[str, ...]
    reason: str
    line: int
    first: int
    last: int


def parse_comment(text: str) -> tuple[tuple[str, ...], str] | None:
    """Codes and reason of a comment token; None for any other comment."""
    match = _COMMENT.fullmatch(text.strip())
    if match is None:
        return None
    codes = tuple(_id(text.strip()) for text in (match[1] or "").split(",") if text.strip())
    return codes, match[2].strip(" \t-:")


def _id(text):
    try:
        return find_code(text).id
    except ValueError:
        return text


def allows_in(source: str) -> list[Allow]:
    """Every inline allow of a source text. SyntaxError or tokenize.TokenError on broken source."""
    found, waiting, inside, start = [], [], [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            parsed = parse_comment(token.string)
            if parsed is not None:
                (waiting if start is None else inside).append((*parsed, token.start[0]))
        elif token.type == tokenize.NEWLINE:
            for codes, reason, line in waiting + inside:
                found.append(Allow(codes, reason, line, start, token.start[0]))
            waiting, inside, start = [], [], None
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            start = token.start[0] if start is None else start
    # A comment after the last statement covers only itself, and is thus reported as unused.
    return found + [Allow(codes, reason, line, line, line) for codes, reason, line in waiting]


@lru_cache(maxsize=256)
def _allows_of(path: str, _stamp: tuple) -> tuple[Allow, ...]:
    try:
        with tokenize.open(path) as file:
            return tuple(allows_in(file.read()))
    except (OSError, SyntaxError, UnicodeError, tokenize.TokenError):
        return ()


def allows_of_file(path: str) -> tuple[Allow, ...]:
    """Inline allows of a file; none where it can't be read (a notebook cell, `python -c`)."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return ()
    return _allows_of(path, (stat.st_mtime_ns, stat.st_size))


def allow_at(path: str | None, line: int | None, code: str) -> Allow | None:
    """The inline allow of `code` that covers path:line; one with a reason wins over one without."""
    if path is None or line is None:
        return None
    covering = [a for a in allows_of_file(path) if a.first <= line <= a.last and code in a.codes]
    return max(covering, key=lambda a: bool(a.reason), default=None)
