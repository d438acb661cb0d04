"""What a person sees while a comparison goes on: what is done, what is left and about how long that takes."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from elastictrainer.budget import format_seconds
from elastictrainer.compare.grid import Cell, Grid, Method, Workload

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Board", "Progress", "make_board"]


_ONCE = ("profile", "flops")  # of what deciding costs, whatever the number of epochs


class Board(Protocol):
    """Told of every change (`show`), several times a second that time passes (`tick`), and lines to say."""

    def show(self, progress: Progress, running: Sequence[Cell]) -> None: ...
    def tick(self, progress: Progress, running: Sequence[Cell]) -> None: ...
    def say(self, text: str) -> None: ...
    def __enter__(self) -> Board: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(slots=True)
class Progress:
    """How far each method of each workload is, read from the run folders, and how long the rest may take.

    A method's seconds an epoch are those of its own finished cells; until it has one, those of its workload's others;
    until there are any, of all others. So an estimate is rough at first and good once every method has run. What a cell
    does once (pricing a step), it does for however many epochs: trials are short.
    """

    grid: Grid
    out: Path
    jobs: int = 1
    rates: dict[tuple[Workload, Method], float] = field(default_factory=dict)
    started_s: list[float] = field(default_factory=list)
    _known: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def ended(self, cell: Cell, wall_s: float) -> None:
        """A cell has ended, after so long: what of it was not training is what starting costs."""
        made = self._result(cell)
        if made is not None and not made["restarts"]:
            self.started_s.append(max(wall_s - made["train_s"] - made["eval_s"], 0.0))

    def cells(self, workload: Workload, method: Method) -> tuple[list[Cell], list[Cell]]:
        """Trials and finals of a method; before its rate is known the finals stand for themselves at the first rate."""
        trials = [cell for cell in self.grid.trials(workload) if cell.method == method]
        rate = self.rates.get((workload, method), self.grid.rates[0])
        finals = [self.grid.cell(workload, method, rate, seed, stage="final") for seed in self.grid.seeds]
        return [self.grid.under(self.out, c) for c in trials], [self.grid.under(self.out, c) for c in finals]

    def finished(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        return [made for cell in cells if (made := self._result(cell)) is not None]

    def epochs_done(self, cell: Cell) -> int:
        """Of a cell that is running: lines of its log."""
        try:
            with (cell.folder / "metrics.jsonl").open("rb") as file:
                return sum(1 for _ in file)
        except OSError:
            return 0

    def counts(self) -> tuple[int, int]:
        """(cells done, cells in all)."""
        done = total = 0
        for workload in self.grid.workloads:
            for method in self.grid.methods:
                for cells in self.cells(workload, method):
                    done, total = done + len(self.finished(cells)), total + len(cells)
        return done, total

    def costs_s(self, workload: Workload, method: Method) -> tuple[float, float] | None:
        """Seconds that a cell takes once, and those of an epoch with its evaluation, of finished cells."""

        def typical(pairs: Sequence[tuple[Workload, Method]]) -> tuple[float, float] | None:
            made = [m for pair in pairs for cells in self.cells(*pair) for m in self.finished(cells) if m["epochs"]]
            if not made:
                return None
            once = [sum(m.get("overhead_s", {}).get(part, 0.0) for part in _ONCE) for m in made]
            each = [(m["train_s"] + m["eval_s"] - first) / m["epochs"] for m, first in zip(made, once)]
            return statistics.mean(once), statistics.mean(each)

        own = typical([(workload, method)])
        near = own if own is not None else typical([(workload, m) for m in self.grid.methods])
        return near if near is not None else typical([(w, m) for w in self.grid.workloads for m in self.grid.methods])

    def left_s(self, workload: Workload, method: Method) -> float | None:
        """About how long the unfinished cells of a method take, one after the other; None before anything is known."""
        waiting = [cell for cells in self.cells(workload, method) for cell in cells if self._result(cell) is None]
        costs = self.costs_s(workload, method)
        if not waiting:
            return 0.0
        if costs is None:
            return None
        start_s = statistics.median(self.started_s) if self.started_s else 0.0
        left = [max(cell.epochs - self.epochs_done(cell), 0) for cell in waiting]
        once_s, each_s = costs
        return sum(
            epochs * each_s + start_s + (once_s if epochs == cell.epochs else 0.0)
            for epochs, cell in zip(left, waiting)
        )

    def left(self) -> str:
        """In words, for all: so many cells at a time, but for those that run alone."""
        done, total = self.counts()
        each = [
            None if (left := self.left_s(workload, method)) is None else left / (1 if method.by_clock else self.jobs)
            for workload in self.grid.workloads
            for method in self.grid.methods
        ]
        known = [seconds for seconds in each if seconds is not None]
        about = f", about {format_seconds(round(sum(known)))} left" if len(known) == len(each) and done < total else ""
        return f"{done} of {total} cells{about}"

    def _result(self, cell: Cell) -> dict[str, Any] | None:
        # A result never changes once it is there, and the board asks for all of them several times a second.
        if cell.folder not in self._known:
            try:
                made = json.loads((cell.folder / "result.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
            self._known[cell.folder] = made
        return self._known[cell.folder]


def make_board(*, wanted: bool) -> Board:
    """A live table if stderr is a terminal, lines if it is not, silence if it is not wanted."""
    if not wanted:
        return _Silent()
    return _Live() if sys.stderr.isatty() else _Lines()


class _Silent(AbstractContextManager["_Silent"]):
    def show(self, progress: Progress, running: Sequence[Cell]) -> None:
        pass

    def tick(self, progress: Progress, running: Sequence[Cell]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Lines(_Silent):
    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Live(_Silent):
    """Rich's live display; the library is imported here, since only terminals need it."""

    EVERY = 25  # ticks: reading the folders more than every five seconds would be felt in what is being timed

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), auto_refresh=False)
        self._ticks = 0

    def __enter__(self) -> _Live:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, progress: Progress, running: Sequence[Cell]) -> None:
        self._live.update(draw(progress, running), refresh=True)

    def tick(self, progress: Progress, running: Sequence[Cell]) -> None:
        self._ticks += 1
        if self._ticks % self.EVERY == 0:
            self.show(progress, running)

    def say(self, text: str) -> None:
        if text.startswith(("failed", "stopped")):  # the table shows the rest
            self._live.console.print(text, markup=False, highlight=False)


def draw(progress: Progress, running: Sequence[Cell]) -> Table:
    """A row a method of the workload that is running, and a row for each other workload as a whole."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=progress.left(), title_justify="left")
    for heading, right in (("", False), ("rate", True), ("trials", True), ("runs", True), ("accuracy", True),
                           ("seconds", True), ("left", True), ("now", False)):  # fmt: skip
        table.add_column(heading, justify="right" if right else "left", no_wrap=not right)
    here = {cell.workload for cell in running} or set(progress.grid.workloads[:1])
    for workload in progress.grid.workloads:
        table.add_row(Text(workload.name, style="bold"), *_summary(progress, workload, progress.grid.methods)[1:], "")
        if workload in here:
            for method in progress.grid.methods:
                name, *figures = _summary(progress, workload, (method,))
                now = [cell for cell in running if cell.workload == workload and cell.method == method]
                at = ", ".join(f"lr {c.lr:g} seed {c.seed}: epoch {_epoch(progress, c)}" for c in now)
                table.add_row(Text(f"  {name}"), *figures, Text(at))
    return table


def _epoch(progress: Progress, cell: Cell) -> str:
    return f"{min(progress.epochs_done(cell) + 1, cell.epochs)}/{cell.epochs}"


def _summary(progress: Progress, workload: Workload, methods: Sequence[Method]) -> list[str]:
    both = [progress.cells(workload, method) for method in methods]
    trials, finals = [c for t, _ in both for c in t], [c for _, f in both for c in f]
    made, tried = progress.finished(finals), progress.finished(trials)
    lefts = [progress.left_s(workload, method) for method in methods]
    known = [seconds for seconds in lefts if seconds is not None]
    one = len(methods) == 1
    rate = progress.rates.get((workload, methods[0])) if one else None
    scores = [m["accuracy"]["final"] for m in made if m["accuracy"]["final"] is not None] if one else []
    seconds = [m["train_s"] for m in made] if one else []
    return [
        methods[0].name,
        f"{rate:g}" if rate is not None else "",
        f"{len(tried)}/{len(trials)}" if trials else "",
        f"{len(made)}/{len(finals)}",
        f"{statistics.mean(scores):.1%}" if scores else "",
        f"{statistics.mean(seconds):.1f}" if seconds else "",
        "?" if len(known) < len(lefts) else format_seconds(round(sum(known))) if any(known) else "",
    ]
