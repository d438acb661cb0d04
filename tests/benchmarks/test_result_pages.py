"""docs/results is what the kept tables say, for tables that are there and for tables that are not."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import pages

ROOT = Path(__file__).parents[2]
HERE = {"device": "cuda (NVIDIA H200)", "threads": 8, "torch": "2.15.0", "seed": 0, "commit": "abc1234"}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One small table of every kind."""

    def cell(method: str, accuracy: float, train_s: float, seed: int = 0, stage: str = "final") -> dict[str, Any]:
        costs = dict.fromkeys(("profile_s", "probe_s", "select_s", "apply_s", "forward_s"), 1.0)
        return {
            "model": "torchvision/resnet50", "data": "../shared/data/cub200", "stage": stage, "method": method,
            "lr": 0.003, "accuracy": accuracy, "train_s": train_s, "measured_ratio": train_s / 100,
            "peak_bytes": 2**30, "flops": train_s * 1e9, "per_epoch_s": f"{train_s / 2} {train_s}",
            "per_epoch_val_accuracy": f"{accuracy - 0.06:.6g} {accuracy:.6g}", **costs, **HERE, "seed": seed,
        }  # fmt: skip

    write(tmp_path / "paper_half_cuda.csv", [
        cell("full", 0.8, 100), cell("full shorter 0.5x", 0.7, 50), cell("suffix 0.5x", 0.5, 52),
        *(cell("elastic 0.5x", 0.6 + 0.02 * seed, 60, seed) for seed in range(3)),
        cell("elastic 0.5x", 0.99, 1, stage="rate"),
    ])  # fmt: skip
    write(tmp_path / "paper_rest_cuda.csv", [cell("elastic 0.7x", 0.65, 75)])
    write(tmp_path / "paper_similarity_cuda.csv", [
        {"model": "resnet50", "data": "cub200", "what": "epochs apart", "count": 2, "pairs": 4, "cosine": 0.87,
         "least": 0.8} | HERE
    ])  # fmt: skip
    write(tmp_path / "paper_resolution_cuda.csv", [
        {"model": "resnet50", "budget": "0.5x", "cells": 100, "of_best": 0.97, "ms": 1.5} | HERE
    ])  # fmt: skip
    write(tmp_path / "time_model_cpu_t1_b4_off.csv", [
        {"model": "resnet50", "batch": 4, "image": 96, "plans": 60, "median": 0.012, "p95": 0.05, "chain_median": 0.2,
         "chain_p95": 0.4, "full_step_s": 0.25, "profile_steps": 90, "tokens_of_text": 128, "autocast": "off"} | HERE
    ])  # fmt: skip
    write(tmp_path / "time_model_plans_cpu_t1_b4_off.csv", [
        {"model": "resnet50", "measured_ratio": 0.5, "predicted_ratio": 0.51} | HERE,
        {"model": "vit", "measured_ratio": 0.7, "predicted_ratio": 0.69} | HERE,
    ])  # fmt: skip
    kept = {"model": "resnet50", "batch": 4, "image": 96}
    write(tmp_path / "elastic_budget_cpu_t1.csv", [
        kept | {"asked": 0.5, "ratio": 0.4912, "off_points": -0.88, "steps": 160, "plans": 4, "profile_steps": 25.0,
                "probe_steps": 24.5, "select_steps": 0.5, "apply_steps": 0.25, "forward_steps": 4.0, "overhead": 0.0085}
        | HERE,
        kept | {"asked": 0.9, "ratio": 0.93, "off_points": 3.0, "steps": 160, "plans": 4, "profile_steps": 0.0,
                "probe_steps": 24.5, "select_steps": 0.5, "apply_steps": 0.25, "forward_steps": 4.0} | HERE,
        kept | {"asked": 0.2, "refused": "too little", "least": 0.31} | HERE,
    ])  # fmt: skip
    write(tmp_path / "elastic_memory_cuda.csv", [
        kept | {"policy": "elastic", "asked": 0.5, "peak_bytes": 2**29, "predicted_bytes": 2**28, "of_full": 0.55}
        | HERE,
        kept | {"policy": "elastic", "asked": 0.1, "refused": "too little"} | HERE,
    ])  # fmt: skip
    judged = {"data": "cub200", "model": "resnet50", "method": "elastic 0.5x", "lr": 0.003, "diverged": ""}
    write(tmp_path / "elastic_accuracy_cub200_resnet50.csv", [
        judged | {"stage": "rate", "seed": 0, "test_accuracy": "", "alone_s": 9.0} | HERE,
        judged | {"stage": "final", "seed": 0, "test_accuracy": 0.68, "alone_s": 90.0} | HERE,
        judged | {"stage": "final", "seed": 1, "test_accuracy": 0.70, "alone_s": 100.0} | HERE,
        judged | {"stage": "final", "seed": 2, "diverged": "the loss is nan"} | HERE,
    ])  # fmt: skip
    timed = kept | {"data": "pets37", "budget": 0.1, "lr": 0.003, "epochs": 12}
    adaptive = timed | {"method": "adaptive", "ratio": 0.099, "of_eager": 0.0251, "stage": "final"} | HERE
    shorter = timed | {"method": "shorter", "ratio": 0.101} | HERE
    write(tmp_path / "frontier_pets37_cpu.csv", [
        *(adaptive | {"test_accuracy": 0.6 + 0.02 * seed, "seed": seed} for seed in range(2)),
        shorter | {"test_accuracy": 0.65, "stage": "final"},
        shorter | {"test_accuracy": 0.99, "stage": "rate", "lr": 0.1},
    ])  # fmt: skip
    write(tmp_path / "kept_steps_cpu.csv", [
        kept | {"share": 0.1, "kept_as": "int8", "full_step_s": 0.1, "plan_step_s": 0.04, "kept_step_s": 0.02,
                "speedup": 5.0, "fill_of_forward": 0.6, "kept_bytes": 2**20, "full_peak_bytes": 4, "plan_peak_bytes": 1,
                "gradient_off": 0.025} | HERE,
        kept | {"share": 0.5, "kept_as": "int8", "obstacle": "too large"} | HERE,
    ])  # fmt: skip
    write(tmp_path / "deadlines_cpu.csv", [
        {"deadline_s": 10, "load": 2, "took_s": 10.5, "late": 0.05, "steps": 7, "accuracy": 0.5, "share": 0.25} | HERE,
        {"deadline_s": 20, "load": 0, "took_s": 19.0, "late": -0.05, "steps": 70, "accuracy": 0.9} | HERE,
    ])  # fmt: skip
    write(tmp_path / "solver.csv", [
        {"instance": "chain", "tensors": 1000, "rho": 0.5, "memory": "", "solver": "select", "ms": 9.0,
         "score_of_best": 1.0} | HERE,
        {"instance": "chain", "tensors": 1000, "rho": 0.5, "memory": "", "solver": "published", "ms": 900.0,
         "score_of_best": 0.9, "over_budget": 0.01} | HERE,
        {"instance": "resnet50", "tensors": 161, "rho": "", "memory": 0.5, "solver": "refused: no"} | HERE,
    ])  # fmt: skip
    return tmp_path


def row_of(page: str, start: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_figure_on_a_page_comes_from_its_row(results: Path) -> None:
    made = pages.build(results)
    index = made["index.md"]
    assert row_of(index, "full")[1:5] == ["80.0", "1", "1.00", "1.000"]
    assert row_of(index, "elastic 0.5x")[1:6] == ["62.0 ± 2.0", "3", "0.60", "0.600", "8.3%"]
    assert "12.0 points above suffix 0.5x" in index
    assert "reached 62.0% in 0.60 of full's seconds: 8.0 points below full shorter 0.5x (70.0% in 0.50 of" in index
    assert row_of(index, "full shorter 0.5x")[6:8] == ["0.50", "–"]
    assert row_of(index, "accuracy is not noticeably lower")[2] == "no"
    assert row_of(index, "training is up to 3.5 times as fast as with other methods")[1:] == [
        "elastic 0.5x: 1.67 times as fast as full training, deciding included", "no"
    ]  # fmt: skip
    assert row_of(index, "it takes a half to a third of their energy")[1:] == ["no meter was there", "not measured"]
    # By hand: full's best is 0.8, of which the first epoch's 0.74 is 92%.
    times = index[index.index("(Table 2):") :]
    assert row_of(times, "full")[1:] == ["50s", "1min40s", "1min40s", "1min40s"]
    assert row_of(times, "suffix 0.5x")[1] == "not reached"
    assert "with 1 seed that may be chance" in index.lower()
    assert "99.0" not in index, "a trial of a rate is no result"
    assert "| 0.87 |" in index
    assert row_of(made["time-model.md"], "resnet50")[1:5] == ["1.2%", "5.0%", "20.0%", "40.0%"]
    assert [line for line in made["solver.md"].splitlines() if "published" in line and "90.00%" in line]
    assert "97.00%" in made["solver.md"]
    budget = made["budget.md"]
    assert row_of(budget, "resnet50")[1:] == ["0.5", "0.491", "-0.9", "160", "4", "25", "24.5", "4.8", "0.9%"]
    assert "1 of 2 runs are within 2 points of what was asked; the most over: +3.0." in budget
    assert "| refused: the least is 0.31x |" in budget
    assert "| 512 | 256 | 55.0% |" in budget
    assert row_of(budget, "cub200")[1:] == ["resnet50", "elastic 0.5x", "69.0 ± 1.4", "2", "1min35s", "0.003"]
    runs = made["runs.md"]
    assert row_of(runs, "resnet50")[1:6] == ["0.1x", "shorter", "65.0", "1", "0.101"]
    assert "| **adaptive** | 61.0 ± 1.4 | 2 | 0.099 | 0.025 | 0.003 |" in runs
    assert "99.0" not in runs, "a trial of a rate is no result"
    assert "| last 10% | int8 | 100ms | 40ms | 20ms | 5.0x | 0.60 | 1MiB | 0.25 | 2.5e-02 |" in runs
    assert row_of(runs, "10s")[1:] == ["from half-way", "10.5s", "+5.0%", "7", "50.0%", "25%"]
    assert "1 of 2 runs ended within 2% of their deadline; the latest was +5.0%." in runs
    assert "NVIDIA H200" in index
    assert "abc1234" in index


def test_a_partial_table_says_what_it_lacks_and_what_to_doubt(results: Path) -> None:
    index = pages.build(results)["index.md"]
    lacking = next(line for line in index.splitlines() if "Not in the tables" in line)
    for method in ("prunetrain", "head", "adaptive 0.5x", "elastic 0.35x", "random 0.5x"):
        assert f"{method}," in lacking.partition("Fewer")[0] + ","
    assert "full (1 of 3)" in lacking
    assert "elastic 0.5x (" not in lacking, "it has its three seeds"
    assert "shared the machine" not in index
    assert "tried" not in row_of(index, "full")[-1], "there was one rate"

    path = results / "paper_rest_cuda.csv"
    with path.open() as file:
        (row,) = csv.DictReader(file)
    final = {**row, "method": "prunetrain", "jobs": 4}
    write(path, [final, *({**final, "stage": "rate", "lr": lr, "accuracy": ""} for lr in (0.001, 0.003))])
    index = pages.build(results)["index.md"]
    assert "Up to 4 runs shared the machine" in index
    assert row_of(index, "prunetrain")[3] == "–", "its seconds are those of others, too, and no price says them"
    assert row_of(index, "full")[3] == "1.00"
    assert row_of(index, "prunetrain")[-1] == "0.003 (largest tried)"


def test_several_networks_stand_beside_each_other(results: Path) -> None:
    with (results / "paper_half_cuda.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert "By network and dataset" not in pages.build(results)["index.md"]
    other = [{**row, "model": "torchvision/mobilenet_v2", "accuracy": "0.5"} for row in rows if row["method"] == "full"]
    write(results / "paper_half_cuda.csv", [*rows, *other])
    index = pages.build(results)["index.md"]
    table = index[index.index("By network and dataset") :]
    assert row_of(table, "method") == ["method", "mobilenet_v2, cub200", "resnet50, cub200"]
    assert row_of(table, "full") == ["full", "50.0", "80.0"]
    assert row_of(table, "elastic 0.5x") == ["elastic 0.5x", "–", "62.0 (-18.0)"]


def test_of_runs_beside_others_seconds_are_those_of_their_prices(results: Path) -> None:
    path = results / "paper_half_cuda.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    write(path, [{**row, "jobs": 8, "alone_s": float(row["train_s"]) / 10} for row in rows])
    (results / "paper_rest_cuda.csv").unlink()
    index = pages.build(results)["index.md"]
    # 60 s of 100 s are 6 s of 10 s by prices; what was measured beside others is not shown.
    assert row_of(index, "elastic 0.5x")[3:6] == ["0.60", "–", "–"]
    times = index[index.index("(Table 2):") :]
    assert row_of(times, "full")[1:] == ["5s", "10s", "10s", "10s"]
    assert row_of(index, "it takes a half to a third of their energy")[1:] == [
        "runs shared the machine",
        "not measured",
    ]
    assert "deciding included, " not in index


def test_a_table_without_full_training_or_any_accuracy_still_makes_a_page(results: Path) -> None:
    with (results / "paper_half_cuda.csv").open() as file:
        rows = [{**row, "accuracy": ""} for row in csv.DictReader(file) if not row["method"].startswith("full")]
    (results / "paper_rest_cuda.csv").unlink()
    write(results / "paper_half_cuda.csv", rows)
    index = pages.build(results)["index.md"]
    assert row_of(index, "elastic 0.5x")[1:4] == ["–", "3", "–"]
    assert "reached" not in index


def test_pictures_are_drawings_and_every_one_is_shown(results: Path) -> None:
    made = pages.build(results)
    pictures = [name for name in made if name.endswith(".svg")]
    assert set(pictures) == {"frontier-1.svg", "time_model_plans_cpu_t1_b4_off.svg"}
    text = "".join(page for name, page in made.items() if name.endswith(".md"))
    for name in pictures:
        root = ElementTree.fromstring(made[name])
        assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) >= 2
        assert f"({name})" in text


def test_where_an_allocator_was_asked_the_errors_in_memory_are_shown(results: Path) -> None:
    assert "memory: 95%" not in pages.build(results)["time-model.md"]
    measured = {"model": "swin_t", "batch": 64, "image": 224, "plans": 60, "median": 0.01, "p95": 0.05}
    measured |= {"chain_median": 0.2, "chain_p95": 0.4, "full_step_s": 0.08, "profile_steps": 150}
    measured |= {"tokens_of_text": 128, "autocast": "bf16"}
    write(results / "time_model_cuda_t1_b64_off.csv", [measured | {"memory_median": 0.02, "memory_p95": 0.07} | HERE])
    page = pages.build(results)["time-model.md"]
    assert row_of(page, "swin_t")[-2:] == ["2.0%", "7.0%"]


def test_what_is_not_there_is_said_with_its_command(tmp_path: Path) -> None:
    made = pages.build(tmp_path)
    assert not [name for name in made if name.endswith(".svg")]
    for name, command in (("index.md", "benchmarks/paper.py"), ("time-model.md", "benchmarks/time_model.py"),
                          ("solver.md", "make bench"), ("budget.md", "benchmarks/elastic.py budget")):  # fmt: skip
        assert "has not been measured yet" in made[name]
        assert command in made[name]


def test_the_pages_in_the_repository_are_what_its_tables_say() -> None:
    for name, text in pages.build(ROOT / "benchmarks" / "results").items():
        kept = ROOT / "docs" / "results" / name
        assert kept.exists(), f"docs/results/{name} is missing: make results"
        assert kept.read_text(encoding="utf-8") == text, f"docs/results/{name} is out of date: make results"
