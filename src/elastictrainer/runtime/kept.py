"""Kept: rows of features by sample and view, in memory or in a mapped file, in half the bytes or a quarter of them.

A sample has as many slots as views are kept of it. What a slot holds is named by the view's code (equal codes mean
equal pixels), so nothing depends on when a view comes by. When all its slots are taken, further views are not kept.

A file lies in the run folder and is mapped: the operating system keeps in memory what fits and writes the rest to disk,
and a killed run finds it again, since the list of rows that are there is written only after the rows themselves have
reached the disk. The name of the file is a hash of everything that made the features; another prefix is another file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastictrainer.budget import format_bytes
from elastictrainer.errors import ConfigError

__all__ = ["Kept", "KeptType", "Rows"]

KeptType = Literal["float32", "float16", "bfloat16", "int8"]
_EMPTY = -1  # codes are never negative


@dataclass(frozen=True, slots=True)
class Rows:
    """What one sample has of one crossing tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return torch.Size(self.shape).numel()


class Kept:
    """Room for `samples * views` rows of each crossing.

        kept = Kept([Rows((512, 7, 7), torch.float32)], samples=5394, views=2, dtype="float16")
        missing = kept.missing(indices, codes)
        kept.put(indices[missing], codes[missing], features)
        features = kept.get(indices, codes)

    `"int8"` has one scale a row. Costs of `get`: one gather and one conversion a crossing.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        *,
        samples: int,
        views: int,
        dtype: KeptType = "float16",
        device: torch.device | str = "cpu",
        file: Path | None = None,
    ) -> None:
        self.rows, self.samples, self.views, self.dtype = tuple(rows), samples, views, dtype
        self.device = torch.device(device)
        self.file = file
        self.codes: NDArray[np.int64] = np.full((samples, views), _EMPTY, dtype=np.int64)
        self.hits = self.misses = 0
        self.key = ""
        slots = samples * views
        self._values: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._block: Tensor | None = None
        if file is None:
            self._block = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        else:
            self._block = _mapped(file, self.nbytes)
            self._recall()
        start = 0
        for row in self.rows:
            width = row.count * self.itemsize
            values = self._block[start : start + slots * width].view(getattr(torch, dtype)).view(slots, row.count)
            start += slots * width
            self._values.append(values)
            if dtype == "int8":
                self._scales.append(self._block[start : start + 4 * slots].view(torch.float32))
                start += 4 * slots

    @classmethod
    def bytes_for(cls, rows: Sequence[Rows], *, samples: int, views: int, dtype: KeptType) -> int:
        """What so many rows take."""
        item: int = getattr(torch, dtype).itemsize
        scale = 4 if dtype == "int8" else 0
        # rounded up to 16 a row, so that every part begins where its type may
        return sum(samples * views * (row.count * item + scale) for row in rows) + 16 * len(rows)

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        return self.bytes_for(self.rows, samples=self.samples, views=self.views, dtype=self.dtype)

    @property
    def filled(self) -> float:
        """The share of all slots that hold something."""
        return float((self.codes != _EMPTY).mean())

    def __str__(self) -> str:
        asked = self.hits + self.misses
        rate = f", {self.hits / asked:.1%} of {asked} asked for were there" if asked else ""
        place = "in memory" if self.file is None else f"in {self.file}"
        return f"{format_bytes(self.nbytes)} {place} ({self.dtype}), {self.filled:.1%} filled{rate}"

    # -- rows ----------------------------------------------------------------------------------------------------------

    def slots(self, samples: NDArray[np.int64], codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each is, or -1."""
        table = self.codes[samples]
        here = table == codes[:, None]
        return np.where(here.any(axis=1), samples * self.views + here.argmax(axis=1), -1)

    def missing(self, samples: NDArray[np.int64], codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self.slots(samples, codes) < 0

    def room(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which samples have a slot left."""
        return np.asarray((self.codes[samples] == _EMPTY).any(axis=1))

    def put(self, samples: NDArray[np.int64], codes: NDArray[np.int64], crossing: Sequence[Tensor]) -> None:
        """Keep rows of samples that have room; the others are passed over. No sample twice in one call."""
        fits = np.flatnonzero(self.room(samples) & self.missing(samples, codes))
        if not len(fits):
            return
        taking = samples[fits]
        free = (self.codes[taking] == _EMPTY).argmax(axis=1)
        at = torch.from_numpy(taking * self.views + free).to(self.device)
        chosen = torch.from_numpy(fits)
        for n, value in enumerate(crossing):
            rows = value.detach().reshape(len(samples), -1)[chosen.to(value.device)].to(self.device)
            if self.dtype == "int8":
                rows = rows.float()
                scale = rows.abs().amax(dim=1).clamp_(min=1e-30) / 127
                self._scales[n][at] = scale
                rows = (rows / scale[:, None]).round_()
            elif self.dtype == "float16":
                rows = rows.clamp(-65504, 65504)
            self._values[n][at] = rows.to(self._values[n].dtype)
        self.codes[taking, free] = codes[fits]

    def get(self, samples: NDArray[np.int64], codes: NDArray[np.int64]) -> list[Tensor]:
        """The rows of samples that are all there, as they crossed."""
        return self.rows_at(self.places(samples, codes))

    def places(self, samples: NDArray[np.int64], codes: NDArray[np.int64]) -> Tensor:
        """Where the rows of samples are that are all there; on the device, which need not be waited for again."""
        found = self.slots(samples, codes)
        assert (found >= 0).all(), "asked for a row that was never kept"
        return torch.from_numpy(found).to(self.device)

    def rows_at(self, at: Tensor) -> list[Tensor]:
        """The rows at these places, as they crossed."""
        self.hits += len(at)
        out = []
        for n, row in enumerate(self.rows):
            values = self._values[n].index_select(0, at).to(row.dtype)
            if self.dtype == "int8":
                values *= self._scales[n].index_select(0, at)[:, None]
            lead, rest = (row.shape[0], row.shape[1:])
            out.append(values.view(len(at) * lead, *rest))
        return out

    # -- across restarts -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make what is kept so far last, if it is in a file."""
        if self.file is None or self._block is None:
            return
        with open(self.file, "r+b") as opened:
            os.fsync(opened.fileno())  # a shared mapping's pages are the file's own
        partial = self._list.with_suffix(".partial")
        with open(partial, "wb") as opened:
            np.save(opened, self.codes)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, self._list)

    def forget(self) -> None:
        """Give the room back."""
        self._values, self._scales, self._block = [], [], None
        if self.file is not None:
            self._list.unlink(missing_ok=True)
            self.file.unlink(missing_ok=True)

    @property
    def _list(self) -> Path:
        assert self.file is not None
        return self.file.with_suffix(".codes.npy")

    def _recall(self) -> None:
        try:
            codes = np.load(self._list)
        except (OSError, ValueError):
            return
        if codes.shape == self.codes.shape and codes.dtype == self.codes.dtype:
            self.codes = codes


def _mapped(file: Path, nbytes: int) -> Tensor:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a+b") as opened:
            if opened.seek(0, os.SEEK_END) != nbytes:
                opened.truncate(0)
                if hasattr(os, "posix_fallocate"):
                    # A file with holes ends the process by a signal when the disk fills; reserved, it is an error now.
                    os.posix_fallocate(opened.fileno(), 0, nbytes)
                else:
                    opened.truncate(nbytes)
                file.with_suffix(".codes.npy").unlink(missing_ok=True)
        return torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"cannot keep {format_bytes(nbytes)} of features in {str(file)!r}: {error}; free space, or lower keep_bytes"
        ) from error


def rows_of(crossings: Sequence[Any], *, batch_size: int) -> list[Rows]:
    """The rows that one sample has of each crossing seen with `batch_size` samples."""
    return [Rows((c.shape[0] // batch_size, *c.shape[1:]), c.dtype) for c in crossings]
