"""`et.select`: a profile and scores in, the best plan within the budgets out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elastictrainer.budget import Budget
from elastictrainer.errors import ConfigError
from elastictrainer.plan import Plan
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection.limits import Limits
from elastictrainer.selection.pins import Pin, pinned
from elastictrainer.selection.prices import Column, Prices
from elastictrainer.selection.solve import Solution, solve

__all__ = ["select"]

_ROUNDS = 8


def select(
    profile: Profile,
    scores: Mapping[str, float],
    *,
    budget: str | float | Budget | None = None,
    pin: Pin = (),
    memory: str | int | None = None,
    gap: float = 0.005,
) -> Plan:
    """Choose the tensors of the most importance whose step fits the budget.

        plan = et.select(profile, scores, budget="0.5x", pin="head", memory="800MiB")

    Pure and deterministic: needs no model, and the same arguments give the same plan on every machine. A tensor whose
    score is not positive is never bought unless it is pinned. Without a budget and without a memory limit, every tensor
    of positive score trains.

    Args:
        scores: importance by tensor name, for every tensor of the profile that is not pinned.
        budget: a share of a full step (`"0.5x"`, `0.5`) or the time of one step (`"12ms"`).
        pin: tensors that train in any case, bought first: `"head"`, names, patterns like `"layer4.*"`, or a test.
        memory: the most bytes that a step may hold at once (`"800MiB"`).
        gap: how far from the best the plan may provably be before the search is made finer; see `Plan.gap`.

    Raises:
        BudgetError: nothing fits, or the pinned tensors alone do not; `least` is the smallest budget that works, in the
            unit that was asked for (a share, seconds, or bytes if memory is what is short).
        ConfigError: scores that are missing or not finite, a pin that fits nothing, nothing at all to train.

    Costs milliseconds for hundreds of tensors on one clock, tens to hundreds where memory or a second clock limits too.
    (ElasticTrainer section 6; exact here, and on the real graph.)
    """
    if not isinstance(profile, Profile):
        raise ConfigError(f"select needs a Profile, not a {type(profile).__name__}; Profile.load(path) reads one")
    if not isinstance(scores, Mapping):
        raise ConfigError(f"scores must be importance by tensor name, not a {type(scores).__name__}")
    if not 0 <= gap < 1:
        raise ConfigError(f"gap {gap!r} must be a share from 0 up to, but not, 1")
    limits = Limits.of(profile, budget, memory)
    kept = pinned(profile, pin)
    values = _checked(profile, scores, kept)
    position = profile.graph.index
    first = [position[name] for name in kept]
    candidates = [k for k in range(len(values)) if values[k] > 0 and profile.names[k] not in set(kept)]
    if kept:
        limits.refuse_pinned(kept)
    elif not candidates:
        raise ConfigError(
            "no tensor has a positive score and none is pinned, so there is nothing to train; "
            "pin='head' trains the output layer"
        )
    note = limits.note() if candidates else "no tensor has a positive score: only the pinned ones train"
    found = _search(profile, limits, Prices(profile, candidates, first), values[candidates], gap)
    if not kept and not found.chosen.any():
        raise limits.refuse_all([profile.names[k] for k in candidates])
    chosen = [profile.names[candidates[i]] for i in np.flatnonzero(found.chosen).tolist()]
    plan = Plan.of(profile, [*kept, *chosen], note=note)
    return replace(
        plan,
        budget=limits.budget,
        memory_bytes=limits.bytes,
        pinned=kept,
        optimal=found.exact and found.gap <= gap,
        gap=found.gap,
        score_values=tuple(values.tolist()),
    )


def _checked(profile: Profile, scores: Mapping[str, float], kept: tuple[str, ...]) -> NDArray[np.float64]:
    """The scores in the profile's order; a pinned tensor needs none."""
    pinned_names = set(kept)
    missing = [name for name in profile.names if name not in scores and name not in pinned_names]
    if missing:
        raise ConfigError(
            f"no score for {_some(missing)}; every tensor that is not pinned needs one (0 for one that must not train)"
        )
    unknown = [str(name) for name in scores if name not in profile.graph.index and name not in profile.graph.unused]
    if unknown:
        raise ConfigError(
            f"scores name {_some(unknown)}, which this profile does not have; were they made for another model?"
        )
    wrong = [f"{name} ({score})" for name, score in scores.items() if not _is_finite(score)]
    if wrong:
        raise ConfigError(f"scores that are not finite: {_some(wrong)}; probe again, or drop the batch that made them")
    return np.asarray([float(scores.get(name, 0.0)) for name in profile.names], dtype=np.float64)


def _is_finite(score: object) -> bool:
    """Whether a score is a number; the sum of thousands of them must be one too."""
    try:
        return abs(float(score)) < 1e300  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return False


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _search(profile: Profile, limits: Limits, prices: Prices, values: NDArray[np.float64], gap: float) -> Solution:
    """The best choice that keeps every limit to the last float, and a bound on all that do."""
    found = _relaxed(limits, prices, values, gap)
    if limits.hold(prices.names(found.chosen)):
        return found
    # The solver allows a billionth more, since sums of floats differ by as much: here that was bought. So ask for a
    # little less. What lies between is not searched, so that the bound stays the first one.
    chosen = max(
        (
            _spent(limits, prices, values, _repaired(limits, prices, values, close.chosen))
            for close in (found, _relaxed(limits.tightened(), prices, values, gap))
        ),
        key=lambda choice: float(values[choice].sum()),
    )
    value = float(values[chosen].sum())
    return Solution(chosen, value, max(found.bound, value), found.exact)


def _relaxed(limits: Limits, prices: Prices, values: NDArray[np.float64], gap: float) -> Solution:
    """Solve with the constraints that matter: begin with one, and add what an answer turns out to violate.

    Leaving constraints out can only raise the bound, so that every round's bound holds, and the first answer that
    violates none is the answer to all of them.
    """
    count = len(prices.candidates)
    columns: dict[tuple[str, int], Column] = limits.first(prices)
    bound = math.inf
    solution = Solution(np.ones(count, dtype=np.bool_), float(values.sum()), float(values.sum()), exact=True)

    def stands(chosen: NDArray[np.bool_]) -> bool:
        return limits.violated(prices, chosen).keys() <= columns.keys()

    for _ in range(_ROUNDS):
        if columns:
            problem = prices.problem(values, list(columns.values()))
            solution = solve(problem, gap=gap, bound=bound, stands=stands)
        bound = min(bound, solution.bound)
        violated = limits.violated(prices, solution.chosen)
        if not violated or violated.keys() <= columns.keys():
            break
        columns |= violated
    return Solution(solution.chosen, solution.value, max(bound, solution.value), solution.exact)


def _repaired(
    limits: Limits, prices: Prices, values: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Drop the least valuable tensors until every limit holds, to the last float; seldom any."""
    if limits.hold(prices.names(chosen)):
        return chosen
    chosen = chosen.copy()
    order = np.argsort(values, kind="stable")
    order = order[chosen[order]]
    low, high = 0, len(order)  # dropping more only lowers the cost, so the fewest that suffice are found by bisection
    while low < high:
        middle = (low + high) // 2
        chosen[order] = True
        chosen[order[:middle]] = False
        low, high = (low, middle) if limits.hold(prices.names(chosen)) else (middle + 1, high)
    chosen[order] = True
    chosen[order[:low]] = False
    return chosen


def _spent(limits: Limits, prices: Prices, values: NDArray[np.float64], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The choice with whatever still fits, the most valuable first."""
    chosen = chosen.copy()
    cheap = ~chosen & limits.within_reach(prices, chosen)
    for k in np.flatnonzero(cheap)[np.argsort(-values[cheap], kind="stable")].tolist():
        chosen[k] = True
        chosen[k] = limits.hold(prices.names(chosen))
    return chosen
