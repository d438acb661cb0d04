"""While a plan with channels stands, a parameter that trains in part *is* its chosen rows.

`module.weight` stays the same object, in the same param group, but its data are the k chosen rows; the whole tensor
lies beside it in a buffer, and forward puts the rows into it (`sparse.py`). Gradients, clipping, gradient scaling,
momentum and moments are then those of k rows because there is nothing else: no optimizer, whatever its decay, can move
or even see another channel, and no mask has to be kept true step after step.

From outside everything looks whole: `model.state_dict()` and the optimizer's hold full tensors and load full tensors,
so a checkpoint does not depend on the plan that stood when it was written. The rejected alternative, a whole gradient
and putting untouched rows back after each step, holds full-size gradients and moments, which is what memory is for.

What can be seen of it, until `undo()`: the parameter's shape, and that `torch.save(model)` (not of its state dict)
would keep the rows. Costs at a re-plan a copy of the rows and of their optimizer state; a whole copy of the latter if
there was one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError
from elastictrainer.runtime import lean, sparse
from elastictrainer.runtime.patch import shadow, unshadow
from elastictrainer.runtime.sparse import CHOSEN, WHOLE, Chosen, whole_of

__all__ = ["Channels", "RowsStanding", "check_channels", "supports_channels"]

Channels = Mapping[str, Sequence[int]]
_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def supports_channels(module: nn.Module) -> bool:
    """Whether output channels of this layer can train apart: convolutions (not transposed) and linear layers.

    Lazy layers, and weights that are computed from other tensors (parametrizations), cannot.
    """
    weight = module._parameters.get("weight")
    return isinstance(module, _KINDS) and weight is not None and not nn.parameter.is_lazy(weight)


def check_channels(model: nn.Module, channels: Channels) -> None:
    """Refuse what could not be trained as asked.

    Raises:
        ConfigError: a tensor that is no weight or bias of a supported layer, is shared, or has no such channel.
    """
    owners = _owners(model)
    for name, rows in channels.items():
        found = owners.get(name)
        if found is None or not supports_channels(found[0][0]):
            raise ConfigError(
                f"{name} cannot train in part: channels are of weights and biases of convolutions and linear layers"
            )
        if len(found) > 1:
            raise ConfigError(f"{name} belongs to {len(found)} layers and cannot train in part; train it whole")
        module, attribute = found[0]
        tensor = module._parameters[attribute]
        assert tensor is not None
        whole = module._buffers.get(WHOLE + attribute)
        count = (tensor if whole is None else whole).shape[0]
        if not rows or min(rows) < 0 or max(rows) >= count or len(set(rows)) < len(rows):
            raise ConfigError(f"{name} has channels 0 to {count - 1}; the plan names {_short(rows)}")
        forwards = module.__dict__.get("forward")
        if forwards is not None and getattr(forwards, "__func__", None) not in (lean.forward, sparse.forward):
            raise ConfigError(f"{name}: its layer's forward was replaced by other code; train it whole")


class RowsStanding:
    """The rows that stand on one model, and the whole optimizer state of which they are a part."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, channels: Channels) -> None:
        self._optimizer = optimizer
        self._places = [
            (module, attribute, tuple(sorted(rows)))
            for name, rows in channels.items()
            for module, attribute in _owners(model)[name]
        ]
        self._parked: dict[Tensor, dict[str, Tensor]] = {}
        self._handles: list[Any] = []

    def put_on(self) -> None:
        for module, attribute, rows in self._places:
            _narrow(module, attribute, rows)
        for module in self._modules():
            unshadow(module, lean.forward)
            shadow(module, sparse.forward)
            self._handles.append(module._register_state_dict_hook(_whole_state))
            self._handles.append(module._register_load_state_dict_pre_hook(_rows_of_state, with_module=True))
        if self._optimizer is not None:
            self._cut()
            self._handles.append(self._optimizer.register_state_dict_post_hook(self._whole_optimizer_state))
            self._handles.append(self._optimizer.register_load_state_dict_post_hook(lambda _: self._cut()))

    def take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._modules():
            unshadow(module, sparse.forward)
        for param, state, key, whole in list(self._whole_states()):
            del param
            state[key] = whole
        self._parked.clear()
        for module, attribute, _ in self._places:
            _widen(module, attribute)

    def _modules(self) -> list[nn.Module]:
        return list(dict.fromkeys(module for module, _, _ in self._places))

    def _params(self) -> Iterable[tuple[nn.Parameter, Tensor, Tensor]]:
        """Each parameter that is rows now, its whole tensor, and which rows."""
        for module, attribute, _ in self._places:
            param, whole = module._parameters[attribute], module._buffers[WHOLE + attribute]
            assert param is not None
            assert whole is not None
            yield param, whole, module.__dict__[CHOSEN][attribute].to(whole.device).rows

    def _cut(self) -> None:
        """Of state that is whole (from before the plan, or just loaded) leave the rows with the optimizer."""
        assert self._optimizer is not None
        for param, whole, rows in self._params():
            state = self._optimizer.state.get(param, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == whole.shape != param.shape:
                    self._parked.setdefault(param, {})[key] = value
                    state[key] = value.index_select(0, rows.to(value.device))

    def _whole_states(self) -> Iterable[tuple[Tensor, dict[str, Any], str, Tensor]]:
        """The optimizer's state with the rows as they are now, in whole tensors; other rows as they were, or zero."""
        if self._optimizer is None:
            return
        for param, whole, rows in self._params():
            state = self._optimizer.state.get(param, {})
            for key, value in state.items():
                if not (isinstance(value, Tensor) and value.shape == param.shape != whole.shape):
                    continue
                parked = self._parked.get(param, {}).get(key)
                full = value.new_zeros(whole.shape) if parked is None else parked.clone()
                yield param, state, key, full.index_copy_(0, rows.to(value.device), value)

    def _whole_optimizer_state(self, optimizer: Optimizer, document: dict[str, Any]) -> dict[str, Any]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        place = {param: index for index, param in enumerate(params)}
        states = dict(document["state"])
        for param, _, key, whole in self._whole_states():
            states[place[param]] = {**states[place[param]], key: whole}
        return {**document, "state": states}


def _narrow(module: nn.Module, attribute: str, rows: Sequence[int]) -> None:
    param, weight = module._parameters[attribute], module._parameters["weight"]
    assert param is not None
    assert weight is not None
    whole = param.data
    groups = int(getattr(module, "groups", 1)) if attribute == "weight" else 1
    chosen = Chosen.of(rows, channels=whole.shape[0], groups=groups, group_inputs=weight.shape[1], device=whole.device)
    module.__dict__.setdefault(CHOSEN, {})[attribute] = chosen
    module.register_buffer(WHOLE + attribute, whole, persistent=False)
    _become(param, whole.index_select(0, chosen.rows))


def _widen(module: nn.Module, attribute: str) -> None:
    param = module._parameters[attribute]
    assert param is not None
    whole = whole_of(module, attribute)
    del module.__dict__[CHOSEN][attribute]
    if not module.__dict__[CHOSEN]:
        del module.__dict__[CHOSEN]
    delattr(module, WHOLE + attribute)
    _become(param, whole.data)


def _become(param: nn.Parameter, data: Tensor) -> None:
    """Give a parameter other data of another shape, and forget all that knew the old one."""
    param.grad = None
    # A graph that someone still holds keeps the parameter's accumulator alive, and with it the old shape; autograd lets
    # go of it when the dtype changes.
    other = torch.float64 if param.dtype != torch.float64 else torch.float32
    param.data = torch.empty(0, dtype=other, device=param.device)
    param.data = data


def _whole_state(module: nn.Module, document: dict[str, Any], prefix: str, _: Any) -> None:
    for attribute in module.__dict__.get(CHOSEN, {}):
        if prefix + attribute in document:
            document[prefix + attribute] = whole_of(module, attribute).detach()


def _rows_of_state(module: nn.Module, document: dict[str, Any], prefix: str, *_: Any) -> None:
    chosen: dict[str, Chosen] = module.__dict__.get(CHOSEN, {})
    for attribute, rows in chosen.items():
        whole, given = module._buffers[WHOLE + attribute], document.get(prefix + attribute)
        if whole is not None and given is not None and given.shape == whole.shape:
            whole.data.copy_(given)
            document[prefix + attribute] = given.index_select(0, rows.rows.to(given.device))


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter name, the modules that hold that very tensor, and as what."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((module, attribute))
    return {name: places[param] for name, param in model.named_parameters(remove_duplicate=False)}


def _short(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "") if rows else "none"
