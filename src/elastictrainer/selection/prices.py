"""From a profile to columns of prices: what each tensor adds, and each set of tensors together, to one constraint.

Seconds on a clock are additive as they stand: an operation is paid if a tensor on it or below it is trained.

The memory peak is not additive, but it is the largest of many moments that are. At the moment when backward runs
operation n the step holds what somebody at or after n still needs, the gradients that were made up to n, all optimizer
state, and n's own workspace; in one more moment, forward's, its own need and all optimizer state. So
`peak_bytes(S) <= limit` means one additive constraint for each moment; which of them matter is found out by checking
answers (`select`), and in practice one or two do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastictrainer.profiling.profile import Lane, Profile
from elastictrainer.selection.problem import Floats, Problem, fold

__all__ = ["Column", "Prices"]


@dataclass(frozen=True, eq=False)
class Column:
    """One constraint: prices by candidate, prices by set of candidates, and what the pinned tensors leave to spend."""

    items: Floats
    sets: tuple[int, ...]
    set_prices: Floats
    capacity: float


class Prices:
    """What the candidates of a profile cost on top of the pinned tensors. Sets are bit sets over the candidates."""

    def __init__(self, profile: Profile, candidates: list[int], pinned: list[int]) -> None:
        self.profile = profile
        self.candidates = candidates
        self.pinned = pinned
        graph = profile.graph
        self._bit = {k: 1 << i for i, k in enumerate(candidates)}
        is_pinned = set(pinned)
        below = [0] * len(graph.nodes)
        paid = [False] * len(graph.nodes)
        for i in range(len(graph.nodes) - 1, -1, -1):
            node = graph.nodes[i]
            members, is_paid = 0, False
            for k in node.tensors:
                members |= self._bit.get(k, 0)
                is_paid = is_paid or k in is_pinned
            for j in node.inputs:
                members |= below[j]
                is_paid = is_paid or paid[j]
            below[i], paid[i] = members, is_paid
        self._below = below
        self._paid = paid

    def names(self, chosen: NDArray[np.bool_]) -> list[str]:
        """The pinned tensors and the chosen candidates, in backward order."""
        trained = sorted([*self.pinned, *(self.candidates[i] for i in np.flatnonzero(chosen).tolist())])
        return [self.profile.names[k] for k in trained]

    def lanes_s(self, names: list[str]) -> list[float]:
        """What a step takes on each clock."""
        trained = self.profile.graph.indices(names)
        reached = self.profile.graph.reached(trained)
        return [self.profile.data_s + lane.step_s(reached, trained) for lane in self.profile.lanes]

    def peak_node(self, names: list[str]) -> int:
        """The operation during which a step holds the most; their number, if forward does."""
        return int(self.profile.held_bytes(names).argmax())

    def clock(self, lane: Lane, budget_s: float) -> Column:
        """Seconds on one clock."""
        paid = np.asarray(self._paid, dtype=np.bool_)
        spent = lane.fixed_s + float(lane.reach_s[paid].sum()) + float(lane.train_s[self.pinned].sum())
        open_nodes = np.flatnonzero(~paid)
        return Column(
            items=lane.train_s[self.candidates],
            sets=tuple(self._below[i] for i in open_nodes.tolist()),
            set_prices=lane.reach_s[open_nodes],
            capacity=budget_s - self.profile.data_s - spent,
        )

    def moment(self, node: int, limit_bytes: int) -> Column:
        """Bytes held while backward runs one operation (or would, if it were reached), or in the forward pass."""
        graph, memory = self.profile.graph, self.profile.memory
        spent = float(memory.base_bytes)
        items = memory.state_bytes[self.candidates].astype(np.float64)
        if node == len(graph.nodes):
            spent += memory.forward_bytes + float(memory.state_bytes[self.pinned].sum())
            return Column(items, (), np.zeros(0), limit_bytes - spent)
        for i, k in enumerate(self.candidates):
            if min(graph.hosts[k]) <= node:
                items[i] += graph.tensors[k].nbytes
        for k in self.pinned:
            spent += float(memory.state_bytes[k])
            if min(graph.hosts[k]) <= node:
                spent += graph.tensors[k].nbytes
        is_pinned = set(self.pinned)
        sets: list[int] = []
        sizes: list[float] = []
        for storage in memory.storages:
            nodes = [n for n in storage.nodes if n >= node]
            tensors = [k for k in storage.tensors if max(graph.hosts[k]) >= node]
            if any(self._paid[n] for n in nodes) or any(k in is_pinned for k in tensors):
                spent += storage.nbytes
                continue
            members = 0
            for n in nodes:
                members |= self._below[n]
            for k in tensors:
                members |= self._bit.get(k, 0)
            sets.append(members)
            sizes.append(float(storage.nbytes))
        workspace = float(memory.workspace_bytes[node])
        if self._paid[node]:
            spent += workspace
        else:
            sets.append(self._below[node])
            sizes.append(workspace)
        return Column(items, tuple(sets), np.asarray(sizes, dtype=np.float64), limit_bytes - spent)

    def problem(self, values: Floats, columns: list[Column]) -> Problem:
        """The columns side by side, each as a share of its capacity."""
        width = len(columns)
        shares = [max(column.capacity, 1e-300) for column in columns]
        items = np.stack([column.items / share for column, share in zip(columns, shares)], axis=1)
        sets = [members for column in columns for members in column.sets]
        table = np.zeros((len(sets), width))
        row = 0
        for c, (column, share) in enumerate(zip(columns, shares)):
            table[row : row + len(column.sets), c] = column.set_prices / share
            row += len(column.sets)
        return fold(values, items, sets, table)
