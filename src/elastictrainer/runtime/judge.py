"""Judge: the evaluations of a run: whether one is worth its time now, and what they have taken so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.data.hashing import permutation
from elastictrainer.data.loader import Loader
from elastictrainer.runtime.ending import Ending
from elastictrainer.runtime.evaluate import Score, evaluate, is_classified, top1
from elastictrainer.runtime.feed import Feed
from elastictrainer.runtime.result import Record
from elastictrainer.runtime.settings import Settings, length
from elastictrainer.runtime.surroundings import with_autocast

__all__ = ["Judge"]

EVALUATE_EVERY = 20  # times what an evaluation takes lie between two of them, where the run is counted in time


class Judge:
    """Evaluates the model of one run, and writes into its record what that takes.

    `ending`, set where there is a deadline, learns from every evaluation how long the last ones will take.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        settings: Settings,
        record: Record,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.model, self.loss_fn, self.settings, self.record, self.clock = model, loss_fn, settings, record, clock
        self.ending: Ending | None = None
        self._device: torch.device = next(model.parameters()).device
        self._metric = settings.metric
        self._evaluated_at = 0.0

    def begin(self, now: float) -> None:
        """Training begins, or goes on, at this time."""
        self._evaluated_at = now

    def is_worth_it(self, *, timed: bool, last: bool) -> bool:
        """Always, if epochs are what is counted. Where time is (`timed`), only if it costs little beside what came
        since, or if it is the last one."""
        if not timed or last or self.settings.early_stop is not None:
            return True
        if self.settings.deterministic:  # which epoch is the best must not hang on a clock
            return True
        record = self.record
        if not record.evaluations:
            return True
        typical_s = record.eval_s / record.evaluations
        return self.clock() - self._evaluated_at > EVALUATE_EVERY * typical_s

    def evaluate(self, loader: Iterable[Any]) -> Score:
        start = self.clock()
        # The same order and transforms each time, from a stream of its own: evaluating changes nothing in training.
        batches: Iterable[Any] = Feed(loader, epoch=0, start=0, seed=self.settings.seed + 1, device=self._device)
        if self._metric == "auto":
            self._metric = top1 if is_classified(next(iter(batches), None)) else None
        counted = _Counted(batches)
        if self.ending is not None:
            if not self.settings.deterministic:
                counted = _Counted(_by_lot(loader) or batches)
            score = self.score(self.ending.holding(loader, counted))
        else:
            score = self.score(counted)
        self._evaluated_at = self.clock()
        took_s, batch_count = self._evaluated_at - start, counted.count
        score = replace(score, share=min(batch_count / (length(loader) or batch_count), 1.0))
        self.record.eval_s += took_s
        self.record.evaluations += 1
        self.record.evaluated_batches += batch_count
        if self.ending is not None:
            self.ending.evaluated(took_s, batch_count)
        return score

    def score(self, batches: Iterable[Any]) -> Score:
        """Of these batches, after the first evaluation; nothing is written down."""
        assert self._metric != "auto", "resolved at the first evaluation"
        metric = with_autocast(self._metric, self._device, self.settings.autocast) if self._metric is not None else None
        return evaluate(self.model, self.loss_fn, batches, metric=metric, device=self._device)


class _Counted:
    """Batches, and how many were taken."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.count += 1
            yield batch


def _by_lot(loader: Iterable[Any]) -> Iterator[Any] | None:
    """The samples of a loader of ours, in an order drawn by lot: wherever time ends it, a fair sample has been seen."""
    if not isinstance(loader, Loader):
        return None
    order = loader.order(0)
    return loader.look(order[permutation(loader.seed, -1, len(order))], 0)
