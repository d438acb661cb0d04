"""Small models that between them do everything a model may do: each is a (model, batch, loss function)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]


def classify(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def labels(count: int = 4) -> Tensor:
    return torch.arange(count) % 3


def _images() -> Any:
    return torch.randn(4, 3, 8, 8), labels()


def chain() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    return model, _images(), classify


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.main = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1)
        )
        self.shortcut = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.main(x) + self.shortcut(x))
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(4))
        self.head = nn.Linear(19, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], dim=1)
        return self.head(x.mean((2, 3)))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.narrow, self.wide = nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1))
        self.pool = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        branches = [self.narrow(x), self.wide(x), self.pool(F.max_pool2d(x, 3, 1, 1))]
        return self.head(torch.cat(branches, 1).mean((2, 3)))


class Twice(nn.Module):
    """One weight used at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(torch.tanh(self.shared(self.inner(x)))))


class TiedText(nn.Module):
    """Token embedding tied to the output layer, learned positions, one attention block; integer input."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.block(self.tokens(tokens) + self.positions))


def tied_text() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return TiedText(), torch.randint(0, 11, (3, 5)), loss


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return self.head(self.used(x).relu())


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, scale = ctx.saved_tensors
        return (
            grads[0] * scale if ctx.needs_input_grad[0] else None,
            (grads[0] * x).sum(0) if ctx.needs_input_grad[1] else None,
        )


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.head = nn.Linear(6, 6), nn.Parameter(torch.rand(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Scale.apply(self.inner(x), self.scale))


class Inplace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).add_(1)
        x[:, :2] = 0.5
        x.relu_()
        return self.head(self.second(x).mul_(2).sigmoid_())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.cells, self.head = kind(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Messages(nn.Module):
    """A graph network in plain torch: gather, transform, scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.node, self.head = nn.Linear(12, 6), nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, graph: tuple[Tensor, Tensor]) -> Tensor:
        x, (source, target) = graph[0], graph[1]
        for _ in range(2):
            messages = self.edge(torch.cat([x[source], x[target]], 1)).relu()
            x = self.node(torch.cat([x, torch.zeros_like(x).index_add(0, target, messages)], 1)).relu()
        return self.head(x)


class Several(nn.Module):
    """Two inputs, two outputs, two towers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6)), nn.Linear(5, 6)
        self.mix, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.mix(self.left(a) * self.right(b))
        return self.one(hidden), self.two(hidden)


def several() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        one, two = model(batch["a"], batch["b"])
        return F.cross_entropy(one, batch["y"]) + two.square().mean()

    return Several(), {"a": torch.randn(4, 4), "b": torch.randn(4, 5), "y": labels()}, loss


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant))


class Weighted(nn.Module):
    """weight_norm: two tensors behind one operation, on a side branch of the layer that uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).relu())


def autocast() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return classify(model, batch)

    return Residual(), _images(), loss


def _vectors(model: nn.Module) -> Case:
    return model, (torch.randn(4, 6), labels()), classify


def graph_network() -> Case:
    return Messages(), ((torch.randn(4, 6), torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])), labels()), classify


ZOO: dict[str, Callable[[], Case]] = {
    "chain": chain,
    "residual": lambda: (Residual(), _images(), classify),
    "dense": lambda: (Dense(), _images(), classify),
    "inception": lambda: (Inception(), _images(), classify),
    "used twice": lambda: _vectors(Twice()),
    "tied text": tied_text,
    "unused": lambda: _vectors(Unused()),
    "custom function": lambda: _vectors(Custom()),
    "in place": lambda: _vectors(Inplace()),
    "lstm": lambda: (Recurrent(), (torch.randn(4, 5, 6), labels()), classify),
    "gru": lambda: (Recurrent(nn.GRU), (torch.randn(4, 5, 6), labels()), classify),
    "graph network": graph_network,
    "several": several,
    "checkpointed": lambda: _vectors(Checkpointed()),
    "weight norm": lambda: _vectors(Weighted()),
    "autocast": autocast,
}
