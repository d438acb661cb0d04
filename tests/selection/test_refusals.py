"""What select refuses, and that each refusal says what to do."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from elastictrainer.budget import Budget
from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection import pinned, select
from tests.selection.graphs import KINDS, priced, scored


@pytest.fixture
def profile() -> Profile:
    rng = np.random.default_rng(1)
    return priced(KINDS["residual"](rng, 12), rng)


@pytest.fixture
def scores(profile: Profile) -> dict[str, float]:
    return {name: 1.0 + k for k, name in enumerate(profile.names)}


@pytest.mark.parametrize("kind", ["ratio", "seconds"])
def test_a_budget_under_the_floor_states_the_least(profile: Profile, scores: dict[str, float], kind: str) -> None:
    tiny = Budget("ratio", 1e-6) if kind == "ratio" else Budget("seconds", 1e-9)
    with pytest.raises(BudgetError, match="least is") as caught:
        select(profile, scores, budget=tiny)
    least = caught.value.least
    assert least is not None
    cheapest = min(profile.step_s([name]) for name in profile.names)
    assert Budget(tiny.kind, least).seconds(profile.full_step_s) == pytest.approx(cheapest, rel=1e-12)
    plan = select(profile, scores, budget=Budget(tiny.kind, least))
    assert plan.trainable
    with pytest.raises(BudgetError):
        select(profile, scores, budget=Budget(tiny.kind, least * (1 - 1e-6)))


def test_memory_under_the_floor_states_the_least(profile: Profile, scores: dict[str, float]) -> None:
    with pytest.raises(BudgetError, match="memory 1B is under the smallest plan") as caught:
        select(profile, scores, memory=1)
    least = caught.value.least
    assert least == min(profile.peak_bytes([name]) for name in profile.names)
    assert select(profile, scores, memory=int(least)).peak_bytes <= least


def test_time_and_memory_that_no_tensor_fits_together(profile: Profile, scores: dict[str, float]) -> None:
    with pytest.raises(BudgetError, match=r"budget 1us is under .* and memory of at least"):
        select(profile, scores, budget="1us", memory=1)
    cheap = min(profile.names, key=lambda name: profile.step_s([name]))
    with pytest.raises(BudgetError, match=r"memory .* within") as caught:
        select(profile, scores, budget=Budget("seconds", profile.step_s([cheap])), memory=1)
    assert caught.value.least is not None
    assert select(profile, scores, budget=Budget("seconds", profile.step_s([cheap])), memory=int(caught.value.least))


def test_the_least_time_and_the_least_memory_do_together() -> None:
    """The tensor that is cheapest in time is not the one that is smallest: naming one figure of each helps nobody."""
    refused = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        profile = priced(KINDS["two_towers"](rng, 10), rng)
        scores = dict.fromkeys(profile.names, 1.0)
        with pytest.raises(BudgetError, match=r"memory of at least .* \(\d+ bytes\)") as caught:
            select(profile, scores, budget=1e-6, memory=1)
        needed = re.search(r"at least \S+ \((\d+) bytes\)", str(caught.value))
        assert needed
        assert caught.value.least is not None
        assert select(profile, scores, budget=caught.value.least, memory=int(needed[1])).trainable
        shown = re.search(r"the least is (\S+x) and", str(caught.value))
        assert shown  # what a person reads and types back works too
        assert select(profile, scores, budget=shown[1], memory=int(needed[1])).trainable
        refused += min(map(profile.peak_bytes, ([n] for n in profile.names))) < int(needed[1])
    assert refused > 5  # cases in which the two smallest figures are of two tensors


def test_pinned_alone_over_both_limits_says_both(profile: Profile, scores: dict[str, float]) -> None:
    pin = profile.names[-1]
    with pytest.raises(BudgetError, match=r"take .* over the budget .* and they hold .* over the limit") as caught:
        select(profile, scores, budget="1us", memory=1, pin=pin)
    assert caught.value.of == "time"
    assert caught.value.least == profile.step_s([pin])
    assert f"({profile.peak_bytes([pin])} bytes)" in str(caught.value)
    plan = select(
        profile, scores, budget=Budget("seconds", caught.value.least), memory=profile.peak_bytes([pin]), pin=pin
    )
    assert pin in plan.trainable


def test_what_fits_is_never_refused_for_what_is_over_by_the_last_bit() -> None:
    rng = np.random.default_rng(0)
    profile = priced(KINDS["chain"](rng, 8), rng)
    cheap, *_, dear = sorted(profile.names, key=lambda name: profile.step_s([name]))
    scores = dict.fromkeys(profile.names, -1.0) | {cheap: 1.0, dear: 9.0}
    assert profile.step_s([cheap]) < 0.99 * profile.step_s([dear])
    plan = select(profile, scores, budget=Budget("seconds", profile.step_s([dear]) * (1 - 1e-12)))
    assert plan.trainable == (cheap,)


def test_pinned_alone_over_budget_says_by_how_much(profile: Profile, scores: dict[str, float]) -> None:
    deepest = profile.names[-1]
    step_s = profile.step_s([deepest])
    with pytest.raises(BudgetError, match=r"the 1 pinned tensor alone take .* over the budget") as caught:
        select(profile, scores, budget=Budget("seconds", step_s * 0.99), pin=deepest)
    assert caught.value.least == step_s
    assert select(profile, scores, budget=Budget("seconds", step_s), pin=deepest).trainable
    peak = profile.peak_bytes([deepest])
    with pytest.raises(BudgetError, match="over the limit") as caught:
        select(profile, scores, memory=peak - 1, pin=deepest)
    assert caught.value.least == peak


def test_no_positive_score_trains_the_pinned_ones_and_says_so(profile: Profile) -> None:
    negative = dict.fromkeys(profile.names, -1.0)
    plan = select(profile, negative, budget="1x", pin="head")
    assert plan.trainable == profile.graph.head
    assert "no tensor has a positive score" in plan.note
    assert "no tensor has a positive score" in str(plan)
    with pytest.raises(ConfigError, match="nothing to train"):
        select(profile, negative, budget="1x")


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_name_the_tensors(profile: Profile, scores: dict[str, float], wrong: float) -> None:
    with pytest.raises(ConfigError, match=r"layer3\.weight \("):
        select(profile, {**scores, "layer3.weight": wrong}, budget=0.9)


def test_missing_and_foreign_scores_name_the_tensors(profile: Profile, scores: dict[str, float]) -> None:
    short = {name: score for name, score in scores.items() if name != "layer2.weight"}
    with pytest.raises(ConfigError, match=r"no score for layer2\.weight"):
        select(profile, short, budget=0.9)
    assert "layer2.weight" in select(profile, short, budget=1.0, pin="layer2.weight").trainable
    with pytest.raises(ConfigError, match="another model"):
        select(profile, {**scores, "no.such.weight": 1.0}, budget=0.9)


@pytest.mark.parametrize(
    ("pin", "expected"),
    [
        ("layer1.weight", ["layer1.weight"]),
        (["layer1.weight", "layer3.*"], ["layer1.weight", "layer3.weight"]),
        (lambda name: name.startswith("layer1."), ["layer1.weight"]),
        ((), []),
    ],
)
def test_pins(profile: Profile, pin: object, expected: list[str]) -> None:
    assert list(pinned(profile, pin)) == expected  # type: ignore[arg-type]


def test_a_pin_that_fits_nothing_is_an_error(profile: Profile, scores: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="'layer99' fits no tensor"):
        select(profile, scores, budget=0.9, pin="layer99")


def test_a_test_that_is_true_of_nothing_is_an_error_too(profile: Profile, scores: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="true of no tensor"):
        select(profile, scores, budget=0.9, pin=lambda name: name.startswith("fc."))


def test_scores_under_what_is_no_name_are_refused(profile: Profile, scores: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="scores name 5, which"):
        select(profile, {**scores, 5: 1.0}, budget=0.9)  # type: ignore[dict-item]


@pytest.mark.parametrize("pin", [5, [5], None, [None, "head"]])
def test_wrong_pins(profile: Profile, scores: dict[str, float], pin: object) -> None:
    with pytest.raises(ConfigError, match="pin"):
        select(profile, scores, budget=0.9, pin=pin)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", [None, "high", [1.0], 1e308])
def test_scores_that_are_no_numbers_name_the_tensors(profile: Profile, scores: dict[str, float], score: object) -> None:
    with pytest.raises(ConfigError, match=r"layer3\.weight \("):
        select(profile, {**scores, "layer3.weight": score}, budget=0.9)  # type: ignore[dict-item]


@pytest.mark.parametrize("memory", [True, -5, [], "0.5x", "", float("nan")])
def test_wrong_memory(profile: Profile, scores: dict[str, float], memory: object) -> None:
    with pytest.raises(ConfigError, match="size"):
        select(profile, scores, memory=memory)  # type: ignore[arg-type]


def test_a_time_that_was_meant_for_the_run_is_noted(profile: Profile, scores: dict[str, float]) -> None:
    plan = select(profile, scores, budget="30min")
    assert plan.trainable == profile.names
    assert plan.note == "the budget is of one step, and 30min is more than a full one takes"
    assert select(profile, scores, budget=Budget("seconds", profile.full_step_s)).note == ""


@pytest.mark.parametrize("gap", [-0.1, 1.0, math.nan])
def test_wrong_gaps(profile: Profile, scores: dict[str, float], gap: float) -> None:
    with pytest.raises(ConfigError, match="gap"):
        select(profile, scores, budget=0.9, gap=gap)


def test_what_is_no_profile_or_no_scores_is_named(profile: Profile, scores: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"Profile, not a str; Profile\.load"):
        select("pi.json", scores, budget=0.9)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scores must be importance by tensor name, not a list"):
        select(profile, list(scores.values()), budget=0.9)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["", "fast", "-1x", 0, True])
def test_wrong_budgets(profile: Profile, scores: dict[str, float], budget: object) -> None:
    with pytest.raises(ConfigError):
        select(profile, scores, budget=budget)  # type: ignore[arg-type]


def test_a_model_of_one_tensor() -> None:
    rng = np.random.default_rng(0)
    profile = priced(KINDS["chain"](rng, 1), rng)
    assert select(profile, scored(profile, rng, negative=0.0), budget=1.0).trainable == profile.names
