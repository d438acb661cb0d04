"""Adapt a network to the few images of one task: a short loop of its own, thousands of which make a benchmark.

`et.fit` profiles, probes and re-plans along epochs of a loader; here one plan stands for a few dozen steps on images
that fit in a hand, so none of that is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastictrainer.errors import TrainingError
from elastictrainer.fewshot.heads import Prototypes, Queries
from elastictrainer.metrics.timing import synchronize
from elastictrainer.plan import Plan
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.divided import Divided

__all__ = ["Adapted", "adapt"]

AT_ONCE = 64  # images of a forward pass that keeps nothing: as many as `Prototypes.of` takes


@dataclass(frozen=True, slots=True)
class Adapted:
    """How an adaptation went: the pseudo-queries' loss at each step, and the seconds of all steps together.

    `remembered_bytes` were kept to go faster: what crosses of the support images, and folded weights. `answers` are
    what the linear head has learnt, if there is one.
    """

    losses: tuple[float, ...]
    steps_s: float
    remembered_bytes: int = 0
    answers: Tensor | None = None


def adapt(
    model: nn.Module,
    head: Prototypes,
    plan: Plan | None,
    optimizer: Optimizer,
    support: Tensor,
    labels: Tensor,
    views: Callable[[int], Tensor],
    *,
    ways: int,
    steps: int,
    batch_size: int,
    bits: bool = True,
    linear: bool = False,
) -> Adapted:
    """Train what the plan names on augmented views of the support images, compared with their own prototypes.

    Each step recomputes the prototypes without gradients, and goes through one view of every support image,
    `batch_size` of them at a time, whose gradients add up to one optimizer step. The model stays in eval mode.

    Args:
        plan: None trains nothing: prototypes of the network as it is.
        views: `views(step)` gives the pseudo-queries of a step, in the support's order.
        bits: as in `et.apply`.
        linear: views are compared with a linear layer that begins as the prototypes and trains, too.

    Raises:
        TrainingError: the loss is not finite.

    Cost: a step is forward and backward of a view of each support image, and a forward pass of these images through
    what trains and all that follows. What comes before runs without autograd, for views at each step and for the
    images once (see `runtime/divided.py`).
    """
    model.eval()
    if plan is None or not plan.trainable:
        return Adapted((), 0.0)
    losses: list[Tensor] = []
    device = support.device
    answers: nn.Parameter | None = None
    if linear:
        answers = nn.Parameter(head.of(model, support, labels, ways))
        optimizer.add_param_group({"params": [answers]})
    with ExitStack() as stack:
        stack.enter_context(apply(model, plan, optimizer=optimizer, bits=bits))
        synchronize(device)
        start = time.perf_counter()
        few = Queries(support[:2], labels[:2], head.of(model, support[:2], labels[:2], ways))
        divided = Divided(model, head, few)
        parts = support.split(AT_ONCE)
        ahead = [divided.ahead(part) for part in parts] if answers is None else []
        group = batch_size * max(1, AT_ONCE // batch_size)
        for step in range(steps):
            prototypes: Tensor | None = answers
            if prototypes is None:
                with torch.no_grad():
                    features = [divided.features(part, crossing) for part, crossing in zip(parts, ahead)]
                    prototypes = head.means(torch.cat(features), labels, ways)
            optimizer.zero_grad(set_to_none=True)
            total = torch.zeros((), device=device)
            for images, numbers in zip(views(step).split(group), labels.split(group)):
                crossing = divided.ahead(images)
                for first in range(0, len(images), batch_size):
                    x, y = images[first : first + batch_size], numbers[first : first + batch_size]
                    with divided.rest(divided.some(crossing, first, len(y), of=len(images))):
                        loss = head.loss(model, Queries(x, y, prototypes)) * (len(y) / len(labels))
                    loss.backward()
                    total += loss.detach()
            optimizer.step()
            losses.append(total)  # read at the end: a look at it would make the host wait for the device
        synchronize(device)
        elapsed = time.perf_counter() - start
        optimizer.zero_grad(set_to_none=True)
    values = tuple(map(float, losses))
    wrong = next((step for step, value in enumerate(values) if not math.isfinite(value)), None)
    if wrong is not None:
        raise TrainingError(f"the loss is {values[wrong]} at step {wrong + 1}; a lower learning rate may help")
    kept = sum(x.numel() * x.element_size() for crossing in ahead for x in crossing)
    return Adapted(values, elapsed, kept + divided.nbytes, None if answers is None else answers.detach())
