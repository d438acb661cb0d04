"""What the optimizer would do now: one real step of its own code, on copies."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError

__all__ = ["look_through", "trial_steps"]

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
    step = _step_of(optimizer)
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
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot take a trial step: {error}; "
                "use an importance that needs none, such as 'gradient' or 'fisher'"
            ) from error
        yield {parameter: copied.detach() for parameter, copied in stepped.items()}


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


def _step_of(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    step: Any = type(optimizer).step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} steps by calling the loss again (a closure), so its update cannot be told "
            "from one gradient; use another optimizer, or an importance that needs none, such as 'gradient'"
        )
    # torch wraps each class's step once, to call hooks (also those registered for all optimizers): go beneath.
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


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
        twin = _twin(optimizer, contents, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be copied for a trial step: {error}; "
            "use an importance that needs none, such as 'gradient' or 'fisher'"
        ) from error
    _bring_home(twin)
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


def _bring_home(optimizer: Optimizer) -> None:
    """Put state that was offloaded to the host while its tensor rests back on the tensor's device."""
    for group in optimizer.param_groups:
        counts_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device != parameter.device and (value.dim() or counts_on_device):
                    state[key] = value.to(parameter.device)


def _twin(optimizer: Optimizer, contents: dict[str, Any], memo: dict[int, Any]) -> Optimizer:
    # Not copy.deepcopy(optimizer): Optimizer.__getstate__ keeps three attributes and drops what a subclass added.
    twin: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for name, value in contents.items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
        elif callable(getattr(type(optimizer), name, None)):
            continue  # a patched method; the class's own takes its place
        elif isinstance(value, Optimizer):
            vars(twin)[name] = memo.get(id(value)) or _twin(value, dict(vars(value)), memo)
        else:
            vars(twin)[name] = copy.deepcopy(value, memo)
    vars(twin)["_warned_capturable_if_run_uncaptured"] = True  # the original warns about capturable=True, once
    return twin
