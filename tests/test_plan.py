"""Plan: prints, compares, round-trips, and explains itself."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastictrainer.budget import Budget
from elastictrainer.errors import BudgetError, ConfigError, ProfileError
from elastictrainer.graph import Graph, Node, TensorInfo
from elastictrainer.plan import Plan
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection import select
from tests.selection.graphs import KINDS, cases, priced, scored

Case = tuple[Profile, dict[str, float]]


@pytest.fixture
def case() -> Case:
    rng = np.random.default_rng(4)
    profile = priced(KINDS["residual"](rng, 14), rng)
    return profile, scored(profile, rng)


@pytest.fixture
def plan(case: Case) -> Plan:
    return select(case[0], case[1], budget=0.7, memory="1MiB", pin="head")


def test_round_trips_through_json_and_pickle(plan: Plan) -> None:
    for again in (
        Plan.from_json(plan.to_json()),
        Plan.from_dict(plan.to_dict()),
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
    ):
        assert again == plan
        assert again.id == plan.id
        assert hash(again) == hash(plan)
        assert again.to_json() == plan.to_json()
        assert again.scores == plan.scores


def test_json_holds_the_contract(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    for key in ("trainable", "step_s", "ratio", "peak_bytes", "optimal", "gap", "id", "scores", "budget"):
        assert key in data
    assert data["budget"] == {"kind": "ratio", "value": 0.7}


def test_id_names_what_is_trained_and_nothing_else(case: Case, plan: Plan) -> None:
    profile, _ = case
    by_hand = Plan.of(profile.scaled(3.0), reversed(plan.trainable), note="by hand")
    assert by_hand.id == plan.id
    assert by_hand != plan
    assert Plan.of(profile, plan.trainable[1:]).id != plan.id
    shuffled = json.dumps(dict(sorted(plan.to_dict().items(), reverse=True)), indent=3)
    assert Plan.from_json(shuffled).id == plan.id
    assert Plan.from_json(shuffled) == plan


def test_hash_and_id_are_the_same_in_every_process(case: Case, plan: Plan) -> None:
    """Not of Python's own string hash, which every process salts anew."""
    text = (
        "import sys; from elastictrainer.plan import Plan; p = Plan.from_json(sys.stdin.read()); print(p.id, hash(p))"
    )
    for salt in ("0", "1"):
        told = subprocess.run(
            [sys.executable, "-c", text],
            input=plan.to_json(),
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.split() == [plan.id, str(hash(plan))]


def test_frozen(plan: Plan) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step_s = 0.0  # type: ignore[misc]
    scores = plan.scores
    assert scores is not None
    scores.clear()
    assert plan.scores


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 99}', "[" * 100_000])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(text)


def test_of_predicts_and_claims_nothing(case: Case) -> None:
    profile, _ = case
    names = profile.names[2:5]
    made = Plan.of(profile, reversed(names), note="by hand")
    assert made.trainable == names
    assert made.step_s == profile.step_s(names)
    assert made.peak_bytes == profile.peak_bytes(names)
    assert made.ratio == made.step_s / profile.full_step_s
    assert not made.optimal
    assert made.gap is None
    assert made.note in str(made)
    with pytest.raises(ProfileError, match=r"no\.such"):
        Plan.of(profile, ["no.such"])


def test_diff(case: Case) -> None:
    profile, _ = case
    a, b = Plan.of(profile, profile.names[:5]), Plan.of(profile, profile.names[2:8])
    change = a.diff(b)
    assert change
    assert change.started == profile.names[5:8]
    assert change.stopped == profile.names[:2]
    assert change.kept == profile.names[2:5]
    assert change.step_s == b.step_s - a.step_s
    assert f"+ {profile.names[5]}" in str(change)
    assert "3 start, 2 stop, 3 stay" in str(change)
    assert not a.diff(a)
    assert "the same 5 tensors" in str(a.diff(a))


def network(names: list[str]) -> Profile:
    nodes = tuple(Node("Op", "", (k + 1,) if k + 1 < len(names) else (), (k,)) for k in range(len(names)))
    return priced(Graph(nodes, tuple(TensorInfo(name, (1,), "float32", 4) for name in names)), np.random.default_rng(0))


def test_the_strip_has_one_mark_a_tensor_by_block() -> None:
    names = ["fc.weight", "fc.bias", "layer2.0.weight", "layer2.1.weight", "layer1.weight", "stem.weight"]
    profile = network(names)
    plan = select(profile, dict(zip(names, (0.0, 1.0, 1.0, -1.0, 1.0, -1.0))), pin="fc.weight")
    assert plan.strip() == "output | fc P#  layer2 #.  layer1 #  stem . | input"
    assert str(plan).startswith("4 of 6 tensors train; ")


def test_the_strip_of_a_large_network_has_a_line_a_block_and_splits_what_is_long() -> None:
    names = ["head.weight"] + [f"features.{i}.{j}.weight" for i in range(12, -1, -1) for j in range(6)]
    lines = Plan.of(network(names), names[:10]).strip().splitlines()
    assert lines[0] == "output"
    assert lines[-1] == "input"
    assert len(lines) == 2 + 1 + 13
    assert lines[2].split() == ["features.12", "######"]
    assert sum(line.count("#") for line in lines) == 10
    assert sum(line.split()[-1].count(".") for line in lines[1:-1]) == len(names) - 10


def test_the_strip_looks_behind_a_common_prefix() -> None:
    assert "a ##" in Plan.of(
        network(["model.a.weight", "model.a.bias", "model.b.weight"]), ["model.a.weight", "model.a.bias"]
    ).strip().replace("model.", "")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(case=cases(most=14), share=st.floats(0.2, 1.0))
def test_why_is_right_about_every_tensor(case: Case, share: float) -> None:
    profile, scores = case
    budget = Budget("seconds", profile.floor_s + share * (profile.full_step_s - profile.floor_s))
    try:
        plan = select(profile, scores, budget=budget, gap=0.0)
    except (BudgetError, ConfigError):
        assume(False)
    read = Plan.from_json(plan.to_json())
    for name in profile.names:
        why = plan.why(name)
        assert read.why(name, profile) == why
        assert str(why).startswith(name)
        assert why.score == scores[name]
        rest = [n for n in plan.trainable if n != name]
        assert why.price_s == pytest.approx(profile.step_s([*rest, name]) - profile.step_s(rest))
        if name in plan.trainable:
            assert why.trained
            assert all(profile.step_s([*rest, other]) <= budget.value for other in why.frees_for)
            # One for one, nothing that its room would let in is worth more: the plan is optimal.
            assert all(scores[other] <= scores[name] * (1 + 1e-9) for other in why.frees_for)
        elif scores[name] > 0:
            left = [n for n in plan.trainable if n not in why.displaces]
            if why.displaces:
                assert profile.step_s([*left, name]) <= budget.value
                assert why.displaced_score == pytest.approx(sum(scores[n] for n in why.displaces))
                assert why.displaced_score >= scores[name] * (1 - 1e-9)
            else:
                assert profile.step_s([name]) > budget.value
        else:
            assert "would not lower the loss" in str(why)


def test_why_of_pinned_unknown_and_unscored_tensors(case: Case, plan: Plan) -> None:
    profile, _ = case
    assert "pinned" in str(plan.why(profile.graph.head[0]))
    with pytest.raises(ProfileError, match=r"no\.such"):
        plan.why("no.such")
    with pytest.raises(ConfigError, match="profile"):
        Plan.from_json(plan.to_json()).why(profile.names[0])
    by_hand = Plan.of(profile, profile.names[:2])
    assert "no score was given" in str(by_hand.why(profile.names[0]))
    assert "no score was given" in str(by_hand.why(profile.names[-1]))
