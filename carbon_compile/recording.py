"""The ledger: what every training step left behind, as hashes, in a file that shows edits.

    with carbon_compile.ledger("run.jsonl", model=model):
        train()

A step is a step of an optimizer; its loss is what `backward()` was called on since the last one.
Hashes are computed on the device (see digest.py) and reach the host in one small copy; on CUDA the
host doesn't wait for it, so a line is written when the next step is recorded, or the ledger closed.

The module isn't called `ledger`, because importing it would hide the function `carbon_compile.ledger`.
"""

import contextlib
import contextvars
import functools
import hashlib
import math
import os
import struct
import sys
from dataclasses import dataclass, field

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import environment, host
from .bits import ENGINE_FLAGS
from .digest import digests
from .ledger_file import FORMAT, GROUPS, LedgerError, Writer, group_differences, tensor_differences

_REASON = "a carbon ledger reads, and computes nothing that training sees"

_unobserved = contextvars.ContextVar("carbon_unobserved", default=False)
_open: list["Ledger"] = []


def ledger(path: str | os.PathLike, model: torch.nn.Module | None = None, *, every: int = 1, tensors: bool = True, start: int = 0, observe: bool = True) -> "Ledger":
    """A ledger of the steps that optimizers make while its `with` block runs.

    Args:
        path: the file. One that exists is continued: a step that it already has is made again and
            compared with its record, which is how a resumed run proves itself; later steps are added.
        model: names the tensors and adds persistent buffers to the weights; without it, parameters
            are called by their place in the optimizer.
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
class _Pending:
    """A step on its way to the host: what its integers will be of, by group."""

    step: int
    losses: int
    names: dict[str, list[str]]
    kinds: dict[str, list[str]]
    known: dict[str, dict[int, int]]  # group -> position -> digest of a value that the host has
    order: list[tuple]  # one list of (group, position) a device, as its integers come
    arriving: list[tuple] = field(default_factory=list)  # (int64 tensor on the host, event or None)


class Ledger:
    """See `ledger`. `recorded` counts the lines written, `confirmed` the steps found to be as recorded."""

    def __init__(self, path, model=None, *, every=1, tensors=True, start=0, observe=True):
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: give a whole number of steps from 1")
        self.path, self.model = os.fspath(path), model
        self.every, self.tensors, self.observe = every, tensors, observe
        self.count, self.recorded, self.confirmed = start, 0, 0
        self._losses, self._names, self._pending, self._told_names = [], {}, None, {}
        self._writer = self._hook = None

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
        """Write the step that is still on its way from the device, and let the disk have it all."""
        with _as_stock():
            self._finish()
        self._writer.sync()

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
        known = self._writer.contents
        return step % self.every == 0 and (step > known.last or step in known.steps)

    def record(self, losses, model, optimizer, step: int) -> None:
        """Record step number `step`, or compare it with its line where the file has one."""
        if self._writer is None:
            raise LedgerError(f"{self.path} isn't open: use it as `with carbon_compile.ledger(...)`")
        with _as_stock():
            self._finish()
            self.count = step
            if self.due(step):
                self._pending = self._started(losses, model, optimizer, step)
                if not any(event for _, event in self._pending.arriving):
                    self._finish()

    def _started(self, losses, model, optimizer, step):
        """Hash on the devices and start the copies to the host."""
        found = {"loss": [], **self._facts(model, optimizer)}
        names = {group: [name for name, _ in found[group]] for group in GROUPS[1:]}
        kinds = {group: [f"{name} {_kind(value)}" for name, value in found[group]] for group in GROUPS[1:]}
        pending = _Pending(step, len(losses), names, kinds, {group: {} for group in GROUPS}, [])
        places = {}
        for group in GROUPS[1:]:
            for position, (_, value) in enumerate(found[group]):
                if isinstance(value, torch.Tensor):
                    places.setdefault(value.device, []).append((group, position, value))
                else:
                    pending.known[group][position] = value
        on_devices = {}
        for position, loss in enumerate(losses):
            if isinstance(loss, torch.Tensor):
                on_devices.setdefault(loss.device, []).append((position, loss))
            else:
                pending.known["loss"][position] = _float_bits(loss)
        for device in dict.fromkeys([*places, *on_devices]):
            hashed, values = places.get(device, []), on_devices.get(device, [])
            pending.order.append([(g, p) for g, p, _ in hashed] + [("loss", p) for p, _ in values])
            parts = [digests([t for _, _, t in hashed])] if hashed else []
            parts += [_loss_bits(value) for _, value in values]
            pending.arriving.append(_to_host(torch.cat(parts)))
        return pending

    def _finish(self):
        """Wait for the pending step's integers, and write or compare its line."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        values = pending.known
        for order, (integers, event) in zip(pending.order, pending.arriving, strict=True):
            if event is not None:
                event.synchronize()
            for (group, position), value in zip(order, integers.tolist(), strict=True):
                values[group][position] = value & (2**64 - 1)
        self._put(self._line(pending, values), pending.names)

    def _line(self, pending, values):
        losses = [_told(values["loss"][i]) for i in range(pending.losses)]
        line = {"step": pending.step, "loss": None if not losses else losses[0] if len(losses) == 1 else losses}
        texts = {}
        for group in GROUPS[1:]:
            texts[group] = "".join(f"{values[group][i]:016x}" for i in range(len(pending.names[group])))
            line[group] = hashlib.sha256("\n".join([*pending.kinds[group], texts[group]]).encode()).hexdigest()[:16]
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
        if all(line.get(group) == recorded.get(group) for group in GROUPS):
            self.confirmed += 1
            return
        from .ledger_file import Contents

        step = line["step"]
        before = self._writer.contents
        now = Contents([before.header, {**line, "names": names}], 0, "")
        group = group_differences(before, now, step)[0]
        first = next(iter(tensor_differences(before, now, step, group)), "") if group != "loss" else ""
        raise LedgerError(
            f"step {step} is not what {self.path} recorded: {' '.join(filter(None, (group, first)))} differs first. "
            "Either the run didn't repeat, or the file is another run's: give this one its own"
        )

    # --- what a step left behind

    def _facts(self, model, optimizer):
        """group -> (name, tensor or integer digest) of gradients, optimizer state and weights."""
        named = self._named_parameters(model, optimizer)
        weights = list(named)
        if model is not None:
            weights += [(name, b) for name, b in _named_buffers(model) if name in self._names["buffers"]]
        return {
            "gradients": [(name, p.grad) for name, p in named if p.grad is not None],
            "optimizer": [] if optimizer is None else list(_optimizer_facts(optimizer, named)),
            "weights": weights,
        }

    def _named_parameters(self, model, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else list(model.parameters())
        key = (id(model), id(optimizer))
        known = self._names.get(key)
        if known is None or len(known) != len(parameters) or any(p is not q for (_, p), q in zip(known, parameters, strict=True)):
            names = parameter_names(model, optimizer)
            known = self._names[key] = [(names[id(p)], p) for p in parameters]
            self._names["buffers"] = _persistent(model)
        return known


def parameter_names(model, optimizer) -> dict[int, str]:
    """id -> name of every parameter: the model's, or its place among the optimizer's groups."""
    names = {}
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        given = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        names.update((id(p), name) for p, name in zip(group["params"], given, strict=True))
    if model is not None:
        names.update((id(p), name.replace("_orig_mod.", "")) for name, p in model.named_parameters())
    return names


def _persistent(model):
    if model is None:
        return frozenset()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return frozenset(name.replace("_orig_mod.", "") for name in model.state_dict() if name not in parameters)


def _named_buffers(model):
    return ((name.replace("_orig_mod.", ""), buffer) for name, buffer in model.named_buffers())


def _optimizer_facts(optimizer, named):
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                yield f"{name}.{key}", value if isinstance(value, torch.Tensor) else _host_digest(value)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and key not in ENGINE_FLAGS:
                on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
                yield f"groups.{number}.{key}", value if on_device else _host_digest(value)


def _host_digest(value):
    """64 bits of a Python value, or of a number that is kept as a tensor on the CPU."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    text = value.hex() if isinstance(value, float) else repr(value)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _kind(value):
    return _told_type(value.dtype, value.shape) if isinstance(value, torch.Tensor) else "value"


@functools.lru_cache(maxsize=1024)
def _told_type(dtype, shape):
    return f"{dtype} {tuple(shape)}"


def _loss_bits(loss):
    return loss.detach().reshape(-1)[:1].to(torch.float64).view(torch.int64)


def _float_bits(value):
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def _told(bits):
    """The loss as JSON has it: a number that reads back exactly, or the name of what JSON can't say."""
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return value if math.isfinite(value) else "nan" if math.isnan(value) else repr(value)


def _to_host(integers):
    if integers.device.type != "cuda":
        return integers.cpu(), None
    host = torch.empty(integers.shape, dtype=integers.dtype, pin_memory=True)
    host.copy_(integers, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(integers.device))
    return host, event


def _as_stock():
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
                    one._losses.append(self.detach())
        return _backward(self, *args, **kwargs)

    backward.__doc__ = _backward.__doc__
    torch.Tensor.backward = backward


def _leave_backward():
    torch.Tensor.backward = _backward
