"""Data parallelism whose gradients do not depend on how many ranks share the batch.

A global batch is a fixed number of equal slices, the logical shards. The gradient of each is computed
by itself, and the gradient of the batch is the exact mean (or sum) over shards (contract section 8).
So 8 shards on one rank, on 2, 4 or 8, in any microbatches, give the same bits:

    shards = LogicalShards(model, 8)                  # a plain module, DistributedDataParallel or FSDP2
    for batch in batches:                             # this rank's part of the global batch
        with shards.step() as step:
            step.backward(loss_of, images, labels)    # once, or once a microbatch of whole shards
        shards.clip_grad_norm_(1.0)
        optimizer.step()

Random numbers: a step draws one seed a shard from PyTorch's default generator, in the order of the
shards; a shard runs with the generator so seeded, and the generator goes on behind the draws.

Costs: the gradients of a rank's shards are kept until the step ends, and each shard has its own
forward and backward pass.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import host
from .lowering import partial, registry
from .lowering import prims as P

registry.load()

from .lowering.collective import CollectiveError, Exchange, describe, exact_sum  # noqa: E402  (rule files are imported in the registry's order)

REDUCTIONS = ("mean", "sum")
_BUCKET = 1 << 23  # elements whose shards travel together


def _exchange(name, group, *tensors):
    """The exchange of a process group (None: the default one, or this process alone)."""
    if group is None and not dist.is_initialized():
        return _Alone()
    group = dist.group.WORLD if group is None else group
    return Exchange(describe(name, *tensors), group.group_name, tensors[0].device)


class _Alone:
    size, rank = 1, 0


def _finish(total, count, reduction, dtype):
    return P.div(total, count, dtype=dtype) if reduction == "mean" else P.cast(total, dtype)


def _shard_sum(contributions, exchange, count, reduction):
    """Contributions [L, n] of each rank to one gradient [n]: exact, rounded once, then the mean's division."""
    dtype = contributions.dtype
    return _finish(exact_sum(contributions, exchange, torch.float32 if reduction == "mean" else dtype), count, reduction, dtype)


def reduce_gradients(state, bucket):
    """A DistributedDataParallel communication hook: the exact mean of the ranks' gradients.

    `ddp.register_comm_hook(group, reduce_gradients)`: each rank is one logical shard of `group` (None:
    the default group). With a LogicalShards as the state, what its earlier shards left is included.
    Buckets of any size and order give the same bits.
    """
    shards = state if isinstance(state, LogicalShards) else None
    group = shards.group if shards else state
    rows = [bucket.buffer()]
    if shards is not None:
        rows = [_joined(one, bucket.parameters()) for one in shards.kept] + rows
    contributions = torch.stack([row.reshape(-1) for row in rows])
    with torch.no_grad():
        exchange = _exchange("reduce_gradients", group, contributions)
        total = _shard_sum(contributions, exchange, exchange.size * len(rows), shards.reduction if shards else "mean")
    future = torch.futures.Future()
    future.set_result(total.view_as(bucket.buffer()))
    return future


def _joined(gradients, parameters):
    return torch.cat([(torch.zeros_like(p) if gradients[p] is None else gradients[p]).reshape(-1) for p in parameters])


class ExactReduceScatter:
    """FSDP2's reduce-scatter as an exact mean: `module.set_custom_reduce_scatter(ExactReduceScatter())`.

    Used alone, each rank is one logical shard. `LogicalShards` installs one for every FSDP module, and
    collects several shards a rank. Give each module its own.
    """

    def __init__(self, shards=None):
        self.shards, self.kept = shards, []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        exchange = _exchange("reduce_scatter gradients", group, input_tensor)
        last, reduction = (True, "mean") if self.shards is None else (self.shards.last, self.shards.reduction)
        self.kept.append(exchange.swap(input_tensor).view(exchange.size, -1))
        if not last:
            return
        contributions, self.kept = torch.cat(self.kept), []
        output_tensor.copy_(_shard_sum(contributions, _Alone(), len(contributions), reduction))
        partial.note(output_tensor, partial.STAGE)


class LogicalShards:
    """Gradients of a model by logical shards of the global batch.

    model: a module; or one wrapped by DistributedDataParallel or FSDP2's `fully_shard`, which then
    reduce through this object. count: logical shards of a global batch, a multiple of the ranks.
    group: the process group whose ranks share the batch; by default the wrapper's, or all ranks, or
    this process alone. reduction: "mean" or "sum" over shards, of gradients and losses.

    Raises ValueError where the ranks do not divide the shards, and NotImplementedError for HSDP and for
    DistributedDataParallel of parameters that ranks cut.
    """

    def __init__(self, model, count, *, group=None, reduction="mean"):
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{count!r} logical shards: give a whole number from 1")
        self.model, self.count, self.reduction = model, count, reduction
        self.ddp = model if isinstance(model, torch.nn.parallel.DistributedDataParallel) else None
        self.fsdp = [m for m in model.modules() if hasattr(m, "set_custom_reduce_scatter")]
        self._check_wrapper()
        self.group = group if group is not None else self._own_group()
        self.kept, self.last, self.step_in_progress = [], False, False
        alone = self.group is None and not dist.is_initialized()
        self.ranks, self.rank = (1, 0) if alone else (dist.get_world_size(self.group), dist.get_rank(self.group))
        if count % self.ranks:
            raise ValueError(f"{count} logical shards can't be divided by {self.ranks} ranks")
        self.local = count // self.ranks
        self._check_fused()
        self._install()

    def _own_group(self):
        if self.ddp is not None:
            return self.ddp.process_group
        mesh = next((p.device_mesh for m in self.fsdp for p in m.parameters() if isinstance(p, DTensor)), None)
        return None if mesh is None else mesh.get_group(0)

    def _check_wrapper(self):
        if any(map(host.replicates_shards, self.fsdp)):
            raise NotImplementedError(
                "HSDP adds in two stages and rounds between them, so the bits would belong to how the ranks are arranged: "
                "give fully_shard a mesh of one dimension with all ranks that share the batch"
            )
        if self.ddp is not None and any(isinstance(p, DTensor) for p in self.model.parameters()):
            raise NotImplementedError(
                "DistributedDataParallel takes no parameters that ranks cut: give LogicalShards the bare module and the data-parallel group, "
                'LogicalShards(module, count, group=mesh["dp"].get_group()), or wrap it with fully_shard(module, mesh=mesh["dp"])'
            )

    def _check_fused(self):
        for name, module in self.model.named_modules():
            if getattr(module, "parts", 1) > 1 and module.weight.device_mesh.ndim > 1:
                raise ValueError(f"{name} holds {module.parts} projections cut over ranks, whose order FSDP2 loses: give its parameters to fully_shard as ignored_params")

    def _install(self):
        if self.ddp is not None:
            self.ddp.register_comm_hook(self, reduce_gradients)
        self.collectors = []
        for module in self.fsdp:
            self.collectors.append(ExactReduceScatter(self))
            module.set_custom_reduce_scatter(self.collectors[-1])
            module.set_gradient_divide_factor(1.0)  # the mean is ours

    def parameters(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def scatters(self, parameter):
        """Whether FSDP2 brings the gradient of a parameter to its owner by itself."""
        return self.ranks > 1 and bool(self.fsdp) and self.group.group_name in _mesh_groups(parameter)

    @contextlib.contextmanager
    def step(self):
        """The gradients of one global batch: yields a `Step`, and when the block ends sets every `.grad`.

        What was in `.grad` before is dropped. Where the block raises, or ranks fail to exchange, there
        are no gradients, and the error goes on.
        """
        step = Step(self)
        try:
            yield step
            step.finish()
        except BaseException:
            self._forget()
            raise
        finally:
            step.restore()

    def _forget(self):
        self.kept, self.last = [], False
        for collector in self.collectors:
            collector.kept = []
        for p in self.parameters():
            p.grad = None

    def clip_grad_norm_(self, max_norm):
        """`clip_grad_norm_` of all gradients of the model."""
        return clip_grad_norm_(self.parameters(), max_norm)


def _mesh_groups(tensor):
    """Names of the groups of a DTensor's mesh."""
    if not isinstance(tensor, DTensor):
        return ()
    return tuple(tensor.device_mesh.get_group(d).group_name for d in range(tensor.device_mesh.ndim))


class Step:
    """One global batch. loss: the exact mean (or sum) of the losses of all shards, when it has ended."""

    def __init__(self, shards):
        self.shards, self.done, self.losses, self.loss = shards, 0, [], None
        words = torch.ops.carbon.keys(shards.count, device=torch.device("cpu")).tolist()
        self.seeds = [(high << 32) | low for low, high in words]
        self.after = torch.default_generator.get_state()
        if shards.ranks > 1:  # an odd seed out would train on quietly
            _exchange(f"step of {shards.count} logical shards seeded {self.seeds[0]:016x}", shards.group, torch.empty(0, device=self._device()))
        shards._forget()

    def _device(self):
        return next((p.device for p in self.shards.parameters()), torch.device("cpu"))

    def restore(self):
        torch.default_generator.set_state(self.after)

    def backward(self, loss_of, *inputs, shards=None):
        """Run loss_of(*slices).backward() for the next `shards` shards of this rank (default: all left).

        inputs: tensors whose first dimension is the batch of those shards, cut into equal slices;
        loss_of returns a scalar. Raises ValueError where they can't be cut, or are too many.
        """
        owner = self.shards
        count = owner.local - self.done if shards is None else shards
        if not 0 < count <= owner.local - self.done:
            raise ValueError(f"{count} shards after {self.done}, but this rank has {owner.local} of the {owner.count}")
        sizes = {x.shape[0] for x in inputs}
        if len(sizes) != 1 or next(iter(sizes)) % count:
            raise ValueError(f"inputs of first dimension {sorted(sizes)} can't be cut into {count} equal shards")
        for slices in zip(*(x.chunk(count) for x in inputs), strict=True):
            self.shard(functools.partial(loss_of, *slices))

    def shard(self, loss_of, start=None):
        """Run loss_of().backward() for the next shard of this rank.

        start: what the backward pass begins with, as a function of the loss, instead of 1. ValueError
        where all of this rank's shards were run, or the loss isn't one number.
        """
        owner = self.shards
        if self.done == owner.local:
            raise ValueError(f"this rank has run all its {owner.local} of the {owner.count} logical shards")
        torch.default_generator.manual_seed(self.seeds[owner.rank * owner.local + self.done])
        self.done += 1
        owner.last = self.done == owner.local
        waiting = owner.ddp.no_sync() if owner.ddp is not None and not owner.last else contextlib.nullcontext()
        with waiting:
            loss = loss_of()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise ValueError("the loss of a shard must be a tensor of one number")
            loss.backward(None if start is None else start(loss))
        self.losses.append(loss.detach())
        if not owner.last:
            owner.kept.append({p: p.grad for p in owner.parameters()})
            for p in owner.parameters():
                p.grad = None

    def finish(self):
        owner = self.shards
        if self.done != owner.local:
            raise ValueError(f"{self.done} shards were run, but this rank has {owner.local} of the {owner.count}")
        with torch.no_grad():
            if owner.ddp is None:
                self._reduce()
            losses = torch.stack(self.losses).float().reshape(-1, 1)
            self.loss = _shard_sum(losses, _exchange("loss", owner.group, losses), owner.count, owner.reduction).reshape(())
        owner.kept, owner.last = [], False

    def _reduce(self):
        """Sum what the wrapper left to us: all, or what FSDP2 ignores, or what it has on one rank."""
        owner = self.shards
        parameters = [p for p in owner.parameters() if p.grad is not None and not owner.scatters(p)]
        for bucket in _buckets(parameters):
            rows = [_local_row([one[p] for p in bucket], bucket) for one in owner.kept]
            rows.append(_local_row([p.grad for p in bucket], bucket))
            contributions = torch.stack(rows)
            total = _shard_sum(contributions, _exchange("reduce_gradients", owner.group, contributions), owner.count, owner.reduction)
            self._hold(bucket, total)
        for p, value in self.held:
            local(p.grad).copy_(value)

    held = ()

    def _hold(self, bucket, total):
        """Nothing is written before everything has been exchanged."""
        sizes = [local(p.grad).numel() for p in bucket]
        self.held = [*self.held, *((p, v.view(local(p.grad).shape)) for p, v in zip(bucket, total.split(sizes), strict=True))]


def local(tensor):
    """The part that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_row(gradients, parameters):
    return torch.cat([(torch.zeros_like(local(p)) if g is None else local(g)).reshape(-1) for p, g in zip(parameters, gradients, strict=True)])


def _buckets(parameters):
    """Lists of parameters of one type and device, in order, of about `_BUCKET` elements."""
    bucket, size = [], 0
    for p in parameters:
        if bucket and (size >= _BUCKET or (p.grad.dtype, p.grad.device) != (bucket[0].grad.dtype, bucket[0].grad.device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += local(p.grad).numel()
    if bucket:
        yield bucket


# --- the norm of all gradients ----------------------------------------------------------------------------


def _groups(gradient):
    """Names of the groups over which a gradient is cut; a replica is not counted twice."""
    if not isinstance(gradient, DTensor):
        return ()
    if any(p.is_partial() for p in gradient.placements):
        raise CollectiveError("a gradient of partial sums has no norm: it was rounded before it was added")
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(d).group_name for d, p in enumerate(gradient.placements) if not p.is_replicate() and mesh.size(d) > 1)


def gradient_norms(gradients):
    """The 2-norm of each gradient, wherever its parts are: sqrt(sum g g), rounded as `vector_norm` is."""
    norms = {}
    for groups in sorted({_groups(g) for g in gradients}):
        members = [i for i, g in enumerate(gradients) if _groups(g) == groups]
        norms |= zip(members, _norms([local(gradients[i]) for i in members], groups), strict=True)
    return [norms[i] for i in range(len(gradients))]


def _norms(parts, groups):
    squares = [P.square(g.reshape(-1)) if g.numel() else g.new_zeros(1, dtype=torch.float32) for g in parts]
    exchanges = [Exchange(f"norms of {len(parts)} gradients", group, parts[0].device) for group in groups]
    m = torch.stack([torch.ops.carbon.magnitude(s, dtype=torch.int32).amax() for s in squares])
    for exchange in exchanges:
        m = exchange.max(m)
    words = []
    for s, largest in zip(squares, m, strict=True):
        q = torch.ops.carbon.sum_terms(s, largest, dtype=torch.int64)
        words.append(torch.stack([torch.ops.carbon.high_word(q, dtype=torch.int64).sum(), torch.ops.carbon.low_word(q, dtype=torch.int64).sum()]))
    words = torch.stack(words, 1)
    for exchange in exchanges:
        words = exchange.sum(words)
    total = torch.ops.carbon.sum_total2(words[0], words[1], m, dtype=torch.float32)
    return [P.sqrt(t, dtype=g.dtype) for t, g in zip(total, parts, strict=True)]


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm):
    """torch.nn.utils.clip_grad_norm_ (2-norm) over gradients that ranks share as DTensors, plain ones
    being whole on every rank. Returns the norm; the bits are those of one rank under carbon."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norms = torch.stack([n.to(gradients[0].device) for n in gradient_norms(gradients)])
    total = P.sqrt(P.sum(P.square(norms)), dtype=norms.dtype)
    coefficient = P.div(float(max_norm), P.add(total, 1e-6, dtype=norms.dtype), dtype=norms.dtype)
    coefficient = P.clamp_max(coefficient, 1.0, dtype=norms.dtype)
    for g in map(local, gradients):
        g.copy_(P.mul(g, coefficient.to(g.device), dtype=g.dtype))
    return total
