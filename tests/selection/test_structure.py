"""The arrangement of groups, and the solver on problems that no graph has: any family of sets."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrainer.selection.exchange import exchanged
from elastictrainer.selection.problem import Problem, as_mask, as_set, bits, fold
from elastictrainer.selection.solve import solve
from elastictrainer.selection.structure import Branch, arrange


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    items, constraints = int(rng.integers(1, 8)), draw(st.integers(1, 3))
    sets = rng.integers(0, 2**items, size=int(rng.integers(0, 10))).tolist()
    price = rng.random((items, constraints)) * 0.5 * rng.choice([0.0, 0.1, 1.0], (items, 1))
    return fold(rng.lognormal(0, 1, items), price, sets, rng.random((len(sets), constraints)) * 0.3)


def best_of(problem: Problem) -> float:
    choices = (np.asarray(choice, dtype=np.bool_) for choice in product((False, True), repeat=problem.items))
    return max(float(problem.value[c].sum()) for c in choices if (problem.cost(c) <= 1 + 1e-9).all())


@settings(deadline=None, max_examples=150, derandomize=True)
@given(problem=problems())
def test_any_family_of_sets_is_solved_exactly(problem: Problem) -> None:
    solution = solve(problem, gap=0.0)
    assert (problem.cost(solution.chosen) <= 1 + 1e-9).all()
    assert solution.value == pytest.approx(best_of(problem), rel=1e-9)
    assert solution.exact
    assert solution.gap == pytest.approx(0.0, abs=1e-9)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(problem=problems())
def test_too_many_closed_sets_fall_back_and_say_so(problem: Problem) -> None:
    """With a limit of one closed set a segment, any crossing falls back: feasible, bounded, and never called exact."""
    solution = solve(problem, gap=0.0, limit=1)
    assert (problem.cost(solution.chosen) <= 1 + 1e-9).all()
    assert solution.value <= best_of(problem) * (1 + 1e-9)
    assert solution.bound >= best_of(problem) * (1 - 1e-9)
    assert solution.exact == arrange(problem, limit=1).exact
    if solution.exact:
        assert solution.value == pytest.approx(best_of(problem), rel=1e-9)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(problem=problems(), prices=st.lists(st.floats(0.0, 3.0), min_size=3, max_size=3))
def test_an_exchange_fits_is_never_worse_and_spends_what_is_left(problem: Problem, prices: list[float]) -> None:
    nothing = np.zeros(problem.items, dtype=np.bool_)
    found = exchanged(problem, nothing, np.asarray(prices[: problem.constraints]), room=1.0)
    assert (problem.cost(found) <= 1 + 1e-9).all()
    assert problem.value[found].sum() <= best_of(problem) * (1 + 1e-9)
    alone = [k for k in range(problem.items) if (problem.cost(np.arange(problem.items) == k) <= 1 - 1e-9).all()]
    assert problem.value[found].sum() >= max((problem.value[k] for k in alone), default=0.0)
    again = exchanged(problem, found, np.asarray(prices[: problem.constraints]), room=1.0)
    assert problem.value[again].sum() == pytest.approx(problem.value[found].sum())


@settings(deadline=None, max_examples=150, derandomize=True)
@given(problem=problems())
def test_whatever_is_on_sale_has_its_groups_paid_once(problem: Problem) -> None:
    # Group g costs 4**g: what was paid, written to base 4, has a digit for each group and shows one that is paid twice.
    marked = replace(problem, group_price=4.0 ** np.arange(len(problem.groups))[:, None])
    seen = np.zeros(problem.items, dtype=np.bool_)

    def walk(branch: Branch, spent: int) -> None:
        at = {-1: spent}
        for s, parent in enumerate(branch.parent.tolist()):
            at[s] = at[parent] + int(branch.price[s, 0])
            digits = [at[s] // 4**g % 4 for g in range(len(problem.groups))]
            assert set(digits) <= {0, 1}
            for k in branch.items[branch.start[s] : branch.start[s + 1]].tolist():
                seen[k] = True
                assert all(digits[g] for g, members in enumerate(problem.groups) if members >> k & 1)
            for side in branch.sides.get(s, ()):
                walk(side, at[s])

    walk(arrange(marked).root, 0)
    assert seen.all()


def test_folding_merges_equal_sets_and_moves_single_ones() -> None:
    problem = fold(
        np.ones(3),
        np.zeros((3, 1)),
        [0b111, 0b111, 0b010, 0b000, 0b011],
        np.asarray([[0.1], [0.2], [0.3], [0.4], [0.0]]),
    )
    assert problem.groups == (0b111,)
    assert problem.group_price == pytest.approx(np.asarray([[0.3]]))
    assert problem.price[:, 0] == pytest.approx([0.0, 0.3, 0.0])


def test_a_long_chain_needs_no_recursion() -> None:
    count = 3000
    everything = (1 << count) - 1
    sets = [everything & ~((1 << k) - 1) for k in range(count)]
    problem = fold(np.ones(count), np.full((count, 1), 1e-4), sets, np.full((count, 1), 5e-4))
    solution = solve(problem)
    assert solution.exact
    assert int(solution.chosen.sum()) == pytest.approx(1 / 6e-4, abs=1)


@given(st.sets(st.integers(0, 90)))
def test_sets_and_masks_are_the_same_thing(members: set[int]) -> None:
    as_bits = sum(1 << m for m in members)
    assert sorted(bits(as_bits)) == sorted(members)
    assert as_set(as_mask(as_bits, 91)) == as_bits
    assert set(np.flatnonzero(as_mask(as_bits, 91)).tolist()) == members
