"""The commit of a checkout is read from git's files, in every way in which git keeps a branch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from elastictrainer.runtime.result import read_commit

GIT = shutil.which("git")


@pytest.mark.skipif(GIT is None, reason="git, which is the oracle here, is not installed")
def test_it_is_what_git_says(tmp_path: Path) -> None:
    def git(*words: str, where: Path = tmp_path / "main") -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main")
        done = subprocess.run(["git", *identity, *words], cwd=where, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    main, other = tmp_path / "main", tmp_path / "worktree"
    main.mkdir()
    git("init", "-q")
    assert read_commit(main / ".git") is None  # nothing is committed yet
    git("commit", "-q", "--allow-empty", "-m", "one")
    assert read_commit(main / ".git") == git("rev-parse", "HEAD")
    git("worktree", "add", "-q", "-b", "side", str(other))
    git("commit", "-q", "--allow-empty", "-m", "two", where=other)
    assert read_commit(other / ".git") == git("rev-parse", "HEAD", where=other) != git("rev-parse", "HEAD")
    git("pack-refs", "--all")
    assert read_commit(main / ".git") == git("rev-parse", "HEAD")
    assert read_commit(other / ".git") == git("rev-parse", "HEAD", where=other)
    git("checkout", "-q", "--detach")
    assert read_commit(main / ".git") == git("rev-parse", "HEAD")
