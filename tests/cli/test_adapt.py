"""`elastictrainer adapt`: a folder of one's own, a run folder, one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from elastictrainer import cli
from elastictrainer.data.models import load_model
from elastictrainer.report.reading import read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog", "fox")):
        (tmp_path / "own" / name).mkdir(parents=True)
        for k in range(3):
            pixels = rng.integers(0, 90, (40, 40, 3))
            pixels[..., number] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "own" / name / f"{k}.png")
    return tmp_path / "own"


def adapt(folder: Path, out: Path, *more: str) -> int:
    return cli.main(
        ["adapt", "--model", "torchvision/mobilenet_v2", "--data", str(folder), "--image-size", "32", "--shots", "2",
         "--steps", "2", "--out", str(out), "--device", "cpu", *more]
    )  # fmt: skip


def test_it_leaves_a_run_folder_that_the_report_reads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision")
    out = tmp_path / "run"
    assert adapt(folder, out, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["policy"] == "tinytrain"
    assert result["accuracy"]["of"] == "queries"
    assert result["config"]["backward"]["nbytes"] <= 2**20
    assert result["config"]["backward"]["macs"] <= 0.15 * result["config"]["full_backward"]["macs"]
    assert json.loads((out / "result.json").read_text()) == result
    assert "tinytrain" in (out / "report.html").read_text(encoding="utf-8")  # left there unasked, as by train
    run = read_run(out)
    assert run.accuracy == result["accuracy"]["final"]
    assert len(run.epochs) == 2
    assert len(run.plans) == 1
    # The weights answer by themselves, with as many classes as the folder has.
    loaded = load_model("torchvision/mobilenet_v2", weights=out / "model.safetensors")
    assert loaded.num_classes == 3
    assert loaded.report.fresh == ()
    with torch.no_grad():
        assert loaded.model.eval()(torch.zeros(1, 3, 32, 32)).isfinite().all()


def test_what_is_wrong_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchvision")

    def fails(message: str, code: int, *more: str) -> None:
        assert adapt(folder, tmp_path / "run", *more) == code
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    fails("the least that works is", 1, "--memory", "1KiB")
    fails("the least that works is", 1, "--compute", "0.01%")
    fails("is not one of none, full", 2, "--method", "tiny")
    fails("share '150%'", 2, "--compute", "150%")
    for image in list((folder / "cat").iterdir())[1:]:
        image.unlink()
    fails("class 'cat' has 1 image", 1)
    for name in ("cat", "dog"):
        for image in (folder / name).iterdir():
            image.unlink()
        (folder / name).rmdir()
    fails("only one class (fox)", 1)
