"""Steps that are recorded once and replayed: the same steps, whatever changes between two of them.

A recorder of this file's own stands in for CUDA graphs: what it "recorded" it runs again, on the tensors that the
recording owns, so that everything but the capture itself is tried here. The capture is tried where there is a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from loop_support import batches, chain_profile, cross_entropy, small_net
from torch import Tensor, nn

import elastictrainer as et
from elastictrainer.profiling import measure
from elastictrainer.profiling.profile import Profile
from elastictrainer.profiling.replays import Replays
from elastictrainer.profiling.steps import Stepper
from elastictrainer.runtime import assembly
from elastictrainer.runtime.capture import CudaRecorder, Uncapturable, brief_collections
from elastictrainer.runtime.engine import KINDS, MANY, WARM, Eager, Replayed
from elastictrainer.runtime.keeper import Keeper
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.runtime.recorded_step import as_recorded, steps_in_a_recording


class Again:
    """Records by remembering the work, and replays by doing it again."""

    def __init__(self, *, hears: str = "", fails: str = "") -> None:
        self.hears, self.fails, self.count = hears, fails, 0

    @contextmanager
    def listening(self) -> Iterator[list[str]]:
        heard: list[str] = []
        yield heard
        heard += [self.hears] if self.hears else []

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.fails:
            raise Uncapturable(self.fails)
        self.count += 1
        return work


def engine(model: nn.Module, optimizer: Any, recorder: Any = None, **options: Any) -> Replayed:
    settings: dict[str, Any] = {
        "inputs": lambda batch: batch, "scaler": torch.amp.GradScaler("cpu", enabled=False), "clip": None,
        "standing": lambda: 0, "allowed": lambda: True,
    }  # fmt: skip
    return Replayed(model, optimizer, cross_entropy, recorder=recorder or Again(), **(settings | options))


def plain(model: nn.Module, optimizer: Any, **options: Any) -> Eager:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    settings: dict[str, Any] = {"inputs": lambda batch: batch, "scaler": scaler, "clip": None}
    return Eager(model, optimizer, cross_entropy, **(settings | options))


def train(steps: Eager, data: list[Any], *, between: Callable[[int], None] = lambda step: None) -> list[float]:
    losses = []
    for index, batch in enumerate(data):
        losses.append(float(steps.backward(batch)))
        assert steps.move()
        between(index)
    return losses


def pair(make: Callable[[nn.Module], Any], **net: Any) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    one, other = small_net(**net), small_net(**net)
    return (one, make(one)), (other, make(other))


def agree(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


def sgd(model: nn.Module) -> Any:
    return make_optimizer("sgd", model.parameters(), lr=0.05, weight_decay=1e-3)


# -- the same steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.1])
def test_replayed_steps_are_the_steps(clip: float | None) -> None:
    (mine, moves), (theirs, others) = pair(sgd)
    steps = engine(mine, moves, clip=clip)
    assert train(steps, batches(12)) == pytest.approx(train(plain(theirs, others, clip=clip), batches(12)), rel=1e-5)
    agree(mine, theirs)
    assert steps.account() == {"recorded": 1, "replayed": 12 - WARM, "obstacle": None}
    assert all(p.grad is None for p in mine.parameters())


def test_a_schedule_goes_on_and_groups_are_never_edited() -> None:
    (mine, moves), (theirs, others) = pair(sgd)
    options = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in moves.param_groups]

    def halve(optimizer: Any) -> Callable[[int], None]:
        def do(_: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

        return do

    train(engine(mine, moves), batches(10), between=halve(moves))
    train(plain(theirs, others), batches(10), between=halve(others))
    agree(mine, theirs)
    assert [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in moves.param_groups] == options
    assert isinstance(moves.param_groups[0]["lr"], float)


def test_a_momentum_that_is_scheduled_makes_the_optimizer_step_apart() -> None:
    (mine, moves), (theirs, others) = pair(sgd)

    def cycle(optimizer: Any) -> Callable[[int], None]:
        def do(step: int) -> None:
            for group in optimizer.param_groups:
                group["momentum"] = 0.9 - 0.02 * step

        return do

    steps = engine(mine, moves)
    train(steps, batches(14), between=cycle(moves))
    train(plain(theirs, others), batches(14), between=cycle(others))
    agree(mine, theirs)
    assert steps.replayed > 14 - 2 * WARM - 2
    assert steps.obstacle is None


def test_another_optimizer_steps_apart() -> None:
    def make(model: nn.Module) -> Any:
        return torch.optim.RMSprop(model.parameters(), lr=0.01)

    (mine, moves), (theirs, others) = pair(make)
    steps = engine(mine, moves)
    train(steps, batches(10))
    train(plain(theirs, others), batches(10))
    agree(mine, theirs)
    assert steps.replayed == 10 - WARM


def test_hooks_of_someone_else_are_called_at_every_step() -> None:
    model = small_net()
    optimizer = sgd(model)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert not steps_in_a_recording(optimizer)
    train(engine(model, optimizer), batches(9))
    assert len(calls) == 9


def test_batches_of_other_sizes_have_recordings_of_their_own() -> None:
    (mine, moves), (theirs, others) = pair(sgd)
    short = batches(6, size=3, seed=5)
    data = [b for k, batch in enumerate(batches(18)) for b in ([batch, short[k // 3]] if k % 3 == 2 else [batch])]
    steps = engine(mine, moves)
    assert train(steps, data) == pytest.approx(train(plain(theirs, others), data), rel=1e-5)
    agree(mine, theirs)
    assert steps.recorded == 2
    assert steps.replayed == len(data) - 2 * WARM


def test_no_more_than_a_few_kinds_are_recorded() -> None:
    model = small_net()
    steps = engine(model, sgd(model))
    for size in range(2, 9):
        train(steps, batches(WARM + 1, size=size))
    assert steps.recorded == KINDS


def test_a_new_plan_is_recorded_anew_and_moves_its_own_tensors() -> None:
    (mine, moves), (theirs, others) = pair(sgd)
    plans = [["11.weight"], ["11.weight", "11.bias", "7.weight"], ["11.weight"]]
    stood = [0]
    steps, eager = engine(mine, moves, standing=lambda: stood[0]), plain(theirs, others)
    for number, plan in enumerate(plans):
        with et.apply(mine, plan, optimizer=moves), et.apply(theirs, plan, optimizer=others):
            stood[0] = number
            before = {name: p.detach().clone() for name, p in mine.named_parameters()}
            train(steps, batches(8, seed=number))
            train(eager, batches(8, seed=number))
            moved = {name for name, p in mine.named_parameters() if not torch.equal(p, before[name])}
            assert moved == set(plan)
    agree(mine, theirs)
    assert steps.recorded == 3


def test_tensors_that_were_moved_in_memory_are_noticed() -> None:
    (mine, moves), (theirs, others) = pair(sgd)

    def shift(step: int) -> None:
        if step == 6:
            for parameter in mine.parameters():
                parameter.data = parameter.data.clone()

    steps = engine(mine, moves)
    train(steps, batches(14), between=shift)
    train(plain(theirs, others), batches(14))
    agree(mine, theirs)
    assert steps.recorded == 2


# -- what cannot be recorded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorder", [Again(hears="loss.py:3 makes the host wait"), Again(fails="not permitted")])
def test_what_cannot_be_recorded_is_made_as_ever_and_said(recorder: Again) -> None:
    (mine, moves), (theirs, others) = pair(sgd)
    steps = engine(mine, moves, recorder)
    assert train(steps, batches(10)) == train(plain(theirs, others), batches(10))
    assert steps.account() == {"recorded": 0, "replayed": 0, "obstacle": recorder.hears or recorder.fails}


def test_a_batch_that_differs_in_more_than_tensors_is_never_taken_for_another() -> None:
    model = small_net()
    steps = engine(model, sgd(model), inputs=lambda batch: (*batch, batch[1].tolist()))
    train(steps, batches(8))  # labels as numbers: hardly two batches are alike
    assert steps.replayed == 0


def test_batches_hardly_two_of_which_are_alike_are_given_up() -> None:
    model = small_net()
    steps = engine(model, sgd(model), inputs=lambda batch: (*batch, object()))
    train(steps, batches(MANY + 2))
    assert "alike" in str(steps.obstacle)


def test_who_asked_is_told_once() -> None:
    told: list[str] = []
    model = small_net()
    train(engine(model, sgd(model), Again(fails="not permitted"), gives_up=told.append), batches(10))
    assert told == ["not permitted"]


# -- through the loop --------------------------------------------------------------------------------------------------


def captured(profile: Profile) -> Profile:
    return replace(profile, lanes=tuple(replace(lane, name="replay") for lane in profile.lanes))


def fit(model: nn.Module, **options: Any) -> Any:
    options.setdefault("profile", captured(chain_profile(model)))
    options.setdefault("graphs", True)
    options.setdefault("policy", "elastic")
    return et.fit(
        model, sgd(model), cross_entropy, batches(9), epochs=4, budget="0.7x", interval=1, feedback=False,
        progress=False, val_loader=batches(2, seed=7), **options,
    )  # fmt: skip


def test_runs_agree_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = small_net(dropout=0.2), small_net(dropout=0.2)
    plain = fit(theirs, graphs=False, profile=chain_profile(theirs))
    recorder = Again()
    monkeypatch.setattr(assembly, "find_recorder", lambda device: recorder)
    result = fit(mine)
    assert result.loss["per_epoch"] == pytest.approx(plain.loss["per_epoch"], rel=1e-4)
    agree(mine, theirs)
    assert len(result.plans) == len(plain.plans) == 4
    assert result.graphs == {"recorded": 4, "replayed": 4 * (9 - WARM), "obstacle": None}
    assert plain.graphs is None


@pytest.mark.parametrize(
    "options",
    [{"deterministic": True}, {"accumulate": 3}, {"graphs": False}],
    ids=["deterministic", "accumulate", "off"],
)
def test_where_it_would_be_wrong_it_is_not_done(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "find_recorder", lambda device: Again())
    model = small_net()
    assert fit(model, **options, profile=chain_profile(model)).graphs is None
    with pytest.raises(et.ProfileError, match="--no-graphs"):
        fit(small_net(), **options)


def test_a_network_that_shrinks_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_pruning")
    import adaptive_support as images

    monkeypatch.setattr(assembly, "find_recorder", lambda device: Again())
    model = images.network()
    result = et.fit(
        model, sgd(model), images.loss_fn, images.loader(16), epochs=1, policy="prunetrain",
        profile=images.profile(), progress=False,
    )  # fmt: skip
    assert result.graphs is None


def test_prices_of_other_steps_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile from elsewhere is of steps as ever: then they are made so."""
    monkeypatch.setattr(assembly, "find_recorder", lambda device: Again())
    model = small_net()
    graphs = fit(model, profile=chain_profile(model)).graphs
    assert graphs["recorded"] == graphs["replayed"] == 0
    assert "profile" in graphs["obstacle"]


def test_kept_features_go_into_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    import adaptive_support as images

    class Ticking:
        now = 0.0

        def __call__(self) -> float:
            self.now += 1e-3
            return self.now

    def adapt(model: nn.Module, price: Profile) -> Any:
        return images.fit(model=model, budget="0.5x", deterministic=False, clock=Ticking(), profile=price)

    monkeypatch.setattr(Keeper, "read_s", lambda self, epoch: 0.0)  # it looks at a real clock
    mine, theirs = images.network(), images.network()
    plain = adapt(theirs, images.profile())
    recorder = Again()
    monkeypatch.setattr(assembly, "find_recorder", lambda device: recorder)
    result = adapt(mine, captured(images.profile()))
    assert result.features["hits"] > 0
    assert result.graphs["replayed"] > result.steps / 2
    assert result.overhead_s["record"] > 0  # on this clock every look takes time, so the two runs part ways there
    assert result.plans[0]["id"] == plain.plans[0]["id"]
    assert result.loss["per_epoch"][0] == pytest.approx(plain.loss["per_epoch"][0], rel=1e-3)


@pytest.mark.parametrize("policy", ["full", "elastic"])
def test_a_run_that_cannot_be_recorded_is_priced_anew(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "find_recorder", lambda device: Again(fails="not permitted"))
    model = small_net()
    taken: list[bool] = []

    def take(*args: Any, captured: bool = False, **options: Any) -> Profile:
        taken.append(captured)
        return chain_profile(model)

    monkeypatch.setattr("elastictrainer.runtime.pricing.take_profile", take)
    result = fit(model, policy=policy)
    assert result.graphs["obstacle"] == "not permitted"
    assert taken == [False]
    assert [plan["reason"] for plan in result.plans][:2] == ["first", "drift"]
    assert result.plans[0]["steps"] == WARM + 1


def test_prices_of_replayed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Again()
    monkeypatch.setattr(measure, "find_recorder", lambda device: recorder)
    model = small_net()
    optimizer = sgd(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    profile = et.profile(model, cross_entropy, batches(1)[0], optimizer=optimizer, effort=12, captured=True)
    assert profile.captured
    assert [lane.name for lane in profile.lanes] == ["launch", "replay"]
    assert recorder.count == 5 + 1 + 3  # a plan each, however often it is replayed; forward; the optimizer's step
    assert profile.lanes[0].overhead_s > 0
    assert 0 < profile.step_s(["11.weight"]) <= profile.full_step_s
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert Profile.from_json(profile.to_json()).captured
    recorder.fails = "no"
    assert not et.profile(model, cross_entropy, batches(1)[0], optimizer=optimizer, effort=12, captured=True).captured


def test_the_optimizers_price_is_of_steps_on_the_tensors_asked_for() -> None:
    model = small_net()
    optimizer = sgd(model)  # whose decay moves a tensor even where its gradient is zero
    parameters = list(model.parameters())
    stepper = Stepper(model, cross_entropy, batches(1)[0], optimizer, parameters)
    stepper.step()
    before = [copied.detach().clone() for _, copied in stepper.pairs]
    assert Replays(stepper, lambda plan: None, Again()).optimizer_s([1, 3]) > 0
    moved = [not torch.equal(copied, was) for (_, copied), was in zip(stepper.pairs, before)]
    assert [k for k, did in enumerate(moved) if did] == [1, 3]


def test_options_come_back_even_if_the_step_fails() -> None:
    model = small_net()
    optimizer = sgd(model)
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(RuntimeError, match="on purpose"), as_recorded(optimizer, [torch.tensor(0.1)]):
        raise RuntimeError("on purpose")
    assert [dict(group) for group in optimizer.param_groups] == before


# -- on a GPU ----------------------------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
PRESETS = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "adamw_fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
}


def on_cuda(make: Callable[[nn.Module], Any], **net: Any) -> tuple[nn.Module, Any, list[Any]]:
    model = small_net(**net).cuda()
    return model, make(model), [(x.cuda(), y.cuda()) for x, y in batches(12)]


@needs_cuda
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_on_cuda_replayed_steps_are_the_steps(preset: str, dropout: float) -> None:
    """With dropout, too: a replay draws what the step would have drawn."""
    results = []
    for recorder in (None, CudaRecorder(torch.device("cuda", 0))):
        model, optimizer, data = on_cuda(PRESETS[preset], dropout=dropout)
        torch.manual_seed(3)
        steps = plain(model, optimizer) if recorder is None else engine(model, optimizer, recorder)
        losses = train(steps, data)
        results.append((model, losses, torch.cuda.get_rng_state()))
    assert steps.account() == {"recorded": 1, "replayed": 12 - WARM, "obstacle": None}
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-4)
    for mine, theirs in zip(results[1][0].parameters(), results[0][0].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(results[0][2], results[1][2])


@needs_cuda
@pytest.mark.parametrize("preset", PRESETS)
def test_on_cuda_plans_come_and_go(preset: str) -> None:
    """Tensors wake and rest, one recorder records them all, and what it recorded before is gone by then."""
    plans = [["16.weight"], ["16.weight", "16.bias", "10.weight", "0.weight"], ["16.weight", "3.bias"]]
    results = []
    for recorder in (None, CudaRecorder(torch.device("cuda", 0))):
        model, optimizer, data = on_cuda(PRESETS[preset], dropout=0.2)
        torch.manual_seed(3)
        stood = [0]
        steps = (
            plain(model, optimizer, clip=0.5)
            if recorder is None
            else engine(model, optimizer, recorder, clip=0.5, standing=lambda stood=stood: stood[0])
        )
        for number, plan in enumerate(plans):
            with et.apply(model, plan, optimizer=optimizer):
                stood[0] = number
                train(steps, data)
        results.append(model)
    assert steps.account() == {"recorded": 3, "replayed": 3 * (12 - WARM), "obstacle": None}
    for mine, theirs in zip(results[1].parameters(), results[0].parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@needs_cuda
def test_on_cuda_under_autocast() -> None:
    def half(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return cross_entropy(model, batch)

    results = []
    for recorder in (None, CudaRecorder(torch.device("cuda", 0))):
        model, optimizer, data = on_cuda(sgd)
        steps = plain(model, optimizer) if recorder is None else engine(model, optimizer, recorder)
        steps.loss_fn = half
        results.append(train(steps, data))
    assert steps.replayed == 12 - WARM
    assert results[1] == pytest.approx(results[0], rel=2e-2)


class Asking(nn.Module):
    """Asks the device for a number at each pass, so no graph can hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * max(float(x.abs().max()), 1.0) ** 0.0)


@needs_cuda
@pytest.mark.parametrize("unheard", [False, True])
def test_on_cuda_what_asks_the_device_is_made_as_ever(unheard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heard beforehand; or, if that were to fail, after a capture that broke: random numbers go on in either case."""
    torch.manual_seed(0)
    model = nn.Sequential(Asking(), nn.Dropout(0.1)).cuda()
    optimizer = sgd(model)
    recorder = CudaRecorder(torch.device("cuda", 0))
    if unheard:
        monkeypatch.setattr(recorder, "listening", Again().listening)
    steps = engine(model, optimizer, recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = train(steps, [(x.cuda(), y.cuda()) for x, y in batches(10)])
    assert all(torch.isfinite(torch.tensor(losses)))
    assert steps.obstacle
    assert steps.replayed == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(3, device="cuda")
    other, moves, data = on_cuda(sgd)  # and the next model can be recorded all the same
    again = engine(other, moves, CudaRecorder(torch.device("cuda", 0)))
    train(again, data)
    assert again.replayed == 12 - WARM


@needs_cuda
def test_on_cuda_a_profile_of_replays() -> None:
    model, optimizer, data = on_cuda(sgd)
    profile = et.profile(model, cross_entropy, data[0], optimizer=optimizer, effort=30, captured=True)
    assert profile.captured
    plain = et.profile(model, cross_entropy, data[0], optimizer=optimizer, effort=30)
    assert profile.full_step_s < plain.full_step_s


def test_many_recordings_in_a_row_do_not_walk_what_was_there_before() -> None:
    import gc

    before = gc.get_freeze_count()
    with brief_collections():
        frozen = gc.get_freeze_count()
        assert frozen > before
        with brief_collections():  # someone else's doing is left to them
            pass
        assert gc.get_freeze_count() == frozen
    assert gc.get_freeze_count() == before
