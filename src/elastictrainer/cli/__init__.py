"""The command line: `main` runs one verb and turns whatever goes wrong into one line and an exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.main import get_command

from elastictrainer.errors import ElasticTrainerError

__all__ = ["main", "run"]

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `elastictrainer ARGUMENTS` (default: the process's own) and return the exit code.

    0: done. 1: a failure. 2: wrong use. 130: interrupted from the keyboard. An error is one readable line on stderr;
    `--debug` shows its traceback as well.
    """
    from elastictrainer.cli.app import app, load_verbs

    # Read by OpenMP when torch loads it: a thread that waits for another gives up its core after some ten microseconds
    # instead of milliseconds. Beside other busy processes that is four times as fast, on a quiet machine the same.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    load_verbs()
    return run(app, sys.argv[1:] if arguments is None else arguments)


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run one command line through a typer app, with `main`'s exit codes and error lines."""
    state = {"debug": False}
    try:
        code = get_command(app).main(
            list(arguments),
            prog_name="elastictrainer",
            standalone_mode=False,
            obj=state,
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`, `less`) has gone. Without this the interpreter would complain once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        if state["debug"]:
            traceback.print_exc()
        print(_line(error), file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    if code == _INTERRUPTED:
        print("elastictrainer: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _line(error: Exception) -> str:
    where = "elastictrainer"
    if isinstance(error, ElasticTrainerError):
        message = str(error)
    elif hasattr(error, "format_message"):
        # Wrong use, found by typer, whose copy of click has no import path that stays from release to release.
        if type(error).__name__ == "NoArgsIsHelpError":
            return str(error.format_message())
        context: Any = getattr(error, "ctx", None)
        where = context.command_path if context else where
        words = (
            error.format_message().replace("Value error, ", "").rstrip(".")
        )  # pydantic's, in newer releases of typer
        message = f"{words} (see {where} --help)"
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        message = f"{type(error).__name__}: {error} (--debug shows where)"
    return f"{where}: error: " + re.sub(r"\s*\n\s*", " ", message).strip()
