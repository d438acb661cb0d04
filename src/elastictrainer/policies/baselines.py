"""What elastic training is compared with: plans that look at no importance and stand for the whole run."""

from __future__ import annotations

from collections.abc import Mapping

from elastictrainer.budget import Budget, format_bytes, format_seconds, parse_bytes
from elastictrainer.errors import BudgetError
from elastictrainer.plan import Plan
from elastictrainer.policies.policy import Policy
from elastictrainer.profiling.profile import Profile
from elastictrainer.selection import Pin, pinned

__all__ = ["BN_BIAS", "FULL", "HEAD", "PRUNETRAIN", "SUFFIX"]

Scores = Mapping[str, float] | None
BudgetLike = str | float | Budget | None
MemoryLike = str | int | None


def plan_full(profile: Profile, scores: Scores, *, budget: BudgetLike, pin: Pin, memory: MemoryLike) -> Plan:
    """Everything that the loss reaches."""
    return _fixed(profile, profile.names, "full", memory)


def plan_prunetrain(profile: Profile, scores: Scores, *, budget: BudgetLike, pin: Pin, memory: MemoryLike) -> Plan:
    """Everything that is still there: what PruneTrain leaves out is gone from the network."""
    return _fixed(profile, profile.names, "prunetrain", memory)


def plan_head(profile: Profile, scores: Scores, *, budget: BudgetLike, pin: Pin, memory: MemoryLike) -> Plan:
    """The output-most layer, and whatever else is pinned."""
    return _fixed(profile, (*profile.graph.head, *pinned(profile, pin)), "head", memory)


def plan_bn_bias(profile: Profile, scores: Scores, *, budget: BudgetLike, pin: Pin, memory: MemoryLike) -> Plan:
    """Every vector (the biases, and the scales and shifts of norm layers) and the pinned tensors.

    By shape rather than by layer type: in networks of convolutions, linear layers and norms the parameters with one
    dimension are exactly these, and no table of class names has to keep up with new ones.
    """
    vectors = [tensor.name for tensor in profile.graph.tensors if len(tensor.shape) <= 1]
    return _fixed(profile, (*vectors, *pinned(profile, pin)), "bn_bias", memory)


def plan_suffix(profile: Profile, scores: Scores, *, budget: BudgetLike, pin: Pin, memory: MemoryLike) -> Plan:
    """The pinned tensors, then from the output side every next tensor for as long as both budgets hold.

    The first tensor that does not fit ends it: a suffix has no holes. Found by bisection, since cost only grows.
    """
    held = set(pinned(profile, pin))
    order = [name for name in profile.names if name not in held]
    limit_s = None if budget is None else Budget.parse(budget).seconds(profile.full_step_s)
    limit_bytes = None if memory is None else parse_bytes(memory)

    def names(count: int) -> list[str]:
        return [*held, *order[:count]]

    def fits(count: int) -> bool:
        if limit_s is not None and profile.step_s(names(count)) > limit_s:
            return False
        return limit_bytes is None or profile.peak_bytes(names(count)) <= limit_bytes

    least = 0 if held else 1
    if not fits(least):
        raise _too_small(profile, names(least), limit_s, limit_bytes, budget)
    low, high = least, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return Plan.of(profile, names(low), note="suffix")


def _fixed(profile: Profile, names: tuple[str, ...] | list[str], note: str, memory: MemoryLike) -> Plan:
    wanted = set(names)
    plan = Plan.of(profile, [name for name in profile.names if name in wanted], note=note)
    if memory is not None and plan.peak_bytes > parse_bytes(memory):
        raise BudgetError(
            f"policy {note!r} holds {format_bytes(plan.peak_bytes)} and memory is limited to "
            f"{format_bytes(parse_bytes(memory))}; allow that much, or use policy 'elastic' or 'suffix', which fit",
            least=float(plan.peak_bytes),
            of="memory",
        )
    return plan


def _too_small(
    profile: Profile, names: list[str], limit_s: float | None, limit_bytes: int | None, budget: BudgetLike
) -> BudgetError:
    step_s, peak = profile.step_s(names), profile.peak_bytes(names)
    if limit_s is not None and step_s > limit_s:
        asked = Budget.parse(budget if budget is not None else 1.0)
        least = step_s / profile.full_step_s if asked.kind == "ratio" else step_s
        shown = f"{least:.3f}x" if asked.kind == "ratio" else format_seconds(least)
        return BudgetError(f"budget {asked} is below the cheapest suffix; the least that works is {shown}", least=least)
    return BudgetError(
        f"memory {format_bytes(limit_bytes or 0)} is below the smallest suffix; the least is {format_bytes(peak)}",
        least=float(peak),
        of="memory",
    )


FULL = Policy(
    "full",
    "Train everything, whatever the budget says.",
    "",
    plan_full,
)
HEAD = Policy("head", "Train only the output layer: traditional transfer learning.", "", plan_head)
BN_BIAS = Policy(
    "bn_bias",
    "Train norm layers, biases and the head; weights of convolutions and linear layers rest.",
    "Cai et al., TinyTL, NeurIPS 2020; Mudrakarta et al., K for the Price of 1, ICLR 2019",
    plan_bn_bias,
)
SUFFIX = Policy(
    "suffix", "Train the last tensors that fit the budget, the same ones throughout: a control.", "", plan_suffix,
    within_budget=True,
)  # fmt: skip
PRUNETRAIN = Policy(
    "prunetrain",
    "Train everything with group lasso, and take channels that reach zero out of the network at every interval.",
    "Lym et al., PruneTrain, SC 2019",
    plan_prunetrain,
    shrinks=True,
)
