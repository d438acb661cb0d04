"""A network sketched without memory: which tensors are its head, and whether it runs on images of a given size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.data.libraries import Architecture, build, reads_values
from elastictrainer.data.model_options import apply_module_options
from elastictrainer.data.weights import one_line
from elastictrainer.errors import ConfigError, ModelError

__all__ = ["Sketch"]


@dataclass(frozen=True, slots=True)
class Sketch:
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
    ) -> Sketch:
        """Find the head by building for n and for n + 1 classes: it is what differs, whatever the network calls it."""
        classes = num_classes or 1000
        model = _without_memory(architecture, classes, arguments)
        apply_module_options(model, settings)
        sized, model = _fit_size(architecture, model, arguments, settings, size, classes)
        other = _without_memory(architecture, classes + 1, sized)
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


def _without_memory(architecture: Architecture, classes: int, arguments: dict[str, Any]) -> nn.Module:
    """A network on the meta device, where nothing is allocated; for real where its builder reads its own values."""
    try:
        with torch.device("meta"):
            return build(architecture, classes, arguments)
    except NotImplementedError:
        with torch.random.fork_rng(devices=[]):
            return build(architecture, classes, arguments)


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
            again = _without_memory(architecture, classes, sized)
            apply_module_options(again, settings)
            if _forward_problem(again, size, classes) is None:
                return sized, again
        except (ConfigError, ModelError):
            pass
    if problem:
        options = f" with its model options ({', '.join(settings)})" if settings else ""
        raise ModelError(f"{architecture.name} cannot be trained on {size} px images{options}: {problem}")
    return arguments, model


def _forward_problem(model: nn.Module, size: int, classes: int) -> str | None:
    try:
        device = next(model.parameters()).device  # meta, or the CPU where that could not be
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            output = model.train()(torch.zeros(2, 3, size, size, device=device))
    except Exception as error:
        if reads_values(error):
            return None  # an operation without a shape rule: it can only be seen with real numbers
        return one_line(error)
    if not isinstance(output, Tensor):
        return (
            f"it returns a {type(output).__name__} where one tensor is needed; if these are auxiliary outputs, "
            "the model option aux_logits=false turns them off in torchvision"
        )
    if tuple(output.shape) != (2, classes):
        return f"its output has shape {tuple(output.shape)}, not (2, {classes})"
    return None
