"""How pixels become what a network was trained on: a mean and a standard deviation per channel, on a 0 to 1 scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from elastictrainer.errors import ConfigError

__all__ = ["Normalisation"]


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Inputs are `(x - mean) / std` with `x` between 0 and 1, red, green, blue.

    >>> Normalisation.parse("inception")
    Normalisation(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    >>> str(Normalisation.parse("0.1,0.2,0.3/0.5"))
    '0.1,0.2,0.3/0.5,0.5,0.5'
    >>> str(Normalisation.parse("imagenet"))
    'imagenet'
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise ConfigError(f"normalisation {self.mean}/{self.std} needs finite numbers and a std above 0")

    @classmethod
    def of(cls, mean: Iterable[float], std: Iterable[float]) -> Normalisation:
        """From any two rows of numbers, as the libraries keep them."""
        return cls(_three(mean), _three(std))

    @classmethod
    def parse(cls, text: str | Normalisation) -> Normalisation:
        """Read `imagenet`, `inception`, `none` or `MEAN/STD`, each side one number or three separated by commas."""
        if isinstance(text, Normalisation):
            return text
        if not isinstance(text, str):
            raise ConfigError(f"normalisation {text!r} is a {type(text).__name__}; {_HOW}")
        named = NAMED.get(text.strip().lower())
        if named:
            return named
        mean, slash, std = text.partition("/")
        try:
            if not slash:
                raise ValueError
            return cls.of(map(float, mean.split(",")), map(float, std.split(",")))
        except ConfigError:
            raise
        except ValueError:
            raise ConfigError(f"normalisation {text!r} cannot be read; {_HOW}") from None

    def __str__(self) -> str:
        for name, named in NAMED.items():
            if named == self:
                return name
        return "/".join(",".join(f"{v:.9g}" for v in side) for side in (self.mean, self.std))


def _three(numbers: Iterable[float]) -> tuple[float, float, float]:
    values = tuple(numbers)
    if len(values) == 1:
        values *= 3
    red, green, blue = values
    return red, green, blue


NAMED = {
    "imagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "inception": Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "none": Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
_HOW = f"write {', '.join(NAMED)}, or MEAN/STD on a 0 to 1 scale, for example '0.5/0.5' or '0.4,0.5,0.6/0.2'"
