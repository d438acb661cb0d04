"""Figures as PNG files, for what takes no SVG: drawn by a browser of this machine, as the page's own buttons do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from elastictrainer.errors import CheckpointError, ConfigError

__all__ = ["find_browser", "write_pngs"]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
_FLAGS = (
    "--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-extensions", "--disable-sync",
    "--disable-background-networking", "--disable-dev-shm-usage", "--force-device-scale-factor=2",
)  # fmt: skip
_SIZE = re.compile(r'<svg [^>]*?\bwidth="([\d.]+)" height="([\d.]+)"')
_TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """Chromium, or another browser of its family, on the PATH."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def write_pngs(drawings: Sequence[Path]) -> list[Path]:
    """Draw SVG files of `write_plots` as PNG files beside them, twice as large; files of these names are replaced.

    Raises:
        ConfigError: no browser of Chromium's family is there.
        CheckpointError: it could not draw a file.

    Costs the start of a browser for each, about a second.
    """
    program = find_browser()
    if program is None:
        raise ConfigError(
            "PNG files are drawn by Chromium or Chrome, and neither is on the PATH; install one, or use the page's own "
            "PNG buttons"
        )
    return [_draw(program, path) for path in drawings]


def _draw(program: str, drawing: Path) -> Path:
    out = drawing.with_suffix(".png")
    size = _SIZE.search(drawing.read_text(encoding="utf-8"))
    assert size is not None  # `plots.standalone` writes it
    width, height = (round(float(side)) for side in size.groups())
    with tempfile.TemporaryDirectory() as home:
        aside = Path(home) / out.name  # a browser that is killed leaves half a file
        # Root has no sandbox to drop into; what is opened is our own drawing, with no script in it.
        flags = [*_FLAGS, *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])]
        try:
            subprocess.run(
                [program, *flags, f"--user-data-dir={home}", f"--window-size={width},{height}",
                 f"--screenshot={aside}", drawing.resolve().as_uri()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT_S, check=True, env={**os.environ, "HOME": home},
            )  # fmt: skip
            shutil.copyfile(aside, out)
        except (OSError, subprocess.SubprocessError) as error:
            raise CheckpointError(f"{out} could not be drawn by {program}: {error}") from error
    return out
