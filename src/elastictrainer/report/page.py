"""The page around the figures: one file with its style and script inside, which fetches nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from elastictrainer.errors import CheckpointError, ConfigError
from elastictrainer.report.charts import Series
from elastictrainer.report.markup import Markup, join, tag

__all__ = ["FULL", "HALF", "cards", "figure", "fold", "legend", "make_page", "notes", "save_page"]

FULL, HALF, PHONE = 1040.0, 500.0, 330.0  # pixels that a figure is drawn for
_START = "<!doctype html>"


def make_page(title: str, subtitle: str, *parts: str) -> str:
    """The whole document. Its policy lets the one script below run, by its hash, and nothing else whatever."""
    style, script = asset("style.css"), asset("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", style),
    )
    body = tag(
        "body",
        tag(
            "header", tag("p", "elastictrainer", class_="mark"), tag("h1", title), tag("p", subtitle, class_="subtitle")
        ),
        tag("main", *parts),
        tag("div", id="tip", role="status", hidden=""),
        tag("script", script),
    )
    return f"{_START}\n{tag('html', head, body, lang='en')}\n"


def save_page(page: str, path: Path) -> Path:
    """Write a page in one moment, over an older one; over nothing else.

    Raises:
        ConfigError: something that is no HTML page is there.
        CheckpointError: it cannot be written.
    """
    from elastictrainer.runtime.checkpoint import reason, write_atomically

    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; give the name of the file to write, such as {path / 'report.html'}")
        if path.exists():
            with path.open("rb") as file:
                start = file.read(len(_START))
            if start and start.lower() != _START.encode():
                raise ConfigError(f"{path} is there and is no HTML page: not overwritten; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {reason(error)}") from error
    return path


def cards(facts: Iterable[tuple[str, str, str]]) -> Markup:
    """The headline: (what, figure, remark)."""
    return tag(
        "dl",
        *(
            tag("div", tag("dt", what), tag("dd", figure), tag("dd", remark, class_="remark"))
            for what, figure, remark in facts
        ),
        class_="cards",
    )


def notes(title: str, sentences: Sequence[str]) -> Markup:
    if not sentences:
        return Markup("")
    return tag("aside", tag("p", title, class_="strong"), tag("ul", *(tag("li", s) for s in sentences)))


def figure(
    title: str,
    draw: Callable[[float], Markup] | None,
    caption: str,
    *extra: str,
    wide: float = HALF,
    key: str,
) -> Markup:
    """A figure drawn for wide screens and paper and once more for phones; None where there is nothing to draw."""
    if draw is None:
        drawings: list[Markup] = [tag("p", "Nothing was measured.", class_="empty")]
    else:
        drawings = [tag("div", draw(wide), class_="wide"), tag("div", draw(PHONE), class_="phone")]
    return tag(
        "figure", tag("h2", title), *extra, *drawings, tag("figcaption", caption),
        id=key, class_="full" if wide == FULL else None,
    )  # fmt: skip


def legend(series: Iterable[Series]) -> Markup:
    return tag("ul", *(tag("li", tag("i", class_=one.style), one.name) for one in series), class_="legend")


def fold(title: str, *content: str, key: str) -> Markup:
    """What only some want to see: closed on a screen, open on paper."""
    return tag("details", tag("summary", title), *content, id=key)


@cache
def asset(name: str) -> Markup:
    text = (resources.files("elastictrainer.report") / "assets" / name).read_text(encoding="utf-8")
    return join([Markup(text)])
