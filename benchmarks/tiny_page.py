"""The page on adaptation to a handful of images: accuracy, bytes, multiply-adds and seconds, method by method."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from elastictrainer.budget import format_bytes

sys.path.insert(0, str(Path(__file__).parent))
from page_parts import Row, absent, markdown, number, percent, tables, where


def few_shot(folder: Path) -> str:
    text = (
        "# A handful of images, measured\n\n"
        "[TinyTrain](../method/tinytrain.md) beside what it is compared with, on the same tasks, images, views and\n"
        "batch, in turns. *Backward memory* is what backward keeps for a batch; *seconds* are of deciding and\n"
        "training, the median over tasks of their share of full training's on the same task.\n\n"
    )
    return text + episodes(folder) + greedy(folder) + memory(folder) + layers(folder) + seconds(folder)


def episodes(folder: Path) -> str:
    found = tables("tinytrain_episodes_*.csv", folder)
    if not found:
        return absent("Few-shot adaptation", "python benchmarks/tinytrain.py episodes --device cuda") + "\n"
    text = ""
    key = lambda row: (row["model"], row["domain"], row["meta"], int(row["batch_size"]))  # noqa: E731
    for name, rows in found.items():
        rows = sorted(rows, key=key)
        for (model, domain, meta, batch), cells in groupby(rows, key=key):
            here = list(cells)
            first = here[0]
            text += f"## {model} on {domain}, {'' if meta == 'True' else 'not '}meta-trained, batch {batch}\n\n"
            text += (
                f"{first['episodes']} tasks of {first['ways']} classes with {first['shots']} images each, "
                f"{first['image_size']} pixels, {first['steps']} steps of {first['optimizer']}; ceilings of "
                f"{first['memory']} and {first['compute']} for those that take any.\n\n"
            )
            columns = (
                "method",
                "accuracy, 95% interval",
                "lr",
                "backward memory",
                "of full",
                "multiply-adds",
                "seconds",
                *(("peak on the device",) if first.get("peak_bytes") else ()),
            )
            text += markdown(columns, map(_episode_row, here)) + "\n" + where(here, name) + "\n"
    return text


def _episode_row(row: Row) -> tuple[str, ...]:
    nbytes, none = float(row["backward_bytes"]), row["method"] == "none"
    half = f" ± {100 * float(row['half']):.1f}" if row["half"] else ""  # of one task there is none
    return (
        row["method"],
        percent(row["accuracy"]) + half,
        "–" if none else number(row["lr"]),
        format_bytes(int(nbytes)),
        f"{nbytes / float(row['full_bytes']):.1%}",
        percent(row["backward_share"]),
        "–" if none else number(row["versus_full"], ".2f"),
        *((format_bytes(int(float(row["peak_bytes"]))),) if row.get("peak_bytes") else ()),
    )


def greedy(folder: Path) -> str:
    found = tables("tinytrain_greedy_*.csv", folder)
    text = (
        "## Greedy beside the best\n\n"
        "TinyTrain takes layers by score. How much of what the integer programme's plan is worth, by the paper's own\n"
        "criterion and within the same ceilings, that gets: the mean over the tasks of all domains, and the least of\n"
        "any. *Gap* is what the programme leaves unproven. Nothing trains here, so this says nothing of accuracy.\n\n"
    )
    if not found:
        return text + absent("Greedy", "python benchmarks/tinytrain.py greedy --models mobilenet_v2,builtin") + "\n"
    key = lambda row: (row["model"], int(row["batch_size"]), row["memory"], row["compute"])  # noqa: E731
    for name, rows in found.items():
        columns = (
            "model", "batch", "memory", "compute", "tasks", "greedy's worth", "the least", "layers", "of the best",
            "ms", "of the best", "gap",
        )  # fmt: skip
        groups = [(k, list(cells)) for k, cells in groupby(sorted(rows, key=key), key=key)]
        text += markdown(columns, (_greedy_row(*k, cells) for k, cells in groups)) + "\n"  # type: ignore[misc]
        text += f"Tasks of {', '.join(dict.fromkeys(row['domain'] for row in rows))}.\n\n" + where(rows, name) + "\n"
    return text


def _greedy_row(model: str, batch: int, memory: str, compute: str, cells: Sequence[Row]) -> tuple[str, ...]:
    """Domains together, each by how many of its tasks the ceilings leave anything of."""
    solved = [row for row in cells if int(row["solved"])]
    about = (model, str(batch), memory or "–", compute or "–")
    if not solved:
        return *about, "nothing fits", *("–",) * 7
    tasks = sum(int(row["solved"]) for row in solved)

    def mean(column: str) -> float:
        return sum(float(row[column]) * int(row["solved"]) for row in solved) / tasks

    return (
        *about, str(tasks), f"{mean('worth'):.2%}", f"{min(float(row['worth_least']) for row in solved):.2%}",
        f"{mean('greedy_layers'):.1f}", f"{mean('best_layers'):.1f}",
        f"{1e3 * mean('greedy_s'):.0f}", f"{1e3 * mean('best_s'):.0f}",
        f"{max(float(row['gap']) for row in solved):.4%}",
    )  # fmt: skip


def memory(folder: Path) -> str:
    found = tables("tinytrain_memory_*.csv", folder)
    text = (
        "## What backward keeps\n\n"
        "Stated by the plan, and what a forward pass of a batch really saves for it. The last column divides full\n"
        "training's at batch 100 by it, as the paper does; most of what that says is the batch.\n\n"
    )
    if not found:
        return text + absent("Memory", "python benchmarks/tinytrain.py memory --models mobilenet_v2,builtin") + "\n"
    for name, rows in found.items():
        columns = ("model", "method", "batch", "backward", "of it saved", "really saved", "of full", "full at 100")
        text += markdown(columns, (
            (r["model"], r["method"], r["batch_size"], *(_bytes(r[k]) for k in ("backward_bytes", "saved_bytes")),
             _bytes(r["held_bytes"]), percent(r["versus_full"]), f"{float(r['times_less_than_full_100']):.0f}x less")
            for r in rows
        ))  # fmt: skip
        off = [_off(row) for row in rows if float(row["held_bytes"])]
        text += f"\nStated and held differ by {max(off):.2%} at the most.\n\n" + where(rows, name) + "\n"
    return text


def _bytes(text: str) -> str:
    return format_bytes(int(float(text)))


def _off(row: Row) -> float:
    return abs(float(row["saved_bytes"]) / float(row["held_bytes"]) - 1)


def layers(folder: Path) -> str:
    found = tables("tinytrain_layers_*.csv", folder)
    text = "## A quarter of a layer's channels\n\n"
    if not found:
        return text + absent("Layers", "python benchmarks/tinytrain.py layers --threads 1") + "\n"
    for name, rows in found.items():
        text += "Seconds of the weight gradient of a quarter of the channels, over the dense one's.\n\n"
        dense = [row for row in rows if int(row["groups"]) == 1]
        grouped = [row for row in rows if int(row["groups"]) > 1]
        kinds = (("dense", dense), ("depthwise or grouped", grouped))
        text += markdown(("layers", "how many", "together", "slower by themselves"), (
            (kind, str(len(made)), f"{_together(made):.2f}", str(sum(float(r["ratio"]) > 1 for r in made)))
            for kind, made in kinds if made
        ))  # fmt: skip
        text += "\n" + where(rows, name) + "\n"
    return text


def seconds(folder: Path) -> str:
    found = tables("tinytrain_seconds_*.csv", folder)
    text = (
        "## What a plan says that it takes\n\n"
        "Prices that were timed (`et.time_backward`) let a plan with channels state the seconds of a step; here\n"
        "beside what a step in a plain loop takes, both over a step of full training in plain PyTorch. *Slower in\n"
        "part* are layers whose weight gradient takes longer in a quarter of the channels than in all; what a plan\n"
        "takes of such a layer trains whole where the ceilings allow it. What is stated errs on the side of too long:\n"
        "the optimizer's part is taken as that of whole tensors, and every ReLU as one that keeps bits.\n\n"
    )
    if not found:
        return text + absent("Seconds", "python benchmarks/tinytrain.py seconds --threads 1") + "\n"
    for name, rows in found.items():
        columns = ("model", "batch", "memory", "compute", "layers", "in part", "stated", "measured", "stated, of full",
                   "measured, of full", "slower in part")  # fmt: skip
        text += markdown(columns, (
            (r["model"], r["batch_size"], r["memory"] or "–", r["compute"] or "–", r["layers"], r["in_part"],
             f"{1e3 * float(r['predicted_s']):.1f} ms", f"{1e3 * float(r['measured_s']):.1f} ms",
             number(r["predicted_ratio"], ".2f"), number(r["measured_ratio"], ".2f"),
             f"{r['slower_in_part']} of {r['of_layers']}")
            for r in rows
        ))  # fmt: skip
        text += "\n" + where(rows, name) + "\n"
    return text


def _together(rows: Sequence[Row]) -> float:
    return sum(float(r["rows_s"]) for r in rows) / sum(float(r["dense_s"]) for r in rows)
