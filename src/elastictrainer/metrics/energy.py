"""Joules from a real meter, or None: never an estimate from time, power limits or FLOPs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import torch

from elastictrainer.errors import ConfigError, ElasticTrainerError
from elastictrainer.metrics.nvml import NvmlMeter
from elastictrainer.metrics.rapl import RaplMeter

__all__ = ["EnergyMeter", "NoMeter", "ReplayMeter", "find_meter"]


@runtime_checkable
class EnergyMeter(Protocol):
    """Joules between `begin()` and `end()`; None where they cannot be known. `covers` says what is measured.

    A meter that fails while it runs measures None: no run is lost for want of a figure about it. Work that is only
    queued on the device is not in a reading: `synchronize` it before both calls.
    """

    @property
    def covers(self) -> str: ...

    def begin(self) -> None: ...

    def end(self) -> float | None: ...


class NoMeter:
    """Where nothing measures. `covers` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @property
    def covers(self) -> str:
        return f"nothing: {self.reason}"

    def begin(self) -> None:
        """Nothing to read."""

    def end(self) -> None:
        return None

    def __repr__(self) -> str:
        return f"NoMeter({self.reason!r})"


class ReplayMeter:
    """Gives back recorded joules in turn, so that what uses a meter can be tested without one.

    >>> meter = ReplayMeter([1.5, None])
    >>> meter.begin(); meter.end()
    1.5
    >>> meter.begin(); meter.end() is None
    True
    """

    covers = "a recording"

    def __init__(self, joules: Iterable[float | None]) -> None:
        self._joules = iter(joules)
        self._begun = False

    def begin(self) -> None:
        self._begun = True

    def end(self) -> float | None:
        if not self._begun:
            raise ConfigError("the meter was not begun; call begin() first")
        self._begun = False
        try:
            return next(self._joules)
        except StopIteration:
            raise ConfigError("the recording has no more measurements; give ReplayMeter as many as are taken") from None


def find_meter(device: str | torch.device = "cpu") -> EnergyMeter:
    """The meter of this device: the GPU's own counter for CUDA (NVML), the processor's for the CPU (RAPL).

    Where there is none, a `NoMeter` that says why, and measures None.

    Cost: milliseconds, once. A reading costs well under a millisecond; counters move about ten times a second (NVML) or
    a thousand times (RAPL), so measure seconds rather than steps.
    """
    device = torch.device(device)
    try:
        if device.type == "cuda":
            return NvmlMeter.of(device)
        if device.type == "cpu":
            return RaplMeter.of_system()
    except ElasticTrainerError as error:
        return NoMeter(str(error))
    return NoMeter(f"no meter is known for device {device}")
