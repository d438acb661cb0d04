"""Steps of given plans, recorded once each and replayed: what a step costs where its launches are free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import numpy as np

from elastictrainer.metrics import synchronize
from elastictrainer.profiling.calibrate import Measured, run_plans
from elastictrainer.profiling.profile import Lane
from elastictrainer.profiling.steps import Stepper, Timed
from elastictrainer.runtime.capture import Recorder, Uncapturable, brief_collections
from elastictrainer.runtime.engine import Recording, kind_of
from elastictrainer.runtime.recorded_step import as_recorded, bring_counts, rates_of, set_rates, steps_in_a_recording

__all__ = ["Replayed", "Replays", "launching", "replay_plans"]

REPEATS, ROUNDS = 8, 2  # replays at once, at most: each is short and much like the last, and recording it was dear
_TIMED_S = 0.02  # long enough for the clock and for the launch of the first


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was measured of steps that are recorded once and replayed."""

    measured: list[Measured]
    forward_s: float
    optimizer_s: list[float]
    host_s: float


def replay_plans(
    stepper: Stepper,
    plans: Sequence[tuple[int, ...]],
    train: Callable[[Sequence[int]], None],
    subsets: Sequence[tuple[int, ...]],
    recorder: Recorder,
    *,
    rounds: int,
) -> Replayed | None:
    """Time the plans as replays, and the optimizer's step on some subsets; None where they cannot be recorded."""
    replays = Replays(stepper, train, recorder)
    try:
        # A replay of its own begins each measurement: no round has to be dropped.
        with brief_collections():
            replays.train(plans[0])
            steps = min(max(round(_TIMED_S / max(replays.timed().step_s, 1e-9)), 2), REPEATS)
            measured, _ = run_plans(
                replays, plans, replays.train, rounds=min(rounds, ROUNDS), steps=steps, warmup=0
            )  # fmt: skip
            train(plans[1])  # the head: what a pass takes at least, since a price list is a sum of what comes on top
            forward_s = replays.forward_s()
            train(plans[0])
            return Replayed(measured, forward_s, [replays.optimizer_s(subset) for subset in subsets], replays.host_s())
    except Uncapturable:
        if stepper.optimizer is not None:
            bring_counts(stepper.optimizer, home=True)
        return None


def launching(lane: Lane, host_s: float) -> Lane:
    """The host's lane beside that of the replays: the same for every plan."""
    nothing = {name: np.zeros_like(getattr(lane, name)) for name in ("forward_s", "fused_s", "pass_s", "dw_s", "opt_s")}
    return Lane("launch", 0.0, host_s, **nothing)


class Replays:
    """A stepper whose steps are replays, so that a price list can be calibrated on them.

    Raises `Uncapturable` from whatever records, before anything was replayed. Costs a step as ever and a recording a
    plan, and while it lives the memory of the largest step.
    """

    def __init__(self, stepper: Stepper, train: Callable[[Sequence[int]], None], recorder: Recorder) -> None:
        self._stepper, self._train, self._recorder = stepper, train, recorder
        self._device = stepper.parameters[0].device
        self._plan: tuple[int, ...] = ()
        self._steps: dict[tuple[int, ...], Callable[[], None]] = {}
        # A gradient scaler, which half precision in float16 comes with, decides on the host whether to step.
        scaled = getattr(stepper.loss_fn, "autocast", None) == "fp16"
        self._optimizer = stepper.optimizer
        self._whole = self._optimizer is not None and not scaled and steps_in_a_recording(self._optimizer)
        self._rates = rates_of(self._optimizer) if self._optimizer is not None else []

    def train(self, plan: Sequence[int]) -> None:
        self._plan = tuple(plan)

    def timed(self, steps: int = 1) -> Timed:
        """The plan that was named last, so many replays back to back."""
        step = self._steps.get(self._plan)
        if step is None:
            self._train(self._plan)
            step = self._steps[self._plan] = self._record()
        step()
        synchronize(self._device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        host_s = (time.perf_counter() - start) / steps
        synchronize(self._device)
        return Timed((time.perf_counter() - start) / steps, host_s, 0.0)

    def forward_s(self) -> float:
        """The forward pass under the plan that stands, replayed."""
        return self._timed(self._recorder.record(lambda: self._stepper.forward()))

    def optimizer_s(self, names: Sequence[int]) -> float:
        """The optimizer's step on these parameters (by position), replayed; as ever where it is not recorded."""
        optimizer = self._optimizer
        if optimizer is None or not self._whole:
            return self._stepper.optimizer_s(names)

        def step() -> None:
            with as_recorded(optimizer, self._rates):
                optimizer.step()

        with self._stepper.pretending(names):
            return self._timed(self._recorder.record(step))

    def host_s(self) -> float:
        """What the host does for a replayed step: the next batch and rates put into place, the launch."""
        assert self._optimizer is not None or not self._rates
        batch = self._stepper.batch
        replay = next(iter(self._steps.values()))
        recording = Recording(batch, self._optimizer) if self._optimizer is not None else None
        seconds = []
        for _ in range(REPEATS):
            synchronize(self._device)
            start = time.perf_counter()
            kind_of(batch)
            if recording is not None and self._optimizer is not None:
                recording.take(batch)
                set_rates(recording.rates, self._optimizer)
            replay()
            seconds.append(time.perf_counter() - start)
        synchronize(self._device)
        return median(seconds)

    def _timed(self, replay: Callable[[], None]) -> float:
        replay()
        synchronize(self._device)
        start = time.perf_counter()
        for _ in range(REPEATS):
            replay()
        synchronize(self._device)
        return (time.perf_counter() - start) / REPEATS

    def _move(self) -> None:
        assert self._optimizer is not None
        with as_recorded(self._optimizer, self._rates):
            self._stepper.move()

    def _record(self) -> Callable[[], None]:
        stepper = self._stepper
        if self._whole and self._optimizer is not None:
            bring_counts(self._optimizer)
        # A warm-up; what waits for the device would break the recording. Everything is trained first, and what is
        # heard then is all there is to hear: listening passes every operation through Python.
        listening = self._recorder.listening() if not self._steps else nullcontext[list[str]]([])
        with listening as heard:
            stepper.gradients()
            if self._whole:
                try:
                    self._move()
                except (RuntimeError, TypeError) as error:  # tensors that the fused kernel does not take
                    raise Uncapturable(str(error)) from error
        if not self._whole:
            stepper.move()
        if heard:
            raise Uncapturable(heard[0])
        if self._whole:

            def whole() -> None:
                stepper.gradients()
                self._move()

            try:
                return self._recorder.record(whole)
            finally:
                stepper.take_gradients()
        try:
            replay = self._recorder.record(stepper.gradients)
        finally:
            gradients = stepper.take_gradients()

        def step() -> None:
            replay()
            stepper.put_gradients(gradients)
            stepper.move()

        return step
