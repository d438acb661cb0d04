"""Better choices from a good one: one item put in or out by force, and the rest made to fit again.

With several constraints the prices' own choices, raised until they fit, may leave a percent or two on the table, and
then the bound decides little. What is found here beats them often, and every bit of it makes the search for a proof
smaller. Nothing is claimed of the result but that it fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elastictrainer.selection.problem import Floats, Problem, as_mask

__all__ = ["exchanged"]

_MOST_MOVES = 1_000
_MOST_ENTRIES = 1_000_000  # of the table of groups by items

Mask = NDArray[np.bool_]


def exchanged(problem: Problem, chosen: Mask, prices: Floats, *, room: float) -> Mask:
    """The choice, or a more valuable one; `prices` say what a unit of each capacity is worth, `room` is each capacity.

    Tries every item in turn and begins again from whatever is better. Costs some 0.2 ms a move, for at most 1,000 of
    them; a problem of millions of item and group pairs is left as it is.
    """
    if problem.items * max(len(problem.groups), 1) > _MOST_ENTRIES:
        return chosen
    moves = _Moves(problem, prices, room)
    best, value = chosen, float(problem.value[chosen].sum())
    place = since = 0
    for _ in range(_MOST_MOVES):
        if since == problem.items:
            break
        found = moves.out(best, place) if best[place] else moves.into(best, place)
        place, since = (place + 1) % problem.items, since + 1
        if found is not None and (worth := float(problem.value[found].sum())) > value * (1 + 1e-12):
            best, value, since = found, worth, 0
    return best


class _Moves:
    def __init__(self, problem: Problem, prices: Floats, room: float) -> None:
        self.problem = problem
        self.prices = prices
        self.room = room
        self.holds = np.zeros((len(problem.groups), problem.items))
        for g, members in enumerate(problem.groups):
            self.holds[g] = as_mask(members, problem.items)

    def out(self, chosen: Mask, item: int) -> Mask:
        """Without the item, its room spent on others."""
        without = chosen.copy()
        without[item] = False
        return self._filled(without, item)

    def into(self, chosen: Mask, item: int) -> Mask | None:
        """With the item, those dropped that are worth least for what they free; None if that never fits."""
        problem, now = self.problem, chosen.copy()
        now[item] = True
        while True:
            count = self.holds @ now
            cost = problem.price[now].sum(axis=0) + problem.group_price[count > 0].sum(axis=0)
            over = cost > self.room
            if not over.any():
                return self._filled(now, -1)
            others = np.flatnonzero(now)
            others = others[others != item]
            if not len(others):
                return None
            single = np.flatnonzero(count == 1)  # groups that close with the one item that holds them open
            closed = self.holds[np.ix_(single, others)].T @ problem.group_price[np.ix_(single, over)]
            freed = (problem.price[np.ix_(others, over)] + closed).sum(axis=1)
            now[others[int((problem.value[others] / np.maximum(freed, 1e-12)).argmin())]] = False

    def _filled(self, chosen: Mask, never: int) -> Mask:
        """The left-over spent, again and again on what is worth most beyond its price."""
        problem = self.problem
        while True:
            is_open = self.holds @ chosen > 0
            left = self.room - problem.price[chosen].sum(axis=0) - problem.group_price[is_open].sum(axis=0)
            extra = problem.price + self.holds[~is_open].T @ problem.group_price[~is_open]
            fits = ~chosen & (extra <= left).all(axis=1)
            if never >= 0:
                fits[never] = False
            if not fits.any():
                return chosen
            worth = problem.value - extra @ self.prices
            chosen[int(np.where(fits, worth, -np.inf).argmax())] = True
