"""The weight gradient of some output channels: a smaller kernel, and only what it needs is saved.

A row of a convolution's or linear layer's weight makes one output channel, and its gradient needs that channel's
incoming gradient alone. So the incoming gradient is narrowed first, and the kernel is that of a layer with as many
outputs as there are chosen ones; likewise the bias. Of a grouped convolution (a depthwise one is the extreme) only the
input channels of the groups that train are needed, and only these are saved. The gradient to the input is the dense
one, by the native kernel, without the input (see `lean.py`).

While a plan stands, `module.weight` *is* the chosen rows (see `rows.py`), and the whole weight, in which forward puts
the rows before it multiplies, lies beside it. What is handed to autograd are the rows.

Costs a copy of the chosen rows at each forward pass and of the chosen channels' gradient at each backward pass. First
derivatives only; compiled code runs this part uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from elastictrainer.runtime.lean import _blank

__all__ = ["CHOSEN", "WHOLE", "Chosen", "forward", "has_rows", "whole_of"]

# On the module: which rows train (by attribute), and a non-persistent buffer for each whole tensor.
CHOSEN = "_elastictrainer_chosen"
WHOLE = "_elastictrainer_whole_"


@dataclass(frozen=True, eq=False)
class Chosen:
    """Output channels of a layer, with what a grouped one needs to compute their gradients in one kernel.

    Each group that trains gets as many places as the fullest one needs: `lanes` are the channels in these places (some
    twice), `picks` the places of the chosen ones, `inputs` the input channels of these groups.
    """

    rows: Tensor
    lanes: Tensor | None = None
    picks: Tensor | None = None
    inputs: Tensor | None = None
    groups: int = 1

    @classmethod
    def of(cls, rows: Sequence[int], *, channels: int, groups: int, group_inputs: int, device: torch.device) -> Chosen:
        """`group_inputs` is how many input channels a group reads."""

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        if groups == 1:
            return cls(index(rows))
        per_group = channels // groups
        by_group: dict[int, list[int]] = {}
        for row in rows:
            by_group.setdefault(row // per_group, []).append(row)
        width = max(map(len, by_group.values()))
        lanes: list[int] = []
        picks: list[int] = []
        inputs: list[int] = []
        for place, (group, members) in enumerate(by_group.items()):
            picks += range(place * width, place * width + len(members))
            lanes += members + [members[-1]] * (width - len(members))
            inputs += range(group * group_inputs, (group + 1) * group_inputs)
        whole = len(by_group) == groups
        even = len(lanes) == len(rows)
        return cls(
            index(rows), index(lanes), None if even else index(picks), None if whole else index(inputs), len(by_group)
        )

    def to(self, device: torch.device) -> Chosen:
        if self.rows.device == device:
            return self
        moved = (None if t is None else t.to(device) for t in (self.rows, self.lanes, self.picks, self.inputs))
        rows, lanes, picks, inputs = moved
        assert rows is not None
        return Chosen(rows, lanes, picks, inputs, self.groups)


def has_rows(module: nn.Module) -> bool:
    """Whether some tensor of this module is its chosen rows now."""
    return CHOSEN in module.__dict__


def whole_of(module: nn.Module, attribute: str) -> Tensor:
    """The whole weight or bias, with the rows that train as they are now."""
    whole: Tensor = module._buffers[WHOLE + attribute]  # type: ignore[assignment]
    rows: Tensor = module._parameters[attribute]  # type: ignore[assignment]
    chosen: Chosen = module.__dict__[CHOSEN][attribute].to(whole.device)
    module.__dict__[CHOSEN][attribute] = chosen
    # By `.data`, always: optimizers may write that way too, unseen by version counters; and nobody's saved tensor is
    # outdated by writing what is there already.
    whole.data.index_copy_(0, chosen.rows, rows.data)
    return whole


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for the forward of a convolution or linear layer that trains in part."""
    with _Calls(self):
        return type(self).forward(self, *args, **kwargs)


class _Calls(TorchFunctionMode):
    """While it is on, the call that uses the module's weight becomes the sparse one, whatever else forward does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in _CONVOLUTIONS:
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given = dict(zip(names, args)) | kwargs
            weight = self.module._parameters["weight"]
            if weight is not None and given["weight"] is weight:
                x, bias = given["input"], given.get("bias")
                if func is F.linear:
                    return _run(self.module, x, bias, None)
                dims = _CONVOLUTIONS[func]
                stride, dilation = _each(given.get("stride", 1), dims), _each(given.get("dilation", 1), dims)
                kernel = weight.shape[2:]
                x, padding = _padded(x, given.get("padding", 0), kernel, dilation)
                return _run(self.module, x, bias, (stride, padding, dilation, given.get("groups", 1)))
        return func(*args, **kwargs)


_CONVOLUTIONS: dict[Any, int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) if len(value) == dims else tuple(value) * dims


def _padded(x: Tensor, padding: Any, kernel: torch.Size, dilation: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """Padding as numbers; what cannot be said so ('same' with an even kernel) is padded here, as PyTorch does it."""
    if not isinstance(padding, str):
        return x, _each(padding, len(kernel))
    if padding == "valid":
        return x, (0,) * len(kernel)
    total = [d * (k - 1) for d, k in zip(dilation, kernel)]
    odd = [side for amount in reversed(total) for side in (0, amount % 2)]
    return (F.pad(x, odd) if any(odd) else x), tuple(amount // 2 for amount in total)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(module: nn.Module, x: Tensor, bias: Tensor | None, geometry: Geometry | None) -> Tensor:
    if geometry is not None and x.dim() == len(geometry[0]) + 1:
        single: Tensor = _run(module, x[None], bias, geometry)[0]
        return single
    chosen: dict[str, Chosen] = module.__dict__[CHOSEN]
    weight_rows: Tensor = module._parameters["weight"]  # type: ignore[assignment]
    weight = whole_of(module, "weight") if "weight" in chosen else weight_rows.detach()
    bias_rows = bias
    if bias is not None:
        bias = whole_of(module, "bias") if "bias" in chosen else bias.detach()
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight_rows, weight = x.to(dtype), weight_rows.to(dtype), weight.to(dtype)
        bias_rows = None if bias_rows is None else bias_rows.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = _Layer.apply(
            x, weight_rows, bias_rows, weight, bias, chosen.get("weight"), chosen.get("bias"), geometry
        )
    return out


class _Layer(torch.autograd.Function):
    """A convolution (with a geometry) or linear layer (without) whose weight and bias train in their chosen rows.

    `weight_rows` and `bias_rows` are what autograd sees; `weight` and `bias` are what is multiplied by.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_rows: Tensor,
        bias_rows: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        chosen: Chosen | None,
        chosen_bias: Chosen | None,
        geometry: Geometry | None,
    ) -> Tensor:
        ctx.chosen, ctx.chosen_bias, ctx.geometry = chosen, chosen_bias, geometry
        ctx.shape, ctx.blank = weight.shape, (x.shape, x.stride(), x.dtype, x.device)
        needed = None
        if ctx.needs_input_grad[1]:
            needed = x if chosen is None or chosen.inputs is None else x.index_select(1, chosen.inputs)
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, needed)
        if geometry is None:
            return F.linear(x, weight, bias)
        stride, padding, dilation, groups = geometry
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weight, x = ctx.saved_tensors
        channel = -1 if ctx.geometry is None else 1
        to_x = to_weight = to_bias = None
        narrow = None
        if ctx.needs_input_grad[0]:
            to_x = grad @ weight if ctx.geometry is None else _input_gradient(ctx, grad, weight)
        if ctx.needs_input_grad[1]:
            narrow = grad if ctx.chosen is None else grad.index_select(channel, ctx.chosen.rows)
            if ctx.geometry is None:
                to_weight = narrow.flatten(0, -2).t() @ x.flatten(0, -2) if x.dim() > 1 else torch.outer(narrow, x)
            else:
                to_weight = _weight_gradient(ctx, grad, narrow, x)
        if ctx.needs_input_grad[2]:
            same = narrow is not None and _same(ctx.chosen, ctx.chosen_bias)
            if not same:
                narrow = grad if ctx.chosen_bias is None else grad.index_select(channel, ctx.chosen_bias.rows)
            assert narrow is not None
            others = [d for d in range(narrow.dim()) if d != channel % narrow.dim()]
            to_bias = narrow.sum(others) if others else narrow
        return to_x, to_weight, to_bias, None, None, None, None, None


def _same(a: Chosen | None, b: Chosen | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a.rows, b.rows))


def _input_gradient(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    return _backward(grad, _blank(*ctx.blank), weight, ctx.geometry, ctx.geometry[3], of=0)


def _weight_gradient(ctx: Any, grad: Tensor, narrow: Tensor, x: Tensor) -> Tensor:
    chosen: Chosen | None = ctx.chosen
    groups = ctx.geometry[3]
    if chosen is not None and chosen.lanes is not None:
        groups = chosen.groups
        narrow = narrow if chosen.picks is None else grad.index_select(1, chosen.lanes)
    shape = (narrow.shape[1], *ctx.shape[1:])
    # Of the weight the kernel reads the shape and the layout alone.
    like = narrow.new_empty(shape)
    found = _backward(narrow, x, like, ctx.geometry, groups, of=1)
    return found if chosen is None or chosen.picks is None else found.index_select(0, chosen.picks)


def _backward(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, groups: int, *, of: int) -> Tensor:
    stride, padding, dilation, _ = geometry
    none = [0] * len(stride)
    mask = [of == 0, of == 1, False]
    found = torch.ops.aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, none, groups, mask
    )
    out: Tensor = found[of]
    return out
