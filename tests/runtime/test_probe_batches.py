"""Where importance takes its gradient from: the batches of the update, other ones, or held-out ones, drawn fairly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adaptive_support import loader as images
from loop_support import batches, chain_profile, cross_entropy, small_net
from resume_worker import train
from test_resume import Killed, kill_after, same
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import elastictrainer as et
from elastictrainer.errors import ConfigError, DataError
from elastictrainer.importance import find_importance
from elastictrainer.runtime.optimizers import make_optimizer
from elastictrainer.runtime.probe_batches import ProbeBatches
from elastictrainer.runtime.streams import read_streams

HERE = torch.device("cpu")


def drawn(loader: Any, *, count: int = 3, seed: int = 0, step: int = 0) -> list[Any]:
    update, gradient = ProbeBatches(loader, count=count, seed=seed, device=HERE).divided([None] * count, step=step)
    assert update == [None] * count
    assert gradient is not None
    return gradient


class Numbers(Dataset[Tensor]):
    """Sample i is the number i, plus what a random transform might add."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index) + torch.rand(())


class Counted:
    """A loader that can only be gone through."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_held_out_samples_come_from_all_of_the_data_and_others_every_time() -> None:
    """A validation loader has its classes one after the other: its first batches would tell of one class alone."""
    loader = DataLoader(Numbers(), batch_size=4)
    seen = [torch.cat(drawn(loader, step=step)).int().tolist() for step in range(20)]
    assert all(len(set(some)) == 12 for some in seen)
    assert len({tuple(some) for some in seen}) == 20
    assert set().union(*seen) == set(range(40))
    assert np.mean(seen) == pytest.approx(19.5, abs=2.5)
    assert seen[3] != torch.cat(drawn(loader, step=3, seed=1)).int().tolist()


@pytest.mark.parametrize("shuffled", [False, True])
def test_what_is_drawn_hangs_on_seed_and_step_alone_and_leaves_no_trace(shuffled: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=shuffled, generator=generator)
    first = drawn(loader, step=7)
    list(loader), torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    state, streams = generator.get_state(), read_streams()
    again = drawn(loader, step=7)
    assert all(torch.equal(a, b) for a, b in zip(first, again))  # the random transforms, too
    assert torch.equal(generator.get_state(), state)
    after = read_streams()
    assert torch.equal(after["torch"], streams["torch"])
    assert after["python"] == streams["python"]
    assert np.array_equal(after["numpy"]["state"]["key"], streams["numpy"]["state"]["key"])


def test_a_sampler_that_divides_one_data_set_is_respected() -> None:
    loader = DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(30, 40)))
    assert {int(x) for step in range(9) for some in drawn(loader, step=step) for x in some} == set(range(30, 40))


def test_our_own_loader_is_drawn_from_by_sample() -> None:
    loader = images(24, training=False)
    some = [drawn(loader, step=step) for step in range(8)]
    assert [len(batch.labels) for batch in some[0]] == [4, 4, 4]
    assert len({tuple(batch.indices.tolist()) for batch in some[0]}) == 3
    assert set(torch.cat([batch.indices for of in some for batch in of]).tolist()) == set(range(24))


@pytest.mark.parametrize("loader", [list(range(10)), Counted()])
def test_of_any_other_loader_batches_are_drawn(loader: Any) -> None:
    seen = [drawn(loader, step=step) for step in range(12)]
    assert all(len(set(some)) == 3 for some in seen)
    assert set().union(*seen) == set(range(10))
    assert sorted(drawn(loader, count=12)) == list(range(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("others", "neither 'same', 'other' nor a loader"),
        ("held_out", "pass the loader of what is held out"),
        ([], "holds no batch"),
        (iter([1]), "without a length"),
        (DataLoader(Stream()), "without a length"),
    ],
)
def test_what_nothing_can_be_drawn_from_is_refused_in_a_line(source: Any, word: str) -> None:
    model = small_net()
    with pytest.raises(ConfigError, match=word) as caught:
        et.Elastic(model, make_optimizer("sgd", model.parameters(), lr=0.1), cross_entropy, gradient_from=source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("policy", "importance"), [("elastic", "magnitude"), ("random", "elastic"), ("full", None)])
def test_where_it_would_change_nothing_it_is_refused(policy: str, importance: str | None) -> None:
    model = small_net()
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"gradient_from is 'other', and .*; leave it out"):
        et.Elastic(
            model, optimizer, cross_entropy, policy=policy, importance=importance, gradient_from="other"
        )  # fmt: skip


# -- in the controller -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["same", "other", "held_out"])
@pytest.mark.parametrize("importance", ["elastic", "fisher"])
def test_scores_are_of_the_batches_asked_for(source: str, importance: str) -> None:
    model, data, apart = small_net(), batches(8), batches(5, seed=3)
    optimizer = make_optimizer("sgd", model.parameters(), lr=0.1)
    elastic = et.Elastic(
        model, optimizer, cross_entropy, profile=chain_profile(model), importance=importance, probe_batches=3, seed=2,
        gradient_from=apart if source == "held_out" else source,  # type: ignore[arg-type]
    )  # fmt: skip
    gradient = {"same": None, "other": data[3:6], "held_out": drawn(apart, seed=2)}[source]
    expected = find_importance(importance).fn(model, optimizer, cross_entropy, data[:3], gradient_batches=gradient)
    next(elastic.epoch(data))
    assert elastic.scores == expected


def test_batches_that_only_give_the_gradient_are_trained_on_too_and_each_once() -> None:
    model, data = small_net(), batches(10)
    elastic = et.Elastic(
        model, make_optimizer("sgd", model.parameters(), lr=0.1), cross_entropy, profile=chain_profile(model),
        interval="9steps", probe_batches=3, gradient_from="other", deterministic=True,
    )  # fmt: skip
    seen = [next(i for i, b in enumerate(data) if b is batch) for _ in range(3) for batch in elastic.epoch(data)]
    assert seen == 3 * list(range(10))
    # At step 9 one batch is left in the epoch, and a probe needs two: it comes with the next epoch.
    assert [event["step"] for event in elastic.history] == [0, 10, 20]


def test_one_batch_cannot_be_two() -> None:
    model = small_net()
    elastic = et.Elastic(
        model, make_optimizer("sgd", model.parameters(), lr=0.1), cross_entropy, profile=chain_profile(model),
        gradient_from="other",
    )  # fmt: skip
    with pytest.raises(DataError, match="needs two batches ahead"):
        next(elastic.epoch(batches(1)))


# -- in the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"gradient_from": "held_out", "val_loader": None}, "there is none; pass one"),
        ({"gradient_from": "else"}, "neither 'same'"),
        ({"gradient_from": "other", "importance": "uniform"}, "takes no gradient"),
        ({"gradient_from": "other", "data": batches(1)}, "needs two batches"),
    ],
)
@pytest.mark.parametrize("policy", ["adaptive", "elastic"])
def test_what_is_wrong_is_said_before_there_is_a_folder(
    tmp_path: Path, options: dict[str, Any], word: str, policy: str
) -> None:
    model = small_net()
    options = {"val_loader": batches(2, seed=1), "data": batches(4), **options}
    with pytest.raises((ConfigError, DataError), match=word):
        et.fit(
            model, make_optimizer("sgd", model.parameters(), lr=0.1), cross_entropy, options.pop("data"), epochs=1,
            policy=policy, out=tmp_path / "run", progress=False, **options,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def validation(source: str) -> dict[str, Any]:
    if source == "other":
        return {"gradient_from": source}
    inputs, labels = zip(*batches(4, seed=9))
    data = TensorDataset(torch.cat(inputs), torch.cat(labels))
    return {"gradient_from": source, "val_loader": DataLoader(data, batch_size=6, shuffle=True)}


@pytest.mark.parametrize("source", ["other", "held_out"])
def test_killed_any_number_of_times_it_ends_bit_equal(tmp_path: Path, source: str) -> None:
    whole = train(None, "adamw", **validation(source))
    plain = train(None, "adamw", **{**validation(source), "gradient_from": "same"})
    assert not same(whole, plain)  # it does make a difference
    sessions = 0
    while not (tmp_path / "run" / "result.json").exists():
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, 2 + sessions % 4)
            try:
                model = train(str(tmp_path / "run"), "adamw", **validation(source))
            except Killed:
                sessions += 1
    assert sessions > 5
    assert same(whole, model)


def test_a_resumed_run_must_take_it_from_the_same_place(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 6)
        with pytest.raises(Killed):
            train(str(tmp_path / "run"), "sgd", **validation("other"))
    with pytest.raises(et.CheckpointError, match="gradient_from"):
        train(str(tmp_path / "run"), "sgd")
