"""Markup: text that is safe to put into a page. All other text is escaped on its way in, so none can be forgotten."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable
from typing import Any

__all__ = ["Markup", "data_block", "join", "tag"]

_EMPTY = frozenset(("meta", "link", "br", "rect", "circle", "line", "path"))
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class Markup(str):
    """A string that is markup already. Only `tag`, `join` and the page's own files make it."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """One element. A child that is no `Markup` is escaped, and so is every attribute; one that is None is left out.

    >>> tag("b", "1 < 2", class_="x", data_tip='say "hi"')
    '<b class="x" data-tip="say &quot;hi&quot;">1 &lt; 2</b>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{written}>" if name in ("meta", "link", "br") else f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str], separator: str = "") -> Markup:
    """Parts side by side, each escaped unless it is markup."""
    return Markup(separator.join(part if isinstance(part, Markup) else _escape(part) for part in parts))


def data_block(data: Any, **attributes: object) -> Markup:
    """Data for the page's script: JSON in an element that no browser runs, with nothing in it that could end it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")
    return tag("script", Markup(text), type="application/json", **attributes)


def _escape(text: str) -> str:
    # A folder's name may hold bytes that are no text (surrogates here), and control characters are no HTML.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return html.escape(_CONTROL.sub("\ufffd", text), quote=True)


def _plain(value: object) -> str:
    """Coordinates to a hundredth of a pixel: figures would otherwise be mostly digits that nobody sees."""
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"
    return str(value)
