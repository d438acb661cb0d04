"""Several runs on one page: accuracy against seconds, and one table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastictrainer.errors import ConfigError
from elastictrainer.report import words
from elastictrainer.report.charts import Point, Series, time_chart
from elastictrainer.report.markup import Markup, tag
from elastictrainer.report.page import FULL, figure, fold, legend, make_page, notes, save_page
from elastictrainer.report.reading import RunRecord, read_run
from elastictrainer.report.tables import Cell, number_cell, table

__all__ = ["comparison_page", "write_comparison"]

_OUTCOME = ("policy", "importance", "budget", "seed")  # what runs are compared by: no surprise if these differ


def write_comparison(run_folders: Sequence[str | Path], out: str | Path) -> Path:
    """Make one page of several runs: accuracy against seconds, and a table to sort and save. Returns where it is.

        et.write_comparison(["runs/full", "runs/elastic"], "runs/comparison.html")

    Runs need not be alike; the page says in what they differ, since a comparison is only fair if little else does.

    Raises:
        CheckpointError: one of the folders is no run folder, or the page cannot be written.
        ConfigError: no run was given, or `out` is something that is no page.
    """
    if not run_folders:
        raise ConfigError("no run to compare; give at least one run folder")
    runs = [read_run(folder) for folder in run_folders]
    return save_page(comparison_page(runs, Path(out)), Path(out))


def comparison_page(runs: Sequence[RunRecord], out: Path) -> str:
    names = _short_names([run.folder for run in runs])
    titles = dict.fromkeys(run.title for run in runs)
    devices = dict.fromkeys(str(run.environment.get("device") or "unknown device") for run in runs)
    missing = [f"{name}: {sentence}" for name, run in zip(names, runs) for sentence in run.missing]
    return make_page(
        next(iter(titles)) if len(titles) == 1 else f"{len(runs)} runs",
        " · ".join([f"{len(runs)} runs compared", *devices]),
        notes("Not everything is here", missing),
        tag("div", _curves(runs, names), _frontier(runs, names), class_="grid"),
        tag("section", tag("h2", "Outcome"), _outcome(runs, names, out), id="outcome"),
        _differences(runs, names),
    )


def _curves(runs: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    series = [
        Series(
            name,
            tuple(
                Point(at, value, f"{name}\nepoch {epoch}, {words.seconds(at)}: {words.percent(value)}")
                for at, value, epoch in run.curve("val_accuracy")
            ),
            colour,
        )
        for colour, (name, run) in enumerate(zip(names, runs))
    ]
    draw = time_chart(
        series, label="Validation accuracy over seconds of training, for each run",
        y_title="validation images classified right", y_format=lambda value: words.percent(value, 0), height=340,
        least_span=0.04,
    )  # fmt: skip
    caption = "After each epoch. Seconds include deciding what to train, and not evaluation."
    return figure("Accuracy against seconds", draw, caption, legend(series), wide=FULL, key="accuracy")


def _frontier(runs: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    series = []
    for colour, (name, run) in enumerate(zip(names, runs)):
        at, accuracy = run.figure("train_s"), run.accuracy
        if at is not None and accuracy is not None:
            tip = f"{name}\n{words.percent(accuracy)} ({run.accuracy_of}) after {words.seconds(at)}"
            series.append(Series(name, (Point(at, accuracy, tip, marked=True),), colour, line=False))
    draw = time_chart(
        series, label="Final accuracy and training time of each run", y_title="final accuracy",
        y_format=lambda value: words.percent(value, 0), height=300, least_span=0.04,
    )  # fmt: skip
    caption = "Where each run ended, with the weights that were kept: further up and further left is better."
    return figure("Where each run ended", draw, caption, legend(series), wide=FULL, key="frontier")


def _outcome(runs: Sequence[RunRecord], names: Sequence[str], out: Path) -> Markup:
    columns = (
        "run", "policy", "importance", "asked", "got", "accuracy", "of", "seconds", "deciding s", "peak MiB",
        "energy J", "GFLOP", "seed", "epochs",
    )  # fmt: skip
    rows = []
    for name, run in zip(names, runs):
        flops, energy = run.figure("flops"), run.figure("energy_j")
        seed = words.number((run.result or run.config).get("seed"))
        rows.append(
            (
                Cell(name, link=_link(run.folder, out)),
                Cell(run.policy),
                Cell(run.importance or "–"),
                Cell(run.budget or "–"),
                number_cell(run.figure("measured_ratio"), "{:.3f}"),
                number_cell(run.accuracy, "{:.1%}"),
                Cell(run.accuracy_of),
                number_cell(run.figure("train_s"), "{:.1f}"),
                number_cell(sum(run.overhead_s.values()), "{:.1f}"),
                number_cell(run.figure("peak_bytes"), "{:.1f}", 2.0**-20),
                Cell("no meter") if energy is None else number_cell(energy, "{:.0f}"),
                number_cell(flops, "{:.4g}", 1e-9),
                number_cell(seed, "{:.0f}"),
                Cell(str(len(run.epochs)), float(len(run.epochs))),
            )
        )
    numeric = [False] * 4 + [True] * 2 + [False] + [True] * 7
    return table("comparison", columns, rows, numeric=numeric)


def _differences(runs: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    """Options in which the runs differ: whoever compares them should know."""
    configs = [
        {**run.config, "device": run.environment.get("device"), "torch": run.environment.get("torch")} for run in runs
    ]
    keys = dict.fromkeys(key for config in configs for key in config if key != "environment")
    differ = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    if not differ:
        return Markup("")
    rows = [
        (Cell(str(key)), *(Cell(_brief(config.get(key))) for config in configs))
        for key in sorted(differ, key=lambda key: (key in _OUTCOME, str(key)))
    ]
    others = [str(key) for key in differ if key not in _OUTCOME]
    title = f"What else differs between the runs: {', '.join(others)}" if others else "Options that differ"
    return tag(
        "section",
        fold(
            title, table("differences", ("option", *names), rows, numeric=[False] * (len(runs) + 1)), key="differences"
        ),
    )


def _brief(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _link(folder: Path, out: Path) -> str | None:
    """To the run's own report, if it has one, as seen from the page."""
    report = folder / "report.html"
    try:
        # quote also takes away what would make a folder's name a scheme (`javascript:`).
        return quote(Path(os.path.relpath(report, out.parent)).as_posix()) if report.is_file() else None
    except ValueError:  # on another drive
        return None


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Each folder by as few of its last parts as tell it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]
