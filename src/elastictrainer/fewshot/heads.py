"""What answers in a few-shot task: the nearest prototype, or a linear layer that starts from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastictrainer.errors import ModelError
from elastictrainer.runtime.patch import replaced

__all__ = ["HEADS", "Prototypes", "Queries", "last_linear"]

HEADS = {
    "prototypes": "the nearest class mean, recomputed at each step",
    "linear": "a linear layer that begins as the class means and trains with the rest",
}

SCALE = 10.0  # of cosine similarity before the softmax, as in Hu et al., CVPR 2022, which TinyTrain adapts by


class Queries(NamedTuple):
    """A batch of a task: images, their classes' numbers, and the prototypes to compare with."""

    images: Tensor
    labels: Tensor
    prototypes: Tensor


@dataclass(frozen=True)
class Prototypes:
    """A network seen as a feature extractor: what its last linear layer is given, compared by cosine with the mean
    feature of each class (Snell et al., 2017). The layer itself is not used and not trained.

    Prototypes are constants of a step, recomputed at each: so backward keeps what the pseudo-queries need and no more.
    """

    head: str
    scale: float = SCALE

    def features(self, model: nn.Module, images: Tensor) -> Tensor:
        """What the last layer is given for these images. The layer itself is not run."""
        given: list[Tensor] = []
        layer = model.get_submodule(self.head)

        def keep(module: nn.Module, args: Any) -> None:
            given.append(args[0])

        def nothing(x: Tensor) -> Tensor:
            return x.new_zeros(()).expand(*x.shape[:-1], int(layer.out_features))  # type: ignore[arg-type]

        handle = layer.register_forward_pre_hook(keep)
        try:
            with replaced([(layer, nothing)]):
                model(images)
        finally:
            handle.remove()
        if not given:
            raise ModelError(f"the network never calls its last layer {self.head!r}, so its features cannot be had")
        return given[0].flatten(1)

    @torch.no_grad()
    def of(self, model: nn.Module, images: Tensor, labels: Tensor, ways: int, *, batch_size: int = 64) -> Tensor:
        """A unit vector for each class."""
        return self.means(torch.cat([self.features(model, part) for part in images.split(batch_size)]), labels, ways)

    def means(self, features: Tensor, labels: Tensor, ways: int) -> Tensor:
        """A unit vector for each class, from the features of its images."""
        sums = features.new_zeros(ways, features.shape[1]).index_add(0, labels, features)
        return F.normalize(sums, dim=1)

    def logits(self, model: nn.Module, images: Tensor, prototypes: Tensor) -> Tensor:
        return self.scale * F.normalize(self.features(model, images), dim=1) @ prototypes.t()

    def loss(self, model: nn.Module, batch: Queries) -> Tensor:
        """Mean cross-entropy of a batch of queries."""
        return F.cross_entropy(self.logits(model, batch.images, batch.prototypes), batch.labels)

    @torch.no_grad()
    def right(self, model: nn.Module, batch: Queries, *, batch_size: int = 64) -> int:
        """How many queries are answered rightly."""
        parts = zip(batch.images.split(batch_size), batch.labels.split(batch_size))
        found = [(self.logits(model, x, batch.prototypes).argmax(1) == y).sum() for x, y in parts]
        return int(torch.stack(found).sum())

    @torch.no_grad()
    def into_head(self, model: nn.Module, prototypes: Tensor) -> None:
        """Write prototypes into the last layer, which then gives the same answers without this class.

        The length of a feature changes no answer, so the layer's weight are the prototypes and its bias is nothing.
        """
        layer = model.get_submodule(self.head)
        assert isinstance(layer, nn.Linear)
        layer.weight.copy_(self.scale * prototypes)
        if layer.bias is not None:
            layer.bias.zero_()


def last_linear(model: nn.Module, head: tuple[str, ...]) -> str:
    """The module that owns the head's tensors (`LoadedModel.head`), which must be a linear layer.

    Raises:
        ModelError: the head is something else.
    """
    owners = {name.rpartition(".")[0] for name in head}
    if len(owners) == 1 and isinstance(model.get_submodule(owner := owners.pop()), nn.Linear):
        return owner
    raise ModelError(f"few-shot learning needs a network that ends in one linear layer; this one ends in {head}")
