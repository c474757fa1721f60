"""Scans and folds as fixed index trees of IEEE operations (contract section 3).

Computes     y_i = x_0 o x_1 o ... o x_i along one dimension, and the last of them alone.
Order        one tree, the same for every length (Brent and Kung, 1982). With P the same scan of
             p_j = x_2j o x_2j+1:

                 y_0 = x_0        y_2j+1 = P_j        y_2j = P_j-1 o x_2j

             so y_i cuts [0, i] into aligned blocks of powers of two, the largest first, takes each
             block by a balanced binary tree, and combines the blocks from the left:
             y_6 = (((x_0 o x_1) o (x_2 o x_3)) o (x_4 o x_5)) o x_6.
Invariant to what comes after i, batch neighbours, strides, threads, devices.
Rounds at    every o. Operands are binary32 or binary64; narrower ones are widened before, and the
             result is rounded once after.

A fold is the last element of the scan. Every step is an elementwise operation on a strided slice:
2 n operations in all, 2 log2(n) steps deep.
"""

import torch


def _every(x, dim, start, step, length=None):
    """x[start::step] along `dim`, cut to `length` elements."""
    index = [slice(None)] * x.dim()
    index[dim] = slice(start, None, step)
    y = x[tuple(index)]
    return y if length is None else y.narrow(dim, 0, length)


def scan(xs, dim, combine):
    """All prefixes of `xs` along `dim`.

    xs: a tuple of tensors of one shape, the parts of one operand. `combine(left, right, out)` writes
    left o right into the tuple of tensors `out`. Returns a tuple like `xs`.
    """
    outs = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs)
    if xs[0].numel():
        _scan_into(xs, outs, dim, combine)
    return outs


def _scan_into(xs, outs, dim, combine):
    n = xs[0].shape[dim]
    for x, out in zip(xs, outs, strict=True):
        out.narrow(dim, 0, 1).copy_(x.narrow(dim, 0, 1))
    if n == 1:
        return
    odd = tuple(_every(out, dim, 1, 2) for out in outs)
    _scan_into(_pairs(xs, dim, combine), odd, dim, combine)
    if n > 2:
        right = tuple(_every(x, dim, 2, 2) for x in xs)
        left = tuple(o.narrow(dim, 0, right[0].shape[dim]) for o in odd)
        combine(left, right, tuple(_every(out, dim, 2, 2) for out in outs))


def _pairs(xs, dim, combine):
    n = xs[0].shape[dim] // 2
    left, right = (tuple(_every(x, dim, start, 2, n) for x in xs) for start in (0, 1))
    out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in left)
    combine(left, right, out)
    return out


def fold(xs, dim, combine):
    """The last prefix of `xs` along `dim`, which keeps length 1; at least one element."""
    n = xs[0].shape[dim]
    if n == 1:
        return xs
    head = fold(_pairs(xs, dim, combine), dim, combine)
    if n % 2 == 0:
        return head
    out = tuple(torch.empty_like(h) for h in head)
    combine(head, tuple(x.narrow(dim, n - 1, 1) for x in xs), out)
    return out


# --- what is scanned ----------------------------------------------------------------------------------


def add(left, right, out):
    torch.add(left[0], right[0], out=out[0])


def multiply(left, right, out):
    torch.mul(left[0], right[0], out=out[0])


def affine(left, right, out):
    """Composition of the maps r -> b + a r, given as (a, b), the left one applied last:
    (a1 a2, b1 + a1 b2), a product and a sum, each rounded."""
    torch.mul(left[0], right[0], out=out[0])
    torch.add(left[1], left[0] * right[1], out=out[1])


def wide(x, dtype):
    """`x` converted to `dtype` as PyTorch does before it reduces, then widened to binary32."""
    x = x.to(dtype)
    return x if dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def cumulative(x, dim, dtype, combine):
    """Prefixes of `x` by `combine`, computed in binary32 (binary64 for that) and rounded to `dtype`."""
    shape = x.shape
    x = wide(x, dtype).reshape(shape or (1,))
    return scan((x,), dim % x.dim(), combine)[0].reshape(shape).to(dtype)


def product(x, dim, keepdim, dtype):
    """The product along `dim`: the last of the products that `cumulative` gives; 1 of nothing."""
    x = wide(x, dtype)
    if x.dim() == 0:
        return x.to(dtype, copy=True)
    dim %= x.dim()
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    y = fold((x,), dim, multiply)[0] if x.shape[dim] else x.new_ones(shape)
    y = y if keepdim else y.squeeze(dim)
    return y.to(dtype, copy=True, memory_format=torch.contiguous_format)


def cumprod_backward(grad, x, dim):
    """The derivative of `cumulative(x, dim, ..., multiply)`, of x's dtype, without a division.

    dx_k = l_k r_k, with l_k = x_0 ... x_k-1 (1 for k = 0) and r_k = grad_k + x_k+1 r_k+1, which is the
    scan of affine maps from the right. Zeros in `x` need no case of their own.
    """
    shape, dtype = x.shape, x.dtype
    x, grad = (wide(t, t.dtype).reshape(shape or (1,)) for t in (x, grad))
    dim, n = dim % x.dim(), x.shape[dim % x.dim()]
    if x.numel() == 0:
        return x.new_empty(shape, dtype=dtype)
    ones = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([ones, scan((x,), dim, multiply)[0].narrow(dim, 0, n - 1)], dim)
    factor = torch.cat([x.narrow(dim, 1, n - 1), ones], dim)
    after = _reverse_affine(factor, grad, dim)
    return (before * after).reshape(shape).to(dtype)


def _reverse_affine(a, b, dim):
    """r_k = b_k + a_k r_k+1 from the last k, where r = b, down."""

    def combine(left, right, out):
        affine(right, left, out)

    return scan((a.flip(dim), b.flip(dim)), dim, combine)[1].flip(dim)


def places(x, dim):
    """0, 1, 2 ... along `dim`, int64, of a shape that broadcasts with `x`."""
    dim %= x.dim()
    place = torch.arange(x.shape[dim], dtype=torch.int64, device=x.device)
    return place.reshape([-1 if d == dim else 1 for d in range(x.dim())])


def running_extreme(key, dim):
    """Running maxima of integer keys, and the last index that attains each, int64."""
    best = key.cummax(dim).values
    return best, torch.where(key == best, places(key, dim), -1).cummax(dim).values
