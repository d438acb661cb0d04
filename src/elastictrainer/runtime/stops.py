"""Ways in which a run is stopped from outside: Ctrl-C, and memory that runs out."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from elastictrainer.budget import format_bytes
from elastictrainer.errors import BudgetError
from elastictrainer.runtime.controller import Elastic

__all__ = ["Interrupts", "explain_memory"]


class Interrupts:
    """Turn the first Ctrl-C into a wish, so that a step is never cut in two; the second one stops at once.

    Only the main thread may handle signals; elsewhere Ctrl-C stays what it was.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._wish)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _wish(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def explain_memory(elastic: Elastic, *, step: int) -> str:
    """What was being trained when memory ran out, and the plan that would fit in its stead."""
    profile, plan = elastic.profile, elastic.plan
    if profile is None or plan is None:
        return (
            f"out of memory at step {step}, before there was a plan: a full step must fit once to be measured; "
            "use a smaller batch"
        )
    total = _total_bytes(next(elastic.model.parameters()).device)
    # Where even the standing plan should have fitted, others hold memory, or the prediction is low: aim well below it.
    limit = int(min(0.9 * total, 0.8 * plan.peak_bytes))
    held, there = format_bytes(plan.peak_bytes), format_bytes(total)
    story = f"out of memory at step {step}: the plan was predicted to hold {held} of {there}"
    scores = elastic.scores or dict.fromkeys(profile.names, 1.0)
    try:
        # No dearer than the plan that stands, whatever the budget was for: a step, or a run.
        smaller = elastic.policy.plan(profile, scores, budget=max(plan.ratio, 1e-3), pin=elastic.pin, memory=limit)
    except BudgetError as error:
        return f"{story}; no plan fits in {format_bytes(limit)} ({error}); use a smaller batch"
    return (
        f"{story}; with memory='{format_bytes(limit)}' a plan of {len(smaller.trainable)} tensors at "
        f"{smaller.ratio:.2f}x would hold {format_bytes(smaller.peak_bytes)}"
    )


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**40
