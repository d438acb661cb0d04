"""The controller on a machine whose clock the test holds: budgets, intervals, feedback, traps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loop_support import Machine, batches, chain_profile, cross_entropy, small_net
from torch import nn

from elastictrainer.errors import BudgetError, CheckpointError, ConfigError, DataError, ProfileError, TrainingError
from elastictrainer.profiling.cache import describe
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime import pricing
from elastictrainer.runtime.controller import Elastic
from elastictrainer.runtime.interval import Interval, similarity
from elastictrainer.runtime.optimizers import make_optimizer


def make(
    machine: Machine | None = None, *, model: nn.Module | None = None, optimizer: str = "sgd", **options: Any
) -> tuple[Elastic, Machine]:
    model = small_net() if model is None else model
    machine = machine or Machine(chain_profile(model))
    options.setdefault("profile", machine.profile)
    options.setdefault("importance", "magnitude")
    elastic = Elastic(
        model,
        make_optimizer(optimizer, model.parameters(), lr=0.01),
        machine.loss_fn,
        clock=machine.clock,
        **options,
    )
    return elastic, machine


def train(elastic: Elastic, machine: Machine, *, epochs: int, data: list[Any]) -> None:
    loader = machine.load(data)
    for _ in range(epochs):
        for batch in elastic.epoch(loader):
            loss = elastic.loss_fn(elastic.model, batch)
            loss.backward()
            elastic.optimizer.step()
            elastic.optimizer.zero_grad()
            assert elastic.plan is not None
            machine.rest_of_step(elastic.plan.trainable)


# -- the budget ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.4, 0.5, 0.7, 0.9])
def test_every_step_keeps_the_budget_on_a_machine_as_profiled(budget: float) -> None:
    elastic, machine = make(budget=budget)
    train(elastic, machine, epochs=6, data=batches(30))
    assert all(event["predicted_ratio"] <= budget + 1e-9 for event in elastic.history if event["reason"] == "first")
    assert budget - 0.02 <= machine.ratio <= budget + 0.01
    assert elastic.ratio == pytest.approx(machine.ratio, abs=1e-3)


def mistaken(factor: float) -> Callable[[tuple[str, ...]], float]:
    """Predictions are right for full steps and off for every other plan: what calibration can leave behind."""
    return lambda trainable: 1.0 if len(trainable) >= 14 else factor


@pytest.mark.parametrize("factor", [0.85, 0.94, 1.06, 1.15])
@pytest.mark.parametrize("budget", [0.45, 0.5, 0.7])
def test_the_run_meets_its_budget_though_the_time_model_is_off(factor: float, budget: float) -> None:
    model = small_net()
    profile = chain_profile(model, error=0.08)
    elastic, machine = make(Machine(profile, mistake=mistaken(factor)), model=model, budget=budget)
    train(elastic, machine, epochs=9, data=batches(60))
    assert budget - 0.02 <= machine.ratio <= budget + 0.01
    blind, other = make(Machine(profile, mistake=mistaken(factor)), model=small_net(), budget=budget, feedback=False)
    train(blind, other, epochs=9, data=batches(60))
    assert abs(other.ratio - budget) > abs(machine.ratio - budget)  # the feedback is what does it


@pytest.mark.parametrize("slow", [1.3, 2.0, 0.7])
def test_a_throttling_machine_leaves_the_ratio_alone(slow: float) -> None:
    model = small_net()
    profile = chain_profile(model)
    throttled = 150 * 0.5 * profile.full_step_s  # after about 150 steps
    elastic, machine = make(
        Machine(profile, slowness=lambda now: 1.0 if now < throttled else slow), model=model, budget="0.5x"
    )
    train(elastic, machine, epochs=9, data=batches(60))
    assert elastic.stats["machine"] == pytest.approx(slow, rel=0.1)
    assert 0.48 <= machine.ratio <= 0.51
    assert elastic.stats["measured_ratio"] == pytest.approx(machine.ratio, abs=0.01)


def test_noise_is_no_reason_to_change_anything() -> None:
    model = small_net()
    profile = chain_profile(model)
    noise = torch.Generator().manual_seed(0)
    jitter = lambda now: 1.0 + 0.03 * float(torch.randn((), generator=noise).clamp(-2, 2))  # noqa: E731
    elastic, machine = make(Machine(profile, slowness=jitter), model=model, budget="0.5x")
    train(elastic, machine, epochs=9, data=batches(60))
    assert elastic.stats["machine"] == pytest.approx(1.0, abs=0.02)
    assert "drift" not in {event["reason"] for event in elastic.history}
    assert 0.48 <= machine.ratio <= 0.51


def test_waiting_for_data_is_part_of_the_step() -> None:
    model = small_net()
    profile = chain_profile(model)
    wait = 0.3 * profile.full_step_s
    elastic, machine = make(Machine(profile, wait_s=wait), model=model, budget="0.6x")
    train(elastic, machine, epochs=6, data=batches(40))
    assert 0.58 <= machine.ratio <= 0.61
    # 0.6 of (full + wait), less the wait itself, is what is left to train with.
    first = elastic.history[0]["predicted_step_s"] - wait
    assert first <= 0.6 * (profile.full_step_s + wait) - wait + 1e-9


def test_a_budget_in_seconds_is_a_step_s() -> None:
    model = small_net()
    profile = chain_profile(model)
    limit = 0.55 * profile.full_step_s
    elastic, machine = make(Machine(profile), model=model, budget=f"{limit}s")
    train(elastic, machine, epochs=3, data=batches(30))
    assert machine.spent_s / 90 == pytest.approx(limit, rel=0.04)


def test_a_budget_below_the_floor_says_what_would_do() -> None:
    elastic, machine = make(budget="0.05x")
    with pytest.raises(BudgetError) as caught:
        train(elastic, machine, epochs=1, data=batches(3))
    assert caught.value.least is not None
    feasible, machine = make(budget=caught.value.least * 1.001)
    train(feasible, machine, epochs=1, data=batches(3))


def test_drift_beyond_the_stated_error_brings_a_new_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_net()
    truth = chain_profile(model)
    stale = chain_profile(model, unit_s=0.15)  # backward taken for half of what it costs
    machine = Machine(truth)
    taken: list[Profile] = []

    def profile(*args: Any, **kwargs: Any) -> Profile:
        taken.append(truth)
        return truth

    monkeypatch.setattr(pricing, "take_profile", profile)
    elastic, _ = make(machine, model=model, profile=stale, budget="0.6x")
    train(elastic, machine, epochs=9, data=batches(60))
    assert len(taken) == 1
    assert [event["reason"] for event in elastic.history].count("drift") == 1
    assert 0.58 <= machine.ratio <= 0.61


def test_stock_is_taken_as_seldom_after_a_restart() -> None:
    """A controller that goes on from a state knows its plan already, and must still wait for a few windows of it."""
    model = small_net()
    elastic, machine = make(model=model, budget="0.6x")
    train(elastic, machine, epochs=1, data=batches(60))
    again, other = make(model=model, budget="0.6x", profile=None)
    again.load_state_dict(json.loads(json.dumps(elastic.state_dict())))
    timed: list[int] = []
    real = again._time_forward
    again._time_forward = lambda batch: (timed.append(again.steps), real(batch))[1]  # type: ignore[method-assign]
    train(again, other, epochs=1, data=batches(60))
    assert 1 <= len(timed) <= 3
    assert timed[0] >= 60 + 3


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("batch", [[[32, 8], [8, 1], "torch.float32", "cpu"], [[32], [1], "torch.int64", "cpu"]], "batch 32x8"),
        ("threads", 96, "threads 96"),
        ("torch", "1.0", "torch 1.0"),
        ("bn", "track", "bn track"),
        ("autocast", "bf16", "autocast bf16"),
        ("device", "another machine", "device another machine"),
    ],
)
def test_a_profile_of_other_steps_is_refused(key: str, value: Any, word: str) -> None:
    """Trap 9: prices of another batch size, precision, device or release would be silently wrong."""
    model = small_net()
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.01)
    batch = batches(1)[0]
    here = describe(
        model, dict(model.named_parameters()), batch, loss_fn=cross_entropy, optimizer=optimizer, bn="frozen"
    )
    fits = dataclasses.replace(chain_profile(model), context=here)
    next(iter(Elastic(model, optimizer, cross_entropy, profile=fits, importance="magnitude").epoch([batch])))
    wrong = dataclasses.replace(fits, context={**here, key: value})
    with pytest.raises(ProfileError, match=f"of other steps than these: {word}, and here "):
        next(iter(Elastic(model, optimizer, cross_entropy, profile=wrong, importance="magnitude").epoch([batch])))


def test_a_loop_that_does_more_than_its_step_is_not_profiled_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_net()
    truth = chain_profile(model)
    machine = Machine(truth, mistake=lambda trainable: 1.6)
    taken: list[int] = []

    def profile(*args: Any, **kwargs: Any) -> Profile:
        taken.append(1)
        return truth

    monkeypatch.setattr(pricing, "take_profile", profile)
    elastic, _ = make(machine, model=model, profile=truth, budget="0.9x")
    train(elastic, machine, epochs=6, data=batches(60))
    assert len(taken) <= 2


# -- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "steps"),
    [(3, [0, 30, 60]), (1, list(range(0, 80, 10))), ("25steps", [0, 25, 50, 75]), (0.5, list(range(0, 80, 5)))],
)
def test_replans_when_due(interval: Any, steps: list[int]) -> None:
    elastic, machine = make(interval=interval, feedback=False)
    train(elastic, machine, epochs=8, data=batches(10))
    assert [event["step"] for event in elastic.history] == steps


@pytest.mark.parametrize("interval", ["7steps", 0.5])
def test_steps_are_counted_to_the_plan_that_they_were_of(interval: Any) -> None:
    """Also where a plan ends in the middle of a window: flops and ratios are sums over plans."""
    elastic, machine = make(policy="random", budget="0.5x", interval=interval, deterministic=True)
    train(elastic, machine, epochs=3, data=batches(14))
    assert [event["steps"] for event in elastic.history] == [7] * 6
    for event in elastic.history:
        assert event["spent_s"] == pytest.approx(7 * event["predicted_step_s"])


def test_auto_replans_when_the_scores_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic, machine = make(interval="auto", feedback=False)
    names = machine.profile.names
    alike = dict.fromkeys(names, 1.0)
    other = {name: float(index % 2) for index, name in enumerate(names)}  # cosine 1/sqrt(2) to the first
    answers = iter([alike, alike, other, other, alike])
    monkeypatch.setattr(Elastic, "_probe", lambda self, batches: dict(next(answers)))
    train(elastic, machine, epochs=5, data=batches(4))
    assert [event["epoch"] for event in elastic.history] == [0, 2, 4]
    assert elastic.history[1]["similarity"] == pytest.approx(0.5**0.5, abs=0.02)


def test_every_batch_is_trained_on_once_and_in_order() -> None:
    elastic, machine = make(interval="7steps", probe_batches=4)
    data = batches(10)
    seen = []
    for _ in range(3):
        for batch in elastic.epoch(machine.load(data)):
            seen.append(next(i for i, b in enumerate(data) if b is batch))
            machine.rest_of_step(elastic.plan.trainable)  # type: ignore[union-attr]
    assert seen == list(range(10)) * 3


def test_an_epoch_that_is_left_early_is_over() -> None:
    """`break` after so many batches is how many loops make an epoch short; plans go on changing all the same."""
    elastic, machine = make(interval=2, feedback=False)
    for _ in range(5):
        for number, _ in enumerate(elastic.epoch(machine.load(batches(10)))):
            if number == 5:
                break
    assert [event["epoch"] for event in elastic.history] == [0, 2, 4]
    assert [event["step"] for event in elastic.history] == [0, 12, 24]


def test_an_epoch_that_a_state_was_in_goes_on() -> None:
    elastic, machine = make(interval=2, feedback=False)
    for number, _ in enumerate(elastic.epoch(machine.load(batches(10)))):
        if number == 5:
            state = elastic.state_dict()
            break
    again, machine = make(interval=2, feedback=False)
    again.load_state_dict(state)
    for data in (batches(4), batches(10), batches(10)):
        list(again.epoch(machine.load(data)))
    assert [event["step"] for event in again.history] == [0, 20]


def test_a_loss_that_is_not_finite_in_a_probe_says_before_which_step() -> None:
    elastic, machine = make(importance="gradient", interval="7steps")
    data = batches(10)
    data[8] = (torch.full_like(data[8][0], float("nan")), data[8][1])
    with pytest.raises(TrainingError, match=r"in the probe before step 8: the loss of batches\[1\] is nan"):
        for _ in elastic.epoch(machine.load(data)):
            pass


def test_probes_are_drawn_anew_and_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 11: importance on one fixed batch."""
    elastic, machine = make(interval=1, probe_batches=3)
    probed: list[list[Any]] = []
    real = Elastic._probe
    monkeypatch.setattr(Elastic, "_probe", lambda self, some: (probed.append(list(some)), real(self, some))[1])
    for epoch in range(3):
        train(elastic, machine, epochs=1, data=batches(5, seed=epoch))
    assert [len(some) for some in probed] == [3, 3, 3]
    assert len({id(some[0]) for some in probed}) == 3


# -- traps -----------------------------------------------------------------------------------------------------------


def test_nothing_happens_before_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 1: selecting in a constructor. The optimizer may even be given its tensors after the controller is made."""
    model = small_net()
    optimizer = make_optimizer("sgd", list(model.parameters())[:1], lr=0.01)
    flags = [p.requires_grad for p in model.parameters()]
    elastic = Elastic(model, optimizer, cross_entropy, profile=chain_profile(model), importance="magnitude")
    assert [p.requires_grad for p in model.parameters()] == flags
    assert elastic.plan is None
    optimizer.add_param_group({"params": list(model.parameters())[1:]})
    for batch in elastic.epoch(batches(3)):
        cross_entropy(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert elastic.plan is not None
    assert len(elastic.plan.trainable) > 1


def test_param_groups_are_never_edited() -> None:
    """Trap 2."""
    elastic, machine = make(interval=1, budget="0.5x")
    held = [id(p) for group in elastic.optimizer.param_groups for p in group["params"]]
    train(elastic, machine, epochs=4, data=batches(6))
    assert [id(p) for group in elastic.optimizer.param_groups for p in group["params"]] == held


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_what_rests_does_not_move_and_what_trains_does(optimizer: str) -> None:
    """Trap 3, through the controller, with plans that change."""
    elastic, machine = make(optimizer=optimizer, policy="random", interval=1, budget="0.5x", feedback=False)
    model = elastic.model
    plans = set()
    for _ in range(5):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        train(elastic, machine, epochs=1, data=batches(4))
        assert elastic.plan is not None
        plans.add(elastic.plan.id)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]) == (name not in elastic.plan.trainable), name
    assert len(plans) > 1


def test_undo_restores_the_flags() -> None:
    elastic, machine = make(budget="0.5x")
    next(elastic.model.parameters()).requires_grad_(False)
    with elastic:
        train(elastic, machine, epochs=1, data=batches(3))
    flags = [p.requires_grad for p in elastic.model.parameters()]
    assert flags == [False] + [True] * (len(flags) - 1)


def test_an_empty_loader_is_an_error() -> None:
    """Trap 12: never an empty silent run."""
    elastic, machine = make()
    with pytest.raises(DataError, match="no batch"):
        train(elastic, machine, epochs=1, data=[])


def test_a_profile_of_another_model_is_refused() -> None:
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    elastic, machine = make(profile=chain_profile(other))
    with pytest.raises(ProfileError, match="another model"):
        train(elastic, machine, epochs=1, data=batches(2))


@pytest.mark.parametrize("policy", ["full", "head", "bn_bias", "suffix", "random", "elastic"])
def test_every_policy_runs_and_says_what_it_cost(policy: str) -> None:
    elastic, machine = make(policy=policy, importance="elastic", budget="0.6x")
    train(elastic, machine, epochs=4, data=batches(8))
    stats = elastic.stats
    assert stats["steps"] == 32
    assert stats["measured_ratio"] == pytest.approx(machine.ratio, abs=0.02)
    assert (stats["budget"] is None) == (policy in ("full", "head", "bn_bias"))
    assert len(elastic.history) == (1 if policy in ("full", "head", "bn_bias", "suffix") else len(elastic.history))


# -- state -----------------------------------------------------------------------------------------------------------


def test_state_is_plain_and_a_controller_goes_on_from_it() -> None:
    def fresh() -> tuple[Elastic, Machine]:
        return make(policy="random", interval=2, budget="0.5x", deterministic=True)

    whole, machine = fresh()
    train(whole, machine, epochs=6, data=batches(5))
    first, machine = fresh()
    train(first, machine, epochs=3, data=batches(5))
    state = json.loads(json.dumps(first.state_dict()))
    second, machine = fresh()
    second.load_state_dict(state)
    train(second, machine, epochs=3, data=batches(5))
    assert [e["id"] for e in second.history] == [e["id"] for e in whole.history]
    assert [e["step"] for e in second.history] == [e["step"] for e in whole.history]


@pytest.mark.parametrize("stop", [1, 3, 7, 12])
def test_a_state_from_within_a_window_has_every_step_in_its_account(stop: int) -> None:
    """A run that is killed has only its last state: what was in no window yet would never be counted."""
    data = batches(14)
    first, machine = make(policy="suffix", budget="0.5x")
    for batch in first.epoch(machine.load(data)):
        first.loss_fn(first.model, batch).backward()
        machine.rest_of_step(first.plan.trainable)  # type: ignore[union-attr]
        if first.steps == stop:
            with first.pause():
                machine.now += 100.0  # a checkpoint being written
                state = json.loads(json.dumps(first.state_dict()))
            spent_s = machine.spent_s
            break
    second, machine = make(policy="suffix", budget="0.5x")
    second.load_state_dict(state)
    assert second.stats["steps"] == stop
    assert second.stats["spent_s"] == pytest.approx(spent_s)
    train(second, machine, epochs=1, data=data[stop:])
    assert second.stats["steps"] == sum(event["steps"] for event in second.history) == 14
    assert second.stats["spent_s"] == pytest.approx(spent_s + machine.spent_s)


def test_deterministic_decisions_do_not_look_at_the_clock() -> None:
    ids = []
    for slow in (1.0, 3.0):
        model = small_net()
        machine = Machine(chain_profile(model), slowness=lambda now, slow=slow: slow, wait_s=slow)
        elastic, _ = make(machine, model=model, deterministic=True, interval=1, budget="0.5x", importance="elastic")
        train(elastic, machine, epochs=4, data=batches(30))
        ids.append([event["id"] for event in elastic.history])
    assert ids[0] == ids[1]


def test_foreign_state_is_refused() -> None:
    elastic, _ = make()
    with pytest.raises(CheckpointError, match="not a controller's state"):
        elastic.load_state_dict({})
    full, _ = make(policy="full")
    with pytest.raises(CheckpointError, match="policy 'full'"):
        elastic.load_state_dict(full.state_dict())


def test_overheads_are_charged_and_pauses_are_not_training() -> None:
    elastic, machine = make(budget="0.5x", importance="elastic")
    loader = machine.load(batches(10))
    for batch in elastic.epoch(loader):
        elastic.loss_fn(elastic.model, batch).backward()
        machine.rest_of_step(elastic.plan.trainable)  # type: ignore[union-attr]
        with elastic.pause():
            machine.now += 100.0
    assert elastic.stats["spent_s"] == pytest.approx(machine.spent_s)
    assert elastic.overhead_s["probe"] >= 6 * machine.profile.forward_s  # six batches went forward


@pytest.mark.parametrize("text", ["x", 0, "0steps", "2.5steps", -1, True])
def test_intervals_that_cannot_be_read(text: Any) -> None:
    with pytest.raises(ConfigError, match="interval"):
        Interval.parse(text)


def test_similarity_of_nothing() -> None:
    assert similarity({"a": 0.0}, {"a": 0.0}) == 1.0
    assert similarity({"a": 0.0}, {"a": 1.0}) == 0.0
