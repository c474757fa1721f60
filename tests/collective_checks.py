"""What every rank does in the tests of collectives; each function returns plain Python."""

import functools
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from carbon_compile import fingerprint
from carbon_compile.backend import carbon
from carbon_compile.lowering import collective, cut, registry
from carbon_compile.lowering import prims as P
from carbon_compile.lowering.matmul import MM
from tests.definition import eager_engine

registry.load()


def world_group():
    return dist.group.WORLD.group_name


def wide(*shape, seed=0):
    """Values over 40 binades, equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())


def chunk(n, rank, world):
    size = -(-n // world)
    return slice(rank * size, min(n, (rank + 1) * size))


def same(a, b):
    return fingerprint(a.detach()) == fingerprint(b.detach())


# --- sums and extremes ----------------------------------------------------------------------------------


def sums(rank, world):
    """Names of what differs from one rank's result."""
    group, wrong = world_group(), []
    every = wide(world, 6 * world, 7)
    every[1, 0], every[0, 1, 0], every[1, 1, 1] = -0.0, math.inf, math.nan
    mine, total = every[rank], P.sum(every, [0])
    exchange = collective.Exchange("sums", group, mine.device)

    def check(name, ours, theirs):
        if not same(ours, theirs):
            wrong.append(name)

    rows = mine.reshape(1, -1)
    check("by owner", collective.by_owner(rows, exchange), total.reshape(-1))
    check("by totals", collective.by_totals(rows, exchange), total.reshape(-1))
    check("all_reduce", collective.ALL_REDUCE(mine, "sum", group, world), total)
    check("avg", collective.ALL_REDUCE(mine, "avg", group, world), P.div(total, world))
    own = chunk(6 * world, rank, world)
    check("reduce_scatter", collective.REDUCE_SCATTER(mine, "sum", group, world), total[own])
    low = every.bfloat16()
    check("bfloat16", collective.ALL_REDUCE(low[rank], "sum", group, world), P.sum(low, [0], dtype=torch.bfloat16))
    # Pieces of other sizes, each rank late by turns: one result.
    flat, pieces = mine.reshape(-1), []
    for turn, piece in enumerate(flat.split(29)):
        if turn % world == rank:
            time.sleep(0.002 * (rank + 1))
        pieces.append(collective.ALL_REDUCE(piece, "sum", group, world))
    check("buckets and delays", torch.cat(pieces), total.reshape(-1))
    extremes = torch.tensor([[-0.0, math.nan, 3.0, -math.inf], [0.0, 1.0, math.inf, -2.0]])
    for op, rule in (("max", P.amax), ("min", P.amin)):
        check(op, collective.ALL_REDUCE(extremes[rank % 2], op, group, world), rule(extremes, [0]))
    many = wide(world, 12, 5, seed=3)  # 12 contributions a rank
    check("contributions", collective.exact_sum(many[rank], exchange), P.sum(many, [0, 1]))
    check("dimensions", collective.SUM_OVER(many[rank], [0], group, world, torch.float32), P.sum(many, [0, 1]))
    return wrong


# --- products ---------------------------------------------------------------------------------------------


def _graded(function, *tensors, incoming):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(incoming)
    return y, [t.grad for t in leaves]


def products(rank, world):
    """Names of cut products, or of their gradients, that differ from the uncut product."""
    group, wrong = world_group(), []
    m, k = 4 * world, 26

    def check(name, ours, theirs):
        for kind, a, b in zip(("output", "da", "db", "dbias"), ours, theirs, strict=False):
            if not same(a, b):
                wrong.append(f"{name}: {kind}")

    def part(t, dim):
        return t.narrow(dim, *(lambda s: (s.start, s.stop - s.start))(chunk(t.shape[dim], rank, world)))

    def compare(window, dtype, n=15):
        a, b = wide(m, k).to(dtype), (wide(n, k, seed=1) * 1e-3).to(dtype).t()
        b[3] = 0.0
        bias, g = wide(n, seed=2).to(dtype), wide(m, n, seed=4).to(dtype)
        y, (da, db, dbias) = _graded(lambda a, b, c: MM(a, b, c, window, "weight", dtype), a, b, bias, incoming=g)

        def product(kind, shared):
            return lambda a, b, c: collective.MM_CUT(a, b, c, window, "weight", dtype, k, n, kind, group, world, shared)

        for shared in (False, True):
            y1, (da1, db1, dc1) = _graded(product("columns", shared), part(a, 0) if shared else a, part(b, 1), part(bias, 0), incoming=part(g, 1))
            check(f"{dtype} columns {shared}", (y1, da1, db1, dc1), (part(y, 1), part(da, 0) if shared else da, part(db, 1), part(dbias, 0)))
            y1, (da1, db1, dc1) = _graded(product("contraction", shared), part(a, 1), part(b, 0), bias, incoming=part(g, 0) if shared else g)
            check(f"{dtype} contraction {shared}", (y1, da1, db1, dc1), (part(y, 0) if shared else y, part(da, 1), part(db, 0), dbias))
    # X2 from bfloat16, X3 from float32; a zero row and values over many binades make the balance matter.
    compare(16, torch.bfloat16)
    compare(24, torch.float32)
    compare(16, torch.bfloat16, n=16385)  # the gradient's contraction has window 24, which no rank's part is long enough for
    n = 15
    a, b = wide(m, k), wide(k, n, seed=1)
    a[0, 0], b[1, 1] = math.nan, math.inf  # on one rank, known to all
    f32 = torch.float32
    if not same(collective.MM_CUT(part(a, 1), part(b, 0), None, 24, "weight", f32, k, n, "contraction", group, world, False), MM(a, b, None, 24, "weight", f32)):
        wrong.append("not finite")
    return wrong


def vocabulary(rank, world):
    """Vocabulary-parallel embedding and cross-entropy."""
    group, wrong, classes = world_group(), [], 19
    table, logits = wide(classes, 6), wide(8, classes, seed=1).clamp(-40, 40)
    table[2, 0] = -0.0
    index, target = torch.tensor([[1, 18, 2], [2, 0, 1]]), torch.tensor([0, 18, 5, -100, 9, 9, 3, 12])
    own = chunk(classes, rank, world)
    y, (dt,) = _graded(lambda t: F.embedding(index, t), table, incoming=wide(2, 3, 6, seed=2))
    y1, (dt1,) = _graded(lambda t: cut.embedding(index, t, classes, group), table[own], incoming=wide(2, 3, 6, seed=2))
    for reduction in ("mean", "sum", "none"):
        options = {"target": target, "reduction": reduction}
        g = torch.full((8,) if reduction == "none" else (), 0.7)
        z, (dl,) = _graded(functools.partial(F.cross_entropy, **options), logits, incoming=g)
        z1, (dl1,) = _graded(functools.partial(cut.cross_entropy, whole=classes, group=group, **options), logits[:, own], incoming=g)
        wrong += [f"cross_entropy {reduction}"] * (not same(z, z1)) + [f"its gradient {reduction}"] * (not same(dl[:, own], dl1))
    return wrong + ["embedding"] * (not same(y, y1)) + ["its gradient"] * (not same(dt[own], dt1))


def eager(rank, world):
    """torch.distributed's own calls in eager code under the contract."""
    import carbon_compile

    every, wrong = wide(world, 4 * world), []
    total = P.sum(every, [0])
    own = chunk(4 * world, rank, world)
    x = every[rank].clone()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    wrong += ["all_reduce"] * (not same(x, total))
    y = torch.empty(4)
    dist.reduce_scatter_tensor(y, every[rank].clone())
    wrong += ["reduce_scatter_tensor"] * (not same(y, total[own]))
    z = every[rank].clone()
    dist.reduce(z, 0)
    wrong += ["reduce"] * (not same(z, total if rank == 0 else every[rank]))
    n = torch.tensor([rank + 1])
    dist.all_reduce(n)
    wrong += ["integers"] * (n.item() != world * (world + 1) // 2)
    try:
        dist.all_reduce(every[rank].clone(), op=dist.ReduceOp.PRODUCT)
        wrong.append("a product was not refused")
    except carbon_compile.Refused as refused:
        wrong += ["code"] * ("CB501" not in str(refused))
    return wrong


def lowered(rank, world):
    """Cut layers under autocast, beside whole ones: outputs and gradients."""
    group, wrong = world_group(), []
    x, u, w, table = wide(3, 8).clamp(-9, 9), wide(4 * world, 8, seed=1).clamp(-9, 9), wide(5, 4 * world, seed=2).clamp(-9, 9), wide(19, 8, seed=3)
    own, classes, target = chunk(4 * world, rank, world), chunk(19, rank, world), torch.tensor([0, 18, 7])
    norm = torch.ones(8)

    def whole(x, u, w, table):
        y = F.linear(F.linear(F.layer_norm(x, (8,), norm), u).relu(), w)
        return y.float().sum() + F.cross_entropy(F.linear(x, table), target)

    def cut_over_ranks(x, u, w, table):
        y = cut.linear(cut.linear(F.layer_norm(x, (8,), norm), u, None, (4 * world, 8), "columns", group).relu(), w, None, (5, 4 * world), "contraction", group)
        return y.float().sum() + cut.cross_entropy(cut.linear(x, table, None, (19, 8), "columns", group), target, 19, group)

    with torch.autocast("cpu", torch.bfloat16):
        one, (dx, du, dw, dt) = _graded(whole, x, u, w, table, incoming=None)
        many, (dx1, du1, dw1, dt1) = _graded(cut_over_ranks, x, u[own], w[:, own], table[classes], incoming=None)
    pairs = {"loss": (many, one), "dx": (dx1, dx), "du": (du1, du[own]), "dw": (dw1, dw[:, own]), "dtable": (dt1, dt[classes])}
    return wrong + [name for name, (ours, theirs) in pairs.items() if not same(ours, theirs)]


def operators(rank, world):
    import carbon_compile

    with carbon_compile.enable(seed=None):  # the gradient of a bias is a sum
        return {f.__name__: f(rank, world) for f in (sums, products, vocabulary, eager, lowered)}


# --- compiled ---------------------------------------------------------------------------------------------


def compiled(rank, world):
    """Functional collectives, and a product summed over ranks, through torch.compile and Inductor."""
    import torch.distributed._functional_collectives as functional

    import carbon_compile

    group = dist.group.WORLD
    every, n, wrong = wide(world, 2 * world, 3), 2, []
    a, u, w = wide(6, 8), wide(4 * world, 8, seed=2), wide(5, 4 * world, seed=1)
    own = chunk(4 * world, rank, world)

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return functional.all_reduce(x, "sum", group)

        @staticmethod
        def backward(ctx, g):
            return g

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return functional.all_reduce(g.contiguous(), "sum", group)

    def fn(x, a, u, w):
        summed = functional.all_reduce(x, "sum", group) * 2
        y = x * 1.0
        dist.all_reduce(y, op=dist.ReduceOp.MAX)
        scattered = functional.reduce_scatter_tensor_autograd(x * 3, "sum", 0, group)
        gathered = functional.all_gather_tensor_autograd(x, 0, group)
        # A column-parallel layer and a row-parallel one, written by hand.
        return summed.detach(), y.detach(), scattered, gathered, Reduce.apply(F.linear(F.linear(Copy.apply(a), u), w))

    def whole(a, u, w):
        return F.linear(F.linear(a, u), w)

    x, a1, u1, w1 = (t.clone().requires_grad_() for t in (every[rank], a, u[own], w[:, own]))
    summed, largest, scattered, gathered, product = torch.compile(fn, backend=carbon, fullgraph=True)(x, a1, u1, w1)
    weights, incoming = wide(world * 2 * world, 3, seed=5), wide(6, 5, seed=6)
    torch.autograd.backward([scattered, gathered, product], [torch.ones(n, 3), weights, incoming])
    total = P.sum(every, [0])
    with carbon_compile.enable(seed=None):
        uncut, (da, du, dw) = _graded(whole, a, u, w, incoming=incoming)
    # Every rank weighs the gathered rows alike, so a row's gradient is the exact sum of equal ones.
    dx = P.add(P.sum(weights.reshape(world, 2 * world, 3)[rank].expand(world, -1, -1), [0]), 3.0)
    expected = {
        "all_reduce": (summed, total * 2), "max": (largest, P.amax(every, [0])),
        "reduce_scatter": (scattered, P.sum(every * 3, [0])[chunk(2 * world, rank, world)]), "all_gather": (gathered, every.reshape(-1, 3)),
        "product": (product, uncut), "da": (a1.grad, da), "du": (u1.grad, du[own]), "dw": (w1.grad, dw[:, own]), "dx": (x.grad, dx),
    }  # fmt: skip
    return wrong + [name for name, (ours, theirs) in expected.items() if not same(ours, theirs)]


# --- training ----------------------------------------------------------------------------------------------


def tensor_parallel(rank, world, steps, kinds):
    """{kind: result} of training whole, cut, cut with shared sequences, or by PyTorch's own styles, each
    eagerly or compiled."""
    from torch.distributed.device_mesh import init_device_mesh

    import carbon_compile
    from tests import parallel_training as training

    mesh, data, results = init_device_mesh("cpu", (world,)), training.batches(steps), {}
    for kind in kinds:
        with carbon_compile.enable():
            model = training.build(dropped="stock" not in kind)
            if "sequence" in kind or "tensor" in kind:
                model = training.cut(model, mesh, "sequence" in kind)
            elif "stock" in kind and "whole" not in kind:
                model = training.cut_by_pytorch(model, mesh)
            if "compiled" in kind:
                model.compile(backend=carbon, fullgraph=True)
                with eager_engine():
                    results[kind] = training.train(model, data)
            else:
                results[kind] = training.train(model, data)
    return results


def data_parallel(rank, world, steps, kinds):
    """{kind: hashes} of a small model on 8 logical shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import carbon_compile
    from carbon_compile.data_parallel import LogicalShards
    from tests import parallel_training as training
    from tests.training import image_batches

    mesh, results = init_device_mesh("cpu", (world,)), {}
    for kind in kinds:
        with carbon_compile.enable():
            model = bare = training.build_small()
            if kind == "fsdp":
                for module in (bare.layers, bare):
                    fully_shard(module, mesh=mesh)
            elif kind == "ddp":
                model = DistributedDataParallel(bare)
            elif kind == "ddp, small buckets":
                model = DistributedDataParallel(bare, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
            micro = int(kind.removeprefix("microbatches ")) if kind.startswith("micro") else 1
            shards, optimizer, losses = LogicalShards(model, 8), torch.optim.AdamW(bare.parameters(), lr=1e-2), []
            torch.manual_seed(3)
            for images, labels in image_batches(steps, 16, 4, 7):
                mine = [t.chunk(world)[rank] for t in (images.flatten(1), labels)]
                with shards.step() as step:
                    for part in zip(*(t.chunk(micro) for t in mine), strict=True):
                        step.backward(training.loss_of(model), *part, shards=8 // world // micro)
                norm = shards.clip_grad_norm_(0.5)
                optimizer.step()
                losses.append((step.loss.item().hex(), norm.item().hex(), torch.rand(1).item()))
            results[kind] = (losses, fingerprint(bare), fingerprint(optimizer))
    return results


def _trainer(model, shards, **how):
    from torch.utils.data import TensorDataset

    from carbon_compile import DeterministicLoader, DeterministicTrainer

    generator = torch.Generator().manual_seed(3)
    data = DeterministicLoader(TensorDataset(torch.randn(32, 48, generator=generator), torch.arange(32) % 7), batch_size=16, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return DeterministicTrainer(model, optimizer, shards=shards, data=data, loss_fn=F.cross_entropy, **{"clip_norm": 0.5, **how})


def trainers(rank, world, steps, kinds, path):
    """{kind: hashes} of trainers on 4 logical shards: losses, weights, optimizer, and the ledger's lines."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import carbon_compile
    from carbon_compile import ledger_file
    from tests import parallel_training as training

    results, saved, lines = {}, f"{path}.pt", []
    for kind in kinds:
        model = training.build_small()
        if kind == "fsdp":
            for module in (model.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        called = DistributedDataParallel(model) if kind == "ddp" else model
        trainer = _trainer(called, 4, backend=carbon if kind == "compiled" else None, accumulate=2 if kind == "eager" else 1)
        recorded = f"{path}.{kind}.{rank}"
        with eager_engine() if kind == "compiled" else carbon_compile.enable(), carbon_compile.ledger(recorded) as ledger:
            losses = []
            while trainer.steps < steps:
                for batch in trainer.data:
                    losses.append(trainer.step(batch).item().hex())
                    if trainer.steps == 1 and kind == "compiled":
                        trainer.save(saved)
                    if trainer.steps == steps:
                        break
            assert trainer.verify_determinism(batch)
        if kind == "compiled" and rank == 0:
            again = _trainer(training.build_small(), None, backend=None)
            again.load(saved, strict=False)
            assert again.steps == 1
        assert ledger.recorded == steps
        if kind != "fsdp" or world == 1:  # there, a rank records its parts
            lines = [{key: value for key, value in line.items() if key != "chain"} for line in ledger_file.read(recorded).steps.values()]
        results[kind] = (losses, fingerprint(model), fingerprint(trainer.optimizer), lines)
    return results


def trainers_apart(rank, world):
    """What trainers say where one rank's part of the batch is bad, and where one rank's optimizer fails."""
    from tests import parallel_training as training

    trainer = _trainer(training.build_small(), 2, backend=None)
    before, (x, y) = fingerprint(trainer.model), next(iter(trainer.data))
    told = {"loss": _raised(lambda: trainer.step((x * float("nan") if rank else x, y)))[0], "kept": fingerprint(trainer.model) == before}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: step() or 1 / 0 if rank else step()
    _raised(lambda: trainer.step((x, y)))
    told["apart"] = _raised(lambda: trainer.step((x, y)))[0]
    return told


# --- failures ----------------------------------------------------------------------------------------------


def _raised(function):
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def disagreement(rank, world):
    """Errors for shapes, types, operations and seeds that differ; then the group still works."""
    from carbon_compile.data_parallel import LogicalShards

    group, told = world_group(), []
    told.append(_raised(lambda: collective.ALL_REDUCE(torch.ones(4 + rank), "sum", group, world)))
    told.append(_raised(lambda: collective.ALL_REDUCE(torch.ones(4), "sum" if rank else "max", group, world)))
    told.append(_raised(lambda: collective.ALL_REDUCE(torch.ones(4, dtype=torch.bfloat16 if rank else torch.float32), "sum", group, world)))
    model = torch.nn.Linear(3, 2)
    shards = LogicalShards(model, world)
    torch.manual_seed(rank)

    def step():
        with shards.step() as step:
            step.backward(lambda x: model(x).sum(), torch.ones(2, 3))

    told.append(_raised(step))
    clean = all(p.grad is None for p in model.parameters())
    return told, clean, collective.ALL_REDUCE(torch.ones(2), "sum", group, world).tolist()


def dying(rank, world):
    """The last rank dies between the shards and the exchange of a step."""
    from carbon_compile.data_parallel import LogicalShards

    model = torch.nn.Linear(3, 2)
    before = fingerprint(model)
    shards = LogicalShards(model, world)

    def step():
        with shards.step() as step:
            step.backward(lambda x: model(x).sum(), torch.ones(2, 3))
            if rank == world - 1:
                os._exit(0)

    told = _raised(step)
    return told, fingerprint(model) == before and all(p.grad is None for p in model.parameters())


def partial_sums(rank, world):
    """[code or None of: a sum over the dimension that ranks cut, one over another, a largest], eager and compiled."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    import carbon_compile
    from carbon_compile.diagnostics import Refused

    x = DTensor.from_local(torch.randn(3, 4), init_device_mesh("cpu", (world,)), [Shard(0)], run_check=False)
    cases = (lambda x: x.sum(0).full_tensor(), lambda x: x.sum(1).full_tensor(), lambda x: x.amax(0).full_tensor())

    def code(run):
        try:
            run(x)
        except Refused as refused:
            return refused.report.diagnostics[0].code
        return None

    with carbon_compile.enable():
        eager = [code(case) for case in cases]
    return eager, [code(torch.compile(case, backend=carbon)) for case in cases[:1]]


def partial_products(rank, world):
    """{how a rank's part of a product is summed: whether that is refused with CB501}, eager and compiled; and
    what must go on: {case: whether it has the expected bits}."""
    import torch.distributed._functional_collectives as functional

    import carbon_compile
    from carbon_compile.diagnostics import Refused

    group, own = dist.group.WORLD, chunk(4 * world, rank, world)
    a, w, bias = wide(2 * world, 4 * world), wide(5, 4 * world, seed=1), wide(5, seed=2)
    x, y = a[:, own], w[:, own]

    def in_place(z):
        dist.all_reduce(z)
        return z

    def added(z):
        return functional.all_reduce(z, "sum", group)

    eager = {
        "in place": lambda: in_place(F.linear(x, y)),
        "functional": lambda: added(x @ y.t()),
        "cast": lambda: in_place(F.linear(x.bfloat16(), y.bfloat16()).float()),
        "batched": lambda: in_place(F.linear(x.view(2, world, -1), y)),
        "scattered": lambda: functional.reduce_scatter_tensor(F.linear(x, y), "sum", 0, group),
        "joined": lambda: in_place(torch.cat([F.linear(x, y), x.new_zeros(1, 5)])),
        "stacked": lambda: in_place(torch.stack([F.linear(x, y), F.linear(x, y)])),
        "written": lambda: in_place(torch.mm(x, y.t(), out=torch.empty(len(x), 5))),
        "overwritten in part": lambda: (z := F.linear(x, y), z[:1].zero_(), in_place(z)),
    }
    compiled = {
        "biased": lambda x: added(F.linear(x, y, bias)),
        "used twice": lambda x: (z := F.linear(x, y), added(z)),
        "cast": lambda x: added(F.linear(x.bfloat16(), y.bfloat16()).float()),
        "other rows": lambda x: functional.reduce_scatter_tensor(F.linear(x, y).view(2, world, 5), "sum", 1, group),
    }

    def refused(run):
        try:
            run()
        except Refused as error:
            return [d.code for d in error.report.diagnostics] == ["CB501"]
        return False

    with carbon_compile.enable(seed=None):
        found = {name: refused(run) for name, run in eager.items()}
        # A weight's gradient is one of the rank's tokens, and what was computed from a product is no product.
        rows = chunk(2 * world, rank, world)
        weight = w.clone().requires_grad_()
        F.linear(a[rows], weight).sum().backward()
        gradients = [torch.empty_like(w) for _ in range(world)]
        dist.all_gather(gradients, weight.grad)
        fine = {"gradient": same(in_place(weight.grad), P.sum(torch.stack(gradients), [0])), "computed": refused(lambda: in_place(F.linear(x, y).relu())) is False}
        # Nor is the gradient of a parameter that was the first operand, or what memory holds afterwards.
        first = torch.nn.Parameter(wide(3, 4 * world, seed=3))
        F.linear(first, w).sum().backward()
        fine["first operand"] = not refused(lambda: in_place(first.grad))
        fine["gradient asked for"] = not refused(lambda: in_place(torch.autograd.grad(F.linear(first, w).sum(), first)[0]))
        fine["flat gradients"] = not refused(lambda: in_place(torch.cat([p.grad.flatten() for p in (first, weight)])))
        fine["overwritten"] = not refused(lambda: in_place(F.linear(x, y).copy_(a[:, :5])))
        fine["zeroed"] = not refused(lambda: in_place(F.linear(x, y).zero_()))
    with eager_engine():
        found |= {f"compiled, {name}": refused(lambda run=run: torch.compile(run, backend=carbon)(x)) for name, run in compiled.items()}
    return found, fine


def arrangements(rank, world):
    """What is said of ranks arranged in two dimensions where that has no exact form: {case: text}."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    import carbon_compile
    from carbon_compile import parallel
    from carbon_compile.data_parallel import LogicalShards

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))

    def hsdp():
        LogicalShards(fully_shard(torch.nn.Linear(4, 4), mesh=mesh), 4)

    def hsdp_alone():
        fully_shard(model := torch.nn.Linear(4, 4), mesh=mesh)
        model(torch.ones(1, 4)).square().sum().backward()

    def ddp_of_parts():
        model = parallelize_module(torch.nn.Linear(4, 4), mesh["tp"], parallel.ColwiseParallel())
        LogicalShards(DistributedDataParallel(model, process_group=mesh["dp"].get_group(), init_sync=False), 4)  # else DDP itself fails

    def two_dimensions():
        parallelize_module(torch.nn.Linear(4, 4), mesh, parallel.RowwiseParallel())

    with carbon_compile.enable():
        return {f.__name__: _raised(f)[0] for f in (hsdp, hsdp_alone, ddp_of_parts, two_dimensions)}


def optimizers_of_parts(rank, world):
    """Names of the optimizers whose steps on a DTensor's parts differ from those on the whole."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    import carbon_compile

    mesh = init_device_mesh("cpu", (world,))
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    }
    different = []
    for name, make in kinds.items():
        with carbon_compile.enable():
            whole = torch.nn.Parameter(torch.randn(5, 3))
            part = torch.nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)]))
            optimizers = make([whole]), make([part])
            for _ in range(3):
                whole.grad = torch.randn(5, 3)
                part.grad = distribute_tensor(whole.grad.clone(), mesh, [Shard(0)])
                for optimizer in optimizers:
                    optimizer.step()
            if not torch.equal(part.full_tensor().detach(), whole.detach()):
                different.append(name)
    return different
