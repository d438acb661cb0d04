"""Let fused optimizers step tensors that have momentum beside tensors that have none yet.

Tried on torch 2.15 over SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, Adadelta, ASGD and Rprop in every
implementation they have (loop, foreach, fused) with plans that change: all but one start the state of each tensor on
that tensor's own first step. Fused SGD with momentum starts all buffers of a group together or none: it raises a
TypeError once a tensor wakes beside others that have momentum. Also, if gradient scaling finds an overflow on that
first step, it leaves the new buffers uninitialised, and later steps read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["FusedStart"]


class FusedStart:
    """Starts the momentum of tensors that wake in a fused group, exactly as the optimizer's first step would.

    The first step sets the buffer to the gradient itself. A buffer of zeros gives the same, `momentum * 0 + gradient`,
    if dampening is 0: then zeros are all it takes. With dampening, the tensors that start are stepped apart from the
    others, once, with dampening off. Costs a look at each parameter of the fused groups per step; nothing elsewhere.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._apart: list[tuple[Tensor, Tensor]] = []
        self._handles = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    @staticmethod
    def needed(optimizer: Optimizer) -> bool:
        """Whether this optimizer has a group of the kind that cannot start its tensors by itself."""
        return any(map(_fused_momentum, optimizer.param_groups))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._start()
            return None

        def then_start() -> Any:
            loss = closure()
            self._start()
            return loss

        return (optimizer,), {**kwargs, "closure": then_start}

    def _start(self) -> None:
        for group in filter(_fused_momentum, self._optimizer.param_groups):
            for param in group["params"]:
                state = self._optimizer.state[param] if param.grad is not None else None
                if state is None or state.get("momentum_buffer") is not None:
                    continue
                state["momentum_buffer"] = torch.zeros_like(param)
                if group["dampening"]:
                    self._apart.append((param, param.grad))
                    param.grad = None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._apart:
            return
        apart, self._apart = self._apart, []
        params = [param for group in optimizer.param_groups for param in group["params"]]
        others = [(param, param.grad) for param in params if param.grad is not None]
        dampening = [(group, group["dampening"]) for group in filter(_fused_momentum, optimizer.param_groups)]
        for param, _ in others:
            param.grad = None
        for param, grad in apart:
            param.grad = grad
        for group, _ in dampening:
            group["dampening"] = 0
        # The step without its hooks: to everyone else this is still one and the same step.
        step = type(optimizer).step
        try:
            getattr(step, "__wrapped__", step)(optimizer)
        finally:
            for param, grad in others:
                param.grad = grad
            for group, value in dampening:
                group["dampening"] = value


def _fused_momentum(group: dict[str, Any]) -> bool:
    return bool(group.get("fused") and group.get("momentum") and "dampening" in group)
