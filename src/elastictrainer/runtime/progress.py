"""What a person sees while a run goes on: a bar on a terminal, plain lines in a pipe or a file, nothing if asked."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Protocol

from elastictrainer.budget import format_seconds
from elastictrainer.errors import ConfigError

__all__ = ["Board", "Progress", "make_progress"]


class Progress(Protocol):
    """Told how far the run is; `fields` are loss, accuracy, trained (share), ratio and budget, any of them None."""

    def step(self, done: int, fields: dict[str, float | str | None]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_progress(wanted: bool, *, total: int | None, done: int) -> Progress:
    """A bar if stderr is a terminal, lines if it is not, silence if it is not wanted."""
    if not wanted:
        return _Silent()
    return _Bar(total, done) if sys.stderr.isatty() else _Lines(total, done)


def describe(fields: dict[str, float | str | None]) -> str:
    """
    >>> describe({"loss": 0.5, "accuracy": 0.9, "trained": 0.25, "ratio": 0.487, "budget": "0.5x"})
    'loss 0.5000  accuracy 90.0%  trained 25%  ratio 0.487 of 0.5x'
    """
    parts = []
    if isinstance(loss := fields.get("loss"), float):
        parts.append(f"loss {loss:.4f}")
    if isinstance(accuracy := fields.get("accuracy"), float):
        parts.append(f"accuracy {accuracy:.1%}")
    if isinstance(trained := fields.get("trained"), float):
        parts.append(f"trained {trained:.0%}")
    if isinstance(ratio := fields.get("ratio"), float):
        budget = fields.get("budget")
        parts.append(f"ratio {ratio:.3f}" + (f" of {budget}" if budget else ""))
    return "  ".join(parts)


class _Silent:
    def step(self, done: int, fields: dict[str, float | str | None]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    """A line every so many seconds, and what is said."""

    EVERY_S = 30.0

    def __init__(self, total: int | None, done: int) -> None:
        self._total, self._first = total, done
        self._start = self._last = time.monotonic()

    def step(self, done: int, fields: dict[str, float | str | None]) -> None:
        now = time.monotonic()
        if now - self._last < self.EVERY_S:
            return
        self._last = now
        left = ""
        if self._total and done > self._first:
            left = f"  {format_seconds((now - self._start) / (done - self._first) * (self._total - done))} left"
        self.say(f"step {done}{f'/{self._total}' if self._total else ''}  {describe(fields)}{left}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """Rich's bar; the library is imported here, since only terminals need it."""

    def __init__(self, total: int | None, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("training", total=total, completed=done, figures="")
        self._bar.start()

    def step(self, done: int, fields: dict[str, float | str | None]) -> None:
        self._bar.update(self._task, completed=done, figures=describe(fields))

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class Board:
    """TensorBoard's event files, behind the extra `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("tensorboard is not installed: pip install 'elastictrainer[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(folder))

    def add(self, step: int, record: dict[str, Any]) -> None:
        """Every number of the record, at this step."""
        for key, value in record.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()
