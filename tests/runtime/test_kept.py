"""Rows that are kept are the rows that come back; in a file, across restarts; never a stale one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer.errors import ConfigError
from elastictrainer.runtime.kept import Kept, Rows

ROWS = [Rows((1, 3, 2), torch.float32), Rows((2, 5), torch.float32)]


def crossing(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 3, 2, generator=generator), torch.randn(count * 2, 5, generator=generator)]


@pytest.mark.parametrize(("dtype", "off"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 1e-2)])
def test_what_comes_back_is_what_was_kept(dtype: str, off: float) -> None:
    kept = Kept(ROWS, samples=9, views=2, dtype=dtype)  # type: ignore[arg-type]
    samples, codes = np.array([7, 0, 3]), np.array([11, 12, 13])
    kept.put(samples, codes, crossing(3))
    order = np.array([2, 0, 1])
    for got, there, lead in zip(kept.get(samples[order], codes[order]), crossing(3), (1, 2)):
        expected = there.view(3, lead, -1)[order].reshape(got.shape)
        assert got.dtype == torch.float32
        assert torch.allclose(got, expected, rtol=off, atol=off * float(there.abs().max()))
    assert kept.filled == pytest.approx(3 / 18)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=40), st.integers(1, 3))
def test_a_slot_holds_the_view_that_it_names(asked: list[tuple[int, int]], views: int) -> None:
    """Oracle: a dictionary. The first `views` views of a sample are kept, later ones are passed over."""
    kept = Kept([Rows((1, 1), torch.float32)], samples=6, views=views, dtype="float32")
    known: dict[tuple[int, int], float] = {}
    for number, (sample, code) in enumerate(asked):
        kept.put(np.array([sample]), np.array([code]), [torch.tensor([[float(number)]])])
        if (sample, code) not in known and sum(s == sample for s, _ in known) < views:
            known[sample, code] = float(number)
    for sample in range(6):
        for code in range(4):
            there = not kept.missing(np.array([sample]), np.array([code]))[0]
            assert there == ((sample, code) in known)
            if there:
                assert kept.get(np.array([sample]), np.array([code]))[0].item() == known[sample, code]


def test_a_file_survives_as_far_as_it_was_flushed(tmp_path: Path) -> None:
    file = tmp_path / "features.bin"
    kept = Kept(ROWS, samples=4, views=1, file=file)
    kept.put(np.array([1, 2]), np.array([5, 6]), crossing(2))
    kept.flush()
    kept.put(np.array([3]), np.array([7]), crossing(1, seed=1))  # never flushed: may not have reached the disk
    again = Kept(ROWS, samples=4, views=1, file=file)
    assert again.missing(np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7])).tolist() == [True, False, False, True]
    assert torch.equal(again.get(np.array([2]), np.array([6]))[0], kept.get(np.array([2]), np.array([6]))[0])
    assert file.stat().st_size == kept.nbytes
    again.forget()
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_size_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "features.bin"
    first = Kept(ROWS, samples=4, views=1, file=file)
    first.put(np.array([1]), np.array([5]), crossing(1))
    first.flush()
    assert Kept(ROWS, samples=5, views=1, file=file).filled == 0


def test_no_room_on_the_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"cannot keep .* No space left on device"):
        Kept(ROWS, samples=4, views=1, file=tmp_path / "features.bin")
