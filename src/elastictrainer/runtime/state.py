"""The optimizer's memory of tensors that rest: keep it, drop it, or put it away in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError

__all__ = ["RestingPolicy", "RestingState", "check_resting_policy"]

RestingPolicy = Literal["keep", "drop", "offload"]


def check_resting_policy(resting_state: str) -> None:
    if resting_state not in get_args(RestingPolicy):
        raise ConfigError(
            f"resting_state={resting_state!r} is not a policy; use one of {', '.join(get_args(RestingPolicy))}"
        )


class RestingState:
    """Momentum, moments and step counts of the tensors that rest.

    - `"keep"`: they stay where they are. A tensor that wakes goes on with the momentum it had.
    - `"drop"`: they are freed. A tensor that wakes starts as on its first step. It cannot be undone.
    - `"offload"`: they wait in host memory and come back to their device when the tensor wakes. Costs a copy of the
      state each way at a re-plan. On a model that lives on the CPU there is nowhere else to go: it is `"keep"`.

    Without an optimizer there is no state, and every policy does nothing. Works on any optimizer that keeps its tensors
    in `optimizer.state[parameter]` by key, as `torch.optim` does; what lies deeper (in lists, say) is kept.
    """

    def __init__(self, optimizer: Optimizer | None, policy: RestingPolicy) -> None:
        self._optimizer = optimizer
        self._policy = policy
        self._resting: tuple[Tensor, ...] = ()
        self._dropped: dict[Tensor, int] = {}
        self._home: dict[Tensor, dict[str, torch.device]] = {}

    def settle(self, active: Iterable[Tensor], resting: Iterable[Tensor]) -> None:
        """Bring back what `active` tensors had, and deal with what `resting` ones have now."""
        self._resting = tuple(resting)
        for param in active:
            self._dropped.pop(param, None)
            self._bring_back(param)
        if self._policy == "drop":
            for param in self._resting:
                self._drop(param)
        elif self._policy == "offload":
            for param in self._resting:
                self._put_away(param)

    def bytes(self) -> dict[str, int]:
        """Of the tensors that rest now: state in place, dropped since they went to rest, and in host memory."""
        total = sum(_nbytes(value) for param in self._resting for value in self._tensors(param).values())
        away = sum(_nbytes(self._tensors(param)[key]) for param in self._resting for key in self._away(param))
        return {"kept": total - away, "dropped": sum(self._dropped.values()), "offloaded": away}

    def _tensors(self, param: Tensor) -> dict[str, Tensor]:
        # .get, since optimizer.state is a defaultdict: to look must not create.
        state = {} if self._optimizer is None else self._optimizer.state.get(param, {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def _away(self, param: Tensor) -> list[str]:
        """Keys whose tensors are in host memory; load_state_dict may have brought some back behind our back."""
        home = self._home.get(param, {})
        return [key for key, value in self._tensors(param).items() if key in home and value.device != home[key]]

    def _drop(self, param: Tensor) -> None:
        tensors = self._tensors(param)
        if tensors and self._optimizer is not None:
            self._dropped[param] = sum(map(_nbytes, tensors.values()))
            del self._optimizer.state[param]

    def _put_away(self, param: Tensor) -> None:
        for key, value in self._tensors(param).items():
            # Adam counts steps on the CPU unless fused or capturable, so each tensor's own home is what counts.
            if self._optimizer is not None and value.device.type != "cpu":
                self._home.setdefault(param, {})[key] = value.device
                self._optimizer.state[param][key] = value.to("cpu")

    def _bring_back(self, param: Tensor) -> None:
        for key in self._away(param):
            if self._optimizer is not None:
                self._optimizer.state[param][key] = self._optimizer.state[param][key].to(self._home[param][key])
        self._home.pop(param, None)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
