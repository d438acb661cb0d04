"""The losses of the latest steps, kept on the device and looked at once in a while."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from elastictrainer.errors import TrainingError

__all__ = ["CHECK_EVERY", "Losses"]

CHECK_EVERY = 50  # steps between looks on an accelerator; on a CPU every step is looked at, since it costs nothing


class Losses:
    """Reading a loss on the host makes it wait for the device. So losses are stored there, and `check` reads a stretch
    of them at once: every 50 steps on an accelerator, every step on a CPU, before every checkpoint and at each epoch's
    end. A loss that is not finite is found then, by its own step, before anything it spoilt can be saved."""

    def __init__(self, device: torch.device) -> None:
        self._stored = torch.zeros(1 if device.type == "cpu" else CHECK_EVERY, device=device)
        self._waiting = 0
        self.total, self.count = 0.0, 0
        self.latest: float | None = None

    def add(self, loss: Tensor, *, step: int) -> None:
        """Keep the loss of this step; look at all that wait when there is no more room.

        Raises:
            TrainingError: one of them is not finite; its step is named.
        """
        self._stored[self._waiting] = loss.detach()
        self._waiting += 1
        if self._waiting == len(self._stored):
            self.check(step=step)

    def check(self, *, step: int) -> None:
        """Look at the losses that wait, of which the last is that of `step`."""
        values = self._stored[: self._waiting].tolist()
        first = step - len(values) + 1
        self._waiting = 0
        for offset, value in enumerate(values):
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss is {value} at step {first + offset}; a lower learning rate or clip= may help"
                )
            self.total += value
            self.count += 1
            self.latest = value

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def reset(self) -> None:
        self.total, self.count = 0.0, 0
