"""Sketch: the two ends of a price list, for a run too short for all of it.

A step with everything trained says how long a share of full training is; one of the output layer alone, with its
forward pass, says what training that layer takes. What lies between is spread evenly over the operations and must not
be planned with: the sketch states an error of 100%.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from elastictrainer.errors import ProfileError
from elastictrainer.profiling.cache import describe
from elastictrainer.profiling.calibrate import run_plans
from elastictrainer.profiling.measure import BESIDES, LEAST_EFFORT, candidates_of, uncompiled
from elastictrainer.profiling.profile import Lane, Profile, Residual
from elastictrainer.profiling.refusals import refuse_model
from elastictrainer.profiling.replays import replay_plans
from elastictrainer.profiling.steps import Stepper
from elastictrainer.profiling.trace import LossFn, trace
from elastictrainer.profiling.weigh import weigh
from elastictrainer.runtime.apply import apply, unwrap
from elastictrainer.runtime.capture import find_recorder
from elastictrainer.runtime.untouched import untouched

__all__ = ["is_sketch", "least_profile_s", "sketch"]

ROUNDS = 2
_KEY, _RECORDINGS = "launched_step_s", "recordings_s"
RECORDED = 3.0  # times as many recordings are made for a profile


def sketch(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: Optimizer,
    bn: Literal["frozen", "track", "with_owner"] = "frozen",
    captured: bool = False,
) -> Profile:
    """What a full step and one of the output layer alone take; nothing that tells other plans apart.

    Leaves no trace, as `profile`, and raises what it raises. Costs about eight full steps, and with `captured` three
    recordings; a profile of the least effort costs more than twice as much.
    """
    model = unwrap(model)
    candidates = candidates_of(model, optimizer)
    refuse_model(model, candidates)
    recorder = find_recorder(next(iter(candidates.values())).device) if captured else None
    context = describe(model, candidates, batch, loss_fn=loss_fn, optimizer=optimizer, bn=bn)
    here = torch.cuda.device_of(next(iter(candidates.values())))
    with here, uncompiled(model), untouched(model), apply(model, candidates, bn=bn) as applied:
        traced = trace(model, loss_fn, batch, candidates)
        graph = traced.graph
        if not graph.tensors:
            raise ProfileError("the loss reaches none of the optimizer's parameters: are they those of another model?")
        for parameter in candidates.values():
            parameter.grad = None

        def train(indices: Sequence[int]) -> None:
            applied.update([graph.names[k] for k in indices])

        everything = tuple(range(len(graph.tensors)))
        head = tuple(graph.index[name] for name in graph.head) or (0,)
        train(everything)
        stepper = Stepper(model, loss_fn, batch, optimizer, [candidates[name] for name in graph.names])
        stepper.step()  # everything gets its optimizer state, and the kernels their warm-up
        plans = [everything, head]
        start = time.perf_counter()
        replayed = None if recorder is None else replay_plans(stepper, plans, train, [], recorder, rounds=1)
        recordings_s = time.perf_counter() - start
        if replayed is None:
            (full, least), forward_s = run_plans(stepper, plans, train, rounds=ROUNDS)
            launched_s = full.step_s
        else:
            (full, least), forward_s = replayed.measured, replayed.forward_s
            train(everything)
            launched_s = stepper.timed().step_s
        geometry = [None] * len(graph.nodes)
        memory = weigh(model, loss_fn, batch, traced, geometry=geometry, state_bytes=stepper.state_bytes(), train=train)

    count = len(graph.nodes)
    other_nodes = ~graph.reached(np.asarray(head, dtype=np.intp))
    other_tensors = np.ones(len(graph.tensors), dtype=np.bool_)
    other_tensors[list(head)] = False
    # On a clock that is coarse beside a step the lesser may seem the greater.
    least_s = min(least.step_s, full.step_s)
    forward_s = min(forward_s, least_s)
    lane = Lane(
        name=next(iter(candidates.values())).device.type if replayed is None else "replay",
        forward_total_s=forward_s,
        overhead_s=least_s - forward_s,
        forward_s=np.full(count, forward_s / count),
        fused_s=_spread(full.step_s - least_s, other_nodes),
        pass_s=np.zeros(count),
        # in a network of one operation, what trains besides the head can only be other tensors of it
        dw_s=_spread(0.0 if other_nodes.any() else full.step_s - least_s, other_tensors),
        opt_s=np.zeros(len(graph.tensors)),
    )
    context |= {_KEY: launched_s, _RECORDINGS: recordings_s if replayed is not None else 0.0} | (
        {"captured": True} if replayed is not None else {}
    )
    return Profile(graph=graph, lanes=(lane,), memory=memory, error=Residual(1.0, 1.0, 0), context=context)


def _spread(seconds: float, over: NDArray[np.bool_]) -> NDArray[np.float64]:
    return seconds * over / max(int(over.sum()), 1)


def is_sketch(profile: Profile | None) -> bool:
    return profile is not None and _KEY in profile.context


def least_profile_s(profile: Profile | None) -> float:
    """About how long a whole profile would take, by the sketch: of the least effort, launched step by step, and of
    steps that are replayed the recordings, too."""
    assert profile is not None, "asked of a sketch only"
    return float(profile.context[_KEY] * (LEAST_EFFORT + BESIDES) + RECORDED * profile.context[_RECORDINGS])
