"""Small image folders on disk, and a machine without a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WriteImage = Callable[..., Path]


@pytest.fixture
def write_image() -> WriteImage:
    def write(path: Path, *, size: tuple[int, int] = (12, 12), seed: int | None = None) -> Path:
        """A small random image, different for every path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(abs(hash(path.as_posix())) if seed is None else seed)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
        return path

    return write


@pytest.fixture
def folder(tmp_path: Path, write_image: WriteImage) -> Path:
    """Three classes, ten training and four test images each, no val."""
    root = tmp_path / "birds"
    for split, count in (("train", 10), ("test", 4)):
        for name in ("crow", "finch10", "finch9"):
            for index in range(count):
                write_image(root / split / name / f"{index}.png", seed=hash((split, name, index)) % 2**32)
    return root


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every download goes to a port where nobody listens, and no cache of an earlier download is found."""
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
