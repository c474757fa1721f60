"""DeterministicTrainer: training steps that leave the same bits everywhere, or nothing at all.

    trainer = DeterministicTrainer(model, optimizer, seed=42, loss_fn=F.cross_entropy, data=loader)
    for batch in loader:
        loss = trainer.step(batch)
    trainer.save("run.pt")

What a step computes is compiled with backend="carbon". Around it, this file keeps the order of
microbatches, the random numbers, and the way back from a step that fails.
"""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from . import checkpoint, host
from .bits import Difference, tensor_diff
from .checkpoint import CheckpointError
from .data_order import DeterministicLoader
from .loss_scale import LossScale
from .lowering.policy import matmul_precision
from .recording import as_stock, open_ledgers, parameter_names, unobserved
from .snapshot import Buffers, RandomState, Snapshot, Undo, local, set_settings, settings

if TYPE_CHECKING:
    from .data_parallel import LogicalShards


class StepFailed(RuntimeError):
    """A step that was taken back: its loss was no finite number. Model, optimizer and random state are as before it."""


class TornStep(RuntimeError):
    """The optimizer failed after it had changed weights or its state, of which there was no copy; load a checkpoint.

    changed: what has changed, such as "layers.0.weight" and "optimizer state of layers.0.weight".
    """

    def __init__(self, message, changed=()):
        super().__init__(message)
        self.changed = tuple(changed)


@dataclass(frozen=True)
class Verification:
    """What `verify_determinism` found. True where both runs of the step gave the same bits.

    compared: how many tensors. first: the first that differs, such as "gradients layers.0.weight",
    in the order loss, gradients (last parameter first), optimizer, weights, buffers, random state.
    difference: where, with both values; None where more than bits differ.
    """

    compared: int
    first: str = ""
    difference: Difference | None = None

    def __bool__(self):
        return not self.first

    def __str__(self):
        if self:
            return f"the step gave the same bits twice ({self.compared} tensors compared)"
        detail = f": {self.difference}" if self.difference is not None else ""
        return f"the step gave other bits the second time; first in {self.first}{detail}"


class DeterministicTrainer:
    """Makes training steps that are a function of model, optimizer, seed and batches.

    Args:
        model, optimizer: already on their device.
        seed: of the trainer's own stream of random numbers (PyTorch's, Python's, NumPy's), which steps
            draw from and nobody else: what is drawn between steps changes nothing.
        loss_fn: `loss_fn(model(inputs), targets)` for batches `(inputs, targets)`; a tuple of inputs
            is spread over positional arguments, a dict over keywords. Without it, the model returns
            the loss itself or an object with `.loss`, called with the batch in the same way.
        forward: `forward(model, batch)` returns the loss, in place of both.
        accumulate: microbatches a step. The tensors of a batch are cut along their first dimension
            into that many equal slices, in order; each slice's loss is divided by their number, and
            gradients add up in that order in the gradient's dtype: ((g1 + g2) + g3) .... The bits
            belong to this number: another one gives others.
        autocast: torch.bfloat16 or torch.float16 for forward and loss under autocast. With float16,
            gradients are scaled by powers of two as torch.amp.GradScaler does, and a step whose
            gradients aren't finite is skipped: it counts, but optimizer and schedulers don't step.
            `loss_scale` tells the scale and how many were skipped.
        clip_norm: clip gradients to this total norm, as torch.nn.utils.clip_grad_norm_ by carbon's rules.
        schedulers: a learning-rate scheduler, or several; each steps once a step.
        data: a DeterministicLoader, whose position then travels in checkpoints.
        shards: logical shards of a batch (see data_parallel.py), as their number or as a LogicalShards of
            `model`: loss and gradients are exact means over shards, so the bits belong to their number and
            not to that of the ranks which share the batch. `step` takes this rank's part of the batch, and
            `data` hands out that part. Each shard has passes of its own, so `accumulate` changes nothing.
            A forward pass that changes buffers is a ValueError: they would be each rank's own.
            Models wrapped by DistributedDataParallel or FSDP2 train eagerly (backend=None); a compiled
            step takes the bare module, which needs no wrapper.
        backend, options: for torch.compile; backend=None runs eagerly, without carbon's promise
            unless `carbon_compile.enable` is in force.
        check_loss: whether a loss that isn't finite ends the step with StepFailed. The host reads
            the loss while the device is busy with the backward pass.
        rollback: whether weights and optimizer state are copied before the optimizer changes them, so
            that one that fails midway is taken back. It takes as much memory as they do. By default
            where they are at most 256 MiB.

    A step that raises leaves model, optimizer, schedulers, loss scale and random state as before it.
    Forward and backward don't change weights, so up to the optimizer a copy of the buffers is all that
    this costs; schedulers, which may raise too, are asked for the next rates before it. Only without
    `rollback`, an optimizer that fails midway leaves what it has changed: TornStep names it.
    Between steps no parameter has a gradient.
    """

    _made = 0  # in this process

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        seed: int = 42,
        loss_fn: Callable | None = None,
        forward: Callable | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        clip_norm: float | None = None,
        schedulers=(),
        data: DeterministicLoader | None = None,
        backend: str | Callable | None = "carbon",
        options: dict | None = None,
        check_loss: bool = True,
        rollback: bool | None = None,
        shards: "int | LogicalShards | None" = None,
    ):
        if loss_fn is not None and forward is not None:
            raise ValueError("give loss_fn or forward, not both")
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate={accumulate!r}: give a whole number from 1")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm!r}: give a positive number")
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"autocast={autocast!r}: give torch.bfloat16 or torch.float16")
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.loss_fn, self.forward = loss_fn, forward
        self.accumulate, self.autocast, self.clip_norm = accumulate, autocast, clip_norm
        self.schedulers = list(schedulers) if isinstance(schedulers, Iterable) else [schedulers]
        self.data, self.check_loss, self.backend = data, check_loss, backend
        self.steps = 0
        self._bare = model
        self.shards = self._sharded(shards) if shards is not None else None
        DeterministicTrainer._made += 1
        self._random = RandomState.seeded(seed)
        self._buffers = Buffers()
        self._undo = Undo(optimizer, rollback)
        self._torn, self._file = None, ""
        self.loss_scale = LossScale() if autocast is torch.float16 else None
        if backend is None:
            self._loss, self._update = self._slice_loss, self._apply
            return
        if self.schedulers:
            _rates_as_tensors(optimizer)
        # PyTorch stops once at the start of every optimizer's step, so that one can't be a full graph.
        self._loss = torch.compile(host.of_its_own(self._slice_loss), backend=backend, fullgraph=True, options=options)
        self._update = torch.compile(host.of_its_own(self._apply), backend=backend, options=options)

    def _sharded(self, shards):
        """`shards` as LogicalShards that this trainer can use. ValueError, NotImplementedError where it can't."""
        from .data_parallel import LogicalShards

        shards = shards if isinstance(shards, LogicalShards) else LogicalShards(self.model, shards)
        if shards.model is not self.model:
            raise ValueError("shards= is of another model: give LogicalShards(model, count), or the number")
        if self.backend is not None and (shards.ddp is not None or shards.fsdp):
            raise ValueError(
                "a compiled step takes the bare module, whose gradients LogicalShards reduces by itself: DeterministicTrainer(module, ..., "
                "shards=LogicalShards(module, count, group=...)); with a wrapper, train eagerly (backend=None) under carbon_compile.enable()"
            )
        if self.autocast is torch.float16 and _is_cut(self.model):
            raise NotImplementedError("autocast=torch.float16 for parameters that ranks cut: ranks would skip different steps; use torch.bfloat16")
        if shards.ddp is not None:
            self._bare = shards.ddp.module
        if self.data is not None:
            self.data.take_part(shards.rank, shards.ranks)
        return shards

    # --- a step

    def step(self, batch) -> torch.Tensor:
        """Train on one batch and return its loss, a 0-d tensor on the model's device.

        batch: with `shards`, this rank's part; the loss is that of the whole batch, on every rank.

        Raises what the model raises, ValueError for a batch that can't be cut, and StepFailed for a
        loss that isn't finite: the step is then taken back. TornStep, and from then on at every
        call until `load`, where the optimizer failed midway and there is no copy (see `rollback`).
        """
        self._require_whole()
        with unobserved(), self._or_back():
            loss, losses = self._gradients(batch)
            self._change_unless_skipped()
            random = RandomState.now()
        self.steps += 1
        self._random = random
        try:
            for one in open_ledgers():
                one.record(losses, self._bare, self.optimizer, self.steps, self._facts())
        finally:
            self._clear_gradients()
        return loss

    @contextlib.contextmanager
    def _or_back(self):
        """On the trainer's own random numbers; if anything raises, as if nothing had been called."""
        outside = RandomState.now()
        self._clear_gradients()
        self._buffers.keep(self.model)
        self._random.restore()
        try:
            yield
        except BaseException:
            self._clear_gradients()
            self._buffers.restore()
            raise
        finally:
            outside.restore()

    def _gradients(self, batch):
        """Forward and backward of every slice: (loss of the step, losses of the slices)."""
        batch = self._moved(batch)
        if self.shards is not None:
            return self._gradients_of_shards(batch)
        losses, total = [], None
        for piece in slices(batch, self.accumulate):
            loss = self._loss(piece)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise ValueError(f"the loss is {_described(loss)}; a step needs one number")
            # Started before the backward pass, so that its work isn't waited for.
            finite = _Arriving(loss) if self.check_loss else None
            loss.backward(None if self.loss_scale is None else self.loss_scale.start(loss))
            if finite is not None:
                # The device is now busy for longer than the host: time for the lines of earlier steps.
                for one in open_ledgers():
                    one.catch_up()
            if finite is not None and not math.isfinite(finite.value()):
                raise StepFailed(f"step {self.steps + 1}: the loss is {finite.value()}; the step was taken back")
            losses.append(loss.detach())
            total = losses[-1] if total is None else total + losses[-1]
        return total.reshape(()), losses

    def _gradients_of_shards(self, batch):
        """`_gradients` of all ranks; they agree on the loss, so either all take a step back or none."""
        with self.shards.step() as step:
            for piece in slices(batch, self.shards.local):
                step.shard(functools.partial(self._loss, piece), None if self.loss_scale is None else self.loss_scale.start)
                for one in open_ledgers():
                    one.catch_up()
        changed = self._buffers.changed()
        if changed:
            raise ValueError(
                f"the forward pass changed {', '.join(dict.fromkeys(changed))}: what a rank's own shards did to it would belong to the number of ranks. "
                "Call eval() on batch norms, or take norms that keep no statistics"
            )
        if self.check_loss and not math.isfinite(step.loss.item()):
            raise StepFailed(f"step {self.steps + 1}: the loss is {step.loss.item()}; the step was taken back")
        return step.loss, [step.loss]

    def _change_unless_skipped(self):
        """`_change`, where gradients that were scaled are finite. StepFailed where no smaller scale could make them so."""
        if self.loss_scale is None:
            return self._change()
        finite = self.loss_scale.unscale([p.grad for p in self.model.parameters() if p.grad is not None])
        if finite:
            self._change()
        elif self.loss_scale.exhausted:
            raise StepFailed(f"step {self.steps + 1}: a gradient isn't finite at a loss scale of {self.loss_scale.scale:g}; the step was taken back")
        self.loss_scale.update(finite)

    def _facts(self):
        """What decides the next step besides model and optimizer, for ledgers."""
        return {} if self.loss_scale is None else {f"loss_scale.{key}": value for key, value in self.loss_scale.state_dict().items()}

    def _change(self):
        """Optimizer and schedulers, both or none; TornStep where that can't be."""
        schedules = [_plain_state(s) for s in self.schedulers]
        with as_stock():
            self._undo.keep()
        try:
            set_rates = self._rates_ahead()
            # Optimizers of a class share the code of their step, which is compiled for each.
            with host.recompiles_allowed(8 + 2 * DeterministicTrainer._made):
                self._update()
            set_rates()
        except BaseException as error:
            with as_stock():
                changed = self._undo.back()
            for scheduler, state in zip(self.schedulers, schedules, strict=True):
                scheduler.load_state_dict(state)
            if changed or not self._undo.tells_all():
                self._torn = self._tear(error, changed)
                raise self._torn from error
            raise

    def _rates_ahead(self):
        """Step the schedulers, before the optimizer because they may raise; what they set takes effect by calling the result."""
        if not self.schedulers:
            return lambda: None
        groups = self.optimizer.param_groups
        present = [settings(group) for group in groups]
        with host.as_if_stepped(self.optimizer):
            for scheduler in self.schedulers:
                scheduler.step()
        ahead = [settings(group) for group in groups]
        _set_all(groups, present)
        return lambda: _set_all(groups, ahead)

    def _tear(self, error, changed):
        names = parameter_names(self._bare, self.optimizer)
        told = [names.get(id(p), "what is no parameter's") if kind == "weights" else f"optimizer state of {names.get(id(p), 'no parameter')}" for p, kind in changed]
        shown = ", ".join(told[:4]) + (f" and {len(told) - 4} more" if len(told) > 4 else "")
        what = f"{shown} changed" if changed else "nothing is seen to have changed"
        if not self._undo.tells_all():
            what += f", but {type(self.optimizer).__name__}'s step isn't PyTorch's and may have changed more"
        file = f" (the last is {self._file})" if self._file else ""
        return TornStep(
            f"step {self.steps + 1} failed in the optimizer ({type(error).__name__}: {error}) midway: {what}. "
            f"Load a checkpoint{file}; rollback=True takes such a step back",
            told,
        )

    def _require_whole(self):
        if self._torn is not None:
            raise TornStep(*self._torn.args, self._torn.changed)

    def _slice_loss(self, batch):
        with self._autocast():
            loss = self._loss_of(batch)
        return loss if self.accumulate == 1 or self.shards is not None else loss / self.accumulate

    def _autocast(self):
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(self._device().type, self.autocast)

    def _loss_of(self, batch):
        if self.forward is not None:
            return self.forward(self.model, batch)
        if self.loss_fn is not None:
            inputs, targets = batch
            return self.loss_fn(_called(self.model, inputs), targets)
        result = _called(self.model, batch)
        return result if isinstance(result, torch.Tensor) else result["loss"] if isinstance(result, dict) else result.loss

    def _apply(self):
        if self.clip_norm is not None:
            if self.shards is not None and _is_cut(self.model):
                self.shards.clip_grad_norm_(self.clip_norm)
            else:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()

    def _device(self):
        return next(self.model.parameters()).device

    def _moved(self, batch):
        device = self._device()
        return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)

    def _clear_gradients(self):
        for parameter in self.model.parameters():
            parameter.grad = None

    # --- proof

    def verify_determinism(self, batch) -> Verification:
        """Make the step of `batch` twice from here, compare everything bit for bit, and go back to here.

        Takes copies of weights, gradients and optimizer state, twice; ledgers don't see it.
        """
        self._require_whole()
        snapshot, steps, random = Snapshot(self.model, self.optimizer, self.schedulers), self.steps, self._random
        scale = self.loss_scale and self.loss_scale.state_dict()
        results = []

        def restore():
            snapshot.restore()
            self.steps, self._random, self._torn = steps, random, None
            if scale:
                self.loss_scale.load_state_dict(scale)

        try:
            for _ in range(2):
                results.append(self._traced_step(batch))
                restore()
        except TornStep as torn:  # of everything there is a copy
            raise torn.__cause__ from None
        finally:
            restore()
            self._clear_gradients()
        return _compared(*results)

    def _traced_step(self, batch):
        """name -> tensor of everything a step leaves behind, in the order in which it comes about."""
        names = parameter_names(self._bare, self.optimizer)
        with unobserved(), self._or_back():
            loss, _ = self._gradients(batch)
            gradients = [(names[id(p)], local(p.grad).clone()) for p in reversed(list(self.model.parameters())) if p.grad is not None]
            self._change_unless_skipped()
            random = RandomState.now().state_dict()
        found = {"loss": loss.clone()}
        found.update((f"gradients {name}", g) for name, g in gradients)
        for p, entry in self.optimizer.state.items():
            found.update((f"optimizer {names[id(p)]}.{key}", local(v).clone()) for key, v in entry.items() if isinstance(v, torch.Tensor))
        found.update((f"weights {name}", local(p).clone()) for name, p in self._bare.named_parameters())
        found.update((f"buffers {name}", b.clone()) for name, b in self._bare.named_buffers())
        found.update((name, torch.tensor(value)) for name, value in self._facts().items())
        found["random state of PyTorch"] = random["cpu"]
        found["random state of Python"] = random["python"][1]
        if random["numpy"]:
            found["random state of NumPy"] = torch.cat([random["numpy"][1], torch.tensor(random["numpy"][2:3])])
        return found | {f"random state of GPU {i}": s for i, s in enumerate(random["cuda"])}

    # --- checkpoints

    def settings(self) -> dict:
        """What besides model, optimizer and data decides the bits of a step."""
        return {
            "seed": self.seed,
            "accumulate": self.accumulate if self.shards is None else 1,
            "shards": None if self.shards is None else f"{self.shards.count}, {self.shards.reduction}",
            "autocast": str(self.autocast).removeprefix("torch."),
            "clip_norm": self.clip_norm,
            "optimizer": type(self.optimizer).__name__,
            "schedulers": [type(s).__name__ for s in self.schedulers],
            "float32_matmul_precision": matmul_precision(),
        }

    def _by_carbon(self):
        """Whether steps are carbon's: compiled by it, or eager under `carbon_compile.enable`."""
        modes = sys.modules.get("carbon_compile.modes")
        named = self.backend == "carbon" or getattr(self.backend, "__name__", "") == "carbon"
        return named or (modes is not None and modes.in_force())

    def save(self, path: str | os.PathLike, extra: dict | None = None) -> None:
        """Write a checkpoint from which training goes on bit for bit: see checkpoint.py.

        With `shards`, the first of the ranks that share a batch writes it, and for the others this does
        nothing: all have the same state, and any number of ranks may load it. NotImplementedError for
        parameters that ranks cut; torch.distributed.checkpoint writes those.

        extra: tensors and plain values of your own, such as the best epoch so far; `load` returns it.
        """
        self._require_whole()
        for one in open_ledgers():
            one.flush()
        if self.shards is not None and _is_cut(self.model):
            raise NotImplementedError("a checkpoint of parameters that ranks cut: use torch.distributed.checkpoint")
        if self.shards is not None and self.shards.rank:
            return
        checkpoint.save(
            path,
            {
                "step": self.steps,
                "model": _state_of(self._bare),
                "optimizer": self.optimizer.state_dict(),
                "schedulers": [_plain_state(s) for s in self.schedulers],
                "loss_scale": self.loss_scale and self.loss_scale.state_dict(),
                "random": self._random.state_dict(),
                "data": self.data.state_dict() if self.data is not None else None,
                "settings": self.settings(),
                "ran": "carbon" if self._by_carbon() else "stock",
                "extra": extra or {},
            },
        )
        self._file = os.fspath(path)

    def load(self, path: str | os.PathLike, *, strict: bool = True) -> dict:
        """Go on from a checkpoint, and return its `extra`.

        strict: False to accept another contract version, other settings or data in another order,
        with which the run is no longer the one that was saved.

        CheckpointError, before anything is changed, names all that doesn't fit.
        """
        return self.resume(checkpoint.load(path), strict=strict, path=path)

    def resume(self, content: dict, *, strict: bool = False, path: str | os.PathLike = "the checkpoint") -> dict:
        """`load`, from a checkpoint's content as checkpoint.load gives it."""
        problems = self._misfits(content) + (self._strangeness(content) if strict else [])
        if problems:
            raise CheckpointError(f"{path} doesn't fit: " + "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else ""))
        live = _state_of(self._bare)
        with torch.no_grad():
            for name, value in content["model"].items():
                if isinstance(value, torch.Tensor):
                    live[name].copy_(value)
        checkpoint.load_optimizer(self.optimizer, content["optimizer"])
        for scheduler, state in zip(self.schedulers, content["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self.data is not None and content["data"] is not None and not self.data.misfits(content["data"]):
            self.data.load_state_dict(content["data"])
        if self.loss_scale is not None and content.get("loss_scale"):
            self.loss_scale.load_state_dict(content["loss_scale"])
        self._random = RandomState.load(content["random"])
        self.steps, self._torn, self._file = content["step"], None, os.fspath(path)
        self._clear_gradients()
        return content["extra"]

    def _misfits(self, content):
        found = checkpoint.misfits(content["model"], _state_of(self._bare), "the checkpoint")
        found += checkpoint.optimizer_misfits(content["optimizer"], self.optimizer)
        if len(content["schedulers"]) != len(self.schedulers):
            found.append(f"the checkpoint has {len(content['schedulers'])} schedulers, this trainer {len(self.schedulers)}")
        return found

    def _strangeness(self, content):
        """Why the run that goes on would not be the one that was saved."""
        found, mine = [], self.settings()
        if content["contract"] != checkpoint.contract():
            found.append(f"it was made under contract {content['contract']}, this is {checkpoint.contract()}")
        found += [f"{key} was {content['settings'].get(key)!r}, here it is {mine[key]!r}" for key in mine if content["settings"].get(key) != mine[key]]
        if self.loss_scale is not None and not content.get("loss_scale"):
            found.append("it has no loss scale")
        if (self.data is None) != (content["data"] is None):
            found.append("only one of the two has a data position" if self.data is None else "it has no data position")
        elif self.data is not None:
            found += self.data.misfits(content["data"])
        return found


def slices(batch, n: int) -> list:
    """The batch cut into n equal slices along the first dimension of its tensors, in order.

    ValueError where a tensor can't be cut so, or there is none. Values that aren't tensors go to all.
    """
    if n == 1:
        return [batch]
    leaves, structure = tree_flatten(batch)
    pieces = [[] for _ in range(n)]
    for leaf in leaves:
        cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        if cut and leaf.shape[0] % n:
            raise ValueError(f"a batch of {leaf.shape[0]} can't be cut into {n} equal parts")
        for i, piece in enumerate(pieces):
            piece.append(leaf[i * leaf.shape[0] // n : (i + 1) * leaf.shape[0] // n] if cut else leaf)
    if not any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves):
        raise ValueError("there is no tensor in the batch to cut")
    return [tree_unflatten(piece, structure) for piece in pieces]


def _called(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _is_cut(model):
    """Whether ranks hold parts of a parameter (DTensors)."""
    return any(hasattr(p, "to_local") for p in model.parameters())


def _described(value):
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


class _Arriving:
    """A number on its way to the host while the device goes on."""

    def __init__(self, loss):
        loss = loss.detach()
        self._event = None
        if loss.device.type == "cuda":
            self._value = torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True)
            self._value.copy_(loss, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(loss.device))
        else:
            self._value = loss

    def value(self):
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()


def _rates_as_tensors(optimizer):
    """A scheduler's new rate would be a new constant, and a new compilation, every step."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)


def _set_all(groups, values):
    for group, kept in zip(groups, values, strict=True):
        set_settings(group, kept)


def _plain_state(scheduler):
    """A scheduler's state with tensors copied: some hold the optimizer's own rate."""
    return {k: _copied(v) for k, v in scheduler.state_dict().items()}


def _copied(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copied(v) for v in value] if isinstance(value, list) else value


def _state_of(model):
    """The state_dict under the names of the model itself, however it was compiled."""
    return {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


def _compared(one, other):
    for name in [*one, *(n for n in other if n not in one)]:
        if name not in one or name not in other:
            return Verification(len(one), name)
        try:
            difference = tensor_diff(one[name], other[name])
        except ValueError:
            return Verification(len(one), name)
        if difference is not None:
            return Verification(len(one), name, difference)
    return Verification(len(one))
