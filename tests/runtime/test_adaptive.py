"""The budget as the run's: kept on a clock that the test holds, on kept features, across kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adaptive_support import fit, loader, loss_fn, network, profile
from torch import Tensor, nn

import elastictrainer as et
from elastictrainer.errors import BudgetError
from elastictrainer.runtime.keeper import Keeper
from elastictrainer.runtime.run import Run


class Ticking:
    """A clock on which every look costs a millisecond: steps, groups of features and evaluations all take time."""

    def __init__(self, tick_s: float = 1e-3) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


# -- the budget --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.2, 0.5, 1.0])
def test_a_share_is_the_runs_and_is_kept(budget: float) -> None:
    result = fit(budget=budget)
    whole_s = 6 * 12 * profile().full_step_s
    assert result.predicted_ratio * whole_s >= budget * whole_s - 2 * profile().full_step_s
    assert result.predicted_ratio * whole_s <= budget * whole_s + profile().full_step_s
    # Where a probe would take more than a tenth of what is left, the head trains on.
    assert [plan["reason"] for plan in result.plans][:2] == (["head", "stage"] if budget > 0.2 else ["head"])
    assert result.features["hits"] > 0


def test_below_the_forward_floor_there_is_something_to_be_had() -> None:
    """The faithful policy refuses what the kept features make possible."""
    floor = profile().floor_s / profile().full_step_s
    with pytest.raises(BudgetError):
        et.select(profile(), dict.fromkeys(profile().names, 1.0), budget=0.5 * floor)
    assert fit(budget=0.5 * floor).steps > 0


def test_it_learns() -> None:
    model = network()
    result = fit(model=model, budget="1x", epochs=12, lr=0.1)
    assert result.accuracy["final"] > 0.6
    assert all(p.requires_grad for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("deadline_s", [3.0, 10.0])
def test_a_deadline_holds_for_everything(tmp_path: Path, deadline_s: float) -> None:
    clock = Ticking()
    began = clock.now
    result = fit(
        tmp_path / "run", budget=f"{deadline_s}s", deterministic=False, clock=clock,
        test_loader=loader(24, seed=2, training=False),
    )  # fmt: skip
    assert clock.now - began <= 1.02 * deadline_s
    assert clock.now - began >= 0.5 * deadline_s
    assert result.accuracy["of"] == "test"
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_too_little_time_says_how_much_would_do() -> None:
    clock = Ticking()
    with pytest.raises(BudgetError, match="leaves no time to train") as caught:
        fit(budget="0.02s", deterministic=False, clock=clock, profile=None)
    assert caught.value.least is not None
    assert caught.value.least > 0.02


def test_a_loader_of_another_kind_is_trained_on_without_keeping() -> None:
    batches = [tuple(batch[:2]) for batch in loader()]
    result = fit(budget="0.5x", data=batches)
    assert result.features is None
    assert result.plans[0]["reason"] == "stage"
    whole_s = 6 * 12 * profile().full_step_s
    assert result.predicted_ratio <= 0.5 + profile().full_step_s / whole_s


def test_moving_statistics_forbid_keeping() -> None:
    result = fit(budget="0.5x", bn="track", profile=None)
    assert result.features is None


def test_what_would_take_too_much_room_is_not_kept_and_the_reason_is_said() -> None:
    result = fit(budget="0.8x", keep_bytes=10)
    assert result.features["hits"] == 0
    assert "would pass the limit of 10B" in result.features["obstacle"]


def test_features_beyond_memory_go_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Path] = []
    real = Keeper.fill

    def fill(self: Keeper, *args: Any, **options: Any) -> int:
        files.extend((tmp_path / "run" / "features").glob("*.bin"))
        return real(self, *args, **options)

    monkeypatch.setattr(Keeper, "fill", fill)
    on_disk = fit(tmp_path / "run", budget="0.3x", keep_bytes=10, keep_disk="1GiB")
    assert files
    assert not list((tmp_path / "run" / "features").glob("*.bin"))  # gone when the run is over
    in_memory = fit(tmp_path / "other", budget="0.3x")
    assert on_disk.loss == in_memory.loss


# -- nothing lost ------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL inside the process: nothing handles it."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_bytes": 10, "keep_disk": "1GiB"},
        {"optimizer": "adamw", "lr": 0.01},
        {"gradient_from": "held_out"},
    ],
)
def test_killed_every_few_steps_it_ends_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Through the head's stage, its features, the choice and the stage after it, with dropout above the cut."""
    options = {"budget": "0.5x", "checkpoint_every": 0.0, "epochs": 4, **options}
    whole, again = network(dropout=0.2), network(dropout=0.2)
    fit(tmp_path / "whole", model=whole, **options)
    real, left = Run.stepped, [0]

    def stepped(self: Run, loss: Tensor) -> None:
        real(self, loss)
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    sessions = 0
    while not (tmp_path / "run" / "result.json").exists():
        with monkeypatch.context() as patch:
            patch.setattr(Run, "stepped", stepped)
            left[0] = 3 + sessions % 5
            again = network(dropout=0.2)
            try:
                fit(tmp_path / "run", model=again, resume=True, **options)
            except Killed:
                sessions += 1
    assert sessions > 3
    kept = [model.state_dict() for model in (whole, again)]
    assert all(torch.equal(a, b) for a, b in zip(kept[0].values(), kept[1].values()))
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "run" / "plans.jsonl").read_text().splitlines()]
    assert reasons == [
        json.loads(line)["reason"] for line in (tmp_path / "whole" / "plans.jsonl").read_text().splitlines()
    ]


# -- the keeper --------------------------------------------------------------------------------------------------------


def stood(model: nn.Module, *trained: str, **options: Any) -> tuple[Keeper, et.runtime.apply.Applied]:
    data = loader()
    names = [name for name, _ in model.named_parameters() if name.startswith(trained)]
    applied = et.apply(model.train(), names)
    keeper = Keeper(model, loss_fn, data, **options)
    keeper.stand(next(iter(data)))
    return keeper, applied


@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-5), ("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 3e-2)])
def test_a_kept_step_is_the_step_on_the_same_views(dtype: Any, off: float) -> None:
    model = network()
    keeper, _ = stood(model, "4.", "8.", dtype=dtype)
    assert keeper.active, keeper.obstacle
    for epoch in range(3):
        keeper.fill(epoch)
        order = keeper.loader.order(epoch)
        seen = list(keeper.loader.look(order, epoch, views=2))
        for batch, with_pixels in zip(keeper.batches(order, epoch), seen):
            assert torch.equal(batch.labels, with_pixels.labels)
            assert torch.equal(batch.views, with_pixels.views)
            kept, real = keeper.loss_fn(model, batch), loss_fn(model, with_pixels)
            assert kept.item() == pytest.approx(real.item(), abs=off * 3, rel=off)
    assert keeper.kept is not None
    assert keeper.kept.misses == 2 * 48  # two views of each, and never again


def test_only_the_batch_that_was_laid_out_is_stood_in_for() -> None:
    """A validation batch has indices, too, and they mean other images."""
    model = network()
    keeper, _ = stood(model, "8.")
    keeper.fill(0)
    other = next(iter(loader(16, seed=1, training=False)))
    for _ in keeper.batches(keeper.loader.order(0), 0):
        assert torch.equal(keeper.loss_fn(model, other), loss_fn(model, other))
        break


def test_a_replan_invalidates_exactly_what_changed() -> None:
    model = network()
    keeper, applied = stood(model, "8.")
    keeper.fill(0)
    first = keeper.kept
    with torch.no_grad():
        model[8].weight.add_(1.0)  # above the cut
    keeper.stand(next(iter(keeper.loader)))
    assert keeper.kept is first
    with torch.no_grad():
        model[3].conv1.weight.add_(0.1)  # below it
    keeper.stand(next(iter(keeper.loader)))
    assert keeper.kept is not first
    assert keeper.kept is not None
    assert keeper.kept.filled == 0
    applied.undo()


def test_rows_do_not_depend_on_what_else_was_missing() -> None:
    """Bit for bit, so that a resumed run that fills again goes on exactly."""
    keeper, _ = stood(network(), "8.")
    keeper.fill(0, first=0, groups=2)
    keeper.fill(0)
    other, _ = stood(network(), "8.")
    other.fill(0)
    order = keeper.loader.order(0)
    codes = keeper.loader.codes(order, 0, views=2)
    assert keeper.kept is not None
    assert other.kept is not None
    assert torch.equal(keeper.kept.get(order, codes)[0], other.kept.get(order, codes)[0])


def test_some_groups_are_a_fair_sample() -> None:
    keeper, _ = stood(network(), "8.")
    keeper.fill(0, groups=1)
    order = np.arange(48)
    there = keeper.kept_of(order, 0)
    assert there.sum() == keeper.group_size
    assert len(np.flatnonzero(there)) != np.ptp(np.flatnonzero(there)) + 1  # not the first ones in a row


def test_where_reading_back_is_slower_than_computing_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "read_s", lambda self, epoch: 1.0)  # a disk that has to be woken
    result = fit(budget="0.5x", deterministic=False, clock=Ticking(1e-5))
    assert result.features["hits"] == 0
    assert "takes longer than computing them" in result.features["obstacle"]
    assert result.steps > 0


def test_reading_is_timed_on_what_is_kept() -> None:
    keeper, _ = stood(network(), "8.")
    keeper.fill(0, groups=1)
    assert keeper.kept is not None
    hits = keeper.kept.hits
    assert 0 < keeper.read_s(0) < 1
    assert keeper.kept.hits == hits
    keeper.give_up("tired of it")
    assert not keeper.active
    assert keeper.obstacle == "tired of it"


def test_a_prefix_in_bf16_is_as_far_off_as_bf16_is() -> None:
    model = network()
    losses = {}
    for precision in (None, "bf16"):
        keeper, applied = stood(model, "8.", precision=precision, dtype="float32")
        assert keeper.active, keeper.obstacle
        keeper.fill(0)
        batch = next(keeper.batches(keeper.loader.order(0), 0))
        losses[precision] = keeper.loss_fn(model, batch).item()
        applied.undo()
    assert losses["bf16"] != losses[None]
    assert losses["bf16"] == pytest.approx(losses[None], rel=0.05)
    assert fit(budget="0.5x", keep_with="bf16").features["hits"] > 0


@pytest.mark.parametrize("source", ["other", "held_out"])
@pytest.mark.parametrize("ours", [True, False])
def test_the_gradient_may_come_from_elsewhere(tmp_path: Path, source: Any, ours: bool) -> None:
    data = loader() if ours else [tuple(batch[:2]) for batch in loader()]
    plain, other = (fit(tmp_path / of, budget="0.5x", data=data, gradient_from=of) for of in ("same", source))
    assert other.config["gradient_from"] == source
    assert other.predicted_ratio == pytest.approx(plain.predicted_ratio, abs=0.05)
    scores = []
    for run in ("same", source):
        plans = [json.loads(line) for line in (tmp_path / run / "plans.jsonl").read_text().splitlines()]
        scores.append(next(plan["scores"] for plan in plans if plan["reason"] == "stage"))
    assert scores[0] != scores[1]


# -- little time -------------------------------------------------------------------------------------------------------


def test_a_refusal_speaks_of_the_run_and_not_of_a_step() -> None:
    """A profile that would not fit the deadline is given up; what would do is a deadline, not that times the steps."""
    with pytest.raises(BudgetError, match=r"^budget 1ms leaves no time to train: .*; try \d+s$") as caught:
        fit(budget="0.001s", deterministic=False, profile=None)
    assert caught.value.least is not None
    assert caught.value.least >= 1


def test_where_nothing_else_can_be_had_any_more_the_head_trains_on() -> None:
    result = fit(budget=0.05)
    assert [plan["reason"] for plan in result.plans] == ["head"]
    whole_s = 6 * 12 * profile().full_step_s
    assert result.predicted_ratio * whole_s >= 0.05 * whole_s - profile().full_step_s  # to the end of the time
