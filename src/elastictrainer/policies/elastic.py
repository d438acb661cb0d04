"""ElasticTrainer's own policy, and the coin that it has to beat."""

from __future__ import annotations

from collections.abc import Mapping

from elastictrainer.budget import Budget
from elastictrainer.plan import Plan
from elastictrainer.policies.policy import Policy
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection import Pin, select

__all__ = ["ELASTIC", "RANDOM"]


def plan_elastic(
    profile: Profile,
    scores: Mapping[str, float] | None,
    *,
    budget: str | float | Budget | None,
    pin: Pin,
    memory: str | int | None,
) -> Plan:
    """The most importance that fits the budget (ElasticTrainer section 6), pinned tensors bought first."""
    assert scores is not None  # Policy.plan has checked
    return select(profile, scores, budget=budget, pin=pin, memory=memory)


ELASTIC = Policy(
    "elastic",
    "Train the tensors worth most within the budget, chosen anew at every interval.",
    "Huang et al., ElasticTrainer, MobiSys 2023",
    plan_elastic,
    needs_scores=True,
    replans=True,
    within_budget=True,
)
RANDOM = Policy(
    "random",
    "Elastic with importance drawn by lot: the control that shows what importance is worth.",
    "",
    plan_elastic,
    needs_scores=True,
    replans=True,
    within_budget=True,
    importance="random",
)
