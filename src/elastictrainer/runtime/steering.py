"""Steering: from measured windows of steps to the budget of the next plan. Arithmetic only, no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastictrainer.budget import Budget
from elastictrainer.errors import BudgetError
from elastictrainer.plan import Plan
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime.pace import Pace

__all__ = ["Steering", "Window"]

SETTLING_STEPS = 3  # after a new plan: allocator, kernel choice, compilation
OVER, UNDER = 0.005, 0.01  # projected excess over, or shortfall under, the budget that is worth another selection
MOST_PROFILES = 2  # a profile that disagrees with the steps twice is right: the loop does more than the step
EAGER = 3  # windows between two timed forward passes, doubled each time that one shows nothing
UNKNOWN_EPOCH = 1000  # steps in an epoch of a loader that does not know its length


class Window:
    """A run of consecutive steps timed as one, so that asynchronous devices are waited for once a window."""

    def __init__(self, length: int) -> None:
        self.length, self.steps = length, 0
        self.start: float | None = None
        self.wait_s = self.excluded_s = 0.0
        self.settling = SETTLING_STEPS

    def open(self, now: float) -> None:
        self.start, self.steps, self.wait_s, self.excluded_s = now, 0, 0.0, 0.0

    def shut(self) -> None:
        self.start = None

    def step(self) -> None:
        self.steps += 1

    def waited(self, seconds: float, *, already_excluded: bool) -> None:
        """The step's batch took so long; one that was looked at ahead was waited for outside the window."""
        self.wait_s += seconds
        if already_excluded:
            self.excluded_s -= seconds

    def exclude(self, seconds: float) -> None:
        if self.start is not None:
            self.excluded_s += seconds

    @property
    def full(self) -> bool:
        return self.steps >= (self.settling or self.length)


class Steering:
    """What the next plan may cost, and whether it is worth choosing one now.

    Args:
        enabled: off, it only keeps the account, and every plan gets the budget as asked.
        timed: prices may include what has been timed in this run; off, they are the profile's and nothing else.
        overlapping: the device works while the host waits for data, so waiting lengthens the host's lane only.
    """

    def __init__(
        self, *, enabled: bool, timed: bool, budget: Budget | None, overlapping: bool, total_steps: int | None
    ) -> None:
        self.enabled, self.timed, self.budget = enabled, timed, budget
        self.overlapping, self.total_steps = overlapping, total_steps
        self.pace = Pace()
        self.window = Window(20 if overlapping else 5)  # waiting for a device costs it a launch; a CPU's clock is free
        self.steps_per_epoch = UNKNOWN_EPOCH
        self.wait_s = 0.0
        self.reference_forward_s: float | None = None
        self._profiles = 0
        self._windows = 0  # since the plan stands
        self._next_check = 0
        self._next_calibration = 0
        self._patience = EAGER

    # -- what is seen ------------------------------------------------------------------------------------------------

    def saw_wait(self, seconds: float) -> None:
        """Until steps have been timed, the batches looked at ahead are all that is known of the loader."""
        if self.pace.steps == 0:
            self.wait_s = seconds

    def profiled(self, before: Profile | None, now: Profile) -> None:
        """A profile was taken, in the place of one or as the first."""
        self._profiles += 1
        self.reference_forward_s = None
        old_s = before.full_step_s * self.pace.machine if before is not None else now.full_step_s
        self.pace.forget_errors(now.full_step_s / old_s)

    def timed_forward(self, seconds: float) -> None:
        """The first timing after a profile is what the machine's speed is measured against from then on."""
        if self.reference_forward_s is None or self.reference_forward_s <= 0:
            self.reference_forward_s = seconds
            return
        machine = self.pace.machine
        self.pace.recalibrate(seconds / self.reference_forward_s)
        # A suspicion that a timed forward pass did not bear out is followed less eagerly the next time.
        self._patience = min(64, 2 * self._patience) if self.pace.machine == machine else EAGER
        self._next_calibration = self._windows + self._patience

    def stand(self, profile: Profile, plan: Plan) -> None:
        prices = self._waiting(profile)
        compute_s = prices.step_s(plan.trainable) - prices.data_s
        if plan.id != self.pace.plan:
            self._windows, self._next_check, self._next_calibration = 0, 3, 0
            self.window.settling = SETTLING_STEPS
        self.pace.stand(plan.id, compute_s / self.pace.machine)

    def close(self, now: float, profile: Profile) -> tuple[int, float, float]:
        """End the window and open the next; its steps, their seconds, and what full ones would have taken."""
        window, pace = self.window, self.pace
        assert window.start is not None
        steps, wait_s = window.steps, 0.0 if self.overlapping else window.wait_s
        elapsed_s = max(now - window.start - window.excluded_s, 0.0)
        before = pace.full_s
        if not window.settling:
            self.wait_s += 0.25 * (window.wait_s / steps - self.wait_s)
        prices = self._waiting(profile)
        full_s = (prices.full_step_s - prices.data_s) / pace.machine
        pace.add(steps, elapsed_s, wait_s, full_s=full_s, budget=self.budget, settling=bool(window.settling))
        if not window.settling:
            self._windows += 1
        window.settling = 0
        window.open(now)
        return steps, elapsed_s, pace.full_s - before

    # -- what follows ------------------------------------------------------------------------------------------------

    def prices(self, profile: Profile) -> Profile:
        """What decisions rest on: the profile on the machine as it is now, waiting for data included."""
        return self._waiting(profile) if self.timed else profile

    def _waiting(self, profile: Profile) -> Profile:
        now = profile.scaled(self.pace.machine)
        if not self.overlapping:
            return now.with_data(self.wait_s)
        host = max(range(len(now.lanes)), key=lambda i: now.lanes[i].name == "launch")
        lane = replace(now.lanes[host], overhead_s=now.lanes[host].overhead_s + self.wait_s)
        return replace(now, lanes=(*now.lanes[:host], lane, *now.lanes[host + 1 :]))

    @property
    def wants_calibration(self) -> bool:
        return self.pace.changed and self._windows >= self._next_calibration

    def wants_profile(self, stated_error: float) -> bool:
        return self._profiles < MOST_PROFILES and self._windows >= 6 and self.pace.drifted(stated_error)

    def wants_trim(self, profile: Profile, plan: Plan, *, horizon: int) -> bool:
        """Asked after 3, 9, 27, ... windows of a plan: each answer rests on three times as much as the one before."""
        if self.budget is None or self._windows < self._next_check or horizon < 2 * self.window.length:
            return False
        self._next_check *= 3
        prices = self.prices(profile)
        excess = self.pace.excess(
            step_s=prices.data_s + self.pace.error(plan.id) * (prices.step_s(plan.trainable) - prices.data_s),
            allowed_s=self.budget.seconds(prices.full_step_s),
            full_s=prices.full_step_s,
            horizon=horizon,
        )
        return excess > OVER or excess < -UNDER

    def choose(self, profile: Profile, plan: Callable[[Profile, Budget | None], Plan], *, horizon: int) -> Plan:
        """Ask for a plan whose steps, by all that is known, bring the run to its budget by the horizon."""
        prices = self.prices(profile)
        if not self.enabled or self.budget is None or self.pace.steps == 0:
            return plan(prices, self.budget)
        target_s = self.pace.target_s(self.budget.seconds(prices.full_step_s), horizon=horizon)
        error = self.pace.error()
        while True:
            limit_s = prices.data_s + (target_s - prices.data_s) / error
            try:
                found = plan(prices, Budget("seconds", max(limit_s, 1e-12)))
            except BudgetError as refusal:
                # What was asked is feasible, or the first plan would have been refused; the corrected budget is not.
                return plan(prices, Budget("seconds", refusal.least * (1 + 1e-9)) if refusal.least else self.budget)
            known = self.pace.error(found.id)
            if known <= error * (1 + OVER):
                return found
            error = known  # this very plan is known to be dearer than plans in general: ask again with that in mind

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "pace": self.pace.to_dict(),
            "steps_per_epoch": self.steps_per_epoch,
            "wait_s": self.wait_s,
            "reference_forward_s": self.reference_forward_s,
            "profiles": self._profiles,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pace = Pace.from_dict(state["pace"])
        self.steps_per_epoch, self.wait_s = state["steps_per_epoch"], state["wait_s"]
        self.reference_forward_s, self._profiles = state["reference_forward_s"], state["profiles"]
