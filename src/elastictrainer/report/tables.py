"""Tables that the page's script sorts and saves as CSV; without scripts they are plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastictrainer.report.markup import Markup, tag

__all__ = ["Cell", "number_cell", "table"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows, the value behind it that is sorted by and saved, and where it leads.

    `wraps`: it may take several lines, where others make the table scroll.
    """

    text: str
    value: float | str | None = None
    link: str | None = None
    wraps: bool = False

    def to_markup(self, *, numeric: bool) -> Markup:
        shown = self.text if self.link is None else tag("a", self.text, href=self.link)
        value = self.text if self.value is None and not numeric else "" if self.value is None else self.value
        # repr keeps every digit: what is saved is what was measured, not what was rounded for reading.
        raw = repr(value) if isinstance(value, float) else value
        return tag("td", shown, class_="number" if numeric else "wraps" if self.wraps else None, data_value=raw)


def number_cell(value: float | None, form: str, factor: float = 1.0) -> Cell:
    """A figure in a unit of its own, rounded for reading."""
    return Cell("–") if value is None else Cell(form.format(value * factor), value * factor)


def table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, numeric: Sequence[bool]) -> Markup:
    """A table named for its CSV file; `numeric` says which columns hold numbers."""
    head = [
        tag("th", tag("button", column, type="button"), scope="col", class_="number" if right else None)
        for column, right in zip(columns, numeric)
    ]
    body = [tag("tr", *(cell.to_markup(numeric=right) for cell, right in zip(row, numeric))) for row in rows]
    return tag(
        "div",
        tag("div", tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body)), class_="scroll", tabindex="0"),
        tag("button", "Download CSV", type="button", class_="csv", data_name=name),
        class_="table",
    )
