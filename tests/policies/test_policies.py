"""Every policy, through one suite: plans are of the profile's tensors, keep their promises, and hold the pinned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.policies import POLICIES, find_policy

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from loop_support import chain_profile, small_net

PROFILE = chain_profile(small_net())
SCORES = {name: 1.0 + index % 3 for index, name in enumerate(PROFILE.names)}


@pytest.mark.parametrize("name", POLICIES)
def test_entries_are_complete(name: str) -> None:
    policy = POLICIES[name]
    assert policy.name == name
    assert policy.description.endswith(".")
    assert "\n" not in policy.description


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("budget", ["0.5x", "0.8x", "1x"])
def test_plans_keep_their_promises(name: str, budget: str) -> None:
    policy = POLICIES[name]
    plan = policy.plan(PROFILE, SCORES if policy.needs_scores else None, budget=budget)
    assert plan.trainable
    assert set(plan.trainable) <= set(PROFILE.names)
    assert set(PROFILE.graph.head) <= set(plan.trainable)
    assert plan.step_s == pytest.approx(PROFILE.step_s(plan.trainable))
    if policy.within_budget:
        assert plan.ratio <= float(budget[:-1]) + 1e-9
    assert plan == policy.plan(PROFILE, SCORES if policy.needs_scores else None, budget=budget)


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.within_budget])
def test_below_the_floor_the_least_that_works_is_stated(name: str) -> None:
    policy = POLICIES[name]
    with pytest.raises(BudgetError) as caught:
        policy.plan(PROFILE, SCORES, budget="0.01x")
    assert caught.value.least is not None
    assert policy.plan(PROFILE, SCORES, budget=caught.value.least * (1 + 1e-6)).trainable


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_kept_or_refused(name: str) -> None:
    policy = POLICIES[name]
    scores = SCORES if policy.needs_scores else None
    most = policy.plan(PROFILE, scores, budget="1x").peak_bytes
    assert policy.plan(PROFILE, scores, budget="1x", memory=most).peak_bytes <= most
    if name in ("full", "head", "bn_bias", "prunetrain"):
        with pytest.raises(BudgetError, match="memory"):
            policy.plan(PROFILE, scores, budget="1x", memory=most - 1)
    else:
        assert policy.plan(PROFILE, scores, budget="1x", memory=most - 1).peak_bytes < most


def test_full_trains_everything_and_head_only_the_output_layer() -> None:
    assert POLICIES["full"].plan(PROFILE, None, budget=None).trainable == PROFILE.names
    assert set(POLICIES["head"].plan(PROFILE, None, budget=None).trainable) == set(PROFILE.graph.head)


def test_bn_bias_is_the_vectors_and_the_head() -> None:
    model = small_net()
    vectors = {name for name, p in model.named_parameters() if p.ndim == 1}
    plan = POLICIES["bn_bias"].plan(PROFILE, None, budget=None)
    assert set(plan.trainable) == vectors | set(PROFILE.graph.head)


def test_a_suffix_has_no_holes_and_the_next_tensor_would_not_fit() -> None:
    plan = POLICIES["suffix"].plan(PROFILE, None, budget="0.6x")
    count = len(plan.trainable)
    assert plan.trainable == PROFILE.names[:count]
    assert PROFILE.step_s(PROFILE.names[: count + 1]) > 0.6 * PROFILE.full_step_s


def test_scores_are_asked_for_where_they_are_needed() -> None:
    with pytest.raises(ConfigError, match="given no scores"):
        POLICIES["elastic"].plan(PROFILE, None, budget="0.5x")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'elastic'"):
        find_policy("elastc")
