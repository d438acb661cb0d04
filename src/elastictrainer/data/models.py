"""Models through one door: a name from torchvision or timm, weights from their own download or a local file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elastictrainer.data.builtin import BUILTIN, builtin_weights
from elastictrainer.data.libraries import Architecture, build, find_architecture
from elastictrainer.data.model_options import apply_module_options, parse_model_options, split_options
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.data.recipe import METADATA_KEY, Recipe, find_recipe, read_recipe
from elastictrainer.data.sketch import Sketch
from elastictrainer.data.weights import LoadReport, Match, align_names, load_tensors, read_weights
from elastictrainer.errors import ConfigError, ModelError

__all__ = ["LoadedModel", "ModelInputs", "load_model", "model_inputs"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network ready to be trained, and everything about it that its inputs must follow.

    `head` names the tensors whose shape follows the number of classes; `report.fresh` those that start at random.
    """

    model: nn.Module
    name: str
    source: str
    num_classes: int
    normalisation: Normalisation
    image_size: int
    head: tuple[str, ...]
    report: LoadReport
    recipe: Recipe

    def metadata(self) -> dict[str, str]:
        """For `safetensors.torch.save_file(..., metadata=)`: with it the saved file loads again without any option."""
        return {"format": "pt", METADATA_KEY: json.dumps(self.recipe.to_dict())}

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.recipe.model_options.items())
        return (
            f"{self.name} with {self.num_classes} classes from {self.source}: {self.report}; "
            f"inputs {self.image_size} px, normalised {self.normalisation}"
            + (f"; options {options}" if options else "")
        )


class ModelInputs(NamedTuple):
    """What a model's images must look like."""

    image_size: int
    normalisation: Normalisation


def model_inputs(
    name: str = "builtin",
    *,
    weights: str | Path | None = None,
    image_size: int | None = None,
    normalize: str | Normalisation | None = None,
) -> ModelInputs:
    """What `load_model` with the same arguments will say about its inputs, for reading the images first.

    >>> model_inputs("torchvision/resnet18").image_size
    224

    Costs reading the weights file for its recipe; nothing is built or downloaded.
    """
    return _Request.of(name, weights, image_size=image_size, normalize=normalize).inputs


def load_model(
    name: str = "builtin",
    *,
    num_classes: int | None = None,
    weights: str | Path | None = None,
    image_size: int | None = None,
    model_options: str | Mapping[str, Any] | Iterable[str] | None = None,
    normalize: str | Normalisation | None = None,
    match: Match | None = None,
    skip: str | Iterable[str] = (),
    seed: int = 0,
) -> LoadedModel:
    """Build a network by name, load weights into it, and fit its head to the classes.

    >>> loaded = load_model("torchvision/resnet18", num_classes=5)
    >>> loaded.head, loaded.normalisation.mean[0], loaded.image_size
    (('fc.weight', 'fc.bias'), 0.485, 224)

    Args:
        name: `builtin`, `torchvision/NAME`, `timm/NAME`, or a bare `NAME` (torchvision's if both have it).
        num_classes: outputs of the network; by default as many as the weights have.
        weights: nothing (random start), `"default"` (the library's own download), a `.safetensors` or `.pth` file, or
            a `.yaml`/`.json` recipe that names one in its key `file`.
        image_size: side of the square inputs in pixels; networks of a fixed size are built for it where they can be.
        model_options: settings that the weights need (see `elastictrainer.data.model_options`).
        normalize: `imagenet`, `inception`, `none` or `MEAN/STD`; by default what the library publishes for the network.
        match: `"name"`, or `"order"` for a file that uses other names for the same tensors in the same order.
        skip: globs of the file's tensors to leave out, for example `"fc.*"` to start the head anew in any case.
        seed: of the random start; the global random state is left as it was.

    Raises:
        ModelError: for an unknown name, an unreadable file, or weights that differ in more than the head, all by name.

    Costs two builds without memory (to find the head by what the number of classes changes), one real one, and reading
    the file; half-precision files are cast to the model's own precision.
    """
    if num_classes is not None and num_classes < 1:
        raise ConfigError(f"num_classes {num_classes} must be at least 1")
    asked = _Request.of(name, weights, image_size=image_size, normalize=normalize, model_options=model_options)
    architecture, recipe = asked.architecture, asked.recipe
    arguments, settings = split_options(asked.options)
    if "num_classes" in arguments:
        raise ConfigError("num_classes is an argument of its own, not a model option")
    sketch = Sketch.of(architecture, arguments, settings, asked.inputs.image_size, num_classes)

    tensors = asked.tensors
    source = asked.file or "random weights"
    if weights == "default":
        source = "the library's own weights"
        tensors = architecture.default_tensors(**sketch.arguments)
    if tensors is not None:
        tensors = align_names(sketch.names, tensors, match=match or recipe.match or "name", origin=source)
        num_classes = num_classes or sketch.classes_in(tensors)
    num_classes = num_classes or sketch.num_classes

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(architecture, num_classes, sketch.arguments)
    apply_module_options(model, settings)
    if tensors is None:
        report = LoadReport(0, fresh=tuple(model.state_dict()))
    else:
        skips = (skip,) if isinstance(skip, str) else tuple(skip)
        report = load_tensors(model, tensors, head=sketch.head, skip=skips or recipe.skip, origin=source)
    inputs = asked.inputs
    kept = Recipe(
        model=architecture.name,
        model_options=asked.options,
        normalize=str(inputs.normalisation),
        image_size=inputs.image_size,
    )
    return LoadedModel(
        model=model,
        name=architecture.name,
        source=source,
        num_classes=num_classes,
        normalisation=inputs.normalisation,
        image_size=inputs.image_size,
        head=sketch.head,
        report=report,
        recipe=kept,
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """What the caller asked for, completed by the recipe and by what the library publishes."""

    architecture: Architecture
    recipe: Recipe
    options: dict[str, Any]
    inputs: ModelInputs
    file: str | None
    tensors: dict[str, Tensor] | None

    @classmethod
    def of(
        cls,
        name: str,
        weights: str | Path | None,
        *,
        image_size: int | None,
        normalize: str | Normalisation | None,
        model_options: str | Mapping[str, Any] | Iterable[str] | None = None,
    ) -> _Request:
        file, recipe, tensors = _open_weights(name, weights)
        if name == BUILTIN:
            name = recipe.model or name
        architecture = find_architecture(name)
        if recipe.model and find_architecture(recipe.model) != architecture:
            raise ModelError(f"weights {file!r} belong to {recipe.model}, as their recipe says, not to {name}")
        published, published_size = architecture.published()
        wanted = normalize or recipe.normalize
        normalisation = Normalisation.parse(wanted) if wanted else published
        inputs = ModelInputs(image_size or recipe.image_size or published_size, normalisation)
        options = {**recipe.model_options, **parse_model_options(model_options)}
        return cls(architecture, recipe, options, inputs, file, tensors)


def _open_weights(name: str, weights: str | Path | None) -> tuple[str | None, Recipe, dict[str, Tensor] | None]:
    """Which file, what its recipe says, and its tensors (none for random or downloaded weights)."""
    if name == BUILTIN:
        if weights not in (None, "default"):
            raise ConfigError(
                f"the built-in model brings its own weights; for {str(weights)!r} name the model it belongs to"
            )
        file, recipe = builtin_weights()
        return str(file), recipe, read_weights(file)[0]
    if weights is None or weights == "default":
        return None, Recipe(), None
    if not str(weights).strip():
        raise ConfigError("weights '' names no file; give a .safetensors or .pth file, 'default' or nothing")
    path = Path(weights).expanduser()
    if path.suffix in (".yaml", ".yml", ".json"):
        recipe = read_recipe(path)
        if not recipe.file:
            raise ModelError(f"recipe {str(path)!r} names no weights: add the key 'file'")
        path = path.parent / recipe.file
        return str(path), recipe, read_weights(path)[0]
    tensors, metadata = read_weights(path)
    return str(path), find_recipe(path, metadata), tensors
