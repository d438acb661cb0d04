"""The figures of a comparison, each after one of the paper's: what accuracy costs, and what everything else costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastictrainer.report import words
from elastictrainer.report.charts import Bar, Point, Reference, Series, bars, chart, time_chart
from elastictrainer.report.groups import Group, Spread
from elastictrainer.report.markup import Markup
from elastictrainer.report.page import FULL, figure, legend
from elastictrainer.report.reading import RunRecord
from elastictrainer.report.tables import Cell, table

__all__ = [
    "accuracy_curves",
    "accuracy_levels",
    "by_budget",
    "by_importance",
    "by_model",
    "energy",
    "frontier",
    "memory",
    "time_to_accuracy",
]

LEVELS = (0.9, 0.95, 0.98, 1.0)  # of what full training reaches on validation


def accuracy_curves(groups: Sequence[Group], key: str) -> Markup:
    series = [
        Series(
            group.name,
            tuple(
                Point(at, at_epoch.mean, f"{group.name}\nepoch {epoch}, {words.seconds(at)}: {_shown(at_epoch)}",
                      low=at_epoch.low, high=at_epoch.high)
                for at, at_epoch, epoch in group.curve("val_accuracy")
            ),
            colour,
        )
        for colour, group in enumerate(groups)
    ]  # fmt: skip
    draw = time_chart(
        series, label="Validation accuracy over seconds of training, for each method",
        y_title="validation images classified right", y_format=lambda value: words.percent(value, 0), height=340,
        least_span=0.04,
    )  # fmt: skip
    caption = "After each epoch. Seconds include deciding what to train, and not evaluation."
    if any(len(group.runs) > 1 for group in groups):
        caption += " Lines are means over seeds, bands what the seeds lay between."
    return figure("Accuracy against seconds", draw, caption, legend(series), wide=FULL, key=key)


def frontier(groups: Sequence[Group], key: str) -> Markup:
    """Where each method ended; a method at several budgets, or full training for several lengths, is one line."""
    families: dict[str, list[tuple[float, Point]]] = {}
    for group in groups:
        at, accuracy = group.over(lambda run: run.figure("train_s")), group.over(lambda run: run.accuracy)
        if at is not None and accuracy is not None:
            tip = f"{group.name}\n{_shown(accuracy)} ({group.runs[0].accuracy_of}) after {words.seconds(at.mean)}"
            point = Point(at.mean, accuracy.mean, tip, marked=True, low=accuracy.low, high=accuracy.high)
            families.setdefault(group.family, []).append((at.mean, point))
    colours = _colours(groups)
    series = [
        Series(name, tuple(point for _, point in sorted(points, key=lambda pair: pair[0])), colours[name])
        for name, points in families.items()
    ]
    draw = time_chart(
        series, label="Final accuracy and training time of each method", y_title="final accuracy",
        y_format=lambda value: words.percent(value, 0), height=320, least_span=0.04,
    )  # fmt: skip
    caption = (
        "Where each method ended, with the weights that were kept: further up and further left is better. A line joins "
        "a method's budgets; that of full training joins its lengths, and is what any other has to be above."
    )
    return figure("The frontier", draw, caption, legend(series), wide=FULL, key=key)


def accuracy_levels(groups: Sequence[Group]) -> list[float]:
    """Validation accuracies worth reaching: shares of what the longest full training had at best."""
    best = {g.name: s.mean for g in groups if (s := g.over(_best_val)) is not None}
    full = [g for g in groups if g.policy == "full" and g.name in best]
    if not best:
        return []
    whole = best[max(full, key=lambda g: g.epochs).name] if full else max(best.values())
    return [whole * level for level in LEVELS]


def time_to_accuracy(groups: Sequence[Group], key: str) -> Markup:
    """ElasticTrainer, Table 2."""
    levels = accuracy_levels(groups)
    if not levels:
        return Markup("")
    rows = []
    for group in groups:
        cells = [Cell(group.name)]
        for level in levels:
            found = group.seconds_to(level - 1e-9)
            mean = sum(found) / len(found) if found else None
            partly = "" if len(found) in (0, len(group.runs)) else f" ({len(found)} of {len(group.runs)} seeds)"
            cells.append(Cell("not reached") if mean is None else Cell(words.seconds(mean) + partly, float(mean)))
        rows.append(tuple(cells))
    columns = ("method", *(f"to {words.percent(level)}" for level in levels))
    return table(key, columns, rows, numeric=[False] + [True] * len(levels))


def by_budget(groups: Sequence[Group], key: str) -> list[Markup]:
    """Training time, and operations, by the budget asked for (Fig. 17), beside full training's; nothing for methods at
    one budget alone."""
    time = _by_budget(
        "Training time by budget", "seconds of training", lambda run: run.figure("train_s"), words.seconds, groups,
        "By the share of full training that was asked for, with everything that deciding took.", f"{key}-time",
    )  # fmt: skip
    flops = _by_budget(
        "Operations by budget", "operations of all steps", lambda run: run.figure("flops"), words.operations, groups,
        "Counted on one step of each plan, times its steps; deciding is not counted.", f"{key}-flops",
    )  # fmt: skip
    return [drawn for drawn in (time, flops) if drawn is not None]


def _by_budget(
    title: str, y_title: str, read: Callable[[RunRecord], float | None], form: Callable[[float], str],
    groups: Sequence[Group], caption: str, key: str,
) -> Markup | None:  # fmt: skip
    families: dict[str, list[Point]] = {}
    for group in groups:
        asked, value = group.runs[0].asked_ratio, group.over(read)
        if asked is not None and value is not None:
            tip = f"{group.name}\n{form(value.mean)}"
            point = Point(asked, value.mean, tip, marked=True, low=value.low, high=value.high)
            families.setdefault(group.family, []).append(point)
    several = {name: points for name, points in families.items() if len({p.x for p in points}) > 1}
    if not several:
        return None
    colours = _colours(groups)
    series = [Series(name, tuple(sorted(points, key=lambda p: p.x)), colours[name]) for name, points in several.items()]
    full = max((g for g in groups if g.policy == "full"), key=lambda g: g.epochs, default=None)
    whole = None if full is None else full.over(read)
    level = () if whole is None or full is None else (Reference(full.name, y=whole.mean),)

    def draw(width: float) -> Markup:
        # From zero: half the seconds should look like half.
        return chart(
            series, width=width, height=250, label=title, x_title="budget asked", y_title=y_title,
            x_format=lambda value: f"{value:g}×", y_format=form, x_zero=False, y_zero=True, references=level,
        )  # fmt: skip

    return figure(title, draw, caption, legend(series), key=key)


def by_model(groups: Sequence[Group], key: str) -> Markup:
    """Accuracy by network, on the same data (Fig. 19)."""
    return _bars_of(
        "By model", groups, lambda g: f"{_short(g.model)} · {g.name}", key,
        "Final accuracy, means over seeds. Colours are methods.",
        # Not by name: it says no more than tells a method from the others of its own workload.
        colour_by=lambda g: f"{g.family} {g.budget} {g.epochs}",
    )  # fmt: skip


def by_importance(groups: Sequence[Group], key: str) -> Markup | None:
    """Accuracy by what importance is measured by, at the same budget (Fig. 20); None where there is one alone."""
    # Other policies that measure importance differ in more than that.
    scored = [g for g in groups if g.importance is not None and g.policy in ("elastic", "random")]
    kept = [
        g for g in scored
        if len({other.importance for other in scored if other.budget == g.budget and other.epochs == g.epochs}) > 1
    ]  # fmt: skip
    if not kept:
        return None
    return _bars_of(
        "By importance", kept, lambda g: f"{g.importance} {g.budget or ''}".strip(), key,
        "Final accuracy by what importance is measured by, at the same budget; random is the control.",
        colour_by=lambda g: g.budget or "",
    )  # fmt: skip


def memory(groups: Sequence[Group], key: str) -> Markup:
    """Fig. 22."""
    on_cpu = all(str(r.environment.get("device") or "cpu").startswith("cpu") for g in groups for r in g.runs)
    caption = "The most that was held while training" + (
        ": the whole process, with Python and its libraries." if on_cpu else ", by the allocator."
    )
    return _value_bars("Memory", groups, lambda run: run.figure("peak_bytes"), words.size, caption, key)


def energy(groups: Sequence[Group], key: str) -> Markup:
    """Fig. 23."""
    metered = [r.result for g in groups for r in g.runs if r.result is not None and r.figure("energy_j") is not None]
    meters = sorted({str(result.get("energy_meter")) for result in metered})
    caption = f"Of training, by {', '.join(meters)}." if meters else "No meter was there, and nothing is guessed."
    return _value_bars("Energy", groups, lambda run: run.figure("energy_j"), words.joules, caption, key)


def _value_bars(
    title: str, groups: Sequence[Group], read: Callable[[RunRecord], float | None], form: Callable[[float], str],
    caption: str, key: str,
) -> Markup:  # fmt: skip
    rows = [
        Bar(group.name, value.mean, form(value.mean))
        for group in groups
        if (value := group.over(read)) is not None
    ]  # fmt: skip
    draw = (lambda width: bars(rows, width=width, label=f"{title} of each method")) if rows else None
    return figure(title, draw, caption, key=key)


def _bars_of(
    title: str, groups: Sequence[Group], name: Callable[[Group], str], key: str, caption: str,
    *, colour_by: Callable[[Group], str],
) -> Markup:  # fmt: skip
    colours = list(dict.fromkeys(colour_by(group) for group in groups))
    rows = [
        Bar(
            name(group),
            value.mean,
            words.percent(value.mean),
            f"{name(group)}: {_shown(value)}",
            colours.index(colour_by(group)),
        )
        for group in sorted(groups, key=lambda g: colours.index(colour_by(g)))
        if (value := group.over(lambda run: run.accuracy)) is not None
    ]
    draw = (lambda width: bars(rows, width=width, label=title)) if rows else None
    return figure(title, draw, caption, key=key)


def _colours(groups: Sequence[Group]) -> dict[str, int]:
    """Of a family that of its first method: a method is of one colour in all figures of a workload."""
    return {group.family: place for place, group in reversed(list(enumerate(groups)))}


def _best_val(run: RunRecord) -> float | None:
    return max((value for _, value, _ in run.curve("val_accuracy")), default=None)


def _shown(spread: Spread) -> str:
    """A mean, and what it lay between where there were several."""
    text = words.percent(spread.mean)
    if spread.count == 1:
        return text
    return f"{text} ({words.percent(spread.low)} to {words.percent(spread.high)}, {spread.count} seeds)"


def _short(model: str) -> str:
    return model.rpartition("/")[2]
