"""`elastictrainer report` on hand-made run folders; what stands on the page is for the tests of the report itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        (folder / "config.yaml").write_text("model: small\npolicy: full\n")
        lines = [{"epoch": n, "step": 4 * n, "train_s": float(n), "val_accuracy": n / 10} for n in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folders


def test_a_run_gets_its_page_in_its_folder(main: Run, runs: list[Path]) -> None:
    assert main("report", runs[0]) == (0, f"report: {runs[0] / 'report.html'}\n", "")
    assert (runs[0] / "report.html").read_text().startswith("<!doctype html>")
    assert not (runs[1] / "report.html").exists()


def test_several_runs_get_one_page_where_it_is_asked_for(main: Run, runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "pages" / "both.html"
    code, printed, _ = main("report", *runs, "--out", page, "--json")
    assert code == 0
    assert json.loads(printed)["report"] == str(page)
    assert all(run.name in page.read_text() for run in runs)
    assert main("report", *runs, "--out", page)[0] == 0  # an older page is replaced


def test_refusals_are_one_line(main: Run, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    for arguments, code, said in (
        (runs, 2, "--out is needed"),
        ([tmp_path / "none"], 1, "is no folder"),
        ([runs[0], "--out", tmp_path / "notes.txt"], 2, "not overwritten"),
        ([], 2, "'runs'"),
    ):
        found, out, err = main("report", *arguments)
        assert (found, out) == (code, "")
        assert said in err
        assert err.count("\n") == 1
    assert (tmp_path / "notes.txt").read_text() == "keep me"
