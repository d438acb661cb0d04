"""Models, optimizers and snapshots that the importance tests share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer


class Custom(Optimizer):
    """As third parties write them: attributes outside the groups, a norm over all tensors, writes into `.grad`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.shrink = 0.5
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        active = [(g["lr"], p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = float(sum(p.grad.square().sum() for _, p in active)) ** 0.5
        self.history.append(norm)
        for lr, p in active:
            p.grad.div_(1 + norm)
            state = self.state[p]
            state["seen"] = state.get("seen", 0) + 1
            p.add_(p.grad, alpha=-lr * self.shrink / state["seen"])


Make = Callable[[Any], Optimizer]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_single": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_tensor_lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "custom": lambda p: Custom(p, lr=0.1),
}


class Net(nn.Module):
    """A convolution, a norm, a dropout, a tied pair, a tensor used twice and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.twice = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.2)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(4, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.drop(self.tied(functional.gelu(self.twice(self.twice(x))))))


Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int, *, seed: int = 0, device: str = "cpu") -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(6, 3, 6, 6, generator=generator).to(device),
            torch.randint(5, (6,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def trained(make: Make, *, steps: int = 3, resting: tuple[str, ...] = (), device: str = "cpu") -> tuple[Net, Optimizer]:
    """A model and optimizer in the middle of training, two groups with settings of their own, some tensors at rest."""
    torch.manual_seed(0)
    model = Net().to(device)
    head = set(model.head.parameters())
    optimizer = make([{"params": [p for p in model.parameters() if p not in head]}, {"params": list(head), "lr": 0.02}])
    if torch.is_tensor(optimizer.defaults["lr"]):
        optimizer.param_groups[1]["lr"] = torch.tensor(0.02)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in resting)
    for batch in batches(steps, seed=1, device=device):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return model, optimizer


def snapshot(model: nn.Module, optimizer: Optimizer, *more: Any) -> list[Any]:
    """Everything that a probe must leave alone: values as bytes, tensors also by identity."""
    return [
        [
            (n, p, _bits(p.detach()), p.requires_grad, p.grad, _bits(p.grad), p._version)
            for n, p in model.named_parameters()
        ],
        [(n, b, _bits(b)) for n, b in model.named_buffers()],
        [m.training for m in model.modules()],
        _frozen(vars(optimizer)),
        _frozen(optimizer.state_dict()),
        [_frozen(x.state_dict()) for x in more],
        torch.get_rng_state().numpy().tobytes(),
        [state.numpy().tobytes() for state in (torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])],
        random.getstate(),
        np.random.get_state()[1].tobytes(),  # noqa: NPY002
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _bits(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.to_dense().cpu().numpy().tobytes())


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value, _bits(value.detach()))
    if isinstance(value, dict):
        return [(k if isinstance(k, Tensor) else repr(k), _frozen(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return [_frozen(v) for v in value]
    return value
