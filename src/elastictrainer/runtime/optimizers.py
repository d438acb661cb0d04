"""The optimizers that `--optimizer` knows: the paper's SGD with decoupled decay, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from elastictrainer.errors import ConfigError

__all__ = ["OPTIMIZERS", "SGDW", "make_optimizer"]


class SGDW(SGD):
    """SGD with momentum whose weight decay is decoupled from the gradient (Loshchilov and Hutter, 2019, Algorithm 1).

    `w <- w - lr * decay * w`, then SGD's own step without decay: momentum never accumulates decay. Tensors without a
    gradient do not decay: a resting tensor rests.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, *, momentum: float = 0.9, weight_decay: float = 0.0, **options: Any
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=0.0, **options)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", weight_decay)
        self.defaults["decoupled_weight_decay"] = weight_decay

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            decay = group.get("decoupled_weight_decay", 0.0)
            if moving and decay:  # asked of the decay alone: the rate may be a tensor on the device
                torch._foreach_mul_(moving, 1.0 - group["lr"] * decay)
        # torch wraps the step of every class that was ever made an instance of, to call hooks; they are called around
        # this step already, so go beneath.
        step: Any = SGD.step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)
        return loss


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": SGDW, "adam": Adam, "adamw": AdamW}


def make_optimizer(
    name: str, params: Iterable[Tensor] | Iterable[dict[str, Any]], *, lr: float, weight_decay: float = 0.0
) -> Optimizer:
    """An optimizer by name: `"sgd"` (momentum 0.9, decoupled decay, as in the paper), `"adam"` or `"adamw"`.

    Give it every tensor that may ever train: what trains now is the plan's to say.

    Raises:
        ConfigError: no such preset, or a rate or decay that is no finite number from 0 on.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}; build any other yourself and use et.fit"
        )
    for what, value in (("lr", lr), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{what} {value} must be a finite number, 0 or more")
    return OPTIMIZERS[name](params, lr=lr, weight_decay=weight_decay)
