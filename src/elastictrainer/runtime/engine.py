"""How a step is made: launch by launch, or recorded once under each plan and replayed (CUDA graphs).

Both make the same step: forward, backward, unscaled and clipped gradients, the optimizer. Replayed, it has the same
results within rounding (SGD steps in its fused kernel), random numbers go on as they would have, and the host's work is
a handful of launches. What cannot be recorded is made as ever, and `obstacle` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from elastictrainer.runtime.capture import Recorder, Uncapturable, as_captured, steps_in_a_graph
from elastictrainer.runtime.optimizer_copy import look_through

__all__ = ["Eager", "Replayed"]

WARM = 3  # steps of a kind that are made as ever first: states are there then, kernels loaded, workspaces taken
KINDS = 4  # of batch (an epoch's last may be short) are recorded under one plan


class Eager:
    """One launch after the other, on any device.

    `loss_fn(model, inputs)` is the loss of what `inputs(batch)` gives: the batch, and what was kept of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        *,
        inputs: Callable[[Any], Any],
        scaler: Any,
        clip: float | None,
    ) -> None:
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.inputs, self.scaler, self.clip = inputs, scaler, clip
        self.parameters = list(model.parameters())

    def backward(self, batch: Any, *, share: int = 1) -> Tensor:
        """Forward and backward of one batch, one of `share` that make a step; its loss, without a graph behind it."""
        return self._backward(self.inputs(batch), share)

    def move(self) -> bool:
        """The optimizer's step on the gradients; False where the gradient scaler found them unfit."""
        return self._move()

    def account(self) -> dict[str, Any] | None:
        """What was recorded and replayed, in plain types."""
        return None

    def _backward(self, inputs: Any, share: int) -> Tensor:
        loss = self.loss_fn(self.model, inputs)
        self.scaler.scale(loss / share).backward()
        return loss.detach()

    def _move(self) -> bool:
        self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            nn.utils.clip_grad_norm_([p for p in self.parameters if p.grad is not None], self.clip)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return bool(self.scaler.get_scale() >= scale)


class Replayed(Eager):
    """Records a step for each kind of batch under the plan that stands, after a few that were made as ever.

    Recorded is the whole step where the optimizer's can be (SGD, Adam and AdamW, ours and torch's), and otherwise
    forward and backward. The learning rate is read from the device, so schedules go on; what else a schedule changes
    (momentum) makes the optimizer step apart.

    Args:
        standing: tells one plan, as it stands on the model, from the next; a recording is of one of them.
        allowed: asked at each step; while False, steps are made as ever.

    Costs, for each recording, a few tens of milliseconds and the memory of one step, held until the plan changes.
    """

    def __init__(
        self,
        *args: Any,
        recorder: Recorder,
        standing: Callable[[], Hashable],
        allowed: Callable[[], bool],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.recorder, self._standing, self._allowed = recorder, standing, allowed
        self.obstacle: str | None = None
        self.recorded = self.replayed = 0
        self._recordings: dict[Hashable, _Recording] = {}
        self._seen: Counter[Hashable] = Counter()
        self._stood: Hashable = None
        self._moved = False
        self._apart = self.scaler.is_enabled()  # whether the optimizer steps outside: a scaler decides on the host
        self._held: list[Tensor] = []
        self._lay: list[int] = []

    def backward(self, batch: Any, *, share: int = 1) -> Tensor:
        inputs = self.inputs(batch)
        self._moved = False
        recording = self._recording_for(inputs, share)
        if recording is None:
            return self._heard(inputs, share)
        recording.take(inputs)
        recording.set_rates(self.optimizer)
        recording.replay()
        self.replayed += 1
        if recording.gradients is None:
            self._moved = True
        else:
            for parameter, gradient in recording.gradients:
                parameter.grad = gradient
        return recording.loss

    def move(self) -> bool:
        return True if self._moved else self._move()

    def account(self) -> dict[str, Any]:
        obstacle = self.obstacle
        if obstacle is None and not self._allowed():
            obstacle = "the profile is of steps that are not recorded"
        return {"recorded": self.recorded, "replayed": self.replayed, "obstacle": obstacle}

    # -- which recording, if any ---------------------------------------------------------------------------------------

    def _recording_for(self, inputs: Any, share: int) -> _Recording | None:
        if self.obstacle is not None or share != 1 or not self._allowed():
            return None
        if self._standing() != self._stood or not self._as_recorded():
            self._forget()
        kind = _kind_of(inputs)
        if kind is None:
            self.obstacle = "a batch holds something that cannot be told from another"
            return None
        found = self._recordings.get(kind)
        if found is None:
            self._seen[kind] += 1
            if self._seen[kind] > WARM and len(self._recordings) < KINDS:
                found = self._record(kind, inputs)
        return found

    def _heard(self, inputs: Any, share: int) -> Tensor:
        """A step as ever; the last one before recording is listened to, since a capture that fails is hard to undo."""
        kind = _kind_of(inputs)
        if self.obstacle is not None or kind is None or self._seen[kind] != WARM:
            return self._backward(inputs, share)
        with self.recorder.listening() as heard:
            loss = self._backward(inputs, share)
        if heard:
            self.obstacle = heard[0]
        return loss

    def _record(self, kind: Hashable, inputs: Any) -> _Recording | None:
        self._apart = self._apart or not steps_in_a_graph(look_through(self.optimizer))
        recording = _Recording(inputs, self.optimizer)

        def work() -> None:
            recording.loss.copy_(self._backward(recording.inputs, 1).reshape(()))
            if not self._apart:
                with as_captured(look_through(self.optimizer), recording.rates):
                    self._move()

        try:
            recording.replay = self.recorder.record(work)
        except Uncapturable as error:
            self.obstacle = str(error)
            self._forget()
            return None
        finally:
            if self._apart:
                recording.gradients = [(p, p.grad) for p in self.parameters if p.grad is not None]
            for parameter in self.parameters:
                parameter.grad = None
        if not self._recordings:
            self._held = [*self.parameters, *self.model.buffers()]
            self._lay = [tensor.data_ptr() for tensor in self._held]
        self.recorded += 1
        self._recordings[kind] = recording
        return recording

    def _as_recorded(self) -> bool:
        """Whether the tensors lie where they lay, and the optimizer's options but its rates are what they were."""
        if not self._recordings:
            return True
        first = next(iter(self._recordings.values()))
        if not self._apart and first.options != _options(self.optimizer):
            self._apart = True
            return False
        return self._lay == [tensor.data_ptr() for tensor in self._held]

    def _forget(self) -> None:
        self._recordings.clear()
        self._seen.clear()
        self._held, self._lay = [], []
        self._stood = self._standing()


class _Recording:
    """One step as recorded, and the tensors through which the next batch, rate and loss go in and out."""

    def __init__(self, inputs: Any, optimizer: Optimizer) -> None:
        leaves, self._spec = tree_flatten(inputs)
        self._own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensors = [leaf for leaf in self._own if isinstance(leaf, Tensor)]
        self.inputs = tree_unflatten(self._own, self._spec)
        groups = optimizer.param_groups
        device = groups[0]["params"][0].device
        self.rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in groups]
        self._set: list[Any] = [None] * len(groups)
        self.loss = torch.zeros((), device=device)
        self.options = _options(optimizer)
        self.gradients: list[tuple[nn.Parameter, Tensor]] | None = None
        self.replay: Callable[[], None] = lambda: None

    def take(self, inputs: Any) -> None:
        fresh = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
        torch._foreach_copy_(self._tensors, fresh)

    def set_rates(self, optimizer: Optimizer) -> None:
        for index, (rate, group) in enumerate(zip(self.rates, optimizer.param_groups)):
            if isinstance(group["lr"], Tensor):
                rate.copy_(group["lr"])
            elif group["lr"] != self._set[index]:
                rate.fill_(group["lr"])
                self._set[index] = group["lr"]


def _kind_of(inputs: Any) -> Hashable | None:
    """What makes two batches alike to a recording: structure, shapes and types, and whatever is not a tensor."""
    leaves, spec = tree_flatten(inputs)
    kind = (spec, tuple((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What a recorded step holds fast: everything but the rates, which it reads, and what is only kept beside them."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]
