"""Keep no input for backward that nobody needs.

The gradient of a convolution to its *input* needs the weight, the incoming gradient and the input's geometry. PyTorch
saves the input itself all the same, even when the weight is frozen (it would be needed for the weight's gradient). The
same holds for batch norm with fixed statistics, whose backward is a scaling by `weight / sqrt(var + eps)`. Here a layer
whose weight rests saves the geometry alone, and backward hands the same native kernel an uninitialised block of that
geometry, which it does not read for what is asked of it. So gradients are bit-equal to plain PyTorch, which the tests
check with blocks full of NaN, for every kind of convolution, layout and dtype.

What there is not to gain: a linear layer saves its input only if its weight trains; layer norm and group norm need
theirs for the gradient to the input; and below the deepest trained tensor autograd records nothing at all.

One layer is kept from harm instead: on a GPU a layer norm whose bias trains while its weight rests fails in backward
where its rows are many, since the bias's gradient is sized by the weight's (pytorch#193016, seen in torch 2.11). There
the bias is added after the norm, to the same result.

Costs about 10 microseconds a step for each layer at rest that passes a gradient on, and one for all others. Backward
borrows the input's size while the layer's own kernel runs. Left out, as plain PyTorch: compiled code (the compiler
decides there what is saved), `torch.func` transforms, devices other than CPU and CUDA, and on a GPU inputs so small
that keeping them costs less than the host's microseconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from elastictrainer.runtime.patch import shadow, unshadow

__all__ = ["convolution_saving", "make_lean", "make_plain"]

Geometry = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def make_lean(model: nn.Module) -> None:
    """Let every convolution and norm of the model decide at each call, by the flags of its tensors, what to save.

    A layer whose forward was replaced by other code is left as it is.
    """
    for module in model.modules():
        if isinstance(module, (_ConvNd, _BatchNorm, nn.LayerNorm)):
            shadow(module, forward)


def make_plain(model: nn.Module) -> None:
    """Take `make_lean` back."""
    for module in model.modules():
        unshadow(module, forward)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the forward of a convolution, batch norm or layer norm."""
    kind = type(self)
    plain: Callable[..., Any] = kind.forward
    # Asked first: what follows must not be traced into compiled code. And `_parameters`, since this runs at every call
    # and `self.weight` is ten times slower.
    if torch.compiler.is_compiling() or not args:
        return plain(self, *args, **kwargs)
    weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
    if isinstance(self, nn.LayerNorm):
        with _KnownCalls() if _fails_in_backward(args[0], weight, bias) else nullcontext():
            return plain(self, *args, **kwargs)
    if not _saved_for_nothing(args[0], weight, bias) or not _hooks_allowed():
        return plain(self, *args, **kwargs)
    saving: AbstractContextManager[Any]
    if kind in _CONVOLUTIONS and weight is not None and self.padding_mode == "zeros":
        saving = convolution_saving(weight)
    elif kind in _NORMS and not self.training and self._buffers["running_mean"] is not None:
        saving = _norm_saving()
    elif kind in _NORMS:
        return plain(self, *args, **kwargs)
    else:
        # A subclass (or a padding) may do more than the one call that is known: be lean in that call alone.
        saving = _KnownCalls()
    with saving:
        return plain(self, *args, **kwargs)


class _KnownCalls(TorchFunctionMode):
    """While it is on, `F.conv*` and `F.batch_norm` save as little as the plain layers do, and `F.layer_norm` works."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}

        def argument(position: int, name: str) -> Any:
            return args[position] if len(args) > position else kwargs.get(name)

        saving: AbstractContextManager[Any] = nullcontext()
        if func in _CONVOLUTION_CALLS:
            weight = argument(1, "weight")
            if _saved_for_nothing(argument(0, "input"), weight, argument(2, "bias")):
                saving = convolution_saving(weight)
        elif func is F.batch_norm:
            fixed = argument(1, "running_mean") is not None and not argument(5, "training")
            if fixed and _saved_for_nothing(argument(0, "input"), argument(3, "weight"), argument(4, "bias")):
                saving = _norm_saving()
        elif func is F.layer_norm:
            x, weight, bias, eps = argument(0, "input"), argument(2, "weight"), argument(3, "bias"), argument(4, "eps")
            if _fails_in_backward(x, weight, bias):
                return func(x, argument(1, "normalized_shape"), weight, None, 1e-5 if eps is None else eps) + bias
        with saving:
            return func(*args, **kwargs)


def convolution_saving(weight: Tensor) -> saved_tensors_hooks:
    """Inside, a convolution by a weight of this size keeps its input's geometry alone."""
    # Saved are the input and the weight, after autocast: neither need be the tensor that was passed. The weight is
    # known by its size and its first dimension: at batch 1, a depthwise layer's input may be as large as its weight. An
    # input that has both is simply kept.
    size, first = weight.numel(), weight.shape[0]

    def pack(saved: Tensor) -> Tensor | Geometry:
        return saved if saved.numel() == size and saved.shape[0] == first else _geometry(saved)

    return saved_tensors_hooks(pack, _restore)


def _norm_saving() -> saved_tensors_hooks:
    # All else that batch norm saves (weight, statistics, cuDNN's reserve) are vectors.
    return saved_tensors_hooks(lambda saved: saved if saved.dim() == 1 else _geometry(saved), _restore)


def _saved_for_nothing(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether backward comes by here, yet not for the weight. The bias may train: its gradient needs no input."""
    if weight is not None and weight.requires_grad:
        return False
    wanted = x.requires_grad or (bias is not None and bias.requires_grad)
    if not wanted or not torch.is_grad_enabled():
        return False
    return x.is_cpu or (x.is_cuda and x.numel() * x.element_size() >= _worth_bytes(x.device))


def _fails_in_backward(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a layer norm's backward would size its bias's gradient by the weight's, which there is none of."""
    if bias is None or not bias.requires_grad or (weight is not None and weight.requires_grad):
        return False
    return x.is_cuda and x.numel() > _MANY_ROWS * bias.numel() and torch.is_grad_enabled()


@functools.cache
def _worth_bytes(device: torch.device) -> int:
    """The least worth 10 microseconds of a GPU's host, which is often the one who is late: 1/40,000 of its memory.

    That is 3.5 MiB on an H200, where small batches wait for the host and large ones for memory; 0.2 MiB on a Jetson.
    """
    return int(torch.cuda.get_device_properties(device).total_memory) // 40_000


def _hooks_allowed() -> bool:
    """False inside `torch.func` transforms and wherever else `disable_saved_tensors_hooks` holds."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


_MANY_ROWS = 1 << 16
_CONVOLUTIONS = frozenset((nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
_NORMS = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
_CONVOLUTION_CALLS = frozenset(
    (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)


def _geometry(saved: Tensor) -> Geometry:
    return saved.shape, saved.stride(), saved.dtype, saved.device


def _restore(packed: Tensor | Geometry) -> Tensor:
    return packed if isinstance(packed, Tensor) else _blank(*packed)


def _blank(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of this geometry, with nothing in it."""
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
