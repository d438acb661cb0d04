"""What a deadline keeps back for the end of the run, on a machine whose pace the test sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastictrainer.runtime.ending import FEW, Ending
from elastictrainer.runtime.result import Record


class Machine:
    """Evaluating a batch takes `batch_s`."""

    def __init__(self) -> None:
        self.now, self.batch_s, self.record = 0.0, 0.1, Record()
        self.deadline = 1e9
        self.pace: Callable[[], float] = lambda: 1.0
        self.val, self.test = range(10), range(30)

    def run(self, batches: list[Any]) -> None:
        self.now += self.batch_s * self.pace() * len(batches)

    def evaluate(self, ending: Ending, batches: int) -> None:
        start = self.now
        self.run(list(ending.holding(self.val, range(batches))))
        ending.evaluated(self.now - start, batches)

    def judge(self, ending: Ending, loader: Any) -> int:
        """Evaluate as far as there is time; how many batches that was."""
        count = 0
        for batch in ending.holding(loader, loader):
            self.run([batch])
            count += 1
        return count


def ending_on(machine: Machine, *, deterministic: bool = False, go_alone: Any = None) -> Ending:
    return Ending(
        lambda: [machine.val, machine.test], machine.run,
        record=lambda: machine.record, forward_s=lambda: 0.05, left_s=lambda: machine.deadline - machine.now,
        clock=lambda: machine.now, deterministic=deterministic, go_alone=go_alone,
    )  # fmt: skip


def test_it_is_what_evaluating_has_taken_so_far() -> None:
    machine = Machine()
    ending = ending_on(machine)
    guess = ending.seconds()
    assert guess >= 0.05 * 40  # by the profile, before anything was evaluated
    machine.evaluate(ending, 10)
    assert ending.seconds() >= 0.1 * 40
    assert ending.seconds() == pytest.approx(0.1 * 40, rel=0.15)


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
    assert ending.seconds() == pytest.approx(0.3 * 40, rel=0.15)


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


@pytest.mark.parametrize("slower", [1.0, 3.0, 30.0])
def test_evaluations_end_before_the_deadline_however_slow_the_machine_has_become(slower: float) -> None:
    machine = Machine()
    ending = ending_on(machine)
    machine.evaluate(ending, 10)
    machine.deadline = machine.now + ending.seconds()  # the time that was kept back
    machine.batch_s *= slower
    judged = machine.judge(ending, machine.val), machine.judge(ending, machine.test)
    if slower == 1:
        assert judged == (10, 30)
    else:
        assert judged[0] + judged[1] < 40
    assert min(judged) >= 1
    assert machine.now <= machine.deadline or judged[1] == 1
    if slower == 3:  # each has its share of the time, less what a slow batch might take
        assert judged[0] == pytest.approx(10 / 3, abs=3)
        assert judged[1] == pytest.approx(30 / 3, abs=4)


def test_a_deterministic_run_is_judged_in_full() -> None:
    machine = Machine()
    ending = ending_on(machine, deterministic=True)
    machine.deadline = machine.now
    assert machine.judge(ending, machine.test) == 30


def test_where_many_threads_wait_for_each_other_one_is_tried_and_the_faster_kept() -> None:
    machine = Machine()
    alone: list[bool] = []
    ending = ending_on(machine, go_alone=alone.append)
    machine.evaluate(ending, 10)
    before = ending.seconds()
    machine.pace = lambda: 4.0 if alone and alone[-1] else 20.0  # others take turns with every thread of ours
    ending.feel(0.5)
    assert alone == [True]
    assert ending.seconds() == pytest.approx(4 * before)
    machine.pace = lambda: 1.5 if alone[-1] else 1.0  # they are gone
    ending.feel(0.7)
    assert alone[-1] is False
    assert ending.seconds() == pytest.approx(before)
    ending.feel(0.8)
    assert len(alone) == 2  # nothing is slow: nothing is tried


def test_one_thread_that_is_no_faster_is_left_again() -> None:
    machine = Machine()
    alone: list[bool] = []
    ending = ending_on(machine, go_alone=alone.append)
    machine.evaluate(ending, 10)
    machine.pace = lambda: 6.0 if alone and alone[-1] else 3.0
    ending.feel(0.5)
    assert alone == [True, False]


def test_steps_that_become_slow_are_felt_at_once_and_once() -> None:
    machine = Machine()
    ending = ending_on(machine)
    machine.evaluate(ending, 10)
    for _ in range(100):
        ending.stepped(0.01, 0.013)  # the prices are a little off: that is no news
    assert ending.slower == 1.0
    machine.pace = lambda: 4.0
    started = machine.now
    for _ in range(40):
        ending.stepped(0.01, 0.05)
    assert ending.slower == pytest.approx(4.0)
    assert machine.now - started == pytest.approx(4 * machine.batch_s)  # one batch, once
    machine.pace = lambda: 1.0
    for _ in range(100):
        ending.stepped(0.01, 0.013)
    machine.pace = lambda: 3.0
    for _ in range(40):
        ending.stepped(0.01, 0.05)  # again
    assert ending.slower == pytest.approx(3.0)


def test_an_evaluation_that_was_slow_is_a_reason_to_try_one_thread() -> None:
    machine = Machine()
    alone: list[bool] = []
    ending = ending_on(machine, go_alone=alone.append)
    machine.evaluate(ending, 10)
    before = ending.seconds()
    machine.pace = lambda: 3.0 if alone and alone[-1] else 30.0
    machine.evaluate(ending, 10)
    assert alone == [True]
    assert ending.seconds() == pytest.approx(3 * before, rel=0.05)


def test_one_slow_batch_does_not_cut_an_evaluation_short() -> None:
    machine = Machine()
    ending = ending_on(machine)
    machine.evaluate(ending, 10)
    machine.deadline = machine.now + ending.seconds()
    paces = iter([1.9])
    machine.pace = lambda: next(paces, 1.0)
    assert machine.judge(ending, machine.val) == 10
    machine.pace = lambda: 1.0
    assert machine.judge(ending, machine.test) == 30
