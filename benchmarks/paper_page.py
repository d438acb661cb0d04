"""The result page of the paper's comparison: what the paper says beside what the kept tables say and lack."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from elastictrainer.budget import format_seconds
from elastictrainer.compare import Grid
from elastictrainer.report.charts import Point, Series, chart

sys.path.insert(0, str(Path(__file__).parent))
from page_parts import Row, absent, markdown, number, picture, tables, where
from paper import GRIDS

OVERHEADS = ("profile", "probe", "select", "apply", "forward", "features", "flops")  # as columns: profile_s and so on
Groups = Mapping[str, Sequence[Row]]

INTRODUCTION = """\
# Elastic training, compared

## What the paper compared with, and what this page adds

The paper (Huang, Yang, Gao, *ElasticTrainer*, MobiSys 2023) compares elastic training with full training, with the head
alone, with norms and biases, and with PruneTrain. It left out three controls that cost the same seconds and that decide
whether choosing tensors is worth anything: full training for **fewer epochs**, a **fixed suffix** and **random
importance**. They are rows below. More things make its figures and these differ:

- At the paper's learning rate the head alone is under-trained. Here every method has its best rate of one grid, chosen
  on validation images.
- The paper's MobileNetV2 was trained in full for twice the epochs of the others. Here all epochs are equal.
- The paper's seconds are of a Jetson TX2 and a Raspberry Pi 4B, with TensorFlow; shares of full training can be
  compared, seconds cannot.
- The paper's PruneTrain is a penalty alone. Here it is the published method: channels leave the network.

| in the paper | here |
| --- | --- |
| Table 1, overheads | the column *deciding*; in steps, [Budgets](budget.md) |
| Table 2, time to reach an accuracy | a table of each network and dataset |
| Fig. 7, similarity of importance | at the end of this page |
| Fig. 13b, the solver's resolution | [The solver](solver.md) |
| Fig. 17, time and operations by budget | the rows of elastic at 0.35x to 0.7x |
| Fig. 19, by network and dataset | a section each, and one for all of them |
| Fig. 20, by importance | the rows of elastic with magnitude and gradient |
| Fig. 21, what was trained | every run's own [report](../howto/report.md) |
| Figs. 22 and 23, memory and energy | columns; memory at batch 64 in [Budgets](budget.md) |
"""
PRICED = (
    "**Up to {} runs shared the machine.** Accuracies count; seconds are those of their steps by prices taken alone, "
    "without deciding and spread evenly over epochs, where there are such prices; energy and memory are left out.\n\n"
)
DISTURBED = (
    "train_s", "eval_s", "step_s", "full_step_s", "measured_ratio", "peak_bytes", "deciding_peak_bytes", "energy_j",
    "per_epoch_s", *(f"{part}_s" for part in OVERHEADS),
)  # fmt: skip
READING = (
    "*Of full's seconds* and *of full's operations* are of the whole run, deciding included in the seconds;"
    " *steps' ratio* is of the steps alone, against full steps as they were in that very run (ElasticTrainer, Fig. 17);"
    " *deciding* is the share of the run's seconds that went into choosing (Table 1); *peak* is the most that was held"
    " (Fig. 22).\n\n"
)
LEVELS = (0.9, 0.95, 0.98, 1.0)  # of the best validation accuracy of full training
NOTICEABLE = 0.01  # of accuracy: "no noticeable loss" is read as less than a point


def comparison(folder: Path, pages: dict[str, str]) -> str:
    text = INTRODUCTION + "\n"
    found = {n: made for grid in GRIDS for n, made in tables(f"paper_{grid}_*.csv", folder).items()}
    everything = [undisturbed(row) | {"source": name} for name, made in found.items() for row in made]
    # A method that several grids hold counts once for each seed.
    finals = [row for row in everything if row["stage"] == "final"]
    rows = list({(*workload(r), r["method"], r["seed"]): r for r in reversed(finals)}.values())[::-1]
    if not rows:
        text += absent("The comparison", "python benchmarks/paper.py --device cuda --weights ../shared/weights")
        return text + "\n" + similarity(folder)
    rows.sort(key=workload)
    for place, (key, cells) in enumerate(groupby(rows, key=workload)):
        here = list(cells)
        groups: dict[str, list[Row]] = {}
        for row in here:
            groups.setdefault(row["method"], []).append(row)
        tried = {float(row["lr"]) for row in everything if workload(row) == key}
        text += f"\n## {key[0].rpartition('/')[2]} on {Path(key[1]).name}\n\n"
        text += missing(groups) + disturbed(here) + outcome(groups, tried) + READING + claims(groups) + verdict(groups)
        if any(figures(made, "accuracy") and figures(made, "train_s") for made in groups.values()):
            name = f"frontier-{place + 1}.svg"
            pages[name] = frontier(groups)
            text += f"![Accuracy against seconds of training]({name})\n\n"
        text += time_to_accuracy(groups)
        text += where(here, ", ".join(dict.fromkeys(r["source"] for r in here)))
    return text + across(rows) + "\n" + similarity(folder)


def across(rows: Sequence[Row]) -> str:
    """ElasticTrainer, Fig. 19: each method on each network and dataset, and how far it is from full training there."""
    keys = list(dict.fromkeys(map(workload, rows)))
    if len(keys) < 2:
        return ""
    methods = list(dict.fromkeys(row["method"] for row in rows))

    def reached(method: str, key: tuple[str, str, str]) -> float | None:
        return mean([row for row in rows if workload(row) == key and row["method"] == method], "accuracy")

    def shown(method: str, key: tuple[str, str, str]) -> str:
        own, whole = reached(method, key), reached("full", key)
        if own is None:
            return "–"
        return f"{100 * own:.1f}" + (f" ({100 * (own - whole):+.1f})" if whole is not None and method != "full" else "")

    names = [f"{model.rpartition('/')[2]}, {Path(data).name}" for model, data, _ in keys]
    return (
        "\n## By network and dataset\n\nTest accuracy, and points from full training (ElasticTrainer, Fig. 19).\n\n"
        + markdown(("method", *names), [(method, *(shown(method, key) for key in keys)) for method in methods])
    )


def workload(row: Row) -> tuple[str, str, str]:
    return row["model"], row["data"], row["device"]


# -- what is not there -----------------------------------------------------------------------------------------------


def expected() -> dict[str, int]:
    """Every method that the suites run, with its seeds."""
    wanted: dict[str, int] = {}
    for suite, names in GRIDS.items():
        grid = Grid.of(models=["builtin"], data=["builtin"], **names, rates=[1.0], epochs=12)
        for method in grid.methods:
            wanted[method.name] = max(wanted.get(method.name, 0), 1 if suite == "rest" else 3)
    return wanted


def missing(groups: Groups) -> str:
    """A partial table says that it is one."""
    wanted = expected()
    none = [method for method in wanted if method not in groups]
    few = [f"{m} ({len(groups[m])} of {n})" for m, n in wanted.items() if m in groups and len(groups[m]) < n]
    said = [f"Not in the tables, not run yet or failed: {', '.join(none)}."] if none else []
    said += [f"Fewer seeds than asked: {', '.join(few)}."] if few else []
    return f"*{' '.join(said)}*\n\n" if said else ""


def disturbed(rows: Sequence[Row]) -> str:
    jobs = max(int(row.get("jobs") or 1) for row in rows)
    return PRICED.format(jobs) if jobs > 1 else ""


def undisturbed(row: Row) -> dict[str, str]:
    """Of a run beside others, what the others did not change: its seconds are then those that its prices say."""
    if int(row.get("jobs") or 1) == 1:
        return dict(row)
    kept = {**row, **dict.fromkeys(DISTURBED, ""), "train_s": row.get("alone_s") or ""}
    if kept["train_s"]:
        epochs = len((row.get("per_epoch_s") or "").split())
        kept["per_epoch_s"] = " ".join(str(float(kept["train_s"]) * (n + 1) / epochs) for n in range(epochs))
    return kept


# -- what is there ---------------------------------------------------------------------------------------------------


def figures(made: Sequence[Row], key: str) -> list[float]:
    return [float(row[key]) for row in made if row.get(key)]


def mean(made: Sequence[Row] | None, key: str) -> float | None:
    found = figures(made or [], key)
    return statistics.mean(found) if found else None


def outcome(groups: Groups, tried: set[float]) -> str:
    columns = (
        "method", "test accuracy", "seeds", "of full's seconds", "steps' ratio", "deciding", "of full's operations",
        "of full's energy", "peak MiB", "lr",
    )  # fmt: skip
    order = sorted(groups, key=lambda method: mean(groups[method], "accuracy") or 0.0, reverse=True)
    return markdown(columns, [table_row(method, groups, tried) for method in order]) + "\n"


def table_row(method: str, groups: Groups, tried: set[float]) -> tuple[str, ...]:
    made = groups[method]
    scores = figures(made, "accuracy")
    spread = f" ± {100 * statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    deciding = [
        sum(figures([r], f"{part}_s")[0] for part in OVERHEADS if r.get(f"{part}_s")) / float(r["train_s"])
        for r in made
        if r.get("train_s") and any(r.get(f"{part}_s") for part in OVERHEADS)
    ]
    ratio, peak = mean(made, "measured_ratio"), mean(made, "peak_bytes")
    return (
        method,
        f"{100 * statistics.mean(scores):.1f}{spread}" if scores else "–",
        str(len(made)),
        share(made, groups, "train_s"),
        "–" if ratio is None else f"{ratio:.3f}",
        f"{statistics.mean(deciding):.1%}" if deciding else "–",
        share(made, groups, "flops"),
        share(made, groups, "energy_j"),
        "–" if peak is None else f"{peak / 2**20:.0f}",
        ", ".join(dict.fromkeys(rate(float(r["lr"]), tried) for r in made)),
    )


def share(made: Sequence[Row], groups: Groups, key: str) -> str:
    own, whole = mean(made, key), mean(groups.get("full"), key)
    return f"{own / whole:.2f}" if own is not None and whole else "–"


def rate(lr: float, tried: set[float]) -> str:
    """A best rate at the grid's end might not be the best."""
    ends = {min(tried): "smallest", max(tried): "largest"} if len(tried) > 1 else {}
    return f"{lr:g}" + (f" ({ends[lr]} tried)" if lr in ends else "")


def claims(groups: Groups) -> str:
    """The three claims of the paper's abstract, each beside the rows that it is about."""
    elastic = {
        method: made for method, made in groups.items() if method.startswith("elastic ") and method.count(" ") == 1
    }
    if "full" not in groups or not elastic:
        return ""
    lines = []
    priced = any(int(row.get("jobs") or 1) > 1 for made in groups.values() for row in made)
    whole, half = mean(groups["full"], "accuracy"), mean(elastic.get("elastic 0.5x"), "accuracy")
    if whole is not None and half is not None:
        said = f"at 0.5x {100 * half:.1f}% against {100 * whole:.1f}%, {difference(half, whole)} full training"
        lines.append(("accuracy is not noticeably lower", said, "yes" if whole - half < NOTICEABLE else "no"))
    for key, claim, limit, words in (
        ("train_s", "training is up to 3.5 times as fast as with other methods", 3.5, "times as fast as full training"),
        ("energy_j", "it takes a half to a third of their energy", 2.0, "times less than full training"),
    ):
        full, own = mean(groups["full"], key), {m: v for m, made in elastic.items() if (v := mean(made, key))}
        if full is None or not own:
            lines.append((claim, "runs shared the machine" if priced else "no meter was there", "not measured"))
            continue
        least = min(own, key=lambda method: own[method])
        factor = full / own[least]
        said = f"{least}: {factor:.2f} {words}{'' if priced else ', deciding included'}"
        lines.append((claim, said, "yes" if factor >= limit else "no"))
    return markdown(("the paper's abstract says", "here", "agrees"), lines) + "\n"


def difference(value: float, other: float) -> str:
    points = 100 * (value - other)
    return "level with" if abs(points) < 0.05 else f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"


def verdict(groups: Groups) -> str:
    """In words, from the rows alone: does choosing tensors beat the controls, and at whose seconds?"""
    elastic = mean(groups.get("elastic 0.5x"), "accuracy")
    controls = {
        m: value
        for m in ("full shorter 0.5x", "suffix 0.5x", "random 0.5x")
        if (value := mean(groups.get(m), "accuracy")) is not None
    }
    if elastic is None or not controls:
        return ""

    def cost(method: str) -> str:
        found = share(groups[method], groups, "train_s")
        return "" if found == "–" else f" in {found} of full's seconds"

    said = [f"{difference(elastic, value)} {m} ({100 * value:.1f}%{cost(m)})" for m, value in controls.items()]
    seeds = min(len(groups[m]) for m in ("elastic 0.5x", *controls))
    caution = "" if seeds > 2 else f" With {seeds} seed{'s' if seeds > 1 else ''} that may be chance."
    own = figures(groups["elastic 0.5x"], "accuracy")
    close = [
        m for m, value in controls.items()
        if len(other := figures(groups[m], "accuracy")) > 1 and len(own) > 1
        and abs(elastic - value) <= max(statistics.stdev(own), statistics.stdev(other))
    ]  # fmt: skip
    if close:
        caution += f" No more apart than one method's seeds are: {', '.join(close)}."
    what = f"Elastic training at 0.5x reached {100 * elastic:.1f}%{cost('elastic 0.5x')}"
    return f"{what}: {', '.join(said)}.{caution}\n\n"


def frontier(groups: Groups) -> str:
    families: dict[str, list[Point]] = {}
    for method, made in groups.items():
        if (scores := figures(made, "accuracy")) and figures(made, "train_s"):
            family = " ".join(word for word in method.split() if not word.endswith("x") or not word[0].isdigit())
            family = "full" if family == "full shorter" else family
            seconds = statistics.mean(figures(made, "train_s"))
            families.setdefault(family, []).append(
                Point(seconds, statistics.mean(scores), method, marked=True, low=min(scores), high=max(scores))
            )
    series = [
        Series(family, tuple(sorted(points, key=lambda p: p.x)), colour)
        for colour, (family, points) in enumerate(families.items())
    ]
    return picture(
        "Test accuracy against seconds of training",
        lambda width: chart(
            series, width=width, height=360, label="Accuracy against seconds", x_title="seconds of training",
            y_title="test accuracy", x_format=lambda v: f"{v:g}", y_format=lambda v: f"{100 * v:.0f}%", least_span=0.04,
        ),
        series,
    )  # fmt: skip


def time_to_accuracy(groups: Groups) -> str:
    """ElasticTrainer, Table 2."""
    curves = {method: [curve for row in made if (curve := _curve(row))] for method, made in groups.items()}
    if not curves.get("full"):
        return ""
    best = statistics.mean(max(value for _, value in curve) for curve in curves["full"])
    lines = []
    for method, each in curves.items():
        cells = [method]
        for level in LEVELS:
            reached = [next((at for at, value in curve if value >= level * best - 1e-9), None) for curve in each]
            found = [at for at in reached if at is not None]
            partly = f" ({len(found)} of {len(each)} seeds)" if 0 < len(found) < len(each) else ""
            cells.append(format_seconds(statistics.mean(found)) + partly if found else "not reached")
        lines.append(tuple(cells))
    text = "Seconds of training until validation accuracy was a share of the best of full training (Table 2):\n\n"
    return text + markdown(("method", *(f"{level:.0%}: {level * best:.1%}" for level in LEVELS)), lines) + "\n"


def _curve(row: Row) -> list[tuple[float, float]]:
    """(seconds of training so far, validation accuracy) after each epoch that was evaluated."""
    seconds, values = (row.get("per_epoch_s") or "").split(), (row.get("per_epoch_val_accuracy") or "").split()
    return [(float(at), float(value)) for at, value in zip(seconds, values) if value != "-"]


def similarity(folder: Path) -> str:
    """ElasticTrainer, Fig. 7."""
    text = (
        "## How long importance lasts, and how many batches it takes\n\nCosine similarity of the scores of all tensors:"
        " between plans that lie some epochs apart, and of a\nprobe on few batches to one on many others"
        " (ElasticTrainer, Fig. 7).\n\n"
    )
    found = tables("paper_similarity_*.csv", folder)
    if not found:
        return text + absent("Similarity", "python benchmarks/paper.py --suites similarity --device cuda")
    for name, rows in found.items():
        columns = ("model", "data", "what", "count", "cosine, mean", "least", "pairs")
        text += markdown(
            columns,
            ((*(r[key] for key in columns[:4]), number(r["cosine"]), number(r["least"]), r["pairs"]) for r in rows),
        )
        text += "\n" + where(rows, name) + "\n"
    return text
