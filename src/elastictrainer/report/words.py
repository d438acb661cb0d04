"""Figures in words: seconds, bytes, shares and ratios as the page writes them."""

from __future__ import annotations

import math
import re
from typing import Any

from elastictrainer.budget import format_bytes, format_seconds

__all__ = ["joules", "number", "operations", "percent", "ratio", "seconds", "size"]

_NARROW = "\u202f"  # narrow no-break space: a number stays with its unit
_UNIT = re.compile(r"(?<=[0-9])(?=[A-Za-z])")
_NEXT = re.compile(r"(?<=[a-z])(?=[0-9])")
UNKNOWN = "–"


def number(value: Any) -> float | None:
    """A finite number, or None for whatever else a damaged file holds in its place."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def seconds(value: float | None) -> str:
    """
    >>> seconds(75).replace(chr(0x202f), "_")
    '1_min 15_s'
    """
    if value == 0:  # where an axis begins: of no unit in particular
        return f"0{_NARROW}s"
    return UNKNOWN if value is None else _spaced(format_seconds(value))


def size(value: float | None) -> str:
    """
    >>> size(1536).replace(chr(0x202f), "_")
    '1.5_KiB'
    """
    return UNKNOWN if value is None else _spaced(format_bytes(value))


def percent(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{100 * value:.{digits}f}{_NARROW}%"


def ratio(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}×"


def joules(value: float | None) -> str:
    return UNKNOWN if value is None else _scaled(value, "J", ("", "k", "M", "G"))


def operations(value: float | None) -> str:
    """
    >>> operations(1.83e11).replace(chr(0x202f), "_")
    '183_GFLOP'
    """
    return UNKNOWN if value is None else _scaled(value, "FLOP", ("", "k", "M", "G", "T", "P", "E"))


def _scaled(value: float, unit: str, prefixes: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{_NARROW}{prefixes[power]}{unit}"


def _spaced(text: str) -> str:
    return _UNIT.sub(_NARROW, _NEXT.sub(" ", text))
