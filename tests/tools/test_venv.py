"""`tools/venv.sh` says in one line what is missing; its happy path is what CI runs first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "venv.sh", tmp_path / "tools")
    return tmp_path


def run(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "tools/venv.sh", ".venv"],
        cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def program(checkout: Path, name: str, script: str) -> str:
    """Put a program first on the PATH; returns that PATH."""
    folder = checkout / "programs"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    line = done.stderr
    assert line.startswith("elastictrainer: ")
    assert line.count("\n") == 1
    return line


def test_no_suitable_python(checkout):
    path = program(checkout, "python3", "echo Python 3.8.1; exit 1")
    for minor in range(10, 14):
        program(checkout, f"python3.{minor}", "exit 127")
    assert "says 'Python 3.8.1'" in refused(run(checkout, PATH=path, PYTHON=""))


def test_a_chosen_python_that_is_none(checkout):
    assert "PYTHON=/nowhere/python" in refused(run(checkout, PYTHON="/nowhere/python"))


def test_no_venv_module(checkout):
    python = f'case "$*" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"'
    line = refused(run(checkout, PATH=program(checkout, "python3", python), PYTHON=""))
    assert "apt install python3-venv" in line


def test_no_room(checkout):
    path = program(checkout, "df", "echo head; echo /dev/x 9 9 3000000 50% /")
    assert "needs 8 GB of disk" in refused(run(checkout, PATH=path, PYTHON=sys.executable))
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("pip_says", "line"),
    [
        ("connection broken by 'NewConnectionError('<...>: Failed to establish a new connection: [Errno -2] Name or "
         "service not known')': /simple/hatchling/", "the package index cannot be reached"),
        ("connection broken by 'NameResolutionError(\"HTTPSConnection(host='pypi.org', port=443): Failed to resolve "
         "'pypi.org' ([Errno -2] Name or service not known)\")': /simple/hatchling/",
         "the package index cannot be reached"),
        ("ERROR: Could not find a version that satisfies the requirement hatchling>=1.25 (from versions: none)",
         "the package index cannot be reached"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "set TMPDIR"),
    ],
    ids=["pip 23", "pip 26", "no retries", "no room"],
)  # fmt: skip
def test_what_pip_says_of_a_failure_becomes_one_line(checkout, pip_says, line):
    """The words are those of real pips, from 23 (Python 3.11's own) to 26."""
    (checkout / "words").write_text(pip_says + "\n")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python = checkout / ".venv" / "bin" / "python"
    failing = f'case "$*" in *"pip install"*) cat {checkout}/words >&2; exit 1;; esac'
    python.write_text(f'#!/bin/sh\n{failing}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    path = program(checkout, "df", "echo head; echo /dev/x 9 9 9000000 50% /")
    assert line in refused(run(checkout, PATH=path, PYTHON=sys.executable))


def test_no_network(checkout):
    path = program(checkout, "df", "echo head; echo /dev/x 9 9 9000000 50% /")
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = run(checkout, PATH=path, PYTHON=sys.executable, PIP_RETRIES="1", **unreachable)
    assert "the package index cannot be reached" in refused(done)
    assert not (checkout / ".venv" / ".made-from").exists()
