"""Shadow one method of one module, in a way that survives copying and comes off again."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["replaced", "shadow", "shadowed", "unshadow"]

# A bound method in the instance's own __dict__, rather than a hook or a changed class:
# - `copy.deepcopy` re-binds it to the copied module, so a copy behaves as its original does;
# - `pickle` writes it as getattr(module, name), so a loaded module is a plain one again, even without this library;
# - state_dict keys, isinstance and the module's hooks stay as they were.
# For the second point the function must carry the name of the method that it stands in for.


def shadow(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Let `function(module, ...)` stand in for the method of its own name; False where someone else already did so."""
    name = function.__name__
    current = module.__dict__.get(name)
    plain = getattr(type(module), name)
    if current is not None and getattr(current, "__func__", None) not in (function, plain):
        return False
    module.__dict__[name] = types.MethodType(function, module)
    return True


def shadowed(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether `function` stands in on this module now."""
    return getattr(module.__dict__.get(function.__name__), "__func__", None) is function


def unshadow(module: nn.Module, function: Callable[..., Any]) -> None:
    """Take `function` off again; nothing happens where it does not stand in."""
    if shadowed(module, function):
        del module.__dict__[function.__name__]


@contextmanager
def replaced(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, these modules run other code; what else stood in for their forward (lean layers) comes back after."""
    before = [(module, module.__dict__.get("forward")) for module, _ in forwards]
    for module, forward in forwards:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, was in before:
            if was is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = was
