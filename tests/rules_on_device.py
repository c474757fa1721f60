"""The rules of reductions, norms, losses and activations on one device, as hashes.

`python -m tests.rules_on_device cuda` prints JSON; `--compare` runs CPU too and exits 1 at a difference.
"""

import json
import sys

import torch

from carbon_compile.hashing import fingerprint

from .definition import compiled
from .test_activation import CASES
from .test_loss import classes, probability, regression
from .test_norm import by_channel, by_row
from .test_reduction import differentiable, rounded_once, selective


def cases():
    """name -> (function, CPU inputs)."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    found = {
        "differentiable": (differentiable, [draw(5, 37, 6)]),
        "selective": (selective, [draw(5, 37, 6).round()]),
        "long rows": (rounded_once, [draw(3, 5000, 2)]),
        "by_row": (by_row, [draw(6, 5, 16), draw(16), draw(16)]),
        "by_channel": (by_channel, [draw(4, 8, 13, 5), draw(8), draw(8)]),
        "regression": (regression, [draw(7, 5), draw(7, 5)]),
        "probability": (probability, [draw(7, 5), draw(7, 5)]),
        "classes": (classes, [draw(6, 9), draw(2, 4, 3, 5), torch.tensor([0, 2, 5, 8, 2, 1]), torch.arange(30).reshape(2, 3, 5) % 4, draw(9).abs()]),
        **{name: (function, [draw(*s) for s in shapes]) for name, (function, shapes) in CASES.items()},
    }
    return {
        f"{name} {str(dtype).removeprefix('torch.')}": (function, [t.to(dtype).requires_grad_(name != "selective" and i < 3) if t.is_floating_point() else t for i, t in enumerate(inputs)])
        for name, (function, inputs) in found.items()
        for dtype in (torch.float32, torch.bfloat16)
    }


def check(device):
    """{case: hash of outputs and gradients} of every case compiled on `device`."""
    hashes = {}
    for name, (function, inputs) in cases().items():
        on_device = [t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs]
        hashes[name] = fingerprint([t.cpu() for part in compiled(function, on_device) for t in part])
    return hashes


if __name__ == "__main__":
    device = next((a for a in sys.argv[1:] if not a.startswith("-")), "cpu")
    result = check(device)
    print(json.dumps(result, indent=1))
    if "--compare" in sys.argv:
        reference = check("cpu")
        different = [name for name in result if result[name] != reference[name]]
        print(f"{device} and cpu differ in: {', '.join(different)}" if different else f"{device} equals cpu in all {len(result)} cases")
        sys.exit(bool(different))
