from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastictrainer.errors import CheckpointError
from elastictrainer.runtime import checkpoint
from elastictrainer.runtime.checkpoint import Checkpoints, decode, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain)
def test_plain_state_survives_json(state: Any) -> None:
    skeleton, tensors = encode(state)
    assert decode(json.loads(json.dumps(skeleton)), tensors) == state


def test_tensors_survive_with_dtype_layout_and_sharing(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    state = {
        "weight": weight,
        "tied": weight,
        "step": torch.tensor(3.0),
        "half": torch.randn(3).bfloat16(),
        "empty": torch.zeros(0),
        "view": torch.arange(10)[::2],
        "generator": torch.get_rng_state(),
        "array": np.arange(5, dtype=np.uint32),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state)
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.keys() == state.keys()
    for key in ("weight", "tied", "step", "half", "empty", "view", "generator"):
        assert torch.equal(loaded[key], state[key])
        assert loaded[key].dtype == state[key].dtype
    assert loaded["weight"].stride() == weight.stride()
    assert (loaded["array"] == state["array"]).all()
    assert loaded["array"].dtype == np.uint32
    assert len(list(tmp_path.glob("save-*"))) == 1


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_weights_can_be_read_by_whoever_may_read_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    checkpoint.save_tensors({"w": torch.ones(2)}, tmp_path / "weights")
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_only_pickle_could_hold_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"schedule\.lambda is a function"):
        encode({"schedule": {"lambda": lambda x: x}})


def test_two_generations_are_kept_and_files_they_refer_to(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for epoch in range(5):
        checkpoint.save_tensors({"w": torch.ones(1)}, tmp_path / f"best-{epoch}.safetensors")
        checkpoints.save({"epoch": epoch}, refers_to=[f"best-{epoch}.safetensors"])
    assert len(checkpoints.generations()) == 2
    assert {p.name for p in tmp_path.glob("best-*")} == {"best-3.safetensors", "best-4.safetensors"}


def test_a_damaged_older_generation_is_no_obstacle_and_what_it_may_need_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for epoch in range(2):
        checkpoint.save_tensors({"w": torch.ones(1)}, tmp_path / f"best-{epoch}.safetensors")
        newest = checkpoints.save({"epoch": epoch}, refers_to=[f"best-{epoch}.safetensors"])
    (newest / "manifest.json").write_text("{")
    checkpoints.save({"epoch": 2}, refers_to=["best-1.safetensors"])
    assert (tmp_path / "best-0.safetensors").exists()  # nobody knows whether the damaged one needs it
    checkpoints.save({"epoch": 3}, refers_to=["best-1.safetensors"])
    assert [path.name for path in tmp_path.glob("best-*")] == ["best-1.safetensors"]
    assert (checkpoints.load() or {})["epoch"] == 3


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it, and nothing is cleaned up."""


@pytest.fixture
def no_cleaning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()


def calls(monkeypatch: pytest.MonkeyPatch, die_at: int | None) -> list[str]:
    """Count the calls that change the disk, and be killed before the one of that number."""
    seen: list[str] = []

    def guard(module: Any, name: str) -> None:
        real = getattr(module, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            if die_at is not None and len(seen) == die_at:
                raise Killed
            seen.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, guarded)

    for module, name in (
        (checkpoint, "save_file"),
        (checkpoint, "_write"),
        (checkpoint, "_sync"),
        (os, "rename"),
        (checkpoint.shutil, "rmtree"),
    ):
        guard(module, name)
    return seen


def test_killed_at_any_moment_of_writing_one_good_state_is_left(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        total_folder = Checkpoints(tmp_path / "count")
        for n in (1, 2, 3):
            total_folder.save({"n": n, "w": torch.full((4,), float(n))})
        seen = calls(patch, None)
        total_folder.save({"n": 4, "w": torch.full((4,), 4.0)})
    assert len(seen) >= 8
    for moment in range(len(seen)):
        checkpoints = Checkpoints(tmp_path / f"kill-{moment}")
        for n in (1, 2, 3):
            checkpoints.save({"n": n, "w": torch.full((4,), float(n))})
        with pytest.MonkeyPatch.context() as patch:
            calls(patch, moment)
            with pytest.raises(Killed):
                checkpoints.save({"n": 4, "w": torch.full((4,), 4.0)})
        after = Checkpoints(checkpoints.folder)
        state = after.load()
        assert state is not None
        assert state["n"] in (3, 4)
        assert torch.equal(state["w"], torch.full((4,), float(state["n"])))
        after.save({"n": 5})  # and the leftovers are no obstacle
        assert (after.load() or {})["n"] == 5
        assert not list(checkpoints.folder.glob("*.tmp"))


def test_damage_is_noticed_and_the_generation_before_is_used(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"n": 1, "w": torch.ones(100)})
    newest = checkpoints.save({"n": 2, "w": torch.ones(100)})
    data = bytearray((newest / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "tensors.safetensors").write_bytes(bytes(data))
    state = checkpoints.load()
    assert state is not None
    assert state["n"] == 1
    assert "damaged" in checkpoints.notes[0]
    checkpoints.save({"n": 3})
    assert newest not in checkpoints.generations()  # else it would count as one of the two that are kept


def test_nothing_readable_is_an_error_and_nothing_written_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    path = checkpoints.save({"n": 1})
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="no checkpoint can be read"):
        checkpoints.load()


@pytest.mark.parametrize("call", ["save_file", "_write", "_sync"])
def test_full_disk_says_so_and_keeps_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"n": 1})

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, call, full)
        with pytest.raises(CheckpointError, match=r"No space left on device; the one before .* is kept") as caught:
            checkpoints.save({"n": 2})
    assert "\n" not in str(caught.value)
    assert (checkpoints.load() or {})["n"] == 1
    assert not list(tmp_path.glob("*.tmp"))
