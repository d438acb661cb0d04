"""What the result pages are made of: kept tables as Markdown, with where they were measured, and pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from elastictrainer.report.charts import Series
from elastictrainer.report.markup import Markup
from elastictrainer.report.page import legend
from elastictrainer.report.plots import standalone_svg

sys.path.insert(0, str(Path(__file__).parent))
from common import read_csv

Row = Mapping[str, str]


def tables(pattern: str, folder: Path) -> dict[str, list[dict[str, str]]]:
    """The kept tables of a suite, by name."""
    return {path.name: rows for path in sorted(folder.glob(pattern)) if (rows := read_csv(path))}


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    right = ["---"] + ["---:"] * (len(columns) - 1)
    lines = [columns, right, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def where(rows: Sequence[Row], source: str) -> str:
    """What the figures depend on, below a table."""

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(row[key] for row in rows if row.get(key))) or "unknown"

    said = f"Device: {all_of('device')}; threads: {all_of('threads')}; torch {all_of('torch')}; "
    return f"{said}seed {all_of('seed')}; commit {all_of('commit')}. Table: `benchmarks/results/{source}`.\n"


def absent(what: str, command: str) -> str:
    return f"*{what} has not been measured yet. This measures it:*\n\n```\n{command}\n```\n"


def percent(text: str | None, digits: int = 1) -> str:
    return f"{100 * float(text):.{digits}f}%" if text else "–"


def number(text: str | None, form: str = ".3g") -> str:
    return f"{float(text):{form}}" if text else "–"


def picture(title: str, draw: Callable[[float], Markup], series: Sequence[Series] = ()) -> str:
    return standalone_svg(title, draw(760.0), legend(series) if len(series) > 1 else "")
