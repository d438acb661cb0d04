"""Keep one bit an element of a ReLU for backward, where PyTorch keeps the element.

The backward of ReLU and ReLU6 asks of each output only whether it lay strictly inside; that is a bit. Under a plan
whose aim is memory, modules of exactly these two types pack theirs, so gradients stay bit-equal to PyTorch's at a 32nd
of the bytes (float32). The output is then held only by who else needs it.

Costs a few passes over one byte an element, forward and backward, some percent of a convolution's time, and in backward
the mask as numbers while it is applied. Left out, as
plain PyTorch: compiled code, `torch.func` transforms, subclasses, and ReLUs called as functions.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.runtime.patch import shadow, unshadow

__all__ = ["keep_bits", "keep_values"]

_TOP: dict[type[nn.Module], float | None] = {nn.ReLU: None, nn.ReLU6: 6.0}
# Eight bytes of 0 or 1 as one integer, times this, have their eight bits in the top byte.
_GATHER = 0x0102040810204080 if sys.byteorder == "little" else 0x8040201008040201 - (1 << 64)


def keep_bits(model: nn.Module) -> None:
    """Let every ReLU and ReLU6 module keep bits. One whose forward was replaced by other code is left as it is."""
    for module in model.modules():
        if type(module) in _TOP:
            shadow(module, forward)


def keep_values(model: nn.Module) -> None:
    """Take `keep_bits` back."""
    for module in model.modules():
        unshadow(module, forward)


def forward(self: nn.Module, input: Tensor) -> Tensor:
    """Stands in for the forward of a ReLU or ReLU6."""
    kind = type(self)
    plain: Any = kind.forward
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and input.requires_grad) or _transformed():
        out: Tensor = plain(self, input)
        return out
    rectified: Tensor = _Rectify.apply(input, _TOP[kind], bool(self.inplace))
    return rectified


class _Rectify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top: float | None, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            y = x.relu_() if top is None else nn.functional.hardtanh_(x, 0.0, top)
        else:
            y = x.relu() if top is None else nn.functional.hardtanh(x, 0.0, top)
        # By what stops a gradient, so that one flows where the output is NaN, as in PyTorch.
        stopped = y <= 0 if top is None else (y <= 0) | (y >= top)
        ctx.last = y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
        ctx.save_for_backward(pack(stopped.permute(0, 2, 3, 1) if ctx.last else stopped))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (bits,) = ctx.saved_tensors
        # One pass of a vectorised kernel: `masked_fill` is ten times slower on a CPU.
        if ctx.last:  # in the order of the output's memory, so that neither way anything is turned round
            grad = grad.contiguous(memory_format=torch.channels_last)
            shape = grad.permute(0, 2, 3, 1).shape
            let_through = unpack(bits, shape, dtype=grad.dtype, inverted=True).permute(0, 3, 1, 2)
        else:
            let_through = unpack(bits, grad.shape, dtype=grad.dtype, inverted=True)
        return torch.ops.aten.threshold_backward(grad, let_through, 0), None, None


def pack(mask: Tensor) -> Tensor:
    """A mask's elements as bits, in row-major order of its shape.

    >>> pack(torch.tensor([True] + [False] * 8)).numel()
    2
    """
    flat = mask.reshape(-1).view(torch.uint8)
    short = -flat.numel() % 8
    if short:
        flat = torch.nn.functional.pad(flat, (0, short))
    return ((flat.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack(bits: Tensor, shape: torch.Size, *, dtype: torch.dtype = torch.bool, inverted: bool = False) -> Tensor:
    """The mask that was packed, or its opposite, as numbers of a type."""
    eights = _table(dtype, inverted, bits.device).index_select(0, bits.int())
    return eights.view(-1)[: shape.numel()].view(shape)


@functools.cache
def _table(dtype: torch.dtype, inverted: bool, device: torch.device) -> Tensor:
    """The eight elements of each byte."""
    places = range(8) if sys.byteorder == "little" else range(7, -1, -1)
    rows = [[bool(byte >> place & 1) != inverted for place in places] for byte in range(256)]
    return torch.tensor(rows, device=device).to(dtype)


def _transformed() -> bool:
    """Inside `torch.func` transforms, which a custom function of this kind cannot follow."""
    return torch._C._functorch.maybe_current_level() is not None if hasattr(torch._C, "_functorch") else False
