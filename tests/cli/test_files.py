"""What `--out` writes to: a file whole, a link's target, and never over a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elastictrainer.cli.files import write_whole


def test_folders_are_made_and_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_whole(path, "older")
    write_whole(path, "newer")
    assert path.read_text() == "newer"
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """As `/dev/null` and `/dev/stdout` must, which whoever is root would otherwise have replaced by a file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_folder_is_refused_and_nothing_left_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
