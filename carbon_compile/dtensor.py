"""Products of DTensors: how carbon's product is cut follows from where its operands' parts are.

So PyTorch's own `ColwiseParallel` and `RowwiseParallel` of linear layers keep the bits of one rank.
DTensor by itself would multiply what a rank holds, round, and add; here maxima and exact totals are
exchanged (contract section 8). One-dimensional meshes. Other sums over a dimension that ranks cut are
refused: DTensor adds partial results that each rank has rounded.
"""

import contextlib
import contextvars

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import host, modes
from .diagnostics import Diagnostic
from .lowering.collective import MM_CUT
from .lowering.matmul import MM


def product(op, args, kwargs):
    """carbon::mm with a DTensor among its operands; the result is a DTensor without partial sums."""
    a, b, bias, window, balance, dtype = args
    if balance == "gradient_transposed":
        return product(op, (b.t(), a.t(), None, window, "gradient", dtype), kwargs).t().contiguous()
    mesh = next(t.device_mesh for t in (a, b, bias) if isinstance(t, DTensor))
    if mesh.ndim != 1:
        raise NotImplementedError(f"a product of DTensors on a mesh of {mesh.ndim} dimensions has no exact form; slice the mesh, or use carbon_compile.parallel")
    cut = _cut(_dim(a), _dim(b))
    wanted = {"contraction": (1, 0, None), "columns": (None, 1, 0), "rows": (0, None, None), "": (None, None, None)}[cut]
    x, y, z = (_part(t, mesh, dim) for t, dim in zip((a, b, bias), wanted, strict=True))
    if cut == "" or cut == "rows" and balance == "weight":  # rows do not know of each other
        out = MM(x, y, z, window, balance, dtype)
    else:
        k, n = a.shape[1], b.shape[1]
        out = MM_CUT(x, y, z, window, balance, dtype, k, n, cut, mesh.get_group().group_name, mesh.size(), False)
    placement = {"columns": Shard(1), "rows": Shard(0)}.get(cut, Replicate())
    return DTensor.from_local(out, mesh, [placement], run_check=False, shape=torch.Size((a.shape[0], b.shape[1])), stride=(b.shape[1], 1))


def _dim(t):
    """The dimension that ranks cut, None where the tensor is whole on every rank."""
    if not isinstance(t, DTensor) or t.placements[0].is_replicate():
        return None
    if type(t.placements[0]) is not Shard:
        raise NotImplementedError(f"a product of a DTensor placed as {t.placements[0]} has no exact form")
    return t.placements[0].dim


def _cut(a, b):
    if a == 1 or b == 0:
        return "contraction"
    if b == 1:
        return "columns"
    return "rows" if a == 0 else ""


def _part(t, mesh, dim):
    """What this rank needs of an operand: the whole, or its chunk along `dim`."""
    if t is None:
        return None
    held, part = _dim(t), t.to_local() if isinstance(t, DTensor) else t
    if held == dim:
        return part
    if held is not None:
        return t.redistribute(mesh, [Replicate() if dim is None else Shard(dim)]).to_local()
    chunks = part.chunk(mesh.size(), dim)
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0)


_REPORT = contextvars.ContextVar("the report of the graph in compilation", default=None)
_PARTIAL = "DTensor adds what each rank has summed and rounded for itself, so the bits belong to the number of ranks; sum it whole, or with carbon_compile.parallel"


@contextlib.contextmanager
def reporting(report):
    """Findings about DTensors that are traced meanwhile go into `report`."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


def check_partial_sum(tensor, operation):
    """CB501 for a floating-point sum of partial results, in a compilation or under `enable`."""
    if not tensor.is_floating_point() or operation not in ("sum", "avg"):
        return
    name = f"a DTensor's {operation} over ranks"
    report = _REPORT.get()
    if report is not None:
        report.add(Diagnostic("CB501", _PARTIAL, name))
    elif modes.in_force():
        host.dispatch_mode(modes.EagerRules).session.refuse("CB501", _PARTIAL, name)


host.handle_dtensors(MM, product)
host.before_partial_sums(check_partial_sum)
