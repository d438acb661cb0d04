"""The best choice of layers and channels as an integer programme: how far greedy is from it, and an oracle for tests.

max sum_ij w_ij x_ij        x_ij in {0, 1}: layer i trains in its option j    sum_j x_ij <= 1
0 <= r_n <= 1 (operation n is reached)      r_n >= x_ij on n       r_n >= r_m for what n hands gradients to
0 <= h_s <= 1 (storage s is kept)           h_s >= r_n and h_s >= x_ij for those who need it
bytes: sum_s bytes_s h_s + sum_ij bytes_ij x_ij        multiply-adds: sum_ij macs_ij x_ij + sum_i macs_i p_i
0 <= p_i <= 1 (layer i passes a gradient on): p_i >= r_m for what it hands gradients to
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.selection.channels import ChannelChoice, Option, Taken

__all__ = ["best"]


def best(choice: ChannelChoice, *, gap: float = 0.0) -> tuple[Taken, float]:
    """The options worth most within the ceilings, and by how much at most another choice could be worth more.

    Raises:
        ConfigError: scipy is not there.
        BudgetError: nothing fits.
    """
    taken, bound = _Programme(choice).solve(gap)
    slack = 1e-7
    while not choice.fits(taken) and slack < 1e-3:  # within the solver's tolerance, and not within ours
        slack *= 10
        taken, _ = _Programme(choice, slack=slack).solve(gap)
    if not choice.fits(taken):
        raise BudgetError("the integer programme keeps the ceilings only within its tolerance; allow a little more")
    worth = choice.worth(taken)
    return taken, max(0.0, 1 - worth / bound) if bound > 0 else 0.0


class _Programme:
    """Columns: an option's x, then r by operation, h by storage, p by layer."""

    def __init__(self, choice: ChannelChoice, *, slack: float = 0.0) -> None:
        self.choice = choice
        graph, memory = choice.prices.profile.graph, choice.prices.profile.memory
        self.options: list[Option] = [option for layer in choice.layers for option in choice.options[layer.weight]]
        self.objective: list[float] = [-option.worth for option in self.options]
        self.lower: list[float] = [0.0] * len(self.options)
        self.rows: list[dict[int, float]] = []
        self.most: list[float] = []
        reached = [self._variable() for _ in graph.nodes]
        kept = [self._variable() for _ in memory.storages]
        passing = [self._variable() for _ in choice.prices.layers]
        index = graph.index

        columns: dict[str, list[int]] = {}
        for column, option in enumerate(self.options):
            columns.setdefault(option.layer.weight, []).append(column)
        for members in columns.values():
            self._limit(dict.fromkeys(members, 1.0), 1.0)
        # Who trains a tensor: the options of its layer; pinned tensors always.
        trained_by: dict[int, list[int]] = {}
        holding: dict[int, list[int]] = {}
        for column, option in enumerate(self.options):
            sliced = choice.prices.is_sliced(option.layer.weight, option.rows)
            for name in option.layer.tensors:
                trained_by.setdefault(index[name], []).append(column)
                if not (sliced and name == option.layer.weight):
                    holding.setdefault(index[name], []).append(column)
        always = {index[name] for name in choice.pinned}
        for n, node in enumerate(graph.nodes):
            for k in node.tensors:
                if k in always:
                    self.lower[reached[n]] = 1.0
                elif k in trained_by:
                    self._at_least(reached[n], trained_by[k])
            for m in node.inputs:
                self._at_least(reached[n], [reached[m]])
        for s, storage in enumerate(memory.storages):
            for n in storage.nodes:
                self._at_least(kept[s], [reached[n]])
            for k in storage.tensors:
                if k in always:
                    self.lower[kept[s]] = 1.0
                elif k in holding:
                    self._at_least(kept[s], holding[k])
        for i, fed in enumerate(choice.prices.fed_by):
            for m in fed:
                self._at_least(passing[i], [reached[m]])

        pinned = choice.prices.spent(choice.pinned)
        own_bytes = pinned.gradient_bytes + pinned.state_bytes
        if choice.memory_bytes is not None:
            scale = float(choice.memory_bytes)
            row = {kept[s]: storage.nbytes / scale for s, storage in enumerate(memory.storages)}
            row |= {c: self._bytes(option) / scale for c, option in enumerate(self.options)}
            self._limit(row, (choice.memory_bytes - own_bytes) / scale - slack)
        if choice.most_macs is not None:
            scale = float(max(choice.most_macs, 1))
            row = {passing[i]: layer.macs / scale for i, layer in enumerate(choice.prices.layers)}
            row |= {c: (o.layer.macs * len(o.rows) // o.layer.channels) / scale for c, o in enumerate(self.options)}
            own = sum(layer.macs for layer in choice.prices.layers if layer.weight in choice.pinned)
            self._limit(row, (choice.most_macs - own) / scale - slack)

    def _bytes(self, option: Option) -> int:
        prices, layer = self.choice.prices, option.layer
        rows = len(option.rows) * layer.row_bytes
        saved = 0
        if prices.is_sliced(layer.weight, option.rows):
            saved = layer.input_bytes * layer.touched(option.rows) // layer.groups
        return rows * (1 + prices.state_copies + (not option.whole)) + saved

    def _variable(self) -> int:
        self.objective.append(0.0)
        self.lower.append(0.0)
        return len(self.objective) - 1

    def _at_least(self, larger: int, smaller: list[int]) -> None:
        self._limit({larger: -1.0} | dict.fromkeys(smaller, 1.0), 0.0)

    def _limit(self, row: dict[int, float], most: float) -> None:
        self.rows.append(row)
        self.most.append(most)

    def solve(self, gap: float) -> tuple[Taken, float]:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError as error:
            raise ConfigError("the integer programme needs scipy: pip install 'elastictrainer[milp]'") from error
        entries = [(r, c, v) for r, row in enumerate(self.rows) for c, v in row.items()]
        r, c, v = zip(*entries)
        matrix = coo_array((v, (r, c)), shape=(len(self.rows), len(self.objective))).tocsr()
        integral = np.zeros(len(self.objective))
        integral[: len(self.options)] = 1
        # In shares of the largest worth: HiGHS's tolerances are absolute, and potentials are tiny.
        scale = max((-value for value in self.objective), default=0.0) or 1.0
        result: Any = milp(
            c=np.asarray(self.objective) / scale,
            constraints=LinearConstraint(matrix, ub=np.asarray(self.most)),
            bounds=Bounds(np.asarray(self.lower), 1.0),
            integrality=integral,
            options={"mip_rel_gap": gap},
        )
        if result.x is None:
            raise BudgetError(f"the integer programme found nothing that fits: {result.message}")
        taken = tuple(self.options[i] for i in np.flatnonzero(result.x[: len(self.options)] > 0.5))
        return taken, -float(result.mip_dual_bound) * scale
