"""What a deadline keeps back for the end of the run, on a machine whose pace the test sets."""

from __future__ import annotations

from typing import Any

import pytest

from elastictrainer.runtime.ending import FEW, Ending
from elastictrainer.runtime.result import Record


class Machine:
    """Evaluating a batch takes `batch_s`."""

    def __init__(self) -> None:
        self.now, self.batch_s, self.record = 0.0, 0.1, Record()

    def run(self, batches: list[Any]) -> None:
        self.now += self.batch_s * len(batches)

    def evaluate(self, ending: Ending, batches: int) -> None:
        start = self.now
        self.run(list(ending.holding(range(batches))))
        ending.evaluated(self.now - start, batches)


def ending_on(machine: Machine, *, val: int = 10, test: int = 30, deterministic: bool = False) -> Ending:
    return Ending(
        lambda: [range(val), range(test)], machine.run,
        record=lambda: machine.record, forward_s=lambda: 0.05, clock=lambda: machine.now, deterministic=deterministic,
    )  # fmt: skip


def test_it_is_what_evaluating_has_taken_so_far() -> None:
    machine = Machine()
    ending = ending_on(machine)
    guess = ending.seconds()
    assert guess >= 0.05 * 40  # by the profile, before anything was evaluated
    machine.evaluate(ending, 10)
    assert ending.seconds() >= 0.1 * 40
    assert ending.seconds() == pytest.approx(0.1 * 40, rel=0.1)


def test_a_machine_that_slows_down_is_noticed_before_the_end() -> None:
    machine = Machine()
    ending = ending_on(machine)
    machine.evaluate(ending, 10)
    before = ending.seconds()
    machine.batch_s *= 3
    ending.feel(0.2)  # too early to matter
    assert ending.seconds() == before
    ending.feel(0.55)
    assert ending.seconds() == pytest.approx(3 * before)
    started = machine.now
    ending.feel(0.6)  # felt once on the way to the next mark
    assert machine.now == started
    machine.batch_s /= 3  # it is over
    ending.feel(0.72)
    assert ending.seconds() == pytest.approx(before)
    machine.batch_s /= 2  # faster than ever: nothing is bet on it
    ending.feel(0.99)
    assert ending.seconds() == pytest.approx(before)


def test_an_evaluation_says_more_than_what_was_felt_before_it() -> None:
    machine = Machine()
    ending = ending_on(machine)
    machine.evaluate(ending, 10)
    machine.batch_s *= 3
    ending.feel(0.5)
    machine.evaluate(ending, 10)
    assert ending.seconds() == pytest.approx(0.3 * 40, rel=0.1)


def test_feeling_costs_a_few_batches_a_mark() -> None:
    machine = Machine()
    ending = ending_on(machine)
    machine.evaluate(ending, 10)
    start = machine.now
    for step in range(1000):
        ending.feel(step / 1000)
    assert machine.now - start == pytest.approx(5 * FEW * machine.batch_s)


def test_deterministic_times_nothing() -> None:
    machine = Machine()
    ending = ending_on(machine, deterministic=True)
    before = ending.seconds()
    machine.evaluate(ending, 10)
    start = machine.now
    ending.feel(0.9)
    assert machine.now == start
    assert ending.seconds() == before
