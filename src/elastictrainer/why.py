"""Why a tensor is in a plan or out of it: its score, its price now, and what would have to make room."""

from __future__ import annotations

from dataclasses import dataclass

from elastictrainer.budget import format_bytes, format_seconds
from elastictrainer.plan import Plan
from elastictrainer.profiling.profile import Profile

__all__ = ["Why", "explain"]


@dataclass(frozen=True)
class Why:
    """One tensor's place in a plan. `str()` gives the reason as a sentence.

    `price_s` is what the tensor adds to the step on top of the rest of the plan, operations that only it needs reached
    included: to be paid if it is out, freed if it is in. `price_bytes` is the same for the peak. `displaces` are the
    tensors that would have to leave to make room for it, fewest importance per second first; `frees_for` the most
    important ones that its room would let in.
    """

    name: str
    trained: bool
    pinned: bool
    score: float | None
    price_s: float
    price_bytes: int
    displaces: tuple[str, ...] = ()
    displaced_score: float = 0.0
    frees_for: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        return self.reason


def explain(plan: Plan, profile: Profile, name: str) -> Why:
    """Look at the plan without, or with, this tensor."""
    profile.graph.indices([name])  # an unknown name is an error that says so
    scores = plan.scores or {}
    score = scores.get(name)
    trained = name in plan.trainable
    without = [n for n in plan.trainable if n != name]
    with_it = [*without, name]
    price_s = profile.step_s(with_it) - profile.step_s(without)
    price_bytes = profile.peak_bytes(with_it) - profile.peak_bytes(without)
    limits = _Limits(plan, profile)
    worth = "no score was given" if score is None else f"its score is {score:.4g}"
    price = f"{format_seconds(max(price_s, 0.0))} a step and {format_bytes(max(price_bytes, 0))} of peak memory"
    about = Why(name, trained, name in plan.pinned, score, price_s, price_bytes)

    def because(reason: str, **more: object) -> Why:
        return Why(**{**_shallow(about), **more, "reason": f"{name} {reason}"})  # type: ignore[arg-type]

    if trained:
        if name in plan.pinned:
            return because(f"trains because it is pinned; {worth} and dropping it would free {price}")
        inside = set(plan.trainable)
        others = sorted((n for n in plan.names if n not in inside and scores.get(n, 0.0) > 0), key=lambda n: -scores[n])
        frees_for = tuple(n for n in others if limits.hold([*without, n]))[:3]
        instead = (
            f"; in its place {' or '.join(frees_for)} would fit, worth at most {scores[frees_for[0]]:.4g}"
            if frees_for
            else ""
        )
        return because(f"trains: {worth}, and dropping it would free {price}{instead}", frees_for=frees_for)
    if score is None:
        return because(f"rests: {worth}, and training it would add {price}")
    if score <= 0:
        return because(f"rests: {worth}, so training it now would not lower the loss; it would add {price}")
    if limits.hold(with_it):
        return because(f"rests although it fits: {worth} and it would add {price}; the plan was not chosen by score")
    leave = _displaced(plan, profile, limits, scores, with_it, name)
    if leave is None:
        return because(
            f"rests: {worth} and it would add {price}, which does not fit even with nothing but the pinned tensors"
        )
    lost = sum(scores.get(n, 0.0) for n in leave)
    shown = ", ".join(leave[:3]) + (f" and {len(leave) - 3} more" if len(leave) > 3 else "")
    return because(
        f"rests: {worth} and it would add {price}; to make room {shown} would have to leave, worth {lost:.4g} together",
        displaces=tuple(leave),
        displaced_score=lost,
    )


class _Limits:
    """The budgets of a plan; a plan without any is held to what it costs itself."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        free = plan.budget is None and plan.memory_bytes is None
        self.profile = profile
        self.step_s = plan.budget.seconds(profile.full_step_s) if plan.budget else plan.step_s if free else None
        self.peak_bytes = plan.memory_bytes

    def hold(self, names: list[str]) -> bool:
        if self.step_s is not None and self.profile.step_s(names) > self.step_s:
            return False
        return self.peak_bytes is None or self.profile.peak_bytes(names) <= self.peak_bytes


def _displaced(
    plan: Plan, profile: Profile, limits: _Limits, scores: dict[str, float], names: list[str], wanted: str
) -> list[str] | None:
    """Tensors to drop until the wanted one fits: the least score per second first, and none that is not needed."""
    full_s = profile.step_s(names)

    def loss_per_second(name: str) -> float:
        freed = full_s - profile.step_s([n for n in names if n != name])
        return scores.get(name, 0.0) / max(freed, 1e-12)

    droppable = sorted((n for n in plan.trainable if n not in plan.pinned and n != wanted), key=loss_per_second)
    leave: list[str] = []
    while not limits.hold([n for n in names if n not in leave]):
        if len(leave) == len(droppable):
            return None
        leave.append(droppable[len(leave)])
    for name in sorted(leave, key=lambda n: -scores.get(n, 0.0)):
        rest = [n for n in leave if n != name]
        if limits.hold([n for n in names if n not in rest]):
            leave = rest
    return leave


def _shallow(why: Why) -> dict[str, object]:
    return {name: getattr(why, name) for name in why.__dataclass_fields__}
