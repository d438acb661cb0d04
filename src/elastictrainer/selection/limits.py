"""The budgets of a choice, in seconds and bytes: what keeps them, what breaks them, what to say where nothing fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elastictrainer.budget import Budget, format_bytes, format_seconds, parse_bytes
from elastictrainer.errors import BudgetError
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection.prices import Column, Prices

__all__ = ["Limits"]

_MARGIN = 3e-9  # the solver's tolerance of a billionth, twice over


@dataclass(frozen=True)
class Limits:
    """The budgets, in seconds and bytes, and what is said when they cannot be kept."""

    profile: Profile
    budget: Budget | None
    seconds: float | None
    bytes: int | None

    @classmethod
    def of(cls, profile: Profile, budget: str | float | Budget | None, memory: str | int | None) -> Limits:
        parsed = None if budget is None else Budget.parse(budget)
        seconds = None if parsed is None else parsed.seconds(profile.full_step_s)
        return cls(profile, parsed, seconds, None if memory is None else parse_bytes(memory))

    def tightened(self) -> Limits:
        """The same budgets, less by more than the solver's tolerance."""
        return replace(
            self,
            seconds=None if self.seconds is None else self.seconds * (1 - _MARGIN),
            bytes=None if self.bytes is None else int(self.bytes * (1 - _MARGIN)),
        )

    def hold(self, names: list[str]) -> bool:
        if self.seconds is not None and self.profile.step_s(names) > self.seconds:
            return False
        return self.bytes is None or self.profile.peak_bytes(names) <= self.bytes

    def within_reach(self, prices: Prices, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The candidates whose own seconds, whatever else they need, are within what a choice leaves."""
        within = np.ones(len(prices.candidates), dtype=np.bool_)
        if self.seconds is not None:
            for lane, lane_s in zip(self.profile.lanes, prices.lanes_s(prices.names(chosen))):
                within &= lane.train_s[prices.candidates] <= self.seconds * (1 + _MARGIN) - lane_s
        return within

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
        """Raise if the pinned tensors alone are over a budget: by how much, and over the other one too if they are."""
        step_s, peak = self.profile.step_s(kept), self.profile.peak_bytes(kept)
        whose = f"the {len(kept)} pinned tensor{'s' if len(kept) > 1 else ''} alone"
        heavy = ""
        if self.bytes is not None and peak > self.bytes:
            heavy = (
                f"hold {format_bytes(peak)} at the peak, {format_bytes(peak - self.bytes)} over the limit of "
                f"{format_bytes(self.bytes)}; the least memory is {format_bytes(peak)} ({peak} bytes), or pin fewer"
            )
        if self.seconds is not None and step_s > self.seconds:
            over = format_seconds(step_s - self.seconds)
            raise BudgetError(
                f"{whose} take {format_seconds(step_s)} a step, {over} over the budget of {self._budget()}; "
                f"the least budget is {self._least(step_s)}, or pin fewer{heavy and f'; and they {heavy}'}",
                least=self._in_unit(step_s),
            )
        if heavy:
            raise BudgetError(f"{whose} {heavy}", least=float(peak), of="memory")

    def refuse_all(self, names: list[str]) -> BudgetError:
        """No tensor of positive score fits on its own: say what would."""
        cost = {name: (self.profile.step_s([name]), self.profile.peak_bytes([name])) for name in names}
        in_time = {n: c for n, c in cost.items() if self.seconds is None or c[0] <= self.seconds}
        in_memory = {n: c for n, c in cost.items() if self.bytes is None or c[1] <= self.bytes}
        if self.seconds is not None and not (self.bytes is not None and in_time):
            # Time is short, or both are: then the time of what fits the memory, if anything does.
            least_s, least_bytes = min((in_memory or cost).values())  # of one tensor: the two must do together
            also = "" if in_memory else f" and memory of at least {format_bytes(least_bytes)} ({least_bytes} bytes)"
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
