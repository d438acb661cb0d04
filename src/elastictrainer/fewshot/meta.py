"""Meta-training: teach a network's features to be compared, on many small tasks of a source domain.

Prototypical networks (Snell et al., 2017): each step is one task, its queries compared with the means of its support,
gradients through both. It is ordinary training of everything with tasks as batches, so it goes through the one loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastictrainer.data.episodes import Bank, Episodes
from elastictrainer.errors import DataError
from elastictrainer.fewshot.heads import Prototypes
from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.runtime.result import Result

__all__ = ["EpisodeLoader", "TaskBatch", "held_out", "meta_train", "task_loss", "task_metric"]


class TaskBatch(NamedTuple):
    """One task: images and class numbers, the first `support` of them to learn from."""

    images: Tensor
    labels: Tensor
    support: int


@dataclass(frozen=True)
class EpisodeLoader:
    """Tasks as the batches of an epoch: `per_epoch` of them, new ones every epoch, the same for the same numbers.

    `augmented` shows every image as a fresh view. Can begin with any task of any epoch, so a run resumes exactly.
    """

    bank: Bank
    episodes: Episodes
    per_epoch: int
    augmented: bool = True

    def __len__(self) -> int:
        return self.per_epoch

    def iterate(self, epoch: int, *, start: int = 0) -> Iterator[TaskBatch]:
        for number in range(epoch * self.per_epoch + start, (epoch + 1) * self.per_epoch):
            episode = self.episodes.episode(number)
            positions = np.concatenate([episode.support, episode.query])
            images = self.bank.views(positions, number) if self.augmented else self.bank.images(positions)
            labels = np.concatenate([episode.support_labels, episode.query_labels])
            yield TaskBatch(images, torch.from_numpy(labels).to(self.bank.device), len(episode.support))

    def __iter__(self) -> Iterator[TaskBatch]:
        return self.iterate(0)


def held_out(classes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Classes to train on, and every fifth, to choose the best epoch by: it has to do with classes never seen."""
    return tuple(c for c in range(classes) if c % 5 != 4), tuple(range(4, classes, 5))


def _logits(head: Prototypes, model: nn.Module, batch: TaskBatch) -> Tensor:
    features = head.features(model, batch.images)
    support, labels = features[: batch.support], batch.labels[: batch.support]
    means = head.means(support, labels, int(labels.max()) + 1)
    return head.scale * F.normalize(features[batch.support :], dim=1) @ means.t()


def task_loss(head: Prototypes, model: nn.Module, batch: TaskBatch) -> Tensor:
    """Mean cross-entropy of the queries."""
    return F.cross_entropy(_logits(head, model, batch), batch.labels[batch.support :])


def task_metric(head: Prototypes, model: nn.Module, batch: TaskBatch) -> tuple[Tensor, int]:
    """Right answers among the queries, and how many there are."""
    labels = batch.labels[batch.support :]
    return (_logits(head, model, batch).argmax(1) == labels).sum(), len(labels)


def meta_train(
    model: nn.Module,
    head: Prototypes,
    bank: Bank,
    *,
    out: str | Path | None,
    resume: bool = False,
    ways: int = 5,
    shots: int = 5,
    queries: int = 10,
    episodes: int = 100,
    epochs: int = 10,
    optimizer: str = "sgd",
    lr: float = 1e-3,
    seed: int = 0,
    deterministic: bool = False,
    checkpoint_every: str | float = "10min",
    progress: bool = True,
    config: dict[str, Any] | None = None,
    weights_metadata: dict[str, str] | None = None,
) -> Result:
    """Train everything on `epochs` of `episodes` tasks each; the epoch that does best on held-out classes is kept.

        result = meta_train(model, Prototypes("fc"), bank, out="runs/meta", epochs=10)

    It is a run as any of `et.fit`'s: killed at any moment it goes on with `resume`, and with `deterministic` ends on a
    CPU in the weights that it would have ended in.

    Raises:
        DataError: fewer than ten classes, of which two could be held out.

    Costs a forward and backward pass of `ways * (shots + queries)` images a task.
    """
    seen, unseen = held_out(len(bank.classes))
    if len(unseen) < 2:
        raise DataError(f"{bank.name} has {len(bank.classes)} classes; meta-training needs at least 10, to hold 2 out")
    shape = {"shots": shots, "queries": queries}
    training = Episodes(bank.labels, ways=min(ways, len(seen)), seed=seed, only=seen, **shape)
    judging = Episodes(bank.labels, ways=min(ways, len(unseen)), seed=seed + 1, only=unseen, **shape)
    return fit(
        model,
        make_optimizer(optimizer, model.parameters(), lr=lr),
        functools.partial(task_loss, head),
        EpisodeLoader(bank, training, episodes),
        epochs=epochs,
        budget="1x",
        policy="full",
        val_loader=EpisodeLoader(bank, judging, max(20, episodes // 5), augmented=False),
        metric=functools.partial(task_metric, head),
        graphs=False,  # the loss asks each task how many classes it has
        out=out,
        resume=resume,
        seed=seed,
        deterministic=deterministic,
        checkpoint_every=checkpoint_every,
        progress=progress,
        config={
            **(config or {}), "data": bank.name, "fingerprint": bank.fingerprint, "image_size": bank.image_size,
            "ways": ways, "shots": shots, "queries": queries,
        },
        weights_metadata=weights_metadata,
    )  # fmt: skip
