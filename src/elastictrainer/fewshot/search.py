"""SparseUpdate's scheme, found offline: what each layer contributes, then an evolutionary search under the ceilings.

Lin et al., On-Device Training Under 256KB Memory (NeurIPS 2022): train one layer alone and see what it gains, for each
layer and share of its channels; then search the set of layers and shares with the largest sum of gains that fits. The
search was described and never released. The scheme is fixed: every later task trains the same channels, those of the
largest weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from elastictrainer.backward import BackwardPrices
from elastictrainer.budget import parse_bytes, parse_share
from elastictrainer.data.episodes import Episodes
from elastictrainer.errors import BudgetError
from elastictrainer.fewshot.learner import Learner
from elastictrainer.fewshot.methods import Ceilings, Method
from elastictrainer.importance.potential import channel_norms
from elastictrainer.plan import Plan

__all__ = ["Gains", "contributions", "evolve", "find_scheme"]

SHARES = (0.25, 1.0)
Gains = dict[tuple[str, float], float]
"""What training a share of a layer (by its weight) alone adds to accuracy."""
Genome = NDArray[np.int64]  # for each layer 0 (rests) or the number of one of its parts


@dataclass(frozen=True, slots=True)
class _Part:
    trainable: tuple[str, ...]
    channels: Mapping[str, tuple[int, ...]]
    gain: float


def find_scheme(learner: Learner, episodes: Episodes, count: int, *, shares: Sequence[float] = SHARES) -> Plan:
    """The scheme for this network under the learner's ceilings, from `count` tasks of a source domain.

    Costs an adaptation for each task, layer and share; the search itself takes seconds.
    """
    norms = channel_norms(learner.model, [layer.weight for layer in learner.prices.layers])
    gains = contributions(learner, episodes, count, norms=norms, shares=shares)
    return evolve(learner.prices, gains, norms=norms, ceilings=learner.ceilings, seed=learner.settings.seed)


def contributions(
    learner: Learner,
    episodes: Episodes,
    count: int,
    *,
    norms: Mapping[str, Sequence[float]],
    shares: Sequence[float] = SHARES,
    known: Mapping[tuple[str, float], float] = MappingProxyType({}),
    on_gain: Callable[[str, float, float], None] = lambda weight, share, gain: None,
) -> Gains:
    """For each layer and share, the mean gain in accuracy over `count` tasks when nothing else trains.

    `known` gains, of an earlier search that was cut short, are not measured again; `on_gain` is told of new ones.
    """
    nothing = Method("none", "", "", lambda task: None)
    before = [learner.solve(nothing, episodes.episode(i), i).accuracy for i in range(count)]
    gains: Gains = dict(known)
    for layer in learner.prices.layers:
        for share in shares:
            if (layer.weight, share) in known:
                continue
            part = _part(learner.prices, layer.weight, share, norms, 0.0)
            plan = _plan(learner.prices, [part], None)
            alone = Method(f"{layer.weight} {share}", "", "", lambda task, plan=plan: plan)  # type: ignore[misc]
            after = [learner.solve(alone, episodes.episode(i), i).accuracy for i in range(count)]
            gains[layer.weight, share] = (math.fsum(after) - math.fsum(before)) / count
            on_gain(layer.weight, share, gains[layer.weight, share])
    return gains


def evolve(
    prices: BackwardPrices,
    gains: Gains,
    *,
    norms: Mapping[str, Sequence[float]],
    ceilings: Ceilings,
    seed: int = 0,
    population: int = 48,
    generations: int = 40,
) -> Plan:
    """The layers and shares with the largest sum of gains within the ceilings, by mutation, crossover and survival.

    What does not fit loses random layers until it does. Layers that gain nothing are left out.

    Raises:
        BudgetError: no layer that gains anything fits.
    """
    options = [
        [_part(prices, layer.weight, s, norms, g) for (w, s), g in gains.items() if w == layer.weight and g > 0]
        for layer in prices.layers
    ]
    most_bytes = math.inf if ceilings.memory is None else parse_bytes(ceilings.memory)
    most_macs = math.inf if ceilings.compute is None else parse_share(ceilings.compute) * prices.full.macs
    rng = np.random.default_rng(seed)
    sizes = np.asarray([len(parts) for parts in options])

    def chosen(genome: Genome) -> list[_Part]:
        return [options[i][genome[i] - 1] for i in np.flatnonzero(genome)]

    def fits(genome: Genome) -> bool:
        plan = _named(chosen(genome))
        spent = prices.spent(*plan)
        return spent.nbytes <= most_bytes and spent.macs <= most_macs

    def repaired(genome: Genome) -> Genome:
        while genome.any() and not fits(genome):
            genome[rng.choice(np.flatnonzero(genome))] = 0
        return genome

    def worth(genome: Genome) -> float:
        return math.fsum(part.gain for part in chosen(genome))

    def lone(i: int, option: int) -> Genome:
        genome = np.zeros(len(options), dtype=np.int64)
        genome[i] = option
        return repaired(genome)

    living = [lone(i, o) for i, parts in enumerate(options) for o in range(1, len(parts) + 1)]
    if not any(genome.any() for genome in living):
        raise BudgetError("no layer that gains anything fits the ceilings; raise them, or measure on more tasks")
    for _ in range(generations):
        living.sort(key=worth, reverse=True)
        living = living[:population]
        children = []
        for _ in range(population):
            mother, father = (living[int(rng.integers(len(living)))] for _ in range(2))
            child = np.where(rng.random(len(options)) < 0.5, mother, father)
            changed = rng.random(len(options)) < 2 / len(options)
            child[changed] = rng.integers(0, sizes[changed] + 1)
            children.append(repaired(child))
        living += children
    return _plan(prices, chosen(max(living, key=worth)), ceilings.memory)


def _part(
    prices: BackwardPrices, weight: str, share: float, norms: Mapping[str, Sequence[float]], gain: float
) -> _Part:
    layer = prices.by_weight[weight]
    count = max(1, round(share * layer.channels))
    if count == layer.channels:
        return _Part(layer.tensors, {}, gain)
    rows = tuple(sorted(np.argsort(-np.asarray(norms[weight]), kind="stable")[:count].tolist()))
    return _Part(layer.tensors, dict.fromkeys(layer.tensors, rows), gain)


def _named(parts: Sequence[_Part]) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    trainable = {name for part in parts for name in part.trainable}
    return trainable, {name: rows for part in parts for name, rows in part.channels.items()}


def _plan(prices: BackwardPrices, parts: Sequence[_Part], memory: str | int | None) -> Plan:
    trainable, channels = _named(parts)
    spent, profile = prices.spent(trainable, channels), prices.profile
    return Plan(
        trainable=tuple(name for name in profile.names if name in trainable), names=profile.names,
        step_s=math.nan, full_step_s=math.nan, peak_bytes=profile.memory.base_bytes + spent.nbytes,
        memory_bytes=None if memory is None else parse_bytes(memory), note="sparse_update", channels=channels,
        backward=spent, full_backward=prices.full,
    )  # fmt: skip
