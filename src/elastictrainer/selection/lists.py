"""Several constraints at once: lists of partial choices with their real costs, kept while they may still beat the best.

One table cannot hold two constraints. But once prices are known, a partial choice is worth following only while what it
has given away stays below the slack between the bound and the best choice known: each item taken or left against its
reduced value, each branch ended at a worse step, adds to that loss. Few partial choices survive, so they are listed one
by one, in real units, without any rounding. Where too many survive, those of the least loss are kept, and the highest
bound among the others is what remains unproven.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastictrainer.selection.problem import Floats, Problem
from elastictrainer.selection.structure import Branch, Structure
from elastictrainer.selection.tables import Core

__all__ = ["Lists"]

_SAMPLE = 64


@dataclass(frozen=True, eq=False)
class _States:
    """Partial choices: cost so far, value given away so far, and where their trail in the log ends."""

    cost: Floats
    loss: Floats
    trail: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.loss)

    def where(self, kept: NDArray[np.bool_] | NDArray[np.intp]) -> _States:
        return _States(self.cost[kept], self.loss[kept], self.trail[kept])


class Lists:
    """Search a core under all constraints. Afterwards `chosen` is the best choice that beats the floor, None if none
    does, and no choice is worth more than `bound` (or the floor).

    `work` is about how many states may be grown in all, at about a microsecond each; then the lists get short. The
    attribute says how many were.
    """

    def __init__(
        self, problem: Problem, structure: Structure, core: Core, floor: float, *, work: int, tolerance: float
    ) -> None:
        self._problem = problem
        self._core = core
        self._relaxation = core.relaxation
        self._width = max(_SAMPLE, work // 50)
        self._most_work = work
        self.work = 0
        self._capacity = 1.0 + tolerance
        self._root = structure.root
        self._top = float(self._relaxation.ends[core.root_ends].max(initial=floor))
        self._previous: list[NDArray[np.intp]] = [np.full(1, -1, dtype=np.intp)]
        self._bought: list[NDArray[np.intp]] = [np.full(1, -1, dtype=np.intp)]
        self._logged = 1
        self._parcels: list[list[int]] = []
        self.value = floor
        self.bound = floor
        self.chosen: NDArray[np.bool_] | None = None
        start = _States(np.zeros((1, problem.constraints)), np.zeros(1), np.zeros(1, dtype=np.intp))
        self._search(structure.root, start)

    @property
    def _slack(self) -> float:
        return self._top - self.value * (1 - 1e-12)

    def _search(self, branch: Branch, states: _States) -> _States:
        """Everything that a branch may turn these states into. The main branch ends choices instead."""
        ends, leads, may_stay = self._core.ends(branch)
        best = self._relaxation.best(branch)
        ending = (
            best - self._relaxation.reach[id(branch)] if branch is not self._root else self._top - self._relaxation.ends
        )
        ahead = _least_ahead(branch, np.where(ends, ending, np.inf))
        done = [_States(states.cost, states.loss + best, states.trail)] if may_stay else []
        at: dict[int, _States] = {-1: states}
        s = 0
        while s < len(ends):
            if not leads[s]:
                s = int(branch.end[s])
                continue
            here = self._step(branch, s, at[int(branch.parent[s])], float(ahead[s]))
            if not len(here):
                s = int(branch.end[s])
                continue
            at[s] = here
            if ends[s]:
                ended = _States(here.cost, here.loss + ending[s], here.trail)
                if branch is self._root:
                    self._finish(ended)
                else:
                    done.append(self._pruned(ended, 0.0))
            s += 1
        if not done:
            return states.where(np.zeros(len(states), dtype=np.bool_))
        return self._pruned(
            _States(*(np.concatenate([getattr(d, f) for d in done]) for f in ("cost", "loss", "trail"))), 0.0
        )

    def _step(self, branch: Branch, s: int, states: _States, ahead: float) -> _States:
        problem, core = self._problem, self._core
        on_sale = branch.items[branch.start[s] : branch.start[s + 1]]
        taken = on_sale[core.taken[on_sale]]
        cost = states.cost + branch.price[s] + problem.price[taken].sum(axis=0)
        trail = states.trail
        if len(taken):
            self._parcels.append(taken.tolist())
            trail = self._log(trail, -1 - len(self._parcels))
        states = self._pruned(_States(cost, states.loss, trail), ahead)
        for k in on_sale[core.open[on_sale]].tolist():
            reduced = float(self._relaxation.reduced[k])
            bought = _States(states.cost + problem.price[k], states.loss + max(-reduced, 0.0), states.trail)
            bought = self._pruned(bought, ahead)
            left = self._pruned(_States(states.cost, states.loss + max(reduced, 0.0), states.trail), ahead)
            bought = _States(bought.cost, bought.loss, self._log(bought.trail, k))
            both = _States(*(np.concatenate((getattr(left, f), getattr(bought, f))) for f in ("cost", "loss", "trail")))
            states = self._narrowed(both, ahead)
        for side in branch.sides.get(s, ()):
            if len(states):
                states = self._narrowed(self._pruned(self._search(side, states), ahead), ahead)
        return states

    def _pruned(self, states: _States, ahead: float) -> _States:
        """The states that fit and may still lead to a better choice."""
        kept = (states.loss + ahead < self._slack) & (states.cost <= self._capacity).all(axis=1)
        return states if kept.all() else states.where(kept)

    def _narrowed(self, states: _States, ahead: float) -> _States:
        """Few enough states: without those that a cheaper one of no less value replaces, then of the least loss."""
        if len(states) <= _SAMPLE:
            return states
        states = states.where(np.argsort(states.loss, kind="stable"))
        value = states.cost @ self._relaxation.prices - states.loss  # apart from what all states here have in common
        beats = value[:_SAMPLE, None] >= value[None, _SAMPLE:]
        for cost in states.cost.T:  # one at a time: a reduction over so short an axis is ten times slower
            beats &= cost[:_SAMPLE, None] <= cost[None, _SAMPLE:]
        beaten = beats.any(axis=0)
        states = states.where(np.concatenate((np.ones(_SAMPLE, dtype=np.bool_), ~beaten)))
        self.work += len(states)
        width = self._width if self.work < self._most_work else _SAMPLE
        if len(states) > width:
            self.bound = max(self.bound, self._top - float(states.loss[width]) - ahead)
            states = states.where(np.arange(width))
        return states

    def _log(self, trail: NDArray[np.intp], bought: int) -> NDArray[np.intp]:
        """Note that these states bought an item (below -1: a parcel of items); returns where their trails end now."""
        self._previous.append(trail)
        self._bought.append(np.full(len(trail), bought, dtype=np.intp))
        self._logged += len(trail)
        return np.arange(self._logged - len(trail), self._logged, dtype=np.intp)

    def _finish(self, states: _States) -> None:
        """Keep the best of the choices that end here, if it beats the floor."""
        states = self._pruned(states, 0.0)
        if not len(states):
            return
        # The bound without the loss is value - price . cost + price . capacity.
        values = self._top - states.loss - (1.0 - states.cost) @ self._relaxation.prices
        best = int(values.argmax())
        if values[best] > self.value:
            self.value = float(values[best])
            self.chosen = np.zeros(self._problem.items, dtype=np.bool_)
            self.chosen[self._trace(int(states.trail[best]))] = True

    def _trace(self, trail: int) -> list[int]:
        starts = np.concatenate(([0], np.cumsum([len(chunk) for chunk in self._previous])))
        items: list[int] = []
        while trail > 0:
            chunk = int(np.searchsorted(starts, trail, side="right")) - 1
            bought = int(self._bought[chunk][trail - starts[chunk]])
            items += [bought] if bought >= 0 else self._parcels[-2 - bought]
            trail = int(self._previous[chunk][trail - starts[chunk]])
        return items


def _least_ahead(branch: Branch, ending: Floats) -> Floats:
    """For each step, the least that is given away by ending anywhere in its subtree."""
    least = ending.copy()
    for s in range(len(least) - 1, 0, -1):
        parent = branch.parent[s]
        if parent >= 0 and least[s] < least[parent]:
            least[parent] = least[s]
    return least
