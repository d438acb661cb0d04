from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer.metrics import Stopwatch


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Tree = st.recursive(
    st.integers(0, 9), lambda inner: st.tuples(st.sampled_from(["train", "probe", "eval"]), st.lists(inner, max_size=4))
)


@given(st.lists(Tree, max_size=5))
def test_seconds_are_charged_once_and_to_the_innermost(work: list[object]) -> None:
    """Work is a tree of spans with ticks as leaves; a tick belongs to the span around it."""
    clock = FakeClock()
    watch = Stopwatch(clock=clock)
    expected: dict[str, float] = {}

    def run(items: list[object], owner: str | None) -> None:
        for item in items:
            if isinstance(item, int):
                clock.now += item
                if owner is not None:
                    expected[owner] += item
            else:
                name, inner = item  # type: ignore[misc]
                expected.setdefault(name, 0.0)
                with watch.span(name):
                    run(inner, name)

    run(work, None)
    assert watch.seconds == expected


def test_a_span_that_ends_in_an_error_is_charged() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock=clock)
    with suppress(InterruptedError), watch.span("probe"):
        clock.now += 2
        raise InterruptedError
    clock.now += 5
    with watch.span("train"):
        clock.now += 1
    assert watch.seconds == {"probe": 2.0, "train": 1.0}


def test_an_interrupted_run_goes_on_counting() -> None:
    clock = FakeClock()
    watch = Stopwatch(clock=clock)
    watch.load_state_dict({"train": 40.0})
    with watch.span("train"):
        clock.now += 2
    assert watch.state_dict() == {"train": 42.0}


def test_the_device_is_waited_for_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    clock = FakeClock()
    watch = Stopwatch("cuda", clock=clock)
    monkeypatch.setattr("elastictrainer.metrics.timing.synchronize", lambda device: waited.append(clock.now))
    with watch.span("train"):
        clock.now += 3
    assert waited == [100.0, 103.0]
