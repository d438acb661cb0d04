"""Episodes: what is learnt from is never asked about, and a number names a task on every machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from elastictrainer.data.episodes import Bank, Episode, Episodes, all_classes
from elastictrainer.data.normalisation import Normalisation
from elastictrainer.errors import ConfigError, DataError

LABELS = np.repeat(np.arange(12), np.arange(3, 15))  # 3 to 14 images a class


def check(episode: Episode) -> None:
    assert not set(episode.support.tolist()) & set(episode.query.tolist())
    assert len(set(episode.support.tolist())) == len(episode.support)
    assert len(set(episode.query.tolist())) == len(episode.query)
    for positions, numbers in (
        (episode.support, episode.support_labels),
        (episode.query, episode.query_labels),
    ):
        assert (LABELS[positions] == episode.classes[numbers]).all()
        assert set(numbers.tolist()) == set(range(episode.ways))


@settings(deadline=None)
@given(ways=st.integers(2, 6), shots=st.integers(1, 6), seed=st.integers(0, 99), index=st.integers(0, 10**6))
def test_fixed_episodes_have_the_ways_and_shots_asked_for(ways: int, shots: int, seed: int, index: int) -> None:
    episode = Episodes(LABELS, ways=ways, shots=shots, queries=4, seed=seed).episode(index)
    check(episode)
    assert episode.ways == ways
    assert np.bincount(episode.support_labels).tolist() == [shots] * ways
    counts = np.bincount(episode.query_labels)
    assert counts.min() == counts.max() <= 4


@settings(deadline=None)
@given(seed=st.integers(0, 99), index=st.integers(0, 10**6))
def test_varied_episodes_vary_within_meta_datasets_bounds(seed: int, index: int) -> None:
    episode = Episodes(LABELS, ways=None, shots=None, seed=seed).episode(index)
    check(episode)
    assert 5 <= episode.ways <= 12
    assert len(episode.support) <= 500
    queries = np.bincount(episode.query_labels)
    smallest = np.bincount(LABELS)[episode.classes].min()
    assert queries.min() == queries.max() == min(10, smallest // 2)


def test_varied_episodes_differ_in_ways_and_shots() -> None:
    episodes = [Episodes(LABELS, ways=None, shots=None).episode(i) for i in range(40)]
    assert {e.ways for e in episodes} == set(range(5, 13))
    assert any(len(set(np.bincount(e.support_labels).tolist())) > 1 for e in episodes)


def test_the_same_number_is_the_same_task() -> None:
    draw = Episodes(LABELS, ways=3, shots=2, seed=1)
    assert (draw.episode(7).support == Episodes(LABELS, ways=3, shots=2, seed=1).episode(7).support).all()
    assert any(draw.episode(7).classes.tolist() != draw.episode(i).classes.tolist() for i in range(7))


def test_impossible_episodes_are_refused() -> None:
    for arguments in ({"ways": 5, "shots": None}, {"ways": 1}, {"shots": 0}, {"queries": 0}):
        with pytest.raises(ConfigError):
            Episodes(LABELS, **arguments)
    with pytest.raises(DataError, match="at least 14 images a class, and 1 classes have"):
        Episodes(LABELS, ways=5, shots=13)
    with pytest.raises(DataError, match="and 0 classes"):
        Episodes(LABELS, ways=5, shots=50)


def test_one_task_of_all_classes() -> None:
    names = [f"class{i}" for i in range(12)]
    task = all_classes(LABELS, names, shots=5, seed=0)
    check(task)
    assert len(task.support) + len(task.query) == len(LABELS)
    assert np.bincount(task.support_labels).tolist() == [2, 3, 4, *[5] * 9]  # one is always kept for judging
    with pytest.raises(DataError, match="class 'b' has 1 image"):
        all_classes(np.asarray([0, 0, 1]), ["a", "b"], shots=1, seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, colour in enumerate(("red", "green", "blue")):
        (tmp_path / colour).mkdir()
        for k in range(4):
            shade = [40 * (k + 1) if i == number else 0 for i in range(3)]
            pixels = np.zeros((12, 12, 3), dtype=np.uint8)
            pixels[: 6 + k] = shade
            Image.fromarray(pixels).save(tmp_path / colour / f"{k}.png")
    return tmp_path


def test_a_bank_gives_images_and_views_by_position(folder: Path) -> None:
    bank = Bank(str(folder), image_size=12, normalisation=Normalisation.parse("none"))
    assert bank.classes == ("blue", "green", "red")
    some = np.asarray([0, 5])
    plain = bank.images(some)
    assert plain.shape == (2, 3, 12, 12)
    assert plain[0, 2].max() == pytest.approx(40 / 255)
    views = [bank.views(some, turn) for turn in (0, 0, 1)]
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    assert torch.equal(bank.views(some[1:], 0)[0], views[0][1])  # a view is its image's, whatever the batch
    with pytest.raises(DataError, match="no split 'val'"):
        Bank(str(folder), image_size=12, normalisation=Normalisation.parse("none"), split="val")
