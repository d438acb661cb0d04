"""Floating-point operations of a step that really ran, counted as its kernels were called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from elastictrainer.runtime.apply import unwrap
from elastictrainer.runtime.untouched import untouched

__all__ = ["StepFlops", "count_flops", "step_flops"]


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Floating-point operations of one training step; a multiply-add counts as two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_flops(run: Callable[[], Any]) -> int:
    """The operations of whatever `run()` does, forward and backward.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48

    Counted: matrix products, convolutions and attention, by the shapes that reach them, a convolution's backward by the
    gradients that it really computes. Not counted: elementwise work, norms and the optimizer, as is the custom.

    Cost: `run()`, slowed by some microseconds an operation; so not while anything is being timed.
    """
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def step_flops(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> StepFlops:
    """The operations of a training step on this batch, as the model stands: what rests now costs no weight gradient.

    Runs one step without the optimizer and leaves no trace (see `untouched`).

    Cost: a forward and a backward pass.
    """
    model = unwrap(model)
    losses: list[Tensor] = []
    with untouched(model), torch.inference_mode(False), torch.enable_grad():
        forward = count_flops(lambda: losses.append(loss_fn(model, batch)))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not (trained and losses[0].requires_grad):
            return StepFlops(forward, 0)
        backward = count_flops(lambda: torch.autograd.grad(losses[0].sum(), trained, allow_unused=True))
    return StepFlops(forward, backward)
