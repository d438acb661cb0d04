"""Ending: what will still have to be done when training stops, in seconds; a deadline keeps them back, and is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elastictrainer.runtime.result import Record
from elastictrainer.runtime.settings import length

__all__ = ["Ending"]

FELT = (0.5, 0.7, 0.8, 0.9, 0.95)  # shares of the time at which the machine's pace is felt
WINDOW_S = 0.25  # of steps, by which the machine's pace is told
LONGEST = 3.0  # times as long as the longest batch so far, the next one may take on a busy machine
OVERRUN = 0.05  # of its time, that an evaluation on a quiet one may take on top rather than be cut short
BUSY = 2.0  # times as slow as before: something else runs
FEW = 3  # batches that are evaluated for the sake of their time
FORWARDS = 1.7  # of training, that evaluating a batch takes before any has been: its batches may be larger
SAVING_S = 0.05
SAVINGS = 3  # the last checkpoint, the weights, the report
MARGIN = 1.1


class Ending:
    """Evaluation on what is left to be judged, the last checkpoint, the weights and the report.

        ending.seconds()          # by what evaluating and saving have taken so far
        ending.feel(progress)     # now and then: is the machine slower than it was then?
        ending.stepped(expected_s, took_s)                 # after a step: is it slower all of a sudden?
        ending.holding(loader, batches)    # an evaluation's batches, as far as there is time for them

    A machine on which something else begins to run would end late. So a few batches of each evaluation are held, and
    evaluated again at some shares of the time, and when steps become slow: `seconds` grows as they do. Where they have
    become slow, one thread may be faster than many, each of which waits for one that has lost its core: the faster is
    kept. And should an evaluation take longer still, it ends when its share of the time left is over, on what it has
    seen by then. With `deterministic` the profile alone says what a batch takes, nothing is timed, and every evaluation
    is made in full.

    Args:
        loaders: what will be evaluated, as far as it is known by now.
        run: evaluates a few batches, leaving no trace.
        record: what evaluating and saving have taken so far.
        forward_s: the profile's seconds of a training step's forward pass; 0 before there is one.
        left_s: seconds until the deadline.
        wait: for the device, so that the clock tells what has been done.
        go_alone: compute with one thread, or with all again; None where there is no choice.
    """

    def __init__(
        self,
        loaders: Callable[[], Iterable[Any]],
        run: Callable[[list[Any]], object],
        *,
        record: Callable[[], Record],
        forward_s: Callable[[], float],
        left_s: Callable[[], float],
        clock: Callable[[], float],
        wait: Callable[[], object] = lambda: None,
        go_alone: Callable[[bool], object] | None = None,
        deterministic: bool = False,
    ) -> None:
        self._loaders, self._run, self._record = loaders, run, record
        self._forward_s, self._left_s, self._clock, self._wait = forward_s, left_s, clock, wait
        self._deterministic, self._go_alone = deterministic, go_alone
        self._batch_s: float | None = None
        self._few: list[Any] = []
        self._few_s = 0.0
        self._slower = 1.0
        self._felt = 0.0
        self._alone = self._felt_slow = False
        self._expected_s = self._took_s = 0.0
        self._usual_pace: float | None = None
        self._best_s: float | None = None  # that a batch of an evaluation has ever taken

    def seconds(self) -> float:
        """What the end will take if it began now."""
        record = self._record()
        batch_s = FORWARDS * self._forward_s()
        if not self._deterministic:
            if self._batch_s is not None:
                batch_s = self._batch_s
            elif record.evaluated_batches:  # before the run was resumed
                batch_s = record.eval_s / record.evaluated_batches
        batches = sum(length(loader) or 0 for loader in self._loaders())
        return self._slower * MARGIN * batch_s * batches + self._saving_s

    @property
    def _saving_s(self) -> float:
        record = self._record()
        timed = record.checkpoints and not self._deterministic
        return self._slower * SAVINGS * (record.checkpoint_s / record.checkpoints if timed else SAVING_S)

    def holding(self, loader: Iterable[Any], batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of an evaluation, the first of them held: all, or as many as there is time for, but at least one.

        The time is the loader's share, by batches, of what is left for it and the loaders that come after it.
        """
        self._few = []
        start, longest_s, count = self._clock(), 0.0, 0
        allowed_s = self._allowed_s(loader)
        before = start
        for batch in batches:
            if not self._deterministic and len(self._few) < FEW:
                self._few.append(batch)
            yield batch
            if self._deterministic:
                continue
            self._wait()
            now = self._clock()
            longest_s, before, count = max(longest_s, now - before), now, count + 1
            usual_s = (now - start) / count  # a single slow batch, the first as a rule, is no busy machine
            slow = self._best_s is not None and usual_s > BUSY * self._best_s
            reserved_s, overrun_s = (LONGEST * longest_s, 0.0) if slow else (usual_s, OVERRUN * allowed_s)
            if now + reserved_s > start + allowed_s + overrun_s:
                return

    def _allowed_s(self, loader: Iterable[Any]) -> float:
        loaders = list(self._loaders())
        place = next((i for i, other in enumerate(loaders) if other is loader), 0)
        batches = [length(other) or 0 for other in loaders[place:]]
        return (self._left_s() - self._saving_s) * (batches[0] / sum(batches) if any(batches) else 1.0)

    def evaluated(self, seconds: float, batches: int) -> None:
        """An evaluation is over and took so long: by it the next ones are judged, as the machine was just now."""
        self._batch_s, self._slower = seconds / batches, 1.0
        if not self._few:
            return
        if self._go_alone is not None and self._best_s is not None and self._batch_s > BUSY * self._best_s:
            took_s = self._time(self._few[:1])
            fastest_s = self._fastest(took_s)
            self._batch_s *= fastest_s / took_s if took_s > 0 else 1.0
            self._few_s = fastest_s * len(self._few)
        else:
            self._few_s = self._time(self._few)
        self._best_s = min(self._few_s / len(self._few), self._best_s or math.inf)

    def feel(self, progress: float) -> None:
        """Between two steps, at this share of the time."""
        passed = max((share for share in FELT if share <= progress), default=0.0)
        if passed <= self._felt:
            return
        self._felt = passed
        self._feel()

    def _feel(self) -> None:
        if self._few and self._few_s > 0:
            usual_s = self._few_s / len(self._few)
            took_s = self._time(self._few[:1])  # where it is slow, all of them might take seconds
            if self._go_alone is not None and (self._alone or took_s > BUSY * usual_s):
                took_s = self._fastest(took_s)
            elif took_s <= BUSY * usual_s:
                took_s = (took_s + self._time(self._few[1:])) / len(self._few)
            self._slower = max(1.0, took_s / usual_s)

    def stepped(self, expected_s: float, took_s: float) -> None:
        """A step is over that was expected to take so long. Some of them much slower than ever: feel at once."""
        if self._deterministic:
            return
        self._expected_s, self._took_s = self._expected_s + expected_s, self._took_s + took_s
        if self._took_s < WINDOW_S or self._expected_s <= 0:
            return
        pace = self._took_s / self._expected_s
        self._expected_s = self._took_s = 0.0
        if self._usual_pace is None or pace < self._usual_pace:
            self._usual_pace = pace
        if pace > BUSY * self._usual_pace and not self._felt_slow:
            self._feel()
        self._felt_slow = pace > BUSY * self._usual_pace  # once, until it is over

    @property
    def slower(self) -> float:
        """How many times as long as usual the machine takes for the same, as far as it has been felt."""
        return self._slower

    def _fastest(self, took_s: float) -> float:
        """Try the other number of threads, and stay with the one that is faster."""
        assert self._go_alone is not None
        self._go_alone(not self._alone)
        others_s = self._time(self._few[:1])
        if others_s < took_s:
            self._alone = not self._alone
            return others_s
        self._go_alone(self._alone)
        return took_s

    def _time(self, batches: list[Any]) -> float:
        start = self._clock()
        self._run(batches)
        return self._clock() - start
