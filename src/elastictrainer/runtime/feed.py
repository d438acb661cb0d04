"""Feed: the batches of one epoch, on the device, and the same ones when a killed run comes back to the middle of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from elastictrainer.errors import DataError
from elastictrainer.runtime.streams import Stream

__all__ = ["Feed", "to_device"]


class Feed:
    """One epoch of a loader, from batch `start` on.

    A loader that has `iterate(epoch, start=...)` is asked for exactly that. Any other is iterated from its beginning
    with host generators of its own, seeded by run and epoch, and the first `start` batches are passed over: the order
    of the data and random transforms are then the same ones, whatever the model has drawn meanwhile. Passing over costs
    loading them once more. Generators that the loader or its sampler were given are seeded too. Workers that persist
    between epochs keep their own streams, which nobody can wind back: leave `persistent_workers` off to resume bit by
    bit.
    """

    def __init__(self, loader: Iterable[Any], *, epoch: int, start: int, seed: int, device: torch.device) -> None:
        self.loader, self.epoch, self.start, self.device = loader, epoch, start, device
        self.seed = (seed * 1_000_003 + epoch) % 2**63

    def __len__(self) -> int:
        """Batches in the whole epoch, those passed over included."""
        return len(self.loader)  # type: ignore[arg-type]  # what has no length raises, as it should

    def __iter__(self) -> Iterator[Any]:
        iterate = getattr(self.loader, "iterate", None)
        source = iterate(self.epoch, start=self.start) if iterate is not None else self._from_plain()
        for batch in source:
            yield to_device(batch, self.device)

    def _from_plain(self) -> Iterator[Any]:
        self._seed_given_generators()
        stream = Stream(self.seed)
        with stream.current():
            batches = iter(self.loader)
        # Workers draw from generators of their own, seeded when the iterator was made: nothing to guard then.
        guarded = not (isinstance(self.loader, DataLoader) and self.loader.num_workers > 0)
        position = 0
        while True:
            try:
                if guarded:
                    with stream.current():
                        batch = next(batches)
                else:
                    batch = next(batches)
            except StopIteration:
                break
            except FileNotFoundError as error:
                raise DataError(f"{error.filename or error}: it was there when training began and is gone") from error
            position += 1
            if position > self.start:
                yield batch
        if position < self.start:
            raise DataError(
                f"the loader has {position} batches in an epoch and the run stood at batch {self.start}: other data?"
            )

    def _seed_given_generators(self) -> None:
        sampler = getattr(self.loader, "sampler", None)
        inner = getattr(getattr(self.loader, "batch_sampler", None), "sampler", None)
        for holder in (self.loader, sampler, inner):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(self.seed)
        for holder in {id(s): s for s in (sampler, inner) if hasattr(s, "set_epoch")}.values():
            holder.set_epoch(self.epoch)  # type: ignore[union-attr]


def to_device(batch: Any, device: torch.device) -> Any:
    """The tensors of a nested batch, on the device; everything else as it is.

    >>> to_device({"x": [torch.ones(1)], "id": "a"}, torch.device("cpu"))
    {'x': [tensor([1.])], 'id': 'a'}
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else _rebuilt(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(item, device) for item in batch)
    return batch


def _rebuilt(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    try:
        return type(batch)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved
