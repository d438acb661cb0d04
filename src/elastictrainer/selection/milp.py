"""The same choice as an integer programme: slow, independent of the solver, and an oracle for its tests.

    max sum_k I_k x_k    x_k in {0, 1} by tensor, 0 <= r_n <= 1 by operation (1: reached)
    r_n >= x_k  for a tensor k on n        r_n >= r_m  for every deeper m that n hands a gradient to
    fixed + sum_n reach_n r_n + sum_k train_k x_k <= budget        for every clock

Memory adds, for each operation n at which an answer turned out to peak above the limit, one more row over new variables
0 <= h_s <= 1 (1: storage s is still held while n runs), with h_s >= r_m and h_s >= x_k for its holders at or below n;
for the forward pass, a row over optimizer state alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.profiling.profile import Profile

__all__ = ["select_milp"]


def select_milp(
    profile: Profile,
    scores: Mapping[str, float],
    *,
    budget_s: float | None = None,
    memory_bytes: int | None = None,
    pinned: Iterable[str] = (),
    gap: float = 0.0,
    most_s: float | None = None,
) -> tuple[tuple[str, ...], float]:
    """The best set of tensors, in backward order, and an upper bound on its score, by `scipy.optimize.milp`.

    Costs from milliseconds to minutes. `gap` is the relative gap at which it may stop, `most_s` the seconds after which
    it must (each time that memory adds a row): the set is then the best one found so far, and the bound still holds.

    Raises:
        ConfigError: scipy is not there.
        BudgetError: nothing fits, pinned tensors included, or nothing that does was found in time.
    """
    kept = set(profile.graph.indices(pinned).tolist())
    programme = _Programme(profile, scores, kept)
    if budget_s is not None:
        for lane in profile.lanes:
            room = budget_s - profile.data_s - lane.fixed_s
            # In shares of the room: HiGHS's tolerances are absolute.
            scale = max(room, 1e-12)
            programme.limit(lane.train_s / scale, lane.reach_s / scale, {}, room / scale)
    moments: set[int] = set()
    while True:
        names, bound = programme.solve(gap, most_s)
        if memory_bytes is None or profile.peak_bytes(names) <= memory_bytes:
            return names, bound
        moment = int(profile.held_bytes(names).argmax())
        if moment in moments:
            raise BudgetError(
                f"the integer programme keeps {memory_bytes} bytes only within its tolerance; allow a byte more"
            )
        moments.add(moment)
        programme.limit_moment(moment, memory_bytes)


class _Programme:
    """Columns: a tensor's x, then an operation's r, then whatever moments add."""

    def __init__(self, profile: Profile, scores: Mapping[str, float], kept: set[int]) -> None:
        graph = profile.graph
        self.profile = profile
        self.tensors = len(graph.tensors)
        self.objective = [-float(scores[name]) for name in profile.names]
        self.lower = [1.0 if k in kept else 0.0 for k in range(self.tensors)]
        self.upper = [1.0 if k in kept or scores[name] > 0 else 0.0 for k, name in enumerate(profile.names)]
        self.rows: list[dict[int, float]] = []
        self.most: list[float] = []
        self.reached = [self.variable() for _ in graph.nodes]
        for n, node in enumerate(graph.nodes):
            for k in node.tensors:
                self.at_least(self.reached[n], k)
            for m in node.inputs:
                self.at_least(self.reached[n], self.reached[m])

    def variable(self) -> int:
        self.objective.append(0.0)
        self.lower.append(0.0)
        self.upper.append(1.0)
        return len(self.objective) - 1

    def at_least(self, larger: int, smaller: int) -> None:
        self.rows.append({smaller: 1.0, larger: -1.0})
        self.most.append(0.0)

    def limit(self, by_tensor: Any, by_node: Any, more: dict[int, float], most: float) -> None:
        row = {k: float(price) for k, price in enumerate(by_tensor) if price}
        row |= {self.reached[n]: float(price) for n, price in enumerate(by_node) if price}
        self.rows.append(row | more)
        self.most.append(most)

    def limit_moment(self, moment: int, memory_bytes: int) -> None:
        graph, memory = self.profile.graph, self.profile.memory
        held: dict[int, float] = {}
        scale = float(memory_bytes)
        if moment == len(graph.nodes):  # the forward pass
            room = (memory_bytes - memory.base_bytes - memory.forward_bytes) / scale
            self.limit(memory.state_bytes / scale, (), {}, room)
            return
        for storage in memory.storages:
            holders = [self.reached[n] for n in storage.nodes if n >= moment]
            holders += [k for k in storage.tensors if max(graph.hosts[k]) >= moment]
            if holders:
                variable = self.variable()
                held[variable] = storage.nbytes / scale
                for holder in holders:
                    self.at_least(variable, holder)
        made = [t.nbytes if min(graph.hosts[k]) <= moment else 0 for k, t in enumerate(graph.tensors)]
        workspace = np.zeros(len(graph.nodes))
        workspace[moment] = memory.workspace_bytes[moment] / scale
        self.limit((memory.state_bytes + made) / scale, workspace, held, (memory_bytes - memory.base_bytes) / scale)

    def solve(self, gap: float, most_s: float | None = None) -> tuple[tuple[str, ...], float]:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError as error:
            raise ConfigError("the integer programme needs scipy: pip install 'elastictrainer[milp]'") from error
        entries = [(r, c, v) for r, row in enumerate(self.rows) for c, v in row.items()]
        r, c, v = zip(*entries)
        matrix = coo_array((v, (r, c)), shape=(len(self.rows), len(self.objective))).tocsr()
        integral = np.zeros(len(self.objective))
        integral[: self.tensors] = 1
        result = milp(
            c=np.asarray(self.objective),
            constraints=LinearConstraint(matrix, ub=np.asarray(self.most)),
            bounds=Bounds(np.asarray(self.lower), np.asarray(self.upper)),
            integrality=integral,
            options={"mip_rel_gap": gap} | ({} if most_s is None else {"time_limit": most_s}),
        )
        if result.x is None:
            raise BudgetError(f"the integer programme found nothing that fits: {result.message}")
        chosen = np.flatnonzero(result.x[: self.tensors] > 0.5)
        return tuple(self.profile.names[k] for k in chosen), -float(result.mip_dual_bound)
