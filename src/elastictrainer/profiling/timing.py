"""Time the parts of a step where they run: every autograd node by hooks, forward at every module's door.

Three measurements, none of which knows a layer type:

- *in place*, everything trained (`all_s`) and only as much as makes every operation pass (`passing_s`): their
  difference is what weights' own gradients cost, with the caches and the allocator as they are in real training;
- *alone*, each of an operation's gradients by itself and all together: what they share (the fused part) and how they
  divide. Only the proportions are used, since alone an operation finds its data in the cache.

On CUDA there are two clocks. The launch lane is the host's time to issue an operation, read without synchronising. The
device lane is the time between events, taken behind a sleeping kernel, so that the queue is never empty and an event
never waits for the host. On any other accelerator there is one clock, read when the device has caught up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as AutogradNode

from elastictrainer.metrics.timing import synchronize
from elastictrainer.profiling.trace import Live, LossFn, Trace, forward, note_owners

__all__ = ["PartTimes", "clock_of", "deepest", "sleep", "split_alone", "time_parts"]

Floats = NDArray[np.float64]
ALONE_SHARE = 0.001  # an operation under a thousandth of backward is not worth measuring alone
_CYCLES_PER_S = 2e9  # an upper estimate of a GPU's clock, for the length of the sleeping kernel
_EVENT_S = 3e-5  # what the host takes to make and record an operation's two events, at most
_ISSUE_S = 2e-4  # and to issue an operation; more was spent waiting for room in the queue
_CUDA = ("launch", "device")


@dataclass(frozen=True, eq=False)
class PartTimes:
    """Medians over the repeats, in seconds, on one lane; arrays are indexed like the graph's nodes and tensors."""

    lane: str
    all_s: Floats
    passing_s: Floats
    accumulate_s: Floats
    forward_s: Floats


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock for work on this device: where work is asynchronous, it waits until the device has done all it was given.

    For CUDA's launch lane, which must not wait, read the host's clock instead.
    """
    if device.type == "cpu":
        return time.perf_counter

    def when_done() -> float:
        synchronize(device)
        return time.perf_counter()

    return when_done


def sleep(host_s: float) -> None:
    """CUDA only: keep the device busy for as long as the host takes to issue what comes next, and half as long again.

    Any longer would be paid by whoever waits for the profile: at batch 4 on a large GPU most of it would be sleep.
    """
    torch.cuda._sleep(int(_CYCLES_PER_S * (0.005 + 1.5 * host_s)))


def deepest(trace: Trace) -> tuple[int, ...]:
    """A small set of tensors that makes every shared operation run: one at each dead end of the graph.

    An operation that leads to a single tensor (a weight's own transpose or cast, the very first layer) belongs to that
    tensor's price, and is left out.
    """
    graph = trace.graph
    rows = np.unpackbits(graph.leads_to, axis=1, count=len(graph.nodes)).view(np.bool_)
    shared = rows.sum(axis=0) > 1
    chosen: list[int] = []
    covered = np.zeros(len(graph.nodes), dtype=np.bool_)
    for node in range(len(graph.nodes) - 1, -1, -1):
        if shared[node] and not covered[node]:
            below = np.flatnonzero(rows[:, node])
            # the smallest one, a bias before its weight: its own gradient is the least disturbance
            k = min(below.tolist(), key=lambda k: (graph.tensors[k].nbytes, -k))
            chosen.append(k)
            covered |= rows[k]
    return tuple(chosen) or ((len(graph.tensors) - 1,) if graph.tensors else ())


def time_parts(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    trace: Trace,
    parameters: Sequence[nn.Parameter],
    *,
    repeats: int,
    warmup: int = 1,
    lanes: Sequence[str] | None = None,
) -> tuple[tuple[PartTimes, ...], tuple[Any, ...]]:
    """Time every part in place; also returns the geometry of the gradients each operation receives, for `split_alone`.

    `lanes`: on CUDA, those that are wanted; both by default. Where steps are replayed nobody waits for the launches.

    Costs `2 * (repeats + warmup)` steps a lane and one more forward pass. `parameters` stand in the graph's order.
    """
    device = parameters[0].device
    sinks = [parameters[k] for k in deepest(trace)]
    geometry: list[Any] = [None] * len(trace.graph.nodes)
    timed: list[PartTimes] = []
    host_s = 0.0  # to issue one instrumented pass, which the device lane has to sleep through
    now = time.perf_counter if device.type == "cuda" else clock_of(device)
    for lane in (lanes or _CUDA) if device.type == "cuda" else (device.type,):
        samples: dict[str, list[tuple[Floats, Floats]]] = {"all": [], "passing": []}
        # events are exact, and every pass behind a sleep costs as much as two
        for repeat in range(warmup + (min(repeats, 3) if lane == "device" else repeats)):
            for which, inputs in (("all", None), ("passing", sinks)):
                loss = forward(model, loss_fn, batch)
                live = trace.locate(loss)
                seen = geometry if which == "all" and repeat == 0 else None
                *result, issued_s = _time_backward(
                    live, inputs or list(parameters), lane=lane, now=now, geometry=seen, host_s=host_s
                )
                # Told by the launch lane; where it is not timed, by the passes before, of which the first warm up.
                if which == "all" and (repeat >= warmup if lane == "launch" else not timed):
                    host_s = max(host_s, issued_s) if lane == "launch" else issued_s
                if repeat >= warmup:
                    samples[which].append((result[0], result[1]))
                for parameter in parameters:
                    parameter.grad = None
                del loss, live
        median = {which: [np.median(np.stack(rows), axis=0) for rows in zip(*runs)] for which, runs in samples.items()}
        timed.append(
            PartTimes(
                lane=lane,
                all_s=median["all"][0],
                passing_s=np.minimum(median["passing"][0], median["all"][0]),
                accumulate_s=median["all"][1],
                forward_s=_time_forward(model, loss_fn, batch, trace, weight_s=median["all"][0], lane=lane, now=now),
            )
        )
    return tuple(timed), tuple(geometry)


def _time_backward(
    live: Live,
    inputs: list[nn.Parameter],
    *,
    lane: str,
    now: Callable[[], float],
    geometry: list[Any] | None,
    host_s: float,
) -> tuple[Floats, Floats, float]:
    """Seconds of each operation, of each tensor's accumulation, and of the host for issuing the whole."""
    nodes = live.operations + live.accumulators
    begin: list[Any] = [None] * len(nodes)
    end: list[Any] = [None] * len(nodes)
    stamp: Callable[[], Any] = _event if lane == "device" else now
    handles = []
    for i, node in enumerate(nodes):

        def before(grads: Any, i: int = i) -> None:
            if geometry is not None and i < len(geometry):
                geometry[i] = tuple(None if g is None else (g.shape, g.stride(), g.dtype, g.device) for g in grads)
            begin[i] = stamp()

        def after(_: Any, __: Any, i: int = i) -> None:
            end[i] = stamp()

        handles += [node.register_prehook(before), node.register_hook(after)]
    if lane in _CUDA:
        torch.cuda.synchronize()
    if lane == "device":
        sleep(min(host_s, _ISSUE_S * len(nodes)) + _EVENT_S * len(nodes))
    start = time.perf_counter()
    try:
        live.loss.backward(inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    issued_s = time.perf_counter() - start
    if lane in _CUDA:
        torch.cuda.synchronize()
    if lane == "device":
        spent = [0.0 if b is None or e is None else b.elapsed_time(e) * 1e-3 for b, e in zip(begin, end)]
    else:
        spent = [0.0 if b is None or e is None else e - b for b, e in zip(begin, end)]
    count = len(live.operations)
    return np.asarray(spent[:count]), np.asarray(spent[count:]), issued_s


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _time_forward(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    trace: Trace,
    *,
    weight_s: Floats,
    lane: str,
    now: Callable[[], float],
) -> Floats:
    """Forward seconds per node: the clock is read at every module's door; what lies between two doors is shared among
    the nodes recorded there by their backward time.

    A dispatch mode would time each operator, but torch decomposes some operators differently while one is active.
    """
    stamp: Callable[[], Any] = _event if lane == "device" else now
    if lane in _CUDA:
        torch.cuda.synchronize()
    if lane == "device":
        sleep(0.01 + 1e-4 * len(trace.graph.nodes))
    with note_owners(model, stamp) as owners:
        loss = forward(model, loss_fn, batch)
        last = stamp()
    numbers = np.asarray([_sequence_number(node) for node in trace.locate(loss).operations])
    if lane in _CUDA:
        torch.cuda.synchronize()
    stamps = [*owners.stamps, last]
    spent = np.zeros(len(numbers))
    room = (
        np.searchsorted(np.asarray(owners.starts), numbers, side="right") - 1
    )  # the interval each node was recorded in
    for interval in np.unique(room[room >= 0]):
        begin, end = stamps[interval], stamps[interval + 1]
        seconds = begin.elapsed_time(end) * 1e-3 if lane == "device" else end - begin
        inside = room == interval
        share = weight_s[inside] + 1e-9
        spent[inside] += seconds * share / share.sum()
    return spent


def _sequence_number(node: AutogradNode) -> int:
    number = getattr(node, "_sequence_nr", None)
    return int(number()) if callable(number) else -1


@dataclass(frozen=True, slots=True)
class Alone:
    """One operation run by itself: the share of its work that is fused, and each gradient's own share."""

    fused: float
    edges: tuple[float, ...]


def split_alone(
    live: Live, trace: Trace, geometry: Sequence[Any], weight_s: Floats, *, repeats: int = 2
) -> dict[int, Alone]:
    """Run each operation that has several gradients by itself: one gradient at a time, and all together.

    `weight_s` says how much each operation matters. The values fed in are noise of the right shape: time does not
    depend on them. Costs about `repeats * (edges + 1)` times the backward pass of the operations measured.
    """
    out: dict[int, Alone] = {}
    total = float(weight_s.sum())
    now = clock_of(live.loss.device)
    for i, row in enumerate(trace.edges):
        edges = [e for e, target in enumerate(row) if target is not None]
        if len(edges) < 2 or weight_s[i] < ALONE_SHARE * total or geometry[i] is None:
            continue
        node = live.operations[i]
        outputs = [GradientEdge(node, o) for o, g in enumerate(geometry[i]) if g is not None]
        grads = [_noise(*g) for g in geometry[i] if g is not None]
        targets = [GradientEdge(*node.next_functions[e]) for e in edges]  # type: ignore[arg-type]
        try:
            single = [_fastest(outputs, [target], grads, now, repeats) for target in targets]
            together = _fastest(outputs, targets, grads, now, repeats)
        except RuntimeError:
            continue  # an operation that cannot run alone keeps the in-place figures, undivided
        fused = min(max((sum(single) - together) / (len(edges) - 1), 0.0), min(single))
        own = dict(zip(edges, [s - fused for s in single]))
        whole = fused + sum(own.values())
        if whole > 0:
            out[i] = Alone(fused / whole, tuple(own.get(e, 0.0) / whole for e in range(len(row))))
    return out


def _fastest(outputs: Any, inputs: Any, grads: Any, now: Callable[[], float], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # the first is warm-up, but a minimum needs no care
        start = now()
        torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
        best = min(best, now() - start)
    return best


def _noise(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    noise = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    once = noise  # of an expanded gradient each element once: several numbers in one place cannot be written
    for dim, (size, step) in enumerate(zip(shape, stride)):
        if step == 0 and size > 1:
            once = once.narrow(dim, 0, 1)
    _ = once.normal_() if dtype.is_floating_point or dtype.is_complex else once.zero_()
    return noise
