"""The paper's comparison in pieces: what was finished stays in the tables, whatever is asked for next."""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import common
import paper
import paper_page


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    for split in ("train", "val", "test"):
        for label in ("a", "b"):
            folder = tmp_path / "sets" / "birds" / split / label
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(folder / "0.png")
    return Namespace(
        runs=tmp_path / "runs", out=tmp_path / "out", data=tmp_path / "sets", sets="birds", models="resnet18",
        weights=None, rates="0.01", seeds=1, epochs=12, image_size=32, batch_size=2, device="cpu", threads=1, jobs=1,
        clip=None, tag="test",
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_rows_of_other_networks_and_images_stay(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    old = [{"model": "m", "data": "birds", "accuracy": 0.5}, {"model": "m", "data": "pets", "accuracy": 0.6}]
    common.write_csv(tmp_path / "kept" / "t.csv", old)
    new = [{"model": "m", "data": "pets", "accuracy": 0.7}, {"model": "m", "data": "pets", "accuracy": 0.8}]
    path = tmp_path / "t.csv"
    for _ in range(2):  # from the kept table at first, and from its own thereafter
        common.write_csv(path, common.with_others(path, new, ["model", "data"]))
        assert [(row["data"], row["accuracy"]) for row in rows(path)] == [
            ("birds", "0.5"), ("pets", "0.7"), ("pets", "0.8"),
        ]  # fmt: skip


@pytest.mark.parametrize("suite", list(paper.GRIDS))
def test_a_suite_that_is_stopped_leaves_its_table_and_never_another_suites(
    suite: str, args: Namespace, monkeypatch: Any
) -> None:
    """`run` is stopped before its first cell has ended, in a folder that holds another suite's table."""
    left = args.runs / "compared" / "results.csv"
    left.parent.mkdir(parents=True)
    common.write_csv(left, [{"model": "of", "data": "another/suite", "commit": "abc"}])

    def stop(self: Any, cells: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(paper.Comparison, "_run", stop)
    with pytest.raises(KeyboardInterrupt):
        paper.compare_suite(suite, args)
    assert rows(args.out / f"paper_{suite}_test.csv") == []


def test_what_several_suites_hold_is_one_cell_and_the_page_expects_all_of_them(
    args: Namespace, monkeypatch: Any
) -> None:
    asked: dict[Path, str] = {}
    monkeypatch.setattr(
        paper.Comparison, "_run", lambda self, cells: asked.update({cell.folder: cell.method.name for cell in cells})
    )
    for suite in paper.GRIDS:
        paper.compare_suite(suite, args)
    assert sorted(asked.values()) == sorted(paper_page.expected())
