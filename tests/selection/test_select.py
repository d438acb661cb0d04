"""`et.select` against brute force, against the integer programme, and by its properties."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastictrainer.budget import Budget
from elastictrainer.errors import BudgetError
from elastictrainer.graph import Graph, Node, TensorInfo
from elastictrainer.profiling.profile import Lane, Memory, Profile, Residual
from elastictrainer.selection import select
from elastictrainer.selection.milp import select_milp
from tests.selection.graphs import KINDS, Wires, cases, priced, scored
from tests.selection.oracles import brute_force

Case = tuple[Profile, dict[str, float]]
relaxed = settings(deadline=None, max_examples=60, derandomize=True)
shares = st.floats(0.0, 1.05)


def between(profile: Profile, share: float) -> Budget:
    """A budget this far from the floor to the full step."""
    return Budget("seconds", profile.floor_s + share * (profile.full_step_s - profile.floor_s) + 1e-9)


def bytes_between(profile: Profile, share: float) -> int:
    base = profile.memory.base_bytes
    return base + 1 + int(share * (profile.peak_bytes(profile.names) - base))


def check(case: Case, budget: Budget | None, memory: int | None, pinned: tuple[str, ...] = ()) -> None:
    """The plan is what brute force finds, is said to be, and keeps its limits; a refusal is one there too."""
    profile, scores = case
    seconds = budget.value if budget else None
    best, found = brute_force(profile, scores, seconds=seconds, limit_bytes=memory, pinned=pinned)
    if not found:
        with pytest.raises((BudgetError, ValueError)):
            select(profile, scores, budget=budget, memory=memory, pin=pinned, gap=0.0)
        return
    plan = select(profile, scores, budget=budget, memory=memory, pin=pinned, gap=0.0)
    assert plan.score == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert plan.optimal
    assert plan.gap == pytest.approx(0.0, abs=1e-9)
    assert set(pinned) <= set(plan.trainable)
    assert plan.step_s == profile.step_s(plan.trainable)
    assert plan.peak_bytes == profile.peak_bytes(plan.trainable)
    assert seconds is None or plan.step_s <= seconds
    assert memory is None or plan.peak_bytes <= memory


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(data=st.data(), share=shares)
def test_equals_brute_force_in_time(kind: str, data: st.DataObject, share: float) -> None:
    case = data.draw(cases(kinds=(kind,)))
    check(case, between(case[0], share), None)


@relaxed
@given(case=cases(most=10), share=shares, which=st.integers(0, 9))
def test_equals_brute_force_with_a_pinned_tensor(case: Case, share: float, which: int) -> None:
    names = case[0].names
    check(case, between(case[0], share), None, pinned=(names[which % len(names)],))


@relaxed
@given(case=cases(most=10, lanes=2), share=shares)
def test_equals_brute_force_on_two_clocks(case: Case, share: float) -> None:
    check(case, between(case[0], share), None)


@relaxed
@given(case=cases(most=10), share=shares)
def test_equals_brute_force_in_memory(case: Case, share: float) -> None:
    check(case, None, bytes_between(case[0], share))


@relaxed
@given(case=cases(most=10, lanes=2), share=shares, of_memory=shares)
def test_equals_brute_force_in_time_and_memory(case: Case, share: float, of_memory: float) -> None:
    check(case, between(case[0], share), bytes_between(case[0], of_memory))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tangle"])
def test_equals_the_integer_programme_at_200_tensors(kind: str) -> None:
    for seed in range(2):
        rng = np.random.default_rng(seed)
        profile = priced(KINDS[kind](rng, 200), rng)
        scores = scored(profile, rng)
        budget = between(profile, 0.4)
        names, bound = select_milp(profile, scores, budget_s=budget.value, gap=1e-7)
        best = sum(scores[name] for name in names)
        plan = select(profile, scores, budget=budget)
        assert plan.optimal
        assert plan.gap is not None
        assert plan.gap < 0.005
        assert plan.score is not None
        assert plan.score <= bound * (1 + 1e-6)
        assert best <= plan.score / (1 - plan.gap) * (1 + 1e-6)
        finest = select(profile, scores, budget=budget, gap=0.0)
        assert finest.score == pytest.approx(best, rel=1e-6)  # made as fine as it gets, it is the same


def test_equals_the_integer_programme_in_time_and_memory_at_100_tensors() -> None:
    for seed, kind in enumerate(("chain", "residual", "weight_norm", "tied")):
        rng = np.random.default_rng(seed)
        profile = priced(KINDS[kind](rng, 100), rng)
        scores = scored(profile, rng)
        budget, memory = between(profile, 0.5), bytes_between(profile, 0.5)
        names, bound = select_milp(profile, scores, budget_s=budget.value, memory_bytes=memory, gap=1e-6)
        plan = select(profile, scores, budget=budget, memory=memory)
        assert plan.score is not None
        assert plan.gap is not None
        assert plan.score <= bound * (1 + 1e-5)
        assert sum(scores[name] for name in names) <= plan.score / (1 - plan.gap) * (1 + 1e-5)
        assert plan.peak_bytes <= memory


@relaxed
@given(case=cases(most=30), share=st.floats(0.1, 1.0), more=st.floats(0.0, 0.5))
def test_more_budget_is_never_worth_less(case: Case, share: float, more: float) -> None:
    profile, scores = case
    try:
        small = select(profile, scores, budget=between(profile, share), gap=0.0)
    except (BudgetError, ValueError):
        assume(False)
    large = select(profile, scores, budget=between(profile, share + more), gap=0.0)
    assert large.score >= small.score * (1 - 1e-9)


@relaxed
@given(case=cases(most=30), share=st.floats(0.2, 1.0), power=st.integers(-20, 20))
def test_scaling_scores_changes_nothing(case: Case, share: float, power: int) -> None:
    profile, scores = case
    scaled = {name: score * 2.0**power for name, score in scores.items()}
    assert outcome(profile, scaled, between(profile, share)) == outcome(profile, scores, between(profile, share))


@relaxed
@given(case=cases(most=30), ratio=st.floats(0.2, 1.0), power=st.integers(-10, 10))
def test_scaling_time_changes_nothing(case: Case, ratio: float, power: int) -> None:
    profile, scores = case
    assert outcome(profile.scaled(2.0**power), scores, Budget("ratio", ratio)) == outcome(
        profile, scores, Budget("ratio", ratio)
    )


@relaxed
@given(case=cases(most=30), ratio=st.floats(0.2, 1.0), of_scores=st.floats(1e-6, 1e6), of_time=st.floats(1e-6, 1e6))
def test_scaling_by_any_factor_is_worth_the_same(case: Case, ratio: float, of_scores: float, of_time: float) -> None:
    """Factors that round: then a tie may be broken otherwise, but what the plan is worth stays."""
    profile, scores = case
    scaled = {name: score * of_scores for name, score in scores.items()}
    try:
        plan = select(profile, scores, budget=ratio, gap=0.0)
    except (BudgetError, ValueError):
        assume(False)
    same = select(profile.scaled(of_time), scaled, budget=ratio, gap=0.0)
    assert same.score == pytest.approx(plan.score * of_scores, rel=1e-9)


def outcome(profile: Profile, scores: dict[str, float], budget: Budget) -> tuple[str, ...] | str:
    try:
        return select(profile, scores, budget=budget).trainable
    except (BudgetError, ValueError) as error:
        return type(error).__name__


@relaxed
@given(case=cases(most=20), share=st.floats(0.3, 1.0))
def test_pure_and_deterministic(case: Case, share: float) -> None:
    profile, scores = case
    try:
        first = select(profile, scores, budget=between(profile, share))
    except (BudgetError, ValueError):
        assume(False)
    again = Profile.from_json(profile.to_json())
    backwards = dict(reversed(scores.items()))
    second = select(again, json.loads(json.dumps(backwards)), budget=between(profile, share))
    assert first == second
    assert first.to_json() == second.to_json()


def published(t_dy: list[float], t_dw: list[float]) -> Profile:
    """A chain in which the deepest trained tensor pays its own t_dy, as the published code counts."""
    count = len(t_dy)
    nodes = tuple(Node("Op", f"layer{i}", (i + 1,) if i + 1 < count else (), (i,)) for i in range(count))
    graph = Graph(nodes, tuple(TensorInfo(f"layer{i}.weight", (1,), "float32", 4) for i in range(count)))
    zero = np.zeros(count)
    lane = Lane("cpu", 0.0, 0.0, zero, zero, np.asarray(t_dy), np.asarray(t_dw), zero)
    memory = Memory(0, (), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64))
    return Profile(graph, (lane,), memory, Residual(0.0, 0.0, 0))


def test_the_published_recurrence_misses_this_optimum() -> None:
    profile = published([1, 3, 2, 3], [2, 1, 1, 1])
    scores = dict(zip(profile.names, [7.0, 1.0, 8.0, 6.0]))
    plan = select(profile, scores, budget="8s")
    assert plan.trainable == ("layer1.weight", "layer2.weight")
    assert plan.score == 9.0
    assert plan.step_s == 8.0


@pytest.mark.parametrize("kind", KINDS)
def test_everything_trains_at_the_full_budget(kind: str) -> None:
    """The published code can never select the tensor nearest the input."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        profile = priced(KINDS[kind](rng, 30), rng, lanes=1 + seed % 2)
        plan = select(profile, dict.fromkeys(profile.names, 1.0), budget=1.0)
        assert plan.trainable == profile.names
        assert plan.ratio == 1.0
        assert plan.gap == 0.0
        only_deepest = dict.fromkeys(profile.names, -1.0) | {profile.names[-1]: 1.0}
        assert select(profile, only_deepest, budget=1.0).trainable == (profile.names[-1],)


def test_tensors_that_cost_nothing_change_nothing_at_the_full_budget() -> None:
    """Sums of floats: what is left without them must not come out a last bit above what the full step costs."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        made = priced(KINDS["residual"](rng, 40), rng)
        free = rng.random(len(made.names)) < 0.3
        lane = made.lanes[0]
        profile = replace(made, lanes=(replace(lane, dw_s=lane.dw_s * ~free, opt_s=lane.opt_s * ~free),))
        costly = tuple(name for name, is_free in zip(profile.names, free) if not is_free)
        scores = dict.fromkeys(profile.names, -1.0) | dict.fromkeys(costly, 1.0)
        assert select(profile, scores, budget=1.0).trainable == costly
        assert select(profile, scores, budget=1.0, pin=costly).trainable == costly


def small(costs: list[float], scores: list[float]) -> tuple[Profile, dict[str, float]]:
    """One operation with all the tensors on it, which cost these seconds each and nothing else."""
    count = len(costs)
    nodes = (Node("Op", "", (), tuple(range(count))),)
    graph = Graph(nodes, tuple(TensorInfo(f"layer{k}.weight", (1,), "float32", 4) for k in range(count)))
    zero = np.zeros(1)
    lane = Lane("cpu", 1.0, 0.0, zero, zero, zero, np.asarray(costs), np.zeros(count))
    memory = Memory(0, (), np.zeros(1, dtype=np.int64), np.zeros(count, dtype=np.int64))
    profile = Profile(graph, (lane,), memory, Residual(0.0, 0.0, 0))
    return profile, dict(zip(profile.names, scores))


def test_what_is_over_by_less_than_the_solver_can_tell_is_not_bought_and_its_room_is_spent() -> None:
    profile, scores = small([1.0 + 1e-10, 0.5, 0.4, 0.3], [10.0, 3.0, 2.0, 1.0])
    plan = select(profile, scores, budget="2s", gap=0.0)
    assert plan.trainable == ("layer1.weight", "layer2.weight")
    assert plan.step_s <= 2.0
    assert not plan.optimal  # what lies between the budget and the solver's tolerance was not searched
    assert plan.gap is not None
    assert plan.gap > 0
    assert "although it fits" not in "".join(str(plan.why(name)) for name in profile.names)


def test_too_many_closed_sets_are_flagged_and_the_gap_still_holds() -> None:
    """Thirteen branches between two operations have 2**13 closed sets, more than are listed."""
    wires = Wires()
    top = wires.node()
    wires.node(*[wires.node(top, tensors=1) for _ in range(13)], tensors=1)
    rng = np.random.default_rng(0)
    made = priced(wires.graph(), rng)
    lane = replace(made.lanes[0], pass_s=rng.uniform(0.5e-3, 1.5e-3, len(made.graph.nodes)))  # none for nothing
    profile = replace(made, lanes=(lane,))
    scores = scored(profile, rng, negative=0.0)
    budget = between(profile, 0.95)  # the operation below all branches must be within reach, or none of them cross
    plan = select(profile, scores, budget=budget, gap=0.0)
    best, _ = brute_force(profile, scores, seconds=budget.value)
    assert not plan.optimal
    assert plan.score is not None
    assert plan.gap is not None
    assert plan.step_s <= budget.value
    assert plan.score <= best * (1 + 1e-9) <= plan.score / (1 - plan.gap) * (1 + 1e-9)


@pytest.mark.parametrize("seed", [4, 7, 11])
def test_too_many_closed_sets_still_find_a_good_plan(seed: int) -> None:
    """The prefixes alone reach 55% to 69% of the best here; exchanges among all closed sets bring most of the rest."""
    rng = np.random.default_rng(seed)
    profile = priced(KINDS["tangle"](rng, 60), rng)
    scores = scored(profile, rng)
    budget = between(profile, 0.5)
    names, _ = select_milp(profile, scores, budget_s=budget.value, gap=1e-4)
    plan = select(profile, scores, budget=budget)
    assert not plan.optimal
    assert plan.score is not None
    assert plan.score >= 0.95 * sum(scores[name] for name in names)


def test_no_limit_at_all_trains_whatever_helps() -> None:
    rng = np.random.default_rng(0)
    profile = priced(KINDS["residual"](rng, 20), rng)
    scores = scored(profile, rng)
    plan = select(profile, scores)
    assert plan.trainable == tuple(name for name in profile.names if scores[name] > 0)
    assert plan.optimal
    assert plan.budget is None


def test_a_shortcut_is_bought_without_the_main_path() -> None:
    """The residual block's two paths are separate prices: training one must not be charged for the other."""
    # loss -> add -> {expensive main path, cheap shortcut} -> stem
    nodes = (
        Node("Add", "", (1, 2), ()),
        Node("Conv", "main", (3,), (0,)),
        Node("Conv", "short", (3,), (1,)),
        Node("Conv", "stem", (), (2,)),
    )
    graph = Graph(nodes, tuple(TensorInfo(f"{n}.weight", (1,), "float32", 4) for n in ("main", "short", "stem")))
    zero = np.zeros(4)
    lane = Lane("cpu", 1.0, 0.0, zero, zero, np.asarray([0.0, 10.0, 1.0, 1.0]), np.zeros(3), np.zeros(3))
    memory = Memory(0, (), np.zeros(4, dtype=np.int64), np.zeros(3, dtype=np.int64))
    profile = Profile(graph, (lane,), memory, Residual(0.0, 0.0, 0))
    scores = dict(zip(profile.names, (5.0, 1.0, 9.0)))
    assert select(profile, scores, budget="2s").trainable == ("short.weight",)
    assert select(profile, scores, budget="11s").trainable == ("main.weight",)
    assert select(profile, scores, budget="13s").trainable == profile.names


def test_left_over_is_spent() -> None:
    """No tensor that rests would still fit."""
    for seed, kind in enumerate(KINDS):
        rng = np.random.default_rng(seed)
        profile = priced(KINDS[kind](rng, 60), rng)
        scores = scored(profile, rng)
        budget = between(profile, 0.5)
        plan = select(profile, scores, budget=budget)
        for name in profile.names:
            if name not in plan.trainable and scores[name] > 0:
                assert profile.step_s([*plan.trainable, name]) > budget.value * (1 - 1e-9)


def test_gap_is_stated_as_a_share_of_the_bound() -> None:
    rng = np.random.default_rng(3)
    profile = priced(KINDS["chain"](rng, 300), rng)
    scores = scored(profile, rng)
    loose = select(profile, scores, budget=between(profile, 0.5), gap=0.05)
    tight = select(profile, scores, budget=between(profile, 0.5), gap=0.0)
    assert loose.gap is not None
    assert tight.gap is not None
    assert tight.gap <= loose.gap
    assert loose.score is not None
    assert tight.score is not None
    assert loose.score <= tight.score <= loose.score / (1 - loose.gap) * (1 + 1e-9)
    assert math.isfinite(tight.gap)
