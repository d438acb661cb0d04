"""Choosing layers and channels: ceilings hold, greedy is the paper's, the integer programme is the best there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastictrainer.backward import BackwardPrices
from elastictrainer.budget import parse_bytes
from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.importance.potential import Potential, fisher_potential
from elastictrainer.plan import Plan
from elastictrainer.profiling.layers import price_backward
from elastictrainer.selection.channels import ChannelChoice, affordable, select_channels


class Net(nn.Module):
    """Dense, depthwise, a residual branch, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        self.act = nn.ReLU6(inplace=True)
        self.side = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        return self.head((self.act(self.deep(x)) + self.side(x)).mean((2, 3)))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1).mean()


@pytest.fixture(scope="module")
def case() -> tuple[BackwardPrices, Potential]:
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(3, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return price_backward(model, loss_fn, x, optimizer=optimizer), fisher_potential(model, loss_fn, [x])


def choice(case: tuple[BackwardPrices, Potential], memory: int | None, compute: float) -> ChannelChoice:
    prices, potential = case
    most = int(compute * prices.full.macs)
    return ChannelChoice(
        prices, potential, frozenset(("potential", "params", "macs")), "fisher", None, 0, (), memory, most
    )


@settings(deadline=None, max_examples=25)
@given(memory=st.integers(1_000, 25_000), compute=st.floats(0.05, 1.0), seed=st.integers(0, 9))
def test_the_integer_programme_is_brute_force_and_greedy_is_below(
    case: tuple[BackwardPrices, Potential], memory: int, compute: float, seed: int
) -> None:
    pytest.importorskip("scipy")
    prices, potential = case
    rng = np.random.default_rng(seed)
    drawn = {name: tuple(np.exp(rng.normal(0, 2, len(values))).tolist()) for name, values in potential.items()}
    problem = choice((prices, drawn), memory, compute)
    every = [(None, *problem.options[layer.weight]) for layer in problem.layers]
    sets = (tuple(option for option in row if option is not None) for row in itertools.product(*every))
    most = max((problem.worth(taken) for taken in sets if problem.fits(taken)), default=0.0)
    if most == 0:
        with pytest.raises(BudgetError, match="the least that works is"):
            select_channels(prices, drawn, memory=memory, compute=compute)
        return
    from elastictrainer.selection.channels_milp import best

    taken, gap = best(problem)
    assert problem.fits(taken)
    assert gap <= 1e-6
    assert problem.worth(taken) == pytest.approx(most, rel=1e-6)
    for share in (1.0, 0.5, 0.25):
        greedy = problem.greedy(share)
        assert problem.fits(greedy)
        assert problem.worth(greedy) <= most * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(memory=st.integers(1_000, 25_000), compute=st.floats(0.05, 1.0), seed=st.integers(0, 9))
def test_layers_that_could_never_fit_need_no_potential(
    case: tuple[BackwardPrices, Potential], memory: int, compute: float, seed: int
) -> None:
    prices, potential = case
    rng = np.random.default_rng(seed)
    drawn = {name: tuple(np.exp(rng.normal(0, 2, len(values))).tolist()) for name, values in potential.items()}
    within = affordable(prices, memory=memory, compute=compute)
    plans = []
    for known in (drawn, {name: drawn[name] for name in within}):
        try:
            plans.append(select_channels(prices, known, memory=memory, compute=compute))
        except BudgetError as error:
            plans.append(str(error))  # which names the least of all layers that works
    whole, some = plans
    if isinstance(whole, str):
        assert whole == some
        return
    assert (whole.trainable, whole.channels, whole.backward) == (some.trainable, some.channels, some.backward)
    assert all(
        b == (a if name in within else 0.0) for name, a, b in zip(whole.names, whole.score_values, some.score_values)
    )


def test_layers_by_score_then_channels_by_potential(case: tuple[BackwardPrices, Potential]) -> None:
    prices, potential = case
    layers = {layer.weight: layer for layer in prices.layers}
    params, macs = max(x.params for x in prices.layers), max(x.macs for x in prices.layers)
    problem = choice(case, None, 1.0)
    for weight, layer in layers.items():
        by_hand = sum(potential[weight]) / (layer.params / params * layer.macs / macs)
        assert problem.scores[weight] == pytest.approx(by_hand)
    first = max(problem.scores, key=problem.scores.__getitem__)
    smallest = prices.spent(layers[first].tensors, dict.fromkeys(layers[first].tensors, (0, 1)))
    plan = select_channels(prices, potential, memory=smallest.nbytes, share=0.5)
    assert first in plan.trainable
    for weight, rows in plan.channels.items():
        worth = potential.get(weight) or potential[weight.replace("bias", "weight")]
        assert set(rows) == set(np.argsort(worth)[::-1][: len(rows)].tolist())


def test_ceilings_hold_and_more_is_worth_more(case: tuple[BackwardPrices, Potential]) -> None:
    prices, potential = case
    worth = 0.0
    for memory, compute in (("4KiB", "20%"), ("8KiB", "40%"), ("64KiB", "100%")):
        plan = select_channels(prices, potential, memory=memory, compute=compute)
        assert plan.backward is not None
        assert plan.backward.nbytes <= parse_bytes(memory)
        assert plan.backward.macs <= float(compute[:-1]) / 100 * prices.full.macs
        exact = select_channels(prices, potential, memory=memory, compute=compute, exact=True)
        assert exact.optimal
        problem = choice(case, parse_bytes(memory), 1.0)
        caught = sum(
            option.worth
            for w in problem.scores
            if w in exact.trainable
            for option in problem.options[w]
            if option.rows == exact.channels.get(w, tuple(range(option.layer.channels)))
        )
        assert caught >= worth
        worth = caught
    assert set(plan.trainable) == {name for layer in prices.layers for name in layer.tensors}
    assert not plan.channels  # everything fits: nothing is left out


def test_ablations_choose_otherwise(case: tuple[BackwardPrices, Potential]) -> None:
    prices, potential = case
    for terms in (("potential",), ("params", "macs"), ("potential", "macs")):
        assert select_channels(prices, potential, memory="4KiB", terms=terms).channels  # type: ignore[arg-type]
    norms = {w: tuple(reversed(values)) for w, values in potential.items()}
    first, lots = (
        select_channels(prices, potential, share=0.25, by=by, norms=norms, seed=seed).channels
        for by, seed in (("l2", 0), ("random", 1))
    )
    for weight, rows in first.items():
        if weight in norms:
            assert rows == (int(np.argmax(norms[weight])),)
    again = select_channels(prices, potential, share=0.25, by="random", seed=1).channels
    assert lots == again
    assert lots != select_channels(prices, potential, share=0.25, by="random", seed=2).channels


def test_pinned_tensors_train_whole(case: tuple[BackwardPrices, Potential]) -> None:
    prices, potential = case
    plan = select_channels(prices, potential, memory="4KiB", pin=["head.weight", "head.bias"])
    assert {"head.weight", "head.bias"} <= set(plan.trainable)
    assert not {"head.weight", "head.bias"} & set(plan.channels)
    with pytest.raises(BudgetError, match=r"pinned .*the least that works is"):
        select_channels(prices, potential, memory="100B", pin=["head.weight"])


def test_too_low_a_ceiling_names_one_that_works(case: tuple[BackwardPrices, Potential]) -> None:
    prices, potential = case
    with pytest.raises(BudgetError, match=r"memory 16B .*the least that works is (\S+)") as refusal:
        select_channels(prices, potential, memory="16B")
    assert select_channels(prices, potential, memory=int(refusal.value.least or 0)).trainable
    with pytest.raises(BudgetError, match=r"compute 0.01% .*the least") as refusal:
        select_channels(prices, potential, compute="0.01%")
    assert select_channels(prices, potential, compute=refusal.value.least).trainable
    with pytest.raises(ConfigError, match="need norms"):
        select_channels(prices, potential, by="l2")
    with pytest.raises(ConfigError, match="flat"):
        select_channels(prices, {name: (0.0,) * len(v) for name, v in potential.items()})


def test_plans_with_channels_round_trip_and_differ(case: tuple[BackwardPrices, Potential]) -> None:
    prices, potential = case
    plan, other = (select_channels(prices, potential, share=share, memory="64KiB") for share in (0.5, 0.25))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.id == plan.id
    assert again.channels == plan.channels
    assert not again.timed
    assert plan.id != other.id
    assert plan != other
    assert "in part" in str(plan)
    assert "+" in plan.strip()
    difference = plan.diff(other)
    assert difference
    assert set(difference.moved) <= set(plan.channels) | set(other.channels)
    assert "in other channels" in str(difference)
    whole = Plan(plan.trainable, plan.names, 1.0, 1.0, 0)
    assert whole.id != plan.id
    with pytest.raises(ConfigError, match="does not train"):
        Plan((), plan.names, 1.0, 1.0, 0, channels={"head.weight": (0,)})
    with pytest.raises(ConfigError, match="in order"):
        Plan(("head.weight",), plan.names, 1.0, 1.0, 0, channels={"head.weight": (1, 0)})
