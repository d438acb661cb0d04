"""How much training a tensor now would lower the loss. One signature for all; scores are plain `{name: float}`.

>>> for entry in IMPORTANCES.values():
...     print(f"{entry.name}: {entry.description}")
elastic: gradient times the update that the optimizer would make now
gradient: gradient magnitude, sum |g|
fisher: empirical Fisher information, sum g^2
magnitude: weight magnitude, sum |w|
uniform: every tensor alike
random: a number between 0 and 1, by seed and name
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from elastictrainer.errors import ConfigError
from elastictrainer.importance.controls import magnitude, random, uniform
from elastictrainer.importance.measures import elastic, fisher, gradient
from elastictrainer.importance.potential import Potential, channel_norms, fisher_potential
from elastictrainer.importance.probe import LossFn

__all__ = [
    "IMPORTANCES",
    "Importance",
    "LossFn",
    "Potential",
    "Score",
    "channel_norms",
    "elastic",
    "find_importance",
    "fisher",
    "fisher_potential",
    "gradient",
    "magnitude",
    "random",
    "uniform",
]


class Score(Protocol):
    """The one signature of every importance; see `elastic` for the arguments."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFn,
        batches: Iterable[Any],
        *,
        names: Iterable[str] | None = None,
        gradient_batches: Iterable[Any] | None = None,
        scaler: GradScaler | None = None,
        seed: int = 0,
    ) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Importance:
    """A measure of importance, as listed by `elastictrainer ls`.

    `needs_batches` is False where scores come without looking at data, given the names: no probe has to be drawn.
    """

    name: str
    description: str
    paper: str
    fn: Score
    needs_batches: bool = True


IMPORTANCES: dict[str, Importance] = {
    entry.name: entry
    for entry in (
        Importance(
            "elastic",
            "gradient times the update that the optimizer would make now",
            "ElasticTrainer (MobiSys'23), sections 3.1 and 4",
            elastic,
        ),
        Importance("gradient", "gradient magnitude, sum |g|", "baseline of ElasticTrainer (MobiSys'23)", gradient),
        Importance("fisher", "empirical Fisher information, sum g^2", "after TinyTrain (ICML'24), by tensor", fisher),
        Importance(
            "magnitude",
            "weight magnitude, sum |w|",
            "baseline of ElasticTrainer (MobiSys'23)",
            magnitude,
            needs_batches=False,
        ),
        Importance("uniform", "every tensor alike", "a control of this project", uniform, needs_batches=False),
        Importance(
            "random",
            "a number between 0 and 1, by seed and name",
            "a control of this project",
            random,
            needs_batches=False,
        ),
    )
}


def find_importance(name: str) -> Importance:
    """The importance of this name; an unknown one is an error that lists the known."""
    try:
        return IMPORTANCES[name]
    except KeyError:
        raise ConfigError(f"no importance {name!r}; there are {', '.join(IMPORTANCES)}") from None
