"""A run too short for a profile begins by a sketch, with the head; on a clock that only the test moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adaptive_support import fit, loader, loss_fn, network, profile
from test_resume import Killed, kill_after

from elastictrainer.errors import BudgetError
from elastictrainer.profiling.profile import Profile
from elastictrainer.runtime import adaptive, pricing
from elastictrainer.runtime.features import Keep
from elastictrainer.runtime.keeper import Keeper
from elastictrainer.runtime.optimizers import make_optimizer

STEP_S = 0.01  # of a full step, launch by launch
SKETCH, LEAST_PROFILE = 8, 21  # full steps


class Shop:
    """Says what steps cost, and takes its time for it; a look at the clock costs a tenth of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked = 0.0, list[str]()
        whole = profile()
        self.prices = replace(whole.scaled(STEP_S / whole.full_step_s), context={})
        monkeypatch.setattr(adaptive, "sketch", self.sketch)
        monkeypatch.setattr(pricing, "take_profile", self.profile)
        monkeypatch.setattr(Keeper, "read_s", lambda self, epoch: 0.0)  # it looks at a real clock

    def clock(self) -> float:
        self.now += STEP_S / 10
        return self.now

    def sketch(self, *args: Any, **options: Any) -> Profile:
        self.asked.append("sketch")
        self.now += SKETCH * STEP_S
        return replace(self.prices, context={"launched_step_s": STEP_S, "recordings_s": 0.0})

    def profile(self, *args: Any, limit_s: float | None = None, **options: Any) -> Profile:
        if limit_s is not None and limit_s < LEAST_PROFILE * STEP_S:
            raise BudgetError("it takes too long", least=LEAST_PROFILE * STEP_S)
        self.asked.append("profile")
        self.now += LEAST_PROFILE * STEP_S
        return self.prices

    def fit(self, budget: str, out: Any = None, **options: Any) -> Any:
        options = {"deterministic": False, "profile": None, "val_loader": None, "lr": 0.01, **options}
        return fit(out, budget=budget, clock=self.clock, **options)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(monkeypatch)


def reasons(result: Any) -> list[str]:
    return [plan["reason"] for plan in result.plans]


@pytest.mark.parametrize(
    ("steps", "asked", "stages"),
    [
        (1000, ["sketch", "profile"], ["head", "stage"]),  # 21 steps are under 5%: at once, and the head by it
        (300, ["sketch", "profile"], ["head", "stage"]),  # 7%: the head first
        (60, ["sketch"], ["head"]),  # after the head more than two fifths of what is left: the head to the end
    ],
)
def test_a_deadline_gets_the_prices_that_it_can_pay_for(
    shop: Shop, steps: int, asked: list[str], stages: list[str]
) -> None:
    deadline_s = steps * STEP_S
    result = shop.fit(f"{deadline_s}s")
    assert shop.asked == asked
    assert reasons(result)[: len(stages)] == stages
    assert 0.5 * deadline_s < shop.now < 1.02 * deadline_s + 5 * STEP_S
    profiled_s = SKETCH * STEP_S + (LEAST_PROFILE * STEP_S if "profile" in asked else 0.0)
    assert result.overhead_s["profile"] == pytest.approx(profiled_s, abs=STEP_S)


@pytest.mark.parametrize(("epochs", "asked"), [(500, ["profile"]), (200, ["sketch", "profile"]), (30, ["sketch"])])
def test_a_small_share_does_not_pay_for_a_profile_that_would_take_it(shop: Shop, epochs: int, asked: list[str]) -> None:
    """A tenth of 500 epochs of 12 steps is 600 steps, of 200 epochs 240, and of 30 epochs 36."""
    result = shop.fit("0.1x", epochs=epochs)
    assert shop.asked == asked
    assert reasons(result)[0] == "head"
    assert result.measured_ratio == pytest.approx(0.1, rel=0.1)


def test_replayed_steps_are_short_beside_a_profile() -> None:
    """600 steps pay for 21 that are launched as they are themselves; replayed, they take a quarter of the time."""
    model = network()
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.05)
    run = adaptive.Adaptive(
        model, optimizer, loss_fn, budget="0.1x", epochs=500, loader=loader(), keep=Keep()
    )  # fmt: skip
    run._steering.steps_per_epoch = 12
    assert not run._sketches_first
    run.captured = True
    assert run._sketches_first


@pytest.mark.parametrize("options", [{"memory": "1GiB"}, {"deterministic": True}, {"keep": False}])
def test_where_a_sketch_would_not_do_there_is_none(shop: Shop, options: dict[str, Any]) -> None:
    """A ceiling of memory and repeats bit by bit need the profile, and without kept features there is no cheap head."""
    shop.fit("3s", **options)
    assert shop.asked == ["profile"]


def test_where_the_head_cannot_be_trained_on_features_the_profile_comes_at_once(shop: Shop) -> None:
    result = shop.fit("3s", keep_bytes=10)
    assert shop.asked == ["sketch", "profile"]
    assert "would pass the limit" in result.features["obstacle"]
    assert next(plan["reason"] for plan in result.plans if plan["steps"]) != "head"


def test_nothing_is_promised_below_the_sketch_itself(shop: Shop) -> None:
    with pytest.raises(BudgetError, match=r"^budget 50ms leaves no time to train: .*; try \d+s$") as caught:
        shop.fit("0.05s")
    assert caught.value.least is not None
    shop.now = 0.0
    assert shop.fit(f"{caught.value.least}s").steps > 0


def test_a_sketch_is_not_left_behind_as_a_profile_and_says_what_it_is(shop: Shop, tmp_path: Path) -> None:
    result = shop.fit("0.6s", tmp_path / "run")
    assert not (tmp_path / "run" / "profile.json").exists()
    assert (tmp_path / "run" / "report.html").exists()
    assert result.plans[0]["steps"] > 0


def test_a_run_that_began_by_a_sketch_goes_on_after_a_kill(shop: Shop, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            shop.fit("3s", tmp_path / "run", checkpoint_every=0.0)
    assert shop.asked == ["sketch"]
    result = shop.fit("3s", tmp_path / "run", resume=True, checkpoint_every=0.0)
    assert shop.asked == ["sketch", "profile"]
    assert reasons(result)[:2] == ["head", "stage"]


def test_the_real_thing(tmp_path: Path) -> None:
    """With real clocks and prices: by a sketch, on a machine however fast."""
    torch.manual_seed(0)
    result = fit(tmp_path / "run", budget="0.1x", deterministic=False, profile=None, epochs=40)
    assert result.plans[0]["reason"] == "head"
    assert result.profile_error["p95"] == 1.0
    assert result.features["hits"] > 0
