"""The clocks that parts are timed with, where there is no device to time."""

from __future__ import annotations

import pytest
import torch

from elastictrainer.profiling import steps, timing


@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda"])
def test_off_the_cpu_a_clock_waits_for_the_device(kind, monkeypatch):
    """On an accelerator work has only been asked for when a call returns: a clock that does not wait times nothing."""
    waited = []
    monkeypatch.setattr(timing, "synchronize", waited.append)
    timing.clock_of(torch.device("cpu"))()
    assert not waited
    timing.clock_of(torch.device(kind))()
    assert waited == [torch.device(kind)]


def test_a_part_on_the_device_is_timed_behind_a_sleep_as_long_as_its_own_issue(monkeypatch):
    """Too short, and the device waits for the host; too long, and the profile is mostly sleep."""
    slept, ran = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            ran.append("event")

        def elapsed_time(self, other):
            return 2.0

    for name, fake in {"Event": Event, "synchronize": lambda: None, "_sleep": slept.append}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    stepper = object.__new__(steps.Stepper)
    stepper.cuda, ticks = True, iter([0.0, 0.04])
    stepper._now = lambda: next(ticks)
    assert stepper.device_s(lambda: ran.append("part")) == pytest.approx(2e-3)
    assert ran == ["part", "event", "part", "event"]
    (cycles,) = slept
    assert 0.04 < cycles / 2e9 < 0.08
