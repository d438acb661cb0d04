"""One pass over the data, in stretches: its next batches can be looked at, and a stretch may be left at any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from elastictrainer.data.loader import Batch, Loader
from elastictrainer.runtime.feed import Feed
from elastictrainer.runtime.keeper import Keeper
from elastictrainer.runtime.lookahead import Lookahead

__all__ = ["Pass", "pass_over"]


class Pass(Protocol):
    """`position` is how far into the epoch's order it has come, in whatever unit it can go on from."""

    position: int

    @property
    def more(self) -> bool: ...
    def peek(self, count: int) -> list[Any]: ...
    def batches(self, keeper: Keeper | None) -> Iterator[Any]: ...


def pass_over(feed: Any, *, position: int | None, clock: Callable[[], float]) -> Pass:
    """A pass over a feed; over our own loader if it has one, which knows its samples before it reads them."""
    if isinstance(feed, Feed) and isinstance(feed.loader, Loader):
        return _OfSamples(
            feed.loader, feed.epoch, feed.start * feed.loader.batch_size if position is None else position
        )
    return _OfBatches(Lookahead(feed, clock=clock))


class _OfBatches:
    """Any loader: batches come as they come, and nothing can be kept of them."""

    def __init__(self, ahead: Lookahead[Any]) -> None:
        self.ahead = ahead
        self.position = 0

    @property
    def more(self) -> bool:
        return bool(self.ahead.peek(1))

    def peek(self, count: int) -> list[Any]:
        return self.ahead.peek(count)

    def batches(self, keeper: Keeper | None) -> Iterator[Any]:
        yield from self.ahead


class _OfSamples:
    """Our loader: samples in the epoch's order, with pixels or, where their features are kept, without."""

    def __init__(self, loader: Loader, epoch: int, position: int) -> None:
        self.loader, self.epoch = loader, epoch
        self.order = loader.order(epoch)
        self.position = position

    @property
    def more(self) -> bool:
        return self.position < len(self.order)

    def peek(self, count: int) -> list[Batch]:
        """From here on; the epoch's first ones where there are no more."""
        some = self.order[self.position :] if self.more else self.order
        return list(islice(self.loader.look(some[: count * self.loader.batch_size], self.epoch), count))

    def batches(self, keeper: Keeper | None) -> Iterator[Batch]:
        """With a keeper that is active, the samples that it has; the others are passed over."""
        here = np.arange(self.position, len(self.order))
        if keeper is not None and keeper.active:
            here = here[keeper.kept_of(self.order[here], self.epoch)]
            made: Iterator[Batch] = keeper.batches(self.order[here], self.epoch)
        else:
            made = self.loader.look(self.order[here], self.epoch)
        taken = 0
        for batch in made:
            taken += len(batch.labels)
            self.position = int(here[taken - 1]) + 1
            yield batch
        self.position = len(self.order)
