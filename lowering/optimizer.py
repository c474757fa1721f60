"""Optimizer steps (contract section 0): the update of one parameter is one formula in binary32.

torch.optim has three implementations of an optimizer (for-loop, foreach, fused) whose formulas
round differently, and its default depends on the device. `install` puts one update of carbon's in
their place where Dynamo traces for carbon and where eager code keeps the contract, and only there:

    Adam, AdamW  g' = g + wd p (coupled decay)                    rate = lr / (1 - beta1^t)
                 m' = m + (1 - beta1) (g' - m)                    norm = sqrt(1 - beta2^t)
                 v' = beta2 v + ((1 - beta2) g') g'
                 p' = (1 - lr wd) p - (rate m') / (sqrt(v') / norm + eps)    (decoupled decay)
    SGD          g' = g + wd p,  b' = mu b + (1 - dampening) g'   (b' = g' at first)
                 p' = p - lr d,  d = g', b', or with Nesterov g' + mu b'

Scalars are rounded once to binary32, 1 - beta and 1 - dampening after the subtraction; 1 - beta^t
is computed in binary64 by repeated squaring and rounded once. What is stored is rounded to its type
once; p' uses m', v' and b' before that. With amsgrad p' uses max(top, v'), the new top, for v'.
Every other optimizer of torch.optim runs its for-loop implementation.
"""

import functools
import importlib

import torch

from . import prims as P
from .pointwise import _maximum, register, stored
from .registry import rule


def _power(o, base, t):
    """base^t for int64 t in [0, 2^31), by repeated squaring."""
    result = base * 0.0 + 1.0
    for bit in range(31):
        result = o.where(((t >> bit) & 1) != 0, result * base, result)
        base = base * base
    return result


def _one_minus_power(o, steps, beta):
    t = o.where(steps > 0, steps, 0)
    t = o.to(o.where(t < 2**30, t, 2**30), torch.int64)
    return o.to(1.0 - _power(o, beta, t), torch.float32)


def _adam_rate(o, steps, beta1, lr):
    return lr / _one_minus_power(o, steps, beta1)


def _adam_norm(o, steps, beta2):
    return o.sqrt(_one_minus_power(o, steps, beta2))


def _decayed(o, p, g, wd):
    """g + wd p; g itself without decay, whatever p is."""
    return o.where(wd == 0.0, g, g + wd * p)


def _adam_mean(o, p, g, m, wd, w1):
    return m + w1 * (_decayed(o, p, g, wd) - m)


def _adam_square(o, p, g, v, wd, beta2, w2):
    g = _decayed(o, p, g, wd)
    return v * beta2 + (w2 * g) * g


def _adam_top(o, p, g, v, top, wd, beta2, w2):
    return _maximum(o, top, _adam_square(o, p, g, v, wd, beta2, w2))


def _adam_moved(o, p, mean, square, shrink, eps, rate, norm):
    return p * shrink - (rate * mean) / (o.sqrt(square) / norm + eps)


def _adam_param(o, p, g, m, v, wd, w1, beta2, w2, shrink, eps, rate, norm):
    mean, square = _adam_mean(o, p, g, m, wd, w1), _adam_square(o, p, g, v, wd, beta2, w2)
    return _adam_moved(o, p, mean, square, shrink, eps, rate, norm)


def _amsgrad_param(o, p, g, m, v, top, wd, w1, beta2, w2, shrink, eps, rate, norm):
    mean, square = _adam_mean(o, p, g, m, wd, w1), _adam_top(o, p, g, v, top, wd, beta2, w2)
    return _adam_moved(o, p, mean, square, shrink, eps, rate, norm)


def _sgd_first_buffer(o, p, g, wd):
    return _decayed(o, p, g, wd)


def _sgd_buffer(o, p, g, b, wd, mu, w):
    return mu * b + w * _decayed(o, p, g, wd)


def _sgd_plain(o, p, g, wd, lr):
    return p - lr * _decayed(o, p, g, wd)


def _sgd_momentum(o, p, g, b, wd, mu, w, lr):
    return p - lr * _sgd_buffer(o, p, g, b, wd, mu, w)


def _sgd_nesterov(o, p, g, b, wd, mu, w, lr):
    return p - lr * (_decayed(o, p, g, wd) + mu * _sgd_buffer(o, p, g, b, wd, mu, w))


def _sgd_first_nesterov(o, p, g, wd, mu, lr):
    g = _decayed(o, p, g, wd)
    return p - lr * (g + mu * g)


for _name, _program, _inputs in (
    ("adam_mean", _adam_mean, 5), ("adam_square", _adam_square, 6), ("adam_top", _adam_top, 7),
    ("adam_param", _adam_param, 12), ("amsgrad_param", _amsgrad_param, 13),
    ("sgd_first_buffer", _sgd_first_buffer, 3), ("sgd_buffer", _sgd_buffer, 6), ("sgd_plain", _sgd_plain, 4),
    ("sgd_momentum", _sgd_momentum, 7), ("sgd_nesterov", _sgd_nesterov, 7), ("sgd_first_nesterov", _sgd_first_nesterov, 5),
):  # fmt: skip
    register(_name, _program, _inputs, "0")
# Stored, so that no kernel computes them anew for every element of a parameter.
stored(register("adam_rate", _adam_rate, 3, "0", widen=False))
stored(register("adam_norm", _adam_norm, 2, "0", widen=False))


# --- one update of every parameter, as Dynamo traces it ----------------------------------------------


def _float32(value, device):
    """A Python number or one-element tensor as a 0-d binary32 tensor."""
    if isinstance(value, torch.Tensor):
        return value.reshape(()).to(device=device, dtype=torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)


def _float64(value, device):
    if isinstance(value, torch.Tensor):
        return value.reshape(()).to(device=device, dtype=torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


class _Adam:
    """The scalars of an Adam step on one device, and its formulas."""

    def __init__(self, steps, lr, beta1, beta2, weight_decay, eps, decoupled):
        device = steps.device
        carbon, f32 = torch.ops.carbon, torch.float32
        lr = _float32(lr, device)
        self.rate = carbon.adam_rate(steps, _float64(beta1, device), lr, dtype=f32)
        self.norm = carbon.adam_norm(steps, _float64(beta2, device), dtype=f32)
        self.w1, self.w2 = _float32(1 - beta1, device), _float32(1 - beta2, device)
        self.beta2, self.eps = _float32(beta2, device), _float32(eps, device)
        decay = _float32(weight_decay, device)
        one, zero = torch.ones((), dtype=f32, device=device), torch.zeros((), dtype=f32, device=device)
        self.shrink, self.decay = (one - lr * decay, zero) if decoupled else (one, decay)

    def update(self, i, p, g, m, v, top):
        """(p', m', v', top') of parameter i; top is None without amsgrad."""
        carbon, mean, square = torch.ops.carbon, (self.decay, self.w1), (self.decay, self.beta2, self.w2)
        rest = (self.decay, self.w1, self.beta2, self.w2, self.shrink, self.eps, self.rate[i], self.norm[i])
        m_new = carbon.adam_mean(p, g, m, *mean, dtype=m.dtype)
        v_new = carbon.adam_square(p, g, v, *square, dtype=v.dtype)
        if top is None:
            return carbon.adam_param(p, g, m, v, *rest, dtype=p.dtype), m_new, v_new, None
        top_new = carbon.adam_top(p, g, v, top, *square, dtype=top.dtype)
        return carbon.amsgrad_param(p, g, m, v, top, *rest, dtype=p.dtype), m_new, v_new, top_new


def _gradient(g, maximize, grad_scale):
    g = -g if maximize else g
    return g if grad_scale is None else g / grad_scale.to(g.device)


def _unless(found_inf, old, new):
    """`old` where the scaled gradients overflowed."""
    return new if found_inf is None else torch.where(found_inf.to(new.device).reshape(()) != 0, old, new)


def _write(destination, value, found_inf):
    destination.copy_(_unless(found_inf, destination, value))


def _devices(params):
    """Indices of the parameters of each device, in order."""
    found = {}
    for i, p in enumerate(params):
        found.setdefault(p.device, []).append(i)
    return found


def _local(tensors):
    """The parts that this rank holds of tensors which ranks share: an update is elementwise."""
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def _placed_like(whole, part):
    """This rank's part of a new state, as a DTensor where its parameter is one."""
    if not hasattr(whole, "to_local"):
        return part
    return type(whole).from_local(part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride())


def adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, grad_scale, found_inf, *, amsgrad, beta1, beta2, lr, weight_decay, eps, maximize, decoupled):
    """Step the parameters and states in place, and the step counts with them."""
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = map(_local, (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs))
    for device, indices in _devices(params).items():
        advance = 1 if found_inf is None else 1 - found_inf.to(device).reshape(())
        steps = torch.stack([state_steps[i] for i in indices]).to(device) + advance
        step = _Adam(steps, lr, beta1, beta2, weight_decay, eps, decoupled)
        for n, i in enumerate(indices):
            g = _gradient(grads[i], maximize, grad_scale)
            top = max_exp_avg_sqs[i] if amsgrad else None
            p, m, v, top_new = step.update(n, params[i], g, exp_avgs[i], exp_avg_sqs[i], top)
            _write(params[i], p, found_inf)
            _write(exp_avgs[i], m, found_inf)
            _write(exp_avg_sqs[i], v, found_inf)
            if amsgrad:
                _write(top, top_new, found_inf)
            state_steps[i].copy_(steps[n])


class _SGD:
    """The scalars of an SGD step on one device, and its formulas."""

    def __init__(self, device, lr, weight_decay, momentum, dampening, nesterov):
        self.lr, self.decay = _float32(lr, device), _float32(weight_decay, device)
        self.mu, self.w = _float32(momentum, device), _float32(1 - dampening, device)
        self.momentum, self.nesterov = momentum != 0, nesterov

    def update(self, p, g, b):
        """(p', b') of one parameter; b is None at the first step, b' without momentum."""
        carbon = torch.ops.carbon
        if not self.momentum:
            return carbon.sgd_plain(p, g, self.decay, self.lr, dtype=p.dtype), None
        if b is None:
            b_new = carbon.sgd_first_buffer(p, g, self.decay, dtype=p.dtype)
            if self.nesterov:
                return carbon.sgd_first_nesterov(p, g, self.decay, self.mu, self.lr, dtype=p.dtype), b_new
            return carbon.sgd_plain(p, g, self.decay, self.lr, dtype=p.dtype), b_new
        moved = carbon.sgd_nesterov if self.nesterov else carbon.sgd_momentum
        p_new = moved(p, g, b, self.decay, self.mu, self.w, self.lr, dtype=p.dtype)
        return p_new, carbon.sgd_buffer(p, g, b, self.decay, self.mu, self.w, dtype=b.dtype)


def sgd(params, grads, buffers, grad_scale, found_inf, *, weight_decay, momentum, lr, dampening, nesterov, maximize):
    """Step the parameters and momentum buffers in place; a buffer that is None is created in its list."""
    wholes, held = params, buffers
    params, grads, buffers = map(_local, (params, grads, buffers))
    steps = {device: _SGD(device, lr, weight_decay, momentum, dampening, nesterov) for device in _devices(params)}
    for i, p in enumerate(params):
        g = _gradient(grads[i], maximize, grad_scale)
        p_new, b_new = steps[p.device].update(p, g, buffers[i] if momentum != 0 else None)
        _write(p, p_new, found_inf)
        if momentum != 0 and buffers[i] is None:
            held[i] = _placed_like(wholes[i], b_new)
        elif momentum != 0:
            _write(buffers[i], b_new, found_inf)


def _adam_call(original):
    def call(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, foreach=None, capturable=False, differentiable=False,
        fused=None, grad_scale=None, found_inf=None, has_complex=False, decoupled_weight_decay=False, *,
        amsgrad, beta1, beta2, lr, weight_decay, eps, maximize,
    ):  # fmt: skip
        scalars = {"amsgrad": amsgrad, "beta1": beta1, "beta2": beta2, "lr": lr, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        if differentiable or has_complex:
            return original(
                params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, foreach=False, capturable=capturable,
                differentiable=differentiable, has_complex=has_complex, decoupled_weight_decay=decoupled_weight_decay, **scalars,
            )  # fmt: skip
        adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, grad_scale, found_inf, decoupled=decoupled_weight_decay, **scalars)

    return call


def _sgd_call(original):
    def call(
        params, d_p_list, momentum_buffer_list, has_sparse_grad=False, foreach=None, fused=None, grad_scale=None, found_inf=None, *,
        weight_decay, momentum, lr, dampening, nesterov, maximize,
    ):  # fmt: skip
        scalars = {"weight_decay": weight_decay, "momentum": momentum, "lr": lr, "dampening": dampening, "nesterov": nesterov, "maximize": maximize}
        if has_sparse_grad:
            return original(params, d_p_list, momentum_buffer_list, has_sparse_grad=True, foreach=False, **scalars)
        sgd(params, d_p_list, momentum_buffer_list, grad_scale, found_inf, **scalars)

    return call


def _loop_call(original):
    """The for-loop implementation, without the fallback to eager for step counts on a GPU."""
    original = getattr(original, "__wrapped__", original)

    def call(*args, **kwargs):
        for choice in ("foreach", "fused"):
            if choice in kwargs:
                kwargs[choice] = False
        return original(*args, **kwargs)

    return call


_LOOPS = ("adadelta", "adagrad", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "_adafactor", "_muon")


def install(tracing_for_carbon, eager):
    """Put these updates in the place of torch.optim's functional ones, where Dynamo traces for carbon or
    eager code keeps the contract.

    `tracing_for_carbon()` says the first; Dynamo asks it while it traces and keeps the answer in the
    code it makes, which belongs to one backend. `eager()` says the second. Anyone else finds what was
    there before.
    """
    _replace(["adam", "adamw"], "adam", _adam_call, tracing_for_carbon, eager)
    _replace(["sgd"], "sgd", _sgd_call, tracing_for_carbon, eager)
    for module in _LOOPS:
        _replace([module], module.removeprefix("_"), _loop_call, tracing_for_carbon, eager)


def _replace(modules, name, make, tracing_for_carbon, eager):
    modules = [importlib.import_module(f"torch.optim.{module}") for module in modules]
    original = getattr(modules[0], name)
    ours = make(original)

    @functools.wraps(original)
    def update(*args, **kwargs):
        if tracing_for_carbon() if torch.compiler.is_compiling() else eager():
            return ours(*args, **kwargs)
        return original(*args, **kwargs)

    for module in modules:
        setattr(module, name, update)


# --- ATen's fused and foreach operators -----------------------------------------------------------------


def _fused_adam(decoupled):
    def fused(params, grads, means, squares, tops, steps, *, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, grad_scale=None, found_inf=None):
        """Step counts come advanced."""
        step = _Adam(torch.stack(steps), lr, beta1, beta2, weight_decay, eps, decoupled)
        grads = [_gradient(g, False, grad_scale) for g in grads]
        results = []
        for i, state in enumerate(zip(params, means, squares, tops or [None] * len(params), strict=True)):
            new = step.update(i, state[0], _gradient(grads[i], maximize, None), state[1], state[2], state[3] if amsgrad else None)
            results.append([_unless(found_inf, a, b) if b is not None else a for a, b in zip(state, new, strict=True)])
        params, means, squares, tops_new = (list(group) for group in zip(*results, strict=True))
        return params, grads, means, squares, tops_new if amsgrad else tops

    return fused


def fused_sgd(params, grads, buffers, *, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step, grad_scale=None, found_inf=None):
    step = _SGD(params[0].device, lr, weight_decay, momentum, dampening, nesterov)
    grads = [_gradient(g, False, grad_scale) for g in grads]
    results = []
    for i, (p, b) in enumerate(zip(params, buffers or [None] * len(params), strict=True)):
        p_new, b_new = step.update(p, _gradient(grads[i], maximize, None), None if is_first_step else b)
        results.append((_unless(found_inf, p, p_new), b if b_new is None else _unless(found_inf, b, b_new)))
    params, buffers_new = (list(group) for group in zip(*results, strict=True))
    return params, grads, buffers_new if buffers else buffers


for _kind, _decoupled in (("adam", False), ("adamw", True)):
    rule(f"aten._fused_{_kind}.default", f"aten._fused_{_kind}.tensor_lr", section="0", integers="rule")(_fused_adam(_decoupled))
rule("aten._fused_sgd.default", "aten._fused_sgd.tensor_lr", section="0", integers="rule")(fused_sgd)


@rule("aten._amp_foreach_non_finite_check_and_unscale.default", section="0", integers="rule")
def unscale(grads, found_inf, inverse_scale):
    """g / scale, rounded once, and 1 in `found_inf` where any g is not finite."""
    for g in grads:
        finite = P.lt(P.abs(g), float("inf"), dtype=torch.bool)
        found_inf = torch.where(torch.ops.aten.all.default(finite), found_inf, 1.0)
    return [P.mul(g, inverse_scale, dtype=g.dtype) for g in grads], found_inf


@rule("aten._amp_update_scale.default", section="0", integers="rule")
def update_scale(scale, tracker, found_inf, growth, backoff, interval):
    """The scale backs off after an overflow, and grows after `interval` steps without one."""
    overflowed, steps = found_inf != 0, tracker + 1
    grown = P.mul(scale, growth)
    grows = (steps == interval) & P.lt(grown, float("inf"), dtype=torch.bool)
    kept = torch.where(grows, grown, scale)
    return torch.where(overflowed, P.mul(scale, backoff), kept), torch.where(overflowed | (steps == interval), 0, steps)


_FOREACH = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor
frac lerp lgamma log log10 log1p log2 max maximum minimum mm mul neg norm pow powsum reciprocal round rsqrt sigmoid sign
sin sinh sqrt sub tan tanh trunc zero
"""
_ONE_BY_ONE = {
    "norm": lambda x, ord=2, dtype=None: torch.ops.aten.linalg_vector_norm.default(x, ord, dtype=dtype),
    "powsum": lambda x, ord=2, dtype=None: torch.ops.aten.sum.dim_IntList(torch.ops.aten.pow(torch.ops.aten.abs(x), ord), None, dtype=dtype),
    "zero": lambda x: torch.ops.aten.zeros_like.default(x),
    "maximum": lambda x, y: torch.ops.aten.maximum(x, y) if isinstance(y, torch.Tensor) else torch.ops.aten.clamp_min(x, y),
    "minimum": lambda x, y: torch.ops.aten.minimum(x, y) if isinstance(y, torch.Tensor) else torch.ops.aten.clamp_max(x, y),
    "addcmul": lambda x, a, b, value=1: torch.ops.aten.addcmul.default(x, a, b, value=value),
    "addcdiv": lambda x, a, b, value=1: torch.ops.aten.addcdiv.default(x, a, b, value=value),
}


def _each(op):
    """`op` on the i-th elements of the lists among the arguments; other arguments go to every call."""

    def foreach(*args, **kwargs):
        n = next(len(a) for a in args if isinstance(a, (list, tuple)))
        return [op(*(a[i] if isinstance(a, (list, tuple)) else a for a in args), **kwargs) for i in range(n)]

    return foreach


for _name in _FOREACH.split():
    _packet = getattr(torch.ops.aten, f"_foreach_{_name}", None)
    for _overload in _packet.overloads() if _packet is not None else ():
        _op = getattr(_packet, _overload)
        # A tensor of scalars can't be traced: its values would have to be known.
        _of_scalars = any(a.name == "scalars" and str(a.type) == "Tensor" for a in _op._schema.arguments)
        if not _of_scalars and not _op._schema.is_mutable and not _overload.endswith("out"):
            _single = _ONE_BY_ONE.get(_name) or getattr(torch.ops.aten, _name)
            rule(f"aten._foreach_{_name}.{_overload}", section="1", integers="rule")(_each(_single))
