"""Fisher potential: what each output channel of each layer is worth on a task, from one backward pass (TinyTrain)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.errors import ConfigError, ModelError, TrainingError
from elastictrainer.importance.probe import LossFn
from elastictrainer.profiling.layers import samples_in
from elastictrainer.runtime.apply import lifted, unwrap
from elastictrainer.runtime.rows import supports_channels
from elastictrainer.runtime.untouched import untouched

__all__ = ["Potential", "channel_norms", "fisher_potential"]

Potential = dict[str, tuple[float, ...]]
"""For each weight (by its name), the worth of each of its output channels."""


def fisher_potential(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    averaged: bool = True,
    layers: Collection[str] | None = None,
) -> Potential:
    """`Delta_o = 1/(2N) sum_n (sum_d a_nd g_nd)^2` for every output channel o of every convolution and linear layer.

    `a` is what the layer puts out for sample n at position d (of an image, or token of a sequence), `g` the gradient of
    that sample's own loss to it, N all samples of all batches. How the samples are cut into batches does not matter, as
    long as the loss treats them apart; the model does, being in eval mode here. Of a layer that runs several times in a
    pass, `sum_d` goes over all its positions in all its runs. Leaves no trace.

    Example:
        >>> from elastictrainer.importance.potential import fisher_potential
        >>> layer = nn.Linear(1, 2, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0], [3.0]]))
        >>> fisher_potential(layer, lambda model, x: model(x).sum(1).mean(), [torch.tensor([[1.0], [2.0]])])
        {'weight': (1.25, 11.25)}

    Args:
        batches: what `loss_fn(model, batch)` takes; the first size of a batch's first tensor counts its samples, which
            every layer must keep apart in its own first dimension (or in equal runs of it, as windows do).
        averaged: whether `loss_fn` returns the mean over the samples (as losses do); False for their sum.
        layers: the weights to measure, by name; all by default. Before the first of them nothing is differentiated and
            nothing kept, so those that the ceilings rule out anyway (`affordable`) are worth leaving out.

    Raises:
        ConfigError: there is no batch, or `layers` names what is no weight of a convolution or linear layer.
        ModelError: the loss depends on no convolution or linear layer, or one mixes samples in its first dimension.
        TrainingError: the loss or a channel's worth is not finite.

    Cost: a forward pass, and a backward pass without any weight's gradient; one copy of each layer's output.

    Paper: TinyTrain (ICML'24); the form is that of Fisher pruning (Theis et al., 2018).
    """
    model = unwrap(model)
    weights = _weights(model, layers)
    totals: dict[str, Tensor] = {}
    samples = 0
    with untouched(model), lifted(model), torch.inference_mode(False), torch.enable_grad():
        model.eval()
        for param in model.parameters():
            param.requires_grad_(False)
        for index, batch in enumerate(batches):
            count = samples_in(batch)
            for name, inner in _inner_products(
                model, loss_fn, batch, count, weights, place=f"batches[{index}]"
            ).items():
                # The mean loss hands each sample a count-th of its own gradient.
                squares = (inner * (count if averaged else 1)).square().sum(0)
                totals[name] = squares if name not in totals else totals[name] + squares
            samples += count
    if not samples:
        raise ConfigError("batches holds no batch; the potential is measured on at least one")
    found = {name: tuple((total / (2 * samples)).tolist()) for name, total in totals.items()}
    wrong = [name for name, values in found.items() if not all(map(_finite, values))]
    if wrong:
        raise TrainingError(f"the Fisher potential of {wrong[0]} is not finite; look at the batches and the weights")
    return found


def channel_norms(model: nn.Module, names: Iterable[str]) -> Potential:
    """The L2 norm of each output channel's weights: channels by magnitude, the paper's ablation."""
    named = dict(unwrap(model).named_parameters())
    with lifted(unwrap(model)), torch.no_grad():
        return {name: tuple(named[name].flatten(1).float().norm(dim=1).tolist()) for name in names}


class _Tap(torch.autograd.Function):
    """The identity, on whose way back each sample's and channel's sum of output times gradient is noted."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, start: Tensor, count: int, by_last: bool, note: Any) -> Tensor:
        ctx.save_for_backward(out)
        ctx.count, ctx.by_last, ctx.note = count, by_last, note
        return out.clone()  # what follows may work in place, and the product needs the output as it is here

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (out,) = ctx.saved_tensors
        product = (out * grads[0]).float() if out.dtype in (torch.float16, torch.bfloat16) else out * grads[0]
        channels = product.shape[-1] if ctx.by_last else product.shape[1]
        if not ctx.by_last:
            product = product.flatten(2).sum(2) if product.dim() > 2 else product
        ctx.note(product.reshape(ctx.count, -1, channels).sum(1))
        return grads[0], None, None, None, None


def _inner_products(
    model: nn.Module, loss_fn: LossFn, batch: Any, count: int, modules: list[tuple[str, nn.Module]], *, place: str
) -> dict[str, Tensor]:
    """For each weight, the sum over positions of output times gradient, by sample and output channel."""
    found: dict[str, Tensor] = {}
    weights = {id(module): name for name, module in modules}
    start: list[Tensor] = []

    def tap(module: nn.Module, args: Any, out: Any) -> Any:
        name = weights[id(module)]
        if not isinstance(out, Tensor):
            return out
        linear = isinstance(module, nn.Linear)
        weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
        if out.dim() < 2 or out.shape[0] % count or not (linear or out.dim() == weight.dim()):
            raise ModelError(
                f"{name}: its layer puts out shape {tuple(out.shape)} for {count} samples, so which sample a row "
                "belongs to cannot be told; give batches of one sample"
            )
        if not start:
            start.append(torch.zeros((), device=out.device, requires_grad=True))

        def note(inner: Tensor) -> None:
            found[name] = inner if name not in found else found[name] + inner

        return _Tap.apply(out, start[0], count, linear, note)

    handles = [module.register_forward_hook(tap) for _, module in modules]
    try:
        loss = loss_fn(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(f"loss_fn must return a scalar tensor; for {place} it returned {type(loss).__name__}")
    if not loss.requires_grad:
        raise ModelError(f"the loss of {place} depends on no convolution or linear layer of the model")
    if not loss.detach().isfinite():
        raise TrainingError(f"the loss of {place} is {loss.item()}, so the potential cannot be measured")
    torch.autograd.grad(loss.reshape(()), start, allow_unused=True)
    return found


def _weights(model: nn.Module, layers: Collection[str] | None) -> list[tuple[str, nn.Module]]:
    modules = ((name, module) for name, module in model.named_modules() if supports_channels(module))
    found = {f"{name}.weight" if name else "weight": module for name, module in modules}
    unknown = [name for name in layers or () if name not in found]
    if unknown:
        raise ConfigError(f"layers names {unknown[0]!r}, which is no weight of a convolution or linear layer")
    return [(name, module) for name, module in found.items() if layers is None or name in layers]


def _finite(value: float) -> bool:
    return value - value == 0.0
