"""How much training each tensor now would lower the loss: the published measure, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from elastictrainer.importance.candidates import candidates
from elastictrainer.importance.probe import LossFn, Probe, probing
from elastictrainer.importance.tally import Tally, falls, values
from elastictrainer.importance.trial import trial_steps
from elastictrainer.runtime.optimizer_copy import look_through

__all__ = ["elastic", "fisher", "gradient"]


def elastic(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    names: Iterable[str] | None = None,
    gradient_batches: Iterable[Any] | None = None,
    scaler: GradScaler | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Gradient times the update that the optimizer would make now: positive where it lowers the loss.

    `I_k = -sum_i (dL/dw_i) * dw_i`, the mean over `batches`, each starting from the optimizer as it is. `dw` is what
    its own code does to copies (momentum, moments, decay and learning rates included), the gradient is taken at the
    present weights. Leaves no trace (see `untouched`); resting tensors are scored like any other.

    Example:
        >>> from elastictrainer.importance import elastic
        >>> model = nn.Linear(1, 1, bias=False)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> elastic(model, sgd, lambda model, x: 2 * model(x).sum(), [torch.ones(1, 1)])  # lr * gradient ** 2
        {'weight': 2.0}

    Args:
        batches: what `loss_fn(model, batch)` takes; several, drawn anew for each probe. Autocast belongs in `loss_fn`.
        names: the tensors to score; left out, every one in the optimizer that the loss reaches. A named tensor that no
            batch reaches scores 0.
        gradient_batches: where the gradient comes from, if not from the batch that made `dw`: other training batches,
            or held-out ones, so that the scores speak of generalisation. Their mean gradient is used.
        scaler: scales the loss as in training, so that half-precision gradients do not vanish; its state is only read.
        seed: not used.

    Raises:
        TrainingError: a loss or a score is not finite; the batch and the tensor are named.
        ConfigError: nothing to score or to score with, or an optimizer whose update cannot be tried (LBFGS).

    Cost: for each batch a full training step (forward, backward, optimizer), for each of `gradient_batches` a forward
    and backward pass. Memory as in a full training step, plus the copies of `trial_steps`, plus one gradient of
    everything with `gradient_batches`. Where that does not fit, call it inside `torch.autograd.graph.save_on_cpu()`.

    Paper: ElasticTrainer (MobiSys'23), sections 3.1 and 4, Eq. 5 with c = 0; held-out gradients: its section 10.
    """
    tensors = candidates(model, optimizer, names)
    tally = Tally(tensors, keep_unreached=names is not None)
    with probing(model, loss_fn, tensors.values(), scaler=scaler) as probe:
        elsewhere = None if gradient_batches is None else _mean_gradient(probe, gradient_batches)
        for place, gradients in probe.gradients(batches):
            against = gradients if elsewhere is None else elsewhere
            scores: dict[nn.Parameter, Tensor] = {}
            for stepped in trial_steps(look_through(optimizer), gradients):
                scores |= falls(against, stepped)
            tally.add(place, scores)
    return tally.mean()


def gradient(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    names: Iterable[str] | None = None,
    gradient_batches: Iterable[Any] | None = None,
    scaler: GradScaler | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Gradient magnitude: `sum_i |dL/dw_i|`, the mean over the batches.

    A sum and not a norm, so that cutting a tensor in two changes nothing: the selection adds scores up. Arguments and
    errors as in `elastic`; `gradient_batches`, where given, take the place of `batches`. Leaves no trace.

    Cost: a forward and a full backward pass for each batch.
    """
    chosen = batches if gradient_batches is None else gradient_batches
    return _of_gradient(torch.abs, model, optimizer, loss_fn, chosen, names=names, scaler=scaler)


def fisher(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    names: Iterable[str] | None = None,
    gradient_batches: Iterable[Any] | None = None,
    scaler: GradScaler | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Empirical Fisher information: `sum_i (dL/dw_i)^2`, the mean over the batches.

    The square is of a batch's mean gradient; for the square of each sample's, pass batches of one. Arguments and errors
    as in `elastic`; `gradient_batches`, where given, take the place of `batches`. Leaves no trace.

    Cost: a forward and a full backward pass for each batch.
    """
    chosen = batches if gradient_batches is None else gradient_batches
    return _of_gradient(torch.square, model, optimizer, loss_fn, chosen, names=names, scaler=scaler)


def _of_gradient(
    measure: Callable[[Tensor], Tensor],
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    names: Iterable[str] | None,
    scaler: GradScaler | None,
) -> dict[str, float]:
    tensors = candidates(model, optimizer, names)
    tally = Tally(tensors, keep_unreached=names is not None)
    with probing(model, loss_fn, tensors.values(), scaler=scaler) as probe:
        for place, gradients in probe.gradients(batches):
            tally.add(place, {p: measure(values(g)).sum() for p, g in gradients.items()})
    return tally.mean()


def _mean_gradient(probe: Probe, batches: Iterable[Any]) -> dict[nn.Parameter, Tensor]:
    total: dict[nn.Parameter, Tensor] = {}
    count = 0
    for _, gradients in probe.gradients(batches, label="gradient_batches"):
        for parameter, gradient in gradients.items():
            precise = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            total[parameter] = total[parameter] + precise if parameter in total else precise
        count += 1
    return {parameter: gradient / count for parameter, gradient in total.items()}
