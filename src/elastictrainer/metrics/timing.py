"""Where the seconds of a run go: named spans on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["Stopwatch", "synchronize"]


def synchronize(device: str | torch.device) -> None:
    """Wait until the device has done what was asked of it; on the CPU nothing is ever outstanding."""
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


class Stopwatch:
    """Seconds by name, added up over a run.

    A span inside another is taken off the outer one, so that no second is counted twice and all of them add up to the
    time that any span was open.

    >>> ticks = iter([0.0, 1.0, 3.0, 10.0])
    >>> watch = Stopwatch(clock=lambda: next(ticks))
    >>> with watch.span("train"):
    ...     with watch.span("probe"):
    ...         pass
    >>> watch.seconds
    {'train': 8.0, 'probe': 2.0}

    Args:
        device: waited for at both ends of a span, so that queued work is charged to who asked for it. That costs what
            is left in the queue; put no span around a single step of asynchronous training.
        clock: seconds that never go back.
    """

    def __init__(self, device: str | torch.device = "cpu", *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = torch.device(device)
        self._clock = clock
        self._open: list[str] = []
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Charge what happens inside to `name`, error or not."""
        self._settle()
        self._open.append(name)
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def _settle(self) -> None:
        """Charge the time since the last change to the innermost open span."""
        synchronize(self._device)
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def state_dict(self) -> dict[str, float]:
        return dict(self.seconds)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on counting from what an interrupted run had."""
        self.seconds = dict(state)
