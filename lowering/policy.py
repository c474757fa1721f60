"""What a compile fixes before any arithmetic: the autocast type and the class of each product."""

import contextlib
import contextvars
from dataclasses import dataclass, replace

import torch

from . import registry

WINDOWS = {"X2": 16, "X3": 24}


@dataclass(frozen=True)
class Policy:
    """Product classes by input type (contract section 4) and the autocast type, if any."""

    float32: str = "X3"
    bfloat16: str = "X2"
    float16: str = "X3"
    autocast: str = ""

    def window(self, dtype):
        """Bits of the quantisation window for a product whose inputs have `dtype`."""
        name = str(dtype).removeprefix("torch.")
        if name not in ("float32", "bfloat16", "float16"):
            code = "CB201" if name == "float64" else "CB204" if dtype.is_complex else "CB205" if dtype.is_floating_point else "CB208"
            raise registry.Refusal(code, name if code == "CB208" else f"matrix products of {name} have no rule; use float32, bfloat16 or float16")
        return WINDOWS[getattr(self, name)]

    def encode(self):
        """A string that fits into an FX graph, so that the policy is part of every cache key."""
        return f"float32={self.float32} bfloat16={self.bfloat16} float16={self.float16} autocast={self.autocast}"

    @staticmethod
    def decode(text):
        return Policy(**dict(item.split("=") for item in text.split(" ")))

    @property
    def autocast_dtype(self):
        return getattr(torch, self.autocast) if self.autocast else None

    def with_autocast(self, dtype):
        return replace(self, autocast="" if dtype is None else str(dtype).removeprefix("torch."))


# The longest contraction with a weight that has 16 bits of window (contract section 4).
_LONGEST_X2 = 1 << 14


def window_for(window, balance, k):
    """The window of a product, whose type has class `window`, over a contraction of k: int."""
    return WINDOWS["X3"] if balance == "weight" and k > _LONGEST_X2 else window


def float32_class(precision):
    """The class of float32 products under `torch.set_float32_matmul_precision(precision)`."""
    return "X2" if precision == "medium" else "X3"


def matmul_precision():
    """`torch.get_float32_matmul_precision()`, "high" where it raises: when the setting comes from
    `fp32_precision` ("tf32" or "bf16"), which has more values than that function can say."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high"


_current = contextvars.ContextVar("carbon_policy")


def current():
    """The policy of the compile in progress."""
    return _current.get(Policy())


@contextlib.contextmanager
def using(policy):
    token = _current.set(policy)
    try:
        yield policy
    finally:
        _current.reset(token)
