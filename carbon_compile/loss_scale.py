"""Loss scaling for float16: gradients times a power of two, so that small ones don't vanish.

Products by powers of two are exact, unless a gradient leaves the range of its dtype, and whether all
gradients are finite is the same in any order. So a scaled step has the same bits everywhere, and so
has the scale of the next one.
"""

import torch

from . import host

LARGEST, FIRST, SMALLEST = 2.0**24, 2.0**16, 1.0
# Steps in a row with finite gradients before the scale is doubled, as in torch.amp.GradScaler.
INTERVAL = 2000


class LossScale:
    """The scale, how many steps in a row were `good` at it, and how many were `skipped` in all.

    A step whose gradients aren't finite is skipped, and halves the scale.
    """

    def __init__(self):
        self.scale, self.good, self.skipped = FIRST, 0, 0

    def start(self, loss: torch.Tensor) -> torch.Tensor:
        """What the backward pass of `loss` starts from instead of 1, of its shape and dtype."""
        return torch.full_like(loss, self.scale)

    def unscale(self, gradients: list[torch.Tensor]) -> bool:
        """Divide the gradients by the scale in place; whether all are finite. The host waits for them."""
        return host.unscale(gradients, 1 / self.scale)

    @property
    def exhausted(self) -> bool:
        """Whether gradients that aren't finite can't be helped by a smaller scale."""
        return self.scale <= SMALLEST

    def update(self, finite: bool) -> None:
        """Choose the scale of the next step."""
        if not finite:
            self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1
            return
        self.good += 1
        if self.good == INTERVAL:
            self.scale, self.good = min(2 * self.scale, LARGEST), 0

    def state_dict(self) -> dict:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict) -> None:
        self.scale, self.good, self.skipped = state["scale"], state["good"], state["skipped"]
