"""Prices of backward by channel: the bytes are those that are really held, the multiply-adds those that really run."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastictrainer.backward import BackwardPrices
from elastictrainer.errors import ConfigError, ProfileError
from elastictrainer.importance.potential import fisher_potential
from elastictrainer.metrics.flops import count_flops
from elastictrainer.metrics.held import held_bytes
from elastictrainer.plan import Plan
from elastictrainer.profiling.layers import price_backward, state_copies
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.optimizers import OPTIMIZERS, make_optimizer
from elastictrainer.selection.channels import select_channels

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def mobilenet() -> tuple[nn.Module, Batch]:
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.mobilenet_v2(num_classes=5).eval()
    return model, (torch.randn(2, 3, 64, 64), torch.tensor([1, 3]))


def plans(prices: BackwardPrices, model: nn.Module, batch: Batch) -> list[Plan]:
    """What selection gives, and what it never would: layers anywhere, in a few channels or whole."""
    potential = fisher_potential(model, loss_fn, [batch])
    found = [select_channels(prices, potential, memory=size, compute=share) for size, share in _CEILINGS]
    rng = random.Random(0)
    for _ in range(6):
        chosen = rng.sample(prices.layers, rng.randint(1, 6))
        channels = {}
        for layer in chosen:
            if rng.random() < 0.8:
                rows = tuple(sorted(rng.sample(range(layer.channels), rng.randint(1, layer.channels - 1))))
                channels.update(dict.fromkeys(layer.tensors, rows))
        trainable = tuple(name for layer in chosen for name in layer.tensors)
        found.append(
            Plan(
                trainable, prices.profile.names, 1.0, 1.0, 0, channels=channels,
                backward=prices.spent(trainable, channels), full_backward=prices.full,
            )
        )  # fmt: skip
    return found


_CEILINGS = [("256KiB", "5%"), ("1MiB", "15%"), ("4MiB", "50%")]


def test_analytic_bytes_are_the_bytes_held(mobilenet: tuple[nn.Module, Batch]) -> None:
    """Saved by forward, gradients and optimizer state, each within 2% (the last two exactly)."""
    model, batch = mobilenet
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.0)
    prices = price_backward(model, loss_fn, batch, optimizer=optimizer)
    for plan in plans(prices, model, batch):
        assert plan.backward is not None
        optimizer = make_optimizer("sgd", model.parameters(), lr=0.0)
        with apply(model, plan, optimizer=optimizer):
            held = held_bytes(lambda: loss_fn(model, batch), model)
            loss_fn(model, batch).backward()
            optimizer.step()
            grads = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
            state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
            model.zero_grad()
        assert held == pytest.approx(plan.backward.saved_bytes, rel=0.02)
        assert grads == plan.backward.gradient_bytes
        assert state == plan.backward.state_bytes
        assert held + grads + state + plan.backward.copy_bytes == pytest.approx(plan.backward.nbytes, rel=0.02)


def test_full_training_too_with_and_without_bits(mobilenet: tuple[nn.Module, Batch]) -> None:
    model, batch = mobilenet
    names = [name for name, _ in model.named_parameters()]
    for bits in (True, False):
        prices = price_backward(model, loss_fn, batch, bits=bits)
        with apply(model, names, bits=bits):
            held = held_bytes(lambda: loss_fn(model, batch), model)
        assert held == pytest.approx(prices.full.saved_bytes, rel=0.02)


def test_multiply_adds_are_those_that_run() -> None:
    """Of dense layers: torch counts a grouped convolution's weight gradient as if it were dense."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 12, 1),
        nn.Flatten(2), nn.Linear(25, 6), nn.Flatten(), nn.Linear(72, 4),
    )  # fmt: skip
    batch = torch.randn(2, 3, 12, 12), torch.tensor([1, 3])
    prices = price_backward(model, loss_fn, batch)
    names = prices.profile.names
    every = [Plan(names, names, 1.0, 1.0, 0)]
    for layer in prices.layers:
        for rows in (range(layer.channels), range(0, layer.channels, 2), (1,)):
            channels = dict.fromkeys(layer.tensors, tuple(rows))
            every.append(Plan(layer.tensors, names, 1.0, 1.0, 0, channels=channels))
    for plan in every:
        with apply(model, plan):
            ran = count_flops(loss_fn(model, batch).backward) / 2
        assert prices.spent(plan.trainable, plan.channels).macs == ran


def test_prices_round_trip(mobilenet: tuple[nn.Module, Batch]) -> None:
    model, batch = mobilenet
    prices = price_backward(model, loss_fn, batch, optimizer=make_optimizer("adamw", model.parameters(), lr=0.1))
    again = BackwardPrices.from_json(prices.to_json())
    assert (again.layers, again.state_copies, again.batch_size) == (prices.layers, 2, 2)
    assert again.full == prices.full
    with pytest.raises(ProfileError, match="damaged"):
        BackwardPrices.from_json('{"format": 1}')


def test_state_copies_are_those_of_the_optimizer() -> None:
    model = nn.Linear(3, 3)
    known = {"sgd": 1, "adam": 2, "adamw": 2}
    assert known.keys() == OPTIMIZERS.keys()
    for name, copies in known.items():
        assert state_copies(make_optimizer(name, model.parameters(), lr=0.1)) == copies
    assert state_copies(torch.optim.SGD(model.parameters(), lr=0.1)) == 0


def test_bad_input() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    prices = price_backward(model, lambda m, x: m(x).sum(), torch.randn(2, 3))
    with pytest.raises(ProfileError, match=r"1\.weight"):
        prices.spent(["1.weight"], {"1.weight": (0,)})
    with pytest.raises(ConfigError, match="does not train"):
        prices.spent(["2.weight"], {"0.weight": (0,)})
