"""The run-level choice: pure, never past the time that is left, never worse by its own measure than training all."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.selection import graphs

from elastictrainer.errors import BudgetError
from elastictrainer.plan import Plan
from elastictrainer.policies.adaptive import PASSES, PASSES_A_VIEW, Keeping, choose_stage, head_stage, worth

SEEDS = st.integers(0, 10_000)


def random_profile(seed):
    rng = np.random.default_rng(seed)
    shape = (graphs.chain, graphs.residual, graphs.dense, graphs.tied)[seed % 4]
    made = graphs.priced(shape(rng, 10), rng, lanes=1 + seed % 2)
    lanes = []
    for lane in made.lanes:
        share = rng.dirichlet(np.ones(len(made.graph.nodes)))
        lanes.append(dataclasses.replace(lane, forward_s=0.9 * lane.forward_total_s * share))
    return dataclasses.replace(made, lanes=tuple(lanes))


def scored(profile, seed):
    return graphs.scored(profile, np.random.default_rng(seed))


@settings(max_examples=12)
@given(SEEDS, st.floats(0.3, 30.0), st.booleans())
def test_the_choice_fits_and_beats_training_everything(seed, passes_of_all, keepable):
    profile = random_profile(seed)
    scores = scored(profile, seed)
    left_s = passes_of_all * 100 * profile.full_step_s
    stage = choose_stage(
        profile, scores, left_s=left_s, steps_per_pass=100, keeping=Keeping(2, 0.7) if keepable else None, pin=()
    )
    assert stage.passes * 100 * stage.step_s <= left_s * (1 + 1e-9) or stage.plan.trainable == profile.names
    everything = Plan.of(profile, profile.names)
    assert stage.worth >= worth(everything, scores, passes_of_all) * (1 - 1e-9)
    assert stage.worth == pytest.approx(worth(stage.plan, scores, stage.passes))


@settings(max_examples=6)
@given(SEEDS)
def test_more_time_is_never_worth_less(seed):
    profile = random_profile(seed)
    scores = scored(profile, seed)
    found = [
        choose_stage(
            profile, scores, left_s=share * 100 * profile.full_step_s, steps_per_pass=100, keeping=Keeping(2), pin=()
        ).worth
        for share in (0.5, 1.0, 2.0, 4.0, 8.0)
    ]
    assert all(a <= b * (1 + 0.01) for a, b in pairwise(found))  # each is within half a percent of its best


@given(SEEDS, st.floats(0.0, 2.0))
def test_kept_prices_are_forward_by_depth(seed, rebuilt):
    profile = random_profile(seed)
    kept = profile.with_kept_prefix(rebuilt=rebuilt, read_s=0.25)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        names = [n for n in profile.names if rng.random() < 0.4]
        reached = profile.graph.reached(profile.graph.indices(names))
        forward = max(
            lane.step_s(reached, profile.graph.indices(names))
            - float(lane.forward_s.sum())
            + 0.25
            + float(lane.forward_s @ np.where(reached, max(1 - rebuilt, 0.0), 0.0))
            + rebuilt * float(lane.forward_s.sum())
            for lane in profile.lanes
        )
        assert kept.step_s(names) == pytest.approx(forward)


def test_the_head_is_cheap_on_kept_features():
    profile = random_profile(3)
    stage = head_stage(profile, Keeping(2, 1.0), pin=(), memory=None, passes=1000.0)
    assert set(stage.plan.trainable) == set(profile.graph.head)
    assert stage.step_s < profile.step_s(profile.graph.head)
    assert math.isnan(stage.worth)


def test_nothing_fits_is_a_refusal():
    profile = random_profile(3)
    with pytest.raises(BudgetError):
        choose_stage(
            profile, dict.fromkeys(profile.names, -1.0) | {profile.names[0]: 1.0}, left_s=0.0, steps_per_pass=100,
            keeping=None, pin=profile.names, memory=1,
        )  # fmt: skip


@given(st.integers(1, 6), st.floats(0.25, 40.0))
def test_another_view_is_made_once_there_are_passes_for_it(views, passes):
    found = Keeping(views).views_in(passes)
    assert 1 <= found <= views
    assert found == 1 or passes / found >= PASSES_A_VIEW
    assert found == views or passes / (found + 1) < PASSES_A_VIEW


@pytest.mark.parametrize("left_s", [3.0, 30.0, 300.0])
def test_a_stage_keeps_as_many_views_as_its_price_was_for(left_s):
    profile = random_profile(3)
    keeping = Keeping(2, 0.5)
    stage = choose_stage(
        profile, dict.fromkeys(profile.names, 1.0), left_s=left_s, steps_per_pass=10, keeping=keeping, pin=()
    )
    if stage.kept:
        grid = [p for p in PASSES if p <= stage.passes * (1 + 1e-9)]
        prices = [
            keeping.prices(profile, p).step_s(stage.plan.trainable) for p in grid if keeping.views_in(p) == stage.views
        ]
        assert any(stage.step_s == pytest.approx(price) for price in prices)
