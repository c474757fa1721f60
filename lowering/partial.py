"""What eager code must not sum over ranks, because ranks have rounded it as a part of such a sum.

A layer cut by hand multiplies what a rank holds and adds the results of all ranks. Each was rounded
before the sum, so the bits belong to the number of ranks; and one such result looks like any tensor.
A compiled graph shows product and sum together (`carbon_compile.recognise`); eager code meets the
product first. So the memory of products is remembered while it lives, through copies and casts too,
until something else is written all over it.
Gradients of parameters are not meant, also of those that a product took as its first operand: a sum of
them over ranks is the gradient by logical shards.

What a reduce-scatter left is one stage of a sum in the same way, if all-reduced over another group (HSDP).
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PRODUCT = (
    "each rank has rounded its part of a product before this sum, so the bits belong to the number of ranks; "
    "compile the layer together with its collective, or cut it with carbon_compile.parallel or parallelize_module"
)
STAGE = (
    "this adds sums over other ranks, which were rounded, so the bits belong to how the ranks are arranged; reduce over one group of all of them "
    "(in place of HSDP, give fully_shard a mesh of one dimension)"
)
_AFFECTED = {PRODUCT: ("sum",), STAGE: ("sum", "avg")}  # a mean of products is no product
_OFTEN = 256

_known: dict[int, tuple[StorageWeakRef, str]] = {}  # by address, which is not used again while the reference lives


def note(x, reason=PRODUCT):
    """Remember that the memory of x holds (part of) a product, or of a stage of a sum; only where there
    are ranks."""
    if not _has_memory(x) or not x.is_floating_point() or not torch.distributed.is_initialized():
        return
    if len(_known) >= _OFTEN and not len(_known) % _OFTEN:
        for address in [a for a, (reference, _) in _known.items() if reference.expired()]:
            del _known[address]
    reference = StorageWeakRef(x.untyped_storage())
    _known[reference.cdata] = reference, reason


def note_copy(x, sources):
    """Remember of a copy x what is known of its sources."""
    for reason in {_reason(source) for source in sources} - {None}:
        note(x, reason)


def overwritten(x, source=None):
    """Something else, which may come from `source`, was written to all of x."""
    if _reason(x) is not None and x.numel() * x.element_size() == x.untyped_storage().nbytes() and _reason(source) is None:
        del _known[x.untyped_storage()._cdata]


def is_gradient(x):
    """Remember that x is the gradient of a parameter, and so no part of a product over ranks."""
    if _reason(x) is PRODUCT:
        del _known[x.untyped_storage()._cdata]


def objection(x, op):
    """Why x must not be combined over ranks by `op`, or None."""
    reason = _reason(x)
    return reason if reason is not None and op in _AFFECTED[reason] else None


def _reason(x):
    if not _known or not _has_memory(x):
        return None
    return _known.get(x.untyped_storage()._cdata, (None, None))[1]


def _has_memory(x):
    """Whether x is no stand-in of a trace."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)
