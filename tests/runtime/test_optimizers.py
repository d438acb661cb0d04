from __future__ import annotations

import pytest
import torch
from torch import nn

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.optimizers import OPTIMIZERS, SGDW, make_optimizer


def test_sgdw_is_sgd_with_the_decay_taken_apart() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, dtype=torch.float64))
    expected, momentum = weight.detach().clone(), torch.zeros(5, dtype=torch.float64)
    optimizer = SGDW([weight], lr=0.1, momentum=0.9, weight_decay=0.05)
    for step in range(4):
        gradient = torch.randn(5, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = gradient if step == 0 else 0.9 * momentum + gradient
        expected = expected * (1 - 0.1 * 0.05) - 0.1 * momentum
        assert torch.allclose(weight, expected, rtol=1e-12)


def test_what_rests_does_not_decay() -> None:
    moves, rests = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = SGDW([moves, rests], lr=0.1, weight_decay=0.5)
    moves.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(rests, torch.ones(2))
    assert torch.allclose(moves, torch.full((2,), 0.95))


def test_hooks_are_called_once_a_step() -> None:
    """Torch wraps the step of each class that an instance was made of: both classes' would call them."""
    weight = nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.1)
    optimizer = make_optimizer("sgd", [weight], lr=0.1)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.register_step_post_hook(lambda *_: calls.append(2))
    weight.grad = torch.ones(1)
    optimizer.step()
    assert calls == [1, 2]
    assert weight.item() == pytest.approx(0.9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_presets_hold_everything_they_are_given(name: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(name, model.parameters(), lr=0.1, weight_decay=0.01)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    twin = make_optimizer(name, model.parameters(), lr=0.3)
    twin.load_state_dict(optimizer.state_dict())
    assert twin.param_groups[0]["lr"] == 0.1


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="'sgdm' is not one of sgd, adam, adamw"):
        make_optimizer("sgdm", [nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    "wrong", [{"lr": float("inf")}, {"lr": float("nan")}, {"lr": -1.0}, {"lr": 0.1, "weight_decay": -1}]
)
def test_a_rate_that_is_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="finite number, 0 or more"):
        make_optimizer("sgd", [nn.Parameter(torch.ones(1))], **wrong)
