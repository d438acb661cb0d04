"""The few-shot suite stops in time, goes on where it stopped, on another machine too, and makes nothing twice."""

from __future__ import annotations

import argparse
import json
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from elastictrainer.importance.potential import fisher_potential
from elastictrainer.profiling.layers import price_backward
from elastictrainer.selection import select_channels
from elastictrainer.selection.channels import SHARES, ChannelChoice

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
tinytrain = pytest.importorskip("tinytrain")
tiny_costs = pytest.importorskip("tiny_costs")
tiny_inputs = pytest.importorskip("tiny_inputs")


def test_notes_are_kept_line_by_line_and_only_for_the_same_settings(tmp_path: Path) -> None:
    path, later = tmp_path / "notes.jsonl", time.monotonic() + 60
    notes = tinytrain.Notes(path, {"steps": 2}, later)
    notes.add({"kind": "rate", "method": "full", "rate": 0.1})
    with path.open("a") as file:
        file.write('{"kind": "half of a li')  # as a kill leaves it
    again = tinytrain.Notes(path, {"steps": 2}, later)
    assert again.lines == [{"kind": "rate", "method": "full", "rate": 0.1}]
    assert again.find(method="full") == again.lines[0]
    assert again.find(method="last") is None
    before = path.read_text()
    assert "half" in before  # to read is not to write: others may be reading too
    again.add({"kind": "peak"})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"steps": 2}, *again.lines]
    assert tinytrain.Notes(path, {"steps": 3}, later).lines == []
    late = tinytrain.Notes(path, {"steps": 3}, time.monotonic() - 1)
    with pytest.raises(tinytrain.OutOfTime):
        late.add({"kind": "rate"})
    assert tinytrain.Notes(path, {"steps": 3}, later).lines == [{"kind": "rate"}]  # written before it stops


def test_a_suite_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells alone: what a cell does is stood in for."""
    ran: list[tuple[str, str]] = []

    def work_on(cell: tuple[str, bool, int, str], args: argparse.Namespace) -> None:
        notes = tinytrain.notes_of(cell, args)
        for episode in range(2):
            if notes.find(episode=episode) is None:
                ran.append((cell[0], cell[3]))
                notes.add({"episode": episode, "method": "full"})

    monkeypatch.setattr(tinytrain, "work_on", work_on)
    monkeypatch.setattr(tinytrain, "_write_table", lambda cells, args: None)
    words = "source varied head ways shots steps optimizer lrs memory compute image_size seed device"
    counts = "tune_episodes search_episodes search_steps"
    told = dict.fromkeys((*words.split(), *counts.split())) | {"methods": "full,sparse_update", "episodes": 2}

    def run(work: str, until: float) -> None:
        tinytrain.episodes_suite(argparse.Namespace(
            **told, models="a,b", meta=None, batch_sizes="1", domains="x,y", jobs=1, work=tmp_path / work,
            state=tmp_path / "state.tar.gz", until=until,
        ))  # fmt: skip

    run("one", time.monotonic() - 1)
    assert ran == [("a", "tune full")]
    run("two", time.monotonic() + 60)  # a bare machine: there is the archive alone
    assert len(ran) == 2 * 2 * (2 + 2)  # tasks, networks, methods to tune and domains
    run("two", time.monotonic() + 60)
    assert len(ran) == 2 * 2 * (2 + 2)  # tasks, networks, methods to tune and domains


def test_greedy_is_judged_by_the_criterion_of_the_choice() -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(6, 8)
    prices = price_backward(model, square, x)
    potential = fisher_potential(model, square, [x])
    terms = frozenset(("potential", "params", "macs"))
    choice = ChannelChoice(prices, potential, terms, "fisher", None, 0, (), 900, None)
    plan = select_channels(prices, potential, memory=900)
    taken = max((choice.greedy(share) for share in SHARES), key=choice.worth)
    assert tiny_costs.worth_of(plan, potential) == pytest.approx(choice.worth(taken))
    found = [tiny_costs.greedy_and_best(prices, potential, memory=m, compute="60%") for m in ("900", "1500", "1")]
    assert found[2] is None  # nothing fits a byte
    assert all(0 < row["worth"] <= 1 + 1e-9 for row in found[:2])
    told = tiny_costs.together(found)
    assert told["solved"] == 2
    assert told["worth_least"] <= told["worth"]
    assert tiny_costs.together([None])["solved"] == 0
    assert tiny_costs.ceilings_of("1MiB:15%,2MiB:none") == [("1MiB", "15%"), ("2MiB", None)]


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum(1).mean()


def test_what_is_done_starts_no_process(tmp_path: Path) -> None:
    words = "source varied head ways shots steps optimizer memory compute image_size seed device tune_episodes "
    told = dict.fromkeys((words + "search_episodes search_steps").split())
    later = time.monotonic() + 60
    args = argparse.Namespace(
        **told, lrs="1e-3", methods="none,full,elastic", episodes=2, work=tmp_path, until=later
    )  # fmt: skip
    tune, domain = ("a", False, 1, "tune full"), ("a", False, 1, "x")
    assert not tinytrain.is_done(tune, args)
    tinytrain.notes_of(tune, args).add({"kind": "rate", "rate": 0.1})
    assert tinytrain.is_done(tune, args)
    notes = tinytrain.notes_of(domain, args)
    for line in ({"episode": i, "method": m} for i in range(2) for m in ("none", "full")):
        assert not tinytrain.is_done(domain, args)
        notes.add(line)
    assert not tinytrain.is_done(domain, args)  # elastic may still be tuned
    tinytrain.notes_of(("a", False, 1, "tune elastic"), args).add({"kind": "rate", "rate": None})
    assert tinytrain.is_done(domain, args)  # nothing of it fits the ceilings


def test_what_is_packed_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_inputs, "PACKAGES", ("yaml",))
    rng = np.random.default_rng(0)
    for kind in ("a", "b", "c10", "c9"):
        (tmp_path / "data" / "fewshot" / "few" / kind).mkdir(parents=True)
        for k in range(3):
            pixels = np.full((20, 30, 3), rng.integers(0, 255, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / "fewshot" / "few" / kind / f"{k}.png")
    name, there = "shufflenet_v2_x0_5", tmp_path / "there"
    args = argparse.Namespace(
        models=name, meta=None, source="few", domains="", per_class=2, data=tmp_path / "data", weights=None,
        image_size=16, device="cpu", seed=0, out=tmp_path / "carry" / "tiny.zip",
    )  # fmt: skip
    tiny_inputs.pack_suite(args)
    zipfile.ZipFile(args.out).extractall(there)
    assert (there / "lib" / "yaml" / "__init__.py").exists()
    moved = argparse.Namespace(**{**vars(args), "data": there / "data", "weights": there / "weights"})
    here, other = tiny_inputs.network(name, args, meta=False), tiny_inputs.network(name, moved, meta=False)
    assert (other.num_classes, other.normalisation) == (2, here.normalisation)
    for key, tensor in other.model.state_dict().items():
        if key not in other.head:
            whole = here.model.state_dict()[key]
            expected = whole.half().float() if tensor.is_floating_point() and tensor.dim() > 1 else whole
            assert torch.equal(tensor, expected)
    full, few = tiny_inputs.bank_of("few", here, args), tiny_inputs.bank_of("few", other, moved)
    assert few.classes == full.classes
    assert np.bincount(few.labels).tolist() == [2, 2, 2, 2]
    kept = tiny_inputs.some_of_each(full.labels, 2)
    apart = (few.pixels(np.arange(8)).int() - full.pixels(np.asarray(kept)).int()).abs()
    assert apart.max() <= 12  # one colour each: what the encoder changes is little
