"""Results of eager products, so that a sum of them over ranks is not taken for an exact one.

A layer cut by hand multiplies what a rank holds and adds the results of all ranks. Each was rounded
before the sum, so the bits belong to the number of ranks; and one such result looks like any tensor.
A compiled graph shows product and sum together (`carbon_compile.recognise`); eager code meets the
product first. So the memory of products is remembered while it lives, through copies and casts too.
Weight gradients are not meant: a sum of those over ranks is the gradient by logical shards.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

REASON = (
    "each rank has rounded its part of a product before this sum, so the bits belong to the number of ranks; "
    "compile the layer together with its collective, or cut it with carbon_compile.parallel or parallelize_module"
)
_OFTEN = 256

_known: dict[int, StorageWeakRef] = {}  # by address, which is not used again while the reference lives


def note(x):
    """Remember that the memory of x holds (part of) a product; only where there are ranks."""
    if not torch.distributed.is_initialized() or not x.is_floating_point():
        return
    if len(_known) >= _OFTEN and not len(_known) % _OFTEN:
        for address in [a for a, reference in _known.items() if reference.expired()]:
            del _known[address]
    reference = StorageWeakRef(x.untyped_storage())
    _known[reference.cdata] = reference


def is_product(x):
    """Whether the memory of x holds what `note` was told of."""
    return bool(_known) and x.untyped_storage()._cdata in _known
