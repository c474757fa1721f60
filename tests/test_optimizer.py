"""Optimizer steps: one result for every implementation, the pinned formulas, clipping, foreach operators."""

import math

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from carbon_compile.backend import carbon
from carbon_compile.hashing import fingerprint

from .definition import check_compiled, compiled, defined, eager_engine

VARIANTS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
CASES = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0, "maximize": True}),
]
OTHERS = ["Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


def parameters(dtype=None):
    torch.manual_seed(1)
    dtypes = (dtype or torch.float32, dtype or torch.bfloat16, dtype or torch.float32)
    shapes = ((3, 4), (5,), (2, 1, 3))
    return [torch.nn.Parameter(torch.randn(shape).to(d)) for shape, d in zip(shapes, dtypes, strict=True)]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)


def stepped(kind, options, steps=3, dtype=None, backend=carbon, device="cpu"):
    """Parameters and states after some compiled steps (eager ones if `backend` is None)."""
    torch._dynamo.reset()
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(dtype)]
    optimizer = kind(params, **options)
    step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
    for i in range(steps):
        give_gradients(params, i)
        step()
    return results(params, optimizer)


def results(params, optimizer):
    states = [v for p in params for _, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in [*params, *states]]


def close(a, b, tolerance):
    for x, y in zip(a, b, strict=True):
        assert ((x.double() - y).abs().max() <= tolerance * y.abs().max().clamp_min(1e-30)).item()


@pytest.mark.parametrize("kind, options", CASES)
def test_every_implementation_gives_one_result(kind, options, bitwise):
    with eager_engine():
        loop, foreach, fused = (stepped(kind, {**options, **variant}) for variant in VARIANTS)
        wide = stepped(kind, {**options, "foreach": False}, dtype=torch.float32)
    bitwise(foreach, loop)
    bitwise(fused, loop)
    close(wide, stepped(kind, options, dtype=torch.float64, backend=None), 1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_run_their_loop(name, bitwise):
    kind = getattr(torch.optim, name)
    with eager_engine():
        loop, foreach = (stepped(kind, {"foreach": f}, steps=2) for f in (False, True))
        wide = stepped(kind, {}, steps=2, dtype=torch.float32)
    bitwise(foreach, loop)
    close(wide, stepped(kind, {}, steps=2, dtype=torch.float64, backend=None), 1e-5)


@pytest.mark.parametrize("kind, options", [CASES[1], CASES[4]])
def test_compiled_is_the_definition(kind, options, bitwise):
    got = stepped(kind, {**options, "fused": True})
    with eager_engine():
        bitwise(got, stepped(kind, {**options, "foreach": False}))


def test_formulas_operation_by_operation():
    """Adam and SGD in NumPy's float32, whose operations are IEEE's."""
    f = np.float32
    with eager_engine():
        adam = stepped(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, dtype=torch.float32)
        sgd = stepped(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, dtype=torch.float32)
    p = [t.detach().numpy().copy() for t in parameters(torch.float32)]
    q = [x.copy() for x in p]
    m, v, b = ([np.zeros_like(x) for x in p] for _ in range(3))
    for step in range(3):
        params = parameters(torch.float32)
        give_gradients(params, step)
        rate = f(0.01) / f(1 - 0.9 ** (step + 1))
        norm = np.sqrt(f(1 - 0.999 ** (step + 1)))
        for i, g in enumerate(t.grad.numpy() for t in params):
            m[i] = m[i] + f(1 - 0.9) * (g - m[i])
            v[i] = v[i] * f(0.999) + (f(1 - 0.999) * g) * g
            p[i] = p[i] * (f(1) - f(0.01) * f(0.1)) - (rate * m[i]) / (np.sqrt(v[i]) / norm + f(1e-8))
            d = g + f(0.1) * q[i]
            b[i] = f(0.9) * b[i] + d if step else d
            q[i] = q[i] - f(0.1) * (d + f(0.9) * b[i])
    for i in range(3):
        assert np.array_equal(adam[i].numpy(), p[i]) and np.array_equal(sgd[i].numpy(), q[i])
    assert np.array_equal(adam[3].numpy(), m[0]) and np.array_equal(adam[4].numpy(), v[0]) and adam[5].item() == 3


def test_a_learning_rate_may_change_and_may_be_a_tensor(bitwise):
    def run(lr):
        torch._dynamo.reset()
        params = parameters()
        optimizer = torch.optim.AdamW(params, lr=lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        step = torch.compile(optimizer.step, backend=carbon)
        for i in range(4):
            give_gradients(params, i)
            step()
            schedule.step()
        return results(params, optimizer)

    by_float = run(0.1)
    with eager_engine():
        bitwise(run(0.1), by_float)
        by_tensor = run(torch.tensor(0.1))
    # The tensor's rate is multiplied in float32, the number's in Python: they part after a step or two.
    close(by_float, by_tensor, 1e-2)


def test_a_step_after_an_eager_one_and_a_reloaded_state(bitwise):
    """The state keeps PyTorch's names and shapes, so steps may be eager, compiled, or after a reload."""

    def run(reload):
        params = parameters(torch.float32)
        optimizer = torch.optim.Adam(params, lr=0.1)
        give_gradients(params, 0)
        optimizer.step()
        if reload:
            state = optimizer.state_dict()
            optimizer = torch.optim.Adam(params, lr=0.1, foreach=True)
            optimizer.load_state_dict(state)
        give_gradients(params, 1)
        torch.compile(optimizer.step, backend=carbon)()
        return results(params, optimizer)

    with eager_engine():
        bitwise(run(True), run(False))


def test_overflowed_gradients_leave_everything_as_it_was(bitwise):
    with eager_engine():
        for kind, options in (CASES[4], CASES[1]):
            torch._dynamo.reset()
            params = parameters(torch.float32)
            optimizer = kind(params, **options, fused=True)
            step = torch.compile(optimizer.step, backend=carbon)
            give_gradients(params, 0)
            step()
            before = results(params, optimizer)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(1.0)
            give_gradients(params, 1)
            step()
            bitwise(results(params, optimizer), before)
            optimizer.found_inf = torch.tensor(0.0)
            give_gradients(params, 1)
            for p in params:
                p.grad *= 8
            step()
            bitwise(results(params, optimizer), stepped(kind, options, steps=2, dtype=torch.float32))


def test_other_backends_find_what_was_there():
    names = []

    def backend(gm, inputs):
        names.extend(str(n.target) for n in gm.graph.nodes)
        return gm.forward

    got = stepped(torch.optim.Adam, {"foreach": False}, backend=backend)
    assert names and not any("carbon" in n for n in names)
    close(got, [t.double() for t in stepped(torch.optim.Adam, {"foreach": False}, backend=None)], 1e-2)


def norms(a, b, c):
    def clip(foreach):
        total = get_total_norm([a, b, c], foreach=foreach)
        scale = torch.clamp(1.0 / (total + 1e-6), max=1.0)
        return [total, get_total_norm([a, b, c], norm_type=math.inf, foreach=foreach), *(t * scale for t in (a, b, c))]

    return *clip(True), *clip(False)


def test_clipping_by_norm(bitwise):
    tensors = [torch.randn(40, 3) * 5, torch.randn(7), torch.randn(2, 3).bfloat16()]
    got, _ = check_compiled(norms, tensors)
    bitwise(got[: len(got) // 2], got[len(got) // 2 :])
    want = torch.cat([t.double().flatten() for t in tensors]).norm()
    assert abs(got[0] / want - 1) < 1e-6

    totals, gradients = [], []
    for foreach in (True, False):
        params = [torch.nn.Parameter(torch.zeros_like(t)) for t in tensors]
        for p, g in zip(params, tensors, strict=True):
            p.grad = g.clone()
        with eager_engine():
            torch._dynamo.reset()
            totals.append(torch.compile(lambda p=params, f=foreach: clip_grad_norm_(p, 1.0, foreach=f), backend=carbon)())
        gradients.append([p.grad for p in params])
    bitwise(totals[0], totals[1])
    bitwise(gradients[0], gradients[1])
    bitwise(gradients[0], got[2 : 2 + len(tensors)])


def lists(a, b, c, s):
    x, y, z = [a, b], [b, a], [c, c]
    foreach = torch._foreach_add
    t = torch
    outputs = [
        foreach(x, y, alpha=0.3), foreach(x, 2.0), foreach(x, [1.5, -2.0]), foreach(x, s), t._foreach_sub(x, y), t._foreach_mul(x, s),
        t._foreach_div(x, z), t._foreach_addcmul(x, y, z, 0.1), t._foreach_addcdiv(x, y, z, [0.3, 0.7]),
        t._foreach_lerp(x, y, 0.9), t._foreach_lerp(x, y, z), t._foreach_sqrt(z),
        t._foreach_pow(0.9, z), t._foreach_pow(z, 2.5), t._foreach_neg(x), t._foreach_abs(x), t._foreach_maximum(x, y), t._foreach_maximum(x, 0.1),
        t._foreach_clamp_min(x, 0.0), t._foreach_exp(x), t._foreach_norm(x), t._foreach_norm(x, 1), t._foreach_reciprocal(z), t._foreach_sign(x),
    ]  # fmt: skip
    return [y for output in outputs for y in output]


def singles(a, b, c, s):
    x, y, z = [a, b], [b, a], [c, c]
    per = [
        [u + 0.3 * v for u, v in zip(x, y, strict=True)], [u + 2.0 for u in x], [x[0] + 1.5, x[1] - 2.0], [u + s for u in x],
        [u - v for u, v in zip(x, y, strict=True)], [u * s for u in x], [u / w for u, w in zip(x, z, strict=True)],
        [torch.addcmul(u, v, w, value=0.1) for u, v, w in zip(x, y, z, strict=True)],
        [torch.addcdiv(u, v, w, value=r) for u, v, w, r in zip(x, y, z, (0.3, 0.7), strict=True)],
        [torch.lerp(u, v, 0.9) for u, v in zip(x, y, strict=True)],
        [torch.lerp(u, v, w) for u, v, w in zip(x, y, z, strict=True)], [w.sqrt() for w in z], [torch.pow(0.9, w) for w in z],
        [w.pow(2.5) for w in z], [-u for u in x], [u.abs() for u in x], [torch.maximum(u, v) for u, v in zip(x, y, strict=True)],
        [u.clamp_min(0.1) for u in x], [u.clamp_min(0.0) for u in x], [u.exp() for u in x], [torch.linalg.vector_norm(u) for u in x],
        [torch.linalg.vector_norm(u, 1) for u in x], [w.reciprocal() for w in z], [u.sign() for u in x],
    ]  # fmt: skip
    return [y for output in per for y in output]


def test_foreach_operators_are_single_ones(bitwise):
    tensors = [torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4) + 0.5, torch.tensor(1.7)]
    together, _ = defined(lists, tensors)
    apart, _ = defined(singles, tensors)
    for i, (a, b) in enumerate(zip(together, apart, strict=True)):
        bitwise(a, b, f"result {i}")


def fused_adamw(p, q, g, h, step):
    states = [[torch.zeros_like(t) for t in (p, q)] for _ in range(2)]
    return [
        t
        for group in torch.ops.aten._fused_adamw([p, q], [g, h], *states, [], [step, step], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
        for t in group
    ]


def test_the_fused_operator_is_the_same_update(bitwise):
    params = parameters(torch.float32)[:2]
    give_gradients(params, 0)
    p, q = (t.detach().clone() for t in params)
    with eager_engine():
        optimizer = torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
        torch.compile(optimizer.step, backend=carbon)()
    got, _ = compiled(fused_adamw, [p, q, params[0].grad, params[1].grad, torch.tensor(1.0)])
    bitwise(got[:2], [t.detach() for t in params])
    bitwise(got[4:8:2], [optimizer.state[params[0]][k] for k in ("exp_avg", "exp_avg_sq")])


def check(device):
    """Fingerprints of parameters and states after a few steps, on `device`."""
    found = {}
    for i, (kind, options) in enumerate(CASES):
        variant = VARIANTS[i % 3]
        states = stepped(kind, {**options, **variant}, device=device)
        found[f"{kind.__name__} {options}"] = fingerprint([t.cpu() for t in states])
    for name in OTHERS:
        found[name] = fingerprint([t.cpu() for t in stepped(getattr(torch.optim, name), {}, steps=2, device=device)])
    torch._dynamo.reset()
    tensors = [t.to(device) for t in (torch.linspace(-9, 7, 120), torch.linspace(-1, 2, 6).bfloat16(), torch.linspace(0, 1, 5))]
    found["clip"] = fingerprint([t.detach() for t in compiled(norms, tensors)[0]])
    return found


@pytest.mark.gpu
def test_gpu_equals_cpu():
    assert check("cuda") == check("cpu")


def test_no_warning_of_a_profiler_range_that_is_pytorchs_own(monkeypatch):
    warned = []
    monkeypatch.setattr("torch._dynamo.variables.ctx_manager.warning_once", lambda log, message, *rest: warned.append(message))

    def ranged(x):
        with torch.profiler.record_function("mine"):
            return x * 2

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    with eager_engine():
        torch.compile(optimizer.step, backend=carbon)()
        torch.compile(optimizer.zero_grad, backend=carbon)()
        assert warned == [] and weight.grad is None
        torch.compile(ranged, backend=carbon)(weight)
    assert len(warned) == 1 and "Profiler record function" in warned[0]
