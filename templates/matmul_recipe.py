"""A product as launches on six buffers: written down once for a signature, then replayed.

Triton's own call binds and specialises some thirty arguments each time, in Python: ten times what
the launch itself costs. A recipe keeps the compiled kernels of its first run and fills in addresses.
It holds for one signature: sizes, strides, types, alignments and device all enter its key, and with
them everything a kernel was specialised for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.jit import MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Buffers: the caller's operands and bias, the result, scratch, scratch that starts as zeros, counters
# that start as zeros and are zeros again afterwards, and what a cut product has from other ranks.
A, B, BIAS, OUT, WORK, ZEROS, GATES, RECEIVED = range(8)

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
        self.sizes = {WORK: 0, ZEROS: 0, GATES: 0}
        self._compiled: dict[int, tuple] = {}  # by the number of the launch

    def reserve(self, length: int, dtype: torch.dtype, buffer: int = WORK) -> Block:
        """A new block of scratch."""
        offset = self.sizes[buffer]
        self.sizes[buffer] += -(-length * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return Block(buffer, offset, dtype, length)

    def launch(self, kernel, grid: int, *arguments, **constants) -> None:
        self.launches.append(Launch(kernel, grid, arguments, constants))

    def scratch(self, device) -> list[Tensor | None]:
        """Fresh buffers WORK, ZEROS and GATES."""
        return [
            new(size, dtype=torch.uint8, device=device) if size else None
            for size, new in zip(self.sizes.values(), (torch.empty, torch.zeros, torch.zeros), strict=True)
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

    def replay(self, pointers: Sequence[int], stream: int, launches: slice = slice(None)) -> None:
        """The launches of the first `run` again, on other addresses of the same alignment."""
        for number in range(len(self.launches))[launches]:
            run, grid, function, metadata, fixed, moving = self._compiled[number]
            arguments = fixed.copy()
            for i, buffer, offset, shape in moving:
                pointer = pointers[buffer] + offset
                arguments[i] = pointer if shape is None else _Address(pointer, *shape)
            run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments)


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
        return _descriptor(argument, MockTensor(argument.block.dtype))
    if isinstance(argument, Block):
        return MockTensor(argument.dtype or types[argument.buffer])
    return argument


def _descriptor(tiles: Tiles, base):
    shape, strides = [tiles.rows, tiles.columns], [tiles.columns, 1]
    if not tiles.swizzled:
        return TensorDescriptor(base, shape, strides, [tiles.height, tiles.width])
    from carbon_compile.templates import matmul_hopper

    return matmul_hopper.descriptor(base, shape, strides, [tiles.height, tiles.width])


def _compiled(step: Launch, kernel) -> tuple:
    """What a replay needs: the launcher, what it always gets, and which arguments are addresses."""
    names = step.kernel.arg_names[len(step.arguments) :]
    arguments = [*step.arguments, *(step.constants[name] for name in names)]
    moving = []
    for i, argument in enumerate(step.arguments):
        if isinstance(argument, Block):
            moving.append((i, argument.buffer, argument.offset, None))
        elif isinstance(argument, Tiles):
            shape = ([argument.rows, argument.columns], [argument.columns, 1])
            moving.append((i, argument.block.buffer, argument.block.offset, shape))
    return kernel.run, step.grid, kernel.function, kernel.packed_metadata, arguments, moving
