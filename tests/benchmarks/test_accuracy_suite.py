"""The accuracy suite's bookkeeping: a rate that diverges is an outcome, and every row says what it took."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import elastictrainer as et


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "elastic.py"
    spec = importlib.util.spec_from_file_location("benchmark_elastic", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before  # its folder is there for scripts
    return module


def options(tmp_path: Path, **others: Any) -> Namespace:
    given = {"runs": tmp_path, "data": Path("birds"), "epochs": 12, "batch_size": 4, "jobs": 2, "device": "cpu"}
    return Namespace(**given | others)


def result(accuracy: float) -> dict[str, Any]:
    return {
        "accuracy": {"per_epoch": [0.9, accuracy], "final": accuracy}, "steps": 30, "best_epoch": 1, "train_s": 7.0,
        "eval_s": 1.0, "predicted_ratio": 0.5,
        "plans": [{"steps": 10, "predicted_step_s": 0.1}, {"steps": 20, "predicted_step_s": 0.2}],
    }  # fmt: skip


def test_a_rate_that_diverges_is_the_worst_and_is_not_tried_again(suite: ModuleType, tmp_path: Path) -> None:
    args = options(tmp_path)
    cells = [suite.cell("m", "full", lr, 0, 4, args) for lr in (0.001, 0.01, 0.1)]
    for c, document in zip(cells, ({"diverged": "the loss is nan"}, result(0.0), {"diverged": "the loss is inf"})):
        Path(c["folder"]).mkdir()
        name = "diverged.json" if "diverged" in document else "result.json"
        (Path(c["folder"]) / name).write_text(json.dumps(document))
    assert suite.best_rate(cells, "full") == 0.01
    assert all(suite.outcome(c) is not None for c in cells)
    rows = [suite.accuracy_row("m", c, args) for c in cells]
    assert [bool(row["diverged"]) for row in rows] == [True, False, True]
    assert rows[1]["train_s"] == 7.0
    assert rows[1]["alone_s"] == pytest.approx(10 * 0.1 + 20 * 0.2)
    assert rows[1]["jobs"] == 2


@pytest.mark.slow
def test_a_cell_that_diverges_says_so_in_its_folder(suite: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    args = options(tmp_path, data="builtin", weights=None, image_size=32)
    shape = suite.network("resnet18", classes=10, weights=None, image_size=32)
    data = suite.images("builtin", shape, batch_size=4, image_size=32, device=torch.device("cpu"))
    model, batch = shape.model.train(), next(iter(data.train))
    price = et.profile(model, suite.loss_fn, batch, optimizer=suite.sgd(model, 0.1), effort=12)
    (tmp_path / "resnet18.profile.json").write_text(price.to_json())
    c = {"model": "resnet18", "method": "full", "lr": 1e30, "seed": 0, "epochs": 1, "folder": str(tmp_path / "cell")}
    args.cell = json.dumps(c)
    suite.cell_suite(args)
    assert "diverged" in suite.outcome(c)
