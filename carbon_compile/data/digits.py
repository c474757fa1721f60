"""The 8x8 handwritten digits (UCI, by way of scikit-learn): see ATTRIBUTION.md beside this file.

`digits.gz` holds 1797 images of 64 pixels, row by row, then 1797 labels, one byte each.
"""

import gzip
from importlib import resources
from typing import NamedTuple

import torch

LEVELS = 17  # a pixel is the number of dark cells in a 4x4 patch of the scan, 0 to 16
PIXELS = 64
CLASSES = 10
_IMAGES = 1797


class Digits(NamedTuple):
    """Images are int64 [N, 64] with values in [0, 17); labels are int64 [N] in [0, 10)."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load():
    """The data on the CPU: every fifth image is held out (359), the others train (1438)."""
    raw = gzip.decompress(resources.files(__package__).joinpath("digits.gz").read_bytes())
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    images = values[: _IMAGES * PIXELS].view(_IMAGES, PIXELS)
    labels = values[_IMAGES * PIXELS :]
    held_out = torch.arange(_IMAGES) % 5 == 4
    return Digits(images[~held_out], labels[~held_out], images[held_out], labels[held_out])
