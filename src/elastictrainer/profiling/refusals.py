"""Steps that cannot be timed as they are: refused in words that name the module and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.errors import ProfileError
from elastictrainer.profiling.fingerprint import tensors_in

__all__ = ["explained", "refuse_loss", "refuse_model"]


def refuse_model(model: nn.Module, candidates: Mapping[str, nn.Parameter]) -> None:
    """Raise for the first part of the model that cannot be timed as it is."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ProfileError(f"{name} has no shape yet: run one batch through the model before profiling it")
        if parameter.is_meta:
            raise ProfileError(f"{name} is on the meta device and has no values: load the model's weights first")
    first = next(iter(candidates))
    for name, parameter in candidates.items():
        if parameter.device != candidates[first].device:
            raise ProfileError(
                f"{name} is on {parameter.device} and {first} on {candidates[first].device}: a profile is of one "
                "device; move the model to it, or leave what is elsewhere out of the optimizer"
            )
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ProfileError(
                f"{name} has a hook that runs whenever its gradient is ready (register_post_accumulate_grad_hook), and "
                "so would in every pass of the profile, optimizer step included: profile before registering it"
            )


@contextmanager
def explained(model: nn.Module, batch: Any) -> Iterator[None]:
    """Inside, a forward pass that fails says in which module; one that fails for its devices says what to move."""
    try:
        yield
    except Exception as error:
        where = _module_that_ran(model, error.__traceback__)
        devices = {str(p.device) for p in model.parameters()}
        elsewhere = sorted({str(t.device) for t in tensors_in(batch)} - devices)
        if elsewhere and isinstance(error, (RuntimeError, NotImplementedError)):
            raise ProfileError(
                f"the forward pass fails{where}, and the batch is on {', '.join(elsewhere)} where the model is on "
                f"{', '.join(sorted(devices))}: move the batch there, or let loss_fn do so ({_first_line(error)})"
            ) from error
        if where and hasattr(error, "add_note"):  # from Python 3.11
            error.add_note(f"while profiling: the forward pass failed{where}")
        raise


def refuse_loss(model: nn.Module, loss: Tensor, run: Callable[[], Any], batch: Any) -> None:
    """Raise for a loss that backward cannot start from, or that no training would start from. `run` is its forward."""
    backward = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    if backward:
        raise ProfileError(
            f"loss_fn called backward() itself ({backward[0]} had a gradient when it returned): it must return the "
            "loss and leave backward to the caller"
        )
    if loss.is_complex():
        raise ProfileError(f"the loss is complex ({loss.dtype}): return a real number, such as its .abs()")
    if not bool(torch.isfinite(loss.detach()).all()):
        value = loss.detach().item()
        raise ProfileError(
            f"the loss of this batch is {value}, so nothing could be learned: {_culprit(model, run, batch)}"
        )


def _module_that_ran(model: nn.Module, trace: TracebackType | None) -> str:
    """` in 'its.name'` of the innermost module whose code was running, from the traceback."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = ""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        found = names.get(id(owner), found)
        trace = trace.tb_next
    return f" in {found!r}" if found else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _is_finite(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return tensor.layout is not torch.strided or bool(torch.isfinite(tensor.detach()).all())


def _culprit(model: nn.Module, run: Callable[[], Any], batch: Any) -> str:
    """Where the first value that is not finite comes from, and what to do."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name and not _is_finite(tensor):
            return f"{name} holds values that are not finite; load good weights"
    tensors = list(tensors_in(batch))
    if not all(map(_is_finite, tensors)):
        return "the batch holds values that are not finite; profile another one, or clean the data"
    if any(t.numel() == 0 for t in tensors):
        return "the batch is empty"
    first: list[str] = []

    def look(out: Any, name: str) -> None:
        if not first and not all(map(_is_finite, tensors_in(out))):
            first.append(name)

    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: look(out, name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    if not first:
        return "every module's output is finite, so it is the loss function's own doing"
    return f"the first values that are not finite come out of {first[0]!r}; scale its input, or leave low precision"
