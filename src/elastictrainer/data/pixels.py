"""Where decoded images live: in memory or a mapped file as uint8 when they fit, else decoded again for every batch."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elastictrainer.budget import format_bytes
from elastictrainer.data.decode import Conversions, Resize, decode, decode_all, worker_count
from elastictrainer.data.samples import Samples
from elastictrainer.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Decoded", "Kept", "Pixels", "decode_splits"]

# Raised whenever decoding changes what it yields, so that an old cache file is never taken for a new one.
_FORMAT = 1
Progress = Callable[[int, int], object]


class Pixels(Protocol):
    """The images of one split: uint8 batches (batch x 3 x size x size) for batches of positions, both on `device`."""

    @property
    def device(self) -> torch.device: ...
    def stream(self, batches: Iterable[Tensor]) -> Iterator[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """Decoded images in one tensor, on the CPU (memory or mapped file) or on a device. A batch costs one copy."""

    images: Tensor
    pin: bool = False

    @property
    def device(self) -> torch.device:
        return self.images.device

    def stream(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        for batch in batches:
            if self.pin:
                # From pinned memory the copy to the device runs behind the host's back; torch keeps the buffer alive.
                shape = (len(batch), *self.images.shape[1:])
                yield torch.index_select(
                    self.images, 0, batch, out=torch.empty(shape, dtype=torch.uint8, pin_memory=True)
                )
            else:
                yield self.images.index_select(0, batch)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Images decoded for each batch in threads, two batches ahead. Nothing is kept."""

    samples: Samples
    size: int
    resize: Resize
    workers: int

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def stream(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        waiting: deque[list[Future[NDArray[np.uint8]]]] = deque()
        pending = iter(batches)
        try:
            while True:
                for batch in islice(pending, 3 - len(waiting)):
                    waiting.append([pool.submit(self._one, index) for index in batch.tolist()])
                if not waiting:
                    return
                yield torch.from_numpy(np.stack([future.result() for future in waiting.popleft()]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, index: int) -> NDArray[np.uint8]:
        try:
            with self.samples.open(index) as image:
                return decode(image, size=self.size, resize=self.resize)[0]
        except Exception as error:
            name = self.samples.names[index]
            raise DataError(f"{name}: was readable when training began and is not any more ({error})") from error


def decode_splits(
    splits: Mapping[str, Samples],
    *,
    size: int,
    resize: Resize,
    limit_bytes: int,
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Pixels], str, str]:
    """Decode every image of every split once, and keep the pixels where there is room.

    Whatever the place, every image has been decoded in full when this returns, so none can break a running training.
    Returns the pixels by split, what had to be converted (in words) and where the pixels are (in words).

    Costs a decode of everything (one read of a file with a filled `cache_dir`) and `3 * size * size` bytes an image in
    memory, if that is at most `limit_bytes`; above it the file in `cache_dir`, mapped, else a decode per batch.
    """
    counts = {split: len(samples) for split, samples in splits.items()}
    total = sum(counts.values())
    nbytes = total * 3 * size * size
    everything = _Everything.of(splits)
    workers = workers or worker_count()

    def run(keep: Callable[[int, NDArray[np.uint8]], object]) -> Conversions:
        return decode_all(
            everything.open, everything.names, size=size, resize=resize, keep=keep, progress=progress, workers=workers
        )  # fmt: skip

    if cache_dir is not None:
        images, words = _mapped(Path(cache_dir).expanduser(), everything, size, resize, run)
        if nbytes <= limit_bytes:
            return _cut(np.array(images), counts), words, f"in memory ({format_bytes(nbytes)})"
        return _cut(images, counts), words, f"in a mapped file ({format_bytes(nbytes)})"
    if nbytes > limit_bytes:
        conversions = run(lambda index, image: None)
        lazy: dict[str, Pixels] = {s: Decoded(samples, size, resize, workers) for s, samples in splits.items()}
        where = f"decoded for each batch ({format_bytes(nbytes)} would pass the limit of {format_bytes(limit_bytes)})"
        return lazy, str(conversions), where
    images = np.empty((total, 3, size, size), dtype=np.uint8)
    conversions = run(images.__setitem__)
    return _cut(images, counts), str(conversions), f"in memory ({format_bytes(nbytes)})"


@dataclass(frozen=True, slots=True)
class _Everything:
    """All splits in one row."""

    names: list[str]
    stamps: list[str]
    places: list[tuple[Samples, int]]

    @classmethod
    def of(cls, splits: Mapping[str, Samples]) -> _Everything:
        rows = [(samples, index) for samples in splits.values() for index in range(len(samples))]
        names = [name for samples in splits.values() for name in samples.names]
        return cls(names, [stamp for samples in splits.values() for stamp in samples.stamps], rows)

    def open(self, index: int) -> Image:
        samples, position = self.places[index]
        return samples.open(position)


def _cut(images: NDArray[np.uint8], counts: Mapping[str, int]) -> dict[str, Pixels]:
    ends = np.cumsum(list(counts.values())).tolist()
    whole = torch.from_numpy(images)
    return {split: Kept(whole[end - count : end]) for (split, count), end in zip(counts.items(), ends)}


def _mapped(
    folder: Path,
    everything: _Everything,
    size: int,
    resize: Resize,
    run: Callable[[Callable[[int, NDArray[np.uint8]], object]], Conversions],
) -> tuple[NDArray[np.uint8], str]:
    """The cache file for exactly these images at this size, made if it is not there; complete or absent, never half."""
    digest = hashlib.sha256(f"{_FORMAT} {size} {resize}".encode())
    for name, stamp in zip(everything.names, everything.stamps):
        digest.update(f"\0{name}\0{stamp}".encode(errors="surrogateescape"))
    file = folder / f"images-{digest.hexdigest()[:24]}.npy"
    words = file.with_suffix(".json")
    shape = (len(everything.names), 3, size, size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            partial = file.with_name(f"{file.stem}.{os.getpid()}.partial")
            try:
                images = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
                with open(partial, "r+b") as opened:
                    # A file with holes ends the process by a signal when the disk fills; reserved, it is an error now.
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(opened.fileno(), 0, partial.stat().st_size)
                words.write_text(json.dumps(str(run(images.__setitem__))), encoding="utf-8")
                images.flush()
                os.replace(partial, file)
            finally:
                partial.unlink(missing_ok=True)
        kept = np.load(file, mmap_mode="c")
        said = json.loads(words.read_text(encoding="utf-8")) if words.exists() else ""
    except (OSError, ValueError) as error:
        raise DataError(
            f"cache {str(file)!r} cannot be used: {error}; free space, or choose another cache_dir"
        ) from error
    if kept.shape != shape or kept.dtype != np.uint8:
        raise DataError(f"cache {str(file)!r} does not hold what its name says; delete it")
    return kept, said
