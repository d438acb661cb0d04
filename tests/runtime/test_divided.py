"""A network in two parts does what it does whole: losses, gradients of what trains, bytes for backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastictrainer.fewshot.heads import Prototypes, Queries
from elastictrainer.metrics.held import held_bytes
from elastictrainer.plan import Plan
from elastictrainer.runtime.apply import apply
from elastictrainer.runtime.divided import Divided


class Net(nn.Module):
    """A stem, residual blocks with norms, a head; the shortcut reads what the main path might change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.deep, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn2(self.deep(self.act(self.bn1(self.first(x))))) + x)


class Careless(nn.Module):
    """Runs a module for what it does to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.act(x)
        return self.head(self.last(x).mean((2, 3)))


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    model = kind().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                nn.init.normal_(tensor)
            nn.init.uniform_(module.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    return model


def queries(count: int = 6) -> Queries:
    generator = torch.Generator().manual_seed(1)
    prototypes = torch.nn.functional.normalize(torch.randn(3, 8, generator=generator), dim=1)
    return Queries(torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 3, prototypes)


def plan(names: list[str], channels: dict[str, tuple[int, ...]] | None = None) -> Plan:
    return Plan(tuple(names), tuple(names), 1.0, 1.0, 0, channels=channels or {})


PLANS = {
    "last block": plan(["blocks.2.first.weight"]),
    "channels": plan(["blocks.1.deep.weight", "blocks.1.deep.bias"], {
        "blocks.1.deep.weight": (0, 5), "blocks.1.deep.bias": (0, 5)}),
    "a norm": plan(["blocks.1.bn2.bias"]),
    "everything": plan([n for n, _ in Net().named_parameters() if not n.startswith("head")]),
    "the first": plan(["stem.0.weight"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_gradients_and_bytes_are_those_of_the_whole(name: str) -> None:
    model, head, batch = net(), Prototypes("head"), queries()

    def gradients() -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    with apply(model, PLANS[name], bits=True):
        head.loss(model, batch).backward()
        expected = gradients()
        model.zero_grad()
        before = {n: m.__dict__.get("forward") for n, m in model.named_modules()}
        divided = Divided(model, head, Queries(batch.images[:2], batch.labels[:2], batch.prototypes))
        crossing = divided.ahead(batch.images)
        assert bool(crossing) == (name not in ("everything", "the first"))

        def step() -> Tensor:
            with divided.rest(crossing):
                return head.loss(model, batch)

        loss = step()
        loss.backward()
        assert {n: m.__dict__.get("forward") for n, m in model.named_modules()} == before
        torch.testing.assert_close(loss.detach(), head.loss(model, batch).detach())
        found = gradients()
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
        plain = held_bytes(lambda: head.loss(model, batch), model)
        crossing = divided.ahead(batch.images)
        # Folded weights and scales are apart (`nbytes`), as the plain network's parameters are.
        assert held_bytes(step, model) <= plain + divided.nbytes + 1024


def test_what_comes_first_runs_once_for_the_same_images_whatever_trains_since() -> None:
    model, head, batch = net(), Prototypes("head"), queries()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply(model, PLANS["channels"], optimizer=optimizer):
        divided = Divided(model, head, batch)
        crossing = divided.ahead(batch.images)
        stem: list[int] = []
        model.stem[0].register_forward_pre_hook(lambda *_: stem.append(1))
        for _ in range(3):
            found = divided.features(batch.images, crossing)
            ran, expected = len(stem), head.features(model, batch.images)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            head.loss(model, batch).backward()
            optimizer.step()
            stem.clear()
            assert ran <= 1  # the module is called and hands back what was kept


def test_where_it_would_be_wrong_it_is_not_done() -> None:
    model, head, batch = net(Careless), Prototypes("head"), queries()
    with apply(model, ["last.weight"]):
        divided = Divided(model, head, batch)
        found = divided.features(batch.images, divided.ahead(batch.images))
        torch.testing.assert_close(found, head.features(model, batch.images))
