"""Convolution whose windows tile the input, as one matrix product (contract section 4).

Where the stride equals the kernel and nothing is padded or dilated, no two windows share an
element: the input is cut into patches [positions, channels x kernel], and the weight, as the second
operand, balances their product. Patch embeddings and 1 x 1 convolutions are of this kind; windows
that overlap have no rule yet and are refused.
"""

import torch
import torch.nn.functional as F

from . import matmul
from .registry import Refusal, composite, refuse


def _tuple(value, n, what):
    value = (value,) * n if isinstance(value, (int, torch.SymInt)) else tuple(value)
    value = value * n if len(value) == 1 else value
    if len(value) != n:
        raise RuntimeError(f"a {n}-dimensional convolution takes {n} values of {what}, got {value}")
    return value


def _refused(name, found):
    raise Refusal("CB105", f"{name} with {found} has no rule yet: only windows that tile the input (stride equal to the kernel, no padding, no dilation, one group) are one matrix product")


def _check_tiling(name, kernel, stride, padding, dilation, groups):
    n = len(kernel)
    if isinstance(padding, str):
        # "same" pads kernel - 1 in all.
        padding = 0 if padding == "valid" or all(k == 1 for k in kernel) else kernel[0] - 1
    padding, dilation = _tuple(padding, n, "padding"), _tuple(dilation, n, "dilation")
    if any(p != 0 for p in padding):
        _refused(name, f"padding {padding}")
    if any(d != 1 and k != 1 for d, k in zip(dilation, kernel, strict=True)):
        _refused(name, f"dilation {dilation}")
    if groups != 1:
        _refused(name, f"{groups} groups")
    if tuple(stride) != tuple(kernel):
        _refused(name, f"kernel {tuple(kernel)} and stride {tuple(stride)}")


def _batched(x, n, name):
    """x with a batch dimension, and whether it had none."""
    if x.dim() == n + 1:
        return x.unsqueeze(0), True
    if x.dim() != n + 2:
        raise RuntimeError(f"{name} takes an input of {n + 1} or {n + 2} dimensions, got {list(x.shape)}")
    return x, False


def convolution(name, x, weight, bias, stride, padding, dilation, groups):
    """x [N, C, *spatial] by weight [O, C, *kernel]: [N, O, *positions], the bias before the last rounding."""
    n = weight.dim() - 2
    kernel = tuple(weight.shape[2:])
    _check_tiling(name, kernel, _tuple(stride, n, "stride"), padding, dilation, groups)
    x, single = _batched(x, n, name)
    if x.shape[1] != weight.shape[1]:
        raise RuntimeError(f"{name}: weight {list(weight.shape)} expects {weight.shape[1]} channels, got an input of {list(x.shape)}")
    positions = [s // k for s, k in zip(x.shape[2:], kernel, strict=True)]
    for d, (p, k) in enumerate(zip(positions, kernel, strict=True)):
        x = x.narrow(d + 2, 0, p * k)  # a rest that no window covers
    patches = _patches(x, positions, kernel)
    y = matmul.mm(patches, weight.reshape(weight.shape[0], -1).t(), bias)
    y = y.reshape(x.shape[0], *positions, weight.shape[0]).movedim(-1, 1)
    return y.squeeze(0) if single else y


def _patches(x, positions, kernel):
    """[N, C, p1 k1, p2 k2, ...] as rows [N p1 p2 ..., C k1 k2 ...]."""
    n = len(kernel)
    split = [size for pair in zip(positions, kernel, strict=True) for size in pair]
    x = x.reshape(*x.shape[:2], *split)
    order = [0, *range(2, 2 + 2 * n, 2), 1, *range(3, 3 + 2 * n, 2)]
    rows, columns = x.shape[0], x.shape[1]
    for p, k in zip(positions, kernel, strict=True):
        rows, columns = rows * p, columns * k
    return x.permute(order).reshape(rows, columns)


def transposed(name, x, weight, bias, stride, padding, output_padding, groups, dilation):
    """x [N, C, *positions] by weight [C, O, *kernel]: each position writes its own window."""
    n = weight.dim() - 2
    kernel = tuple(weight.shape[2:])
    _check_tiling(name, kernel, _tuple(stride, n, "stride"), padding, dilation, groups)
    if any(p != 0 for p in _tuple(output_padding, n, "output_padding")):
        _refused(name, f"output padding {output_padding}")
    x, single = _batched(x, n, name)
    positions, outputs = list(x.shape[2:]), weight.shape[1]
    rows = x.movedim(1, -1).reshape(-1, x.shape[1])
    # One bias an output channel, repeated over the window, joins before the product's last rounding.
    columns = weight.reshape(weight.shape[0], -1)
    window = columns.shape[1] // outputs
    bias = None if bias is None else bias.unsqueeze(1).expand(outputs, window).reshape(-1)
    y = matmul.mm(rows, columns, bias).reshape(x.shape[0], *positions, outputs, *kernel)
    order = [0, n + 1, *(d for i in range(n) for d in (i + 1, n + 2 + i))]
    y = y.permute(order).reshape(x.shape[0], outputs, *(p * k for p, k in zip(positions, kernel, strict=True)))
    return y.squeeze(0) if single else y


def _forward(n):
    name = f"conv{n}d"

    def conv(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        return convolution(name, input, weight, bias, stride, padding, dilation, groups)

    conv.__name__, conv.__doc__ = name, f"torch.nn.functional.{name} with windows that tile the input."
    composite(getattr(F, name), getattr(torch, name), section="4")(conv)


def _transpose(n):
    name = f"conv_transpose{n}d"

    def conv(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
        return transposed(name, input, weight, bias, stride, padding, output_padding, groups, dilation)

    conv.__name__, conv.__doc__ = name, f"torch.nn.functional.{name} with windows that tile the output."
    composite(getattr(F, name), getattr(torch, name), section="4")(conv)


for _n in (1, 2, 3):
    _forward(_n)
    _transpose(_n)

refuse(
    "aten.convolution.default", "aten.convolution_backward.default", "aten._convolution.default",
    "aten.convolution_overrideable.default", "aten.cudnn_convolution.default", "aten.mkldnn_convolution.default",
    "aten._slow_conv2d_forward.default", "aten._conv_depthwise2d.default", "aten.conv_depthwise3d.default",
    "aten.slow_conv3d_forward.default", "aten.slow_conv_transpose2d.default", "aten.slow_conv_transpose3d.default",
    code="CB105",
    reason="only windows that tile the input (stride equal to the kernel, no padding, no dilation, one group) are one matrix product",
)  # fmt: skip
