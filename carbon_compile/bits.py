"""Tensors as bits: what two results must share, and where they first do not."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch

# One NaN stands for all (contract section 1): dtype -> (integer view, the NaN's bits as that integer).
_FLOAT_BITS = {
    torch.float64: (torch.int64, 0x7FF8000000000000),
    torch.float32: (torch.int32, 0x7FC00000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e5m2: (torch.uint8, 0x7F),
    torch.float8_e4m3fnuz: (torch.uint8, 0x80),
    torch.float8_e5m2fnuz: (torch.uint8, 0x80),
}


def canonical_bits(tensor):
    """The representation of each element as an integer, with every NaN the same.

    Args:
        tensor: any strided tensor on any device. Complex numbers become pairs of reals in a last
            dimension of 2; integers and bools are returned as they are.

    Raises TypeError for a dtype or layout without one plain value an element (sparse, quantized).
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} has no plain bits; densify it first")
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if not tensor.is_floating_point():
        return tensor
    if tensor.dtype not in _FLOAT_BITS:
        raise TypeError(f"no canonical bits are defined for {tensor.dtype}")
    integer, nan = _FLOAT_BITS[tensor.dtype]
    # One-byte floats have no comparison of their own.
    comparable = tensor.float() if tensor.element_size() == 1 else tensor
    bits = tensor.contiguous().view(integer)
    return torch.where(comparable != comparable, torch.tensor(nan, dtype=integer, device=bits.device), bits)


@dataclass(frozen=True)
class Difference:
    """The first place, in index order, where two tensors of one dtype and shape differ."""

    index: tuple
    a: object
    b: object
    a_hex: str
    b_hex: str
    ulps: int | None  # steps of the dtype's grid between the two; None where one is NaN
    differing: int
    elements: int

    def __str__(self):
        ulps = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return (
            f"{self.differing} of {self.elements} elements differ; first at {self.index}: "
            f"{self.a!r} ({self.a_hex}) and {self.b!r} ({self.b_hex}){ulps}"
        )


def tensor_diff(a, b):
    """The first `Difference` between two tensors, or None when all bits are equal.

    NaNs are equal to each other; +0 and -0 are not (0 ulp apart). Devices may differ.

    Raises ValueError when dtypes or shapes differ.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
    dtype = a.real.dtype if a.is_complex() else a.dtype
    x, y = canonical_bits(a).cpu(), canonical_bits(b).cpu()
    unequal = x != y
    if not unequal.any():
        return None
    flat = int(unequal.reshape(-1).byte().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape))
    x_bits, y_bits = x[index], y[index]
    return Difference(
        index=index,
        a=x_bits.view(dtype).item(),
        b=y_bits.view(dtype).item(),
        a_hex=_hex(x_bits),
        b_hex=_hex(y_bits),
        ulps=_ulps(x_bits, y_bits, dtype),
        differing=int(unequal.sum()),
        elements=unequal.numel(),
    )


def assert_bitwise(a, b, what="results"):
    """Raise AssertionError unless `a` and `b` hold the same bits; the message names the first difference.

    Args:
        a, b: tensors, modules and optimizers (by their state_dict), NumPy arrays, numbers, or lists,
            tuples, dicts and dataclasses of them with the same structure. NaNs are equal to each
            other; +0 and -0 are not. Other leaves are compared with ==.
        what: names the value in the message.
    """
    a, b = _opened(a), _opened(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        try:
            difference = tensor_diff(a, b)
        except ValueError as mismatch:
            raise AssertionError(f"{what}: {mismatch}") from None
        if difference is not None:
            raise AssertionError(f"{what}: {difference}")
    elif isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            raise AssertionError(f"{what}: only one has {sorted(map(repr, a.keys() ^ b.keys()))}")
        for key in a:
            assert_bitwise(a[key], b[key], f"{what}[{key!r}]")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            raise AssertionError(f"{what}: {len(a)} items against {len(b)}")
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_bitwise(x, y, f"{what}[{i}]")
    elif type(a) is float and type(b) is float:
        assert_bitwise(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), what)
    elif type(a) is not type(b) or a != b:
        raise AssertionError(f"{what}: {a!r} against {b!r}")


# How an optimizer computes, not what: these may differ between two machines of one result.
ENGINE_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})


def _opened(value):
    """Modules, optimizers, schedulers, dataclasses and arrays as dicts and tensors; others as they are."""
    if isinstance(value, torch.optim.Optimizer):
        state = value.state_dict()
        groups = [{k: v for k, v in group.items() if k not in ENGINE_FLAGS} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}
    if isinstance(value, torch.nn.Module):
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in value.state_dict().items()}
    if isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        return value.state_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if type(value).__module__ == "numpy":
        return torch.from_numpy(value.copy()) if hasattr(value, "ndim") and value.ndim else value.item()
    return dict(value) if isinstance(value, Mapping) else value


def frozen(value):
    """A copy of what `assert_bitwise` compares, which later training can't change."""
    value = _opened(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return [frozen(item) for item in value] if isinstance(value, (list, tuple)) else value


def _unsigned(bits):
    return int(bits) & ((1 << (8 * bits.element_size())) - 1)


def _hex(bits):
    return f"0x{_unsigned(bits):0{2 * bits.element_size()}x}"


def ulp_distances(a, b):
    """(int64 distances in ulps, bool where exactly one is NaN) of floating tensors of one dtype and
    shape, on the CPU; +0 and -0 are 0 ulp apart."""
    integer, nan = _FLOAT_BITS[a.dtype]
    x, y = canonical_bits(a).cpu(), canonical_bits(b).cpu()
    width = 8 * a.element_size()
    low = (1 << (width - 1)) - 1

    def place(bits):
        magnitude = bits.to(torch.int64) & low
        return torch.where((bits.to(torch.int64) >> (width - 1)) & 1 == 1, -magnitude, magnitude)

    return (place(x) - place(y)).abs(), (x == nan) != (y == nan)


def _ulps(x, y, dtype):
    if not dtype.is_floating_point:
        return abs(int(x) - int(y))
    if _FLOAT_BITS[dtype][1] in (_unsigned(x), _unsigned(y)):
        return None
    sign = 1 << (8 * x.element_size() - 1)

    def place(bits):
        value = _unsigned(bits)
        return -(value - sign) if value & sign else value

    return abs(place(x) - place(y))
