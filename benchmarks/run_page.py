"""The page on whole runs: accuracy for a share of full training's time, kept features, the loader, deadlines."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from elastictrainer.budget import format_bytes, format_seconds

sys.path.insert(0, str(Path(__file__).parent))
from page_parts import Row, absent, markdown, number, percent, tables, where


def whole_runs(folder: Path) -> str:
    text = (
        "# Whole runs, measured\n\n"
        "What the [adaptive policy](../method/adaptive.md) makes of a share of full training's time, beside simpler\n"
        "ways to spend it; what a step costs once its forward pass is not paid again; whether images come as\n"
        "fast; and whether deadlines hold.\n\n"
    )
    return text + frontier(folder) + kept_steps(folder) + loader(folder) + deadlines(folder)


def frontier(folder: Path) -> str:
    text = "## Accuracy within a share of full training's time\n\n"
    found = tables("frontier_*.csv", folder)
    if not found:
        return text + absent("The frontier", "python benchmarks/frontier.py --device cuda --full") + "\n"
    for name, rows in found.items():
        finals = [row for row in rows if row["stage"] == "final" and row.get("test_accuracy")]
        first = finals[0]
        text += (
            f"{first['data']}, {first['epochs']} epochs as the whole, batch {first['batch']}, images of "
            f"{first['image']} pixels; each method at its best rate on validation. *Took* is of full training,\n"
            "deciding and building of features included, on the engine that all methods run on; *of eager* is of\n"
            "plain PyTorch's full training, launch by launch. Prices are given to all methods alike.\n\n"
        )
        key = lambda row: (row["model"], float(row["budget"]))  # noqa: E731
        finals.sort(key=key)
        lines = []
        for (model, budget), cells in groupby(finals, key=key):
            here: dict[str, list[Row]] = {}
            for row in cells:
                here.setdefault(row["method"], []).append(row)
            ranked = sorted(here.items(), key=lambda item: -_mean(item[1], "test_accuracy"))
            for method, made in ranked:
                lines.append((
                    model, f"{budget:g}x", f"**{method}**" if method == "adaptive" else method, _accuracy(made),
                    str(len(made)), f"{_mean(made, 'ratio'):.3f}", f"{_mean(made, 'of_eager'):.3f}",
                    number(made[0]["lr"]),
                ))  # fmt: skip
        text += markdown(("model", "time", "method", "test accuracy", "seeds", "took", "of eager", "lr"), lines) + "\n"
        text += where(finals, name) + "\n"
    return text


def _mean(rows: Sequence[Row], key: str) -> float:
    known = [float(row[key]) for row in rows if row.get(key)]
    return statistics.mean(known) if known else 0.0


def _accuracy(rows: Sequence[Row]) -> str:
    known = [100 * float(row["test_accuracy"]) for row in rows]
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.1f}{spread}"


def kept_steps(folder: Path) -> str:
    text = (
        "## Steps on kept features\n\n"
        "Real steps, in turns in one process: everything trained; the last tensors trained, forward pass and all; the\n"
        "same on kept features. *Building* is a batch's features beside its forward pass in a step. *Off* is how far\n"
        "the gradient on kept features is from the whole network's on the same views.\n\n"
    )
    found = tables("kept_steps_*.csv", folder)
    if not found:
        return text + absent("Kept features", "python benchmarks/kept_steps.py") + "\n"
    for name, rows in found.items():
        text += f"Batch {rows[0]['batch']}, images of {rows[0]['image']} pixels.\n\n"
        columns = (
            "model", "tensors", "kept as", "full step", "without keeping", "kept", "faster", "building", "kept in all",
            "step holds, of full", "off",
        )  # fmt: skip
        text += markdown(columns, (
            (r["model"], "head" if float(r["share"]) == 0 else f"last {percent(r['share'], 0)}", r["kept_as"],
             format_seconds(float(r["full_step_s"])), format_seconds(float(r["plan_step_s"])),
             format_seconds(float(r["kept_step_s"])), f"{float(r['speedup']):.1f}x",
             number(r["fill_of_forward"], ".2f"),
             format_bytes(int(float(r["kept_bytes"]))),
             f"{float(r['plan_peak_bytes']) / float(r['full_peak_bytes']):.2f}", f"{float(r['gradient_off']):.1e}")
            for r in rows if r.get("kept_step_s")
        ))  # fmt: skip
        text += "\n" + where(rows, name) + "\n"
    return text


def loader(folder: Path) -> str:
    text = (
        "## The loader\n\n"
        "What a batch takes to be shuffled, augmented and normalised on one thread, its images decoded before. Steps\n"
        "that take longer never wait for it; on a GPU it is done there.\n\n"
    )
    found = tables("loader_*.csv", folder)
    if not found:
        return text + absent("The loader", "python benchmarks/loader.py") + "\n"
    for name, rows in found.items():
        text += markdown(("pixels in", "batch", "augmentation", "image", "images a second", "a batch"), (
            (r["pixels_in"], r["batch"], r["augment"], r["image"], number(r["images_per_s"], ".0f"),
             format_seconds(float(r["batch_ms"]) / 1e3))
            for r in rows
        ))  # fmt: skip
        text += "\n" + where(rows, name) + "\n"
    return text


def deadlines(folder: Path) -> str:
    text = (
        "## Deadlines\n\n"
        "From the call of `et.fit` until it returns: training, validation, test, checkpoints, weights and report. In\n"
        "every third run, processes that multiply matrices start on every core at half of the time. *Judged by*: the\n"
        "share of the test images for which there was time.\n\n"
    )
    found = tables("deadlines_*.csv", folder)
    if not found:
        return text + absent("Keeping deadlines", "python benchmarks/deadlines.py") + "\n"
    for name, rows in found.items():
        text += markdown(("deadline", "load", "took", "late by", "steps", "test accuracy", "judged by"), (
            (format_seconds(float(r["deadline_s"])), "from half-way" if int(r["load"]) else "none",
             format_seconds(float(r["took_s"])), f"{100 * float(r['late']):+.1f}%", r["steps"], percent(r["accuracy"]),
             percent(r.get("share"), 0))
            for r in rows
        ))  # fmt: skip
        late = [float(r["late"]) for r in rows]
        text += (
            f"\n{sum(share <= 0.02 for share in late)} of {len(late)} runs ended within 2% of their deadline; the "
            f"latest was {100 * max(late):+.1f}%.\n"
        )
        notes = dict.fromkeys(r["note"] for r in rows if r.get("note"))
        text += "".join(f"\n{note}\n" for note in notes) + "\n" + where(rows, name) + "\n"
    return text
