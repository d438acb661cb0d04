"""Few-shot episodes: which images of which classes are learnt from, and which are asked about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastictrainer.data.augment import Augment, Kit, prepare
from elastictrainer.data.hashing import uniform
from elastictrainer.data.images import open_source
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.data.pixels import Kept, decode_splits
from elastictrainer.errors import ConfigError, DataError

__all__ = ["Bank", "Episode", "Episodes", "all_classes"]

# Meta-Dataset (Triantafillou et al., 2020), appendix A: sampling of varied episodes.
MOST_WAYS, LEAST_WAYS, MOST_SUPPORT, MOST_OF_A_CLASS, QUERIES = 50, 5, 500, 100, 10
PSEUDO_QUERIES = "flip,zoom"
_ROOM_BYTES = 8 * 2**30
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Episode:
    """A task: images by position, each with its class's number in the task. `classes` are their numbers in the set."""

    classes: Positions
    support: Positions
    support_labels: Positions
    query: Positions
    query_labels: Positions

    @property
    def ways(self) -> int:
        return len(self.classes)


@dataclass(frozen=True)
class Episodes:
    """Draws tasks from the labels of a set: the same task for the same (seed, index), on every machine.

    With `ways` and `shots` every task has so many classes and images a class to learn from. Without, they vary as in
    Meta-Dataset: 5 to 50 classes, up to 500 images in all, more of classes that have more. Queries are up to `queries`
    a class, as many of each class, and never among the support. `only` names the classes to draw from.

    >>> episode = Episodes(np.repeat(np.arange(6), 4), ways=3, shots=1, queries=2).episode(0)
    >>> episode.ways, len(episode.support), len(episode.query)
    (3, 3, 6)
    """

    labels: Positions
    ways: int | None = 5
    shots: int | None = 5
    queries: int = QUERIES
    seed: int = 0
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (self.ways is None) != (self.shots is None):
            raise ConfigError("give both ways and shots, or neither for varied episodes")
        if self.ways is not None and (self.ways < 2 or (self.shots or 0) < 1 or self.queries < 1):
            raise ConfigError(
                f"an episode needs at least 2 ways, 1 shot and 1 query; got {self.ways}, {self.shots}, {self.queries}"
            )
        enough, need = self._eligible()
        if len(enough) < (self.ways or LEAST_WAYS):
            raise DataError(
                f"an episode needs {self.ways or LEAST_WAYS} classes with at least {need} images a class, and "
                f"{len(enough)} classes have them; lower --shots or --ways, or add images"
            )

    def _eligible(self) -> tuple[Positions, int]:
        need = 2 if self.shots is None else self.shots + 1
        counts = np.bincount(self.labels)
        if self.only is not None:
            counts[np.setdiff1d(np.arange(len(counts)), self.only)] = 0
        return np.flatnonzero(counts >= need), need

    def episode(self, index: int) -> Episode:
        """The task of this number."""
        eligible, _ = self._eligible()
        draws = uniform(self.seed, index, np.arange(3, dtype=np.int64), stream=1)
        if self.ways is None:
            most = min(MOST_WAYS, len(eligible))
            ways = LEAST_WAYS + int(draws[0] * (most - LEAST_WAYS + 1))
        else:
            ways = self.ways
        order = np.argsort(uniform(self.seed, index, eligible, stream=2), kind="stable")
        classes = eligible[order[:ways]]
        members = [self._shuffled(index, int(label)) for label in classes]
        shots, queries = self._sizes(index, classes, [len(m) for m in members], float(draws[1]))
        support = [m[:k] for m, k in zip(members, shots)]
        query = [m[k : k + queries] for m, k in zip(members, shots)]
        numbers = np.arange(ways, dtype=np.int64)
        return Episode(
            classes, np.concatenate(support), np.repeat(numbers, [len(s) for s in support]), np.concatenate(query),
            np.repeat(numbers, [len(q) for q in query]),
        )  # fmt: skip

    def _shuffled(self, index: int, label: int) -> Positions:
        return _members(self.labels, label, seed=self.seed, index=index)

    def _sizes(self, index: int, classes: Positions, counts: list[int], draw: float) -> tuple[list[int], int]:
        if self.shots is not None:
            return [self.shots] * len(counts), max(1, min(self.queries, min(counts) - self.shots))
        queries = min(self.queries, min(counts) // 2)
        left = [count - queries for count in counts]
        share = 1 - draw  # in (0, 1]
        total = min(MOST_SUPPORT, sum(math.ceil(share * min(MOST_OF_A_CLASS, n)) for n in left))
        alphas = np.log(0.5) + uniform(self.seed, index, classes, stream=4) * (np.log(2) - np.log(0.5))
        weights = np.exp(alphas) * np.asarray(left)
        weights /= weights.sum()
        return [min(int(w * max(total - len(left), 0)) + 1, n) for w, n in zip(weights.tolist(), left)], queries


def all_classes(labels: Positions, names: Sequence[str], *, shots: int, seed: int) -> Episode:
    """One task of all classes: up to `shots` images of each to learn from, all others to be judged by.

    A class that has no more than `shots` keeps one image for judging.

    Raises:
        DataError: a class has a single image.
    """
    support, query = [], []
    for label, name in enumerate(names):
        members = _members(labels, label, seed=seed, index=0)
        if len(members) < 2:
            raise DataError(
                f"class {name!r} has {len(members)} image; it needs at least 2, one to learn from and one to be judged "
                "by: add some, or remove the class"
            )
        take = min(shots, len(members) - 1)
        support.append(members[:take])
        query.append(members[take:])
    numbers = np.arange(len(names), dtype=np.int64)
    return Episode(
        numbers, np.concatenate(support), np.repeat(numbers, [len(s) for s in support]), np.concatenate(query),
        np.repeat(numbers, [len(q) for q in query]),
    )  # fmt: skip


def _members(labels: Positions, label: int, *, seed: int, index: int) -> Positions:
    """The images of a class, shuffled."""
    members = np.flatnonzero(labels == label).astype(np.int64)
    return members[np.argsort(uniform(seed, index, members, stream=3), kind="stable")]


class Bank:
    """All images of a set in memory, to be had by position: as they are, or as pseudo-queries, augmented views.

    `split` is one of the set's, by default `test` where there is one and else `train` (all images of a folder without
    splits). Costs a decode of the split and 3 bytes a pixel.
    """

    def __init__(
        self,
        source: str,
        *,
        image_size: int,
        normalisation: Normalisation,
        split: str | None = None,
        augment: str = PSEUDO_QUERIES,
        seed: int = 0,
        device: torch.device | str = "cpu",
        cache_dir: str | None = None,
        download_dir: str = "~/.cache/elastictrainer/datasets",
    ) -> None:
        opened = open_source(source, download_dir=download_dir)
        chosen = split or ("test" if "test" in opened.splits else "train")
        if chosen not in opened.splits:
            raise DataError(f"{opened.name} has no split {chosen!r}; it has {', '.join(opened.splits)}")
        samples = opened.splits[chosen]
        pixels, _, _ = decode_splits(
            {chosen: samples}, size=image_size, resize="crop", limit_bytes=_ROOM_BYTES, cache_dir=cache_dir
        )
        kept = pixels[chosen]
        if not isinstance(kept, Kept):
            raise DataError(f"{opened.name}: its {len(samples)} images take more than 8 GiB; use fewer or smaller ones")
        self.name, self.classes, self.split = opened.name, opened.classes, chosen
        self.labels: Positions = samples.labels
        self.names = samples.names
        self.fingerprint = opened.fingerprint()
        self.device = torch.device(device)
        self.image_size, self.seed = image_size, seed
        self.augment = Augment.parse(augment)
        self._pixels = kept.images.to(self.device)
        self._kit = Kit.of(normalisation, self.augment, size=image_size, device=self.device)

    def images(self, positions: Positions) -> Tensor:
        """Normalised images, as they are."""
        return prepare(self.pixels(positions), None, self._kit)

    def views(self, positions: Positions, turn: int) -> Tensor:
        """The same images, each cropped and mirrored as (seed, turn, position) says."""
        views = self.augment.views(self.seed, turn, positions, size=self.image_size).to(self.device)
        return prepare(self.pixels(positions), views, self._kit)

    def pixels(self, positions: Positions) -> Tensor:
        """What was decoded, as bytes."""
        return self._pixels.index_select(0, torch.from_numpy(positions).to(self.device))
