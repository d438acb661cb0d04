"""What people write, parsed in one place: "0.5x", "30min", "12ms", "800MiB", "15%"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from elastictrainer.errors import ConfigError

__all__ = ["Budget", "format_bytes", "format_seconds", "parse_bytes", "parse_seconds", "parse_share"]

_SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0,
    "hour": 3600.0, "hours": 3600.0, "d": 86400.0,
}  # fmt: skip
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_QUANTITY = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Budget:
    """A share of full training (`"0.5x"`) or an amount of time (`"30min"`, `"12ms"`).

    >>> Budget.parse("0.5x")
    Budget(kind='ratio', value=0.5)
    >>> Budget.parse("1h30min").value
    5400.0
    >>> str(Budget.parse(0.4))
    '0.4x'
    """

    kind: Literal["ratio", "seconds"]
    value: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0):
            raise ConfigError(f"budget {self.value!r} must be a positive, finite number")

    @classmethod
    def parse(cls, text: str | float | Budget) -> Budget:
        """Read a budget; a bare number is a ratio, since seconds without a unit would be a guess."""
        if isinstance(text, Budget):
            return text
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            return cls._share(float(text))
        if not isinstance(text, str):
            raise ConfigError(f"budget {text!r} is a {type(text).__name__}; write for example '0.5x' or '30min'")
        body = text.strip().lower()
        number = body.removesuffix("x").strip()
        try:
            return cls._share(float(number))
        except ConfigError:
            raise
        except ValueError:
            pass
        try:
            return cls("seconds", parse_seconds(text))
        except ConfigError as error:
            raise ConfigError(f"budget {text!r} is neither a share ('0.5x') nor a time ('30min', '12ms')") from error

    @classmethod
    def _share(cls, value: float) -> Budget:
        """A share of full training; more than all of it would train everything, and means a unit forgotten."""
        if math.isfinite(value) and value > 1:
            raise ConfigError(
                f"budget {value:g} would be {value:g} times full training, which is everything; "
                f"write a share up to 1 such as '0.3x', or a time with its unit: '{value:g}s', '{value:g}min'"
            )
        return cls("ratio", value)

    def seconds(self, full_s: float) -> float:
        """The budget in seconds, given what everything trained would take."""
        return self.value * full_s if self.kind == "ratio" else self.value

    def ratio(self, full_s: float) -> float:
        """The budget as a share of what everything trained would take."""
        return self.value if self.kind == "ratio" else self.value / full_s

    def __str__(self) -> str:
        return f"{self.value:g}x" if self.kind == "ratio" else format_seconds(self.value)


def parse_seconds(text: str | float) -> float:
    """Seconds from `"30min"`, `"1h30min"`, `"12ms"`, or a plain number of seconds."""
    if isinstance(text, (int, float)):
        return float(text)
    return _parse(text, _SECONDS, "time", "'30min', '1h30min' or '12ms'")


def parse_bytes(text: str | int | float) -> int:
    """Bytes from `"800MiB"`, `"1GB"`, or a plain number of bytes.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ConfigError(f"size {text!r} is a {type(text).__name__}; write for example '800MiB' or a number of bytes")
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        value = _parse(text, _BYTES, "size", "'800MiB' or '1GB'")
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"size {text!r} must be a positive, finite number of bytes")
    return int(value)


def parse_share(text: str | float) -> float:
    """A share between 0 and 1 from `"15%"`, `"0.15x"` or `0.15`."""
    try:
        if not isinstance(text, str):
            value = float(text)
        elif text.strip().endswith("%"):
            value = float(text.strip()[:-1]) / 100
        else:
            value = float(text.strip().lower().removesuffix("x"))
    except ValueError:
        raise ConfigError(f"share {text!r} cannot be read; write for example '15%' or '0.15'") from None
    if not 0 < value <= 1:
        raise ConfigError(f"share {text!r} must lie above 0 and at most 1")
    return value


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    body = text.strip().replace(" ", "")
    if not body:
        raise ConfigError(f"{what} is empty; write for example {example}")
    try:
        return float(body)
    except ValueError:
        pass
    total, position = 0.0, 0
    for match in _QUANTITY.finditer(body):
        number, unit = match.groups()
        if match.start() != position or unit.lower() not in units:
            break
        total += float(number) * units[unit.lower()]
        position = match.end()
    if position != len(body):
        raise ConfigError(f"{what} {text!r} cannot be read; write for example {example} (units: {', '.join(units)})")
    return total


def format_seconds(value: float) -> str:
    """Seconds as a person would write them.

    >>> format_seconds(0.0123), format_seconds(75), format_seconds(5400)
    ('12.3ms', '1min15s', '1h30min')
    """
    if value < 0 or not math.isfinite(value):
        return f"{value:g}s"
    if value < 1e-3:
        return f"{value * 1e6:.3g}us"
    if value < 1:
        return f"{value * 1e3:.3g}ms"
    if value < 59.95:
        return f"{value:.3g}s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}min" if minutes else f"{hours}h"
    return f"{minutes}min{seconds}s" if seconds else f"{minutes}min"


def format_bytes(value: float) -> str:
    """Bytes as a person would write them.

    >>> format_bytes(1536), format_bytes(800 * 2**20)
    ('1.5KiB', '800MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g}{unit}"
        value /= 1024
    return f"{value:.4g}GiB"
