"""A network with fewer channels: fit its layers to tensors of other shapes, and let the optimizer follow.

Convolutions, batch norms and linear layers know their sizes twice, in their tensors and in plain numbers beside them.
Both are changed here and nowhere else; whatever computes by the shape of its input, as nearly all else does, follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.errors import ModelError
from elastictrainer.runtime.apply import unwrap

__all__ = ["Cuts", "cut", "follow", "load_pruned", "resize"]

Cuts = Mapping[str, Sequence[tuple[int, Tensor]]]
"""For each tensor that becomes smaller, by its name in `state_dict()`: dimensions, and which of their places stay."""

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_CAN_SHRINK = (nn.modules.conv._ConvNd, nn.Linear, _BATCH_NORM)


def load_pruned(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a `model.safetensors` that PruneTrain left into a network as its library builds it. Returns the network.

        net = load_model("resnet50", num_classes=200).model
        load_pruned(net, "runs/pruned/model.safetensors")

    The layers shrink to what the file holds; names and kinds of layers must be the same.

    Raises:
        ModelError: a tensor of another shape belongs to a layer that cannot shrink, or names differ.
    """
    from elastictrainer.runtime.checkpoint import load_tensors

    tensors = load_tensors(Path(path))
    inner = unwrap(model)
    resize(inner, tensors)
    try:
        inner.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"{path} is of another network: {' '.join(str(error).split())}") from error
    return model


def resize(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[Tensor, nn.Parameter]:
    """Give every layer the shapes of these tensors (by their names in `state_dict()`); values are not copied.

    Returns the parameters that were replaced, each with its successor. Costs nothing where all shapes agree.

    Raises:
        ModelError: the shape of something that is no convolution, batch norm or linear layer would have to change.
    """
    replaced: dict[Tensor, nn.Parameter] = {}
    for path, module in model.named_modules():
        changed = False
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            wanted = tensors.get(f"{path}.{name}" if path else name)
            if tensor is None or wanted is None or wanted.shape == tensor.shape:
                continue
            if not isinstance(module, _CAN_SHRINK) or wanted.dim() != tensor.dim():
                raise ModelError(
                    f"{path}.{name} would have to change from {tuple(tensor.shape)} to {tuple(wanted.shape)}, and a "
                    f"{type(module).__name__} cannot; is this file of another network?"
                )
            changed = True
            fresh = torch.empty(wanted.shape, dtype=tensor.dtype, device=tensor.device)
            if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
                fresh = fresh.to(memory_format=torch.channels_last)
            if isinstance(tensor, nn.Parameter):
                replaced[tensor] = module._parameters[name] = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            else:
                module._buffers[name] = fresh
        if changed:
            _count_again(module)
    return replaced


def cut(tensor: Tensor, cuts: Iterable[tuple[int, Tensor]]) -> Tensor:
    """What stays of a tensor."""
    for dim, kept in cuts:
        tensor = tensor.index_select(dim, kept.to(tensor.device))
    return tensor


def follow(optimizer: Optimizer, replaced: Mapping[Tensor, nn.Parameter], cuts: Mapping[Tensor, Any]) -> None:
    """Let the optimizer hold the successors, in their places, with the state of what stayed.

    `cuts` are by the old parameter; state of a parameter's own shape is cut as it was, other state kept as it is.
    """
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old, new in replaced.items():
        if old not in optimizer.state:
            continue
        state = optimizer.state.pop(old)
        optimizer.state[new] = {
            key: cut(value, cuts.get(old, ())) if isinstance(value, Tensor) and value.shape == old.shape else value
            for key, value in state.items()
        }


def _count_again(module: nn.Module) -> None:
    """The plain numbers beside the tensors."""
    if isinstance(module, nn.modules.conv._ConvNd):
        outputs, inputs = module.weight.shape[:2]
        if module.groups > 1 and inputs == 1:  # depthwise: a group a channel
            module.groups = outputs
        module.out_channels, module.in_channels = outputs, inputs * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _BATCH_NORM):
        held = module.weight if module.weight is not None else module.running_mean
        if held is not None:
            module.num_features = len(held)
