"""Price a backward pass by layer and channel, in bytes and multiply-adds: what TinyTrain's selection needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.backward import BackwardPrices, Layer
from elastictrainer.errors import ProfileError
from elastictrainer.profiling.fingerprint import tensors_in
from elastictrainer.profiling.measure import candidates_of
from elastictrainer.profiling.profile import Profile, Residual
from elastictrainer.profiling.trace import LossFn, forward, trace
from elastictrainer.profiling.weigh import weigh
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.norms import NormPolicy
from elastictrainer.runtime.rows import supports_channels
from elastictrainer.runtime.untouched import untouched

__all__ = ["layers_run", "price_backward", "samples_in", "state_copies"]


def price_backward(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    optimizer: Optimizer | None = None,
    bn: NormPolicy = "frozen",
    bits: bool = True,
) -> BackwardPrices:
    """What backward of this batch keeps and computes, by tensor, layer and output channel.

    Traces the step as `et.profile` does, and weighs it, without timing anything: the answer is the same on every
    machine. `bits` as in `et.apply`, where it is on for plans with channels. Leaves no trace.

    Example:
        >>> from elastictrainer.profiling.layers import price_backward
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2, bias=False))
        >>> prices = price_backward(model, lambda model, x: model(x).square().mean(), torch.randn(4, 8))
        >>> [(layer.name, layer.channels, layer.macs) for layer in prices.layers]
        [('0', 16, 512), ('2', 2, 128)]
        >>> prices.spent(["2.weight"], {"2.weight": (1,)}).gradient_bytes
        64

    Raises:
        ProfileError: the step cannot be traced, or the loss reaches nothing.

    Cost: five forward passes and a full backward pass, with a full backward pass's memory. The prices depend on the
    model and the batch's shape alone, so they can be taken elsewhere and kept (they round-trip through JSON).
    """
    candidates = candidates_of(model, optimizer)
    with untouched(model), apply(model, candidates, bn=bn, bits=bits) as applied:
        traced = trace(model, loss_fn, batch, candidates)
        graph = traced.graph
        if not graph.tensors:
            raise ProfileError("the loss reaches none of the optimizer's parameters: are they those of another model?")
        for parameter in candidates.values():
            parameter.grad = None

        def train(indices: Sequence[int]) -> None:
            applied.update([graph.names[k] for k in indices])

        memory = weigh(
            model, loss_fn, batch, traced, geometry=[None] * len(graph.nodes), state_bytes=[0] * len(graph.tensors),
            train=train,
        )  # fmt: skip
        with layers_run(model) as calls, torch.no_grad():
            forward(model, loss_fn, batch)
        layers = _layers(model, calls, set(graph.names))
    untimed = Profile(graph=graph, lanes=(), memory=memory, error=Residual(0.0, 0.0, 0))
    return BackwardPrices(untimed, layers, 0 if optimizer is None else state_copies(optimizer), samples_in(batch))


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the first size of its first tensor."""
    first = next((t for t in tensors_in(batch) if t.dim()), None)
    if first is None:
        raise ProfileError("the batch holds no tensor with a first dimension, so its samples cannot be counted")
    return first.shape[0]


def state_copies(optimizer: Optimizer) -> int:
    """How many numbers the optimizer keeps for each that it trains: 1 for momentum, 2 for Adam. Tried on one tensor."""
    probe = nn.Parameter(torch.zeros(3, 5))
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    twin = type(optimizer)([{**group, "params": [probe], "lr": 0.0}], **_arguments(optimizer, group))
    probe.grad = torch.zeros_like(probe)
    twin.step()
    return sum(isinstance(v, Tensor) and v.shape == probe.shape for v in twin.state[probe].values())


def _arguments(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    # Every optimizer of torch takes the learning rate by name; all else comes with the group.
    return {"lr": 0.0} if "lr" in group else {}


Calls = dict[str, list[tuple[nn.Module, int, int]]]


@contextmanager
def layers_run(model: nn.Module) -> Iterator[Calls]:
    """Inside, note by module name each call of a layer that could train in part: its multiply-adds, its input's bytes.

    Layers whose forward is never called (attention that reads a projection's weight itself) are not noted, and so are
    never trained in part.
    """
    calls: Calls = {}
    handles = []
    for name, module in model.named_modules():
        if supports_channels(module):

            def note(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
                weight = module._parameters["weight"]
                if isinstance(out, Tensor) and args and isinstance(args[0], Tensor) and weight is not None:
                    macs = out.numel() * (weight.numel() // weight.shape[0])
                    calls.setdefault(name, []).append((module, macs, args[0].numel() * args[0].element_size()))

            handles.append(module.register_forward_hook(note))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module, calls: Calls, reached: set[str]) -> tuple[Layer, ...]:
    shared: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                shared[param] = shared.get(param, 0) + 1
    layers = []
    for name, made in calls.items():
        module = made[0][0]
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        prefix = f"{name}." if name else ""
        if weight is None or shared[weight] > 1 or f"{prefix}weight" not in reached:
            continue
        has_bias = bias is not None and shared[bias] == 1 and f"{prefix}bias" in reached
        layers.append(
            Layer(
                name=name,
                weight=f"{prefix}weight",
                bias=f"{prefix}bias" if has_bias else None,
                channels=weight.shape[0],
                groups=int(getattr(module, "groups", 1)),
                row_numel=weight.numel() // weight.shape[0],
                item_bytes=weight.element_size(),
                macs=sum(macs for _, macs, _ in made),
                input_bytes=sum(nbytes for _, _, nbytes in made),
            )
        )
    return tuple(layers)
