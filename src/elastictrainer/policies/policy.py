"""Policy: something that yields plans over time. A small frozen entry around one pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from elastictrainer.budget import Budget
from elastictrainer.errors import ConfigError
from elastictrainer.plan import Plan
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection import Pin

__all__ = ["Planner", "Policy"]


class Planner(Protocol):
    """The pure part of a policy: prices and scores in, a plan out."""

    def __call__(
        self,
        profile: Profile,
        scores: Mapping[str, float] | None,
        *,
        budget: str | float | Budget | None,
        pin: Pin,
        memory: str | int | None,
    ) -> Plan: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """What decides which tensors train.

    `needs_scores`: the planner is handed importance, so the run probes. `replans`: it is asked again at every interval;
    otherwise its first plan stands for the whole run. `within_budget`: it keeps the time budget; otherwise it costs
    what it costs and the budget is not even looked at. `importance` is set where the policy is defined by one.
    `shrinks`: the network loses channels while it trains (`runtime/prunetrain.py`).
    """

    name: str
    description: str
    paper: str
    planner: Planner
    needs_scores: bool = False
    replans: bool = False
    within_budget: bool = False
    importance: str | None = None
    shrinks: bool = False

    def plan(
        self,
        profile: Profile,
        scores: Mapping[str, float] | None,
        *,
        budget: str | float | Budget | None,
        pin: Pin = "head",
        memory: str | int | None = None,
    ) -> Plan:
        """The plan for these prices and scores. Pure: nothing is measured and no model is touched.

        Raises:
            BudgetError: nothing fits; it states the least budget that would.
            ConfigError: the policy needs scores and was given none.
        """
        if self.needs_scores and scores is None:
            raise ConfigError(f"policy {self.name!r} plans by importance and was given no scores; probe first")
        return self.planner(profile, scores, budget=budget, pin=pin, memory=memory)
