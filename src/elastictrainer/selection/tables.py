"""The knapsack table, grown along the steps of a structure: one table answers every place where a choice may end.

`table[c]` is the most value that c cells of the budget can buy of what has been on sale so far. A step extends its
parent's table by the items it puts on sale, one vector operation an item, and its own price only moves where the table
is read: it is kept in real units and rounded once. Branches are entered from a table and leave one behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elastictrainer.selection.bound import Relaxed
from elastictrainer.selection.problem import Floats, Problem
from elastictrainer.selection.structure import Branch, Structure

__all__ = ["Core", "Tables"]

_TINY = 1e-9
_NOWHERE = -np.inf


@dataclass(frozen=True, eq=False)
class Core:
    """What is left to decide once a choice of `floor` is known and the relaxation bounds the rest.

    `taken` items are bought wherever they are on sale, `open` ones are decided by the table, the others never bought;
    `slack` is by how much a step may be worse than its branch's best and still matter.
    """

    taken: NDArray[np.bool_]
    open: NDArray[np.bool_]
    relaxation: Relaxed
    slack: float
    root_ends: NDArray[np.bool_]

    @classmethod
    def of(cls, relaxations: list[Relaxed], floor: float) -> Core:
        """Choose the relaxation that is tightest on the ends that may still beat the floor."""
        open_ends = np.minimum.reduce([relaxation.ends for relaxation in relaxations]) > floor * (1 - 1e-12)
        bounds = [float(relaxation.ends[open_ends].max(initial=floor)) for relaxation in relaxations]
        return cls.at(relaxations[int(np.argmin(bounds))], floor, open_ends)

    @classmethod
    def at(cls, relaxation: Relaxed, floor: float, root_ends: NDArray[np.bool_]) -> Core:
        """What these ends of the main branch leave to decide."""
        # Sums of floats: err on the side of searching more.
        slack = float(relaxation.ends[root_ends].max(initial=floor)) - floor * (1 - 1e-12)
        decided = np.abs(relaxation.reduced) >= slack
        return cls(decided & (relaxation.reduced > 0), ~decided, relaxation, slack, root_ends)

    def ends(self, branch: Branch) -> tuple[NDArray[np.bool_], NDArray[np.bool_], bool]:
        """Which steps a better choice may end at, which ones may lead to such a step, and whether it may stay out."""
        if branch is self.relaxation.structure.root:
            ends, may_stay = self.root_ends, False
        else:
            best = self.relaxation.best(branch)
            ends, may_stay = best - self.relaxation.reach[id(branch)] < self.slack, best < self.slack
        after = np.concatenate(([0], np.cumsum(ends)))
        return ends, after[branch.end] > after[:-1], may_stay


@dataclass(eq=False)
class _Visit:
    """What one step decided: for each item a row (bought at this cell?), for each side branch its own record."""

    taken: list[int] = field(default_factory=list)
    items: list[tuple[int, int, NDArray[np.bool_]]] = field(default_factory=list)
    sides: list[_Record] = field(default_factory=list)
    price: float = 0.0
    value: float = 0.0


@dataclass(eq=False)
class _Record:
    """How a branch was searched: where the best choice of each cell ends (-1: not entered), and what led there."""

    branch: Branch
    end: NDArray[np.int32]
    shift: dict[int, int]
    visits: dict[int, _Visit]


class Tables:
    """One search of a structure's core under a single constraint: `weights` per constraint make several into one.

    Rounded up, a choice found at cell `resolution` is within the budget; rounded down, no choice is worth more than
    `value`. Costs `resolution` cell operations an item and step that the core leaves open; rounded up it also keeps
    one byte a cell for each, to find the choice again.
    """

    def __init__(
        self,
        problem: Problem,
        structure: Structure,
        core: Core,
        weights: Floats,
        *,
        resolution: int,
        up: bool,
        spare: int = 0,
    ) -> None:
        self._core = core
        self._up = up
        self._scale = resolution / float(weights.sum())
        self._weights = weights
        self._cells = resolution + spare
        self._own = problem.price @ weights * self._scale
        rounded = np.ceil(self._own - _TINY) if up else np.floor(self._own + _TINY)
        self._item_cells = np.minimum(rounded, self._cells + 1).astype(np.int64).tolist()
        self._values = problem.value.tolist()
        self.resolution = resolution
        self.lowest = resolution - resolution // 4 if up else resolution
        self.table, self._record = self._search(structure.root, np.zeros(self._cells + 1), self._cells, self.lowest)

    @property
    def value(self) -> float:
        """The best value at the full budget, as far as this search knows (it leaves out what cannot beat the floor)."""
        return float(self.table[self.resolution])

    def choice(self, cell: int) -> list[int]:
        """The items of the best choice that this many cells can buy; from `lowest` cells up."""
        items: list[int] = []
        self._collect(self._record, cell, items)
        return items

    def _round(self, cost: float) -> int:
        return int(np.ceil(cost - _TINY)) if self._up else int(np.floor(cost + _TINY))

    def _search(self, branch: Branch, table: Floats, room: int, lowest: int) -> tuple[Floats, _Record]:
        """Enter a branch or not. `room` is the last cell that is of any use; nothing reads below `lowest`."""
        ends, leads, may_stay = self._core.ends(branch)
        out = table.copy() if may_stay else np.full(len(table), _NOWHERE)
        record = _Record(branch, np.full(len(table), -1, dtype=np.int32), {}, {})
        prices = (branch.price @ self._weights * self._scale).tolist()
        tables: dict[int, tuple[Floats, float, float]] = {-1: (table.copy(), 0.0, 0.0)}
        last = _last_children(branch, leads)
        s = 0
        count = len(prices)
        while s < count:
            if not leads[s]:
                s = int(branch.end[s])
                continue
            parent = int(branch.parent[s])
            grown, price, value = tables.pop(parent) if last[parent] == s else tables[parent]
            if last[parent] != s:
                grown = grown.copy()
            visit = _Visit(price=prices[s])
            for k in branch.items[branch.start[s] : branch.start[s + 1]].tolist():
                if self._core.taken[k]:
                    visit.taken.append(k)
                    visit.price += self._own[k]
                    visit.value += self._values[k]
            price, value = price + visit.price, value + visit.value
            shift = self._round(price)
            left = room - shift
            if left < 0:
                s = int(branch.end[s])
                continue
            for k in branch.items[branch.start[s] : branch.start[s + 1]].tolist():
                if self._core.open[k]:
                    cells = self._item_cells[k]
                    if cells > left:
                        continue
                    before = grown[: left + 1 - cells]
                    now = grown[cells : left + 1]
                    bought = before + self._values[k]
                    if self._up:
                        visit.items.append((k, cells, bought > now))
                    np.maximum(now, bought, out=now)
            for side in branch.sides.get(s, ()):
                grown, inner = self._search(side, grown, left, 0)
                visit.sides.append(inner)
            record.visits[s] = visit
            if ends[s]:
                record.shift[s] = shift
                start = max(shift, lowest)
                target = out[start : room + 1]
                offered = grown[start - shift : left + 1] + value
                better = offered > target
                target[better] = offered[better]
                record.end[start : room + 1][better] = s
            if s in last:
                tables[s] = grown, price, value
            s += 1
        return out, record

    def _collect(self, record: _Record, cell: int, items: list[int]) -> int:
        """Walk back from a cell; returns the cell of the table that the branch was entered from."""
        s = int(record.end[cell])
        if s < 0:
            return cell
        cell -= record.shift[s]
        while s >= 0:
            visit = record.visits[s]
            for inner in reversed(visit.sides):
                cell = self._collect(inner, cell, items)
            for k, cells, bought in reversed(visit.items):
                if cell >= cells and bought[cell - cells]:
                    items.append(k)
                    cell -= cells
            items += visit.taken
            s = int(record.branch.parent[s])
        return cell


def _last_children(branch: Branch, leads: NDArray[np.bool_]) -> dict[int, int]:
    """For each step (and -1) the last child that is visited: it may grow the table in place."""
    visited = np.flatnonzero(leads)
    return dict(zip(branch.parent[visited].tolist(), visited.tolist()))
