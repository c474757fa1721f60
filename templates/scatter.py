"""Integer scatters: what an exact segment sum is made of (contract section 6).

Computes     maxima, totals and positions of integers that share a destination; writes of rows.
Order        none: integer maxima and sums are the same in any order, so atomics are fine, and rows
             written to one destination are equal.
Invariant to the order of contributions, threads, blocks, devices.

Two layouts. *Rows*: `rows` [N, inner] go to the destinations `index` [N] of [S, inner]. *Along*:
`source` goes to `index` along one dimension, as `torch.scatter_add` counts. Indices are int64 in
[0, S); others raise IndexError or RuntimeError on a CPU and a device assertion on a GPU.
"""

import torch

# Above this many destinations a contribution, sorting the indices is cheaper than filling a table.
TABLE_FACTOR = 64


def rows_max(rows, index, segments, initial):
    """The largest row element of each destination, `initial` where nothing arrives; rows' dtype."""
    out = rows.new_full((segments, rows.shape[1]), initial)
    return out.scatter_reduce_(0, index.unsqueeze(1).expand_as(rows), rows, "amax")


def rows_total(rows, index, segments):
    """The exact int64 sum of each destination's row elements."""
    out = torch.zeros((segments, rows.shape[1]), dtype=torch.int64, device=rows.device)
    return out.index_add_(0, index, rows)


def along_max(source, dim, index, size, initial):
    """The largest element of each destination along `dim`, `initial` where nothing arrives."""
    out = source.new_full(size, initial)
    return out.scatter_reduce_(dim, index, source, "amax")


def along_total(source, dim, index, size):
    """The exact int64 sum of each destination's elements along `dim`."""
    out = torch.zeros(size, dtype=torch.int64, device=source.device)
    return out.scatter_add_(dim, index, source)


def positions(index, segments, last):
    """For each of `index` [N] the first (or last) position holding the same destination, int64 [N]."""
    n = index.shape[0]
    # Narrow integers, because a GPU has no atomic maximum of wide ones.
    place = torch.arange(n, dtype=torch.int32 if n < 2**31 else torch.int64, device=index.device)
    if segments <= TABLE_FACTOR * max(n, 1024):
        table = place.new_full((segments,), -1 if last else n)
        return table.scatter_reduce_(0, index, place, "amax" if last else "amin")[index].to(torch.int64)
    ordered, order = index.sort(stable=True)
    return torch.empty_like(order).scatter_(0, order, order[_run_ends(ordered, place, last)])


def _run_ends(ordered, place, last):
    """For each place in sorted `ordered` the first (or last) place of its run of equal values."""
    if last:
        return place.numel() - 1 - _run_ends(ordered.flip(0), place, False).flip(0)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return torch.where(starts, place, 0).cummax(0).values.to(torch.int64)


def write(destination, index, rows):
    """`destination` [S, inner] with `rows` [N, inner] in place of those at `index`; rows that share a
    destination must be equal."""
    return destination.clone(memory_format=torch.contiguous_format).index_copy_(0, index, rows)


def place(index, rows, segments):
    """`write` into [segments, inner] zeros."""
    return rows.new_zeros((segments, rows.shape[1])).index_copy_(0, index, rows)
