"""What a training step may change, copied and put back: random states, buffers, weights, optimizer state."""

import random
import sys
from dataclasses import dataclass

import torch


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

    def restore(self) -> None:
        with torch.no_grad():
            for module, name, buffer in self._owners:
                module._buffers[name] = buffer
            if self._live:
                torch._foreach_copy_(self._live, self._kept)


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
        self._groups = [{k: _copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
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
            for key, value in kept.items():
                group[key] = _put_back(group.get(key), value)
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
