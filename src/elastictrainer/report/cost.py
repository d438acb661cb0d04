"""A picture of what a step costs along the network: an SVG file that needs nothing, on light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from elastictrainer.report import words
from elastictrainer.report.charts import text_width, ticks
from elastictrainer.report.markup import Markup, tag

__all__ = ["Cost", "cost_picture"]

# A page's colours cannot reach into an image, so it has its own ground and asks for the reader's preference itself.
_STYLE = """
svg { --card: #ffffff; --ink: #1b1f24; --muted: #656d76; --grid: #eceef0; --c0: #0b7a70; --c1: #c4500f; --c2: #aab2ba;
  font: 11px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink); }
@media (prefers-color-scheme: dark) {
  svg { --card: #181c20; --ink: #e6e9ec; --muted: #98a1aa; --grid: #2c3238;
    --c0: #3cc7b7; --c1: #f39255; --c2: #5a646e; }
}
.card { fill: var(--card); } .title { font-size: 14px; font-weight: 600; } .muted { fill: var(--muted); }
.grid { stroke: var(--grid); } .end { text-anchor: end; }
.train { fill: var(--c0); } .pass { fill: var(--c1); } .forward { fill: var(--c2); }
"""
_PARTS = (
    ("forward", "forward pass", "forward_s"),
    ("pass", "passing gradients through", "reach_s"),
    ("train", "training its tensors", "train_s"),
)
_WIDTH, _HEIGHT, _LEFT, _TOP = 960.0, 300.0, 52.0, 58.0


class Cost(Protocol):
    """A block or a tensor, and the seconds of a step that are its own."""

    @property
    def name(self) -> str: ...
    @property
    def forward_s(self) -> float: ...
    @property
    def reach_s(self) -> float: ...
    @property
    def train_s(self) -> float: ...


def cost_picture(costs: Sequence[Cost], *, title: str) -> str:
    """An SVG of these costs, the first one (the input's) on the left.

    A bar is what a full step pays there: for its forward pass, for passing gradients on to what lies deeper, and for
    training its tensors, the optimizer's share included.
    """
    highest = max((cost.forward_s + cost.reach_s + cost.train_s for cost in costs), default=0.0) * 1e3 or 1.0
    slot = (_WIDTH - _LEFT - 16) / max(len(costs), 1)
    below = max((text_width(cost.name) for cost in costs), default=0.0) * math.sin(math.radians(50)) + 24

    def y(ms: float) -> float:
        return _TOP + _HEIGHT * (1 - ms / highest)

    parts: list[Markup] = []
    for value in ticks(0, highest, 5):
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - 16, y1=y(value), y2=y(value), class_="grid"))
        parts.append(tag("text", f"{value:g} ms", x=_LEFT - 6, y=y(value) + 4, class_="muted end"))
    free_from = 0.0
    for place, cost in enumerate(costs):
        x, ms = _LEFT + slot * place, 0.0
        for style, what, field in _PARTS:
            own_ms = 1e3 * float(getattr(cost, field))
            if own_ms > 0:
                tip = tag("title", f"{cost.name}, {what}: {words.seconds(own_ms / 1e3)}")
                ms += own_ms
                parts.append(
                    tag("rect", tip, x=x + slot * 0.1, y=y(ms), width=slot * 0.8, height=y(0) - y(own_ms), class_=style)
                )
        if x >= free_from:
            at = f"{x + slot / 2 + 4:.1f} {y(0) + 14:.1f}"
            parts.append(tag("text", cost.name, transform=f"translate({at}) rotate(-50)", class_="muted end"))
            free_from = x + 13
    legend, x = [], _LEFT
    for style, what, _ in _PARTS:
        legend += [tag("rect", x=x, y=35, width=11, height=11, class_=style), tag("text", what, x=x + 16, y=45)]
        x += text_width(what) + 44
    height = math.ceil(y(0) + below)
    return tag(
        "svg",
        tag("style", Markup(_STYLE)),
        tag("rect", width=_WIDTH, height=height, rx=8, class_="card"),
        tag("text", title, x=16, y=24, class_="title"),
        *legend,
        *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_WIDTH:g} {height}", role="img", aria_label=title,
    )  # fmt: skip
