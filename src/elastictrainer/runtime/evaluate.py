"""Evaluate a model on held-out batches: mean loss, and a metric where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.errors import DataError
from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.feed import to_device

__all__ = ["Metric", "Score", "evaluate", "is_classified", "top1"]

Metric = Callable[[nn.Module, Any], "tuple[Tensor | float, int]"]
"""`metric(model, batch)` -> what is summed over batches, and the count that the sum is divided by. Higher is better."""


@dataclass(frozen=True, slots=True)
class Score:
    """`accuracy` is the metric, whatever it measures; None where there is none. `share` is below 1 where there was no
    time for all batches."""

    loss: float
    accuracy: float | None
    count: int
    share: float = 1.0

    def better_than(self, other: Score | None) -> bool:
        """By the metric, or by the loss where there is none; a draw is not better, and any number is than NaN."""
        if other is None:
            return True
        mine, others = -self.loss, -other.loss
        if self.accuracy is not None and other.accuracy is not None:
            mine, others = self.accuracy, other.accuracy
        return mine > others or (math.isnan(others) and not math.isnan(mine))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def top1(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Right answers among batches of (inputs, class numbers, ...)."""
    inputs, labels = batch[:2]
    return (model(inputs).argmax(dim=-1) == labels).sum(), labels.numel()


def is_classified(batch: Any) -> bool:
    """The batch is (inputs, class numbers, ...), so that `top1` means something."""
    pair = isinstance(batch, (list, tuple)) and len(batch) >= 2 and isinstance(batch[1], Tensor)
    return pair and batch[1].ndim == 1 and not (batch[1].is_floating_point() or batch[1].is_complex())


def evaluate(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    loader: Iterable[Any],
    *,
    metric: Metric | None,
    device: torch.device,
) -> Score:
    """The mean over the loader's batches, in eval mode and without gradients; training flags are put back.

    Sums stay on the device until the end. A batch's loss is weighed by the metric's count, or all alike without one.
    Cost: a forward pass a batch: the metric and the loss ask for the same one, which is made once.

    Raises:
        DataError: the loader gave no batch.
    """
    modes = [(module, module.training) for module in model.modules()]
    loss = torch.zeros((), device=device, dtype=torch.float64 if device.type != "mps" else torch.float32)
    right: Tensor | float = 0.0
    batches, weight, count = 0, 0, 0
    model.eval()
    try:
        with torch.no_grad(), _once(model) as begin:
            for batch in loader:
                batch = to_device(batch, device)
                begin()
                size = 1
                if metric is not None:
                    summed, size = metric(model, batch)
                    right, count = right + summed, count + size
                loss += loss_fn(model, batch).detach() * size
                weight += size
                batches += 1
    finally:
        for module, mode in modes:
            module.training = mode
    if batches == 0 or weight == 0:
        raise DataError("there is nothing to evaluate on: the loader gave no batch")
    return Score(float(loss) / weight, float(right) / count if metric is not None else None, count or batches)


@contextmanager
def _once(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Inside, a call of the model with the very arguments of an earlier one gives its answer again, until `begin()`.

    Whatever wraps the model (compilation, DDP) may not call its forward at all, and is left as it is. A call that
    someone listens to from inside (features by a hook) is made in full: an answer given again would run no hook.
    """
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}
    if unwrap(model) is not model or "forward" in model.__dict__:
        yield known.clear
        return
    plain = model.forward
    inside = [module for module in model.modules() if module is not model]

    def forward(*args: Any, **kwargs: Any) -> Any:
        key = tuple(map(id, (*args, *kwargs, *kwargs.values())))
        if key not in known or any(m._forward_hooks or m._forward_pre_hooks for m in inside):
            # The arguments are held, so that an id is not given to another object meanwhile.
            known[key] = ((args, kwargs), plain(*args, **kwargs))
        return known[key][1]

    model.__dict__["forward"] = forward
    try:
        yield known.clear
    finally:
        del model.__dict__["forward"]
