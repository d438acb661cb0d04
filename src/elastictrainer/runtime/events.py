"""Events: what is kept of every plan that stood, in plain dicts: a controller's history, and `plans.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from elastictrainer.plan import Plan
from elastictrainer.runtime.apply import unwrap

__all__ = ["new_event", "predicted_ratio", "rebuilt_so_far"]


def new_event(plan: Plan, model: nn.Module, *, plan_id: str, **when: Any) -> dict[str, Any]:
    """A plan begins to stand: nothing was spent on it yet."""
    params = dict(unwrap(model).named_parameters())
    total = sum(p.numel() for p in params.values())
    return {
        **when,
        "id": plan_id,
        "tensors": len(plan.trainable),
        "share_trained": sum(params[n].numel() for n in plan.trainable if n in params) / max(total, 1),
        "predicted_step_s": plan.step_s,
        "predicted_ratio": plan.ratio,
        "peak_bytes": plan.peak_bytes,
        "steps": 0,
        "spent_s": 0.0,
    }


def predicted_ratio(history: Sequence[dict[str, Any]]) -> float | None:
    """Of the steps so far, each at what its plan was predicted to cost."""
    spent = [(event["predicted_ratio"], event["steps"]) for event in history if event["steps"]]
    steps = sum(count for _, count in spent)
    return sum(ratio * count for ratio, count in spent) / steps if steps else None


def rebuilt_so_far(history: Sequence[dict[str, Any]]) -> int:
    """How often the network under a plan has lost channels."""
    return sum(event["reason"] == "rebuilt" for event in history)
