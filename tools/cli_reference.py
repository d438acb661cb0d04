"""An mkdocs hook: `<!-- cli -->` in a page becomes the help of every verb, so that the page cannot fall behind."""

from __future__ import annotations

from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from elastictrainer.cli.app import app, load_verbs

_PLACE = "<!-- cli -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(_PLACE, _reference()) if _PLACE in markdown else markdown


def _reference() -> str:
    load_verbs()
    sections = []
    for verb in get_command(app).commands:  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [verb, "--help"], prog_name="elastictrainer", env={"COLUMNS": "100"})
        sections.append(f"## {verb}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(sections)
