"""The grid: what is run, in which turn, where it is kept, and everything wrong with a request at once."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer.compare import Grid, Method
from elastictrainer.errors import ConfigError
from elastictrainer.policies import POLICIES

MODELS = ("torchvision/resnet18", "torchvision/resnet50", "builtin")


def grid(**changes: object) -> Grid:
    options: dict[str, object] = {
        "models": MODELS[:1], "data": ["builtin"], "policies": ["full", "elastic"], "rates": [0.01], "epochs": 12,
    }  # fmt: skip
    return Grid.of(**{**options, **changes})  # type: ignore[arg-type]


@given(
    models=st.lists(st.sampled_from(MODELS), min_size=1, max_size=3),
    policies=st.lists(st.sampled_from([*POLICIES, "shorter"]), min_size=1, max_size=4),
    importances=st.lists(st.sampled_from(["elastic", "magnitude", "fisher"]), min_size=1, max_size=2),
    budgets=st.lists(st.sampled_from(["0.5x", "0.7x", "0.5"]), min_size=1, max_size=3),
    rates=st.lists(st.sampled_from([0.001, 0.01, 0.1]), min_size=1, max_size=3),
    seeds=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_every_combination_once_and_each_in_a_folder_of_its_own(models, policies, importances, budgets, rates, seeds):
    made = grid(models=models, policies=policies, importances=importances, budgets=budgets, rates=rates, seeds=seeds)
    limits = {"0.5x" if b == "0.5" else b for b in budgets}
    expected = set()
    for name in policies:
        if name == "shorter":
            expected |= {Method("full", None, limit, shorter=True) for limit in limits}
            continue
        policy = POLICIES[name]
        scored = set(importances) if policy.needs_scores and policy.importance is None else {None}
        expected |= {Method(name, i, b) for i, b in product(scored, limits if policy.within_budget else {None})}
    assert set(made.methods) == expected
    cells = []
    for workload in made.workloads:
        trials = made.trials(workload)
        assert len(trials) == (len(expected) * len(set(rates)) if len(set(rates)) > 1 else 0)
        finals = made.finals(workload, dict.fromkeys(made.methods, made.rates[0]))
        assert Counter((c.method, c.seed) for c in finals) == Counter(product(expected, set(seeds)))
        cells += [*trials, *finals]
    assert len({cell.folder for cell in cells}) == len(cells)
    assert len({cell.name for cell in cells}) == len(cells)


def test_methods_take_turns_and_another_begins_at_every_seed() -> None:
    made = grid(policies=["full", "head", "elastic"], seeds=[0, 1, 2, 3], rates=[0.1, 0.2])
    workload = made.workloads[0]
    finals = made.finals(workload, dict.fromkeys(made.methods, 0.1))
    for start in range(0, len(finals), 3):
        assert {cell.method for cell in finals[start : start + 3]} == set(made.methods)
        assert len({cell.seed for cell in finals[start : start + 3]}) == 1
    assert [finals[start].method.policy for start in range(0, 12, 3)] == ["full", "head", "elastic", "full"]
    trials = made.trials(workload)
    assert [cell.method.policy for cell in trials[:3]] == ["full", "head", "elastic"]
    assert {cell.epochs for cell in trials} == {4}


def test_shorter_is_full_training_for_the_epochs_that_the_budget_pays_for() -> None:
    made = grid(policies=["shorter"], budgets=["0.35x", "0.5x", "0.7x"])
    cells = made.finals(made.workloads[0], dict.fromkeys(made.methods, 0.1))
    assert [cell.epochs for cell in cells] == [4, 6, 8]
    words = cells[0].arguments()
    assert words[words.index("--policy") + 1] == "full"
    assert "--budget" not in words
    assert words[words.index("--epochs") + 1] == "4"


def test_trials_never_see_the_test_images() -> None:
    made = grid(rates=[0.1, 0.2])
    assert all("--no-test" in cell.arguments() for cell in made.trials(made.workloads[0]))
    finals = made.finals(made.workloads[0], dict.fromkeys(made.methods, 0.1))
    assert not any("--no-test" in cell.arguments() for cell in finals)


def test_workloads_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "birds").mkdir(parents=True)
    made = grid(data=[str(tmp_path / "a" / "birds"), str(tmp_path / "b" / "birds")])
    folders = [made.finals(w, dict.fromkeys(made.methods, 0.1))[0].folder.parent.name for w in made.workloads]
    assert folders == ["resnet18_on_birds", "resnet18_on_birds-2"]


def test_weights_are_for_all_models_or_one_for_each() -> None:
    made = grid(models=MODELS[:2], weights=["default"])
    assert [w.weights for w in made.workloads] == ["default", "default"]
    made = grid(models=MODELS[:2], weights=["a.pth", "b.pth"])
    assert [w.weights for w in made.workloads] == ["a.pth", "b.pth"]
    assert [w.weights for w in grid(models=MODELS[:2]).workloads] == [None, None]


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        grid(
            models=["resnet5000"], data=["/nowhere"], policies=["elastik", "shorter"], importances=["elastc"],
            budgets=["half", "30min", "0.01x"], rates=["fast", -1.0], seeds=["x"], weights=["a", "b", "c"],
            epochs=12, tune_epochs=13,
        )  # fmt: skip
    message = str(caught.value)
    for word in (
        "resnet5000", "/nowhere", "'elastik'", "'elastc'", "'half'", "30min of 12 epochs", "0.01x of 12 epochs",
        "'fast'", "-1.0", "'x'", "3 weights for 1 models", "tune-epochs 13",
    ):  # fmt: skip
        assert word in message, f"{word} is not in: {message}"
    assert "\n" not in message


@pytest.mark.parametrize("absent", ["models", "data", "policies", "rates", "seeds"])
def test_nothing_of_a_kind_is_an_error(absent: str) -> None:
    with pytest.raises(ConfigError, match="was given"):
        grid(**{absent: []})
