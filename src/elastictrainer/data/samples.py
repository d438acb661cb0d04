"""What every source of images boils down to: named, labelled samples that can be opened, in splits, with classes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elastictrainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Samples", "Source", "split_off"]


@dataclass(frozen=True, slots=True)
class Samples:
    """One split. `names` are stable (a path relative to the source); `stamps` change when an image does."""

    names: Sequence[str]
    labels: NDArray[np.int64]
    stamps: Sequence[str]
    open: Callable[[int], Image]

    def __len__(self) -> int:
        return len(self.names)

    def take(self, positions: NDArray[np.int64]) -> Samples:
        """The samples at these positions, in this order."""
        chosen = [int(p) for p in positions]
        whole = self
        return Samples(
            [self.names[p] for p in chosen], self.labels[positions], [self.stamps[p] for p in chosen],
            lambda index: whole.open(chosen[index]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """Images before they are decoded: `train`, and `val` and `test` where they exist.

    `augment` and `image_size` are what suits this source when the caller does not say; `notes` are for the user.
    """

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Samples]
    augment: str = "flip,crop"
    image_size: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        train = self.splits["train"]
        if len(self.classes) < 2:
            raise DataError(
                f"{self.name}: only one class ({', '.join(self.classes) or 'none'}); training needs at least two"
            )
        counts = np.bincount(train.labels, minlength=len(self.classes))
        empty = [name for name, count in zip(self.classes, counts) if not count]
        if empty:
            raise DataError(f"{self.name}: no training image for class {', '.join(empty[:5])}")

    def fingerprint(self) -> str:
        """A digest of the classes and of which sample is in which split: equal for equal data, wherever it lies."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for split in sorted(self.splits):
            samples = self.splits[split]
            for name, label in zip(samples.names, samples.labels.tolist()):
                digest.update(f"\1{split}\0{name}\0{label}".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]


def split_off(source: Source, *, share: float, seed: int, into: str = "val") -> Source:
    """Take a share of every training class out of `train`, chosen by a hash of (seed, name).

    The choice depends on names alone, not on their order or on any library's generator, so it is the same on every
    machine. A class keeps at least one training image and gives at least one from two on.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"val_share {share} must be at least 0 and below 1")
    train = source.splits["train"]
    if share == 0:
        return source
    ranks = [hashlib.blake2b(f"{seed}\0{n}".encode(errors="surrogateescape")).digest() for n in train.names]
    by_class: dict[int, list[int]] = {}
    for position, label in enumerate(train.labels.tolist()):
        by_class.setdefault(label, []).append(position)
    chosen: list[int] = []
    single: list[str] = []
    for label, positions in by_class.items():
        count = min(max(1, round(share * len(positions))), len(positions) - 1)
        if count == 0:
            single.append(source.classes[label])
        chosen += sorted(positions, key=ranks.__getitem__)[:count]
    notes = source.notes
    if single:
        notes = (
            *notes,
            f"{len(single)} classes have a single training image and are not in {into} (first: {single[0]})",
        )
    if not chosen:
        raise DataError(
            f"{source.name}: no class has two training images, so none can go to {into}; add {into}/ or images"
        )
    held = np.zeros(len(train), dtype=np.bool_)
    held[chosen] = True
    splits = {**source.splits, "train": train.take(np.flatnonzero(~held)), into: train.take(np.flatnonzero(held))}
    return replace(source, splits=splits, notes=notes)
