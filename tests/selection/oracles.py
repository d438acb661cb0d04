"""Brute force: every set of tensors, costed by the profile itself."""

from __future__ import annotations

from itertools import chain, combinations

from elastictrainer.profiling.profile import Profile


def brute_force(
    profile: Profile,
    scores: dict[str, float],
    *,
    seconds: float | None = None,
    limit_bytes: int | None = None,
    pinned: tuple[str, ...] = (),
) -> tuple[float, tuple[str, ...]]:
    """The best score and a set that has it; the pinned tensors count whatever their score is."""
    free = [name for name in profile.names if name not in pinned and scores[name] > 0]
    best, found = float("-inf"), ()
    for extra in chain.from_iterable(combinations(free, size) for size in range(len(free) + 1)):
        value = sum(scores[name] for name in (*pinned, *extra))
        if value <= best:
            continue
        names = [*pinned, *extra]
        if seconds is not None and profile.step_s(names) > seconds * (1 + 1e-9):
            continue
        if limit_bytes is not None and profile.peak_bytes(names) > limit_bytes:
            continue
        best, found = value, tuple(names)
    return best, found
