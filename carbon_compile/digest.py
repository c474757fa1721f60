"""A 64-bit digest of a tensor's bits by integer sums, so that every engine may add in its own order.

    digest(x) = sum over words i of mix(w_i + i G)  mod 2^64
    mix(v)    = fold(fold(v C1) C2),  fold(w) = w ^ (w >> 32)   mod 2^64, logical shift

w_i are 64 bits of x's elements in row-major order, the first in the lowest bits: one float64, two
float32, four bfloat16, eight bytes. The last word is filled up with zeros. An element counts by the
canonical bits that bits.canonical_bits gives (one NaN); a complex number is two elements. G, C1, C2
are the constants of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014).

What it is worth: `mix` is a bijection, so a change within one word always changes the digest. Changes
of several words cancel with a chance of about 2^-64 unless somebody searches for them: it detects
change, and it is not cryptographic. Dtype, shape and name are not in it; whoever keeps a digest
keeps those beside it.

Everything here is the CPU twin in int64, which wraps; `digest_kernels` does the same on a GPU, in one
launch for all tensors of a kind.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from carbon_compile.bits import canonical_bits

G, C1, C2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Words mixed at a time: their buffers stay in a core's cache.
_CHUNK = 1 << 15
# Tensors up to this size are copied and mixed together: a step count has one element, and there are hundreds.
_SMALL = 1 << 12


def signed(value: int) -> int:
    """A number modulo 2^64 as the int64 that holds it."""
    return ((value + 2**63) & (2**64 - 1)) - 2**63


def digest(x: Tensor) -> int:
    """The digest of one tensor, in [0, 2^64). TypeError where it has no plain bits (sparse, quantized)."""
    return int(digests([x])[0]) & (2**64 - 1)


def digests(tensors: list[Tensor]) -> Tensor:
    """The digests of tensors of one device as int64 [len(tensors)] there; the host waits for nothing.

    TypeError where one has no plain bits.
    """
    out = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    prepared(tensors).start(tensors, out)
    return out


def prepared(tensors: list[Tensor]):
    """A `Batch` for tensors like these: of digest_kernels on a GPU, of the twin on a CPU or without Triton."""
    return _kernels().Batch(tensors) if tensors[0].is_cuda and _kernels() is not None else Batch(tensors)


class Batch:
    """The digests of tensors of one device, again and again.

    Made from a list of tensors, it takes other lists of the same dtypes, shapes, strides and views
    (conjugate, negative), which isn't checked. TypeError where a tensor has no plain bits.
    """

    def __init__(self, tensors: list[Tensor]):
        self._large: list[int] = []
        small: dict[tuple, list[int]] = {}
        for place, x in enumerate(tensors):
            if x.layout is not torch.strided or x.is_quantized or x.numel() > _SMALL:
                self._large.append(place)
            elif x.numel():
                small.setdefault((x.dtype, x.shape), []).append(place)
        self._small = [(places, torch.tensor(places, device=tensors[0].device)) for places in small.values()]

    def start(self, tensors: list[Tensor], out: Tensor) -> None:
        """Put the digest of tensor i into out[i], int64 zeros on the tensors' device."""
        out[: len(tensors)] = self.later(tensors)()

    @torch.no_grad()
    def later(self, tensors: list[Tensor]) -> Callable[[], Tensor]:
        """The digests of the tensors as they are now, int64 [len(tensors)], when called for.

        Large tensors are read at once; small ones are copied, and cost no more until then.
        """
        out = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
        for place in self._large:
            out[place] = _mixed_sum(words(tensors[place][None]))[0]
        copies = [torch.stack([tensors[place] for place in places]) for places, _ in self._small]

        def finish():
            for (_, places), copy in zip(self._small, copies, strict=True):
                out[places] = _mixed_sum(words(copy))
            return out

        return finish


@functools.cache
def _kernels():
    try:
        from carbon_compile import digest_kernels
    except ImportError:  # no Triton: the twin runs on the GPU too, only slower
        return None
    return digest_kernels


def words(x: Tensor) -> Tensor:
    """The words of each of x[0], x[1], ... as int64 [len(x), words]."""
    bits = _integers(x).reshape(x.shape[0], -1)
    each = 8 // bits.element_size()
    if bits.shape[1] % each or bits.storage_offset() % each:
        filled = torch.zeros(bits.shape[0], -(-bits.shape[1] // each) * each, dtype=bits.dtype, device=bits.device)
        filled[:, : bits.shape[1]] = bits
        bits = filled
    return bits.view(torch.int64)


def _integers(x):
    """The canonical bits of each element as some integer type; pairs of them for complex numbers."""
    x = x.detach()
    # A sum says cheaply that no element is NaN; where it can't, the slower way is right too.
    if x.is_floating_point() and x.element_size() > 1 and x.layout is torch.strided and not x.sum().isnan():
        return x.resolve_neg().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return canonical_bits(x).contiguous()


def _mixed_sum(rows):
    """The sum of mix(w_i + i G) over each row of words, int64 [len(rows)]."""
    total = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    steps = _steps(_CHUNK, rows.device)
    for start in range(0, rows.shape[1], _CHUNK):
        chunk = rows[:, start : start + _CHUNK]
        v = (chunk + steps[: chunk.shape[1]]).add_(signed(start * G))
        for constant in (C1, C2):
            v.mul_(signed(constant))
            v.bitwise_xor_((v >> 32).bitwise_and_(0xFFFFFFFF))
        total += v.sum(1)
    return total


@functools.lru_cache(maxsize=4)
def _steps(n, device):
    """i G for i in 0..n-1."""
    return torch.arange(n, dtype=torch.int64, device=device) * signed(G)
