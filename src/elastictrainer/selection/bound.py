"""The Lagrangian bound: at a price per unit of each constraint, the best choice is found step by step, and bounds them all.

    L(price) = price . capacity + max over choices of (value - price . cost)  >=  the best feasible value, for any price >= 0

The maximum is one pass over the structure, as vector operations, and it bounds every place where a choice may end on its
own: the lowest bound of each over many prices is (nearly) its fractional knapsack, and the largest of those bounds all.

It also tells what can still matter: taking an item against its reduced value r = value - price . cost loses |r| from the
bound, and ending a branch at a step that is worse by d loses d. Whatever falls to the value of a choice already known
needs no further search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastictrainer.selection.problem import Floats, Problem
from elastictrainer.selection.structure import Branch, Structure

__all__ = ["Choice", "Relaxed", "prices_for"]

_SUBGRADIENT_STEPS = 120
_GRID = 2.0 ** (np.arange(-8, 9) / 4)
_REFINEMENTS = 16


@dataclass(frozen=True, eq=False)
class Choice:
    """A set of items with its value and its cost, as shares of the capacities."""

    chosen: NDArray[np.bool_]
    value: float
    cost: Floats


class Relaxed:
    """The problem with its constraints replaced by prices per unit of capacity. One pass over the structure.

    `reduced` is value - price . cost by item; `reach` is, by branch (its id) and step, the best total of a choice that
    ends there; `ends` bounds every feasible value by where on the main branch the choice ends.
    """

    def __init__(self, problem: Problem, structure: Structure, prices: Floats) -> None:
        self.problem = problem
        self.structure = structure
        self.prices = prices
        self.reduced = problem.value - problem.price @ prices
        self.reach: dict[int, Floats] = {}
        self._best: dict[int, float] = {}
        gains = np.maximum(self.reduced, 0.0)
        for branch in structure.branches:
            total = np.concatenate(([0.0], np.cumsum(gains[branch.items])))
            gain = total[branch.start[1:]] - total[branch.start[:-1]] - branch.price @ prices
            for step, sides in branch.sides.items():
                gain[step] += sum(self._best[id(side)] for side in sides)
            # What a step gains counts for its whole subtree: added where the subtree begins, taken away where it ends.
            change = np.bincount(branch.end, weights=gain, minlength=len(gain) + 1)
            reach = np.cumsum(np.append(gain, 0.0) - change)[:-1]
            self.reach[id(branch)] = reach
            self._best[id(branch)] = max(0.0, float(reach.max()))
        self.ends: Floats = self.reach[id(structure.root)] + float(prices.sum())
        self.bound = float(self.ends.max())

    def best(self, branch: Branch) -> float:
        """What the best choice gains in a branch; 0 if it does not enter it."""
        return self._best[id(branch)]

    def choice(self, end: int | None = None) -> Choice:
        """The best choice at these prices, or the best of those that end at this step of the main branch."""
        chosen = np.zeros(self.problem.items, dtype=np.bool_)
        cost = np.zeros(self.problem.constraints)
        pending = [(self.structure.root, end)]
        while pending:
            branch, at = pending.pop()
            if at is None:
                if self._best[id(branch)] <= 0:
                    continue
                at = int(self.reach[id(branch)].argmax())
            above = np.zeros(len(branch.end), dtype=np.bool_)
            above[: at + 1] = branch.end[: at + 1] > at  # in preorder, the steps whose subtree holds this one
            items = branch.items[np.repeat(above, np.diff(branch.start))]
            chosen[items[self.reduced[items] > 0]] = True
            cost += branch.price[above].sum(axis=0)
            pending += [(side, None) for step, sides in branch.sides.items() if above[step] for side in sides]
        return Choice(chosen, float(self.problem.value[chosen].sum()), cost + self.problem.price[chosen].sum(axis=0))


def prices_for(problem: Problem, structure: Structure) -> list[Relaxed]:
    """Relaxations at prices that together bring the bounds down, the lowest overall bound first.

    One constraint: Kelley's cutting planes, which end at the exact minimum after a handful of passes, a grid around it,
    and refinements for the ends whose bounds are highest. Several: a fixed number of projected subgradient steps.
    """
    tried: list[Relaxed] = []

    def at(prices: Floats) -> Relaxed:
        tried.append(Relaxed(problem, structure, prices))
        return tried[-1]

    search = _one_price if problem.constraints == 1 else _many_prices
    for _ in search(problem, at):
        pass
    return sorted(tried, key=lambda relaxation: relaxation.bound)


def _one_price(problem: Problem, at: Callable[[Floats], Relaxed]) -> Iterator[Relaxed]:
    free = at(np.zeros(1))
    yield free
    over = free.choice()
    if over.cost[0] <= 1.0:
        return
    # At a price of the whole value per unit of capacity, nothing that costs more than the capacity is worth it.
    dear = at(np.asarray([float(problem.value.sum())]))
    yield dear
    under = dear.choice()
    while True:
        price = (over.value - under.value) / float(over.cost[0] - under.cost[0])
        here = at(np.asarray([price]))
        yield here
        choice = here.choice()
        known = max(c.value - price * float(c.cost[0]) for c in (over, under))
        if choice.value - price * float(choice.cost[0]) <= known * (1 + 1e-12):
            break
        if choice.cost[0] > 1.0:
            over = choice
        else:
            under = choice
    by_price = {float(relaxation.prices[0]): relaxation for relaxation in (free, dear, here)}
    for factor in _GRID:
        by_price.setdefault(price * factor, at(np.asarray([price * factor])))
        yield by_price[price * factor]
    for _ in range(_REFINEMENTS):
        ordered = sorted(by_price)
        table = np.stack([by_price[p].ends for p in ordered])
        worst = int(table.min(axis=0).argmax())
        best = int(table[:, worst].argmin())
        near = [p for p in ordered[max(best - 1, 0) : best + 2] if p != ordered[best]]
        far = [p for p in near if abs(p - ordered[best]) > 0.01 * ordered[best]]
        if not far:
            return
        for p in far:
            middle = (p + ordered[best]) / 2
            by_price[middle] = at(np.asarray([middle]))
            yield by_price[middle]


def _many_prices(problem: Problem, at: Callable[[Floats], Relaxed]) -> Iterator[Relaxed]:
    free = at(np.zeros(problem.constraints))
    yield free
    choice = free.choice()
    if (choice.cost <= 1.0).all():
        return
    prices = np.where(choice.cost > 1.0, free.bound / problem.constraints / choice.cost, 0.0)
    step, lowest, best_prices, stalled = 0.3, free.bound, prices, 0
    for _ in range(_SUBGRADIENT_STEPS):
        here = at(prices)
        yield here
        if here.bound < lowest * (1 - 1e-6):
            lowest, best_prices, stalled = here.bound, prices, 0
        else:
            stalled += 1
        if stalled == 8:
            step, stalled, prices = step / 2, 0, best_prices
            continue
        slope = here.choice().cost - 1.0
        length = float(slope @ slope)
        if length == 0.0:
            return
        # Polyak's step towards a bound a little below the lowest so far, since the least one is not known.
        prices = np.maximum(0.0, prices + step * (here.bound - 0.97 * lowest) / length * slope)
