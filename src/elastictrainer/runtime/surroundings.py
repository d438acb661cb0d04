"""Small things around a training loop that are undone at its end, or that keep it honest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from elastictrainer.errors import TrainingError
from elastictrainer.runtime.apply import unwrap

__all__ = ["check_weights", "deterministic_kernels", "load_weights", "modes_restored", "with_autocast"]

Answer = TypeVar("Answer")


def with_autocast(
    function: Callable[[nn.Module, Any], Answer], device: torch.device, precision: str | None
) -> Callable[[nn.Module, Any], Answer]:
    """The function under autocast, so that whoever calls it, a probe or the profile too, sees what training sees."""
    if precision is None:
        return function
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    @functools.wraps(function)
    def cast(model: nn.Module, batch: Any) -> Answer:
        with torch.autocast(device.type, dtype=dtype):
            return function(model, batch)

    cast.autocast = precision  # type: ignore[attr-defined]  # a profile records it
    return cast


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Afterwards each module is in training or eval mode as it was before."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, an operation without a deterministic kernel raises; cuDNN does not choose kernels by timing them."""
    kernels, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kernels, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Values into the model's own tensors, whatever it is wrapped in; a mismatch raises RuntimeError with the names."""
    unwrap(model).load_state_dict(weights)


def check_weights(model: nn.Module, *, step: int) -> None:
    """A finite loss does not mean that the update after it was: look at the weights before they are saved.

    Raises:
        TrainingError: a tensor is not finite; it is named. Cost: one pass over the weights and one wait for the device.
    """
    floating = {n: p for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex()}
    finite: list[Tensor] = [torch.isfinite(p.detach()).all() for p in floating.values()]
    if finite and not bool(torch.stack([f.to(finite[0].device) for f in finite]).all()):
        name = next(name for name, ok in zip(floating, finite) if not bool(ok))
        raise TrainingError(f"{name} is not finite after step {step}; a lower learning rate or clip= may help")
