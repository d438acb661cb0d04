from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer.budget import Budget
from elastictrainer.runtime.pace import LARGEST_REPAYMENT, Pace


def run(pace: Pace, windows: int, *, step_s: float, full_s: float = 1.0, budget: str = "0.5x") -> None:
    for _ in range(windows):
        pace.add(5, 5 * step_s, 0.0, full_s=full_s, budget=Budget.parse(budget))


def test_ratio_is_spent_over_full() -> None:
    pace = Pace()
    pace.stand("a", 0.5)
    run(pace, 4, step_s=0.6)
    assert pace.ratio == pytest.approx(0.6)
    assert pace.spent_s - pace.allowed_s == pytest.approx(20 * 0.1)


def test_waiting_for_data_belongs_to_the_full_step_too() -> None:
    pace = Pace()
    pace.stand("a", 0.5)
    pace.add(5, 5 * (0.5 + 1.0), 5 * 1.0, full_s=1.0, budget=Budget.parse("0.5x"))
    assert pace.ratio == pytest.approx(1.5 / 2.0)
    assert pace.windows == [pytest.approx(1.0)]


def test_error_of_a_plan_is_a_median_so_a_hiccup_does_not_count() -> None:
    pace = Pace()
    pace.stand("a", 0.5)
    run(pace, 5, step_s=0.55)
    run(pace, 1, step_s=50.0)
    assert pace.error("a") == pytest.approx(1.1)
    assert pace.error("never run") == pytest.approx(1.1)
    assert not pace.changed


def test_forward_pass_tells_a_slow_machine_from_a_dear_plan() -> None:
    slow, dear = Pace(), Pace()
    for pace, forward in ((slow, 1.5), (dear, 1.0)):
        pace.stand("a", 0.5)
        run(pace, 5, step_s=0.5)
        run(pace, 3, step_s=0.75)
        assert pace.changed
        pace.recalibrate(forward)
    assert slow.machine == pytest.approx(1.5)
    assert slow.error("a") == pytest.approx(1.0)
    assert dear.machine == 1.0
    assert dear.error("a") == pytest.approx(1.5)


def test_a_forward_pass_that_the_steps_deny_changes_nothing() -> None:
    pace = Pace()
    pace.stand("a", 0.5)
    run(pace, 8, step_s=0.5)
    pace.recalibrate(1.4)  # one noisy reading
    assert pace.machine == 1.0


@given(st.floats(0.1, 3.0), st.floats(0.1, 3.0), st.integers(1, 10_000))
def test_target_pays_back_what_is_owed_but_never_more_than_a_tenth(spent: float, allowed: float, horizon: int) -> None:
    pace = Pace(spent_s=spent, allowed_s=allowed, full_s=5.0)
    target = pace.target_s(1.0, horizon=horizon)
    owed = spent - allowed
    assert abs(target - 1.0) <= LARGEST_REPAYMENT + 1e-12
    if abs(owed / horizon) <= LARGEST_REPAYMENT:
        assert spent + horizon * target == pytest.approx(allowed + horizon * 1.0)
        assert pace.excess(step_s=target, allowed_s=1.0, full_s=2.0, horizon=horizon) == pytest.approx(0.0, abs=1e-9)


def test_round_trip() -> None:
    pace = Pace()
    pace.stand("a", 0.5)
    run(pace, 4, step_s=0.6)
    assert Pace.from_dict(pace.to_dict()) == pace
