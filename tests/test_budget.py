"""Budgets as people write them."""

from __future__ import annotations

import pytest

from elastictrainer.budget import Budget
from elastictrainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("0.5x", "ratio", 0.5), ("0.5", "ratio", 0.5), (1, "ratio", 1.0), ("1x", "ratio", 1.0),
        ("30s", "seconds", 30.0), ("30min", "seconds", 1800.0), ("12 ms", "seconds", 0.012),
    ],
)  # fmt: skip
def test_a_share_or_a_time(text: str | float, kind: str, value: float) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.value) == (kind, pytest.approx(value))
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("text", ["30", 30, "5x", "1.5x", 1.01])
def test_more_than_everything_is_a_unit_forgotten(text: str | float) -> None:
    number = str(text).removesuffix("x")
    with pytest.raises(ConfigError, match=f"'{number}s', '{number}min'") as caught:
        Budget.parse(text)
    assert "'0.3x'" in str(caught.value)


@pytest.mark.parametrize("text", ["", "half", "-1x", 0, "nan", "inf", "12 parsecs", True])
def test_what_is_neither(text: str | float) -> None:
    with pytest.raises(ConfigError, match="budget"):
        Budget.parse(text)
