"""The GPU side of `digest`: all tensors of one element size in one launch.

A program mixes one chunk of one tensor, whose address it reads from a table, and adds its sum to
that tensor's digest with an integer atomic. Addresses travel to the GPU in one small copy a call.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from carbon_compile.digest import C1, C2, G

_CHUNK, _BLOCK, _WARPS = 1 << 14, 1 << 11, 8
_G, _C1, _C2 = tl.constexpr(G), tl.constexpr(C1), tl.constexpr(C2)

# dtype -> (how the kernel reads it, bits of the magnitude, those of infinity, those of the one NaN);
# the last three are 0 where every pattern counts as it is.
_FLOATS = {
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80, 0x7FC0),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00, 0x7E00),
}
_TRITON = {
    torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64, torch.bool: tl.uint8,
    torch.uint8: tl.uint8, torch.uint16: tl.uint16, torch.uint32: tl.uint32, torch.uint64: tl.int64,
}  # fmt: skip


@triton.jit
def digest_kernel(
    addresses, sizes, owners, starts, places, out,
    ELEMENT: tl.constexpr, MAGNITUDE: tl.constexpr, INFINITY: tl.constexpr, NAN: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    start = tl.load(starts + program)
    size = tl.load(sizes + tensor)
    elements = tl.load(addresses + tensor).to(tl.pointer_type(ELEMENT))
    total = tl.zeros([BLOCK], tl.int64)
    for offset in range(0, CHUNK, BLOCK):
        i = start + offset + tl.arange(0, BLOCK).to(tl.int64)
        inside = i < size
        bits = tl.load(elements + i, mask=inside, other=0).to(tl.int64)
        if INFINITY != 0:
            bits = tl.where((bits & MAGNITUDE) > INFINITY, NAN, bits)
        v = bits.to(tl.uint64, bitcast=True) + i.to(tl.uint64, bitcast=True) * _G
        v = v * _C1
        v = (v ^ (v >> 32)) * _C2
        v = v ^ (v >> 32)
        total += tl.where(inside, v.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(out + tl.load(places + tensor), tl.sum(total, 0))


def digests(tensors: list[Tensor], out: Tensor) -> None:
    """Add the digest of tensor i to out[i], int64 zeros on the tensors' device."""
    kinds: dict[tuple, list] = {}
    for place, x in enumerate(tensors):
        flat, kind = _readable(x)
        if flat.numel():
            kinds.setdefault(kind, []).append((place, flat))
    for kind, members in kinds.items():
        _launch(kind, members, out)


def _readable(x):
    """(contiguous tensor of known kind, kind)."""
    if x.dtype in _FLOATS and x.is_contiguous() and not x.is_neg():  # nearly all, and there are hundreds a step
        return x, _FLOATS[x.dtype]
    if x.layout is not torch.strided or x.is_quantized:
        raise TypeError(f"a {x.layout} tensor of {x.dtype} has no plain bits; densify it first")
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.resolve_neg().contiguous()
    if x.dtype in _FLOATS:
        return x, _FLOATS[x.dtype]
    if x.is_floating_point():
        from carbon_compile.bits import canonical_bits

        x = canonical_bits(x)
    return x, (x.dtype, 0, 0, 0)


@functools.lru_cache(maxsize=64)
def _schedule(places, sizes, device):
    """The tables that don't change while shapes don't: sizes, places, and each program's chunk."""
    owners = [i for i, n in enumerate(sizes) for _ in range(triton.cdiv(n, _CHUNK))]
    starts = [start for n in sizes for start in range(0, n, _CHUNK)]
    return [torch.tensor(table, dtype=torch.int64).to(device) for table in (sizes, places, owners, starts)]


def _launch(kind, members, out):
    element, magnitude, infinity, nan = kind
    sizes, places, owners, starts = _schedule(tuple(p for p, _ in members), tuple(x.numel() for _, x in members), out.device)
    addresses = torch.tensor([x.data_ptr() for _, x in members], dtype=torch.int64)
    if out.is_cuda:
        addresses = addresses.pin_memory().to(out.device, non_blocking=True)
    digest_kernel[(len(owners),)](
        addresses, sizes, owners, starts, places, out,
        ELEMENT=_TRITON[element], MAGNITUDE=magnitude, INFINITY=infinity, NAN=nan,
        CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
