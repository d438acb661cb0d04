"""The run-level choice: what to train, and how many passes to make with it, in the time that is left.

ElasticTrainer caps the cost of a step and fixes the number of steps. A budget that people mean is the run's, and then
the two trade off: half as dear a step is twice as many steps. So the candidates are numbers of passes P. For each, the
solver finds the best set of tensors whose steps fit `time left / (P * steps per pass)`, under prices in which what lies
below the deepest trained tensor is computed once a view and kept; training everything, with a new view every time, is
always a candidate, too. Among them the one of the largest

    worth = sum of importance * (1 - exp(-P / SATURATION))

is taken: importance says how fast the loss falls at first, and what a set of tensors can learn is used up after a few
passes. Pure: prices and scores in, a stage out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastictrainer.budget import Budget
from elastictrainer.errors import BudgetError
from elastictrainer.plan import Plan
from elastictrainer.policies.policy import Policy
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection import Pin, select

__all__ = ["ADAPTIVE", "Keeping", "Stage", "choose_stage", "head_stage", "worth"]

PASSES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
SATURATION = 3.0
PASSES_A_VIEW = 1.0  # that a view must be good for before another is made; 4 were tried without gain


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is known of keeping features: so many views of a sample at most, and what computing one costs beside the
    same part of a training step's forward pass (larger batches, folded norms, no autograd: below 1)."""

    views: int
    rebuild: float = 1.0

    def views_in(self, passes: float) -> int:
        """How many views there is any use for in so many passes."""
        return max(1, min(self.views, int(passes / PASSES_A_VIEW)))

    def prices(self, profile: Profile, passes: float) -> Profile:
        """The prices of a step when the prefix is kept over so many passes."""
        return profile.with_kept_prefix(rebuilt=self.rebuild * self.views_in(passes) / passes)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of a run: a plan, whether its prefix is kept, how many passes the time allows, what a step costs with
    the building of what is kept spread over them, and how many views of a sample are kept."""

    plan: Plan
    kept: bool
    passes: float
    step_s: float
    worth: float
    views: int = 1


def head_stage(profile: Profile, keeping: Keeping, *, pin: Pin, memory: str | int | None, passes: float) -> Stage:
    """The output layer alone, on kept features: next to nothing a step, and what every longer course begins with."""
    from elastictrainer.policies.baselines import HEAD

    prices = keeping.prices(profile, passes)
    plan = HEAD.plan(prices, None, budget=None, pin=pin, memory=memory)
    return Stage(plan, True, passes, plan.step_s, math.nan, keeping.views_in(passes))


def choose_stage(
    profile: Profile,
    scores: Mapping[str, float],
    *,
    left_s: float,
    steps_per_pass: int,
    keeping: Keeping | None,
    pin: Pin = "head",
    memory: str | int | None = None,
) -> Stage:
    """The stage of the largest expected worth for the time left.

    Args:
        keeping: None where features cannot be kept: then every pass pays the whole forward pass.

    Raises:
        BudgetError: not even a quarter of a pass fits with anything trained.

    Costs a selection for each number of passes, some tens of milliseconds each.
    """
    found: list[Stage] = []
    everything = _everything(profile, memory)
    if everything is not None:
        passes = left_s / (steps_per_pass * everything.step_s)
        found.append(Stage(everything, False, passes, everything.step_s, worth(everything, scores, passes)))
    refusal: BudgetError | None = None
    for passes in PASSES:
        step_s = max(left_s, 1e-9) / (steps_per_pass * passes)
        for kept in (True, False) if keeping is not None else (False,):
            prices = keeping.prices(profile, passes) if kept and keeping is not None else profile
            try:
                plan = select(prices, scores, budget=Budget("seconds", step_s), pin=pin, memory=memory)
            except BudgetError as error:
                refusal = error
                continue
            # What the plan does not spend goes into more passes.
            able = max(passes, left_s / (steps_per_pass * plan.step_s))
            views = keeping.views_in(passes) if kept and keeping is not None else 1
            found.append(Stage(plan, kept, able, plan.step_s, worth(plan, scores, able), views))
    if not found:
        assert refusal is not None, "every candidate was refused, and one of the refusals is kept"
        raise refusal
    return max(found, key=lambda stage: stage.worth)


def _everything(profile: Profile, memory: str | int | None) -> Plan | None:
    from elastictrainer.policies.baselines import FULL

    try:
        return FULL.plan(profile, None, budget=None, pin=(), memory=memory)
    except BudgetError:
        return None  # more than the memory that is allowed


def worth(plan: Plan, scores: Mapping[str, float], passes: float) -> float:
    """How much lower the loss is expected to be after so many passes with this plan, in units of importance."""
    gain = math.fsum(max(scores.get(name, 0.0), 0.0) for name in plan.trainable)
    return gain * -math.expm1(-passes / SATURATION)


def _plan(
    profile: Profile,
    scores: Mapping[str, float] | None,
    *,
    budget: str | float | Budget | None,
    pin: Pin,
    memory: str | int | None,
) -> Plan:
    """A single step's plan, for whoever asks for one: as elastic would choose it."""
    assert scores is not None  # Policy.plan has checked
    return select(profile, scores, budget=budget, pin=pin, memory=memory)


ADAPTIVE = Policy(
    "adaptive",
    "Keep the run's budget: choose what to train and how often, on features computed once where that pays.",
    "",
    _plan,
    needs_scores=True,
    replans=True,
    within_budget=True,
)
