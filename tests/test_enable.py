"""Eager code under `carbon_compile.enable`: the compiled run's hashes, the contract's refusals, and a
process that is afterwards as it was before."""

import contextlib
import copy
import io
import json
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import carbon_compile
from carbon_compile import eager, modes
from carbon_compile.backend import carbon
from carbon_compile.bits import assert_bitwise
from carbon_compile.diagnostics import Refused
from carbon_compile.lowering import philox
from carbon_compile.lowering.engines import TorchEngine
from carbon_compile.runlog import LOG

from . import training
from .definition import compiled, eager_engine

RECORDED = json.loads(training.GOLDEN.read_text())
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def nothing_left():
    """A failed test doesn't leave the next one under the contract."""
    yield
    while eager._enabled:
        carbon_compile.disable()


# --- training without torch.compile ------------------------------------------------------------------


def train(case, device, precision):
    """`training.train` without torch.compile: 20 lines that a user could have written."""
    autocast = PRECISIONS[precision]
    build, loss_of, batches = training.CASES[case]
    with carbon_compile.enable(seed=0):
        model = training.initialise(build()).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        torch.manual_seed(3)
        for batch in batches(training.STEPS):
            batch = tuple(t.to(device) for t in batch) if isinstance(batch, tuple) else batch.to(device)
            with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"weights": carbon_compile.fingerprint(model), "optimizer": carbon_compile.fingerprint(optimizer), "loss": loss.item().hex()}


def expect_recorded(case, precision, device, monkeypatch):
    """The hashes that the compiled run had on an H100."""
    if case in ("gpt2", "llama", "vit"):
        masks = pytest.importorskip("transformers.masking_utils")
        # The library takes other branches where it is compiled; take those.
        monkeypatch.setattr(masks, "is_tracing", lambda *_: True)
    assert train(case, device, precision) == RECORDED[f"{case}/{precision}"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["mlp", "recurrent", "gpt2"])
def test_eager_training_gives_the_hashes_of_the_compiled_run(case, precision, monkeypatch):
    expect_recorded(case, precision, "cpu", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", ["mlp", "recurrent", "gpt2", "llama", "vit"])
def test_eager_training_on_cuda_gives_the_hashes_of_the_compiled_run(case, precision, monkeypatch):
    expect_recorded(case, precision, "cuda", monkeypatch)


# --- initialisation -------------------------------------------------------------------------------------


def initialised(device):
    """What layers and initialisers draw on a device, in order."""
    with carbon_compile.enable(seed=7), torch.device(device):
        layers = nn.Sequential(nn.Linear(5, 3), nn.Embedding(4, 6), nn.Conv2d(2, 3, 2), nn.LSTM(3, 4), nn.MultiheadAttention(8, 2), nn.Bilinear(2, 3, 2))
        drawn = [p.detach() for p in layers.parameters()]
        for name in ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"):
            drawn.append(getattr(nn.init, name)(torch.empty(4, 3)))
        drawn.append(nn.init.sparse_(torch.empty(6, 3), 0.5))
        drawn += [torch.empty(9, dtype=torch.bfloat16).normal_(), torch.rand(5), torch.randn(5), torch.randint(9, (5,)), torch.randperm(7)]
        return [t.cpu() for t in drawn]


def test_initialisation_draws_the_numbers_of_the_compiled_rules():
    def draw():
        w = nn.init.kaiming_uniform_(torch.empty(3, 5), a=5**0.5)
        return w, torch.empty(6).normal_(1.0, 2.0), torch.rand(3), nn.init.xavier_normal_(torch.empty(4, 2)), torch.randperm(5)

    torch.manual_seed(7)
    with eager_engine():
        expected = torch.compile(draw, backend=carbon, fullgraph=True)()
    with carbon_compile.enable(seed=7):
        for mine, theirs in zip(draw(), expected, strict=True):
            assert_bitwise(mine, theirs)


def test_a_uniform_draw_is_philox_under_the_seeds_next_64_bits():
    with carbon_compile.enable(seed=7):
        drawn = torch.empty(2, 3).uniform_()
    mt = torch.Generator().manual_seed(7)
    bits = torch.empty((), dtype=torch.int64).random_(-(2**63), None, generator=mt).item()
    word = philox.philox(TorchEngine, torch.tensor(bits & 0xFFFFFFFF), torch.tensor((bits >> 32) & 0xFFFFFFFF), torch.arange(6))
    assert_bitwise(drawn.flatten(), (word >> 8).float() * 2.0**-24)


def test_layouts_do_not_change_what_is_drawn():
    with carbon_compile.enable(seed=1):
        plain = torch.empty(4, 6).normal_()
    with carbon_compile.enable(seed=1):
        assert_bitwise(torch.empty(6, 4).t().normal_(), plain)


@pytest.mark.gpu
def test_initialisation_on_cuda_equals_that_on_cpu():
    for mine, theirs in zip(initialised("cuda"), initialised("cpu"), strict=True):
        assert_bitwise(mine, theirs)


# --- the same bits as the compiler's, for what training loops do ---------------------------------------------


def both(function, *inputs):
    """Outputs and gradients of a function, by eager code under the contract and by the compiler's rules."""
    with eager_engine():
        expected = compiled(function, inputs)
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    with carbon_compile.enable(seed=None):
        outputs = function(*leaves)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    roots = [y for y in outputs if y.requires_grad]
    generator = torch.Generator().manual_seed(0)
    incoming = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in roots]
    with carbon_compile.enable(seed=None):
        gradients = torch.autograd.grad(roots, [t for t in leaves if t.requires_grad], incoming) if roots else ()
    for mine, theirs in zip([*outputs, *gradients], [*expected[0], *expected[1]], strict=True):
        assert_bitwise(mine, theirs)


def floats(*shape, grad=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def test_functions_and_derivatives_are_those_of_the_compiler():
    def many(x, w, b):
        y = F.layer_norm(F.linear(x, w, b), (4,))
        y = F.gelu(y) + torch.logsumexp(y, -1, keepdim=True) * y.softmax(-1)
        q = torch.einsum("ij,kj->ik", y, x @ w.t())
        z = torch.addcdiv(y, y.square(), y.square() + 1, value=0.3)
        return q, z.cumsum(0), torch.cat([y, z]).std(0), F.cross_entropy(y, torch.arange(5) % 4), (y**3).mean(), y.T.contiguous()

    both(many, floats(5, 4), floats(4, 4), floats(4))


def test_pictures_are_resized_as_the_compiler_does():
    def resized(x):
        for size, mode in ((2.0, "nearest"), (1.5, "bilinear"), (0.5, "bicubic")):
            x = F.interpolate(x, scale_factor=size, mode=mode)
        return x, F.multi_margin_loss(x[0, 0, :, :3], torch.tensor([0, 1, 2, 1, 0, 1]))

    both(resized, floats(1, 2, 4, 4))


def test_in_place_code_is_what_the_compiler_makes_of_it():
    def steps(x):
        y = x * 2
        y.add_(1).mul_(0.1).clamp_(min=-1)
        y[0] = 0.5
        y[:, 1] += x[:, 0]
        y.view(-1).sub_(0.25)
        y.masked_fill_(y > 1, 1.0)
        z = torch.zeros(3, 4).index_add_(0, torch.tensor([2, 0, 2, 2, 1]), y)
        return y.exp(), z, z.bfloat16().add_(y[0])

    both(steps, floats(5, 4))


def test_nested_autocast_follows_the_one_list():
    def steps(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x, w)
            with torch.autocast("cpu", enabled=False):
                z = F.linear(x, w)
            return y, z, y.softmax(-1), (y + z).sum(), F.layer_norm(y, (4,)), F.linear(y, w).pow(2)

    both(steps, floats(5, 4), floats(4, 4))


def test_gradients_are_those_of_their_forward_whatever_autocast_surrounds_them():
    def gradient(inside):
        x = floats(5, 4)
        with carbon_compile.enable(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (F.linear(x, x).float().exp() / 100).sum()
            if inside:
                loss.backward()
        if not inside:
            with carbon_compile.enable():
                loss.backward()
        return x.grad

    assert_bitwise(gradient(True), gradient(False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_same_bits(reentrant):
    def gradients(run):
        with carbon_compile.enable(seed=5):
            model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))
            x = torch.randn(3, 4, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = run(model, x)
            y.float().square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    plain = gradients(lambda model, x: model(x))
    for mine, theirs in zip(gradients(lambda model, x: checkpoint(model, x, use_reentrant=reentrant)), plain, strict=True):
        assert_bitwise(mine, theirs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_ledger_changes_nothing_and_sees_each_loss_once(tmp_path, reentrant):
    def gradients(ledger):
        with carbon_compile.enable(seed=5), ledger:
            model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.LayerNorm(65), nn.Dropout(0.3), nn.Linear(65, 33))
            y = checkpoint(model, torch.randn(17, 33, requires_grad=True), use_reentrant=reentrant)
            y.square().mean().backward()
            torch.optim.SGD(model.parameters()).step()
        return [p.grad for p in model.parameters()]

    path = tmp_path / "run.jsonl"
    for mine, theirs in zip(gradients(carbon_compile.ledger(path)), gradients(contextlib.nullcontext()), strict=True):
        assert_bitwise(mine, theirs)
    assert isinstance(json.loads(path.read_text().splitlines()[1])["loss"], float)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_bits_stay(quiet):
    with carbon_compile.enable():
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        x = torch.randn(2, 3, 8)
        with_gradients = block(x)
        with quiet():
            assert_bitwise(block(x).clone(), with_gradients.detach())
            block.eval()
            assert_bitwise(block(x).clone(), with_gradients.detach())


KINDS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_optimizers_take_one_formula_for_every_implementation(kind, options):
    start = [floats(3, 4, grad=False), floats(5, grad=False, dtype=torch.bfloat16)]
    given = [[floats(step, *p.shape, grad=False, dtype=p.dtype)[0] for p in start] for step in (1, 2, 3)]

    def stepped(engine, **variant):
        params = [nn.Parameter(p.clone()) for p in start]
        optimizer = kind(params, **options, **variant)
        step = optimizer.step if engine is None else torch.compile(optimizer.step, backend=engine)
        for gradients in given:
            for p, g in zip(params, gradients, strict=True):
                p.grad = g.clone()
            step()
        return carbon_compile.fingerprint(optimizer), [p.detach() for p in params]

    torch._dynamo.reset()
    with eager_engine():
        state, weights = stepped(carbon)
    for variant in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        with carbon_compile.enable(seed=None):
            mine, moved = stepped(None, **variant)
        assert mine == state
        for a, b in zip(moved, weights, strict=True):
            assert_bitwise(a, b)


def test_clipping_is_the_compilers():
    given = [floats(6, 3, grad=False) * 3, floats(4, grad=False) * 3]

    def clipped(engine):
        params = [nn.Parameter(g.clone()) for g in given]
        for p, g in zip(params, given, strict=True):
            p.grad = g.clone()
        clip = torch.nn.utils.clip_grad_norm_
        norm = (clip if engine is None else torch.compile(clip, backend=engine))(params, 0.7)
        return [norm, *(p.grad for p in params)]

    torch._dynamo.reset()
    with eager_engine():
        expected = clipped(carbon)
    with carbon_compile.enable():
        for mine, theirs in zip(clipped(None), expected, strict=True):
            assert_bitwise(mine, theirs)


def test_a_gradient_scaler_skips_what_overflowed():
    with carbon_compile.enable():
        weight = nn.Parameter(torch.ones(3))
        optimizer, scaler = torch.optim.SGD([weight], 0.5), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for factor, scale, value in ((2.0, 8.0, 0.0), (float("inf"), 4.0, 0.0)):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale and weight.tolist() == [value] * 3


# --- torch.compile meanwhile -----------------------------------------------------------------------------------


def small_run(compiling):
    torch._dynamo.reset()
    with carbon_compile.enable(seed=3):
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        call = torch.compile(model, backend=carbon, fullgraph=True) if compiling else model
        step = torch.compile(optimizer.step, backend=carbon) if compiling else optimizer.step
        for _ in range(2):
            call(torch.arange(24.0).reshape(4, 6) * 0.125).square().mean().backward()
            assert modes.in_force()
            step()
            optimizer.zero_grad()
        return carbon_compile.fingerprint(model)


def test_what_carbon_compiles_runs_meanwhile_with_the_same_bits():
    with eager_engine():
        assert small_run(True) == small_run(False)


def test_a_refusal_in_compiled_code_leaves_the_contract_in_force():
    with carbon_compile.enable():
        with pytest.raises(carbon_compile.Refused, match="CB103"):
            torch.compile(torch.linalg.svdvals, backend=carbon)(torch.eye(3))
        with pytest.raises(carbon_compile.Refused, match="CB103"):
            torch.linalg.svdvals(torch.eye(3))


def test_another_backends_functions_run_as_they_are_written():
    asked = []

    def backend(gm, inputs):
        asked.append(gm)
        return gm.forward

    def function(x):
        return torch.sigmoid(x).sum()

    other = torch.compile(function, backend=backend, fullgraph=True)
    x = floats(40, grad=False)
    with carbon_compile.enable():
        assert_bitwise(other(x), function(x))
        with eager_engine():
            assert_bitwise(torch.compile(function, backend=carbon)(x), function(x))
    assert not asked
    other(x)
    assert asked


# --- the rest of a training script -----------------------------------------------------------------------------


class Noisy(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((2,), float(i)) + torch.rand(2), i


def test_data_loaders_work_with_any_number_of_workers():
    def order(workers, generator=None):
        with carbon_compile.enable(seed=9):
            loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers, generator=generator)
            return [i for _, index in loader for i in index.tolist()]

    assert order(0) == order(2) and sorted(order(0)) == list(range(12))
    seeded = [order(0, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_tensors_can_be_shown_saved_and_copied():
    with carbon_compile.enable():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        x = torch.randn(2, 3)
        for t in (x, x.double(), x.bfloat16(), x.sum(), model[0].weight, x > 0, torch.zeros(2, dtype=torch.complex64)):
            assert "tensor" in f"{t}" or t.dim() == 0
        assert f"{x[0, 0]:.2f}" and x.tolist() and x.numpy().shape == (2, 3) and float(x.sum()) == x.sum().item()
        assert x.allclose(x) and torch.equal(x, x) and bool((x == x).all())
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "whole": model, "rng": torch.get_rng_state()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        other = copy.deepcopy(model)
        other.load_state_dict(loaded["model"])
        torch.optim.AdamW(other.parameters()).load_state_dict(loaded["optimizer"])
        assert carbon_compile.fingerprint(other) == carbon_compile.fingerprint(loaded["whole"]) == carbon_compile.fingerprint(model)
        model.half().double().float().to("cpu").share_memory()


def test_out_arguments_hold_the_results():
    with carbon_compile.enable():
        a = torch.randn(3, 3)
        for function, args in (
            (torch.add, (a, a)), (torch.mm, (a, a)), (torch.matmul, (a, a)), (torch.exp, (a,)), (torch.addmm, (a, a, a)),
            (torch.clamp, (a, 0, 1)), (torch.mean, (a, 0)), (torch.cat, ([a, a],)), (torch.outer, (a[0], a[0])), (torch.std, (a, 0)),
        ):  # fmt: skip
            expected = function(*args)
            out = torch.empty_like(expected)
            assert function(*args, out=out) is out
            assert_bitwise(out, expected)
            assert_bitwise(function(*args, out=torch.empty(0)), expected)
        largest, index = torch.empty(3), torch.empty(3, dtype=torch.int64)
        torch.max(a, 1, out=(largest, index))
        assert_bitwise(largest, a.max(1).values)
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            torch.mm(a.requires_grad_(), a, out=torch.empty(3, 3))
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.zeros(3, dtype=torch.int64).add_(0.5)


def test_a_rule_that_returns_its_argument_does_not_alias_it():
    with carbon_compile.enable():
        x = torch.tensor([1.0, -2.0])
        for function in (torch.round, torch.relu, torch.abs, torch.sgn, torch.clone, torch.nan_to_num, lambda t: t.sum(0, keepdim=True), torch.sum):
            y = function(torch.ones(1))
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        z = torch.ones(())
        total = z.sum()
        total.add_(1)
        assert z.item() == 1


def test_memory_that_nothing_has_written_reads_as_nan():
    with carbon_compile.enable():
        fresh = [torch.empty(3), torch.empty_like(torch.ones(3)), torch.ones(1).new_empty(3), torch.empty_strided((3,), (2,)), torch.zeros(1).resize_(4)[1:]]
        assert all(t.isnan().all() for t in fresh)
        assert torch.empty(2, dtype=torch.int8).tolist() == [127, 127]
        assert torch.zeros(2).resize_(4)[:2].tolist() == [0, 0]


def test_tensors_on_meta_and_functional_transforms_work():
    with carbon_compile.enable():
        state = torch.get_rng_state()
        with torch.device("meta"):
            nn.TransformerEncoderLayer(8, 2)(torch.empty(2, 3, 8))
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.func.grad(lambda w: (w * w).sum())(torch.ones(3)).tolist() == [2.0] * 3
        x = torch.ones(3, requires_grad=True)
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        first.sum().backward()
        assert x.grad.tolist() == [6.0] * 3


# --- refusals ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("test_enable::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


REFUSED = {
    "CB201": lambda: torch.eye(2).double() @ torch.eye(2).double(),
    "CB103": lambda: torch.linalg.svd(torch.eye(2)),
    "CB104": lambda: torch.fft.fft(torch.ones(4)),
    "CB202": lambda: torch.ones(3).double().sum(),
    "CB203": lambda: torch.ones(3).double().exp(),
    "CB204": lambda: torch.ones(2, dtype=torch.complex64) * 2,
    "CB205": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "CB402": lambda: torch.multinomial(torch.ones(3), 1),
    "CB105": lambda: F.conv2d(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)),
    "CB107": lambda: torch.ops.aten._thnn_fused_gru_cell(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 1)),
    "CB108": lambda: torch.eye(2).to_sparse(),
    "CB610": lambda: twice(torch.ones(2)),
    "CB109": lambda: torch.ones(2).digamma_(),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_has_no_rule_is_refused_at_the_users_line(code):
    with carbon_compile.enable(), pytest.raises(carbon_compile.Refused) as error:
        REFUSED[code]()
    (found,) = error.value.report.refused
    assert found.code == code and found.file == __file__ and found.line == REFUSED[code].__code__.co_firstlineno
    assert f"{code}]" in str(error.value) and "test_enable.py" in str(error.value)


def test_a_backward_without_a_rule_is_refused_there():
    with carbon_compile.enable():
        x = torch.ones(3, requires_grad=True)
        loss = torch.lgamma(x).sum()
        with pytest.raises(carbon_compile.Refused) as error:
            loss.backward()
    (found,) = error.value.report.refused
    assert found.direction == "backward" and found.source_line == "loss.backward()"


def test_ranks_are_not_combined_without_a_rule(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with carbon_compile.enable():
            x = torch.ones(1, 2)
            dist.broadcast(x, 0)  # moves elements
            dist.all_reduce(x)  # adds exactly
            with pytest.raises(carbon_compile.Refused, match="CB501"):
                dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
            with pytest.raises(carbon_compile.Refused, match="CB502"):
                nn.parallel.DistributedDataParallel(nn.Linear(2, 2))(x)
    finally:
        dist.destroy_process_group()


def test_the_user_may_allow_what_is_refused():
    x = torch.eye(3)
    with carbon_compile.enable(options={"allow": ["CB103"]}):
        torch.linalg.svdvals(x)
        with carbon_compile.enable(seed=None), pytest.raises(carbon_compile.Refused):
            torch.linalg.svdvals(x)
        torch.linalg.svdvals(x)
    with carbon_compile.enable():
        torch.linalg.svdvals(x)  # carbon: allow[CB103] a test of the comment
    with carbon_compile.enable(options={"on_unsafe": "warn"}), pytest.warns(UserWarning, match="CB103"):
        torch.linalg.svdvals(x)
    with pytest.raises(ValueError, match="did you mean 'allow'"):
        carbon_compile.enable(options={"alow": []})
    assert not modes.in_force()


def test_the_certificate_counts_what_eager_code_ran_and_names_what_was_allowed():
    LOG.reset()
    assert not carbon_compile.certificate().held  # nothing ran at all
    with carbon_compile.enable(options={"allow": ["CB103"]}):
        torch.ones(3).exp()
        held = carbon_compile.certificate()
        torch.linalg.svdvals(torch.eye(2))
        broken = carbon_compile.certificate()
    assert held.held and "eager code ran 2 operators" in str(held)
    assert not broken.held and "CB103" in str(broken)
    LOG.reset()


def test_a_refusal_in_a_worker_process_says_why():
    class Broken(Noisy):
        def __getitem__(self, i):
            return torch.linalg.svdvals(torch.eye(2))

    with carbon_compile.enable(), pytest.raises(carbon_compile.Refused, match="CB103"):
        list(DataLoader(Broken(), num_workers=1))


# --- what is changed is restored -----------------------------------------------------------------------------------


def process_state():
    """Every setting and random state that `enable` may touch."""
    cudnn = torch.backends.cudnn
    return [
        random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist(), torch.initial_seed(),
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
        threading.Thread.start, torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(), modes.in_force(),
        eager.environment.subnormals_flushed(), torch.optim.AdamW.step, F.linear, torch.Tensor.backward,
    ]  # fmt: skip


def test_everything_is_restored_at_the_end_and_after_an_error():
    torch.backends.cudnn.benchmark = True
    try:
        before = process_state()
        with carbon_compile.enable():
            assert process_state() != before
            random.random(), np.random.rand(), torch.randn(3)
        assert process_state() == before
        with pytest.raises(ZeroDivisionError), carbon_compile.enable():
            1 / 0  # noqa: B018
        assert process_state() == before
        carbon_compile.enable()
        torch.randn(3)
        carbon_compile.disable()
        assert process_state() == before
        carbon_compile.disable()
        assert process_state() == before
    finally:
        torch.backends.cudnn.benchmark = False


def test_subnormals_count_meanwhile():
    torch.set_flush_denormal(True)
    try:
        with carbon_compile.enable():
            assert (torch.tensor(2.0**-126) / 2).item() == 2.0**-127
        assert eager.environment.subnormals_flushed()
    finally:
        torch.set_flush_denormal(False)


def test_the_seed_decides_every_generator():
    def drawn(seed):
        with carbon_compile.enable(seed):
            return random.random(), np.random.rand(), torch.randn(2).tolist()

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(2**40)
    torch.manual_seed(5)
    with carbon_compile.enable(seed=None):
        first = torch.randn(2).tolist()
    with carbon_compile.enable(seed=5):
        assert torch.randn(2).tolist() == first
    with carbon_compile.enable(seed=None):
        assert torch.randn(2).tolist() != first  # without a seed the stream goes on


def test_nested_use_seeds_anew_and_comes_back():
    with carbon_compile.enable(seed=1) as outer:
        torch.randn(3)
        state = torch.get_rng_state()
        with carbon_compile.enable(seed=2):
            torch.randn(5)
        assert torch.equal(torch.get_rng_state(), state) and modes.in_force()
        inner = carbon_compile.enable(seed=3)
        carbon_compile.disable()
        inner.disable()
        assert modes.in_force()
        carbon_compile.enable(seed=4)
        outer.disable()  # and with it the one inside
        assert not modes.in_force()
    assert not modes.in_force()


def test_an_end_that_cuts_across_another_mode_is_an_error():
    enabled = carbon_compile.enable()
    with torch.device("cpu"), pytest.raises(RuntimeError, match="leave that one first"):
        enabled.disable()
    assert modes.in_force()
    enabled.disable()
    assert not modes.in_force()


def test_threads_started_meanwhile_keep_the_contract():
    seen = []
    release = threading.Event()

    def work():
        seen.append(modes.in_force())
        release.wait()
        seen.append(modes.in_force())
        seen.append(torch.linalg.svdvals(torch.eye(2)).tolist())

    with carbon_compile.enable():
        thread = threading.Thread(target=work)
        thread.start()
        other = threading.Thread(target=lambda: seen.append(error_of(carbon_compile.disable)))
        other.start()
        other.join()
    release.set()
    thread.join()
    assert seen[0] is True and isinstance(seen[1], RuntimeError) and seen[2] is False and seen[3] == [1.0, 1.0]


def error_of(function):
    try:
        function()
    except Exception as error:
        return error


@pytest.mark.gpu
def test_on_cuda_gradients_keep_the_contract_in_autograds_own_thread():
    with carbon_compile.enable():
        x = torch.ones(3, device="cuda", requires_grad=True)
        with pytest.raises(carbon_compile.Refused):
            torch.lgamma(x).sum().backward()


def check(device):
    """Hashes to compare between devices in one run."""
    results = {f"{case}/{p}": train(case, device, p) for case in ("mlp", "recurrent") for p in PRECISIONS}
    results["initialised"] = [carbon_compile.fingerprint(t) for t in initialised(device)]
    return results


def test_an_extension_may_say_its_version_but_not_compute():
    library = torch.library.Library("carbon_extension_test", "DEF")
    library.define("version() -> int")
    library.impl("version", lambda: 7, "CompositeExplicitAutograd")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: x * 3, "CompositeExplicitAutograd")
    with carbon_compile.enable(seed=1):
        assert torch.ops.carbon_extension_test.version() == 7
        with pytest.raises(Refused, match="CB610"):
            torch.ops.carbon_extension_test.triple(torch.ones(2))
