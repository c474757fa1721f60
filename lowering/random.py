"""Random functions (contract section 7): one key a random call, one draw an element of its result.

A random call takes a 64-bit key from the host's default generator, wherever its tensor lives, and
element i of its result is a Philox program of (key, i). While a graph is traced a call's key is the
placeholder `carbon::key`; `collect_keys` then draws all keys of the graph in one operation at its
start, in program order. So `torch.manual_seed` seeds, `get_rng_state` and `fork_rng` cover
everything, and a recomputed forward sees the same draws, because it sees the same keys.
"""

import math

import torch
from torch.utils.checkpoint import CheckpointPolicy

from . import philox
from . import prims as P
from .pointwise import LIBRARY, register
from .registry import Refusal, composite, refuse, rule, template

_DRAWN_ON_THE_HOST = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag)
LIBRARY.define("key(*, Device device) -> Tensor", tags=_DRAWN_ON_THE_HOST)
LIBRARY.define("keys(int n, *, Device device) -> Tensor", tags=_DRAWN_ON_THE_HOST)
LIBRARY.define("permutation(Tensor key, SymInt n, *, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def draw_keys(n, *, device, generator=None):
    """n keys as int64 [n, 2], each word in [0, 2^32): the low one, the high one.

    A key is the next 64 bits of a CPU generator (mt19937), PyTorch's default one unless another is
    given: its next output is the high word, the one after it the low word.
    """
    bits = torch.empty(n, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    words = torch.stack((bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF), 1)
    if torch.device(device).type == "cuda":
        return words.pin_memory().to(device, non_blocking=True)
    return words.to(device)


def _permutation(key, n, *, dtype):
    """0..n-1 in the order of 63 random bits each; equal bits, if any, stay in place."""
    from .engines import TorchEngine

    index = torch.arange(n, dtype=torch.int64, device=key.device)
    high, low = philox.philox64(TorchEngine, key[0], key[1], index)
    return torch.sort((high << 31) | (low >> 1), stable=True).indices.to(dtype)


LIBRARY.impl("key", lambda *, device: draw_keys(1, device=device)[0], "CompositeExplicitAutograd")
LIBRARY.impl("keys", draw_keys, "CompositeExplicitAutograd")
LIBRARY.impl("permutation", _permutation, "CompositeExplicitAutograd")


@torch.library.register_fake("carbon::key", lib=LIBRARY)
def _key_fake(*, device):
    return torch.empty(2, dtype=torch.int64, device=device)


@torch.library.register_fake("carbon::keys", lib=LIBRARY)
def _keys_fake(n, *, device):
    return torch.empty((n, 2), dtype=torch.int64, device=device)


@torch.library.register_fake("carbon::permutation", lib=LIBRARY)
def _permutation_fake(key, n, *, dtype):
    return torch.empty(n, dtype=dtype, device=key.device)


KEY = template("key", "7")
KEYS = template("keys", "7")
PERMUTATION = template("permutation", "7")


def _bernoulli_of(o, key_lo, key_hi, index, p):
    """`bernoulli` with a probability an element."""
    return philox.bernoulli(o, key_lo, key_hi, index, philox.threshold_of(o, o.to(p, torch.float32)))


for _name, (_program, _inputs, _) in philox.PROGRAMS.items():
    register(_name, _program, _inputs, "7", widen=False)
register("bernoulli_of", _bernoulli_of, 4, "7", widen=False)


def collect_keys(graph):
    """Replace the `carbon::key` placeholders of a graph, in place, by rows of one `carbon::keys`.

    The draw stands at the start of the graph and is never repeated: activation checkpointing, which
    recomputes what it is applied to, must find the keys of the first run.
    """
    calls = [n for n in graph.nodes if n.target is KEY]
    if not calls:
        return graph
    device = calls[0].kwargs["device"]
    value = calls[0].meta["val"]
    start = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(start):
        keys = graph.call_function(KEYS, (len(calls),), {"device": device})
    keys.meta = {"val": value.new_empty((len(calls), 2)), "recompute": CheckpointPolicy.MUST_SAVE}
    for i, call in enumerate(calls):
        with graph.inserting_before(call):
            row = graph.call_function(torch.ops.aten.select.int, (keys, 0, i))
            row.meta = {**call.meta, "val": keys.meta["val"].select(0, i)}
            if call.kwargs["device"] != device:
                copied = graph.call_function(torch.ops.prims.device_put.default, (row, call.kwargs["device"]))
                row.meta, copied.meta = {**row.meta}, {**call.meta}
                row = copied
        call.replace_all_uses_with(row)
        graph.erase_node(call)
    return graph


def _int64(value, device):
    return torch.full((), value, dtype=torch.int64, device=device)


def draw(name, shape, device, *arguments, dtype, key=None):
    """Program `name` over the row-major logical indices of `shape`: a contiguous tensor of `dtype`."""
    device = torch.empty((), device=device).device
    key = KEY(device=device) if key is None else key
    index = torch.ops.aten.arange.default(math.prod(shape), dtype=torch.int64, device=device)
    index = torch.ops.aten.view.default(index, list(shape))
    arguments = [a if isinstance(a, torch.Tensor) else _int64(a, device) for a in arguments]
    op = getattr(torch.ops.carbon, name).default
    return op(torch.ops.aten.select.int(key, 0, 0), torch.ops.aten.select.int(key, 0, 1), index, *arguments, dtype=dtype)


def uniform(shape, device, dtype):
    """Uniform in [0, 1) on the grid of its type: float32, bfloat16, float16 or float64."""
    name = str(dtype).removeprefix("torch.")
    if f"uniform_{name}" not in philox.PROGRAMS:
        raise RuntimeError(f"uniform draws of {name} are not defined; use a floating dtype")
    return draw(f"uniform_{name}", shape, device, dtype=dtype)


def normal(shape, device, dtype=torch.float32):
    """Standard normal, computed in binary32 and rounded once to `dtype`."""
    if dtype is torch.float64:
        raise Refusal("CB203", "float64 normal draws need float64 functions; draw float32 and convert")
    if not dtype.is_floating_point:
        raise RuntimeError(f"normal draws of {dtype} are not defined; use a floating dtype")
    return draw("normal", shape, device, dtype=dtype)


def keep_mask(shape, device, p):
    """Dropout's mask: True with probability 1 - p."""
    return draw("keep", shape, device, philox.threshold(float(p)), dtype=torch.bool)


# --- dropout, caught above autograd ----------------------------------------------------------------


def _check(p):
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _channels(x):
    if x.dim() < 2:
        raise RuntimeError("feature dropout requires at least 2 dimensions in the input")
    return [*x.shape[:2], *[1] * (x.dim() - 2)]


def _dropped(x, p, shape):
    """~keep, or everything where p is 1, which draws nothing."""
    if p == 1:
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.logical_not(keep_mask(shape, x.device, p))


@composite(torch.dropout, section="7")
def dropout(x, p, train=True):
    """where(keep, x / (1 - p), 0): the scale is rounded once, to binary32. No draw if p is 0."""
    return _dropout(x, p, train, x.shape)


@composite(torch.feature_dropout, section="7")
def feature_dropout(x, p, train=True):
    """Dropout of whole channels: one draw for [n, c]."""
    return _dropout(x, p, train, _channels(x))


def _dropout(x, p, train, shape):
    _check(p)
    if p == 0 or not train or x.numel() == 0:
        return x
    dropped = _dropped(x, p, shape)
    return (x if p == 1 else x * (1.0 / (1.0 - p))).masked_fill(dropped, 0.0)


@composite(torch.alpha_dropout, section="7")
def alpha_dropout(x, p, train=True):
    """a where(keep, x, -alpha') + b in binary32 (Klambauer et al., 2017), rounded once."""
    return _alpha_dropout(x, p, train, x.shape)


@composite(torch.feature_alpha_dropout, section="7")
def feature_alpha_dropout(x, p, train=True):
    return _alpha_dropout(x, p, train, _channels(x))


_ALPHA = 1.7580993408473766  # the negative saturation value of SELU


def _alpha_dropout(x, p, train, shape):
    _check(p)
    if p == 0 or not train or x.numel() == 0:
        return x
    dropped = _dropped(x, p, shape)
    if p == 1:
        return x.masked_fill(dropped, 0.0)
    a = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide.masked_fill(dropped, -_ALPHA) * a + _ALPHA * a * p).to(x.dtype)


def _in_place(function):
    def apply(x, p, train=True):
        y = function(x, p, train)
        return x if y is x else x.copy_(y)

    apply.__doc__ = f"`{function.__name__}`, written back to its input."
    return apply


for _function in (dropout, feature_dropout, alpha_dropout, feature_alpha_dropout):
    composite(getattr(torch, f"{_function.__name__}_"), section="7")(_in_place(_function))


@rule("aten.native_dropout.default", section="7")
def native_dropout(x, p, train):
    """Dropout and its mask, where PyTorch chose this operator by itself."""
    if p == 0 or train is False or x.numel() == 0:
        return torch.ops.aten.clone.default(x), torch.ones(x.shape, dtype=torch.bool, device=x.device)
    keep = torch.zeros(x.shape, dtype=torch.bool, device=x.device) if p == 1 else keep_mask(x.shape, x.device, p)
    return native_dropout_backward(x, keep, 0.0 if p == 1 else 1.0 / (1.0 - p)), keep


@rule("aten.native_dropout_backward.default", section="7")
def native_dropout_backward(grad, mask, scale):
    zero = P.scalar(0.0, grad, grad.dtype)
    return torch.ops.carbon.select(mask, P.mul(grad, scale, dtype=grad.dtype), zero, dtype=grad.dtype)


# --- ATen's random functions ------------------------------------------------------------------------


def _random(*names):
    """A rule for calls that may hold no floating tensor; `generator` must be None."""

    def decorate(function):
        def checked(*args, generator=None, layout=None, pin_memory=None, memory_format=None, **kwargs):
            if generator is not None:
                raise Refusal("CB403", "a generator object draws other numbers on each device; seed with torch.manual_seed, or use torch.random.fork_rng() for a separate stream")
            if layout not in (None, torch.strided):
                raise Refusal("CB108", f"random draws in {layout} storage have no rule")
            return function(*args, **kwargs)

        checked.__name__, checked.__doc__ = function.__name__, function.__doc__
        rule(*(f"aten.{name}" for name in names), section="7", integers="rule")(checked)
        return function

    return decorate


def _laid_out(x, y):
    """`y` with the strides of `x`: indices are logical, layouts are not."""
    return y if x.is_contiguous() else torch.ops.aten.copy.default(torch.ops.aten.empty_like.default(x, dtype=y.dtype), y)


def _default(dtype):
    return dtype or torch.get_default_dtype()


@_random("rand.default", "rand.generator")
def rand(size, *, dtype=None, device=None):
    return uniform(size, device, _default(dtype))


@_random("rand_like.default", "rand_like.generator")
def rand_like(x, *, dtype=None, device=None):
    return _laid_out(x, uniform(x.shape, device or x.device, dtype or x.dtype))


@_random("randn.default", "randn.generator")
def randn(size, *, dtype=None, device=None):
    return normal(size, device, _default(dtype))


@_random("randn_like.default", "randn_like.generator")
def randn_like(x, *, dtype=None, device=None):
    return _laid_out(x, normal(x.shape, device or x.device, dtype or x.dtype))


def _integers(low, high, shape, device, dtype):
    if not low < high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    return draw("randint", shape, device, low, high, dtype=dtype)


@_random("randint.default", "randint.generator")
def randint(high, size, *, dtype=None, device=None):
    return _integers(0, high, size, device, dtype or torch.int64)


@_random("randint.low", "randint.low_generator")
def randint_low(low, high, size, *, dtype=None, device=None):
    return _integers(low, high, size, device, dtype or torch.int64)


@_random("randint_like.default", "randint_like.generator")
def randint_like(x, high, *, dtype=None, device=None):
    return _laid_out(x, _integers(0, high, x.shape, device or x.device, dtype or x.dtype))


@_random("randint_like.low_dtype", "randint_like.low_generator_dtype")
def randint_like_low(x, low, high, *, dtype=None, device=None):
    return _laid_out(x, _integers(low, high, x.shape, device or x.device, dtype or x.dtype))


# The largest integers that `random_()` draws: what the type counts without gaps.
_COUNTS = {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8, torch.bool: 1}


@_random("random.default")
def random(x):
    return random_from(x, 0, None)


@_random("random.to")
def random_to(x, to):
    return random_from(x, 0, to)


@_random("random.from")
def random_from(x, low, to):
    if to is None:
        to = (_COUNTS[x.dtype] if x.dtype in _COUNTS else torch.iinfo(x.dtype).max) + 1
        to = min(to, 2**63 - 1)  # `randint` takes an exclusive bound that int64 holds
    return _laid_out(x, _integers(low, to, x.shape, x.device, x.dtype))


@_random("uniform.default")
def uniform_between(x, low=0.0, high=1.0):
    """low + u (high - low) in binary32, rounded once to the type."""
    if not low <= high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    u = uniform(x.shape, x.device, x.dtype)
    if (low, high) != (0, 1):
        u = P.add(P.mul(u, high - low), low, dtype=x.dtype)
    return _laid_out(x, u)


@_random("normal_functional.default")
def normal_functional(x, mean=0.0, std=1.0):
    return _laid_out(x, _scaled_normal(x.shape, x.device, x.dtype, mean, std))


@_random("normal.float_float")
def normal_of(mean, std, size, *, dtype=None, device=None):
    return _scaled_normal(size, device, _default(dtype), mean, std)


@_random("normal.Tensor_float")
def normal_around(mean, std=1.0):
    return _scaled_normal(mean.shape, mean.device, mean.dtype, mean, std)


@_random("normal.float_Tensor")
def normal_spread(mean, std):
    return _scaled_normal(std.shape, std.device, std.dtype, mean, std)


@_random("normal.Tensor_Tensor")
def normal_each(mean, std):
    return _scaled_normal(torch.broadcast_shapes(mean.shape, std.shape), mean.device, mean.dtype, mean, std)


def _scaled_normal(shape, device, dtype, mean, std):
    """mean + z std in binary32, rounded once to the type."""
    numbers = not isinstance(mean, torch.Tensor) and not isinstance(std, torch.Tensor)
    if not isinstance(std, torch.Tensor) and std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    if dtype is torch.float64 or numbers and (mean, std) == (0, 1):
        return normal(shape, device, dtype)
    return P.add(P.mul(normal(shape, device), std), mean, dtype=dtype)


@_random("exponential.default")
def exponential(x, rate=1.0):
    if x.dtype is torch.float64:
        raise Refusal("CB203", "float64 exponential draws need float64 functions; draw float32 and convert")
    e = draw("exponential", x.shape, x.device, dtype=torch.float32)
    return _laid_out(x, P.cast(e, x.dtype) if rate == 1 else P.div(e, rate, dtype=x.dtype))


@_random("bernoulli.p")
def bernoulli_p(x, p):
    return _laid_out(x, draw("bernoulli", x.shape, x.device, philox.threshold(float(p)), dtype=x.dtype))


@_random("bernoulli.default")
def bernoulli(x):
    """1 with the probability that each element says."""
    return bernoulli_each(x, x)


@_random("bernoulli.Tensor")
def bernoulli_each(x, p):
    return _laid_out(x, draw("bernoulli_of", x.shape, x.device, p, dtype=x.dtype))


@_random("randperm.default", "randperm.generator")
def randperm(n, *, dtype=None, device=None):
    key = KEY(device=torch.empty((), device=device).device)
    return PERMUTATION(key, n, dtype=dtype or torch.int64)


refuse(
    "aten.multinomial.default", "aten.poisson.default", "aten.binomial.default", "aten._standard_gamma.default",
    "aten._sample_dirichlet.default", "aten.geometric.default", "aten.cauchy.default", "aten.log_normal.default",
    "aten.rrelu_with_noise.default", "aten.rrelu_with_noise_functional.default",
    code="CB402",
    reason="a sampler without a rule; build the draw from torch.rand, torch.randn or Tensor.exponential_",
)  # fmt: skip
