"""Who competes: stock PyTorch in four ways, carbon, and its peers where they are installed."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bench.registry import Contender
from carbon_compile.environment import installed


@dataclass(frozen=True)
class Engine:
    """A way to run a PyTorch function: a backend of torch.compile or None for eager, and its options.

    `deterministic` runs every call under torch.use_deterministic_algorithms; `optimizer` compiles a
    training step's optimizer too, where the others use PyTorch's fused one.
    """

    backend: str | None = None
    options: dict = field(default_factory=dict)
    deterministic: bool = False
    optimizer: bool = False

    def compiled(self, function: Callable, **settings) -> Callable:
        """The function as this engine runs it; compiled at its first call, for the shapes of that call."""
        if self.backend is None:
            return function
        backend = self.backend
        if backend == "carbon":
            # By name it needs an installed entry point, which a bare checkout hasn't.
            from carbon_compile.backend import carbon as backend
        return torch.compile(function, backend=backend, options=self.options or None, dynamic=False, **settings)

    def running(self, call: Callable) -> Callable:
        """The call under this engine's switches."""
        if not self.deterministic:
            return call

        def deterministically():
            with _deterministic_algorithms():
                return call()

        return deterministically


@contextlib.contextmanager
def _deterministic_algorithms():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@functools.cache
def engines() -> dict[str, Engine]:
    """All engines by name."""
    import torch._inductor

    settled = Engine("inductor", {"deterministic": True})
    if "deterministic" not in torch._inductor.list_options():
        settled = Engine("inductor", deterministic=True)
    return {
        "eager": Engine(),
        "eager deterministic": Engine(deterministic=True),
        "inductor": Engine("inductor"),
        "inductor deterministic": settled,
        "inductor+graphs": Engine("inductor", {"triton.cudagraphs": True}),
        "carbon": Engine("carbon"),
        "carbon+graphs": Engine("carbon", {"inductor": {"triton.cudagraphs": True}}),
        "carbon+optimizer": Engine("carbon", optimizer=True),
    }


NOT_INSTALLED = "not installed"
FUNCTIONS = ("eager", "eager deterministic", "inductor", "inductor deterministic", "carbon")


def peers(operation: str, device: str, operands: tuple, backward: bool = False) -> tuple[list[Contender], list[tuple[str, str]]]:
    """Other projects that promise equal bits, on one operation: (contenders, [(name, why not)]).

    `operands` are the operation's inputs. What a peer's kernels would misread is left out: a fault on a
    GPU ends the whole process. Their operands are made contiguous before the clock starts.
    """
    found, absent = [], []
    for name, offer in (("alia-carbon", _alia_carbon), ("bitexact", _bitexact)):
        try:
            call = offer(operation, device, operands, backward)
        except _Absent as reason:
            absent.append((name, str(reason)))
        else:
            found.append(Contender(name, functools.partial(_returning, call)))
    return found, absent


def missing_peers() -> list[str]:
    """Distributions of peers that this environment hasn't."""
    return [name for name in ("alia-carbon", "bitexact") if installed(name) is None]


def _returning(call):
    return call


class _Absent(Exception):
    """Why a peer doesn't take part."""


def _alia_carbon(operation, device, operands, backward):
    # The distribution alia-carbon installs the module `carbon`, a name that it shares with others.
    module = _import("alia-carbon", "carbon")
    if backward:
        raise _Absent("not measured backward")
    if operation == "product":
        return lambda: module.DeterministicMatMul.apply(*operands)
    if operation == "layer-norm":
        x, weight, bias = operands
        norm = module.CarbonLayerNorm(x.shape[-1]).to(x.device, x.dtype)
        with torch.no_grad():
            norm.weight.copy_(weight), norm.bias.copy_(bias)
        return torch.no_grad()(lambda: norm(x))
    raise _Absent("has no such operation")


def _bitexact(operation, device, operands, backward):
    module = _import("bitexact", "bitexact")
    if device != "cuda":
        raise _Absent("needs a GPU")
    if backward:
        raise _Absent("has no backward pass")
    if any(x.dtype is not torch.float32 or x.dim() > 2 for x in operands):
        raise _Absent("takes float32 matrices only")
    if operation != "product" and operands[0].shape[-1] % 4:
        raise _Absent("faults on rows whose length is no multiple of 4")
    names = {"product": "matmul", "row-sum": "sum", "layer-norm": "layer_norm", "rms-norm": "rms_norm"}
    if operation not in names:
        raise _Absent("has no such operation")
    function, operands = getattr(module, names[operation]), [x.detach().contiguous() for x in operands]
    return lambda: function(*operands)


def _import(distribution, module):
    if installed(distribution) is None:
        raise _Absent(NOT_INSTALLED)
    try:
        return __import__(module)
    except Exception as error:
        raise _Absent(f"can't be imported: {type(error).__name__}") from error
