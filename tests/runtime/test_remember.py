"""What cannot have changed is not run again, and nobody can tell by the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.remember import Remembered, constant_modules


class Net(nn.Module):
    """A stem, residual blocks, a head; the shortcut of a block reads what its main path may change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Conv2d(6, 6, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))) + x)


@pytest.mark.parametrize(
    ("trained", "run_again"),
    [
        (["head.weight"], {"head"}),
        (["blocks.2.second.weight"], {"head", "blocks.2.second", "blocks.2.act"}),
        (["blocks.1.first.bias"], {"head", "blocks.1.first", "blocks.1.second", "blocks.2.first", "blocks.2.second"}),
        (["stem.0.weight"], {"stem.0", "stem.1", "head", "blocks.0.first"}),
    ],
)
def test_bit_equal_and_only_what_follows_runs(trained: list[str], run_again: set[str]) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    x = torch.randn(5, 3, 8, 8)
    with apply(model, trained):
        remembered = Remembered(model, x[:1])
        for _ in range(3):
            with torch.no_grad():
                expected = torch.cat([model(part) for part in x.split(2)])
                found = remembered.again(lambda: torch.cat([model(part) for part in x.split(2)]))
            assert torch.equal(found, expected)
            for name in trained:  # a step
                model.get_parameter(name).data.add_(0.1)
        constant = {n for n, m in model.named_modules() if m in constant_modules(model, x[:1])}
    assert not constant & run_again
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_in_a_row_only_the_last_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 50, 1), nn.ReLU(), nn.Conv2d(50, 2, 1), nn.Conv2d(2, 3, 1))
    x = torch.randn(4, 3, 8, 8)
    with apply(model, ["3.weight"]):
        remembered = Remembered(model, x[:1])
        first = remembered.again(lambda: model(x))
        assert remembered.nbytes == 4 * 2 * 64 * 4
        calls: list[int] = []
        model[0].register_forward_pre_hook(lambda *_: calls.append(1))
        model[0].weight.data.fill_(float("nan"))  # it is not run
        assert torch.equal(remembered.again(lambda: model(x)), first)


class Pyramid(nn.Module):
    """Runs the modules of a Sequential one by one and reads each."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor | float = 0.0
        for module in self.row:
            x = module(x)
            total = total + x.mean()
        assert isinstance(total, Tensor)
        return total


def test_modules_that_others_read_are_kept() -> None:
    model, x = Pyramid().eval(), torch.randn(2, 3, 4, 4)
    with apply(model, ["row.2.weight"]), torch.no_grad():
        remembered = Remembered(model, x[:1])
        assert torch.equal(remembered.again(lambda: model(x)), model(x))
        assert torch.equal(remembered.again(lambda: model(x)), model(x))


class Careless(nn.Module):
    """Runs a module for what it does to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.act(x)
        return self.last(x)


def test_where_it_would_be_wrong_it_is_not_done() -> None:
    torch.manual_seed(0)
    model, x = Careless().eval(), torch.randn(2, 3, 4, 4)
    with apply(model, ["last.weight"]), torch.no_grad():
        remembered = Remembered(model, x[:1])
        for _ in range(2):
            assert torch.equal(remembered.again(lambda: model(x)), model(x))
        assert remembered.nbytes == 0


def test_nothing_is_constant_where_everything_trains() -> None:
    model = Net().eval()
    x = torch.randn(2, 3, 8, 8)
    with apply(model, [n for n, _ in model.named_parameters()]):
        assert constant_modules(model, x) == ()
        remembered = Remembered(model, x[:1])
        assert torch.equal(remembered.again(lambda: model(x)), remembered.again(lambda: model(x)))
        assert remembered.nbytes == 0
