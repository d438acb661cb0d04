"""Which output channels of which layers train, within ceilings of backward memory and compute (TinyTrain).

    s_i = P_i / [ (params_i / max_l params_l) * (macs_i / max_l macs_l) ]        P_i = sum_o Delta_o

Layers are taken by `s_i` for as long as both ceilings hold, in each the channels of the largest `Delta_o`. How many of
a layer's channels to take is not said in the paper: here a layer gives up to a share of them, and of several shares the
one whose plan is worth most wins. What a plan is worth is `sum_i s_i * (the chosen channels' part of P_i)`; the integer
programme of `channels_milp.py` finds the best plan for that, and so says how far greedy is from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from elastictrainer.backward import BackwardPrices, Layer, Spent
from elastictrainer.budget import parse_bytes, parse_share
from elastictrainer.errors import BudgetError, ConfigError
from elastictrainer.plan import Plan

__all__ = ["By", "ChannelChoice", "Option", "Term", "affordable", "select_channels"]

Term = Literal["potential", "params", "macs"]
By = Literal["fisher", "l2", "random"]
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
STEPS = 16  # a layer trains in a sixteenth of its channels, in two, ...: finer steps buy nothing that can be measured


def select_channels(
    prices: BackwardPrices,
    potential: Mapping[str, Sequence[float]],
    *,
    memory: str | int | None = None,
    compute: str | float | None = None,
    pin: Iterable[str] = (),
    share: float | None = None,
    terms: Iterable[Term] = get_args(Term),
    by: By = "fisher",
    norms: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    exact: bool = False,
) -> Plan:
    """The layers and channels worth most on a task, within ceilings. Pure: it needs no model.

        plan = select_channels(prices, potential, memory="1MiB", compute="15%")
        applied = et.apply(model, plan, optimizer=optimizer)

    Args:
        prices: `price_backward`'s, for the batch size that training will use.
        potential: `fisher_potential`'s, by weight. A layer that it does not name is not trained.
        memory: the most that backward may keep: saved activations, gradients, optimizer state and copies of rows.
        compute: the most multiply-adds backward may take, as a share of full training's (`"15%"`).
        pin: tensors that train whole whatever they are worth, such as a new output layer.
        share: the largest share of a layer's channels; by default the best of 1, 1/2, 1/4, 1/8 and 1/16.
        terms: of the criterion, those that count; leaving one out is the paper's ablation.
        by: which channels of a layer: of the largest Fisher potential, the largest weights (`norms`), or by lot.
        exact: the best plan by the integer programme (needs scipy) instead of the greedy one. Plans of `share` None
            only; the plan states its proven gap.

    Raises:
        BudgetError: a ceiling is below the cheapest plan; it states the least that works.
        ConfigError: nothing to choose by, or channels by L2 without norms.

    Prices that were timed (`time_backward`) let the plan state its seconds; and a layer that would take longer in part
    than whole trains whole, where the ceilings allow it.

    Costs milliseconds a layer; the integer programme from a second to minutes.
    """
    choice = ChannelChoice(
        prices, potential, terms=frozenset(terms), by=by, norms=norms, seed=seed,
        pinned=tuple(dict.fromkeys(pin)),
        memory_bytes=None if memory is None else parse_bytes(memory),
        most_macs=None if compute is None else math.floor(parse_share(compute) * prices.full.macs),
    )  # fmt: skip
    choice.check(memory, compute)
    gap: float | None = None
    if exact:
        from elastictrainer.selection.channels_milp import best

        taken, gap = best(choice)
    else:
        tried = [choice.greedy(limit) for limit in (SHARES if share is None else (share,))]
        taken = max(tried, key=choice.worth)
    if share is None:
        taken = choice.widened(taken)
    return choice.plan(taken, note=f"tinytrain{'' if compute is None else f', compute {compute}'}", gap=gap)


def affordable(
    prices: BackwardPrices, *, memory: str | int | None = None, compute: str | float | None = None
) -> tuple[str, ...]:
    """The layers, by weight, that could train in some channels if nothing else did; all where none could.

    What is left out is too dear in the fewest channels that `select_channels` would take, whichever these are: no
    potential could bring it into a plan, so none need be measured. Pure, and the same for every task.
    """
    most_bytes = math.inf if memory is None else parse_bytes(memory)
    most_macs = math.inf if compute is None else math.floor(parse_share(compute) * prices.full.macs)
    found = []
    for layer in prices.layers:
        # The first channels, as few as the smallest option has: they lie in as few groups as so many can.
        rows = tuple(range(-(-layer.channels // STEPS)))
        spent = prices.spent(layer.tensors, {} if len(rows) == layer.channels else dict.fromkeys(layer.tensors, rows))
        if spent.nbytes <= most_bytes and spent.macs <= most_macs:
            found.append(layer.weight)
    return tuple(found) or tuple(layer.weight for layer in prices.layers)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to train a layer: so many of its channels, best first."""

    layer: Layer
    rows: tuple[int, ...]
    worth: float

    @property
    def whole(self) -> bool:
        return len(self.rows) == self.layer.channels


Taken = tuple[Option, ...]


@dataclass(frozen=True, eq=False)
class ChannelChoice:
    """The problem that greedy and the integer programme both solve."""

    prices: BackwardPrices
    potential: Mapping[str, Sequence[float]]
    terms: frozenset[Term]
    by: By
    norms: Mapping[str, Sequence[float]] | None
    seed: int
    pinned: tuple[str, ...]
    memory_bytes: int | None
    most_macs: int | None

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """What there is to choose from."""
        held = set(self.pinned)
        return tuple(x for x in self.prices.layers if x.weight in self.potential and x.weight not in held)

    @cached_property
    def scores(self) -> dict[str, float]:
        """`s_i` by weight, from the terms that count."""
        most_params = max((layer.params for layer in self.prices.layers), default=1)
        most_macs = max((layer.macs for layer in self.prices.layers), default=1)
        found = {}
        for layer in self.layers:
            score = math.fsum(self.potential[layer.weight]) if "potential" in self.terms else 1.0
            score /= layer.params / most_params if "params" in self.terms else 1.0
            score /= max(layer.macs, 1) / most_macs if "macs" in self.terms else 1.0
            found[layer.weight] = score
        return found

    @cached_property
    def options(self) -> dict[str, Taken]:
        """For each layer, what it may be taken for, smallest first."""
        return {layer.weight: tuple(self._options(layer)) for layer in self.layers}

    def _options(self, layer: Layer) -> Iterable[Option]:
        worth = np.asarray(self.potential[layer.weight], dtype=np.float64)
        if len(worth) != layer.channels:
            raise ConfigError(f"{layer.weight} has {layer.channels} channels and {len(worth)} potentials")
        order = np.argsort(-self._rank(layer, worth), kind="stable")
        total = worth.sum()
        # Of a layer that is worth nothing, or where worth does not count, every channel is alike.
        part = worth / total if total > 0 else np.full(layer.channels, 1 / layer.channels)
        caught = np.cumsum(part[order])
        for count in sorted({-(-layer.channels * step // STEPS) for step in range(1, STEPS + 1)}):
            rows = tuple(sorted(order[:count].tolist()))
            yield Option(layer, rows, self.scores[layer.weight] * float(caught[count - 1]))

    def _rank(self, layer: Layer, worth: np.ndarray) -> np.ndarray:
        if self.by == "fisher":
            return worth
        if self.by == "l2":
            if self.norms is None:
                raise ConfigError("channels by L2 need norms; pass norms=channel_norms(model, potential)")
            return np.asarray(self.norms[layer.weight], dtype=np.float64)
        if self.by == "random":
            digits = [ord(letter) for letter in layer.weight]
            return np.random.default_rng([self.seed, *digits]).random(layer.channels)
        raise ConfigError(f"by={self.by!r} is no way to choose channels; use one of {', '.join(get_args(By))}")

    def worth(self, taken: Taken) -> float:
        return math.fsum(option.worth for option in taken)

    def named(self, taken: Taken) -> tuple[set[str], dict[str, tuple[int, ...]]]:
        """The tensors that train, and of those in part their channels."""
        trainable = set(self.pinned)
        channels = {}
        for option in taken:
            trainable.update(option.layer.tensors)
            if not option.whole:
                channels.update(dict.fromkeys(option.layer.tensors, option.rows))
        return trainable, channels

    def spent(self, taken: Taken) -> Spent:
        return self.prices.spent(*self.named(taken))

    def fits(self, taken: Taken) -> bool:
        spent = self.spent(taken)
        return (self.most_macs is None or spent.macs <= self.most_macs) and (
            self.memory_bytes is None or spent.nbytes <= self.memory_bytes
        )

    def greedy(self, share: float) -> Taken:
        """Layers by score; each gives as many channels, up to the share, as still fit."""
        taken: Taken = ()
        for weight in sorted(self.scores, key=lambda weight: -self.scores[weight]):
            if self.scores[weight] <= 0:
                continue
            options = self.options[weight]
            limit = max(share * options[0].layer.channels, len(options[0].rows))
            within = [option for option in options if len(option.rows) <= limit]
            if not self.fits((*taken, within[0])):
                continue  # most layers, and then one look is enough
            # Cost only grows with the channels: bisect.
            low, high = 1, len(within)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.fits((*taken, within[middle - 1])) else (low, middle - 1)
            taken = (*taken, within[low - 1])
        return taken

    def widened(self, taken: Taken) -> Taken:
        """With layers whole that in part take longer, by the clock; that is worth more, too. No clock, no change."""
        if self.prices.clock is None:
            return taken
        for i, option in enumerate(taken):
            wider = (*taken[:i], self.options[option.layer.weight][-1], *taken[i + 1 :])
            if self.prices.step_s(*self.named(wider)) < self.prices.step_s(*self.named(taken)) and self.fits(wider):
                taken = wider
        return taken

    def check(self, memory: str | int | None, compute: str | float | None) -> None:
        """Refuse ceilings under which nothing trains, naming the least that works."""
        if not self.layers and not self.pinned:
            raise ConfigError("no layer to choose from: the potential names none of the layers that were traced")
        smallest = [self.options[x.weight][0] for x in self.layers if self.scores[x.weight] > 0]
        if not smallest and not self.pinned:
            raise ConfigError("no layer has a Fisher potential above zero: the loss is flat on these samples")
        if self.pinned:
            costs, what = [self.spent(())], f"what is pinned ({', '.join(self.pinned[:3])})"
        else:
            costs, what = [self.spent((option,)) for option in smallest], "the smallest part of the cheapest layer"
        full = max(self.prices.full.macs, 1)
        macs = min(cost.macs for cost in costs)
        if self.most_macs is not None and macs > self.most_macs:
            raise BudgetError(
                f"compute {compute} is below what {what} takes; the least that works is {_percent(macs / full)}",
                least=macs / full,
            )
        nbytes = min(cost.nbytes for cost in costs if self.most_macs is None or cost.macs <= self.most_macs)
        if self.memory_bytes is not None and nbytes > self.memory_bytes:
            at = "" if compute is None else f" (with compute {compute})"
            kib = math.ceil(nbytes / 102.4) / 10
            raise BudgetError(
                f"memory {memory} is below what {what} takes{at}; the least that works is {kib}KiB",
                least=float(nbytes),
            )

    def plan(self, taken: Taken, *, note: str, gap: float | None) -> Plan:
        profile = self.prices.profile
        trainable, channels = self.named(taken)
        spent = self.prices.spent(trainable, channels)
        clock = self.prices.clock
        step_s = self.prices.step_s(trainable, channels)
        if clock is not None and step_s >= clock.full_step_s:
            note += "; by the clock it takes as long as full training: what it saves is memory"
        return Plan(
            trainable=tuple(name for name in profile.names if name in trainable),
            names=profile.names,
            step_s=step_s,
            full_step_s=math.nan if clock is None else clock.full_step_s,
            peak_bytes=profile.memory.base_bytes + spent.nbytes,
            memory_bytes=self.memory_bytes,
            pinned=self.pinned,
            optimal=gap is not None and gap <= 1e-6,
            gap=gap,
            note=note,
            score_values=tuple(self.scores.get(name, 0.0) for name in profile.names),
            channels={name: channels[name] for name in profile.names if name in channels},
            backward=spent,
            full_backward=self.prices.full,
        )


def _percent(share: float) -> str:
    return f"{math.ceil(share * 1e4) / 100:.2f}%"
