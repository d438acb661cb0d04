"""What a batch, a loss function and a module are, as far as it changes a step's cost: part of a kept profile's key."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["behaviour", "code", "shapes", "tensors_in"]

_DEEPEST = 3  # objects inside objects that are looked into


def shapes(batch: Any, depth: int = 0) -> Any:
    """What a batch is made of: tensors by shape and place, numbers by value, anything else by what it holds.

    Text is not looked at: it names samples, and does not say how much there is to compute.
    """
    if isinstance(batch, Tensor):
        strides = list(batch.stride()) if batch.layout is torch.strided else str(batch.layout)
        return [list(batch.shape), strides, str(batch.dtype), str(batch.device)]
    if isinstance(batch, np.ndarray):
        return [list(batch.shape), str(batch.dtype)]
    if batch is None or isinstance(batch, (bool, int)):
        return batch
    if isinstance(batch, float):
        return repr(batch)  # one that is not finite has no JSON
    if isinstance(batch, Mapping):
        return {str(k): shapes(v, depth) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [shapes(v, depth) for v in batch]
    kind = type(batch).__qualname__
    held = _attributes(batch) if depth < _DEEPEST else {}
    return [kind, shapes(held, depth + 1)] if held else kind


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
    elif hasattr(batch, "__dict__"):
        yield from tensors_in(vars(batch))


def code(function: Any) -> str:
    """A digest of what a loss function does: its code, what it closes over and reads, and the same of what it calls.

    Autocast usually lives inside the loss function, where no global flag shows it before it runs: switched by an
    argument (`functools.partial`), an attribute of an object, or a global of its module. So plain values are followed
    into all of those. A value too many costs a profile that could have been found again; one too few, a wrong budget.
    """
    digest = hashlib.sha256()
    queue: list[tuple[Any, int]] = [(function, 0)]
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id is used again
    while queue:
        item, depth = queue.pop()
        if _plain(item) or isinstance(item, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            digest.update(f"{item!r};".encode())
        elif isinstance(item, (Tensor, np.ndarray)):
            digest.update(f"{shapes(item)};".encode())
        elif isinstance(item, (ModuleType, type)) or _is_libraries(item):
            digest.update(f"{getattr(item, '__qualname__', None) or getattr(item, '__name__', type(item))};".encode())
        elif id(item) not in seen:
            seen[id(item)] = item
            digest.update(f"{type(item).__qualname__}(".encode())
            held, inside = _parts(item), depth
            if not isinstance(item, (FunctionType, MethodType, CodeType, partial)):
                held, inside = (held, depth + 1) if depth < _DEEPEST else ([], depth)
            queue += [(part, inside) for part in held]
    return digest.hexdigest()[:16]


def behaviour(module: nn.Module) -> str:
    """What a module of somebody's own computes, beyond its kind and what it prints: its settings and its methods' code.

    `model.set_grad_checkpointing()` changes nothing but an attribute, and an edited `forward` nothing but its code;
    both change the price. Of torch's own modules the settings alone are looked at.
    """
    settings = {name: held for name, held in vars(module).items() if not name.startswith("_")}
    digest = hashlib.sha256(repr(_settings(settings, 0)).encode())
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] not in {"torch", *sys.stdlib_module_names}:
            for name, held in sorted(vars(kind).items()):
                if isinstance(held, FunctionType):
                    digest.update(f"{name} {_bytecode(held.__code__)}".encode())
    return digest.hexdigest()[:16]


def _settings(value: Any, depth: int) -> Any:
    """Plain values, and those inside containers and configuration objects; None for anything else."""
    if _plain(value) or isinstance(value, (torch.dtype, torch.device)):
        return value
    if isinstance(value, (Tensor, nn.Module, FunctionType, type)) or depth == _DEEPEST:
        return None
    if isinstance(value, (list, tuple)):
        return [_settings(part, depth + 1) for part in value]
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return [(str(name), _settings(part, depth + 1)) for name, part in held.items()]


def _bytecode(block: CodeType) -> Any:
    return [_bytecode(part) if isinstance(part, CodeType) else part for part in _parts(block)]


def _parts(item: Any) -> list[Any]:
    """What an object does or holds, as far as it can change what a function that uses it computes."""
    if isinstance(item, CodeType):
        return [item.co_code, *item.co_names, *(c for c in item.co_consts if _plain(c) or isinstance(c, CodeType))]
    if isinstance(item, FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        defaults = [*(item.__defaults__ or ()), *_flat(item.__kwdefaults__ or {})]
        return [item.__code__, *cells, *defaults, *_globals_read(item)]
    if isinstance(item, MethodType):
        return [item.__func__, item.__self__]
    if isinstance(item, partial):
        return [item.func, *item.args, *_flat(item.keywords)]
    if isinstance(item, dict):  # no other mapping, whose items may have to be loaded from somewhere
        return _flat(item)
    if isinstance(item, (list, tuple)):
        return list(item)
    if isinstance(item, (set, frozenset)):
        return sorted(map(repr, filter(_plain, item)))
    called = type(item).__call__ if callable(item) else None
    return [called, *_flat(_attributes(item))]


def _globals_read(function: FunctionType) -> list[Any]:
    """The globals that a function names, and plain values of modules (`settings.AMP`), in a fixed order."""
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    read = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    modules = [value for value in read.values() if isinstance(value, ModuleType) and not _is_libraries(value)]
    return [*_flat(read), *(v for m in modules for n in sorted(names) if _plain(v := getattr(m, n, None)))]


def _flat(mapping: Mapping[Any, Any]) -> list[Any]:
    return [part for pair in mapping.items() for part in pair]


def _is_libraries(item: Any) -> bool:
    """Code of torch or of Python itself, whose release says what it does."""
    if not isinstance(item, (FunctionType, BuiltinFunctionType, ModuleType)):
        return False
    package = str(item.__name__ if isinstance(item, ModuleType) else item.__module__).partition(".")[0]
    return isinstance(item, BuiltinFunctionType) or package == "torch" or package in sys.stdlib_module_names


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes that an object itself holds, slots included; of a module what it is made of, not its hooks."""
    if isinstance(value, nn.Module):
        own = {name: held for name, held in vars(value).items() if not name.startswith("_")}
        return own | dict(value.named_children()) | dict(value.named_parameters(recurse=False))
    slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _names(slots: Any) -> list[str]:
    listed = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in listed if name not in ("__dict__", "__weakref__")]


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True
