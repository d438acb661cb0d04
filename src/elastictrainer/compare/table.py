"""One CSV of a comparison: a row a finished cell, with everything that its figures depend on."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from elastictrainer.compare.grid import Cell
from elastictrainer.policies import find_policy
from elastictrainer.runtime.checkpoint import write_atomically

__all__ = ["COLUMNS", "row", "write_table"]

_FIGURES = (
    "steps", "best_epoch", "train_s", "eval_s", "full_step_s", "step_s", "predicted_ratio", "measured_ratio",
    "peak_bytes", "deciding_peak_bytes", "flops", "energy_j", "energy_meter", "restarts",
)  # fmt: skip
_DECIDING = ("profile", "probe", "select", "apply", "forward", "features", "flops")
_ENVIRONMENT = ("device", "threads", "torch", "python", "elastictrainer", "platform", "commit")
COLUMNS = (
    "model", "weights", "data", "stage", "method", "policy", "importance", "budget", "lr", "seed", "epochs",
    "batch_size", "accuracy", "accuracy_of", "val_accuracy", "per_epoch_s", "per_epoch_val_accuracy", *_FIGURES,
    "alone_s", *(f"{part}_s" for part in _DECIDING), "jobs", *_ENVIRONMENT,
    "folder",
)  # fmt: skip


def row(cell: Cell, *, jobs: int = 1) -> dict[str, Any]:
    """The figures of a finished cell; with `jobs` above 1 its seconds and memory mean nothing.

    `alone_s` are the seconds of its steps by the prices that it planned by, as if it had had the machine to itself;
    empty where no price says it. A trial has no accuracy on test images: rates are chosen without them.
    """
    made = json.loads((cell.folder / "result.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((cell.folder / "config.yaml").read_text(encoding="utf-8"))
    epochs = [json.loads(line) for line in (cell.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    accuracies = [value for value in made["accuracy"]["per_epoch"] if value is not None]
    overhead = made["overhead_s"]
    return {
        "model": cell.workload.model,
        "weights": cell.workload.weights,
        "data": cell.workload.data,
        "stage": cell.stage,
        "method": cell.method.name,
        "policy": made["policy"],
        "importance": made["importance"],
        "budget": cell.method.budget,
        "lr": cell.lr,
        "seed": made["seed"],
        "epochs": made["epochs"],
        "batch_size": made["batch_size"],
        "accuracy": made["accuracy"]["final"],
        "accuracy_of": made["accuracy"]["of"],
        "val_accuracy": max(accuracies, default=None),
        "per_epoch_s": " ".join(f"{line['train_s']:.6g}" for line in epochs),
        "per_epoch_val_accuracy": " ".join(_shown(line.get("val_accuracy")) for line in epochs),
        **{figure: made.get(figure) for figure in _FIGURES},
        "alone_s": _alone_s(cell, made),
        **{f"{part}_s": overhead.get(part) for part in _DECIDING},
        "jobs": 1 if cell.method.by_clock else jobs,
        **{fact: (config.get("environment") or {}).get(fact) for fact in _ENVIRONMENT},
        "folder": str(cell.folder),
    }


def _alone_s(cell: Cell, made: dict[str, Any]) -> float | None:
    """None where prices are not those of all steps: the network shrank, or features were kept and built at times."""
    if cell.method.by_clock or find_policy(made["policy"]).shrinks:
        return None
    return float(sum(plan["steps"] * plan["predicted_step_s"] for plan in made["plans"]))


def _shown(accuracy: float | None) -> str:
    """Of an epoch; a policy may find evaluating not worth its time after some."""
    return "-" if accuracy is None else f"{accuracy:.6g}"


def write_table(path: Path, cells: Iterable[Cell], *, jobs: int = 1) -> None:
    """Replace the table in one moment. What was not measured is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row(cell, jobs=jobs) for cell in cells)
    write_atomically(path, text.getvalue())
