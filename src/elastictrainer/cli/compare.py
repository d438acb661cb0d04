"""`elastictrainer compare`: models x data x policies x importances x budgets x seeds, on equal terms."""

from __future__ import annotations

import statistics
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastictrainer.cli import options
from elastictrainer.cli import train as training
from elastictrainer.cli.app import app
from elastictrainer.cli.output import Output

if TYPE_CHECKING:
    from elastictrainer.compare import Outcome

__all__ = ["compare"]

_GRID = "What is compared"
_MANY = "; may be given again"


def _several(option: str, help: str) -> Any:
    return typer.Option(option, help=help, rich_help_panel=_GRID)


@app.command()
def compare(
    model: Annotated[list[str], _several("--model", f"A network, as for `train`{_MANY}.")] = ["builtin"],  # noqa: B006
    weights: Annotated[
        list[str] | None, _several("--weights", "Its weights, as for `train`: once for all models, or once for each.")
    ] = None,
    data: Annotated[list[str], _several("--data", f"Images, as for `train`{_MANY}.")] = ["builtin"],  # noqa: B006
    policy: Annotated[
        list[str],
        _several("--policy", "Policies with commas between; 'shorter' is full training for as many epochs as fit."),
    ] = ["full,shorter,suffix,random,elastic,adaptive"],  # noqa: B006
    importance: Annotated[
        list[str], _several("--importance", "Importances with commas between, for the policies that measure it.")
    ] = ["elastic"],  # noqa: B006
    budget: Annotated[
        list[str], _several("--budget", "Budgets with commas between, for the policies that keep one.")
    ] = ["0.5x"],  # noqa: B006
    seed: Annotated[list[str], _several("--seed", "Seeds with commas between.")] = ["0"],  # noqa: B006
    lr: Annotated[
        list[str], _several("--lr", "Learning rates with commas between; each method takes its best on validation.")
    ] = ["0.003"],  # noqa: B006
    epochs: options.Epochs = 12,
    tune_epochs: Annotated[
        int | None,
        typer.Option(
            "--tune-epochs",
            min=1,
            help="Epochs of a learning rate's trial; a third of --epochs if absent.",
            rich_help_panel=_GRID,
        ),
    ] = None,
    model_options: options.ModelOptions = None,
    normalize: options.Normalize = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 16,
    optimizer: options.Optimizer = "sgd",
    weight_decay: training.WeightDecay = 0.0,
    schedule: training.Schedule = "cosine",
    accumulate: training.Accumulate = 1,
    clip: training.Clip = None,
    autocast: options.Autocast = None,
    graphs: options.Graphs = True,
    interval: options.Interval = "3",
    memory: options.Memory = None,
    pin: options.Pin = None,
    probe_batches: training.ProbeBatches = 6,
    bn: options.Norms = None,
    resting_state: training.RestingState = "keep",
    feedback: training.Feedback = True,
    deterministic: options.Deterministic = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            min=1,
            help="Cells at a time; above 1 their seconds and memory mean nothing.",
            rich_help_panel="Machine",
        ),
    ] = 1,
    keep_weights: Annotated[
        bool,
        typer.Option(
            "--keep-weights/--no-keep-weights",
            help="Keep the weights of finished cells; those of trials never are.",
            rich_help_panel="Output",
        ),
    ] = True,
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Compare ways to train, on equal terms.

    Epochs, batches, order and views of the images are the same for each. Every method gets its learning rate from the
    same grid (--lr), tried for a third of the epochs and chosen on validation images, never on test; then it is trained
    for every seed. Every cell is a run folder, made by `train` in a process of its own. Killed at any moment, the
    comparison goes on with --resume: finished cells are not run again, half a cell goes on from its checkpoint. With
    --resume it can also grow: more policies, budgets, seeds.

    Leaves results.csv and report.html in --out. Exits with 1 if a cell failed; all others are run nevertheless.

    \b
    elastictrainer compare --out runs/first
    elastictrainer compare --model resnet50 --weights default --data birds/ --data pets/ \\
        --policy full,shorter,head,elastic --budget 0.5x,0.7x --seed 0,1,2 --lr 0.001,0.003,0.01 --out runs/birds
    elastictrainer compare --config birds.yaml --out runs/birds --resume
    """  # fmt: skip
    from elastictrainer.compare import Comparison, Grid
    from elastictrainer.compare.board import make_board
    from elastictrainer.errors import ConfigError

    asked = {
        "model": model, "weights": weights or [], "data": data, "policy": _split(policy),
        "importance": _split(importance), "budget": _split(budget), "lr": _split(lr), "seed": _split(seed),
    }  # fmt: skip
    shared = {
        "model-options": model_options, "normalize": normalize, "image-size": image_size, "batch-size": batch_size,
        "optimizer": optimizer, "weight-decay": weight_decay, "schedule": schedule, "accumulate": accumulate,
        "clip": clip, "autocast": autocast,
        "graphs": None if graphs else False, "interval": interval, "memory": memory, "pin": pin,
        "probe-batches": probe_batches, "bn": bn, "resting-state": resting_state, "feedback": feedback,
        "deterministic": deterministic, "device": device, "threads": threads,
    }  # fmt: skip
    shared = {key: value for key, value in shared.items() if value is not None}
    grid = Grid.of(
        models=model, weights=asked["weights"], data=data, policies=asked["policy"], importances=asked["importance"],
        budgets=asked["budget"], rates=asked["lr"], seeds=asked["seed"], epochs=epochs, tune_epochs=tune_epochs,
    )  # fmt: skip
    if resume and out is None:
        raise ConfigError("--resume needs --out, the folder of the comparison to go on with")
    where = out if out is not None else training.new_folder(Path("runs"), "compare")
    lengths = {"epochs": epochs, "tune-epochs": grid.tune_epochs}
    screen = Output(as_json)
    with make_board(wanted=not as_json) as board:
        outcome = Comparison(
            grid, where, shared=shared, asked={**asked, **lengths, **shared}, resume=resume, jobs=jobs,
            keep_weights=keep_weights, board=board,
        ).run()  # fmt: skip
    _show(screen, outcome, where)
    if outcome.failed:
        raise typer.Exit(1)


def _split(values: list[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _show(screen: Output, outcome: Outcome, where: Path) -> None:
    from elastictrainer.compare.table import row

    rows = [row(cell, jobs=outcome.jobs) for cell in outcome.finals]
    lines = []
    key = lambda made: (made["model"], made["data"], made["method"])  # noqa: E731
    for (_, _, method), group in groupby(sorted(rows, key=key), key=key):
        made = list(group)
        scores = [r["accuracy"] for r in made if r["accuracy"] is not None]
        spread = f" ± {100 * statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        ratios = [r["measured_ratio"] for r in made if r["measured_ratio"] is not None]
        lines.append(
            (
                made[0]["model"],
                made[0]["data"],
                method,
                made[0]["lr"],
                len(made),
                f"{100 * statistics.mean(scores):.1f}{spread}" if scores else "-",
                statistics.mean(r["train_s"] for r in made),
                statistics.mean(ratios) if ratios else None,
            )
        )
    screen.say()
    columns = ("model", "data", "method", "lr", "seeds", "accuracy %", "seconds", "ratio got")
    screen.table(columns, lines)
    for remark in outcome.remarks:
        screen.say(remark)
    for name, why in outcome.failed.items():
        screen.say(f"failed: {name}: {why}")
    screen.say()
    screen.say(f"everything about it: {where}" + (f"; the report: {outcome.report}" if outcome.report else ""))
    screen.document(
        {
            "cells": rows,
            "failed": outcome.failed,
            "remarks": list(outcome.remarks),
            "csv": str(outcome.csv),
            "report": str(outcome.report) if outcome.report else None,
        }
    )
