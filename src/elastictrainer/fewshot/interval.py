"""The mean of some measurements and how sure of it one may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Mean"]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and the half-width of its 95% interval, `1.96 s / sqrt(n)`, as few-shot papers state it.

    >>> str(Mean.of([0.5, 0.7, 0.6, 0.6]))
    '60.0% +- 8.0 (4 episodes)'
    """

    mean: float
    half: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        mean = math.fsum(values) / len(values)
        if len(values) < 2:
            return cls(mean, None, len(values))
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean, 1.96 * math.sqrt(variance / len(values)), len(values))

    def __str__(self) -> str:
        spread = "" if self.half is None else f" +- {100 * self.half:.1f}"
        return f"{self.mean:.1%}{spread} ({self.count} episode{'s' if self.count != 1 else ''})"
