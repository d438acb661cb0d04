"""`elastictrainer train` from the outside: what it prints, writes, refuses, and how it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that a network can tell apart: dark and bright noise."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4), ("test", 4)):
        for label, level in (("dark", 40), ("bright", 200)):
            place = tmp_path / "data" / split / label
            place.mkdir(parents=True)
            for index in range(count):
                pixels = np.clip(noise.normal(level, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.png")
    return tmp_path / "data"


@pytest.fixture
def options(folder: Path) -> list[Any]:
    return [
        "train", "--model", "torchvision/resnet18", "--data", folder, "--image-size", 32, "--batch-size", 4,
        "--epochs", 2, "--lr", "0.01", "--bn", "track", "--interval", "1", "--budget", "0.7x", "--device", "cpu",
        "--probe-batches", 2, "--no-feedback", "--policy", "elastic",
    ]  # fmt: skip


def test_a_run_from_nothing_to_a_result(main: Run, options: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, printed, _ = main(*options, "--out", out)
    assert code == 0, printed
    for word in ("accuracy (test)", "training", "budget asked", "0.7x", "ratio got", "peak memory", "energy", str(out)):
        assert word in printed
    document = json.loads((out / "result.json").read_text())
    assert document["config"]["model"] == "torchvision/resnet18"
    assert document["plans"][0]["predicted_ratio"] <= 0.7
    assert document["epochs"] == 2

    code, printed, complaint = main(*options, "--out", out)
    assert code == 1
    assert complaint.count("\n") == 1
    assert "nothing is overwritten" in complaint

    code, printed, _ = main(*options, "--out", out, "--resume", "--json")
    assert code == 0
    assert json.loads(printed) == document


def test_a_budget_below_the_floor_is_one_line(main: Run, options: list[Any], tmp_path: Path) -> None:
    code, _, complaint = main(*options, "--out", tmp_path / "run", "--budget", "0.01x")
    assert code == 1
    assert complaint.rstrip().count("\n") == 0
    assert "least" in complaint


def test_resume_needs_a_folder(main: Run, options: list[Any]) -> None:
    code, _, complaint = main(*options, "--resume")
    assert code == 2
    assert "--out" in complaint


def test_by_default_the_budget_is_the_runs(main: Run, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, complaint = main(
        "train", "--model", "torchvision/resnet18", "--data", folder, "--image-size", 32, "--batch-size", 4,
        "--epochs", 40, "--lr", "0.01", "--budget", "0.5x", "--device", "cpu", "--probe-batches", 2, "--views", 1,
        "--keep-as", "int8", "--out", out,
    )  # fmt: skip
    assert code == 0, complaint
    document = json.loads((out / "result.json").read_text())
    assert document["policy"] == "adaptive"
    assert document["features"]["dtype"] == "int8"
    assert document["features"]["views"] == 1
    assert [plan["reason"] for plan in document["plans"]][:2] == ["head", "stage"]
