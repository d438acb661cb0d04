"""A small app of its own for the frame's tests, and the ways to run a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastictrainer import cli
from elastictrainer.cli import options
from elastictrainer.cli.app import App
from elastictrainer.cli.output import Output
from elastictrainer.errors import BudgetError, ConfigError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    """What the verb `show` was called with."""
    return []


@pytest.fixture
def run(seen: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command line through `cli.run` and return its exit code, stdout and stderr."""
    app = App(no_args_is_help=True)

    @app.command()
    def show(
        model: options.Model,
        batch_size: options.BatchSize = 4,
        lr: options.LearningRate = 0.1,
        budget: options.Budget = None,
        pin: options.Pin = None,
        out: options.Out = None,
        deterministic: options.Deterministic = False,
        as_json: options.Json = False,
    ) -> None:
        """Keep what was asked for."""
        seen.append(dict(locals()))
        output = Output(as_json)
        output.say("some words")
        output.table(("name", "value"), [("lr", lr)])
        output.document({"lr": lr})

    @app.command()
    def fail(kind: str) -> None:
        """Fail in a chosen way."""
        errors: dict[str, BaseException] = {
            "budget": BudgetError("budget 0.1x cannot be met;\n  the least is 0.3x"),
            "config": ConfigError("model 'x' is not known"),
            "bug": KeyError("x"),
            "file": FileNotFoundError(2, "No such file or directory", "weights.pth"),
            "interrupt": KeyboardInterrupt(),
        }
        raise errors[kind]

    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.run(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command line through `cli.main`."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line as a process of its own, with its output in a pipe."""

    def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "elastictrainer", *map(str, arguments)],
            capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, **environment}, timeout=120,
        )  # fmt: skip

    return call
