"""Optimizers seen through their wrappers, and copied so that a step of the copy is a step of theirs."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError

__all__ = ["bring_home", "look_through", "plain_step", "twin_of"]


def look_through(optimizer: Any) -> Optimizer:
    """The optimizer itself, behind wrappers that only forward to it (accelerate's, Lightning's).

    A wrapper with state of its own (Lookahead) is an optimizer in its own right and stays.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        if isinstance(optimizer, Optimizer) and optimizer.state is not inner.state:
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer, nor does its .optimizer hold one"
        )
    return optimizer


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The step of its class, called as `step(optimizer)`: without hooks, schedulers' patches or compilation.

    Raises:
        ConfigError: it needs a closure.
    """
    step: Any = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} steps by calling the loss again (a closure), so its update cannot be told "
            "from one gradient, nor its step be priced; use another optimizer"
        )
    # torch wraps each class's step once, to call hooks (also those registered for all optimizers): go beneath.
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def twin_of(optimizer: Optimizer, contents: dict[str, Any], memo: dict[int, Any]) -> Optimizer:
    """A deep copy made of these attributes, without hooks and patches; `memo` as in `copy.deepcopy`.

    It steps copies of the parameters, which hold no gradients.
    """
    # Not copy.deepcopy(optimizer): Optimizer.__getstate__ keeps three attributes and drops what a subclass added.
    twin: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for name, value in contents.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
        elif callable(getattr(type(optimizer), name, None)):
            continue  # a patched method; the class's own takes its place
        elif isinstance(value, Optimizer):
            vars(twin)[name] = memo.get(id(value)) or twin_of(value, dict(vars(value)), memo)
        else:
            vars(twin)[name] = copy.deepcopy(value, memo)
    vars(twin)["_warned_capturable_if_run_uncaptured"] = True  # the original warns about capturable=True, once
    return twin


def bring_home(optimizer: Optimizer) -> None:
    """Put state that was offloaded to the host while its tensor rests back on the tensor's device."""
    for group in optimizer.param_groups:
        counts_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device != parameter.device and (value.dim() or counts_on_device):
                    state[key] = value.to(parameter.device)
