from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from elastictrainer.errors import DataError
from elastictrainer.runtime.feed import Feed
from elastictrainer.runtime.lookahead import Lookahead
from elastictrainer.runtime.streams import read_streams, write_streams

CPU = torch.device("cpu")


class Noisy(Dataset[torch.Tensor]):
    """Augments from every global stream, as foreign transforms do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])  # noqa: NPY002


def loaders() -> dict[str, Any]:
    data = Noisy()
    return {
        "shuffled": DataLoader(data, batch_size=3, shuffle=True),
        "own generator": DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator()),
        "own sampler": DataLoader(data, batch_size=3, sampler=RandomSampler(data, generator=torch.Generator())),
    }


@pytest.mark.parametrize("kind", loaders())
@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_an_epoch_can_be_entered_anywhere_whatever_else_draws(kind: str, start: int) -> None:
    loader = loaders()[kind]
    whole = []
    for batch in Feed(loader, epoch=2, start=0, seed=7, device=CPU):
        whole.append(batch)
        torch.rand(5)  # dropout, say
    torch.manual_seed(999)
    rest = list(Feed(loaders()[kind], epoch=2, start=start, seed=7, device=CPU))
    assert len(rest) == 4 - start
    assert all(torch.equal(a, b) for a, b in zip(whole[start:], rest))
    other = torch.cat(list(Feed(loader, epoch=3, start=0, seed=7, device=CPU)))
    assert not torch.equal(other, torch.cat(whole))


def test_feeding_draws_nothing_from_the_process_streams() -> None:
    before = read_streams()
    list(Feed(loaders()["shuffled"], epoch=0, start=0, seed=0, device=CPU))
    after = read_streams()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert (before["numpy"]["state"]["key"] == after["numpy"]["state"]["key"]).all()


def test_streams_round_trip() -> None:
    state = read_streams()
    first = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    write_streams(state)
    second = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])


class Positioned:
    """A loader of the kind that this library's own is."""

    asked: tuple[int, int] = (-1, -1)

    def iterate(self, epoch: int, *, start: int = 0) -> Iterator[int]:
        self.asked = (epoch, start)
        yield from range(start, 5)


def test_a_loader_that_can_start_anywhere_is_asked_to() -> None:
    loader = Positioned()
    assert list(Feed(loader, epoch=4, start=3, seed=0, device=CPU)) == [3, 4]  # type: ignore[arg-type]
    assert loader.asked == (4, 3)


class Vanishing(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise FileNotFoundError(2, "No such file or directory", "/data/birds/7.jpg")


def test_a_vanished_file_is_named() -> None:
    with pytest.raises(DataError, match=r"/data/birds/7\.jpg: it was there"):
        list(Feed(DataLoader(Vanishing()), epoch=0, start=0, seed=0, device=CPU))


def test_fewer_batches_than_the_run_had_seen_is_an_error() -> None:
    with pytest.raises(DataError, match="stood at batch 9"):
        list(Feed(loaders()["shuffled"], epoch=0, start=9, seed=0, device=CPU))


def test_lookahead_loses_nothing_and_keeps_order() -> None:
    ahead = Lookahead(range(7), clock=lambda: 0.0)
    seen = [next(ahead)]
    assert ahead.peek(3) == [1, 2, 3]
    seen += [next(ahead), next(ahead)]
    assert ahead.peek(9) == [3, 4, 5, 6]
    assert seen + list(ahead) == list(range(7))
