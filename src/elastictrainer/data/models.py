"""Models through one door: a name from torchvision or timm, weights from their own download or a local file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.data.builtin import BUILTIN, builtin_weights
from elastictrainer.data.libraries import Architecture, build, find_architecture
from elastictrainer.data.model_options import apply_module_options, parse_model_options, split_options
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.data.recipe import METADATA_KEY, Recipe, find_recipe, read_recipe
from elastictrainer.data.weights import LoadReport, Match, align_names, load_tensors, one_line, read_weights
from elastictrainer.errors import ConfigError, ModelError

__all__ = ["LoadedModel", "load_model"]


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
    file, recipe, file_tensors = _open_weights(name, weights)
    if name == BUILTIN:
        name = recipe.model or name
    architecture = find_architecture(name)
    if recipe.model and find_architecture(recipe.model) != architecture:
        raise ModelError(f"weights {file!r} belong to {recipe.model}, as their recipe says, not to {name}")
    options = {**recipe.model_options, **parse_model_options(model_options)}
    arguments, settings = split_options(options)
    if "num_classes" in arguments:
        raise ConfigError("num_classes is an argument of its own, not a model option")
    published, published_size = architecture.published()
    wanted = normalize or recipe.normalize
    size = image_size or recipe.image_size or published_size
    sketch = _Sketch.of(architecture, arguments, settings, size, num_classes)

    tensors = file_tensors
    source = str(file) if file else "random weights"
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
    normalisation = Normalisation.parse(wanted) if wanted else published
    kept = Recipe(model=architecture.name, model_options=options, normalize=str(normalisation), image_size=size)
    return LoadedModel(
        model=model,
        name=architecture.name,
        source=source,
        num_classes=num_classes,
        normalisation=normalisation,
        image_size=size,
        head=sketch.head,
        report=report,
        recipe=kept,
    )


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
    path = Path(weights).expanduser()
    if path.suffix in (".yaml", ".yml", ".json"):
        recipe = read_recipe(path)
        if not recipe.file:
            raise ModelError(f"recipe {str(path)!r} names no weights: add the key 'file'")
        path = path.parent / recipe.file
        return str(path), recipe, read_weights(path)[0]
    tensors, metadata = read_weights(path)
    return str(path), find_recipe(path, metadata), tensors


@dataclass(frozen=True, slots=True)
class _Sketch:
    """A network built without memory, and what it takes to build it for this image size."""

    names: tuple[str, ...]
    head: tuple[str, ...]
    widths: Mapping[str, tuple[int, int]]
    num_classes: int
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        arguments: dict[str, Any],
        settings: dict[str, Any],
        size: int,
        num_classes: int | None,
    ) -> _Sketch:
        """Find the head by building for n and for n + 1 classes: it is what differs, whatever the network calls it."""
        classes = num_classes or 1000
        sized = arguments
        model, on_meta = _without_memory(architecture, classes, arguments)
        if on_meta:
            apply_module_options(model, settings)
            sized, model = _fit_size(architecture, model, arguments, settings, size, classes)
        other, _ = _without_memory(architecture, classes + 1, sized)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        widths = {}
        for name, tensor in other.state_dict().items():
            for axis, (ours, theirs) in enumerate(zip(shapes[name], tensor.shape)):
                if ours != theirs:
                    # A two-way head may have several outputs a class: the width is kept as a multiple.
                    widths[name] = (axis, theirs - ours)
        if not widths:
            raise ModelError(
                f"{architecture.name} has no layer whose size follows the number of classes: it is no classifier"
            )
        return cls(tuple(shapes), tuple(widths), widths, classes, sized)

    def classes_in(self, tensors: Mapping[str, Tensor]) -> int | None:
        """How many classes a file's head has; None when it has no head."""
        for name, (axis, outputs) in self.widths.items():
            if name in tensors and tensors[name].ndim > axis:
                return tensors[name].shape[axis] // outputs
        return None


def _without_memory(architecture: Architecture, classes: int, arguments: dict[str, Any]) -> tuple[nn.Module, bool]:
    """A network on the meta device, where nothing is allocated; for real where its builder reads its own values."""
    try:
        with torch.device("meta"):
            return build(architecture, classes, arguments), True
    except NotImplementedError:
        with torch.random.fork_rng(devices=[]):
            return build(architecture, classes, arguments), False


def _fit_size(
    architecture: Architecture,
    model: nn.Module,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    size: int,
    classes: int,
) -> tuple[dict[str, Any], nn.Module]:
    """Try a step's forward pass on shapes alone; a network of fixed size is built again for the size that was asked."""
    problem = _forward_problem(model, size, classes)
    if problem and architecture.size_argument not in arguments:
        sized = {**arguments, architecture.size_argument: size}
        try:
            again, on_meta = _without_memory(architecture, classes, sized)
            apply_module_options(again, settings)
            if on_meta and _forward_problem(again, size, classes) is None:
                return sized, again
        except (ConfigError, ModelError):
            pass
    if problem:
        options = f" with its model options ({', '.join(settings)})" if settings else ""
        raise ModelError(f"{architecture.name} cannot be trained on {size} px images{options}: {problem}")
    return arguments, model


def _forward_problem(model: nn.Module, size: int, classes: int) -> str | None:
    try:
        output = model.train()(torch.empty(2, 3, size, size, device="meta"))
    except NotImplementedError:
        return None  # an operation without a shape rule: it can only be seen with real numbers
    except Exception as error:
        return one_line(error)
    if not isinstance(output, Tensor):
        return (
            f"it returns a {type(output).__name__} where one tensor is needed; if these are auxiliary outputs, "
            "the model option aux_logits=false turns them off in torchvision"
        )
    if tuple(output.shape) != (2, classes):
        return f"its output has shape {tuple(output.shape)}, not (2, {classes})"
    return None
