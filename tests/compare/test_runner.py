"""A comparison from outside: cells are run folders, finished ones are never run again, a killed one goes on."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from elastictrainer import cli
from elastictrainer.compare import Cell, Comparison, Grid
from elastictrainer.compare.board import Progress, draw
from elastictrainer.compare.runner import _may_join, _Running
from elastictrainer.compare.table import COLUMNS
from elastictrainer.errors import CheckpointError


@pytest.fixture
def images(tmp_path: Path) -> Path:
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


def command(images: Path, out: Path, *more: object, policy: str = "full,shorter") -> list[str]:
    words = [
        "compare", "--model", "torchvision/resnet18", "--data", images, "--policy", policy, "--epochs", 6,
        "--image-size", 32, "--batch-size", 4, "--lr", "0.01", "--bn", "track", "--device", "cpu", "--threads", 1,
        "--probe-batches", 2, "--out", out, *more,
    ]  # fmt: skip
    return [str(word) for word in words]


def start(images: Path, out: Path, *more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "elastictrainer", *command(images, out, *more)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not list((folder / "checkpoint").glob("save-*[0-9]")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_comparison_stopped_in_one_cell_and_killed_in_the_next_goes_on(
    images: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    cells = out / "cells" / "resnet18_on_data"
    full, shorter = cells / "full-lr0.01-s0", cells / "full_shorter_0.5x-lr0.01-s0"
    process = start(images, out)
    wait_for_checkpoint(full, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines() == [
        "begins: resnet18 on data: full, lr 0.01, seed 0",
        f"stopped: 0 of 2 cells; go on with --out {out} --resume",
        "elastictrainer: interrupted",
    ]
    assert "stopped" in (out / "logs" / "resnet18_on_data--full-lr0.01-s0.txt").read_text()
    process = start(images, out, "--resume")
    wait_for_checkpoint(shorter, process)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert "done: resnet18 on data: full, lr 0.01, seed 0" in said
    assert "1 of 2 cells, about" in said
    before = (full / "result.json").stat()
    assert not (shorter / "result.json").exists()
    time.sleep(0.5)  # the cell has died with its parent: its folder is free

    assert cli.main(command(images, out)) == 1
    assert "--resume" in capsys.readouterr().err
    assert cli.main(command(images, out, "--resume", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert (full / "result.json").stat() == before, "a finished cell was run again"
    made = json.loads((shorter / "result.json").read_text())
    assert made["restarts"] == 1
    assert (made["epochs"], made["policy"]) == (3, "full")
    assert json.loads((full / "result.json").read_text())["restarts"] == 1

    assert [cell["method"] for cell in document["cells"]] == ["full", "full shorter 0.5x"]
    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    for row in rows:
        folder = Path(row["folder"])
        result = json.loads((folder / "result.json").read_text())
        environment = yaml.safe_load((folder / "config.yaml").read_text())["environment"]
        assert float(row["accuracy"]) == result["accuracy"]["final"]
        assert float(row["train_s"]) == result["train_s"]
        assert (row["device"], row["torch"]) == (environment["device"], environment["torch"])
        assert (row["seed"], row["accuracy_of"], row["stage"]) == ("0", "test", "final")
        assert len(row["per_epoch_s"].split()) == result["epochs"]
        assert (folder / "report.html").is_file()
    page = (out / "report.html").read_text()
    assert "full, 6 epochs" in page
    assert "full, 3 epochs" in page
    # What is kept can be given back: the file asks for the same comparison, which is finished.
    assert cli.main(["compare", "--config", str(out / "comparison.yaml"), "--out", str(out), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document


@pytest.mark.slow
def test_a_cell_that_fails_stops_no_other(images: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    code = cli.main(command(images, out, "--budget", "0.01x", "--epochs", 1, policy="suffix,full"))
    said = capsys.readouterr()
    assert code == 1
    assert "failed: resnet18 on data: suffix 0.01x" in said.err
    assert "the least that works" in said.out
    assert "full" in said.out
    assert "suffix 0.01x" in (out / "report.html").read_text()


def test_wrong_use_is_one_line_with_everything_in_it(tmp_path: Path, capsys: Any) -> None:
    code = cli.main(
        ["compare", "--model", "resnet5000", "--data", str(tmp_path / "no"), "--policy", "elastik,full",
         "--budget", "2h,x", "--lr", "0.1,-1", "--out", str(tmp_path / "out")]
    )  # fmt: skip
    complaint = capsys.readouterr().err
    assert code == 2
    assert complaint.count("\n") == 1
    for word in ("'resnet5000'", str(tmp_path / "no"), "did you mean 'elastic'?", "'x'", "lr -1"):
        assert word in complaint
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_method_starts_at_the_same_weights_and_sees_the_same_images(
    images: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Whatever a policy draws by lot or looks at besides, of a seed all methods have the same batches in one order."""
    pytest.importorskip("torch_pruning", reason="the extra prunetrain is not installed")
    from elastictrainer.runtime import run as running

    seen: dict[str, list[str]] = {}
    method = ""
    begin, count = running.Run.begin_epoch, running.Run.count_flops

    def watch_begin(self: Any) -> None:
        if self.record.step == 0:
            weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
            seen[method] = [hashlib.sha256(weights).hexdigest()]
        begin(self)

    def watch_batches(self: Any, batch: Any) -> None:
        seen[method].append(hashlib.sha256(batch[0].numpy().tobytes()).hexdigest())
        count(self, batch)

    monkeypatch.setattr(running.Run, "begin_epoch", watch_begin)
    monkeypatch.setattr(running.Run, "count_flops", watch_batches)
    made = Grid.of(
        models=["torchvision/resnet18"], data=[str(images)], epochs=2, rates=[0.01], budgets=["0.6x"],
        policies=["full", "suffix", "random", "elastic", "prunetrain"], importances=["elastic", "magnitude"],
    )  # fmt: skip
    shared = [
        "--image-size", "32", "--batch-size", "4", "--bn", "track", "--device", "cpu", "--threads", "1",
        "--probe-batches", "2",
    ]  # fmt: skip
    for cell in made.finals(made.workloads[0], dict.fromkeys(made.methods, 0.01)):
        method = cell.method.name
        assert cli.main(["train", *made.under(tmp_path, cell).arguments(), *shared]) == 0
    assert len(seen) == 6
    assert len(seen["full"]) == 1 + 2 * 6
    assert all(each == seen["full"] for each in seen.values())


# -- without training: folders as cells leave them -------------------------------------------------------------------


def grid(**changes: Any) -> Grid:
    options: dict[str, Any] = {
        "models": ["builtin"], "data": ["builtin"], "policies": ["full", "head"], "rates": [0.001, 0.01, 0.1],
        "seeds": [0, 1], "epochs": 6,
    }  # fmt: skip
    return Grid.of(**{**options, **changes})


def comparison(tmp_path: Path, made: Grid, **options: Any) -> Comparison:
    return Comparison(made, tmp_path / "out", shared={}, asked={"epochs": 6, "lr": [1]}, **options)


def leave(out: Path, cell: Cell, *, val: float, test: float | None = None, train_s: float = 10.0) -> None:
    """What of a finished cell a comparison reads."""
    folder = out / cell.folder
    folder.mkdir(parents=True)
    document = {
        "accuracy": {"per_epoch": [val / 2, val], "final": test, "of": "test"}, "train_s": train_s, "eval_s": 2.0,
        "epochs": cell.epochs, "restarts": 0,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(document))


def test_rates_are_the_best_on_validation_and_diverged_ones_are_out(tmp_path: Path) -> None:
    made = grid()
    run = comparison(tmp_path, made)
    scores = {("full", 0.001): 0.5, ("full", 0.01): 0.7, ("full", 0.1): 0.6, ("head", 0.001): 0.3, ("head", 0.01): 0.4}
    for cell in made.trials(made.workloads[0]):
        if (cell.method.policy, cell.lr) in scores:  # head at 0.1 diverged
            leave(
                tmp_path / "out",
                cell,
                val=scores[cell.method.policy, cell.lr],
                test=1 - scores[cell.method.policy, cell.lr],
            )
    remarks: list[str] = []
    diverged = made.trials(made.workloads[0])[-1]
    run.failed[diverged.name] = "the loss is not finite"
    rates = run._rates(made.workloads[0])
    run._judge(made.workloads[0], rates, remarks)
    assert {method.policy: rate for method, rate in rates.items()} == {"full": 0.01, "head": 0.01}
    assert remarks == [f"{diverged.name}: the loss is not finite"]
    assert run.failed == {}, "a rate that diverges is what a grid is for"
    # Whoever goes on later knows the rates before anything runs, so that tables do not lose what was finished.
    assert not Comparison(made, tmp_path / "out", shared={}, asked={"epochs": 6, "lr": [1]}, resume=True).progress.rates
    leave(tmp_path / "out", diverged, val=0.1)
    again = Comparison(made, tmp_path / "out", shared={}, asked={"epochs": 6, "lr": [1]}, resume=True)
    assert {method.policy: rate for (_, method), rate in again.progress.rates.items()} == {"full": 0.01, "head": 0.01}


def test_a_best_rate_at_the_edge_of_the_grid_is_remarked_and_none_at_all_is_a_failure(tmp_path: Path) -> None:
    made = grid()
    run = comparison(tmp_path, made)
    for cell in made.trials(made.workloads[0]):
        if cell.method.policy == "full":
            leave(tmp_path / "out", cell, val=cell.lr)
    remarks: list[str] = []
    rates = run._rates(made.workloads[0])
    run._judge(made.workloads[0], rates, remarks)
    assert {method.policy: rate for method, rate in rates.items()} == {"full": 0.1}
    assert remarks == [
        f"{made.workloads[0].name}: at the largest lr of the grid, 0.1, these did best: full. "
        "A wider grid might do them more justice."
    ]
    assert list(run.failed.values()) == ["no learning rate of the grid could be trained with"]


def test_estimates_come_from_the_methods_own_cells_then_from_its_neighbours(tmp_path: Path) -> None:
    made = grid(rates=[0.1])
    workload, (full, head) = made.workloads[0], made.methods
    progress = Progress(made, tmp_path)
    assert progress.left_s(workload, full) is None
    assert progress.left() == "0 of 4 cells"
    first, second = made.finals(workload, dict.fromkeys(made.methods, 0.1))[:2]
    leave(tmp_path, first, val=0.5, train_s=58.0)  # 6 epochs in 60 s with evaluation
    assert progress.left_s(workload, full) == pytest.approx(60)
    assert progress.left_s(workload, head) == pytest.approx(120)
    progress.ended(progress.cells(workload, full)[1][0], 65.0)  # a process took 5 s to start
    assert progress.left_s(workload, full) == pytest.approx(65)
    leave(tmp_path, second, val=0.5, train_s=10.0)
    assert progress.left_s(workload, head) == pytest.approx(12 + 5)
    half = progress.cells(workload, full)[1][1]
    half.folder.mkdir(parents=True)
    (half.folder / "metrics.jsonl").write_text("{}\n{}\n{}\n")
    assert progress.left_s(workload, full) == pytest.approx(30 + 5)
    assert progress.left() == "2 of 4 cells, about 52s left"
    progress.jobs = 2
    assert progress.left() == "2 of 4 cells, about 26s left"


def test_what_a_cell_does_once_is_not_expected_of_every_epoch(tmp_path: Path) -> None:
    made = grid(rates=[0.1, 0.2], policies=["full"], seeds=[0])
    workload, (full,) = made.workloads[0], made.methods
    for cell in made.trials(workload):  # 2 epochs of 5 s, of which an evaluation is 1 s, after 30 s of pricing
        leave(tmp_path, cell, val=0.5, train_s=38.0)
        path = tmp_path / cell.folder / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"overhead_s": {"profile": 29.0, "flops": 1.0}}))
    progress = Progress(made, tmp_path)
    assert progress.left_s(workload, full) == pytest.approx(30 + 6 * 5)
    begun = progress.cells(workload, full)[1][0].folder
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text("{}\n")
    assert progress.left_s(workload, full) == pytest.approx(5 * 5)


def test_the_live_table_shows_what_is_done_left_and_going_on(tmp_path: Path) -> None:
    from rich.console import Console

    made = grid(rates=[0.1], policies=["full", "elastic"])
    cells = [made.under(tmp_path, c) for c in made.finals(made.workloads[0], dict.fromkeys(made.methods, 0.1))]
    leave(tmp_path, made.finals(made.workloads[0], dict.fromkeys(made.methods, 0.1))[0], val=0.5, test=0.61)
    progress = Progress(made, tmp_path)
    progress.rates = {(made.workloads[0], method): 0.1 for method in made.methods}
    screen = Console(width=140, record=True, file=io.StringIO())
    screen.print(draw(progress, [cells[1]]))
    shown = screen.export_text()
    assert "1 of 4 cells" in shown
    assert "61.0%" in shown
    row = next(line for line in shown.splitlines() if "elastic 0.5x" in line)
    assert "lr 0.1 seed 0: epoch 1/6" in row


def test_a_folder_of_another_comparison_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    made = grid()
    comparison(tmp_path, made)
    with pytest.raises(CheckpointError, match="--resume"):
        comparison(tmp_path, made)
    with pytest.raises(CheckpointError, match="epochs was 6, now 7; batch-size was None, now 4"):
        Comparison(made, tmp_path / "out", shared={}, asked={"epochs": 7, "lr": [2], "batch-size": 4}, resume=True)
    Comparison(made, tmp_path / "out", shared={}, asked={"epochs": 6, "lr": [1, 2]}, resume=True)  # it may grow
    assert yaml.safe_load((tmp_path / "out" / "comparison.yaml").read_text())["lr"] == [1, 2]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        Comparison(made, tmp_path / "mine", shared={}, asked={})


def leave_config(out: Path, cell: Cell) -> None:
    """How a cell was asked for, as `train` keeps it."""
    asked = {"model": cell.workload.model, "data": cell.workload.data, "weights": cell.workload.weights}
    (out / cell.folder / "config.yaml").write_text(yaml.safe_dump({"command": asked}))


def test_finished_cells_are_never_taken_for_those_of_other_images_or_weights(tmp_path: Path) -> None:
    """Two folders of one name in another order, or other weights: the same cells' folders would be found finished."""
    first, second = tmp_path / "a" / "birds", tmp_path / "b" / "birds"
    for folder in (first, second):
        folder.mkdir(parents=True)
    made = grid(data=[str(first), str(second)], rates=[0.1])
    comparison(tmp_path, made)
    for workload in made.workloads:
        cell = made.finals(workload, dict.fromkeys(made.methods, 0.1))[0]
        leave(tmp_path / "out", cell, val=0.5)
        leave_config(tmp_path / "out", cell)
    third = tmp_path / "c" / "birds"
    third.mkdir(parents=True)
    comparison(tmp_path, grid(data=[f"{first}/", str(second), str(third)], rates=[0.1]), resume=True)  # it may grow
    with pytest.raises(CheckpointError, match="would now hold"):
        comparison(tmp_path, grid(data=[str(second), str(first)], rates=[0.1]), resume=True)
    first.rename(tmp_path / "a" / "moved")
    (tmp_path / "d" / "birds").mkdir(parents=True)
    comparison(tmp_path, grid(data=[str(tmp_path / "d" / "birds"), str(second)], rates=[0.1]), resume=True)  # it moved
    (tmp_path / "a" / "moved").rename(first)
    with pytest.raises(CheckpointError, match=r"weights other\.pth"):
        comparison(tmp_path, grid(data=[str(first)], weights=["other.pth"], rates=[0.1]), resume=True)


def test_cells_that_share_the_machine_plan_by_prices_taken_alone(tmp_path: Path) -> None:
    made = grid(rates=[0.1], seeds=[0, 1], policies=["full", "elastic", "adaptive"])
    workload = made.workloads[0]
    alone, shared = comparison(tmp_path, made), comparison(tmp_path, made, resume=True, jobs=2)
    prices = shared._profile(workload)
    prices.parent.mkdir()
    prices.write_text("{}")
    placed = [made.under(tmp_path / "out", cell) for cell in made.finals(workload, dict.fromkeys(made.methods, 0.1))]
    began_alone, began_priced = placed[:2]
    for cell, how in ((began_alone, {"lr": 0.1}), (began_priced, {"lr": 0.1, "profile": str(prices)})):
        cell.folder.mkdir(parents=True)
        (cell.folder / "config.yaml").write_text(yaml.safe_dump({"command": how}))
    for cell in placed:
        assert "--profile" not in alone.command(cell)
        priced = not cell.method.by_clock and cell is not began_alone
        assert ("--profile" in shared.command(cell), "--no-feedback" in shared.command(cell)) == (priced, priced)
    # Whatever is trained by the clock is trained less beside others: it runs alone, and its seconds count.
    by_clock = [cell for cell in placed if cell.method.by_clock]
    assert {cell.method.policy for cell in by_clock} == {"adaptive"}
    running = lambda cell: [_Running(cell, None, None)]  # type: ignore[arg-type]  # noqa: E731
    others = [cell for cell in placed if not cell.method.by_clock]
    assert _may_join(others[0], running(others[1]))
    assert _may_join(by_clock[0], [])
    assert not _may_join(by_clock[0], running(others[0]))
    assert not _may_join(others[0], running(by_clock[0]))


def test_a_cell_that_diverged_is_not_tried_again(tmp_path: Path) -> None:
    made = grid(policies=["full"], rates=[0.01, 0.1], seeds=[0])
    workload = made.workloads[0]
    fine, wild = made.trials(workload)
    leave(tmp_path / "out", fine, val=0.5)
    (final,) = made.finals(workload, {made.methods[0]: 0.01})
    leave(tmp_path / "out", final, val=0.5, test=0.4)
    (tmp_path / "out" / wild.folder).mkdir()
    (tmp_path / "out" / wild.folder / "diverged.json").write_text('{"diverged": "the loss is nan at step 3"}')
    run = comparison(tmp_path, made, resume=True)
    assert run.progress.rates, "every trial has come to something"
    run._start = None  # type: ignore[assignment,method-assign]  # nothing is to be started
    run._run([made.under(tmp_path / "out", cell) for cell in (fine, wild, final)])
    assert run.failed == {wild.name: "the loss is nan at step 3"}
    remarks: list[str] = []
    run._judge(workload, run._rates(workload), remarks)
    assert run.failed == {}
    assert f"{wild.name}: the loss is nan at step 3" in remarks


def test_of_a_finished_cell_stays_what_is_of_use(tmp_path: Path) -> None:
    made = grid(policies=["full"], rates=[0.01, 0.1], seeds=[0])
    cells = [*made.trials(made.workloads[0])[:1], *made.finals(made.workloads[0], {made.methods[0]: 0.01})]

    def left(**options: Any) -> list[bool]:
        run = comparison(tmp_path, made, resume=True, **options)
        for cell in cells:
            (tmp_path / "out" / cell.folder / "checkpoint").mkdir(parents=True, exist_ok=True)
            (tmp_path / "out" / cell.folder / "model.safetensors").write_bytes(b"much")
            run._tidy(made.under(tmp_path / "out", cell))
            assert not (tmp_path / "out" / cell.folder / "checkpoint").exists()
        return [(tmp_path / "out" / cell.folder / "model.safetensors").exists() for cell in cells]

    assert left() == [False, True]
    assert left(keep_weights=False) == [False, False]


@pytest.mark.slow
def test_beside_each_other_cells_train_by_one_profile(images: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    words = command(images, out, "--jobs", 2, "--epochs", 1, "--lr", "0.01,1e30", policy="full,suffix")
    words += ["--budget", "0.9x", "--json"]
    assert cli.main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(list((out / "profiles").iterdir())) == 1
    kept = {(folder / "profile.json").read_text() for folder in (out / "cells").glob("*/*-s0")}
    assert len(kept) == 1, "all plan by the same prices"
    for row in document["cells"]:
        (plan,) = json.loads((Path(row["folder"]) / "result.json").read_text())["plans"]
        assert row["alone_s"] == pytest.approx(row["steps"] * plan["predicted_step_s"])
        assert row["jobs"] == 2
    assert sum("the loss is" in remark for remark in document["remarks"]) == 2
    assert not list((out / "cells").glob("*/*-trial/*.safetensors"))
    began = {path: path.stat().st_mtime_ns for path in (out / "logs").iterdir()}
    assert cli.main([*words, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == document["remarks"]
    assert {path: path.stat().st_mtime_ns for path in (out / "logs").iterdir()} == began, "nothing was run again"


def test_seconds_of_cells_that_ran_beside_others_are_never_passed_off_as_undisturbed(tmp_path: Path) -> None:
    made = grid(rates=[0.1], seeds=[0])
    comparison(tmp_path, made, jobs=4)
    for again in (comparison(tmp_path, made, resume=True), comparison(tmp_path, made, resume=True, jobs=2)):
        assert again.most_jobs == 4
