"""Composite functions are caught above autograd, autocast and device dispatch (contract section 0).

`Composites` is a function mode: whatever calls `F.linear`, `x @ w` or `F.layer_norm` under it gets
carbon's composite with its pinned forward and backward, after the casts of one autocast list that
is the same on every device. `call` is how a Dynamo graph says so: a graph node names the function
and the policy, and AOTAutograd traces through it.
"""

import contextlib
import contextvars
import functools
import importlib
import types

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from . import policy, registry

_PLACES = (torch, torch.Tensor, F, torch.linalg, torch.special, torch._C._nn)


def resolve_all(names):
    """Every function that goes by one of the names: torch's, Tensor's methods, torch.nn.functional's …"""
    return frozenset(f for name in names.split() for place in _PLACES if callable(f := getattr(place, name, None)))


# The autocast lists are those that PyTorch documents for CUDA, pinned for every device.
LOWER = resolve_all(
    "linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm addmv baddbmm mv einsum chain_matmul multi_dot "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu "
    "scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell bilinear",
) | {__import__("operator").matmul}
FLOAT32 = resolve_all(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ __rdiv__ __rtruediv__ "
    "softplus layer_norm rms_norm group_norm norm nuclear_norm vector_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss "
    "multi_margin_loss binary_cross_entropy binary_cross_entropy_with_logits cross_entropy dist pdist "
    "cdist renorm logsumexp prod softmax log_softmax cumprod cumsum sum",
) | {__import__("operator").pow}
WIDEST = resolve_all(
    "addcdiv addcmul atan2 cross dot vdot grid_sample index_put index_put_ tensordot scatter_add scatter_add_"
)
NARROW = (torch.bfloat16, torch.float16)


class Composites(TorchFunctionMode):
    """Replaces composite functions and applies the pinned autocast list while it is active."""

    def __init__(self, current):
        super().__init__()
        self.policy = current
        self.entered = set()

    def __torch_function__(self, function, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.policy.autocast:
            args, kwargs = cast_arguments(self.policy, function, args, kwargs)
        replacement = None if _differentiating() else registry.COMPOSITES.get(function)
        if replacement is not None:
            try:
                _check_layout(args, kwargs)
                with policy.using(self.policy), Composites(self.policy.with_autocast(None)):
                    return _written(replacement, args, kwargs)
            except registry.Refusal as refusal:
                met = _refusals.get()
                if met is None:
                    raise
                met.append((refusal, resolve_name(function), torch.fx.traceback.get_current_meta()))
        if isinstance(function, types.FunctionType) and function.__module__ in ("torch.nn.functional", "torch.functional") and function not in self.entered:
            # A function that picks among others (F.max_pool2d, torch.unique) is met again from them.
            self.entered.add(function)
            try:
                with self:
                    return body(function)(*args, **kwargs)
            finally:
                self.entered.remove(function)
        return function(*args, **kwargs)


def _written(replacement, args, kwargs):
    """The replacement's result; `out=`, which composites don't know, gets a copy of it."""
    out = kwargs.get("out")
    if not isinstance(out, torch.Tensor):
        return replacement(*args, **kwargs)
    result = replacement(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if result.shape != out.shape or not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"out= is {out.dtype} of shape {tuple(out.shape)}, and the result is {result.dtype} of shape {tuple(result.shape)}")
    return out.copy_(result)


def _differentiating():
    """Whether torch.func takes a derivative here. Our derivatives can't be a part of its own, so the
    function runs as PyTorch's, whose operators have rules; the same forward, and PyTorch's derivative."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key().name in ("Grad", "Jvp") for level in levels)


def _check_layout(args, kwargs):
    if any(t.is_nested for t in floats_of((args, kwargs))):
        raise registry.Refusal("CB108", "nested")


def cast_arguments(current, function, args, kwargs):
    """Cast the floating arguments of a call as the pinned autocast list says."""
    low = current.autocast_dtype
    if function in LOWER:
        return _cast_all((args, kwargs), lambda t: low if t.dtype in (torch.float32, *NARROW) else t.dtype)
    if function in FLOAT32:
        return _cast_all((args, kwargs), lambda t: torch.float32 if t.dtype in NARROW else t.dtype)
    if function in WIDEST:
        wide = any(t.dtype is torch.float32 for t in floats_of((args, kwargs)))
        return _cast_all((args, kwargs), lambda t: torch.float32 if wide and t.dtype in NARROW else t.dtype)
    return args, kwargs


_refusals = contextvars.ContextVar("carbon_refusals", default=None)


@contextlib.contextmanager
def collecting():
    """Refusals of composites as a list of (refusal, function name, node metadata), instead of raising
    the first: the function then runs as PyTorch's own, and tracing goes on to the next finding."""
    met = []
    token = _refusals.set(met)
    try:
        yield met
    finally:
        _refusals.reset(token)


def resolve_name(function):
    """How a user writes a function: "torch.nn.functional.conv2d"."""
    module = getattr(function, "__module__", None) or "torch"
    return f"{module.replace('torch._C._nn', 'torch.nn.functional')}.{getattr(function, '__name__', function)}"


def floats_of(tree):
    """The floating tensors among arguments."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.is_floating_point() else []
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [t for item in tree for t in floats_of(item)] if isinstance(tree, (list, tuple)) else []


def _cast_all(tree, choose):
    if isinstance(tree, torch.Tensor):
        if not tree.is_floating_point():
            return tree
        dtype = choose(tree)
        return tree if dtype is tree.dtype else tree.to(dtype)
    if isinstance(tree, dict):
        return {k: _cast_all(v, choose) for k, v in tree.items()}
    if isinstance(tree, list):  # in a graph it is a class of FX's own
        return [_cast_all(v, choose) for v in tree]
    return tuple(_cast_all(v, choose) for v in tree) if type(tree) is tuple else tree


@functools.cache
def body(function):
    """`function` without its own override check, so that what it calls still meets the mode."""
    unchecked = {name: lambda *a: False for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")}
    copy = types.FunctionType(function.__code__, {**function.__globals__, **unchecked}, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def call(name, policy_text, *args, **kwargs):
    """Run the function called `name` under `Composites`: the target of rewritten Dynamo nodes."""
    with Composites(policy.Policy.decode(policy_text)):
        return resolve(name)(*args, **kwargs)


@functools.cache
def resolve(name):
    """The function behind a qualified name such as "torch.nn.functional.linear" or "torch.Tensor.matmul"."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise LookupError(f"no function is called {name}")


def wants(function, autocast):
    """Whether a Dynamo call of `function` has to go through `call`."""
    registry.load()
    if function in registry.COMPOSITES:
        return True
    if isinstance(function, types.FunctionType) and function.__module__ in ("torch.nn.functional", "torch.functional"):
        return True
    return autocast and (function in LOWER or function in FLOAT32 or function in WIDEST)
