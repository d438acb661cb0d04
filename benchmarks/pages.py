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
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from elastictrainer.budget import format_seconds
from elastictrainer.report.charts import Point, Reference, Series, chart

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS
from page_parts import Row, absent, markdown, number, percent, picture, tables, where
from paper_page import comparison
from run_page import whole_runs
from tiny_page import few_shot

PAGES = Path(__file__).parents[1] / "docs" / "results"
MADE = "<!-- Made by `make results` from benchmarks/results; edit benchmarks/pages.py. -->\n"


# -- the time model --------------------------------------------------------------------------------------------------


def time_model(folder: Path, pages: dict[str, str]) -> str:
    summaries = {n: r for n, r in tables("time_model_*.csv", folder).items() if "_plans_" not in n}
    text = (
        "# The time model, measured\n\n"
        "How far a predicted step is from a measured one, for random plans of every depth and density. *Ours* is\n"
        "[this time model](../method/time-model.md); *chain* is the published one, fed with the same measured parts:\n"
        "forward taken as a third of the step, branches flattened to a chain. The aim is a median of 3% and a 95th\n"
        "percentile of 8%.\n\n"
        "On a GPU steps are *replayed* (recorded once as a CUDA graph, as `et.fit` runs them) or *eager*. Eager steps\n"
        "at batch 4 wait for their host, whose speed varies from step to step, on a rented machine by more than\n"
        "the aim: there what a plan costs is known no better than it can be repeated.\n\n"
    )
    if not summaries:
        text += absent("The time model", "python benchmarks/time_model.py --device cpu --batch-size 4 --image-size 96")
    for name, rows in summaries.items():
        first = rows[0]
        text += f"## {lane_of(first, name)}\n\n"
        text += f"Images of {first['image']} pixels, texts of {first['tokens_of_text']} tokens, "
        text += f"{first['plans']} plans a model.\n\n"
        weighed = all(r.get("memory_p95") for r in rows)  # where there is an allocator to ask
        columns = ("model", "median error", "95%", "chain: median", "chain: 95%", "full step", "profile costs, steps")
        text += markdown((*columns, *(("memory: median", "memory: 95%") if weighed else ())), (
            (r["model"], percent(r["median"]), percent(r["p95"]), percent(r["chain_median"]), percent(r["chain_p95"]),
             format_seconds(float(r["full_step_s"])), number(r["profile_steps"], ".0f"),
             *((percent(r["memory_median"]), percent(r["memory_p95"])) if weighed else ()))
            for r in rows
        ))  # fmt: skip
        middle = [statistics.median(float(r[key]) for r in rows) for key in ("median", "chain_median")]
        within = sum(float(r["median"]) <= 0.03 and float(r["p95"]) <= 0.08 for r in rows)
        text += f"\n{within} of {len(rows)} models are within 3% and 8%. "
        text += f"The middle model's median error is {middle[0]:.1%}; the chain's is {middle[1]:.1%}.\n\n"
        plans = tables(name.replace("time_model_", "time_model_plans_"), folder)
        for source, measured in plans.items():
            name_of_picture = f"{Path(source).stem}.svg"
            pages[name_of_picture] = scatter(measured)
            text += f"![Predicted against measured step times]({name_of_picture})\n\n"
        text += where(rows, name) + "\n"
    return text


def lane_of(first: Row, name: str) -> str:
    """A table's heading: device, batch, precision, and how the steps were run."""
    threads = int(first["threads"])
    steps = "replayed" if "_captured" in name else "eager"
    on_cpu = f", {threads} thread{'s' * (threads > 1)}" if "_cpu_" in name else f", {steps} steps"
    layout = ", channels last" if "_channels_last" in name else ""
    precision = {"off": "float32"}.get(first["autocast"], f"{first['autocast']} autocast")
    return f"{first['device']}: batch {first['batch']}, {precision}{on_cpu}{layout}"


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


OVER = ("over budget", "over memory")


def most(found: Iterable[str | None]) -> str:
    """The largest of some shares, those that are not there left out."""
    shares = [float(share) for share in found if share]
    return f"{max(shares):.2%}" if shares else ""


def solver(folder: Path, pages: dict[str, str]) -> str:
    text = "# The solver, measured\n\nHow long choosing takes, and how far from the best it may be.\n\n"
    found = tables("solver.csv", folder)
    if not found:
        return text + absent("The solver", "make bench") + "\n" + resolution(folder, pages)
    rows = found["solver.csv"]
    text += (
        "*of best*: importance reached over the best that is possible (by the solver's own proven bound on chains, by\n"
        "an integer programme on real networks, or its bound where that stopped). *over budget*, *over memory*:\n"
        "by how much a solver overran at the most.\n\n"
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
        over = [most(r.get(key) for r in made) for key in (name.replace(" ", "_") for name in OVER)]
        time_limit, memory_limit = f"time {float(rho):g}x" if rho else "", f"memory {memory}" if memory else ""
        limits = " and ".join(filter(None, (time_limit, memory_limit)))
        lines.append(
            (instance, size, limits, name, number(str(statistics.median(ms))) if ms else "–",
             f"{statistics.median(of_best):.2%}" if of_best else "–", f"{min(of_best):.2%}" if of_best else "–",
             *over, str(len(made)))
        )  # fmt: skip
    columns = ("instance", "tensors", "within", "solver", "ms", "of best", "least", *OVER, "cases")
    return text + markdown(columns, lines) + "\n" + where(rows, "solver.csv") + "\n" + resolution(folder, pages)


def resolution(folder: Path, pages: dict[str, str]) -> str:
    """ElasticTrainer, Fig. 13b."""
    text = (
        "## Resolution\n\n"
        "What the knapsack's cells cost and give, on real profiles (ElasticTrainer, Fig. 13b). Tables are made only\n"
        "of what bounds leave open, so few cells may do; a gap that stays is searched otherwise, whatever they are.\n\n"
    )
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
        columns = (
            "model",
            "asked",
            "took",
            "points off",
            "steps",
            "plans",
            "profile",
            "probes",
            "choosing",
            "of the run",
        )
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
        text += f"Batch {rows[0]['batch']}, images of {rows[0]['image']} pixels.\n\n" if "image" in rows[0] else ""
        text += markdown(columns, (
            (r["model"], r["policy"], r["asked"], f"{float(r['peak_bytes']) / 2**20:.0f}",
             f"{float(r['predicted_bytes']) / 2**20:.0f}", percent(r["of_full"]) if r.get("of_full") else "–")
            for r in rows if r.get("peak_bytes")
        ))  # fmt: skip
        text += "\n" + where(rows, name) + "\n"
    return text


def elastic_accuracy(folder: Path) -> str:
    found = tables("elastic_accuracy_*.csv", folder)
    text = (
        "\n## Accuracy\n\n"
        "Each method at the best learning rate of one grid, chosen on validation; judged once on test.\n\n"
    )
    if not found:
        return text + absent("Accuracy", "python benchmarks/elastic.py accuracy --device cuda")
    for name, rows in found.items():
        finals = [row for row in rows if row["stage"] == "final" and not row["diverged"]]
        lines = []
        for method in dict.fromkeys(row["method"] for row in finals):
            here = [row for row in finals if row["method"] == method]
            right = [100 * float(row["test_accuracy"]) for row in here]
            spread = f" ± {statistics.stdev(right):.1f}" if len(right) > 1 else ""
            alone_s = statistics.mean(float(row["alone_s"]) for row in here)
            lines.append((
                here[0]["data"], here[0]["model"], method, f"{statistics.mean(right):.1f}{spread}", str(len(here)),
                format_seconds(alone_s), number(here[0]["lr"]),
            ))  # fmt: skip
        text += markdown(("data", "model", "method", "test accuracy", "seeds", "seconds of steps", "lr"), lines)
        text += "\n" + where(rows, name) + "\n"
    return text


def _kept(row: Row) -> tuple[str, ...]:
    if row.get("refused"):
        return row["model"], row["asked"], f"refused: the least is {number(row['least'])}x", *["–"] * 7
    choosing = sum(float(row[f"{part}_steps"]) for part in ("select", "apply", "forward"))
    return (
        row["model"], row["asked"], number(row["ratio"], ".3f"), number(row["off_points"], "+.1f"), row["steps"],
        row["plans"], number(row["profile_steps"], ".0f"), number(row["probe_steps"], ".1f"), f"{choosing:.1f}",
        percent(row["overhead"]) if row.get("overhead") else "–",
    )  # fmt: skip


# -- writing ---------------------------------------------------------------------------------------------------------


def build(folder: Path) -> dict[str, str]:
    """Every page and picture, by file name."""
    pages: dict[str, str] = {}
    pages["index.md"] = MADE + comparison(folder, pages)
    pages["time-model.md"] = MADE + time_model(folder, pages)
    pages["solver.md"] = MADE + solver(folder, pages)
    pages["budget.md"] = MADE + budgets(folder) + elastic_accuracy(folder)
    pages["runs.md"] = MADE + whole_runs(folder)
    pages["few-shot.md"] = MADE + few_shot(folder)
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
