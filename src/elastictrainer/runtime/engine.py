"""How a step is made: launch by launch, or recorded once under each plan and replayed (CUDA graphs).

Both make the same step: forward, backward, unscaled and clipped gradients, the optimizer. Replayed, it has the same
results within rounding (SGD steps in its fused kernel), random numbers go on as they would have, and the host's work is
a handful of launches. What cannot be recorded is made as ever, and `obstacle` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from elastictrainer.runtime.capture import Recorder, Uncapturable
from elastictrainer.runtime.optimizer_copy import look_through
from elastictrainer.runtime.recorded_step import as_recorded, bring_counts, rates_of, set_rates, steps_in_a_recording

__all__ = ["Eager", "Recording", "Replayed", "kind_of"]

WARM = 3  # steps of a kind that are made as ever first: states are there then, kernels loaded, workspaces taken
MANY = 32  # kinds of batch, and not one of them seen often enough to be recorded
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
        recording: opened around each recording, whose time is no step's.
        gives_up: told the reason, once, if nothing can be recorded any more.

    Costs, for each recording, some tens of milliseconds and the memory of one step, held until the plan changes.
    """

    def __init__(
        self,
        *args: Any,
        recorder: Recorder,
        standing: Callable[[], Hashable],
        allowed: Callable[[], bool] = lambda: True,
        recording: Callable[[], AbstractContextManager[Any]] = nullcontext,
        gives_up: Callable[[str], None] = lambda reason: None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.recorder, self._standing, self._allowed = recorder, standing, allowed
        self._recording, self._gives_up = recording, gives_up
        self.obstacle: str | None = None
        self.recorded = self.replayed = 0
        self._recordings: dict[Hashable, Recording] = {}
        self._seen: Counter[Hashable] = Counter()
        self._stood: Hashable = None
        self._moved = self._last_warm = False
        self._apart = self.scaler.is_enabled()  # whether the optimizer steps outside: a scaler decides on the host
        self._held: list[Tensor] = []
        self._lay: list[int] = []

    def backward(self, batch: Any, *, share: int = 1) -> Tensor:
        inputs = self.inputs(batch)
        self._moved = self._last_warm = False
        recording = self._recording_for(inputs, share)
        if recording is None:
            return self._heard(inputs, share) if self._last_warm else self._backward(inputs, share)
        recording.take(inputs)
        set_rates(recording.rates, self._own)
        recording.replay()
        self.replayed += 1
        self._moved = recording.gradients is None
        for parameter, gradient in recording.gradients or ():
            parameter.grad = gradient
        return recording.loss

    def move(self) -> bool:
        if self._moved:
            return True
        if not self._last_warm or self._apart or self.obstacle is not None:
            return self._move()
        # The kernels that will be recorded run once before that, and are listened to.
        bring_counts(self._own)
        rates = rates_of(self._own)  # before listening: they come from the host
        with self.recorder.listening() as heard, as_recorded(self._own, rates):
            moved = self._move()
        if heard:
            self._step_apart()
        return moved

    def account(self) -> dict[str, Any]:
        obstacle = self.obstacle
        if obstacle is None and not self._allowed():
            obstacle = "the profile is of steps that are not recorded"
        return {"recorded": self.recorded, "replayed": self.replayed, "obstacle": obstacle}

    @property
    def _own(self) -> Optimizer:
        return look_through(self.optimizer)

    # -- which recording, if any ---------------------------------------------------------------------------------------

    def _recording_for(self, inputs: Any, share: int) -> Recording | None:
        if self.obstacle is not None or share != 1 or not self._allowed():
            return None
        if self._standing() != self._stood or not self._as_recorded():
            self._forget()
        kind = kind_of(inputs)
        if kind is None:
            self._give_up("a batch holds something that cannot be told from another")
            return None
        found = self._recordings.get(kind)
        if found is None:
            self._seen[kind] += 1
            self._last_warm = self._seen[kind] == WARM
            if self._seen[kind] > WARM and len(self._recordings) < KINDS:
                found = self._record(kind, inputs)
            elif len(self._seen) > MANY and not self._recordings:
                self._give_up("hardly two batches are alike: shapes, numbers or words in them differ")
        return found

    def _heard(self, inputs: Any, share: int) -> Tensor:
        """The last step as ever, listened to: a recording that breaks is hard to undo."""
        with self.recorder.listening() as heard:
            loss = self._backward(inputs, share)
        if heard:
            self._give_up(heard[0])
        elif not self._apart and not steps_in_a_recording(self._own):
            self._step_apart()
        return loss

    def _record(self, kind: Hashable, inputs: Any) -> Recording | None:
        recording = Recording(inputs, self._own)

        def work() -> None:
            recording.loss.copy_(self._backward(recording.inputs, 1).reshape(()))
            if not self._apart:
                with as_recorded(self._own, recording.rates):
                    self._move()

        if not self._apart:
            bring_counts(self._own)  # of tensors that woke since the last warm step, too
        try:
            with self._recording():
                recording.replay = self.recorder.record(work)
        except Uncapturable as error:
            self._give_up(str(error))
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
        if not self._apart and next(iter(self._recordings.values())).options != _options(self._own):
            self._step_apart()
            return False
        return self._lay == [tensor.data_ptr() for tensor in self._held]

    def _step_apart(self) -> None:
        self._apart = True
        self._recordings.clear()  # whole steps hold counts that now go home
        bring_counts(self._own, home=True)

    def _give_up(self, reason: str) -> None:
        self.obstacle = reason
        self._forget()
        bring_counts(self._own, home=True)
        self._gives_up(reason)

    def _forget(self) -> None:
        self._recordings.clear()
        self._seen.clear()
        self._held, self._lay = [], []
        self._stood = self._standing()


class Recording:
    """One step as recorded, and the tensors through which the next batch, rates and the loss go in and out."""

    def __init__(self, inputs: Any, optimizer: Optimizer) -> None:
        leaves, spec = tree_flatten(inputs)
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensors = [leaf for leaf in own if isinstance(leaf, Tensor)]
        self.inputs = tree_unflatten(own, spec)
        self.rates = rates_of(optimizer)
        self.loss = torch.zeros((), device=next(p.device for group in optimizer.param_groups for p in group["params"]))
        self.options = _options(optimizer)
        self.gradients: list[tuple[nn.Parameter, Tensor]] | None = None
        self.replay: Callable[[], None] = lambda: None

    def take(self, inputs: Any) -> None:
        """Put another batch of the same kind where the recording reads it."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)])


def kind_of(inputs: Any) -> Hashable | None:
    """What makes two batches alike to a recording: structure, shapes and types, and whatever is not a tensor."""
    leaves, spec = tree_flatten(inputs)
    what = tuple((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    for kind in ((spec, what), (repr(spec), what)):  # older torch cannot hash a structure
        with suppress(TypeError):
            hash(kind)
            return kind
    return None


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What a recorded step holds fast: everything but the rates, which it reads, and what is only kept beside them."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
        for group in optimizer.param_groups
    ]
