"""Do not run again what cannot have changed: for the same input, all that comes before anything that trains.

While a plan stands, a module whose output requires no gradient depends on nothing that trains. Where the same images go
through the network at every step (the support of a few-shot task), the outermost such modules run once; afterwards they
hand back what they put out, and what follows is bit for bit the same. Of a run of them in an `nn.Sequential`, only the
last one's output is kept, since only the next one reads it.

Costs the memory of what is kept, which is none of backward's, and four passes of a single image to see what is constant
and to try it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Remembered", "constant_modules"]

T = TypeVar("T")


class Remembered:
    """The constant part of a network under the plan that stands, for one input.

    `again(run)` calls `run()`; from the second time on, constant modules are not run. `run` must put the same inputs
    through the network each time, in eval mode.
    """

    def __init__(self, model: nn.Module, one: Tensor) -> None:
        calls = _calls(model, one)
        self._constant = _outermost(model, calls)
        self._needed = _read_outside(calls, self._constant)
        self._kept: dict[nn.Module, list[Any]] = {}
        if not self._holds(model, one):
            self._constant = self._needed = ()

    @torch.no_grad()
    def _holds(self, model: nn.Module, one: Tensor) -> bool:
        """Tried on one input: a module that matters by what it does to its input would be missed."""
        plain = model(one)
        self.again(lambda: model(one))
        found = self.again(lambda: model(one))
        self._kept.clear()
        return isinstance(plain, Tensor) and torch.equal(plain, found)

    @property
    def nbytes(self) -> int:
        """What is kept."""
        outs = (out for outs in self._kept.values() for out in outs)
        return sum(out.numel() * out.element_size() for out in outs)

    def again(self, run: Callable[[], T]) -> T:
        if not self._kept:
            with self._keeping():
                return run()
        with self._handing_back():
            return run()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            # What follows may work in place.
            self._kept.setdefault(module, []).append(out.detach().clone())

        handles = [module.register_forward_hook(keep) for module in self._needed]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _handing_back(self) -> Iterator[None]:
        before = {module: module.__dict__.get("forward") for module in self._constant}
        for module in self._constant:
            outs = iter(self._kept[module]) if module in self._kept else None
            module.__dict__["forward"] = _hand_back(outs)
        try:
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


def _hand_back(outs: Iterator[Tensor] | None) -> Callable[..., Any]:
    if outs is None:
        return lambda x, *args, **kwargs: x  # nobody reads it
    return lambda *args, **kwargs: next(outs).clone()


def constant_modules(model: nn.Module, one: Tensor) -> tuple[nn.Module, ...]:
    """The outermost modules whose output, for this input, no trained tensor has a part in. Costs one forward pass."""
    return _outermost(model, _calls(model, one))


Calls = dict[nn.Module, list[bool]]


def _calls(model: nn.Module, one: Tensor) -> Calls:
    """For each module that runs, whether what it puts out is a tensor that nothing trained has a part in."""
    calls: Calls = {}

    def note(module: nn.Module, args: Any, out: Any) -> None:
        calls.setdefault(module, []).append(isinstance(out, Tensor) and not out.requires_grad)

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.enable_grad():
            model(one)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _outermost(model: nn.Module, calls: Calls) -> tuple[nn.Module, ...]:
    found: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():  # a module before what is in it
        if module not in inside and calls.get(module) == [True]:
            found[module] = None
            inside.update(module.modules())
    return tuple(found)


def _read_outside(calls: Calls, constant: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """Those of them whose output someone reads that runs again."""
    known = set(constant)
    silent: set[nn.Module] = set()
    for parent in calls:  # a Sequential whose modules others run one by one does not run itself
        if type(parent) is nn.Sequential:
            row = list(parent)
            silent.update(a for a, b in pairwise(row) if a in known and b in known)
    return tuple(module for module in constant if module not in silent)
