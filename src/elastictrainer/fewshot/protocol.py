"""The few-shot protocol: many tasks, every method on each, accuracy with its interval and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from elastictrainer.data.episodes import Episodes
from elastictrainer.fewshot.interval import Mean
from elastictrainer.fewshot.learner import Learner
from elastictrainer.fewshot.methods import Method

__all__ = ["Summary", "run_episodes", "summarise"]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """One method over all tasks; seconds are medians over tasks, bytes and multiply-adds means."""

    method: str
    accuracy: Mean
    backward_bytes: float
    backward_share: float
    remembered_bytes: float
    decide_s: float
    steps_s: float


def run_episodes(
    learner: Learner,
    methods: Sequence[Method],
    episodes: Episodes,
    count: int,
    *,
    done: Iterable[Mapping[str, Any]] = (),
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """A row for each task and method, those of `done` not made again.

    Within a task the methods take turns, beginning with another one each time: whatever the machine is doing meanwhile
    falls on all alike.
    """
    rows = [dict(row) for row in done]
    known = {(row["episode"], row["method"]) for row in rows}
    for index in range(count):
        turn = index % max(len(methods), 1)
        for method in [*methods[turn:], *methods[:turn]]:
            if (index, method.name) in known:
                continue
            episode = episodes.episode(index)
            outcome = learner.solve(method, episode, index)
            spent = None if outcome.plan is None else outcome.plan.backward
            full = learner.plain.full
            row = {
                "episode": index, "method": method.name, "accuracy": outcome.accuracy, "ways": episode.ways,
                "support": len(episode.support), "decide_s": outcome.decide_s, "steps_s": outcome.steps_s,
                "backward_bytes": 0 if spent is None else spent.nbytes,
                "saved_bytes": 0 if spent is None else spent.saved_bytes,
                "full_bytes": full.nbytes,
                "remembered_bytes": outcome.remembered_bytes,
                "backward_share": 0.0 if spent is None else spent.macs / full.macs,
                "plan": None if outcome.plan is None else outcome.plan.id,
            }  # fmt: skip
            rows.append(row)
            on_row(row)
    return rows


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[Summary]:
    """By method, in order of appearance. A method's first task warms caches up and is timed only if alone."""
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_method.setdefault(row["method"], []).append(row)
    return [
        Summary(
            method,
            Mean.of([row["accuracy"] for row in found]),
            sum(row["backward_bytes"] for row in found) / len(found),
            sum(row["backward_share"] for row in found) / len(found),
            sum(row["remembered_bytes"] for row in found) / len(found),
            median(row["decide_s"] for row in found[1:] or found),
            median(row["steps_s"] for row in found[1:] or found),
        )
        for method, found in by_method.items()
    ]
