"""Ending: what will still have to be done when training stops, in seconds; a deadline keeps them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elastictrainer.runtime.result import Record
from elastictrainer.runtime.settings import length

__all__ = ["Ending"]

FELT = (0.5, 0.7, 0.8, 0.9, 0.95)  # shares of the time at which the machine's pace is felt
FEW = 3  # batches that are evaluated for the sake of their time
FORWARDS = 1.7  # of training, that evaluating a batch takes before any has been: its batches may be larger
SAVING_S = 0.05
SAVINGS = 3  # the last checkpoint, the weights, the report
MARGIN = 1.05


class Ending:
    """Evaluation on what is left to be judged, the last checkpoint, the weights and the report.

        ending.seconds()          # by what evaluating and saving have taken so far
        ending.feel(progress)     # now and then: is the machine slower than it was then?

    A machine on which something else begins to run would end late. So a few batches of each evaluation are held, and
    evaluated again at some shares of the time: `seconds` grows as they do. With `deterministic` the profile alone says
    what a batch takes, and nothing is timed.

    Args:
        loaders: what will be evaluated, as far as it is known by now.
        run: evaluates a few batches, leaving no trace.
        record: what evaluating and saving have taken so far.
        forward_s: the profile's seconds of a training step's forward pass; 0 before there is one.
    """

    def __init__(
        self,
        loaders: Callable[[], Iterable[Any]],
        run: Callable[[list[Any]], object],
        *,
        record: Callable[[], Record],
        forward_s: Callable[[], float],
        clock: Callable[[], float],
        deterministic: bool = False,
    ) -> None:
        self._loaders, self._run, self._record = loaders, run, record
        self._forward_s, self._clock, self._deterministic = forward_s, clock, deterministic
        self._batch_s: float | None = None
        self._few: list[Any] = []
        self._few_s = 0.0
        self._slower = 1.0
        self._felt = 0.0

    def seconds(self) -> float:
        """What the end will take if it began now."""
        record = self._record()
        batch_s, saving_s = FORWARDS * self._forward_s(), SAVING_S
        if not self._deterministic:
            if self._batch_s is not None:
                batch_s = self._batch_s
            elif record.evaluated_batches:  # before the run was resumed
                batch_s = record.eval_s / record.evaluated_batches
            if record.checkpoints:
                saving_s = record.checkpoint_s / record.checkpoints
        batches = sum(length(loader) or 0 for loader in self._loaders())
        return self._slower * (MARGIN * batch_s * batches + SAVINGS * saving_s)

    def holding(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an evaluation, the first of them held."""
        self._few = []
        for batch in batches:
            if not self._deterministic and len(self._few) < FEW:
                self._few.append(batch)
            yield batch

    def evaluated(self, seconds: float, batches: int) -> None:
        """An evaluation is over and took so long: by it the next ones are judged, as the machine was just now."""
        self._batch_s = seconds / batches
        if self._few:
            self._few_s, self._slower = self._time_few(), 1.0

    def feel(self, progress: float) -> None:
        """Between two steps, at this share of the time."""
        passed = max((share for share in FELT if share <= progress), default=0.0)
        if passed <= self._felt:
            return
        self._felt = passed
        if self._few and self._few_s > 0:
            self._slower = max(1.0, self._time_few() / self._few_s)

    def _time_few(self) -> float:
        start = self._clock()
        self._run(self._few)
        return self._clock() - start
