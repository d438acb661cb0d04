"""An optimizer's own step inside a recording: rates that go on changing, and nothing asked of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from elastictrainer.runtime.fused import FusedStart
from elastictrainer.runtime.optimizers import SGDW

__all__ = ["as_recorded", "bring_counts", "rates_of", "set_rates", "steps_in_a_recording"]

# Exactly these: what a subclass adds to a step may be the host's work, which no recording repeats.
_STEPS = (SGD, SGDW, Adam, AdamW)


def steps_in_a_recording(optimizer: Optimizer) -> bool:
    """Whether this optimizer's own step can be recorded, with a learning rate that goes on changing.

    Asked best while gradients are there: sparse ones cannot. Someone else's hooks around the step may be the host's
    work, too.
    """
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    foreign = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), FusedStart)]
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        foreign += getattr(torch_optimizer, name, {}).values()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    dense = all(p.is_floating_point() and (p.grad is None or p.grad.layout is torch.strided) for p in parameters)
    plain = not any(group.get("differentiable") for group in optimizer.param_groups)
    fits = not isinstance(optimizer, SGD) or _fits_fused(optimizer)
    return type(optimizer) in _STEPS and not foreign and dense and plain and fits


def _fits_fused(optimizer: Optimizer) -> bool:
    """Whether the fused kernel takes what has gradients: all with momentum or none, each laid out as its gradient."""
    for group in optimizer.param_groups:
        moving = [p for p in group["params"] if p.grad is not None]
        buffers = [optimizer.state.get(p, {}).get("momentum_buffer") for p in moving]
        if group.get("momentum") and any(b is None for b in buffers) and any(b is not None for b in buffers):
            return False
        for parameter, buffer in zip(moving, buffers):
            if not all(_laid_out_as(parameter, t) for t in (parameter.grad, buffer) if t is not None):
                return False
    return True


def _laid_out_as(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
        return False
    strides = zip(one.shape, one.stride(), other.stride())
    return all(size == 1 or mine == theirs for size, mine, theirs in strides)


def rates_of(optimizer: Optimizer) -> list[Tensor]:
    """A place on the device for each group's learning rate."""
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    return [torch.as_tensor(group["lr"], dtype=torch.float32).to(device) for group in optimizer.param_groups]


def set_rates(rates: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Let the next replay step at the groups' learning rates as they are now; waits for nothing."""
    for rate, group in zip(rates, optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            rate.copy_(group["lr"])
        else:
            rate.fill_(group["lr"])


@contextmanager
def as_recorded(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Inside, a step of this optimizer reads each group's learning rate from a tensor and asks the device nothing.

    SGD does so in its fused kernel, Adam as `capturable`, whose counts of steps must be on the device (`bring_counts`).
    The groups are afterwards as they were.
    """
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
        if isinstance(optimizer, SGD):
            group["fused"], group["foreach"] = True, False
        else:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, was in zip(optimizer.param_groups, before):
            group.clear()
            group.update(was)


def bring_counts(optimizer: Optimizer, *, home: bool = False) -> None:
    """Put Adam's counts of steps beside its tensors, where a recording finds them, or back where they are kept.

    Its other ways of stepping work with either, but wait for the device once a tensor for those that lie there.
    """
    if not isinstance(optimizer, (Adam, AdamW)):
        return
    for group in optimizer.param_groups:
        if home and (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            count = state.get("step")
            where = torch.device("cpu") if home else parameter.device
            if isinstance(count, Tensor) and count.device != where:
                state["step"] = count.to(where, torch.float32)
