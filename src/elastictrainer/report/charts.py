"""Charts as SVG: lines over time, one quantity against another, and bars. Colours are classes; the page gives them.

Every chart is drawn for a width in pixels, since text that is scaled down cannot be read: a page asks for each chart
twice, once for wide screens and paper and once for phones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastictrainer.report.markup import Markup, join, tag

__all__ = [
    "COLOURS",
    "Bar",
    "Point",
    "Reference",
    "Series",
    "bars",
    "chart",
    "svg",
    "text_width",
    "ticks",
    "time_chart",
]

COLOURS = 6  # how many the style sheet has; after that, lines are dashed and points square
_CHARACTER = 6.1  # mean width of a character at the charts' 11 pixels
_MANY = 60  # points of a series beyond which they are not marked one by one


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a place, what is said of it, and whether it is the one that counts.

    `low` and `high` are what the value lay between, where it is a mean: a band along a line of many points, whiskers
    on `marked` ones.
    """

    x: float
    y: float
    tip: str
    marked: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one name and colour; `line` joins them."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    line: bool = True

    @property
    def style(self) -> str:
        """Colours first; then dashed lines and square points; then dotted lines."""
        return f"c{self.colour % COLOURS}" + ("", " dash", " dots")[self.colour // COLOURS % 3]


@dataclass(frozen=True, slots=True)
class Reference:
    """A dashed line that values are to be compared with: level at `y`, or y = `slope` * x with a band around it."""

    label: str
    y: float | None = None
    slope: float | None = None
    band: float = 0.0


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    text: str
    tip: str = ""
    colour: int = 0


def svg(*children: str, width: float, height: float, label: str, **attributes: object) -> Markup:
    """The frame of a figure, with the words that a screen reader says for it."""
    return tag(
        "svg", *children, viewBox=f"0 0 {width:g} {math.ceil(height)}", role="img", aria_label=label,
        style=f"max-width:{width * 1.3:.0f}px", **attributes,
    )  # fmt: skip


def text_width(text: str) -> float:
    return _CHARACTER * len(text)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values within a range, about `count` of them.

    >>> ticks(0, 61.2, 5)
    [0.0, 20.0, 40.0, 60.0]
    >>> ticks(0.47, 0.56, 4)
    [0.48, 0.5, 0.52, 0.54, 0.56]
    """
    raw = (high - low) / max(count, 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.85)
    digits = max(0, 2 - math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(k * step, digits) for k in range(first, last + 1)]


def chart(
    series: Sequence[Series],
    *,
    width: float,
    height: float,
    label: str,
    x_title: str,
    y_title: str,
    x_format: Callable[[float], str],
    y_format: Callable[[float], str],
    references: Sequence[Reference] = (),
    x_zero: bool = True,
    y_zero: bool = False,
    least_span: float = 0.0,
) -> Markup:
    """Series on common axes. `least_span` keeps noise from filling the height where nothing happens."""
    xs = [p.x for s in series for p in s.points]
    ys = [y for s in series for p in s.points for y in (p.y, p.low, p.high) if y is not None]
    ys += [r.y for r in references if r.y is not None] + [r.slope * x for r in references if r.slope for x in xs]
    x_low, x_high = _range([0.0, *xs] if x_zero else xs, pad=0.0 if x_zero else 0.08)
    y_low, y_high = _range([0.0, *ys] if y_zero else ys, pad=0.08, least=least_span)
    y_ticks = ticks(y_low, y_high, 4 if height < 260 else 5)
    labels = [y_format(v) for v in y_ticks]
    left, right, top, bottom = max(map(text_width, labels), default=0) + 10, 14.0, 24.0, 38.0
    x_ticks = ticks(x_low, x_high, max(2, int((width - left - right) / 80)))

    def px(value: float) -> float:
        return left + (value - x_low) / (x_high - x_low) * (width - left - right)

    def py(value: float) -> float:
        return height - bottom - (value - y_low) / (y_high - y_low) * (height - top - bottom)

    parts = [tag("text", y_title, x=0, y=11, class_="muted")]
    for value, text in zip(y_ticks, labels):
        parts.append(tag("line", x1=left, x2=width - right, y1=py(value), y2=py(value), class_="grid"))
        parts.append(tag("text", text, x=left - 8, y=py(value) + 4, class_="tick end"))
    for value in x_ticks:
        parts.append(tag("text", x_format(value), x=px(value), y=height - bottom + 16, class_="tick middle"))
    parts.append(tag("line", x1=left, x2=width - right, y1=height - bottom, y2=height - bottom, class_="axis"))
    parts.append(tag("text", x_title, x=width - right, y=height - 5, class_="muted end"))
    for reference in references:
        parts.append(_reference(reference, (x_low, x_high), (y_low, y_high), px, py))
    for one in series:
        parts.append(_series(one, px, py))
    return svg(*parts, width=width, height=height, label=label, class_="chart")


def time_chart(
    series: Sequence[Series],
    *,
    label: str,
    y_title: str,
    y_format: Callable[[float], str],
    height: float = 250.0,
    references: Sequence[Reference] = (),
    least_span: float = 0.0,
) -> Callable[[float], Markup] | None:
    """A drawing of values over seconds of training, in a unit that suits them; None where there are no values."""
    longest_s = max((p.x for s in series for p in s.points), default=None)
    if longest_s is None:
        return None
    unit, unit_s = (
        ("hours", 3600.0) if longest_s >= 3 * 3600 else ("minutes", 60.0) if longest_s >= 300 else ("seconds", 1.0)
    )
    scaled = [replace(s, points=tuple(replace(p, x=p.x / unit_s) for p in s.points)) for s in series]

    def draw(width: float) -> Markup:
        return chart(
            scaled, width=width, height=height, label=label, x_title=f"{unit} of training", y_title=y_title,
            x_format=lambda value: f"{value:g}", y_format=y_format, references=references, least_span=least_span,
        )  # fmt: skip

    return draw


def _range(values: Sequence[float], *, pad: float, least: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    span = max(high - low, least, abs(high) * 1e-3, 1e-9)
    centre = (low + high) / 2
    if high - low < span:
        low, high = centre - span / 2, centre + span / 2
        if min(values) >= 0 > low:  # no axis goes below zero for what cannot
            low, high = 0.0, span
    floor = 0.0 if min(values) >= 0 else -math.inf
    return max(low - pad * span, floor), high + pad * span


def _reference(
    reference: Reference,
    x_ends: tuple[float, float],
    y_ends: tuple[float, float],
    px: Callable[[float], float],
    py: Callable[[float], float],
) -> Markup:
    low, high = x_ends
    if reference.slope is None:
        assert reference.y is not None
        line = tag("line", x1=px(low), x2=px(high), y1=py(reference.y), y2=py(reference.y), class_="reference")
        return join([line, tag("text", reference.label, x=px(high), y=py(reference.y) - 6, class_="tick end halo")])
    parts = []
    if reference.band:
        edges = [_within(reference.slope * (1 + side * reference.band), x_ends, y_ends) for side in (-1, 1)]
        corners = [*edges[0], *reversed(edges[1])]
        path = "M" + "L".join(f"{px(x):.1f},{py(y):.1f}" for x, y in corners) + "Z"
        parts.append(tag("path", d=path, class_="band"))
    inside = [(x, y) for x, y in _within(reference.slope, x_ends, y_ends) if math.isclose(y, reference.slope * x)]
    if len(inside) > 1:
        (x1, y1), (x2, y2) = inside[0], inside[-1]
        parts.append(tag("line", x1=px(x1), x2=px(x2), y1=py(y1), y2=py(y2), class_="reference"))
    return tag("g", *parts)


def _within(slope: float, x_ends: tuple[float, float], y_ends: tuple[float, float]) -> list[tuple[float, float]]:
    """y = slope * x, held inside the axes: corners where it meets them, level along an edge beyond.

    >>> _within(2.0, (1.0, 3.0), (0.0, 4.0))
    [(1.0, 2.0), (2.0, 4.0), (3.0, 4.0)]
    """
    meets = [y / slope for y in y_ends] if slope else []
    xs = sorted({*x_ends, *(x for x in meets if x_ends[0] < x < x_ends[1])})
    return [(x, min(max(slope * x, y_ends[0]), y_ends[1])) for x in xs]


def _series(series: Series, px: Callable[[float], float], py: Callable[[float], float]) -> Markup:
    places = [(px(p.x), py(p.y)) for p in series.points]
    parts = []
    spread = [(px(p.x), py(p.low), py(p.high), p) for p in series.points if p.low is not None and p.high is not None]
    around = [(x, low, high) for x, low, high, p in spread if not p.marked and low - high > 0.5]
    if series.line and len(around) > 1:
        corners = [(x, high) for x, _, high in around] + [(x, low) for x, low, _ in reversed(around)]
        parts.append(tag("path", d="M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in corners) + "Z", class_="spread"))
    if series.line and len(places) > 1:
        parts.append(tag("path", d="M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places), class_="line"))
    for x, low, high, point in spread:
        if point.marked and low - high > 0.5:
            ends = "".join(f"M{x - 4:.1f},{y:.1f}h8" for y in (low, high))
            parts.append(tag("path", d=f"M{x:.1f},{low:.1f}V{high:.1f}{ends}", class_="whisker"))
    many = len(places) > _MANY
    square = series.colour // COLOURS % 3 == 1
    for point, (x, y) in zip(series.points, places):
        kind = "point marked" if point.marked else "point quiet" if many else "point"
        radius = 5.0 if point.marked else 3.2
        if square:
            corner = {"x": round(x - radius, 1), "y": round(y - radius, 1), "width": 2 * radius, "height": 2 * radius}
            parts.append(tag("rect", **corner, class_=kind, data_tip=point.tip))
        else:
            parts.append(tag("circle", cx=round(x, 1), cy=round(y, 1), r=radius, class_=kind, data_tip=point.tip))
    return tag("g", *parts, class_=series.style)


def bars(rows: Sequence[Bar], *, width: float, label: str) -> Markup:
    """Horizontal bars from zero, each with its name before it and its value after; above it where names are long."""
    left = 1.1 * max(text_width(row.label) for row in rows) + 12  # these words are a pixel larger than an axis's
    right = 1.1 * max(text_width(row.text) for row in rows) + 12
    stacked = left + right > 0.7 * width
    left, above, step = (0.0, 18, 46) if stacked else (left, 0, 28)
    longest = max((row.value for row in rows), default=0.0) or 1.0
    most = int(width / (1.1 * _CHARACTER)) - 2
    parts: list[Markup] = []
    for number, row in enumerate(rows):
        y = 6 + step * number
        length = max(row.value / longest * (width - left - right), 1.5)
        name = row.label if len(row.label) <= most else row.label[: most - 1] + "…"
        parts += [
            tag("text", name, x=0 if stacked else left - 10, y=y + 13, class_="name" if stacked else "name end"),
            tag("rect", x=left, y=y + above, width=length, height=18, rx=2, class_=f"bar c{row.colour % COLOURS}",
                data_tip=row.tip or f"{row.label}: {row.text}"),
            tag("text", row.text, x=left + length + 7, y=y + above + 13, class_="value"),
        ]  # fmt: skip
    return svg(*parts, width=width, height=6 + step * len(rows), label=label, class_="chart")
