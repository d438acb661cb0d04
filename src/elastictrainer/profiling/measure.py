"""`profile`: trace one real step, time and weigh its parts, calibrate on real plans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from elastictrainer.budget import format_seconds
from elastictrainer.errors import BudgetError, ConfigError, ProfileError
from elastictrainer.graph import Graph
from elastictrainer.profiling.cache import Cache, describe
from elastictrainer.profiling.calibrate import calibrate, calibration_plans, fit_optimizer, raw_lane, run_plans
from elastictrainer.profiling.observe import Allocator, counted_forward_bytes, observe
from elastictrainer.profiling.profile import Profile
from elastictrainer.profiling.refusals import refuse_model
from elastictrainer.profiling.replays import launching, replay_plans
from elastictrainer.profiling.steps import Stepper
from elastictrainer.profiling.timing import split_alone, time_parts
from elastictrainer.profiling.trace import LossFn, forward, trace
from elastictrainer.profiling.weigh import weigh
from elastictrainer.runtime.apply import apply, unwrap
from elastictrainer.runtime.capture import Recorder, find_recorder
from elastictrainer.runtime.untouched import untouched

__all__ = ["candidates_of", "profile", "uncompiled"]

LEAST_EFFORT = 12
BESIDES = 9  # steps that a profile takes beyond its effort


def profile(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: Optimizer | None = None,
    bn: Literal["frozen", "track", "with_owner"] = "frozen",
    effort: int = 100,
    cache: str | Path | None = None,
    seed: int = 0,
    limit_s: float | None = None,
    captured: bool = False,
    bits: bool = False,
) -> Profile:
    """What every tensor of this model costs to train, on this device, with this batch and optimizer.

    Traces autograd's own graph of `loss_fn(model, batch)`: any model, no layer types, no names. The candidates are the
    optimizer's parameters, or without one every parameter that requires a gradient. Afterwards the model, its buffers
    and gradients, the optimizer and every random stream are bit for bit as they were.

    Example:
        >>> import elastictrainer as et
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> batch = torch.randn(4, 8), torch.tensor([0, 1, 0, 1])
        >>> loss_fn = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> price = et.profile(model, loss_fn, batch, effort=12)
        >>> price.names
        ('2.bias', '2.weight', '0.bias', '0.weight')
        >>> price.step_s(["2.bias"]) < price.full_step_s
        True

    Args:
        bn: the BatchNorm policy that training will use; frozen statistics cost less than tracked ones.
        effort: about how many full steps the profile may cost. 100 is under 1% of the paper's 12 epochs of 1,500
            steps; the least is 12, with a larger error, which the profile states.
        cache: a folder in which profiles are kept and found again, keyed by everything that changes the answer; one
            that was taken with less effort is taken again.
        limit_s: give up as soon as it is clear, after about a quarter of the work, that it would take longer.
        captured: on CUDA, price steps that are recorded once and replayed (`et.fit(graphs=True)`), where the host's
            launches cost next to nothing. `Profile.captured` says whether that could be done.
        bits: price steps whose ReLUs keep bits, as under plans with channels (`et.apply`).

    Raises:
        BudgetError: it would take longer than `limit_s`; `least` is about what it would take.
        ProfileError: the step cannot be traced or timed; the message names the module and the way out.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"profile needs a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(effort, int) or effort < LEAST_EFFORT:
        raise ConfigError(f"effort {effort!r} is below {LEAST_EFFORT} steps, which cannot tell a price from noise")
    model = unwrap(model)  # what wraps it (compilation, DDP) comes and goes with a plan, and is the calibration's
    candidates = candidates_of(model, optimizer)
    refuse_model(model, candidates)
    recorder = find_recorder(next(iter(candidates.values())).device) if captured else None
    context = describe(model, candidates, batch, loss_fn=loss_fn, optimizer=optimizer, bn=bn) | {"effort": effort}
    context |= {"captured": True} if recorder is not None else {}
    context |= {"bits": True} if bits else {}
    store = Cache(Path(cache)) if cache is not None else None
    if store is not None and (found := store.find(context)) is not None:
        return found
    made = _measure(
        model, loss_fn, batch, optimizer, candidates,
        bn=bn, effort=effort, context=context, seed=seed, limit_s=limit_s,
        recorder=recorder, bits=bits,
    )  # fmt: skip
    if store is not None:
        store.keep(made)
    return made


def _measure(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: Optimizer | None,
    candidates: dict[str, nn.Parameter],
    *,
    bn: Literal["frozen", "track", "with_owner"],
    effort: int,
    context: dict[str, Any],
    seed: int,
    limit_s: float | None,
    recorder: Recorder | None,
    bits: bool,
) -> Profile:
    start = time.perf_counter()
    here = torch.cuda.device_of(next(iter(candidates.values())))  # CUDA's clocks are the current device's
    with here, uncompiled(model), untouched(model), apply(model, candidates, bn=bn, bits=bits) as applied:
        traced = trace(model, loss_fn, batch, candidates)
        graph = traced.graph
        if not graph.tensors:
            raise ProfileError("the loss reaches none of the optimizer's parameters: are they those of another model?")
        parameters = [candidates[name] for name in graph.names]
        for parameter in candidates.values():
            parameter.grad = None

        def train(indices: Sequence[int]) -> None:
            applied.update([graph.names[k] for k in indices])

        train(range(len(graph.tensors)))
        repeats = max(1, min(5, effort // 20))
        clocks = None if recorder is None else ("device",)  # launches are timed if it comes to launching
        parts, geometry = time_parts(model, loss_fn, batch, traced, parameters, repeats=repeats, lanes=clocks)
        step_s = (time.perf_counter() - start) / (2 * (repeats + 1) + 1)
        _refuse_if_too_long(step_s * (effort + BESIDES), limit_s)
        live = traced.locate(forward(model, loss_fn, batch))
        alone = split_alone(live, traced, geometry, parts[0].all_s, repeats=1 if effort < 50 else 2)
        del live

        stepper = Stepper(model, loss_fn, batch, optimizer, parameters)
        plans = calibration_plans(graph, 12 if effort >= 60 else 8 if effort >= 30 else 5, seed=seed)
        stepper.step()  # everything gets its optimizer state, and the kernels their warm-up
        subsets = [plans[0], plans[0][: len(plans[0]) // 2] or plans[0], plans[1]]
        steps, warmup = (2, 1) if stepper.cuda else (1, 0)
        rounds = max(1, min(8, round((effort - 15) / (0.7 * (steps + warmup) * len(plans)))))  # a plan is 0.7 steps
        replayed = None if recorder is None else replay_plans(stepper, plans, train, subsets, recorder, rounds=rounds)
        if replayed is None:
            if recorder is not None and stepper.cuda:
                train(plans[0])
                launches, _ = time_parts(
                    model, loss_fn, batch, traced, parameters, repeats=repeats, lanes=("launch",)
                )  # fmt: skip
                parts = (*launches, *parts)
            optimizer_host = fit_optimizer(graph, subsets, [stepper.optimizer_s(s) for s in subsets])
            measured, forward_s = run_plans(stepper, plans, train, rounds=rounds, steps=steps, warmup=1 - warmup)
            forwards, optimizers = [forward_s], [optimizer_host]
        memory = weigh(model, loss_fn, batch, traced, geometry=geometry, state_bytes=stepper.state_bytes(), train=train)
        if stepper.cuda and replayed is None:
            train(plans[1])  # the head: what a pass takes at least
            forwards.append(float(np.median([stepper.device_s(lambda: loss_fn(model, batch)) for _ in range(3)])))
            train(plans[0])
            optimizers.append(_device_optimizer(stepper, graph, subsets))
        if stepper.cuda:
            memory = observe(stepper, traced, memory, plans[:4], train, Allocator(), recorded=replayed is not None)
        else:
            memory = replace(memory, forward_bytes=counted_forward_bytes(model, loss_fn, batch))
        drafts = [raw_lane(traced, part, alone) for part in parts]
        if replayed is not None:  # the device's parts; what the host would take to launch them is not waited for
            drafts, measured = [replace(drafts[-1], name="replay")], replayed.measured
            forwards, optimizers = [replayed.forward_s], [fit_optimizer(graph, subsets, replayed.optimizer_s)]
        lanes, error = calibrate(
            graph,
            memory,
            drafts,
            measured,
            forward_s=forwards,
            optimizer=optimizers,
        )
        if replayed is not None:
            lanes = (launching(lanes[0], replayed.host_s), *lanes)
    return Profile(graph=graph, lanes=lanes, memory=memory, error=error, context=context)


def _refuse_if_too_long(whole_s: float, limit_s: float | None) -> None:
    if limit_s is not None and whole_s > limit_s:
        raise BudgetError(
            f"finding out what a step costs takes about {format_seconds(whole_s)} on this machine as it is now, and "
            f"there are {format_seconds(limit_s)} for it",
            least=whole_s,
        )


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, compiled parts run as what they were compiled from, as a compiled model does: they hide their nodes."""
    compiled = any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def candidates_of(model: nn.Module, optimizer: Optimizer | None) -> dict[str, nn.Parameter]:
    """By name, what may train: the optimizer's parameters, or without one all that require a gradient."""
    named = dict(model.named_parameters())
    if optimizer is None:
        found = {name: p for name, p in named.items() if p.requires_grad}
    else:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = {name: p for name, p in named.items() if id(p) in held}
    if not found:
        raise ProfileError("nothing to profile: no parameter of the model requires a gradient or is in the optimizer")
    return found


def _device_optimizer(stepper: Stepper, graph: Graph, subsets: Sequence[tuple[int, ...]]) -> tuple[float, Any]:
    return fit_optimizer(graph, subsets, [stepper.optimizer_s(s, clock=stepper.device_s) for s in subsets])
