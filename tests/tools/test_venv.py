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


def test_no_network(checkout):
    path = program(checkout, "df", "echo head; echo /dev/x 9 9 9000000 50% /")
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = run(checkout, PATH=path, PYTHON=sys.executable, PIP_RETRIES="1", **unreachable)
    assert "the package index cannot be reached" in refused(done)
    assert not (checkout / ".venv" / ".made-from").exists()
