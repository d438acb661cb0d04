"""A small network with a price list made by hand, and a machine whose every step takes what the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastictrainer.graph import Graph, Node, TensorInfo
from elastictrainer.profiling.profile import Lane, Memory, Profile, Residual, Storage

LAYERS, WIDTH, CLASSES = 6, 8, 3


def small_net(seed: int = 0, *, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with a norm and dropout between, so that buffers and random streams matter."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for index in range(LAYERS - 1):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        if index == 1:
            parts.append(nn.BatchNorm1d(WIDTH))
        if dropout:
            parts.append(nn.Dropout(dropout))
    return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count: int, *, size: int = 6, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        labels = torch.randint(CLASSES, (size,), generator=generator)
        inputs = torch.randn(size, WIDTH, generator=generator)
        inputs[torch.arange(size), labels] += 2.0
        made.append((inputs, labels))
    return made


def chain_profile(model: nn.Module, *, forward_s: float = 1.0, unit_s: float = 0.3, error: float = 0.02) -> Profile:
    """Prices for a chain of layers: reaching a layer and training each of its tensors cost by its size."""
    owners: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        owners.setdefault(name.rpartition(".")[0], []).append((name, parameter))
    nodes, tensors = [], []
    layers = list(owners.items())[::-1]
    for depth, (owner, held) in enumerate(layers):
        indices = tuple(range(len(tensors), len(tensors) + len(held)))
        tensors += [TensorInfo(n, tuple(p.shape), "float32", p.numel() * 4) for n, p in reversed(held)]
        nodes.append(Node("Layer", owner, (depth + 1,) if depth + 1 < len(layers) else (), indices))
    size = np.array([float(len(t.shape)) for t in tensors])
    count = len(nodes)
    lane = Lane(
        name="cpu",
        forward_total_s=forward_s,
        overhead_s=0.05,
        forward_s=np.full(count, forward_s / count),
        fused_s=np.zeros(count),
        pass_s=np.array([0.0] + [unit_s] * (count - 1)),
        dw_s=unit_s * size / 2,
        opt_s=np.full(len(tensors), 0.01),
    )
    memory = Memory(
        base_bytes=10_000,
        storages=tuple(Storage(1000, (), node.tensors) for node in nodes),
        workspace_bytes=np.full(count, 100, dtype=np.int64),
        state_bytes=np.array([t.nbytes for t in tensors], dtype=np.int64),
    )
    return Profile(Graph(tuple(nodes), tuple(tensors)), (lane,), memory, Residual(error / 2, error, 10))


class Machine:
    """A clock that moves only when the model computes, and by as much as the test wants.

    `slowness(now)` is the machine's (all work takes that much longer), `mistake(trainable)` the time model's (this
    plan takes that much longer than predicted), `wait_s` what every batch is waited for.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        slowness: Callable[[float], float] = lambda now: 1.0,
        mistake: Callable[[tuple[str, ...]], float] = lambda trainable: 1.0,
        wait_s: float = 0.0,
    ) -> None:
        self.profile, self.slowness, self.mistake, self.wait_s = profile, slowness, mistake, wait_s
        self.now = 0.0
        self.spent_s = self.full_s = 0.0

    def clock(self) -> float:
        return self.now

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += self.slowness(self.now) * self.profile.forward_s
        return cross_entropy(model, batch)

    def load(self, data: list[Any]) -> Iterator[Any]:
        return _Loading(self, data)  # type: ignore[return-value]

    def rest_of_step(self, trainable: tuple[str, ...]) -> None:
        """Backward and optimizer, after `loss_fn` has taken the forward pass's time."""
        slow = self.slowness(self.now)
        step_s = self.mistake(trainable) * self.profile.step_s(trainable)
        self.now += slow * (step_s - self.profile.forward_s)
        self.spent_s += slow * step_s + self.wait_s
        self.full_s += slow * self.profile.full_step_s + self.wait_s

    @property
    def ratio(self) -> float:
        """The truth that a controller tries to steer: seconds spent over those of as many full steps."""
        return self.spent_s / self.full_s


class _Loading:
    def __init__(self, machine: Machine, data: list[Any]) -> None:
        self.machine, self.data = machine, data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data:
            self.machine.now += self.machine.wait_s
            yield batch
