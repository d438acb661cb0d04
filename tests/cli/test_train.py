"""`elastictrainer train` from the outside: what it prints, writes, refuses, and how it goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

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


@pytest.fixture
def _torch_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_torch_as_before")
def test_the_config_of_a_run_asks_for_the_same_again(main: Run, options: list[Any], tmp_path: Path) -> None:
    first = tmp_path / "first"
    given = [*options, "--pin", "head", "--pin", "layer4.*", "--deterministic", "--policy", "full", "--threads", 1]
    assert main(*given, "--out", first)[0] == 0
    code, printed, complaint = main("train", "--config", first / "config.yaml", "--out", tmp_path / "again", "--json")
    assert code == 0, complaint
    kept = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "again")]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    again = json.loads(printed)["config"]
    before = yaml.safe_load((first / "config.yaml").read_text())
    assert again == {key: value for key, value in before.items() if key != "environment"}
    assert not {"out", "resume", "json"} & before["command"].keys()

    assert main("train", "--config", first / "config.yaml", "--out", tmp_path / "other", "--seed", 1)[0] == 0
    assert json.loads((tmp_path / "other" / "result.json").read_text())["seed"] == 1
    # What only says how to compute may be another one when the run goes on.
    assert main(*given, "--threads", 2, "--out", first, "--resume")[0] == 0


def test_the_config_of_a_run_made_in_python_is_no_command(main: Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: small\nenvironment: {torch: '2'}\n")
    code, _, complaint = main("train", "--config", tmp_path / "config.yaml")
    assert code == 2
    assert "made from Python" in complaint


def test_a_budget_below_the_floor_is_one_line(main: Run, options: list[Any], tmp_path: Path) -> None:
    code, _, complaint = main(*options, "--out", tmp_path / "run", "--budget", "0.01x")
    assert code == 1
    assert complaint.rstrip().count("\n") == 0
    assert "least" in complaint


def test_how_images_are_varied_and_divided_can_be_said(
    main: Run, options: list[Any], folder: Path, tmp_path: Path
) -> None:
    shutil.rmtree(folder / "val")
    asked = ["--augment", "flip,zoom", "--val-share", "0.25", "--epochs", 1, "--policy", "full"]
    code, printed, complaint = main(*options, *asked, "--out", tmp_path / "run", "--json")
    assert code == 0, complaint
    config = json.loads(printed)["config"]
    assert config["augment"] == "flip,zoom"
    assert config["split"] == {
        "train": 18,
        "val": 6,
        "test": 8,
        "val_from_train": True,
        "val_share": 0.25,
        "split_seed": 0,
    }
    for wrong in (["--augment", "crop,zoom"], ["--val-share", "1.5"]):
        code, _, complaint = main(*options, *wrong)
        assert code == 2
        assert wrong[0] in complaint


def test_importance_can_take_its_gradient_from_validation_images(main: Run, options: list[Any], tmp_path: Path) -> None:
    asked = [*options, "--epochs", 1, "--gradient-from"]
    code, printed, complaint = main(*asked, "held-out", "--out", tmp_path / "run", "--json")
    assert code == 0, complaint
    assert json.loads(printed)["config"]["gradient_from"] == "held_out"
    code, _, complaint = main(*asked, "elsewhere")
    assert (code, "--gradient-from" in complaint) == (2, True)
    code, _, complaint = main(*asked, "other", "--importance", "random")
    assert (code, complaint.count("\n"), "takes no gradient" in complaint) == (2, 1, True)


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


@pytest.mark.parametrize("data", ["builtin", "folder"])
def test_statistics_follow_images_that_are_far_from_those_they_describe(data: str, folder: Path) -> None:
    from elastictrainer.cli.workload import load

    where = str(folder) if data == "folder" else data
    work = load("torchvision/resnet18", where, image_size=32, batch_size=2, device=torch.device("cpu"))
    assert work.norms == ("track" if data == "builtin" else "frozen")
