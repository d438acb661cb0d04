from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastictrainer.metrics import StepFlops, count_flops, step_flops
from elastictrainer.runtime.apply import apply

BATCH, SIZE, CHANNELS = 2, 8, (3, 4, 5)


def model() -> nn.Sequential:
    first, middle, last = CHANNELS
    return nn.Sequential(
        nn.Conv2d(first, middle, 3, padding=1), nn.BatchNorm2d(middle), nn.ReLU(), nn.Conv2d(middle, last, 3, padding=1)
    )


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def conv_flops(inputs: int, outputs: int) -> int:
    return 2 * BATCH * SIZE * SIZE * inputs * outputs * 9


FIRST, SECOND = conv_flops(3, 4), conv_flops(4, 5)


@pytest.mark.parametrize(
    ("trainable", "backward"),
    [
        (["0.weight", "3.weight"], FIRST + 2 * SECOND),  # each weight, and the way down to the first layer's output
        (["3.weight"], SECOND),
        (["0.weight"], FIRST + SECOND),
        (["0.bias"], SECOND),
        (["3.bias"], 0),
        ([], 0),
    ],
)
def test_what_rests_costs_no_weight_gradient(trainable: list[str], backward: int) -> None:
    net = model()
    x = torch.randn(BATCH, 3, SIZE, SIZE)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    with apply(net, trainable, bn="track"):
        flops = step_flops(net, loss_fn, x)
    assert flops == StepFlops(FIRST + SECOND, backward)
    assert flops.total == FIRST + SECOND + backward
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())


def test_inside_no_grad_the_step_is_a_training_step() -> None:
    net, x = model(), torch.randn(BATCH, 3, SIZE, SIZE)
    with torch.no_grad():
        assert step_flops(net, loss_fn, x) == step_flops(net, loss_fn, x)
        assert step_flops(net, loss_fn, x).backward == FIRST + 2 * SECOND


def test_whatever_runs_is_counted() -> None:
    a, b = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5, requires_grad=True)
    assert count_flops(lambda: (a @ b).sum().backward()) == 3 * (2 * 3 * 4 * 5)
