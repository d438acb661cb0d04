"""Meta-training: teach a network's features to be compared, on many small tasks of a source domain.

Prototypical networks (Snell et al., 2017): each step is one task, its queries compared with the means of its support,
gradients through both. It is ordinary training of everything with tasks as batches, so it goes through the one loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastictrainer.data.episodes import Bank, Episodes
from elastictrainer.fewshot.heads import Prototypes

__all__ = ["EpisodeLoader", "TaskBatch", "held_out", "task_loss", "task_metric"]


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
