"""The selection over time: tensors by plans, output side at the top (ElasticTrainer, Fig. 21).

A cell for every tensor of every plan would be tens of thousands of elements, so each shade is one path, and what is
under the pointer is looked up by the page's script in one block of data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from elastictrainer.graph import block_of
from elastictrainer.report.charts import svg, text_width
from elastictrainer.report.markup import Markup, tag
from elastictrainer.report.reading import PlanRow

__all__ = ["SHADES", "heat_map", "heat_map_data"]

SHADES = 5
_DECADES = 3.0  # the lightest shade is for a thousandth of the plan's largest score, and less
_NARROWEST = 5.0  # pixels of a plan that stood for a moment


def heat_map(names: Sequence[str], plans: Sequence[PlanRow], *, width: float, label: str) -> Markup:
    """Columns are plans, wider the longer they stood; rows are tensors; a filled cell is a tensor that trains."""
    blocks = [(block, len(list(members))) for block, members in groupby(names, key=block_of)]
    shown = {block: _shortened(block, 18 if width > 500 else 11) for block, _ in blocks}
    left = max((text_width(text) for text in shown.values()), default=0) + 12
    row = min(max(620 / len(names), 3.0), 16.0)
    top, bottom, right = 20.0, 40.0, 2.0
    edges = _edges([max(plan.steps, 0) for plan in plans], left, width - right)
    height = top + row * len(names) + bottom
    parts = [
        tag("text", "output", x=left, y=12, class_="muted"),
        tag("rect", x=left, y=top, width=edges[-1] - left, height=row * len(names), class_="ground"),
        *_cells(names, plans, edges, top, row),
        *_rows(blocks, shown, left, edges[-1], top, row),
        *_columns(plans, edges, top, row * len(names)),
        tag("text", "input", x=left, y=height - 4, class_="muted"),
        tag("text", "epoch", x=edges[-1], y=height - 4, class_="muted end"),
        tag("rect", x=0, y=0, width=0, height=0, class_="cursor"),
    ]
    return svg(
        *parts, width=width, height=height, label=label, class_="heatmap",
        data_edges=" ".join(f"{edge:.1f}" for edge in edges), data_top=top, data_row=row,
    )  # fmt: skip


def heat_map_data(names: Sequence[str], plans: Sequence[PlanRow]) -> dict[str, Any]:
    """What the page's script says of a cell. Scores that plans share (trims choose from the same) stand once."""
    scores: list[list[float | None]] = []
    columns = []
    for plan in plans:
        aligned = [None if (s := plan.scores.get(name)) is None else float(f"{s:.3g}") for name in names]
        if aligned not in scores[-1:]:
            scores.append(aligned)
        columns.append(
            {
                "title": f"plan {plan.index + 1} ({plan.reason}): epoch {plan.epoch + 1}, {plan.steps} steps",
                "trains": "".join("1" if name in plan.trainable else "0" for name in names),
                "scores": len(scores) - 1,
            }
        )
    return {"names": list(names), "plans": columns, "scores": scores}


def shade(score: float | None, largest: float) -> int:
    """1 (least) to SHADES, by the logarithm of the share of the plan's largest score.

    >>> shade(1.0, 1.0), shade(0.1, 1.0), shade(1e-5, 1.0), shade(-1.0, 1.0), shade(None, 0.0)
    (5, 4, 1, 1, 5)
    """
    if score is None or largest <= 0:
        return SHADES
    if score <= 0:
        return 1
    share = 1 + math.log10(score / largest) / _DECADES
    return min(max(math.ceil(share * SHADES), 1), SHADES)


def _edges(steps: Sequence[int], left: float, right: float) -> list[float]:
    """Where columns begin and end: in proportion to their steps, on top of a width that can be seen and touched."""
    least = min(_NARROWEST, (right - left) / len(steps) / 2)
    spare, total = right - left - least * len(steps), sum(steps) or len(steps)
    edges = [left]
    for count in steps:
        edges.append(edges[-1] + least + spare * (count if sum(steps) else 1) / total)
    return edges


def _cells(
    names: Sequence[str], plans: Sequence[PlanRow], edges: Sequence[float], top: float, row: float
) -> list[Markup]:
    paths: dict[int, list[str]] = {level: [] for level in range(1, SHADES + 1)}
    for plan, x, after in zip(plans, edges, edges[1:]):
        largest = max((plan.scores.get(name, 0.0) for name in plan.trainable), default=0.0)
        gap = 1.0 if after - x > 8 else 0.4
        levels = [shade(plan.scores.get(name), largest) if name in plan.trainable else 0 for name in names]
        at = 0
        for level, run in groupby(levels):
            count = len(list(run))
            if level:
                paths[level].append(
                    f"M{x:.1f},{top + row * at:.1f}h{after - x - gap:.1f}v{row * count:.1f}h-{after - x - gap:.1f}z"
                )
            at += count
    return [tag("path", d="".join(path), class_=f"heat h{level}") for level, path in paths.items() if path]


def _rows(
    blocks: Sequence[tuple[str, int]], shown: dict[str, str], left: float, right: float, top: float, row: float
) -> list[Markup]:
    """A hairline between blocks, and their names where there is room."""
    parts, at, free_from = [], 0, 0.0
    for block, count in blocks:
        y, middle = top + row * at, top + row * (at + count / 2) + 4
        if at:
            parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="between"))
        if middle - 10 >= free_from:
            parts.append(tag("text", shown[block], x=left - 8, y=middle, class_="tick end"))
            free_from = middle + 2
        at += count
    return parts


def _columns(plans: Sequence[PlanRow], edges: Sequence[float], top: float, height: float) -> list[Markup]:
    """Below a column the epoch in which its plan was made, where it is a new one and there is room."""
    parts, seen, free_from = [], -1, 0.0
    for plan, x in zip(plans, edges):
        if plan.epoch == seen:
            continue
        seen, text = plan.epoch, str(plan.epoch + 1)
        parts.append(tag("line", x1=x, x2=x, y1=top + height, y2=top + height + 5, class_="axis"))
        if x >= free_from:
            parts.append(tag("text", text, x=x, y=top + height + 17, class_="tick"))
            free_from = x + text_width(text) + 8
    return parts


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]
