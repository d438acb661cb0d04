"""Pricing: the profile that a run's decisions rest on, taken for what the run can afford, or given and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.budget import Budget
from elastictrainer.errors import ProfileError
from elastictrainer.profiling import profile as take_profile
from elastictrainer.profiling.cache import describe, differences
from elastictrainer.profiling.measure import LEAST_EFFORT
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.ranks import from_first_rank, ranks

__all__ = ["check_given", "effort_for", "take_prices"]

MOST_EFFORT = 100
EFFORT_SHARE = 0.005  # of the run's time may go into its profile, where its length is known

LossFn = Callable[[nn.Module, Any], Tensor]
Norms = Literal["frozen", "track", "with_owner"]


def effort_for(steps: int | None, budget: Budget | None) -> int:
    """About how many full steps a profile may cost, for a run of so many steps (None: not known) within this budget."""
    if steps is None:
        return MOST_EFFORT
    share = min(1.0, budget.value) if budget is not None and budget.kind == "ratio" else 1.0
    return int(min(max(EFFORT_SHARE * share * steps, LEAST_EFFORT), MOST_EFFORT))


def take_prices(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizer,
    *,
    bn: Norms,
    cache: str | Path | None,
    seed: int,
    effort: int,
    limit_s: float | None,
    captured: bool,
) -> Profile:
    """The profile of steps on batches like this one; the first rank's, where there are several."""
    taken = take_profile(
        model, loss_fn, batch, optimizer=optimizer, bn=bn, cache=cache, seed=seed, effort=effort, limit_s=limit_s,
        captured=captured,
    )  # fmt: skip
    return Profile.from_dict(from_first_rank(taken.to_dict())) if ranks() > 1 else taken


def check_given(
    profile: Profile, model: nn.Module, loss_fn: LossFn, batch: Any, optimizer: Optimizer, *, bn: Norms, captured: bool
) -> None:
    """A profile from elsewhere must be one of this model, and of steps like these (trap 9)."""
    here = dict(unwrap(model).named_parameters())
    shapes = {name: tuple(p.shape) for name, p in unwrap(model).named_parameters(remove_duplicate=False)}
    if profile.captured and not captured:
        raise ProfileError(
            "the profile is of steps that are recorded and replayed, and here they are made one launch at a time; "
            "take it again with 'elastictrainer profile --no-graphs'"
        )
    wrong = [t.name for t in profile.graph.tensors if shapes.get(t.name) != t.shape]
    if wrong:
        raise ProfileError(
            f"the profile is of another model: {wrong[0]} ({len(wrong)} in all) is not here or in another shape; "
            "take it again with 'elastictrainer profile'"
        )
    context = describe(unwrap(model), here, batch, loss_fn=loss_fn, optimizer=optimizer, bn=bn)
    if other := differences(profile.context, context):
        raise ProfileError(
            f"the profile is of other steps than these: {'; '.join(other)}; "
            "take it again with 'elastictrainer profile' and the options of this run"
        )
