"""Solve a problem: bound it, search what can still matter, and say how far from the best the answer may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastictrainer.selection.bound import Relaxed, prices_for
from elastictrainer.selection.exchange import exchanged
from elastictrainer.selection.lists import Lists
from elastictrainer.selection.problem import Floats, Problem, as_mask
from elastictrainer.selection.structure import Structure, arrange
from elastictrainer.selection.tables import Core, Tables

__all__ = ["Solution", "solve"]

_CELLS = (1_500_000, 15_000_000, 100_000_000)  # cells touched by each try: about 5 ms, 50 ms and 0.4 s on one core
_CELLS_OF_SEVERAL = 4_000_000  # several constraints are searched by lists, whose time goes with it: some 60 ms
_RESOLUTION = (1_000, 200_000)
_LISTED = 750_000  # states listed in one try: below a second
_CLOSE = 0.001  # a gap not worth another table, if one as large was asked for
_STARTS = 2
_TOLERANCE = 1e-9  # of a capacity, or of the value: both are sums of floats


@dataclass(frozen=True, eq=False)
class Solution:
    """A feasible choice, its value, and a proven upper bound on the value of every feasible choice.

    `exact` is False where closed sets were left out of the search; `bound` holds even then.
    """

    chosen: NDArray[np.bool_]
    value: float
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """How much of the bound this choice may be short of: no other is worth more than value / (1 - gap)."""
        short = 1.0 - self.value / self.bound if self.bound > 0 else 0.0
        return short if short > _TOLERANCE else 0.0


def solve(
    problem: Problem,
    *,
    gap: float = 0.005,
    resolution: int | None = None,
    limit: int = 4096,
    bound: float = math.inf,
    stands: Callable[[NDArray[np.bool_]], bool] = lambda chosen: True,
) -> Solution:
    """The choice of the most value that fits every constraint.

    `gap` is how large a proven shortfall is acceptable before the search is made finer; the answer is usually much
    closer. `resolution` fixes the number of cells of the table instead of choosing it. `limit` is the most closed sets
    of one segment that are enumerated. No choice is worth more than `bound`, if that is known already. `stands` is
    asked before the dearest search whether the best choice so far is worth proving. Costs milliseconds for hundreds of
    items; the finest search takes about half a second whatever the number of items, and some 0.1 s under several
    constraints.
    """
    kept, problem = _affordable(problem)
    if not problem.items:
        return Solution(kept, 0.0, 0.0, exact=True)
    structure = arrange(problem, limit=limit)
    search = _Search(problem, structure)
    search.bound = min(search.bound, bound)
    search.start()
    if problem.constraints == 1:
        search.one(gap, resolution)
    else:
        search.several(gap, resolution, stands=lambda chosen: stands(_whole(kept, chosen)))
    search.finish()
    if not structure.exact:
        search.exchange()  # among all closed sets, not only those that were listed
        search.finish()
        # The bound above covers only the closed sets that were listed. One of the problem with crossing groups made
        # free until few enough are left covers all of them.
        outer = _Search(problem, arrange(problem, limit=limit, relax=True))
        search.bound = max(search.value, outer.bound)
    return Solution(_whole(kept, search.chosen), search.value, max(search.bound, search.value), structure.exact)


def _whole(kept: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """A choice among the items that were kept, as one among all."""
    out = kept.copy()
    out[kept] = chosen
    return out


def _affordable(problem: Problem) -> tuple[NDArray[np.bool_], Problem]:
    """Leave out items that no feasible choice holds; besides being useless, their prices would drown the others'."""
    kept = np.ones(problem.items, dtype=np.bool_)
    while True:
        dear = (problem.group_price > 1 + _TOLERANCE).any(axis=1)
        blocked = 0
        for g in np.flatnonzero(dear).tolist():
            blocked |= problem.groups[g]
        fits = (problem.price <= 1 + _TOLERANCE).all(axis=1) & ~as_mask(blocked, problem.items)
        if fits.all():
            return kept, problem
        kept[kept] = fits
        problem = problem.only(fits)


class _Search:
    """The best choice so far and the lowest bound so far."""

    def __init__(self, problem: Problem, structure: Structure) -> None:
        self.problem = problem
        self.structure = structure
        self.chosen = np.zeros(problem.items, dtype=np.bool_)
        self.value = 0.0
        self.relaxations = prices_for(problem, structure)
        self.ends = np.minimum.reduce([relaxation.ends for relaxation in self.relaxations])
        self.bound = float(self.ends.max())

    @property
    def gap(self) -> float:
        return 1.0 - self.value / self.bound if self.bound > 0 else 0.0

    def start(self) -> None:
        """Turn the choices that the prices make at the most promising ends into feasible ones."""
        tightest = self.relaxations[0]
        self._cheapest_fit(tightest.prices, None)
        for end in np.argsort(-self.ends, kind="stable")[:_STARTS].tolist():
            best = min(self.relaxations, key=lambda relaxation: float(relaxation.ends[end]))
            self._cheapest_fit(best.prices, end)

    def _cheapest_fit(self, prices: Floats, end: int | None) -> None:
        """Raise prices together, as little as makes the choice fit all constraints at once."""
        low, high = 0.9, 2.0
        found: NDArray[np.bool_] | None = None
        for _ in range(8):
            factor = (low + high) / 2
            here = Relaxed(self.problem, self.structure, prices * factor).choice(end)
            if (here.cost <= 1 + _TOLERANCE).all():
                high, found = factor, here.chosen
            else:
                low = factor
        if found is not None:
            self._offer(found)

    def one(self, gap: float, resolution: int | None) -> None:
        """Search by tables, ever larger ones; the first is cheap, and taken whatever the gap."""
        for cells in _CELLS:
            if self.gap > 0:
                self.tabulate(cells, resolution, gap)
            if self.gap <= gap or resolution is not None:
                return

    def several(self, gap: float, resolution: int | None, *, stands: Callable[[NDArray[np.bool_]], bool]) -> None:
        """Search by lists; a table of several constraints weighed into one proves little.

        A short list often proves it and is cheaper than exchanges, which make every list shorter.
        """
        if self.gap > gap:
            self.tabulate(_CELLS[0], resolution, gap)
        if self.gap > gap:
            value = self.value
            self.exchange()
            if self.gap > gap and self.value > value:
                self.tabulate(_CELLS[0], resolution, gap)
        if self.gap > gap and resolution is None and stands(self.chosen):
            self.tabulate(_CELLS_OF_SEVERAL, resolution, gap)

    def exchange(self) -> None:
        """Look around the best choice so far."""
        self._offer(exchanged(self.problem, self.chosen, self.relaxations[0].prices, room=1.0))

    def tabulate(self, cells: int, resolution: int | None, gap: float) -> None:
        """Search what the bound leaves open with tables of about this many cells in all."""
        core = Core.of(self.relaxations, self.value)
        work = _work(self.structure, core)
        size = resolution or int(np.clip(cells // max(work, 1), *_RESOLUTION))
        weights = core.relaxation.prices if core.relaxation.prices.any() else np.ones(self.problem.constraints)
        spare = min(size // 4, int(core.open.sum()) + 1)
        up = Tables(self.problem, self.structure, core, weights, resolution=size, up=True, spare=spare)
        self._read(up, size, spare)
        if self.gap > min(gap, _CLOSE) and self.problem.constraints == 1:
            core = Core.of(self.relaxations, self.value)
            down = Tables(self.problem, self.structure, core, weights, resolution=size, up=False)
            self.bound = max(self.value, min(self.bound, down.value))
        if self.gap > min(gap, _CLOSE) and (self.problem.constraints > 1 or self.gap > gap):
            self._list(cells)

    def _list(self, cells: int) -> None:
        """Search what is left open in real units under all constraints at once.

        That is needed where a table of the weighed constraints proves little, and where rounding hides what decides.
        Ends are taken in groups that one relaxation bounds about as well as their own best one does.
        """
        table = np.stack([relaxation.ends for relaxation in self.relaxations])
        unproven = self.value
        pending = np.ones(len(self.ends), dtype=np.bool_)
        work = min(cells // 20, _LISTED)  # for all groups together: the first ones are what holds the bound up
        while (open_ends := pending & (self.ends > self.value)).any():
            highest = int(np.where(open_ends, self.ends, -np.inf).argmax())
            relaxation = int(table[:, highest].argmin())
            slack = self.ends - self.value
            group = open_ends & (table[relaxation] - self.value <= 1.2 * slack + 0.1 * slack[highest])
            core = Core.at(self.relaxations[relaxation], self.value, group)
            lists = Lists(self.problem, self.structure, core, self.value, work=work, tolerance=_TOLERANCE)
            work = max(work - lists.work, 0)
            unproven = max(unproven, lists.bound)
            if lists.chosen is not None:
                self._offer(lists.chosen)
            pending &= ~group
        self.bound = max(self.value, min(self.bound, unproven))

    def _read(self, tables: Tables, size: int, spare: int) -> None:
        """Offer the best choices that really fit. Rounded-up cells overstate, so some beyond the budget do."""
        if self.problem.constraints > 1:
            levels, first = np.unique(tables.table[tables.lowest :], return_index=True)
            cells = (first + tables.lowest)[levels > self.value][::-1]
            for cell in cells[:200].tolist():
                if tables.table[cell] > self.value:
                    self._offer_items(tables.choice(cell))
            return
        low, high = size, size + spare  # what size cells buy fits for certain
        self._offer_items(tables.choice(low))
        while low < high:
            middle = (low + high + 1) // 2
            if self._offer_items(tables.choice(middle)):
                low = middle
            else:
                high = middle - 1

    def _offer_items(self, items: list[int]) -> bool:
        chosen = np.zeros(self.problem.items, dtype=np.bool_)
        chosen[items] = True
        return self._offer(chosen)

    def _offer(self, chosen: NDArray[np.bool_]) -> bool:
        """Keep a choice if it fits and, with the left-over spent on what it has on sale, is the best so far."""
        left = 1 + _TOLERANCE - self.problem.cost(chosen)
        if (left < 0).any():
            return False
        value = float(self.problem.value[chosen].sum())
        filled = chosen.copy()
        cheap = np.flatnonzero((self.problem.price <= left).all(axis=1))
        if value + float(self.problem.value[cheap].sum()) <= self.value:
            return True
        on_sale = cheap[self.problem.on_sale(chosen)[cheap]]
        for k in on_sale[np.argsort(-self.problem.value[on_sale], kind="stable")].tolist():
            if (self.problem.price[k] <= left).all():
                filled[k] = True
                left = left - self.problem.price[k]
        value = float(self.problem.value[filled].sum())
        if value > self.value:
            self.chosen, self.value = filled, value
        return True

    def finish(self) -> None:
        """Spend what is left over: again and again the most valuable item that still fits, what it needs included."""
        chosen = self.chosen.copy()
        left = 1 + _TOLERANCE - self.problem.cost(chosen)
        while affordable := self.problem.affordable(chosen, left):
            k, extra = max(affordable, key=lambda pair: float(self.problem.value[pair[0]]))
            chosen[k] = True
            left = left - extra
        self.chosen, self.value = chosen, float(self.problem.value[chosen].sum())


def _work(structure: Structure, core: Core) -> int:
    """How many items and steps one table is grown by."""
    total = 0
    for branch in structure.branches:
        ends, leads, _ = core.ends(branch)
        open_items = np.concatenate(([0], np.cumsum(core.open[branch.items])))
        per_step = open_items[branch.start[1:]] - open_items[branch.start[:-1]]
        total += int(per_step[leads].sum()) + int(ends.sum()) // 2
    return total
