"""Refuse what would train nothing in silence: re-entrant checkpointing over trained tensors behind a frozen start.

`torch.utils.checkpoint(..., use_reentrant=True)` runs its part of the model without autograd and hangs the backward
pass on its *inputs*. If all that lies before is frozen, no input requires a gradient: PyTorch warns in passing, and the
tensors inside never get a gradient. Plans freeze first layers all the time.
"""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from elastictrainer.errors import ModelError
from elastictrainer.runtime.norms import asked_mode

__all__ = ["unwatch_checkpoints", "watch_checkpoints"]


def watch_checkpoints(model: nn.Module) -> None:
    """Check each layer that owns parameters until it has once run under autograd; then the check takes itself off.

    So it costs nothing from the second training step on.
    """
    for name, module in model.named_modules():
        if module._parameters and not _watches(module):
            module.register_forward_pre_hook(partial(_watch, name))


def unwatch_checkpoints(model: nn.Module) -> None:
    for module in model.modules():
        _unwatch(module)


def _watch(name: str, module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        _unwatch(module)
        return
    trained = [key for key, param in module._parameters.items() if param is not None and param.requires_grad]
    if trained and asked_mode(module) and _inputs_are_frozen():
        names = ", ".join(f"{name}.{key}" if name else key for key in trained)
        raise ModelError(
            f"{names} would get no gradient: the plan trains it inside a re-entrant checkpoint none of whose inputs "
            "requires a gradient; use the other kind, torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def _inputs_are_frozen() -> bool:
    """Whether a re-entrant checkpoint is running this code, with no input that requires a gradient.

    Nothing public says so, hence the look at the stack; it happens only where autograd is off.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            passed = frame.f_locals["args"]
            return not any(isinstance(x, torch.Tensor) and x.requires_grad for x in passed)
        frame = frame.f_back
    return False


def _watches(module: nn.Module) -> list[int]:
    hooks = module._forward_pre_hooks
    return [key for key, hook in hooks.items() if isinstance(hook, partial) and hook.func is _watch]


def _unwatch(module: nn.Module) -> None:
    for key in _watches(module):
        del module._forward_pre_hooks[key]
