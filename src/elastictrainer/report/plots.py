"""The figures of a page as files of their own: SVG, which every browser, word processor and LaTeX setup takes.

They are cut out of the page, so a file shows exactly what the page shows. `pngs` draws them as PNG.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from elastictrainer.errors import CheckpointError, ConfigError
from elastictrainer.report.charts import text_width
from elastictrainer.report.markup import Markup, join, tag
from elastictrainer.report.page import asset

__all__ = ["standalone_svg", "write_plots"]

_FIGURE = re.compile(r'<figure id="(?P<key>[\w-]+)"[^>]*><h2>(?P<title>.*?)</h2>(?P<rest>.*?)</figure>', re.DOTALL)
_DRAWING = re.compile(r'<div class="wide"><svg (?P<head>[^>]*)>(?P<body>.*?)</svg>', re.DOTALL)
_ENTRY = re.compile(r'<li><i class="(?P<style>[\w ]+)"></i>(?P<name>.*?)</li>', re.DOTALL)
_SIZE = re.compile(r'viewBox="0 0 (\S+) (\S+)"')
_LINE = 20.0  # pixels of a line of the legend


def write_plots(page: str | Path, folder: str | Path) -> list[Path]:
    """Write every figure of a page into a folder, as `FIGURE.svg`; files of these names are replaced.

        write_plots("runs/birds/report.html", "figures")      # figures/accuracy.svg, figures/selection.svg, ...

    Raises:
        ConfigError: the page holds no figure.
        CheckpointError: it cannot be read, or the files cannot be written.
    """
    from elastictrainer.runtime.checkpoint import reason, write_atomically

    page, folder = Path(page), Path(folder)
    try:
        text = page.read_text(encoding="utf-8")
        found = {
            match["key"]: standalone(match["title"], drawing["head"], drawing["body"], match["rest"])
            for match in _FIGURE.finditer(text)
            if (drawing := _DRAWING.search(match["rest"])) is not None
        }
        if not found:
            raise ConfigError(f"{page} holds no figure; give a page that `elastictrainer report` made")
        folder.mkdir(parents=True, exist_ok=True)
        for key, drawn in found.items():
            write_atomically(folder / f"{key}.svg", drawn)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"figures of {page} cannot be written to {folder}: {reason(error)}") from error
    return [folder / f"{key}.svg" for key in found]


def standalone_svg(title: str, drawing: Markup, legend: str = "") -> str:
    """The same for a drawing that stands on no page, with the legend that a page would have beside it."""
    head, _, body = drawing.removeprefix("<svg ").partition(">")
    return standalone(html.escape(title), head, body.removesuffix("</svg>"), legend)


def standalone(title: str, head: str, body: str, rest: str) -> str:
    """A drawing with its title, legend, colours and type, on white paper whatever the reader's browser prefers."""
    size = _SIZE.search(head)
    assert size is not None  # `charts.svg` writes it
    width, height = float(size[1]), float(size[2])
    entries = [(match["style"], html.unescape(match["name"])) for match in _ENTRY.finditer(rest)]
    above, legend = _legend(entries, width)
    drawing = tag("g", Markup(body), transform=f"translate(0 {above:g})")
    parts = [
        tag("rect", width="100%", height="100%", fill="#ffffff"),
        tag("text", html.unescape(title), x=0, y=14, style="font-size:14px;font-weight:600"),
        legend,
        drawing,
    ]
    content = join(parts)
    return tag(
        "svg", tag("style", _style(content)), content, xmlns="http://www.w3.org/2000/svg",
        viewBox=f"-12 -8 {width + 24:g} {height + above + 16:g}", width=width + 24, height=height + above + 16,
    ).replace("</svg>", "</svg>\n")  # fmt: skip


def _legend(entries: list[tuple[str, str]], width: float) -> tuple[float, Markup]:
    """Names with their colours, flowing into as many lines as they need; and where the drawing may begin."""
    parts, x, y = [], 0.0, 34.0
    for style, name in entries:
        needed = 26 + text_width(name) + 16
        if x and x + needed > width:
            x, y = 0.0, y + _LINE
        stroke = tag("path", d=f"M{x:g},{y - 4:g}h18", class_="line")
        parts.append(tag("g", stroke, class_=style))
        parts.append(tag("text", name, x=x + 25, y=y, class_="tick"))
        x += needed
    return (y + 14 if entries else 30.0), join(parts)


def _style(content: str) -> str:
    """What the page's style sheet says of these marks, with its colours written out: few programs know variables."""
    sheet = str(asset("style.css"))
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", sheet.partition("}")[0]))
    used = {name for names in re.findall(r'class="([^"]*)"', content) for name in names.split()}
    kept = ["svg { font: 11px system-ui, sans-serif; fill: var(--ink) }"]
    for selector, rule in re.findall(r"([^{}]+)(\{[^{}]*\})", sheet.partition("@media (max-width")[0]):
        classes, elements = re.findall(r"\.([\w-]+)", selector), re.findall(r"(?<![\w.-])[a-z]\w*", selector)
        plain = not re.search(r"[@:*#\[]", selector)
        if plain and classes and set(classes) <= used and set(elements) <= {"line"}:
            kept.append(selector.strip() + rule)
    return Markup(re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], "\n".join(kept)))
