"""Real networks on real images for the training suites: the weights and folders of `--weights` and `--data`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elastictrainer.data import Images, LoadedModel, load_images, load_model

# What each weights file needs besides its name (see docs/howto/data.md)
WEIGHTS: dict[str, dict[str, Any]] = {
    "resnet50": {
        "file": "resnet50_v1_imagenet.safetensors",
        "model_options": "layer[234].0.conv1.stride=2,2; layer[234].0.conv2.stride=1,1; type:BatchNorm2d.eps=1e-3",
    },
    "mobilenet_v2": {"file": "mobilenet_v2_imagenet.safetensors", "normalize": "inception"},
}
NOISE = "noise"  # the `--data` of networks whose time and memory alone are measured
NAMES = {"vit_s": "timm/vit_small_patch16_224"}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def network(name: str, *, classes: int, weights: Path | None, image_size: int, seed: int = 0) -> LoadedModel:
    """The network with its ImageNet weights; without a file for it, or without `--weights`, from a random start."""
    special = dict(WEIGHTS.get(name, {}))
    file = special.pop("file", None)
    path = weights / file if weights is not None and file is not None else None
    options = special if path is not None else {}
    return load_model(
        NAMES.get(name, f"torchvision/{name}"),
        num_classes=classes,
        weights=path,
        image_size=image_size,
        seed=seed,
        **options,
    )


def images(
    data: Path | str,
    like: LoadedModel,
    *,
    batch_size: int,
    image_size: int,
    device: torch.device,
    seed: int = 0,
    cache: Path | None = None,
) -> Images | Noise:
    if str(data) == NOISE:
        return Noise(batch_size=batch_size, image_size=image_size, device=device, seed=seed)
    return load_images(
        data,
        image_size=image_size,
        normalize=like.normalisation,
        batch_size=batch_size,
        device=device,
        seed=seed,
        cache_dir=cache,
    )


class Noise:
    """Random images that lie on the device, for machines where real ones cannot be had: nothing is waited for."""

    num_classes = 37

    def __init__(self, *, batch_size: int, image_size: int, device: torch.device, seed: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        shape = (batch_size, 3, image_size, image_size)
        self.batch_size = batch_size
        self.train = self
        self._batches = [
            (
                torch.randn(shape, generator=stream).to(device),
                torch.randint(self.num_classes, (batch_size,), generator=stream).to(device),
            )
            for _ in range(8)
        ]

    def set_epoch(self, epoch: int) -> None:
        """Every epoch is the same one."""

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)
