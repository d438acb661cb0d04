"""Summary: the figures of a run put together, after an epoch (`metrics.jsonl`) and at its end (`result.json`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from elastictrainer.runtime.controller import Elastic
from elastictrainer.runtime.engine import Eager
from elastictrainer.runtime.evaluate import Score
from elastictrainer.runtime.meters import Meters
from elastictrainer.runtime.result import Record, Result, versions
from elastictrainer.runtime.settings import Settings, batch_size

__all__ = ["epoch_line", "make_result"]


def epoch_line(
    elastic: Elastic, record: Record, *, loss: float | None, score: Score | None, lr: float
) -> dict[str, Any]:
    """One line of `metrics.jsonl`: the epoch that is over, and the run up to now."""
    stats = elastic.stats
    return {
        "epoch": record.epoch + 1,
        "step": record.step,
        "loss": loss,
        "val_loss": score.loss if score else None,
        "val_accuracy": score.accuracy if score else None,
        "lr": lr,
        "train_s": _train_s(stats),
        "eval_s": record.eval_s,
        "step_s": stats["step_s"],
        "full_step_s": stats["full_step_s"],
        "predicted_ratio": stats["predicted_ratio"],
        "measured_ratio": stats["measured_ratio"],
        "overhead_s": stats["overhead_s"],
        "share_trained": stats["plans"][-1]["share_trained"],
        "plan": stats["plans"][-1]["id"],
        "peak_bytes": record.peak_bytes,
        "energy_j": record.energy_j,
    }


def make_result(
    elastic: Elastic,
    engine: Eager,
    record: Record,
    meters: Meters,
    *,
    settings: Settings,
    config: dict[str, Any],
    train_loader: Iterable[Any],
    test: Score | None,
    kept: int,
    folder: str | None,
) -> Result:
    """The outcome; `kept` is the epoch whose weights are."""
    stats = elastic.stats
    final = test.to_dict() if test else record.score_of(kept)
    profile = elastic.profile
    assert profile is not None
    return Result(
        policy=stats["policy"],
        importance=stats["importance"],
        budget=config["budget"] if stats["budget"] else None,
        seed=settings.seed,
        device=versions(meters.device)["device"],
        torch=str(torch.__version__),
        epochs=record.epoch,
        batch_size=batch_size(train_loader),
        steps=record.step,
        train_s=_train_s(stats),
        eval_s=record.eval_s,
        full_step_s=stats["full_step_s"],
        step_s=stats["step_s"],
        predicted_ratio=stats["predicted_ratio"],
        measured_ratio=stats["measured_ratio"],
        accuracy={
            "per_epoch": [score and score["accuracy"] for score in record.scores],
            "final": final["accuracy"] if final else None,
            "of": "test" if test else "val" if final else None,
        }
        | ({"share": final["share"]} if final and final.get("share", 1.0) < 1 else {}),
        loss={
            "per_epoch": record.losses,
            "val": [score and score["loss"] for score in record.scores],
            "final": final["loss"] if final else None,
        },
        best_epoch=None if record.best_epoch is None else record.best_epoch + 1,
        overhead_s=stats["overhead_s"],
        peak_bytes=record.peak_bytes,
        deciding_peak_bytes=record.deciding_peak_bytes,
        flops=_flops(stats, record),
        energy_j=record.energy_j,
        energy_meter=meters.meter.covers,
        resting_state_bytes=elastic.resting_state_bytes(),
        plans=stats["plans"],
        profile_error=asdict(profile.error),
        restarts=record.restarts,
        config=config,
        folder=folder,
        compilations=stats["compilations"],
        features=stats.get("features"),
        graphs=engine.account(),
    )


def _flops(stats: dict[str, Any], record: Record) -> int | None:
    """Of all steps, each as its plan's was counted; None if one was not."""
    steps = {event["id"]: 0 for event in stats["plans"]}
    for event in stats["plans"]:
        steps[event["id"]] += event["steps"]
    counted = [(record.flops_by_plan.get(plan), count) for plan, count in steps.items() if count]
    flops = [a_step * count for a_step, count in counted if a_step is not None]
    return sum(flops) if len(flops) == len(counted) else None


def _train_s(stats: dict[str, Any]) -> float:
    return float(stats["spent_s"] + sum(stats["overhead_s"].values()))
