"""A product as launches on six buffers: written down once for a signature, then replayed.

Triton's own call binds and specialises some thirty arguments each time, in Python: ten times what
the launch itself costs. A recipe keeps the compiled kernels of its first run and fills in addresses.
It holds for one signature: sizes, strides, types, alignments and device all enter its key, and with
them everything a kernel was specialised for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Buffers: the caller's operands and bias, the result, scratch, scratch that starts as zeros, and what
# a cut product has from other ranks, or one of given digits as their exponents.
A, B, BIAS, OUT, WORK, ZEROS, RECEIVED = range(7)
EXPONENTS = RECEIVED

_ALIGNMENT = 256  # of blocks within scratch: more than TMA or any vector load asks for
# Launchers whose arguments were compared with `CompiledKernel.run`'s; others take the ordinary path.
_REPLAYS = ("3.5.", "3.6.")


class Block(NamedTuple):
    """A part of a buffer; without a type, the caller's whole tensor."""

    buffer: int
    offset: int = 0
    dtype: torch.dtype | None = None
    length: int = 0


class Tiles(NamedTuple):
    """A matrix [rows, columns] of int8 that TMA reads in tiles [height, width]."""

    block: Block
    rows: int
    columns: int
    height: int
    width: int
    swizzled: bool  # as the specialised kernel's shared memory


class Launch(NamedTuple):
    """`constants` are constexprs and options, by name; the grid has one dimension."""

    kernel: object
    grid: int
    arguments: tuple
    constants: dict


class _Address:
    """What a launcher reads of a tensor descriptor."""

    __slots__ = ("pointer", "shape", "strides")
    padding = "zero"

    def __init__(self, pointer: int, shape: list[int], strides: list[int]):
        self.pointer, self.shape, self.strides = pointer, shape, strides

    @property
    def base(self) -> _Address:
        return self

    def data_ptr(self) -> int:
        return self.pointer


class Recipe:
    """Launches in order, and how much scratch they need."""

    def __init__(self):
        self.launches: list[Launch] = []
        self.quantising = 0  # how many of them make digits
        self.plan = None  # of the rest
        self.product = None  # what that was chosen by, if it was: m, n, padded k, window, batch, engine
        self.sizes = {WORK: 0, ZEROS: 0}
        self._compiled: dict[int, Callable] = {}  # by the number of the launch

    def reserve(self, length: int, dtype: torch.dtype, buffer: int = WORK) -> Block:
        """A new block of scratch."""
        offset = self.sizes[buffer]
        self.sizes[buffer] += -(-length * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return Block(buffer, offset, dtype, length)

    def launch(self, kernel, grid: int, *arguments, **constants) -> None:
        self.launches.append(Launch(kernel, grid, arguments, constants))

    def scratch(self, device) -> list[Tensor | None]:
        """Fresh buffers WORK and ZEROS."""
        return [
            new(size, dtype=torch.uint8, device=device) if size else None
            for size, new in zip(self.sizes.values(), (torch.empty, torch.zeros), strict=True)
        ]

    def run(self, buffers: Sequence[Tensor | None], launches: slice = slice(None)) -> None:
        """The ordinary way: through Triton, on views of the buffers."""
        for number in range(len(self.launches))[launches]:
            step = self.launches[number]
            arguments = [_tensors(buffers, argument) for argument in step.arguments]
            kernel = step.kernel[(step.grid,)](*arguments, **step.constants)
            if kernel is not None and triton.__version__.startswith(_REPLAYS):
                self._compiled[number] = _compiled(step, kernel)

    def warm(self, types: Sequence[torch.dtype | None]) -> None:
        """Compile the launches, for aligned buffers of these types; within Triton's
        `AsyncCompileMode` this only hands them to its threads."""
        for step in self.launches:
            arguments = [_stand_ins(types, argument) for argument in step.arguments]
            step.kernel.warmup(*arguments, grid=(step.grid,), **step.constants)

    @property
    def replays(self) -> bool:
        """Whether `replay` may take the place of `run`."""
        return len(self._compiled) == len(self.launches)

    def steps(self) -> list[Callable[[Sequence[int], int], None]]:
        """What `replay` calls, one function a launch."""
        return [self._compiled[number] for number in range(len(self.launches))]

    def replay(self, pointers: Sequence[int], stream: int, launches: slice = slice(None)) -> None:
        """The launches of the first `run` again, on other addresses of the same alignment."""
        for number in range(len(self.launches))[launches]:
            self._compiled[number](pointers, stream)


def hooked() -> bool:
    """Whether somebody (a profiler of Triton's) wants to see each launch."""
    runtime = knobs.runtime
    return any(
        getattr(hook, "calls", hook)
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook)
    )


def view(buffers: Sequence[Tensor | None], block: Block) -> Tensor:
    """The tensor a block stands for."""
    buffer = buffers[block.buffer]
    if block.dtype is None:
        return buffer
    size = block.length * block.dtype.itemsize
    return buffer[block.offset : block.offset + size].view(block.dtype)


def _tensors(buffers, argument):
    if isinstance(argument, Tiles):
        return _descriptor(argument, view(buffers, argument.block))
    return view(buffers, argument) if isinstance(argument, Block) else argument


def _stand_ins(types, argument):
    if isinstance(argument, Tiles):
        return _descriptor(argument, MockTensor(argument.block.dtype or types[argument.block.buffer]))
    if isinstance(argument, Block):
        return MockTensor(argument.dtype or types[argument.buffer])
    return argument


def _descriptor(tiles: Tiles, base):
    shape, strides = [tiles.rows, tiles.columns], [tiles.columns, 1]
    if not tiles.swizzled:
        return TensorDescriptor(base, shape, strides, [tiles.height, tiles.width])
    from carbon_compile.templates import matmul_hopper

    return matmul_hopper.descriptor(base, shape, strides, [tiles.height, tiles.width])


def _compiled(step: Launch, kernel) -> Callable[[Sequence[int], int], None]:
    """A function of addresses and a stream that launches `step` as its first run did.

    It is written out as Python: a list of thirty arguments to copy, walk and unpack costs more.
    """
    names = step.kernel.arg_names[len(step.arguments) :]
    given = {"run": kernel.run, "function": kernel.function, "metadata": kernel.packed_metadata}
    native = _native_launcher(kernel)
    begin = f"run({step.grid}, 1, 1, stream, function, "
    if native is not None:
        given["run"], cooperative, dependent, encoders = native
        begin += f"{cooperative}, {dependent}, None, None, "
        encoders = iter(encoders)
    texts = []
    for i, argument in enumerate([*step.arguments, *(step.constants[name] for name in names)]):
        if isinstance(argument, Block | Tiles):
            block = argument if isinstance(argument, Block) else argument.block
            text = f"at[{block.buffer}] + {block.offset}" if block.offset else f"at[{block.buffer}]"
            if isinstance(argument, Tiles):
                shape = ([argument.rows, argument.columns], [argument.columns, 1])
                given[f"tiles{i}"] = _descriptors(shape) if native is None else next(encoders)(*shape)
                text = f"tiles{i}({text})"
                if native is not None:
                    text += f", {argument.rows}, {argument.columns}, {argument.columns}, 1"
        elif type(argument) in (int, bool):
            text = repr(argument)
        else:
            given[f"given{i}"] = argument
            text = f"given{i}"
        texts.append(text)
    exec(f"def launch(at, stream):\n    {begin}metadata, None, None, None, {', '.join(texts)})", given)  # noqa: S102
    return given["launch"]


def _descriptors(shape):
    return lambda pointer: _Address(pointer, *shape)


# A process meets few addresses of scratch: the allocator gives the same ones again.
_ENCODED = 1024


def _native_launcher(kernel) -> tuple | None:
    """Of a kernel that Triton 3.6 compiled: the C function behind `kernel.run`, its two flags, and of
    each tensor descriptor a function (shape, strides) -> (address -> encoded). None elsewhere.

    In between Python would encode each descriptor anew for every launch.
    """
    launcher = kernel.run
    try:
        if not triton.__version__.startswith("3.6.") or launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        flags = bool(launcher.launch_cooperative_grid), bool(launcher.launch_pdl)
        if not inspect.isfunction(launcher.launch):  # no descriptors
            return launcher.launch, *flags, ()
        within = inspect.getclosurevars(launcher.launch).nonlocals
        kinds = [within["tensordesc_meta"][i] for i in range(len(within["tensordesc_indices"]))]
        if not all(kinds) or any(kind["fp4_padded"] for kind in kinds):
            return None
        return within["launcher"], *flags, [functools.partial(_encoder, kind) for kind in kinds]
    except (AttributeError, KeyError, TypeError):
        return None


def _encoder(kind, shape, strides):
    """As Triton 3.6 encodes a descriptor without padding; the code is a function of the address alone."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    encode = triton.runtime.driver.active.utils.fill_tma_descriptor
    fixed = kind["swizzle"], kind["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[kind["elem_type"]], kind["block_size"]
    return functools.lru_cache(_ENCODED)(lambda pointer: encode(pointer, *fixed, shape, strides, 0))
