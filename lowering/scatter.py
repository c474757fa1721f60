"""Gather's derivatives and scatter (contract section 6): exact sums of what each destination receives.

A destination's value is section 3's sum of exactly its contributions, the old value included: a
scatter of integer maxima, a pointwise quantisation, a scatter of integers, one rounding. Integers
are order-free, and the pointwise parts fuse. A destination that receives nothing keeps its bits.
Writes without accumulation: of several to one destination the last in index order stays.
"""

import math

import torch
import torch.nn.functional as F

from ..templates import scatter as templates
from . import prims as P
from .arithmetic import where
from .registry import Refusal, composite, kernels, rule

aten = torch.ops.aten


_operator = kernels("6")


ROWS_MAX = _operator(
    "rows_max(Tensor rows, Tensor index, SymInt segments, int initial) -> Tensor",
    templates.rows_max,
    lambda rows, index, segments, initial: rows.new_empty((segments, rows.shape[1])),
)
ROWS_TOTAL = _operator(
    "rows_total(Tensor rows, Tensor index, SymInt segments) -> Tensor",
    templates.rows_total,
    lambda rows, index, segments: rows.new_empty((segments, rows.shape[1]), dtype=torch.int64),
)
ALONG_MAX = _operator(
    "along_max(Tensor source, int dim, Tensor index, SymInt[] size, int initial) -> Tensor",
    templates.along_max,
    lambda source, dim, index, size, initial: source.new_empty(size),
)
ALONG_TOTAL = _operator(
    "along_total(Tensor source, int dim, Tensor index, SymInt[] size) -> Tensor",
    templates.along_total,
    lambda source, dim, index, size: source.new_empty(size, dtype=torch.int64),
)
POSITIONS = _operator(
    "positions(Tensor index, SymInt segments, bool last) -> Tensor",
    templates.positions,
    lambda index, segments, last: index.new_empty(index.shape, dtype=torch.int64),
)
# Inductor could store the rows in a fused kernel, but it may then fuse a reader with the fill before.
WRITE = _operator(
    "write_rows(Tensor destination, Tensor index, Tensor rows) -> Tensor",
    templates.write,
    lambda destination, index, rows: destination.new_empty(destination.shape),
)
PLACE = _operator(
    "place_rows(Tensor index, Tensor rows, SymInt segments) -> Tensor",
    templates.place,
    lambda index, rows, segments: rows.new_empty((segments, rows.shape[1])),
)


# --- where contributions meet -------------------------------------------------------------------------


class Rows:
    """Contributions [N, inner] to `segments` destinations by `index` [N]: one accumulator each."""

    def __init__(self, index, segments):
        self.index, self.segments = index, segments
        self.most = index.shape[0]  # contributions that one destination may receive

    def largest(self, keys, initial):
        return ROWS_MAX(keys, self.index, self.segments, initial)

    def total(self, q):
        return ROWS_TOTAL(q, self.index, self.segments)

    def count(self):
        return self.total(torch.ones((self.index.shape[0], 1), dtype=torch.int64, device=self.index.device))

    def spread(self, accumulators):
        """Each contribution's own accumulator."""
        return aten.index.Tensor(accumulators, [self.index])

    def old(self, destinations):
        """The destinations' values beside the accumulators."""
        return destinations

    def place(self, destinations, result, touched):
        """The destinations (or zeros, for None) with the results of those that were touched."""
        return result if destinations is None else chosen(touched, result, destinations)


class Slots(Rows):
    """`Rows` for many destinations: the accumulator of a destination is the place of its first
    contribution, so that nothing but the result is as large as the destinations."""

    def __init__(self, index, segments):
        super().__init__(POSITIONS(index, segments, False), index.shape[0])
        self.destination, self.destinations = index, segments

    def old(self, destinations):
        return aten.index.Tensor(destinations, [self.destination])

    def place(self, destinations, result, touched):
        rows = self.spread(result)
        if destinations is None:
            return PLACE(self.destination, rows, self.destinations)
        return WRITE(destinations, self.destination, rows)


class Along:
    """Contributions to destinations of `size` by `index` along `dim`, as `torch.scatter_add` counts."""

    def __init__(self, index, dim, size):
        self.index, self.dim, self.size = index, dim, size
        self.most = index.shape[dim]

    def largest(self, keys, initial):
        return ALONG_MAX(keys, self.dim, self.index, self.size, initial)

    def total(self, q):
        return ALONG_TOTAL(q, self.dim, self.index, self.size)

    def count(self):
        return self.total(torch.ones_like(self.index))

    def spread(self, accumulators):
        return aten.gather.default(accumulators, self.dim, self.index)

    old = Rows.old
    place = Rows.place


SMALL = 1024


def rows(index, segments):
    """`Rows` or `Slots`, whichever needs less memory; the bits are the same."""
    n = index.shape[0]
    few = P.provably(segments <= n) or (P.provably(segments < SMALL) and not isinstance(n, int))
    return Rows(index, segments) if few else Slots(index, segments)


# --- what becomes of them -----------------------------------------------------------------------------


def accumulate(groups, values, destinations, own=True, mean=False):
    """Each destination's exact sum (or mean) of its `values`, with its old value if `own`.

    destinations: of the result's dtype, or None for zeros that receive values alone, of the values'
    dtype. Floats are rounded once to binary32 and once more to the storage type; a mean divides
    between the two. Integers wrap around, and their mean is rounded down, as in PyTorch.
    """
    dtype = values.dtype if destinations is None else destinations.dtype
    if not dtype.is_floating_point:
        return _accumulate_integers(groups, values, destinations, own, mean)
    if dtype is torch.float64:
        raise Refusal("CB202", "sums of float64 have no rule in the contract; convert to float32 first")
    m = groups.largest(torch.ops.carbon.magnitude(values, dtype=torch.int32), -1)
    touched = aten.ge.Scalar(m, 0)
    if own:
        old = groups.old(destinations)
        m = aten.maximum.default(m, torch.ops.carbon.magnitude(old, dtype=torch.int32))
    total = [groups.total(t) for t in _terms(values, groups.spread(m), groups)]
    if own:
        total = [aten.add.Tensor(t, o) for t, o in zip(total, _terms(old, m, groups), strict=True)]
    finish = torch.ops.carbon.sum_total if len(total) == 1 else torch.ops.carbon.sum_total2
    result = finish(*total, m, dtype=torch.float32 if mean else dtype)
    if mean:
        n = groups.count()
        result = P.div(result, aten.add.Scalar(n, 1) if own else n, dtype=dtype)
    return groups.place(destinations, result, touched)


def _accumulate_integers(groups, values, destinations, own, mean):
    total, n = groups.total(values.to(torch.int64)), groups.count()
    touched = aten.gt.Scalar(n, 0)
    if own:
        total, n = aten.add.Tensor(total, groups.old(destinations)), aten.add.Scalar(n, 1)
    if mean:
        total = aten.div.Tensor_mode(total, aten.clamp.default(n, 1), rounding_mode="floor")
    return groups.place(destinations, total.to(values.dtype), touched)


def chosen(mask, a, b):
    """`a` where `mask`, else `b`, of one dtype; NaN payloads and zeros' signs stay."""
    return torch.ops.carbon.select(mask, a, b, dtype=b.dtype)


def _terms(values, m, groups):
    """Quantised values as one int64, or as (high, low) words where more than fit one may meet."""
    q = torch.ops.carbon.sum_terms(values, m, dtype=torch.int64)
    if P.provably(groups.most + 1 < P.SINGLE_WORD):
        return (q,)
    return torch.ops.carbon.high_word(q, dtype=torch.int64), torch.ops.carbon.low_word(q, dtype=torch.int64)


def extreme(groups, values, destinations, own=True, smallest=False):
    """Each destination's largest (or smallest) value, its old one included if `own`; NaN wins, a zero
    is +0."""
    integer = P.key_type(values.dtype) if values.is_floating_point() else torch.int64
    start = torch.iinfo(integer).min

    def key(x):
        if not x.is_floating_point():
            x = x.to(torch.int64)
            return aten.bitwise_not.default(x) if smallest else x
        return torch.ops.carbon.order_key(P.neg(x, dtype=x.dtype) if smallest else x, dtype=integer)

    best = groups.largest(key(values), start)
    floating = values.is_floating_point()
    # An integer may be the smallest there is, a float's key is not.
    touched = aten.gt.Scalar(best, start) if floating else aten.gt.Scalar(groups.count(), 0)
    if own:
        best = aten.maximum.default(best, key(groups.old(destinations)))
    if not floating:
        result = (aten.bitwise_not.default(best) if smallest else best).to(values.dtype)
    elif smallest:
        result = P.sub(0.0, P.value_of_key(best, values.dtype), dtype=values.dtype)
    else:
        result = P.value_of_key(best, values.dtype)
    return groups.place(destinations, result, touched)


def overwrite(destinations, index, values):
    """`destinations` [S, inner] with `values` [N, inner] written at `index`, the last of each winning."""
    winner = POSITIONS(index, destinations.shape[0], True)
    return WRITE(destinations, index, aten.index.Tensor(values, [winner]))


def _exact(x, reduce):
    """Integer products are exact in any order."""
    return reduce in ("prod", "multiply") and not x.is_floating_point()


def _reduced(reduce, groups, values, destinations, own):
    if reduce in ("sum", "add", "mean"):
        return accumulate(groups, values, destinations, own, reduce == "mean")
    if reduce in ("amax", "amin"):
        return extreme(groups, values, destinations, own, reduce == "amin")
    raise Refusal("CB106", f"a scattered product ({reduce}) depends on its order; reduce logarithms by sum, or sort and multiply")


# --- index_put: several index tensors ---------------------------------------------------------------


def _inside(index, size):
    return aten.bitwise_and.Tensor(aten.ge.Scalar(index, 0), aten.lt.Scalar(index, size))


def _wrap(index, size):
    """Negative indices counted from the end."""
    index = index.to(torch.int64)
    return aten.where.self(aten.lt.Scalar(index, 0), aten.add.Scalar(index, size), index)


class Places:
    """`x[indices]` as rows of a matrix: indexed dimensions first and folded, the others behind.

    indices: one integer tensor (or None) a dimension of `x`; trailing Nones may be left out.
    """

    def __init__(self, x, indices):
        self.x = x
        indices = [*indices, *[None] * (x.dim() - len(indices))]
        self.indexed = [d for d, i in enumerate(indices) if i is not None]
        self.rest = [d for d, i in enumerate(indices) if i is None]
        self.batch = torch.broadcast_shapes(*(indices[d].shape for d in self.indexed))
        self.segments = math.prod(x.shape[d] for d in self.indexed)
        self.inner = math.prod(x.shape[d] for d in self.rest)
        self.index = self._linear(indices).expand(self.batch).reshape(-1)

    def _linear(self, indices):
        if len(self.indexed) == 1:
            return _wrap(indices[self.indexed[0]], self.segments)
        linear, valid = 0, None
        for d in self.indexed:
            size = self.x.shape[d]
            i = _wrap(indices[d], size)
            linear = aten.add.Tensor(i, linear * size) if isinstance(linear, torch.Tensor) else i
            valid = _inside(i, size) if valid is None else aten.bitwise_and.Tensor(valid, _inside(i, size))
        # An index out of its own range must not fall upon a neighbour's.
        return aten.where.self(valid, linear, P.scalar(self.segments, linear, torch.int64))

    def matrix(self):
        """`x` as [segments, inner]."""
        return self.x.permute([*self.indexed, *self.rest]).reshape(self.segments, self.inner)

    def rows(self, values):
        """`values`, of a shape that broadcasts to that of `x[indices]`, as [N, inner]."""
        first, last = self.indexed[0], self.indexed[-1]
        before = [d for d in self.rest if d < first] if last - first + 1 == len(self.indexed) else []
        after = [d for d in self.rest if d not in before]
        shape = [*(self.x.shape[d] for d in before), *self.batch, *(self.x.shape[d] for d in after)]
        values = values.expand(shape)
        k, b = len(before), len(self.batch)
        order = [*range(k, k + b), *range(k), *range(k + b, len(shape))]
        return values.permute(order).reshape(self.index.shape[0], self.inner)

    def restore(self, matrix):
        """The inverse of `matrix`."""
        order = [*self.indexed, *self.rest]
        full = matrix.reshape([self.x.shape[d] for d in order])
        return full.permute([order.index(d) for d in range(len(order))])


@rule("aten.index_put.default", "aten._unsafe_index_put.default", section="6", verdict="template", integers="rule")
def index_put(x, indices, values, accumulate=False):
    """Accumulating: an exact sum a destination. Otherwise the last write in index order stays."""
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return _index_put_masked(x, indices, values, accumulate)
    if values.dim() == 0:
        values = values.to(x.device)  # a number: `x[i] = 0` hands it over on the CPU
    places = Places(x, indices)
    matrix, values = places.matrix(), places.rows(values)
    if accumulate:
        return places.restore(accumulate_rows(places.index, values, matrix))
    return places.restore(overwrite(matrix, places.index, values))


def accumulate_rows(index, values, matrix):
    """`matrix` [S, inner] plus `values` [N, inner] at `index` [N], summed exactly."""
    return accumulate(rows(index, matrix.shape[0]), values, matrix)


def _index_put_masked(x, indices, values, accumulate):
    mask = indices[0]
    behind = x.dim() - mask.dim() if mask is not None else -1
    alone = all(i is None for i in indices[1:]) and mask is not None and mask.dtype is torch.bool
    # Values that don't count the mask's elements are the same wherever they are written.
    uniform = values.dim() <= behind or (values.dim() == behind + 1 and isinstance(values.shape[0], int) and values.shape[0] == 1)
    if alone and uniform and not accumulate:
        mask = mask.reshape(*mask.shape, *[1] * behind)
        values = values.reshape(values.shape[1:]) if values.dim() == behind + 1 else values
        return chosen(mask, values, x)
    return INDEX_PUT_MASKED(x, indices, values, accumulate)


def _index_put_eager(x, indices, values, accumulate):
    """`index_put` with masks among the indices, whose lengths are known only now."""
    expanded = []
    for i in indices:
        masked = i is not None and i.dtype in (torch.bool, torch.uint8)
        expanded.extend(i.nonzero().unbind(1) if masked else [i])
    return index_put(x, expanded, values, accumulate).contiguous()


INDEX_PUT_MASKED = _operator(
    "index_put_masked(Tensor x, Tensor?[] indices, Tensor values, bool accumulate) -> Tensor",
    _index_put_eager,
    lambda x, indices, values, accumulate: x.new_empty(x.shape),
)


@rule("aten._unsafe_masked_index.default", section="6", integers="rule")
def masked_index(x, mask, indices, fill):
    """x[indices] where `mask`, else `fill`; indices need not be valid where the mask is off."""
    clamped = [None if i is None else aten.where.self(mask, i, P.scalar(0, i, i.dtype)) for i in indices]
    return where(mask, aten.index.Tensor(x, clamped), fill)


@rule("aten._unsafe_masked_index_put_accumulate.default", section="6", verdict="template", integers="rule")
def masked_index_put_accumulate(x, mask, indices, values):
    clamped = [None if i is None else aten.where.self(mask, i, P.scalar(0, i, i.dtype)) for i in indices]
    return aten.index_put.default(x, clamped, where(mask, values, 0), True)


# --- one index tensor along a dimension -------------------------------------------------------------


def _rows_first(x, dim):
    """`x` as [size of dim, the rest], and the way back."""
    shape = x.shape if x.dim() else (1,)
    moved = x.reshape(shape).movedim(dim, 0)

    def restore(matrix):
        return matrix.reshape(moved.shape).movedim(0, dim).reshape(x.shape)

    return moved.reshape(moved.shape[0], math.prod(moved.shape[1:])), restore


def _index_rows(x, dim, index, source):
    matrix, restore = _rows_first(x, dim)
    index = index.reshape(-1).to(torch.int64)
    return matrix, restore, index, _rows_first(source, dim)[0]


@rule("aten.index_add.default", section="6", verdict="template", integers="rule")
def index_add(x, dim, index, source, *, alpha=1):
    """x plus alpha source at `index`, each destination an exact sum; alpha source is rounded first."""
    matrix, restore, index, values = _index_rows(x, dim, index, source)
    if alpha != 1:
        values = P.mul(values, alpha) if values.is_floating_point() else aten.mul.Scalar(values, alpha)
    return restore(accumulate_rows(index, values, matrix))


@rule("aten.index_reduce.default", section="6", verdict="template", integers="rule")
def index_reduce(x, dim, index, source, reduce, *, include_self=True):
    if _exact(x, reduce):
        return NotImplemented
    matrix, restore, index, values = _index_rows(x, dim, index, source)
    return restore(_reduced(reduce, rows(index, matrix.shape[0]), values, matrix, include_self))


@rule("aten.index_copy.default", section="6", verdict="template", integers="rule")
def index_copy(x, dim, index, source):
    """The last of several writes to one place stays."""
    matrix, restore, index, values = _index_rows(x, dim, index, source)
    return restore(overwrite(matrix, index, values))


@rule("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor", section="6", verdict="template", integers="rule")
def index_fill(x, dim, index, value):
    matrix, restore = _rows_first(x, dim)
    index = _wrap(index.reshape(-1), matrix.shape[0])
    value = P.cast(value, x.dtype) if isinstance(value, torch.Tensor) else P.scalar(value, x, x.dtype)
    return restore(WRITE(matrix, index, value.expand(index.shape[0], matrix.shape[1])))


# --- index tensors shaped like the source ----------------------------------------------------------


def _empty(index):
    return P.provably(index.numel() == 0)


def _strip(x, dim, index, source):
    """0-d operands as 1-d, and the source cut to the index."""
    x, index = (t.reshape(1) if t.dim() == 0 else t for t in (x, index))
    if isinstance(source, torch.Tensor):
        source = source.reshape(1) if source.dim() == 0 else source
        for d, n in enumerate(index.shape):
            source = source.narrow(d, 0, n)
    return x, dim % x.dim(), index.to(torch.int64), source


def _flat(x, dim, index):
    """Positions of the destinations in x.reshape(-1), one an element of `index`."""
    stride, linear = 1, None
    for d in reversed(range(x.dim())):
        if d == dim:
            # One out of range would fall upon another destination.
            i = aten.where.self(_inside(index, x.shape[d]), index * stride, P.scalar(x.numel(), index, torch.int64))
        else:
            i = torch.arange(index.shape[d], dtype=torch.int64, device=index.device) * stride
            i = i.reshape([-1 if k == d else 1 for k in range(x.dim())])
        linear = i if linear is None else aten.add.Tensor(linear, i)
        stride = stride * x.shape[d]
    return linear.expand(index.shape).reshape(-1)


def _scatter_reduce(x, dim, index, source, reduce, own):
    if _exact(x, reduce):
        return NotImplemented
    if _empty(index):
        return x.clone()
    y, dim, index, source = _strip(x, dim, index, source)
    if P.provably(2 * index.numel() < y.numel()):
        groups = Slots(_flat(y, dim, index), y.numel())
        return _reduced(reduce, groups, source.reshape(-1, 1), y.reshape(-1, 1), own).reshape(x.shape)
    return _reduced(reduce, Along(index, dim, y.shape), source, y, own).reshape(x.shape)


@rule("aten.scatter_add.default", section="6", verdict="template", integers="rule")
def scatter_add(x, dim, index, source):
    return _scatter_reduce(x, dim, index, source, "sum", True)


@rule("aten.scatter_reduce.two", section="6", verdict="template", integers="rule")
def scatter_reduce(x, dim, index, source, reduce, *, include_self=True):
    return _scatter_reduce(x, dim, index, source, reduce, include_self)


@rule("aten.scatter.reduce", section="6", verdict="template", integers="rule")
def scatter_with(x, dim, index, source, *, reduce):
    return _scatter_reduce(x, dim, index, source, reduce, True)


@rule("aten.scatter.value_reduce", section="6", verdict="template", integers="rule")
def scatter_value_with(x, dim, index, value, *, reduce):
    source = P.scalar(value, x, x.dtype).expand(index.shape)
    return _scatter_reduce(x, dim, index, source, reduce, True)


@rule("aten.scatter.src", section="6", verdict="template", integers="rule")
def scatter(x, dim, index, source):
    """The last of several writes to one place, in the index tensor's order, stays."""
    if _empty(index):
        return x.clone()
    y, dim, index, source = _strip(x, dim, index, source)
    return overwrite(y.reshape(-1, 1), _flat(y, dim, index), source.reshape(-1, 1)).reshape(x.shape)


@rule("aten.scatter.value", section="6", verdict="template", integers="rule")
def scatter_value(x, dim, index, value):
    if _empty(index):
        return x.clone()
    y, dim, index, _ = _strip(x, dim, index, value)
    index = _flat(y, dim, index)
    value = P.scalar(value, x, x.dtype).expand(index.shape[0], 1)
    return WRITE(y.reshape(-1, 1), index, value).reshape(x.shape)


@rule("aten.put.default", section="6", verdict="template", integers="rule")
def put(x, index, source, accumulate=False):
    """`source` at positions of the flattened `x`; without `accumulate` the last write stays."""
    index, values, matrix = _wrap(index.reshape(-1), x.numel()), source.reshape(-1, 1), x.reshape(-1, 1)
    result = accumulate_rows(index, values, matrix) if accumulate else overwrite(matrix, index, values)
    return result.reshape(x.shape)


# --- masks, windows, counts ---------------------------------------------------------------------------


@rule("aten.masked_scatter.default", section="6", integers="rule")
def masked_scatter(x, mask, source):
    """The k-th true place of `mask` takes the k-th element of `source`."""
    x, mask = torch.broadcast_tensors(x, mask)
    rank = aten.sub.Scalar(aten.cumsum.default(mask.reshape(-1).to(torch.int64), 0), 1).reshape(mask.shape)
    rank = aten.where.self(mask, rank, P.scalar(0, rank, torch.int64))
    if P.provably(source.numel() == 0):
        return x.clone()
    return chosen(mask, aten.index.Tensor(source.reshape(-1), [rank]), x)


@rule("aten.masked_scatter_backward.default", section="6", verdict="template", integers="rule")
def masked_scatter_backward(grad, mask, sizes):
    """The derivative by `source`, of shape `sizes`: its k-th element's is that of the k-th true place."""
    grad, mask = grad.reshape(-1), mask.expand(grad.shape).reshape(-1)
    n = math.prod(sizes)
    rank = aten.sub.Scalar(aten.cumsum.default(mask.to(torch.int64), 0), 1)
    # All others write a zero behind the end.
    index = aten.where.self(mask, rank, P.scalar(n, rank, torch.int64))
    kept = chosen(mask, grad, P.scalar(0, grad, grad.dtype))
    out = PLACE(index, kept.reshape(-1, 1), n + 1)
    return out.narrow(0, 0, n).reshape(sizes)


@rule("aten.unfold_backward.default", section="6", verdict="template")
def unfold_backward(grad, input_sizes, dim, size, step):
    """Each element's exact sum over the windows that hold it. grad: input_sizes, with `dim` counting
    windows and a last dimension of `size`."""
    if len(input_sizes) == 0:
        return grad.reshape(input_sizes)
    dim = dim % len(input_sizes)
    n, others = input_sizes[dim], [s for d, s in enumerate(input_sizes) if d != dim]
    index = torch.arange(n, dtype=torch.int64, device=grad.device).unfold(0, size, step).reshape(-1)
    values = grad.movedim((dim, -1), (0, 1)).reshape(index.shape[0], math.prod(others))
    return accumulate(rows(index, n), values, None, own=False).reshape(n, *others).movedim(0, dim)


@rule("aten.embedding_dense_backward.default", section="6", verdict="template")
def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    """Each weight row's exact sum. The padding row's is zero; scaled, each contribution is divided by
    how often its index occurs, and rounded, first."""
    index = indices.reshape(-1).to(torch.int64)
    values = grad.reshape(index.shape[0], grad.shape[-1])
    if padding_idx >= 0:
        padding = aten.eq.Scalar(index, padding_idx).unsqueeze(1)
        values = chosen(padding, P.scalar(0, values, values.dtype), values)
    groups = rows(index, num_weights)
    if scale_grad_by_freq:
        values = P.div(values, groups.spread(groups.count()))
    return P.cast(accumulate(groups, values, None, own=False), grad.dtype)


@rule("aten.bincount.default", section="6", verdict="template", integers="rule")
def bincount(x, weights=None, minlength=0):
    """The exact sum of the weights of each integer."""
    if weights is None:
        return NotImplemented
    if weights.dtype is not torch.float32:
        raise Refusal("CB202", "weighted bincount sums in float64 unless the weights are float32; convert them")
    n = aten.bincount.default(x, None, minlength).shape[0]
    return accumulate(rows(x.to(torch.int64), n), weights.reshape(-1, 1), None, own=False).reshape(n)


@rule("aten.histc.default", section="6", verdict="template")
def histc(x, bins=100, min=0, max=0):  # noqa: A002
    """Counts of floor((x - min) bins / (max - min)), a rounding an operation, the last bin closed."""
    flat = P.f32(x.reshape(-1))
    if min == max:
        low, high = P.amin(flat), P.amax(flat)
        same = P.eq(low, high, dtype=torch.bool)
        low, high = where(same, P.sub(low, 1.0), low), where(same, P.add(high, 1.0), high)
    else:
        low, high = (P.scalar(v, flat, flat.dtype) for v in (min, max))
    inside = aten.bitwise_and.Tensor(P.ge(flat, low, dtype=torch.bool), P.le(flat, high, dtype=torch.bool))
    place = P.floor_div(P.mul(P.sub(flat, low), float(bins)), P.sub(high, low), dtype=torch.int64)
    place = aten.where.self(inside, aten.clamp.default(place, 0, bins - 1), P.scalar(bins, place, torch.int64))
    counts = ROWS_TOTAL(torch.ones_like(place).unsqueeze(1), place, bins + 1)
    return P.cast(counts.narrow(0, 0, bins).reshape(bins), x.dtype)


@rule("aten.repeat_interleave.Tensor", section="6", integers="rule")
def repeat_interleave(repeats, *, output_size=None):
    """Place k of the result is the i with sum(repeats[:i]) <= k < sum(repeats[:i + 1])."""
    if output_size is None:
        return NotImplemented
    ends = aten.cumsum.default(repeats, 0, dtype=torch.int64)
    place = torch.arange(output_size, dtype=torch.int64, device=repeats.device)
    return aten.searchsorted.Tensor(ends, place, right=True).to(repeats.dtype)


# --- functions above autograd -----------------------------------------------------------------------


@composite(F.one_hot, section="6")
def one_hot(x, num_classes=-1):
    """x [...] int64 to [..., num_classes] int64; RuntimeError for a class out of range."""
    if num_classes == -1:
        return aten.one_hot.default(x, num_classes)
    valid = (x >= 0) & (x < num_classes)
    aten._assert_async.msg(valid.all(), f"one_hot takes classes from 0 to {num_classes - 1}")
    return (x.unsqueeze(-1) == torch.arange(num_classes, dtype=torch.int64, device=x.device)).to(torch.int64)


@composite(F.embedding_bag, section="6")
def embedding_bag(input, weight, offsets=None, max_norm=None, norm_type=2, scale_grad_by_freq=False, mode="mean", sparse=False, per_sample_weights=None, include_last_offset=False, padding_idx=None):  # noqa: A002
    """Sums, means or maxima of the weight rows of each bag.

    input [B, L], or [N] with offsets [B] ([B + 1] if they include the last); result [B, D]. Sums are
    exact; a maximum's derivative is shared evenly among equals. An empty bag is 0.
    """
    if max_norm is not None or sparse:
        raise Refusal("CB106", "embedding_bag with max_norm or sparse gradients has no rule")
    if input.dim() == 2:
        bags, length = input.shape
        bag = torch.arange(bags, dtype=torch.int64, device=input.device).unsqueeze(1).expand(bags, length).reshape(-1)
    else:
        offsets = offsets[:-1] if include_last_offset else offsets
        bags = offsets.shape[0]
        place = torch.arange(input.shape[0], device=input.device, dtype=offsets.dtype)
        bag = torch.searchsorted(offsets.contiguous(), place, right=True) - 1
    flat = input.reshape(-1)
    taken = F.embedding(flat, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        taken = taken * per_sample_weights.reshape(-1, 1)
    if padding_idx is not None:
        # What is padded away goes to a bag of its own behind the last.
        bag = torch.where(flat == padding_idx % weight.shape[0], bags, bag)
    shape = (bags + 1, weight.shape[1])
    if mode == "sum":
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device).index_add(0, bag, taken)[:bags]
    if mode == "max":
        zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        return zeros.index_reduce(0, bag, taken, "amax", include_self=False)[:bags]
    total = torch.zeros(shape, dtype=torch.float32, device=weight.device).index_add(0, bag, taken.to(torch.float32))
    count = torch.zeros(bags + 1, dtype=torch.int64, device=weight.device).index_add(0, bag, torch.ones_like(bag))
    return (total / count.clamp(min=1).unsqueeze(1))[:bags].to(weight.dtype)
