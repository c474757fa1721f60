"""The ledger: what every training step left behind, as hashes, in a file that shows edits.

    with carbon_compile.ledger("run.jsonl", model=model):
        train()

A step is a step of an optimizer; its loss is what `backward()` was called on since the last one.
Hashes are computed on the device (see digest.py) and reach the host in one small copy. On CUDA the
host doesn't wait for it: a line is written at the first later step that finds its hashes arrived, or
when the ledger is flushed or closed. A killed process loses the lines on their way, at most LATE.

The module isn't called `ledger`, because importing it would hide the function `carbon_compile.ledger`.
"""

import contextlib
import contextvars
import hashlib
import math
import operator
import os
import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import environment, host
from .bits import ENGINE_FLAGS
from .digest import prepared, signed
from .ledger_file import (
    FORMAT,
    GROUPS,
    LedgerError,
    Writer,
    group_differences,
    same_bits,
    tensor_differences,
)
from .snapshot import local

_REASON = "a carbon ledger reads, and computes nothing that training sees"

# Steps whose hashes may be on their way at once; a host further ahead waits for the first of them.
LATE = 8

_unobserved = contextvars.ContextVar("carbon_unobserved", default=False)
_open: list["Ledger"] = []


def ledger(path: str | os.PathLike, model: torch.nn.Module | None = None, *, every: int = 1, tensors: bool = True, start: int = 0, observe: bool = True) -> "Ledger":
    """A ledger of the steps that optimizers make while its `with` block runs.

    Args:
        path: the file. One that exists is continued: a step that it already has is made again and
            compared with its record, which is how a resumed run proves itself; later steps are added.
        model: names the tensors and adds persistent buffers to the weights; without it, parameters
            are called by their place in the optimizer. Of tensors that ranks cut (DTensors) this rank's
            parts are recorded; each rank needs a file of its own.
        every: record steps whose number divides by this; the others cost nothing.
        tensors: keep a hash a tensor, so that `carbon-compile diff` can name the first that differs;
            otherwise one a group.
        start: how many steps were made before the first, where a run is resumed without a
            `DeterministicTrainer`, which knows.
        observe: False to record only what `Ledger.step` is called with.

    Raises LedgerError for a file that is no ledger, was edited, or is being written by another
    process, and where a step made again isn't what its line says. OSError where it can't be written.
    """
    return Ledger(path, model, every=every, tensors=tensors, start=start, observe=observe)


@dataclass
class _Arrival:
    """Integers of one device on their way to the host: `tensors` digests, then the bits of losses."""

    integers: Callable[[], torch.Tensor]
    tensors: int
    losses: list[int] = field(default_factory=list)  # which of the step's
    event: torch.cuda.Event | None = None
    release: Callable[[], None] = lambda: None  # let a later step have the memory


@dataclass
class _Pending:
    """A step on its way to the host."""

    step: int
    layout: "_Layout"
    losses: list[int | None]  # bits of float64; None on its way
    known: list[int]  # digests of values that the host has
    arriving: list[_Arrival]

    def arrived(self):
        return all(arrival.event is None or arrival.event.query() for arrival in self.arriving)


class Ledger:
    """See `ledger`. `recorded` counts the lines written, `confirmed` the steps found to be as recorded."""

    def __init__(self, path, model=None, *, every=1, tensors=True, start=0, observe=True):
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: give a whole number of steps from 1")
        self.path, self.model = os.fspath(path), model
        self.every, self.tensors, self.observe = every, tensors, observe
        self.count, self.recorded, self.confirmed = start, 0, 0
        self._losses, self._pending, self._told_names = [], deque(), {}
        self._layouts, self._spare = {}, {}
        self._writer = self._hook = None
        self._parted = ""

    # --- its life

    def __enter__(self):
        self._writer = Writer(self.path)
        self._told_names = dict(self._writer.contents.names)
        if self._writer.contents.header is None:
            self._writer.append(_header(self.every))
        if self.observe:
            self._hook = register_optimizer_step_post_hook(self._observed)
            if not any(other.observe for other in _open):
                _watch_backward()
        _open.append(self)
        return self

    def __exit__(self, *raised):
        _open.remove(self)
        if self._hook is not None:
            self._hook.remove()
            if not any(other.observe for other in _open):
                _leave_backward()
        try:
            if raised[0] is None:
                self.flush()
            else:  # what raised matters more than the last line
                with contextlib.suppress(Exception):
                    self.flush()
        finally:
            self._writer.close()
            self._writer = None

    def flush(self) -> None:
        """Write the steps that are still on their way from the device, and let the disk have it all.

        LedgerError in a ledger whose `with` block isn't running, as of every method.
        """
        self._require_open()
        with as_stock():
            while self._pending:
                self._finish()
        self._writer.sync()

    def catch_up(self) -> None:
        """Write the steps whose hashes have arrived; wait only where more than LATE are on their way. A trainer calls it while
        the host has nothing else to do; without it, the next step recorded does so."""
        self._require_open()
        with as_stock():
            while self._pending and (len(self._pending) > LATE or self._pending[0].arrived()):
                self._finish()

    def _require_open(self):
        if self._writer is None:
            raise LedgerError(f"{self.path} isn't open: use it as `with carbon_compile.ledger(...)`")

    # --- steps

    @torch.compiler.disable(reason=_REASON)
    def _observed(self, optimizer, args, kwargs):
        if not _unobserved.get():
            losses, self._losses = self._losses, []
            self.record(losses, self.model, optimizer, self.count + 1)

    def step(self, loss, model=None, optimizer=None) -> None:
        """Record a step just made: call it after `optimizer.step()` and before gradients are cleared.

        loss: a tensor or number, or a list of them, one a microbatch. LedgerError in a ledger that
        observes by itself.
        """
        if self.observe:
            raise LedgerError(f"{self.path} records optimizer steps by itself; open it with observe=False to call step()")
        self.record(loss if isinstance(loss, (list, tuple)) else [loss], model or self.model, optimizer, self.count + 1)

    def due(self, step: int) -> bool:
        """Whether this step will be recorded or compared."""
        self._require_open()
        known = self._writer.contents
        return step % self.every == 0 and (step > known.last or step in known.steps)

    def record(self, losses, model, optimizer, step: int, facts: dict | None = None) -> None:
        """Record step number `step`, or compare it with its line where the file has one.

        facts: name -> plain value of what else decides the next step; recorded with the optimizer.
        """
        self._require_open()
        if self._parted:  # whoever caught that error may go on, but not in this file
            raise LedgerError(self._parted)
        self.count = step
        with as_stock(), torch.no_grad():
            if self.due(step):
                self._pending.append(self._started(losses, model, optimizer, step, facts or {}))
        # The device has its work by now, and the host time to write what has arrived meanwhile.
        self.catch_up()

    def _started(self, losses, model, optimizer, step, facts):
        """Hash on the devices and start the copies to the host."""
        layout, values = self._found(model, optimizer, facts)
        on_devices = {device: [] for device in layout.devices}
        bits = [None] * len(losses)
        for place, loss in enumerate(losses):
            if isinstance(loss, torch.Tensor) and loss.is_cuda:
                on_devices.setdefault(loss.device, []).append(place)
            else:
                bits[place] = _float_bits(loss.reshape(-1)[0].item() if isinstance(loss, torch.Tensor) else loss)
        arriving = []
        for device, places in on_devices.items():
            positions, batch = layout.devices.get(device, ((), None))
            arriving.append(self._sent([values[i] for i in positions], batch, device, losses, places))
        return _Pending(step, layout, bits, layout.host_digests(values), arriving)

    def _sent(self, tensors, batch, device, losses, places):
        """Digests of tensors, and losses by their places, of one device on their way."""
        if device.type != "cuda":
            integers = batch.later(tensors)
            return _Arrival(lambda: integers().cpu(), len(tensors))
        out = torch.zeros(len(tensors) + len(places), dtype=torch.int64, device=device)
        if tensors:
            batch.start(tensors, out)
        numbers = out.view(torch.float64)
        for i, place in enumerate(places, len(tensors)):
            numbers[i].copy_(losses[place].reshape(-1)[0])
        spare = self._spare.setdefault((device, out.numel()), [])
        buffer, event = spare.pop() if spare else _room(out)
        buffer.copy_(out, non_blocking=True)
        event.record(torch.cuda.current_stream(device))
        return _Arrival(lambda: buffer, len(tensors), places, event, lambda: spare.append((buffer, event)))

    def _finish(self):
        """Wait for the integers of the first pending step, and write or compare its line."""
        pending = self._pending.popleft()
        try:
            digests_found = []
            for arrival in pending.arriving:
                if arrival.event is not None:
                    arrival.event.synchronize()
                integers = arrival.integers().tolist()
                digests_found += integers[: arrival.tensors]
                for place, bits in zip(arrival.losses, integers[arrival.tensors :], strict=True):
                    pending.losses[place] = bits
                arrival.release()
            self._put(self._line(pending, digests_found + pending.known), pending.layout.names)
        except BaseException:
            # Steps behind one that couldn't be written, or isn't what was recorded, have no place in the file.
            self._pending.clear()
            raise

    def _line(self, pending, integers):
        losses = [_told(bits) for bits in pending.losses]
        line = {"step": pending.step, "loss": None if not losses else losses[0] if len(losses) == 1 else losses}
        texts = pending.layout.texts(integers)
        for group, text in texts.items():
            line[group] = pending.layout.group_hash(group, text)
        if self.tensors:
            line["tensors"] = texts
        return line

    def _put(self, line, names):
        recorded = self._writer.contents.steps.get(line["step"])
        if recorded is not None:
            self._confirm(line, recorded, names)
            return
        changed = {group: names[group] for group in names if self._told_names.get(group) != names[group]}
        if self.tensors and changed:
            line["names"] = changed
            self._told_names.update(changed)
        self._writer.append(line)
        self.recorded += 1

    def _confirm(self, line, recorded, names):
        if all(same_bits(line.get(group), recorded.get(group)) for group in GROUPS):
            self.confirmed += 1
            return
        from .ledger_file import Contents

        step = line["step"]
        before = self._writer.contents
        now = Contents([before.header, {**line, "names": names}], 0, "")
        group = group_differences(before, now, step)[0]
        first = next(iter(tensor_differences(before, now, step, group)), "") if group != "loss" else ""
        self._parted = (
            f"step {step} is not what {self.path} recorded: {' '.join(filter(None, (group, first)))} differs first. "
            "Either the run didn't repeat, or the file is another run's: give this one its own"
        )
        raise LedgerError(self._parted)

    def _found(self, model, optimizer, facts):
        """(layout, values) of a step."""
        key = (id(model), id(optimizer))
        layout = self._layouts.get(key)
        values = layout.values(facts) if layout is not None else None
        if values is None:
            layout = self._layouts[key] = _Layout(model, optimizer, facts)
            values = layout.fetched(facts)
        return layout, values


class _Layout:
    """Where a step's values are, what they are called, and how they become a line.

    All of it stays the same while model and optimizer keep their parameters, buffers and state, and
    these their types: then a step only fetches values. There are hundreds, and host time isn't hidden
    where the host launches kernels no faster than the device runs them.
    """

    def __init__(self, model, optimizer, facts):
        self._model, self._optimizer = model, optimizer
        self._parameters = _parameters(model, optimizer)
        self._cut = any(hasattr(p, "to_local") for p in self._parameters)  # then the digests are of this rank's parts
        names = parameter_names(model, optimizer)
        self._parameter_names = [names[id(p)] for p in self._parameters]
        self._modules = _modules(model)
        self._buffers = _persistent_buffers(model)
        self._stateful = list(optimizer.state) if optimizer is not None else []
        place = {id(p): i for i, p in enumerate(self._stateful)}
        self._entries = [(name, place[id(p)]) for name, p in zip(self._parameter_names, self._parameters, strict=True) if id(p) in place]
        self._keys, self._facts = self._present_keys(), list(facts)
        self._prepare(self.fetched(facts))

    def values(self, facts: dict) -> list | None:
        """The values of the step just made, in this layout's order; None where it no longer holds."""
        if not _same(_parameters(self._model, self._optimizer), self._parameters) or _modules(self._model) != self._modules:
            return None
        if self._optimizer is not None and not (_same(self._optimizer.state, self._stateful) and self._present_keys() == self._keys):
            return None
        if list(facts) != self._facts:
            return None
        values = self.fetched(facts)
        return values if self._holds(values) else None

    def _present_keys(self):
        """The names of what the optimizer keeps, of each parameter and of each group."""
        if self._optimizer is None:
            return []
        return [tuple(entry) for entry in self._optimizer.state.values()] + [tuple(group) for group in self._optimizer.param_groups]

    def fetched(self, facts: dict) -> list:
        """Gradients, optimizer state, optimizer settings, facts, parameters, buffers; None where there is none."""
        values = [p.grad for p in self._parameters]
        if self._optimizer is not None:
            entries = list(self._optimizer.state.values())
            for _, place in self._entries:
                values += entries[place].values()
            for group in self._optimizer.param_groups:
                values += [value for key, value in group.items() if _counts(key)]
        values += facts.values()
        values += self._parameters + [buffers.get(key) for _, buffers, key in self._buffers]
        return [local(v) if isinstance(v, torch.Tensor) else v for v in values] if self._cut else values

    def _labels(self):
        """(group, name, whether it is a setting) of each value that is fetched."""
        yield from (("gradients", name, False) for name in self._parameter_names)
        for name, place in self._entries:
            yield from (("optimizer", f"{name}.{key}", False) for key in self._keys[place])
        for number, keys in enumerate(self._keys[len(self._stateful) :]):
            yield from (("optimizer", f"groups.{number}.{key}", True) for key in keys if _counts(key))
        yield from (("optimizer", name, True) for name in self._facts)
        yield from (("weights", name, False) for name in self._parameter_names)
        yield from (("weights", name, False) for name, _, _ in self._buffers)

    def _prepare(self, values):
        """Sort values by who hashes them: a device, or the host."""
        self.names = {group: [] for group in GROUPS[1:]}
        kinds = {group: [] for group in GROUPS[1:]}
        self._absent, self._host, places, order = [], [], {}, []
        for position, ((group, name, setting), value) in enumerate(zip(self._labels(), values, strict=True)):
            if value is None and not setting:
                self._absent.append(position)
                continue
            on_host = _on_host(value, setting)
            if on_host:
                self._host.append((position, setting))
            else:
                places.setdefault(value.device, []).append(position)
            self.names[group].append(name)
            kinds[group].append(f"{name} value" if on_host else f"{name} {value.dtype} {tuple(value.shape)}")
            order.append(position)
        hashed = [position for positions in places.values() for position in positions]
        self._tensors = hashed
        self._same_types = host.same_types([values[i] for i in hashed]) if hashed else lambda: True
        self.devices = {device: (positions, prepared([values[i] for i in positions])) for device, positions in places.items()}
        arrival = {position: i for i, position in enumerate([*hashed, *(position for position, _ in self._host)])}
        self._order = [arrival[position] for position in order]
        self._hashes = {group: hashlib.sha256("".join(kind + "\n" for kind in kinds[group]).encode()) for group in kinds}
        self._host_values, self._host_digests = [], []

    def _holds(self, values):
        """Whether every value is of the type that was prepared for."""
        return (
            self._same_types(*[values[i] for i in self._tensors])
            and all(values[i] is None for i in self._absent)
            and all(_on_host(values[i], setting) for i, setting in self._host)
        )

    def host_digests(self, values) -> list[int]:
        """Digests of the values that the host has, as int64."""
        found = [values[i] for i, _ in self._host]
        # Most are settings: the very objects of the step before.
        if not (_same(found, self._host_values) and all(map(_is_fixed, found))):
            self._host_values, self._host_digests = found, [signed(_host_digest(value)) for value in found]
        return self._host_digests

    def texts(self, integers) -> dict[str, str]:
        """group -> 16 hex digits a tensor, from the digests in the order of devices, then of the host."""
        digits = struct.pack(f">{len(self._order)}q", *[integers[i] for i in self._order]).hex()
        texts, end = {}, 0
        for group, names in self.names.items():
            start, end = end, end + 16 * len(names)
            texts[group] = digits[start:end]
        return texts

    def group_hash(self, group, text) -> str:
        """16 hex digits for a group: names and types, then the digests."""
        total = self._hashes[group].copy()
        total.update(text.encode())
        return total.hexdigest()[:16]


def _parameters(model, optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else list(model.parameters())


def _same(one, other):
    """Whether two collections hold the same objects in the same order."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def parameter_names(model, optimizer) -> dict[int, str]:
    """id -> name of every parameter: the model's, or its place among the optimizer's groups."""
    names = {}
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        given = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        names.update((id(p), name) for p, name in zip(group["params"], given, strict=True))
    if model is not None:
        names.update((id(p), name.replace("_orig_mod.", "")) for name, p in model.named_parameters())
    return names


def _modules(model):
    """module -> how many buffers it has, for model and all in it; quicker than `model.modules()`."""
    found, waiting = {}, [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = len(module._buffers)
            waiting.extend(module._modules.values())
    return found


def _persistent_buffers(model):
    """(name, dict, key) of every buffer of the model's state_dict, so that a new tensor in its place is found."""
    if model is None:
        return []
    kept, found = set(model.state_dict()), []
    for name, _ in model.named_buffers():
        if name in kept:
            path, _, key = name.rpartition(".")
            found.append((name.replace("_orig_mod.", ""), model.get_submodule(path)._buffers, key))
    return found


def _counts(key):
    """Whether a setting of a group of parameters decides bits."""
    return key != "params" and key not in ENGINE_FLAGS


def _on_host(value, setting):
    """Whether the host hashes a value: plain ones, and settings that are tensors on the CPU."""
    return value.device.type == "cpu" and setting if isinstance(value, torch.Tensor) else value is not None or setting


def _is_fixed(value):
    """Whether the same object is always the same value."""
    return isinstance(value, (int, float, bool, str, type(None))) or (type(value) is tuple and all(map(_is_fixed, value)))


def _host_digest(value):
    """64 bits of a Python value, or of a number that is kept as a tensor on the CPU."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    text = value.hex() if isinstance(value, float) else repr(value)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _float_bits(value):
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def _told(bits):
    """The loss as JSON has it: a number that reads back exactly, or the name of what JSON can't say."""
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return value if math.isfinite(value) else "nan" if math.isnan(value) else repr(value)


def _room(integers):
    """(pinned memory for integers of a GPU, an event)."""
    return torch.empty(integers.shape, dtype=integers.dtype, pin_memory=True), torch.cuda.Event()


def as_stock():
    """Integers need no rules: under `carbon_compile.enable`, hashing goes around them."""
    modes = sys.modules.get("carbon_compile.modes")
    return contextlib.nullcontext() if modes is None else modes.suspended()


def _header(every):
    facts = environment.describe()
    return {
        "ledger": FORMAT,
        "every": every,
        "contract": _contract(),
        **{key: facts[key] for key in ("carbon_compile", "torch", "gpus", "cpu", "float32_matmul_precision", "cuda_matmul_tf32")},
    }


def _contract():
    from .certify import contract_version

    return contract_version()


# --- observing


def is_only_ours(message: str, optimizer) -> bool:
    """Whether what Dynamo leaves to Python is a ledger's hook behind `optimizer`'s compiled step, and no
    other hook, which might compute something."""
    others = host.optimizer_hooks() - sum(one.observe for one in _open)
    return _REASON in message and others == 0 and not getattr(optimizer, "_optimizer_step_post_hooks", True)


@contextlib.contextmanager
def unobserved():
    """Optimizer steps and backward passes in here are nobody's: a trainer records its own."""
    token = _unobserved.set(True)
    try:
        yield
    finally:
        _unobserved.reset(token)


def open_ledgers() -> list["Ledger"]:
    """The ledgers whose `with` block is running."""
    return list(_open)


_backward = torch.Tensor.backward


def _watch_backward():
    """Let Tensor.backward tell what it was called on: PyTorch has no hook for it."""

    def backward(self, *args, **kwargs):
        if not _unobserved.get():
            for one in _open:
                if one.observe and one.due(one.count + 1):
                    # A copy: what is made of the loss before the optimizer's step may be made in its place.
                    one._losses.append(_first_element(self))
        # Modes know the backward pass by PyTorch's own function, not by this one, which they would also call again.
        if torch.overrides.has_torch_function_unary(self):
            return torch.overrides.handle_torch_function(_backward, (self,), self, *args, **kwargs)
        return _backward(self, *args, **kwargs)

    backward.__doc__ = _backward.__doc__
    torch.Tensor.backward = backward


def _first_element(loss):
    with as_stock(), torch.no_grad():
        return (loss if loss.dim() == 0 else loss.reshape(-1)[0]).clone()


def _leave_backward():
    torch.Tensor.backward = _backward
