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
FIRST_CHECK = 3  # windows of a plan until stock is taken, then three times as many, and so on
SUSPICION = 5  # windows between two timed forward passes for a suspicion, doubled each time
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
        self._profiles = 0
        self._windows = 0  # since the plan stands
        self._next_check, self._next_suspicion = FIRST_CHECK, SUSPICION
        self._checking = False

    # -- what is seen ------------------------------------------------------------------------------------------------

    def saw_wait(self, seconds: float) -> None:
        """Until steps have been timed, the batches looked at ahead are all that is known of the loader."""
        if self.pace.steps == 0:
            self.wait_s = seconds

    def profiled(self, profile: Profile, *, taken: bool) -> None:
        """These are the prices from now on; `taken`: in this run, not given from outside."""
        self._profiles += taken
        self.pace.renew(profile.full_step_s - profile.data_s, stated=profile.error.p95)

    def stand(self, profile: Profile, plan: Plan) -> None:
        if plan.id != self.pace.plan:
            self._windows, self._next_check, self._next_suspicion = 0, FIRST_CHECK, SUSPICION
            self.window.settling = SETTLING_STEPS
        predicted_s, full_s = self._compute_s(profile, plan)
        self.pace.stand(plan.id, predicted_s=predicted_s, full_s=full_s)

    def _compute_s(self, profile: Profile, plan: Plan) -> tuple[float, float]:
        """A step of the plan and a full one on the machine as profiled, without what is waited for apart."""
        prices = self._waiting(profile)
        machine = self.pace.machine
        return (prices.step_s(plan.trainable) - prices.data_s) / machine, (prices.full_step_s - prices.data_s) / machine

    def close(self, now: float) -> tuple[int, float]:
        """End the window and open the next; its steps and their seconds."""
        window = self.window
        assert window.start is not None
        steps, wait_s = window.steps, 0.0 if self.overlapping else window.wait_s
        elapsed_s = max(now - window.start - window.excluded_s, 0.0)
        self.pace.add(steps, elapsed_s, wait_s, settling=bool(window.settling))
        if not window.settling:
            self._windows += 1
            self.wait_s += 0.25 * (window.wait_s / steps - self.wait_s)
        window.settling = 0
        window.open(now)
        return steps, elapsed_s

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

    def takes_stock(self) -> bool:
        """Whether to time a forward pass after this window and ask what follows from it.

        After 3, 9, 27, ... windows of a plan, so that each answer rests on three times as much as the one before; after
        every 200; and when the plan's steps have changed.
        """
        self._checking = self._windows >= self._next_check
        if self._checking:
            self._next_check *= 3
            return True
        if self.pace.changed and self._windows >= self._next_suspicion:
            self._next_suspicion = 2 * self._windows
            return True
        return self._windows % 200 == 199

    @property
    def wants_profile(self) -> bool:
        return self._profiles < MOST_PROFILES and self.pace.drifted()

    def wants_trim(self, profile: Profile, plan: Plan, *, horizon: int) -> bool:
        """Whether the run, going on as it does, would miss its budget by more than is let pass."""
        if not self._checking or self.budget is None or horizon < 2 * self.window.length:
            return False
        prices = self.prices(profile)
        excess = self.pace.excess(
            step_s=prices.data_s + self.pace.error(plan.id) * (prices.step_s(plan.trainable) - prices.data_s),
            allowed_s=self.budget.seconds(prices.full_step_s),
            full_s=prices.full_step_s,
            budget=self.budget,
            horizon=horizon,
        )
        return excess > OVER or excess < -UNDER

    def choose(self, profile: Profile, plan: Callable[[Profile, Budget | None], Plan], *, horizon: int) -> Plan:
        """Ask for a plan whose steps, by all that is known, bring the run to its budget by the horizon."""
        prices = self.prices(profile)
        if not self.enabled or self.budget is None or self.pace.steps == 0:
            return plan(prices, self.budget)
        target_s = self.pace.target_s(self.budget.seconds(prices.full_step_s), budget=self.budget, horizon=horizon)
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

    def state_dict(self, steps: int = 0, elapsed_s: float = 0.0) -> dict[str, Any]:
        """`steps` and their seconds are those of the open window, which is not in the account yet."""
        pace = Pace.from_dict(self.pace.to_dict())
        if steps:
            pace.add(steps, elapsed_s, 0.0 if self.overlapping else self.window.wait_s, settling=True)
        return {
            "pace": pace.to_dict(),
            "steps_per_epoch": self.steps_per_epoch,
            "wait_s": self.wait_s,
            "profiles": self._profiles,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pace = Pace.from_dict(state["pace"])
        self.steps_per_epoch, self.wait_s = state["steps_per_epoch"], state["wait_s"]
        self._profiles = state["profiles"]
