"""Nothing is lost: killed any number of times, a deterministic run ends with bit-equal weights."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_support import batches, cross_entropy, small_net
from resume_worker import EPOCHS, train
from safetensors.torch import load_file
from torch import Tensor, nn

from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime.loop import fit
from elastictrainer.runtime.optimizers import OPTIMIZERS, make_optimizer
from elastictrainer.runtime.run import Run
from elastictrainer.runtime.settings import _name

STEPS = EPOCHS * 15


class Killed(BaseException):
    """Stands for SIGKILL inside the process: nothing handles it."""


def kill_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Be killed right after so many more batches have gone backward, before anything else happens."""
    real, left = Run.stepped, [steps]

    def stepped(self: Run, loss: Tensor) -> None:
        real(self, loss)
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    monkeypatch.setattr(Run, "stepped", stepped)


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values())
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("resting", ["keep", "drop"])
def test_killed_after_every_single_step(tmp_path: Path, optimizer: str, resting: str) -> None:
    """Each session lives for a few batches only, so the run is killed dozens of times, at every place there is."""
    whole = train(None, optimizer, resting)
    again = train(None, optimizer, resting)
    assert same(whole, again)  # the yardstick itself must be exact
    sessions = 0
    while not (tmp_path / "run" / "result.json").exists():
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, 2 + sessions % 4)  # two batches make a step, so that each session gets on
            try:
                model = train(str(tmp_path / "run"), optimizer, resting)
            except Killed:
                sessions += 1
    assert sessions >= STEPS // 6
    assert same(whole, model)
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in whole.state_dict().items())


def test_the_plans_did_change_while_it_was_killed(tmp_path: Path) -> None:
    train(str(tmp_path / "run"), "sgd")
    plans = [json.loads(line)["id"] for line in (tmp_path / "run" / "plans.jsonl").read_text().splitlines()]
    assert len(plans) >= 8
    assert len(set(plans)) > 1


def test_logs_are_as_of_an_uninterrupted_run(tmp_path: Path) -> None:
    train(str(tmp_path / "whole"), "adam")
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 23)
        with pytest.raises(Killed):
            train(str(tmp_path / "killed"), "adam")
    train(str(tmp_path / "killed"), "adam")
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("whole", "killed")]
    assert results[0]["flops"] == results[1]["flops"]
    assert [p["steps"] for p in results[0]["plans"]] == [p["steps"] for p in results[1]["plans"]]
    for name in ("metrics.jsonl", "plans.jsonl"):
        whole, killed = (
            [json.loads(line) for line in (tmp_path / run / name).read_text().splitlines()]
            for run in ("whole", "killed")
        )
        keys = ("epoch", "step", "loss", "plan", "id", "scores", "reason")
        assert [{k: line.get(k) for k in keys} for line in killed] == [{k: line.get(k) for k in keys} for line in whole]


def test_killed_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    def dies(model: nn.Module, batch: Any) -> Tensor:
        raise Killed

    with pytest.raises(Killed):
        train(str(tmp_path / "run"), "sgd", loss_fn=dies)
    assert same(train(str(tmp_path / "run"), "sgd"), train(None, "sgd"))


def test_deterministic_without_a_profile_takes_one_once_and_keeps_it(tmp_path: Path) -> None:
    """Decisions rest on what was timed before the first step: taken once, kept in the folder, never taken again."""
    folder = tmp_path / "run"
    kept: set[bytes] = set()
    sessions = 0
    while not (folder / "result.json").exists():
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, 3 + sessions % 5)
            with contextlib.suppress(Killed):
                model = train_unpriced(folder)
        kept.add((folder / "profile.json").read_bytes())
        sessions += 1
    assert sessions >= 5
    assert len(kept) == 1
    plans = [json.loads(line) for line in (folder / "plans.jsonl").read_text().splitlines()]
    assert {plan["reason"] for plan in plans} == {"first", "interval"}
    assert same(train_unpriced(None, profile=folder / "profile.json"), model)


def test_killed_before_the_first_checkpoint_other_threads_may_go_on(tmp_path: Path) -> None:
    """The profile in the folder is of one thread; no plan that rested on it has survived."""

    def attempt() -> None:
        model = small_net()
        fit(
            model, make_optimizer("sgd", model.parameters(), lr=0.01), cross_entropy, batches(8), epochs=1, budget="1x",
            policy="full", out=tmp_path / "run", resume=True, progress=False,
        )  # fmt: skip

    threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, 3)
            with pytest.raises(Killed):
                attempt()
        assert (tmp_path / "run" / "profile.json").exists()
        torch.set_num_threads(threads + 1)
        attempt()
    finally:
        torch.set_num_threads(threads)
    assert Profile.load(tmp_path / "run" / "profile.json").context["threads"] == threads + 1


def train_unpriced(folder: Path | None, *, profile: Path | None = None) -> nn.Module:
    """Wide enough layers that passing gradients and making them take time to speak of."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Dropout(0.1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(512, 3))
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(64, 512, generator=generator), torch.arange(64) % 3) for _ in range(8)]
    fit(
        model, make_optimizer("adam", model.parameters(), lr=1e-3), cross_entropy, data, epochs=4, budget="0.9x",
        interval="5steps", policy="random", probe_batches=2, deterministic=True, out=folder, resume=folder is not None,
        profile=profile, checkpoint_every=0.0, progress=False,
    )  # fmt: skip
    return model


def test_the_newest_checkpoint_damaged_the_one_before_serves(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 20)
        with pytest.raises(Killed):
            train(str(tmp_path / "run"), "adamw")
    newest = sorted((tmp_path / "run" / "checkpoint").glob("save-*"))[-1]
    (newest / "tensors.safetensors").write_bytes(b"not what was written")
    assert same(train(str(tmp_path / "run"), "adamw"), train(None, "adamw"))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is a POSIX signal")
def test_a_real_process_killed_at_random_moments(tmp_path: Path) -> None:
    """kill -9 from outside, at moments drawn by lot: in a step, in a probe, in the writing of a checkpoint."""
    folder, optimizer = tmp_path / "run", "adamw"
    worker = [sys.executable, str(Path(__file__).with_name("resume_worker.py")), str(folder), optimizer, "keep"]
    lot = random.Random(optimizer)
    kills = 0
    deadline = time.monotonic() + 180
    while not (folder / "result.json").exists():
        assert time.monotonic() < deadline
        process = subprocess.Popen(worker, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before = _newest(folder)
        patience = time.monotonic() + 30
        if kills < 2:
            # Let it get on a little first: what is killed while it imports torch shows nothing.
            while process.poll() is None and _newest(folder) == before and time.monotonic() < patience:
                time.sleep(0.002)
            time.sleep(lot.random() * 0.15)
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    assert kills >= 1
    whole = train(None, optimizer)
    kept = load_file(folder / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in whole.state_dict().items())


def _newest(folder: Path) -> str:
    return max((path.name for path in (folder / "checkpoint").glob("save-????????")), default="")


class Metric:
    def __call__(self, model: nn.Module, batch: object) -> tuple[float, int]:
        return 1.0, 1


def test_what_was_given_goes_by_names_that_another_process_gives_it_too() -> None:
    def metric(scale: float, model: nn.Module, batch: object) -> tuple[float, int]:
        return scale, 1

    told = [_name(given) for given in (functools.partial(functools.partial(metric, 2.0)), Metric(), metric, "head")]
    assert [name.rpartition(".")[2] for name in told] == ["metric", "Metric", "metric", "head"]
    assert not any("0x" in name for name in told)
