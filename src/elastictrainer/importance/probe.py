"""The few batches on which importance is measured: gradients at the live weights, without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from elastictrainer.errors import ConfigError, ModelError, TrainingError
from elastictrainer.runtime.apply import lifted, unwrap
from elastictrainer.runtime.untouched import untouched

__all__ = ["LossFn", "Probe", "probing"]

LossFn = Callable[[nn.Module, Any], Tensor]


@contextmanager
def probing(
    model: nn.Module, loss_fn: LossFn, parameters: Iterable[nn.Parameter], *, scaler: GradScaler | None = None
) -> Iterator[Probe]:
    """A probe of these parameters: inside, each of them requires a gradient and no other does.

    So what a probe finds does not depend on which tensors rest at the moment. On exit nothing has changed.
    """
    model = unwrap(model)  # eager and alone: no recompilation for flags that last one probe, no reduction across ranks
    with untouched(model), lifted(model), torch.inference_mode(False), torch.enable_grad():
        chosen = tuple(dict.fromkeys(parameters))  # each once, also where a tied one was asked for by two names
        wanted = set(chosen)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in wanted)
        yield Probe(model, loss_fn, chosen, scaler)


class Probe:
    """Gradients, batch after batch. Made by `probing`."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, parameters: Sequence[nn.Parameter], scaler: GradScaler | None
    ) -> None:
        self.parameters = tuple(parameters)
        self._model = model
        self._loss_fn = loss_fn
        self._looked = False
        # Only read: GradScaler.scale() would create the scaler's tensors on first use.
        self._scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    def gradients(
        self, batches: Iterable[Any], *, label: str = "batches"
    ) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """Yield, for each batch, its place (for messages) and the gradient of every parameter that its loss reaches.

        Raises:
            ConfigError: there is no batch, or the loss is not a scalar.
            ModelError: the loss depends on none of the parameters.
            TrainingError: the loss is not finite; the batch is named.

        Cost: a forward and a full backward pass for each batch; with a gradient scaler whose scale has become too
        large, up to one more for each factor of 4 that must come off it.
        """
        place = ""
        for place, batch in _numbered(batches, label):
            yield place, self._gradients(batch, place)
        if not place:
            raise ConfigError(f"{label} holds no batch; importance is measured on at least one")

    def reached(self, batches: Iterable[Any]) -> set[nn.Parameter]:
        """The parameters that the loss of the first batch depends on. Cost: one forward pass."""
        place, batch = next(_numbered(batches, "batches"), ("", None))
        if not place:
            raise ConfigError("without names, one batch is needed to see which tensors the loss reaches; pass one")
        found = {getattr(node, "variable", None) for node in _nodes(self._loss(batch, place))}
        return {parameter for parameter in self.parameters if parameter in found}

    def _loss(self, batch: Any, place: str) -> Tensor:
        loss = self._loss_fn(self._model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {what} for {place}; it must return a scalar tensor, such as a mean")
        if not loss.requires_grad:
            raise self._unreached(place)
        if not self._looked and any(node.name() == "CheckpointFunctionBackward" for node in _nodes(loss)):
            raise ModelError(
                "the model checkpoints its activations in the re-entrant way, which hides the tensors inside and "
                "cannot be trained in part; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        self._looked = True  # once: a walk over the graph costs about as much as launching a forward pass
        value = loss.detach()
        if not value.isfinite():
            raise TrainingError(
                f"the loss of {place} is {value.item()}, so importance cannot be measured; "
                "look at that batch, or lower the learning rate"
            )
        return loss.reshape(())

    def _unreached(self, place: str) -> ModelError:
        return ModelError(
            f"the loss of {place} depends on none of the {len(self.parameters)} candidate tensors; "
            "does loss_fn use the model it is given, without no_grad or detach?"
        )

    def _gradients(self, batch: Any, place: str) -> dict[nn.Parameter, Tensor]:
        while True:
            loss = self._loss(batch, place)
            # Not backward(): that would run the hooks by which some training loops step their optimizer.
            raw = torch.autograd.grad(loss * self._scale, self.parameters, allow_unused=True)
            if all(gradient is None for gradient in raw):
                raise self._unreached(place)
            if self._scale == 1.0:
                return {p: g for p, g in zip(self.parameters, raw) if g is not None}
            # Out of place: autograd may hand one tensor to two parameters.
            gradients = {p: g * (1 / self._scale) for p, g in zip(self.parameters, raw) if g is not None}
            if _all_finite(gradients.values()):
                return gradients
            self._scale = max(self._scale / 4, 1.0)


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Autograd's graph, each node once."""
    stack: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(deeper for deeper, _ in node.next_functions)


def _numbered(batches: Iterable[Any], label: str) -> Iterator[tuple[str, Any]]:
    if isinstance(batches, (Tensor, dict)):
        raise ConfigError(f"{label} is one {type(batches).__name__}, not a list of batches; write [{label}]")
    for index, batch in enumerate(batches):
        yield f"{label}[{index}]", batch


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        by_device.setdefault(tensor.device, []).append(values.isfinite().all())
    return all(bool(torch.stack(flags).all()) for flags in by_device.values())
