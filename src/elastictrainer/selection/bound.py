"""The Lagrangian bound: with a price for each constraint the best choice is found step by step, and bounds them all.

    L(price) = price . capacity + max over choices of (value - price . cost)  >=  every feasible value, if price >= 0

The maximum is one pass over the structure, as vector operations, and it bounds every place where a choice may end on
its own: the lowest bound of each over many prices is (nearly) its fractional knapsack, and the largest of those bounds
all.

It also tells what can still matter: taking an item against its reduced value r = value - price . cost loses |r| from
the bound, and ending a branch at a step that is worse by d loses d. Whatever falls to the value of a choice already
known needs no further search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastictrainer.selection.problem import Floats, Problem
from elastictrainer.selection.structure import Branch, Structure

__all__ = ["Choice", "Relaxed", "prices_for"]

_FINEST_WEIGHTS = 0.02
_GRID = 2.0 ** (np.arange(-8, 9) / 4)
_REFINEMENTS = 16
_MOVES = 6


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
            reach: Floats = np.cumsum(np.append(gain, 0.0) - change, dtype=np.float64)[:-1]
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
    """Relaxations at prices that together bring the bounds of all ends down, the lowest overall bound first.

    Constraints are weighed into one, and its best price found by cutting planes; with several constraints the weights
    are found by a pattern search. Around the best prices follow a grid, and refinements for the ends whose bounds are
    highest. About 50 passes for one constraint, 200 for two.
    """
    lines = _Lines(problem, structure)
    weights = _best_weights(lines)
    best = min(lines.tried, key=lambda relaxation: relaxation.bound)
    if float(best.prices.sum()) > 0.0:
        _refine(lines, weights, float(best.prices.sum()))
        if problem.constraints > 1:
            _refine_ends(lines)
    return sorted(lines.tried, key=lambda relaxation: relaxation.bound)


class _Lines:
    """Relaxations by prices; along one direction of prices the bound is convex and made of straight pieces."""

    def __init__(self, problem: Problem, structure: Structure) -> None:
        self.problem = problem
        self.structure = structure
        self.tried: list[Relaxed] = []
        self.free = self.at(np.zeros(problem.constraints))
        self._free_choice = self.free.choice()

    def at(self, prices: Floats) -> Relaxed:
        self.tried.append(Relaxed(self.problem, self.structure, prices))
        return self.tried[-1]

    def lowest(self, weights: Floats) -> float:
        """The lowest bound along a direction: Kelley's cutting planes, exact after a handful of passes."""
        over = _Line.of(self._free_choice, weights)
        if over.cost <= 1.0:
            return self.free.bound
        # At a price of the whole value per unit of capacity, nothing that costs more than the capacity is worth it.
        under = _Line.of(self.at(weights * self.free.bound).choice(), weights)
        lowest = math.inf
        while True:
            price = (over.value - under.value) / (over.cost - under.cost)
            here = self.at(weights * price)
            lowest = min(lowest, here.bound)
            found = _Line.of(here.choice(), weights)
            known = max(over.value - price * over.cost, under.value - price * under.cost)
            if found.value - price * found.cost <= known + 1e-12 * abs(known):
                return lowest
            over, under = (found, under) if found.cost > 1.0 else (over, found)


@dataclass(frozen=True, slots=True)
class _Line:
    """Value and weighed cost of a choice: the bound as a function of the price is the largest of such lines."""

    value: float
    cost: float

    @classmethod
    def of(cls, choice: Choice, weights: Floats) -> _Line:
        return cls(choice.value, float(choice.cost @ weights))


def _best_weights(lines: _Lines) -> Floats:
    """Weights of the constraints, summing to one, under which the bound is lowest: a pattern search on the simplex.

    The bound is quasi-convex in the weights (it is the surrogate dual), so that a search by ever smaller steps towards
    and away from the single constraints ends near its minimum. Any weights give a valid bound.
    """
    count = lines.problem.constraints
    corners: list[Floats] = list(np.eye(count, dtype=np.float64))
    if count == 1:
        lines.lowest(corners[0])
        return corners[0]
    starts: list[Floats] = [*corners, np.full(count, 1.0 / count)]
    bounds = [lines.lowest(weights) for weights in starts]
    best, weights = min(bounds), starts[int(np.argmin(bounds))]
    step = 0.5
    while step > _FINEST_WEIGHTS:
        moves = [weights + sign * step * (corner - weights) for corner in corners for sign in (1.0, -1.0)]
        moves = [np.maximum(move, 0.0) / np.maximum(move, 0.0).sum() for move in moves]
        moves = [move for move in moves if np.abs(move - weights).max() > 1e-9]
        bounds = [lines.lowest(move) for move in moves]
        if min(bounds) < best * (1 - 1e-9):
            best, weights = min(bounds), moves[int(np.argmin(bounds))]
        else:
            step /= 2
    return weights


def _refine(lines: _Lines, weights: Floats, price: float) -> None:
    """Try prices around the best one, then between those where the highest of the ends' bounds may still come down."""
    by_price = {factor * price: lines.at(weights * price * factor) for factor in _GRID}
    for _ in range(_REFINEMENTS):
        ordered = sorted(by_price)
        table = np.stack([by_price[p].ends for p in ordered])
        worst = int(table.min(axis=0).argmax())
        best = int(table[:, worst].argmin())
        near = [p for p in ordered[max(best - 1, 0) : best + 2] if abs(p - ordered[best]) > 0.01 * ordered[best]]
        if not near:
            return
        for p in near:
            middle = (p + ordered[best]) / 2
            by_price[middle] = lines.at(weights * middle)


def _refine_ends(lines: _Lines) -> None:
    """With several constraints, also move the prices one by one for the ends whose bounds are highest."""
    for _ in range(_REFINEMENTS // 2):
        table = np.stack([relaxation.ends for relaxation in lines.tried])
        worst = int(table.min(axis=0).argmax())
        best = lines.tried[int(table[:, worst].argmin())]
        for factor in (1.5, 1.15, 1.04):
            for _ in range(_MOVES):
                factors = [np.where(row, f, 1.0) for row in np.eye(len(best.prices)) for f in (factor, 1 / factor)]
                moved = [lines.at(best.prices * f) for f in factors]
                found = min(moved, key=lambda relaxation: float(relaxation.ends[worst]))
                if float(found.ends[worst]) >= float(best.ends[worst]):
                    break
                best = found
