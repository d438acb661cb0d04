"""A cosine over time instead of steps: for runs that end when their time is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["TimedCosine"]


class TimedCosine:
    """Each param group's learning rate goes from what it was to zero along a half cosine of `progress()`, 0 to 1.

    Steps that turn out dearer or cheaper than predicted change how far a step goes along it, not where it ends.
    """

    def __init__(self, optimizer: Optimizer, progress: Callable[[], float]) -> None:
        self.optimizer, self.progress = optimizer, progress
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.first = [float(group["initial_lr"]) for group in optimizer.param_groups]

    def step(self) -> None:
        share = 0.5 * (1 + math.cos(math.pi * min(max(self.progress(), 0.0), 1.0)))
        for group, first in zip(self.optimizer.param_groups, self.first):
            group["lr"] = first * share

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self.first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = list(state["first"])
