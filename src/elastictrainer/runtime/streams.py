"""Random streams: of the whole process, to be kept in a checkpoint; and one of its own for the data of each epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["Stream", "read_streams", "seed_streams", "write_streams"]


def seed_streams(seed: int) -> None:
    """Start the generators of python, numpy and torch, on every device, from one seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global stream is what foreign transforms draw from
    torch.manual_seed(seed)


def read_streams() -> dict[str, Any]:
    """The state of every generator of the process, as plain data and tensors."""
    state = {**_read_host()}
    if torch.cuda.is_initialized():  # asking an uninitialised device would initialise it
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def write_streams(state: dict[str, Any]) -> None:
    """The inverse of `read_streams`; streams of devices that are not here are passed over."""
    _write_host(state)
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


class Stream:
    """Host generators apart from the process's own, so that what is drawn inside depends on nothing that runs outside.

    Cost: some tens of microseconds at every entry.
    """

    def __init__(self, seed: int) -> None:
        outer = _read_host()
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        self._state = _read_host()
        _write_host(outer)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside, this stream is the process's."""
        outer = _read_host()
        _write_host(self._state)
        try:
            yield
        finally:
            self._state = _read_host()
            _write_host(outer)


def _read_host() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "torch": torch.get_rng_state(),
    }


def _write_host(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
