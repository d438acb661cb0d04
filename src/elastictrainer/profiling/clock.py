"""Seconds for the price list of backward: what a plan with channels will take, and where fewer save nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.backward import BackwardPrices, Clock
from elastictrainer.metrics.timing import synchronize
from elastictrainer.plan import Plan
from elastictrainer.profiling.measure import profile
from elastictrainer.profiling.trace import LossFn, forward
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.norms import NormPolicy
from elastictrainer.runtime.untouched import untouched

__all__ = ["time_backward"]

SHARES = (1 / 16, 1 / 4, 1 / 2, 15 / 16)
ROUNDS, REPEATS = 5, 3


def time_backward(
    prices: BackwardPrices,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: Optimizer | None = None,
    bn: NormPolicy = "frozen",
    effort: int = 100,
) -> BackwardPrices:
    """The same prices with seconds of this device, so that plans made from them state how long a step takes.

        prices = et.time_backward(et.price_backward(model, loss_fn, batch), model, loss_fn, batch)
        plan = et.select_channels(prices, potential, memory="1MiB")
        plan.step_s, plan.ratio  # and layers that would take longer in part than whole train whole, where that fits

    Two profiles, one with ReLUs that keep bits as they do under plans with channels and one as plain PyTorch runs, and
    each layer's weight gradient by itself in a few shares of its channels, beside the whole one. Leaves no trace.

    Args:
        effort: of each profile, as in `et.profile`.

    Raises:
        ProfileError: the step cannot be traced or timed.

    Cost: twice `effort` steps, and about a hundred backward passes of each layer alone.
    """
    plain = profile(model, loss_fn, batch, optimizer=optimizer, bn=bn, effort=effort)
    thrifty = profile(model, loss_fn, batch, optimizer=optimizer, bn=bn, effort=effort, bits=True)
    with untouched(model):
        rows = _rows(model, loss_fn, batch, prices)
    return replace(prices, clock=Clock(thrifty, SHARES, rows, plain.full_step_s))


def _rows(model: nn.Module, loss_fn: LossFn, batch: Any, prices: BackwardPrices) -> dict[str, tuple[float, ...]]:
    given: dict[str, Tensor] = {}
    handles = []
    for layer in prices.layers:

        def keep(module: nn.Module, args: Any, weight: str = layer.weight) -> None:
            given.setdefault(weight, args[0].detach().clone())

        handles.append(model.get_submodule(layer.name).register_forward_pre_hook(keep))
    try:
        with torch.no_grad():
            forward(model, loss_fn, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {
        layer.weight: _ratios(model.get_submodule(layer.name), given[layer.weight], layer.channels)
        for layer in prices.layers
    }


def _ratios(layer: nn.Module, x: Tensor, channels: int) -> tuple[float, ...]:
    """In turns with the whole one, so that whatever the machine does meanwhile falls on both."""
    names = tuple(name for name, _ in layer.named_parameters(recurse=False))
    whole = Plan(names, names, 0.0, 0.0, 0)
    found = []
    for share in SHARES:
        count = max(1, round(share * channels))
        chosen = tuple(k * channels // count for k in range(count))  # spread over the groups
        part = replace(whole, channels=dict.fromkeys(names, chosen))
        ratios = []
        for _ in range(ROUNDS):
            seconds = []
            for plan in (whole, part):
                with apply(layer, plan):
                    seconds.append(_backward_s(lambda: layer(x), x.device))
            ratios.append(seconds[1] / seconds[0])
        found.append(statistics.median(ratios))
    return tuple(found)


def _backward_s(run: Callable[[], Tensor], device: torch.device) -> float:
    outs = [run() for _ in range(REPEATS + 1)]
    gradient = torch.ones_like(outs[0])
    outs.pop().backward(gradient)
    synchronize(device)
    start = time.perf_counter()
    for out in outs:
        out.backward(gradient)
    synchronize(device)
    return time.perf_counter() - start
