"""Collectives (contract section 8): sums over ranks are exact, everything else only moves or compares.

A sum over ranks is section 3's: largest magnitude, integer terms, integer total, one rounding. Two
engines give its bits: `by_owner` brings all contributions of an element to one rank, which sums
them and sends the result around (the bytes of a plain all-reduce); `by_totals` exchanges magnitudes
(max of int32) and totals (sum of int64), which is less where a rank has many contributions of its
own. Maxima travel as integer order keys, because libraries disagree on NaN and on signed zeros.

Before data moves, ranks compare what they are about to do. So a rank that disagrees on a shape, a
type or an operation is an error on every rank, where the libraries would hang or mix up memory.
"""

import contextlib
import zlib

import torch
import torch.distributed.fsdp  # noqa: F401  (registers FSDP2's operators)

from ..templates import cut as templates
from ..templates.matmul import exact_mm
from . import partial, policy
from . import prims as P
from .composites import NARROW
from .matmul import define_product
from .pointwise import LIBRARY
from .registry import Refusal, keep, kernels, refuse, rule

c10d = torch.ops._c10d_functional


class CollectiveError(RuntimeError):
    """Ranks disagree on a collective, or one of them is gone. Nothing was written."""


# --- what ranks exchange ------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched(call, group, size):
    """Errors of the library (a dead peer, a timeout) become one that says what was going on."""
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"{call} over group {group!r} of {size} ranks did not finish: a rank died, left early, or took longer than "
            f"the group's timeout. Nothing was written. The library says: {error}"
        ) from error


_TEXT = 128  # bytes that describe a call
_agreed = set()


def process_group(name):
    """The group of that name; functional collectives know groups by name (checked on 2.11 and 2.13)."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def agree(call, group, size, device):
    """Raise CollectiveError on every rank unless all are about to do `call` (a line of text).

    On a CPU always; on a GPU, where reading the answer waits for the stream, once for each call.
    """
    if size == 1 or device.type != "cpu" and (call, group) in _agreed:
        return
    data = call.encode()
    # The checksum tells long texts apart that begin alike.
    data = zlib.crc32(data).to_bytes(4, "little") + data[: _TEXT - 4].ljust(_TEXT - 4)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    with _watched(call, group, size):
        everyone = c10d.wait_tensor(c10d.all_gather_into_tensor(mine, size, group)).cpu().view(size, _TEXT)
    if bool((everyone == everyone[0]).all()):
        _agreed.add((call, group))
        return
    said = {}
    for rank, row in enumerate(everyone):
        said.setdefault(bytes(row.tolist())[4:].decode(errors="replace").strip(), []).append(str(rank))
    told = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items())
    raise CollectiveError(f"ranks of group {group!r} disagree, so nothing was exchanged. {told}")


def describe(name, *tensors):
    """A call as ranks compare it: "all_reduce sum of float32 [4, 8]"."""
    return f"{name} of " + ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors)


def _wait(call, group, size, function, *args):
    with _watched(call, group, size):
        return c10d.wait_tensor(function(*args, group))


class Exchange:
    """The collectives of one call over one group, on contiguous tensors and exact everywhere."""

    def __init__(self, call, group, device):
        self.call, self.group = call, group
        members = process_group(group)
        self.size, self.rank = members.size(), members.rank()
        agree(call, group, self.size, device)

    def _run(self, function, *args):
        return _wait(self.call, self.group, self.size, function, *args)

    def max(self, x):
        """Elementwise maximum of integers."""
        return x if self.size == 1 else self._run(c10d.all_reduce, x.contiguous(), "max")

    def sum(self, x):
        """Elementwise sum of integers."""
        return x if self.size == 1 else self._run(c10d.all_reduce, x.contiguous(), "sum")

    def gather(self, x):
        """The tensors of all ranks, one behind the other."""
        return x if self.size == 1 else self._run(c10d.all_gather_into_tensor, x.contiguous(), self.size)

    def swap(self, x):
        """x [size n, ...]: slice s goes to rank s; the slices that arrive, in the order of ranks."""
        if self.size == 1:
            return x
        share = [x.shape[0] // self.size] * self.size
        return self._run(c10d.all_to_all_single, x.contiguous(), share, share)

    def swap_words(self, x):
        """`swap` of int16, which NCCL has no name for, as bytes."""
        return self.swap(x.view(torch.uint8)).view(torch.int16)


# --- sums and extremes of contributions ---------------------------------------------------------------


def _padded(x, multiple):
    """x [L, n] with zeros up to a multiple of `multiple` columns."""
    rest = -x.shape[1] % multiple
    return torch.nn.functional.pad(x, (0, rest)) if rest else x


_FLOATS = (torch.float32, *NARROW)


def _sum_rows(x, dtype):
    """Exact sum of x [L, n] over L: what `P.sum` computes, on a GPU by one kernel."""
    if x.is_cuda and x.dtype in _FLOATS and dtype in _FLOATS:
        from ..templates import sum_kernels

        if 0 < x.shape[0] < sum_kernels.LIMIT:
            with torch.cuda.device_of(x):  # Triton launches on the current device
                return sum_kernels.sum_rows(x, dtype)
    return P.sum(x, [0], dtype=dtype)


def own_sum(x, exchange, dtype=torch.float32):
    """Contributions x [L, size n] of each rank to the slices of all: this rank's [n], summed exactly
    over contributions and ranks."""
    n = x.shape[1] // exchange.size
    mine = exchange.swap(x.reshape(x.shape[0], exchange.size, n).transpose(0, 1).contiguous())
    return _sum_rows(mine.reshape(-1, n), dtype)


def by_owner(x, exchange, dtype=torch.float32):
    """Exact sum of x [L, n] over L and ranks, [n]: every element is summed by one rank."""
    own = own_sum(_padded(x, exchange.size), exchange, dtype)
    return exchange.gather(own)[: x.shape[1]]


def by_totals(x, exchange, dtype=torch.float32, dims=(0,)):
    """Exact sum of x over `dims` and ranks: largest magnitudes first, then totals."""
    dims = list(dims)
    m = exchange.max(torch.ops.aten.amax.default(torch.ops.carbon.magnitude(x, dtype=torch.int32), dims, True))
    q = torch.ops.carbon.sum_terms(x, m, dtype=torch.int64)
    if _words(x, dims, exchange.size) == 1:
        words = (q,)
    else:
        words = (torch.ops.carbon.high_word(q, dtype=torch.int64), torch.ops.carbon.low_word(q, dtype=torch.int64))
    words = [exchange.sum(w.sum(dims, True)) for w in words]
    finish = torch.ops.carbon.sum_total if len(words) == 1 else torch.ops.carbon.sum_total2
    return finish(*words, m, dtype=dtype).squeeze(dims)


def exact_sum(x, exchange, dtype=torch.float32):
    """Exact sum of x [L, n] over L and ranks by the engine that moves fewer bytes."""
    if exchange.size == 1:
        return _sum_rows(x, dtype)
    owner = x.shape[0] * x.element_size() + dtype.itemsize
    return (by_owner if owner < 2 * (4 + 8) else by_totals)(x, exchange, dtype)


def _check_sum(x):
    if x.dtype is torch.float64:
        raise Refusal("CB202", "sums of float64 over ranks have no rule; convert to float32 first")


def _mean(total, op, size, dtype):
    return P.div(total, size, dtype=dtype) if op == "avg" else total


def _all_reduce(x, op, group, size):
    exchange = Exchange(describe(f"all_reduce {op}", x), group, x.device)
    if op in ("max", "min"):
        return _extreme(x, op, exchange)
    total = exact_sum(x.reshape(1, -1), exchange, torch.float32 if op == "avg" else x.dtype)
    return _mean(total, op, size, x.dtype).reshape(x.shape)


def _extreme(x, op, exchange):
    """NaN wins, a zero is +0."""
    key = torch.ops.carbon.order_key(P.neg(x, dtype=x.dtype) if op == "min" else x, dtype=P.key_type(x.dtype))
    value = P.value_of_key(exchange.max(key), x.dtype)
    return P.sub(0.0, value, dtype=x.dtype) if op == "min" else value


def _reduce_scatter(x, op, group, size):
    exchange = Exchange(describe(f"reduce_scatter {op}", x), group, x.device)
    shape = (x.shape[0] // size, *x.shape[1:])
    if op in ("max", "min"):
        rank_first = exchange.swap(x).reshape(size, *shape)
        return P.amax(rank_first, [0]) if op == "max" else P.amin(rank_first, [0])
    total = own_sum(x.reshape(1, -1), exchange, torch.float32 if op == "avg" else x.dtype)
    return _mean(total, op, size, x.dtype).reshape(shape)


def _scattered(x, op, group, size):
    torch._check(x.shape[0] % size == 0, lambda: f"reduce_scatter cuts {x.shape[0]} rows over {size} ranks")
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


def _sum_over(x, dims, group, size, dtype):
    # The sizes that are summed may differ from rank to rank; what is exchanged may not.
    kept = [n for d, n in enumerate(x.shape) if d not in P.normal_dims(x, dims)]
    exchange = Exchange(f"sum of {str(x.dtype).removeprefix('torch.')} to {kept} in {_words(x, dims, size)} words", group, x.device)
    return by_totals(x, exchange, dtype, dims)


def _words(x, dims, size):
    """How many int64 words hold the total of all ranks."""
    return 1 if P.count(x, dims) * size < P.SINGLE_WORD else 2


def _sum_over_fake(x, dims, group, size, dtype):
    dims = P.normal_dims(x, dims)
    return x.new_empty([n for d, n in enumerate(x.shape) if d not in dims], dtype=dtype)


def _unit_sum_over(p, dim, group, size):
    exchange = Exchange(f"softmax denominator of {list(p.shape[:dim])}", group, p.device)
    total = torch.ops.carbon.unit_terms(p, dtype=torch.int64).sum(dim, True)
    return torch.ops.carbon.unit_total(exchange.sum(total), dtype=torch.float32)


def _pick(x, owned, group, size):
    """Each element from the one rank that owns it, bit for bit: sums of bit patterns and zeros."""
    exchange = Exchange(describe("pick", x), group, x.device)
    bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    kept = torch.where(owned, bits, 0).to(torch.int64 if x.element_size() == 8 else torch.int32)
    return exchange.sum(kept).to(bits.dtype).view(x.dtype)


def _gather_rows(x, group, size):
    gathered = Exchange(describe("gather rows", x), group, x.device).gather(x)
    return x.clone() if gathered is x else gathered


_operator = kernels("8")


ALL_REDUCE = _operator("all_reduce(Tensor x, str op, str group, int size) -> Tensor", _all_reduce, lambda x, op, group, size: x.new_empty(x.shape))
REDUCE_SCATTER = _operator("reduce_scatter(Tensor x, str op, str group, int size) -> Tensor", _reduce_scatter, _scattered)
SUM_OVER = _operator("sum_over(Tensor x, int[] dims, str group, int size, ScalarType dtype) -> Tensor", _sum_over, _sum_over_fake)
UNIT_SUM_OVER = _operator(
    "unit_sum_over(Tensor p, int dim, str group, int size) -> Tensor", _unit_sum_over, lambda p, dim, group, size: p.new_empty([1 if d == dim else n for d, n in enumerate(p.shape)])
)
PICK = _operator("pick(Tensor x, Tensor owned, str group, int size) -> Tensor", _pick, lambda x, owned, group, size: x.new_empty(x.shape))
GATHER_ROWS = _operator("gather_rows(Tensor x, str group, int size) -> Tensor", _gather_rows, lambda x, group, size: x.new_empty((x.shape[0] * size, *x.shape[1:])))


# --- products whose operands are cut --------------------------------------------------------------------

def _mm_cut(a, b, bias, window, balance, dtype, k, n, cut, group, size, shared):
    """A product of which `group` cuts one dimension; see `templates/cut.py`.

    cut: "rows" (M), "columns" (N) or "contraction" (K). k, n: the whole K and N; k = 0 is unknown.
    shared: rows of activations are cut over the group as well: with "columns" a holds this rank's
    share and is gathered, with "contraction" each rank is left its share of the result's rows.
    """
    k = k or (0 if cut == "contraction" else a.shape[1])
    # Without k, parts of a contraction are taken for equal; ranks that differ where this matters are told so.
    window = policy.window_for(window, balance, k or a.shape[1] * size)
    whole = {"rows": f"[*, {k}] x [{k}, {b.shape[1]}]", "columns": f"[{a.shape[0]}, {k}] x [{k}, *]", "contraction": f"[{a.shape[0]}, {k or '*'}] x [{k or '*'}, {b.shape[1]}]"}
    exchange = Exchange(f"product {whole[cut]} cut by {cut}, {balance} balance, window {window}, shared {shared}", group, a.device)
    if cut == "rows":
        return templates.multiply(a, b, bias, window, balance, dtype, k, templates.Exchanges(rows=exchange.max))
    if cut == "columns":
        a = exchange.gather(a) if shared else a
        return templates.multiply(a, b, bias, window, balance, dtype, k, templates.Exchanges(columns=exchange.max))
    return _contract(a, b, bias, window, balance, dtype, k, exchange, shared)


def _contract(a, b, bias, window, balance, dtype, k, exchange, shared):
    """The contraction is cut: each rank rounds its share of the rows, which are then gathered."""
    m = a.shape[0]
    if exchange.size == 1:  # where K = 1 has its own rule
        return exact_mm(a, b, window=window, balance=balance, bias=bias, out_dtype=dtype)
    if shared and m % exchange.size:
        raise ValueError(f"{m} rows can't be shared evenly by {exchange.size} ranks")
    exchanges = templates.Exchanges(contraction=exchange.max, swap=exchange.swap_words, size=exchange.size, rank=exchange.rank)
    out = templates.multiply(a, b, bias, window, balance, dtype, k or templates.UNKNOWN, exchanges)
    return out if shared else exchange.gather(out)[:m]


def _mm_cut_fake(a, b, bias, window, balance, dtype, k, n, cut, group, size, shared):
    torch._check(a.dim() == 2 and b.dim() == 2, lambda: f"a cut product takes 2-D operands, got {a.dim()}-D and {b.dim()}-D")
    torch._check(a.shape[1] == b.shape[0], lambda: f"cannot contract {tuple(a.shape)} with {tuple(b.shape)}")
    m = a.shape[0]
    if shared:
        m = m * size if cut == "columns" else m // size
    return a.new_empty((m, b.shape[1]), dtype=dtype)


MM_CUT = define_product(
    "mm_cut", "8",
    "(Tensor a, Tensor b, Tensor? bias, int window, str balance, ScalarType dtype, SymInt k, SymInt n, str cut, str group, int size, bool shared) -> Tensor",
    _mm_cut, _mm_cut_fake,
)  # fmt: skip


def _mm_cut_setup(ctx, inputs, output):
    a, b, bias, ctx.window, _, _, ctx.k, ctx.n, ctx.cut, ctx.group, ctx.size, ctx.shared = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(a, b)


def _mm_cut_backward(ctx, grad):
    """dA = dC B^T is cut by contraction where the product was cut by columns, and the other way round;
    dB = A^T dC is cut by rows or by columns. Every rank has all tokens there: shares are gathered."""
    a, b = ctx.saved_tensors
    by_columns, group, size = ctx.cut == "columns", ctx.group, ctx.size
    da = db = dbias = None
    if ctx.shared and not by_columns:
        grad = GATHER_ROWS(grad, group, size)
    if ctx.needs_input_grad[0]:
        da = MM_CUT(grad, b.t(), None, ctx.window, "weight", a.dtype, ctx.n, ctx.k, "contraction" if by_columns else "columns", group, size, ctx.shared and by_columns)
    if ctx.needs_input_grad[1]:
        a = GATHER_ROWS(a, group, size) if ctx.shared and by_columns else a
        db = MM_CUT(a.t(), grad, None, ctx.window, "gradient", b.dtype, a.shape[0], ctx.n, "columns" if by_columns else "rows", group, size, False)
        db = db.t().contiguous().t() if b.stride(0) == 1 else db
    if ctx.needs_input_grad[2]:
        dbias = torch.sum(grad, [0], dtype=ctx.bias_dtype)
    return da, db, dbias, *[None] * 9


torch.library.register_autograd("carbon::mm_cut", _mm_cut_backward, setup_context=_mm_cut_setup, lib=LIBRARY)


# --- functional collectives in the joint graph ----------------------------------------------------------

_MOVES = "moves bits, and adds nothing"
keep(
    *(f"_c10d_functional.{name}.default" for name in (
        "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_to_all_single", "broadcast", "wait_tensor", "_wrap_tensor_autograd",
    )), section="8", reason=_MOVES,
)  # fmt: skip


def _group(group):
    return getattr(group, "group_name", group)  # 2.13 may pass the group itself


def _ruled(x, op):
    if op not in ("sum", "avg", "max", "min"):
        raise Refusal("CB501", f"{op} over ranks of {str(x.dtype).removeprefix('torch.')} has no rule; sum, avg, max and min have")
    if op in ("sum", "avg"):
        _check_sum(x)
    if reason := partial.objection(x, op):
        raise Refusal("CB501", reason)
    return op


@rule("_c10d_functional.all_reduce.default", section="8", verdict="template")
def all_reduce(x, op, group):
    """Exact sum or mean over ranks; the largest or smallest."""
    name = _group(group)
    return ALL_REDUCE(x, _ruled(x, op), name, process_group(name).size())


@rule("_c10d_functional.all_reduce_coalesced.default", section="8", verdict="template")
def all_reduce_coalesced(tensors, op, group):
    return [c10d.all_reduce.default(x, op, group) for x in tensors]


@rule("_c10d_functional.reduce_scatter_tensor.default", section="8", verdict="template")
def reduce_scatter_tensor(x, op, size, group):
    result = REDUCE_SCATTER(x, _ruled(x, op), _group(group), size)
    if op in ("sum", "avg"):
        partial.note(result, partial.STAGE)
    return result


@rule("_c10d_functional.reduce_scatter_tensor_coalesced.default", section="8", verdict="template")
def reduce_scatter_tensor_coalesced(tensors, op, size, group):
    return [c10d.reduce_scatter_tensor.default(x, op, size, group) for x in tensors]


refuse(
    "_c10d_functional.isend.default", "_c10d_functional.irecv.default", "_c10d_functional.batch_p2p_ops.default",
    code="CB501", reason="messages between two ranks have no rule yet",
)  # fmt: skip


# --- torch.distributed called by eager code -------------------------------------------------------------

keep(
    *(f"c10d.{name}.default" for name in (
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "alltoall_", "alltoall_base_",
        "broadcast_", "gather_", "scatter_", "send", "recv_", "recv_any_source_", "barrier", "monitored_barrier_",
    )), section="8", reason=_MOVES,
)  # fmt: skip

keep(
    *(f"fsdp.{name}.default" for name in ("all_gather_copy_in", "chunk_cat", "split_with_sizes_copy", "copy_")),
    section="8", reason="FSDP2's copies in and out of what it gathers and scatters",
)  # fmt: skip


def _called(group, op):
    """(name and size of the group, name of the operation) of the boxed arguments of a c10d operator."""
    from torch.distributed import ProcessGroup, ReduceOp

    names = {int(getattr(ReduceOp, name.upper())): name for name in ("sum", "avg", "max", "min", "product", "premul_sum")}
    return ProcessGroup.unbox(group), names.get(int(op.op()), "this operation")


def _work(group, device):
    """What callers wait on: the work of a collective that changes nothing."""
    return torch.ops.c10d.broadcast_.default([torch.zeros(1, device=device, dtype=torch.int64)], group, 0, 0)[1]


def _reduced_into(targets, sources, group, op, reduce, root=None):
    members, name = _called(group, op)
    results = [reduce(x, _ruled(x, name), members.group_name, members.size()) for x in sources]
    for target, result in zip(targets, results, strict=True):
        if root is None or members.rank() == root:
            target.copy_(result.view_as(target))
            if reduce is REDUCE_SCATTER and name in ("sum", "avg"):
                partial.note(target, partial.STAGE)
    return _work(group, sources[0].device)


@rule("c10d.allreduce_.default", section="8", verdict="template")
def allreduce_(tensors, group, op, sparse_indices=None, async_op=True, timeout=-1):
    return tensors, _reduced_into(tensors, tensors, group, op, ALL_REDUCE)


@rule("c10d.allreduce_coalesced_.default", section="8", verdict="template")
def allreduce_coalesced_(tensors, group, op, async_op=True, timeout=-1):
    return _reduced_into(tensors, tensors, group, op, ALL_REDUCE)


@rule("c10d.reduce_.default", section="8", verdict="template")
def reduce_(tensors, group, op, root_rank, root_tensor, async_op=True, timeout=-1):
    return _reduced_into(tensors, tensors, group, op, ALL_REDUCE, root_rank)


@rule("c10d._reduce_scatter_base_.default", section="8", verdict="template")
def reduce_scatter_base_(output, x, group, op, async_op=True, timeout=-1):
    return output, _reduced_into([output], [x.reshape(-1)], group, op, REDUCE_SCATTER)


@rule("c10d.reduce_scatter_tensor_coalesced_.default", section="8", verdict="template")
def reduce_scatter_tensor_coalesced_(outputs, inputs, group, op, async_op=True, timeout=-1):
    return _reduced_into(outputs, [x.reshape(-1) for x in inputs], group, op, REDUCE_SCATTER)


@rule("c10d.reduce_scatter_.default", section="8", verdict="template")
def reduce_scatter_(outputs, inputs, group, op, async_op=True, timeout=-1):
    return outputs, _reduced_into(outputs, [torch.cat([x.reshape(-1) for x in parts]) for parts in inputs], group, op, REDUCE_SCATTER)
