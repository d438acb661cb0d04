"""Importance that asks nothing of the loss: what any real measure has to beat."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from elastictrainer.importance.candidates import candidates
from elastictrainer.importance.probe import LossFn, probing
from elastictrainer.importance.tally import Tally, wide

__all__ = ["magnitude", "random", "uniform"]


def magnitude(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Iterable[Any] = (),
    *,
    names: Iterable[str] | None = None,
    gradient_batches: Iterable[Any] | None = None,
    scaler: GradScaler | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Weight magnitude: `sum_i |w_i|`. The arguments are those of `elastic`.

    Cost: one pass over the weights; without `names` also one forward pass, on the first batch, to see which tensors
    the loss reaches.
    """
    tensors = _reached(model, optimizer, loss_fn, batches, names)
    tally = Tally(tensors, keep_unreached=False)
    tally.add("the present weights", {p: wide(p.detach()).abs().sum() for p in tensors.values()})
    return tally.mean()


def uniform(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Iterable[Any] = (),
    *,
    names: Iterable[str] | None = None,
    gradient_batches: Iterable[Any] | None = None,
    scaler: GradScaler | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Every tensor alike: 1. The selection then buys as many tensors as fit. The arguments are those of `elastic`.

    Cost: none; without `names` one forward pass, on the first batch, to see which tensors the loss reaches.
    """
    return dict.fromkeys(_reached(model, optimizer, loss_fn, batches, names), 1.0)


def random(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Iterable[Any] = (),
    *,
    names: Iterable[str] | None = None,
    gradient_batches: Iterable[Any] | None = None,
    scaler: GradScaler | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """A number between 0 and 1 for each tensor, by `seed` and name alone. The arguments are those of `elastic`.

    The same on every machine, whatever else is scored and whatever generators have given out; pass another seed for
    each new plan.

    Cost: none; without `names` one forward pass, on the first batch, to see which tensors the loss reaches.
    """
    found = _reached(model, optimizer, loss_fn, batches, names)
    return {name: Random(f"{seed}:{name}").random() for name in found}


def _reached(
    model: nn.Module, optimizer: Optimizer, loss_fn: LossFn, batches: Iterable[Any], names: Iterable[str] | None
) -> dict[str, nn.Parameter]:
    tensors = candidates(model, optimizer, names)
    if names is not None:
        return tensors
    with probing(model, loss_fn, tensors.values()) as probe:
        reached = probe.reached(batches)
    return {name: parameter for name, parameter in tensors.items() if parameter in reached}
