"""Settings that a weights file needs and its tensors cannot carry: strides, epsilons, a builder's own arguments.

One small language for all of them. `PATTERN.ATTRIBUTE=VALUE` sets a plain attribute of every module whose dotted path
matches the glob; `type:CLASS.ATTRIBUTE=VALUE` does so by class name, subclasses included; `NAME=VALUE` without a dot is
an argument of the library's own builder:

    layer[234].0.conv1.stride=2; type:BatchNorm2d.eps=1e-3; width_mult=1.4

Only attributes that exist, hold a plain value and keep their kind can be set, so a slip of the pen is an error and
never a setting that nothing reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from elastictrainer.errors import ConfigError, ModelError

__all__ = ["apply_module_options", "parse_model_options", "split_options"]

_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parse_model_options(options: str | Mapping[str, Any] | Iterable[str] | None) -> dict[str, Any]:
    """Read options from a mapping, from `"a=1; b=2"`, or from a list of such strings.

    >>> parse_model_options("layer[234].0.conv1.stride=2,2; type:BatchNorm2d.eps=1e-3")
    {'layer[234].0.conv1.stride': (2, 2), 'type:BatchNorm2d.eps': 0.001}
    """
    if options is None:
        return {}
    if isinstance(options, Mapping):
        return {str(key): _value(value) if isinstance(value, str) else value for key, value in options.items()}
    if not isinstance(options, str):
        return {key: value for part in options for key, value in parse_model_options(part).items()}
    parsed: dict[str, Any] = {}
    for part in filter(str.strip, options.replace("\n", ";").split(";")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"model option {part.strip()!r} has no value; write for example 'type:BatchNorm2d.eps=1e-3'"
            )
        parsed[key.strip()] = _value(value)
    return parsed


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The builder's arguments (no dot in the name) and the settings of modules (a dot), apart."""
    builder = {key: value for key, value in options.items() if "." not in key and ":" not in key}
    return builder, {key: value for key, value in options.items() if key not in builder}


def apply_module_options(model: nn.Module, options: Mapping[str, Any]) -> dict[str, int]:
    """Set module attributes by path glob or type; returns how many modules each option reached.

    Raises:
        ModelError: listing every option that matches no module, or whose attribute does not exist, is not a plain
            value, or is of another kind. Nothing is set then.
    """
    problems: list[str] = []
    settings: list[tuple[nn.Module, str, Any]] = []
    reached: dict[str, int] = {}
    for option, value in options.items():
        pattern, _, attribute = option.rpartition(".")
        matches = [(path, module) for path, module in model.named_modules() if _matches(pattern, path, module)]
        reached[option] = len(matches)
        if not matches:
            problems.append(f"{option}: no module matches {pattern!r}")
        for path, module in matches:
            if attribute not in vars(module):
                problems.append(
                    f"{option}: {path or 'the model'} ({type(module).__name__}) has no setting {attribute!r}"
                )
                break
            try:
                settings.append((module, attribute, _coerce(vars(module)[attribute], value)))
            except TypeError as error:
                problems.append(f"{option}: {path or 'the model'}.{attribute} {error}")
                break
    if problems:
        raise ModelError("model options do not fit: " + "; ".join(problems))
    for module, attribute, new in settings:
        setattr(module, attribute, new)
    return reached


def _matches(pattern: str, path: str, module: nn.Module) -> bool:
    if pattern.startswith("type:"):
        return any(fnmatchcase(kind.__name__, pattern[5:]) for kind in type(module).__mro__)
    return fnmatchcase(path, pattern)


def _coerce(current: Any, value: Any) -> Any:
    """`value` in the kind of `current`: one number fills a tuple, an int becomes a float, nothing else changes kind."""
    if isinstance(current, (tuple, list)) and current:
        given = list(value) if isinstance(value, (tuple, list)) else [value] * len(current)
        if len(given) != len(current):
            raise TypeError(f"holds {len(current)} values and cannot become {value!r}")
        return type(current)(_coerce(old, new) for old, new in zip(current, given))
    if isinstance(current, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if current is None or (type(current) in (bool, int, str) and type(value) is type(current)):
        return value
    if type(current) in (bool, int, float, str):
        raise TypeError(f"is {current!r} ({type(current).__name__}) and cannot become {value!r}")
    raise TypeError(f"is a {type(current).__name__}, not a plain setting")


def _value(text: str) -> Any:
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
