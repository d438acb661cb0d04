"""Steps of given plans, recorded once each and replayed: what a step costs where its launches are free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from elastictrainer.metrics import synchronize
from elastictrainer.profiling.steps import Stepper, Timed
from elastictrainer.runtime.capture import Recorder, Uncapturable, as_captured, steps_in_a_graph

__all__ = ["Replays"]


class Replays:
    """A stepper whose steps are replays, so that a price list can be calibrated on them.

    Raises `Uncapturable` from `timed`, before anything was replayed. Costs a step as ever and a recording a plan, and
    while it lives the memory of the largest step.
    """

    def __init__(self, stepper: Stepper, train: Callable[[Sequence[int]], None], recorder: Recorder) -> None:
        self._stepper, self._train, self._recorder = stepper, train, recorder
        self._plan: tuple[int, ...] = ()
        self._steps: dict[tuple[int, ...], Callable[[], None]] = {}
        self._device = stepper.parameters[0].device
        optimizer = stepper.optimizer
        self._whole = optimizer is not None and steps_in_a_graph(optimizer)
        # Recordings read them where they are, as long as this lives.
        self._rates = [
            torch.as_tensor(group["lr"], dtype=torch.float32, device=self._device)
            for group in (optimizer.param_groups if optimizer is not None else ())
        ]

    def train(self, plan: Sequence[int]) -> None:
        self._plan = tuple(plan)

    def timed(self, steps: int = 1) -> Timed:
        """The plan that was named last, so many replays back to back."""
        step = self._steps.get(self._plan) or self._record()
        step()
        synchronize(self._device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        host_s = (time.perf_counter() - start) / steps
        synchronize(self._device)
        return Timed((time.perf_counter() - start) / steps, host_s, 0.0)

    def _record(self) -> Callable[[], None]:
        stepper, optimizer = self._stepper, self._stepper.optimizer
        self._train(self._plan)
        with self._recorder.listening() as heard:
            stepper.gradients()  # a warm-up, listened to: what waits for the device would spoil the recording
        stepper.move()
        if heard:
            raise Uncapturable(heard[0])
        if optimizer is not None and self._whole:

            def whole() -> None:
                stepper.gradients()
                with as_captured(optimizer, self._rates):
                    stepper.move()

            try:
                step = self._recorder.record(whole)
            finally:
                stepper.take_gradients()
        else:
            replay = self._recorder.record(stepper.gradients)
            gradients = stepper.take_gradients()

            def step() -> None:
                replay()
                stepper.put_gradients(gradients)
                stepper.move()

        self._steps[self._plan] = step
        return step
