"""DeterministicTrainer: what a step computes, what a failing one leaves, and that a run resumes bit for bit."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import carbon_compile
from carbon_compile import (
    DeterministicLoader,
    DeterministicTrainer,
    assert_bitwise,
    checkpoint,
    cli,
    runlog,
)
from carbon_compile.bits import frozen
from carbon_compile.checkpoint import CheckpointError
from carbon_compile.loss_scale import LossScale
from carbon_compile.snapshot import RandomState
from carbon_compile.trainer import StepFailed, TornStep, slices

from .definition import eager_engine


class Net(nn.Module):
    """Every kind of state: weights, buffers, and draws."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.fail = None

    def forward(self, x):
        if self.fail is not None:
            self.layers(x)
            raise self.fail
        return self.layers(x)


def data(**how):
    generator = torch.Generator().manual_seed(3)
    return DeterministicLoader(TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24) % 3), **{"batch_size": 4, "seed": 5, **how})


def made(optimizer="AdamW", schedule=False, **how):
    torch.manual_seed(1)
    model = Net()
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    schedulers = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if schedule else ()
    return DeterministicTrainer(model, optimizer, **{"loss_fn": F.cross_entropy, "backend": None, "schedulers": schedulers, "data": data(), **how})


def state(trainer):
    return frozen([trainer.model, trainer.optimizer, [s.state_dict() for s in trainer.schedulers], trainer._random.state_dict(), trainer._facts(), trainer.steps])


def run(trainer, steps):
    losses = []
    while len(losses) < steps:
        for batch in trainer.data:
            losses.append(trainer.step(batch))
            if len(losses) == steps:
                break
    return losses


BATCH = (torch.linspace(-1, 1, 16).reshape(4, 4), torch.tensor([0, 1, 2, 0]))
FULL = {"schedule": True, "accumulate": 2, "clip_norm": 0.5, "autocast": torch.bfloat16}


# --- what a step computes


def test_a_step_is_the_plain_loop():
    trainer, other = made(), made()
    losses = run(trainer, 6)
    torch.manual_seed(42)
    for (x, y), loss in zip(data(), losses, strict=True):
        expected = F.cross_entropy(other.model(x), y)
        expected.backward()
        other.optimizer.step()
        other.optimizer.zero_grad()
        assert_bitwise(loss, expected.detach())
    assert_bitwise(trainer.model, other.model)
    assert_bitwise(trainer.optimizer, other.optimizer)


def test_microbatches_add_up_in_order():
    trainer, other = made(accumulate=2, clip_norm=0.1), made()
    loss = trainer.step(BATCH)
    torch.manual_seed(42)
    parts = [F.cross_entropy(other.model(BATCH[0][i : i + 2]), BATCH[1][i : i + 2]) / 2 for i in (0, 2)]
    for part in parts:
        part.backward()
    nn.utils.clip_grad_norm_(other.model.parameters(), 0.1)
    other.optimizer.step()
    assert_bitwise(trainer.model, other.model)
    assert_bitwise(loss, parts[0].detach() + parts[1].detach())


def test_ways_to_a_loss():
    x, y = BATCH
    loss = made().step((x, y))
    ways = [
        (made(loss_fn=None, forward=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])), {"x": x, "y": y}),
        (made(loss_fn=lambda out, targets: F.cross_entropy(out, targets[0])), ({"x": x}, [y])),
        (made(loss_fn=F.cross_entropy), ((x,), y)),
    ]

    class Loss(Net):
        def forward(self, x, y):
            return {"loss": F.cross_entropy(super().forward(x), y)}

    whole = made(loss_fn=None)
    whole.model.__class__ = Loss
    for trainer, batch in [*ways, (whole, (x, y)), (whole, {"x": x, "y": y})][:4]:
        assert_bitwise(trainer.step(batch), loss)


def test_slices():
    x, y = torch.arange(6), torch.arange(12).reshape(6, 2)
    assert_bitwise(slices({"x": x, "n": 3, "y": [y]}, 3)[1], {"x": x[2:4], "n": 3, "y": [y[2:4]]})
    with pytest.raises(ValueError, match="a batch of 6 can't be cut into 4 equal parts"):
        slices(x, 4)
    with pytest.raises(ValueError, match="no tensor in the batch"):
        slices([torch.tensor(1.0), "a"], 2)


def test_draws_between_steps_change_nothing():
    quiet, noisy = made(), made()
    run(quiet, 4)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for i, batch in enumerate(noisy.data):
        if i == 4:
            break
        if i == 2:
            assert_bitwise(torch.rand(3), expected)  # and steps change nothing in between
        noisy.step(batch)
    assert_bitwise(state(quiet), state(noisy))


def test_compiled_steps_are_carbons_and_keep_the_promise(tmp_path):
    runlog.LOG.reset()
    with eager_engine(), carbon_compile.ledger(tmp_path / "run.jsonl"):
        trainer = made(backend="carbon", **FULL)
        run(trainer, 3)
        assert trainer.verify_determinism(BATCH)
        trainer.save(tmp_path / "c.pt")
        run(trainer, 2)
        other = made(backend="carbon", **FULL)
        other.load(tmp_path / "c.pt")
        run(other, 2)
    assert_bitwise(state(other), state(trainer))
    certificate = carbon_compile.certificate()
    assert certificate.held, certificate.reasons
    assert made(**FULL).optimizer.param_groups[0]["lr"] == 0.01
    assert all(graph["calls"] for graph in certificate.data["graphs"])


def test_eager_steps_under_enable_are_the_compiled_ones(tmp_path):
    with eager_engine(), carbon_compile.ledger(tmp_path / "run.jsonl") as compiled:
        trainer = made(backend="carbon", **FULL)
        run(trainer, 2)
    other = made(**FULL)  # under `enable`, initialisation draws other numbers
    with carbon_compile.enable(), carbon_compile.ledger(tmp_path / "run.jsonl") as ledger:
        run(other, 2)
        assert other.verify_determinism(BATCH)
    assert (compiled.recorded, ledger.confirmed, ledger.recorded) == (2, 2, 0)
    assert_bitwise(other.model, trainer.model)


# --- resuming


@pytest.mark.parametrize("how", [{}, FULL, {"optimizer": "SGD"}])
@pytest.mark.parametrize("stop", [1, 6, 8])
def test_resuming_is_the_uninterrupted_run(tmp_path, how, stop):
    whole, first, second = made(**how), made(**how), made(**how)
    run(whole, 14)
    run(first, stop)
    first.save(tmp_path / "c.pt", extra={"best": 3})
    torch.rand(5)
    assert second.load(tmp_path / "c.pt") == {"best": 3}
    run(second, 14 - stop)
    assert_bitwise(state(second), state(whole))


def test_a_mismatched_checkpoint_is_refused_with_reasons_and_changes_nothing(tmp_path):
    trainer = made()
    run(trainer, 2)
    trainer.save(tmp_path / "c.pt")
    for how, reason in (
        ({"accumulate": 2, "clip_norm": 1.0}, "accumulate was 1, here it is 2; clip_norm was None, here it is 1.0"),
        ({"optimizer": "SGD"}, "optimizer was 'AdamW', here it is 'SGD'"),
        ({"schedule": True}, "has 0 schedulers, this trainer 1"),
        ({"data": data(seed=6)}, "the data's seed was 5, here it is 6"),
        ({"data": None}, "only one of the two has a data position"),
        ({"seed": 1}, "seed was 42, here it is 1"),
    ):
        other = made(**how)
        before = state(other)
        with pytest.raises(CheckpointError, match=reason):
            other.load(tmp_path / "c.pt")
        assert_bitwise(state(other), before)
    other = made()
    other.model.layers[3] = nn.Linear(8, 5)
    with pytest.raises(CheckpointError, match=r"layers.3.bias is float32\[3\] in the checkpoint and float32\[5\] in the model"):
        other.load(tmp_path / "c.pt")
    other = made(accumulate=2)
    other.load(tmp_path / "c.pt", strict=False)
    assert other.steps == 2


def test_another_contract_is_refused(tmp_path, monkeypatch):
    made().save(tmp_path / "c.pt")
    monkeypatch.setattr("carbon_compile.checkpoint.contract", lambda: "5")
    with pytest.raises(CheckpointError, match="it was made under contract 4 .*, this is 5"):
        made().load(tmp_path / "c.pt")


def test_narrow_weights_keep_wide_optimizer_state(tmp_path):
    def narrow():
        trainer = made(loss_fn=None, forward=lambda model, batch: model.layers[0](batch.bfloat16()).square().mean())
        trainer.model.bfloat16()
        return trainer

    trainer = narrow()
    trainer.step(BATCH[0])
    for entry in trainer.optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].float() + 1e-7
    trainer.save(tmp_path / "c.pt")
    other = narrow()
    other.load(tmp_path / "c.pt")
    assert_bitwise(other.optimizer, trainer.optimizer)


def test_diff_of_checkpoints_names_what_else_differs(tmp_path, capsys):
    trainer = made()
    run(trainer, 1)
    for name, extra in (("a", {}), ("b", {}), ("c", {"best": 3})):
        trainer.save(tmp_path / name, extra=extra)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert cli.main(["diff", a, b]) == 0
    assert capsys.readouterr().out == f"equal: after step 1, {checkpoint.tensor_count(checkpoint.load(a))} tensors\n"
    assert cli.main(["diff", a, c]) == 1 and capsys.readouterr().out == "checkpoints: extra differs\n"


# --- float16


HALF = {"autocast": torch.float16, "schedule": True, "clip_norm": 0.5, "accumulate": 2}


def overflowing(steps, **how):
    """A trainer whose float16 gradients overflow at first, after some steps."""
    trainer = made(**{**HALF, **how})
    trainer.loss_fn = lambda out, targets: F.cross_entropy(out, targets) * 8
    run(trainer, steps)
    return trainer


def test_a_scaled_step_is_the_plain_one_with_gradscaler():
    trainer, other = overflowing(0), made(**HALF)
    scaler = torch.amp.GradScaler("cpu")
    torch.manual_seed(42)
    skipped = 0
    for x, y in data():
        loss, rate = trainer.step((x, y)), other.optimizer.param_groups[0]["lr"]
        with torch.autocast("cpu", torch.float16):
            parts = [F.cross_entropy(other.model(x[i : i + 2]), y[i : i + 2]) * 8 / 2 for i in (0, 2)]
        for part in parts:
            scaler.scale(part).backward()
        scaler.unscale_(other.optimizer)
        nn.utils.clip_grad_norm_(other.model.parameters(), 0.5)
        scale = scaler.get_scale()
        scaler.step(other.optimizer), scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            other.schedulers[0].step()
            assert other.optimizer.param_groups[0]["lr"] < rate
        other.optimizer.zero_grad()
        assert_bitwise(loss, parts[0].detach() + parts[1].detach())
        assert_bitwise([trainer.model, trainer.optimizer], [other.model, other.optimizer])
        assert (trainer.loss_scale.scale, trainer.loss_scale.skipped) == (scaler.get_scale(), skipped)
    assert 0 < skipped < trainer.steps


def test_the_scale_grows_and_shrinks_within_bounds(monkeypatch):
    monkeypatch.setattr("carbon_compile.loss_scale.INTERVAL", 2)
    scale = LossScale()
    seen = []
    for finite in (True, True, True, False, True, True):
        scale.update(finite)
        seen.append(scale.scale)
    assert seen == [2.0**16, 2.0**17, 2.0**17, 2.0**16, 2.0**16, 2.0**17] and scale.skipped == 1
    for _ in range(40):
        scale.update(True)
    assert scale.scale == 2.0**24


def test_a_gradient_that_no_scale_helps_takes_the_step_back():
    trainer = overflowing(3)
    trainer.loss_scale.scale = 1.0
    trainer.loss_fn = lambda out, targets: (out.sum() * 0).sqrt()  # 0, and a gradient of 0 times infinity
    with unchanged(trainer), pytest.raises(StepFailed, match="step 4: a gradient isn't finite at a loss scale of 1; the step was taken back"):
        trainer.step(BATCH)


@pytest.mark.parametrize("stop", [1, 5])
def test_scaled_runs_resume_verify_and_are_recorded(tmp_path, stop):
    path, whole = tmp_path / "run.jsonl", overflowing(0)
    with carbon_compile.ledger(path):
        run(whole, 8)
    assert 0 < whole.loss_scale.skipped < 8
    first = overflowing(stop)
    with unchanged(first):
        assert first.verify_determinism(BATCH)
    first.save(tmp_path / "c.pt")
    second = overflowing(0)
    second.load(tmp_path / "c.pt")
    with carbon_compile.ledger(path) as ledger:
        run(second, 8 - stop)
    assert ledger.confirmed == 8 - stop
    assert_bitwise(state(second), state(whole))
    assert {"loss_scale.scale", "loss_scale.good", "loss_scale.skipped"} <= set(carbon_compile.ledger_file.read(path).tensors(1, "optimizer"))
    third = overflowing(stop)
    third.loss_scale.scale *= 2
    with pytest.raises(carbon_compile.ledger_file.LedgerError, match=f"step {stop + 1} is not what"), carbon_compile.ledger(path):
        run(third, 1)


def test_a_checkpoint_without_a_scale_is_refused(tmp_path):
    trainer = overflowing(1)
    trainer.save(tmp_path / "c.pt")
    content = checkpoint.load(tmp_path / "c.pt")
    other = overflowing(0)
    with pytest.raises(CheckpointError, match="it has no loss scale"):
        other.resume({**content, "loss_scale": None}, strict=True)
    other.resume(content, strict=True)
    assert other.loss_scale.state_dict() == trainer.loss_scale.state_dict()


def test_eager_scaled_steps_under_enable_are_the_compiled_ones(tmp_path):
    with eager_engine():
        trainer = overflowing(4, backend="carbon")
    other = overflowing(0)
    with carbon_compile.enable():
        run(other, 4)
        assert other.verify_determinism(BATCH)
    assert 0 < trainer.loss_scale.skipped < 4
    assert_bitwise(other.model, trainer.model)
    assert other.loss_scale.state_dict() == trainer.loss_scale.state_dict()


# --- steps that fail


@contextlib.contextmanager
def unchanged(trainer):
    """The step inside fails and leaves everything as it was, the process's random state too."""
    before, outside = state(trainer), RandomState.now().state_dict()
    yield
    assert_bitwise(state(trainer), before)
    assert_bitwise(RandomState.now().state_dict(), outside)
    assert all(p.grad is None for p in trainer.model.parameters())


@pytest.mark.parametrize("steps", [0, 2])
def test_a_batch_that_raises_leaves_the_state_as_it_was(steps):
    trainer, other = made(**FULL), made(**FULL)
    run(trainer, steps), run(other, steps)
    trainer.model.fail = KeyError("the model's own")
    with unchanged(trainer), pytest.raises(KeyError, match="the model's own"):
        trainer.step(BATCH)
    trainer.model.fail = None
    with unchanged(trainer), pytest.raises(ValueError, match="a batch of 3 can't be cut"):
        trainer.step((BATCH[0][:3], BATCH[1][:3]))
    with unchanged(trainer), pytest.raises(RuntimeError):
        trainer.step((BATCH[0][:, :3], BATCH[1]))
    run(trainer, 3), run(other, 3)
    assert_bitwise(state(trainer), state(other))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_taken_back(value):
    trainer = made()
    run(trainer, 2)
    with unchanged(trainer), pytest.raises(StepFailed, match="step 3: the loss is (nan|inf); the step was taken back"):
        trainer.step((BATCH[0] * value, BATCH[1]))
    with unchanged(trainer), pytest.raises(ValueError, match=r"the loss is a tensor of shape \(4, 3\)"):
        trainer.loss_fn = lambda out, targets: out
        trainer.step(BATCH)


def test_a_failing_optimizer_that_changed_nothing_is_taken_back():
    trainer = made(schedule=True)
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: trainer.optimizer.state[next(trainer.model.parameters())].update(step=torch.tensor(0.0)) or 1 / 0
    with unchanged(trainer), pytest.raises(ZeroDivisionError):
        trainer.step(BATCH)
    trainer.optimizer.step = step
    other = made(schedule=True)
    trainer.step(BATCH), other.step(BATCH)
    assert_bitwise(state(trainer), state(other))


class Halfway(torch.optim.SGD):
    """Once broken, it changes the first weight where PyTorch's counters see it, the second where they don't, and fails."""

    broken = False

    @torch.no_grad()
    def step(self, closure=None):
        if not self.broken:
            return super().step(closure)
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i == 2:
                self.param_groups[0]["more"] = 1
                raise OSError("broken")
            self.state[p].setdefault("steps", []).append(i)
            p.add_(1) if i == 0 else p.data.add_(1)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("optimizer", ["AdamW", "Halfway"])
def test_an_optimizer_that_fails_midway_is_taken_back(optimizer, steps, monkeypatch):
    monkeypatch.setattr(torch.optim, "Halfway", Halfway, raising=False)
    trainer, other = made(optimizer, schedule=True), made(optimizer, schedule=True)
    run(trainer, steps), run(other, steps)
    trainer.optimizer.broken, step = True, trainer.optimizer.step
    if optimizer == "AdamW":
        trainer.optimizer.step = functools.wraps(step)(lambda: step() or 1 / 0)
    with unchanged(trainer), pytest.raises((ZeroDivisionError, OSError)):
        trainer.step(BATCH)
    assert "more" not in trainer.optimizer.param_groups[0]
    trainer.optimizer.broken, trainer.optimizer.step = False, step
    run(trainer, 2), run(other, 2)
    assert_bitwise(state(trainer), state(other))


def test_a_compiled_step_is_taken_back():
    with eager_engine():
        trainer, other = made(backend="carbon"), made(backend="carbon")
        run(trainer, 1), run(other, 1)
        hook = trainer.optimizer.register_step_post_hook(lambda *_: 1 / 0)
        with unchanged(trainer), pytest.raises(Exception, match="division by zero"):
            trainer.step(BATCH)
        hook.remove()
        run(trainer, 1), run(other, 1)
    assert_bitwise(state(trainer), state(other))


def test_a_scheduler_that_raises_is_taken_back_without_copies(recwarn):
    trainer = made("SGD", rollback=False)
    trainer.schedulers = [torch.optim.lr_scheduler.OneCycleLR(trainer.optimizer, 0.1, total_steps=3)]
    rates = [run(trainer, 1) and trainer.optimizer.param_groups[0]["lr"] for _ in range(3)]
    plain = made("SGD")
    other = torch.optim.lr_scheduler.OneCycleLR(plain.optimizer, 0.1, total_steps=3)
    for rate in rates:
        plain.optimizer.step(), other.step()
        assert plain.optimizer.param_groups[0]["lr"] == rate
    with unchanged(trainer), pytest.raises(ValueError, match="Tried to step 4 times"):
        trainer.step(BATCH)
    assert not any("lr_scheduler.step" in str(w.message) for w in recwarn)


def test_without_copies_a_torn_step_names_what_changed(tmp_path):
    trainer = made(rollback=False)
    run(trainer, 2)
    trainer.save(tmp_path / "c.pt")
    before = state(trainer)
    weight = trainer.model.layers[0].weight
    trainer.optimizer.broken, step = True, Halfway.step.__get__(trainer.optimizer)
    trainer.optimizer.step = lambda: trainer.optimizer.state[weight]["exp_avg"].zero_() is None or step()
    told = (
        r"step 3 failed in the optimizer \(OSError: broken\) midway: layers.0.weight, optimizer state of layers.0.weight changed, "
        r"but AdamW's step isn't PyTorch's and may have changed more. Load a checkpoint \(the last is .*c.pt\); rollback=True takes such a step back"
    )
    for use in (trainer.step, trainer.step, trainer.verify_determinism, lambda _: trainer.save(tmp_path / "d.pt")):
        with pytest.raises(TornStep, match=told) as torn:
            use(BATCH)
        assert torn.value.changed == ("layers.0.weight", "optimizer state of layers.0.weight")
    del trainer.optimizer.step
    trainer.load(tmp_path / "c.pt")
    assert_bitwise(state(trainer), before)
    trainer.step(BATCH)
    trainer.optimizer.step = step
    with unchanged(trainer), pytest.raises(OSError, match="broken"):
        trainer.verify_determinism(BATCH)
    del trainer.optimizer.step
    trainer.step(BATCH)


def test_copies_are_made_where_they_are_small(monkeypatch):
    small = made()
    run(small, 2)
    weights = sum(p.numel() for p in small.model.parameters())
    assert sum(t.numel() for t in small._undo._kept) == 3 * weights + len(small._undo._kept) // 4
    monkeypatch.setattr("carbon_compile.snapshot.SMALL", 100)
    for how, copied in (({}, False), ({"rollback": True}, True), ({"rollback": False}, False)):
        trainer = made(**how)
        run(trainer, 1)
        assert (trainer._undo._kept is not None) == copied


def test_wrong_arguments_are_refused():
    for how, told in (({"accumulate": 0}, "accumulate=0"), ({"clip_norm": -1}, "clip_norm=-1"), ({"forward": len}, "loss_fn or forward"), ({"autocast": torch.float64}, "autocast=torch.float64")):
        with pytest.raises(ValueError, match=told):
            made(**how)


# --- logical shards


class Smooth(nn.Module):
    """What a shard may have: weights and draws, and no buffer that a forward pass changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def sharded(shards=4, **how):
    torch.manual_seed(1)
    model = Smooth()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return DeterministicTrainer(model, optimizer, **{"loss_fn": F.cross_entropy, "backend": None, "data": data(), "shards": shards, **how})


def test_a_step_of_shards_is_logical_shards_step():
    from carbon_compile.data_parallel import LogicalShards

    trainer, other = sharded(clip_norm=0.1), sharded(None)
    shards, batches = LogicalShards(other.model, 4), data()
    with carbon_compile.enable():
        losses = run(trainer, 3)
        torch.manual_seed(42)
        for (x, y), loss in zip(batches, losses, strict=False):
            with shards.step() as step:
                step.backward(lambda x, y: F.cross_entropy(other.model(x), y), x, y)
            nn.utils.clip_grad_norm_(other.model.parameters(), 0.1)
            other.optimizer.step()
            assert_bitwise(loss, step.loss)
        assert_bitwise([trainer.model, trainer.optimizer], [other.model, other.optimizer])


def test_shards_compiled_in_any_microbatches_resume_and_are_recorded(tmp_path):
    how = {"backend": "carbon", "autocast": torch.bfloat16, "clip_norm": 0.5}
    with eager_engine(), carbon_compile.ledger(tmp_path / "run.jsonl") as ledger:
        trainer = sharded(**how)
        run(trainer, 2)
        trainer.save(tmp_path / "c.pt")
        with unchanged(trainer):
            assert trainer.verify_determinism(BATCH)
        run(trainer, 2)
    assert ledger.recorded == 4
    other = sharded(accumulate=2, **{**how, "backend": None})
    with carbon_compile.enable(), carbon_compile.ledger(tmp_path / "run.jsonl") as ledger:
        other.load(tmp_path / "c.pt")
        run(other, 2)
    assert ledger.confirmed == 2
    assert_bitwise(state(other), state(trainer))
    with pytest.raises(CheckpointError, match="shards was '4, mean', here it is '2, mean'"):
        sharded(2, **how).load(tmp_path / "c.pt")


def test_shards_that_fail_are_taken_back():
    trainer, half = sharded(), sharded(autocast=torch.float16)
    run(trainer, 1), run(half, 3)
    assert half.steps == 3 and trainer.steps == 1
    with unchanged(trainer), pytest.raises(StepFailed, match="step 2: the loss is nan"):
        trainer.step((BATCH[0].index_fill(0, torch.tensor([2]), float("nan")), BATCH[1]))
    with unchanged(trainer), pytest.raises(ValueError, match="a batch of 3 can't be cut into 4 equal"):
        trainer.step((BATCH[0][:3], BATCH[1][:3]))
    with unchanged(trainer), pytest.raises(ValueError, match="must be a tensor of one number"):
        trainer.loss_fn = lambda out, targets: out
        trainer.step(BATCH)
    moving = made(shards=2)
    with unchanged(moving), pytest.raises(ValueError, match="the forward pass changed .*BatchNorm1d.num_batches_tracked: what a rank"):
        moving.step(BATCH)


def test_ranks_parts_make_up_the_batches():
    whole, parts = [b for b, _ in data(batch_size=6)], []
    for rank in range(3):
        loader = data(batch_size=6)
        loader.take_part(rank, 3)
        parts.append([b for b, _ in loader])
        assert (loader.epoch, loader.batch, len(loader)) == (1, 0, 4) and not loader.misfits(data(batch_size=6).state_dict())
    assert_bitwise([torch.cat(together) for together in zip(*parts, strict=True)], whole)
    short = data(batch_size=5)
    short.take_part(0, 5)
    with pytest.raises(ValueError, match="a batch of 4 can't be cut into 5 equal parts; drop_last=True"):
        list(short)
    with pytest.raises(ValueError, match="part 2 of 2"):
        short.take_part(2, 2)


def test_shards_that_do_not_fit_are_refused():
    from carbon_compile.data_parallel import LogicalShards
    from carbon_compile.replay import ReplayError, Target

    with pytest.raises(ValueError, match="shards= is of another model"):
        sharded(LogicalShards(Smooth(), 4))
    with pytest.raises(ReplayError, match="job.make.. returned a trainer with logical shards"):
        Target((sharded(), BATCH), "job:make")


# --- proof


def test_verification_restores_everything():
    for steps in (0, 3):
        trainer = made(**FULL)
        run(trainer, steps)
        with unchanged(trainer):
            verification = trainer.verify_determinism(BATCH)
        assert verification and str(verification).startswith("the step gave the same bits twice (")


def test_verification_names_what_differs_first():
    trainer, calls = made(), []

    def noisy(out, targets):
        calls.append(0)
        return F.cross_entropy(out, targets) + (0 if len(calls) % 2 else 1e-3) * out[:, 0].sum()

    trainer.loss_fn = noisy
    with unchanged(trainer):
        verification = trainer.verify_determinism(BATCH)
    assert not verification and verification.first == "loss" and verification.difference.elements == 1
    assert str(verification).startswith("the step gave other bits the second time; first in loss: 1 of 1 elements differ")

    def noisy_backward(out, targets):
        calls.append(0)
        out.register_hook(lambda g: g * (1 + len(calls) % 2))
        return F.cross_entropy(out, targets)

    trainer.loss_fn = noisy_backward
    assert trainer.verify_determinism(BATCH).first == "gradients layers.3.bias"


def test_a_ledger_records_the_trainers_steps_once(tmp_path):
    path = tmp_path / "run.jsonl"
    trainer = made(**FULL)
    with carbon_compile.ledger(path, every=2) as ledger:
        run(trainer, 4)
        trainer.verify_determinism(BATCH)
        trainer.save(tmp_path / "c.pt")
        run(trainer, 2)
    assert ledger.recorded == 3
    line = carbon_compile.ledger_file.read(path).steps[4]
    assert len(line["loss"]) == 2 and line["gradients"] != line["weights"]
    other = made(**FULL)
    other.load(tmp_path / "c.pt")
    with carbon_compile.ledger(path, every=2) as ledger:
        run(other, 4)
    assert (ledger.confirmed, ledger.recorded) == (1, 1)


def test_lines_are_written_while_the_device_is_busy(tmp_path, monkeypatch):
    """A step's line is there before the next step's optimizer, not only after it."""
    from carbon_compile import recording

    arrived = type("Event", (), {"query": lambda self: self.done, "synchronize": lambda self: None, "done": False})
    sent = recording.Ledger._sent

    def late(ledger, *given):
        arrival = sent(ledger, *given)
        arrival.event = arrived()
        return arrival

    monkeypatch.setattr(recording.Ledger, "_sent", late)
    path, trainer, seen = tmp_path / "run.jsonl", made(), []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: seen.append(carbon_compile.ledger_file.read(path).last) or step()
    with carbon_compile.ledger(path, observe=False):
        trainer.step(BATCH), trainer.step(BATCH)
        arrived.done = True
        trainer.step(BATCH)
    assert seen == [0, 0, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("how", [FULL, HALF], ids=["bfloat16", "float16"])
def test_a_step_on_cuda_is_the_step_on_the_cpu(tmp_path, how):
    results = []
    for device in ("cpu", "cuda"):
        trainer = made(backend="carbon", **how)
        if how is HALF:
            trainer.loss_fn = lambda out, targets: F.cross_entropy(out, targets) * 8  # the first steps overflow
        trainer.model.to(device)
        with carbon_compile.ledger(tmp_path / f"{device}.jsonl", model=trainer.model):
            run(trainer, 3)
            assert trainer.verify_determinism(BATCH)
        results.append(carbon_compile.ledger_file.read(tmp_path / f"{device}.jsonl"))
    assert list(carbon_compile.ledger_file.differences(*results)) == []


def test_many_trainers_of_one_architecture():
    """Each has functions of its own to compile, and a certificate that knows its model."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        trainer = DeterministicTrainer(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed, loss_fn=torch.nn.functional.cross_entropy)
        trainer.step((torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])))
        assert carbon_compile.certificate(model).held, str(carbon_compile.certificate(model))


@pytest.mark.parametrize("shards", [0, -1, 2.0, True, "x"])
def test_a_number_of_shards_is_a_whole_one(shards):
    with pytest.raises(ValueError, match="logical shards: give a whole number from 1"):
        made(shards=shards)
