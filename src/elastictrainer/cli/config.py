"""`--config file.yaml`: every option of a verb is also a key of one YAML file.

The file is read while the command line is parsed, before any other option is, and becomes that command's defaults. So
what stands on the command line wins, and a value from the file passes exactly the checks that a typed one passes.

The `config.yaml` of a run folder is such a file too. It records what became of the options (the network, the classes,
the division of the images), which no option could say again; the options themselves stand in it under `command`.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import typer
import yaml

from elastictrainer.errors import ConfigError, ElasticTrainerError

__all__ = ["COMMAND", "command", "merge"]

COMMAND = "command"
_OWN = "config"  # a file cannot name another file
_NOT_AGAIN = ("out", "resume", "json", "debug", _OWN)  # options of one call, not of what it does


def command(context: typer.Context) -> dict[str, Any]:
    """The options of the verb that is running, as a file that asks for the same again would have them."""
    options = {_key(option): context.params.get(option.name) for option in context.command.params}
    return {
        key: str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        for key, value in options.items()
        if value is not None and key not in _NOT_AGAIN
    }


def merge(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the defaults of the command being parsed; report everything wrong with it at once."""
    if path is None or context.resilient_parsing:
        return path
    options = {_key(option): option for option in context.command.params if _key(option) not in (_OWN, "help")}
    defaults: dict[str, Any] = {}
    problems: list[str] = []
    for written, value in _read(path).items():
        key = str(written).replace("_", "-")
        option = options.get(key)
        if option is None:
            problems.append(f"unknown key {str(written)!r}{_suggestion(key, options)}")
        elif value is not None:
            try:
                defaults[option.name] = _as_typed(option, value)
                option.process_value(context, defaults[option.name])
            except (typer.BadParameter, ElasticTrainerError) as error:
                problems.append(f"{written}: {_reason(error)}")
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _key(option: Any) -> str:
    # Options go by their long spelling, arguments by their name: that is what people see in --help.
    longest: str = max(option.opts, key=len)
    return longest.lstrip("-").replace("_", "-")


def _read(path: Path) -> dict[Any, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not a text file in UTF-8 (byte {error.start})") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"--config {path}:{where} {getattr(error, 'problem', None) or error}") from error
    if document is None:
        return {}
    if isinstance(document, dict) and "environment" in document:  # the record of a run
        document = document.get(COMMAND) or {}
        if not document:
            raise ConfigError(f"--config {path}: a run made from Python, not by a command that could be given again")
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise ConfigError(f"--config {path}: holds a {kind}; write one 'key: value' a line, for example 'epochs: 12'")
    return document


def _as_typed(option: Any, value: Any) -> Any:
    """What the shell would have handed over for this value: text, a list of texts, or a flag's truth."""
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{value!r} is neither true nor false")
        return value
    if option.multiple or option.nargs != 1:
        return [_text(item) for item in (value if isinstance(value, list) else [value])]
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{value!r} is a {type(value).__name__}; one number or text is wanted (quote it if it is a word)")


def _suggestion(key: str, options: dict[str, Any]) -> str:
    close = difflib.get_close_matches(key, options, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(sorted(options))})"


def _reason(error: Exception) -> str:
    # Typer carries its own copy of click in newer releases, so its exceptions have no import path that stays.
    return str(getattr(error, "message", None) or error)
