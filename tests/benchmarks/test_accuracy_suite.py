"""The accuracy suite's bookkeeping: a rate that diverges is an outcome, and every row says what it took."""

from __future__ import annotations

import importlib.util
import json
import sys
import tarfile
import time
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
    given = {
        "runs": tmp_path, "data": Path("birds"), "epochs": 12, "batch_size": 4, "jobs": 2, "device": "cpu",
        "until": time.monotonic() + 60,
    }  # fmt: skip
    return Namespace(**given | others)


def result(accuracy: float) -> dict[str, Any]:
    return {
        "accuracy": {"per_epoch": [0.9, accuracy], "final": accuracy}, "steps": 30, "best_epoch": 1, "train_s": 7.0,
        "overhead_s": {"profile": 0.0, "probe": 0.5, "select": 0.2, "apply": 0.1}, "peak_bytes": None,
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


PRETENDS = """
import json, pathlib, sys, time
folder, what = sys.argv[1:]
if what == "fails":
    sys.exit(3)
time.sleep(60 if what == "hangs" else 0)
pathlib.Path(folder).mkdir()
pathlib.Path(folder, "result.json").write_text(json.dumps({"what": what}))
"""


@pytest.fixture
def pretending(suite: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that do at once what they are named after."""
    command = lambda c, args: [sys.executable, "-c", PRETENDS, c["folder"], c["method"]]  # noqa: E731
    monkeypatch.setattr(suite, "cell_command", command)


@pytest.mark.usefixtures("pretending")
def test_a_cell_that_fails_is_named_and_the_others_go_on(suite: ModuleType, tmp_path: Path) -> None:
    cells = [{"folder": str(tmp_path / what), "method": what} for what in ("fails", "one", "two")]
    saved = []
    failed = suite.run_cells(cells, options(tmp_path, jobs=1), lambda: saved.append(len(list(tmp_path.iterdir()))))
    assert failed == ["fails (exit code 3)"]
    assert saved == [0, 1, 2], "whatever has ended is on disk before the next one"
    assert [suite.outcome(c) is not None for c in cells] == [False, True, True]


@pytest.mark.usefixtures("pretending")
def test_out_of_time_what_is_finished_is_kept(suite: ModuleType, tmp_path: Path) -> None:
    cells = [{"folder": str(tmp_path / what), "method": what} for what in ("one", "hangs")]
    started = time.monotonic()
    with pytest.raises(suite.OutOfTime):
        suite.run_cells(cells, options(tmp_path, until=started + 3), lambda: None)
    assert time.monotonic() - started < 30
    assert [suite.outcome(c) is not None for c in cells] == [True, False]
    (tmp_path / "one" / "model.safetensors").write_bytes(b"much")
    (tmp_path / "m.profile.json").write_text("{}")
    suite.pack(tmp_path / "state.tar.gz", tmp_path, also=("*.profile.json",))
    with tarfile.open(tmp_path / "state.tar.gz") as archive:
        assert sorted(archive.getnames()) == ["m.profile.json", "one/result.json"]
    suite.unpack(tmp_path / "state.tar.gz", tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "one" / "result.json").exists()


def test_a_table_keeps_what_was_measured_of_the_same(suite: ModuleType, tmp_path: Path) -> None:
    args = options(tmp_path, image_size=32, steps=8, seed=0, resume=True)
    table = suite.Table(tmp_path / "t.csv", args)
    table.add({"model": "m", "asked": 0.5, "ratio": 0.5})
    with table.trying("another"):
        raise RuntimeError("one row must not cost the others")
    assert table.failed == ["another"]
    assert suite.Table(tmp_path / "t.csv", args).find(model="m", asked=0.5)
    assert not suite.Table(tmp_path / "t.csv", args).find(model="m", asked=0.7)
    args.steps = 9
    assert not suite.Table(tmp_path / "t.csv", args).rows


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
