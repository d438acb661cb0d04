"""`elastictrainer ls`: what can be named on the command line, each with its one line."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Protocol

import typer

from elastictrainer.cli import options
from elastictrainer.cli.app import app
from elastictrainer.cli.output import Output
from elastictrainer.errors import ConfigError

__all__ = ["What", "ls"]


class What(str, enum.Enum):
    """The shelves."""

    models = "models"
    policies = "policies"
    importances = "importances"
    methods = "methods"
    datasets = "datasets"


class _Entry(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Where a shelf's entries come from, and which option takes their names."""

    option: str
    entries: Callable[[], Iterable[_Entry]]


def _models() -> Iterable[_Entry]:
    from elastictrainer.data import list_models

    return list_models()


def _policies() -> Iterable[_Entry]:
    from elastictrainer.compare import SHORTER
    from elastictrainer.policies import POLICIES

    shorter = _Control(SHORTER, "Of `compare` alone: train everything, for as many epochs as fit the budget.", "")
    return [*POLICIES.values(), shorter]


def _importances() -> Iterable[_Entry]:
    from elastictrainer.importance import IMPORTANCES

    return IMPORTANCES.values()


def _methods() -> Iterable[_Entry]:
    from elastictrainer.fewshot.methods import METHODS

    return METHODS.values()


def _datasets() -> Iterable[_Entry]:
    from elastictrainer.data import list_datasets

    return list_datasets()


_SHELVES = {
    What.models: _Shelf("--model", _models),
    What.policies: _Shelf("--policy", _policies),
    What.importances: _Shelf("--importance", _importances),
    What.methods: _Shelf("--method of adapt and fewshot", _methods),
    What.datasets: _Shelf("--data", _datasets),
}


@app.command()
def ls(
    what: Annotated[
        What | None, typer.Argument(help="models, policies, importances, methods or datasets; all if absent.")
    ] = None,
    pattern: Annotated[str, typer.Argument(help="Only names that match, for example '*resnet*'.")] = "*",
    as_json: options.Json = False,
) -> None:
    """List models, policies, importances, methods and datasets.

    The names are what --model, --policy, --importance, --method and --data take. Models come from whichever of
    torchvision and timm is installed; importing them takes a few seconds.

    \b
    elastictrainer ls
    elastictrainer ls models '*mobilenet*'
    elastictrainer ls policies --json
    """
    shelves = [what] if what else list(_SHELVES)
    found = {
        shelf: [entry for entry in _SHELVES[shelf].entries() if fnmatchcase(entry.name, pattern)] for shelf in shelves
    }
    if not any(found.values()):
        raise ConfigError(f"nothing in {', '.join(shelf.value for shelf in shelves)} matches {pattern!r}")
    out = Output(as_json)
    for number, (shelf, entries) in enumerate(found.items()):
        if number:
            out.say()
        shown = _overview(entries) if what is None and pattern == "*" and shelf is What.models else entries
        title = f"{shelf.value} ({_SHELVES[shelf].option})"
        columns = _columns(shown)
        out.table(columns, [[getattr(entry, column, "") for column in columns] for entry in shown], title=title)
    out.document(
        {
            shelf.value: [{column: getattr(e, column, "") for column in _columns(entries)} for e in entries]
            for shelf, entries in found.items()
        }
    )


@dataclass(frozen=True, slots=True)
class _Control:
    name: str
    description: str
    paper: str


def _columns(entries: list[_Entry]) -> list[str]:
    """What is implemented after a paper names it."""
    return ["name", "description", *(["paper"] if any(getattr(entry, "paper", "") for entry in entries) else [])]


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    description: str


def _overview(models: list[_Entry]) -> list[_Entry]:
    """A thousand names hide the rest of the page: one line a library instead."""
    libraries = Counter(entry.name.partition("/")[0] for entry in models if "/" in entry.name)
    groups = [
        _Group(f"{name}/...", f"{count} networks: elastictrainer ls models '{name}/*'")
        for name, count in libraries.items()
    ]
    return [*(entry for entry in models if "/" not in entry.name), *groups]
