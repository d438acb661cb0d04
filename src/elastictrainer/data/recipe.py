"""A recipe: the options that a weights file needs, kept with it so that nobody has to remember them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from elastictrainer.data.model_options import parse_model_options
from elastictrainer.data.weights import Match
from elastictrainer.errors import ModelError

__all__ = ["Recipe", "find_recipe"]

METADATA_KEY = "elastictrainer"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of `load_model` as they stand in a YAML or JSON file; whatever the caller says explicitly wins.

    >>> Recipe.from_dict({"model_options": {"type:BatchNorm2d.eps": "1e-3"}}, origin="x.yaml").model_options
    {'type:BatchNorm2d.eps': 0.001}
    """

    model: str | None = None
    file: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    normalize: str | None = None
    image_size: int | None = None
    match: Match | None = None
    skip: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, data: Any, *, origin: str) -> Recipe:
        known = [item.name for item in fields(cls)]
        if not isinstance(data, Mapping) or set(data) - set(known):
            wrong = (
                ", ".join(sorted(map(str, set(data) - set(known))))
                if isinstance(data, Mapping)
                else type(data).__name__
            )
            raise ModelError(f"recipe {origin}: {wrong} is not understood; its keys are {', '.join(known)}")
        values = dict(data)
        values["model_options"] = parse_model_options(values.get("model_options"))
        skip = values.get("skip") or ()
        values["skip"] = (skip,) if isinstance(skip, str) else tuple(skip)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """What is set, as plain data."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["model_options"] = {k: list(v) if isinstance(v, tuple) else v for k, v in self.model_options.items()}
        data["skip"] = list(self.skip)
        return {key: value for key, value in data.items() if value}


def find_recipe(weights: str | Path, metadata: Mapping[str, str] | None = None) -> Recipe:
    """The recipe of a weights file: `FILE.yaml` or `FILE.json` beside it, else its safetensors metadata, else empty."""
    path = Path(weights).expanduser()
    for beside in (path.with_name(path.name + ".yaml"), path.with_name(path.name + ".json")):
        if beside.is_file():
            return read_recipe(beside)
    if metadata and METADATA_KEY in metadata:
        try:
            return Recipe.from_dict(json.loads(metadata[METADATA_KEY]), origin=f"in {path.name}")
        except json.JSONDecodeError as error:
            raise ModelError(f"recipe in the metadata of {str(path)!r} is not JSON: {error}") from error
    return Recipe()


def read_recipe(path: Path) -> Recipe:
    """A recipe from a YAML or JSON file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ModelError(f"recipe {str(path)!r} cannot be read: {' '.join(str(error).split())}") from error
    return Recipe.from_dict(data, origin=repr(str(path)))
