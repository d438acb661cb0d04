"""Scores of several batches, added up in double precision and checked as they come."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from elastictrainer.errors import TrainingError

__all__ = ["Tally", "falls", "values", "wide"]


class Tally:
    """The mean score of each tensor over batches; one that a batch does not reach scores 0 on it."""

    def __init__(self, tensors: Mapping[str, nn.Parameter], *, keep_unreached: bool) -> None:
        self._tensors = tensors
        self._sums = dict.fromkeys(tensors.values(), 0.0) if keep_unreached else {}
        self._batches = 0

    def add(self, place: str, scores: Mapping[nn.Parameter, Tensor]) -> None:
        """Add one batch's scores. Waits for the device once for each device, not once for each tensor."""
        by_device: dict[torch.device, list[nn.Parameter]] = {}
        for parameter, score in scores.items():
            by_device.setdefault(score.device, []).append(parameter)
        for parameters in by_device.values():
            numbers = torch.stack([scores[p] for p in parameters]).tolist()
            for parameter, number in zip(parameters, numbers):
                self._check(parameter, number, place)
                self._sums[parameter] = self._sums.get(parameter, 0.0) + number
        self._batches += 1

    def mean(self) -> dict[str, float]:
        return {n: self._sums[p] / self._batches for n, p in self._tensors.items() if p in self._sums}

    def _check(self, parameter: nn.Parameter, number: float, place: str) -> None:
        if not math.isfinite(number):
            name = next(name for name, p in self._tensors.items() if p is parameter)
            raise TrainingError(
                f"the importance of {name} on {place} is {number}: the gradient, update or weights are not finite; "
                "look at that batch, lower the learning rate, or pass the gradient scaler if training uses one"
            )


def wide(tensor: Tensor) -> Tensor:
    """As real numbers of at least single precision: sums over millions of halves would lose them."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.to(torch.promote_types(real.dtype, torch.float32))


def values(gradient: Tensor) -> Tensor:
    """The elements of a gradient, `wide`; of a sparse one, those that are stored, each once."""
    return wide(gradient.coalesce().values() if gradient.is_sparse else gradient)


def falls(
    gradients: Mapping[nn.Parameter, Tensor], stepped: Mapping[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """By how much the step lowers the loss, to first order: for each parameter `-sum_i g_i * (stepped_i - now_i)`.

    A sparse gradient reads only the rows that it holds.
    """
    found = [parameter for parameter in stepped if parameter in gradients]
    if not found:
        return {}
    falls = list(torch._foreach_sub([wide(p.detach()) for p in found], [wide(stepped[p]) for p in found]))
    for index, parameter in enumerate(found):
        if gradients[parameter].is_sparse:
            falls[index] = falls[index].sparse_mask(gradients[parameter].coalesce()).values()
    torch._foreach_mul_(falls, [values(gradients[p]) for p in found])
    return {parameter: fall.sum() for parameter, fall in zip(found, falls)}
