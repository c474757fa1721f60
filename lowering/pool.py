"""Pooling, padding and unfolding: windows gathered by index (contract sections 3 and 6).

A window is a table of input positions, valid or not, one a dimension. Averages are exact sums of
what is valid over a count, maxima the element at the lowest index among the largest. Derivatives
are those of gathers: each input's exact sum over the windows that hold it.
"""

import math

import torch
import torch.nn.functional as F

from . import prims as P
from .registry import composite


def _list(value, n):
    if isinstance(value, (list, tuple)):
        return list(value) if len(value) == n else list(value) * n
    return [value] * n


class Windows:
    """The windows of the last `n` dimensions of an input: index and valid, [outputs..., kernel...].

    tables: one (index, valid) pair a dimension, each [outputs, kernel]; an invalid index counts as
    position 0. `sizes`: the input's.
    """

    def __init__(self, sizes, tables):
        n = len(tables)
        self.n, self.sizes = n, sizes
        self.outputs = [t[0].shape[0] for t in tables]
        self.kernel = [t[0].shape[1] for t in tables]
        spread = [[(t.shape[k // n] if k % n == d else 1) for k in range(2 * n)] for d, (t, _) in enumerate(tables)]
        self.valid = _all(valid.reshape(shape) for (_, valid), shape in zip(tables, spread, strict=True))
        self.index = [torch.where(valid, index, 0).reshape(shape) for (index, valid), shape in zip(tables, spread, strict=True)]

    def gather(self, x):
        """[..., sizes...] to [..., outputs..., kernel...]; what stands at invalid places is arbitrary."""
        return x[(..., *self.index)]

    def flat(self):
        """Each place's position in the flattened dimensions."""
        position = 0
        for index, size in zip(self.index, self.sizes, strict=True):
            position = position * size + index
        return position

    def inner(self):
        """The kernel's dimensions, from the end."""
        return list(range(-self.n, 0))


def _all(masks):
    result = None
    for mask in masks:
        result = mask if result is None else result & mask
    return result


def _line(n, start, step, device):
    return torch.arange(n, dtype=torch.int64, device=device) * step + start


def strided(sizes, device, kernel, stride, padding, dilation, ceil_mode=False, include_padding=False):
    """Windows over dimensions of `sizes`, and the number of elements that each counts."""
    tables, counts = [], []
    for d, size in enumerate(sizes):
        k, s, p = kernel[d], stride[d], padding[d]
        reach = dilation[d] * (k - 1) + 1
        outputs = (size + 2 * p - reach + (s - 1 if ceil_mode else 0)) // s + 1
        if ceil_mode and (outputs - 1) * s >= size + p:
            outputs -= 1
        if outputs <= 0:
            raise RuntimeError(f"a window of {reach} does not fit into {size} elements padded by {p}")
        index = _line(outputs, -p, s, device).unsqueeze(1) + _line(k, 0, dilation[d], device)
        valid = (index >= 0) & (index < size)
        tables.append((index, valid))
        counts.append((index < size + p) if include_padding else valid)
    return Windows(sizes, tables), _counted([c.sum(1) for c in counts])


def _counted(counts):
    """[outputs...] from one count a window of each dimension."""
    n = len(counts)
    spread = [c.reshape([-1 if e == d else 1 for e in range(n)]) for d, c in enumerate(counts)]
    return math.prod(spread[1:], start=spread[0])


def _pooling(x, kernel, stride, padding, dilation, ceil_mode, include_padding=False):
    n = len(kernel)
    for k, p, d in zip(kernel, padding, dilation, strict=True):
        if 2 * p > d * (k - 1) + 1:
            raise RuntimeError(f"padding {p} is more than half of a window of {d * (k - 1) + 1}")
    return strided(x.shape[x.dim() - n :], x.device, kernel, stride, padding, dilation, ceil_mode, include_padding)


def adaptive(x, outputs):
    """Windows from floor(i n / o) up to ceil((i + 1) n / o), and the number of elements of each."""
    n = len(outputs)
    sizes, tables, counts = x.shape[x.dim() - n :], [], []
    for size, o in zip(sizes, outputs, strict=True):
        o = size if o is None else o
        longest = size // o if isinstance(size, int) and size % o == 0 else size // o + 2
        place = _line(o, 0, 1, x.device)
        start, end = place * size // o, ((place + 1) * size + o - 1) // o
        index = start.unsqueeze(1) + _line(longest, 0, 1, x.device)
        tables.append((index, index < end.unsqueeze(1)))
        counts.append(end - start)
    return Windows(sizes, tables), _counted(counts)


def average(x, windows, count):
    """Exact sums of valid elements over `count`; in binary32, rounded once."""
    wide = x.to(P.wide(x))
    total = torch.where(windows.valid, windows.gather(wide), 0.0).sum(windows.inner())
    return (total / count).to(x.dtype)


def maximum(x, windows):
    """(values, positions in the flattened dimensions) of the lowest index among the largest; NaN wins."""
    key = x.detach()
    if x.is_floating_point():
        key = torch.ops.carbon.order_key(key, dtype=P.key_type(x.dtype))
    key = torch.where(windows.valid, windows.gather(key), torch.iinfo(key.dtype).min)
    best = (key == key.amax(windows.inner(), keepdim=True)) & windows.valid
    last = math.prod(windows.sizes) - 1
    # Bounded for lanes that hold no window: see `reduction._first`.
    index = torch.where(best, windows.flat(), last).amin(windows.inner()).clamp(max=last)
    values = x.flatten(-windows.n).gather(-1, index.flatten(-windows.n))
    return values.reshape(index.shape), index


# --- pooling ------------------------------------------------------------------------------------------------


def _max_pool(n):
    def max_pool(x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        """[..., sizes...] to [..., outputs...]; with `return_indices`, also where in each plane."""
        kernel = _list(kernel_size, n)
        stride = _list(stride, n) if stride not in (None, [], ()) else kernel
        windows, _ = _pooling(x, kernel, stride, _list(padding, n), _list(dilation, n), ceil_mode)
        values, index = maximum(x, windows)
        return (values, index) if return_indices else values

    return max_pool


def _avg_pool(n):
    def avg_pool(x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        """[..., sizes...] to [..., outputs...]."""
        kernel = _list(kernel_size, n)
        stride = _list(stride, n) if stride not in (None, [], ()) else kernel
        windows, count = _pooling(x, kernel, stride, _list(padding, n), [1] * n, ceil_mode, count_include_pad)
        return average(x, windows, divisor_override or count)

    return avg_pool


def _adaptive_avg_pool(n):
    def adaptive_avg_pool(x, output_size):
        return average(x, *adaptive(x, _list(output_size, n)))

    return adaptive_avg_pool


def _adaptive_max_pool(n):
    def adaptive_max_pool(x, output_size, return_indices=False):
        values, index = maximum(x, adaptive(x, _list(output_size, n))[0])
        return (values, index) if return_indices else values

    return adaptive_max_pool


def _with_indices(function):
    def with_indices(*args, **kwargs):
        return function(*args, **{**kwargs, "return_indices": True})

    return with_indices


for _n in (1, 2, 3):
    for _kind, _make in (("max_pool", _max_pool), ("adaptive_max_pool", _adaptive_max_pool)):
        _name, _function = f"{_kind}{_n}d", _make(_n)
        composite(getattr(F, _name), section="3")(_function)
        composite(getattr(F, f"{_name}_with_indices"), section="3")(_with_indices(_function))
        if _kind == "max_pool":
            composite(getattr(torch, _name), section="3")(_function)
    composite(getattr(F, f"avg_pool{_n}d"), section="3")(_avg_pool(_n))
    composite(getattr(F, f"adaptive_avg_pool{_n}d"), section="3")(_adaptive_avg_pool(_n))


# --- padding and unfolding ---------------------------------------------------------------------------------


def _reflected(index, size):
    return (size - 1) - (size - 1 - index.abs()).abs()


_PADDED = {
    "reflect": _reflected,
    "replicate": lambda index, size: index.clamp(0, size - 1),
    "circular": lambda index, size: index % size,
}


@composite(F.pad, torch._C._nn.pad, section="6")
def pad(input, pad, mode="constant", value=None):  # noqa: A002
    """torch.nn.functional.pad; the last dimension's (left, right) comes first in `pad`."""
    if mode not in _PADDED:
        return torch.constant_pad_nd(input, pad, 0 if value is None else value)
    n = len(pad) // 2
    index = []
    for d in range(n):
        left, right = pad[2 * (n - 1 - d)], pad[2 * (n - 1 - d) + 1]
        size = input.shape[input.dim() - n + d]
        limit = {"reflect": size - 1, "circular": size}.get(mode)
        if limit is not None and max(left, right) > limit:
            raise RuntimeError(f"{mode} padding of {max(left, right)} is more than {limit} for {size} elements")
        place = _line(size + left + right, -left, 1, input.device)
        index.append(_PADDED[mode](place, size).reshape([-1 if e == d else 1 for e in range(n)]))
    return input[(..., *index)]


@composite(F.unfold, section="6")
def unfold(input, kernel_size, dilation=1, padding=0, stride=1):  # noqa: A002
    """[N, C, H, W] (or without N) to [N, C kh kw, windows]."""
    windows, _ = _blocks(input, input.shape[-2:], kernel_size, dilation, padding, stride)
    taken = torch.where(windows.valid, windows.gather(input), 0.0)
    lead = taken.dim() - 4
    order = [*range(lead), lead + 2, lead + 3, lead, lead + 1]
    return taken.permute(order).reshape(*input.shape[:-3], -1, math.prod(windows.outputs))


@composite(F.fold, section="6")
def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):  # noqa: A002
    """[N, C kh kw, windows] (or without N) to [N, C, H, W]: each element's exact sum over its windows."""
    sizes = _list(output_size, 2)
    windows, _ = _blocks(input, sizes, kernel_size, dilation, padding, stride)
    if input.shape[-1] != math.prod(windows.outputs):
        raise RuntimeError(f"fold to {sizes} takes {math.prod(windows.outputs)} windows, got {input.shape[-1]}")
    area = math.prod(sizes)
    # Padding goes to a place of its own behind the last.
    index = torch.where(windows.valid, windows.flat(), area).permute(2, 3, 0, 1).reshape(-1)
    lead = [*input.shape[:-2], input.shape[-2] // math.prod(windows.kernel)]
    source = input.reshape(math.prod(lead), index.shape[0])
    out = torch.zeros((source.shape[0], area + 1), dtype=input.dtype, device=input.device)
    return out.index_add(1, index, source)[:, :area].reshape(*lead, *sizes)


def _blocks(like, sizes, kernel_size, dilation, padding, stride):
    return strided(sizes, like.device, *(_list(v, 2) for v in (kernel_size, stride, padding, dilation)))
