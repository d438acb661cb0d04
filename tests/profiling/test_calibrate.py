"""Calibration on made-up machines whose true prices are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from elastictrainer.profiling.calibrate import (
    Measured,
    calibrate,
    calibration_plans,
    fit_optimizer,
    raw_lane,
    run_plans,
)
from elastictrainer.profiling.profile import Lane, Memory, Storage
from elastictrainer.profiling.steps import Timed, nonnegative_fit
from elastictrainer.profiling.timing import Alone, PartTimes, deepest
from elastictrainer.profiling.trace import trace
from tests.zoo import ZOO


def _traced(name="residual"):
    torch.manual_seed(0)
    model, batch, loss_fn = ZOO[name]()
    return trace(model, loss_fn, batch, dict(model.named_parameters()))


def _parts(traced, rng, lane="cpu"):
    nodes, tensors = len(traced.graph.nodes), len(traced.graph.tensors)
    reached = traced.graph.reached(deepest(traced))
    everything = rng.random(nodes) + 0.1
    passing = np.where(reached, everything * rng.random(nodes), 0.0)
    return PartTimes(lane, everything, passing, rng.random(tensors), rng.random(nodes))


@pytest.mark.parametrize("name", ZOO)
def test_every_second_measured_is_charged_to_someone(name):
    traced, rng = _traced(name), np.random.default_rng(0)
    parts = _parts(traced, rng)
    alone = {
        i: Alone(0.2, tuple(rng.random(len(row))))
        for i, row in enumerate(traced.edges)
        if rng.random() < 0.7 and any(e is not None for e in row)
    }
    lane = raw_lane(traced, parts, alone)
    charged = lane.fused_s.sum() + lane.pass_s.sum() + lane.dw_s.sum()
    assert charged == pytest.approx(parts.all_s.sum() + parts.accumulate_s.sum())


@pytest.mark.parametrize("name", ZOO)
def test_passing_alone_costs_what_was_measured_so(name):
    """The sum over what the deepest tensors reach, less their own gradients, is the passing run's."""
    traced, rng = _traced(name), np.random.default_rng(1)
    parts = _parts(traced, rng)
    lane = raw_lane(traced, parts, {})
    sinks = np.asarray(deepest(traced), dtype=np.intp)
    reached = traced.graph.reached(sinks)
    shared = np.unpackbits(traced.graph.leads_to, axis=1, count=len(reached)).sum(axis=0) > 1
    whole = lane.reach_s @ (reached & shared) + sum(lane.dw_s[k] - parts.accumulate_s[k] for k in sinks)
    assert whole <= parts.all_s[reached].sum() + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_nonnegative_fit_agrees_with_scipy(seed):
    rng = np.random.default_rng(seed)
    features, target = rng.random((12, 4)), rng.random(12) - 0.3
    ours = nonnegative_fit(features, target, prior=np.zeros(4), trust=np.zeros(4))
    assert ours == pytest.approx(nnls(features, target)[0], abs=1e-6)


def _lane(traced, rng, **scalars):
    nodes, tensors = len(traced.graph.nodes), len(traced.graph.tensors)
    forward, fused, passing = rng.random((3, nodes)) * 1e-4
    own, optimizer = rng.random((2, tensors)) * [[2e-4], [1e-5]]
    return Lane(scalars.get("name", "cpu"), scalars.get("forward", 1e-3), 0.0, forward, fused, passing, own, optimizer)


def _memory(traced):
    nodes, tensors = len(traced.graph.nodes), len(traced.graph.tensors)
    return Memory(0, tuple(Storage(1000, (i,), ()) for i in range(nodes)), np.zeros(nodes, int), np.zeros(tensors, int))


def _measured(traced, lanes, count=12):
    rows = []
    for plan in calibration_plans(traced.graph, count):
        trained = np.asarray(plan)
        seconds = [lane.step_s(traced.graph.reached(trained), trained) for lane in lanes]
        rows.append(Measured(plan, max(seconds), seconds[0]))
    return rows


@pytest.mark.parametrize(("scale", "per_node"), [(1.0, 0.0), (1.3, 0.0), (1.0, 2e-5), (0.8, 1e-5)])
def test_what_the_parts_missed_is_found(scale, per_node):
    """A machine that is `scale` slower than its parts and pays per node: predictions must land, seen or unseen."""
    traced, rng = _traced(), np.random.default_rng(0)
    parts = _lane(traced, rng)
    true = replace(
        parts,
        forward_total_s=1.2e-3,
        fused_s=parts.fused_s * scale + per_node,
        pass_s=parts.pass_s * scale,
        dw_s=parts.dw_s * scale + per_node,
    )
    lanes, error = calibrate(
        traced.graph,
        _memory(traced),
        [parts],
        _measured(traced, [true]),
        forward_s=[1e-3],
        optimizer=[(0.0, parts.opt_s)],
    )
    assert error.median < 0.01
    for _ in range(20):
        trained = np.flatnonzero(rng.random(len(traced.graph.tensors)) < rng.random())
        reached = traced.graph.reached(trained)
        assert lanes[0].step_s(reached, trained) == pytest.approx(true.step_s(reached, trained), rel=0.05)


def test_each_lane_learns_from_the_plans_it_binds():
    """Small plans wait for the host, large ones for the device."""
    traced, rng = _traced(), np.random.default_rng(0)
    host = _lane(traced, rng, name="launch", forward=2e-3)
    device = Lane("device", 5e-4, 0.0, host.forward_s, host.fused_s * 4, host.pass_s * 4, host.dw_s * 4, host.opt_s)
    rows = _measured(traced, [host, device])
    bound = {
        int(np.argmax([lane.step_s(traced.graph.reached(r.trained), np.asarray(r.trained)) for lane in (host, device)]))
        for r in rows
    }
    assert bound == {0, 1}
    lanes, error = calibrate(
        traced.graph, _memory(traced), [host, device], rows, forward_s=[2e-3, 5e-4], optimizer=[(0.0, host.opt_s)] * 2
    )
    assert [lane.name for lane in lanes] == ["launch", "device"]
    assert error.p95 < 0.05


def test_the_optimizer_is_a_constant_a_tensor_and_a_byte():
    traced = _traced()
    graph = traced.graph
    nbytes = np.asarray([t.nbytes for t in graph.tensors])
    plans = [tuple(range(len(nbytes))), tuple(range(len(nbytes) // 2)), (0,)]
    seconds = [1e-5 + 2e-6 * len(p) + 1e-9 * nbytes[list(p)].sum() for p in plans]
    constant, share = fit_optimizer(graph, plans, seconds)
    for plan, expected in zip(plans, seconds):
        assert constant + share[list(plan)].sum() == pytest.approx(expected, rel=0.02)


def test_a_machine_that_slows_down_in_the_middle_changes_no_ratio():
    class Throttled:
        """Stands for a stepper: a plan's true time is its length; the machine halves its speed half-way through."""

        def __init__(self) -> None:
            self.calls, self.plan = 0, ()

        def train(self, plan):
            self.plan = plan

        def timed(self, steps):
            self.calls += 1
            seconds = len(self.plan) * (1.0 if self.calls < 60 else 2.0)
            return Timed(seconds, seconds, 0.1)

    machine = Throttled()
    plans = [tuple(range(n)) for n in (20, 1, 5, 10, 15, 19, 3)]
    measured, _ = run_plans(machine, plans, machine.train, rounds=9)
    full = measured[0].step_s
    for row in measured:
        assert row.step_s / full == pytest.approx(len(row.trained) / 20, rel=1e-6)


def test_calibration_plans_cover_depth_and_always_hold_everything_and_the_head():
    graph = _traced().graph
    plans = calibration_plans(graph, 12)
    assert plans[0] == tuple(range(len(graph.tensors)))
    assert {graph.names[k] for k in plans[1]} == set(graph.head)
    assert max(max(p) for p in plans[2:]) == len(graph.tensors) - 1
    assert len({max(p) for p in plans}) > len(graph.tensors) // 2
