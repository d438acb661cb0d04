"""The clocks that parts are timed with, where there is no device to time."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import elastictrainer as et
from elastictrainer.profiling import measure, steps, timing
from tests.zoo import ZOO


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


class Pretended(nn.Parameter):
    """A parameter that says it is on a GPU, so that everything is done as there is one."""

    device = torch.device("cuda")


class Event:
    """Of a device that does everything at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def pretend(kind, monkeypatch):
    """A model of the zoo on a device that is not there, and the kernels that it was put to sleep by."""
    torch.manual_seed(0)
    model, batch, loss_fn = ZOO[kind]()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = Pretended(parameter.detach())
    slept: list[int] = []
    fakes = {
        "Event": Event, "synchronize": lambda *_: None, "_sleep": slept.append,
        "get_device_name": lambda _: "Pretended",
        "memory_allocated": lambda: 5000, "max_memory_allocated": lambda: 9000, "reset_peak_memory_stats": lambda: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return model, batch, loss_fn, slept


class Recorder:
    """Of a device that does everything at once: what is replayed is done again."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    @contextmanager
    def listening(self):
        yield [self.fails] if self.fails else []

    def record(self, step):
        step()
        return step


@pytest.mark.parametrize(("fails", "lanes"), [("", ["device"]), ("not permitted", ["device", "launch"])])
def test_launches_are_timed_only_where_steps_are_launched(fails, lanes, monkeypatch):
    """Replayed steps wait for no launch, and timing them is a third of a profile; they are where recording fails."""
    model, batch, loss_fn, slept = pretend("residual", monkeypatch)
    timed = []
    real = timing._time_backward
    monkeypatch.setattr(
        timing, "_time_backward", lambda *args, lane, **more: (timed.append(lane), real(*args, lane=lane, **more))[1]
    )
    monkeypatch.setattr(measure, "find_recorder", lambda device: Recorder(fails))
    profile = et.profile(model, loss_fn, batch, effort=12, captured=True)
    assert list(dict.fromkeys(timed)) == lanes
    assert profile.captured == (not fails)
    assert [lane.name for lane in profile.lanes] == ["launch", "device" if fails else "replay"]
    assert max(slept) / 2e9 > 0.005  # by its own passes the device lane knows how long issuing takes
    assert et.Profile.from_json(profile.to_json()).captured == profile.captured


@pytest.mark.parametrize("kind", ["residual", "lstm", "tied text", "checkpointed"])
def test_the_whole_path_of_cuda_on_a_pretended_device(kind, monkeypatch):
    """Both lanes, events, sleeps and the allocator, in their order: what a machine without a GPU can check of it."""
    model, batch, loss_fn, slept = pretend(kind, monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    profile = et.profile(model, loss_fn, batch, optimizer=optimizer, effort=30)
    assert [lane.name for lane in profile.lanes] == ["launch", "device"]
    assert profile.context["device"] == "Pretended"
    assert profile.full_step_s > profile.forward_s > 0
    assert profile.error.plans > 0
    assert profile.memory.forward_bytes == 4000
    assert profile.peak_bytes(profile.names) > profile.peak_bytes([])
    assert slept
    assert et.Profile.from_json(profile.to_json()).to_json() == profile.to_json()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state
