"""What a training step may change, copied and put back: random states, buffers, weights, optimizer state."""

import random
import sys
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves, tree_map


@dataclass
class RandomState:
    """Python's, NumPy's (where it is loaded) and PyTorch's generators: CPU, and CUDA where it is in use."""

    python: tuple
    numpy: tuple | None
    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @staticmethod
    def now() -> "RandomState":
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return RandomState(random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state(), cuda)

    @staticmethod
    def seeded(seed: int) -> "RandomState":
        """The states after seeding all generators with `seed`; the present ones stay as they are."""
        before = RandomState.now()
        random.seed(seed)
        torch.manual_seed(seed)
        if before.numpy is not None:
            sys.modules["numpy"].random.seed(seed % 2**32)
        after = RandomState.now()
        before.restore()
        return after

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda and torch.cuda.is_available() and len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self.cuda)

    def state_dict(self) -> dict:
        """Tensors and numbers only, as a checkpoint needs them."""
        version, words, gauss = self.python
        state = {"python": [version, torch.tensor(words), gauss], "cpu": self.cpu, "cuda": self.cuda, "numpy": None}
        if self.numpy is not None:
            name, keys, *rest = self.numpy
            state["numpy"] = [name, torch.tensor(list(map(int, keys))), *map(_number, rest)]
        return state

    @staticmethod
    def load(state: dict) -> "RandomState":
        version, words, gauss = state["python"]
        numpy = state["numpy"]
        if numpy is not None:
            name, keys, *rest = numpy
            numpy = (name, keys.tolist(), *rest)
        return RandomState((version, tuple(words.tolist()), gauss), numpy, state["cpu"], list(state["cuda"]))


def _number(value):
    return value if isinstance(value, float) else int(value)


class Buffers:
    """A copy of a model's buffers, for taking back what a forward pass did to them.

    The copy is made once a step into the same memory: one launch, and as many bytes as the buffers
    have, which is nothing beside the weights.
    """

    def __init__(self):
        self._live, self._kept = [], []

    def keep(self, model: torch.nn.Module) -> None:
        self._owners = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
        live = [b for _, _, b in self._owners]
        with torch.no_grad():
            if len(live) != len(self._live) or any(a is not b for a, b in zip(live, self._live, strict=True)):
                self._live, self._kept = live, [b.detach().clone() for b in live]
            elif live:
                torch._foreach_copy_(self._kept, live)
        self._versions = [b._version for b in live]

    def changed(self) -> list[str]:
        """The names, in their own modules, of buffers that were written or replaced since `keep`."""
        now = zip(self._owners, self._versions, strict=True)
        return [f"{type(module).__name__}.{name}" for (module, name, b), version in now if module._buffers.get(name) is not b or b._version != version]

    def restore(self) -> None:
        with torch.no_grad():
            for module, name, buffer in self._owners:
                module._buffers[name] = buffer
            if self._live:
                torch._foreach_copy_(self._live, self._kept)


# Copies of so many bytes are made before every step unless told otherwise: a fraction of a millisecond
# on a GPU, and little beside the step of a model of that size on a CPU.
SMALL = 1 << 28


class Undo:
    """What an optimizer's step may change, so that a step that fails is taken back, or says what it left.

    Plain values and the settings of groups are always copied. So are weights and state tensors where
    `copies` is True, or None and they are no more than SMALL bytes; into the same memory every step.
    Otherwise PyTorch's counters of in-place changes tell which have changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copies: bool | None):
        self.optimizer, self.copies = optimizer, copies
        self._live, self._kept = [], None

    @torch.no_grad()
    def keep(self) -> None:
        """Note everything as it is now."""
        self._entries = {p: {key: _held(v) for key, v in entry.items()} for p, entry in self.optimizer.state.items()}
        self._groups = [settings(group) for group in self.optimizer.param_groups]
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        live = weights + [t for entry in self._entries.values() for v in entry.values() for t in _tensors(v)]
        if len(live) != len(self._live) or any(a is not b for a, b in zip(live, self._live, strict=True)):
            self._live, self._kept = live, [local(t).clone() for t in live] if self._copied(live) else None
            self._kinds = {}
            for i, t in enumerate(live):  # only what is of one kind is copied by one launch
                self._kinds.setdefault((t.device, t.dtype), []).append(i)
        elif self._kept is not None:
            for places in self._kinds.values():
                torch._foreach_copy_([self._kept[i] for i in places], [local(live[i]) for i in places])
        self._versions = [t._version for t in live]

    def _copied(self, live):
        return self.copies if self.copies is not None else sum(local(t).nbytes for t in live) <= SMALL

    @torch.no_grad()
    def back(self) -> list[tuple[torch.Tensor, str]]:
        """Put back what was kept; (parameter, "weights" or "state") of what has changed and could not be."""
        changed = [i for i, t in enumerate(self._live) if t._version != self._versions[i]]
        if self._kept is not None:
            torch._foreach_copy_([local(t) for t in self._live], self._kept)
            changed = []
        self.optimizer.state.clear()
        self.optimizer.state.update(self._entries)
        for group, kept in zip(self.optimizer.param_groups, self._groups, strict=True):
            set_settings(group, kept)
        owners = {id(t): p for p, entry in self._entries.items() for v in entry.values() for t in _tensors(v)}
        weights = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found = ((self._live[i], "weights") if id(self._live[i]) in weights else (owners[id(self._live[i])], "state") for i in changed)
        return list(dict.fromkeys(found))

    def tells_all(self) -> bool:
        """Whether what can't be put back is known: PyTorch's optimizers change tensors where their counters
        see it, which `.data` doesn't."""
        return self._kept is not None or getattr(self.optimizer.step, "__module__", "").startswith("torch.optim.")


# Hundreds of values a step: pytree only where there is a tree.


def _held(value):
    return tree_map(lambda v: v, value) if isinstance(value, (list, tuple, dict)) else value


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return (value,)
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple, dict)) else ()


def settings(group: dict) -> dict:
    """Copies of what a group of parameters has besides them, such as its rate."""
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def set_settings(group: dict, values: dict) -> None:
    """Put settings back, tensors into the tensors that hold them: what was compiled for them stays valid."""
    for key in set(group) - {"params", *values}:
        del group[key]
    for key, value in values.items():
        group[key] = _put_back(group.get(key), value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, without its history."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Snapshot:
    """Everything: weights, buffers, gradients, optimizer and scheduler states. Costs as much memory as they do."""

    def __init__(self, model, optimizer, schedulers=()):
        self.model, self.optimizer, self.schedulers = model, optimizer, schedulers
        self._parameters = [(p, p.detach().clone()) for p in model.parameters()]
        self._buffers = Buffers()
        self._buffers.keep(model)
        self._gradients = [(p, None if p.grad is None else p.grad.detach().clone()) for p, _ in self._parameters]
        self._state = {p: {k: _copied(v) for k, v in entry.items()} for p, entry in optimizer.state.items()}
        self._live = {p: dict(entry) for p, entry in optimizer.state.items()}
        self._groups = [settings(group) for group in optimizer.param_groups]
        self._schedules = [{k: _copied(v) for k, v in s.state_dict().items()} for s in schedulers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put it all back, into the tensors that held it: what was compiled for them stays valid."""
        for parameter, kept in self._parameters:
            parameter.copy_(kept)
        self._buffers.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        for parameter in list(self.optimizer.state):
            if parameter not in self._state:
                del self.optimizer.state[parameter]
        for parameter, entry in self._state.items():
            self.optimizer.state[parameter] = {k: _put_back(self._live[parameter][k], v) for k, v in entry.items()}
        for group, kept in zip(self.optimizer.param_groups, self._groups, strict=True):
            set_settings(group, kept)
        for scheduler, kept in zip(self.schedulers, self._schedules, strict=True):
            scheduler.load_state_dict({k: _copied(v) for k, v in kept.items()})


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _put_back(live, kept):
    if isinstance(live, torch.Tensor) and isinstance(kept, torch.Tensor) and live.shape == kept.shape and live.dtype is kept.dtype:
        return live.copy_(kept)
    return _copied(kept)
