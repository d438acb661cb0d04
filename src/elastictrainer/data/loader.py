"""Batches in an order and with views that depend on (seed, epoch, sample) alone, from any batch of any epoch on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastictrainer.data.augment import Augment, Kit, Views, prepare
from elastictrainer.data.hashing import permutation
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.data.pixels import Pixels
from elastictrainer.errors import ConfigError, DataError

__all__ = ["Batch", "Loader"]


class Batch(NamedTuple):
    """`images, labels = batch[:2]`; `indices` name the samples, `views` how each was seen (same code, same pixels)."""

    images: Tensor
    labels: Tensor
    indices: Tensor
    views: Tensor


class Loader:
    """Iterates one split, batch by batch, on its device.

        for epoch in range(epochs):
            for images, labels, *_ in loader.iterate(epoch):
                ...

    `iterate` is pure: the same epoch gives the same batches bit for bit, and `start=k` begins with batch k without
    decoding or touching what was skipped. Plain `for batch in loader` runs the epoch that `set_epoch` named, and the
    next one each time after.

    Costs nothing between batches but the batch itself: the order and the views of an epoch are computed once, a few
    numbers a sample, and moved to the device once.
    """

    def __init__(
        self,
        pixels: Pixels,
        labels: NDArray[np.int64],
        *,
        image_size: int,
        batch_size: int,
        normalisation: Normalisation,
        augment: Augment | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size {batch_size} must be at least 1")
        if drop_last and len(labels) < batch_size:
            raise DataError(
                f"{len(labels)} training images are fewer than one batch of {batch_size}: lower the batch size"
            )
        self.image_size = image_size
        self.batch_size = batch_size
        self.normalisation = normalisation
        self.augment = augment or Augment()
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.device = torch.device(device)
        self.epoch = 0
        self._pixels = pixels
        self._labels = labels
        self._kit = Kit.of(normalisation, self.augment, size=image_size, device=self.device)

    @property
    def num_samples(self) -> int:
        """Images in the split, whether or not they fill whole batches."""
        return len(self._labels)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of every sample, by sample index."""
        return self._labels

    def __len__(self) -> int:
        whole, rest = divmod(len(self._labels), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch plain iteration runs next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self.iterate(epoch)

    def iterate(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""
        if not 0 <= start <= len(self):
            raise ConfigError(f"start {start} is no batch of an epoch of {len(self)}")
        return self.look(self.order(epoch)[start * self.batch_size :], epoch)

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The samples of an epoch, in the order in which its batches hold them."""
        count = len(self._labels)
        order = permutation(self.seed, epoch, count) if self.shuffle else np.arange(count, dtype=np.int64)
        return order[: len(self) * self.batch_size]

    def codes(self, samples: NDArray[np.int64], epoch: int, *, views: int | None = None) -> NDArray[np.int64]:
        """How these samples are seen in an epoch: `Batch.views`, known without looking at a pixel."""
        return self._views(samples, epoch, views).code.numpy()

    def _views(self, samples: NDArray[np.int64], epoch: int, limit: int | None) -> Views:
        return self.augment.views(self.seed, epoch, samples, size=self.image_size, limit=limit)

    def look(
        self,
        samples: NDArray[np.int64],
        epoch: int,
        *,
        batch_size: int | None = None,
        views: int | None = None,
        pixels: bool = True,
    ) -> Iterator[Batch]:
        """These samples as an epoch sees them, in batches.

        `views`: of each image there are only so many views, which come round in turn; by default every epoch has new
        ones. Without `pixels` nothing is read or augmented, and the images are blanks that take no memory: for whoever
        has kept what it needs of them.
        """
        if not len(samples):
            return
        size = batch_size or self.batch_size
        seen = self._views(samples, epoch, views).to(self.device).split(size)
        labels = torch.from_numpy(self._labels[samples]).to(self.device).split(size)
        here = torch.from_numpy(samples)
        indices = here.to(self.device).split(size)
        if not pixels:
            blank = torch.zeros((), device=self.device)
            for label, index, view in zip(labels, indices, seen):
                yield Batch(blank.expand(len(label), 3, self.image_size, self.image_size), label, index, view.code)
            return
        wanted = indices if self._pixels.device.type == self.device.type else here.split(size)
        unchanged = self.augment == Augment()
        for raw, label, index, view in zip(self._pixels.stream(wanted), labels, indices, seen):
            arrived = raw.to(self.device, non_blocking=True)
            images = prepare(arrived, None if unchanged else view, self._kit)
            yield Batch(images, label, index, view.code)

    def __repr__(self) -> str:
        shape = f"{self.num_samples} images, {len(self)} batches of {self.batch_size}"
        return f"Loader({shape}, augment {self.augment}, on {self.device})"
