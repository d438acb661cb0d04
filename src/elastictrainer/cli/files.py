"""A file that a verb was asked to write."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all; missing folders are made.

    Written beside and moved over, which would replace whatever has the name: so a link's target is written and the link
    stays, and what is no regular file (`/dev/null`, `/dev/stdout`, a pipe) is written to as it stands.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
