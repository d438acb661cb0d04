"""`elastictrainer report` from the outside: one run, several, figures, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from loop_support import batches, chain_profile, cross_entropy, small_net

from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import make_optimizer

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for policy in ("full", "head"):
        net = small_net()
        made.append(tmp_path_factory.mktemp("runs") / policy)
        fit(
            net, make_optimizer("sgd", net.parameters(), lr=0.05), cross_entropy, batches(4), epochs=2, policy=policy,
            profile=chain_profile(net), out=made[-1], progress=False, val_loader=batches(2, seed=1),
        )  # fmt: skip
    return made


def test_a_run_leaves_its_report_and_the_verb_makes_it_again(main: Main, runs: list[Path]) -> None:
    page = runs[0] / "report.html"
    first = page.read_text()
    page.unlink()
    code, printed, _ = main("report", runs[0])
    assert code == 0
    assert str(page) in printed
    assert page.read_text() == first


def test_several_runs_need_a_place_of_their_own(main: Main, runs: list[Path], tmp_path: Path) -> None:
    code, _, complaint = main("report", *runs)
    assert code == 2
    assert "--out" in complaint
    code, printed, _ = main("report", *runs, "--out", tmp_path / "both.html", "--plots", tmp_path / "plots", "--json")
    assert code == 0
    document = json.loads(printed)
    assert Path(document["report"]).read_text().startswith("<!doctype html>")
    assert {Path(path).name for path in document["figures"]} >= {"accuracy.svg", "frontier.svg", "memory.svg"}


def test_png_without_a_browser_says_what_to_do(
    main: Main, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    code, _, complaint = main("report", runs[0], "--plots", tmp_path / "plots", "--png")
    assert code == 2
    assert "Chromium" in complaint
    assert complaint.count("\n") == 1
    assert main("report", runs[0], "--png")[0] == 2


def test_a_folder_that_is_no_run_is_one_line(main: Main, tmp_path: Path) -> None:
    code, _, complaint = main("report", tmp_path)
    assert code == 1
    assert "no run folder" in complaint
    assert complaint.count("\n") == 1


def test_refusals_are_one_line(main: Main, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    for arguments, code, said in (
        ([tmp_path / "none"], 1, "is no folder"),
        ([runs[0], "--out", tmp_path / "notes.txt"], 2, "not overwritten"),
        ([], 2, "'runs'"),
    ):
        found, out, err = main("report", *arguments)
        assert (found, out) == (code, "")
        assert said in err
        assert err.count("\n") == 1
    assert (tmp_path / "notes.txt").read_text() == "keep me"
