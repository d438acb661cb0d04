"""Small images through our own loader, a network with norms and a residual block, and a profile of its real graph."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import elastictrainer as et
from elastictrainer.data.augment import Augment
from elastictrainer.data.loader import Loader
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.data.pixels import Kept as Pixels
from elastictrainer.profiling.profile import Lane, Profile
from elastictrainer.runtime.optimizers import make_optimizer

CLASSES, SIDE = 4, 12


def loader(count: int = 48, *, seed: int = 0, training: bool = True, batch_size: int = 4) -> Loader:
    """Images whose class is the corner that is bright."""
    generator = torch.Generator().manual_seed(100 + seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pixels = torch.randint(0, 120, (count, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    half = SIDE // 2
    for image, label in zip(pixels, labels.tolist()):
        image[:, half * (label // 2) : half * (label // 2) + half, half * (label % 2) : half * (label % 2) + half] += (
            100
        )
    return Loader(
        Pixels(pixels), labels.numpy().astype(np.int64), image_size=SIDE, batch_size=batch_size,
        normalisation=Normalisation.parse("imagenet"), augment=Augment(crop="shift") if training else None,
        shuffle=training, drop_last=training, seed=seed,
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + x)


def network(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Block(8), Block(8),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, CLASSES),
    )  # fmt: skip


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


@cache
def profile(name: str = "sgd") -> Profile:
    """Of the real graph, at made-up prices, so that what rests on it comes out the same on every machine."""
    model = network()
    optimizer = make_optimizer(name, model.parameters(), lr=0.05)
    taken = et.profile(model.train(), loss_fn, next(iter(loader())), optimizer=optimizer, effort=12)
    (lane,) = taken.lanes
    nodes, tensors = (np.full(len(of), 1e-4) for of in (taken.graph.nodes, taken.graph.tensors))
    made_up = Lane(
        lane.name, forward_total_s=float(nodes.sum()), overhead_s=1e-4, forward_s=nodes, fused_s=nodes / 2,
        pass_s=nodes, dw_s=tensors, opt_s=tensors / 10,
    )  # fmt: skip
    return replace(taken, lanes=(made_up,))


def fit(out: Any = None, *, model: nn.Module | None = None, optimizer: str = "sgd", **options: Any) -> Any:
    model = network() if model is None else model
    options.setdefault("epochs", 6)
    options.setdefault("val_loader", loader(16, seed=1, training=False))
    options.setdefault("deterministic", True)
    options.setdefault("profile", profile(optimizer))
    task = options.pop("loss_fn", loss_fn)
    data = options.pop("data", None) or loader()
    return et.fit(
        model, make_optimizer(optimizer, model.parameters(), lr=options.pop("lr", 0.05)), task, data,
        policy="adaptive", probe_batches=2, out=out, progress=False, **options,
    )  # fmt: skip
