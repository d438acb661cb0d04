"""Plans with channels state their seconds, and what fewer channels do not save is trained whole."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import elastictrainer as et
from elastictrainer.backward import BackwardPrices, Clock
from elastictrainer.importance.potential import Potential, fisher_potential

SHARES = (0.25, 0.5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.act, self.head = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.deep(self.act(self.stem(x)))).mean((2, 3)))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1).mean()


Case = tuple[BackwardPrices, Potential]


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prices = et.price_backward(model, loss_fn, x, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    timed = et.time_backward(prices, model, loss_fn, x, optimizer=optimizer, effort=12)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not optimizer.state
    return timed, fisher_potential(model, loss_fn, [x])


def with_rows(case: Case, ratio: float) -> BackwardPrices:
    """As if so many channels of any layer took this much of what all of them take."""
    prices = case[0]
    assert prices.clock is not None
    return replace(prices, clock=replace(
        prices.clock, shares=SHARES, rows={layer.weight: (ratio, ratio) for layer in prices.layers}
    ))  # fmt: skip


def test_every_layer_is_measured_and_plans_state_seconds(case: Case) -> None:
    prices, potential = case
    clock = prices.clock
    assert clock is not None
    assert clock.rows.keys() == {layer.weight for layer in prices.layers}
    assert all(value > 0 for values in clock.rows.values() for value in values)
    plan = et.select_channels(prices, potential, compute="60%")
    assert plan.timed
    assert plan.full_step_s == clock.full_step_s
    assert "a step" in str(plan)
    again = BackwardPrices.from_json(prices.to_json())
    assert again.to_json() == prices.to_json()
    assert et.select_channels(again, potential, compute="60%").step_s == plan.step_s


def test_a_plan_that_saves_no_time_says_so(case: Case) -> None:
    prices, potential = case
    assert prices.clock is not None
    plans = [
        et.select_channels(replace(prices, clock=replace(prices.clock, full_step_s=full_s)), potential, compute="60%")
        for full_s in (1e-9, 1e9)
    ]
    assert ["as long as full training" in str(plan) for plan in plans] == [True, False]


def test_without_a_clock_nothing_is_stated_and_old_files_are_read(case: Case) -> None:
    prices = replace(case[0], clock=None)
    assert math.isnan(et.select_channels(prices, case[1], compute="60%").step_s)
    assert BackwardPrices.from_json(prices.to_json()).clock is None


@given(share=st.floats(0.01, 0.99), ratio=st.floats(0.1, 3.0))
@settings(deadline=None)
def test_a_part_takes_its_ratio_of_the_gradient_and_nothing_else(case: Case, share: float, ratio: float) -> None:
    clock = with_rows(case, ratio).clock
    assert clock is not None
    names, weight = clock.profile.names, "stem.weight"
    assert clock.ratio(weight, share) == pytest.approx(ratio)
    assert clock.ratio(weight, 1.0) == 1.0
    assert clock.step_s(names, {}) == clock.profile.step_s(names)
    (lane,) = clock.profile.lanes
    gained = (1 - ratio) * lane.dw_s[clock.profile.graph.index[weight]]
    assert clock.step_s(names, {weight: share}) == pytest.approx(clock.profile.step_s(names) - gained)


def test_between_measured_shares_a_line_and_beyond_them_the_last(case: Case) -> None:
    clock = Clock(case[0].profile, SHARES, {"w": (0.4, 0.8)}, 1.0)
    assert [clock.ratio("w", share) for share in (0.1, 0.25, 0.375, 0.9)] == pytest.approx([0.4, 0.4, 0.6, 0.8])


@given(memory=st.integers(600, 40_000), compute=st.floats(0.05, 1.0), ratio=st.sampled_from([0.3, 1.0, 2.5]))
@settings(deadline=None, max_examples=60)
def test_slower_in_part_trains_whole_where_that_fits(case: Case, memory: int, compute: float, ratio: float) -> None:
    prices, potential = with_rows(case, ratio), case[1]
    try:
        plan = et.select_channels(prices, potential, memory=memory, compute=compute)
    except et.BudgetError:
        return
    plain = et.select_channels(replace(prices, clock=None), potential, memory=memory, compute=compute)
    assert set(plan.trainable) == set(plain.trainable)
    assert plan.backward is not None
    assert plan.backward.nbytes <= memory
    assert plan.backward.macs <= compute * prices.full.macs
    assert plan.step_s <= prices.step_s(plain.trainable, plain.channels)
    if ratio <= 1:
        assert plan.channels == plain.channels
        return
    for name in {layer.weight for layer in prices.layers} & plan.channels.keys():  # what is left in part had to be
        wider = {other: rows for other, rows in plan.channels.items() if other.rpartition(".")[0] != name[:-7]}
        spent = prices.spent(plan.trainable, wider)
        assert spent.nbytes > memory or spent.macs > int(compute * prices.full.macs)
