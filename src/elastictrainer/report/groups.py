"""Runs that are alike in all but the seed, taken together: a group is one way to train, and its runs are its spread."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastictrainer.report.reading import RunRecord
from elastictrainer.report.words import number

__all__ = ["Group", "Spread", "group_runs"]

_NO_DIFFERENCE = ("seed", "environment", "classes", "fingerprint")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the runs of a group: the mean, and between what it lay."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(statistics.mean(values), min(values), max(values), len(values)) if values else None


@dataclass(frozen=True)
class Group:
    """`workload` is the network and its data; `family` what remains of the name without the budget."""

    name: str
    workload: str
    model: str
    data: str
    policy: str
    importance: str | None
    budget: str | None
    epochs: int
    lr: float | None
    runs: tuple[RunRecord, ...]

    @property
    def family(self) -> str:
        """Policy and importance: what is the same method at another budget."""
        own = None if self.importance in (self.policy, "elastic") else self.importance  # what is usual goes unsaid
        return " ".join(filter(None, (self.policy, own)))

    def over(self, figure: Callable[[RunRecord], float | None]) -> Spread | None:
        """A figure of every run that has it."""
        return Spread.of([value for run in self.runs if (value := figure(run)) is not None])

    def curve(self, key: str) -> list[tuple[float, Spread, int]]:
        """(mean seconds of training, the figure, epoch): as far as every run of the group has come."""
        by_run = [{epoch: (at, value) for at, value, epoch in run.curve(key)} for run in self.runs]
        shared = sorted(set.intersection(*(set(curve) for curve in by_run))) if by_run else []
        found = []
        for epoch in shared:
            spread = Spread.of([curve[epoch][1] for curve in by_run])
            assert spread is not None
            found.append((statistics.mean(curve[epoch][0] for curve in by_run), spread, epoch))
        return found

    def seconds_to(self, accuracy: float) -> list[float]:
        """Seconds of training after which each run first had this validation accuracy; runs that never had are out."""
        firsts = [
            next((at for at, value, _ in run.curve("val_accuracy") if value >= accuracy), None) for run in self.runs
        ]
        return [at for at in firsts if at is not None]


def group_runs(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Group]:
    """The groups, in order of their first run. A name says as little as tells a group from the others on its workload.

    `names` are the runs' own, for groups that nothing else tells apart.
    """
    found: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        found.setdefault(_key(run), []).append(place)
    groups = [_group([runs[place] for place in places]) for places in found.values()]
    for tell in (_nothing, _epochs, _rate, _both):
        labels = [tell(group) for group in groups]
        counts = Counter((group.workload, label) for group, label in zip(groups, labels))
        groups = [
            replace(group, name=label) if counts[group.workload, label] == 1 and not group.name else group
            for group, label in zip(groups, labels)
        ]
    own = [names[places[0]] for places in found.values()]
    return [group if group.name else replace(group, name=name) for group, name in zip(groups, own)]


def _group(runs: Sequence[RunRecord]) -> Group:
    first = runs[0]
    data = first.config.get("data")
    return Group(
        name="",
        workload=first.title,
        model=first.title.removesuffix(f" on {data}"),
        data=str(data or ""),
        policy=first.policy,
        importance=first.importance,
        budget=first.budget,
        epochs=int(number(first.config.get("epochs")) or len(first.epochs)),
        lr=_lr(first.config),
        runs=tuple(runs),
    )


def _nothing(group: Group) -> str:
    return " ".join(filter(None, (group.family, group.budget)))


def _epochs(group: Group) -> str:
    return f"{_nothing(group)}, {group.epochs} epoch{'s' if group.epochs > 1 else ''}"


def _rate(group: Group) -> str:
    return f"{_nothing(group)}, lr {group.lr:g}" if group.lr is not None else _nothing(group)


def _both(group: Group) -> str:
    return f"{_epochs(group)}, lr {group.lr:g}" if group.lr is not None else _epochs(group)


def _lr(config: dict[str, Any]) -> float | None:
    optimizer = config.get("optimizer")
    groups = optimizer.get("groups") if isinstance(optimizer, dict) else None
    return number(groups[0].get("lr")) if isinstance(groups, list) and groups and isinstance(groups[0], dict) else None


def _key(run: RunRecord) -> str:
    options = {key: value for key, value in run.config.items() if key not in _NO_DIFFERENCE}
    return json.dumps([run.title, run.policy, run.importance, run.budget, options], sort_keys=True, default=str)
