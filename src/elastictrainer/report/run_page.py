"""The report of one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import yaml

from elastictrainer.report import words
from elastictrainer.report.charts import Bar, Point, Reference, Series, bars, chart, time_chart
from elastictrainer.report.heatmap import SHADES, heat_map, heat_map_data
from elastictrainer.report.markup import Markup, data_block, tag
from elastictrainer.report.page import FULL, cards, figure, fold, legend, make_page, notes, save_page
from elastictrainer.report.reading import RunRecord, read_run
from elastictrainer.report.tables import Cell, number_cell, table

__all__ = ["run_page", "write_report"]


def write_report(run_folder: str | Path, out: str | Path | None = None) -> Path:
    """Make the report of a run: one HTML file, for people, that needs no network. Returns where it is.

        write_report("runs/birds")          # runs/birds/report.html

    Works on a run that is still going on or was killed: the page says what is missing. Costs well under a second.

    Raises:
        CheckpointError: not a run folder, or the page cannot be written.
        ConfigError: `out` is something that is no page.
    """
    run = read_run(run_folder)
    return save_page(run_page(run), Path(out) if out is not None else run.folder / "report.html")


def run_page(run: RunRecord) -> str:
    ended = "" if run.result is not None else f"not ended, {len(run.epochs)} epochs so far"
    about = [run.policy, f"budget {run.budget}" if run.budget else "", str(run.environment.get("device") or ""), ended]
    return make_page(
        run.heading,
        " · ".join([run.name, *filter(None, about)]),
        notes("Not everything is here", run.missing),
        _headline(run),
        tag("div", _accuracy(run), _loss(run), _selection(run), _budget(run), _steps(run), _memory(run), _overhead(run),
            class_="grid"),
        _tables(run),
        _configuration(run),
    )  # fmt: skip


def _headline(run: RunRecord) -> Markup:
    train_s, deciding_s = run.figure("train_s"), sum(run.overhead_s.values())
    best = words.number((run.result or {}).get("best_epoch"))
    of = {"test": "on test images", "val": "on validation images"}.get(run.accuracy_of, run.accuracy_of)
    if (share := run.judged_share) is not None:
        of = f"on {share:.0%} of them, for want of time: " + of
    energy = run.figure("energy_j")
    asked = run.asked_ratio
    return cards(
        [
            ("Accuracy", words.percent(run.accuracy), of + (f", weights of epoch {best:.0f}" if best else "")),
            ("Training time", words.seconds(train_s), f"{words.seconds(deciding_s)} of it deciding"),
            (
                "Share of full training",
                words.ratio(run.figure("measured_ratio")),
                (f"{words.ratio(asked)} asked" if asked is not None else "no budget to keep") + _with_deciding(run),
            ),
            ("Peak memory", words.size(run.figure("peak_bytes")), "measured while training"),
            ("Energy", words.joules(energy) if energy is not None else "no meter", _meter(run, energy)),
        ]
    )


def _with_deciding(run: RunRecord) -> str:
    """The share that is asked for is of the steps; whoever waits waits for the deciding, too."""
    train_s, full_step_s, steps = run.figure("train_s"), run.figure("full_step_s"), run.figure("steps")
    if not (train_s and full_step_s and steps) or run.policy == "adaptive":  # whose share is the run's already
        return ""
    return f"; {words.ratio(train_s / (full_step_s * steps))} with deciding"


def _meter(run: RunRecord, energy: float | None) -> str:
    covers = str((run.result or {}).get("energy_meter") or "")
    if energy is None:
        return "nothing here counts it" if run.result is not None else ""
    return covers


def _curves(run: RunRecord, lines: dict[str, str], show: Callable[[float], str], *, best: int = -1) -> list[Series]:
    """Figures of metrics.jsonl over seconds of training, by the names that they are shown with."""
    return [
        Series(
            name,
            tuple(
                Point(at, value, f"epoch {epoch}, {words.seconds(at)}\n{name} {show(value)}", marked=epoch == best)
                for at, value, epoch in curve
            ),
            colour,
        )
        for colour, (name, key) in enumerate(lines.items())
        if (curve := run.curve(key))
    ]


def _accuracy(run: RunRecord) -> Markup:
    best = words.number((run.result or {}).get("best_epoch"))
    series = _curves(run, {"accuracy": "val_accuracy"}, words.percent, best=int(best or -1))
    draw = time_chart(
        series, label="Validation accuracy over seconds of training", y_title="validation images classified right",
        y_format=lambda v: words.percent(v, 0 if _span(series) > 0.06 else 1), least_span=0.02,
    )  # fmt: skip
    kept = f" The ring marks epoch {best:.0f}, whose weights were kept." if best and draw else ""
    return figure("Accuracy", draw, f"After each epoch, without the time that evaluation took.{kept}", key="accuracy")


def _loss(run: RunRecord) -> Markup:
    series = _curves(run, {"training": "loss", "validation": "val_loss"}, lambda value: f"{value:.4g}")
    draw = time_chart(
        series, label="Training and validation loss over seconds of training", y_title="mean loss",
        y_format=lambda value: f"{value:.3g}",
    )  # fmt: skip
    caption = "Training: the mean over an epoch, while the network changed. Validation: after it."
    return figure("Loss", draw, caption, legend(series) if len(series) > 1 else "", key="loss")


def _selection(run: RunRecord) -> Markup:
    names, plans = run.names, run.plans
    if not names or not plans:
        return figure("What was trained", None, "There is no record of plans.", wide=FULL, key="selection")
    scored = any(plan.scores for plan in plans)
    trained = set().union(*(plan.trainable for plan in plans))
    ever = sum(name in trained for name in names)
    caption = (
        f"{len(plans)} plan{'s' if len(plans) > 1 else ''} over {len(names)} tensors, of which {ever} were trained at "
        "some time. A column is a plan, wider the longer it stood; a row is a tensor, by the block that it is in."
    )
    shades = range(1 if scored else SHADES, SHADES + 1)
    trains = "trains; darker: scored higher in its plan" if scored else "trains"
    scale = tag(
        "p",
        tag("span", tag("i", class_="ground"), "rests"),
        tag("span", *(tag("i", class_=f"h{level}") for level in shades), trains),
        class_="scale",
    )
    return figure(
        "What was trained",
        lambda width: heat_map(names, plans, width=width, label=f"Tensors trained by each of {len(plans)} plans"),
        caption,
        scale,
        data_block(heat_map_data(names, plans), class_="cells"),
        wide=FULL,
        key="selection",
    )


def _budget(run: RunRecord) -> Markup:
    asked = run.asked_ratio
    series = _curves(run, {"share so far": "measured_ratio"}, lambda value: words.ratio(value, 3))
    draw = time_chart(
        series, label="Share of full training's time so far, over seconds of training",
        y_title="share of full steps' time",
        y_format=words.ratio, references=() if asked is None else (Reference(f"asked: {words.ratio(asked)}", y=asked),),
        least_span=0.2,
    )  # fmt: skip
    caption = "Seconds of all steps so far over those of as many full steps, on the machine as it was at the time."
    return figure("Budget", draw, caption, key="budget")


def _steps(run: RunRecord) -> Markup:
    pairs = [(plan, plan.predicted_step_s, plan.step_s) for plan in run.plans]
    points = tuple(
        Point(
            predicted * 1e3, measured * 1e3,
            f"plan {plan.index + 1}, epoch {plan.epoch + 1}, {plan.steps} steps\npredicted {words.seconds(predicted)}, "
            f"measured {words.seconds(measured)} ({measured / predicted - 1:+.1%})",
        )
        for plan, predicted, measured in pairs
        if predicted and measured
    )  # fmt: skip
    if not points:
        ended = "In this run the steps of a plan were not timed by themselves."
        caption = ended if run.result is not None else "The steps of each plan are written down when a run ends."
        return figure("Step time, predicted and measured", None, caption, key="steps")
    band = run.profile.error.p95 if run.profile is not None else 0.0
    off = median(abs(p.y / p.x - 1) for p in points)
    caption = f"A dot is a plan; on the dashed line the prediction was right. Median error {off:.1%}"
    caption += f"; the band is what the profile states of itself, {band:.1%} either way." if band else "."

    def draw(width: float) -> Markup:
        return chart(
            [Series("plans", points, line=False)], width=width, height=250, x_zero=False,
            label="Measured against predicted step time of each plan",
            x_title="predicted, ms a step", y_title="measured, ms a step",
            x_format=lambda value: f"{value:g}", y_format=lambda value: f"{value:g}",
            references=(Reference("", slope=1.0, band=band),),
        )  # fmt: skip

    return figure("Step time, predicted and measured", draw, caption, key="steps")


def _memory(run: RunRecord) -> Markup:
    peaks = [plan.peak_bytes for plan in run.plans if plan.peak_bytes]
    found: list[tuple[str, float | None, int]] = [
        ("full step, predicted", _full_bytes(run), 1),
        ("largest plan, predicted", max(peaks, default=None), 0),
        ("training, measured", run.figure("peak_bytes"), 0),
        ("deciding, measured", run.figure("deciding_peak_bytes"), 1),
    ]
    rows = [Bar(name, value, words.size(value), colour=colour) for name, value, colour in found if value]
    on_cpu = str(run.environment.get("device") or "cpu").startswith("cpu")
    caption = "Predicted: what a step holds, network and optimizer included. " + (
        "Measured: the whole process, with Python and its libraries." if on_cpu else "Measured: by the allocator."
    )
    return figure("Memory", _bars(rows, "Memory, predicted and measured"), caption, key="memory")


def _full_bytes(run: RunRecord) -> float | None:
    return None if run.profile is None else float(run.profile.peak_bytes(run.profile.names))


def _overhead(run: RunRecord) -> Markup:
    parts, train_s = run.overhead_s, run.figure("train_s")
    said = {
        "profile": "pricing a step", "probe": "scoring tensors", "select": "choosing", "apply": "applying plans",
        "forward": "timing this machine", "flops": "counting operations", "features": "keeping features",
    }  # fmt: skip
    rows = [
        Bar(said.get(part, part), value, words.seconds(value) + (f" ({value / train_s:.1%})" if train_s else ""))
        for part, value in sorted(parts.items(), key=lambda item: -item[1])
    ]
    total = sum(parts.values())
    share = f", {total / train_s:.1%} of the training time" if train_s else ""
    caption = f"Deciding what to train took {words.seconds(total)}{share}, and is part of it."
    if compiled := run.figure("compilations"):
        caption += (
            f" torch.compile built {compiled:.0f} graphs over {len(run.plans)} plans, within the steps' own time."
        )
    return figure("Overheads", _bars(rows, "Seconds spent on deciding"), caption if rows else "", key="overheads")


def _bars(rows: list[Bar], label: str) -> Callable[[float], Markup] | None:
    return (lambda width: bars(rows, width=width, label=label)) if rows else None


def _span(series: list[Series]) -> float:
    values = [p.y for s in series for p in s.points]
    return max(values) - min(values) if values else 0.0


def _tables(run: RunRecord) -> Markup:
    """Every figure's numbers, for screen readers and spreadsheets."""
    epochs = [
        (int(words.number(line.get("epoch")) or 0), {key: words.number(line.get(key)) for key in line})
        for line in run.epochs
    ]
    by_epoch = table(
        f"{run.name}-epochs",
        ("epoch", "seconds", "loss", "validation loss", "accuracy", "share of full", "trained", "learning rate"),
        [
            (
                Cell(str(epoch), float(epoch)),
                number_cell(line.get("train_s"), "{:.1f}"),
                number_cell(line.get("loss"), "{:.4f}"),
                number_cell(line.get("val_loss"), "{:.4f}"),
                number_cell(line.get("val_accuracy"), "{:.1%}"),
                number_cell(line.get("measured_ratio"), "{:.3f}"),
                number_cell(line.get("share_trained"), "{:.1%}"),
                number_cell(line.get("lr"), "{:.3g}"),
            )
            for epoch, line in epochs
        ],
        numeric=[True] * 8,
    )
    by_plan = table(
        f"{run.name}-plans",
        ("plan", "why", "epoch", "steps", "tensors", "trained", "predicted ms", "measured ms", "ratio", "peak MiB"),
        [
            (
                Cell(str(plan.index + 1), float(plan.index + 1)),
                Cell(plan.reason),
                Cell(str(plan.epoch + 1), float(plan.epoch + 1)),
                Cell(str(plan.steps), float(plan.steps)),
                Cell(str(len(plan.trainable)), float(len(plan.trainable))),
                number_cell(plan.share_trained, "{:.1%}"),
                number_cell(plan.predicted_step_s, "{:.2f}", 1e3),
                number_cell(plan.step_s, "{:.2f}", 1e3),
                number_cell(plan.predicted_ratio, "{:.3f}"),
                number_cell(plan.peak_bytes, "{:.1f}", 2.0**-20),
            )
            for plan in run.plans
        ],
        numeric=[True, False] + [True] * 8,
    )
    return tag(
        "section",
        fold(f"Epochs ({len(epochs)})", by_epoch, key="epochs") if epochs else "",
        fold(f"Plans ({len(run.plans)})", by_plan, key="plans") if run.plans else "",
    )


def _configuration(run: RunRecord) -> Markup:
    asked = {key: value for key, value in run.config.items() if key != "environment"}
    facts = {**run.environment, "folder": str(run.folder)}
    listed = tag("dl", *(tag("div", tag("dt", str(k)), tag("dd", str(v))) for k, v in facts.items()), class_="facts")
    text = yaml.safe_dump(asked, sort_keys=False, allow_unicode=True) if asked else "not known"
    return tag(
        "section",
        fold("Configuration", tag("pre", text, tabindex="0"), key="configuration"),
        fold("Versions and machine", listed, key="versions"),
    )
