"""TinyTL's lite residual modules: a small trained path beside each block, at half the resolution.

Cai et al., TinyTL (NeurIPS 2020): biases train, for which no activation is kept, and so does beside each block a path
whose activations are few: the block's input at half its resolution, a convolution in two groups, ReLU, a 1x1
convolution, back to the resolution of the block's output, and added to it. The paper's are pretrained with the network;
here they start at nothing (the last convolution is zero), so the network is at first what it was. The paper's group
norms are left out: they would keep their input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastictrainer.errors import ModelError
from elastictrainer.runtime.untouched import untouched

__all__ = ["LITE", "LiteResidual", "lite_residuals"]

LITE = "lite_residual"  # by this name each hangs on its block's first convolution: a Sequential would run it


class LiteResidual(nn.Module):
    """What is added to a block's output of `channels`, from its input."""

    def __init__(self, given: int, channels: int, *, kernel: int) -> None:
        super().__init__()
        groups = math.gcd(2, math.gcd(given, channels))
        self.spread = nn.Conv2d(given, channels, kernel, padding=kernel // 2, groups=groups)
        self.act = nn.ReLU(inplace=True)
        self.point = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.point.weight)
        nn.init.zeros_(self.point.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        # Bilinear at a half is the mean of each four; the pooling operation itself would keep its input for backward.
        half = (-(-x.shape[2] // 2), -(-x.shape[3] // 2))
        small = F.interpolate(x, size=half, mode="bilinear")
        return F.interpolate(self.point(self.act(self.spread(small))), size=size, mode="bilinear")


@contextmanager
def lite_residuals(model: nn.Module, images: Tensor, *, share: float = 1.0, seed: int = 0) -> Iterator[tuple[str, ...]]:
    """Inside, each block of the model has one, or this share of the blocks, the last; gives the parameters' names.

    A block is a member of a Sequential with two convolutions or more in it and no other block, that maps one image to
    one image. `images` is any input, to see the shapes by.

    Raises:
        ModelError: the model has no such block.
    """
    blocks = _blocks(model, images)
    if not blocks:
        raise ModelError(
            "lite residual modules (tinytl) stand beside blocks of convolutions in a Sequential, and this network has "
            "none; --method bias trains the biases alone"
        )
    last = list(blocks)[-math.ceil(share * len(blocks)) :]
    blocks = {block: blocks[block] for block in last}
    handles = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block, (given, channels) in blocks.items():
            _holder(block).add_module(LITE, LiteResidual(given, channels, kernel=_kernel(block)).to(images.device))
            handles.append(block.register_forward_hook(_add))
    try:
        yield tuple(name for name, _ in model.named_parameters() if f".{LITE}." in f".{name}")
    finally:
        for handle in handles:
            handle.remove()
        for block in blocks:
            delattr(_holder(block), LITE)


def _holder(block: nn.Module) -> nn.Module:
    return next(part for part in block.modules() if isinstance(part, nn.Conv2d))


def _kernel(block: nn.Module) -> int:
    """As wide as the block's own, up to 5."""
    widest = max(max(part.kernel_size) for part in block.modules() if isinstance(part, nn.Conv2d))
    return min(5, widest | 1)


def _add(block: nn.Module, args: Any, out: Tensor) -> Tensor:
    added: Tensor = _holder(block).get_submodule(LITE)(args[0], tuple(out.shape[2:]))
    return out + added


def _blocks(model: nn.Module, images: Tensor) -> dict[nn.Module, tuple[int, int]]:
    """In the order in which they run, each with the channels of what it is given and puts out."""
    members = [
        child
        for parent in model.modules()
        if isinstance(parent, nn.Sequential)
        for child in parent.children()
        if sum(isinstance(part, nn.Conv2d) for part in child.modules()) > 1
    ]
    candidates = set(members)
    innermost = [m for m in members if not any(part in candidates for part in m.modules() if part is not m)]
    found: dict[nn.Module, tuple[int, int]] = {}

    def note(block: nn.Module, args: Any, out: Any) -> None:
        if (
            len(args) == 1
            and isinstance(args[0], Tensor)
            and isinstance(out, Tensor)
            and args[0].dim() == out.dim() == 4
        ):
            found[block] = (args[0].shape[1], out.shape[1])

    handles = [block.register_forward_hook(note) for block in innermost]
    try:
        with untouched(model), torch.no_grad():
            model.eval()(images)
    finally:
        for handle in handles:
            handle.remove()
    return found
