"""`et.select`: a profile and scores in, the best plan within the budgets out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elastictrainer.budget import Budget, format_bytes, format_seconds, parse_bytes
from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.plan import Plan
from elastictrainer.profiling.profile import Profile
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
    limits = _Limits.of(profile, budget, memory)
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
    unknown = [name for name in scores if name not in profile.graph.index and name not in profile.graph.unused]
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


def _search(profile: Profile, limits: _Limits, prices: Prices, values: NDArray[np.float64], gap: float) -> Solution:
    """Solve with the constraints that matter: begin with one, and add what an answer turns out to violate.

    Leaving constraints out can only raise the bound, so that every round's bound holds, and the first answer that
    violates none is the answer to all of them.
    """
    count = len(prices.candidates)
    columns: dict[tuple[str, int], Column] = limits.first(prices)
    bound = math.inf
    solution = Solution(np.ones(count, dtype=np.bool_), float(values.sum()), float(values.sum()), exact=True)
    for _ in range(_ROUNDS):
        if columns:
            solution = solve(prices.problem(values, list(columns.values())), gap=gap)
        bound = min(bound, solution.bound)
        violated = limits.violated(prices, solution.chosen)
        if not violated or violated.keys() <= columns.keys():
            break
        columns |= violated
    chosen = _repaired(limits, prices, values, solution.chosen)
    value = float(values[chosen].sum())
    return Solution(chosen, value, max(bound, value), solution.exact)


def _repaired(
    limits: _Limits, prices: Prices, values: NDArray[np.float64], chosen: NDArray[np.bool_]
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


@dataclass(frozen=True)
class _Limits:
    """The budgets, in seconds and bytes, and what is said when they cannot be kept."""

    profile: Profile
    budget: Budget | None
    seconds: float | None
    bytes: int | None

    @classmethod
    def of(cls, profile: Profile, budget: str | float | Budget | None, memory: str | int | None) -> _Limits:
        parsed = None if budget is None else Budget.parse(budget)
        seconds = None if parsed is None else parsed.seconds(profile.full_step_s)
        return cls(profile, parsed, seconds, None if memory is None else parse_bytes(memory))

    def hold(self, names: list[str]) -> bool:
        if self.seconds is not None and self.profile.step_s(names) > self.seconds:
            return False
        return self.bytes is None or self.profile.peak_bytes(names) <= self.bytes

    def note(self) -> str:
        """A time for a step that no step takes was probably meant for the run."""
        if self.budget is None or self.budget.kind == "ratio" or self.budget.value <= self.profile.full_step_s:
            return ""
        return f"the budget is of one step, and {self.budget} is more than a full one takes"

    def first(self, prices: Prices) -> dict[tuple[str, int], Column]:
        """The clock that is shortest of time, if time is limited at all."""
        if self.seconds is None:
            return {}
        clocks = [prices.clock(lane, self.seconds) for lane in self.profile.lanes]
        load = [(c.items.sum() + c.set_prices.sum()) / max(c.capacity, 1e-300) for c in clocks]
        tightest = int(np.argmax(load))
        return {("clock", tightest): clocks[tightest]}

    def violated(self, prices: Prices, chosen: NDArray[np.bool_]) -> dict[tuple[str, int], Column]:
        """The constraints that a choice breaks: every clock that runs over, and the moment of the peak."""
        names = prices.names(chosen)
        found: dict[tuple[str, int], Column] = {}
        if self.seconds is not None:
            for i, lane_s in enumerate(prices.lanes_s(names)):
                if lane_s > self.seconds * (1 + 1e-9):
                    found["clock", i] = prices.clock(self.profile.lanes[i], self.seconds)
        if self.bytes is not None and self.profile.peak_bytes(names) > self.bytes:
            moment = prices.peak_node(names)
            found["moment", moment] = prices.moment(moment, self.bytes)
        return found

    def refuse_pinned(self, kept: tuple[str, ...]) -> None:
        step_s, peak = self.profile.step_s(kept), self.profile.peak_bytes(kept)
        whose = f"the {len(kept)} pinned tensor{'s' if len(kept) > 1 else ''} alone"
        if self.seconds is not None and step_s > self.seconds:
            over = format_seconds(step_s - self.seconds)
            raise BudgetError(
                f"{whose} take {format_seconds(step_s)} a step, {over} over the budget of {self._budget()}; "
                f"the least budget is {self._least(step_s)}, or pin fewer",
                least=self._in_unit(step_s),
            )
        if self.bytes is not None and peak > self.bytes:
            raise BudgetError(
                f"{whose} hold {format_bytes(peak)} at the peak, {format_bytes(peak - self.bytes)} over the limit of "
                f"{format_bytes(self.bytes)}; the least memory is {format_bytes(peak)} ({peak} bytes), or pin fewer",
                least=float(peak),
                of="memory",
            )

    def refuse_all(self, names: list[str]) -> BudgetError:
        """No tensor of positive score fits on its own: say what would."""
        cost = {name: (self.profile.step_s([name]), self.profile.peak_bytes([name])) for name in names}
        in_time = {n: c for n, c in cost.items() if self.seconds is None or c[0] <= self.seconds}
        in_memory = {n: c for n, c in cost.items() if self.bytes is None or c[1] <= self.bytes}
        if self.seconds is not None and not (self.bytes is not None and in_time):
            # Time is short, or both are: then the time of what fits the memory, if anything does.
            least_s = min(c[0] for c in (in_memory or cost).values())
            also = "" if in_memory else f" and memory of at least {format_bytes(min(c[1] for c in cost.values()))}"
            return BudgetError(
                f"budget {self._budget()} is under the cheapest plan that trains anything; "
                f"the least is {self._least(least_s)}{also} "
                f"(a step without any training takes {format_seconds(self.profile.floor_s)})",
                least=self._in_unit(least_s),
            )
        least_bytes = min(c[1] for c in (in_time or cost).values())
        return BudgetError(
            f"memory {format_bytes(self.bytes or 0)} is under the smallest plan that trains anything"
            f"{'' if self.seconds is None else f' within {self._budget()}'}; "
            f"the least is {format_bytes(least_bytes)} ({least_bytes} bytes)",
            least=float(least_bytes),
            of="memory",
        )

    def _budget(self) -> str:
        assert self.budget is not None, "asked only where time is limited"
        assert self.seconds is not None, "parsed together with the budget"
        return str(self.budget) if self.budget.kind == "seconds" else f"{self.budget} ({format_seconds(self.seconds)})"

    def _in_unit(self, step_s: float) -> float:
        """The smallest budget, in the unit asked for, that a step of this length keeps: rounded up, never down."""
        assert self.budget is not None, "asked only where time is limited"
        if self.budget.kind == "seconds":
            return step_s
        ratio = step_s / self.profile.full_step_s
        while ratio * self.profile.full_step_s < step_s:
            ratio = math.nextafter(ratio, math.inf)
        return ratio

    def _least(self, step_s: float) -> str:
        least = self._in_unit(step_s)
        assert self.budget is not None, "asked only where time is limited"
        return (
            f"{math.ceil(least * 1e4) / 1e4:g}x"
            if self.budget.kind == "ratio"
            else f"{format_seconds(least)} ({least!r}s)"
        )
