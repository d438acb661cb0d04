"""A network and its images from the options of the command line, fitted to each other: what every verb starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from elastictrainer.data import Images, LoadedModel

__all__ = ["Workload", "load", "loss_fn"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The network on its device, and loaders that give it what it expects."""

    network: LoadedModel
    images: Images

    @property
    def model(self) -> nn.Module:
        return self.network.model

    @property
    def norms(self) -> Literal["frozen", "track"]:
        """What running statistics do if nobody says: ImageNet's are so far from digits that training diverges."""
        from elastictrainer.data.builtin import BUILTIN

        return "track" if self.images.name == BUILTIN else "frozen"

    def batch(self) -> Any:
        """The first training batch."""
        return next(iter(self.images.train))

    def describe(self) -> list[str]:
        """Lines for people: what was loaded, and what they should know of it."""
        return [str(self.network), str(self.images), *self.images.notes]

    def config(self) -> dict[str, Any]:
        """What a run's config keeps."""
        return {"model": self.network.name, "weights": self.network.source, **self.images.to_dict()}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of (images, class numbers)."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch[0]), batch[1])


def load(
    model: str,
    data: str,
    *,
    weights: str | None = None,
    model_options: Sequence[str] | None = None,
    normalize: str | None = None,
    image_size: int | None = None,
    augment: str | None = None,
    val_share: float = 0.1,
    batch_size: int = 16,
    seed: int = 0,
    device: torch.device,
    cache_dir: Path | None = None,
    progress: bool = False,
) -> Workload:
    """Load both. The images say how many classes the network needs, the network how its images must look."""
    from elastictrainer.cli.output import counting
    from elastictrainer.data import load_images, load_model

    shape = load_model(model, weights=weights, image_size=image_size, model_options=model_options, normalize=normalize)
    with counting("checking images", wanted=progress) as counted:
        images = load_images(
            data,
            image_size=image_size or shape.image_size,
            normalize=shape.normalisation,
            augment=augment,
            val_share=val_share,
            batch_size=batch_size,
            seed=seed,
            device=device,
            cache_dir=cache_dir,
            progress=counted,
        )
    network = load_model(
        model,
        num_classes=images.num_classes,
        weights=weights,
        image_size=images.image_size,
        model_options=model_options,
        normalize=normalize,
        seed=seed,
    )
    network.model.to(device)
    return Workload(network, images)
