"""An mkdocs hook: LaTeX becomes MathML while the pages are built, so that a reader needs no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves behind in its generic mode.
_EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>', re.DOTALL
)


def on_page_content(page_html: str, **_: Any) -> str:
    return _EQUATION.sub(_to_mathml, page_html)


def _to_mathml(match: re.Match[str]) -> str:
    block = match["block"]
    latex = html.unescape(block if block is not None else match["inline"]).strip()
    mathml = convert(latex, display="block" if block is not None else "inline")
    # The source stays readable for whoever hovers, copies or searches.
    return mathml.replace("<math ", f'<math title="{html.escape(latex, quote=True)}" ', 1)
