"""Pace: seconds spent against seconds allowed, and what the difference says about the next plan.

Pure bookkeeping: it is told what was measured and answers with numbers; no clock and no model in here. What a step of
plan S really takes is read as

    step = wait + machine * error(S) * predicted(S)

`wait` for the batch is seen directly. `machine`, how much slower everything runs than when it was profiled (heat, other
processes), and `error(S)`, how far the time model is off for this plan, cannot be told apart from step times alone: a
timed forward pass, which no plan changes, separates them (`recalibrate`). It matters because the budget is a share of a
*full* step: a slow machine makes the full step slow too and leaves the ratio alone; a model error does not.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean, median
from typing import Any

from elastictrainer.budget import Budget

__all__ = ["Pace"]

RECENT = 3  # windows that must agree before anything is concluded from them
MEMORY = 32  # windows of the standing plan that its error is the median of
NOTICEABLE = 0.05  # relative change of step or forward time below which the machine is held to be the same
LARGEST_REPAYMENT = (
    0.10  # share of a step's allowance that may go into repaying, or spending, earlier steps' difference
)


@dataclass(slots=True)
class Pace:
    """The account of a run. `full_s` is what the same steps would have taken with everything trained, at the machine's
    speed of the moment; `spent_s / full_s` is therefore the run's measured ratio."""

    steps: int = 0
    spent_s: float = 0.0
    full_s: float = 0.0
    allowed_s: float = 0.0
    machine: float = 1.0
    plan: str = ""
    predicted_s: float = 0.0
    windows: list[float] = field(default_factory=list)
    window_full_s: list[float] = field(default_factory=list)
    share: float = 1.0
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Measured share of full training so far."""
        return self.spent_s / self.full_s if self.full_s > 0 else None

    def stand(self, plan: str, predicted_s: float) -> None:
        """From now on steps are of this plan, predicted to compute for so long on the machine as profiled."""
        if plan != self.plan:
            self.windows, self.window_full_s = [], []
        self.plan, self.predicted_s = plan, predicted_s

    def forget_errors(self, full: float = 1.0) -> None:
        """After a new profile: what the old one got wrong says nothing about this one.

        `full`: a full step by the new profile over one by the old, by which all accounts so far were off.
        """
        self.full_s, self.allowed_s = self.full_s * full, self.allowed_s * (full if self.share else 1.0)
        self.windows, self.window_full_s, self.errors, self.machine = [], [], {}, 1.0

    def add(
        self,
        steps: int,
        elapsed_s: float,
        wait_s: float,
        *,
        full_s: float,
        budget: Budget | None,
        settling: bool = False,
    ) -> None:
        """Account for a window of steps; `full_s` is a full step's compute as profiled.

        `settling`: the window paid for things that happen once after a new plan (allocator, kernel choice,
        compilation); it counts as spent but says nothing about the plan.
        """
        full = self.machine * full_s + wait_s / steps
        self.steps += steps
        self.spent_s += elapsed_s
        self.full_s += full * steps
        self.allowed_s += (budget.seconds(full) if budget else full) * steps
        if settling or self.predicted_s <= 0:
            return
        compute = max(elapsed_s - wait_s, 0.0) / steps
        self.windows = [*self.windows, compute / (self.machine * self.predicted_s)][-MEMORY:]
        self.window_full_s = [*self.window_full_s, steps * self.machine * full_s][-MEMORY:]
        self.share = 1.0 if budget is None else budget.value if budget.kind == "ratio" else 0.0
        if len(self.windows) >= RECENT:
            self.errors[self.plan] = median(self.windows)

    def error(self, plan: str | None = None) -> float:
        """Measured over predicted for this plan; for one never run, what the plans so far have in common."""
        if plan in self.errors:
            return self.errors[plan]
        return geometric_mean(list(self.errors.values())[-8:]) if self.errors else 1.0

    @property
    def changed(self) -> bool:
        """The standing plan's latest steps differ from its earlier ones: worth a timed forward pass."""
        if len(self.windows) < 2 * RECENT:
            return False
        before, now = median(self.windows[:-RECENT]), median(self.windows[-RECENT:])
        return abs(now / before - 1) > NOTICEABLE

    def recalibrate(self, forward: float) -> None:
        """Told that a forward pass now takes `forward` times what it took when profiled, decide what has changed.

        A single reading is noisy, and everything that follows rests on it, so the machine is held to have changed only
        if the steps say so too: by the same turn, or, where it came slowly, by an error of the plan that this explains.
        The steps then say how much, where the two roughly agree, since there are many of them.
        """
        shift = forward / self.machine
        steps = self._step_shift()
        if self._confirmed(shift, steps):
            factor = steps if steps is not None and abs(steps / shift - 1) < 2 * NOTICEABLE else shift
            self.machine *= factor
            if len(self.windows) >= RECENT:
                self._revalue(factor)
        elif self.changed:  # the plan itself has become dearer or cheaper: only its latest windows are true
            self.windows, self.window_full_s = self.windows[-RECENT:], self.window_full_s[-RECENT:]
        if len(self.windows) >= RECENT:
            self.errors[self.plan] = median(self.windows)

    def _confirmed(self, shift: float, steps: float | None) -> bool:
        if abs(shift - 1) <= NOTICEABLE:
            return False
        if steps is not None and (steps - 1) * (shift - 1) > 0 and abs(steps - 1) > NOTICEABLE / 2:
            return True
        if abs(shift - 1) <= 2 * NOTICEABLE:
            return False
        error = median(self.windows) if len(self.windows) >= RECENT else shift
        return abs(math.log(error / shift)) < abs(math.log(error))

    def _revalue(self, factor: float) -> None:
        """The windows since the machine changed were accounted at its old speed: a full step was slower, too."""
        now = median(self.windows[-RECENT:])
        first = len(self.windows) - RECENT
        while first > 0 and abs(self.windows[first - 1] / now - 1) <= NOTICEABLE:
            first -= 1
        late_s = (factor - 1) * sum(self.window_full_s[first:])
        self.full_s += late_s
        self.allowed_s += self.share * late_s
        self.windows[first:] = [w / factor for w in self.windows[first:]]
        self.window_full_s[first:] = [w * factor for w in self.window_full_s[first:]]

    def _step_shift(self) -> float | None:
        if len(self.windows) < 2 * RECENT:
            return None
        return median(self.windows[-RECENT:]) / median(self.windows[:-RECENT])

    def drifted(self, stated: float) -> bool:
        """The plan's steps are off by more than twice the profile's stated error (95th percentile) and 5% more."""
        return len(self.windows) >= 2 * RECENT and abs(median(self.windows) - 1) > 2 * stated + NOTICEABLE

    def target_s(self, allowed_s: float, *, horizon: int) -> float:
        """What a step may take from now on so that the account is even after `horizon` steps."""
        owed = (self.spent_s - self.allowed_s) / max(horizon, 1)
        most = LARGEST_REPAYMENT * allowed_s
        return allowed_s - min(max(owed, -most), most)

    def excess(self, *, step_s: float, allowed_s: float, full_s: float, horizon: int) -> float:
        """By how much, as a share of full training, the run will be over its budget after `horizon` such steps."""
        over = self.spent_s - self.allowed_s + horizon * (step_s - allowed_s)
        return over / (self.full_s + horizon * full_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pace:
        return cls(**data)
