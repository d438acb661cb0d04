"""From timed parts to a price list whose sums predict real steps, and an honest statement of how well.

The parts miss what happens between them: the engine's own work per node, the allocator's for what is kept, caches, what
a layer at rest does differently, and on a GPU that the host may be the one who is late. A handful of real plans is run
un-instrumented, interleaved with full steps so that a machine that slows down slows both, and the coefficients of

    step(S) = forward + constant + a * passing(S) + b * own(S)
              + c * nodes(S) + d * tensors(S) + e * kept_bytes(S) + optimizer(S)

are fitted by non-negative least squares on relative errors, drawn to "the parts are right" (a = b = 1, the rest 0).
Each coefficient is then folded into the nodes and tensors it belongs to, so a profile holds plain sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elastictrainer.graph import Graph
from elastictrainer.profiling.profile import Lane, Memory, Residual
from elastictrainer.profiling.steps import Timed, nonnegative_fit
from elastictrainer.profiling.timing import Alone, PartTimes, deepest
from elastictrainer.profiling.trace import Trace

__all__ = ["Measured", "calibrate", "calibration_plans", "fit_optimizer", "raw_lane", "run_plans"]

Floats = NDArray[np.float64]
# A plan's measured ratio is good to about 2%; the parts' scales are believed to within 15%, what they miss to be within
# 10% of a full step (5% for the constant). The squared ratio of the first to the others is each prior's weight.
_TRUST = (0.02 / np.asarray([0.05, 0.15, 0.15, 0.1, 0.1, 0.1])) ** 2
_PRIOR = np.asarray([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
_WAITS = 1.1  # a step this much longer than the host's part of it was bound by the device
_FULL_WEIGHT = 3.0  # every budget is a share of the full step: it must be right


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan that was really run: its tensors (by position), its seconds a step and the host's part of them."""

    trained: tuple[int, ...]
    step_s: float
    host_s: float


def calibration_plans(graph: Graph, count: int, *, seed: int = 0) -> list[tuple[int, ...]]:
    """Plans that cover depth and density: everything, the head, then every depth, thin and thick by turns."""
    rng = np.random.default_rng(seed)
    total = len(graph.tensors)
    head = tuple(graph.index[name] for name in graph.head) or (0,)
    plans: list[tuple[int, ...]] = [tuple(range(total)), head]
    for j in range(max(count - 2, 0)):
        depth = max(1, round(total * (j + 1) / (count - 2)))
        density = (1.0, 0.15, 0.5)[j % 3]
        chosen = set(np.flatnonzero(rng.random(depth) < density).tolist()) | {depth - 1}
        plans.append(tuple(sorted(chosen)))
    return plans


class _Timer(Protocol):
    def timed(self, steps: int = 1) -> Timed: ...


def run_plans(
    stepper: _Timer,
    plans: Sequence[tuple[int, ...]],
    train: Callable[[Sequence[int]], None],
    *,
    rounds: int,
    steps: int = 1,
    warmup: int = 1,
) -> tuple[list[Measured], float]:
    """Time each plan once a round, full steps between them; returns per-plan seconds and the forward pass's.

    A plan's figure is the median over rounds of its ratio to the full steps around it, times the median full step: a
    machine that is slower for a while changes neither. The first `warmup` rounds are dropped; none need be where every
    timing begins with a step of warm-up of its own.
    """
    everything = plans[0]
    ratios: list[list[tuple[float, float]]] = [[] for _ in plans]
    fulls: list[float] = []
    forwards: list[float] = []
    for round_ in range(warmup + rounds):
        times: list[Timed] = []
        around: list[float] = []
        for index, plan in enumerate(plans):
            if index % 4 == 0:
                train(everything)
                full = stepper.timed(steps)
                around.append(full.step_s)
            if index:
                train(plan)
            times.append(stepper.timed(steps) if index else full)
        if round_ >= warmup:
            reference = float(np.median(around))
            fulls += around
            # the head's pass, which keeps least; not more than the others', should something have come between
            heads = times[min(1, len(times) - 1)].forward_s
            forwards.append(min(heads, float(np.median([timed.forward_s for timed in times]))))
            for row, timed in zip(ratios, times):
                row.append((timed.step_s / reference, timed.host_s / reference))
    full_s = float(np.median(fulls))
    medians = [np.median(np.asarray(row), axis=0) * full_s for row in ratios]
    measured = [Measured(plan, float(m[0]), float(m[1])) for plan, m in zip(plans, medians)]
    return [replace(measured[0], step_s=full_s), *measured[1:]], float(np.median(forwards))


def raw_lane(trace: Trace, parts: PartTimes, alone: dict[int, Alone]) -> Lane:
    """Divide each operation's time among what it is paid for, before calibration.

    With the deepest tensors alone trained (`passing_s`) an operation pays its fused part and its passing gradients;
    what it takes beyond that with everything trained is its weights'. The proportions inside each come from `alone`.
    """
    graph = trace.graph
    sinks = deepest(trace)
    reached = graph.reached(sinks)
    fused, passing, dw = np.zeros(len(graph.nodes)), np.zeros(len(graph.nodes)), parts.accumulate_s.copy()

    def pay(target: int, seconds: float) -> None:
        if target >= 0:
            passing[target] += seconds
        else:
            dw[-1 - target] += seconds

    for i, row in enumerate(trace.edges):
        edges = [(e, target) for e, target in enumerate(row) if target is not None]
        share = alone.get(i, Alone(1.0, (0.0,) * len(row)))  # not measured alone: what is not a weight's is fused
        # An operation that the deepest tensors do not reach leads to one tensor only: all its time has one payer.
        own = [(e, t) for e, t in edges if reached[i] and not (reached[t] if t >= 0 else -1 - t in sinks)]
        shared = [edge for edge in edges if edge not in own]
        base = parts.passing_s[i] if own else parts.all_s[i]
        first, *rest = _divide(base, [share.fused, *(share.edges[e] for e, _ in shared)])
        fused[i] = first
        for (_, target), seconds in zip(shared, rest):
            pay(target, seconds)
        for (_, target), seconds in zip(own, _divide(parts.all_s[i] - base, [share.edges[e] for e, _ in own])):
            pay(target, seconds)
    zeros = np.zeros(len(graph.tensors))
    return Lane(parts.lane, 0.0, 0.0, parts.forward_s, fused, passing, dw, zeros)


def _divide(amount: float, weights: Sequence[float]) -> list[float]:
    """An amount in proportion to the weights, or evenly if all are zero."""
    whole = sum(weights)
    return [amount * (weight / whole if whole > 0 else 1 / len(weights)) for weight in weights]


def fit_optimizer(graph: Graph, plans: Sequence[tuple[int, ...]], seconds: Sequence[float]) -> tuple[float, Floats]:
    """The optimizer's step as a constant, so much a tensor and so much a byte: (constant, share per tensor)."""
    nbytes = np.asarray([t.nbytes for t in graph.tensors], dtype=np.float64)
    rows = np.asarray([[1.0, len(plan), nbytes[list(plan)].sum()] for plan in plans])
    target = np.asarray(seconds)
    scale = np.maximum(rows.max(axis=0), 1e-30)
    weight = 1 / np.maximum(target, 1e-9)
    fitted = (
        nonnegative_fit(rows / scale * weight[:, None], target * weight, prior=np.zeros(3), trust=np.full(3, 1e-9))
        / scale
    )
    return float(fitted[0]), fitted[1] + fitted[2] * nbytes


def calibrate(
    graph: Graph,
    memory: Memory,
    lanes: Sequence[Lane],
    measured: Sequence[Measured],
    *,
    forward_s: Sequence[float],
    optimizer: Sequence[tuple[float, Floats]],
) -> tuple[tuple[Lane, ...], Residual]:
    """Fit the lanes to the measured plans; the residual is of each plan predicted from all the others.

    On CUDA the launch lane learns from the time the host took to issue each plan's step, the device lane from the plans
    that the host had to wait for. A lane with too few plans to learn from keeps the parts as they were measured.
    """
    drafts = [_with_optimizer(lane, f, o) for lane, f, o in zip(lanes, forward_s, optimizer)]

    def fit(rows: Sequence[Measured]) -> list[Lane]:
        if len(drafts) == 1:
            return [_fit(graph, memory, drafts[0], [(row.trained, row.step_s) for row in rows])]
        waited = [row.step_s > _WAITS * row.host_s for row in rows]
        host = [(row.trained, row.host_s if w else row.step_s) for row, w in zip(rows, waited)]
        device = [(row.trained, row.step_s) for row, w in zip(rows, waited) if w]
        return [_fit(graph, memory, draft, seen) for draft, seen in zip(drafts, (host, device))]

    unseen = []
    for left_out in range(1, len(measured)):  # the full step always stays in: it is the unit
        lanes_without = fit([m for i, m in enumerate(measured) if i != left_out])
        row = measured[left_out]
        unseen.append(abs(_predict(graph, lanes_without, row) / row.step_s - 1))
    residual = Residual(
        median=float(np.median(unseen)) if unseen else 0.0,
        p95=float(np.quantile(unseen, 0.95)) if unseen else 0.0,
        plans=len(unseen),
    )
    return tuple(fit(measured)), residual


def _predict(graph: Graph, lanes: Sequence[Lane], row: Measured) -> float:
    trained = np.asarray(row.trained, dtype=np.intp)
    reached = graph.reached(trained)
    return max(lane.step_s(reached, trained) for lane in lanes)


def _with_optimizer(lane: Lane, forward_s: float, optimizer: tuple[float, Floats]) -> Lane:
    constant, share = optimizer
    spread = float(lane.forward_s.sum())
    forward = lane.forward_s * (forward_s / spread) if spread > 0 else lane.forward_s
    return Lane(lane.name, forward_s, constant, forward, lane.fused_s, lane.pass_s, lane.dw_s, share)


def _kept_per_node(graph: Graph, memory: Memory) -> tuple[Floats, Floats]:
    """Kept bytes as a sum over nodes and tensors: a storage is charged to the holder nearest the loss."""
    nodes, tensors = np.zeros(len(graph.nodes)), np.zeros(len(graph.tensors))
    for storage in memory.storages:
        if storage.nodes:
            nodes[min(storage.nodes)] += storage.nbytes
        elif storage.tensors:
            tensors[min(storage.tensors, key=lambda k: min(graph.hosts[k]))] += storage.nbytes
    return nodes, tensors


def _fit(graph: Graph, memory: Memory, lane: Lane, rows: Sequence[tuple[tuple[int, ...], float]]) -> Lane:
    if len(rows) < 3:
        return lane
    node_bytes, tensor_bytes = _kept_per_node(graph, memory)
    # units in which a coefficient of 1 means a whole full step
    unit = max(seconds for _, seconds in rows) / np.asarray(
        [1.0, np.nan, np.nan, len(graph.nodes), len(graph.tensors), max(node_bytes.sum() + tensor_bytes.sum(), 1.0)]
    )
    unit[1:3] = 1.0
    features, target = [], []
    for names, seconds in rows:
        trained = np.asarray(names, dtype=np.intp)
        reached = graph.reached(trained)
        row = [
            1.0,
            lane.reach_s @ reached,
            lane.dw_s[trained].sum(),
            reached.sum(),
            len(trained),
            node_bytes @ reached + tensor_bytes[trained].sum(),
        ]
        weight = (_FULL_WEIGHT if len(trained) == len(graph.tensors) else 1.0) / seconds
        features.append(weight * np.asarray(row) * unit)
        target.append(weight * (seconds - lane.fixed_s - lane.opt_s[trained].sum()))
    found = nonnegative_fit(np.asarray(features), np.asarray(target), prior=_PRIOR, trust=_TRUST) * unit
    constant, passing, own, per_node, per_tensor, per_byte = found.tolist()
    return replace(
        lane,
        overhead_s=lane.overhead_s + constant,
        fused_s=lane.fused_s * passing + per_node + per_byte * node_bytes,
        pass_s=lane.pass_s * passing,
        dw_s=lane.dw_s * own + per_tensor + per_byte * tensor_bytes,
    )
