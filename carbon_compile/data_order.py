"""The order of training data as a function of a seed and an epoch, for any number of workers.

    loader = carbon_compile.DeterministicLoader(dataset, batch_size=32, seed=7, num_workers=4)
    for epoch in range(loader.epoch, 10):
        for batch in loader:
            ...

Draws are Philox (contract section 7): the order doesn't depend on the device, on PyTorch's release,
or on what else drew random numbers. Items are fetched under seeds of their own, so that a random
crop is a function of (seed, epoch, index) too, and not of the worker that made it.
"""

import random
import sys
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from .lowering import philox, registry
from .snapshot import RandomState

_OURS = ("shuffle", "sampler", "batch_sampler", "generator", "batch_size", "drop_last", "worker_init_fn")


def permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """0..n-1, int64 [n], in the order of `seed` and `epoch`: carbon::permutation under the key
    (w0, w1) of the Philox block of key `seed` and counter `epoch`."""
    registry.load()
    key = torch.stack(_block(seed, epoch, 0)[:2])
    return torch.ops.carbon.permutation(key, n, dtype=torch.int64)


def _block(seed, epoch, draw):
    low, high = (torch.tensor(half) for half in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return [torch.as_tensor(word) for word in philox.block(low, high, torch.tensor(epoch), (draw, 0))]


class _Order(Sampler):
    """Batches of (epoch, index), from a position on."""

    def __init__(self, n, batch_size, seed, shuffle, drop_last):
        self.n, self.batch_size, self.seed, self.shuffle, self.drop_last = n, batch_size, seed, shuffle, drop_last
        self.epoch = self.batch = 0
        self.part, self.parts = 0, 1

    def __len__(self):
        return self.n // self.batch_size if self.drop_last else -(-self.n // self.batch_size)

    def __iter__(self):
        order = permutation(self.n, self.seed, self.epoch) if self.shuffle else torch.arange(self.n)
        for batch in range(self.batch, len(self)):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            if len(chosen) % self.parts:
                raise ValueError(f"a batch of {len(chosen)} can't be cut into {self.parts} equal parts; drop_last=True leaves out a short one")
            size = len(chosen) // self.parts
            yield [(self.epoch, index) for index in chosen[self.part * size : (self.part + 1) * size].tolist()]


class _Seeded(Dataset):
    """Items of a dataset, each fetched under generators that its epoch and index seed."""

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, place):
        epoch, index = place
        if torch.utils.data.get_worker_info() is None:  # in the process that trains
            before = RandomState.now()
            try:
                return self._item(epoch, index)
            finally:
                before.restore()
        return self._item(epoch, index)

    def _item(self, epoch, index):
        seed = _item_seed(self.seed, epoch, index)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        return self.dataset[index]


def _item_seed(seed, epoch, index):
    """63 bits by SplitMix64 over the three numbers: pure Python, for a call an item."""
    state = seed & (2**64 - 1)
    for value in (epoch, index):
        state = (state + value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


class DeterministicLoader:
    """A DataLoader whose batches are a function of seed, epoch and position.

    Args:
        dataset: with `__len__` and `__getitem__`. seed: from 0 to 2^64 - 1. shuffle: False for the
            dataset's own order. drop_last, and further keywords such as num_workers, collate_fn and
            pin_memory: as in torch.utils.data.DataLoader.

    Each `iter()` runs the rest of the present epoch and then turns to the next. `epoch` and `batch`
    tell the position: how many batches of it were handed out, whatever workers have fetched ahead.
    `state_dict()` and `load_state_dict()` carry it; a DeterministicTrainer's checkpoint does.

    TypeError for a dataset without an index, or a keyword that would decide the order.
    """

    def __init__(self, dataset, batch_size=1, *, seed=0, shuffle=True, drop_last=False, **keywords):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError("an iterable dataset has its own order; give one with __len__ and __getitem__")
        taken = [key for key in keywords if key in _OURS]
        if taken:
            raise TypeError(f"{taken[0]} would decide the order; it is a function of seed and epoch here")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}: give a whole number from 1")
        if len(dataset) < (batch_size if drop_last else 1):
            raise ValueError(f"{len(dataset)} items make no batch of {batch_size}")
        self._order = _Order(len(dataset), batch_size, seed, shuffle, drop_last)
        # Its own generator: a DataLoader draws a seed from the global one at every epoch.
        self._loader = DataLoader(_Seeded(dataset, seed), batch_sampler=self._order, generator=torch.Generator(), **keywords)

    @property
    def epoch(self) -> int:
        return self._position()[0]

    @property
    def batch(self) -> int:
        return self._position()[1]

    def _position(self):
        """(epoch, batch) of the next batch: behind the last one of an epoch, the next epoch's first."""
        order = self._order
        return (order.epoch + 1, 0) if order.batch >= len(order) else (order.epoch, order.batch)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._order)

    def __iter__(self) -> Iterator:
        order = self._order
        order.epoch, order.batch = epoch, _ = self._position()
        for batch in self._loader:
            if order.epoch != epoch:
                raise RuntimeError("the loader's position was changed during an epoch; start a new loop")
            order.batch += 1
            yield batch
        order.epoch, order.batch = epoch + 1, 0

    def take_part(self, part: int, parts: int) -> None:
        """Hand out the `part`-th, from 0, of `parts` equal slices of every batch, as of the next loop: one a rank.

        Positions count whole batches, so they don't depend on it. A batch that can't be cut so is a ValueError
        when its turn comes.
        """
        if not 0 <= part < parts:
            raise ValueError(f"part {part} of {parts}: give a whole number from 0 below the number of parts")
        self._order.part, self._order.parts = part, parts

    def state_dict(self) -> dict:
        return {"seed": self._order.seed, "length": self._order.n, "batch_size": self._order.batch_size, "shuffle": self._order.shuffle,
                "drop_last": self._order.drop_last, "epoch": self.epoch, "batch": self.batch}  # fmt: skip

    def misfits(self, state: dict) -> list[str]:
        """Why a position can't be taken up here: it is one of another order."""
        mine = self.state_dict()
        return [f"the data's {key} was {state[key]}, here it is {mine[key]}" for key in mine if key not in ("epoch", "batch") and state[key] != mine[key]]

    def load_state_dict(self, state: dict) -> None:
        """Go to a position. ValueError where the order is another."""
        found = self.misfits(state)
        if found:
            raise ValueError("; ".join(found))
        self._order.epoch, self._order.batch = state["epoch"], state["batch"]
