"""The meters of a run: energy and peak memory of training, apart from what deciding needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from elastictrainer.metrics import EnergyMeter, PeakMemory, find_meter, step_flops, synchronize
from elastictrainer.runtime.result import Record

__all__ = ["Meters"]


class Meters:
    """Adds what it reads to the run's record.

    Energy is that of whole epochs of training, deciding included, evaluation and checkpoints not. Memory is kept apart:
    a profile and a probe hold what a full step holds, a step of the plan does not.
    """

    def __init__(self, device: torch.device, record: Record, *, meter: EnergyMeter | None = None) -> None:
        self.record = record
        self.device = device
        self.meter = find_meter(device) if meter is None else meter
        self._memory = PeakMemory(device)
        self._running = False

    def begin(self) -> None:
        """Training begins or goes on."""
        synchronize(self.device)
        self.meter.begin()
        self._memory.begin()
        self._running = True

    def end(self) -> None:
        """Training stops for a while."""
        synchronize(self.device)
        joules = self.meter.end()
        if joules is not None:
            self.record.energy_j = (self.record.energy_j or 0.0) + joules
        self._note_peak("peak_bytes")
        self._running = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is inside belongs to no meter; everything read so far is in the record."""
        if not self._running:
            yield
            return
        self.end()
        try:
            yield
        finally:
            self.begin()

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """A profile or a probe: its memory is noted apart."""
        self._note_peak("peak_bytes")
        self._memory.begin()
        try:
            yield
        finally:
            self._note_peak("deciding_peak_bytes")
            self._memory.begin()

    def step_flops(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> int:
        """Operations of a step as the model stands; costs one such step."""
        return step_flops(model, loss_fn, batch).total

    def _note_peak(self, field: str) -> None:
        peak = self._memory.end()
        if peak is not None:
            setattr(self.record, field, max(getattr(self.record, field) or 0, peak.peak_bytes))
