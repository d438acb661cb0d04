"""Interval: how long a plan stands before the next probe, and where in it a loop is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from elastictrainer.errors import ConfigError

__all__ = ["SIMILAR", "Interval", "Place", "similarity"]

SIMILAR = 0.8  # cosine similarity of scores above which "auto" lets a plan stand (ElasticTrainer section 3.2, Fig. 7)


@dataclass(frozen=True, slots=True)
class Interval:
    """So many epochs or steps, or `"auto"`: asked every epoch, by the likeness of the scores.

    >>> str(Interval.parse(3)), str(Interval.parse("500steps")), str(Interval.parse("auto"))
    ('3epochs', '500steps', 'auto')
    """

    kind: Literal["epochs", "steps", "auto"]
    value: float = 1

    @classmethod
    def parse(cls, text: str | float | Interval) -> Interval:
        """Read an interval; a bare number means epochs, and a fraction of an epoch is fine."""
        if isinstance(text, Interval):
            return text
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(epochs?|steps?)?", str(text).strip().lower())
        if str(text).strip().lower() == "auto":
            return cls("auto")
        if isinstance(text, bool) or match is None or not float(match[1]) > 0:
            raise ConfigError(f"interval {text!r} cannot be read; write epochs (3), steps ('500steps') or 'auto'")
        value = float(match[1])
        if (match[2] or "epochs").startswith("step"):
            if value != int(value):
                raise ConfigError(f"interval {text!r} is not a whole number of steps")
            return cls("steps", int(value))
        return cls("epochs", value)

    def steps(self, steps_per_epoch: int) -> int:
        """The interval in steps."""
        return int(self.value) if self.kind == "steps" else max(1, round(self.value * steps_per_epoch))

    def __str__(self) -> str:
        return "auto" if self.kind == "auto" else f"{self.value:g}{self.kind}"


@dataclass(slots=True)
class Place:
    """Where a loop stands: epochs and steps that it has made, and those at which it last planned and probed."""

    epochs: int = 0
    steps: int = 0
    epoch_step: int = 0
    checked_epoch: int = -1
    plan_epoch: int = 0
    plan_step: int = 0

    def step(self) -> None:
        self.steps += 1
        self.epoch_step += 1

    def end_epoch(self) -> None:
        self.epochs, self.epoch_step = self.epochs + 1, 0

    def checked(self) -> None:
        """A probe is made here."""
        self.checked_epoch = self.epochs

    def planned(self) -> None:
        """A new plan stands from here on."""
        self.plan_epoch, self.plan_step = self.epochs, self.steps

    def is_due(self, interval: Interval, steps_per_epoch: int) -> bool:
        """Whether the interval of the plan that stands is over."""
        new_epoch = self.epoch_step == 0 and self.checked_epoch != self.epochs
        if interval.kind == "auto":
            return new_epoch
        if interval.kind == "epochs" and interval.value == int(interval.value):
            return new_epoch and self.epochs - self.plan_epoch >= interval.value
        return self.steps - self.plan_step >= interval.steps(steps_per_epoch)

    def left(self, interval: Interval, steps_per_epoch: int, *, total: int | None) -> int:
        """Steps until the plan's interval, or the run, is over; at least one."""
        if interval.kind == "auto":
            left = steps_per_epoch - self.epoch_step
        else:
            left = interval.steps(steps_per_epoch) - (self.steps - self.plan_step)
        return max(1, left if total is None else min(left, total - self.steps))

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Place:
        """From a dict that may hold more."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def similarity(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """Cosine similarity of two sets of scores; a tensor missing from one counts as 0 there.

    >>> similarity({"w": 1.0, "b": 0.0}, {"w": 2.0, "b": 0.0})
    1.0
    """
    dot = sum(value * b.get(name, 0.0) for name, value in a.items())
    norm = math.sqrt(sum(v * v for v in a.values())) * math.sqrt(sum(v * v for v in b.values()))
    if norm == 0:
        return 1.0 if not any(a.values()) and not any(b.values()) else 0.0
    return dot / norm
