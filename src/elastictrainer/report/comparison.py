"""Several runs on one page: what accuracy costs by each method, and everything else that it costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastictrainer.errors import ConfigError
from elastictrainer.report import words
from elastictrainer.report.comparison_figures import (
    accuracy_curves,
    by_budget,
    by_importance,
    by_model,
    energy,
    frontier,
    memory,
    time_to_accuracy,
)
from elastictrainer.report.groups import Group, group_runs
from elastictrainer.report.markup import Markup, tag
from elastictrainer.report.page import fold, make_page, notes, save_page
from elastictrainer.report.reading import RunRecord, read_run
from elastictrainer.report.tables import Cell, number_cell, table

__all__ = ["comparison_page", "write_comparison"]

_OUTCOME = ("policy", "importance", "budget", "seed")  # what runs are compared by: no surprise if these differ


def write_comparison(run_folders: Sequence[str | Path], out: str | Path, *, remarks: Sequence[str] = ()) -> Path:
    """Make one page of several runs: figures by method, and tables to sort and save. Returns where it is.

        write_comparison(["runs/full", "runs/elastic"], "runs/comparison.html")

    Runs that differ only in their seed are one method, with its spread; every network and dataset has figures of its
    own. Runs need not be alike; the page says in what they differ, since a comparison is only fair if little else does.
    `remarks` are sentences to stand above everything else.

    Raises:
        CheckpointError: one of the folders is no run folder, or the page cannot be written.
        ConfigError: no run was given, or `out` is something that is no page.
    """
    if not run_folders:
        raise ConfigError("no run to compare; give at least one run folder")
    runs = [read_run(folder) for folder in run_folders]
    return save_page(comparison_page(runs, Path(out), remarks=remarks), Path(out))


def comparison_page(runs: Sequence[RunRecord], out: Path, *, remarks: Sequence[str] = ()) -> str:
    names = _short_names([run.folder for run in runs])
    groups = group_runs(runs, names)
    workloads = list(dict.fromkeys(group.workload for group in groups))
    headings = _headings(groups, workloads)
    devices = dict.fromkeys(str(run.environment.get("device") or "unknown device") for run in runs)
    missing = [f"{name}: {sentence}" for name, run in zip(names, runs) for sentence in run.missing]
    sections = [
        _workload(headings[workload], [g for g in groups if g.workload == workload], place, alone=len(workloads) == 1)
        for place, workload in enumerate(workloads)
    ]
    return make_page(
        headings[workloads[0]] if len(workloads) == 1 else f"{len(workloads)} workloads",
        " · ".join([f"{len(runs)} runs of {len(groups)} methods compared", *devices]),
        notes("To be read with this in mind", list(remarks)),
        notes("Not everything is here", missing),
        *sections,
        _by_model(groups),
        tag("section", tag("h2", "Outcome"), _outcome(runs, names, out), id="outcome"),
        _differences(runs, names),
    )


def _headings(groups: Sequence[Group], workloads: Sequence[str]) -> dict[str, str]:
    """Of each workload: with folders by their last parts, where these tell it from the others."""
    short = {group.workload: group.runs[0].heading for group in groups}
    return {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in workloads}


def _workload(heading: str, groups: Sequence[Group], place: int, *, alone: bool) -> Markup:
    """One network on one dataset. Ids are numbered from the second workload on."""

    def key(name: str) -> str:
        return name if place == 0 else f"{name}-{place + 1}"

    importance = by_importance(groups, key("by-importance"))
    drawn = [
        accuracy_curves(groups, key("accuracy")),
        frontier(groups, key("frontier")),
        *by_budget(groups, key("by-budget")),
        *([] if importance is None else [importance]),
        memory(groups, key("memory")),
        energy(groups, key("energy")),
    ]
    reached = time_to_accuracy(groups, key("time-to-accuracy"))
    return tag(
        "section",
        "" if alone else tag("h2", heading, class_="workload"),
        tag("div", *drawn, class_="grid"),
        tag(
            "section",
            tag("h2", "Time to reach an accuracy"),
            tag("p", "On validation images, as shares of the best that full training reached there; seconds of training"
                " after the first epoch that had it, means over the seeds that did.", class_="about"),
            reached,
        ) if reached else "",
    )  # fmt: skip


def _by_model(groups: Sequence[Group]) -> Markup:
    """For each dataset that several networks were trained on."""
    drawn: list[Markup] = []
    for data in dict.fromkeys(group.data for group in groups):
        on_it = [group for group in groups if group.data == data]
        if len({group.model for group in on_it}) > 1:
            drawn.append(by_model(on_it, f"by-model-{len(drawn) + 1}"))
    return tag("div", *drawn, class_="grid", style="margin-top:20px") if drawn else Markup("")


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
                number_cell(flops, "{:.0f}" if flops is not None and flops >= 1e12 else "{:.4g}", 1e-9),
                number_cell(seed, "{:.0f}"),
                Cell(str(len(run.epochs)), float(len(run.epochs))),
            )
        )
    numeric = [False] * 4 + [True] * 2 + [False] + [True] * 7
    return table("comparison", columns, rows, numeric=numeric)


def _differences(runs: Sequence[RunRecord], names: Sequence[str]) -> Markup:
    """Options in which the runs differ, which whoever compares them should know: a row a value, with who has it."""
    configs = [
        _flat({**run.config, "device": run.environment.get("device"), "torch": run.environment.get("torch")})
        for run in runs
    ]
    keys = dict.fromkeys(key for config in configs for key in config)
    differ = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    if not differ:
        return Markup("")
    rows = []
    for key in sorted(differ, key=lambda key: (key in _OUTCOME, key)):
        by_value: dict[str, list[str]] = {}
        for name, config in zip(names, configs):
            by_value.setdefault("–" if config.get(key) is None else str(config[key]), []).append(name)
        for value, having in by_value.items():
            rows.append(
                (
                    Cell(key),
                    Cell(_brief(value), wraps=True),
                    Cell(str(len(having)), float(len(having))),
                    Cell(", ".join(having), wraps=True),
                )
            )
    others = [key for key in differ if key not in _OUTCOME]
    title = f"What else differs between the runs: {', '.join(others)}" if others else "Options that differ"
    shown = table("differences", ("option", "value", "runs", "which"), rows, numeric=[False, False, True, False])
    return tag("section", fold(title, shown, key="differences"))


def _flat(config: Any, path: str = "") -> dict[str, Any]:
    """Options by their whole names: `optimizer.groups.0.lr`, where all of `optimizer` would say too much."""
    if isinstance(config, dict):
        pairs = list(config.items())
    elif isinstance(config, list) and any(isinstance(item, dict) for item in config):
        pairs = list(enumerate(config))
    else:  # names of classes, say: one thing, however many there are
        return {path: config}
    found: dict[str, Any] = {}
    for key, value in pairs:
        if path or key not in ("environment", "command"):
            found |= _flat(value, f"{path}.{key}" if path else str(key))
    return found


def _brief(text: str) -> str:
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
