from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer.budget import Budget
from elastictrainer.runtime.pace import LARGEST_REPAYMENT, Pace

HALF = Budget.parse("0.5x")


def started(*, predicted_s: float = 0.5, stated: float = 0.05) -> Pace:
    """A plan predicted at half a full step of one second; a forward pass took 0.3 s when the profile was new."""
    pace = Pace()
    pace.renew(1.0, stated=stated)
    pace.stand("a", predicted_s=predicted_s, full_s=1.0)
    pace.timed_forward(0.3)
    return pace


def run(pace: Pace, windows: int, *, step_s: float) -> None:
    for _ in range(windows):
        pace.add(5, 5 * step_s, 0.0)


def test_without_a_timed_forward_pass_full_steps_are_as_profiled() -> None:
    pace = Pace()
    pace.stand("a", predicted_s=0.5, full_s=1.0)
    run(pace, 4, step_s=0.6)
    assert pace.ratio == pytest.approx(0.6)
    account = pace.account(HALF)
    assert account.spent_s - account.allowed_s == pytest.approx(20 * 0.1)


def test_waiting_for_data_belongs_to_the_full_step_too() -> None:
    pace = Pace()
    pace.stand("a", predicted_s=0.5, full_s=1.0)
    pace.add(5, 5 * (0.5 + 1.0), 5 * 1.0)
    assert pace.ratio == pytest.approx(1.5 / 2.0)
    assert pace.windows == [pytest.approx(1.0)]


def test_forward_passes_tell_a_slow_machine_from_a_dear_plan() -> None:
    slow, dear = started(), started()
    for pace, forward_s in ((slow, 0.45), (dear, 0.3)):
        for _ in range(6):
            run(pace, 3, step_s=0.75)
            pace.timed_forward(forward_s)
    assert slow.error("a") == pytest.approx(1.0)
    assert slow.machine == pytest.approx(1.5)
    assert slow.ratio == pytest.approx(0.5)
    assert dear.error("a") == pytest.approx(1.5, rel=0.02)
    assert dear.machine == pytest.approx(1.0, rel=0.02)
    assert dear.ratio == pytest.approx(0.75, rel=0.02)


def test_a_hiccup_is_not_a_change() -> None:
    pace = started()
    run(pace, 8, step_s=0.5)
    run(pace, 1, step_s=50.0)
    assert not pace.changed
    run(pace, 3, step_s=0.75)
    assert pace.changed


def test_pairs_are_believed_as_far_as_they_agree_and_the_profile_may_be_off() -> None:
    """The same mean of pairs: believed on a quiet machine, less on a noisy one, hardly against a sure profile."""
    beliefs = []
    for stated, wobble in ((0.10, 0.0), (0.10, 0.2), (0.01, 0.2)):
        pace = started(stated=stated)
        for k in range(6):
            run(pace, 3, step_s=0.55)
            pace.timed_forward(0.3 * (1 + wobble) ** (1 if k % 2 else -1))
        beliefs.append(pace.error("a"))
    assert beliefs[0] == pytest.approx(1.1, rel=0.01)
    assert beliefs[0] > beliefs[1] > beliefs[2] > 1.0


def test_what_plans_have_in_common_is_believed_of_one_never_run() -> None:
    pace = started(stated=0.10)
    for plan in ("b", "c", "d"):
        pace.stand(plan, predicted_s=0.5, full_s=1.0)
        for _ in range(2):
            run(pace, 3, step_s=0.55)
            pace.timed_forward(0.3)
    assert pace.error("never run") == pytest.approx(1.1, rel=0.01)


def test_drift_takes_two_pairs_and_more_than_what_was_stated() -> None:
    pace = started(stated=0.05)
    run(pace, 3, step_s=0.7)
    pace.timed_forward(0.3)
    assert not pace.drifted()
    run(pace, 3, step_s=0.7)
    pace.timed_forward(0.3)
    assert pace.drifted()
    within = started(stated=0.30)
    for _ in range(4):
        run(within, 3, step_s=0.7)
        within.timed_forward(0.3)
    assert not within.drifted()


@pytest.mark.parametrize("waited", [0.0, 5.0])
def test_windows_that_were_all_waiting_or_pause_say_nothing_of_the_plan(waited: float) -> None:
    """A loop whose whole body is a pause, or a clock too coarse for its steps."""
    pace = started()
    for _ in range(10):
        pace.add(5, waited, waited)
        pace.timed_forward(0.3)
        assert not pace.changed
        assert not pace.drifted()
    assert pace.machine == 1.0
    assert pace.steps == 50


def test_a_new_profile_values_all_steps_so_far() -> None:
    pace = started()
    run(pace, 4, step_s=0.6)
    pace.renew(1.2, stated=0.02)
    assert pace.steps == 20
    assert pace.ratio == pytest.approx(0.5)
    assert pace.error() == 1.0


@given(st.floats(0.1, 3.0), st.floats(0.1, 3.0), st.integers(1, 10_000))
def test_target_pays_back_what_is_owed_but_never_more_than_a_tenth(spent: float, full: float, horizon: int) -> None:
    pace = Pace()
    pace.stand("a", predicted_s=0.5, full_s=full)
    pace.add(1, spent, 0.0)
    target = pace.target_s(1.0, budget=HALF, horizon=horizon)
    allowed = full / 2
    assert abs(target - 1.0) <= LARGEST_REPAYMENT + 1e-12
    if abs((spent - allowed) / horizon) <= LARGEST_REPAYMENT:
        assert spent + horizon * target == pytest.approx(allowed + horizon * 1.0)
        excess = pace.excess(step_s=target, allowed_s=1.0, full_s=2.0, budget=HALF, horizon=horizon)
        assert excess == pytest.approx(0.0, abs=1e-9)


def test_round_trip() -> None:
    pace = started()
    run(pace, 4, step_s=0.6)
    pace.timed_forward(0.31)
    assert Pace.from_dict(pace.to_dict()) == pace
