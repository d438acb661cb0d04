"""Pace: seconds spent against seconds allowed, and what the difference says about the next plan.

Pure bookkeeping: it is told what was measured and answers with numbers; no clock and no model in here. What a step of
plan S really takes is read as

    step = wait + machine * error(S) * predicted(S)

`wait` for the batch is seen directly. `machine`, how much slower everything runs now than when it was profiled (heat,
other processes), and `error(S)`, how far the time model is off for this plan, cannot be told apart from step times
alone. It matters, because the budget is a share of a *full* step: a slow machine makes the full step slow, too, and
leaves the ratio alone; a model error does not. So now and then a forward pass, which no plan changes, is timed beside
the steps: what they have in common is the machine's, and only what is left is the plan's.

How far that is believed depends on how well such pairs agree with each other, against how far the profile says that it
may be off: on a quiet machine one pair settles it, on one that wobbles by 20% the profile is the better witness.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from elastictrainer.budget import Budget

__all__ = ["Account", "Pace", "Stretch"]

RECENT = 3  # windows that stand for "now"
MEMORY = 32  # windows of the standing plan that are remembered
NOTICEABLE = 0.05  # relative change of step times that is worth another look at the machine
LEAST_NOISE = 0.002  # no two timings agree better than this
LARGEST_REPAYMENT = 0.10  # share of a step's allowance that may go into repaying, or spending, what went before


@dataclass(slots=True)
class Stretch:
    """All steps of one plan. `predicted_s` and `full_s` are computing time a step, by the profile; `samples` are
    logarithms of what timed pairs of step and forward pass said of the plan's error."""

    predicted_s: float
    full_s: float
    steps: int = 0
    spent_s: float = 0.0
    wait_s: float = 0.0
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds of the run so far: as they were, as full steps would have taken, and as the budget allows."""

    spent_s: float
    full_s: float
    allowed_s: float


@dataclass(slots=True)
class Pace:
    """The account of a run."""

    stated: float = 0.0
    """The profile's own error, 95th percentile."""
    reference_s: float | None = None
    """A forward pass when the profile was new; None where none was timed: the machine is then taken as profiled."""
    machine: float = 1.0
    plan: str = ""
    windows: list[float] = field(default_factory=list)
    """Step over prediction, for each window of the standing plan."""
    stretches: dict[str, Stretch] = field(default_factory=dict)
    settled: Stretch = field(default_factory=lambda: Stretch(0.0, 0.0))
    """Steps from before the present profile, valued at its full step."""

    # -- what is seen ------------------------------------------------------------------------------------------------

    def stand(self, plan: str, *, predicted_s: float, full_s: float) -> None:
        """From now on steps are of this plan."""
        if plan != self.plan:
            self.windows = []
        self.plan = plan
        stretch = self.stretches.setdefault(plan, Stretch(predicted_s, full_s))
        stretch.predicted_s, stretch.full_s = predicted_s, full_s

    def add(self, steps: int, elapsed_s: float, wait_s: float, *, settling: bool = False) -> None:
        """Account for a window of steps.

        `settling`: the window paid for things that happen once after a new plan (allocator, kernel choice,
        compilation); it counts as spent but says nothing about the plan. Nor does one that was all waiting or pause.
        """
        stretch = self.stretches[self.plan]
        stretch.steps += steps
        stretch.spent_s += elapsed_s
        stretch.wait_s += wait_s
        if settling or elapsed_s <= wait_s:
            return
        self.windows = [*self.windows, (elapsed_s - wait_s) / steps / stretch.predicted_s][-MEMORY:]
        self._follow_machine()

    def timed_forward(self, seconds: float) -> None:
        """A forward pass took so long, just now. The first one after a profile is what later ones are measured by."""
        if self.reference_s is None:
            self.reference_s = seconds
        elif len(self.windows) >= RECENT and seconds > 0:
            pair = math.log(median(self.windows[-RECENT:]) * self.reference_s / seconds)
            self.stretches[self.plan].samples.append(pair)
            self._follow_machine()

    def _follow_machine(self) -> None:
        if self.reference_s is not None and len(self.windows) >= RECENT:
            self.machine = median(self.windows[-RECENT:]) / self.error(self.plan)

    def renew(self, full_s: float, *, stated: float) -> None:
        """A new profile: what the old one got wrong says nothing about this one, whose full step values all so far."""
        for stretch in self.stretches.values():
            self.settled.steps += stretch.steps
            self.settled.spent_s += stretch.spent_s
            self.settled.wait_s += stretch.wait_s
        self.settled.full_s = full_s
        self.stretches, self.windows, self.plan = {}, [], ""
        self.machine, self.reference_s, self.stated = 1.0, None, stated

    # -- what follows ------------------------------------------------------------------------------------------------

    def error(self, plan: str | None = None) -> float:
        """What a step of this plan is believed to take, over its prediction, the machine apart.

        Pairs are shrunk by how noisy they are against how far the profile may be off: first all plans' together, which
        is also what is believed of a plan never run, then the plan's own.
        """
        pairs = [sample for stretch in self.stretches.values() for sample in stretch.samples]
        if not pairs:
            return 1.0
        common = self._trust(len(pairs)) * fmean(pairs)
        own = self.stretches[plan].samples if plan is not None and plan in self.stretches else []
        return math.exp(common + self._trust(len(own)) * (fmean(own) - common) if own else common)

    def _trust(self, pairs: int) -> float:
        # One more than their mean's variance: the reference that all of them share is no better than they are.
        believed = max(self.stated / 2, 0.01) ** 2
        return believed / (believed + self.noise**2 * (1 + 1 / pairs)) if pairs else 0.0

    @property
    def noise(self) -> float:
        """How far two pairs of one plan differ, as a share; before there are enough, how far its windows do."""
        apart = [
            abs(sample - fmean(stretch.samples))
            for stretch in self.stretches.values()
            if len(stretch.samples) > 1
            for sample in stretch.samples
        ]
        return max(LEAST_NOISE, 1.5 * median(apart) if len(apart) > 3 else self.scatter)

    @property
    def scatter(self) -> float:
        """How far the standing plan's windows differ from each other, as a share."""
        if len(self.windows) < RECENT:
            return 0.0
        middle = median(self.windows)
        return 1.5 * median(abs(window - middle) for window in self.windows) / middle

    @property
    def changed(self) -> bool:
        """The latest steps differ from the plan's earlier ones by more than those do by themselves."""
        if len(self.windows) < 2 * RECENT:
            return False
        before, now = median(self.windows[:-RECENT]), median(self.windows[-RECENT:])
        return abs(now / before - 1) > max(NOTICEABLE, 2.5 * self.scatter)

    def drifted(self) -> bool:
        """Two pairs at least say that the plan is off by more than twice the stated error, 5% and the noise."""
        own = self.stretches[self.plan].samples if self.plan in self.stretches else []
        return len(own) >= 2 and abs(fmean(own)) > 2 * self.stated + NOTICEABLE + 2 * self.noise

    def account(self, budget: Budget | None) -> Account:
        """The run so far. The machine's speed of the moment is in the steps themselves: what a plan is believed to take
        of a full step is what they took of it."""
        spent = full = allowed = 0.0
        for plan, stretch in self.stretches.items():
            computed = stretch.spent_s - stretch.wait_s
            if self.reference_s is None:
                whole = stretch.steps * stretch.full_s
            else:
                whole = computed / (self.error(plan) * stretch.predicted_s) * stretch.full_s
            spent, full = spent + stretch.spent_s, full + whole + stretch.wait_s
        spent += self.settled.spent_s
        full += self.settled.steps * self.settled.full_s + self.settled.wait_s
        if budget is None or budget.kind == "ratio":
            allowed = full * (budget.value if budget else 1.0)
        else:
            allowed = self.steps * budget.value
        return Account(spent, full, allowed)

    @property
    def steps(self) -> int:
        return self.settled.steps + sum(stretch.steps for stretch in self.stretches.values())

    @property
    def ratio(self) -> float | None:
        """Share of full training so far."""
        account = self.account(None)
        return account.spent_s / account.full_s if account.full_s > 0 else None

    def target_s(self, allowed_s: float, *, budget: Budget, horizon: int) -> float:
        """What a step may take from now on so that the account is even after `horizon` steps."""
        account = self.account(budget)
        owed = (account.spent_s - account.allowed_s) / max(horizon, 1)
        most = LARGEST_REPAYMENT * allowed_s
        return allowed_s - min(max(owed, -most), most)

    def excess(self, *, step_s: float, allowed_s: float, full_s: float, budget: Budget, horizon: int) -> float:
        """By how much, as a share of full training, the run will be over its budget after `horizon` such steps."""
        account = self.account(budget)
        over = account.spent_s - account.allowed_s + horizon * (step_s - allowed_s)
        return over / (account.full_s + horizon * full_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Pace:
        stretches = {plan: Stretch(**stretch) for plan, stretch in data["stretches"].items()}
        return cls(**{**data, "stretches": stretches, "settled": Stretch(**data["settled"])})
