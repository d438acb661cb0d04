"""What every suite shares: where a row was measured, and a table that is a CSV file first and a printout second."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
RESULTS = Path(__file__).parent / "results"
SMALL = (".json", ".jsonl", ".yaml", ".csv", ".txt")  # what of a run folder travels: its page can be made again


def where(device: str = "cpu") -> dict[str, Any]:
    """Device, versions and commit, to stand in every row."""
    import torch

    from elastictrainer.profiling.cache import device_name

    return {
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit measured, marked when the tree differs from it; machines without git are told by COMMIT."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def run(*asked: str) -> str:
        told = subprocess.run(["git", "-C", HERE, *asked], capture_output=True, text=True, check=True)
        return told.stdout.strip()

    try:
        changed = run("status", "--porcelain", "--", ":/src", ":/benchmarks/*.py")
        return run("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def folder_or_none(text: str) -> Path | None:
    """A folder of weights, or `none` for networks from a random start: where only time and memory are measured."""
    return None if text.lower() == "none" else Path(text)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows whose columns are the union of all keys, in order of appearance; atomically."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({k: _round(v) for k, v in row.items()} for row in rows)
    os.replace(temporary, path)
    print(f"wrote {path} ({len(rows)} rows)", file=sys.stderr)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def kept_rows(path: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run of a suite that say the same of themselves: what it need not measure again."""
    if not path.is_file():
        return []
    told = {key: str(_round(value)) for key, value in facts.items()}
    return [dict(row) for row in read_csv(path) if all(row.get(key) == value for key, value in told.items())]


def with_others(path: Path, rows: Iterable[Mapping[str, Any]], key: Iterable[str]) -> list[dict[str, Any]]:
    """The rows, and those that the table there, or the one kept in the repository, has of other keys: a suite that was
    asked for one network leaves those of the others alone."""
    rows, key = [dict(row) for row in rows], list(key)
    kept = next((read_csv(p) for p in (path, RESULTS / path.name) if p.is_file()), [])
    mine = {tuple(str(row.get(k)) for k in key) for row in rows}
    return [*(row for row in kept if tuple(str(row.get(k)) for k in key) not in mine), *rows]


def print_table(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> None:
    rows, columns = list(rows), list(columns)
    cells = [columns] + [[str(_round(row.get(c, ""))) for c in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


# -- machines that forget --------------------------------------------------------------------------------------------


def unpack(state: Path, runs: Path) -> None:
    if state.exists():
        with tarfile.open(state) as archive:
            archive.extractall(runs, filter="data")


def pack(state: Path, runs: Path, *, also: Iterable[str] = ()) -> None:
    """Finished runs without their weights: enough for them not to be run again, and for every table and report."""
    ended = {path.parent for name in ("result.json", "diverged.json") for path in runs.rglob(name)}
    aside = state.with_name(state.name + ".tmp")
    state.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(aside, "w:gz") as archive:
        for path in (path for pattern in also for path in sorted(runs.glob(pattern))):
            archive.add(path, path.relative_to(runs))
        for folder in sorted(ended):
            for path in sorted(folder.iterdir()):
                if path.suffix in SMALL:
                    archive.add(path, path.relative_to(runs))
    aside.replace(state)
    print(f"packed {len(ended)} finished runs into {state}", file=sys.stderr)


def _round(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
