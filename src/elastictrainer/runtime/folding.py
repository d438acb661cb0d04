"""Fold a batch norm into the convolution before it, for as long as neither is trained.

With fixed statistics a batch norm scales and shifts each channel, and so can a convolution's own weight and bias. The
folded weights are copies in channels_last, in which CPUs and GPUs convolve faster; the model's own are not touched.
Results change by rounding only. Only plain layers are folded: a subclass may do more in its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["fold", "is_convolution", "is_norm", "passed_on", "scaled_and_shifted"]

_CONVOLUTIONS = frozenset((nn.Conv1d, nn.Conv2d, nn.Conv3d))
_NORMS = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


def is_convolution(module: nn.Module) -> bool:
    return type(module) in _CONVOLUTIONS


def is_norm(module: nn.Module) -> bool:
    return type(module) in _NORMS and module._buffers.get("running_mean") is not None


def fold(convolution: nn.Module, norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A forward for the convolution that does the norm's work, too. The sums are made in float64."""
    weight, bias = convolution.get_parameter("weight").detach(), convolution._parameters.get("bias")
    scale, shift = _scale_and_shift(norm)
    if bias is not None:
        shift = shift + bias.detach().double() * scale
    folded = (weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
    if folded.dim() == 4:
        folded = folded.contiguous(memory_format=torch.channels_last)
    shift = shift.to(weight.dtype)
    run: Any = convolution._conv_forward  # pads as the layer is told to

    def forward(x: Tensor) -> Tensor:
        out: Tensor = run(x, folded, shift)
        return out

    return forward


def scaled_and_shifted(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A forward for a norm at rest: two numbers a channel, of which backward needs one."""
    dtype = norm.get_buffer("running_mean").dtype
    scale, shift = (numbers.to(dtype) for numbers in _scale_and_shift(norm))

    def forward(x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return torch.addcmul(shift.view(shape), x, scale.view(shape))

    return forward


def _scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    scale = (norm.get_buffer("running_var").double() + float(norm.eps)).rsqrt()  # type: ignore[arg-type]
    if norm._parameters.get("weight") is not None:
        scale = scale * norm.get_parameter("weight").detach().double()
    shift = -norm.get_buffer("running_mean").double() * scale
    if norm._parameters.get("bias") is not None:
        shift = shift + norm.get_parameter("bias").detach().double()
    return scale, shift


def passed_on(x: Tensor) -> Tensor:
    """Stands in for the forward of a norm whose work the convolution has done."""
    return x
