"""Random functions: one key a call from the host's generator, one draw an element."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from carbon_compile.backend import carbon
from carbon_compile.hashing import fingerprint
from carbon_compile.lowering import composites, philox, registry
from carbon_compile.lowering import random as R
from carbon_compile.lowering.engines import TorchEngine
from carbon_compile.lowering.policy import Policy
from carbon_compile.lowering.registry import Refusal

from .definition import eager_engine

registry.load()


def compiled(function, **options):
    return torch.compile(function, backend=carbon, fullgraph=True, **options)


@pytest.fixture
def by_definition():
    """Rewritten graphs run eagerly: for what a kernel can't change, such as which call has which key."""
    with eager_engine():
        yield


def eager(function, *args, **kwargs):
    """The definition: the function with every composite in place, run by eager PyTorch."""
    with composites.Composites(Policy()):
        return function(*args, **kwargs)


def plain(name, key, n, *arguments):
    """A program's draws of elements 0..n-1, straight from its definition."""
    return philox.PROGRAMS[name][0](TorchEngine, key[0], key[1], torch.arange(n), *arguments)


def keys(seed, n):
    torch.manual_seed(seed)
    return R.draw_keys(n, device="cpu")


def test_keys_are_the_generators_next_64_bits():
    # The first outputs of mt19937 seeded with 0, as NumPy's RandomState(0) gives them.
    words = [2357136044, 2546248239, 3071714933, 3626093760]
    assert keys(0, 2).tolist() == [[words[1], words[0]], [words[3], words[2]]]
    torch.manual_seed(0)
    assert [R.draw_keys(1, device="cpu")[0].tolist() for _ in range(2)] == keys(0, 2).tolist()


def every_draw(x):
    """The i-th result takes the i-th key."""
    low, on = x.detach().bfloat16(), {"device": x.device}
    return (
        torch.rand(6, 7, **on),
        torch.rand(5, dtype=torch.bfloat16, **on),
        torch.rand(9, dtype=torch.float16, **on),
        torch.rand(9, dtype=torch.float64, **on),
        torch.rand_like(low),
        torch.randint(11, (13,), **on),
        torch.randint(-5, 2**40, (4, 3), **on),
        torch.randint_like(low, 3, 9),
        x.detach().clone().uniform_(-2.0, 3.0),
        x.detach().clone().bernoulli_(0.25),
        torch.full((40,), 0.75, **on).bernoulli(),
        torch.ops.aten.random(torch.empty(33, **on)),  # Dynamo breaks the graph at Tensor.random_
        torch.ops.aten.random(torch.empty(33, dtype=torch.int32, **on), 10, 20),
        torch.randperm(17, **on),
        F.dropout(x, 0.3),
        F.dropout(low, 0.3),
    )


def test_each_function_is_its_program():
    x = torch.randn(5, 8, requires_grad=True)
    k = keys(5, 16)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    got = compiled(every_draw)(x)
    assert torch.equal(torch.get_rng_state(), _after(state, 16))

    u = plain("uniform_float32", k[8], 40).view(5, 8)
    mask = plain("keep", k[14], 40, philox.threshold(0.3)).view(5, 8)
    low_mask = plain("keep", k[15], 40, philox.threshold(0.3)).view(5, 8)
    scale = torch.tensor(1 / (1 - 0.3))
    low = x.detach().bfloat16()
    high, bottom = plain_words(k[13], 17)
    expected = (
        plain("uniform_float32", k[0], 42).view(6, 7),
        plain("uniform_bfloat16", k[1], 5).bfloat16(),
        plain("uniform_float16", k[2], 9).half(),
        plain("uniform_float64", k[3], 9),
        plain("uniform_bfloat16", k[4], 40).bfloat16().view(5, 8),
        plain("randint", k[5], 13, 0, 11),
        plain("randint", k[6], 12, -5, 2**40).view(4, 3),
        plain("randint", k[7], 40, 3, 9).bfloat16().view(5, 8),
        u * 5.0 + -2.0,
        plain("bernoulli", k[9], 40, philox.threshold(0.25)).float().view(5, 8),
        plain("bernoulli", k[10], 40, philox.threshold(0.75)).float(),
        plain("randint", k[11], 33, 0, 2**24 + 1).float(),
        plain("randint", k[12], 33, 10, 20).int(),
        torch.argsort((high << 31) | (bottom >> 1), stable=True),
        torch.where(mask, x.detach() * scale, 0.0),
        torch.where(low_mask, (low.float() * scale).bfloat16(), torch.zeros((), dtype=torch.bfloat16)),
    )
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.dtype is b.dtype and torch.equal(a, b), i


def plain_words(key, n):
    return philox.philox64(TorchEngine, key[0], key[1], torch.arange(n))


def _after(state, n):
    torch.set_rng_state(state)
    R.draw_keys(n, device="cpu")
    return torch.get_rng_state()


def test_distributions_are_sane(by_definition):
    def draws():
        return torch.rand(40000), torch.randint(7, (40000,)), F.dropout(torch.ones(40000), 0.2), torch.randperm(4000)

    u, n, d, p = compiled(draws)()
    assert abs(u.mean() - 0.5) < 0.01 and u.min() >= 0 and u.max() < 1
    assert set(n.tolist()) == set(range(7)) and abs((n == 3).float().mean() - 1 / 7) < 0.01
    assert abs((d != 0).float().mean() - 0.8) < 0.01 and abs(d.mean() - 1) < 0.02
    assert p.sort().values.equal(torch.arange(4000)) and not p.equal(torch.arange(4000))


def normals(x):
    on = {"device": x.device}
    return (
        torch.randn(40000, **on), torch.randn(30001, dtype=torch.bfloat16, **on), torch.empty(40000, **on).normal_(3.0, 0.5),
        torch.empty(40000, **on).exponential_(2.0), torch.normal(x, 2.0), torch.randn_like(x.mT), F.gumbel_softmax(x, hard=False),
    )  # fmt: skip


def test_normal_and_exponential_draws():
    x = torch.arange(12.0).view(3, 4)
    torch.manual_seed(1)
    z, low, shifted, e, around, like, gumbel = compiled(normals)(x)
    k = keys(1, 6)
    assert torch.equal(z, plain("normal", k[0], 40000))
    assert torch.equal(low, plain("normal", k[1], 30001).bfloat16())
    assert torch.equal(shifted, plain("normal", k[2], 40000) * 0.5 + 3.0)
    assert torch.equal(e, plain("exponential", k[3], 40000) / 2.0)
    assert torch.equal(around, plain("normal", k[4], 12).view(3, 4) * 2.0 + x)
    assert torch.equal(like, plain("normal", k[5], 12).view(4, 3)) and like.stride() == (1, 4)
    assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02 and abs(e.mean() - 0.5) < 0.02
    assert torch.allclose(gumbel.sum(-1), torch.ones(3))


def dropouts(x):
    return (
        F.dropout(x, 0.5), F.dropout1d(x, 0.4), F.dropout2d(x[..., None], 0.5), F.alpha_dropout(x, 0.4, True),
        F.feature_alpha_dropout(x, 0.5, True), F.dropout(x * 1.0, 0.25, inplace=True), torch.dropout(x, 0.0, True),
        F.dropout(x, 1.0), F.dropout(x, 0.5, training=False), F.alpha_dropout(x, 1.0, True),
    )  # fmt: skip


def test_dropout_compiled_is_the_definition(bitwise):
    def both(x):
        return dropouts(x), dropouts(x.bfloat16())

    x = torch.linspace(-3, 5, 4 * 6 * 10).view(4, 6, 10)
    torch.manual_seed(7)
    got = compiled(both)(x)
    torch.manual_seed(7)
    bitwise(got, eager(both, x))
    for results, source in zip(got, (x, x.bfloat16()), strict=True):
        element, channel = results[0], results[2]
        assert torch.equal(element, torch.where(element != 0, source * 2, torch.zeros_like(source)))
        dead = (channel == 0).flatten(2).all(-1)
        assert dead.any() and not dead.all()
        assert torch.equal(channel[~dead], (source * 2)[..., None][~dead])
        assert results[6].equal(source) and results[8].equal(source)
        assert results[7].count_nonzero() == 0 and results[9].count_nonzero() == 0


def test_dropout_gradient_is_its_mask(by_definition):
    def f(x):
        return F.dropout(x, 0.3), F.dropout2d(x, 0.3), F.alpha_dropout(x, 0.3, True)

    x = torch.rand(8, 5, 7).add(1).requires_grad_()
    y, z, alpha = compiled(f)(x)
    g = torch.randn(8, 5, 7)
    scale = torch.tensor(1 / (1 - 0.3))
    for kept in (y, z):
        (dx,) = torch.autograd.grad(kept, x, g, retain_graph=True)
        assert torch.equal(dx, torch.where(kept != 0, g * scale, 0.0))
    (dx,) = torch.autograd.grad(alpha, x, g)
    dead = alpha == alpha.min()
    assert dead.any() and (dx[dead] == 0).all() and (dx[~dead] != 0).all()


def test_kept_infinities_and_dropped_nans(by_definition):
    """A dropped element is 0 whatever it was."""
    y = compiled(lambda x: F.dropout(x, 0.5))(torch.full((64,), float("nan")))
    assert (y == 0).any() and y.isnan().any() and ((y == 0) | y.isnan()).all()


def test_a_draw_depends_on_seed_and_call_only(by_definition):
    f = compiled(lambda x: (torch.rand_like(x), F.dropout(x, 0.5)))
    x = torch.ones(1000)
    torch.manual_seed(0)
    first, second = f(x), f(x)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        again = f(x)
    third = f(x)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(second, third, strict=True))
    state = torch.get_rng_state()
    fourth = f(x)
    torch.set_rng_state(state)
    assert all(torch.equal(a, b) for a, b in zip(fourth, f(x), strict=True))


def test_identical_calls_draw_apart_and_an_unused_one_does_not_count(by_definition):
    def f(x):
        a, _, _, c = F.dropout(x, 0.5), torch.rand(3), F.dropout(x, 0.25), F.dropout(x, 0.5)
        return a, c

    k = keys(2, 2)
    torch.manual_seed(2)
    for y, key in zip(compiled(f)(torch.ones(500)), k, strict=True):
        assert torch.equal(y != 0, plain("keep", key, 500, 2**31))


def test_dynamic_shapes_inference_and_training_agree(bitwise):
    def f(x):
        return F.dropout(x, 0.4) + torch.rand_like(x)

    g = compiled(f, dynamic=True)
    for n in (3, 5, 16):
        x = torch.linspace(1, 2, n * 7).view(n, 7)
        torch.manual_seed(n)
        inference = g(x)
        torch.manual_seed(n)
        training = g(x.clone().requires_grad_())
        torch.manual_seed(n)
        k = keys(n, 2)
        kept = plain("keep", k[0], n * 7, philox.threshold(0.4)).view(n, 7)
        expected = torch.where(kept, x * torch.tensor(1 / (1 - 0.4)), 0.0) + plain("uniform_float32", k[1], n * 7).view(n, 7)
        bitwise(inference, expected)
        bitwise(training.detach(), expected)


@pytest.mark.parametrize("where", ["inside", "outside", "none"])
def test_checkpointing_replays_the_draws(where, bitwise, by_definition):
    """The gradient of a recomputed dropout is that of the first run, compiled region or eager."""

    def block(x):
        return F.dropout(x * x, 0.5) + torch.rand_like(x) * x

    def f(x):
        return checkpoint(block, x, use_reentrant=False) * 2.0

    x = torch.linspace(1, 3, 200).requires_grad_()
    torch.manual_seed(4)
    if where == "inside":
        y = compiled(f)(x)
    elif where == "outside":
        y = checkpoint(compiled(block), x, use_reentrant=False) * 2.0
    else:
        y = compiled(lambda x: block(x) * 2.0)(x)
    y.sum().backward()
    k = keys(4, 2)
    kept = plain("keep", k[0], 200, 2**31)
    u = plain("uniform_float32", k[1], 200)
    with torch.no_grad():
        square = x * x
        bitwise(y.detach(), (torch.where(kept, square * 2.0, 0.0) + u * x) * 2.0)
        through = torch.where(kept, 4.0, 0.0) * x
        bitwise(x.grad, (u * 2.0 + through) + through)


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.multinomial(torch.ones(4), 2),
        lambda: torch.poisson(torch.ones(4)),
        lambda: torch.empty(3).cauchy_(),
    ],
)
def test_samplers_without_a_rule_are_refused(function):
    with pytest.raises(Exception, match="CB402"):
        torch.compile(function, backend=carbon)()


def test_a_generator_object_is_refused():
    with pytest.raises(Refusal) as refused:
        registry.RULES[torch.ops.aten.bernoulli.p].function(torch.ones(3), 0.5, generator=torch.Generator())
    assert refused.value.code == "CB403"


PROGRAM = """
import torch, torch.nn.functional as F
from carbon_compile.backend import carbon
from torch._dynamo.utils import counters
def f(x):
    return F.dropout(x, 0.5) + torch.rand(4, 8)
x = torch.ones(4, 8, requires_grad=True)
torch.manual_seed(11)
g = torch.compile(f, backend=carbon)
y = g(x); y.sum().backward()
print(y.tolist(), x.grad.tolist(), g(x).tolist(), "hits", counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_warm_process_draws_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs = [subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    cold, warm = (r.rsplit("hits", 1) for r in runs)
    assert cold[0] == warm[0]
    assert int(cold[1]) == 0 and int(warm[1]) >= 1


def check(device):
    """Fingerprints of every draw and of dropout's gradient, on `device`."""
    found = {}
    for i, function in enumerate((every_draw, normals, dropouts)):
        torch._dynamo.reset()
        x = torch.linspace(-3, 5, 240).view(4, 6, 10).to(device).requires_grad_()
        torch.manual_seed(i)
        outputs = compiled(function)(x)
        found[function.__name__] = fingerprint([y.detach() for y in outputs])
        if function is dropouts:
            sum((y * (n + 1)).sum() for n, y in enumerate(outputs)).backward()
            # Sums outside the compiled function are PyTorch's; their gradients are exact.
            found["gradient"] = fingerprint(x.grad)
    return found


@pytest.mark.gpu
def test_gpu_equals_cpu():
    assert check("cuda") == check("cpu")
