"""Comparisons of real runs: seeds are one method, controls are named apart, what was not reached is said."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest

from elastictrainer.errors import CheckpointError, ConfigError
from elastictrainer.report import write_comparison, write_plots
from elastictrainer.report.charts import Point, Reference, Series, chart
from elastictrainer.report.comparison_figures import accuracy_curves, accuracy_levels, frontier
from elastictrainer.report.groups import Group, group_runs
from elastictrainer.report.reading import read_run


@pytest.fixture(scope="module")
def groups(runs: list[Path]) -> list[Group]:
    return group_runs([read_run(run) for run in runs], [run.name for run in runs])


def test_runs_that_differ_in_their_seed_are_one_method(groups: list[Group]) -> None:
    sizes = {(group.model, group.name): len(group.runs) for group in groups}
    assert sizes == {
        ("torchvision/resnet50", "full, 4 epochs"): 2,
        ("torchvision/resnet50", "full, 2 epochs"): 1,
        ("torchvision/resnet50", "head"): 1,
        ("torchvision/resnet50", "elastic 0.6x"): 2,
        ("torchvision/resnet50", "elastic 0.8x"): 2,
        ("torchvision/resnet50", "elastic magnitude 0.6x"): 1,
        ("torchvision/resnet50", "random 0.6x"): 1,
        ("torchvision/mobilenet_v2", "full"): 1,
        ("torchvision/mobilenet_v2", "elastic 0.6x"): 1,
    }


def test_a_group_is_the_mean_of_its_runs(groups: list[Group]) -> None:
    group = groups[0]
    made = [json.loads((run.folder / "result.json").read_text()) for run in group.runs]
    spread = group.over(lambda run: run.figure("train_s"))
    assert spread is not None
    seconds = [result["train_s"] for result in made]
    assert (spread.mean, spread.low, spread.high) == (statistics.mean(seconds), min(seconds), max(seconds))
    for epoch, (_, accuracy, number) in enumerate(group.curve("val_accuracy")):
        assert number == epoch + 1
        assert accuracy.mean == pytest.approx(statistics.mean(r["accuracy"]["per_epoch"][epoch] for r in made))


def test_time_to_an_accuracy_is_that_of_the_first_epoch_that_had_it(groups: list[Group]) -> None:
    here = [group for group in groups if group.model == "torchvision/resnet50"]
    levels = accuracy_levels(here)
    best = statistics.mean(max(v for _, v, _ in run.curve("val_accuracy")) for run in here[0].runs)
    assert levels[-1] == pytest.approx(best)
    for group in here:
        for level in levels:
            by_hand = []
            for run in group.runs:
                reached = [at for at, value, _ in run.curve("val_accuracy") if value >= level]
                by_hand += reached[:1]
            assert group.seconds_to(level) == by_hand


def test_runs_that_nothing_tells_apart_keep_their_folders_names(runs: list[Path], tmp_path: Path) -> None:
    copies = []
    for bn in ("frozen", "track"):
        folder = tmp_path / f"with-{bn}"
        folder.mkdir()
        for name in ("metrics.jsonl", "result.json", "plans.jsonl", "profile.json"):
            (folder / name).write_bytes((runs[0] / name).read_bytes())
        (folder / "config.yaml").write_text((runs[0] / "config.yaml").read_text().replace("bn: frozen", f"bn: {bn}"))
        copies.append(folder)
    found = group_runs([read_run(run) for run in copies], [run.name for run in copies])
    assert [group.name for group in found] == ["with-frozen", "with-track"]


def test_a_run_that_has_no_epoch_yet_is_compared_as_far_as_it_goes(runs: list[Path], tmp_path: Path) -> None:
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.yaml").write_bytes((runs[0] / "config.yaml").read_bytes())
    page = write_comparison([young, *runs[2:4]], tmp_path / "c.html").read_text()
    assert "no epoch has been completed" in page


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        write_comparison([], tmp_path / "c.html")
    with pytest.raises(CheckpointError, match="no folder"):
        write_comparison([tmp_path / "nowhere"], tmp_path / "c.html")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no figure"):
        write_plots(tmp_path / "notes.txt", tmp_path / "figures")


def test_every_figure_becomes_a_drawing_with_its_legend(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "c.html")
    drawn = {path.stem: ElementTree.parse(path).getroot() for path in write_plots(page, tmp_path / "figures")}
    words = {e.text for e in drawn["accuracy"].iter("{http://www.w3.org/2000/svg}text")}
    assert {"Accuracy against seconds", "full, 4 epochs", "elastic 0.6x"} <= words


def test_the_error_band_ends_where_the_axes_end() -> None:
    """A profile that is unsure of itself has a band far wider than the figure."""
    points = tuple(Point(x, x * 1.01, "") for x in (35.0, 40.0, 45.0))
    for band in (0.01, 0.35, 3.0):
        drawing = chart(
            [Series("plans", points, line=False)], width=500, height=250, label="", x_title="", y_title="",
            x_format=str, y_format=str, x_zero=False, references=(Reference("", slope=1.0, band=band),),
        )  # fmt: skip
        root = ElementTree.fromstring(drawing)
        (path,) = [e.attrib["d"] for e in root.iter("path") if e.get("class") == "band"]
        corners = [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path.rstrip("Z"))[1:]]
        assert all(0 <= x <= 500 and 0 <= y <= 250 - 38 for x, y in corners)
        (line,) = [e.attrib for e in root.iter("line") if e.get("class") == "reference"]
        assert all(0 <= float(line[key]) <= 250 - 38 for key in ("y1", "y2"))


def test_options_that_differ_are_named_to_the_last_part_with_who_has_them(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "c.html").read_text()
    fold = page[page.index('id="differences"') :]
    rows = re.findall(r"<tr>(.*?)</tr>", fold[: fold.index("</table>")], re.DOTALL)
    cells = [re.findall(r'data-value="(.*?)"', row) for row in rows[1:]]
    short = next(cell for cell in cells if cell[:2] == ["epochs", "2"])
    assert short[2:] == ["1.0", "full-short"]
    assert sum(float(cell[2]) for cell in cells if cell[0] == "epochs") == len(runs)


def test_a_method_has_one_colour_in_all_figures(groups: list[Group]) -> None:
    here = [group for group in groups if group.model == "torchvision/resnet50"]
    shown = {}
    for drawn in (accuracy_curves(here, "a"), frontier(here, "f")):
        for style, name in re.findall(r'<li><i class="(.*?)"></i>(.*?)</li>', drawn):
            shown.setdefault(name.split(",")[0].split(" 0.")[0], []).append(style)
    assert len(set(shown["head"])) == len(set(shown["random"])) == len(set(shown["elastic magnitude"])) == 1


def test_folders_of_images_are_headed_by_their_last_part_where_that_is_enough(tmp_path: Path) -> None:
    def folder(name: str, data: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"model: torchvision/resnet18\ndata: {data}\npolicy: full\n")
        (tmp_path / name / "metrics.jsonl").write_text('{"epoch": 1, "train_s": 2.0, "val_accuracy": 0.5}\n')
        return tmp_path / name

    def headings(*runs: Path) -> list[str]:
        page = write_comparison(runs, tmp_path / "c.html").read_text()
        return re.findall(r"<h1>(.*?)</h1>", page) + re.findall(r'<h2 class="workload">(.*?)</h2>', page)

    birds, other, pets = folder("r1", "/home/a/birds/"), folder("r2", "/home/b/birds"), folder("r3", "/home/a/pets")
    assert headings(birds) == ["torchvision/resnet18 on birds"]
    assert headings(birds, pets)[1:] == ["torchvision/resnet18 on birds", "torchvision/resnet18 on pets"]
    assert headings(birds, other)[1:] == [
        "torchvision/resnet18 on /home/a/birds/",
        "torchvision/resnet18 on /home/b/birds",
    ]
    assert headings(folder("r4", "builtin")) == ["torchvision/resnet18 on builtin"]
