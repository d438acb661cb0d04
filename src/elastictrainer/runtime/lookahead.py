"""Lookahead: see the next batches before they are trained on, without losing one or drawing one twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Generic, TypeVar

__all__ = ["Lookahead"]

Batch = TypeVar("Batch")


class Lookahead(Generic[Batch]):
    """An iterator over `batches` whose next elements can be looked at first.

    Cost: the batches looked at are held in memory until they are taken.

    >>> ahead = Lookahead("abc", clock=lambda: 0.0)
    >>> ahead.peek(2), list(ahead)
    (['a', 'b'], ['a', 'b', 'c'])
    """

    def __init__(self, batches: Iterable[Batch], *, clock: Callable[[], float]) -> None:
        self._batches = iter(batches)
        self._clock = clock
        self._seen: deque[tuple[Batch, float]] = deque()
        self.waited_s = 0.0
        """How long the batch last taken was waited for, whenever that was."""

    def peek(self, count: int) -> list[Batch]:
        """The next `count` batches, or as many as there are."""
        while len(self._seen) < count and self._fetch():
            pass
        return [batch for batch, _ in list(self._seen)[:count]]

    def _fetch(self) -> bool:
        start = self._clock()
        try:
            batch = next(self._batches)
        except StopIteration:
            return False
        self._seen.append((batch, self._clock() - start))
        return True

    @property
    def typical_wait_s(self) -> float:
        """How long a batch in sight was waited for; the first, which may start workers, only if it is alone."""
        waits = [wait for _, wait in self._seen]
        return median(waits[1:] or waits or [0.0])

    @property
    def held(self) -> bool:
        """The next batch has been looked at already."""
        return bool(self._seen)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._seen and not self._fetch():
            raise StopIteration
        batch, self.waited_s = self._seen.popleft()
        return batch
