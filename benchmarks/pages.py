"""docs/results from the kept tables: `make results`, or python benchmarks/pages.py.

Every number on those pages comes from a CSV in benchmarks/results, every picture is drawn from one, and a table that is
not there yet is named with the command that makes it. Nothing is measured here.

A profile kept there as profile_*.json is drawn, too: what training costs along the network. `--check` writes nothing
and fails where a page is not what the tables say.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from elastictrainer.budget import format_seconds
from elastictrainer.report.charts import Point, Reference, Series, chart
from elastictrainer.report.markup import Markup
from elastictrainer.report.page import legend
from elastictrainer.report.plots import standalone_svg

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, read_csv

PAGES = Path(__file__).parents[1] / "docs" / "results"
MADE = "<!-- Made by `make results` from benchmarks/results; edit benchmarks/pages.py. -->\n"
Row = Mapping[str, str]


# -- tables ----------------------------------------------------------------------------------------------------------


def tables(pattern: str, folder: Path) -> dict[str, list[dict[str, str]]]:
    """The kept tables of a suite, by name."""
    return {path.name: rows for path in sorted(folder.glob(pattern)) if (rows := read_csv(path))}


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    right = ["---"] + ["---:"] * (len(columns) - 1)
    lines = [columns, right, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def where(rows: Sequence[Row], source: str) -> str:
    """What the figures depend on, below a table."""

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(row[key] for row in rows if row.get(key))) or "unknown"

    said = f"Device: {all_of('device')}; threads: {all_of('threads')}; torch {all_of('torch')}; "
    return f"{said}seed {all_of('seed')}; commit {all_of('commit')}. Table: `benchmarks/results/{source}`.\n"


def absent(what: str, command: str) -> str:
    return f"*{what} has not been measured yet. This measures it:*\n\n```\n{command}\n```\n"


def percent(text: str | None, digits: int = 1) -> str:
    return f"{100 * float(text):.{digits}f}%" if text else "–"


def number(text: str | None, form: str = ".3g") -> str:
    return f"{float(text):{form}}" if text else "–"


# -- the time model --------------------------------------------------------------------------------------------------


def time_model(folder: Path, pages: dict[str, str]) -> str:
    summaries = {n: r for n, r in tables("time_model_*.csv", folder).items() if "_plans_" not in n}
    text = (
        "# The time model, measured\n\n"
        "How far a predicted step is from a measured one, for random plans of every depth and density. *Ours* is\n"
        "[this time model](../method/time-model.md); *chain* is the published one, fed with the same measured parts:\n"
        "forward taken as a third of the step, branches flattened to a chain.\n\n"
    )
    if not summaries:
        text += absent("The time model", "python benchmarks/time_model.py --device cpu --batch-size 4 --image-size 96")
    for name, rows in summaries.items():
        first = rows[0]
        text += f"## {name.removeprefix('time_model_').removesuffix('.csv')}\n\n"
        text += f"Batch {first['batch']}, images of {first['image']} pixels, {first['plans']} plans a model.\n\n"
        columns = ("model", "median error", "95%", "chain: median", "chain: 95%", "full step", "profile costs, steps")
        text += markdown(columns, (
            (r["model"], percent(r["median"]), percent(r["p95"]), percent(r["chain_median"]), percent(r["chain_p95"]),
             format_seconds(float(r["full_step_s"])), number(r["profile_steps"], ".0f"))
            for r in rows
        ))  # fmt: skip
        middle = [statistics.median(float(r[key]) for r in rows) for key in ("median", "chain_median")]
        text += f"\nThe middle model's median error is {middle[0]:.1%}; the chain's is {middle[1]:.1%}.\n\n"
        plans = tables(name.replace("time_model_", "time_model_plans_"), folder)
        for source, measured in plans.items():
            name_of_picture = f"{Path(source).stem}.svg"
            pages[name_of_picture] = scatter(measured)
            text += f"![Predicted against measured step times]({name_of_picture})\n\n"
        text += where(rows, name) + "\n"
    return text


def scatter(rows: Sequence[Row]) -> str:
    """Predicted against measured, both as shares of a full step; a colour a model."""
    by_model = {m: list(found) for m, found in groupby(rows, key=lambda r: r["model"])}
    series = [
        Series(
            model,
            tuple(Point(float(r["measured_ratio"]), float(r["predicted_ratio"]), "") for r in found),
            colour, line=False,
        )
        for colour, (model, found) in enumerate(by_model.items())
    ]  # fmt: skip
    return picture(
        "Predicted against measured step time",
        lambda width: chart(
            series, width=width, height=460, label="Predicted against measured",
            x_title="measured, share of a full step", y_title="predicted, share of a full step",
            x_format=lambda v: f"{v:g}", y_format=lambda v: f"{v:g}", y_zero=True,
            references=(Reference("", slope=1.0),),
        ),
        series,
    )  # fmt: skip


def picture(title: str, draw: Callable[[float], Markup], series: Sequence[Series] = ()) -> str:
    return standalone_svg(title, draw(760.0), legend(series) if len(series) > 1 else "")


def costs(profile_file: Path) -> str:
    """What training costs along the network: reaching a tensor, and the tensor itself, output side first."""
    import elastictrainer as et

    profile = et.Profile.load(profile_file)
    deep, own = [], []
    for place, name in enumerate(profile.names):
        deep.append(Point(float(place), 1e3 * profile.step_s([name]), name))
        own.append(Point(float(place), 1e3 * profile.step_s(profile.names[: place + 1]), name))
    series = [
        Series("this tensor alone", tuple(deep)),
        Series("this tensor and all nearer the output", tuple(own), 1),
    ]
    return picture(
        "What a step costs that trains down to a tensor",
        lambda width: chart(
            series, width=width, height=320, label="Cost along the network", y_title="ms a step, forward pass included",
            x_title="tensors, from the output", x_format=lambda v: f"{v:g}", y_format=lambda v: f"{v:g}", y_zero=True,
        ),
        series,
    )  # fmt: skip


# -- the solver ------------------------------------------------------------------------------------------------------


def solver(folder: Path, pages: dict[str, str]) -> str:
    text = "# The solver, measured\n\nHow long choosing takes, and how far from the best it may be.\n\n"
    found = tables("solver.csv", folder)
    if not found:
        return text + absent("The solver", "make bench") + "\n" + resolution(folder, pages)
    rows = found["solver.csv"]
    text += (
        "*of best*: importance reached over the best that is possible (by the solver's own proven bound on chains, by\n"
        "an integer programme on real networks). *over budget*: by how much a solver overran, where it did.\n\n"
    )
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        key = (row["instance"], row["tensors"], row["rho"], row.get("memory", ""), row["solver"])
        groups.setdefault(key, []).append(row)
    lines = []
    for (instance, size, rho, memory, name), made in groups.items():
        if name.startswith("refused"):
            continue
        ms = [float(r["ms"]) for r in made if r.get("ms")]
        of_best = [float(r["score_of_best"]) for r in made if r.get("score_of_best")]
        over = [float(r["over_budget"]) for r in made if r.get("over_budget")]
        time_limit, memory_limit = f"time {float(rho):g}x" if rho else "", f"memory {memory}" if memory else ""
        limits = " and ".join(filter(None, (time_limit, memory_limit)))
        lines.append(
            (instance, size, limits, name, number(str(statistics.median(ms))) if ms else "–",
             f"{statistics.median(of_best):.2%}" if of_best else "–", f"{min(of_best):.2%}" if of_best else "–",
             f"{max(over):.2%}" if over else "", str(len(made)))
        )  # fmt: skip
    columns = ("instance", "tensors", "within", "solver", "ms", "of best", "least", "over budget", "cases")
    return text + markdown(columns, lines) + "\n" + where(rows, "solver.csv") + "\n" + resolution(folder, pages)


def resolution(folder: Path, pages: dict[str, str]) -> str:
    """ElasticTrainer, Fig. 13b."""
    text = "## Resolution\n\nWhat the knapsack's cells cost and give, on real profiles (ElasticTrainer, Fig. 13b).\n\n"
    found = tables("paper_resolution_*.csv", folder)
    if not found:
        return text + absent("Resolution", "python benchmarks/paper.py --suites resolution --device cuda")
    for name, rows in found.items():
        text += markdown(
            ("model", "budget", "cells", "of the finest", "ms"),
            ((r["model"], r["budget"], r["cells"], percent(r["of_best"], 2), number(r["ms"])) for r in rows),
        )
        text += "\n" + where(rows, name) + "\n"
    return text


# -- the comparison --------------------------------------------------------------------------------------------------

CLAIMS = """
## What the paper compared with, and what this page adds

The paper (Huang, Yang, Gao, *ElasticTrainer*, MobiSys 2023) compares elastic training with full training, with the head
alone, with norms and biases, and with PruneTrain. It left out three controls that cost the same seconds and that decide
whether choosing tensors is worth anything: full training for **fewer epochs**, a **fixed suffix** and **random
importance**. They are rows below. Two more things make its figures and these differ:

- At the paper's learning rate the head alone is under-trained. Here every method has its best rate of one grid, chosen
  on validation images.
- The paper's MobileNetV2 was trained in full for twice the epochs of the others. Here all epochs are equal.
"""


def comparison(folder: Path, pages: dict[str, str]) -> str:
    text = "# Elastic training, compared\n" + CLAIMS + "\n"
    found = {n: made for grid in ("half", "rest", "run") for n, made in tables(f"paper_{grid}_*.csv", folder).items()}
    finals = [row | {"source": name} for name, made in found.items() for row in made if row["stage"] == "final"]
    # A method that several grids hold counts once for each seed.
    rows = list({(*workload(r), r["method"], r["seed"]): r for r in reversed(finals)}.values())[::-1]
    if not rows:
        text += absent("The comparison", "python benchmarks/paper.py --device cuda --weights ../shared/weights")
        return text + "\n" + similarity(folder)
    rows.sort(key=workload)
    for place, ((model, data, device), cells) in enumerate(groupby(rows, key=workload)):
        here = list(cells)
        text += f"\n## {model.rpartition('/')[2]} on {Path(data).name}\n\n"
        groups: dict[str, list[dict[str, str]]] = {}
        for row in here:
            groups.setdefault(row["method"], []).append(row)
        whole = statistics.mean(float(r["train_s"]) for r in groups["full"]) if "full" in groups else None
        lines = sorted(
            (table_row(method, made, whole) for method, made in groups.items()), key=lambda line: line[0], reverse=True
        )
        columns = (
            "method",
            "test accuracy",
            "seeds",
            "of full's seconds",
            "steps' ratio",
            "deciding",
            "peak MiB",
            "lr",
        )
        text += markdown(columns, (line for _, line in lines)) + "\n"
        text += verdict(groups, whole)
        name = f"frontier-{place + 1}.svg"
        pages[name] = frontier(groups)
        text += f"![Accuracy against seconds of training]({name})\n\n"
        text += where(here, ", ".join(dict.fromkeys(r["source"] for r in here))) + f"\nMeasured on {device}.\n"
    return text + "\n" + similarity(folder)


def workload(row: Row) -> tuple[str, str, str]:
    return row["model"], row["data"], row["device"]


def table_row(method: str, made: Sequence[Row], whole: float | None) -> tuple[float, tuple[str, ...]]:
    scores = [float(r["accuracy"]) for r in made if r["accuracy"]]
    seconds = statistics.mean(float(r["train_s"]) for r in made)
    spread = f" ± {100 * statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    parts = [f"{part}_s" for part in ("profile", "probe", "select", "apply", "forward")]
    deciding = statistics.mean(sum(float(r[part] or 0) for part in parts) / float(r["train_s"]) for r in made)
    ratios = [float(r["measured_ratio"]) for r in made if r["measured_ratio"]]
    peaks = [float(r["peak_bytes"]) for r in made if r["peak_bytes"]]
    mean = statistics.mean(scores) if scores else 0.0
    return mean, (
        method,
        f"{100 * mean:.1f}{spread}" if scores else "–",
        str(len(made)),
        f"{seconds / whole:.2f}" if whole else "–",
        f"{statistics.mean(ratios):.3f}" if ratios else "–",
        f"{deciding:.1%}",
        f"{statistics.mean(peaks) / 2**20:.0f}" if peaks else "–",
        ", ".join(dict.fromkeys(f"{float(r['lr']):g}" for r in made)),
    )


def verdict(groups: Mapping[str, Sequence[Row]], whole: float | None) -> str:
    """In words, from the rows alone: does choosing tensors beat the controls at half the time?"""
    mean = {m: statistics.mean(float(r["accuracy"]) for r in made) for m, made in groups.items() if made[0]["accuracy"]}
    elastic = mean.get("elastic 0.5x")
    controls = {m: mean[m] for m in ("full shorter 0.5x", "suffix 0.5x", "random 0.5x") if m in mean}
    if elastic is None or not controls:
        return ""
    said = [
        f"{100 * abs(elastic - value):.1f} points {'above' if elastic >= value else 'below'} {m} ({100 * value:.1f}%)"
        for m, value in controls.items()
    ]
    seeds = min(len(groups[m]) for m in ("elastic 0.5x", *controls))
    caution = "" if seeds > 2 else f" With {seeds} seed{'s' if seeds > 1 else ''} that may be chance."
    return f"Elastic training at 0.5x reached {100 * elastic:.1f}%: {', '.join(said)}.{caution}\n\n"


def frontier(groups: Mapping[str, Sequence[Row]]) -> str:
    families: dict[str, list[Point]] = {}
    for method, made in groups.items():
        scores = [float(r["accuracy"]) for r in made if r["accuracy"]]
        if scores:
            family = " ".join(word for word in method.split() if not word.endswith("x") or not word[0].isdigit())
            family = "full" if family == "full shorter" else family
            seconds = statistics.mean(float(r["train_s"]) for r in made)
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


# -- the budget of a run ---------------------------------------------------------------------------------------------


def budgets(folder: Path) -> str:
    text = (
        "# Budgets, kept or not\n\n"
        "A run under `et.Elastic` is asked for a share of full training; what it took is measured against full steps\n"
        "of a twin network, taken in turns with its own, so that a busy machine weighs on both. Deciding is counted\n"
        "in full steps of that network: 12 epochs at the paper's scale are about 18,000 (CUB-200, batch 4).\n\n"
    )
    found = tables("elastic_budget_*.csv", folder)
    if not found:
        text += absent("The budget", "python benchmarks/elastic.py budget --image-size 96") + "\n"
    for name, rows in found.items():
        text += f"## {name.removeprefix('elastic_budget_').removesuffix('.csv')}\n\n"
        text += f"Batch {rows[0]['batch']}, images of {rows[0]['image']} pixels.\n\n"
        columns = ("model", "asked", "took", "points off", "steps", "plans", "profile", "probes", "choosing")
        text += markdown(columns, (_kept(row) for row in rows))
        off = [float(row["off_points"]) for row in rows if row["off_points"]]
        if off:
            near = sum(abs(points) <= 2 for points in off)
            text += (
                f"\n{near} of {len(off)} runs are within 2 points of what was asked; the most over: {max(off):+.1f}.\n"
            )
        text += "\n" + where(rows, name) + "\n"
    text += "## Memory\n\n"
    found = tables("elastic_memory_*.csv", folder)
    if not found:
        text += absent("Memory", "python benchmarks/elastic.py memory --device cuda --batch-size 64")
    for name, rows in found.items():
        columns = ("model", "policy", "asked", "peak MiB", "predicted MiB", "of full training")
        text += markdown(columns, (
            (r["model"], r["policy"], r["asked"], f"{float(r['peak_bytes']) / 2**20:.0f}",
             f"{float(r['predicted_bytes']) / 2**20:.0f}", percent(r["of_full"]))
            for r in rows
        ))  # fmt: skip
        text += "\n" + where(rows, name) + "\n"
    return text


def _kept(row: Row) -> tuple[str, ...]:
    if row.get("refused"):
        return row["model"], row["asked"], f"refused: the least is {number(row['least'])}x", *["–"] * 6
    choosing = sum(float(row[f"{part}_steps"]) for part in ("select", "apply", "forward"))
    return (
        row["model"], row["asked"], number(row["ratio"], ".3f"), number(row["off_points"], "+.1f"), row["steps"],
        row["plans"], number(row["profile_steps"], ".0f"), number(row["probe_steps"], ".1f"), f"{choosing:.1f}",
    )  # fmt: skip


# -- writing ---------------------------------------------------------------------------------------------------------


def build(folder: Path) -> dict[str, str]:
    """Every page and picture, by file name."""
    pages: dict[str, str] = {}
    pages["index.md"] = MADE + comparison(folder, pages)
    pages["time-model.md"] = MADE + time_model(folder, pages)
    pages["solver.md"] = MADE + solver(folder, pages)
    pages["budget.md"] = MADE + budgets(folder)
    for profile in sorted(folder.glob("profile_*.json")):
        name = f"{profile.stem}.svg"
        pages[name] = costs(profile)
        pages["time-model.md"] += f"## Along a network\n\nFrom `{profile.name}`.\n\n![Cost along the network]({name})\n"
    return {name: text.rstrip("\n") + "\n" for name, text in pages.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PAGES)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is out of date")
    args = parser.parse_args()
    pages = build(args.results)
    stale = [name for name, text in pages.items() if not _is(args.out / name, text)]
    if args.check:
        sys.exit(f"pages: {', '.join(stale)} out of date; run `make results`" if stale else 0)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (args.out / name).write_text(pages[name], encoding="utf-8")
    print(f"{len(stale)} of {len(pages)} files in {args.out} were out of date and are written")


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
