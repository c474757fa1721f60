"""The GPU side of `digest`: all tensors of a kind in one launch.

A program mixes one chunk of one tensor, whose address it reads from a table, and adds its sum to
that tensor's digest with an integer atomic. Chunks are alike, so a table of which tensor each program
works at spreads an embedding and a bias over the same grid. Only the addresses may change from one
step to the next, and they travel to the GPU only if they did.
"""

from __future__ import annotations

import array
import contextlib
import functools
import operator

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.digest import C1, C2, G

# 64 KiB a program, in rounds of eight words a thread: four loads of 16 bytes are under way at once.
_CHUNK, _BLOCK, _WARPS = 1 << 13, 1 << 10, 4
_G, _C1, _C2 = tl.constexpr(G), tl.constexpr(C1), tl.constexpr(C2)

# dtype -> (bits of an element, those of infinity, those of the one NaN).
_FLOATS = {
    torch.float64: (64, 0x7FF0000000000000, 0x7FF8000000000000),
    torch.float32: (32, 0x7F800000, 0x7FC00000),
    torch.bfloat16: (16, 0x7F80, 0x7FC0),
    torch.float16: (16, 0x7C00, 0x7E00),
}
# Where every pattern counts as it is.
_PLAIN = (64, 0, 0)


@triton.jit
def _one_nan(word, WIDTH: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr):
    """A word whose elements that are NaN are all NAN."""
    if INFINITY == 0:
        return word
    elif WIDTH == 64:
        return tl.where((word & 0x7FFFFFFFFFFFFFFF) > INFINITY, NAN, word)
    elif WIDTH == 32:
        # The halves are registers of their own, so this costs no shift.
        low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
        low = tl.where((low & 0x7FFFFFFF) > INFINITY, NAN, low)
        high = tl.where((high & 0x7FFFFFFF) > INFINITY, NAN, high)
        return low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    else:
        # Four elements at a time. The sum carries into an element's top bit where its magnitude is
        # above infinity's, and never beyond; (2^16 - 1) times those bits is a mask of the elements.
        LANES: tl.constexpr = 0x0001000100010001
        above = ((word & (0x7FFF * LANES)) + ((0x7FFF - INFINITY) * LANES)) & (LANES << 15)
        mask = (above << 1) - (above >> 15)
        return word ^ ((word ^ (NAN * LANES)) & mask)


@triton.jit
def _mixed(word, step):
    v = (word + step) * _C1
    v = (v ^ (v >> 32)) * _C2
    return v ^ (v >> 32)


@triton.jit
def digest_kernel(
    owners, addresses, lengths, firsts, places, out,
    WIDTH: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    address = tl.load(addresses + tensor)
    start = (program - tl.load(firsts + tensor)).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(lengths + tensor) - start * 8, CHUNK * 8).to(tl.int32)  # bytes
    lane = tl.arange(0, BLOCK)
    steps = lane.to(tl.uint64) * _G
    first = start.to(tl.uint64) * _G
    ROUND: tl.constexpr = BLOCK * _G % 2**64
    total = tl.zeros([BLOCK], tl.uint64)
    # A tensor in the middle of a buffer may begin inside a word: its words are then cut from two.
    odd = 0 if ALIGNED else (address % 8).to(tl.int32)
    words = (address - odd + start * 8).to(tl.pointer_type(tl.uint64))
    if ALIGNED:
        words = tl.multiple_of(words, 16)
    if ALIGNED and left == CHUNK * 8:
        for offset in range(0, CHUNK, BLOCK):
            word = tl.load(words + offset + lane)
            total += _mixed(_one_nan(word, WIDTH, INFINITY, NAN), steps + first)
            first += ROUND
    else:
        offset = 0
        while offset * 8 < left:
            begin = (offset + lane) * 8
            inside = begin < left
            word = tl.load(words + offset + lane, mask=inside, other=0)
            if not ALIGNED:
                next = tl.load(words + offset + lane + 1, mask=begin + 8 - odd < left, other=0)
                bits = (odd * 8).to(tl.uint64)
                word = (word >> bits) | ((next << 1) << (63 - bits))
            surplus = tl.minimum(tl.maximum(begin + 8 - left, 0), 7).to(tl.uint64) * 8
            word = (word << surplus) >> surplus
            mixed = _mixed(_one_nan(word, WIDTH, INFINITY, NAN), steps + first)
            total += tl.where(inside, mixed, 0)
            first += ROUND
            offset += BLOCK
    tl.atomic_add(out + tl.load(places + tensor), tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


class Batch:
    """digest.Batch on a GPU."""

    def __init__(self, tensors: list[Tensor]):
        self._prepare(tensors)

    def _prepare(self, tensors):
        """Group the tensors by kind; those that a kernel can't read as they are, are copied at every start."""
        kinds: dict[tuple, list] = {}
        self._copied = []
        for place, x in enumerate(tensors):
            flat, kind = _readable(x)
            if flat is not x:
                self._copied.append(place)
            if flat.numel():
                kinds.setdefault((*kind, flat.data_ptr() % 16 == 0), []).append((place, flat.numel() * flat.element_size()))
        self._launches = [_Launch(kind, members, tensors[0].device) for kind, members in kinds.items()]

    def start(self, tensors: list[Tensor], out: Tensor) -> None:
        """Add the digest of tensor i to out[i], int64 zeros on the tensors' device; the host doesn't wait."""
        if self._copied:
            readable = list(tensors)
            for place in self._copied:
                readable[place] = _readable(tensors[place])[0]
        else:
            readable = tensors
        if not all([launch.locate(readable, out) for launch in self._launches]):
            self._prepare(tensors)
            return self.start(tensors, out)
        with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
            for launch in self._launches:
                launch(out)


class _Launch:
    """The tensors of one kind; `members` are (place in the list, bytes)."""

    def __init__(self, kind, members, device):
        *self.kind, self.aligned = kind
        self._places = [place for place, _ in members]
        chunks = [triton.cdiv(size, 8 * _CHUNK) for _, size in members]
        self.programs = sum(chunks)
        owners = torch.repeat_interleave(torch.arange(len(members), dtype=torch.int32), torch.tensor(chunks))
        firsts = torch.tensor([0, *chunks[:-1]]).cumsum(0)
        self._tables = [owners.to(device), *(table.to(device) for table in (torch.tensor([size for _, size in members]), firsts.int(), torch.tensor(self._places)))]
        self._pointers, self._addresses, self._stream = None, None, None

    def locate(self, tensors, out):
        """Let the GPU know where the tensors are. False where they are no longer aligned as they were."""
        members = tensors if len(self._places) == len(tensors) else [tensors[place] for place in self._places]
        pointers = [x.data_ptr() for x in members]
        # A table that another stream copied might not be there yet.
        stream = torch.cuda.current_stream(out.device) if out.is_cuda else None
        if pointers == self._pointers and stream == self._stream:
            return True
        if self.aligned and functools.reduce(operator.or_, pointers) % 16:
            return False
        addresses = torch.frombuffer(array.array("q", pointers), dtype=torch.int64)
        self._addresses = addresses.pin_memory().to(out.device, non_blocking=True) if out.is_cuda else addresses
        self._pointers, self._stream = pointers, stream
        return True

    def __call__(self, out):
        owners, lengths, firsts, places = self._tables
        width, infinity, nan = self.kind
        digest_kernel[(self.programs,)](
            owners, self._addresses, lengths, firsts, places, out,
            WIDTH=width, INFINITY=infinity, NAN=nan, ALIGNED=self.aligned, CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip


def _readable(x):
    """(contiguous tensor, its kind: width, infinity and NaN); x itself where that is possible."""
    if x.layout is not torch.strided or x.is_quantized:
        raise TypeError(f"a {x.layout} tensor of {x.dtype} has no plain bits; densify it first")
    x = x.detach() if x.is_complex() else x
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.is_neg() or not x.is_contiguous():
        x = x.detach().resolve_neg().contiguous()
    if x.is_floating_point() and x.dtype not in _FLOATS:
        from carbon_compile.bits import canonical_bits

        x = canonical_bits(x)
    return x, _FLOATS.get(x.dtype, _PLAIN)
