"""What a verb prints: rich on a terminal, plain lines in a pipe, or one JSON document."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Output", "counting", "to_json"]

_LINE_EVERY_S = 30.0


class Output:
    """Where a verb's words and its result go.

    On a terminal tables are drawn by rich (which respects NO_COLOR); otherwise they are aligned plain lines without
    any control sequence. Under `--json` only `document` prints, so stdout holds one JSON document and nothing else.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def say(self, text: str = "") -> None:
        """Print a line for people."""
        if not self.as_json:
            print(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
        """Print a table for people; numbers are aligned to the right."""
        if self.as_json:
            return
        numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
        cells = [[_cell(value) for value in row] for row in rows]
        if sys.stdout.isatty():
            _rich_table(columns, cells, numeric, title)
        else:
            _plain_table(columns, cells, numeric, title)

    def document(self, result: Mapping[str, Any]) -> None:
        """Print the result as JSON if that was asked for."""
        if self.as_json:
            print(to_json(result))


@contextmanager
def counting(what: str, *, wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Something to call with (done, all) while people wait: a bar where stderr is a terminal, else a line at times."""
    if not wanted:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        last = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _LINE_EVERY_S:
                last = time.monotonic()
                print(f"{what} {done}/{total}", file=sys.stderr, flush=True)

        yield line


def to_json(result: Any) -> str:
    """Strict JSON: a number that is not finite becomes null, since JSON has no word for it.

    >>> to_json({"loss": float("nan"), "names": ("a", "b")}).replace("\\n", "").replace(" ", "")
    '{"loss":null,"names":["a","b"]}'
    """
    return json.dumps(_finite(result), indent=2, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rich_table(columns: Sequence[str], cells: list[list[str]], numeric: list[bool], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(columns, numeric):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        # Text, not str: a name such as "layer[0]" is no markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _plain_table(columns: Sequence[str], cells: list[list[str]], numeric: list[bool], title: str) -> None:
    lines = [list(columns), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    if title:
        print(title)
    for line in lines:
        padded = (cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(line, widths, numeric))
        print("  ".join(padded).rstrip())
