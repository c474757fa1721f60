"""The ledger's file: one JSON line a step, each chained to all before it. Nothing here needs torch.

The first line says who wrote it; every other line is a step. `chain` is the SHA-256 of the chain
before it and the line without it, so a line that was edited, removed or moved is found, and so is
everything after it. Lines cut off the end can't be missed: a killed process ends anywhere.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator

FORMAT = 2  # 1 had digests of elements, not of words
_START = b'{"ledger":'
# Groups in the order in which a step computes them: the first that differs is nearest the cause.
GROUPS = ("loss", "gradients", "optimizer", "weights")


class LedgerError(ValueError):
    """A ledger that can't be trusted, used, or continued; reads as one line."""


def chained(before: str, line: dict) -> str:
    """The chain value of `line` (without its own) behind the chain value `before`."""
    return _behind(before, _text(line))


def _behind(before, text):
    return hashlib.sha256((before + text).encode()).hexdigest()


def _text(line):
    return json.dumps({key: value for key, value in line.items() if key != "chain"}, separators=(",", ":"), ensure_ascii=True)


def is_ledger(path: str | os.PathLike) -> bool:
    """Whether the file begins as a ledger does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_START)) == _START
    except OSError:
        return False


def read(path: str | os.PathLike) -> "Contents":
    """The lines of a ledger, checked. A torn last line is left out.

    LedgerError for a file that is no ledger, of another format, or with a line that doesn't follow
    from those before it; OSError where it can't be read.
    """
    with open(path, "rb") as file:
        return _parse(file.read(), path)


def _parse(data, path):
    lines, chain, end = [], "", 0
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        last = end + len(raw) == len(data)
        line = _decoded(raw)
        if line is None and last:
            break  # the process was killed while it wrote
        if line is None or line.get("chain") != chained(chain, line):
            raise LedgerError(f"{path}, line {number}: the chain is broken: this line was edited, or one before it is missing")
        if number == 1 and line.get("ledger") != FORMAT:
            raise LedgerError(_not_ours(path, line))
        lines.append(line)
        chain, end = line["chain"], end + len(raw)
    if not lines and not _START.startswith(data[: len(_START)]):
        raise LedgerError(f"{path} isn't a ledger: it doesn't begin with a line of JSON")
    return Contents(lines, end, chain)


def _not_ours(path, line):
    if "ledger" in line:
        return f"{path} is a ledger of format {line['ledger']}; this release reads {FORMAT}"
    return f'{path} isn\'t a ledger: its first line has no "ledger"'


def _decoded(raw):
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


class Contents:
    """A checked ledger.

    header: the first line. steps: step number -> line. last: the number of the last step, 0 where there
    is none. length: bytes up to the end of the last whole line. chain: that line's chain value.
    """

    def __init__(self, lines, length, chain):
        self.header = lines[0] if lines else None
        self.steps = {line["step"]: line for line in lines[1:]}
        self.length, self.chain = length, chain
        self.last = max(self.steps, default=0)
        self._names = {}
        names = {}
        for line in lines[1:]:
            names = {**names, **line.get("names", {})}
            self._names[line["step"]] = names

    @property
    def names(self) -> dict:
        """group -> names of its tensors, as of the last step."""
        return self._names.get(self.last, {})

    def tensors(self, step: int, group: str) -> dict[str, str]:
        """name -> digest of the tensors of `group` at `step`; empty where only totals were kept."""
        text = self.steps[step].get("tensors", {}).get(group, "")
        digests = [text[i : i + 16] for i in range(0, len(text), 16)]
        return dict(zip(self._names[step].get(group, []), digests, strict=True))


class Writer:
    """Appends lines to a ledger, holding a lock on it.

    Opening cuts a torn last line. A line is written with one call and not buffered, so a killed
    process loses at most the line it was writing; `sync` makes it survive a power failure too.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock()
            self.contents = _parse(os.pread(self._file, os.fstat(self._file).st_size, 0), self.path)
        except BaseException:
            os.close(self._file)
            raise
        os.ftruncate(self._file, self.contents.length)
        os.lseek(self._file, 0, os.SEEK_END)
        self._chain = self.contents.chain

    def _lock(self):
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LedgerError(f"{self.path} is being written by another process") from None

    def append(self, line: dict) -> None:
        """Write one line, completed by its chain value; `line` must not have one."""
        text = _text(line)
        chain = _behind(self._chain, text)
        # The chain value goes last into the text that was hashed: a line has kilobytes, so it is made once.
        data = f'{text[:-1]},"chain":"{chain}"}}\n'.encode()
        start = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(28, "No space left on device")
        except OSError:
            os.ftruncate(self._file, start)
            os.lseek(self._file, start, os.SEEK_SET)
            raise
        self._chain = chain

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


# --- where two ledgers part


def differences(a: Contents, b: Contents) -> Iterator[str]:
    """Lines that say where two ledgers part, the first step and tensor first; none where they agree."""
    step = first_difference(a, b)
    if step is not None:
        yield from _step_difference(a, b, step)
        yield from _headers(a.header, b.header)
    elif a.last != b.last:
        shorter = min(a.last, b.last)
        yield f"equal up to step {shorter}, where one ends; the other has {max(a.last, b.last)}"
    elif not a.steps.keys() & b.steps.keys():
        yield "no step is in both"


def agreement(a: Contents, b: Contents) -> str:
    """What was compared of two ledgers that have no `differences`, in a line."""
    common = sorted(a.steps.keys() & b.steps.keys())
    tensors = sum(len(a.tensors(step, group) or b.tensors(step, group)) for step in common for group in GROUPS[1:])
    hashes = f"hashes of {counted(tensors, 'tensor')}" if tensors else "hashes of groups only"
    return f"equal: {counted(len(common), 'step')} ({common[0]} to {common[-1]}), {hashes}"


def counted(n: int, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def first_difference(a: Contents, b: Contents) -> int | None:
    """The first step in both whose hashes differ."""
    common = sorted(a.steps.keys() & b.steps.keys())
    return next((step for step in common if group_differences(a, b, step)), None)


def group_differences(a: Contents, b: Contents, step: int) -> list[str]:
    """The groups that differ at a step, in the order in which the step computes them."""
    return [group for group in GROUPS if not same_bits(a.steps[step].get(group), b.steps[step].get(group))]


def same_bits(one, other) -> bool:
    """Whether two values of a line are the same: losses by their bits, so that 0.0 isn't -0.0."""
    return one == other and repr(one) == repr(other)


def tensor_differences(a: Contents, b: Contents, step: int, group: str) -> list[str]:
    """The names of the tensors of a group that differ at a step, nearest the cause first: a backward
    pass reaches the last parameters before the first ones. None where either kept only totals."""
    one, other = a.tensors(step, group), b.tensors(step, group)
    if not all("tensors" in contents.steps[step] for contents in (a, b)):
        return []
    found = [name for name in [*one, *(n for n in other if n not in one)] if one.get(name) != other.get(name)]
    return found[::-1] if group == "gradients" else found


def _step_difference(a, b, step):
    groups = group_differences(a, b, step)
    one, other = a.steps[step], b.steps[step]
    yield f"first difference: step {step}, {_first(a, b, step, groups[0])}"
    before = [s for s in a.steps.keys() & b.steps.keys() if s < step]
    if before:
        yield f"equal up to step {max(before)}"
    for group in groups:
        if group == "loss":
            yield f"loss: {one.get(group)} -> {other.get(group)}"
            continue
        names = tensor_differences(a, b, step, group)
        total = len(a.tensors(step, group) or b.tensors(step, group))
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        yield f"{group}: {len(names)} of {total} differ: {shown}" if names else f"{group}: {one.get(group)} -> {other.get(group)}"


def _first(a, b, step, group):
    names = tensor_differences(a, b, step, group)
    if group == "loss":
        return "loss"
    return f"{group} {names[0]}" if names else f"{group} (tensor by tensor hashes were not kept)"


def _headers(a, b):
    for key in sorted((a.keys() | b.keys()) - {"chain", "ledger"}):
        if a.get(key) != b.get(key):
            yield f"{key}: {a.get(key, 'not told')} -> {b.get(key, 'not told')}"
