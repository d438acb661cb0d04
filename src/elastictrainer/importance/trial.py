"""What the optimizer would do now: one real step of its own code, on copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.exhausted import is_out_of_memory
from elastictrainer.runtime.optimizer_copy import bring_home, plain_step, twin_of

__all__ = ["trial_steps"]

PIECE_NUMEL = 1 << 22
"""How many elements are copied at once where tensors can be stepped apart: 16 MiB of float32, times 1 + its state."""


def trial_steps(optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Yield, piece by piece, what one step on these gradients would make of each parameter; nothing is changed.

    The step is the optimizer's own: the code of its class runs on copies of parameters, state and param groups, so
    momentum, moments, step counts, decay, learning rates and whatever a third party invented are all in it. Left out
    are hooks, and `step` as patched by a scheduler or wrapped by `torch.compile`: they would act on the original.

    Raises:
        ConfigError: the optimizer needs a closure, cannot be copied, or its step fails.

    Cost: one optimizer step and a copy. Extra memory: for torch's own optimizers, which treat every tensor by itself, a
    piece of at most 4 Mi elements (or one tensor) at a time, with its gradients and state; for any other, all of them.
    """
    step = plain_step(optimizer)
    for piece in _pieces(optimizer, list(gradients)):
        memo: dict[int, Any] = {}
        twin = _copy_of(optimizer, piece, memo)
        stepped = {parameter: memo[id(parameter)] for parameter in piece}
        # Copies in the parameter's own layout, as backward() would leave them: some optimizers write into .grad.
        for parameter, gradient in zip(piece, _copies([gradients[p] for p in piece], like=piece)):
            stepped[parameter].grad = gradient
        try:
            with torch.no_grad():
                step(twin)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ConfigError(
                f"{type(optimizer).__name__} cannot take a trial step: {error}; "
                "use an importance that needs none, such as 'gradient' or 'fisher'"
            ) from error
        yield {parameter: copied.detach() for parameter, copied in stepped.items()}


def _apart(optimizer: Optimizer) -> bool:
    """Whether each tensor's update depends on its own gradient and state alone: so it is in all that torch brings."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def _pieces(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    if not _apart(optimizer):
        yield list(parameters)
        return
    # Tensors with state and tensors without go apart: fused SGD refuses a step on a mixture.
    started = [p for p in parameters if any(v is not None for v in optimizer.state.get(p, {}).values())]
    seen = set(started)
    for kind in (started, [p for p in parameters if p not in seen]):
        piece: list[nn.Parameter] = []
        numel = 0
        for parameter in kind:
            if piece and numel + parameter.numel() > PIECE_NUMEL:
                yield piece
                piece, numel = [], 0
            piece.append(parameter)
            numel += parameter.numel()
        if piece:
            yield piece


def _copy_of(optimizer: Optimizer, piece: Sequence[nn.Parameter], memo: dict[int, Any]) -> Optimizer:
    """A copy that holds only this piece where the class is torch's own, and everything otherwise."""
    contents = dict(vars(optimizer))
    if _apart(optimizer):
        chosen = set(piece)
        contents["param_groups"] = [
            {**group, "params": kept}
            for group in optimizer.param_groups
            if (kept := [p for p in group["params"] if p in chosen])
        ]
        state = {p: optimizer.state[p] for p in piece if p in optimizer.state}
        contents["state"] = defaultdict(dict, state)
        # All tensors at once, for deepcopy to find: one by one, a GPU would wait for hundreds of small copies.
        tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
        memo.update(zip(map(id, tensors), _copies(tensors)))
        twins = (nn.Parameter(copied, requires_grad=True) for copied in _copies([p.detach() for p in piece]))
        memo.update(zip(map(id, piece), twins))
    try:
        twin = twin_of(optimizer, contents, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be copied for a trial step: {error}; "
            "use an importance that needs none, such as 'gradient' or 'fisher'"
        ) from error
    bring_home(twin)
    return twin


def _copies(tensors: Sequence[Tensor], *, like: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Copies, in the layout of `like` where that is given; those of one kind are made by one kernel."""
    copied = [torch.empty_like(target) for target in (tensors if like is None else like)]
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.is_sparse:
            copied[index] = tensor.clone()
        else:
            alike.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in alike.values():
        torch._foreach_copy_([copied[i] for i in indices], [tensors[i] for i in indices])
    return copied
