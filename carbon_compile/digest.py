"""A 64-bit digest of a tensor's bits by integer sums, so that every engine may add in its own order.

    digest(x) = sum over elements i of mix(b_i + i G)  mod 2^64
    mix(v)    = fold(fold(v C1) C2),  fold(w) = w ^ (w >> 32)   mod 2^64, logical shift

b_i is element i's canonical bits as the integer that bits.canonical_bits makes of them (a float32 is
an int32, with one NaN), i its row-major logical index; a complex number is two elements. G, C1, C2 are the constants of SplitMix64
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

What it is worth: `mix` is a bijection, so a change of one element always changes the digest. Changes
of several elements cancel with a chance of about 2^-64 unless somebody searches for them: it detects
change, and it is not cryptographic. Dtype, shape and name are not in it; whoever keeps a digest
keeps those beside it.

Everything here is the CPU twin in int64, which wraps; `digest_kernels` does the same on a GPU, in one
launch for all tensors of a kind.
"""

import functools

import torch
from torch import Tensor

from carbon_compile.bits import canonical_bits

G, C1, C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Elements mixed at a time: their int64 buffers stay in a core's cache.
_CHUNK = 1 << 15
# Tensors up to this size are mixed together: a step count has one element, and there are hundreds.
_SMALL = 1 << 12


def signed(value: int) -> int:
    """A number modulo 2^64 as the int64 that holds it."""
    return ((value + 2**63) & (2**64 - 1)) - 2**63


def digest(x: Tensor) -> int:
    """The digest of one tensor, in [0, 2^64). TypeError where it has no plain bits (sparse, quantized)."""
    return int(digests([x])[0]) & (2**64 - 1)


def digests(tensors: list[Tensor]) -> Tensor:
    """The digests of tensors of one device as int64 [len(tensors)] there; the host waits for nothing."""
    device = tensors[0].device
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if device.type == "cuda" and _kernels() is not None:
        _kernels().digests(tensors, out)
        return out
    small: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        if x.numel() > _SMALL or x.is_complex() or x.layout is not torch.strided:
            out[i] = _large(x)
        else:
            small.setdefault(x.dtype, []).append(i)
    for places in small.values():
        _small([tensors[i] for i in places], places, out)
    return out


@functools.cache
def _kernels():
    try:
        from carbon_compile import digest_kernels
    except ImportError:  # no Triton: the twin runs on the GPU too, only slower
        return None
    return digest_kernels


def integers(x: Tensor) -> Tensor:
    """The canonical bits of each element in row-major order, as a flat tensor of some integer type."""
    x = x.detach()
    # A sum says cheaply that no element is NaN; where it can't, the slower way is right too.
    if x.is_floating_point() and x.element_size() > 1 and x.layout is torch.strided and not x.sum().isnan():
        bits = x.resolve_neg().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    else:
        bits = canonical_bits(x)
    return (bits.view(torch.int64) if bits.dtype is torch.uint64 else bits).reshape(-1)


def _mixed(v: Tensor, spare: Tensor | None = None) -> Tensor:
    """`mix` of every element, in place; `spare` holds what is shifted."""
    for constant in (C1, C2):
        v.mul_(signed(constant))
        v.bitwise_xor_(torch.bitwise_right_shift(v, 32, out=spare).bitwise_and_(0xFFFFFFFF))
    return v


@functools.lru_cache(maxsize=4)
def _steps(n, device):
    """i G for i in 0..n-1."""
    return torch.arange(n, dtype=torch.int64, device=device) * signed(G)


def _large(x):
    bits = integers(x)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    steps, v, spare = _steps(_CHUNK, x.device), *torch.empty(2, _CHUNK, dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        n = chunk.numel()
        torch.add(chunk, steps[:n], out=v[:n]).add_(signed(start * G))
        total += _mixed(v[:n], spare[:n]).sum()
    return total


@functools.lru_cache(maxsize=64)
def _layout(sizes, device):
    """(i G of every element, which tensor it belongs to) for small tensors laid end to end."""
    steps = torch.cat([_steps(max(sizes, default=1), device)[:n] for n in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64)).to(device)
    return steps, owner


def _small(tensors, places, out):
    """Digests of small tensors of one dtype, laid end to end: step counts come in hundreds."""
    steps, owner = _layout(tuple(x.numel() for x in tensors), out.device)
    bits = integers(torch.cat([x.detach().reshape(-1) for x in tensors])).to(torch.int64)
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=out.device)
    totals.index_add_(0, owner, _mixed(bits + steps))
    out[torch.tensor(places, device=out.device)] = totals
